"""Checks of a session's arguments: errors where it cannot train with them, warnings of doubts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from inspect import Parameter, signature
from itertools import zip_longest
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from batchwright.client.reporter_process import destination
from batchwright.distributed.group import Group
from batchwright.distributed.joining.versions import versions
from batchwright.errors import ArgumentError, PlanError
from batchwright.records import Plan, Stage
from batchwright.records.registries.optimizers import OPTIMIZERS
from batchwright.records.text.formatting import counted
from batchwright.records.text.problems import described
from batchwright.workload.data.loading import loader_processes

_ANY_NUMBER = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_LONGEST_ENTRY = 200  # characters of a plan's value, or of a tensor's name


def planned_loaders(plan: Plan) -> int:
    """Loader processes of a worker by the plan's job, for data of a loop's own."""
    return loader_processes(plan.job, 1, files=False)


def doubts(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    first: bool,
    own_rates: bool,
    scheduled: float | None,
    loaders: int,
    stage: Callable[[], Stage],
) -> Iterator[str]:
    """Warnings where a user's loop differs from its plan, a line each.

    Args:
        plan: The plan that is followed.
        model: The user's model.
        optimizer: The user's optimizer.
        device: The model's device.
        first: Whether this is worker 0, which alone gives most warnings.
        own_rates: Whether the optimizer's rates are left alone.
        scheduled: As `scheduled_rate`, before a checkpoint brings other rates.
        loaders: Loader processes of each worker.
        stage: Returns the plan's row that the training is in.
    """
    rule = plan.learning_rate
    if own_rates and rule.scaling == "gain":
        yield (
            "learning_rate='mine': the plan wanted your rate times a measured gain "
            "(scaling=gain), which is left out"
        )
    if first and own_rates and plan.growth:
        yield (
            "learning_rate='mine': where the batch grows (batch_growth=noise) the plan raises the "
            "rate with it, and yours stays: plan with batch_growth=off, or leave the rate to it"
        )
    asked = plan.job.device
    if first and asked not in ("auto", device.type):  # `auto`: nothing was measured
        move = "model.to(f'cuda:{local_rank}')" if asked == "cuda" else "model.to('cpu')"
        yield (
            f"the plan is for device={asked} and the model is on {device}: {move} before "
            f"the optimizer is built, or probe with device={device.type}"
        )
    trained = {one for one in model.parameters() if one.requires_grad}
    held = {one for group in optimizer.param_groups for one in group["params"]}
    without = trained - held
    left_out = [name for name, one in model.named_parameters() if one in without]
    if first and trained and trained.isdisjoint(held):
        yield (
            "the optimizer has none of the parameters that the model trains, so the model will not "
            "change: build it from the parameters of the very model that the session gets"
        )
    elif first and left_out:
        yield (
            f"the optimizer leaves out {len(left_out)} of {len(trained)} tensors that the model "
            f"trains, such as {left_out[0]}, and a step clears their gradients, so no other "
            "optimizer changes them either: give it all of them, in groups of their own, or freeze "
            "these (requires_grad_(False))"
        )
    # SGD for AdamW goes without a word: rates are factors on the user's own, times are close.
    name = type(optimizer).__name__
    spec, like = OPTIMIZERS[plan.update], name.lower()  # ours, torch's, or somebody's own
    # Not all members: other packages' are loaded where a job names them, and nowhere else.
    special = [one for one in (*OPTIMIZERS.own.values(), spec) if one.own_loop]
    found = next((one for one in special if one.name in like), None)
    if first and found != (spec if spec in special else None):
        if found:
            how = f"take an optimizer like {plan.update}, or plan with optimizer={found.name}"
        else:
            how = f"take {spec.own_loop}, or plan with optimizer=sgd"
        yield (
            f"the plan's batch and times are for optimizer={plan.update} and the session got "
            f"{name}: {how}"
        )
    planned = planned_loaders(plan)
    timed = any(reason.choice == "loading" for reason in plan.reasons)  # with its loading
    if first and timed and loaders != planned:
        yield (
            f"the plan's times were measured with loaders={planned} and the session got "
            f"loaders={loaders}: leave it out, or probe with loaders={loaders}"
        )
    adam = any("betas" in group for group in optimizer.param_groups)
    if first and plan.ags is not None and adam:
        yield (
            f"ags: {name} divides each gradient by its own recent size, so factors on "
            "gradients nearly cancel: use SGD, or plan with ags.mode=off"
        )
    if first and scheduled is not None and not own_rates:
        yield (
            f"a scheduler has set the optimizer's rate to {scheduled:.3g}, and the plan sets it at "
            "each step, as a multiple of that: leave the scheduler out, or give "
            "learning_rate='mine'"
        )
    layers = {group.get("lr_scale", 1.0) for group in optimizer.param_groups}
    if first and scheduled is None and layers != {1.0}:
        yield (
            "the optimizer's groups have lr_scale, which only timm's schedulers multiply into "
            "their rates: do so before the session, by group['lr'] *= group.pop('lr_scale', 1.0) "
            "for each group in optimizer.param_groups"
        )
    if own_rates and rule.peak != rule.base:
        yield (
            f"learning_rate='mine': the plan wanted {rule.peak / rule.base:.3g} times your "
            f"rate at global batch {stage().global_batch_size}"
        )


def scheduled_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """The first rate that a scheduler of PyTorch has set; ``None``: none was built."""
    rates = (group["lr"] for group in optimizer.param_groups if "initial_lr" in group)
    return next(map(float, rates), None)


def other_number(planned: int, found: int) -> PlanError:
    """The error where another number of workers is running than planned."""
    how = "" if found > 1 else f" (torchrun --nproc-per-node {planned})"
    return PlanError(
        f"the plan is for {counted(planned, 'worker')}, and {found} running: start {planned}{how}, "
        f"or plan again with workers={found}"
    )


def checked_service(report_to: str | None, run_folder: str | Path | None) -> str | None:
    """Address of the service to report to, checked before anything is opened; ``None``: none."""
    if not report_to:
        return None
    if not run_folder:
        raise PlanError("report_to= needs run_folder=: what is reported is what stands there")
    return destination(None, report_to)


def checked_number(number: object, name: str, of: str, *, least: int) -> None:
    """Refuse what is no whole number from ``least`` on, nor ``None``.

    Args:
        number: The argument.
        name: Its name.
        of: The function that it is an argument of.
        least: The smallest that makes sense.

    Raises:
        ArgumentError: It is another.
    """
    if number is not None and (not isinstance(number, Integral) or int(number) < least):
        raise ArgumentError(
            f"{name}={number!r} of {of}: give a whole number from {least} on, or None for that of "
            "the plan"
        )


def checked_norm(clip_norm: float | None, plan: Plan) -> float | None:
    """The largest gradient norm that a session asks for, else that of the plan's job."""
    if clip_norm is None:
        return plan.job.clip_norm
    try:
        norm = float(clip_norm)
    except (TypeError, ValueError):
        norm = math.nan
    if not norm > 0:  # by a negative one gradients would be turned around
        raise ArgumentError(
            f"clip_norm={clip_norm!r} of Session: give a number above 0, or None for that of the "
            "plan's job"
        )
    return norm


