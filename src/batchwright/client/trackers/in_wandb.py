"""Weights & Biases: a run in a project, offline where ``WANDB_MODE`` says so."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from batchwright.client.trackers.following import Tracked

_EXIT_CODES = {"finished": 0, "failed": 1}
_KILLED = 255  # as their own hook says of Ctrl-C


class _WandB:
    lasts_after = 30.0
    """Their own process writes and sends some seconds later, and ends with this one."""

    def __init__(self, project: str, run: Tracked) -> None:
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
        """A late accuracy comes with the newest step: theirs never go back."""
        self._last = max(self._last, step)
        self._run.log(dict(values), step=self._last)

    def flush(self) -> None:
        """Nothing of theirs does it; see `lasts_after`."""

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES.get(outcome, _KILLED))


def open_tracker(place: str, run: Tracked) -> _WandB:
    """The run in a project."""
    return _WandB(place or "batchwright", run)
