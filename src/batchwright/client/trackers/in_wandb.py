"""Weights & Biases: a run in a project, offline where ``WANDB_MODE`` says so."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from batchwright.client.trackers.following import TrackedRun

_EXIT_CODES = {"finished": 0, "failed": 1}
_KILLED = 255  # as wandb's own hook reports Ctrl-C


class _WandB:
    lasts_after = 30.0
    """Seconds: wandb's own process writes and sends values later, and ends with this one."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        self._last = run.after
        self._run = wandb.init(
            project=project,
            id=run.id,
            name=run.name,
            config=dict(run.facts),
            resume="allow",
            dir=str(run.folder),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values; a late accuracy gets the newest step, as wandb's steps never go back."""
        self._last = max(self._last, step)
        self._run.log(dict(values), step=self._last)

    def flush(self) -> None:
        """Do nothing: wandb cannot flush; see `lasts_after`."""

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES.get(outcome, _KILLED))


def open_tracker(place: str, run: TrackedRun) -> _WandB:
    """The run in a project."""
    return _WandB(place or "batchwright", run)
