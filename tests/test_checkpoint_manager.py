"""Checkpoints: written behind training's back, with the one before kept, found again by all."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
import weakref
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.distributed.group import Group
from batchwright.distributed.processes import STARTED, STARTED_AGAIN
from batchwright.errors import BatchwrightError, FileError, PlanError
from batchwright.records.run_folder import has_checkpoint
from batchwright.reporting.data.accounting import accounting
from batchwright.training.all_reduce_run import AllReduceRun
from batchwright.training.batches.randomness import (
    random_states,
    restore_random_states,
    seed_worker,
)
from batchwright.training.checkpoints import checkpoint_lookup, checkpoint_writer
from batchwright.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from batchwright.training.checkpoints.checkpoint_lookup import find_checkpoint
from batchwright.training.checkpoints.checkpoint_manager import CheckpointManager, RunState
from batchwright.training.recorder import Recorder
from batchwright.training.step.epoch_totals import EpochMeter
from batchwright.workload.starting_weights import file_normalization
from test_session import Counter, make_tiny_plan, wait_until


class Run:
    """A network with everything that a checkpoint holds, and its keeper."""

    def __init__(self, folder, group=None, *, plan=None, seed=0):
        torch.manual_seed(seed)
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = RunState()
        self.group = group or Group(torch.device("cpu"))
        self.plan = plan or make_tiny_plan()
        recorder = Recorder(folder if self.group.rank == 0 else None, self.plan)
        self.keeper = CheckpointManager(
            folder, self.plan, self.model, self.optimizer, self.group, recorder, {}
        )
        if self.group.rank == 0:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)

    def train(self, steps=1):
        """Change all of it."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 4)).square().sum().backward()
            self.optimizer.step()
            self.state.step += 1
            self.state.steps += 1
            self.state.meter.local_samples += 5
            self.state.meter.samples += 5 * self.group.size

    def save(self, name="last"):
        self.keeper.save(name, self.state, 1 / self.group.size)

    def values(self):
        """Everything that training changes, as one list of tensors."""
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        return [v.detach().clone() for v in (*self.model.state_dict().values(), *momenta)]

    def path(self, name="last"):
        return self.folder / "checkpoints" / f"{name}.pt"

    def step_in(self, name="last"):
        return load_checkpoint(self.path(name))["state"]["step"]

    def notes(self):
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["text"] for line in lines]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


@pytest.fixture
def slow_disk(monkeypatch):
    """Nothing reaches the disk before the event is set; how often it was asked to."""
    released = threading.Event()
    synced = os.fsync

    def sync(descriptor):
        assert released.wait(300)
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    yield released
    released.set()


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# ---------------------------------------------------------------------------------------- writing


def test_training_goes_on_while_its_former_state_is_written(run, slow_disk):
    counter = Counter()
    run.keeper.keep("counter", counter)
    run.train(3)
    before = run.values()
    run.save()
    run.train(2)
    counter.count = 9
    assert not run.path().exists()
    slow_disk.set()
    run.keeper.settle()
    again = Run(run.folder, seed=1)
    assert again.keeper.restore(again.state)
    assert same(again.values(), before)
    assert (again.state.step, again.state.steps) == (3, 3)
    kept = Counter()
    again.keeper.keep("counter", kept)
    assert kept.count == 0


def test_of_those_that_wait_for_the_disk_only_the_newest_is_written(run, slow_disk):
    for _ in range(3):
        run.train()
        run.save()
        run.save("best")
    waiting = run.keeper._writer._waiting
    assert {name: content["state"]["step"] for name, content in waiting.items()} == {
        "last": 3,
        "best": 3,
    }
    slow_disk.set()
    run.keeper.settle()
    assert (run.step_in("last"), run.step_in("previous"), run.step_in("best")) == (3, 1, 3)


@pytest.fixture
def written(monkeypatch):
    """Names of the checkpoints that are written, in their order."""
    names = []
    save = checkpoint_writer.save_checkpoint
    monkeypatch.setattr(
        checkpoint_writer,
        "save_checkpoint",
        lambda path, *args, **kwargs: (names.append(path.stem), save(path, *args, **kwargs)),
    )
    return names