def checked_rates(learning_rate: str) -> bool:
    """Whether the optimizer's rates are left alone."""
    if learning_rate not in ("plan", "mine"):
        raise ArgumentError(
            f"learning_rate={learning_rate!r} of Session: give 'plan' or 'mine'; the optimizer is "
            "built with the rate itself"
        )
    return learning_rate == "mine"


def as_weights(weights: object) -> Tensor | None:
    """Weights of samples as a tensor; they may be an array, a list or a column of a table."""
    if weights is None or isinstance(weights, Tensor):
        return weights
    try:
        # A copy, since PyTorch takes no array in reverse order.
        return torch.from_numpy(np.array(weights, dtype=np.float64))
    except (TypeError, ValueError):
        raise ValueError(
            f"sample_weights of Session is {described(weights)}: give one number for each sample"
        ) from None


def checked_weights(weights: Tensor | None, samples: int) -> Tensor | None:
    """Weights with which so many samples are drawn, as float64 (samples,) on the CPU."""
    if weights is None:
        return None
    weights = weights.detach().to("cpu", torch.float64)
    bad = weights.shape != (samples,) or not bool(torch.isfinite(weights).all())
    if bad or bool((weights < 0).any()) or not bool(weights.sum() > 0):
        raise ValueError(
            f"sample_weights of shape {tuple(weights.shape)} for {samples} samples: give one "
            "finite number for each, none negative and not all 0"
        )
    return weights


