"""Checkpoints of a run with a parameter server: written on the way, restored at a resume."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import torch

from batchwright.distributed.group import Group
from batchwright.errors import FileError, PlanError
from batchwright.records import Plan
from batchwright.records.run_folder import BEST, KEPT, LAST
from batchwright.records.text.formatting import counted
from batchwright.training.checkpoints.checkpoint import about_network
from batchwright.training.checkpoints.checkpoint_lookup import find_checkpoint
from batchwright.training.checkpoints.checkpoint_manager import folder_problem
from batchwright.training.checkpoints.checkpoint_writer import Writer
from batchwright.training.parameter_server.merging import Weights, as_state_dict
from batchwright.training.parameter_server.server_coordinator import ServerCoordinator
from batchwright.training.recorder import Recorder
from batchwright.training.step.epoch_totals import BestScore


class ServerCheckpoints:
    """Writes and reads checkpoints for the server's process, in `checkpoint_manager`'s format.

    The server never changes weights in place, so nothing is copied and no worker waits
    while a thread writes. Nothing that waits for the disk holds the coordinator's lock: it may be
    slow. Of the models that are to stay (`checkpoint_epochs`) one at a time is given to the disk,
    and workers get no new rounds while several wait for it in memory. The workers' optimizers are
    not kept: after a resume momentum is fresh.

    Args:
        folder: The run folder; ``None`` keeps nothing.
        plan: The plan that is followed.
        coordinator: The coordinator whose state is kept.
        recorder: Its records are kept too.
    """

    def __init__(
        self, folder: Path | None, plan: Plan, coordinator: ServerCoordinator, recorder: Recorder
    ) -> None:
        self._folder, self._plan, self._coordinator = folder, plan, coordinator
        self._recorder, self._writer = recorder, None
        if folder is not None:
            self._writer = Writer(folder / "checkpoints", plan.job)

    def prepare(self, *, resume: bool) -> None:
        """Make the folder, and go on from the last checkpoint in it if there is one.

        Raises:
            FileError: The folder holds a run already, cannot be made, or no checkpoint is readable.
            PlanError: The checkpoint is of another plan.
        """
        if self._folder is None or self._writer is None:
            return
        problem = folder_problem(self._folder, may_exist=resume)
        if problem:
            raise FileError(problem)
        found = None
        if resume:
            found = find_checkpoint(self._folder / "checkpoints", Group(torch.device("cpu")))
        if found is None:
            return
        content = found.content
        other = Plan.model_validate_json(content["plan"])
        if other.model_copy(update={"job": self._plan.job}) != self._plan:
            raise PlanError(f"{found.path} is of another plan: resume with that of its run folder")
        state = content["state"]
        where = (
            f"resumed after {counted(state['epoch'], 'epoch')}, {state['samples_seen']} samples"
            f"{found.source}: rounds that were under way are repeated, with fresh momentum"
        )
        self._recorder.restore(content["run"], where)
        best = BestScore(*found.best, loss_as_score=state.get("loss_as_score", True))
        self._coordinator.restore(content["server"], state["steps"], best)
        self._writer.saved_steps = found.last_steps
        self._writer.last_is_damaged = found.last_is_damaged
        found.tell_problems(self._recorder, where)

    def save_if_due(self) -> None:
        """Write ``last`` where the job's seconds or steps between checkpoints have passed."""
        _, _, steps = self._coordinator.progress
        if self._writer is not None and self._writer.due(steps):
            self.save_last()

    def save_last(self) -> None:
        """Have ``last.pt`` written; the former one becomes ``previous.pt``.

        A best model that waits is written before it, since ``last`` says what its score is, and so
        are models that are to stay, which nobody writes again behind it.
        """
        with self._coordinator.lock:
            server = self._coordinator.server
            if server is not None:
                while self._save_one_kept():
                    pass
                self.save_best()
                self._save(LAST, server.weights)

    def save_best(self) -> None:
        """Have ``best.pt`` written if there is a new best model.

        It waits for models that are to stay, as `save_last` does.
        """
        with self._coordinator.lock:
            best = None if self._coordinator.keeps else self._coordinator.take_best()
            if best is not None:
                self._save(BEST, best)

    def save_kept(self) -> None:
        """Have the oldest model written that is to stay, once the one before is on the disk."""
        if self._writer is None or not self._writer.keeping:
            self._save_one_kept()

    def check(self) -> None:
        """Raise `FileError` if a write that has ended went wrong."""
        if self._writer is not None:
            self._writer.check()

    def settle(self) -> None:
        """Wait until everything is written; `FileError` if that went wrong."""
        if self._writer is not None:
            self._writer.wait()

    def finish(self) -> None:
        """Write the last checkpoint, and wait until that and everything else is written."""
        self.settle()
        self.save_last()
        self.settle()

    def close(self) -> None:
        """Finish what is being written."""
        if self._writer is not None:
            self._writer.close()

    def _save_one_kept(self) -> bool:
        """Have the oldest model written that is to stay; whether there was one."""
        with self._coordinator.lock:
            kept = self._coordinator.take_kept()
            if kept is not None:
                self._save(f"{KEPT}{kept.number}", kept.weights, kept.progress)
            return kept is not None

    def _save(
        self, name: str, weights: Weights, progress: tuple[int, int, int] | None = None
    ) -> None:
        """Have a model written; ``progress``: the coordinator's, as the model was merged."""
        if self._writer is None:
            return
        started, coordinator = time.perf_counter(), self._coordinator
        epochs, samples, steps = progress or coordinator.progress
        content = {
            "model": as_state_dict(weights, coordinator.entries),
            "optimizer": {},
            **about_network(self._plan, coordinator.description),
            "state": {
                "epoch": epochs,
                "step": 0,
                "steps": steps,
                "samples_seen": samples,
                **asdict(coordinator.evaluations.best),
            },
            "kept": {},
            "run": self._recorder.values(),
            "workers": [],
            "server": coordinator.values() if name in (LAST, BEST) else {},
        }
        self._writer.put(name, content)
        coordinator.round_log.saved(time.perf_counter() - started)
