"""`bw.probe(step=...)`: a step of the user's own, measured as it is."""

from __future__ import annotations

import copy
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DataParallel
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw
from batchwright.errors import ArgumentError, DataError, Interrupted, JobError, LostWorkerError
from batchwright.probing import commands, own_step
from batchwright.probing.measure.timing import from_rank_0, on_any_worker
from far import FAR, far_device

QUICK = {"probe": {"budget": 0.3}, "epochs": 2}


class Text:
    """A step on text, with two losses and a second network that an optimizer of its own steps."""

    def __init__(self):
        torch.manual_seed(2)
        self.words = nn.Embedding(50, 16)
        self.reads = nn.GRU(16, 16, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.judge = nn.Linear(16, 1)
        both = [*self.words.parameters(), *self.reads.parameters(), *self.norm.parameters()]
        self.optimizer = torch.optim.AdamW(both, lr=0.01)
        self.second = torch.optim.SGD(self.judge.parameters(), lr=0.1, momentum=0.9)
        self.sizes = []

    def batch(self, size):
        self.sizes.append(size)
        return {"tokens": torch.randint(50, (size, 12)), "labels": torch.rand(size)}

    def step(self, batch):
        _, state = self.reads(self.words(batch["tokens"]))
        state = self.norm(state[0])
        for optimizer, part in ((self.second, state.detach()), (self.optimizer, state)):
            optimizer.zero_grad()
            out = self.judge(part)[:, 0]
            (functional.mse_loss(out, batch["labels"]) + 0.1 * out.square().mean()).backward()
            optimizer.step()
        if len(batch["labels"]) > 40:
            time.sleep(1e-4)  # whatever a step does is in it

    def state(self):
        modules = (self.words, self.reads, self.norm, self.judge)
        tensors = [t.clone() for one in modules for t in one.state_dict().values()]
        states = [one.state_dict() for one in (self.optimizer, self.second)]
        return tensors, copy.deepcopy(states)


def test_what_a_first_step_that_fails_has_changed_is_put_back():
    text = Text()
    before = text.state()

    def step(batch):
        text.step(batch)
        raise ValueError("behind the update")

    with pytest.raises(JobError, match=r"failed with a batch of .*: behind the update"):
        bw.probe(step=step, batch=text.batch, samples=2000, **QUICK)
    after = text.state()
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert after[1] == before[1]


@pytest.mark.slow
def test_a_step_on_text_with_two_networks_is_measured_planned_and_put_back(tmp_path):
    text = Text()
    text.step(text.batch(8))  # the optimizers have a state already
    before = text.state()
    draws = torch.get_rng_state()
    profile = bw.probe(
        step=text.step, batch=text.batch, samples=2000, out=tmp_path / "profile.json", **QUICK
    )
    assert torch.equal(draws, torch.get_rng_state())
    after = text.state()
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
    assert bw.load(tmp_path / "profile.json") == profile
    assert profile.network.parameters == sum(
        p.numel()
        for one in (text.words, text.reads, text.norm, text.judge)
        for p in one.parameters()
    )
    assert profile.network.batch_norm
    assert profile.job.optimizer == "adamw"
    assert profile.job.learning_rate == 0.01
    assert profile.data.train_samples == 2000
    assert len({one.local_batch_size for one in profile.steps}) >= 2
    assert {one.local_batch_size for one in profile.steps} <= set(text.sizes)
    peaks = sorted((one.local_batch_size, one.peak_bytes) for one in profile.memory)
    assert peaks[0][1] < peaks[-1][1]
    assert profile.memory_parts.optimizer > 0

    plan = bw.plan(profile, epochs=3)
    assert plan.workers == 1
    assert plan.stages[0].predicted_epoch_seconds.value > 0
    assert plan.explain()
    with pytest.raises(DataError, match=r"bw\.Session"):
        bw.train(plan)


@pytest.mark.slow
def test_a_loader_is_timed_with_the_step():
    data = TensorDataset(torch.randn(400, 1, 20), torch.randn(400, 1))
    network = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def step(batch):
        optimizer.zero_grad()
        functional.mse_loss(network(batch[0])[:, 0], batch[1]).backward()
        optimizer.step()

    def slow(items):
        time.sleep(0.002 * len(items))
        return torch.utils.data.default_collate(items)

    def loader(size):
        return DataLoader(data, size, shuffle=True, collate_fn=slow)

    profile = bw.probe(step=step, loader=loader, samples=len(data), base_batch=32, **QUICK)
    assert profile.job.base_batch == 32
    for one in profile.steps:
        assert one.step_seconds > 0.002 * one.local_batch_size


def probed(rank):
    torch.manual_seed(rank)
    network = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()

    return bw.probe(step=step, batch=lambda n: torch.randn(n, 8), samples=500, **QUICK)


@pytest.mark.slow
def test_all_workers_of_a_launcher_probe_together_and_get_one_profile(crew):
    one, other = crew.together(probed, workers=2)
    assert one == other
    assert {step.workers for step in one.steps} == {2}
    assert any(c.operation == "all-reduce" for c in one.collectives)
    assert bw.plan(one).workers == 2


def visited_with_loaders(rank):
    """Two workers whose hosts load by none and by three processes, as by their cores."""
    layer = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(inputs):
        layer(inputs).sum().backward()
        optimizer.step()

    class Loaded:
        num_workers, prefetch_factor = (0, 3)[rank], 2

        def __init__(self, size):
            self.size = size

        def __iter__(self):
            return iter([torch.ones(self.size, 4)])

    own = own_step.OwnStep(step, None, Loaded, 100, 60)
    visit = {"workers": 2, "resolution": 1, "local_batch_size": 8, "seconds": 0.01, "most_steps": 2}
    visited = own.carry_out(commands.Visit(**visit))
    own.group.close()
    return len(visited.steps)


@pytest.mark.slow
def test_workers_use_up_equally_many_batches_whatever_their_hosts_load_ahead(crew):
    assert crew.together(visited_with_loaders, workers=2) == [2, 2]


def failed_on_the_first(rank, place):
    """What ends a probe on each worker, where a command fails on worker 0 alone."""
    calls = []

    def failing(before):
        def call(*arguments, **keys):
            calls.append(before)
            if rank == 0 and len(calls) == 4:  # past what comes before the first command
                raise KeyError("pixels")
            return before(*arguments, **keys)

        return call

    with pytest.MonkeyPatch.context() as patch:
        if place == "behind its last exchange":
            patch.setattr(
                own_step.StepContents, "put_back", failing(own_step.StepContents.put_back)
            )
        network = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

        def step(batch):
            optimizer.zero_grad()
            network(batch).square().mean().backward()
            optimizer.step()

        taken = failing(step) if place == "in a step" else step
        try:
            bw.probe(step=taken, batch=lambda n: torch.randn(n, 8), samples=500, **QUICK)
        except (KeyError, LostWorkerError) as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["in a step", "behind its last exchange"])