def test_what_knows_the_score_of_the_best_is_written_after_it(run, slow_disk, written):
    """Else a run that was killed in between would know a score that no model has."""
    for name in ("best", "last", "best"):
        run.save(name)
    slow_disk.set()
    run.keeper.settle()
    assert written == ["best", "best", "last"]


def test_a_best_stays_while_a_last_waits_that_knows_its_score(run, slow_disk):
    for name in ("epoch-1", "best", "last"):
        run.save(name)
    run.keeper._writer.forget("best")  # as a better one is about to be copied
    assert run.keeper._writer._waiting.keys() >= {"best", "last"}


def test_nothing_is_written_after_an_error(run, monkeypatch):
    names = []

    def full(path, *_, **__):
        names.append(path.stem)
        raise FileError("the test's disk is full")

    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", full)
    run.save("best")
    run.save()
    with pytest.raises(FileError, match="full"):
        run.keeper.settle()
    run.keeper.close()
    assert names == ["best"]


def test_those_that_stay_are_written_before_what_is_resumed_from(run, slow_disk, written):
    """Else a run that was killed in between would go on without them."""
    for name in ("best", "last", "epoch-1", "best", "epoch-2"):
        run.save(name)
    slow_disk.set()
    run.keeper.settle()
    assert written == ["best", "epoch-1", "epoch-2", "best", "last"]


def gone_on_from_its_best(run):
    """Another run in the same folder, once the best is written."""
    run.save("best")
    run.keeper.settle()
    before = run.values()
    again = Run(run.folder, seed=1)
    assert has_checkpoint(run.folder)
    assert again.keeper.restore(again.state)
    assert same(again.values(), before)
    return again


def test_a_run_goes_on_from_its_best_where_that_is_newer_than_its_last(run):
    """Else the best would be of an epoch that the resumed run never has."""
    run.save()
    run.train(3)
    run.state.note_score({"top1": 3.0}, 4)
    again = gone_on_from_its_best(run)
    assert again.state.step == 3
    assert not again.state.note_score({"top1": 2.0}, 4)
    told = "resumed at epoch 1 after 3 steps of it, from best.pt, the newest"
    assert again.notes() == [told]


def test_a_newer_best_that_is_damaged_is_told_and_the_last_is_used(run, monkeypatch, capsys):
    run.save()
    run.train()
    run.save("best")
    run.keeper.settle()

    def load(path, *, mapped=False):
        if path.stem == "best" and not mapped:
            raise FileError(f"{path} is no readable checkpoint: it is damaged")
        return load_checkpoint(path, mapped=mapped)

    monkeypatch.setattr(checkpoint_lookup, "load_checkpoint", load)
    again = Run(run.folder)
    assert again.keeper.restore(again.state)
    assert again.state.step == 0
    for said in (again.notes()[1], capsys.readouterr().err):
        assert f"{run.path('best')} is no readable checkpoint: it is damaged; " in said
        assert f"{run.path()} is used instead: resumed at epoch 1 after 0 steps of it" in said
    assert again.state.note_score({"top1": 1.0}, 4)


def test_last_and_best_are_never_both_in_memory(run, monkeypatch):
    """Each worker of a machine reads them."""
    run.save()
    run.train()
    run.save("best")
    run.keeper.settle()
    there = []

    class Content(dict):
        """Unlike a dict, it can be referred to weakly."""

    def load(path, *, mapped=False):
        if mapped:
            return load_checkpoint(path, mapped=True)
        assert [one() for one in there if one() is not None] == []
        content = Content(load_checkpoint(path))
        there.append(weakref.ref(content))
        return content

    monkeypatch.setattr(checkpoint_lookup, "load_checkpoint", load)
    found = find_checkpoint(run.path().parent, run.group)
    assert (found.path, len(there)) == (run.path("best"), 2)


