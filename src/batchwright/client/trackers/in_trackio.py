"""trackio: a run in a project, in its own local store or where ``TRACKIO_SPACE_ID`` says."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from batchwright.client.trackers.following import Tracked


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
        """A thread of theirs writes what it has been given, twice a second."""

    def close(self, outcome: str) -> None:
        del outcome
        self._run.finish()


def open_tracker(place: str, run: Tracked) -> _Trackio:
    """The run in a project."""
    return _Trackio(place or "batchwright", run)
