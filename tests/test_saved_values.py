"""What checkpoints give back, and what they refuse before it is too late."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from batchwright.errors import FileError
from batchwright.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from batchwright.training.checkpoints.saved_values import refuse_unsaveable
from test_session import Points, make_model, make_session, make_tiny_plan

Pair = namedtuple("Pair", "a b")


class Color(enum.IntEnum):
    RED = 1


class Thing:
    """Something of the user's whose state is one value."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def back(value, tmp_path):
    """What comes out of a checkpoint that PyTorch opens without this package."""
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"value": value})
    torch.load(path, weights_only=True)
    return load_checkpoint(path)["value"]


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 2**200, 1.5, float("inf"), 1 + 2j, "text", b"bytes", bytearray(b"more")),
        *([1, (2, [3])], {"a": {1: 2, (1, "b"): None}}, {1, 2}, Counter("abca")),
        *(torch.float16, torch.device("cpu"), torch.Size([2, 3])),
        *(Path("a/b"), [Path("/c")]),
        OrderedDict([("b", 1), ("a", 2)]),
    ],
    ids=repr,
)
def test_plain_values_and_paths_come_back_as_they_were(value, tmp_path):
    refuse_unsaveable(value, "it")
    found = back(value, tmp_path)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.complex128(1 + 2j), 1 + 2j),
        (np.str_("a"), "a"),
    ],
    ids=repr,
)
def test_numbers_of_numpy_come_back_as_pythons(value, plain, tmp_path):
    refuse_unsaveable({value: [value]}, "it")
    found = back({value: [value]}, tmp_path)
    assert found == {plain: [plain]}
    assert {type(one) for one in [*found, *found[plain]]} == {type(plain)}


