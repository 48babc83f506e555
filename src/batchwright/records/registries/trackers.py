"""Trackers: option ``--tracker``, where a run's values are shown besides its own page."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.records.registries.registry import Registry


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker.

    Attributes:
        name: As in ``--tracker``, before any colon.
        open: Import string of a function (place, run) that returns a
            `client.trackers.following.Tracker`; ``run`` is a
            `client.trackers.following.TrackedRun`.
        package: What is imported for it.
        place: What may stand behind the colon, in words.
        folder: Whether that is a folder.
        extra: Of ours that installs the package; empty: it is installed by itself.
        single: Whether a process can feed one place of it alone.
    """

    name: str
    open: str
    package: str
    place: str
    folder: bool = False
    extra: str = ""
    single: bool = False


_HERE = "batchwright.client.trackers"

TRACKERS = Registry(
    "tracker",
    TrackerSpec(
        "tensorboard",
        f"{_HERE}.in_tensorboard:open_tracker",
        "tensorboard",
        "a folder, which gets one for each run; else `tensorboard/` in the run folder",
        folder=True,
        extra="tracking",
    ),
    TrackerSpec(
        "mlflow",
        f"{_HERE}.in_mlflow:open_tracker",
        "mlflow",
        "the tracking address, such as `sqlite:////FOLDER/FILE`; else as MLflow has it",
        extra="tracking",
    ),
    TrackerSpec(
        "wandb",
        f"{_HERE}.in_wandb:open_tracker",
        "wandb",
        "the project; else `batchwright`. `WANDB_MODE=offline` keeps it here",
        extra="tracking",
        single=True,
    ),
    TrackerSpec(
        "trackio",
        f"{_HERE}.in_trackio:open_tracker",
        "trackio",
        "the project; else `batchwright`",
    ),
    group="batchwright.trackers",
)
