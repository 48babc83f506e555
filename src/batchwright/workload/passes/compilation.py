"""The forward and backward pass of a network, compiled by `torch.compile`.

Only passes that are trained on are: evaluation would be compiled once more, for a few batches. What
cannot be compiled goes on as it is: a forward pass at once, a backward pass by a step that is taken
again; whoever trains says so, and has the other workers do likewise. Batch and image side are
symbols to the compiler, so that most other batches, at the end of an epoch, under `dynamic-batch`
or in a probe, are no new compilation; the C++ compiler's kernels made one of their own for fewer
than eight samples and for another side (docs/log.md).

What was compiled before is read from PyTorch's own cache (``TORCHINDUCTOR_CACHE_DIR``, by default
one for each user of a machine). Processes may share it: files in it are named by what they hold and
are there whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import nn

from batchwright.errors import BatchwrightError
from batchwright.workload.host import is_out_of_memory

BACKEND: str | Callable[..., Any] = "inductor"
"""As `torch.compile` takes it; tests take a quicker one."""

COMPILERS = ("g++", "clang++", "c++")
"""Of C++, one of which is needed on the CPU where ``CXX`` names none."""

_OWN = "own_of_batchwright"  # attribute of a forward pass that compiles: the network's own
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_LONGEST_CAUSE = 200  # characters


@dataclass
class Compilation:
    """Whether a network computes compiled.

    Attributes:
        on: Whether it is to.
        failure: Why it cannot, in words; empty: nothing has failed.
        asked: Whether a training is to end where it cannot, as the job asks for it.
    """

    on: bool = True
    failure: str = ""
    asked: bool = False

    def gives_up(self, error: Exception) -> bool:
        """Whether an error of a backward pass may be the compiler's; then it is used no more.

        If it was the network's own, it comes again without.
        """
        if self.failure or not self.on or isinstance(error, BatchwrightError):
            return False
        self.failure = failure_words(error)
        return True


def compile_training(network: nn.Module) -> Compilation:
    """Have the forward pass of ``network`` compiled at its first use in training.

    Names and weights stay as they are. Where compiling fails, the network goes on as it is, and
    what is returned says why. One that the user has compiled as a whole is left so.
    """
    if getattr(network.forward, "__self__", None) is not network:
        return Compilation(on=False)
    # Without threads of its own: a pool of processes would outlive a worker that is killed.
    os.environ.setdefault(_THREADS, "1")
    there: Any = network.forward.__func__
    own: Callable[..., Any] = getattr(there, _OWN, there)  # of an earlier training, not twice
    told = Compilation()
    compiled = torch.compile(own, dynamic=True, backend=BACKEND)

    def forward(network: nn.Module, *inputs: Any, **named: Any) -> Any:
        trained = network.training and torch.is_grad_enabled()
        if told.failure or not (told.on and trained):
            return own(network, *inputs, **named)
        try:
            return compiled(network, *inputs, **named)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            outputs = own(network, *inputs, **named)  # if it is the network's error, it comes again
            told.failure = failure_words(error)
        return outputs

    setattr(forward, _OWN, own)
    network.forward = MethodType(forward, network)
    return told


def what_is_missing(device: torch.device) -> str:
    """What compiling needs and this machine lacks, and how to get it; empty: nothing."""
    if device.type == "cuda":
        return "" if find_spec("triton") else "the package triton (pip install triton)"
    asked = os.environ.get("CXX")
    if any(map(shutil.which, (asked,) if asked else COMPILERS)):
        return ""
    if asked:
        return f"a C++ compiler: CXX={asked} is none"
    return f"a C++ compiler ({', '.join(COMPILERS)}), such as that of apt install g++"


def failure_words(error: Exception) -> str:
    """What an error of compiling says, in a line."""
    found = getattr(error, "inner_exception", None) or error  # PyTorch wraps what a backend raises
    lines = [line.strip() for line in str(found).splitlines() if line.strip()]
    told = lines[0] if lines else "no reason given"
    return f"{type(found).__name__}: {told}"[:_LONGEST_CAUSE]
