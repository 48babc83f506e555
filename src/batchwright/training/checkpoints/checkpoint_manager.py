"""Checkpoints of a run: written on the way, and restored when the run goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from batchwright.algorithms.splicing import why_not
from batchwright.distributed.group import Group
from batchwright.errors import ArgumentError, FileError, PlanError, one_line
from batchwright.prediction.noise_scale import NoiseState
from batchwright.records import Plan, Stage
from batchwright.records.run_folder import CHECKPOINTED, has_begun, is_checkpoint
from batchwright.records.text.formatting import counted
from batchwright.records.text.problems import described
from batchwright.training.batches.randomness import (
    random_states,
    restore_random_states,
    seed_worker,
)
from batchwright.training.checkpoints.checkpoint import about_network
from batchwright.training.checkpoints.checkpoint_lookup import find_checkpoint
from batchwright.training.checkpoints.checkpoint_writer import Writer
from batchwright.training.checkpoints.saved_values import copied, refuse_unsaveable, to_plain
from batchwright.training.evaluate.evaluation import merged_batch_norm
from batchwright.training.evaluate.weight_average import WeightAverage
from batchwright.training.recorder import Recorder
from batchwright.training.step.epoch_totals import BestScore, EpochMeter
from batchwright.training.step.gradient_scaling import TensorNoise
from batchwright.workload.loss_scaling import LossScale

_MODEL, _OPTIMIZER = "the model's state_dict()", "the optimizer's state_dict()"
_LONGEST_WHY = 300  # characters of what PyTorch says of a state that does not fit
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Keys of parameter groups that PyTorch's schedulers add."""
_SCHEDULED = {"lr", "momentum", "betas"}
"""Keys of parameter groups that PyTorch's schedulers change."""
_LOOK_SECONDS = 1.0
"""Seconds between two messages of worker 0 to the others on whether the disk is done."""


@dataclass
class RunState(BestScore):
    """How far a run is, and what it has measured on the way.

    Attributes:
        epoch: Zero-based epoch in progress.
        step: Steps of it that are done.
        steps: Steps since the start of the run.
        samples_seen: Training samples since the start, all workers.
        growth: Rows of the plan's ``growth`` that are in reach of the gradient noise.
        meter: Sums of the epoch in progress, this worker's.
        noise: Gradient noise so far.
        tensors: Gradient noise of each tensor; ``None`` where nothing depends on it.
        local_batch_sizes: Local batches in effect, in samples, by place; empty before the first
            epoch.
        speeds: Measured samples per second, by place.
        fixed_samples: Fixed cost of a step, in samples that would take as long.
        balancing: What was watched of the workers' times so far; see `Balancer.state_dict`.
        micro_limits: Most pixels at once of workers that ran out of memory, by place: samples times
            the image's side squared, so that it holds at other resolutions too.
        gradient_order: Order in which gradients are summed; see `Reducer.order`.
        loss_scale: Factor on losses in float16; ``None``: no step was taken yet.
    """

    epoch: int = 0
    step: int = 0
    steps: int = 0
    samples_seen: int = 0
    growth: int = 0
    meter: EpochMeter = field(default_factory=EpochMeter)
    noise: NoiseState = field(default_factory=NoiseState)
    tensors: TensorNoise | None = None
    local_batch_sizes: dict[str, int] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)
    fixed_samples: float = 0.0
    balancing: dict[str, Any] = field(default_factory=dict)
    micro_limits: dict[str, int] = field(default_factory=dict)
    gradient_order: list[list[int]] = field(default_factory=list)
    loss_scale: LossScale | None = None

    def stage(self, plan: Plan, epoch: int | None = None) -> Stage:
        """The plan's row that a zero-based epoch belongs to; unset: the one in progress."""
        number = self.epoch if epoch is None else epoch
        batch = plan.growth[self.growth - 1].global_batch_size if self.growth else 0
        return plan.row(min(number, plan.epochs - 1), batch)

    def values(self) -> dict[str, Any]:
        """Plain values for a checkpoint; the meter is each worker's own and not among them."""
        values = asdict(self)
        del values["meter"]
        return values

    def restore(self, values: dict[str, Any], meter: EpochMeter) -> None:
        """Go on from a checkpoint's `values`, with this worker's meter."""
        self.__dict__.update({"loss_as_score": True, **values})
        self.noise = NoiseState(**values["noise"])
        tensors = values.get("tensors")
        self.tensors = None if tensors is None else TensorNoise(**tensors)
        scale = values.get("loss_scale")
        self.loss_scale = None if scale is None else LossScale(**scale)
        self.meter = meter


