"""`training.evaluate.curvature`: gradient norm and largest Hessian eigenvalue, and in a run."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from batchwright.errors import JobError, TrainingError
from batchwright.records.documents import load_job
from batchwright.records.run import RunSummary
from batchwright.reporting.pages.page import accuracy_part
from batchwright.training.checkpoints.checkpoint import load_checkpoint
from batchwright.training.evaluate.curvature import MAX_SAMPLES, tracked
from batchwright.training.simulated.simulated_training import train_task
from samples import make_epoch, make_summary
from simulated_tasks import CPU, make_task, make_virtual_plan

BOTH = ("gradient-norm", "hessian")


class Quadratic(nn.Module):
    """Half the sum of curvatures times squared weights, at weights of 1."""

    def __init__(self, curvatures):
        super().__init__()
        self.curvatures = torch.tensor(curvatures)
        self.weight = nn.Parameter(torch.ones(len(curvatures)))

    def forward(self, _):
        return 0.5 * (self.curvatures * self.weight.square()).sum()


@pytest.mark.parametrize(
    ("curvatures", "largest"),
    [((5.0, 1.0, 0.2), 5.0), ((-8.0, 2.0, 1.0), 2.0), ((-3.0, -2.0), -2.0), ((0.0, 0.0), 0.0)],
)
def test_the_largest_eigenvalue_is_found_though_another_may_be_farther_from_zero(
    curvatures, largest
):
    model = Quadratic(curvatures)
    found = tracked(BOTH, model, model, lambda count: torch.zeros(count), 4)
    assert found["track/hessian"] == pytest.approx(largest, abs=0.02)
    norm = sum(c * c for c in curvatures) ** 0.5
    assert found["track/gradient_norm"] == pytest.approx(norm)
    assert model.weight.grad is None


def test_the_eigenvalue_of_a_network_is_that_of_its_whole_hessian():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    images, labels = torch.randn(16, 3), torch.arange(16) % 2

    def loss_at(flat):
        sizes = [one.numel() for one in model.parameters()]
        names = [name for name, _ in model.named_parameters()]
        parts = zip(names, flat.split(sizes), model.parameters(), strict=True)
        given = {name: part.view_as(one) for name, part, one in parts}
        outputs = torch.func.functional_call(model, given, (images,))
        return nn.functional.cross_entropy(outputs, labels)

    def loss_of(batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    whole = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss_at, flat)).max()
    found = tracked(BOTH, model, loss_of, lambda count: (images[:count], labels[:count]), 16)
    assert found["track/hessian"] == pytest.approx(float(whole), rel=0.05)
    gradient = torch.autograd.functional.jacobian(loss_at, flat)
    assert found["track/gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-4)


def test_where_memory_runs_out_half_as_many_samples_are_taken():
    asked = []

    def batch_of(count):
        asked.append(count)
        if count > 20:
            raise torch.OutOfMemoryError
        return torch.zeros(count)

    model = Quadratic((2.0, 1.0))
    assert "track/hessian" in tracked(BOTH, model, model, batch_of, 1000)
    assert asked == [MAX_SAMPLES, 64, 32, 16]


class Pair(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


def test_a_batch_stays_of_its_class():
    model = nn.Linear(3, 2).double()

    def loss_of(batch):
        return nn.functional.cross_entropy(model(batch.images), batch.labels)

    found = tracked(BOTH, model, loss_of, lambda n: Pair(torch.ones(n, 3), torch.arange(n) % 2), 4)
    assert len(found) == len(BOTH)


def test_a_network_without_a_second_derivative_is_named_in_a_line():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            context.save_for_backward(value)
            return value.square().sum()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(context, gradient):
            return 2 * context.saved_tensors[0] * gradient

    model = Quadratic((1.0, 1.0))
    with pytest.raises(TrainingError, match="track=hessian: the network has no second") as refused:
        tracked(BOTH, model, lambda _: Once.apply(model.weight), lambda count: count, 4)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("consistency", [None, pytest.param("asp", marks=pytest.mark.slow)])
def test_a_run_keeps_both_at_each_evaluation_and_learns_the_same(tmp_path, consistency):
    served = {"consistency": consistency, "shares": (50, 40)} if consistency else {}
    weights = {}
    for name, track in (("bare", ()), ("tracked", BOTH)):
        plan = make_virtual_plan((10, 8), epochs=3, track=track, **served)
        train_task(plan, make_task(), CPU, tmp_path / name)
        weights[name] = load_checkpoint(tmp_path / name / "checkpoints" / "last.pt")["model"]
        summary = RunSummary.model_validate_json((tmp_path / name / "summary.json").read_text())
        for one in summary.epochs:
            assert (one.gradient_norm is None) is (one.hessian_eigenvalue is None) is (not track)
            assert one.val_count
    assert all(torch.equal(one, weights["tracked"][key]) for key, one in weights["bare"].items())
    assert '"hessian_eigenvalue":' in (tmp_path / "tracked" / "metrics.jsonl").read_text()
    assert "hessian" not in (tmp_path / "bare" / "metrics.jsonl").read_text()


def test_the_report_draws_what_was_tracked_and_nothing_else():
    epochs = tuple(
        make_epoch(n, gradient_norm=1.0 / (n + 1), hessian_eigenvalue=10.0 + n) for n in range(3)
    )
    page = accuracy_part(make_summary(epochs=epochs))
    assert "Largest eigenvalue of the Hessian" in page
    assert "Gradient norm" in page
    assert "Largest eigenvalue" not in accuracy_part(make_summary())


def test_what_cannot_be_tracked_is_refused_in_a_line():
    assert load_job(None, ["track=gradient-norm,hessian"]).track == BOTH
    with pytest.raises(JobError, match="track") as refused:
        load_job(None, ["track=sharpness"])
    assert "\n" not in str(refused.value)
