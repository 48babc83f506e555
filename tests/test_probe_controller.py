"""The course of a probe on an invented machine with a clock of its own."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from itertools import pairwise
from operator import sub
from unittest import mock

import pytest

from batchwright.errors import JobError, WorkerError
from batchwright.planning.candidates.learnt import NO_ACCURACY
from batchwright.planning.planner import make_plan
from batchwright.prediction.contradictions import contradictions
from batchwright.probing import commands, visiting
from batchwright.probing.bench import SMALLEST_BATCH
from batchwright.probing.commands import Point, ignored
from batchwright.probing.course import refinement as refinement_module
from batchwright.probing.course.controller import Controller
from batchwright.probing.course.refinement import Refinement
from batchwright.probing.visiting import MAX_RESTARTS, Visitor
from batchwright.probing.workers import Killed
from batchwright.records import (
    CollectiveTime,
    CompilationTimes,
    FirstAnswers,
    Goal,
    GradientNoise,
    GraphTimes,
    MemoryParts,
    PrecisionTime,
    ProbeSettings,
    RecomputationTimes,
    Trial,
    UpdateTime,
)
from batchwright.records.text.formatting import percent
from samples import make_data, make_job, make_network

MIB = 2**20
LONG_VISITS = ProbeSettings(budget=30, steps=100)  # fewer of them, and fewer plans between
TRIAL_FIELDS = {"optimizer", "global_batch_size", "resolution", "samples", "held_out"}


@dataclass
class Machine:
    """Answers commands as workers would, and moves the clock by what each of them takes.

    Attributes:
        latency: Seconds of a step without samples.
        sample_seconds: Seconds per sample at 32 px on one of any number of workers.
        drift: Relative standard deviation between visits.
        memory: Bytes a worker may use.
        held: Bytes of it that images take, and whatever else stays on a GPU.
        deadly: Bytes at which a worker is killed.
        loaders: Loader processes that feed each worker.
        trial_room: Most samples in a forward pass of a trial.
        slowed: Times as long as it should take that a trial takes.
        optimizers: Seconds of an update with each that the network has something for.
        data: What is not as usual of the data.
        saves: Whether blocks are recomputed where memory is short.
        compiling_pays: Whether the network is compiled where that is asked.
        planning: Seconds that a plan takes, as one of hundreds of workers does: fewer are made.
    """

    latency: float = 0.004
    sample_seconds: float = 0.0005
    drift: float = 0.0
    memory: int = 8192 * MIB
    held: int = 0
    deadly: float = float("inf")
    seconds: float = 100.0
    loaders: int | None = None
    trial_room: int = 10**6
    slowed: float = 1.0
    optimizers: dict[str, float] = field(default_factory=lambda: {"sgd": 1e-4, "muon": 5e-3})
    data: dict[str, object] = field(default_factory=dict)
    saves: bool = False
    compiling_pays: bool = False
    planning: float = 1.0
    recomputes: bool = False
    restarts: int = 0
    replays: bool = False
    asked: list[commands.Command] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def clock(self) -> float:
        return self.seconds

    def ask(self, command, answer, heard=None):
        self.asked.append(command)
        done = getattr(self, f"_{command.do}")(command)
        assert isinstance(done, answer)
        return done

    def restart(self):
        self.restarts += 1

    def points(self, kind):
        return [Point(c.workers, c.resolution, c.local_batch_size) for c in self.asked if
                isinstance(c, kind)]  # fmt: skip

    def step(self, command):
        share = (command.resolution / 32) ** 2
        work = self.latency + self.sample_seconds * command.local_batch_size * share
        return work * self.random.lognormvariate(0, self.drift)

    def peak(self, command):
        share = 0.25 if self.recomputes else 1.0
        each = share * MIB / 4 * (command.resolution / 32) ** 2
        whatever = self.held + (13 if self.replays else 10) * MIB
        return whatever + int(each * command.local_batch_size)

    def _compare(self, command):
        self.seconds += command.seconds
        time = PrecisionTime(
            precision="float32", resolution=32, local_batch_size=64, step_seconds=1.0
        )
        return commands.Compared(precision="float32", times=(time,), ratio=None)

    def _prepare(self, command):
        self.recomputes = command.recompute
        parts = MemoryParts(
            parameters=2 * MIB, buffers=0, gradients=2 * MIB, optimizer=2 * MIB, reduction=2 * MIB
        )
        return commands.Prepared(
            data=make_data(**({"train_samples": 50_000} | self.data)),
            network=make_network(),
            parts=parts,
            held_bytes=self.held,
            device_name="invented",
            threads=1,
            memory_bytes=self.memory,
            allocator="none",
            loaders=self.loaders,
        )

    def _recompute(self, command):
        self.seconds += command.seconds
        self.recomputes = self.saves
        times = RecomputationTimes(
            **command.model_dump(include={"resolution", "wanted_batch_size", "limit_bytes"}),
            plain_batch_size=8,
            recomputing_batch_size=32,
            chosen=self.saves,
        )
        return commands.Recomputed(times=times)

    def _compile(self, command):
        self.seconds += command.seconds
        self.replays = self.replays and not self.compiling_pays
        return CompilationTimes(
            resolution=command.resolution,
            local_batch_size=command.wanted_batch_size,
            training_seconds=1000.0,
            plain_seconds=0.012,
            asked=command.asked,
            chosen=self.compiling_pays,
        )

    def _replay(self, command):
        self.seconds += command.seconds
        self.replays = True
        return GraphTimes(
            resolution=command.resolution,
            local_batch_size=command.wanted_batch_size,
            plain_seconds=0.012,
            chosen=True,
        )

    def _guess(self, command):
        return commands.Guessed(peak_bytes=self.peak(command) - self.held)

    def _weigh(self, command):
        peak = self.peak(command)
        if peak >= self.deadly:
            raise Killed
        self.seconds += 2 * self.step(command)
        return commands.Weighed(peak_bytes=peak, resident_bytes=None)

    def _visit(self, command):
        step = self.step(command)
        timed = min(command.most_steps, max(2, int(command.seconds / step)))
        warm_up = 1 if step >= 0.1 else 2
        if self.loaders is not None:  # they load first, and steps use that up
            warm_up += self.loaders + 1 + max(self.loaders, warm_up)
            timed = max(timed // self.loaders, 1) * self.loaders if self.loaders else timed
        self.seconds += step * (timed + warm_up)
        return commands.Visited(steps=((step * 0.9, step * 0.1),) * timed)

    def _exchange(self, command):
        self.seconds += command.seconds
        return CollectiveTime(
            operation=command.operation,
            bytes=command.bytes,
            workers=command.workers,
            seconds=0.001,
            low=0.001,
            high=0.001,
            repeats=3,
        )

    def _noise(self, command):
        self.seconds += command.seconds
        noise = GradientNoise(noise_scale=100, trace=100, sqr_norm=1, parts=8, repeats=4)
        return commands.NoiseMeasured(noise=noise)

    def _evaluate(self, command):
        seconds = 0.3 * self.sample_seconds
        self.seconds += seconds * command.batch_size * (command.repeats + 1)
        return commands.Evaluated(seconds_per_image=seconds)

    def _trial(self, command):
        if command.micro_batch > self.trial_room:
            return commands.TrialRun(trial=None)
        steps = command.samples // command.global_batch_size
        updates = steps * (self.optimizers[command.optimizer] - self.optimizers["sgd"])
        passes = command.samples * self.sample_seconds / command.workers
        seconds = self.slowed * (passes + updates)
        if seconds > command.most_seconds:
            self.seconds += command.most_seconds
            return commands.TrialRun(given_up=True)
        self.seconds += seconds
        learnt = steps if command.optimizer == "sgd" else 4 * steps
        trial = Trial(
            **command.model_dump(include=TRIAL_FIELDS),
            rate=0.1 * command.rate_scale,
            usual_rate=0.1,
            steps=steps,
            accuracy=0.1 + 0.9 * learnt / (learnt + 2000),
            loss=1.0,
            seconds=seconds,
        )
        return commands.TrialRun(trial=trial)

    def _updates(self, command):
        self.seconds += 2 * command.seconds
        times = self.optimizers
        return commands.UpdatesTimed(
            times=tuple(
                UpdateTime(
                    optimizer=name,
                    workers=command.workers,
                    seconds=one,
                    low=one,
                    high=one,
                    repeats=9,
                )
                for name, one in times.items()
            )
        )


@dataclass
class SlowStretch(Machine):
    """Some visits to one batch take eight times as long.

    Attributes:
        slow_batch: Its samples.
        slow_visits: How many of its first visits are slow; of batch 2 the very first is a trial.
    """

    slow_batch: int = 4
    slow_visits: float = 1

    def step(self, command):
        slow = command.do == "visit" and command.local_batch_size == self.slow_batch
        if slow and self.slow_visits > 0:
            self.slow_visits -= 1
            return 8 * super().step(command)
        return super().step(command)


def measured_on(
    machine, counts=(1, 2), learning=0.0, keep=ignored, report_trial=ignored, **changes
):
    probe = changes.pop("probe", ProbeSettings(budget=30))
    job = make_job(
        **{
            "device": "cpu",
            "workers": "auto",
            "precision": "float32",
            "resolutions": (24, 32),
            "probe": probe.model_copy(update={"learning": learning}),
            **changes,
        }
    )
    usual = refinement_module.plan_to_measure

    def plan(profile):
        machine.seconds += machine.planning
        return usual(profile)

    with mock.patch.object(refinement_module, "plan_to_measure", plan):
        return controller_of(machine, job, counts, keep=keep, report_trial=report_trial).measure()


def controller_of(machine, job, counts, **told):
    visitor = Visitor(job, machine, max(counts), ignored)
    times = {"clock": machine.clock, "started": machine.clock()}
    return Controller(visitor, counts, report=ignored, **times, **told)


@pytest.mark.parametrize("drift", [0.02, pytest.param(0.1, marks=pytest.mark.slow), 0.3])
@pytest.mark.parametrize(
    "sample_seconds",
    [0.0005, *(pytest.param(n, marks=pytest.mark.slow) for n in (0.00005, 0.005))],
)
def test_the_budget_is_kept_and_used(drift, sample_seconds):
    profile = measured_on(Machine(drift=drift, sample_seconds=sample_seconds), probe=LONG_VISITS)
    assert profile.probe_seconds <= 30 * 1.1
    if drift > 0.05:  # where nothing is ever certain
        assert profile.probe_seconds >= 30 * 0.8


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 13))])
def test_no_batch_far_above_scattered_visits_is_taken_for_one_that_the_budget_affords(seed):
    """A line through a few of them may be nearly flat: 5,000 images seemed to take what 64 took."""
    machine = Machine(drift=0.3, sample_seconds=0.005, random=random.Random(seed))
    assert measured_on(machine, probe=LONG_VISITS).probe_seconds <= 30 * 1.1


@pytest.mark.parametrize(("epochs", "seconds"), [(1, 5), (100, 10), (400, 20)])
def test_a_probe_takes_a_tenth_of_the_training_within_limits(epochs, seconds):
    """50,000 images take 1.25 s on two workers, at best."""
    machine = Machine(drift=0.1, sample_seconds=0.00005, latency=0.0)
    settings = LONG_VISITS.model_copy(update={"budget": "auto"})
    profile = measured_on(machine, epochs=epochs, probe=settings)
    assert 0.8 * seconds <= profile.probe_seconds <= 1.2 * seconds


def test_a_long_training_has_the_batches_measured_that_a_longer_probe_reaches():
    largest = {
        budget: max(
            one.local_batch_size
            for one in measured_on(
                Machine(drift=0.05, sample_seconds=0.002),
                epochs=100,
                probe=ProbeSettings(budget=budget),
            ).steps
        )
        for budget in (5, 20, "auto")
    }
    assert largest["auto"] == largest[20], largest


@pytest.mark.parametrize("loaders", [0, 2, 8])
def test_the_budget_is_kept_where_loader_processes_feed_the_steps(loaders):
    profile = measured_on(Machine(drift=0.1, sample_seconds=0.002, loaders=loaders))
    assert profile.probe_seconds <= 30 * 1.1
    on_curve = [point for point in profile.steps if (point.workers, point.resolution) == (2, 32)]
    assert len(on_curve) >= 3


def test_a_steady_machine_needs_less_than_the_budget_for_the_same_certainty():
    profile = measured_on(Machine(drift=0.001), probe=ProbeSettings(budget=300))
    assert profile.probe_seconds < 150
    assert len([point for point in profile.steps if len(point.visits) > 1]) >= 3 * 4


def test_every_curve_is_measured_and_its_visits_are_apart():
    machine = Machine(drift=0.1)
    profile = measured_on(machine)
    for workers in (1, 2):
        for side in (24, 32):
            on_curve = [p for p in profile.steps if (p.workers, p.resolution) == (workers, side)]
            assert len(on_curve) >= 3
            sizes = [point.local_batch_size for point in on_curve]
            assert max(sizes) >= 8 * min(sizes)
    visits = machine.points(commands.Visit)
    assert all(a != b for a, b in pairwise(visits))
    # The first tries, and a look at more samples at 24 px, are no measurements.
    assert sum(len(point.visits) for point in profile.steps) == len(visits) - 4 - 2


def test_steps_of_mostly_fixed_time_soon_lead_to_far_larger_batches():
    """As on a busy machine, whose first visits take all the time for measuring."""
    machine = Machine(latency=0.06, sample_seconds=0.0002)
    with mock.patch.object(Refinement, "refine"):
        profile = measured_on(
            machine, counts=(1,), resolutions=(32,), probe=ProbeSettings(budget=10)
        )
    assert max(step.local_batch_size for step in profile.steps) >= 256


def test_a_fixed_time_of_each_step_makes_no_curve_begin_with_fewer_samples():
    """In proportion to a step of two samples, 16 would take 35 ms; they take 7.2."""
    machine = Machine(latency=0.004, sample_seconds=0.0002)
    profile = measured_on(machine, resolutions=(32,), probe=ProbeSettings(budget=5))
    for workers in (1, 2):
        sizes = [one.local_batch_size for one in profile.steps if one.workers == workers]
        assert min(sizes) == 16
    assert profile.probe_seconds <= 5 * 1.1


def test_a_look_at_the_batch_that_a_curve_begins_with_is_its_first_visit():
    """Where time is in proportion to the batch, the look says what the very first step said."""
    machine = Machine(latency=0.0, sample_seconds=0.0025)
    short = ProbeSettings(budget=5)
    profile = measured_on(machine, counts=(1,), resolutions=(32,), probe=short)
    visits = [point.local_batch_size for point in machine.points(commands.Visit)]
    assert visits[:2] == [2, 8]
    assert all(one != next_one for one, next_one in pairwise(visits))
    assert sum(len(point.visits) for point in profile.steps) == len(visits) - 1


def test_steps_that_take_seconds_are_measured_at_the_smallest_batches():
    machine = Machine(latency=0.5, sample_seconds=0.2)
    profile = measured_on(machine, counts=(1,), resolutions=(32,))
    assert [point.local_batch_size for point in profile.steps] == [2, 4, 8]
    # Their first visits alone: what a budget cannot do without.
    least = sum(5 * (0.5 + 0.2 * size) for size in (2, 2, 4, 8))
    assert profile.probe_seconds <= 30 + least


def test_what_memory_does_not_allow_is_not_tried():
    machine = Machine(memory=40 * MIB)
    profile = measured_on(machine, resolutions=(32,))
    assert max(machine.peak(command) for command in machine.asked if command.do == "weigh") <= (
        machine.memory
    )
    assert profile.out_of_memory == ()
    assert len(profile.steps) >= 6


@pytest.mark.parametrize("memory", [60, 200])
def test_images_that_stay_on_a_gpu_are_not_taken_for_what_grows_with_the_batch(memory):
    """With 1.4 GiB of them a card of 10 GiB was refused: "a step takes more memory than there is".

    The smallest batch is weighed first, and all that was not known to be fixed was its samples'.
    """
    keys = {"counts": (1,), "resolutions": (32,), "activation_checkpointing": "auto"}
    images = 50 * memory * MIB
    usual = measured_on(Machine(memory=memory * MIB), **keys)
    held = measured_on(Machine(memory=memory * MIB + images, held=images), **keys)
    assert [one.local_batch_size for one in held.steps] == [
        one.local_batch_size for one in usual.steps
    ]
    assert (held.recomputation is None) == (usual.recomputation is None)


@pytest.mark.parametrize(("memory", "saves"), [(8192, True), (40, True), (40, False)])
def test_whether_blocks_are_recomputed_is_asked_only_where_memory_is_short(memory, saves):
    machine = Machine(memory=memory * MIB, saves=saves)
    profile = measured_on(machine, resolutions=(32,), activation_checkpointing="auto")
    asked = [one for one in machine.asked if one.do == "recompute"]
    assert len(asked) == (memory == 40)
    chosen = bool(asked) and saves
    assert profile.job.activation_checkpointing == ("on" if chosen else "off")
    assert (profile.recomputation is not None) == bool(asked)
    for point in profile.memory:  # as it is trained, whatever was weighed before
        assert point.peak_bytes == machine.peak(point)


def test_memory_is_that_of_replayed_steps_where_they_are_chosen():
    machine = Machine(memory=40 * MIB)
    keys = {"device": "cuda", "activation_checkpointing": "auto"}
    profile = measured_on(machine, resolutions=(32,), **keys)
    assert (profile.job.cuda_graphs, machine.replays) == ("on", True)
    for point in profile.memory:
        assert point.peak_bytes == machine.peak(point)
    (asked,) = [one for one in machine.asked if one.do == "replay"]
    assert asked.wanted_batch_size == profile.recomputation.plain_batch_size


@pytest.mark.parametrize("pays", [True, False])
def test_compiling_is_compared_with_replayed_passes_and_takes_their_place(pays):
    machine = Machine(compiling_pays=pays)
    profile = measured_on(machine, resolutions=(32,), device="cuda", compile="auto")
    assert [one.do for one in machine.asked if one.do in ("replay", "compile")] == [
        "replay",
        "compile",
    ]
    chosen = ("on", "off") if pays else ("off", "on")
    assert (profile.job.compile, profile.job.cuda_graphs) == chosen
    assert (profile.graphs is None) == pays
    for point in profile.memory:
        assert point.peak_bytes == machine.peak(point)


@pytest.mark.parametrize("other", ["activation_checkpointing", "compile"])
def test_what_goes_without_replayed_passes_is_no_question_where_these_are_asked_for(other):
    machine = Machine(memory=40 * MIB)
    keys = {"device": "cuda", "cuda_graphs": "on", other: "auto"}
    profile = measured_on(machine, resolutions=(32,), **keys)
    assert not [one for one in machine.asked if one.do in ("recompute", "compile", "replay")]
    assert (profile.job.cuda_graphs, getattr(profile.job, other)) == ("on", "off")


def test_the_goals_own_limit_of_memory_holds():
    machine = Machine()
    measured_on(machine, resolutions=(32,), goal={"memory": 40 * MIB})
    weighed = [machine.peak(command) for command in machine.asked if command.do == "weigh"]
    assert max(weighed) <= 40 * MIB


@pytest.mark.parametrize(("counts", "fewer"), [((1,), ""), ((2,), "fewer workers, ")])
def test_a_first_step_that_cannot_fit_is_refused_before_it_is_tried(counts, fewer):
    for held in (0, 6):
        machine = Machine(memory=(9 + held) * MIB, held=held * MIB)
        told = (
            rf"local batch 2.*: a step takes about {10 + held}[.]\d+ MiB, .* {9 + held}[.]\d+ MiB"
        )
        with pytest.raises(JobError, match=rf"{told}: .* resolution, {fewer}or more goal.memory$"):
            measured_on(machine, counts, resolutions=(32,))
        assert not machine.points(commands.Weigh)


def test_what_kills_workers_is_noted_and_nothing_like_it_is_tried_again():
    machine = Machine(deadly=50 * MIB)
    profile = measured_on(machine)
    assert 1 <= machine.restarts <= MAX_RESTARTS
    assert len(profile.out_of_memory) == machine.restarts
    for lost in profile.out_of_memory:
        assert machine.peak(lost) >= machine.deadly
        assert lost.short_of == "memory"
        tried = [
            point
            for point in machine.points(commands.Weigh)
            if point[:2] == (lost.workers, lost.resolution)
            and point.local_batch_size >= lost.local_batch_size
        ]
        assert tried[-1].local_batch_size == lost.local_batch_size
    for workers in (1, 2):
        for side in (24, 32):
            curve = [p for p in profile.steps if (p.workers, p.resolution) == (workers, side)]
            assert len(curve) >= 3


def test_workers_that_are_killed_whatever_they_try_end_the_probe(monkeypatch):
    with pytest.raises((WorkerError, JobError), match="memory"):
        measured_on(Machine(deadly=0))
    monkeypatch.setattr(visiting, "MAX_RESTARTS", 0)
    for counts, fewer in (((1,), ""), ((2,), ", or choose fewer workers")):
        with pytest.raises(WorkerError, match=f"what a worker may use{fewer}$"):
            measured_on(Machine(deadly=0), counts)


def test_too_little_shared_memory_for_loader_processes_is_named(monkeypatch):
    machine = Machine(loaders=1)
    usual, fits = machine._visit, 0

    def short(command):
        if command.local_batch_size <= fits:
            return usual(command)
        raise Killed(shared=True)

    monkeypatch.setattr(machine, "_visit", short)
    remedy = r"shared memory .*--shm-size=1g\), or loaders=0$"
    with pytest.raises(JobError, match=rf"^\d+ px, local batch 2.*: .*{remedy}"):
        measured_on(machine)
    fits = SMALLEST_BATCH  # of which a step is tried, but not timed
    with pytest.raises(JobError, match=rf"^\d+ px, local batch \d+.*: .*{remedy}"):
        measured_on(machine)
    fits = 0
    monkeypatch.setattr(visiting, "MAX_RESTARTS", 0)
    with pytest.raises(WorkerError, match=rf"^workers were killed 1 times, last while .*{remedy}"):
        measured_on(machine)


def test_what_found_too_little_shared_memory_is_noted_and_nothing_larger_is_tried(monkeypatch):
    machine = Machine(loaders=1)
    usual = machine._visit

    def short(command):
        if command.local_batch_size > 32:
            raise Killed(shared=True)
        return usual(command)

    monkeypatch.setattr(machine, "_visit", short)
    profile = measured_on(machine)
    assert {one.short_of for one in profile.out_of_memory} == {"shared memory"}
    visited = machine.points(commands.Visit)
    for one in profile.out_of_memory:
        lost = Point(one.workers, one.resolution, one.local_batch_size)
        later = visited[visited.index(lost) + 1 :]
        assert not [point for point in later if min(map(sub, point, lost)) >= 0]


def test_formats_are_compared_where_the_job_leaves_them_open():
    profile = measured_on(Machine(), precision="auto")
    assert profile.job.precision == "float32"
    assert len(profile.precisions) == 1


@pytest.mark.parametrize(("others", "known"), [((), ("float32",)), (("Xeon",), ())])
def test_what_processors_of_several_models_compute_in_is_said_of_none(others, known, monkeypatch):
    """The first worker's formats were said to be those of all, also of one `probe.kind`."""
    machine = Machine()
    prepared = machine._prepare

    def mixed(command):
        more = {"other_devices": others, "formats": ("float32",)}
        return prepared(command).model_copy(update=more)

    monkeypatch.setattr(machine, "_prepare", mixed)
    profile = measured_on(machine, probe=ProbeSettings(kind="any"))
    assert (profile.cluster.kind, profile.cluster.formats) == ("any", known)


