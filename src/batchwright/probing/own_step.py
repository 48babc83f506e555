"""A step of the user's own, timed and weighed as it is, by the same controller as ours.

Nothing is said of the step but how to call it. What it trains is found in its first call: PyTorch
tells which modules compute and which optimizers are stepped. Their weights and states are put back.

Each worker takes the step by itself, all at the same time; what the exchange of gradients takes is
measured by a sum of as many bytes behind each step, so that a worker that runs out of memory leaves
nobody waiting.
"""

from __future__ import annotations

import copy
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

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
)
from batchwright.probing import commands
from batchwright.probing.bench import SMALLEST_BATCH, if_it_fits
from batchwright.probing.course.controller import Controller, Progress
from batchwright.probing.executor import devices
from batchwright.probing.measure.collective import time_exchange
from batchwright.probing.measure.memory import held_bytes, weigh
from batchwright.probing.measure.step_time import visit
from batchwright.probing.measure.timing import now, on_any
from batchwright.probing.probe import Reporter, unlike
from batchwright.probing.visiting import Visitor
from batchwright.probing.workers import Answer
from batchwright.records import DataFacts, Job, MemoryParts, NetworkFacts, Profile, Record
from batchwright.records.documents import change_job
from batchwright.records.registries.data_sources import OWN_STEP
from batchwright.training.batches.randomness import put_aside
from batchwright.workload.host import arithmetic, enter, release_memory
from batchwright.workload.load import LoadWatch
from batchwright.workload.tensor_bytes import bytes_of

_IMAGES = 4  # dimensions of a tensor of images
_NEVER = 1e-9  # seconds: held-out samples are the user's to evaluate, and none are planned for

Step = Callable[[Any], Any]
Batches = Callable[[int], Any]


@dataclass
class Found:
    """What a step was seen to use, as it was before: kept on the CPU, or peaks of a GPU had it.

    Attributes:
        modules: That computed, in the order in which they began.
        optimizers: That were stepped, with what makes their states before.
        start: Tensors that it changes, by identity, with their first values.
    """

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[tuple[Optimizer, Callable[[], dict[str, Any]]]] = field(default_factory=list)
    start: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def computes(self, module: nn.Module, _: Any) -> None:
        """Before a module's forward pass."""
        if any(module is one for one in self.modules):
            return
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            raise ArgumentError(
                f"step= of probe calls a model in {type(module).__name__}: call the model itself, "
                "its .module; the probe times the exchange of gradients besides"
            )
        self.modules.append(module)
        self._keep(module.buffers(recurse=False))

    def steps(self, optimizer: Optimizer, *_: Any) -> None:
        """Before an optimizer's step."""
        if any(optimizer is one for one, _ in self.optimizers):
            return
        self.optimizers.append((optimizer, _kept(optimizer.state_dict())))
        self._keep(p for group in optimizer.param_groups for p in group["params"])

    def _keep(self, tensors: Iterator[Tensor]) -> None:
        for tensor in tensors:
            self.start.setdefault(id(tensor), (tensor, _copied(tensor)))

    @property
    def trained(self) -> list[nn.Parameter]:
        """All parameters that an optimizer steps, each once."""
        every = (p for one, _ in self.optimizers for g in one.param_groups for p in g["params"])
        return list({id(p): p for p in every if p.requires_grad}.values())

    @property
    def parameters(self) -> list[Tensor]:
        """These and the frozen ones."""
        every = (p for module in self.modules for p in module.parameters(recurse=False))
        return list({id(p): p for p in (*self.trained, *every)}.values())

    @property
    def buffers(self) -> list[Tensor]:
        """Statistics of batch normalization and the like."""
        every = (b for module in self.modules for b in module.buffers(recurse=False))
        return list({id(b): b for b in every}.values())

    @property
    def states(self) -> list[Tensor]:
        """What the optimizers keep."""
        kept = (state for one, _ in self.optimizers for state in one.state.values())
        return [v for state in kept for v in state.values() if torch.is_tensor(v)]

    def put_back(self, *, whole: bool) -> None:
        """Weights and buffers as they were before; if ``whole`` the optimizers, too."""
        with torch.no_grad():
            for tensor, start in self.start.values():
                tensor.copy_(start)
        if whole:
            for optimizer, state_before in self.optimizers:
                optimizer.load_state_dict(state_before())
                optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, take in what is used; afterwards only known modules and optimizers are."""
        handles = (
            register_module_forward_pre_hook(self.computes),
            register_optimizer_step_pre_hook(self.steps),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class OwnBench:
    """Takes the user's step as `Bench` takes ours.

    Attributes:
        device: Where it computes.
        group: The workers that measure together.
        found: What it uses.
        first_steps: See `Stepping`; nothing is recorded of a step of the user's own.
    """

    first_steps = 0

    def __init__(self, step: Step, supply: Callable[[], Any], timeout: float) -> None:
        self._step, self.found = step, Found()
        with self.found.watching():
            try:
                step(supply())
            except BatchwrightError:
                raise
            except Exception as error:
                raise JobError(
                    f"step= of probe failed with a batch of {SMALLEST_BATCH}: {one_line(error)}"
                ) from error
        if not self.found.trained:
            raise ArgumentError(
                "step= of probe updated no weights: it is to do all that a step of yours does, "
                "with zero_grad(), backward() and the optimizer's step()"
            )
        self.device = self.found.trained[0].device
        self.group = Group(enter(self.device), timeout)
        self._exchanged = torch.empty(
            sum(p.numel() for p in self.found.trained) if self.group.size > 1 else 0,
            device=self.device,
        )

    def step(self, *supplies: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of the step with its batch, and of the exchange that would follow."""
        start = now(self.device)
        for supply in supplies:
            self._step(supply())
        computed = now(self.device)
        self.group.sum(self._exchanged.zero_())
        return computed - start, now(self.device) - computed

    def try_step(self, supply: Callable[[], Any]) -> bool:
        """One step, if it fits into memory on all workers."""
        fits = if_it_fits(
            lambda: self.step(supply) if self.group.size == 1 else self._alone(supply)
        )
        if fits is None:
            self.found.put_back(whole=False)
            for parameter in self.found.trained:
                parameter.grad = None
            release_memory(self.device)
        return not on_any(self.group, fits is None)

    def _alone(self, supply: Callable[[], Any]) -> bool:
        self._step(supply())
        return True

    def live_bytes(self) -> int:
        """Bytes of weights, buffers, optimizer state and gradients kept between two steps."""
        kept = [p.grad for p in self.found.trained if p.grad is not None]
        found = self.found
        return bytes_of((*found.parameters, *found.buffers, *found.states, *kept))

    def parts(self) -> MemoryParts:
        """What takes memory whatever the batch."""
        found, gradients = self.found, bytes_of(self.found.trained)
        return MemoryParts(
            parameters=bytes_of(found.parameters),
            buffers=bytes_of(found.buffers),
            gradients=gradients,
            optimizer=bytes_of(found.states),
            reduction=gradients,
        )


