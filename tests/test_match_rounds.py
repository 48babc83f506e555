"""Two batch sizes: measured, planned again, until their rounds end together."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from batchwright.errors import PlanError
from batchwright.probing import pairs
from batchwright.probing.commands import Pair
from batchwright.records import Estimate, PairTime, Plan, ProbeSettings, Profile
from batchwright.workflows.match_rounds import (
    AGREEMENT,
    CHOICE,
    MAX_TIMES,
    expected_difference,
    pair_measurer_for,
    pairs_of,
    round_checks,
    settle,
    worst_difference,
)
from samples import make_job, make_pair, make_plan, make_profile, make_server

SAMPLES, LARGE_BATCH = 50_000, 500


def dual_plan(small_batch: int, share: int, *, large: int = 3, small: int = 1, **changes) -> Plan:
    """``share``: samples of a small-batch worker's round."""
    plan = make_plan()
    rest = SAMPLES - small * share
    samples = [rest // large if large else 0] * large + [share] * small
    samples[0] += SAMPLES - sum(samples)
    row = plan.stages[0].model_copy(
        update={
            "local_batch_sizes": (LARGE_BATCH,) * large + (small_batch,) * small,
            "micro_batch_size": LARGE_BATCH,
            "samples_per_round": tuple(samples),
            "update_factors": (1.0,) * (large + small),
        }
    )
    rule = make_server(small_workers=small)
    job = make_job(workers=large + small, method="dual-batch")
    fields = {
        "job": job,
        "method": "dual-batch",
        "merge": "parameter server",
        "server": rule,
        "stages": (row,),
    }
    return plan.model_copy(update=fields | changes)


@dataclass
class Cluster:
    """An invented cluster where step times are no line in the batch.

    Attributes:
        seconds: True seconds of a step of so many samples, in the company of the others.
        believed: Seconds per sample and fixed seconds that the planner starts from.
        noise: Relative standard deviation of a measured ratio.
    """

    seconds: Callable[[float], float]
    believed: tuple[float, float]
    extra_time: float = 1.05
    large: int = 3
    small: int = 1
    noise: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(0))
    asked: list[Pair] = field(default_factory=list)

    def measure(self, pairs: Sequence[Pair]) -> tuple[PairTime, ...]:
        self.asked += pairs
        return tuple(self._time(pair) for pair in pairs)

    def _time(self, pair: Pair) -> PairTime:
        large = self.seconds(pair.large_batch)
        small = self.seconds(pair.small_batch) * self.random.lognormvariate(0, self.noise)
        return make_pair(
            large_workers=pair.large_workers,
            small_workers=pair.small_workers,
            small_batch=pair.small_batch,
            large_seconds=large,
            small_seconds=small,
            ratios=(small / large,) * 5,
        )

    def plan(self, profile: Profile) -> Plan:
        """B_S = b / ((a + b / B_L) / r - a), by the chord through the nearest measured pair."""
        a, b = self.believed
        batch = self._small_batch(a, b)
        for _ in range(20):
            near = min(profile.pairs, key=lambda p: abs(p.small_batch - batch), default=None)
            if near is not None:
                a = (near.large_seconds - near.small_seconds) / (LARGE_BATCH - near.small_batch)
                b = near.large_seconds - a * LARGE_BATCH
                batch = self._small_batch(a, b)
        if batch < 2:
            raise PlanError("dual.extra_time=1.05 wants a local batch below 2")
        share = round(self._part() * self._large_samples())
        return dual_plan(batch, share, large=self.large, small=self.small)

    def _large_samples(self) -> float:
        return self.extra_time * SAMPLES / (self.large + self.small)

    def _part(self) -> float:
        """d_S / d_L."""
        n = self.large + self.small
        return (n - self.extra_time * self.large) / (self.extra_time * self.small)

    def _small_batch(self, a: float, b: float) -> int:
        return round(b / ((a + b / LARGE_BATCH) / self._part() - a))

    def settled(self):
        profile = make_profile()
        return settle(self.plan(profile), profile, self.measure, self.plan)


def bent(batch: float) -> float:
    """A fixed time, one per sample, and one that small batches use worse."""
    return 0.014 + 0.000566 * batch + 0.00035 * batch**0.7


def test_a_plan_from_a_wrong_line_settles_where_the_rounds_end_together():
    cluster = Cluster(bent, believed=(0.0005, 0.03))
    first = cluster.plan(make_profile())
    found = cluster.settled()
    before = round_checks(first, found.profile.pairs)
    assert worst_difference(before) > 0.05
    assert worst_difference(found.rounds) <= AGREEMENT
    assert found.times <= 3
    assert found.plan.stages[0].local_batch_sizes[-1] not in (
        first.stages[0].local_batch_sizes[-1],
    )
    true = [bent(pair.small_batch) for pair in found.profile.pairs]
    assert [pair.small_seconds for pair in found.profile.pairs] == true


