"""How far a training has come that a run folder could go on from."""

from __future__ import annotations

import json
from pathlib import Path

from batchwright.client.outbox import METRICS
from batchwright.storage.files import end_of_lines

NEWEST = Path("checkpoints", "last.pt")
_TAIL = 64 * 1024  # bytes; a line of many workers has some ten thousand


class CheckpointProgress:
    """Looks at a run folder now and then, which may not be there yet."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen: int | None = None  # when the newest checkpoint was written

    def trained(self) -> float | None:
        """Epochs in a checkpoint that is newer than the one before, in fractions too.

        `None`: there is no newer one, or the last lines do not tell. What was written after the
        checkpoint and before this look counts as well, some steps at most.
        """
        try:
            written = (self._run / NEWEST).stat().st_mtime_ns
            if written == self._seen:
                return None
            with (self._run / METRICS).open("rb") as file:
                end = end_of_lines(file)
                file.seek(max(0, end - _TAIL))
                lines = file.read(end - file.tell()).splitlines()
        except OSError:
            return None
        self._seen = written
        return next((found for line in reversed(lines) if (found := _epochs(line))), None)


def _epochs(line: bytes) -> float | None:
    """Epochs until a line of metrics.jsonl; `None` if it does not say."""
    try:
        values = json.loads(line)
        if values["kind"] == "epoch":
            return float(values["record"]["epoch"] + 1)
        return float(values["epoch"] + (values["step"] + 1) / values["steps"])
    except (ValueError, TypeError, LookupError, ZeroDivisionError):
        return None