def test_one_worker_exchanges_nothing():
    assert measured_on(Machine(), counts=(1,)).collectives == ()


def test_exchanges_of_each_number_of_workers_are_measured():
    profile = measured_on(Machine(), counts=(1, 2, 4))
    seen = {(one.operation, one.workers) for one in profile.collectives}
    assert seen == {(kind, count) for kind in ("all-reduce", "push-pull") for count in (2, 4)}


def test_the_batch_that_is_asked_for_may_be_measured():
    machine = Machine(drift=0.05)
    measured_on(machine, counts=(2,), resolutions=(32,), global_batch=600)
    assert Point(2, 32, 300) in machine.points(commands.Visit)


def test_a_profile_of_an_invented_machine_can_be_planned():
    plan = make_plan(measured_on(Machine(drift=0.02)))
    assert plan.stages[0].resolution == 32


def measured_in_little_time(machine):
    return measured_on(
        machine, counts=(1,), resolutions=(32,), probe=ProbeSettings(budget=5), goal={}
    )


def test_the_machine_is_asked_once_for_its_cores_however_many_plans_a_probe_makes(monkeypatch):
    asked = []
    monkeypatch.setattr(visiting, "usable_cores", lambda: asked.append(1) or 4)
    assert measured_in_little_time(Machine()).cluster.cores == 4
    assert len(asked) == 1