@settings(max_examples=60)
@given(
    fixed=some.floats(0.008, 0.08),
    bend=some.floats(0, 0.001),
    wrong=some.floats(0.5, 2),
    extra=some.floats(1.02, 1.12),
    groups=some.sampled_from([(1, 1), (3, 1), (2, 2), (1, 3)]),
)
def test_four_measurements_are_enough_whatever_the_curve(fixed, bend, wrong, extra, groups):
    def seconds(batch: float) -> float:
        return fixed + 0.0006 * batch + bend * batch**0.6

    large, small = groups
    cluster = Cluster(
        seconds, believed=(0.0006, wrong * fixed), extra_time=extra, large=large, small=small
    )
    found = cluster.settled()
    assert len(cluster.asked) == found.times <= MAX_TIMES
    batch = found.plan.stages[0].local_batch_sizes[-1]
    one_sample = abs(seconds(batch + 1) / (batch + 1) / (seconds(batch) / batch) - 1)
    assert worst_difference(found.rounds) <= AGREEMENT + one_sample


def test_noise_does_not_keep_it_measuring():
    for seed in range(30):
        cluster = Cluster(bent, (0.0005, 0.03), noise=0.05, random=random.Random(seed))
        found = cluster.settled()
        assert found.times == len(cluster.asked) <= MAX_TIMES
        tried = {pair.small_batch for pair in cluster.asked}
        assert found.plan.stages[0].local_batch_sizes[-1] in tried


def test_a_lucky_pair_does_not_end_the_measuring_and_all_pairs_choose():
    """One whose ratio is hardly known may agree by luck."""
    cluster = Cluster(bent, believed=(0.0005, 0.03))
    first = cluster.plan(make_profile())
    batches = [first.stages[0].local_batch_sizes[-1] + n for n in range(MAX_TIMES)]
    plans = [cluster_row(first, n) for n in batches]
    (row,) = first.stages
    parts = row.samples_per_round[-1] / row.samples_per_round[0]
    luck = iter([0.0, 0.05, -0.04, 0.03])  # difference of the groups' rounds, as measured

    def measure(pairs):
        (pair,) = pairs
        ratio = (1 + next(luck)) * pair.small_batch / pair.large_batch / parts
        ratios = tuple(ratio * one for one in (0.95, 0.98, 1.0, 1.02, 1.05))
        return (make_pair(small_batch=pair.small_batch, small_seconds=0.3 * ratio, ratios=ratios),)

    later = iter(plans[1:])
    found = settle(
        first,
        make_profile(),
        measure,
        lambda known: first.model_copy(update={"stages": next(later)}),
    )
    assert found.times == MAX_TIMES
    told = [
        expected_difference(first.model_copy(update={"stages": one}), found.profile.pairs)
        for one in plans
    ]
    assert found.plan.stages[0].local_batch_sizes[-1] == batches[told.index(min(told))]


def test_a_pair_that_is_not_well_known_is_measured_again_and_its_visits_are_pooled():
    """Else one noisy measurement of the pair that the plan comes to would be the last word."""
    cluster = Cluster(bent, believed=(0.0005, 0.03))
    plan = cluster.plan(make_profile())
    noisy = iter([1.1, 1.06, 1.02, 1.04])

    def measure(pairs):
        factor = next(noisy)
        return tuple(
            make_pair(small_batch=pair.small_batch, ratios=(0.2 * factor, 0.2, 0.2 / factor))
            for pair in pairs
        )

    found = settle(plan, make_profile(), measure, lambda known: plan)
    assert found.times == MAX_TIMES
    (pair,) = found.profile.pairs
    assert len(pair.ratios) == 3 * MAX_TIMES


def test_what_remains_is_said_with_both_rounds():
    cluster = Cluster(bent, believed=(0.0005, 0.03))
    profile = make_profile()
    plan = cluster.plan(profile)
    stubborn = iter([plan.model_copy(update={"stages": cluster_row(plan, n)}) for n in (4, 5, 6)])
    found = settle(plan, profile, cluster.measure, lambda known: next(stubborn))
    assert found.times == MAX_TIMES
    (reason,) = (one for one in found.plan.reasons if one.choice == CHOICE)
    assert reason.value.startswith("differ to ")
    assert "More than 1.0 % is left." in reason.why
    (check,) = found.rounds
    for seconds in (check.small_seconds, check.large_seconds):
        assert f"{seconds:.3g} s" in reason.why