class CheckpointManager:
    """Writes and reads the checkpoints of one run; all workers call its methods together.

    A checkpoint's ``model`` is a plain ``state_dict`` whose batch normalization has the statistics
    of all workers; each worker's own buffers and random numbers stand beside it. Where the plan
    averages weights, ``average`` is what was evaluated, in the same form.

    Training waits for a copy of the state only (docs/log.md, checkpoints beside the training). Rank
    0 writes it from a thread of its own: `check` raises if that failed, `settle` alone waits for
    it, however long the disk takes. A ``best`` that still waits for the disk is replaced by the
    next one; ``last`` is due again once the one before is written. So of each name one copy waits
    at most. A run goes on from the newest of ``last`` and ``best``.

    Args:
        folder: The run folder; ``None`` keeps nothing.
        plan: The plan that is followed; a checkpoint of another plan is refused, unless the two
            differ only from its epoch on.
        model: The network that is trained.
        optimizer: The optimizer of its parameters; its state is kept too.
        group: The workers.
        recorder: Its records are kept too.
        description: What a user of the network must know about its input.
        average: Average of the model's weights, if the plan has one.
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
        average: WeightAverage | None = None,
    ) -> None:
        self._folder, self._plan, self._group = folder, plan, group
        self._model, self._optimizer = model, optimizer
        self._recorder, self._description = recorder, description
        self._average = average
        self._things: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}  # restored states of things not kept yet
        self._steps_then, self._groups_then = 0, list[Any]()  # restored steps, parameter groups
        self._writer = Writer(folder / "checkpoints", plan.job) if folder is not None else None

    def prepare(self, *, may_exist: bool) -> None:
        """Make the folder, on rank 0; all workers wait for the outcome.

        Raises:
            FileError: The folder holds a run already, or cannot be made; or the model or the
                optimizer cannot be read back from a checkpoint.
        """
        problem = None
        if self._group.rank == 0 and self._folder is not None:
            problem = folder_problem(self._folder, may_exist)
            try:  # what cannot be kept is better known now than at a resume
                refuse_unsaveable(dict(self._model.state_dict()), _MODEL)
                refuse_unsaveable(self._optimizer.state_dict(), _OPTIMIZER)
            except FileError as error:
                problem = problem or str(error)
        problem = self._group.gather(problem)[0]
        if problem:
            raise FileError(problem)

    def keep(self, name: str, thing: Any, steps: int = 0) -> None:
        """Put ``thing`` into checkpoints; after a resume its state is loaded at once.

        A scheduler that was made after the resume has set the rates of its start, and maybe the
        momentum: the optimizer gets those of the checkpoint again, unless it has stepped since.

        Args:
            name: Names it in checkpoints.
            thing: What to keep.
            steps: Steps of the run so far.

        Raises:
            ArgumentError: It has no state to keep.
            FileError: Its state cannot be read back from a checkpoint.
        """
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise ArgumentError(
                f"session.keep({name!r}) got {described(thing)}: give something that has "
                "state_dict() and load_state_dict(state)"
            )
        if self._writer is not None:
            refuse_unsaveable(thing.state_dict(), _kept(name))
        self._things[name] = thing
        if name in self._waiting:
            thing.load_state_dict(self._waiting.pop(name))
            if isinstance(thing, LRScheduler) and steps == self._steps_then:
                groups = self._optimizer.param_groups
                for group, then in zip(groups, self._groups_then, strict=True):
                    for key in _SCHEDULED & then.keys():
                        if isinstance(group[key], torch.Tensor):
                            group[key].fill_(then[key])
                        else:
                            group[key] = then[key]

    # ------------------------------------------------------------------------------------ writing

    def due(self, steps: int) -> bool:
        """Whether ``last`` is to be written, on rank 0 as `Writer.due`; the others say no."""
        return self._writer is not None and self._group.rank == 0 and self._writer.due(steps)

    def misses(self, steps: int) -> bool:
        """Whether there is no ``last`` of so many steps, on rank 0; the others say no."""
        first, writer = self._group.rank == 0, self._writer
        return first and writer is not None and writer.saved_steps < steps

    def save(self, name: str, state: RunState, share: float) -> float:
        """Copy the state, to be written to ``checkpoints/NAME.pt`` once the disk is free.

        Args:
            name: ``last``, ``best``, or `KEPT` with the number of epochs.
            state: How far the run is.
            share: This worker's share of the samples, for batch normalization.

        Returns:
            The seconds that training waited.

        Raises:
            FileError: On rank 0: the state holds something by now that could not be read back. The
                checkpoint before is unharmed.
        """
        if self._writer is None:
            return 0.0
        started = time.perf_counter()
        self._writer.forget(name)
        first = self._group.rank == 0
        model, averaged = self._merged(share), {}
        if self._average:
            with self._average.in_place():
                averaged = {"average": self._merged(share)}
        workers = self._group.gather(
            {
                "buffers": {key: copied(value) for key, value in self._model.named_buffers()},
                "random": random_states(self._group.device),
                "meter": state.meter.values(),
                "average": to_plain(self._average.values(), _MODEL) if self._average else None,
            }
        )
        if first:
            content = {
                "model": model,
                **averaged,
                "optimizer": to_plain(self._optimizer.state_dict(), _OPTIMIZER),
                "outside": [copied(parameter) for parameter in self._outside],
                **about_network(self._plan, self._description),
                "state": state.values(),
                "kept": {
                    key: to_plain(thing.state_dict(), _kept(key))
                    for key, thing in self._things.items()
                },
                "run": self._recorder.values(),
                "workers": workers,
            }
            self._writer.put(name, content)
        return time.perf_counter() - started

    def _merged(self, share: float) -> dict[str, Any] | None:
        """The model's state with the statistics of all workers, on rank 0."""
        with merged_batch_norm(self._model, self._group, share):
            first = self._group.rank == 0
            return to_plain(dict(self._model.state_dict()), _MODEL) if first else None

    def check(self) -> None:
        """Raise the error of a write that has failed; takes next to no time.

        Raises:
            FileError: On rank 0: a checkpoint could not be written. The one before is unharmed.
        """
        if self._writer is not None:
            self._writer.check()

    def settle(self) -> None:
        """Wait until everything is written; nobody leaves before rank 0 is done.

        The disk may take longer than a collective may: so rank 0 tells the others every second
        whether it is done.

        Raises:
            FileError: On all workers: something could not be written.
        """
        done, problem = False, ""
        seconds = min(_LOOK_SECONDS, self._plan.job.timeout / 4)
        while not done:
            try:
                done = self._writer is None or self._writer.wait(seconds)
            except FileError as error:
                problem = str(error)
            done, problem = self._group.gather((done or bool(problem), problem))[0]
        if problem:
            raise FileError(problem)

    def close(self) -> None:
        """Finish what this worker writes, whatever has become of the others."""
        if self._writer is not None:
            self._writer.close()

    # ------------------------------------------------------------------------------------ reading

    def restore(self, state: RunState) -> bool:
        """Load the newest checkpoint into model, optimizer, recorder and ``state``.

        With as many workers as wrote it, each goes on exactly where it was, found by its rank.
        With more or fewer, batch normalization has the merged statistics, random numbers are
        seeded anew from (seed, steps, rank), and rank 0 has the epoch's times so far.

        Returns:
            Whether there was a checkpoint; if not, the run begins at its start.

        Raises:
            FileError: There has been a checkpoint, and none can be read; or it is of another model
                or optimizer.
            PlanError: The checkpoint was written under another plan.
        """
        if self._folder is None or self._writer is None:
            return False
        found = find_checkpoint(self._folder / "checkpoints", self._group)
        if found is None:
            return False
        content = found.content
        state_then = content["state"]
        done = state_then["epoch"] + (state_then["step"] > 0)  # what has begun is not changed
        # The job may differ: what may change in it after planning is the caller's to say.
        if why_not(self._plan, Plan.model_validate_json(content["plan"]), done):
            raise PlanError(
                f"{found.path} was written under another plan: resume with the plan of its run "
                "folder"
            )
        with _fitting(found.path, "model"):
            self._model.load_state_dict(content["model"])
        with _fitting(found.path, "optimizer"):
            _refuse_other_keys(content["optimizer"], self._optimizer.state_dict())
            self._optimizer.load_state_dict(content["optimizer"])
        self._steps_then = state_then["steps"]
        self._groups_then = content["optimizer"]["param_groups"]
        outside = content.get("outside", ())  # an earlier version's has none
        with torch.no_grad():
            for parameter, value in zip(self._outside, outside, strict=bool(outside)):
                parameter.copy_(value)
        if self._average and "average" in content:  # else the plan before had none
            rank, same = self._group.rank, len(content["workers"]) == self._group.size
            own = content["workers"][rank if same else 0]["average"]
            self._average.restore(content["average"], own, same_workers=same)
        meter = self._restore_worker(content["workers"], content["state"]["steps"])
        state.restore(content["state"], meter)
        state.best_score, state.best_loss = found.best
        self._waiting = dict(content["kept"])
        self._writer.saved_steps = found.last_steps
        self._writer.last_is_damaged = found.last_is_damaged
        where = f"resumed at epoch {state.epoch + 1} after {counted(state.step, 'step')} of it"
        where += found.source
        if len(content["workers"]) != self._group.size:
            where += f", with {counted(self._group.size, 'worker')}"
            where += f" in place of {len(content['workers'])}"
        self._recorder.restore(content["run"], where)
        found.tell_problems(self._recorder, where)
        return True

    @property
    def _outside(self) -> list[nn.Parameter]:
        """Parameters that the optimizer trains besides the model's, such as a loss's own."""
        own = set(self._model.parameters())
        groups = self._optimizer.param_groups
        return [one for group in groups for one in group["params"] if one not in own]

    def _restore_worker(self, workers: list[dict[str, Any]], steps: int) -> EpochMeter:
        """Load this worker's own buffers and random numbers, or substitutes; returns its meter."""
        rank, same = self._group.rank, len(workers) == self._group.size
        own = workers[rank if same else 0]
        merged = () if same else self._model.state_dict().keys()
        for key, buffer in self._model.named_buffers():
            kept = own["buffers"].get(key)
            # A network makes those that its state lacks by itself, and may have made others now.
            if key not in merged and kept is not None and kept.shape == buffer.shape:
                buffer.copy_(kept)
        if same:
            restore_random_states(own["random"], self._group.device)
        else:
            seed_worker(self._plan.job.seed, steps, rank)
        meter = EpochMeter(**own["meter"])
        return meter if same or rank == 0 else meter.for_a_newcomer()


