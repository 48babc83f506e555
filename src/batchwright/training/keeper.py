"""Keeps a run: its folder, its checkpoints, and the way back from them."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchwright.errors import FileError, PlanError
from batchwright.group import Group
from batchwright.prediction.noise_scale import NoiseState
from batchwright.records import Plan
from batchwright.training.checkpoint import load_checkpoint, save_checkpoint
from batchwright.training.evaluation import merged_batch_norm
from batchwright.training.meter import EpochMeter
from batchwright.training.recorder import Recorder


@dataclass
class RunState:
    """How far a run is, and what it has added up on the way.

    Attributes:
        epoch: Zero-based epoch in progress.
        step: Steps of it that are done.
        samples_seen: Training samples since the start, all workers.
        best_score: Highest score of an evaluation so far.
        meter: Sums of the epoch in progress, this worker's.
        noise: Gradient noise so far.
    """

    epoch: int = 0
    step: int = 0
    samples_seen: int = 0
    best_score: float = -math.inf
    meter: EpochMeter = field(default_factory=EpochMeter)
    noise: NoiseState = field(default_factory=NoiseState)

    def values(self) -> dict[str, Any]:
        """Plain values for a checkpoint; the meter is each worker's own and not among them."""
        values = asdict(self)
        del values["meter"]
        return values

    def restore(self, values: dict[str, Any], meter: dict[str, Any]) -> None:
        """Go on from a checkpoint's `values` and this worker's meter."""
        self.__dict__.update(values)
        self.noise = NoiseState.from_dict(values["noise"])
        self.meter = EpochMeter(**meter)


class Keeper:
    """Writes and reads the checkpoints of one run; all workers call its methods together.

    A checkpoint's ``model`` is a plain ``state_dict`` whose batch normalization has the statistics
    of all workers; each worker's own buffers and random numbers stand beside it.

    Args:
        folder: The run folder; ``None`` keeps nothing.
        plan: What is followed; a checkpoint of another plan is refused.
        model: Trained in place.
        optimizer: Likewise.
        group: The workers.
        recorder: Its records are kept too.
        description: What a user of the network must know of its input.
    """

    def __init__(
        self,
        folder: Path | None,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: Group,
        recorder: Recorder,
        description: dict[str, Any],
    ) -> None:
        self._folder, self._plan, self._group = folder, plan, group
        self._model, self._optimizer = model, optimizer
        self._recorder, self._description = recorder, description
        self._things: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}  # states of things that nobody has kept yet
        self._saved_at = time.perf_counter()

    def prepare(self, *, may_exist: bool) -> None:
        """Make the folder. Rank 0 does it; all learn the outcome before anybody goes on.

        Raises:
            FileError: It holds a run already, or cannot be made.
        """
        problem = None
        if self._group.rank == 0 and self._folder is not None:
            problem = _folder_problem(self._folder, may_exist)
        problem = self._group.gather(problem)[0]
        if problem:
            raise FileError(problem)

    def keep(self, name: str, thing: Any) -> None:
        """Put ``thing`` into checkpoints; after a resume its state is loaded at once."""
        self._things[name] = thing
        if name in self._waiting:
            thing.load_state_dict(self._waiting.pop(name))

    @property
    def due(self) -> bool:
        """Whether the time between checkpoints has passed, by this worker's clock."""
        waited = time.perf_counter() - self._saved_at
        return self._folder is not None and waited > self._plan.job.checkpoint_seconds

    def save(self, name: str, state: RunState, share: float) -> float:
        """Write ``checkpoints/name.pt``; returns the seconds it took.

        Args:
            name: ``last`` or ``best``.
            state: How far the run is.
            share: This worker's share of the samples, for batch normalization.

        Raises:
            FileError: It cannot be written; the previous one is unharmed.
        """
        if self._folder is None:
            return 0.0
        started = time.perf_counter()
        with merged_batch_norm(self._model, self._group, share):
            model = {key: value.cpu().clone() for key, value in self._model.state_dict().items()}
        workers = self._group.gather(self._worker_state(state))
        if self._group.rank == 0:
            content = {
                "model": model,
                "optimizer": self._optimizer.state_dict(),
                "network": self._plan.network.name,
                "classes": list(self._plan.data.classes),
                "input": self._description,
                "plan": self._plan.model_dump_json(),
                "state": state.values(),
                "kept": {key: thing.state_dict() for key, thing in self._things.items()},
                "run": self._recorder.values(),
                "workers": workers,
            }
            save_checkpoint(self._folder / "checkpoints" / f"{name}.pt", content)
        self._group.barrier()  # a checkpoint that only some workers believe in is none
        now = time.perf_counter()
        if name == "last":  # only this one is resumed from
            self._saved_at = now
        return now - started

    def restore(self, state: RunState) -> None:
        """Load ``last.pt`` into model, optimizer, recorder and ``state``, if there is one.

        Raises:
            FileError: It is damaged.
            PlanError: It was written under another plan.
        """
        path = self._folder / "checkpoints" / "last.pt" if self._folder else None
        if path is None or not path.exists():
            return  # stopped before the first checkpoint: from the start
        content = load_checkpoint(path)
        self._refuse_other_plan(path, content["plan"])
        own = content["workers"][self._group.rank]
        self._model.load_state_dict(content["model"])
        self._optimizer.load_state_dict(content["optimizer"])
        buffers = dict(self._model.named_buffers())
        for key, value in own["buffers"].items():
            buffers[key].copy_(value)
        torch.set_rng_state(own["random"])
        if own["random_device"] is not None:
            torch.cuda.set_rng_state(own["random_device"])
        state.restore(content["state"], own["meter"])
        self._waiting = dict(content["kept"])
        self._recorder.restore(content["run"])

    def _worker_state(self, state: RunState) -> dict[str, Any]:
        on_gpu = next(self._model.parameters()).is_cuda
        return {
            "buffers": {key: value.cpu() for key, value in self._model.named_buffers()},
            "random": torch.get_rng_state(),
            "random_device": torch.cuda.get_rng_state() if on_gpu else None,
            "meter": state.meter.values(),
        }

    def _refuse_other_plan(self, path: Path, text: str) -> None:
        """The job may differ: what may change in it after planning is the caller's to say."""
        other = Plan.model_validate_json(text)
        if other.model_copy(update={"job": self._plan.job}) != self._plan:
            raise PlanError(
                f"{path} was written under another plan: resume with the plan of its run folder"
            )


def _folder_problem(folder: Path, may_exist: bool) -> str | None:
    if (folder / "metrics.jsonl").exists() and not may_exist:
        return f"{folder} holds a run already: choose another folder, or resume it"
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot make {folder}/checkpoints: {error.strerror}; choose another folder"
    return None
