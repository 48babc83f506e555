"""A training step of the user's own, timed and weighed as it is, by the same controller as ours.

The user gives nothing but a function that takes a step. Its first call shows what it trains:
PyTorch's hooks report which modules compute and which optimizers are stepped (`step_contents`).
Their weights and states are restored.

All workers take the step at the same time, each by itself. The exchange of gradients is timed as a
sum of equally many bytes after each step, so that no worker waits for one that runs out of memory.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import Optimizer

from batchwright.distributed.group import Group
from batchwright.distributed.supervisor import noting_signals
from batchwright.errors import (
    ArgumentError,
    BatchwrightError,
    Interrupted,
    JobError,
    LostWorkerError,
    PlanError,
    one_line,
    stopped_by,
)
from batchwright.probing import commands
from batchwright.probing.bench import SMALLEST_BATCH, if_it_fits
from batchwright.probing.course.controller import Controller, Progress
from batchwright.probing.executor import devices
from batchwright.probing.measure.collective import time_exchange
from batchwright.probing.measure.memory import held_bytes, weigh
from batchwright.probing.measure.step_time import visit
from batchwright.probing.measure.timing import now, on_any_worker
from batchwright.probing.probe import Reporter, unlike
from batchwright.probing.step_contents import StepContents, tensors_in
from batchwright.probing.visiting import Visitor
from batchwright.probing.workers import Answer
from batchwright.records import DataFacts, Job, MemoryParts, NetworkFacts, Profile, Record
from batchwright.records.documents import change_job
from batchwright.records.registries.data_sources import OWN_STEP
from batchwright.workload.data.random_numbers import put_aside
from batchwright.workload.host import arithmetic, enter, release_memory
from batchwright.workload.load import LoadWatch
from batchwright.workload.tensor_bytes import bytes_of

_IMAGES = 4  # dimensions of a tensor of images
_NEVER = 1e-9  # seconds of evaluating an image: the user's program evaluates, the plan does not

Step = Callable[[Any], Any]
Batches = Callable[[int], Any]


class OwnBench:
    """A `Steppable` that takes the user's steps, as `Bench` takes ours.

    Args:
        step: Takes a step with a batch.
        supply: Returns the batch of the first step.
        timeout: Seconds that an exchange may take.

    Attributes:
        device: Device of the trained parameters.
        group: The workers that measure together.
        contents: Modules and optimizers that the step uses.
        first_steps: See `Steppable`; passes of the user's step are not recorded.

    Raises:
        ArgumentError: The step trains nothing, or calls a data-parallel wrapper.
        JobError: The first step failed.
    """

    first_steps = 0

    def __init__(self, step: Step, supply: Callable[[], Any], timeout: float) -> None:
        self._step, self.contents = step, StepContents()
        try:
            with self.contents.watching():
                step(supply())
            if not self.contents.trained:
                raise ArgumentError(
                    "step= of probe updated no weights: it is to do all that a step of yours does, "
                    "with zero_grad(), backward() and the optimizer's step()"
                )
        except Exception as error:
            with suppress(RuntimeError):  # of a GPU that has failed
                self.contents.put_back(whole=True)  # it may have updated weights before
            if isinstance(error, BatchwrightError):
                raise
            raise JobError(
                f"step= of probe failed with a batch of {SMALLEST_BATCH}: {one_line(error)}"
            ) from error
        self.device = self.contents.trained[0].device
        self.group = Group(enter(self.device), timeout)
        self._exchanged = torch.empty(
            sum(p.numel() for p in self.contents.trained) if self.group.size > 1 else 0,
            device=self.device,
        )

    def step(self, *supplies: Callable[[], Any]) -> tuple[float, float]:
        """Take a step; seconds of the step with its batch, and of an exchange after it."""
        start = now(self.device)
        for supply in supplies:
            self._step(supply())
        computed = now(self.device)
        self.group.sum(self._exchanged.zero_())
        return computed - start, now(self.device) - computed

    def try_step(self, supply: Callable[[], Any]) -> bool:
        """Take a step if it fits into memory on all workers; else restore the weights."""

        def take() -> bool:
            if self.group.size == 1:
                self.step(supply)
            else:  # without the exchange, in which a worker might be missing
                self._step(supply())
            return True

        fits = if_it_fits(take)
        if fits is None:
            self.contents.put_back(whole=False)
            for parameter in self.contents.trained:
                parameter.grad = None
            release_memory(self.device)
        return not on_any_worker(self.group, fits is None)

    def live_bytes(self) -> int:
        """Bytes of weights, buffers, optimizer state and gradients kept between two steps."""
        kept = [p.grad for p in self.contents.trained if p.grad is not None]
        contents = self.contents
        return bytes_of((*contents.parameters, *contents.buffers, *contents.states, *kept))

    def parts(self) -> MemoryParts:
        """Bytes that a step takes whatever the batch."""
        contents, gradients = self.contents, bytes_of(self.contents.trained)
        return MemoryParts(
            parameters=bytes_of(contents.parameters),
            buffers=bytes_of(contents.buffers),
            gradients=gradients,
            optimizer=bytes_of(contents.states),
            reduction=gradients,
        )


class OwnStep:
    """A `workers.CommandRunner` with the user's step.

    Each worker has its own; worker 0's gets the commands from the controller and hands them out.

    Args:
        step: Takes a whole training step with a batch.
        batch: f(n) makes a batch of n samples.
        loader: f(n) makes an iterable of batches of n samples; replaces ``batch``.
        samples: Samples of the training set.
        timeout: Seconds that an exchange may take.
        noted: Stop signals that this process has received so far.

    Attributes:
        others_wait: Whether all other workers are between two commands, and wait for worker 0.
        bench: Takes the steps.
        group: The workers that measure together.
        side: Image side in the batches, in pixels.
        network: Facts of the step's network.
        data: Facts of the user's data.
    """

    def __init__(
        self,
        step: Step,
        batch: Batches | None,
        loader: Batches | None,
        samples: int,
        timeout: float,
        noted: Sequence[int] = (),
    ) -> None:
        self._make, self._loader, self._noted = batch, loader, noted
        self.others_wait = True
        first = self.supply(SMALLEST_BATCH)()
        self.bench = OwnBench(step, lambda: first, timeout)
        self.group, self.side = self.bench.group, side_of(first)
        root = self.bench.contents.modules[0] if self.bench.contents.modules else None
        name = type(root).__name__ if root is not None else "step"
        norms = any(isinstance(one, _BatchNorm) for one in self.bench.contents.modules)
        self.network = NetworkFacts(
            name=name,
            parameters=sum(p.numel() for p in self.bench.contents.parameters),
            trained_bytes=bytes_of(self.bench.contents.trained),
            batch_norm=norms,
        )
        known = f"{name} {samples} {self.network.parameters}"
        self.data = DataFacts(
            name="data of your own",
            digest=hashlib.sha256(known.encode()).hexdigest(),
            train_samples=samples,
            val_samples=0,
            split="as your program has it",
            classes=(),
            side=self.side,
        )
        self.bench.contents.put_back(whole=False)

    def supply(self, size: int) -> Callable[[], Any]:
        """A function that returns a batch of ``size`` samples, a new one or the loader's next."""
        if self._loader is None:
            assert self._make is not None  # noqa: S101 - `probe_step` has checked
            return partial(self._make, size)
        return _endless(self._loader(size), size).__next__

    def ask(
        self,
        command: commands.Command,
        answer: type[Answer],
        on_progress: Callable[[float], None] = commands.ignored,
    ) -> Answer:
        """See `CommandRunner.ask`."""
        del on_progress
        self.others_wait = False
        self.group.hand_out(command.model_dump_json(), 0)
        done = self.carry_out(command)
        self.end_if_stopped()
        self.others_wait = True
        assert isinstance(done, answer)  # noqa: S101 - narrows the type
        return done

    def restart(self) -> None:
        """Do nothing: what kills this process ends the probe."""

    def end_if_stopped(self) -> None:
        """End the probe on all workers, after a command, if any of them got a stop signal.

        Raises:
            Interrupted: A worker got one.
        """
        signals = self.group.gather(self._noted[0] if self._noted else 0)
        if number := next(filter(None, signals), 0):
            raise Interrupted(number, stopped_by(number))

    def carry_out(self, command: commands.Command) -> Record:
        """Carry out this worker's part of a command.

        Raises:
            Interrupted: The step failed after a stop signal.
        """
        with _explained_by(self._noted):
            return self._carried_out(command)

    def _carried_out(self, command: commands.Command) -> Record:
        bench = self.bench
        match command:
            case commands.Prepare():
                neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.group.size)))
                return commands.Prepared(
                    data=self.data,
                    network=self.network,
                    parts=bench.parts(),
                    held_bytes=held_bytes(bench),
                    **devices(self.group, max(1, neighbours)),
                    threads=torch.get_num_threads(),
                    allocator="as the program has set it",
                    arithmetic=arithmetic(bench.device),
                )
            case commands.Weigh():
                peak, resident = weigh(bench, self.supply(command.local_batch_size))
                bench.contents.put_back(whole=False)
                return commands.Weighed(peak_bytes=peak, resident_bytes=resident)
            case commands.Visit():
                supply = self.supply(command.local_batch_size)
                ahead = _read_ahead(self._loader, command.local_batch_size)
                for _ in range(max(self.group.gather(ahead))):  # equally many on all workers
                    bench.step(supply)  # uses up the batches that were loaded ahead
                steps, _ = visit(
                    bench, supply, seconds=command.seconds, most_steps=command.most_steps
                )
                bench.contents.put_back(whole=False)
                return commands.Visited(steps=tuple(steps))
            case commands.Exchange():
                return time_exchange(
                    self.group, command.operation, command.bytes, seconds=command.seconds
                )
            case commands.Guess():
                return commands.Guessed(peak_bytes=None)
            case commands.MeasureNoise():
                return commands.NoiseMeasured(noise=None)
            case commands.Evaluate():
                return commands.Evaluated(seconds_per_image=_NEVER)
            case _:
                raise PlanError(f"a step of your own cannot tell what {command.do} asks")