def test_a_best_that_the_run_does_not_know_is_replaced_by_the_next(run):
    """An earlier version's parameter server has written one that nothing can go on from."""
    run.state.note_score({"top1": 2.0}, 4)
    run.save()
    run.train()
    run.state.note_score({"top1": 3.0}, 4)
    run.save("best")
    run.keeper.settle()
    save_checkpoint(run.path("best"), load_checkpoint(run.path("best")) | {"server": {}})
    again = Run(run.folder)
    assert again.keeper.restore(again.state)
    assert again.state.step == 0
    assert again.state.note_score({"top1": 1.0}, 4)


@pytest.mark.parametrize("older", [0.5, None])
def test_a_best_that_a_killed_run_has_not_written_is_not_taken_for_written(run, older):
    if older is not None:
        run.state.best_score = older
        run.save("best")
    run.state.best_score = 0.9  # of a model that waited for the disk
    run.save()
    run.keeper.settle()
    again = Run(run.folder)
    assert again.keeper.restore(again.state)
    assert again.state.best_score == (-math.inf if older is None else older)
    assert again.state.note_score({"top1": 0.8}, 1)


def test_the_loss_of_a_best_that_a_killed_run_has_not_written_is_not_taken_for_written(run):
    assert run.state.note_score({"top1": 3.0, "loss": 4.0}, 4)
    run.save("best")
    assert run.state.note_score({"top1": 3.0, "loss": 2.0}, 4)  # waited for the disk
    run.save()
    run.keeper.settle()
    again = Run(run.folder)
    assert again.keeper.restore(again.state)
    assert (again.state.best_score, again.state.best_loss) == (0.75, 1.0)
    assert not again.state.note_score({"top1": 3.0, "loss": 4.0}, 4)
    assert again.state.note_score({"top1": 3.0, "loss": 3.0}, 4)
    assert not again.state.note_score({"top1": 2.0, "loss": 1.0}, 4)


def test_a_run_of_a_version_that_kept_no_loss_of_the_best_goes_on(run):
    run.state.note_score({"top1": 3.0, "loss": 4.0}, 4)
    for name in ("best", "last"):
        run.save(name)
    run.keeper.settle()
    for name in ("best", "last"):
        content = load_checkpoint(run.path(name))
        del content["state"]["best_loss"]
        save_checkpoint(run.path(name), content)
    again = Run(run.folder)
    assert again.keeper.restore(again.state)
    assert (again.state.best_score, again.state.best_loss) == (0.75, -math.inf)
    assert not again.state.note_score({"top1": 3.0, "loss": 2.0}, 4)  # as that version had it
    assert again.state.note_score({"top1": 4.0, "loss": 8.0}, 4)


def test_the_last_two_are_kept(run):
    for name in ("last", "last", "best", "last"):
        run.train()
        run.save(name)
        run.keeper.settle()
    assert (run.step_in("last"), run.step_in("previous"), run.step_in("best")) == (4, 2, 3)
    assert len(list(run.path().parent.iterdir())) == 3


def test_due_by_steps_since_the_last_one(tmp_path):
    run = Run(tmp_path / "run", plan=make_tiny_plan(checkpoint_steps=3))
    assert [run.keeper.due(steps) for steps in (1, 2, 3)] == [False, False, True]
    run.train(3)
    run.save()
    run.keeper.settle()
    assert [run.keeper.due(steps) for steps in (3, 5, 6)] == [False, False, True]
    again = Run(run.folder, plan=run.plan)
    again.keeper.restore(again.state)
    assert [again.keeper.due(steps) for steps in (5, 6)] == [False, True]


@pytest.mark.parametrize("often", [{"checkpoint_seconds": 1e-9}, {"checkpoint_steps": 1}])
def test_none_is_due_while_one_is_being_written_and_at_once_after(tmp_path, slow_disk, often):
    run = Run(tmp_path / "run", plan=make_tiny_plan(**often))
    assert run.keeper.due(1)
    run.save()
    run.save("best")
    assert not run.keeper.due(2)
    slow_disk.set()
    run.keeper.settle()
    assert run.keeper.due(2)


def test_a_write_that_failed_is_told_once_it_has_ended(run, monkeypatch):
    run.train()
    run.save()
    run.keeper.settle()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    run.train()
    run.save()
    wait_until(lambda: all(job.done() for job in run.keeper._writer._jobs))
    with pytest.raises(FileError, match=r"last\.pt: No space left"):
        run.keeper.check()
    run.keeper.check()
    run.save()
    with pytest.raises(FileError, match=r"last\.pt: No space left"):
        run.keeper.settle()
    assert run.step_in() == 1


