"""SGD and AdamW for jobs: torch's own, without the compiler that they would load."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizers

from batchwright.records import Job


def without_compiler(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """A subclass of one of torch's optimizers that works without loading the compiler.

    torch wraps some methods to keep `torch.compile` out of them, and the wrappers import all of
    `torch._dynamo` at the first call: some 2 s of CPU time in every worker at every start, and
    again after every kill. The subclass has the unwrapped methods; torch itself is not changed, and
    compiling a network loads the compiler as usual. So do optimizers of a torch release that wraps
    its methods in another way.

    Args:
        kind: A class of optimizers that never differentiate through their steps.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    step = torch.no_grad()(inspect.unwrap(kind.step))  # the wrapper of `step` does this, too
    return type(kind.__name__, (kind,), {**methods, "step": step})


def sgd(network: nn.Module, job: Job, rate: float) -> torch.optim.Optimizer:
    """SGD with Nesterov's or plain momentum, with weight decay in its first group.

    It is fused: one pass over the weights in place of a loop over the tensors.
    """
    return without_compiler(torch.optim.SGD)(
        decaying_and_other(network, job),
        lr=rate,
        momentum=job.momentum,
        nesterov=job.looks_ahead,
        fused=True,
    )


def adamw(network: nn.Module, job: Job, rate: float) -> torch.optim.Optimizer:
    """AdamW, fused, with weight decay in its first group."""
    return without_compiler(torch.optim.AdamW)(
        decaying_and_other(network, job), lr=rate, betas=job.betas, eps=job.eps, fused=True
    )


_OF_TORCH = {
    inspect.unwrap(kind.step)
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
}
_HOOKS = "pre", "post"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def can_skip_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `skip_step_if` works: the step is torch's own and fused, and has no hooks.

    An optimizer that is wrapped or derived, or has hooks, may do more in a step than torch's own.
    """
    steps = {type(optimizer).step, getattr(optimizer.step, "__func__", optimizer.step)}
    return (
        all(inspect.unwrap(step, stop=_of_others) in _OF_TORCH for step in steps)
        and getattr(optimizer, "_step_supports_amp_scaling", False)  # as it was built
        and all(group.get("fused") for group in optimizer.param_groups)  # as it was loaded
        and all(_empty(optimizer, f"_optimizer_step_{place}_hooks") for place in _HOOKS)
        and all(_empty(torch_optimizers, f"_global_optimizer_{place}_hooks") for place in _HOOKS)
    )


def _of_others(step: Callable[..., Any]) -> bool:
    """Whether a step is not torch's code, and so may do more than the step that it wraps."""
    code = getattr(step, "__code__", None)
    return code is None or not code.co_filename.startswith(_TORCH)


def _empty(owner: Any, name: str) -> bool:
    """Whether a list of hooks exists and is empty; without `Optimizer.__init__` there is none."""
    hooks = getattr(owner, name, None)
    return hooks is not None and not hooks


@contextmanager
def skip_step_if(optimizer: torch.optim.Optimizer, flag: Tensor) -> Iterator[None]:
    """Inside, a step changes nothing if ``flag``, a float32 scalar on the device, is 1, not 0.

    `torch.amp.GradScaler` has fused optimizers leave out steps in the same way.
    """
    optimizer.found_inf = flag  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def decaying_and_other(network: nn.Module, job: Job) -> list[dict[str, Any]]:
    """Two parameter groups: matrices and kernels with weight decay, vectors and scalars without."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": job.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
