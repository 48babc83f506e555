"""The schedule of resolutions: stages of the learning rate, each of which goes through resolutions.

Cyclic progressive learning (Lu et al. 2025, arXiv 2509.26092, section 4) goes through all
resolutions from low to high in *every* stage, so that the high rate trains on images of the highest
resolution, too. It is compared with going through the resolutions once over the whole training, and
with staying at the highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from batchwright.algorithms.partition import apportion
from batchwright.planning.chosen import Chosen
from batchwright.records import Alternative, DataFacts, Job, Reason, Source
from batchwright.records.registries.data_sources import source_of
from batchwright.records.registries.methods import PAPER
from batchwright.records.registries.presets import Preset
from batchwright.records.text.formatting import percent

Number = TypeVar("Number", int, float)

LARGE_SIDE = 64
"""Largest top resolution, in pixels, with one lower resolution in a cycle; above it there are 2."""

_ASKED: tuple[Source, str] = ("asked", "")
_PUBLISHED: tuple[Source, str] = ("published", PAPER)
_DEFAULT_PARTS = 3  # stages of the rate where nothing says how many
_DEFAULT_DECAY = 0.1  # of one stage's rate to the next's


@dataclass(frozen=True)
class SubStage:
    """A stretch of constant resolution inside a stage of constant rate."""

    epochs: int  # length, in epochs
    rate_stage: int  # index of the stage of the rate that it belongs to, zero-based
    level: int  # index of its resolution, zero-based, low to high


@dataclass(frozen=True)
class Schedule:
    """The stages of a training, with their resolutions, rates and regularization."""

    resolutions: tuple[int, ...]  # image sides, low to high, in pixels
    parts: tuple[SubStage, ...]  # the sub-stages in order
    # Epochs of each stage of the rate, without stages of no epoch; and the reason.
    stage_epochs: Chosen[tuple[int, ...]]
    rates: tuple[float, ...]  # rate of each stage relative to the first
    dropouts: tuple[float, ...]  # dropout at each resolution, a share
    strengths: tuple[float, ...]  # strength of the augmentation at each resolution
    preset: Preset | None  # the published schedule that it follows; `None`: none

    @property
    def epochs_of_levels(self) -> tuple[int, ...]:
        """Epochs trained at each resolution."""
        return tuple(
            sum(part.epochs for part in self.parts if part.level == level)
            for level in range(len(self.resolutions))
        )

    def reasons(self, job: Job, data: DataFacts) -> tuple[Reason, ...]:
        """Reasons for preset, resolutions, stages and regularization."""
        found = [self._resolutions(job, data), self._stages(job)]
        if self.preset is not None:
            doubts = preset_doubts(self.preset, data)
            why = "Asked for. The job's own keys go before it where they differ from the defaults"
            why += f", and so does {' and '.join(job.cycle.keep)}" if job.cycle.keep else ""
            why += f". It {' and '.join(doubts)}: it may not suit." if doubts else "."
            if recipe := [f"{key}={getattr(job, key)}".lower() for key in self.preset.recipe]:
                why += f" Besides its schedule: augment={job.augmentation}, {', '.join(recipe)}."
            if other := _unmet_recipe(job):
                why += (
                    f" What was measured has its own {', '.join(other)}: to train with the "
                    f"preset's, probe with cycle.preset={job.cycle.preset}."
                )
            preset = Chosen(job.cycle.preset, why, "published", PAPER)
            found.insert(0, preset.reason("preset"))
        values = [f"dropout {', '.join(f'{one:g}' for one in self.dropouts)}"]
        if len(set(self.strengths)) > 1:
            values.append(f"strength {', '.join(f'{one:g}' for one in self.strengths)}")
        if len(set(self.dropouts)) > 1 or len(values) > 1:
            source = _PUBLISHED if self.preset and self.dropouts == self.preset.dropouts else _ASKED
            why = "Each resolution has its own: larger images need more of it."
            found.append(Chosen("; ".join(values), why, *source).reason("regularization"))
        return tuple(found)

    def _resolutions(self, job: Job, data: DataFacts) -> Reason:
        sides, order = self.resolutions, job.cycle.order
        text = {
            "cycle": "Low to high in each stage of the learning rate, so that the high rate meets "
            "all",
            "one-pass": "Low to high once over the whole training, as progressive learning without "
            "a cycle does",
            "fixed": "The highest throughout",
        }[order]
        pixels = sum(
            part.epochs * (sides[part.level] / sides[-1]) ** 2 for part in self.parts
        ) / max(1, job.epochs)
        own = "the size of the data's own images"
        if sides[-1] != data.side:
            own = f"asked for, the data's own images have {data.side} px"
        why = (
            f"{text}; the highest is {own}. All epochs together go through {percent(pixels, 0)} of "
            f"the pixels that they would at {sides[-1]} px throughout."
        )
        source = _PUBLISHED if order == "cycle" else _ASKED
        return Chosen(sides, why, *source).reason("resolutions", f"{', '.join(map(str, sides))} px")

    def _stages(self, job: Job) -> Reason:
        stages = self.stage_epochs
        uneven = any(
            len({part.epochs for part in self.parts if part.rate_stage == stage}) > 1
            for stage in range(len(stages.value))
        )
        if uneven and job.cycle.order == "cycle" and job.cycle.shares == "auto":
            stages = stages._replace(
                why=f"{stages.why} Where a stage does not divide evenly, the higher resolution "
                "gets the odd epoch, as the highest is what is evaluated."
            )
        rates = ", ".join(f"{rate:g}" for rate in self.rates)
        lengths = "+".join(map(str, stages.value))
        epochs = "epoch" if sum(stages.value) == 1 else "epochs"
        return stages.reason("stages", f"{lengths} {epochs} at {rates} times the rate")


def resolution_reason(
    side: int, data: DataFacts, alternatives: tuple[Alternative, ...] = ()
) -> Reason:
    """The reason for the resolution of a plan of one row: it is the data's own, or was asked for.

    Args:
        side: Image side, in pixels.
        data: The data set.
        alternatives: Candidates at other resolutions that the job names.
    """
    own = side == data.side
    why = "The size of the data's own images."
    if not own:
        why = f"Asked for; the data's own images have {data.side} px."
    if alternatives:
        why += " The highest of those asked for, at which `plain` trains."
    found = Chosen(side, why, "assumed" if own else "asked", "", alternatives)
    return found.reason("resolution", f"{side} px")


def sub_stages(
    stage_epochs: Sequence[int], levels: int, order: str, shares: Sequence[float] = ()
) -> tuple[SubStage, ...]:
    """The stages cut into sub-stages of one resolution each.

    Epochs that do not divide evenly go to the largest remainders. Of equal remainders the higher
    resolution gets the epoch, since evaluation is at the highest: a stage that is too short for all
    resolutions keeps the highest.

    Args:
        stage_epochs: Epochs of each stage of the rate.
        levels: Number of resolutions.
        order: ``cycle``, ``one-pass`` or ``fixed``, as in the job.
        shares: Parts for the resolutions, low to high; empty: equal ones.

    Example:
        >>> [(one.epochs, one.rate_stage, one.level) for one in sub_stages((3, 1), 2, "cycle")]
        [(1, 0, 0), (2, 0, 1), (1, 1, 1)]
        >>> [(one.epochs, one.rate_stage, one.level) for one in sub_stages((3, 1), 2, "one-pass")]
        [(2, 0, 0), (1, 0, 1), (1, 1, 1)]
    """
    weights = list(shares) or [1.0] * levels
    if order == "cycle":
        cut = [_divided(epochs, weights) for epochs in stage_epochs]
        found = [
            SubStage(epochs, stage, level)
            for stage, parts in enumerate(cut)
            for level, epochs in enumerate(parts)
        ]
        return tuple(one for one in found if one.epochs)
    of_level = _divided(sum(stage_epochs), weights)
    if order == "fixed":
        of_level = [0] * (levels - 1) + [sum(stage_epochs)]
    stages = [stage for stage, epochs in enumerate(stage_epochs) for _ in range(epochs)]
    levels_of = [level for level, epochs in enumerate(of_level) for _ in range(epochs)]
    rows: dict[tuple[int, int], int] = {}
    for key in zip(stages, levels_of, strict=True):
        rows[key] = rows.get(key, 0) + 1
    return tuple(SubStage(epochs, stage, level) for (stage, level), epochs in rows.items())


def _divided(epochs: int, weights: Sequence[float]) -> list[int]:
    """Epochs for each resolution; ties go to the last."""
    return apportion(list(reversed(weights)), epochs)[::-1]


def preset_doubts(preset: Preset, data: DataFacts) -> tuple[str, ...]:
    """How the data differ from those that the preset was made for, in words; empty if alike."""
    found = []
    if len(data.classes) != preset.classes:
        found.append(
            f"was made for {preset.classes:,} classes, {data.name} has {len(data.classes)}"
        )
    if not preset.least_side <= data.side <= (preset.most_side or data.side):
        sides = f"{preset.least_side} px" + ("" if preset.most_side else " or more")
        found.append(f"was made for images of {sides}, {data.name} has {data.side} px")
    return tuple(found)


def settled(job: Job, data: DataFacts, *, least_side: int = 1) -> Job:
    """The job with `resolutions` filled in and, under a preset, `epochs`.

    Values that the job gives are kept in place of the preset's, and stages then keep their
    proportions. Settling twice changes nothing.

    Args:
        job: As given.
        data: The data set, whose image side is the top resolution.
        least_side: Smallest image side that the network takes, in pixels, if already known.
    """
    sides = job.asked_resolutions or (data.side,)
    if not job.asked_resolutions and (job.method_spec.cycles or job.method == "auto"):
        sides = tuple(s for s in rising_sides(data.side) if s >= least_side) or sides
    return job.model_copy(update={"epochs": job.asked_epochs, "resolutions": sides})


def with_recipe(job: Job) -> Job:
    """The job with the training settings of its preset, for keys that are still at their default.

    It has to be applied before anything is measured, since augmentation takes time.
    """
    return job.model_copy(update=_unmet_recipe(job))


def _unmet_recipe(job: Job) -> dict[str, float]:
    """Keys of the job that are still at their default where its preset has another value."""
    if job.preset is None:
        return {}
    own = source_of(job.data).as_they_come  # such data sets augment their images themselves
    return {
        key: value
        for key, value in job.preset.recipe.items()
        if getattr(job, key) == Job.model_fields[key].default != value
        and key not in job.cycle.keep
        and not (own and key in ("rotation", "zoom"))
    }


def rising_sides(top: int) -> tuple[int, ...]:
    """Resolutions to cycle through, up to ``top`` pixels.

    Up to a top of 64 px they are 0.75 and 1 times the top, above 0.55, 0.775 and 1 times: about
    those of the published schedules (24, 32 and 160, 224, 288 px). They are multiples of 4, so
    that halvings stay whole, or of 2 where 4 would be too coarse.

    Example:
        >>> rising_sides(8), rising_sides(32), rising_sides(160), rising_sides(288)
        ((6, 8), (24, 32), (88, 124, 160), (160, 224, 288))
    """
    shares = (0.75, 1.0) if top <= LARGE_SIDE else (0.55, 0.775, 1.0)
    step = 4 if top >= 16 else 2
    lower = {max(step, step * round(share * top / step)) for share in shares[:-1]}
    return (*sorted(side for side in lower if side < top), top)


def sides(job: Job) -> tuple[int, ...]:
    """The resolutions of a resolved job, in pixels, rising."""
    return () if job.resolutions == "auto" else job.resolutions


def cycle_batches(job: Job, data: DataFacts) -> Chosen[tuple[int, ...]] | None:
    """The global batch at each resolution of `cyclic`; `None` where all have the chosen batch."""
    if not job.method_spec.takes("cycle.batches"):
        return None
    given, preset = job.cycle.batches, job.preset
    if given != "auto":
        return Chosen(per_resolution(given, sides(job)), "Asked for.", "asked")
    if preset is None or job.global_batch != "auto" or sides(job) != preset.resolutions:
        return None
    if max(preset.batches) > data.train_samples // job.goal.least_steps:
        return None
    why = "The published batch of a step, for which the published rate holds."
    return Chosen(preset.batches, why, *_PUBLISHED)


def schedule_of(job: Job) -> Schedule:
    """The schedule of a job whose resolutions and epochs are settled."""
    cycle, preset, levels = job.cycle, job.preset, sides(job)
    chosen = _stage_epochs(job)
    stages, dropouts = chosen.value, cycle.dropouts
    if dropouts == "auto":
        dropouts = (job.dropout,)
        if preset is not None and len(preset.dropouts) == len(levels) and not job.dropout:
            dropouts = preset.dropouts
    rates = cycle.stage_rates
    if rates == "auto":
        rates = tuple(_DEFAULT_DECAY**stage for stage in range(len(stages)))
        if preset is not None and len(preset.rates) == len(stages):
            rates = preset.rates
    shares = () if cycle.shares == "auto" else per_resolution(cycle.shares, levels)
    kept = [index for index, epochs in enumerate(stages) if epochs]
    return Schedule(
        resolutions=levels,
        parts=sub_stages([stages[index] for index in kept], len(levels), cycle.order, shares),
        stage_epochs=chosen._replace(value=tuple(stages[index] for index in kept)),
        rates=tuple(rates[index] / rates[0] for index in kept),
        dropouts=per_resolution(dropouts, levels),
        strengths=per_resolution((1.0,) if cycle.strengths == "auto" else cycle.strengths, levels),
        preset=preset,
    )


def per_resolution(values: Sequence[Number], sides: Sequence[int]) -> tuple[Number, ...]:
    """One value for each resolution; a single value is repeated for all."""
    return tuple(values) * (len(sides) if len(values) == 1 else 1)


def _stage_epochs(job: Job) -> Chosen[tuple[int, ...]]:
    if job.cycle.stage_epochs != "auto":
        return Chosen(job.cycle.stage_epochs, "Asked for.", "asked")
    if job.preset is not None:
        why = f"In the proportion of cycle.preset={job.cycle.preset}."
        parts = job.preset.stage_epochs
    else:
        rates = job.cycle.stage_rates
        count = _DEFAULT_PARTS if rates == "auto" else len(rates)
        parts = tuple(2 ** (count - 1 - stage) for stage in range(count))
        why = "Each half as long as the one before, as published."
    return Chosen(tuple(apportion(list(parts), job.epochs)), why, *_PUBLISHED)