FILL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from batchwright.errors import FileError
from test_checkpoint_manager import Run
run = Run(Path(sys.argv[1]) / "run")
run.train()
run.save()
run.keeper.settle()
run.model.register_buffer("large", __import__("torch").ones(1_000_000))
run.train()
run.save()
try:
    run.keeper.settle()
except FileError as error:
    print(error)
print(run.step_in())
"""


@pytest.mark.slow
def test_a_full_file_system_keeps_the_last_good_checkpoint(tmp_path):
    """A real one of 1 MB, in a mount namespace of its own, which goes with its process."""
    inside = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1" "$4"'
    tests = Path(__file__).parent
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            [*command, 'mount -t tmpfs none "$1"', "sh", tmp_path], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("mounting is not permitted here")
    done = subprocess.run(
        [*command, inside, "sh", tmp_path, sys.executable, FILL, tests],
        check=True,
        capture_output=True,
        text=True,
        timeout=500,
    )
    said, step = done.stdout.splitlines()
    assert "last.pt: No space left on device; the previous one, if any, is unharmed" in said
    assert step == "1"


# ---------------------------------------------------------------------------------------- reading


def test_without_a_checkpoint_the_run_begins(run):
    assert not run.keeper.restore(run.state)


@pytest.fixture
def saved(run):
    """Two checkpoints: ``previous`` after 2 steps, ``last`` after 5."""
    for steps in (2, 3):
        run.train(steps)
        run.save()
    run.keeper.settle()
    return run


@pytest.mark.parametrize("maps", [True, False])
def test_of_the_best_model_the_score_alone_is_read_where_the_disk_can_map_files(
    run, monkeypatch, maps
):
    run.state.best_score = 0.5
    run.save("best")
    run.keeper.settle()
    run.state.best_score = 0.9  # of a model that a kill has taken
    run.save("last")
    run.keeper.settle()
    read, load = [], torch.load

    def spied(path, **named):
        if path == run.path("best"):
            read.append(named.get("mmap", False))
            if read[-1] and not maps:
                raise OSError("this disk maps no files")
        return load(path, **named)

    monkeypatch.setattr(torch, "load", spied)
    again = Run(run.folder)
    again.keeper.restore(again.state)
    assert again.state.best_score == 0.5
    assert read == ([True] if maps else [True, False])


def spoil(path, how):
    if how == "missing":
        path.unlink()  # killed between the two renames
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-300])
    elif how == "foreign":
        torch.save({"model": {}}, path)
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("how", ["missing", "truncated", "foreign", "empty"])
def test_the_previous_one_is_used_where_the_last_cannot_be_and_it_says_so(saved, how, capsys):
    spoil(saved.path(), how)
    again = Run(saved.folder)
    assert again.keeper.restore(again.state)
    assert again.state.step == 2
    assert again.notes()[0] == "resumed at epoch 1 after 2 steps of it"
    for said in (again.notes()[1], capsys.readouterr().err):
        assert str(saved.path()) in said
        assert f"{saved.path('previous')} is used instead: resumed at epoch 1 after 2" in said


def test_a_damaged_one_does_not_take_the_place_of_the_previous_one(saved):
    """Else a kill as the next one is written, or damage to that one too, would leave none."""
    spoil(saved.path(), "truncated")
    again = Run(saved.folder)
    again.keeper.restore(again.state)
    steps = []
    for _ in range(2):
        again.train()
        again.save()
        again.keeper.settle()
        steps.append((again.step_in("last"), again.step_in("previous")))
    assert steps == [(3, 2), (4, 3)]


def test_a_good_checkpoint_is_no_news(saved, capsys):
    again = Run(saved.folder)
    again.keeper.restore(again.state)
    assert again.notes() == ["resumed at epoch 1 after 5 steps of it"]
    assert not capsys.readouterr().err


def test_what_a_killed_process_left_of_writing_takes_no_room_of_the_next_one(saved):
    for name in ("best", "epoch-3"):
        saved.path().with_name(f".{name}.pt.writing").write_bytes(bytes(100))
    own = saved.path().with_name(".notes.writing")  # of the user
    own.touch()
    saved.keeper.prepare(may_exist=True)
    left = {one.name for one in saved.path().parent.iterdir()}
    assert left == {"last.pt", "previous.pt", own.name}


def test_what_cannot_be_removed_of_it_keeps_no_run_from_going_on(saved, monkeypatch):
    """Such as another user's in a shared folder."""

    def unlink(self, missing_ok=False):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    saved.path().with_name(".best.pt.writing").touch()
    monkeypatch.setattr(Path, "unlink", unlink)
    saved.keeper.prepare(may_exist=True)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_a_checkpoint_for_which_memory_does_not_suffice_is_not_called_damaged(
    saved, monkeypatch, error
):
    """Else somebody would begin again, or the run go on from an older one."""

    def load(*_, **__):
        raise error

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(BatchwrightError, match=r"^memory ran out while .*last\.pt was read: end"):
        saved.keeper.restore(saved.state)
    with pytest.raises(BatchwrightError, match=r"^memory ran out while .*last\.pt was read: end"):
        file_normalization(saved.path())


