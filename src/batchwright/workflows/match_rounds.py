"""Makes workers with two batch sizes end their rounds together, by measuring and planning again.

A line fitted through step times says how many samples of each batch size take the same time, but a
small error in the line's fixed time per step changes the small batch a lot. So the planned pair of
batches is measured side by side, and the plan made again with that, until both groups agree.

    plan --> measure its pairs --> plan again --> ... --> rounds that differ by 1 % at most
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from batchwright.algorithms.measured_pairs import expected_ratio
from batchwright.errors import PlanError
from batchwright.prediction.drift import WELL_KNOWN_RATIO, ratio_error
from batchwright.records import PairTime, Plan, Profile, Reason, RoundCheck, Stage
from batchwright.records.text.formatting import counted, number, percent
from batchwright.reporting.render.progress import steps
from batchwright.storage.files import make_folder
from batchwright.workflows.check_plan import with_points

if TYPE_CHECKING:
    from batchwright.probing.commands import Pair
    from batchwright.probing.pairs import MeasurePairs

AGREEMENT = 0.01
"""Largest difference between the groups' rounds, as a share, that counts as ending together."""

MAX_TIMES = 4
"""How often pairs are measured at most: noise may keep them from ever agreeing."""

CHOICE = "round times"
"""Name of the choice in the reason that is added to the plan."""


@dataclass(frozen=True)
class Settled:
    """A plan with two batch sizes whose pairs were measured, and how well its rounds agree.

    Attributes:
        plan: The plan, with a reason that says how well its rounds agree.
        profile: The profile with all pairs that were measured.
        rounds: The plan's rounds, by resolution.
        times: How often pairs were measured.
    """

    plan: Plan
    profile: Profile
    rounds: tuple[RoundCheck, ...]
    times: int


def pairs_of(plan: Plan) -> tuple[Pair, ...]:
    """The pairs of batch sizes that train side by side in a plan, by resolution.

    There are none without two batch sizes, and for virtual workers, which cannot be measured.
    """
    from batchwright.probing.commands import Pair

    if plan.job.launcher.simulated:
        return ()
    found: dict[Pair, None] = {}
    for stage in plan.stages:
        large, small = _groups(plan, stage)
        if large and small and stage.local_batch_sizes[0] != stage.local_batch_sizes[-1]:
            pair = Pair(
                stage.resolution,
                large,
                small,
                stage.local_batch_sizes[0],
                stage.local_batch_sizes[-1],
                stage.micro_batch_size,
            )
            found[pair] = None
    return tuple(sorted(found))


@contextmanager
def pair_measurer_for(plan: Plan, folder: Path) -> Iterator[MeasurePairs]:
    """Start workers that measure pairs of a plan with two batch sizes and of others of its job.

    Their files go into ``folder``, which is made if missing.

    Yields:
        The function that `settle` measures with.

    Raises:
        BatchwrightError: As `probing.pairs.pair_measurer` raises.
    """
    from batchwright.probing.pairs import pair_measurer
    from batchwright.probing.probe import counts_of

    make_folder(folder)
    counts = {plan.workers, *(count for count in counts_of(plan.job) if count > 1)}
    training, settings = plan.whole_seconds, plan.job.probe
    seconds = settings.budget_for(training.value if training else 0.0)
    budget = settings.model_copy(update={"budget": seconds})
    job = plan.job.model_copy(update={"probe": budget})  # the budget of a probe of this training
    with steps() as show, pair_measurer(job, counts, folder, progress=show) as measure:
        yield measure


def _groups(plan: Plan, stage: Stage) -> tuple[int, int]:
    """Numbers of workers with the large batch, which have the lowest ranks, and the small one."""
    small = plan.server.small_workers if plan.server else 0
    return stage.workers - small, small


def round_checks(plan: Plan, pairs: Sequence[PairTime]) -> tuple[RoundCheck, ...]:
    """The rounds of a plan's stages whose pair of batches was measured, each distinct one once."""
    measured = {_place(pair): pair for pair in pairs}
    found: dict[RoundCheck, None] = {}
    for stage in plan.stages:
        large, small = _groups(plan, stage)
        batches = stage.local_batch_sizes[0], stage.local_batch_sizes[-1]
        pair = measured.get((stage.resolution, large, small, *batches))
        if pair is None:
            continue
        samples = stage.samples_per_round
        check = RoundCheck(
            pair=pair,
            large_samples=fmean(samples[:large]),
            small_samples=fmean(samples[large:]),
        )
        found[check] = None
    return tuple(found)


