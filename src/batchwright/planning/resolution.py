"""Which resolution and rate when: stages of the learning rate, each going through resolutions.

Cyclic progressive learning (Lu et al. 2025, arXiv 2509.26092, section 4) goes through all
resolutions low to high in *every* stage, so that images of the highest meet the high rate, too;
going through them once over the whole training, or staying at the highest, are what it is compared
with.
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
"""Up to this top resolution, in pixels, one lower one; above it two."""

_ASKED: tuple[Source, str] = ("asked", "")
_PUBLISHED: tuple[Source, str] = ("published", PAPER)
_DEFAULT_PARTS = 3  # stages of the rate where nothing says how many
_DEFAULT_DECAY = 0.1  # of one stage's rate to the next's


@dataclass(frozen=True)
class SubStage:
    """A stretch of constant resolution inside a stage of constant rate.

    Attributes:
        epochs: Length.
        rate_stage: Stage of the rate that it is a part of, zero-based.
        level: Index of its resolution, low to high.
    """

    epochs: int
    rate_stage: int
    level: int


@dataclass(frozen=True)
class Schedule:
    """Stages and what holds in each.

    Attributes:
        resolutions: Image sides, low to high, in pixels.
        parts: The sub-stages in order.
        stage_epochs: Length of each stage of the rate, those without an epoch left out; and why.
        rates: Rate of each stage relative to the first.
        dropouts: Share at each resolution.
        strengths: Of the augmentation at each resolution.
        preset: The published schedule it follows; `None`: none.
    """

    resolutions: tuple[int, ...]
    parts: tuple[SubStage, ...]
    stage_epochs: Chosen[tuple[int, ...]]
    rates: tuple[float, ...]
    dropouts: tuple[float, ...]
    strengths: tuple[float, ...]
    preset: Preset | None

    @property
    def epochs_of_levels(self) -> tuple[int, ...]:
        """Epochs trained at each resolution."""
        return tuple(
            sum(part.epochs for part in self.parts if part.level == level)
            for level in range(len(self.resolutions))
        )

    def reasons(self, job: Job, data: DataFacts) -> tuple[Reason, ...]:
        """Why the preset, resolutions, stages and regularization are so."""
        found = [self._resolutions(job, data), self._stages(job)]
        if self.preset is not None:
            doubts = preset_doubts(self.preset, data)
            why = "Asked for. What the job says otherwise than by default goes before it"
            why += f", and so does {' and '.join(job.cycle.keep)}" if job.cycle.keep else ""
            why += f". It {' and '.join(doubts)}: it may not suit." if doubts else "."
            if told := [f"{key}={getattr(job, key)}".lower() for key in self.preset.recipe]:
                why += f" Besides its schedule: augment={job.augmentation}, {', '.join(told)}."
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
            why = "Larger images, more of it: each resolution has its own."
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
            f"the pixels of {sides[-1]} px throughout."
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
        return stages.reason("stages", f"{lengths} epochs at {rates} times the rate")


def resolution_reason(
    side: int, data: DataFacts, alternatives: tuple[Alternative, ...] = ()
) -> Reason:
    """Why a plan of one row has its resolution: it is the data's own, or was asked for."""
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
    """The stages cut at changes of resolution.

    Largest remainder where they do not divide evenly; of equal remainders the higher resolution
    gets the epoch, since what is evaluated is the highest: a stage too short for all keeps that.

    Args:
        stage_epochs: Length of each stage of the rate.
        levels: How many resolutions there are.
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
    """Why the data are not those it was made for, in words; empty if they are alike."""
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
    """The job with resolutions and, under a preset, epochs made concrete.

    What the job says otherwise than by default wins over the preset, and stages keep their
    proportions then. Settling twice changes nothing.

    Args:
        job: As given.
        data: Tells the top resolution.
        least_side: Smallest that the network takes, if that is known already, in pixels.
    """
    sides = job.asked_resolutions or (data.side,)
    if not job.asked_resolutions and (job.method_spec.cycles or job.method == "auto"):
        sides = tuple(s for s in rising_sides(data.side) if s >= least_side) or sides
    return job.model_copy(update={"epochs": job.asked_epochs, "resolutions": sides})


def with_recipe(job: Job) -> Job:
    """The job with what a preset says of the training, where it leaves that as it is by default.

    To be made so before anything is measured: turning images takes time.
    """
    return job.model_copy(update=_unmet_recipe(job))


def _unmet_recipe(job: Job) -> dict[str, float]:
    """Keys of the job that are still at their default where its preset has another value."""
    if job.preset is None:
        return {}
    own = source_of(job.data).as_they_come  # such data augment their images themselves
    return {
        key: value
        for key, value in job.preset.recipe.items()
        if getattr(job, key) == Job.model_fields[key].default != value
        and key not in job.cycle.keep
        and not (own and key in ("rotation", "zoom"))
    }


def rising_sides(top: int) -> tuple[int, ...]:
    """Resolutions to cycle through, up to ``top`` pixels.

    Up to 64 px three quarters of it and all, above in the proportion 0.55, 0.775, 1: about those of
    the published schedules (24, 32 and 160, 224, 288 px). In multiples of 4, so that halvings stay
    whole, or of 2 where 4 would be too coarse.

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
    """The global batch at each resolution of `cyclic`; `None` where the chosen one holds at all."""
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
    """The stages of a job whose resolutions and epochs are settled."""
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
    """One value for each resolution; a single one holds for all."""
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
