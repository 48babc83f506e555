"""Evaluations that run out of memory, and that leave nothing behind that training stumbles over."""

from __future__ import annotations

import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchwright.errors import ArgumentError, BatchwrightError, DataError, TrainingError
from batchwright.training.evaluate.evaluation import evaluation_batch, merged_batch_norm
from test_session import (
    CLASSES,
    FEATURES,
    Points,
    make_model,
    make_session,
    make_tiny_plan,
    weights_of,
)

HELD_OUT = 21


class Memory:
    """A forward pass for `Session.evaluate` into which only so many samples fit."""

    def __init__(self, most):
        self.most = most
        self.sizes, self.kept, self.alive = [], [], []

    def __call__(self, model, batch):
        features, labels = batch
        self.alive.append(sum(one() is not None for one in self.kept))
        activations = model(features)
        self.kept.append(weakref.ref(activations))
        self.sizes.append(len(labels))
        if len(labels) > self.most:
            raise torch.OutOfMemoryError("the test allows no more")
        return activations, labels


def counting(outputs, labels):
    return {"ones": torch.ones(len(labels)), "label": labels, "sum": outputs.sum(1)}


@pytest.mark.parametrize("loaders", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_evaluation_without_enough_memory_goes_on_in_smaller_parts(loaders):
    memory = Memory(5)
    with make_session(loaders=loaders) as one:
        wanted = one.evaluate(Points(HELD_OUT), counting, batch_size=5)
        with pytest.warns(UserWarning, match="with 16 samples .* goes on with 8 from") as told:
            found = one.evaluate(Points(HELD_OUT), counting, forward=memory, batch_size=16)
        assert [warning.filename for warning in told] == [__file__] * 2
        assert memory.sizes == [16, 8, 4, 4, 4, 4, 4, 1]
        assert found == pytest.approx(wanted)
        assert found["ones"] == 1
        memory.sizes.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = one.evaluate(Points(HELD_OUT), counting, forward=memory)
        assert memory.sizes == [4, 4, 4, 4, 4, 1]
        assert again == found


@pytest.mark.parametrize(("micro", "samples"), [(64, 64), (4, 7)])
def test_a_forward_pass_holds_the_micro_batch_or_the_pixels_of_64_small_images(micro, samples):
    changed = {"resolution": 96, "micro_batch_size": micro}
    stage = make_tiny_plan().stages[0].model_copy(update=changed)
    assert evaluation_batch(make_tiny_plan().model_copy(update={"stages": (stage,)})) == samples


def test_memory_that_runs_out_on_the_way_counts_nothing_twice():
    class Filling(Memory):
        def __call__(self, model, batch):
            self.most = 8 if len(self.sizes) < 2 else 3  # somebody else takes the rest
            return super().__call__(model, batch)

    memory = Filling(8)
    with make_session() as one:
        with pytest.warns(UserWarning, match="with 5 samples"):
            found = one.evaluate(Points(HELD_OUT), counting, forward=memory, batch_size=8)
        assert memory.sizes == [8, 8, 5, 2, 2, 1]
        assert (found["ones"], found["label"]) == (1, 1)  # a third of the labels are 0, 1 and 2


def test_nothing_of_a_failed_attempt_is_held_in_the_next():
    memory = Memory(4)
    with make_session() as one, pytest.warns(UserWarning, match="memory ran out"):
        one.evaluate(Points(HELD_OUT), counting, forward=memory, batch_size=16)
    assert set(memory.alive) == {0}


def test_a_metric_without_enough_memory_is_no_other_case():
    def metric(outputs, labels):
        if len(labels) > 6:
            raise MemoryError
        return labels == labels

    with make_session() as one, pytest.warns(UserWarning, match="with 10 samples"):
        assert one.evaluate(Points(HELD_OUT), metric, batch_size=10) == {"top1": 1}


def test_where_not_even_one_sample_fits_it_says_so():
    with (
        pytest.warns(UserWarning, match="goes on with 1"),
        make_session() as one,
        pytest.raises(
            TrainingError,
            match=r"/cpu:0 has not enough memory to evaluate 1 sample.*\(\w*Error",
        ),
    ):
        one.evaluate(Points(HELD_OUT), counting, forward=Memory(0), batch_size=4)


def test_another_error_of_a_forward_pass_is_nobodys_memory():
    def broken(model, batch):
        raise RuntimeError("shapes do not fit")

    with make_session() as one, pytest.raises(RuntimeError, match="shapes do not fit"):
        one.evaluate(Points(HELD_OUT), counting, forward=broken)


@pytest.mark.slow
def test_each_worker_goes_on_by_itself(crew):
    found = crew.together(both, workers=2)
    assert found[0][0] == found[1][0] == {"ones": 1.0, "label": 1.0}
    assert [sizes for _, sizes in found] == [[11], [10, 5, 2, 2, 2, 2, 2]]


def both(rank):
    memory = Memory(99 if rank == 0 else 3)

    def metric(outputs, labels):
        return {"ones": torch.ones(len(labels)), "label": labels}

    with warnings.catch_warnings(), make_session(plan=make_tiny_plan((5, 5))) as one:
        warnings.simplefilter("ignore")
        means = one.evaluate(Points(HELD_OUT), metric, forward=memory)
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(one.model(features), labels))
    return means, memory.sizes


