"""trackio: a run in a project, in its own local store or where ``TRACKIO_SPACE_ID`` says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext

import trackio

from batchwright.client.trackers.following import TrackedRun

_FLUSH_SECONDS = 5.0  # at most; where a server is away, its own thread keeps trying


class _Trackio:
    def __init__(self, project: str, run: TrackedRun) -> None:
        self._run = trackio.init(
            project,
            name=f"{run.name}-{run.id[:8]}",  # trackio resumes a run by its name
            config=dict(run.facts),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # A process that was killed may have logged more than trackers.json says.
        self._newest = getattr(self._run, "_next_step", 0) - 1 if run.after >= 0 else -1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._newest:
            self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Wait for trackio's thread, which writes twice a second what was logged."""
        end = time.monotonic() + _FLUSH_SECONDS
        while getattr(self._run, "_queued_logs", ()) and time.monotonic() < end:
            time.sleep(_FLUSH_SECONDS / 500)
        with getattr(self._run, "_client_lock", nullcontext()):
            pass  # held by the thread while it writes what it took from the queue

    def close(self, outcome: str) -> None:
        del outcome
        self._run.finish()


def open_tracker(place: str, run: TrackedRun) -> _Trackio:
    """The run in a project."""
    return _Trackio(place or "batchwright", run)