def test_what_fails_on_worker_0_alone_is_told_at_once(crew, place):
    """Neither waits until an exchange's time is up, which would hide what it was."""
    first, other = crew.together(failed_on_the_first, place, workers=2)
    assert first == "KeyError: 'pixels'"
    assert other.startswith("LostWorkerError: lost contact with another worker")
    assert "worker 0" in other


def test_other_workers_are_told_why_a_probe_leaves_them(monkeypatch):
    told, calls = [], []
    network = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def step(batch):
        calls.append(batch)
        if len(calls) == 4:
            raise KeyError("pixels")
        network(batch).sum().backward()
        optimizer.step()

    monkeypatch.setattr(own_step.Group, "close", lambda group, error=None: told.append(error))
    with pytest.raises(KeyError) as raised:
        bw.probe(step=step, batch=lambda n: torch.randn(n, 8), samples=500, **QUICK)
    assert told == [raised.value]


def linear_step(batch):
    network = nn.Linear(4, 1)
    torch.optim.SGD(network.parameters(), lr=0.1)
    network(batch).sum().backward()


def wrapped_step(batch):
    network = DataParallel(nn.Linear(4, 1))
    network(batch).sum().backward()


def failing_step(batch):
    raise KeyError("pixels")


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"step": linear_step, "batch": lambda n: torch.ones(n, 4)}, ArgumentError, "no weights"),
        ({"step": wrapped_step, "batch": lambda n: torch.ones(n, 4)}, ArgumentError, r"\.module"),
        ({"step": failing_step, "batch": lambda n: torch.ones(n, 4)}, JobError, "'pixels'"),
        ({"step": failing_step}, ArgumentError, "either batch="),
        ({"batch": lambda n: n}, ArgumentError, "go with step="),
        ({"job": "x.yaml", "step": failing_step}, ArgumentError, "not both"),
        ({"step": failing_step, "batch": lambda n: n, "samples": 0}, ArgumentError, "samples=0"),
        ({"step": failing_step, "batch": 5}, ArgumentError, "batch=5 of probe: give a function"),
        ({"step": "x", "batch": lambda n: n}, ArgumentError, "step='x' of probe: give a function"),
        ({"step": failing_step, "batch": len, "samples": "100"}, ArgumentError, "samples='100'"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_in_a_line(how, error, words):
    with pytest.raises(error, match=words) as told:
        bw.probe(**{"samples": 100, **how})
    assert "\n" not in str(told.value)


def test_what_a_gpu_holds_beside_a_step_of_ones_own_is_told(monkeypatch):
    monkeypatch.setattr(own_step, "held_bytes", lambda bench: 123)
    text = Text()
    own = own_step.OwnStep(text.step, text.batch, None, 100, 60.0)
    told = own.carry_out(commands.Prepare(workers=1, precision="float32"))
    own.group.close()
    assert told.held_bytes == 123


def test_what_is_put_back_takes_no_memory_of_a_gpu_meanwhile():
    """In each peak there would be a second set of weights, and of the optimizer's state."""
    with far_device() as seen:
        layer = nn.Linear(4, 1).to(FAR)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

        def step():
            layer(torch.ones(2, 4, device=FAR)).sum().backward()
            optimizer.step()

        def values():
            states = [one["momentum_buffer"] for one in optimizer.state.values()]
            return [one.detach().clone().near for one in (*layer.parameters(), *states)]

        step()
        before, found = values(), own_step.StepContents()
        seen.waits.clear()
        with found.watching():
            step()
        assert seen.waits["back to the CPU"] == 4
        assert not any(start.device == FAR for _, start in found.start.values())
        step()
        found.put_back(whole=True)
        assert all(map(torch.equal, values(), before))


def test_random_numbers_of_gpus_are_put_back(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["of one", "of another"])
    put_back = []
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put_back.extend)
    with pytest.raises(JobError, match="pixels"):
        bw.probe(step=failing_step, batch=lambda n: torch.ones(n, 4), samples=100)
    assert put_back == ["of one", "of another"]