def test_two_bad_checkpoints_are_both_named(saved):
    spoil(saved.path(), "truncated")
    spoil(saved.path("previous"), "foreign")
    with pytest.raises(FileError) as refused:
        saved.keeper.restore(saved.state)
    assert f"{saved.path()} is no readable checkpoint" in str(refused.value)
    assert f"{saved.path('previous')} is not a checkpoint of batchwright" in str(refused.value)


def test_lost_checkpoints_are_not_a_run_that_had_none_yet(saved):
    for lost in (saved.path(), saved.path("previous")):
        lost.unlink()
    with pytest.raises(FileError, match=r"holds no readable checkpoint .* put a copy of one back"):
        saved.keeper.restore(saved.state)
    shutil.rmtree(saved.path().parent)
    with pytest.raises(FileError, match="or begin again in another folder"):
        saved.keeper.restore(saved.state)
    saved.keeper.prepare(may_exist=False)  # whoever has cleared the folder begins another run
    assert not saved.keeper.restore(saved.state)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(run):
    run.train(2)
    (run.folder / "metrics.jsonl").touch()
    again = Run(run.folder)
    again.keeper.prepare(may_exist=True)
    assert not again.keeper.restore(again.state)


def test_a_run_that_has_had_its_best_alone_goes_on_from_that(run):
    """It was killed before its first ``last.pt``, and an epoch or more would be lost."""
    run.train(2)
    run.state.note_score({"top1": 3.0}, 4)
    again = gone_on_from_its_best(run)
    assert (again.state.step, again.state.best_score) == (2, 0.75)
    assert again.notes() == ["resumed at epoch 1 after 2 steps of it, from best.pt, the newest"]
    assert again.keeper.misses(again.state.steps)


@pytest.mark.parametrize("how", ["truncated", "weights alone"])
def test_a_best_alone_that_nothing_can_go_on_from_is_named(run, how):
    run.save("best")
    run.keeper.settle()
    if how == "truncated":
        spoil(run.path("best"), how)
    else:
        save_checkpoint(run.path("best"), load_checkpoint(run.path("best")) | {"server": {}})
    with pytest.raises(FileError, match=r"best\.pt (is no|holds the weights).* one back, or"):
        run.keeper.restore(run.state)


def test_no_run_goes_on_from_weights_alone(saved):
    """As where somebody has put a parameter server's epoch-N.pt in the place of last.pt."""
    saved.save("best")
    saved.keeper.settle()
    for name in ("last", "previous", "best"):
        save_checkpoint(saved.path(name), load_checkpoint(saved.path(name)) | {"server": {}})
    with pytest.raises(FileError, match=r"last\.pt holds the weights.*previous.* one back, or"):
        saved.keeper.restore(saved.state)