class OwnStep:
    """Carries out what a controller asks, with the user's step; see `workers.Measuring`.

    With several workers each has one of these: the first is asked and hands the commands out.

    Args:
        step: Does all that a step does with a batch.
        batch: Makes a batch of so many samples.
        loader: Makes an iterable of batches of so many samples each; replaces ``batch``.
        samples: Of the training set.
        timeout: Seconds that an exchange may take.
        noted: Stop signals that this process has received so far.

    Attributes:
        others_wait: Whether the others, none of which is in a command, wait for the first's word.
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
        root = self.bench.found.modules[0] if self.bench.found.modules else None
        name = type(root).__name__ if root is not None else "step"
        norms = any(isinstance(one, _BatchNorm) for one in self.bench.found.modules)
        self.network = NetworkFacts(
            name=name,
            parameters=sum(p.numel() for p in self.bench.found.parameters),
            trained_bytes=bytes_of(self.bench.found.trained),
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
        self.bench.found.put_back(whole=False)

    def supply(self, size: int) -> Callable[[], Any]:
        """Makes a batch of so many samples each time, or takes the loader's next one."""
        if self._loader is None:
            assert self._make is not None  # noqa: S101 - `probe_step` has looked
            return partial(self._make, size)
        return _endless(self._loader(size), size).__next__

    def ask(
        self,
        command: commands.Command,
        answer: type[Answer],
        heard: Callable[[float], None] = commands.ignored,
    ) -> Answer:
        """As `Measuring` says."""
        del heard
        self.others_wait = False
        self.group.hand_out(command.model_dump_json(), 0)
        done = self.carry_out(command)
        self.end_if_stopped()
        self.others_wait = True
        assert isinstance(done, answer)  # noqa: S101 - tells the type checker
        return done

    def restart(self) -> None:
        """Nothing to do: what kills this process ends the probe."""

    def end_if_stopped(self) -> None:
        """End the probe after a command, on all workers, if one of them was asked to stop.

        Raises:
            Interrupted: One was.
        """
        asked = self.group.gather(self._noted[0] if self._noted else 0)
        if number := next(filter(None, asked), 0):
            raise Interrupted(number, f"stopped by signal {number}")

    def carry_out(self, command: commands.Command) -> Record:
        """What this worker does of a command."""
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
                bench.found.put_back(whole=False)
                return commands.Weighed(peak_bytes=peak, resident_bytes=resident)
            case commands.Visit():
                supply = self.supply(command.local_batch_size)
                for _ in range(_read_ahead(self._loader, command.local_batch_size)):
                    bench.step(supply)  # those that were loaded before anything was timed
                steps, _ = visit(
                    bench, supply, seconds=command.seconds, most_steps=command.most_steps
                )
                bench.found.put_back(whole=False)
                return commands.Visited(steps=tuple(steps))
            case commands.Exchange():
                time = time_exchange(
                    self.group, command.operation, command.bytes, seconds=command.seconds
                )
                return commands.Exchanged(time=time)
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
        step: Called with a batch; does all that a step does, the optimizer's step included.
        batch: f(n) makes a batch of n samples.
        loader: f(n) makes an iterable of such batches, such as a `DataLoader`.
        samples: Of the training set.
        keys: Job keys to change.
        progress: As `probe.probe` takes it.
        tell: Likewise, in the first worker.

    Raises:
        ArgumentError: The step does not fit; the message says how.
        Interrupted: A stop signal came, to whichever worker; all have ended.
        BatchwrightError: What is wrong, in one line.
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
        # The signal waits for the command at hand; a second one ends a step that hangs.
        noted = stack.enter_context(noting_signals(once=True))
        own = OwnStep(step, batch, loader, samples, Job().timeout, noted)
        stack.callback(own.group.close)
        stack.callback(own.bench.found.put_back, whole=True)
        job = job_of(own, keys)
        if own.group.rank:
            return _follow(own)
        reporter = Reporter(progress, job.probe.most_budget)
        visitor = Visitor(job, own, own.group.size, reporter, LoadWatch())
        told: Profile | BatchwrightError | None = None
        try:
            told = Controller(
                visitor, (own.group.size,), report=reporter, started=started
            ).measure()
            reporter.finish()
            if line := unlike(visitor.prepared):
                tell(line)
        except BatchwrightError as error:
            told = error
        finally:  # whoever is in a command's exchange hears of it as the group is left
            if own.others_wait:
                own.group.hand_out(None, 0)
                own.group.hand_out(told, 0)
        if isinstance(told, BatchwrightError):
            raise told
        assert told is not None  # noqa: S101 - else something was raised
        own.end_if_stopped()  # since the last command
        return told