@pytest.mark.parametrize(("batch", "visits"), [(8, 1), (16, 2), (2, 3)])
def test_stray_visits_are_outvoted_though_the_budget_is_spent(batch, visits, monkeypatch):
    def probed():
        return measured_in_little_time(
            SlowStretch(latency=0.02, slow_batch=batch, slow_visits=visits, planning=0.3)
        )

    with monkeypatch.context() as without:
        without.setattr(Refinement, "reconcile", lambda self: None)
        assert contradictions(probed().steps)
    profile = probed()
    assert not contradictions(profile.steps)
    assert profile.probe_seconds <= 5 * 1.6  # the last visit may begin within the half
    (point,) = (one for one in profile.steps if one.local_batch_size == batch)
    assert point.step_seconds == pytest.approx(0.02 + 0.0005 * batch)
    make_plan(profile)


def test_what_stays_contradictory_ends_the_probe_in_time_and_widens_the_plans_intervals():
    machine = SlowStretch(latency=0.02, slow_visits=float("inf"))
    profile = measured_in_little_time(machine)
    ((small, large),) = contradictions(profile.steps)
    assert (small.local_batch_size, large.local_batch_size) == (4, 8)
    assert profile.probe_seconds <= 5 * 1.6
    plan = make_plan(profile)
    (told,) = (one for one in plan.reasons if "was disturbed" in one.why)
    assert "ocal batch 8 " in told.why
    assert "but batch 4 " in told.why


