"""The public handle in two real processes, against one process with the whole batch."""

from __future__ import annotations

import os
import re
import signal
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchwright import Session
from batchwright.errors import FileError, PlanError
from batchwright.prediction.noise_scale import NoiseState, estimate
from batchwright.records import AgsRule, LearningRateRule
from batchwright.training.batches.sampler import epoch_order
from test_session import FEATURES, Points, make_model, make_tiny_plan, summary_in

pytestmark = pytest.mark.slow
SAMPLES = 30  # of steps of 8: three whole ones and a tail of 6
RULE = LearningRateRule(
    base=0.1, base_batch=8, scaling="linear", peak=0.2, warmup_epochs=1, decay="cosine"
)


class Loss(nn.Module):
    """Cross entropy with weights of its own, which only the optimizer knows."""

    def __init__(self, rank):
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(1.0 + rank, dtype=torch.float64))

    def forward(self, outputs, labels):
        return functional.cross_entropy(self.sharpness * outputs, labels)


def make_plan(batches, **changes):
    return make_tiny_plan(batches, samples=SAMPLES, rule=RULE, epochs=3, **changes)


SCALED = AgsRule(mode="gain", base_batch=2, least=1.0, most=None, lookback=50)


def train(
    rank,
    batches,
    folder=None,
    *,
    model=None,
    resume=False,
    until=None,
    leave=None,
    micro=64,
    ags=None,
):
    """Everything that can be compared afterwards."""
    torch.manual_seed(rank)  # rank 0's weights are everybody's
    model = model or nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    loss = Loss(rank)
    optimizer = torch.optim.SGD(
        [*model.parameters(), *loss.parameters()], lr=0.1, momentum=0.9, nesterov=True
    )
    points, steps, means = Points(SAMPLES), 0, []
    with Session(
        model,
        optimizer,
        points,
        plan=make_plan(batches, micro=micro).model_copy(update={"ags": ags}),
        run_folder=folder,
        resume=resume,
        loaders=0,
        clip_norm=0.5,
    ) as one:
        one.keep("loss", loss)
        for _ in one.epochs():
            for features, labels in one.batches():
                steps += one.step(loss(model(features.double()), labels))
                if until == (rank, steps):
                    os.kill(os.getpid(), signal.SIGTERM)
                if leave == steps:
                    break
            if leave == steps:
                break
            means.append(
                one.evaluate(
                    Points(7),
                    lambda outputs, labels: {"ones": torch.ones(len(labels)), "label": labels},
                    forward=lambda model, batch: (model(batch[0].double()), batch[1]),
                )
            )
        noise = one.noise_scale
    weights = torch.cat([p.detach().flatten() for p in optimizer_parameters(optimizer)])
    return {"weights": weights, "means": means, "noise": noise, "seen": points.seen, "steps": steps}


