"""Batches that are made one ahead, and the clock of steps that a device works off."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from batchwright.training.step.clock import DeviceClock, StepClock, clock_for
from batchwright.training.step.epoch_totals import EpochMeter
from batchwright.workload.data import copying
from batchwright.workload.data.copying import copy_to_device, prefetched
from batchwright.workload.passes.recorded_passes import Recorder
from test_pipeline import CPU, MIXED, UNIFORM, build


def test_what_is_made_ahead_comes_in_order_by_a_thread_of_its_own():
    makers = set()

    def make(number):
        makers.add(threading.current_thread())
        return (torch.tensor(number),)

    made = [int(one) for (one,) in prefetched(make, range(7), CPU)]
    assert made == list(range(7))
    assert len(makers) == 1
    assert threading.current_thread() not in makers
    assert list(prefetched(make, (), CPU)) == []


def test_one_more_is_asked_for_than_was_given_out():
    asked = []

    def requests():
        for number in range(5):
            asked.append(number)
            yield number

    made = prefetched(lambda number: (torch.tensor(number),), requests(), CPU)
    next(made)
    assert asked == [0, 1]
    next(made)
    assert asked == [0, 1, 2]
    made.close()
    assert asked == [0, 1, 2]


def test_an_error_comes_with_its_batch():
    def make(number):
        if number == 1:
            raise ValueError("the second")
        return (torch.tensor(number),)

    made = prefetched(make, range(3), CPU)
    assert int(next(made)[0]) == 0
    with pytest.raises(ValueError, match="the second"):
        next(made)


def test_what_found_no_memory_beside_a_step_is_made_after_it():
    fails = [1, 2, 2]  # the last one's second time, too

    def make(number):
        if number in fails:
            fails.remove(number)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (torch.tensor(number),)

    made = prefetched(make, range(3), CPU)
    assert [int(next(made)[0]) for _ in range(2)] == [0, 1]
    with pytest.raises(torch.OutOfMemoryError):
        next(made)


@pytest.mark.parametrize("store", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_batches_made_ahead_are_those_made_one_by_one(store):
    batches = list(torch.randperm(300).split(40))
    wanted = build(store).training(batches, epoch=2, resolution=12)
    ahead = build(store)
    found = (
        ahead._finished(gathered, 12)
        for gathered in prefetched(lambda some: ahead._gathered(some, 2, 12), batches, CPU)
    )
    for (images, labels), (ours, own) in zip(wanted, found, strict=True):
        assert torch.equal(images, ours)
        assert torch.equal(labels, own)


class Stream:
    """As far as `prefetched` and a `Recorder` look into one of CUDA's."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return self.number == other.number

    def record_event(self):
        return None


@pytest.fixture
def streams(monkeypatch):
    """Numbers of the streams that were asked for; they are handed out in turn, as by PyTorch."""
    turn, given = itertools.cycle(range(3)), []

    def stream(device=None):
        given.append(next(turn))
        return Stream(given[-1])

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(copying, "enter", lambda device: device)
    copying.copy_stream.cache_clear()
    yield given
    copying.copy_stream.cache_clear()


def test_each_epoch_is_made_ahead_in_the_same_stream(streams):
    for _ in range(2):
        assert len(list(prefetched(lambda _: (), range(3), torch.device("cuda", 0)))) == 3
    assert streams == [0]


def test_a_gpu_without_a_number_is_the_current_one(streams, monkeypatch):
    entered = []
    monkeypatch.setattr(copying, "enter", entered.append)
    for name in ("cuda:0", "cuda"):
        assert len(list(prefetched(lambda _: (), range(3), torch.device(name)))) == 3
    assert streams == [0]
    assert entered == [torch.device("cuda", 0)] * 2


def test_nothing_is_recorded_in_the_stream_in_which_others_are_made_ahead(streams):
    """What a thread copies meanwhile would be recorded in place of done."""
    aside = copying.copy_stream(torch.device("cuda", 0))
    recorded = [Recorder()._stream() for _ in range(5)]
    assert [one.number for one in recorded] == [1, 2, 1, 2, 1]
    assert aside not in recorded


def test_on_the_cpu_nothing_is_sent():
    tensor = torch.ones(2)
    assert copy_to_device(tensor, CPU) is tensor


# --------------------------------------------------------------------------------------- the clock


class Device:
    """Works off what is queued, in made-up seconds; the host goes ahead."""

    def __init__(self, monkeypatch):
        self.host = self.done = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.host)

    def queue(self, seconds, *, host=0.001):
        """Something that takes the device so long, and the host as long to say."""
        self.host += host
        self.done = max(self.done, self.host) + seconds

    def wait(self):
        self.host = max(self.host, self.done)

    def mark(self):
        return Mark(self)


class Mark:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = max(self.device.done, self.device.host)

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


def test_the_time_of_a_backward_pass_is_no_exchange(monkeypatch):
    device, meter = Device(monkeypatch), EpochMeter()
    clock = DeviceClock(device.mark)
    for _ in range(3):
        clock.lap(meter, "input")
        device.queue(0.100)  # forward and backward pass
        clock.lap(meter, "compute")
        device.queue(0.030)  # what is left of the exchange
        device.wait()
        exchange = clock.lap(meter, "communication")
        assert exchange == pytest.approx(0.030)
        device.queue(0.005)  # the update
        clock.lap(meter, "compute")
    assert meter.communication == pytest.approx(3 * 0.030)
    assert meter.training == pytest.approx(device.host)
    assert meter.input + meter.compute + meter.communication == pytest.approx(meter.training)
    assert meter.compute > 0.3


def test_what_the_device_goes_on_with_is_computing_of_the_next_step(monkeypatch):
    device, meter = Device(monkeypatch), EpochMeter()
    clock = DeviceClock(device.mark)
    go_on = clock.passing(lambda: device.queue(0.050))  # update and next batch
    for _ in range(3):
        clock.lap(meter, "input")
        device.queue(0.100)
        clock.lap(meter, "compute")
        device.queue(0.030)
        figures = device.done
        go_on()
        device.host = figures
        assert clock.lap(meter, "communication") == pytest.approx(0.030)
        clock.lap(meter, "compute")
    assert meter.communication == pytest.approx(3 * 0.030)
    assert meter.compute + meter.communication == pytest.approx(meter.training)


def test_what_is_left_out_is_no_computing(monkeypatch):
    device, meter = Device(monkeypatch), EpochMeter()
    clock = DeviceClock(device.mark)
    device.queue(2.0)  # an evaluation
    device.wait()
    clock.leave_out(device.host)
    device.queue(0.1)
    clock.lap(meter, "compute")
    device.wait()
    clock.lap(meter, "communication")
    assert meter.training == pytest.approx(0.101)
    assert clock.computed() == pytest.approx(0.101)


def test_the_cpu_keeps_its_own_clock():
    assert type(clock_for(CPU)) is StepClock


def test_marks_are_on_the_gpu_of_the_training(monkeypatch):
    """An event refuses the stream of another GPU, which a script may have made the current one."""
    gpu, recorded = torch.device("cuda", 1), []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            recorded.append(stream)

        def elapsed_time(self, end):
            assert isinstance(end, Event)
            return 0.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    clock, meter = clock_for(gpu), EpochMeter()
    clock.lap(meter, "compute")
    clock.passing(lambda: None)()
    clock.lap(meter, "communication")
    assert set(recorded) == {"the stream of cuda:1"}
    assert len(recorded) == 3