def test_points_that_agree_are_not_visited_for_it(monkeypatch):
    machines = [Machine(drift=0.05), Machine(drift=0.05)]
    usual = measured_on(machines[0], probe=LONG_VISITS)
    monkeypatch.setattr(Refinement, "reconcile", lambda self: None)
    assert measured_on(machines[1], probe=LONG_VISITS).steps == usual.steps


def test_optimizers_are_timed_where_the_plan_is_to_choose_one():
    for asked, timed in (("auto", {"sgd", "muon"}), ("sgd", set()), ("muon", set())):
        profile = measured_on(Machine(), optimizer=asked, probe=LONG_VISITS)
        assert {one.optimizer for one in profile.updates} == timed
        counts = {point.workers for point in profile.steps} if timed else set()
        assert {one.workers for one in profile.updates} == counts


# ------------------------------------------------------------------- where the choice is still open


def taught(machine, **changes):
    """A profile with trials of SGD and Muon; others' seconds are the machine's own."""
    open_ = {"optimizer": "auto", "learning_rate": "auto", "resolutions": (32,), "epochs": 20}
    open_["probe"] = LONG_VISITS.model_copy(update={"budget": 6})  # trials come after it
    return measured_on(machine, **(open_ | changes))


@pytest.fixture(scope="module")
def known():
    """Such a profile of a usual machine, and what was kept before each of its trials."""
    kept = []
    machine = Machine(drift=0.02, sample_seconds=0.0005)
    return taught(machine, learning=0.1, keep=kept.append, probe=LONG_VISITS), kept


