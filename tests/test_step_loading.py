"""A step beside loading: the visit of a few steps against a long epoch on an invented machine."""

from __future__ import annotations

from collections import deque
from math import inf
from types import SimpleNamespace

import pytest

from batchwright.probing.measure import evaluation, step_time
from batchwright.probing.measure.step_time import visit_beside_loading
from batchwright.workload.data.loading import Totals

NOTHING = 1e-12  # seconds


class Machine:
    """Cores that a step and loader processes share fairly; its own feed, meter, bench and group.

    Args:
        cores: How many.
        threads: Of a step.
        step: Seconds of a step by itself.
        loaders: Processes that load.
        load: Seconds that one of them takes for a batch by itself.
        ahead: Batches that each is asked for ahead.
    """

    def __init__(self, cores, threads, step, loaders, load, ahead=1):
        self.cores, self.threads, self.step_seconds = cores, threads, step
        self.loaders, self.load, self.ahead = loaders, load, ahead
        self.queues = [deque() for _ in range(loaders)]  # seconds that batches still take
        self.seconds = 0.0
        self.asked = self.batches = self.taken = 0
        self.loading = self.group = self
        self.device, self.first_steps = None, 0

    @property
    def totals(self):
        return Totals(self.batches, self.batches * self.load, self.batches * self.load)

    def gather(self, value):
        return [value]

    def step(self, supply):
        start = self.seconds
        supply()
        self.work(self.step_seconds)
        return self.seconds - start, 0.0

    def stream(self, feed=None, size=0, resolution=0):
        """Batches as PyTorch's loaders give them: in turn, each taken one replaced."""
        while self.asked < self.ahead * self.loaders:
            self.ask()
        while True:
            if self.loaders:
                while not self.is_there(self.taken):
                    self.go_on()
                self.ask()
            else:
                self.asked += 1
                self.work(self.load)
                self.batches += 1
            self.taken += 1
            yield self.taken

    def ask(self):
        self.queues[self.asked % self.loaders].append(self.load)
        self.asked += 1

    def is_there(self, batch):
        own = batch % self.loaders
        asked = len(range(own, self.asked, self.loaders))
        return batch // self.loaders < asked - len(self.queues[own])

    def work(self, seconds):
        """Compute; the loaders go on beside."""
        while seconds > NOTHING:
            seconds -= self.go_on(seconds)

    def sleep(self, seconds):
        """Nothing computes; the loaders go on."""
        until = self.seconds + seconds
        while self.seconds < until - NOTHING:
            self.go_on(most=until - self.seconds)

    def go_on(self, work=0.0, most=inf):
        """Until a batch is there or the work done, at most so many seconds; returns work done."""
        busy = [queue for queue in self.queues if queue]
        wanted = len(busy) + self.threads * (work > 0)
        speed = min(1.0, self.cores / wanted) if wanted else 1.0
        parts = [queue[0] for queue in busy] + [work] * (work > 0)
        passed = min(min(parts, default=inf) / speed, most)
        self.seconds += passed
        for queue in busy:
            queue[0] -= passed * speed
            if queue[0] <= NOTHING:
                queue.popleft()
                self.batches += 1
        return passed * speed


def visited(monkeypatch, machine, most_steps):
    bench = machine if isinstance(machine, Machine) else Machine(*machine)
    # Its own name: a thread that another test left may sleep, too.
    clock = SimpleNamespace(sleep=bench.sleep, perf_counter=lambda: bench.seconds)
    monkeypatch.setattr(step_time, "time", clock)
    monkeypatch.setattr(step_time, "from_rank_0", lambda group, number: number)
    steps, _, told = visit_beside_loading(bench, bench, 8, 8, seconds=inf, most_steps=most_steps)
    return steps, told


def step_of_an_epoch(machine, steps=400):
    bench = Machine(*machine, ahead=2)
    stream = bench.stream()
    for _ in range(steps):
        bench.step(stream.__next__)
    return bench.seconds / steps


# Cores, threads of a step, its seconds, loader processes, seconds of a batch in one of them.
MACHINES = {
    "loading is light": (2, 2, 1.0, 2, 0.3),
    "it takes as long as a step": (2, 2, 1.0, 2, 1.0),
    "cores are shared evenly": (2, 2, 1.0, 2, 2.0),
    "loading is the limit": (2, 2, 1.0, 2, 5.0),
    "one loader keeps up": (2, 2, 1.0, 1, 0.5),
    "one loader is the limit": (2, 2, 1.0, 1, 3.0),
    "there are cores for all": (16, 1, 1.0, 4, 2.0),
    "loaders are nearly enough": (16, 1, 1.0, 4, 4.4),
    "loaders are too few": (16, 1, 1.0, 2, 8.0),
    "there are no loaders": (2, 2, 1.0, 0, 0.7),
}


