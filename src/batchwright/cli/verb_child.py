"""One verb of a sweep's or an agent's: the command line, in a process that ends with its parent.

python -m batchwright.cli.verb_child train PLAN.json --out DIR
"""

from __future__ import annotations

from batchwright.distributed.processes import VERB_PARENT, die_with_parent


def _main() -> None:
    die_with_parent(VERB_PARENT)
    from batchwright.cli.commands import main

    main()


if __name__ == "__main__":
    _main()