@pytest.mark.parametrize("learning", [0.02, 0.1, 20.0])
def test_trials_take_their_time_beyond_the_budget_and_no_more(learning, known):
    machine = Machine(drift=0.02, sample_seconds=0.0005)
    profile = known[0] if learning == 0.1 else taught(machine, learning=learning)
    blind = make_plan(profile.model_copy(update={"trials": ()}))
    planned = blind.chosen.train_seconds.value
    spent = sum(one.seconds for one in profile.trials)
    assert profile.trials
    assert spent <= (learning if learning >= 1 else learning * planned) * 1.05
    assert profile.probe_seconds - spent <= 30 * 1.1


@pytest.mark.parametrize("epochs", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_trials_to_a_target_take_a_share_of_the_epochs_that_it_is_likely_to_take(epochs):
    machine = Machine(drift=0.02, sample_seconds=0.002)
    profile = taught(machine, learning=0.1, goal={"accuracy": 0.6}, epochs=epochs)
    plan = make_plan(profile)
    assert profile.trials
    assert plan.likely_epochs() < epochs / 3
    # Each was begun by what those before it told.
    assert sum(one.seconds for one in profile.trials) <= 0.2 * plan.chosen.train_seconds.value


@pytest.mark.parametrize(
    ("sample_seconds", "longer"),
    [pytest.param(0.0002, False, marks=pytest.mark.slow), (0.005, True)],
)
def test_to_a_target_a_probe_takes_a_tenth_of_what_trials_tell(sample_seconds, longer):
    """All 1,000 epochs would take hours."""
    machine = Machine(drift=0.1, sample_seconds=sample_seconds, latency=0.0)
    settings = ProbeSettings(budget="auto", steps=100)
    asked = {"goal": {"accuracy": 0.5}, "epochs": 1000, "probe": settings}
    profile = taught(machine, learning=0.1, **asked)
    plan = make_plan(profile)
    wanted = settings.budget_for(plan.chosen.train_seconds.value)
    spent = sum(one.seconds for one in profile.trials)
    # By the fastest steps, which drift makes faster than they are.
    assert 0.5 * wanted <= profile.probe_seconds - spent <= 1.4 * wanted
    assert plan.likely_epochs() < 100
    kinds = [one.do for one in machine.asked]
    after = kinds[len(kinds) - kinds[::-1].index("trial") :]
    assert ("visit" in after) == longer == (wanted > 5)


@pytest.mark.slow
def test_without_trials_a_probe_to_a_target_takes_a_tenth_of_all_epochs():
    machine = Machine(drift=0.1, sample_seconds=0.0002, latency=0.0, trial_room=0)
    settings = ProbeSettings(budget="auto", steps=100)
    asked = {"goal": {"accuracy": 0.5}, "epochs": 1000, "probe": settings}
    profile = taught(machine, learning=0.1, **asked)
    assert "out of memory" in profile.trials_note
    assert 16 <= profile.probe_seconds <= 28


def test_trials_of_an_invented_task_decide(known):
    """There Muon makes of a step what SGD makes of four."""
    profile, _ = known
    assert {one.optimizer for one in profile.trials} == {"sgd", "muon"}
    plan = make_plan(profile)
    assert plan.update == "muon"
    assert plan.chosen is not None
    assert plan.chosen.accuracy is not None


@pytest.mark.parametrize(
    "changes", [{"learning": 0.0}, {"learning": 0.02, "epochs": 1}, {"method": "dual-batch"}]
)
def test_no_trials_without_time_or_for_another_method(changes):
    machine = Machine(drift=0.02, sample_seconds=0.00005)
    assert taught(machine, **({"learning": 0.1} | changes)).trials == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "dual-batch"}, "as method=dual-batch does"),
        ({"scaling": "gain"}, "with rates or gradients scaled by gradient noise"),
    ],
)
def test_trials_that_were_asked_for_and_cannot_be_are_told(changes, said):
    machine = Machine(drift=0.02, sample_seconds=0.0005)
    note = taught(machine, learning=5, **changes).trials_note
    assert note == f"there are no trials, as they do not train {said}"
    assert taught(machine, learning=0.1, **changes).trials_note == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"goal": {"max_cost": 1e-9, "price": 1}},
        {"ags": {"mode": "norm"}, "micro_batch": 16},
        {"scaling": "gain", "micro_batch": 16},
    ],
    ids=["no plan", "factors", "gain"],
)
def test_a_probe_ends_well_where_trials_would_tell_nothing(changes):
    assert taught(Machine(drift=0.02), learning=60, **changes).trials == ()