def refuse_other_things(model: object, optimizer: object, dataset: object) -> None:
    """Refuse arguments of another kind than expected, and a model in a wrapper.

    Wrappers exchange gradients by themselves, or hold only a part of the weights.

    Raises:
        ArgumentError: An argument is something else; the message names it.
        PlanError: The model is wrapped.
    """
    for name, given, fits in (
        ("model", model, isinstance(model, nn.Module)),
        ("optimizer", optimizer, hasattr(optimizer, "param_groups")),
    ):
        if not fits:
            several = isinstance(given, list | tuple | dict) and name == "optimizer"
            raise ArgumentError(
                f"{name} of Session is {described(given)}: "
                + "give one optimizer, with a parameter group for what each of yours has" * several
                + "write bw.Session(model, optimizer, dataset, plan=...)" * (not several)
            )
    _refuse_other_updates(optimizer)
    assert isinstance(model, nn.Module)  # noqa: S101 - as was looked at
    if not any(True for _ in model.parameters()):
        raise ArgumentError(
            f"model of Session is a {type(model).__name__} without parameters: give it the network "
            "that is trained"
        )
    if lazy := [name for name, one in model.named_parameters() if is_lazy(one)]:
        raise ArgumentError(
            f"the model's {lazy[0]} has no shape yet: run a batch through the model before the "
            "optimizer is built"
        )
    if dataset is None or isinstance(dataset, str | Path | nn.Module | DataLoader):
        raise ArgumentError(
            f"dataset of Session is {described(dataset)}: give the data set itself, with a length "
            "and items by index; the session loads its batches"
        )
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        what = f"the model's {name}" if name else "the model"
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            raise PlanError(
                f"{what} is wrapped in {type(module).__name__}: leave that out and give Session "
                "the model itself, which is the wrapper's .module; step() sums the gradients"
            )
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise PlanError(
                f"{what} is sharded ({type(module).__name__}): give Session the model as it was "
                "before; each worker holds all of its weights, and step() sums the gradients"
            )


def _refuse_other_updates(optimizer: Any) -> None:
    """Refuse an optimizer that needs more than gradients and a rate for its step."""
    name = type(optimizer).__name__
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise PlanError(
            f"the optimizer is sharded ({name}): give Session one as without it; each worker holds "
            "all of its state"
        )
    # Of the class: a scheduler gives the object a step of its own, with other arguments.
    more: list[Parameter] = []
    with suppress(AttributeError, TypeError, ValueError):  # compiled code may not tell
        more = list(signature(type(optimizer).step).parameters.values())[1:]
    needs = [one.name for one in more if one.default is one.empty and one.kind not in _ANY_NUMBER]
    if needs:
        raise ArgumentError(
            f"optimizer of Session is {name}, whose step() needs {needs[0]}=: a session's step is "
            "one backward pass and then the update, so take an optimizer that needs no more, "
            "or keep your loop and use bw.Sampler and bw.weight in it"
        )
    rates = [group.get("lr") for group in optimizer.param_groups]
    if None in rates:
        raise ArgumentError(
            f"optimizer of Session is {name} with lr=None in group {rates.index(None)}: build it "
            "with a rate, of which the plan's is a multiple"
        )


