"""Losses of a job: cross entropy, and those of the user's own."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
import torch
from torch.nn import functional

from batchwright.errors import JobError, WorkerError
from batchwright.records import Job
from batchwright.workflows.prepare_job import ready_for
from batchwright.workload.data.sources import open_data
from batchwright.workload.loss import build_loss, check_loss

USER_MODULE = """
import torch
from torch import nn
from torch.nn import functional

def summed(outputs, labels):
    return outputs.sum()

def alone(outputs):
    return outputs.sum()

def more(outputs, labels, weight):
    return outputs.sum()

def each(outputs, labels):
    return outputs

def number(outputs, labels):
    return 0.5

class Weighted(nn.Module):
    def __init__(self, weight):
        super().__init__()

class Alone(nn.Module):
    def forward(self, outputs):
        return outputs.sum()

five = 5

def added(outputs, labels):
    return functional.cross_entropy(outputs, labels, reduction="sum")

class Added(nn.Module):
    def forward(self, outputs, labels):
        return added(outputs, labels)

class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, outputs, labels):
        return self.weight * outputs.sum()

learned, frozen = Learned(), Learned().requires_grad_(False)
of_classes = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))

def hundredth(outputs, labels):
    return added(outputs, labels) / 100

def mean(outputs, labels):
    return functional.cross_entropy(outputs, labels)

def pairs(outputs, labels):
    return (outputs @ outputs.T).sum()

calls = []

def counting(outputs, labels):
    calls.append(1)
    return len(calls) * mean(outputs, labels)

def drawn(outputs, labels):
    return torch.rand(()) * mean(outputs, labels)

def failing(outputs, labels):
    return functional.cross_entropy(outputs.T, labels)

def none(outputs, labels):
    pass

def of_labels(outputs, labels):
    return labels.float().mean()

def detached(outputs, labels):
    return mean(outputs.detach(), labels)

@torch.no_grad()
def ungraded(outputs, labels):
    return mean(outputs, labels)

def wrong(outputs, labels):
    return (outputs.argmax(1) != labels).float().mean()

def clamped(outputs, labels):
    return mean(outputs.clamp_(-1, 1), labels)

def none_sure(outputs, labels):
    return (functional.relu(outputs - 100)).mean()

def raising(outputs, labels):
    raise raised
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module of the user's, importable as ``mine``."""
    (tmp_path / "mine.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("mine", None)


def test_cross_entropy_is_a_mean_in_float32_with_the_jobs_smoothing():
    outputs, labels = torch.randn(5, 4).bfloat16(), torch.tensor([0, 1, 2, 3, 0])
    loss = build_loss(Job(label_smoothing=0.1))(outputs, labels)
    assert loss.dtype == torch.float32
    expected = functional.cross_entropy(outputs.float(), labels, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


@pytest.mark.usefixtures("user_module")
def test_a_loss_may_be_imported_as_a_function_or_a_module():
    assert build_loss(Job(loss="mine:summed"))(torch.ones(3), torch.ones(3)) == 3
    assert build_loss(Job(loss="torch.nn:MSELoss"))(torch.ones(3), torch.zeros(3)) == 1
    assert build_loss(Job(loss="mine:frozen"))(torch.ones(3), torch.zeros(3)) == 3
    with pytest.raises(JobError, match="a int cannot be called"):
        build_loss(Job(loss="mine:five"))
    with pytest.raises(JobError, match="loss=mse: unknown"):
        build_loss(Job(loss="mse"))


@pytest.mark.usefixtures("user_module")
def test_a_loss_that_is_a_module_computes_where_the_outputs_are():
    there = torch.device("meta")
    loss = build_loss(Job(loss="mine:of_classes"), there)
    outputs, labels = torch.ones(3, 2, device=there), torch.zeros(3, device=there).long()
    assert loss(outputs, labels).device == there


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("alone", r"cannot be called as loss\(outputs, labels\), too many positional arguments; "),
        ("Alone", r"cannot be called as loss\(outputs, labels\), too many positional arguments; "),
        ("more", r"cannot be called as .*, missing a required argument: 'weight'; it takes"),
        ("Weighted", r"cannot be built without arguments \(TypeError: .*'weight'\): name"),
        ("each", r"gave a tensor of shape \(3,\); it takes the network's outputs"),
        ("Learned", r"has parameters of its own, .* with them in the optimizer, or set requires"),
        ("learned", r"has parameters of its own, which no run trains: train in a loop of your own"),
        ("number", r"gave the float 0\.5; it takes .* their mean loss, a tensor with one number"),
    ],
)
def test_a_loss_of_another_form_is_told_what_it_has_to_be(name, said):
    with pytest.raises(JobError, match=f"^loss=mine:{name}: {said}"):
        build_loss(Job(loss=f"mine:{name}"))(torch.ones(3), torch.ones(3))


@pytest.mark.usefixtures("user_module")
def test_an_error_inside_a_loss_names_the_loss_and_the_line():
    said = r"^loss=mine:failing: \S+mine\.py, line \d+: ValueError: Expected input .*; it takes"
    with pytest.raises(JobError, match=said):
        build_loss(Job(loss="mine:failing"))(torch.ones(3, 4), torch.zeros(3).long())


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA error: operation not permitted when stream is capturing"),
        RuntimeError("CUDA error: device-side assert triggered"),
        torch._dynamo.exc.Unsupported("a call"),
        WorkerError("of ours"),
    ],
    ids=str,
)
def test_errors_that_are_not_of_the_loss_itself_pass_through_it(error):
    import_module("mine").raised = error
    with pytest.raises(type(error)) as raised:
        build_loss(Job(loss="mine:raising"))(torch.ones(3, 4), torch.zeros(3).long())
    assert raised.value is error


OTHERS = ("mean", "pairs", "counting", "drawn", "failing", "each", "none", "clamped", "none_sure")


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize("name", ["added", "Added", "hundredth"])
def test_a_loss_that_adds_samples_up_is_refused(name):
    job = Job(loss=f"mine:{name}")
    with pytest.raises(JobError, match=rf"^loss=mine:{name}: adds the samples .* their mean loss"):
        check_loss(job, build_loss(job), classes=4)


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize("name", OTHERS)
def test_a_loss_that_is_no_clear_sum_is_left_to_the_run(name):
    before, job = torch.random.get_rng_state(), Job(loss=f"mine:{name}")
    check_loss(job, build_loss(job), classes=4)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize("name", ["of_labels", "detached", "ungraded", "wrong"])
def test_a_loss_without_a_gradient_is_refused(name):
    job = Job(loss=f"mine:{name}")
    loss, said = build_loss(job), rf"^loss=mine:{name}: has no gradient, .* from the outputs, with"
    with pytest.raises(JobError, match=said):
        check_loss(job, loss, classes=4)
    outputs, labels = torch.ones(3, 4, requires_grad=True), torch.zeros(3).long()
    with pytest.raises(JobError, match=said):  # where made-up outputs tell nothing
        loss(outputs, labels)
    with torch.no_grad():  # as an evaluation does
        assert not loss(outputs, labels).requires_grad


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("name", "said"), [("added", "adds the samples up"), ("detached", "has no gradient")]
)
def test_both_are_refused_before_anything_is_measured(name, said):
    job = Job(loss=f"mine:{name}", device="cpu")
    with pytest.raises(JobError, match=rf"^loss=mine:{name}: {said}"):
        ready_for(job, open_data(job).facts)