def commanded(machine):
    return [one for one in machine.asked if isinstance(one, commands.RunTrial)]


@pytest.mark.parametrize(
    "stated",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"sample_seconds": 1e-6, "step_seconds": 0.0},
        pytest.param({"sample_seconds": 0.01}, marks=pytest.mark.slow),
    ],
)
def test_trials_of_a_virtual_cluster_take_real_time_whatever_is_simulated(stated):
    machine = Machine(drift=0.02, sample_seconds=0.0005)
    virtual = {"launch": "virtual", "workers": 4, "virtual": stated}
    profile = taught(machine, counts=(1,), learning=0.1, **virtual)
    spent = sum(one.seconds for one in profile.trials)
    assert profile.trials
    assert {one.workers for one in commanded(machine)} == {1}
    assert all(one.micro_batch <= -(-one.global_batch_size // 4) for one in commanded(machine))
    steps = [one for one in profile.steps if one.resolution == 32]
    each = min(one.step_seconds / one.local_batch_size for one in steps)
    planned = 20 * 50_000 * each
    assert 0.02 * planned < spent < 0.3 * planned
    assert make_plan(profile).chosen.accuracy is not None


def test_trials_that_take_too_long_end_at_twice_their_time():
    machine = Machine(drift=0.02, sample_seconds=0.0005, slowed=4.0)
    begun = [taught(Machine(drift=0.02, sample_seconds=0.0005), learning=0.0), machine.seconds]
    profile = taught(machine, learning=60)
    assert profile.probe_seconds - begun[0].probe_seconds < 2 * 60 + 5
    assert profile.trials
    machine.slowed = 50.0
    profile = taught(machine, learning=60)
    assert profile.trials == ()
    assert profile.probe_seconds - begun[0].probe_seconds < 2 * 60 + 5
    assert "given up after 2 min " in profile.trials_note
    told = next(one for one in make_plan(profile).reasons if one.choice == "accuracy")
    assert "The trials were given up" in told.why


def test_a_trial_has_the_time_that_its_optimizer_takes():
    """One of Muon was given that of SGD, given up, and the machine blamed for it."""
    slow = {"sgd": 1e-4, "muon": 0.5}
    profile = taught(Machine(sample_seconds=0.0005, optimizers=slow), learning=0.1)
    assert profile.trials
    assert profile.trials_note == ""
    blind = make_plan(profile.model_copy(update={"trials": ()}))
    assert sum(one.seconds for one in profile.trials) <= 0.105 * blind.chosen.train_seconds.value


def test_what_is_known_is_kept_before_each_trial(known):
    profile, kept = known
    assert not profile.trials_open
    assert [len(one.trials) for one in kept] == list(range(len(profile.trials)))
    assert all(one.trials_open for one in kept)
    same = {"trials", "trials_open", "probe_seconds"}
    assert all(one.model_dump(exclude=same) == profile.model_dump(exclude=same) for one in kept)
    seconds = [one.probe_seconds for one in (*kept, profile)]
    assert seconds == sorted(seconds)
    told = next(one for one in make_plan(kept[1]).reasons if one.choice == "accuracy")
    assert "was stopped during its trials" in told.why


def test_trials_go_on_from_those_that_were_kept(known):
    whole, kept = known
    later = Machine(sample_seconds=0.0005, seconds=9000.0)
    controller = controller_of(later, whole.job, (1, 2))
    controller._visitor.prepare(seconds=0)
    profile = controller.learn(kept[2])
    assert profile.trials == whole.trials
    assert [one.do for one in later.asked] == ["prepare"] + ["trial"] * (len(whole.trials) - 2)
    assert not profile.trials_open
    assert profile.probe_seconds == pytest.approx(whole.probe_seconds, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "data", "said"),
    [
        (
            {"learning": 0.001},
            {},
            r"as 0.1 % \(probe.learning=0.001\) of the \d+ epochs? that the probe was for is "
            r"[\d.]+ s, too little for one: probe.learning=\d+s gives it time$",
        ),
        (
            {"learning": 1.0},
            {},
            r"as probe.learning=1s is too little for one: probe.learning=\d+s gives it time$",
        ),
        (
            {"learning": 60, "goal": {"least_steps": 1}},
            {"train_samples": 9},
            "9 training images are too few to hold any out",
        ),
        ({"learning": 60}, {"classes": ("a",)}, "they go by accuracy, which takes two classes"),
        ({"learning": 60, "epochs": 1}, {"train_samples": 400}, "the whole training, 400 images"),
    ],
)
def test_why_there_is_no_trial_is_said_once_in_the_plan_and_with_what_to_give(changes, data, said):
    machine = Machine(drift=0.02, sample_seconds=0.002, data=data)
    profile = taught(machine, **changes)
    assert not commanded(machine)
    assert re.search(f"^there are no trials, {said}|{said}", profile.trials_note)
    plan = make_plan(profile)
    told = next(one for one in plan.reasons if one.choice == "accuracy")
    assert told.source == "assumed"
    assert profile.trials_note[1:] in told.why
    unjudged = "classes" in data  # small batches of few images have steps enough to be told of
    assert (told.value == "not known") == unjudged
    assert ("goal.objective=auto goes by time" in told.why) == unjudged
    assert ("as other tasks' trainings lead to expect" in told.why) != unjudged
    if enough := re.search(r"probe.learning=(\d+)s gives it time", profile.trials_note):
        assert taught(machine, **(changes | {"learning": int(enough[1])})).trials


def test_answers_without_accuracy_are_told_before_time_that_would_not_help():
    """With the default of `probe.learning` a note asked for more time, which led to this one."""
    first = FirstAnswers(images=0, right=0, by_chance=0.0)

    class Judged(Machine):
        def _evaluate(self, command):
            return super()._evaluate(command).model_copy(update={"first_answers": first})

    for learning in (0.001, 60):
        machine = Judged(drift=0.02, sample_seconds=0.0005)
        assert taught(machine, learning=learning).trials_note == NO_ACCURACY
        assert not commanded(machine)


def test_a_target_that_guessing_reaches_needs_no_trials_and_a_note_says_so():
    machine = Machine(drift=0.02, sample_seconds=0.0005)
    profile = taught(machine, learning=0.1, goal={"accuracy": 0.1})
    assert profile.trials_note == "there are no trials, as guessing reaches goal.accuracy=0.1"
    assert not commanded(machine)


def test_a_probe_without_a_plan_says_why_it_made_no_trials():
    machine = Machine(drift=0.02, sample_seconds=0.0005, data={"train_samples": 9})
    profile = taught(machine, learning=60)
    said = r"^there are no trials, as there is no plan: .* give goal.least_steps=\d or less"
    assert re.search(said, profile.trials_note)
    goal = profile.job.goal.model_copy(update={"least_steps": 1})
    plan = make_plan(profile, profile.job.model_copy(update={"goal": goal}))
    told = next(one for one in plan.reasons if one.choice == "accuracy")
    assert profile.trials_note[1:] in told.why
    assert taught(machine, learning=0).trials_note == ""


def test_trials_that_lose_their_workers_say_so(monkeypatch):
    machine, reports = Machine(drift=0.02, sample_seconds=0.0005), []
    usual, killed = machine._trial, []

    def once(command):
        if not killed:
            killed.append(command)
            raise Killed
        return usual(command)

    monkeypatch.setattr(machine, "_trial", once)
    profile = taught(machine, learning=0.1, report_trial=lambda *told: reports.append(told))
    assert profile.trials
    assert profile.trials_note == ""
    assert max(one.global_batch_size for one in profile.trials) < killed[0].global_batch_size
    assert any("a worker was killed (out of memory?)" in name for name, *_ in reports)


def test_how_far_trials_have_come_is_told(monkeypatch):
    machine, reports = Machine(drift=0.02, sample_seconds=0.0005), []
    usual = machine.ask

    def ask(command, answer, heard=None):
        if command.do == "trial":
            machine.seconds += 1
            heard(0.25)
        return usual(command, answer)

    monkeypatch.setattr(machine, "ask", ask)
    profile = taught(machine, learning=20.0, report_trial=lambda *told: reports.append(told))
    assert profile.trials
    assert [share for _, share, _ in reports] == [0.0, 0.25, 1.0] * len(profile.trials)
    assert reports[0][0].startswith("trial 1: ")
    assert reports[2][0].endswith(f", {percent(profile.trials[0].accuracy)} right")
    assert reports[3][0].startswith("trial 2: ")
    assert reports[0][2] == 20
    assert reports[1][2] == 19
    assert all(left >= -1 for *_, left in reports)  # each takes a second longer than it should


def test_no_trial_of_an_optimizer_that_the_network_has_nothing_for(monkeypatch):
    machine = Machine(drift=0.02)
    monkeypatch.setattr(machine, "optimizers", {"sgd": 1e-4})
    trials = taught(machine, learning=0.1).trials
    assert {one.optimizer for one in trials} == {"sgd"}


def test_trials_end_before_workers_were_killed_too_often(monkeypatch):
    machine = Machine(drift=0.02)

    def deadly(command):
        raise Killed

    monkeypatch.setattr(machine, "_trial", deadly)
    monkeypatch.setattr(visiting, "MAX_RESTARTS", 1)
    assert taught(machine, learning=0.1).trials == ()
    assert machine.restarts == 1


def test_what_is_too_large_for_a_trial_leaves_the_smaller():
    machine = Machine(drift=0.02, sample_seconds=0.0005, trial_room=64)
    profile = taught(machine, learning=0.1)
    asked = [one for one in machine.asked if isinstance(one, commands.RunTrial)]
    assert len(profile.trials) < len(asked)
    assert profile.trials
    alone = taught(Machine(drift=0.02, trial_room=0), counts=(1,), learning=0.1)
    assert alone.trials_note.endswith(": out of memory; choose a smaller network")


def stages_of(profile):
    plan = make_plan(profile)
    return plan, {
        (plan.workers, one.resolution, min(max(one.local_batch_sizes), one.micro_batch_size))
        for one in plan.stages
    }


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
@pytest.mark.parametrize(
    ("latency", "sample_seconds", "sides", "budget"),
    [
        (0.03, 0.005, (16, 32), 20),
        pytest.param(0.06, 0.004, (24, 32), 30, marks=pytest.mark.slow),
        pytest.param(0.03, 0.0005, (16, 32), 20, marks=pytest.mark.slow),
    ],
)
def test_a_plan_of_two_resolutions_rests_on_steps_that_were_measured(
    latency, sample_seconds, sides, budget, seed
):
    machine = Machine(latency=latency, sample_seconds=sample_seconds, drift=0.05, planning=0)
    machine.random.seed(seed)
    profile = measured_on(
        machine, method="cyclic", resolutions=sides, probe=ProbeSettings(budget=budget)
    )
    plan, used = stages_of(profile)
    largest = {}
    for one in profile.steps:
        key = one.workers, one.resolution
        largest[key] = max(one.local_batch_size, largest.get(key, 0))
    beyond = max(batch / largest[workers, side] for workers, side, batch in used)
    assert beyond <= 2
    assert (beyond == 2) == any(one.choice == "extrapolation" for one in plan.reasons)
    assert profile.probe_seconds <= budget * 1.1


@pytest.mark.slow
def test_most_visits_go_to_the_curves_that_the_choice_is_between():
    machine = Machine(drift=0.1, latency=0.01, sample_seconds=0.002, planning=0)
    profile = measured_on(machine, method="cyclic", probe=ProbeSettings(budget=40))
    plan, _ = stages_of(profile)
    visits = {1: 0, 2: 0}
    for one in profile.steps:
        visits[one.workers] += len(one.visits)
    assert visits[plan.workers] > 1.2 * visits[3 - plan.workers]


@dataclass
class EvenMachine(Machine):
    """Two workers take as long for each step as one would for both, but for a little."""

    def step(self, command):
        return super().step(command) * (1.9 if command.workers > 1 else 1)


@pytest.mark.slow
def test_level_candidates_are_measured_on_while_there_is_time():
    """Alone, what is certain enough ends a probe; between two that are level it goes on."""
    steady = {"drift": 0.01, "latency": 0.0005, "sample_seconds": 0.002, "planning": 0}
    keys = {"probe": ProbeSettings(budget=80), "goal": Goal(objective="knee")}
    clear, even = (measured_on(one(**steady), **keys) for one in (Machine, EvenMachine))
    assert any(one.level for one in make_plan(even).considered)
    assert even.probe_seconds > clear.probe_seconds


def test_where_planning_takes_long_it_is_not_asked_between_all_visits(monkeypatch):
    """Of thousands of workers, a plan takes longer than a visit."""
    machine, asked = Machine(drift=0.1, planning=0), []

    def slow_plan(profile):
        machine.seconds += 1.0
        asked.append(machine.seconds)
        return make_plan(profile)

    monkeypatch.setattr(refinement_module, "plan_to_measure", slow_plan)
    measured_on(machine, probe=ProbeSettings(budget=60))
    assert 1 <= len(asked) <= 60 / 10
