"""A disk that cannot follow: it makes checkpoints rarer, and nobody takes worker 0 for lost."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.nn import functional

from batchwright import Session
from batchwright.errors import FileError, Interrupted
from batchwright.training.checkpoints import checkpoint_writer
from batchwright.training.checkpoints.checkpoint import load_checkpoint
from batchwright.training.checkpoints.checkpoint_manager import CheckpointManager
from test_session import Points, make_model, make_tiny_plan, wait_until

pytestmark = pytest.mark.slow
SAMPLES, EPOCHS = 8, 3


class Disk:
    """Writes nothing until worker 1 has heard three times that worker 0 still writes.

    So whoever leaves the other without word while the disk is busy never sees the end of it.
    """

    def __init__(self, rank, folder, *, full=False):
        self.rank, self.full = rank, full
        self.released = folder / "released"
        self.written, self.heard = [], 0
        self.trained_without = False

    def patch(self, patch):
        save, settle = checkpoint_writer.save_checkpoint, CheckpointManager.settle

        def wait_and_save(path, content, **options):
            wait_until(self.released.exists)
            if self.full:
                raise FileError(f"cannot write {path.name}: the test's disk is full")
            save(path, content, **options)
            self.written.append(path.stem)

        def listening(keeper):
            self.trained_without = not self.released.exists()
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(keeper._group, "gather", self.listen(keeper._group.gather))
                settle(keeper)

        patch.setattr(checkpoint_writer, "save_checkpoint", wait_and_save)
        patch.setattr(CheckpointManager, "settle", listening)

    def listen(self, gather):
        def heard(value):
            found = gather(value)
            self.heard += 1
            if self.heard == 3 and self.rank == 1:
                self.released.touch()
            return found

        return heard


def train(rank, folder, *, stop_at=None, full=False):
    """A run with ``best`` after each epoch and ``last`` after each step, as the disk allows."""
    folder.mkdir(exist_ok=True)
    disk, model, steps, ended = Disk(rank, folder, full=full), make_model(), 0, ""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = make_tiny_plan((2, 2), samples=SAMPLES, epochs=EPOCHS, checkpoint_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        disk.patch(patch)
        try:
            with Session(
                model,
                optimizer,
                Points(SAMPLES),
                plan=plan,
                loaders=0,
                run_folder=folder / "run",
                exit_on_stop=False,
            ) as one:
                for epoch in one.epochs():
                    for features, labels in one.batches():
                        steps += one.step(functional.cross_entropy(model(features), labels))
                        if (rank, steps) == (1, stop_at):
                            os.kill(os.getpid(), signal.SIGTERM)
                    one.evaluate(Points(4), lambda o, y, e=epoch: torch.full(y.shape, float(e)))
        except (Interrupted, FileError) as error:
            ended = str(error)
    return {
        "steps": steps,
        "ended": ended,
        "written": disk.written,
        "trained without": disk.trained_without,
        "heard": disk.heard,
    }


def everything(rank, folder):
    return {
        "whole": train(rank, folder / "whole"),
        "stopped": train(rank, folder / "stopped", stop_at=3),
        "full": train(rank, folder / "full", full=True),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("disks")


@pytest.fixture(scope="module")
def found(folder, crew):
    return crew.together(everything, folder, workers=2)


def state_in(folder, name):
    return load_checkpoint(folder / "run" / "checkpoints" / f"{name}.pt")["state"]


@pytest.mark.parametrize("case", ["whole", "stopped", "full"])
def test_training_goes_on_while_the_disk_is_busy_and_all_wait_for_it_at_the_end(found, case):
    for each in found:
        assert each[case]["trained without"]
        assert each[case]["heard"] >= 3


def test_only_the_newest_of_those_that_waited_are_written(found, folder):
    for each in found:
        assert (each["whole"]["steps"], each["whole"]["ended"]) == (6, "")
    assert found[0]["whole"]["written"] == ["last", "best", "last"]
    assert found[1]["whole"]["written"] == []
    assert state_in(folder / "whole", "previous")["steps"] == 1
    assert state_in(folder / "whole", "last")["steps"] == 6
    assert state_in(folder / "whole", "best")["best_score"] == EPOCHS - 1


def test_a_stop_is_kept_however_long_the_disk_takes(found, folder):
    for each in found:
        assert each["stopped"]["ended"].startswith("stopped by SIGTERM at epoch 2, step 2")
    assert found[0]["stopped"]["written"] == ["last", "best", "last"]
    assert state_in(folder / "stopped", "last")["steps"] == 4  # the step after the signal


def test_both_hear_that_it_could_not_be_written_after_all(found):
    for each in found:
        assert each["full"]["ended"] == "cannot write last.pt: the test's disk is full"


def test_a_run_has_its_summary_only_once_its_last_checkpoint_is_there(found, folder):
    """A folder with a summary is taken for that of a finished run."""
    assert found[0]["full"]["ended"]
    assert (folder / "whole" / "run" / "summary.json").exists()
    assert not (folder / "full" / "run" / "summary.json").exists()