def _place(pair: PairTime) -> tuple[int, int, int, int, int]:
    """What identifies a pair: resolution, workers of both groups, and both batches."""
    groups = pair.large_workers, pair.small_workers
    return pair.resolution, *groups, pair.large_batch, pair.small_batch


def settle(
    plan: Plan,
    profile: Profile,
    measure: MeasurePairs,
    again: Callable[[Profile], Plan],
) -> Settled:
    """Measure a plan's pairs and plan again until its rounds agree, at most `MAX_TIMES` times.

    Of the plans whose pairs were measured, the result is the one whose rounds agree best by all
    measured pairs together. By its own pair alone it would be the one that noise favours most.

    Args:
        plan: The plan; without two batch sizes it is returned unchanged.
        profile: The profile that it was made from.
        measure: Times pairs side by side.
        again: Makes a plan from the profile with the new times.

    Raises:
        JobError: A pair does not fit the memory.
        BatchwrightError: The workers that measure have failed.
    """
    tried: list[Plan] = []
    note = ""
    while pairs := pairs_of(plan):
        profile = with_points(profile, cluster=profile.cluster, pairs=measure(pairs))
        tried.append(plan)
        rounds = round_checks(plan, profile.pairs)
        known = all(ratio_error(one.pair.ratios) <= WELL_KNOWN_RATIO for one in rounds)
        if (known and worst_difference(rounds) <= AGREEMENT) or len(tried) == MAX_TIMES:
            break
        try:
            new = again(profile)
        except PlanError as error:
            note = f" No plan comes of the measured times: {error}."
            break
        if known and _table(new) == _table(plan):
            break  # batches are whole samples, so the rounds cannot agree better
        plan = new  # which may be the same plan, to measure its pairs more precisely
    if not tried:
        return Settled(plan, profile, (), 0)
    best = min(tried, key=lambda one: expected_difference(one, profile.pairs))
    rounds = round_checks(best, profile.pairs)
    worst = expected_difference(best, profile.pairs)
    reasons = (
        *(one for one in best.reasons if one.choice != CHOICE),
        _reason(rounds, worst, len(tried), note),
    )
    return Settled(best.model_copy(update={"reasons": reasons}), profile, rounds, len(tried))


def expected_difference(plan: Plan, pairs: Sequence[PairTime]) -> float:
    """The largest difference between the groups' rounds as a share, by all measured pairs together.

    The plan must have two batch sizes, and its own pairs must be among ``pairs``.
    """
    found = []
    for one in round_checks(plan, pairs):
        own = one.pair
        beside = [pair for pair in pairs if _place(pair)[:4] == _place(own)[:4]]
        ratio = expected_ratio(beside, own.large_batch, own.small_batch)
        steps = one.small_samples / own.small_batch, one.large_samples / own.large_batch
        found.append(abs(ratio * steps[0] / steps[1] - 1))
    return max(found)


def worst_difference(rounds: Sequence[RoundCheck]) -> float:
    """The largest absolute difference between the groups' rounds, as a share."""
    return max(abs(one.difference) for one in rounds)


def _table(plan: Plan) -> list[tuple[object, ...]]:
    """The parts of a plan's table that decide how long rounds take."""
    return [(s.resolution, s.local_batch_sizes, s.samples_per_round) for s in plan.stages]


def _reason(rounds: Sequence[RoundCheck], worst: float, times: int, note: str) -> Reason:
    agree = worst <= AGREEMENT
    parts = "; ".join(_words(one) for one in rounds)
    return Reason(
        choice=CHOICE,
        value=f"{'agree' if agree else 'differ'} to {percent(worst)}",
        why=f"Measured side by side {counted(times, 'time')}, planned to be equal: {parts}."
        + (" The difference is by all measured pairs together." if times > 1 else "")
        + ("" if agree else f" More than {percent(AGREEMENT)} is left.")
        + note,
        source="measured",
    )


def _words(one: RoundCheck) -> str:
    pair = one.pair
    return (
        f"at {pair.resolution} px a round takes {number(one.small_seconds)} s with a batch of "
        f"{pair.small_batch} and {number(one.large_seconds)} s with one of {pair.large_batch}"
    )