@pytest.mark.parametrize(
    "array",
    [
        *(np.arange(6.0).reshape(2, 3), np.array(2.5), np.zeros((0, 3), np.float16)),
        *(np.array([True, False]), np.array([1, 2**63], np.uint64), np.array([1 + 2j])),
        *(np.arange(5)[::-2], np.array([1, 2], ">i4")),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_arrays_come_back_as_arrays(array, tmp_path):
    refuse_unsaveable([array], "it")
    (found,) = back([array], tmp_path)
    assert type(found) is np.ndarray
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.shape == array.shape
    assert np.array_equal(found, array)
    found[...] = 1  # and may be written to


def test_the_state_of_a_module_keeps_the_versions_of_its_layers(tmp_path):
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    found = back(state, tmp_path)
    assert type(found) is OrderedDict
    assert found._metadata == state._metadata
    assert all(torch.equal(found[key], state[key]) for key in state)


class Marked(torch.Tensor):
    """A tensor of a kind of its own."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Pair(1, 2), r"\['value'\] is of type test_saved_values\.Pair"),
        ([{"x": Color.RED}], r"\['value'\]\[0\]\['x'\] is of type test_saved_values\.Color"),
        (defaultdict(int), r"\['value'\] is of type collections\.defaultdict"),
        (frozenset({1}), r"\['value'\] is of type builtins\.frozenset"),
        (np.longdouble(1), r"\['value'\] is of type numpy\.longdouble"),
        (np.array(["a"]), r"\['value'\] is of type numpy\.ndarray"),
        (np.array([None]), r"\['value'\] is of type numpy\.ndarray"),
        (np.ma.array([1]), r"\['value'\] is of type numpy\.ma\S*\.MaskedArray"),
        (torch.zeros(2).as_subclass(Marked), r"\['value'\] is of type test_saved_values\.Marked"),
        (len, r"\['value'\] is of type builtins\.builtin_function"),
        ({Path("a"): 1}, r"\['value'\] has a key of type PosixPath"),
        ({(1, Path("a")): 1}, r"\['value'\] has a key of type tuple"),
        ({Path("a")}, r"\['value'\] has a member of type PosixPath"),
        ({Color.RED: 1}, r"\['value'\] is of type test_saved_values\.Color"),
        ({"batchwright/kind": 1}, r"\['value'\] has the key 'batchwright/kind'"),
        (torch.zeros(2, device="meta"), r"\['value'\] is a tensor on the meta device"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_as_it_was_is_refused_and_the_file_before_stays(
    value, kind, tmp_path
):
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"value": 1})
    with pytest.raises(FileError, match=kind):
        refuse_unsaveable({"value": value}, "it")
    with pytest.raises(FileError, match=kind):
        save_checkpoint(path, {"value": value})
    assert load_checkpoint(path)["value"] == 1
    assert list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------------------------- in sessions


def run(folder, *, resume=False, things=None, each_epoch=lambda: None, model=None, **groups):
    model = model or make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **groups)
    plan = make_tiny_plan(epochs=3)
    with make_session(model, optimizer, plan=plan, run_folder=folder, resume=resume) as one:
        for name, thing in (things or {}).items():
            one.keep(name, thing(optimizer) if callable(thing) else thing)
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(model(features), labels))
            each_epoch()
    return optimizer


@pytest.mark.parametrize(
    "thing", [Thing(np.float64(1.5)), Thing(Path("/a")), Thing(np.arange(3)), Thing({"a": (1,)})]
)
def test_a_kept_thing_comes_back_in_a_resumed_run(thing, tmp_path):
    run(tmp_path / "run", things={"thing": thing})
    again = Thing()
    run(tmp_path / "run", resume=True, things={"thing": again})
    assert np.array_equal(again.value, thing.value)
    assert isinstance(thing.value, type(again.value))


def test_numbers_of_numpy_in_the_optimizer_and_in_schedulers_do_no_harm(tmp_path):
    plateaus = []

    def plateau(optimizer):
        plateaus.append(lr_scheduler.ReduceLROnPlateau(optimizer))
        return plateaus[-1]

    def sequence(optimizer):
        parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 10)]
        return lr_scheduler.SequentialLR(optimizer, parts, [2])

    def best():
        plateaus[-1].best = np.float64(0.25)

    things = {"plateau": plateau, "sequence": sequence}
    run(tmp_path / "run", things=things, each_epoch=best, weight_decay=np.float64(1e-4))
    optimizer = run(tmp_path / "run", resume=True, things=things)
    assert optimizer.param_groups[0]["weight_decay"] == 1e-4
    assert plateaus[-1].best == 0.25


def test_an_optimizer_that_could_not_be_resumed_is_refused_at_the_start(tmp_path):
    kind = r"optimizer's state_dict\(\)\['param_groups'\]\[0\]\['dampening'\] is of type .*Color"
    with pytest.raises(FileError, match=kind):
        run(tmp_path / "run", dampening=Color.RED)
    run(None, dampening=0.0)


def test_a_model_that_could_not_be_resumed_is_refused_at_the_start(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return Pair(1, 2)

        def set_extra_state(self, state):
            pass

    with pytest.raises(FileError, match=r"model's state_dict\(\)\['_extra_state'\] is of type"):
        run(tmp_path / "run", model=Odd(4, 3))


def test_a_thing_that_could_not_be_resumed_is_refused_by_keep(tmp_path):
    with make_session(run_folder=tmp_path / "run") as one:
        with pytest.raises(FileError, match=r"keep\('pair'\)\['value'\] is of type .*Pair"):
            one.keep("pair", Thing(Pair(1, 2)))
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(one.model(features), labels))
    with make_session() as one:  # keeps nothing, so anything may be given
        one.keep("pair", Thing(Pair(1, 2)))


def test_a_thing_that_changes_for_the_worse_ends_the_run_and_the_checkpoint_before_is_whole(
    tmp_path,
):
    thing, path = Thing(1), tmp_path / "run" / "checkpoints" / "best.pt"
    one = make_session(run_folder=tmp_path / "run", plan=make_tiny_plan(epochs=3))

    def loop():
        with one:
            one.keep("thing", thing)
            for epoch in one.epochs():
                for features, labels in one.batches():
                    one.step(functional.cross_entropy(one.model(features), labels))
                one.evaluate(Points(4), lambda o, y, e=epoch: torch.full(y.shape, float(e)))
                thing.value = Pair(1, 2) if epoch else 2

    with pytest.raises(FileError, match=r"keep\('thing'\)\['value'\] is of type .*Pair"):
        loop()
    assert load_checkpoint(path)["kept"] == {"thing": {"value": 2}}
