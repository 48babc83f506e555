"""``batchwright serve`` under a wall clock that somebody sets: STEP_FILE holds by how much.

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
    time.time = _stepped  # before anything takes hold of it
    from batchwright.cli.commands import main

    main()