def probe_step(
    step: Step,
    batch: Batches | None,
    loader: Batches | None,
    samples: int,
    keys: dict[str, Any],
    *,
    progress: Progress | None = None,
    tell: Callable[[str], None] = commands.ignored,
) -> Profile:
    """Step times and memory of a step of the user's own.

    All workers of a process group, or of torchrun, call this together and get the same profile.

    Args:
        step: Called with a batch; takes a whole step, with the optimizer's.
        batch: f(n) makes a batch of n samples.
        loader: f(n) makes an iterable of batches of n samples, such as a `DataLoader`.
        samples: Samples of the training set.
        keys: Job keys to change.
        progress: As for `probe.probe`.
        tell: As for `probe.probe`; called in worker 0.

    Raises:
        ArgumentError: An argument is no step or batch that can be probed; the message says why.
        Interrupted: A worker got a stop signal; all have ended.
        BatchwrightError: Anything else that is wrong, in one line.
    """
    if (batch is None) == (loader is None):
        raise ArgumentError(
            "probe of a step= takes either batch=, a function that makes a batch of n samples, or "
            "loader=, one that makes a loader of such batches"
        )
    for key, value in (("step", step), ("batch", batch), ("loader", loader)):
        if value is not None and not callable(value):
            raise ArgumentError(f"{key}={value!r} of probe: give a function")
    if not isinstance(samples, Integral) or samples < 2 * SMALLEST_BATCH:
        raise ArgumentError(f"samples={samples!r} of probe: give how many the training set has")
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(put_aside(gpus=True))
        # A handler of the program's own might exchange something, as Lightning's does for SIGTERM.
        # So a signal waits until the command at hand is done; a second one ends a hanging step.
        noted = stack.enter_context(noting_signals(once=True))
        with _explained_by(noted):
            own = OwnStep(step, batch, loader, samples, Job().timeout, noted)
        stack.push(lambda _, error, __: own.group.close(error))
        stack.callback(own.bench.contents.put_back, whole=True)
        job = job_of(own, keys)
        if own.group.rank:
            return _obey_worker_0(own)
        reporter = Reporter(progress, job.probe.most_budget)
        visitor = Visitor(job, own, own.group.size, reporter, LoadWatch())
        result: Profile | BatchwrightError | None = None
        try:
            result = Controller(
                visitor, (own.group.size,), report=reporter, started=started
            ).measure()
            reporter.finish()
            if line := unlike(visitor.prepared):
                tell(line)
        except BatchwrightError as error:
            result = error
        finally:  # workers that are still in a command's exchange notice as the group is left
            if own.others_wait:
                own.group.hand_out(None, 0)
                own.group.hand_out(result, 0)
        if isinstance(result, BatchwrightError):
            raise result
        assert result is not None  # noqa: S101 - else something was raised
        own.end_if_stopped()  # a signal may have come since the last command
        return result


