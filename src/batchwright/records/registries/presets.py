"""Presets: job key ``cycle.preset``, published schedules of cyclic progressive learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchwright.records.base import Augmentation


@dataclass(frozen=True)
class Preset:
    """A published schedule.

    Attributes:
        stage_epochs: Epochs of each rate stage.
        rates: Rate of each rate stage, per step, whatever the batch.
        resolutions: Image sides of each rate stage's cycle, in pixels.
        dropouts: Dropout at each resolution, a share.
        batches: Local batch of a large-batch worker at each resolution, in samples.
        classes: Number of classes of the data that the schedule was made for.
        least_side: Least side of the images, in pixels.
        most_side: Largest side of the images, in pixels; `None`: any.
        augment: Augmentation of `augment=auto`; `None`: that of the data source.
        recipe: Other settings of the published training, by job key; each holds where the job
            leaves the key at its default.
    """

    stage_epochs: tuple[int, ...]
    rates: tuple[float, ...]
    resolutions: tuple[int, ...]
    dropouts: tuple[float, ...]
    batches: tuple[int, ...]
    classes: int
    least_side: int
    most_side: int | None
    augment: Augmentation | None = None
    recipe: Mapping[str, float | bool] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = {
    "cifar100": Preset(
        stage_epochs=(80, 40, 20),
        rates=(0.2, 0.02, 0.002),
        resolutions=(24, 32),
        dropouts=(0.1, 0.2),
        batches=(600, 560),
        classes=100,
        least_side=32,
        most_side=32,
        augment="flip",
        recipe={"rotation": 0.05, "zoom": 0.25, "nesterov": False, "weight_decay": 1e-4},
    ),
    "imagenet": Preset(
        stage_epochs=(60, 30, 15),
        rates=(0.2, 0.02, 0.002),
        resolutions=(160, 224, 288),
        dropouts=(0.1, 0.2, 0.3),
        batches=(2330, 1110, 740),
        classes=1000,
        least_side=160,  # the natural side of an image folder is never said to be more
        most_side=None,
    ),
}
"""Tables 6, 7 and 9 of Lu et al. 2025, arXiv 2509.26092, and the authors' code for their
experiments C and D: four workers, large batches that filled their GPUs. How ImageNet's images were
augmented, and with which decay, is not known to us."""
