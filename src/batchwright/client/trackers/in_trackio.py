"""trackio: a run in a project, in its own local store or where ``TRACKIO_SPACE_ID`` says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import inf
from threading import Lock

import trackio

from batchwright.client.trackers.following import TrackedRun

_FLUSH_SECONDS = 5.0  # at most; where a server is away, `lasts_after` says that values may be lost


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
        self._newest = getattr(self._run, "_next_step", 0) - 1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._newest:
            self._run.log(dict(values), step=step)

    @property
    def lasts_after(self) -> float:
        """Infinity while values wait for trackio's thread, or the thread writes some; then 0."""
        # The thread holds the lock while it writes what it took from the queue.
        lock = getattr(self._run, "_client_lock", None) or Lock()
        return inf if getattr(self._run, "_queued_logs", ()) or lock.locked() else 0.0

    def flush(self) -> None:
        """Wait a little for trackio's thread, which writes twice a second what was logged."""
        end = time.monotonic() + _FLUSH_SECONDS
        while self.lasts_after and time.monotonic() < end:
            time.sleep(_FLUSH_SECONDS / 500)

    def close(self, outcome: str) -> None:
        del outcome
        self._run.finish()


def open_tracker(place: str, run: TrackedRun) -> _Trackio:
    """The run in a project."""
    return _Trackio(place or "batchwright", run)
