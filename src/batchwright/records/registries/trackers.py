"""Trackers: option ``--tracker``, programs that show a run's values besides its own page."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.records.registries.registry import Registry


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker.

    Attributes:
        name: Name in ``--tracker``, before any colon.
        open: Import string of a function (place, run) -> `client.trackers.following.Tracker`, which
            takes the values; ``run`` is a `client.trackers.following.TrackedRun`.
        package: The package that it imports.
        place: Description of the text after the colon.
        folder: Whether the place is a folder.
        extra: Our extra that installs the package; empty: it is installed by itself.
        single: Whether a process can feed only one place of this tracker.
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