def refuse_unlike_workers(
    plan: Plan,
    group: Group,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    **options: object,
) -> None:
    """Refuse, on all workers together, workers that differ from worker 0.

    Else they would exchange different things, and wait for each other until a timeout.

    Args:
        plan: The plan.
        group: The workers.
        model: What is trained.
        optimizer: Its optimizer.
        options: Further options of `Session` that must be the same, by name.

    Raises:
        PlanError: A worker differs; the message says which one and in what.
    """
    if group.size == 1:
        return
    lists = {
        "plan": list(_entries(plan.model_dump(mode="json"))),
        "model": [
            *[_layout(one, name) for name, one in model.named_parameters()],
            *[_layout(one, name) for name, one in model.named_buffers()],
        ],
        "optimizer": [
            _layout(one, f"group {number}:")
            for number, each in enumerate(optimizer.param_groups)
            for one in each["params"]
        ],
    }
    # Of weights their number alone: hosts may differ in the last bit of what they compute.
    of_options = {
        name: f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    digests = {what: sha256(repr(each).encode()).hexdigest() for what, each in lists.items()}
    first, *others = group.gather({**versions(), **digests, **of_options})
    for rank, other in enumerate(others, 1):
        for what, value in first.items():
            if other[what] != value:
                here, there = value, other[what]
                if what in lists:
                    every = group.gather(lists[what])
                    here, there = _first_difference(every[0], every[rank])
                raise PlanError(
                    f"worker {rank} ({group.places[rank]}) has {what} {there}, and worker 0 "
                    f"({group.places[0]}) has {here}: give all workers the same {what}"
                )


def _first_difference(one: list[str], other: list[str]) -> tuple[str, str]:
    """The first entries in which two lists differ, shortened."""
    pairs = zip_longest(one, other, fillvalue="nothing more")
    here, there = next((a, b) for a, b in pairs if a != b)
    return here[:_LONGEST_ENTRY], there[:_LONGEST_ENTRY]


def _entries(value: object, name: str = "") -> Iterator[str]:
    """The single values of nested ones with their names, as in ``stages.0.epochs=3``."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in pairs:
            yield from _entries(one, f"{name}.{key}" if name else str(key))
    else:
        yield f"{name}={value}"


def _layout(tensor: Tensor, name: str) -> str:
    """What workers must have alike of a tensor, in words."""
    kind = "trained" if tensor.requires_grad else "not trained"
    return f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {kind}"


def refuse_several_devices(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, alone: bool
) -> None:
    """Refuse weights on several devices: their gradients are summed and measured together.

    Args:
        model: The model.
        optimizer: The optimizer, which may train others.
        alone: Whether one worker trains. Then frozen weights may be anywhere, such as a large
            embedding on the CPU; workers compare theirs, on one device.

    Raises:
        PlanError: A weight is on another device than the model's first one.
    """
    named = {one: f"the model's {name}" for name, one in model.named_parameters()}
    for group in optimizer.param_groups:
        for one in group["params"]:
            named.setdefault(one, f"a parameter of the optimizer, of shape {tuple(one.shape)},")
    (first, name), *others = named.items()
    for one, other in others:
        if one.device != first.device and (one.requires_grad or not alone):
            raise PlanError(
                f"{other} is on {one.device}, and {name} on {first.device}: a session trains "
                "weights of one device, so move all of them to one before the optimizer is built"
            )


def refuse_without_float64(device: torch.device) -> None:
    """Refuse a device without float64, in which losses and norms are summed."""
    if device.type == "mps":
        raise PlanError(
            "the model is on mps, where PyTorch has no float64, in which losses are added up: "
            "move it by model.to('cpu') before the optimizer is built"
        )


def refuse_default_device() -> None:
    """Refuse a default device other than the CPU, on which numbers of samples are drawn."""
    # Not `torch.get_default_device`, which fails in PyTorch 2.6 after set_default_device(None).
    device = torch.empty(0).device
    if device.type != "cpu":
        raise PlanError(
            f"the default device {device} (torch.set_default_device, or a `with` block around the "
            "session) holds for all that a session makes, also for what loader processes read: set "
            f"it for the model alone, as in `with torch.device('{device}'): model = make_model()`"
        )


def refuse_synchronized_on_cpu(model: nn.Module, device: torch.device) -> None:
    """Refuse SyncBatchNorm on the CPU, which does not compute it."""
    if device.type == "cpu" and any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        raise PlanError(
            "SyncBatchNorm computes on GPUs only: on the CPU use plain BatchNorm, whose statistics "
            "are merged over the workers for evaluation and checkpoints"
        )