@contextmanager
def _explained_by(noted: Sequence[int]) -> Iterator[None]:
    """Inside, an error after a stop signal is that signal's, and raised as `Interrupted`.

    A signal to the whole process group also ends the processes of the user's loader, for which
    PyTorch raises an error in the next step.
    """
    try:
        yield
    except Exception as error:
        if noted:
            raise Interrupted(noted[0], stopped_by(noted[0])) from error
        raise


def _obey_worker_0(own: OwnStep) -> Profile:
    """Carry out worker 0's commands; return its result, or raise its error."""
    while (text := own.group.hand_out(None, 0)) is not None:
        own.carry_out(commands.read_command(text))
        own.end_if_stopped()
    result = own.group.hand_out(None, 0)
    if isinstance(result, Profile):
        own.end_if_stopped()
        return result
    raise result or LostWorkerError("worker 0 gave the probe up; its own error is the one to read")


def job_of(own: OwnStep, keys: dict[str, Any]) -> Job:
    """The job of the profile: what the step was seen to use, and the user's keys."""
    optimizer = max((one for one, _ in own.bench.contents.optimizers), key=_size)
    word = type(optimizer).__name__.lower()
    similar = next((name for part, name in _LIKE.items() if part in word), "sgd")
    rate = float(optimizer.param_groups[0]["lr"])
    known: dict[str, Any] = {
        "data": OWN_STEP,
        "network": own.network.name,
        "optimizer": similar,
        "learning_rate": rate if rate > 0 else "auto",
        "precision": "float32",
        "activation_checkpointing": "off",
        "compile": "off",
        "cuda_graphs": "off",
        "device": own.bench.device.type,
        "workers": own.group.size,
        "resolutions": (own.side,),
    }
    for key in known.keys() & keys.keys() - {"learning_rate", "optimizer"}:
        raise ArgumentError(f"{key}= of probe is the step's own to say: leave it out with step=")
    job = change_job(Job(**known), keys)
    settings = job.probe.model_copy(update={"learning": 0.0})
    return job.model_copy(update={"probe": settings})