def optimizer_parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.fixture(scope="module")
def alone():
    return train(0, (8,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def found(folder, crew):
    """By worker, what each function gives; all in one start, since starting takes the time."""
    return crew.together(everything, folder, workers=2)


def everything(rank, folder):
    return {
        "whole": train(rank, (5, 3), folder / "whole"),
        "micro-batches": train(rank, (7, 1), micro=2),
        "scaled": train(rank, (4, 4), folder / "scaled", micro=1, ags=SCALED),
        "noise": one_step_of_noise(rank),
        "batch norm": train_with_batch_norm(rank, folder / "norm"),
        "pieces": stop_and_resume(rank, folder / "pieces"),
        "average": train_averaging(rank, folder / "average"),
        "unfrozen": train_and_unfreeze(rank, (5, 3)),
        "buffers": train_with_buffers(rank),
        "refusals": refusals(rank, folder),
    }


def test_unequal_shares_train_like_one_process(alone, found):
    assert torch.equal(found[0]["whole"]["weights"], found[1]["whole"]["weights"])
    assert torch.allclose(found[0]["whole"]["weights"], alone["weights"], rtol=1e-9)


def test_micro_batches_on_one_worker_only_change_nothing(alone, found):
    for each in found:
        assert torch.allclose(each["micro-batches"]["weights"], alone["weights"], rtol=1e-9)


def test_factors_depend_on_the_parts_of_a_step_not_on_how_many_workers_have_them(
    alone, found, folder
):
    eight = train(0, (8,), micro=1, ags=SCALED)
    for each in found:
        assert torch.equal(each["scaled"]["weights"], found[0]["scaled"]["weights"])
        assert torch.allclose(each["scaled"]["weights"], eight["weights"], rtol=1e-4)
        assert each["scaled"]["noise"] == pytest.approx(eight["noise"], rel=1e-4)
    assert not torch.allclose(eight["weights"], alone["weights"], rtol=1e-2)
    for epoch in summary_in(folder / "scaled").epochs:
        assert 1 <= epoch.gradient_factors.least < epoch.gradient_factors.most <= 4
        assert epoch.rate_gain is None


class Codes(nn.Module):
    """Has a buffer of its own, as a codebook is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("longest", torch.zeros(()), persistent=False)  # a cache of its own
        self.register_buffer("code", torch.zeros(()))

    def forward(self, outputs):
        if self.training:
            self.longest = outputs.detach().max()
            self.code = self.code * 0.9 + outputs.detach().mean() * 0.1
        return outputs


def train_with_buffers(rank):
    """Warnings of a model with buffers of its own, which each worker makes from its samples."""
    model = nn.Sequential(make_model(extras=True), Codes())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(rank, (5, 3), model=model.double())
    return [str(one.message) for one in told if "buffer" in str(one.message)]


def test_a_buffer_that_each_worker_makes_from_its_own_samples_is_told_once(found):
    assert [len(each["buffers"]) for each in found] == [1, 0]
    assert "the model's buffer 1.code is no longer the same" in found[0]["buffers"][0]


def train_averaging(rank, folder):
    """What evaluations with an average see, with statistics of each worker's own."""
    torch.manual_seed(rank)
    plan = make_plan((5, 3)).model_copy(update={"average_epochs": 1})
    model, seen = make_model(extras=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, Points(SAMPLES), plan=plan, run_folder=folder, loaders=0) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(model(features), labels))
            seen.append(one.evaluate(Points(7), lambda outputs, _: {"first": outputs[:, 0]}))
        return {"seen": seen, "left": one.evaluate(Points(7), lambda o, _: {"first": o[:, 0]})}


def test_workers_average_alike_and_their_checkpoint_is_what_they_evaluated(found, folder):
    first, second = (each["average"] for each in found)
    assert first == second
    assert first["left"] == first["seen"][-1]
    content = torch.load(folder / "average" / "checkpoints" / "last.pt", weights_only=True)
    delivered = make_model(extras=True)
    delivered.load_state_dict(content["average"])
    optimizer = torch.optim.SGD(delivered.parameters(), lr=0.1)
    with Session(delivered, optimizer, Points(SAMPLES), plan=make_plan((8,)), loaders=0) as one:
        told = one.evaluate(Points(7), lambda outputs, _: {"first": outputs[:, 0]})
    assert told == pytest.approx(first["left"], rel=1e-5)


def test_every_sample_is_seen_once_by_one_of_the_workers(found, folder):
    both = sorted(found[0]["whole"]["seen"] + found[1]["whole"]["seen"])
    assert both == sorted(list(range(SAMPLES)) * 3)
    for epoch in summary_in(folder / "whole").epochs:
        assert epoch.samples == SAMPLES
        assert [worker.samples for worker in epoch.workers] == [19, 11]
        assert [worker.local_batch_size for worker in epoch.workers] == [5, 3]


def test_the_held_out_samples_are_counted_once_over_both(found):
    assert found[0]["whole"]["means"] == found[1]["whole"]["means"]
    assert found[0]["whole"]["means"][0] == {"ones": 1.0, "label": sum(i % 3 for i in range(7)) / 7}


def test_the_noise_scale_is_the_estimators(found):
    for each in found:
        assert each["noise"]["session"] == pytest.approx(each["noise"]["alone"], rel=1e-4)


def test_layers_unfrozen_on_the_way_train_like_in_one_process(found):
    alone = train_and_unfreeze(0, (8,))
    for each in found:
        assert torch.equal(each["unfrozen"], found[0]["unfrozen"])
        assert torch.allclose(each["unfrozen"], alone, rtol=1e-9)


def train_and_unfreeze(rank, batches):
    """The first layer from the second epoch on, the second within the third."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    ).double()
    model[:3].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = make_plan(batches)
    with Session(model, optimizer, Points(SAMPLES), plan=plan, loaders=0) as one:
        for epoch in one.epochs():
            model[0].requires_grad_(epoch > 0)
            for number, (features, labels) in enumerate(one.batches()):
                model[2].requires_grad_((epoch, number) > (2, 1))
                one.step(functional.cross_entropy(model(features.double()), labels))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def one_step_of_noise(rank):
    """The session's state after a step, and the estimate from gradients computed alone."""
    model, points = make_model().double(), Points(SAMPLES)
    order = epoch_order(SAMPLES, 0, 0)[:8].split([5, 3])
    gradients = []
    for part in order:
        features = torch.stack([points[int(i)][0] for i in part]).double()
        loss = functional.cross_entropy(model(features), torch.zeros(len(part)).long())
        gradients.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        )
    whole = (5 * gradients[0] + 3 * gradients[1]) / 8
    weighted = (5 * gradients[0].square().sum() + 3 * gradients[1].square().sum()) / 8
    trace, sqr_norm = estimate(float(weighted), float(whole.square().sum()), parts=2, batch=8)
    wanted = NoiseState(trace, sqr_norm, 1).noise_scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with Session(model, optimizer, points, plan=make_plan((5, 3)), loaders=0) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(model(features.double()), 0 * labels))
                found.append(one.noise_scale)
    return {"session": found[0], "alone": wanted}


