"""Two batch sizes that end their rounds together: measured side by side, and planned again.

A line through step times says how many samples of each batch size take the same time; but a small
error in its fixed time per step moves the small batch a lot. So the very pair that was planned is
measured, and the plan made again with what was found, until both agree.

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
"""Difference between the groups' rounds, as a share, at which they end together."""

MAX_TIMES = 4
"""Times that pairs are measured: noise may keep them from ever agreeing."""

CHOICE = "round times"


@dataclass(frozen=True)
class Settled:
    """A plan with two batch sizes, and how well its rounds agree."""

    plan: Plan  # the planned pairs were measured, and a reason tells how well they fit
    profile: Profile  # with all that was measured on the way
    rounds: tuple[RoundCheck, ...]  # of the plan, by resolution
    times: int  # how often pairs were measured


def pairs_of(plan: Plan) -> tuple[Pair, ...]:
    """The pairs of batch sizes that a plan puts side by side, by resolution; none without two.

    Virtual workers have none that could be measured.
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
    """What measures the pairs of a plan, and of others that may come of it, for `settle`.

    The folder takes the workers' files, and is made where it is not there.

    Raises:
        BatchwrightError: As `probing.pairs.pair_measurer` raises.
    """
    from batchwright.probing.pairs import pair_measurer
    from batchwright.probing.probe import counts_of

    make_folder(folder)
    counts = {plan.workers, *(count for count in counts_of(plan.job) if count > 1)}
    training = sum(
        stage.epochs * stage.predicted_epoch_seconds.value
        for stage in plan.stages
        if stage.predicted_epoch_seconds is not None
    )
    settings = plan.job.probe
    budget = settings.model_copy(update={"budget": settings.budget_for(training)})
    job = plan.job.model_copy(update={"probe": budget})  # as a probe of this training has
    with steps() as show, pair_measurer(job, counts, folder, progress=show) as measure:
        yield measure


def _groups(plan: Plan, stage: Stage) -> tuple[int, int]:
    """Workers with the large batch, which come first, and with the small one."""
    small = plan.server.small_workers if plan.server else 0
    return stage.workers - small, small


def round_checks(plan: Plan, pairs: Sequence[PairTime]) -> tuple[RoundCheck, ...]:
    """What the rounds of a plan with two batch sizes take, by those measured pairs that it has."""
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
    groups = pair.large_workers, pair.small_workers
    return pair.resolution, *groups, pair.large_batch, pair.small_batch


def settle(
    plan: Plan,
    profile: Profile,
    measure: MeasurePairs,
    again: Callable[[Profile], Plan],
) -> Settled:
    """Measure a plan's pairs and plan again until its rounds agree, `MAX_TIMES` at most.

    Of the plans on the way the one is kept whose rounds agree best by all pairs together: by its
    own pair alone it would be the one that noise has flattered most. A later one that nobody has
    measured is not trained.

    ``measure`` times pairs side by side, and ``again`` makes a plan from the profile with the new
    times. A plan without two batch sizes comes back as it is.

    Raises:
        JobError: A pair does not fit the memory.
        BatchwrightError: As the workers that measure raise.
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
            break  # whole samples come no nearer
        plan = new  # or the same, to be measured better
    if not tried:
        return Settled(plan, profile, (), 0)
    best = min(tried, key=lambda one: expected_difference(one, profile.pairs))
    rounds = round_checks(best, profile.pairs)
    worst = expected_difference(best, profile.pairs)
    reasons = (
        *(one for one in best.reasons if one.choice != CHOICE),
        _reason(rounds, worst, len(tried), note),
    )
    told = best.model_copy(update={"reasons": reasons})
    return Settled(told, profile, rounds, len(tried))


def expected_difference(plan: Plan, pairs: Sequence[PairTime]) -> float:
    """The largest difference between the groups' rounds by all pairs together, as a share.

    The plan has two batch sizes, and its own are among the measured pairs.
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
    """The largest difference between the groups' rounds, as a share, whichever is longer."""
    return max(abs(one.difference) for one in rounds)


def _table(plan: Plan) -> list[tuple[object, ...]]:
    """What of the rows tells how long rounds take."""
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
