"""`batchwright` without what a service does not need: torch, and what only training and files use.

A process that has imported this forks services (`clients.start_service`).

    python -m bare_service serve WORDS...
"""

import os
import sys

sys.modules.update(dict.fromkeys(("torch", "sklearn", "matplotlib", "PIL")))
from batchwright.cli import commands  # noqa: E402
from batchwright.distributed.processes import PARENT_PID  # noqa: E402
from batchwright.service.operating import serving  # noqa: E402, F401 - once for all

if __name__ == "__main__":
    os.environ.pop(PARENT_PID, None)  # it is no worker of what has forked it
    for number, name in ((1, "stdout"), (2, "stderr")):
        # Python's own was made for a file, and this may be a pipe.
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115 - to its end
    commands.main()
