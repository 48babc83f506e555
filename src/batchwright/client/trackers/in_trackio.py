"""trackio: a run in a project, in its own local store or where ``TRACKIO_SPACE_ID`` says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext

import trackio

from batchwright.client.trackers.following import Tracked

_FLUSH_SECONDS = 5.0  # at most; where a server is away, its own thread keeps trying


class _Trackio:
    def __init__(self, project: str, run: Tracked) -> None:
        self._run = trackio.init(
            project,
            name=f"{run.name}-{run.id[:8]}",  # it finds runs again by their names
            config=dict(run.facts),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # A process that was killed may have handed on more than its note says.
        self._had = getattr(self._run, "_next_step", 0) - 1 if run.after >= 0 else -1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._had:
            self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Wait for a thread of theirs, which writes twice a second what it has been given."""
        end = time.monotonic() + _FLUSH_SECONDS
        while getattr(self._run, "_queued_logs", ()) and time.monotonic() < end:
            time.sleep(_FLUSH_SECONDS / 500)
        with getattr(self._run, "_client_lock", nullcontext()):
            pass  # what it took from there is written, too

    def close(self, outcome: str) -> None:
        del outcome
        self._run.finish()


def open_tracker(place: str, run: Tracked) -> _Trackio:
    """The run in a project."""
    return _Trackio(place or "batchwright", run)
