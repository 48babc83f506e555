"""What else the machine does: read from a kernel whose files the test writes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from math import sqrt

import pytest

from batchwright.errors import PlanError
from batchwright.planning.measurements import machine
from batchwright.planning.merging import merge_profiles
from batchwright.planning.planner import make_plan
from batchwright.prediction.drift import least_share
from batchwright.prediction.step_time import fit_step_time
from batchwright.probing.commands import Point
from batchwright.probing.course.controller import Controller
from batchwright.probing.visiting import Visitor
from batchwright.records import Goal, MachineLoad, ProbeSettings, StepLoading
from batchwright.records.text.load_text import BUSY_SHARE, busy_warning, load_words
from batchwright.reporting.pages.page import profile_facts
from batchwright.workload import load as load_module
from batchwright.workload.load import LoadWatch, Reading, load_between, read_load
from samples import make_cluster, make_job, make_profile, make_step
from test_probe_controller import Machine

ME, WORKER, LOADER, OTHER, KERNEL, DISPLAY = 10, 11, 12, 20, 2, 13
PARENTS = {1: 0, KERNEL: 0, ME: 1, WORKER: ME, LOADER: WORKER, DISPLAY: ME, OTHER: 1}
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
GROUP = "usage_usec {used}\nnr_periods 4\nnr_throttled 2\nthrottled_usec {throttled}\n"
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")


@dataclass
class Kernel:
    """A machine of four cores, of which this process may use two.

    Attributes:
        used: Seconds of each process so far; the name of a process may hold anything.
        reaped: Seconds of ended children that a process waited for.
    """

    folder: object
    used: dict[int, float] = field(default_factory=lambda: dict.fromkeys(PARENTS, 0.0))
    reaped: dict[int, float] = field(default_factory=dict)
    cores: list[list[float]] = field(default_factory=lambda: [[0.0] * 8 for _ in range(4)])

    def write(self):
        lines = ["cpu 0 0 0 0 0 0 0 0 0 0"]
        for number, times in enumerate(self.cores):
            lines.append(f"cpu{number} " + " ".join(str(round(TICKS * t)) for t in times) + " 0 0")
        (self.folder / "stat").write_text("\n".join([*lines, "intr 0"]))
        for process, seconds in self.used.items():
            flags = 0x00200000 if process == KERNEL else 0
            times = f"{round(TICKS * seconds)} 0 {round(TICKS * self.reaped.get(process, 0))} 0"
            place = self.folder / str(process)
            place.mkdir(exist_ok=True)
            (place / "stat").write_text(
                f"{process} (a) b (c) S {PARENTS[process]} 0 0 0 0 {flags} 0 0 0 0 {times} 20 0"
            )


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(load_module.os, "getpid", lambda: ME)
    monkeypatch.setattr(load_module.os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(load_module, "control_groups", lambda _: iter([tmp_path / "group"]))
    monkeypatch.setattr(load_module, "usable_cores", lambda: 2)
    return Kernel(tmp_path)


@linux
def test_what_others_use_is_all_less_ours_and_the_kernels_threads(kernel, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(load_module.time, "monotonic", lambda: now[0])
    kernel.write()
    watch = LoadWatch(lambda: read_load(kernel.folder), lambda: now[0])
    assert watch.stretch() is None  # too short to tell
    # Ten seconds: ours used 9 of two cores, an ended child of a worker among them, others 4.
    kernel.used |= {ME: 1.0, WORKER: 5.0, LOADER: 1.0, DISPLAY: 0.5, OTHER: 3.0, KERNEL: 2.0}
    kernel.reaped[WORKER] = 1.5
    for core, times in ((0, (3, 4, 3)), (2, (2, 2, 1)), (1, (10, 0, 0)), (3, (0, 0, 10))):
        kernel.cores[core][:3] = times
    kernel.cores[0][7], kernel.cores[2][3], kernel.cores[2][4] = 0.5, 3.0, 1.0
    kernel.cores[2][6] = 1.0  # interrupts are nobody's program
    group = kernel.folder / "group"
    group.mkdir()
    (group / "cpu.stat").write_text(GROUP.format(used=12_000_000, throttled=2_500_000))
    kernel.write()
    now[0] += 10
    load = watch.stretch()
    assert load is not None
    assert (load.cores, load.seconds) == (2, 10)
    assert load.ours == pytest.approx(0.9)
    assert load.others == pytest.approx(0.4)  # 15 in programs, less 9 and the kernel's 2
    assert load.stolen == pytest.approx(0.05)
    assert load.idle == pytest.approx(0.4)
    assert load.throttled == pytest.approx(0.25)
    assert watch.whole() == load
    assert watch.stretch() is None


def between(kernel, monkeypatch, *, used, throttled, version):
    """The load of ten seconds in which ours ran for 9 of them, and its group for ``used``."""
    now = [100.0]
    monkeypatch.setattr(load_module.time, "monotonic", lambda: now[0])
    kernel.write()
    before = read_load(kernel.folder)
    kernel.used |= {WORKER: 9.0}
    for core in (0, 2):
        kernel.cores[core][:4] = 4.5, 0.0, 0.0, 5.5
    group = kernel.folder / "group"
    group.mkdir()
    if version == 2:
        told = GROUP.format(used=round(1e6 * used), throttled=round(1e6 * throttled))
    else:
        told = f"nr_periods 4\nnr_throttled 2\nthrottled_time {round(1e9 * throttled)}\n"
        (group / "cpuacct.usage").write_text(f"{round(1e9 * used)}\n")
    (group / "cpu.stat").write_text(told)
    kernel.write()
    now[0] += 10
    return load_between(before, read_load(kernel.folder))


@linux
@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_that_only_our_own_work_reaches_disturbs_nothing(version, kernel, monkeypatch):
    load = between(kernel, monkeypatch, used=9.0, throttled=7.0, version=version)
    assert load.throttled == pytest.approx(0.0, abs=1e-9)
    assert load_words(load) == ""


@linux
@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_keeps_back_no_more_than_others_in_the_group_use(version, kernel, monkeypatch):
    load = between(kernel, monkeypatch, used=12.0, throttled=7.0, version=version)
    assert load.throttled == pytest.approx(0.3)
    assert load.idle > 1  # cores that the limit leaves idle are no room for us
    assert load_words(load) == "a control group's limit kept back 0.30 of 2 cores"


@linux
def test_cores_are_those_that_a_control_group_allows(kernel, monkeypatch):
    monkeypatch.setattr(load_module, "usable_cores", lambda: 1)
    kernel.write()
    assert read_load(kernel.folder).cores == 1


def test_others_on_a_larger_machine_than_we_may_use_are_told_where_no_core_is_left():
    beside = {"cores": 2, "ours": 2.0, "others": 30.0}
    assert load_words(make_load(**beside, idle=32.0)) == ""
    told = load_words(make_load(**beside, idle=0.5))
    assert "other programs used 30.00 cores, where we may use 2" in told


@linux
def test_a_child_that_ends_takes_nothing_from_what_ours_used(kernel):
    kernel.used |= {WORKER: 5.0, LOADER: 1.0}
    kernel.write()
    before = read_load(kernel.folder)
    del kernel.used[LOADER]
    for left in (kernel.folder / str(LOADER)).iterdir():
        left.unlink()
    kernel.reaped[WORKER] = 1.0
    kernel.write()
    after = read_load(kernel.folder)
    assert before.ours == after.ours == pytest.approx(6.0)


@linux
def test_our_own_processes_and_their_children_are_ours():
    """Of the real kernel: what a child that ended used is there, whoever else is at work."""
    before = read_load()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True, timeout=500)
    after = read_load()
    assert before is not None
    assert after.ours > before.ours
    assert after.busy >= before.busy


def test_a_kernel_that_shows_nothing_tells_nothing(tmp_path):
    assert read_load(tmp_path) is None
    watch = LoadWatch(lambda: None)
    assert watch.stretch() is None
    assert watch.whole() is None
    (tmp_path / "stat").write_text("cpu 1 2 3 4\ncpu0 1 2 3 4\n")
    assert read_load(tmp_path) is None


# ------------------------------------------------------------------------------------ what is said


def make_load(**changes):
    quiet = {"cores": 2, "seconds": 20, "ours": 1.7, "others": 0.02, "stolen": 0.0, "idle": 0.28}
    return MachineLoad(**(quiet | {"throttled": 0.0, "scatter": 0.04} | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"others": 0.9 * 2 * BUSY_SHARE},  # daemons, the display, what counting misses
        {"scatter": 0.2},  # short steps scatter
        {"scatter": None},
        {"cores": 64, "ours": 2.0, "others": 10.0, "idle": 52.0},  # room for all
    ],
)
def test_a_quiet_machine_is_not_called_busy(changes):
    assert load_words(make_load(**changes)) == busy_warning(make_load(**changes)) == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"others": 0.7, "idle": 0.0}, "other programs used 0.70 of 2 cores"),
        ({"others": 0.2}, "other programs used 0.20 of 2 cores"),
        ({"stolen": 0.3}, "the host of this virtual machine took 0.30 of 2 cores"),
        ({"throttled": 0.4}, "a control group's limit kept back 0.40 of 2 cores"),
        ({"scatter": 0.6}, "the same step scattered by 60.0 %"),
        ({"cores": 64, "ours": 40.0, "others": 20.0, "idle": 4.0}, "used 20.00 of 64 cores"),
    ],
)
def test_what_disturbs_is_named_in_one_line(changes, told):
    warning = busy_warning(make_load(**changes))
    assert told in warning
    assert "\n" not in warning


def test_plan_page_and_merged_profiles_tell_of_a_busy_machine():
    quiet = make_profile(load=make_load())
    busy = make_profile(load=make_load(others=0.9, idle=0.1))
    assert all(one.choice != "machine" for one in make_plan(quiet).reasons)
    told = make_plan(busy).reasons[0]
    assert (told.choice, told.source) == ("machine", "measured")
    assert "other programs used 0.90 of 2 cores" in told.why
    assert "other programs used" in profile_facts(busy)
    assert "other programs" not in profile_facts(quiet)
    (merged,) = merge_profiles([quiet, busy])
    assert merged.load.others == pytest.approx(0.46)
    assert merged.load.seconds == 40
    assert make_plan([quiet, make_profile()]).reasons[0].choice != "machine"


@pytest.mark.parametrize(
    ("workers", "load", "cluster", "helps"),
    [
        (1, {"others": 0.9}, {}, True),  # both cores are the one worker's
        (2, {"others": 0.9}, {}, False),
        (1, {"others": 0.9}, {"threads": 1, "workers": 1}, False),  # one thread was asked for
        (1, {"scatter": 0.9}, {}, False),  # from whatever cause
        (1, {"others": 0.9}, {"device": "cuda"}, False),
    ],
)
def test_one_thread_is_advised_where_several_wait_beside_others(workers, load, cluster, helps):
    profile = make_profile(load=make_load(**load, idle=0.1), cluster=make_cluster(**cluster))
    (told,) = machine([profile], workers)
    assert ("probe again while it is quiet, or with BATCHWRIGHT_THREADS=1" in told.why) is helps


# ------------------------------------------------------------------------ intervals beside others


def interval_of(plan):
    return plan.stages[0].predicted_epoch_seconds


def test_a_quiet_machine_plans_as_if_its_load_were_not_known():
    plan = make_plan(make_profile())
    for load in (make_load(), make_load(least_share=0.4)):  # a moment beside a short program
        assert make_plan(make_profile(load=load)).model_dump_json() == plan.model_dump_json()


def test_intervals_reach_what_a_worker_takes_with_the_least_share_of_its_cores_and_with_all():
    quiet = make_plan(make_profile())
    for least, load in (
        (0.5, make_load(others=0.9, idle=0.1, least_share=0.5)),
        (0.85, make_load(others=0.9, idle=0.1)),  # of older profiles the mean: 1.7 of 2 cores
        (0.1, make_load(others=0.9, idle=0.1, least_share=0.0)),
    ):
        profile = make_profile(load=load)
        assert least_share(profile) == pytest.approx(least)
        plan = make_plan(profile)
        narrow, wide = interval_of(quiet), interval_of(plan)
        assert wide.value == narrow.value
        assert wide.high >= max(narrow.high, wide.value / least)
        assert wide.low <= min(narrow.low, wide.value * least)
        assert plan.stages[0].local_batch_sizes == quiet.stages[0].local_batch_sizes
        assert f"any share of the cores from {100 * least:.0f} % to all" in plan.reasons[0].why
        assert "more than the intervals say" not in plan.reasons[0].why


def test_the_reason_names_waits_and_a_deadline_asks_for_a_quiet_machine():
    waited = [
        one.model_copy(update={"beside_seconds": one.step_seconds + 0.3})
        for one in make_profile().steps
    ]
    load = make_load(others=0.9, idle=0.1, least_share=0.5)
    assert "the longest wait" not in make_plan(make_profile(load=load)).reasons[0].why
    profile = make_profile(load=load, steps=tuple(waited))
    plan = make_plan(profile)
    assert "and for the longest wait of a step beside others" in plan.reasons[0].why
    seconds = plan.stages[0].predicted_epoch_seconds.value * plan.epochs
    job = profile.job.model_copy(update={"goal": Goal(deadline=2 * seconds)})
    with pytest.raises(PlanError, match="or probe again while the machine is quiet") as refused:
        make_plan(profile, job)
    assert "probe.budget" not in str(refused.value)  # more visits beside others narrow nothing


def test_a_scatter_that_others_explain_already_does_not_count_twice():
    points = [make_step(1, batch) for batch in (16, 32, 64)]
    scattered = [
        one.model_copy(update={"visits": tuple(k * one.step_seconds for k in (0.5, 1, 1, 2))})
        for one in points
    ]
    with_load, without = (
        fit_step_time(scattered, least_share=share).predict(1, 32, 32) for share in (0.8, 1.0)
    )
    assert with_load == without
    assert fit_step_time(points, least_share=0.8).predict(1, 32, 32).high > without.value / 0.8


@pytest.mark.parametrize(
    ("load", "cluster"), [({"others": 0.9}, {"device": "cuda"}), ({"scatter": 0.9}, {})]
)
def test_what_no_share_of_cores_tells_may_be_off_by_more_than_the_intervals_say(load, cluster):
    profile = make_profile(load=make_load(**load, idle=0.1), cluster=make_cluster(**cluster))
    assert least_share(profile) == 1
    (told,) = machine([profile], 1)
    assert "more than the intervals say" in told.why


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"others": 0.0}, 1.0),
        ({"ours": 0.6, "others": 0.7}, 0.6 / 1.3),  # ours wait for each other, a core is idle
        ({"ours": 1.0, "others": 0.8, "stolen": 0.2}, 0.5),
        ({"ours": 1.9, "others": 40.0}, 0.95),  # the machine has more cores than we may use
        ({"ours": 0.0, "others": 0.0}, 1.0),
    ],
)
def test_the_share_is_that_of_the_cores_in_use_of_those_that_we_may_use(changes, share):
    assert make_load(**changes).share == pytest.approx(share)


def test_merged_profiles_have_the_least_share_of_all():
    loads = [make_load(others=0.9, idle=0.1, least_share=least) for least in (0.7, 0.5, None)]
    (merged,) = merge_profiles([make_profile(load=load) for load in loads])
    assert merged.load.least_share == 0.5


# ----------------------------------------------------------------------------------- what is done


@dataclass
class SharedMachine(Machine):
    """Steps take twice as long while others are at work: from one moment to another."""

    others_from: float = 0.0
    others_until: float = 0.0

    def step(self, command):
        return super().step(command) * (2 if self.others() else 1)

    def others(self):
        return self.others_from <= self.seconds - 100 < self.others_until

    def read(self):
        at = self.seconds - 100
        others = min(max(at - self.others_from, 0.0), self.others_until - self.others_from)
        return Reading(at, 2, 1.2 * at + others, 0.8 * at - others, 0.0, 1.2 * at, 0.0)


def measured_on(machine, budget=20.0, **keys):
    job = make_job(
        workers="auto",
        precision="float32",
        resolutions=(32,),
        probe=ProbeSettings(budget=budget, learning=0),
        **keys,
    )
    watch = LoadWatch(machine.read, lambda: machine.seconds - 100)
    visitor = Visitor(job, machine, 1, lambda what: None, watch)

    def sleep(seconds):
        machine.seconds += seconds

    controller = Controller(
        visitor,
        (1,),
        report=lambda what: None,
        clock=machine.clock,
        sleep=sleep,
        started=machine.clock(),
    )
    return controller.measure()


def test_points_measured_beside_others_are_measured_again_and_only_that_counts():
    machine = SharedMachine(drift=0.02, others_from=1.0, others_until=8.0)
    profile = measured_on(machine)
    for one in profile.steps:
        alone = 0.004 + 0.0005 * one.local_batch_size
        assert one.step_seconds == pytest.approx(alone, rel=0.15)
    assert "other programs used" in load_words(profile.load)
    assert profile.load.least_share == pytest.approx(1.2 / 2)  # of a second beside them


def test_work_that_goes_on_is_measured_and_told_within_the_budget():
    machine = SharedMachine(drift=0.02, others_from=0.0, others_until=1e6)
    profile = measured_on(machine)
    assert profile.probe_seconds <= 20 * 1.1
    for one in profile.steps:
        beside = 2 * (0.004 + 0.0005 * one.local_batch_size)
        assert one.step_seconds == pytest.approx(beside, rel=0.15)
    told = [one for one in profile.steps if one.disturbed]  # not what is visited within a second
    assert len(told) > len(profile.steps) / 2
    assert "other programs used" in load_words(profile.load)


def test_alone_nothing_is_told_and_nobody_waits():
    profile = measured_on(SharedMachine(drift=0.02))
    assert load_words(profile.load) == ""
    assert profile.load.least_share is None
    plain = measured_on(SharedMachine(drift=0.02))
    assert plain.steps == profile.steps


def test_a_probe_waits_a_little_for_what_is_about_to_end():
    machine = SharedMachine(others_from=-5.0, others_until=2.5)
    visited = []
    original = machine._visit

    def visit(command):
        visited.append(machine.others())
        return original(command)

    machine._visit = visit
    prepared = machine._prepare

    def prepare(command):
        machine.seconds += 1.5
        return prepared(command)

    machine._prepare = prepare
    measured_on(machine)
    assert not any(visited)


def test_idle_cores_do_not_hide_others_while_nobody_measures():
    half = Reading(0.0, 2, 0.0, 0.0, 0.0, 0.0, 0.0)
    readings = [half, Reading(2.0, 2, 1.9, 2.1, 0.0, 0.0, 0.0)] * 2
    for waiting in (True, False):
        given = iter(readings)
        watch = LoadWatch(lambda given=given: next(given), lambda: 2.0)
        visitor = Visitor(make_job(), Machine(), 1, lambda what: None, watch)
        assert visitor.is_disturbed(waiting=waiting) == waiting
        assert visitor._shares == []  # neither an idle machine nor waiting tells one


def test_quiet_visits_replace_disturbed_ones():
    from batchwright.probing.course.acquisition import Ledger

    ledger, point = Ledger(), Point(1, 32, 16)

    def seconds():
        return [one.seconds for one in ledger.means(point)]

    ledger.add(point, ((2.0, 0.0),))
    ledger.disturb(0)
    assert ledger.is_disturbed(point)
    assert seconds() == [2.0]
    assert ledger.slowest_left_out(point) is None
    ledger.add(point, ((1.0, 0.0),))
    assert not ledger.is_disturbed(point)
    assert seconds() == [1.0]
    assert ledger.slowest_left_out(point) == 2.0
    ledger.disturb(1)
    assert seconds() == [2.0, 1.0]
    assert ledger.is_disturbed(point)


def loaded_in(seconds):
    return StepLoading(
        loaders=2, batch_seconds=seconds, cpu_seconds=seconds, alone_seconds=1.0, input_seconds=0.1
    )


def test_loading_that_counts_is_that_of_the_visits_that_do():
    machine, point = Machine(loaders=2), Point(1, 32, 16)
    told = iter([9.0, 8.0, 1.0, 2.0])  # the first is that of the smallest step, no measurement
    answered = machine._visit
    machine._visit = lambda command: answered(command).model_copy(
        update={"loading": loaded_in(next(told))}
    )
    visitor = Visitor(make_job(precision="float32"), machine, 1, lambda what: None)
    visitor.prepare(seconds=1)
    visitor.try_first(point)
    visitor.visit(point)
    assert visitor.step_times()[0].loading == loaded_in(8.0)
    visitor.ledger.disturb(0)
    assert visitor.step_times()[0].loading == loaded_in(8.0)  # the only one
    visitor.visit(point)
    assert visitor.step_times()[0].loading == loaded_in(1.0)
    visitor.visit(point)
    assert visitor.step_times()[0].loading.batch_seconds == 1.5


def test_a_point_tells_what_the_scatter_of_steps_makes_of_a_visit_not_how_far_visits_are_apart():
    machine, point = Machine(), Point(1, 32, 16)
    levels = iter([1.0, 1.0, 3.0])
    answered = machine._visit

    def visit(command):
        level = next(levels)
        steps = tuple((level * one, 0.0) for one in (0.8, 0.9, 1.0, 1.1, 1.2))
        return answered(command).model_copy(update={"steps": steps})

    machine._visit = visit
    visitor = Visitor(make_job(precision="float32"), machine, 1, lambda what: None)
    visitor.prepare(seconds=1)
    visitor.visit(point)
    assert visitor.look(point).shortest == pytest.approx(0.8)  # no measurement
    visitor.visit(point)
    (told,) = visitor.step_times()
    assert told.visits == pytest.approx((1.0, 3.0))
    assert told.visit_error == pytest.approx(sqrt(0.025 / 5))


def test_two_readings_close_together_tell_nothing():
    one = Reading(0.0, 2, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert load_between(one, one) is None