def test_a_best_that_is_damaged_is_not_advised_in_the_place_of_a_lost_last(saved):
    for name in ("last", "previous"):
        saved.path(name).unlink()
    saved.path("best").write_bytes(b"nothing")
    with pytest.raises(FileError, match=r"no readable checkpoint .* put a copy of one back, or"):
        saved.keeper.restore(saved.state)


def test_a_best_is_not_taken_for_a_last_that_was_lost(saved):
    """A copy of that may be further than any best is."""
    saved.save("best")
    saved.keeper.settle()
    for lost in (saved.path(), saved.path("previous")):
        lost.unlink()
    assert not has_checkpoint(saved.folder)
    with pytest.raises(FileError, match=r"no readable .* back \(or best\.pt in the place"):
        saved.keeper.restore(saved.state)
    with pytest.raises(FileError, match="holds a run already"):
        saved.keeper.prepare(may_exist=False)
    shutil.copy(saved.path("best"), saved.path())
    again = Run(saved.folder)
    assert again.keeper.restore(again.state)
    assert again.state.steps == saved.state.steps


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_folder_with_checkpoints_alone_is_that_of_a_run(run, name):
    """Its ``metrics.jsonl`` was moved away, and a new run would replace its checkpoints."""
    for own in ("pretrained", "epoch-wise"):  # of the user's
        run.path(own).touch()
    run.keeper.prepare(may_exist=False)
    run.train()
    run.save(name)
    run.keeper.settle()
    with pytest.raises(FileError, match="holds a run already: choose another folder, or resume it"):
        Run(run.folder).keeper.prepare(may_exist=False)
    again = Run(run.folder)
    again.keeper.prepare(may_exist=True)
    assert again.keeper.restore(again.state)


def test_a_folder_with_a_summary_alone_is_that_of_a_run(run):
    """A new run would replace it, and, once killed, be taken for one that has lost its last.pt."""
    (run.folder / "summary.json").touch()
    with pytest.raises(FileError, match="holds a run already"):
        run.keeper.prepare(may_exist=False)


class Foreign:
    """What only a reader that runs code could build."""


@pytest.mark.parametrize(
    "how", ["truncated", "random", "text", "pickle", "foreign", "foreign as of old", "zip"]
)
def test_a_file_that_is_no_checkpoint_is_refused_without_torchs_advice(tmp_path, how, recwarn):
    path = tmp_path / "last.pt"
    if how == "truncated":
        save_checkpoint(path, {"model": {"a": torch.zeros(1000)}})
        path.write_bytes(path.read_bytes()[:2000])
    elif how == "zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", pickle.dumps(Foreign()))
            file.writestr("archive/version", "3")
    elif how.startswith("foreign"):
        torch.save({"a": Foreign()}, path, _use_new_zipfile_serialization=how == "foreign")
    else:
        random = np.random.default_rng(0).bytes(5000)
        texts = {"random": random, "text": b"hello world", "pickle": pickle.dumps(Path("x"))}
        path.write_bytes(texts[how])
    with pytest.raises(FileError) as refused:
        find_checkpoint(tmp_path, Group(torch.device("cpu")))
    assert str(refused.value) == (
        f"{path} is no readable checkpoint: it is damaged, cut short or of another program; "
        f"there is no checkpoint {tmp_path / 'previous.pt'} to resume from; "
        "put a copy of one back, or begin again in another folder"
    )
    assert not recwarn.list


def test_wall_time_has_each_second_once_whoever_starts_the_workers_again(monkeypatch):
    monkeypatch.setenv(STARTED, str(time.time() - 1800))
    content = Recorder(None, make_tiny_plan()).values()
    for started, seconds in ((os.environ[STARTED], 1800), (str(time.time() - 100), 1900)):
        monkeypatch.setenv(STARTED, started)  # by the same launcher, and by a resume
        again = Recorder(None, make_tiny_plan())
        again.restore(content, "resumed")
        assert again.wall_seconds == pytest.approx(seconds, abs=50)
    monkeypatch.delenv(STARTED)
    alone = Recorder(None, make_tiny_plan())
    alone.restore(content, "resumed")
    assert alone.wall_seconds == pytest.approx(1800, abs=50)


