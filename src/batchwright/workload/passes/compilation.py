"""The forward and backward pass of a network, compiled by `torch.compile`.

Only training passes are compiled: evaluation would need another compilation, for a few batches.
Where a pass cannot be compiled, training goes on without the compiler: a failed forward pass is
taken again at once, a failed backward pass by repeating the step. The caller reports it, and
switches compiling off on the other workers, too. Batch and image side are symbols to the compiler,
so that most other batches, at the end of an epoch, under `dynamic-batch` or in a probe, are not
compiled anew; with C++ kernels, fewer than eight samples and another side were (docs/log.md).

Compiled kernels are kept in PyTorch's own cache (``TORCHINDUCTOR_CACHE_DIR``, by default one for
each user of a machine). Processes may share it: its files are named by their content, and are
written whole or not at all.
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
from batchwright.workload.host import gpu_failure, is_out_of_memory

BACKEND: str | Callable[..., Any] = "inductor"
"""The backend argument of `torch.compile`; tests set a quicker one."""

COMPILERS = ("g++", "clang++", "c++")
"""C++ compilers, one of which is needed on the CPU unless ``CXX`` names another."""

_OWN = "own_of_batchwright"  # attribute of a compiling forward pass: the network's own one
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_LONGEST_CAUSE = 200  # characters


@dataclass
class Compilation:
    """Whether a network's training passes are compiled.

    Attributes:
        on: Whether they are to be compiled.
        failure: Why they cannot be, in words; empty: nothing has failed.
        asked: Whether the job asks for compiling, so that training ends if it fails.
    """

    on: bool = True
    failure: str = ""
    asked: bool = False

    def gives_up(self, error: Exception) -> bool:
        """Whether an error of a backward pass may be the compiler's; it is then switched off.

        An error of the network's own comes again without the compiler.
        """
        if self.failure or not self.on or isinstance(error, BatchwrightError) or gpu_failure(error):
            return False
        self.failure = failure_words(error)
        return True


def compile_training(network: nn.Module) -> Compilation:
    """Have the forward pass of ``network`` compiled at its first use in training.

    Names and weights do not change. Where compiling fails, the network computes without it, and the
    returned object says why. A network that the user has compiled as a whole is not changed.
    """
    if getattr(network.forward, "__self__", None) is not network:
        return Compilation(on=False)
    # The compiler's pool of processes would outlive a worker that is killed.
    os.environ.setdefault(_THREADS, "1")
    present: Any = network.forward.__func__
    own: Callable[..., Any] = getattr(present, _OWN, present)  # not that of an earlier training
    compilation = Compilation()
    compiled = torch.compile(own, dynamic=True, backend=BACKEND)

    def forward(network: nn.Module, *inputs: Any, **named: Any) -> Any:
        trained = network.training and torch.is_grad_enabled()
        if compilation.failure or not (compilation.on and trained):
            return own(network, *inputs, **named)
        try:
            return compiled(network, *inputs, **named)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            outputs = own(network, *inputs, **named)  # raises again if it is the network's error
            compilation.failure = failure_words(error)
        return outputs

    setattr(forward, _OWN, own)
    network.forward = MethodType(forward, network)
    return compilation


def what_is_missing(device: torch.device) -> str:
    """What this machine lacks for compiling, and how to get it; empty: nothing."""
    if device.type == "cuda":
        return "" if find_spec("triton") else "the package triton (pip install triton)"
    asked = os.environ.get("CXX")
    if any(map(shutil.which, (asked,) if asked else COMPILERS)):
        return ""
    if asked:
        return f"a C++ compiler: CXX={asked} is none"
    return f"a C++ compiler ({', '.join(COMPILERS)}), such as that of apt install g++"


def failure_words(error: Exception) -> str:
    """The message of a compiling error, on one line."""
    found = getattr(error, "inner_exception", None) or error  # PyTorch wraps a backend's errors
    lines = [line.strip() for line in str(found).splitlines() if line.strip()]
    why = lines[0] if lines else "no reason given"
    return f"{type(found).__name__}: {why}"[:_LONGEST_CAUSE]