# ---------------------------------------------------------------------------- batch normalization


def test_batch_norm_is_merged_by_samples_for_evaluation_and_checkpoints(found, folder):
    own = [each["batch norm"]["after"] for each in found]
    assert not torch.equal(own[0]["running_mean"], own[1]["running_mean"])
    mean = (5 * own[0]["running_mean"] + 3 * own[1]["running_mean"]) / 8
    moment = sum(
        share / 8 * (each["running_var"] + each["running_mean"].square())
        for share, each in zip((5, 3), own, strict=True)
    )
    merged = [each["batch norm"]["inside"] for each in found]
    kept = torch.load(folder / "norm" / "checkpoints" / "last.pt", weights_only=True)["model"]
    for statistics in (*merged, {name.removeprefix("0."): kept[name] for name in kept}):
        assert torch.allclose(statistics["running_mean"], mean)
        assert torch.allclose(statistics["running_var"], moment - mean.square())


def test_evaluation_leaves_every_workers_own_statistics(found):
    for each in found:
        before, after = each["batch norm"]["before"], each["batch norm"]["after"]
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_step_that_one_worker_spoils_leaves_the_statistics_of_all(found):
    for each in found:
        earlier, later = each["batch norm"]["skipped"]
        assert all(torch.equal(earlier[name], later[name]) for name in earlier)


def train_with_batch_norm(rank, folder):
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}

    def statistics():
        return {name: value.clone() for name, value in model[0].named_buffers()}

    def metric(outputs, labels):
        found["inside"] = statistics()
        return labels == 0

    plan = make_plan((5, 3))
    with Session(model, optimizer, Points(SAMPLES), plan=plan, run_folder=folder, loaders=0) as one:
        for _ in one.epochs():
            for number, (features, labels) in enumerate(one.batches()):
                earlier = statistics()
                spoilt = features * float("nan") if (rank, number) == (1, 2) else features
                if not one.step(functional.cross_entropy(model(spoilt), labels)):
                    found["skipped"] = earlier, statistics()
            found["before"] = statistics()
            one.evaluate(Points(7), metric)
            found["after"] = statistics()
    return found


# ----------------------------------------------------------------------------- stop, resume, refuse


def stop_and_resume(rank, folder):
    """Stopped twice by a signal that reaches the second worker only, and left once by both."""
    codes = []
    for piece, until in enumerate([(1, 2), (1, 5)]):
        try:
            # One without the folder, as on a host with a disk of its own, or one that joins.
            train(rank, (5, 3), folder, resume=piece > 0 and rank == 0, until=until)
        except SystemExit as stopped:
            codes.append(stopped.code)
    train(rank, (5, 3), folder, resume=rank == 1, leave=2)
    return {**train(rank, (5, 3), folder, resume=True), "codes": codes}


def test_stopped_by_a_signal_to_one_or_left_by_both_a_run_ends_with_the_same_bits(found, folder):
    for each in found:
        assert each["pieces"]["codes"] == [143, 143]
        assert torch.equal(each["pieces"]["weights"], each["whole"]["weights"])
        assert 0 < each["pieces"]["steps"] < 12 - 2 - 2 - 2
    summary = summary_in(folder / "pieces")
    assert summary.resumed == 3
    assert [epoch.samples for epoch in summary.epochs] == [SAMPLES] * 3


def refusals(rank, folder):
    """What both workers hear when the run cannot begin."""
    if rank == 0:
        (folder / "file").write_text("")
    return [
        str(raised(PlanError, train, rank, (8,), folder / "one")),
        str(raised(PlanError, train, rank, (4, 2, 2), folder / "three")),
        str(raised(FileError, train, rank, (5, 3), folder / "file" / "run")),
        str(raised(PlanError, train, rank, (5, 3) if rank else (4, 4))),
        str(raised(PlanError, train, rank, (5, 3), None if rank else folder / "some")),
    ]


def raised(kind, function, *args):
    try:
        function(*args)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def test_both_workers_hear_why_a_run_cannot_begin(found, folder):
    one, two = found[0]["refusals"], found[1]["refusals"]
    assert one == two
    assert "for 1 worker, and 2 running: start 1, or plan again with workers=2" in one[0]
    assert "for 3 workers, and 2 running" in one[1]
    assert f"cannot write {folder}/file/run: Not a directory" in one[2]
    assert re.search(
        r"^worker 1 \(.+/cpu:1\) has plan stages\.0\.\S+=5, and worker 0 .+ has stages\.0\.\S+=4:",
        one[3],
    )
    assert re.search(r"^worker 1 .+ has run_folder None, and worker 0 .+ has a folder", one[4])
