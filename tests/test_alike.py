"""Workers that hold the same weights, in real processes: at the start, and whatever happens."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from batchwright import Session
from batchwright.distributed.group import Group
from batchwright.errors import LostWorkerError, TrainingError
from batchwright.training import all_reduce_run
from batchwright.training.all_reduce_run import weights_digest
from test_session import FEATURES, Points, make_tiny_plan

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
SAMPLES = 48  # six steps of 8


class Odd(nn.Module):
    """Buffers of number formats that backends do not all know."""

    def __init__(self, rank):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 3)
        numbers = torch.arange(3.0) + rank
        for dtype in (torch.bool, torch.int8, torch.int16, torch.int32, torch.complex64):
            self.register_buffer(str(dtype).removeprefix("torch."), numbers.to(dtype))
        self.register_buffer("small", numbers.to(torch.float8_e4m3fn))
        self.register_buffer("single", torch.tensor(rank, dtype=torch.int16))
        self.register_buffer("turned", torch.zeros(3, 2, dtype=torch.int16).add_(rank).t())

    def forward(self, features):
        return self.linear(features)


def shared(rank):
    model = Odd(rank)
    group = Group(CPU, timeout=200)
    try:
        group.broadcast(model.buffers())
    finally:
        group.close()
    return {name: buffer.to(torch.complex64) for name, buffer in model.named_buffers()}


def test_buffers_of_every_number_format_are_those_of_worker_0(crew):
    first, second = crew.together(shared, workers=2)
    wanted = {name: buffer.to(torch.complex64) for name, buffer in Odd(0).named_buffers()}
    for name, buffer in wanted.items():
        assert torch.equal(first[name], buffer), name
        assert torch.equal(second[name], buffer), name


def train(rank, folder, spoilt):
    """Worker 1 rounds otherwise, at the steps in ``spoilt``; weights of both after each step."""
    all_reduce_run.DRIFT_STEPS = 4
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen, step = [], 0
    plan = make_tiny_plan((4, 4), epochs=2, samples=SAMPLES)
    with Session(model, optimizer, Points(SAMPLES), plan=plan, run_folder=folder, loaders=0) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(model(features), labels))
                if rank == 1 and step in spoilt:
                    with torch.no_grad():
                        model.weight.mul_(1 + 2e-7)
                        optimizer.state[model.weight]["momentum_buffer"].mul_(1 + 2e-7)
                step += 1
                seen.append(model.weight.detach().clone())
    all_reduce_run.DRIFT_STEPS = 100
    return seen


def notes_in(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if "no longer the same" in line.get("text", "")]


def test_replicas_that_drift_apart_are_noticed_and_evened_out(crew, tmp_path):
    folder = tmp_path / "drifting"
    one, two = crew.together(train, folder, (1, 7), workers=2)
    equal = [torch.equal(a, b) for a, b in zip(one, two, strict=True)]
    # Compared while steps 0 and 4 of each epoch of 6 are taken; evened out before the next.
    assert equal == [True, *[False] * 4, *[True] * 2, *[False] * 4, True]
    assert len(notes_in(folder)) == 1
    assert "epoch 1, step 5" in notes_in(folder)[0]


def spoil(rank, spoilt):
    """What the workers say once the one in ``spoilt`` has weights that are no numbers."""
    all_reduce_run.DRIFT_STEPS = 4
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = make_tiny_plan((4, 4), epochs=1, samples=SAMPLES)
    try:
        with Session(model, optimizer, Points(SAMPLES), plan=plan, loaders=0) as one:
            for _ in one.epochs():
                for step, (features, labels) in enumerate(one.batches()):
                    one.step(functional.cross_entropy(model(features), labels))
                    if step == 3 and rank == spoilt:
                        model.weight.data[0, 0] = torch.nan
    except TrainingError as error:
        return str(error)
    finally:
        all_reduce_run.DRIFT_STEPS = 100
    return model.weight.isfinite().all().item()


def test_weights_that_are_no_numbers_are_not_spread(crew):
    first, second = crew.together(spoil, 0, workers=2)
    assert first == second
    assert "have weights" not in first
    assert "has weights that are infinite or not a number" in first
    assert "epoch 1, step 5" in first


def test_replicas_that_stay_the_same_are_left_alone(crew, tmp_path):
    one, two = crew.together(train, tmp_path / "same", (), workers=2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not notes_in(tmp_path / "same")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_digest_tells_weights_that_differ_in_any_bit(dtype):
    torch.manual_seed(1)
    weights = [torch.randn(10, 7).to(dtype), torch.randn(8, 3, 2, 2).to(dtype)]
    weights[1] = weights[1].to(memory_format=torch.channels_last)
    digest = weights_digest(weights)
    assert digest == weights_digest([one.clone() for one in weights])
    assert 0 <= digest < 2**23
    for bits in range(8 * weights[0].element_size()):
        for place in range(2):
            other = [one.clone() for one in weights]
            flipped = other[place].contiguous()
            size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flipped.element_size()]
            flipped.view(-1).view(size)[bits] ^= torch.tensor(1, dtype=size) << bits
            other[place] = flipped
            assert weights_digest(other) != digest


def test_a_digest_looks_at_every_piece_of_a_large_tensor(monkeypatch):
    monkeypatch.setattr(all_reduce_run, "_PIECE", 100)
    weights = torch.randn(250)
    digests = {float(weights_digest([weights]))}
    for place in (0, 99, 100, 199, 249):
        weights[place] += 1
        digests.add(float(weights_digest([weights])))
    assert len(digests) == 6


def test_a_digest_tells_changes_that_would_cancel_in_a_sum():
    weights = torch.randn(1000)
    bits = weights.view(torch.int32).clone()
    bits[::2] += 1
    bits[1::2] -= 1
    assert weights_digest([bits.view(torch.float32)]) != weights_digest([weights])


def exchange_of_its_own(rank):
    """The loop sums a count by itself; worker 1 is gone before it gets there."""
    model = nn.Linear(FEATURES, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = make_tiny_plan((4, 4), epochs=1, samples=SAMPLES)
    try:
        with Session(model, optimizer, Points(SAMPLES), plan=plan, loaders=0) as one:
            for _ in one.epochs():
                for features, labels in one.batches():
                    one.step(functional.cross_entropy(model(features), labels))
                    if rank == 1:
                        raise KeyboardInterrupt
                    dist.all_reduce(torch.ones(1))
    except KeyboardInterrupt:
        return "left"
    except LostWorkerError as error:
        return f"lost: {error}"
    except RuntimeError as error:
        return f"not named: {error}"


def test_an_error_in_a_collective_of_the_users_own_names_the_lost_worker(crew):
    first, second = crew.together(exchange_of_its_own, workers=2)
    assert second == "left"
    assert first.startswith("lost: lost contact with another worker during an exchange: worker 1 (")
