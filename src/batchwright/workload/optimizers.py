"""Torch's optimizers without the compiler that they would load."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch


def without_compiler(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """A subclass of one of torch's optimizers that does the same without loading the compiler.

    torch wraps these methods to keep `torch.compile` out of them, and the wrappers import all of
    `torch._dynamo` at the first call: some 2 s of CPU time in every worker at every start, and
    again after every kill. Here they are unwrapped; nothing of torch is changed, and whoever
    compiles a network, loads the compiler then. Where a release of torch wraps them otherwise, it
    is loaded as usual.

    Args:
        kind: Its instances never differentiate through their steps.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    step = torch.no_grad()(inspect.unwrap(kind.step))  # what its wrapper does besides
    return type(kind.__name__, (kind,), {**methods, "step": step})