def _follow(own: OwnStep) -> Profile:
    """Do what worker 0 hands out, until it says what came of it."""
    while (text := own.group.hand_out(None, 0)) is not None:
        own.carry_out(commands.read_command(text))
        own.end_if_stopped()
    told = own.group.hand_out(None, 0)
    if isinstance(told, Profile):
        own.end_if_stopped()
        return told
    raise told or LostWorkerError("worker 0 gave the probe up; its own error is the one to read")


def job_of(own: OwnStep, keys: dict[str, Any]) -> Job:
    """The job that such a profile is of: what the step was seen to use, and the user's keys."""
    optimizer = max((one for one, _ in own.bench.found.optimizers), key=_size)
    word = type(optimizer).__name__.lower()
    found = next((name for part, name in _LIKE.items() if part in word), "sgd")
    rate = float(optimizer.param_groups[0]["lr"])
    known: dict[str, Any] = {
        "data": OWN_STEP,
        "network": own.network.name,
        "optimizer": found,
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
"""Which of our optimizers is like one whose name holds a word."""


def side_of(batch: Any) -> int:
    """Side of the images in a batch, in pixels; 1 where nothing looks like (n, channels, h, w)."""
    tensors = list(_tensors(batch))
    return next((int(one.shape[-1]) for one in tensors if one.ndim == _IMAGES), 1)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _kept(state: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Makes a state as it is now, later, with each tensor on the device where it is now."""
    kept = {id(one): (_copied(one), one.device) for one in _tensors(state)}
    here = copy.deepcopy(state, {key: value for key, (value, _) in kept.items()})

    def made() -> dict[str, Any]:
        back = {id(value): value.to(device) for value, device in kept.values()}
        return copy.deepcopy(here, back)

    return made


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict) or hasattr(batch, "values"):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)


def _endless(loader: Any, size: int) -> Iterator[Any]:
    """A loader's batches over and over; small ones at its end are left out."""
    while True:
        empty = True
        batches = iter(loader)
        for batch in batches:
            first = next(_tensors(batch), None)
            if first is None or first.ndim == 0 or len(first) >= size:
                empty = False
                yield batch
        if empty:
            raise JobError(f"loader= of probe made no batch of {size} samples")


def _read_ahead(loader: Batches | None, size: int) -> int:
    """Batches that loader processes have ready before the first is asked for."""
    if loader is None:
        return 0
    made = loader(size)
    ahead = (getattr(made, "num_workers", 0) or 0) * (getattr(made, "prefetch_factor", 0) or 0)
    return ahead + 1
