"""What a step of the user's own trains: seen by PyTorch's hooks, and put back afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from batchwright.errors import ArgumentError

_Tensor = TypeVar("_Tensor", bound=Tensor)


@dataclass
class StepContents:
    """Modules and optimizers that a step uses, with their state before it.

    The state is kept on the CPU: on a GPU it would count in the measured peaks.

    Attributes:
        modules: The modules that computed, in the order in which they began.
        optimizers: The optimizers that were stepped, each with a function that returns its state
            before.
        start: Tensors that the step changes, by `id`, with their first values.
    """

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[tuple[Optimizer, Callable[[], dict[str, Any]]]] = field(default_factory=list)
    start: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """A hook before a module's forward pass."""
        if any(module is one for one in self.modules):
            return
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            raise ArgumentError(
                f"step= of probe calls a model in {type(module).__name__}: call the model itself, "
                "its .module; the probe times the exchange of gradients besides"
            )
        self.modules.append(module)
        self._keep(module.buffers(recurse=False))

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """A hook before an optimizer's step."""
        if any(optimizer is one for one, _ in self.optimizers):
            return
        self.optimizers.append((optimizer, _state_maker(optimizer.state_dict())))
        self._keep(p for group in optimizer.param_groups for p in group["params"])

    def _keep(self, tensors: Iterator[Tensor]) -> None:
        for tensor in tensors:
            self.start.setdefault(id(tensor), (tensor, _cpu_copy(tensor)))

    @property
    def trained(self) -> list[nn.Parameter]:
        """The trained parameters: all that an optimizer steps, each once."""
        stepped = (p for one, _ in self.optimizers for g in one.param_groups for p in g["params"])
        return _each_once(p for p in stepped if p.requires_grad)

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, trained and frozen, each once."""
        own = (p for module in self.modules for p in module.parameters(recurse=False))
        return _each_once((*self.trained, *own))

    @property
    def buffers(self) -> list[Tensor]:
        """All buffers of the modules, such as statistics of batch normalization, each once."""
        return _each_once(b for module in self.modules for b in module.buffers(recurse=False))

    @property
    def states(self) -> list[Tensor]:
        """The tensors of the optimizers' states."""
        kept = (state for one, _ in self.optimizers for state in one.state.values())
        return [v for state in kept for v in state.values() if torch.is_tensor(v)]

    def put_back(self, *, whole: bool) -> None:
        """Restore weights and buffers; if ``whole`` the optimizers as well."""
        with torch.no_grad():
            for tensor, start in self.start.values():
                tensor.copy_(start)
        if whole:
            for optimizer, state_before in self.optimizers:
                optimizer.load_state_dict(state_before())
                optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, record the modules and optimizers that are used."""
        handles = (
            register_module_forward_pre_hook(self.before_forward),
            register_optimizer_step_pre_hook(self.before_step),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _each_once(tensors: Iterable[_Tensor]) -> list[_Tensor]:
    return list({id(one): one for one in tensors}.values())


def _cpu_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _state_maker(state: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """A function that later returns a copy of ``state`` as it is now, each tensor on its device.

    Until then the copy's tensors are on the CPU.
    """
    copies = {id(one): (_cpu_copy(one), one.device) for one in tensors_in(state)}
    # A memo makes deepcopy put the given tensors in the places of those with these ids.
    on_cpu = copy.deepcopy(state, {key: value for key, (value, _) in copies.items()})

    def make() -> dict[str, Any]:
        memo = {id(value): value.to(device) for value, device in copies.values()}
        return copy.deepcopy(on_cpu, memo)

    return make


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors in a batch, at any depth of its dictionaries, lists and tuples."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict) or hasattr(batch, "values"):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value)