@pytest.mark.parametrize("most_steps", [4, 10])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_a_visit_of_few_steps_tells_the_step_of_a_long_epoch(machine, most_steps, monkeypatch):
    steps, _ = visited(monkeypatch, machine, most_steps)
    assert sum(steps[0]) == pytest.approx(step_of_an_epoch(machine), rel=0.03)


def test_the_parts_of_a_step_are_told_apart(monkeypatch):
    steps, told = visited(monkeypatch, MACHINES["loading is the limit"], 10)
    assert len(steps) == 10
    assert told.loaders == 2
    assert told.batch_seconds == told.cpu_seconds == pytest.approx(5.0)
    assert told.alone_seconds == pytest.approx(1.0)  # though the same step takes longer beside it
    waited, whole = told.input_seconds, sum(steps[0])
    assert whole == pytest.approx(3.5)
    assert whole - waited == pytest.approx(2.0)


class Recording(Machine):
    """Its first step takes many times as long."""

    recorded = False

    def step(self, supply):
        first, self.recorded = not self.recorded, True
        return super().step((lambda: self.work(50.0)) if first else supply)


def test_the_step_that_is_told_is_not_one_in_which_cuda_graphs_are_recorded(monkeypatch):
    bench = Recording(*MACHINES["loading is the limit"])
    bench.first_steps = 1
    steps, told = visited(monkeypatch, bench, 10)
    assert told.alone_seconds == pytest.approx(1.0)
    assert len(steps) == 10


@pytest.mark.parametrize(("loaders", "timed"), [(4, 8), (16, 16)])
def test_all_loaders_load_equally_many_batches_in_a_visit(loaders, timed, monkeypatch):
    steps, _ = visited(monkeypatch, (32, 1, 1.0, loaders, 2.0), 10)
    assert len(steps) == timed


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_nothing_is_left_to_load_beside_what_is_measured_next(machine, monkeypatch):
    bench = Machine(*machine)
    visited(monkeypatch, bench, 10)
    assert bench.batches == bench.asked


def test_more_loaders_than_steps_tell_the_step_of_a_long_epoch(monkeypatch):
    machine = (32, 1, 1.0, 12, 18.0)
    steps, _ = visited(monkeypatch, machine, 10)
    assert sum(steps[0]) == pytest.approx(step_of_an_epoch(machine, 480), rel=0.03)


@pytest.mark.parametrize(("loaders", "timed"), [(0, 4), (2, 4), (5, 5), (16, 16)])
def test_all_loaders_load_equally_many_batches_of_an_evaluation(loaders, timed, monkeypatch):
    machine = Machine(32, 1, 1.0, loaders, 18.0)
    ready, clock = [], []
    monkeypatch.setattr(evaluation, "set_training", lambda network: None)
    monkeypatch.setattr(evaluation, "now", lambda device: clock.append(0) or machine.seconds)

    def stream(feed, size, batches):
        ready.append(batches)
        return ((None, batch) for batch in machine.stream())

    feed = SimpleNamespace(loading=machine, close=lambda: None)
    bench = SimpleNamespace(
        batches=SimpleNamespace(evaluation_feed=lambda workers: feed, evaluation_stream=stream),
        group=SimpleNamespace(size=1),
        device=None,
        network=SimpleNamespace(eval=lambda: None),
        classes=1,
        start_over=lambda: None,
        outputs_and_loss=lambda batch: (None, machine.work(1.0)),
    )
    seconds = evaluation.evaluate(bench, 1, repeats=4).seconds_per_image
    passes = 1 + loaders + timed
    assert len(clock) == 2 * passes
    assert ready == [passes + loaders]
    if loaders:  # a batch every so often, however they come
        assert seconds == pytest.approx(max(1.0, 18.0 / loaders), rel=0.1)


def test_a_worker_that_loads_by_itself_waits_as_long_as_that_takes(monkeypatch):
    steps, told = visited(monkeypatch, MACHINES["there are no loaders"], 4)
    assert told.loaders == 0
    assert told.input_seconds == told.batch_seconds == pytest.approx(0.7)
    assert sum(steps[0]) == pytest.approx(1.7)


class ColdMachine(Machine):
    """Its first steps take ten times as long, as where memory is touched first."""

    def step(self, supply):
        self.step_seconds = 10.0 if self.seconds < 20 else 1.0
        return super().step(supply)


def test_without_loaders_a_step_with_its_images_at_hand_is_what_timed_steps_are(monkeypatch):
    _, told = visited(monkeypatch, ColdMachine(2, 2, 1.0, 0, 0.7), 4)
    assert told.alone_seconds == pytest.approx(1.0)
