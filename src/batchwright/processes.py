"""What every worker process does first and last: live no longer than its parent, report its error.

Imports nothing heavy, so that the promise to die with the parent is made before torch is loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from batchwright.documents import one_line
from batchwright.errors import BatchwrightError, LostWorkerError

ERRORS_FOLDER = "BATCHWRIGHT_ERRORS"  # where a worker leaves its last error, as a JSON file
PARENT_PID = "BATCHWRIGHT_PARENT"  # the launcher's process, for its agent
AGENT_PID = "BATCHWRIGHT_AGENT"  # the agent's process, for its workers
STARTED = "BATCHWRIGHT_STARTED"  # when the launcher started, in seconds of Unix time
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def die_with_parent(variable: str) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere nothing).

    Args:
        variable: Environment variable with the parent's process number; if the parent is gone
            already, this process ends at once.
    """
    if sys.platform != "linux" or variable not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[variable]):
        os._exit(1)


def seconds_since_launch() -> float:
    """Seconds since the launcher started the processes; 0 without a launcher."""
    return max(0.0, time.time() - float(os.environ.get(STARTED, "inf")))


def worker_main(work: Callable[[], None]) -> None:
    """Run a worker's work; whatever ends it is left as one line for the launcher."""
    die_with_parent(AGENT_PID)
    try:
        work()
    except BatchwrightError as error:
        _leave(one_line(error), error.exit_code, secondary=isinstance(error, LostWorkerError))
        print(f"error: {one_line(error)}", file=sys.stderr)  # noqa: T201 - the worker's own log
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - this is the last frame: report and end
        traceback.print_exc()
        _leave(one_line(error), 1, secondary=False)
        sys.exit(1)


def _leave(message: str, exit_code: int, *, secondary: bool) -> None:
    folder = os.environ.get(ERRORS_FOLDER)
    if folder is None:
        return
    rank = int(os.environ.get("RANK", "0"))
    report = {
        "rank": rank,
        "message": message,
        "exit_code": exit_code,
        "secondary": secondary,
        "time": time.time(),
    }
    try:
        Path(folder, f"rank{rank}.json").write_text(json.dumps(report), encoding="utf-8")
    except OSError:
        print(f"cannot leave a report in {folder}", file=sys.stderr)  # noqa: T201 - as above
