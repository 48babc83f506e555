"""Two batch sizes that end their rounds together: measured side by side, and planned again.

A line through step times says how many samples of each batch size take the same time; but a small
error in its fixed time per step moves the small batch a lot. So the very pair that was planned is
measured, and the plan made again with what was found, until both agree.

    plan --> measure its pairs --> plan again --> ... --> rounds that differ by 1 % at most
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from batchwright.checking import with_points
from batchwright.errors import PlanError
from batchwright.records import PairTime, Plan, Profile, Reason, RoundCheck, Stage
from batchwright.records.words import counted, number, percent

if TYPE_CHECKING:
    from batchwright.probing.commands import Pair

AGREEMENT = 0.01
"""Difference between the groups' rounds, as a share, at which they end together."""

MOST_TIMES = 4
"""Times that pairs are measured: noise may keep them from ever agreeing."""

CHOICE = "round times"


@dataclass(frozen=True)
class Settled:
    """A plan with two batch sizes, and how well its rounds agree.

    Attributes:
        plan: The planned pairs were measured, and a reason tells how well they fit.
        profile: With all that was measured on the way.
        rounds: Of the plan, by resolution.
        times: How often pairs were measured.
    """

    plan: Plan
    profile: Profile
    rounds: tuple[RoundCheck, ...]
    times: int


def pairs_of(plan: Plan) -> tuple[Pair, ...]:
    """The pairs of batch sizes that a plan puts side by side, by resolution; none without two.

    Virtual workers have none that could be measured.
    """
    from batchwright.probing.commands import Pair

    if plan.job.launch == "virtual":
        return ()
    found = {}
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


def _groups(plan: Plan, stage: Stage) -> tuple[int, int]:
    """Workers with the large batch, which come first, and with the small one."""
    small = plan.server.small_workers if plan.server else 0
    return stage.workers - small, small


def round_checks(plan: Plan, pairs: Sequence[PairTime]) -> tuple[RoundCheck, ...]:
    """What the rounds of a plan take by measured pairs: those that are its own.

    Args:
        plan: With two batch sizes.
        pairs: Of a profile, or as measured.
    """
    measured = {_place(pair): pair for pair in pairs}
    found = {}
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
    measure: Callable[[Sequence[Pair]], tuple[PairTime, ...]],
    again: Callable[[Profile], Plan],
) -> Settled:
    """Measure a plan's pairs and plan again until its rounds agree, `MOST_TIMES` at most.

    Of the plans on the way the one whose measured rounds agree best is kept: it, and no later one
    that nobody has measured, is known to be that good.

    Args:
        plan: From ``profile``; one without two batch sizes comes back as it is.
        profile: What it was made from.
        measure: Times pairs side by side.
        again: Makes a plan from the profile with the new times.

    Raises:
        JobError: A pair does not fit the memory.
        BatchwrightError: As the workers that measure raise.
    """
    best: Settled | None = None
    note = ""
    for times in range(1, MOST_TIMES + 1):
        pairs = pairs_of(plan)
        if not pairs:
            break
        profile = with_points(profile, cluster=profile.cluster, pairs=measure(pairs))
        rounds = round_checks(plan, profile.pairs)
        if best is None or _worst(rounds) < _worst(best.rounds):
            best = Settled(plan, profile, rounds, times)
        if _worst(rounds) <= AGREEMENT or times == MOST_TIMES:
            break
        try:
            new = again(profile)
        except PlanError as error:
            note = f" No plan comes of the measured times: {error}."
            break
        if _table(new) == _table(plan):
            break  # the nearest that whole samples come
        plan = new
    if best is None:
        return Settled(plan, profile, (), 0)
    # TODO below
    reason = _reason(best.rounds, times, note)
    others = tuple(one for one in best.plan.reasons if one.choice != CHOICE)
    told = best.plan.model_copy(update={"reasons": (*others, reason)})
    return Settled(told, profile, best.rounds, times)


def _worst(rounds: Sequence[RoundCheck]) -> float:
    return max(abs(one.difference) for one in rounds)


def _table(plan: Plan) -> list[tuple[object, ...]]:
    """What of the rows tells how long rounds take."""
    return [(s.resolution, s.local_batch_sizes, s.samples_per_round) for s in plan.stages]


def _reason(rounds: Sequence[RoundCheck], times: int, note: str) -> Reason:
    worst = _worst(rounds)
    agree = worst <= AGREEMENT
    parts = "; ".join(_words(one) for one in rounds)
    return Reason(
        choice=CHOICE,
        value=f"{'agree' if agree else 'differ'} to {percent(worst)}",
        why=f"Measured side by side {counted(times, 'time')}, planned to be equal: {parts}."
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
