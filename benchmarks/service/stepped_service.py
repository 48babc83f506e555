"""``batchwright serve`` with a wall clock that is off by the seconds in the file STEP_FILE.

python -m benchmarks.service.stepped_service serve --port 8400
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_true, _file = time.time, Path(os.environ["STEP_FILE"])


def _stepped() -> float:
    return _true() + float(_file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    time.time = _stepped  # before any import keeps a reference to it
    from batchwright.cli.commands import main

    main()
