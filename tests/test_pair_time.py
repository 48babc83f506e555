"""`probing` of two batches side by side: how often, how exactly, and with real processes."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf, log
from statistics import stdev
from types import SimpleNamespace

import pytest

from batchwright.errors import JobError
from batchwright.planning.merging import merge_profiles
from batchwright.prediction.drift import ratio_error
from batchwright.probing import commands
from batchwright.probing.commands import Pair
from batchwright.probing.measure import pair_time
from batchwright.probing.pairs import BUDGET, ENOUGH_VISITS, MIN_VISITS, PairVisits, pair_measurer
from batchwright.probing.visiting import Visitor
from batchwright.probing.workers import Killed
from batchwright.records import CompilationTimes, Job, MemoryParts, ProbeSettings, Profile
from batchwright.records.job_sections import MIN_BUDGET
from batchwright.workload.passes.compilation import Compilation
from samples import make_data, make_job, make_network, make_profile
from test_match_rounds import make_pair

MIB = 2**20
PAIR = Pair(32, 1, 1, 256, 40)


@dataclass
class Machine:
    """Answers as workers would; the second computes ``slower`` times as long as the first.

    Attributes:
        noise: Relative standard deviation of a visit's ratio.
        common: The same of what both groups see at the same time.
        deadly: Local batch at which a worker is killed.
        large: Local batch that does not fit.
    """

    noise: float = 0.0
    common: float = 0.0
    slower: float = 1.0
    deadly: float = inf
    large: float = inf
    seconds: float = 0.0
    visits: list[commands.VisitPair] = field(default_factory=list)
    compiled: bool = False
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def clock(self):
        return self.seconds

    def restart(self):
        pass

    def ask(self, command, answer, heard=None):
        match command:
            case commands.Prepare():
                return commands.Prepared(
                    data=make_data(),
                    network=make_network(),
                    parts=MemoryParts(
                        parameters=MIB, buffers=1, gradients=MIB, optimizer=MIB, reduction=MIB
                    ),
                    device_name="invented",
                    threads=1,
                    memory_bytes=1024 * MIB,
                    allocator="",
                )
            case commands.Compile():
                self.compiled = True
                return CompilationTimes(
                    resolution=command.resolution,
                    local_batch_size=command.wanted_batch_size,
                    training_seconds=1000.0,
                    plain_seconds=0.1,
                    asked=command.asked,
                    chosen=True,
                )
            case commands.Weigh():
                fits = command.local_batch_size < self.large
                return commands.Weighed(peak_bytes=MIB if fits else None, resident_bytes=None)
            case commands.VisitPair():
                return self._visit(command)

    def _visit(self, command):
        if command.large_batch >= self.deadly:
            raise Killed
        self.visits.append(command)
        self.seconds += 2 * (command.seconds + 0.2)
        stretches = []
        for worker_of_large in (0, 1):
            now = self.random.lognormvariate(0, self.common)
            speeds = (1.0, self.slower)
            large = now * true_seconds(command.large_batch) * speeds[worker_of_large]
            small = now * true_seconds(command.small_batch) * speeds[1 - worker_of_large]
            stretches.append((large, small * self.random.lognormvariate(0, self.noise)))
        return commands.PairVisited(stretches=tuple(stretches))


def true_seconds(batch):
    return 0.01 + 0.0006 * batch


def measurer(machine, **changes):
    job = make_job(**({"precision": "float32", "probe": ProbeSettings(budget=20)} | changes))
    visitor = Visitor(job, machine, 2, lambda what: None)
    visitor.prepare(seconds=1)
    return PairVisits(visitor, clock=machine.clock)


def ratio_of(pair):
    return true_seconds(pair.small_batch) / true_seconds(pair.large_batch)


def test_quiet_machines_are_left_after_five_visits():
    machine = Machine(noise=0.001)
    (time,) = measurer(machine).measure([PAIR])
    assert len(machine.visits) == time.repeats == len(time.ratios) == ENOUGH_VISITS
    assert time.small_seconds / time.large_seconds == pytest.approx(ratio_of(PAIR), rel=0.005)


def test_noise_is_averaged_until_the_time_is_up():
    machine = Machine(noise=0.2)
    (time,) = measurer(machine).measure([PAIR])
    assert time.repeats > ENOUGH_VISITS
    assert machine.seconds <= BUDGET * 20


def test_without_a_budget_of_ones_own_noise_is_averaged_for_half_of_the_least():
    machine = Machine(noise=0.2)
    measurer(machine, probe=ProbeSettings()).measure([PAIR])
    assert machine.seconds <= BUDGET * MIN_BUDGET


def test_two_visits_are_made_however_long_they_take():
    machine = Machine(noise=0.2)
    (time,) = measurer(machine, probe=ProbeSettings(budget=0.1)).measure([PAIR])
    assert time.repeats == MIN_VISITS


def test_slow_stretches_and_slow_workers_leave_the_ratio_alone():
    machine = Machine(common=0.3, slower=1.5)
    (time,) = measurer(machine).measure([PAIR])
    assert time.repeats == ENOUGH_VISITS
    assert time.small_seconds / time.large_seconds == pytest.approx(ratio_of(PAIR), rel=1e-9)


def test_pairs_are_visited_in_turn_and_those_that_are_known_no_longer():
    machine = Machine(noise=0.0)
    other = PAIR._replace(resolution=24, small_batch=64)
    first, second = measurer(machine, probe=ProbeSettings(budget=40)).measure([PAIR, other])
    assert [one.resolution for one in machine.visits] == [32, 24] * ENOUGH_VISITS
    assert (first.small_batch, second.small_batch) == (40, 64)


def test_the_micro_batch_is_the_jobs_or_the_plans():
    for asked, planned, used in (("auto", None, 256), ("auto", 100, 100), (32, 100, 32)):
        machine = Machine()
        measurer(machine, micro_batch=asked).measure([PAIR._replace(micro_batch=planned)])
        assert {one.micro_batch for one in machine.visits} == {used}


@pytest.mark.parametrize("machine", [Machine(deadly=256), Machine(large=256)])
def test_a_pair_that_does_not_fit_is_refused_by_name(machine):
    said = r"^32 px, local batches 256 and 40, 1 \+ 1 workers: .* 1024 MiB .* dual\.large_batches"
    with pytest.raises(JobError, match=said):
        measurer(machine).measure([PAIR])


def test_the_error_of_a_median_ratio_is_that_of_many_repetitions():
    rng = random.Random(0)
    drawn = [[rng.lognormvariate(0, 0.03) for _ in range(9)] for _ in range(2000)]
    medians = [log(sorted(ratios)[4]) for ratios in drawn]
    told = sum(map(ratio_error, drawn)) / len(drawn)
    assert told == pytest.approx(stdev(medians), rel=0.05)
    assert ratio_error([1.0]) == inf


@pytest.mark.parametrize(
    ("size", "most", "parts"),
    [(500, 128, [128, 128, 128, 116]), (83, 128, [83]), (64, 32, [32, 32])],
)
def test_micro_batches_make_up_the_local_batch(size, most, parts):
    assert pair_time._parts(size, most) == parts


def test_profiles_with_pairs_pool_those_of_one_place():
    first = make_pair(small_seconds=0.3 * 0.2, ratios=(0.19, 0.2, 0.21), repeats=3)
    second = make_pair(large_seconds=0.6, small_seconds=0.6 * 0.24, ratios=(), repeats=1)
    other = make_pair(small_batch=80)
    (merged,) = merge_profiles([make_profile(pairs=(first,)), make_profile(pairs=(second, other))])
    pooled, left = merged.pairs
    assert left == other
    assert pooled.ratios == (0.19, 0.2, 0.21, 0.24)
    assert pooled.repeats == 4
    assert pooled.large_seconds == pytest.approx((3 * 0.3 + 0.6) / 4)
    assert pooled.small_seconds / pooled.large_seconds == pytest.approx(0.205)
    assert Profile.model_validate_json(merged.model_dump_json()) == merged


# ----------------------------------------------------------------------------------- one worker


@dataclass
class Worker:
    """One of two workers: its bench, the group of both, and the clock."""

    rank: int
    others: list[object]
    size: int = 2
    device: None = None
    first_steps: int = 0
    seconds: float = 5.0
    steps: list[list[int]] = field(default_factory=list)
    told: list[object] = field(default_factory=list)
    compilation: Compilation = field(default_factory=lambda: Compilation(on=False))
    failure_of_other: str = ""

    def share_failure(self, group):
        self.compilation.failure = self.compilation.failure or self.failure_of_other
        return bool(self.compilation.failure)

    def now(self, device):
        return self.seconds

    def gather(self, value):
        self.told.append(value)
        return [value, self.others[len(self.told) - 1]]

    @property
    def batches(self):
        return self

    def feed(self, workers):
        return None

    def supply(self, size, resolution):
        return size

    def step(self, *sizes):
        self.steps.append(list(sizes))
        spent = true_seconds(sum(sizes))
        self.seconds += spent
        return spent, 0.0


def visited(worker, monkeypatch, *, large=256, seconds=1.0):
    clock = SimpleNamespace(perf_counter=lambda: worker.now(None))
    monkeypatch.setattr(pair_time, "time", clock)
    command = commands.VisitPair(
        workers=2,
        resolution=32,
        large_workers=1,
        large_batch=large,
        small_batch=40,
        micro_batch=128,
        seconds=seconds,
    )
    return pair_time.visit_pair(worker, worker, command)


def test_a_worker_takes_steps_of_both_batches_until_the_others_are_done_too(monkeypatch):
    small, large = true_seconds(40), true_seconds(256)
    worker = Worker(0, [small, (False, 0.05), large, (True, 0.3)])
    stretches = visited(worker, monkeypatch)
    steps = ["large" if step == [128, 128] else "small" for step in worker.steps]
    changed = steps.index("small")
    assert set(steps[:changed]) == {"large"}
    assert set(steps[changed:]) == {"small"}
    untimed = (1, 2)  # of steps that are long, and short
    assert len(steps[:changed]) - untimed[0] == -(-1.0 // large)
    assert len(steps[changed:]) - untimed[1] == -(-1.0 // small)
    ((large_0, small_0), (large_1, small_1)) = stretches
    assert (large_0, small_1) == pytest.approx((large, small))
    assert (small_0, large_1) == (0.05, 0.3)


def test_a_stretch_has_two_of_the_slowest_workers_steps_at_least(monkeypatch):
    worker = Worker(1, [4.0, (True, 3.9), 4.0, (False, 0.1)])
    visited(worker, monkeypatch, seconds=0.001)
    assert sum(map(sum, worker.steps[: worker.steps.index([128, 128])])) * 0.0006 > 2 * 4.0 * 0.6
    assert worker.seconds >= 5 + 2 * 2.5 * 4.0


def test_a_step_that_the_others_did_not_see_to_its_end_does_not_count(monkeypatch):
    worker = Worker(0, [0.1, (False, 0.1), 0.1, (True, 0.1)])
    lengths = iter([0.3, *[0.3] * 3, 9.0, *[0.05] * 50])

    def step(*sizes):
        worker.seconds += (spent := next(lengths))
        return spent, 0.0

    monkeypatch.setattr(worker, "step", step)
    ((large, _), _) = visited(worker, monkeypatch)
    assert large == pytest.approx(0.3)


def test_after_another_workers_compiler_failed_a_worker_warms_up_anew(monkeypatch):
    """Its first step was compiled, or waited for the compiler: its seconds say nothing."""
    worker = Worker(0, [0.2, (False, 0.1), 0.2, (True, 0.1)], failure_of_other="no such kernel")
    lengths = iter([5.0, *[0.2] * 50])

    def step(*sizes):
        worker.steps.append(list(sizes))
        worker.seconds += (spent := next(lengths))
        return spent, 0.0

    monkeypatch.setattr(worker, "step", step)
    ((large, _), (_, small)) = visited(worker, monkeypatch)
    assert (large, small) == pytest.approx((0.2, 0.2))
    assert worker.seconds < 5 + 5.0 + 2 * 2.0  # 2.5 steps of 5 s would be longer


@pytest.mark.parametrize("recomputing", ["off", "auto"])
@pytest.mark.parametrize("compiling", ["on", "off"])
def test_pairs_of_a_compiled_training_are_measured_compiled(
    tmp_path, monkeypatch, compiling, recomputing
):
    """Where nobody has chosen recomputation, blocks are not recomputed, and may be compiled."""
    machine = Machine()
    monkeypatch.setattr("batchwright.probing.pairs.measuring", lambda *_: nullcontext(machine))
    plain = {"cuda_graphs": "off", "precision": "float32"}
    job = make_job(compile=compiling, activation_checkpointing=recomputing, **plain)
    with pair_measurer(job, {2}, tmp_path) as measure:
        measure([PAIR])
    assert machine.compiled == (compiling == "on")


# ------------------------------------------------------------------------------- real processes


@pytest.mark.slow
def test_two_workers_are_measured_side_by_side_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "probe"
    folder.mkdir()
    job = Job(device="cpu", precision="float32", resolutions=(8,), probe=ProbeSettings(budget=0.2))
    seen = []
    with pair_measurer(job, {2}, folder, progress=lambda *one: seen.append(one)) as measure:
        first = measure([Pair(8, 1, 1, 64, 8)])
        # Its memory is weighed by both together, after each went its own way.
        second = measure([Pair(8, 1, 1, 96, 4, micro_batch=32)])
    assert [(time.large_batch, time.small_batch) for time in first + second] == [(64, 8), (96, 4)]
    for time in first + second:
        assert time.repeats == len(time.ratios) >= MIN_VISITS
        assert 0 < time.small_seconds < time.large_seconds
    assert seen[-1][0] == seen[-1][1]