@contextmanager
def _fitting(path: Path, what: str) -> Iterator[None]:
    """Replace the error of a state that does not fit, as PyTorch raises it, by one line.

    Raises:
        FileError: The checkpoint is of another model or optimizer.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and "loading state_dict" not in str(error):
            raise  # of the device
        raise FileError(
            f"{path} was written with another {what} than this session got: build it as it was, "
            f"or begin in another folder ({one_line(error)[:_LONGEST_WHY]})"
        ) from error


def _refuse_other_keys(kept: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the groups of two optimizers' states are not of one kind.

    PyTorch loads them all the same, and the first step ends in an error. A release of it may add
    options, or drop some; one kind in place of another does both.
    """
    there, wanted = (
        {key for group in each.get("param_groups", ()) for key in group} for each in (kept, own)
    )
    extra, missing = there - wanted - _OF_SCHEDULERS, wanted - there - _OF_SCHEDULERS
    if extra and missing:
        has, lacks = (", ".join(sorted(keys)) for keys in (extra, missing))
        raise ValueError(f"its groups have {has} and lack {lacks}")


def _kept(name: str) -> str:
    return f"the state_dict() of session.keep({name!r})"


def folder_problem(folder: Path, may_exist: bool) -> str | None:
    """Make a folder for a run; returns why it cannot be used, ``None`` if it can."""
    if has_begun(folder) and not may_exist:
        return f"{folder} holds a run already: choose another folder, or resume it"
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        if not may_exist:  # left of a run that was removed
            (folder / CHECKPOINTED).unlink(missing_ok=True)
    except OSError as error:
        return f"cannot make {folder}/checkpoints: {error.strerror}; choose another folder"
    for left in (folder / "checkpoints").glob(".*.pt.writing"):  # by a process that was killed
        if is_checkpoint(left.name[1:].removesuffix(".pt.writing")):
            with suppress(OSError):  # another user's, which may be in nobody's way
                left.unlink()
    return None
