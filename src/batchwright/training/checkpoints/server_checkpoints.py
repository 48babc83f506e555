"""Keeps a run with a parameter server: its folder, its checkpoints, and the way back from them."""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from batchwright.distributed.group import Group
from batchwright.errors import FileError, PlanError
from batchwright.records import Plan
from batchwright.training.checkpoints.checkpoint import save_checkpoint
from batchwright.training.checkpoints.checkpoint_lookup import LAST, PREVIOUS, find_checkpoint
from batchwright.training.checkpoints.checkpoint_manager import folder_problem
from batchwright.training.parameter_server.merging import Weights, as_state_dict
from batchwright.training.parameter_server.server_coordinator import ServerCoordinator
from batchwright.training.recorder import Recorder

_BEST = "best"


class ServerCheckpoints:
    """Writes and reads checkpoints for the server's process, in `checkpoint_manager`'s format.

    What is kept of the weights is never changed in place, so nothing is copied and no worker waits
    while a thread writes. What waits for the disk never holds the coordinator's lock: it may be
    slow. The workers' optimizers are not kept: after a resume momentum is fresh.

    Args:
        folder: The run folder; ``None`` keeps nothing.
        plan: What is followed.
        coordinator: Whose state is kept.
        recorder: Its records are kept too.
    """

    def __init__(
        self, folder: Path | None, plan: Plan, coordinator: ServerCoordinator, recorder: Recorder
    ) -> None:
        self._folder, self._plan, self._coordinator, self._recorder = (
            folder,
            plan,
            coordinator,
            recorder,
        )
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._under_way: list[tuple[str, Future[None]]] = []  # in the order of writing
        self._saved_at, self._saved_steps = time.perf_counter(), 0

    def prepare(self, *, resume: bool) -> None:
        """Make the folder, and go on from the last checkpoint in it if there is one.

        Raises:
            FileError: It holds a run already, cannot be made, or no checkpoint in it can be read.
            PlanError: The checkpoint is of another plan.
        """
        if self._folder is None:
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
        self.refuse_other_plan(str(found.path), content["plan"])
        state = content["state"]
        where = (
            f"resumed after {state['epoch']} epoch(s), {state['samples_seen']} samples: rounds "
            "that were under way are repeated, with fresh momentum"
        )
        self._recorder.restore(content["run"], where)
        self._coordinator.restore(content["server"], state["steps"], state["best_score"])
        self._saved_steps = state["steps"]
        if found.problems:
            text = f"{'; '.join(found.problems)}; {found.path} is used instead: {where}"
            self._recorder.note(text)
            print(f"batchwright: {text}", file=sys.stderr)  # noqa: T201 - no other channel here

    def refuse_other_plan(self, path: str, text: str) -> None:
        """Raise `PlanError` if a plan, as JSON text, differs in more than its job."""
        other = Plan.model_validate_json(text)
        if other.model_copy(update={"job": self._plan.job}) != self._plan:
            raise PlanError(f"{path} is another plan: use that of the run folder on all workers")

    def save_if_due(self) -> None:
        """Write ``last`` where the job's seconds or steps between checkpoints have passed."""
        _, _, steps = self._coordinator.progress
        most = self._plan.job.checkpoint_steps
        by_steps = most is not None and steps - self._saved_steps >= most
        by_clock = time.perf_counter() - self._saved_at > self._plan.job.checkpoint_seconds
        if (by_steps or by_clock) and not self._is_writing(LAST):
            self.save_last()

    def save_last(self) -> None:
        """Have ``last.pt`` written; what was it becomes ``previous.pt``.

        A best model that waits is written before: the checkpoint says what its score is.
        """
        with self._coordinator.lock:
            server = self._coordinator.server
            if server is not None:
                self._take_best()
                self._save(LAST, server.weights)

    def save_best(self) -> None:
        """Have ``best.pt`` written if there is a new best model.

        While an earlier one is being written, it stays where it is until the next call; a better
        one may replace it there.
        """
        with self._coordinator.lock:
            if not self._is_writing(_BEST):
                self._take_best()

    def check(self) -> None:
        """Raise `FileError` if a write that has ended went wrong."""
        while self._under_way and self._under_way[0][1].done():
            self._under_way.pop(0)[1].result()

    def settle(self) -> None:
        """Wait until everything is written; `FileError` if that went wrong."""
        while self._under_way:
            self._under_way.pop(0)[1].result()

    def finish(self) -> None:
        """Write the last checkpoint, and wait until that and everything else is written."""
        self.settle()
        self.save_last()
        self.settle()

    def close(self) -> None:
        """Let what is being written be finished."""
        self._writer.shutdown()

    def _is_writing(self, name: str) -> bool:
        return any(one == name and not write.done() for one, write in self._under_way)

    def _take_best(self) -> None:
        best = self._coordinator.take_best()
        if best is not None:
            self._save(_BEST, best)

    def _save(self, name: str, weights: Weights) -> None:
        if self._folder is None:
            return
        started = time.perf_counter()
        coordinator, (epochs, samples, steps) = self._coordinator, self._coordinator.progress
        content = {
            "model": as_state_dict(weights, coordinator.entries),
            "optimizer": {},
            "network": self._plan.network.name,
            "classes": list(self._plan.data.classes),
            "input": dict(coordinator.description),
            "plan": self._plan.model_dump_json(),
            "state": {
                "epoch": epochs,
                "step": 0,
                "steps": steps,
                "samples_seen": samples,
                "best_score": coordinator.evaluations.best_score,
            },
            "kept": {},
            "run": self._recorder.values(),
            "workers": [],
            "server": coordinator.values() if name == LAST else {},
        }
        self._under_way.append((name, self._writer.submit(self._write, name, content)))
        now = time.perf_counter()
        coordinator.book.saved(now - started)
        if name == LAST:
            self._saved_at, self._saved_steps = now, steps

    def _write(self, name: str, content: dict[str, Any]) -> None:
        assert self._folder is not None  # noqa: S101 - else nothing is saved
        checkpoints = self._folder / "checkpoints"
        former = checkpoints / f"{PREVIOUS}.pt" if name == LAST else None
        save_checkpoint(checkpoints / f"{name}.pt", content, former=former)