@pytest.mark.parametrize(("times", "ends"), [(1, Interrupted), (2, KeyboardInterrupt)])
def test_a_stop_signal_waits_for_the_step_and_a_second_one_does_not(times, ends):
    layer = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(inputs):
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        optimizer.zero_grad()
        layer(inputs).sum().backward()
        optimizer.step()

    outside = signal.default_int_handler  # a shell's background jobs have SIGINT ignored
    former = signal.signal(signal.SIGINT, outside)
    try:
        with pytest.raises(ends):
            bw.probe(step=step, batch=lambda size: torch.ones(size, 4), samples=100)
        assert signal.getsignal(signal.SIGINT) is outside
    finally:
        signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_step_that_fails_after_a_stop_signal_was_stopped(fails_at):
    """A signal to the whole process group also kills the processes of a loader."""
    text, steps = Text(), []

    def step(batch):
        text.step(batch)
        steps.append(1)
        if len(steps) == fails_at:
            signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")

    with pytest.raises(Interrupted, match="SIGTERM"):
        bw.probe(step=step, batch=text.batch, samples=100, **QUICK)


def test_a_stop_signal_after_the_last_command_counts(monkeypatch):
    late = partial(signal.raise_signal, signal.SIGTERM)
    monkeypatch.setattr("batchwright.probing.own_step.Reporter.finish", lambda _: late())
    text = Text()
    with pytest.raises(Interrupted, match="SIGTERM"):
        bw.probe(step=text.step, batch=text.batch, samples=100, **QUICK)


def test_workers_agree_where_they_compute():
    """A group of the user's own may be NCCL's alone, which takes no tensor of the CPU."""

    def summed(values):
        assert values.device == FAR
        return values

    with far_device():
        group = SimpleNamespace(rank=0, device=FAR, sum=summed)
        assert from_rank_0(group, 3) == 3
        assert on_any_worker(group, here=True)
