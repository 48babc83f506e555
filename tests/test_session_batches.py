"""Loops over `session.batches()` that are left and entered again: each sample still counts once."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
import torch
from torch.nn import functional

import batchwright as bw
from batchwright import Session
from batchwright.distributed.server_child import SERVER, SERVER_KEY
from batchwright.training import recorder
from hosting import KEY, hosted
from served import make_served_plan
from test_session import SAMPLES, Points, make_model, make_tiny_plan, weights_of

BROKEN = 5


class Numbered(Points):
    """Each sample says its number too."""

    def __getitem__(self, index):
        return (*super().__getitem__(index), index)


class Training:
    """A run in pieces: loops of ``piece`` batches, entered until nothing comes; 0 is one loop."""

    def __init__(self, piece, plan, *, folder=None, loaders=0, memory=99, samples=SAMPLES):
        self.piece, self.memory = piece, memory
        self.model = make_model()
        self.numbers, self.updates = [], 0
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        with Session(
            self.model,
            optimizer,
            Numbered(samples),
            plan=plan,
            run_folder=folder,
            loaders=loaders,
        ) as self.session:
            for _ in self.session.epochs():
                self.numbers.append([])
                while self.loop():
                    pass
        self.weights = weights_of(self.model)

    def loop(self):
        """One loop; whether it found something."""
        found, batches = False, self.session.batches()
        for features, labels, indices in islice(batches, self.piece) if self.piece else batches:
            found = True
            self.take(features, labels, indices)
        return found

    def take(self, features, labels, indices):
        meter = self.session._run.stepper._state.meter
        repeated = meter.repeated
        self.updates += self.session.step(lambda: self.loss(features, labels))
        if meter.repeated == repeated:
            self.numbers[-1] += indices.tolist()

    def loss(self, features, labels):
        if len(labels) > self.memory:
            raise torch.OutOfMemoryError("the test allows no more")
        return functional.cross_entropy(self.model(features), labels)


def same(one, other):
    assert one.numbers == other.numbers
    assert one.updates == other.updates
    return torch.equal(one.weights, other.weights)


@pytest.mark.parametrize("piece", [1, 2, 3, 5])
@pytest.mark.parametrize("micro", [64, 2], ids=["whole steps", "micro-batches"])
def test_a_loop_goes_on_where_the_one_before_was_left(piece, micro):
    """With micro-batches also in the middle of a step."""
    plan = make_tiny_plan(micro=micro)
    pieces = Training(piece, plan)
    assert [Counter(epoch) for epoch in pieces.numbers] == [Counter(range(SAMPLES))] * 2
    assert same(pieces, Training(0, plan))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [99, 3], ids=["enough memory", "too little memory"])
def test_what_loader_processes_have_fetched_ahead_is_used(memory):
    plan = make_tiny_plan()
    assert same(Training(2, plan, loaders=2, memory=memory), Training(0, plan, memory=memory))


@pytest.mark.parametrize("piece", [1, 2])
def test_a_step_is_repeated_in_the_next_loop_where_memory_ran_out_at_the_end_of_one(piece):
    plan = make_tiny_plan()
    assert same(Training(piece, plan, memory=3), Training(0, plan, memory=3))


def test_steps_after_which_a_loop_was_left_are_recorded_and_kept(tmp_path, monkeypatch):
    """At the very end of an epoch, too, where no loop comes after."""
    monkeypatch.setattr(recorder, "STEP_LINE_SECONDS", 0.0)  # a line for each step

    class Leaving(Training):
        def loop(self):
            batches = self.session.batches()
            for number, batch in enumerate(batches):
                self.take(*batch)
                if number == 1 or sum(map(len, self.numbers)) % SAMPLES == 0:
                    break
            return sum(map(len, self.numbers)) % SAMPLES

    noted = []
    for name, kind in (("whole", Training), ("left", Leaving)):
        kind(0, make_tiny_plan(checkpoint_steps=5), folder=tmp_path / name)
        lines = bw.metrics(tmp_path / name)
        noted.append([(one["epoch"], one["step"]) for one in lines if one["kind"] == "step"])
        assert (tmp_path / name / "checkpoints" / "previous.pt").exists()
    assert noted[0] == noted[1] != []


def test_epochs_that_are_left_within_a_step_go_on_there():
    found = []
    for left_after in (0, 2):
        with open_session(epochs=2, micro=2) as one:

            def take(batch, one=one):
                one.step(functional.cross_entropy(one.model(batch[0]), batch[1]))

            for _ in one.epochs():
                for batch in islice(one.batches(), left_after):
                    take(batch)
                break
            for _ in one.epochs():
                for batch in one.batches():
                    take(batch)
            found.append(weights_of(one.model))
    assert torch.equal(*found)


def test_a_loop_of_the_epoch_before_may_end_while_a_batch_is_open():
    """Autocast stays on for that batch."""
    found, former = [], None
    with open_session(epochs=2, precision="bfloat16") as one:
        for _ in one.epochs():
            batches = one.batches()
            for features, labels in islice(batches, 5):
                if former is not None:
                    former.close()
                outputs = one.model(features)
                found.append(outputs.dtype)
                one.step(functional.cross_entropy(outputs, labels))
            former = batches
    assert set(found) == {torch.bfloat16}


def open_session(epochs=1, **changes):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = make_tiny_plan(epochs=epochs, **changes)
    return Session(model, optimizer, Points(), plan=plan, loaders=0)


def test_two_loops_at_once_are_refused_and_either_can_be_ended():
    with open_session() as one:
        for _ in one.epochs():
            first, steps = one.batches(), 0
            features, labels = next(first)
            one.step(functional.cross_entropy(one.model(features), labels))
            with pytest.raises(RuntimeError, match="still open in another loop of this epoch"):
                next(one.batches())
            features, labels = next(first)  # and nothing is lost by it
            one.step(functional.cross_entropy(one.model(features), labels))
            first.close()
            for features, labels in one.batches():
                one.step(functional.cross_entropy(one.model(features), labels))
                steps += 1
            assert steps == 3
            assert list(one.batches()) == []


def test_a_batch_that_was_left_without_its_step_is_refused_in_the_next_loop():
    one = open_session()
    next(one.epochs())
    for _ in one.batches():
        break
    with pytest.raises(RuntimeError, match=r"before session\.step\(\)"):
        next(one.batches())
    one.__exit__(None, RuntimeError("as above"), None)


class Broken(Points):
    """One sample cannot be read."""

    def __getitem__(self, index):
        if index == BROKEN:
            raise OSError(f"sample {index} cannot be read")
        return super().__getitem__(index)


def test_an_error_that_ended_the_batches_is_named_again_where_the_loop_goes_on_after_it():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one = Session(model, optimizer, Broken(), plan=make_tiny_plan(epochs=1), loaders=0)

    def careless():
        for _ in one.epochs():
            try:
                for features, labels in one.batches():
                    one.step(functional.cross_entropy(one.model(features), labels))
            except OSError:
                pass

    def stubborn():
        for features, labels in one.batches():
            one.step(functional.cross_entropy(one.model(features), labels))

    with (
        one,
        pytest.raises(RuntimeError, match=r"cannot go on: OSError: sample 5 cannot") as caught,
    ):
        careless()
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(RuntimeError, match=r"cannot go on: OSError: sample 5 cannot be read"):
        stubborn()


def test_batches_are_refused_once_all_epochs_are_over():
    with open_session() as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(one.model(features), labels))
        with pytest.raises(RuntimeError, match=r"outside of session\.epochs"):
            next(one.batches())


@pytest.mark.slow
def test_two_workers_may_leave_their_loops_where_they_like(crew):
    """The first after every step, the second within steps, and where its memory runs out."""
    found = crew.together(both, workers=2)
    (whole, pieces), (other_whole, other_pieces) = found
    assert torch.equal(whole[1], pieces[1])
    assert torch.equal(other_whole[1], pieces[1])
    assert (whole[0], other_whole[0]) == (pieces[0], other_pieces[0])
    for one, other in zip(pieces[0], other_pieces[0], strict=True):
        assert sorted(one + other) == list(range(SAMPLES))


def both(rank):
    plan = make_tiny_plan((5, 6))
    runs = [Training(piece, plan, memory=99 - 96 * rank) for piece in (0, 1 + rank)]
    return [(run.numbers, run.weights) for run in runs]


@pytest.mark.slow
def test_rounds_with_a_parameter_server_go_on_likewise(monkeypatch):
    plan = make_served_plan((8,), (29,), server={"exchange_steps": 3}, epochs=2)
    runs = []
    for piece in (0, 1, 2):
        with hosted(plan) as address:
            environment = {SERVER: address, SERVER_KEY: KEY.hex(), "RANK": "0"}
            for name, value in {**environment, "LOCAL_WORLD_SIZE": "1"}.items():
                monkeypatch.setenv(name, value)
            runs.append(Training(piece, plan, samples=29))
    seen = Counter(number for numbers in runs[0].numbers for number in numbers)
    assert seen == Counter([*range(29), *range(29)])
    assert same(runs[1], runs[0])
    assert same(runs[2], runs[0])