def cluster_row(plan: Plan, small_batch: int):
    (row,) = plan.stages
    sizes = (*row.local_batch_sizes[:-1], small_batch)
    return (row.model_copy(update={"local_batch_sizes": sizes}),)


def test_that_rounds_agree_is_a_reason_of_the_plan_once():
    cluster = Cluster(bent, believed=(0.0005, 0.03))
    found = cluster.settled()
    again = settle(found.plan, found.profile, cluster.measure, cluster.plan)
    told = [one for one in again.plan.reasons if one.choice == CHOICE]
    assert len(told) == 1
    assert told[0].value.startswith("agree to ")
    assert told[0].source == "measured"
    assert again.times == 1
    assert found.plan.reasons[:-1] == make_plan().reasons


def test_a_pair_that_is_measured_again_pools_its_visits():
    cluster = Cluster(bent, believed=(0.0005, 0.03))
    found = cluster.settled()
    again = settle(found.plan, found.profile, cluster.measure, cluster.plan)
    place = found.plan.stages[0].local_batch_sizes[-1]
    (pair,) = (one for one in again.profile.pairs if one.small_batch == place)
    assert (pair.repeats, len(pair.ratios)) == (10, 10)
    assert again.profile.probe_seconds == make_profile().probe_seconds


def test_times_that_no_plan_comes_of_leave_the_plan_and_say_so():
    def hardly_fixed(batch: float) -> float:
        return 1e-5 + 0.0006 * batch

    cluster = Cluster(hardly_fixed, believed=(0.0005, 0.03))
    found = cluster.settled()
    assert found.times == 1
    assert "No plan comes of the measured times: dual.extra_time" in found.plan.reasons[-1].why


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(),
        dual_plan(83, 12_500, large=0, small=4),
        dual_plan(LARGE_BATCH, 12_500),
        dual_plan(83, 10_625, job=make_job(launch="virtual", workers=4)),
    ],
    ids=["no server", "one group", "equal batches", "virtual workers"],
)
def test_a_plan_without_two_real_batch_sizes_is_left_as_it_is(plan):
    found = settle(plan, make_profile(), pytest.fail, pytest.fail)
    assert pairs_of(plan) == ()
    assert found.plan == plan
    assert found.times == 0
    assert found.rounds == ()


def test_rows_of_one_resolution_share_a_pair_and_others_have_their_own():
    plan = dual_plan(83, 10_625)
    (row,) = plan.stages
    low = row.model_copy(
        update={
            "resolution": 24,
            "local_batch_sizes": (600, 600, 600, 130),
            "micro_batch_size": 300,
        }
    )
    cycled = plan.model_copy(update={"stages": (low, row, low, row)})
    assert pairs_of(cycled) == (Pair(24, 3, 1, 600, 130, 300), Pair(32, 3, 1, 500, 83, 500))
    measured = (
        make_pair(resolution=24, large_batch=600, small_batch=130),
        make_pair(),
        make_pair(small_batch=80),
    )
    checks = round_checks(cycled, measured)
    assert [(one.pair.resolution, one.pair.small_batch) for one in checks] == [(24, 130), (32, 83)]
    top = checks[1]
    assert top.small_seconds == pytest.approx(0.06 * 10_625 / 83)
    assert top.large_seconds == pytest.approx(0.3 * 13_125 / 500)
    assert top.difference == pytest.approx(top.small_seconds / top.large_seconds - 1)


@pytest.mark.parametrize(
    ("asked", "epochs", "budget"),
    [("auto", 1, 5.0), ("auto", 80, 8.0), ("auto", 1000, 20.0), (3.0, 1000, 3.0)],
)
def test_pairs_are_measured_by_the_budget_of_a_probe_of_this_training(
    asked, epochs, budget, tmp_path, monkeypatch
):
    plan = dual_plan(40, 8)
    epoch = Estimate(value=1.0, low=0.9, high=1.1)
    (stage,) = plan.stages
    stage = stage.model_copy(update={"epochs": epochs, "predicted_epoch_seconds": epoch})
    job = plan.job.model_copy(update={"probe": ProbeSettings(budget=asked)})
    plan = plan.model_copy(update={"stages": (stage,), "job": job})
    seen = []

    @contextmanager
    def measurer(job, counts, folder, *, progress):
        seen.append(job.probe.budget)
        yield None

    monkeypatch.setattr(pairs, "pair_measurer", measurer)
    with pair_measurer_for(plan, tmp_path / "pairs"):
        pass
    assert seen == [budget]