def test_epochs_that_were_lost_before_the_first_checkpoint_are_no_set_up(monkeypatch):
    monkeypatch.setenv(STARTED, str(time.time() - 1800))
    monkeypatch.setenv(STARTED_AGAIN, str(time.time() - 100))
    recorder = Recorder(None, make_tiny_plan())
    recorder.training_begins()
    summary = recorder.summary()
    assert summary.setup_seconds == pytest.approx(100, abs=50)
    assert summary.wall_seconds == pytest.approx(1800, abs=50)
    assert dict(accounting(summary))["other"] == pytest.approx(1700, abs=50)


def test_another_plans_checkpoint_is_refused_though_there_is_a_previous_one(saved):
    run = Run(saved.folder, plan=make_tiny_plan(epochs=9))
    with pytest.raises(PlanError, match=r"last\.pt was written under another plan"):
        run.keeper.restore(run.state)


def test_shares_speeds_and_limits_are_kept(run):
    run.state.local_batch_sizes = [5]
    run.state.speeds = {"a/cpu:0": 31.5}
    run.state.micro_limits = {"a/cpu:0": 16}
    run.save()
    run.keeper.settle()
    again = Run(run.folder)
    again.keeper.restore(again.state)
    assert again.state.values() == run.state.values()


def test_a_network_may_have_other_tables_by_now_than_when_a_checkpoint_was_written(run):
    """Buffers that no state_dict has: the network makes them by itself, also in another size."""

    def with_tables(one, **sizes):
        for name, size in sizes.items():
            table = torch.full((size,), float(one.state.steps))
            one.model[0].register_buffer(name, table, persistent=False)

    run.train()
    with_tables(run, kept=2, grown=3)
    run.save()
    run.keeper.settle()
    again = Run(run.folder)
    with_tables(again, kept=2, grown=5, new=1)
    assert again.keeper.restore(again.state)
    assert same(again.values(), run.values())
    tables = [again.model[0].get_buffer(name).tolist() for name in ("kept", "grown", "new")]
    assert tables == [[1, 1], [0] * 5, [0]]


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002


def test_all_random_numbers_go_on(tmp_path):
    draws()
    random.gauss(0, 1)
    np.random.normal()  # noqa: NPY002
    save_checkpoint(tmp_path / "a.pt", {"random": random_states(torch.device("cpu"))})
    after = draws(), random.gauss(0, 1), np.random.normal()  # noqa: NPY002
    states = load_checkpoint(tmp_path / "a.pt")["random"]
    restore_random_states(states, torch.device("cpu"))
    assert (draws(), random.gauss(0, 1), np.random.normal()) == after  # noqa: NPY002


def test_seeds_tell_runs_steps_and_workers_apart():
    drawn = []
    for key in [(0, 5, 1), (0, 5, 1), (1, 5, 1), (0, 6, 1), (0, 5, 2), (2**63 - 1, 5, 1)]:
        seed_worker(*key)
        drawn.append(draws())
    assert drawn[0] == drawn[1]
    assert all(len({each[kind] for each in drawn}) == 5 for kind in range(3))


def test_a_run_that_goes_on_with_other_workers_says_how_many():
    said = []
    run = SimpleNamespace(
        world_size=1,
        _plan=SimpleNamespace(workers=2, stages=[SimpleNamespace(global_batch_size=8)]),
        _setup=SimpleNamespace(least=1),
        _recorder=SimpleNamespace(note=said.append),
    )
    AllReduceRun._check_workers(run, goes_on=True)
    assert said == ["going on with 1 worker, planned were 2"]


def test_one_worker_goes_on_where_two_were(saved, monkeypatch):
    """The checkpoint that two would have written: their own statistics differ from the merged."""
    content = load_checkpoint(saved.path())
    other = copy.deepcopy(content["workers"][0])
    other["buffers"]["1.running_mean"] += 1
    content["state"]["local_batch_sizes"] = [3, 2]
    save_checkpoint(saved.path(), content | {"workers": [other, other]})
    runs = [Run(saved.folder, seed=seed) for seed in (1, 2)]
    for run in runs:
        run.keeper.restore(run.state)
        assert same(run.values(), saved.values())
        assert torch.equal(run.model[1].running_mean, saved.model[1].running_mean)
        assert run.state.steps == 5
        assert (run.state.meter.samples, run.state.meter.local_samples) == (25, 25)
    assert runs[0].notes()[0].endswith("with 1 worker in place of 2")
    seed_worker(saved.plan.job.seed, 5, 0)
    wanted = draws()
    runs[0].keeper.restore(runs[0].state)
    assert draws() == wanted