def _size(optimizer: Optimizer) -> int:
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


_LIKE = {"muon": "muon", "adam": "adamw", "lion": "adamw", "sgd": "sgd"}
"""By a word in the name of an optimizer's class: our most similar optimizer."""


def side_of(batch: Any) -> int:
    """Side of the images in a batch, in pixels; 1 where no tensor is (n, channels, h, w)."""
    tensors = list(tensors_in(batch))
    return next((int(one.shape[-1]) for one in tensors if one.ndim == _IMAGES), 1)


def _endless(loader: Any, size: int) -> Iterator[Any]:
    """A loader's batches, over and over; batches of fewer than ``size`` samples are left out."""
    while True:
        empty = True
        batches = iter(loader)
        for batch in batches:
            first = next(tensors_in(batch), None)
            if first is None or first.ndim == 0 or len(first) >= size:
                empty = False
                yield batch
        if empty:
            raise JobError(f"loader= of probe made no batch of {size} samples")


def _read_ahead(loader: Batches | None, size: int) -> int:
    """Number of batches that a loader has ready by the time the first one is taken."""
    if loader is None:
        return 0
    made = loader(size)
    ahead = (getattr(made, "num_workers", 0) or 0) * (getattr(made, "prefetch_factor", 0) or 0)
    return ahead + 1
