"""One run of a sweep: the ordinary command line, in a process that ends with its sweep.

python -m batchwright.sweeping.cell train PLAN.json --out DIR
"""

from __future__ import annotations

from batchwright.processes import die_with_parent

SWEEP_PID = "BATCHWRIGHT_SWEEP"  # the sweep's process, for its cells


def _main() -> None:
    die_with_parent(SWEEP_PID)
    from batchwright.cli import main

    main()


if __name__ == "__main__":
    _main()
