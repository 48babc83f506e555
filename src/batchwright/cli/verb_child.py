"""The command line in a process that ends with its parent: a run of a sweep, or of an agent.

python -m batchwright.cli.verb_child train PLAN.json --out DIR
"""

from __future__ import annotations

from batchwright.distributed.processes import VERB_PARENT, die_with_parent, end_with

if __name__ == "__main__":
    die_with_parent(VERB_PARENT)
    from batchwright.cli.commands import main

    end_with(main)
