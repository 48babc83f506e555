"""A fork server that is forked from another, and imports what that has not (`forked.imported`).

python -m forked_server LINE MODULES...
"""

from batchwright.distributed import fork_server

if __name__ == "__main__":
    fork_server._main()