@pytest.mark.slow
def test_parts_of_a_data_set_that_workers_have_made_themselves_are_refused(crew):
    line = "got 10 samples on worker 1 and 11 on worker 0: give all workers the whole data set"
    assert all(line in said for said in crew.together(in_parts, workers=2))


def in_parts(rank):
    """The error of a worker whose loop has shared out the held-out samples before."""
    with pytest.raises(DataError) as told, make_session(plan=make_tiny_plan((5, 5))) as one:
        one.evaluate(Points(HELD_OUT // 2 + (rank == 0)), counting)
    return str(told.value)


@pytest.mark.slow
def test_an_average_that_each_worker_made_of_other_weights_is_worker_0s_on_all(crew):
    """Each worker would have evaluated its part of the samples with weights of its own."""
    (first, means, before), (second, others, own) = crew.together(averaging, workers=2)
    assert torch.equal(first, second)
    assert torch.equal(first, before)
    assert not torch.equal(first, own)
    assert means == others


def averaging(rank):
    """Weights of an average that was made before the session, after an evaluation; and before."""
    torch.manual_seed(rank)
    average, means = nn.Linear(FEATURES, CLASSES), []
    before, other = weights_of(average), nn.Linear(FEATURES, CLASSES + rank)

    def evaluate():
        with make_session(plan=make_tiny_plan((5, 5))) as one:
            means.append(one.evaluate(Points(HELD_OUT), counting, model=average))
            one.evaluate(Points(HELD_OUT), counting, model=other)

    with pytest.raises(ArgumentError, match="other weights on worker 1 than on worker 0"):
        evaluate()
    return weights_of(average), means, before


@pytest.mark.slow
def test_weights_of_the_session_stay_in_another_model_that_only_some_evaluate_in_vain(crew):
    """All would wait for each other, or take each other's numbers for something else."""
    told = crew.together(wrapping, workers=2)
    assert any("evaluates another model" in one and "on all workers alike" in one for one in told)


def wrapping(rank):
    """The error of evaluations that are not the same on all workers."""
    model = make_model()

    def evaluate():
        with make_session(model, plan=make_tiny_plan((5, 5))) as one:
            with torch.no_grad():
                model.weight += rank  # as processors may round differently
            own = weights_of(model)
            one.evaluate(Points(HELD_OUT), counting, model=nn.Sequential(model))
            assert torch.equal(weights_of(model), own)
            average = nn.Linear(FEATURES, CLASSES) if rank else None
            one.evaluate(Points(HELD_OUT), counting, model=average)

    with pytest.raises(BatchwrightError) as told:
        evaluate()
    return str(told.value)


# ------------------------------------------------------------------------------ nothing left behind


class Cached(nn.Module):
    """Keeps a tensor of its first forward pass, as tables of positions are kept."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(FEATURES, CLASSES), None

    def forward(self, features):
        if self.table is None:
            self.table = torch.linspace(0.9, 1.1, FEATURES)
        return self.linear(features * self.table)


def test_merged_statistics_have_no_variance_below_zero():
    """A constant channel has none, and rounding of its squared mean would make it NaN."""
    layer, means = nn.BatchNorm1d(101), torch.linspace(1e5, 1e7, 101)
    layer.running_mean.copy_(means)
    layer.running_var.zero_()
    others = SimpleNamespace(size=2, sum=lambda own: own + 2 * own)  # of the same statistics
    with merged_batch_norm(layer, others, 1 / 3):
        torch.testing.assert_close(layer.running_mean, means)
        assert layer.running_var.min() >= 0


def test_what_a_module_keeps_of_an_evaluation_can_be_trained_with():
    model = Cached()
    with make_session(model) as one:
        one.evaluate(Points(7), counting)
        for _ in one.epochs():
            for features, labels in one.batches():
                features.requires_grad_()
                assert one.step(functional.cross_entropy(model(features), labels))
                assert features.grad is not None


def test_an_evaluation_between_a_batch_and_its_step_leaves_weights_their_gradients():
    """Autocast, which is on meanwhile, keeps the weights that it has cast."""
    weights = []
    for evaluates in (False, True):
        model = make_model()
        plan = make_tiny_plan(precision="bfloat16", epochs=1)
        with make_session(model, plan=plan) as one:
            for _ in one.epochs():
                for features, labels in one.batches():
                    if evaluates:
                        one.evaluate(Points(7), counting)
                    assert one.step(functional.cross_entropy(model(features).float(), labels))
        weights.append(weights_of(model))
    assert torch.equal(*weights)


@pytest.mark.parametrize("micro", [64, 3])
def test_an_evaluation_in_the_middle_of_a_step_is_of_the_model_before_it(micro, tmp_path):
    """And so is ``best.pt``: weights and statistics of normalization are of the same step."""
    model, before, seen = make_model(extras=True), {}, []

    def statistics():
        return {name: value.clone() for name, value in model.named_buffers()}

    def metric(outputs, labels):
        seen.append(statistics())
        return labels == labels

    def same(one, other):
        return all(torch.equal(one[name], other[name]) for name in one)

    plan = make_tiny_plan(micro=micro, epochs=1)
    with make_session(model, plan=plan, run_folder=tmp_path / "run") as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                step = one._run.state.step
                first = step not in before
                before.setdefault(step, statistics())
                loss = functional.cross_entropy(model(features), labels)
                if step == 2 and first == (micro == 64):  # else with its second micro-batch
                    passed = statistics()
                    one.evaluate(Points(4), metric)
                    assert same(statistics(), passed)
                    assert not same(passed, before[2])
                one.step(loss)
    assert same(seen[0], before[2])
    best = torch.load(tmp_path / "run" / "checkpoints" / "best.pt", weights_only=True)
    assert same(before[2], best["model"])
    assert same(before[2], best["workers"][0]["buffers"])


def test_a_data_set_that_is_refused_leaves_the_one_before(tmp_path):
    held_out = Points(7)
    with make_session() as one:
        wanted = one.evaluate(held_out, counting)
        with pytest.raises(DataError, match="can only be iterated"):
            one.evaluate(iter(held_out), counting)
        assert one.evaluate(held_out, counting) == wanted


def test_a_session_that_was_left_evaluates_and_trains_no_more():
    held_out = Points(7)
    with make_session() as one:
        one.evaluate(held_out, counting)
        next(one.epochs())
    with pytest.raises(RuntimeError, match=r"session\.evaluate\(\) behind its `with` block"):
        one.evaluate(held_out, counting)
    with pytest.raises(RuntimeError, match=r"session\.epochs\(\) behind its `with` block"):
        next(one.epochs())


@pytest.mark.slow
def test_an_evaluation_between_the_passes_of_several_workers_leaves_batch_norm_alone(crew):
    """Its layers have the statistics of all workers meanwhile."""
    for plain, evaluated in crew.together(with_batch_norm, workers=2):
        assert torch.equal(plain, evaluated)


def with_batch_norm(rank):
    del rank
    weights = []
    for evaluates in (False, True):
        model = nn.Sequential(nn.BatchNorm1d(FEATURES), make_model())
        with make_session(model, plan=make_tiny_plan((5, 5), epochs=1)) as one:
            for _ in one.epochs():
                for features, labels in one.batches():
                    loss = functional.cross_entropy(model(features), labels)
                    if evaluates:
                        one.evaluate(Points(7), counting)
                    one.step(loss)
        weights.append(torch.cat([weights_of(model), model[0].running_var]))
    return weights