def test_a_newcomer_has_the_epochs_sums_and_nothing_of_its_own():
    meter = EpochMeter(epoch=3, steps=7, samples=70, local_samples=30, loss=4.0, compute=1.5)
    wanted = EpochMeter(epoch=3, steps=7, samples=70, loss=4.0, whole=False)
    assert meter.for_a_newcomer() == wanted


# -------------------------------------------------------------------------------- several workers


@pytest.fixture(scope="module")
def found(tmp_path_factory, crew):
    return crew.together(everything, tmp_path_factory.mktemp("workers"), workers=2)


def everything(rank, folder):
    group = Group(torch.device("cpu"), 30)
    try:
        return {"disks": on_two_disks(group, folder), "failure": failing_write(group, folder)}
    finally:
        group.close()


def on_two_disks(group, folder):
    """Each worker's folder is its own; restored from what one of the two can read."""
    source = Run(folder / "source", group)
    group.barrier()
    kept = {}
    for steps in (2, 3):
        source.train(steps)
        torch.manual_seed(10 * group.rank + steps)
        source.save()
        source.keeper.settle()
        kept[source.state.step] = {**content_of(source), "draw": torch.rand(1)}
    results = {}
    for case in CASES:
        own = Run(folder / f"{case}-{group.rank}", group, seed=9)
        own.path().parent.mkdir(parents=True, exist_ok=True)
        name = CASES[case][group.rank]
        if name is not None:
            shutil.copy(source.path(name.removeprefix("bad ")), own.path())
        if name is not None and name.startswith("bad "):
            spoil(own.path(), "truncated")
        restored = own.keeper.restore(own.state)
        result = {**content_of(own), "draw": torch.rand(1)} if restored else None
        results[case] = (result, kept.get(own.state.step))
        own.keeper.close()
    return results


CASES = {
    "only the first": ("last", None),
    "only the second": (None, "last"),
    "older first": ("previous", "last"),
    "older second": ("last", "previous"),
    "damaged first": ("bad last", "previous"),
    "nowhere": (None, None),
}


def content_of(run):
    return {
        "weights": [p.detach().clone() for p in run.model.parameters()],
        "mean": run.model[1].running_mean.clone(),
        "state": run.state.values(),
        "own": run.state.meter.local_samples,
    }


@pytest.mark.slow
def test_the_newest_checkpoint_on_any_disk_is_everybodys(found):
    steps = [5, 5, 5, 5, 2]
    for rank, each in enumerate(found):
        for (case, names), step in zip(CASES.items(), steps, strict=False):
            restored, source = each["disks"][case]
            assert restored["state"]["step"] == step, (rank, names)
            of_first = found[0]["disks"][case][1]  # they trained apart; its weights are kept
            assert same(restored["weights"], of_first["weights"])
            assert torch.equal(restored["mean"], source["mean"])
            assert restored["own"] == source["own"]
            assert torch.equal(restored["draw"], source["draw"])
        assert each["disks"]["nowhere"][0] is None
    first, second = (each["disks"]["older first"][0] for each in found)
    assert not torch.equal(first["mean"], second["mean"])
    assert not torch.equal(first["draw"], second["draw"])


def failing_write(group, folder):
    run = Run(folder / "failure", group)
    run.train()
    if group.rank == 0:
        shutil.rmtree(run.path().parent)
    run.save()
    try:
        run.keeper.settle()
    except FileError as error:
        return str(error)


@pytest.mark.slow
def test_all_workers_hear_that_a_checkpoint_could_not_be_written(found):
    one, two = (each["failure"] for each in found)
    assert one == two
    assert "last.pt: No such file or directory" in one
