"""Forward and backward pass of a network for one shape, recorded as CUDA graphs and checked."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.workload.data.copying import aside_of
from batchwright.workload.passes.graph_nodes import graph_nodes

_WARM_UP = 3  # passes, as PyTorch advises: kernels are loaded and chosen in the first
_FAR = 0.02  # relative distance, more than rounding in 16 bits makes


class CannotRecordError(Exception):
    """A pass that no graph can repeat; the words say why."""


class NoRoomError(CannotRecordError):
    """A pass that would leave too little memory for all else."""


class Recorder:
    """Records work for a GPU, in memory that all graphs of a network share.

    They may: of two passes the first has ended, backward pass and all, before the second begins.

    Args:
        limit: Bytes that the process may use there; ``None``: all that are free.
    """

    device_type = "cuda"

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._pool: Any = None
        # By GPU, the one to record in, kept as cuBLAS keeps some 32 MiB for each that it has seen.
        # No two networks share one: from PyTorch 2.12 on this memory goes with any graph that was
        # recorded in the stream, and the others still use it.
        self._streams: dict[int, torch.cuda.Stream] = {}

    def begin_anew(self) -> None:
        """Record in other memory from now on: all that was recorded has gone."""
        self._pool = None

    def warm_up(self, work: Callable[[], Any]) -> None:
        """Do the work aside a few times, as recording takes it.

        Raises:
            NoRoomError: Less memory is left than twice what it takes. What is recorded is not there
                for evaluations, nor for batches that are not recorded.
        """
        gc.collect()  # a graph must not be freed while another is recorded
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        aside = self._stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                work()
        torch.cuda.current_stream().wait_stream(aside)
        taken = torch.cuda.memory_reserved() - before
        torch.cuda.empty_cache()
        left = torch.cuda.mem_get_info()[0]
        if self._limit is not None:
            left = min(left, max(0, self._limit - torch.cuda.memory_reserved()))
        if 2 * taken > left:
            raise NoRoomError(f"it takes {taken >> 20} MiB, and {left >> 20} MiB are left")

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What the work returns, once it is replayed, and what replays it."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        collects, begun = gc.isenabled(), False
        gc.disable()
        try:
            # Other threads, such as one that pins batches, may go on meanwhile. After an error the
            # stream that is recorded would stay the current one.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, self._pool, self._stream(), "thread_local"),
            ):
                begun = True
                outputs = work()
        except BaseException:
            self._recover(graph, begun=begun)
            raise
        finally:
            if collects:
                gc.enable()
        return outputs, graph.replay

    def _recover(self, graph: torch.cuda.CUDAGraph, *, begun: bool) -> None:
        """After a recording that failed: give back what PyTorch keeps of it.

        Before 2.14 that is its hold on the pool. Up to 2.12 it does not end either, so that the
        allocator would give no memory back, and up to 2.11 random numbers would be refused.
        """
        device = torch.cuda.current_device()
        if _torch_version() < (2, 14):
            self._let_go(graph, device, begun=begun)
        if _torch_version() < (2, 12):
            generator = torch.cuda.default_generators[device]
            generator.graphsafe_set_state(generator.clone_state())

    def _let_go(self, graph: torch.cuda.CUDAGraph, device: int, *, begun: bool) -> None:
        try:
            graph.pool()
        except RuntimeError:  # it has not ended; else it lets the pool go when it goes itself
            with suppress(RuntimeError, AttributeError):  # raises where PyTorch has done it
                torch._C._cuda_endAllocateToPool(device, self._pool)
                begun = True
            # Never twice, or the pool would go while other graphs use it: of PyTorches for AMD some
            # before 2.14 do it, too.
            if begun and torch.version.hip is None:
                with suppress(RuntimeError, AttributeError):
                    torch._C._cuda_releasePool(device, self._pool)

    def _stream(self) -> torch.cuda.Stream:
        device = torch.cuda.current_device()
        if device not in self._streams:
            stream = torch.cuda.Stream()
            # PyTorch hands out 32 in turn, and what another thread copies would be recorded.
            if stream == aside_of(torch.device("cuda", device)):
                stream = torch.cuda.Stream()
            self._streams[device] = stream
        return self._streams[device]


class Passes:
    """Forward and backward pass of one shape, recorded.

    Attributes:
        parameters: What is trained.
        gradients: Theirs, once the backward pass was replayed; `None` where there is none.
        output: Of the network, once the forward pass was replayed.
        used: When it was last.
    """

    used = 0

    def __init__(
        self,
        network: nn.Module,
        own: Callable[..., Any],
        images: Tensor,
        recorder: Recorder,
    ) -> None:
        self._network, self._own = network, own
        self.parameters = [one for one in network.parameters() if one.requires_grad]
        self._images = images.detach().clone()
        self._live: Tensor
        with _aliased(network) as leaves:
            self._leaves = [leaves[one] for one in self.parameters]
            self._record(recorder)
            # `nn.LSTM` does, on CUDA, where it finds others than it knows: what was recorded would
            # read that memory, and the optimizer write into the other.
            if any(leaf.data_ptr() != one.data_ptr() for one, leaf in leaves.items()):
                raise CannotRecordError("a layer moves its weights to other memory, as nn.LSTM")
            self._check()

    def _record(self, recorder: Recorder) -> None:
        with _as_before(self._network, self._images.device), _weights_cast_anew():
            recorder.warm_up(self._both)
            output, self._forward = recorder.record(self._run_forward)
            if not isinstance(output, Tensor):
                raise CannotRecordError(f"its output is of class {type(output).__name__}")
            self._slope = torch.empty_like(output)
            self.gradients, self._backward = recorder.record(self._run_backward)
        self._live = self.output = output.detach()

    def replay_forward(self, images: Tensor) -> Tensor:
        """The output, which is the caller's own."""
        self._images.copy_(images)
        self._forward()
        return self.output.clone()

    def replay_backward(self, slope: Tensor) -> list[Tensor | None]:
        """The gradients, which are the caller's own.

        Else autograd would take the graph's memory for those of the parameters, and the next
        backward pass would be added to itself.
        """
        self._slope.copy_(slope)
        self._backward()
        there = [one for one in self.gradients if one is not None]
        copies = iter(torch._foreach_mul(there, 1.0) if there else ())  # of all with few launches
        return [None if one is None else next(copies) for one in self.gradients]

    def _both(self) -> None:
        output = self._run_forward()
        if isinstance(output, Tensor):
            self._slope = torch.zeros_like(output)
            self._run_backward()

    def _run_forward(self) -> Tensor:
        with torch.enable_grad():
            self._live = self._own(self._network, self._images)
        return self._live

    def _run_backward(self) -> Sequence[Tensor | None]:
        with torch.autocast(self._images.device.type, enabled=False):
            return torch.autograd.grad(self._live, self._leaves, self._slope, allow_unused=True)

    def _check(self) -> None:
        """Compare a replayed pass with one as it is, from the same numbers.

        Raises:
            CannotRecordError: They are not the same, or the graph has weights that are not seen.
        """
        device, count = self._images.device, self.output.numel()
        slope = torch.linspace(-1, 1, count, device=device).view(self.output.shape)
        slope = slope.to(self.output.dtype)
        with _as_before(self._network, device):
            output = self._run_forward()
            # Else the gradient by that way would be missing, in both passes.
            if not _weights_behind(output).isdisjoint(map(id, self.parameters)):
                raise CannotRecordError("a layer keeps weights in a list or an attribute besides")
            output = output.detach()
            self._slope.copy_(slope)
            gradients = self._run_backward()
            self._live = self.output
            wanted = self._told(output, gradients)
        with _as_before(self._network, device):
            output = self.replay_forward(self._images.clone())
            found = self._told(output, self.replay_backward(slope))
        if any(_apart(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)):
            raise CannotRecordError("a replayed pass was not what the network computes itself")

    def _told(
        self, output: Tensor, gradients: Sequence[Tensor | None]
    ) -> tuple[Sequence[Tensor | None], ...]:
        return [output], gradients, [one.clone() for one in self._network.buffers()]


def _weights_behind(output: Tensor) -> set[int]:
    """Which parameters an output was computed from, as autograd knows it; their `id`."""
    # Only where autograd adds up a parameter's gradient, a node has it.
    return {id(node.variable) for node in graph_nodes(output) if hasattr(node, "variable")}


@contextmanager
def _as_before(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, passes may be taken that change nothing: buffers and random numbers are put back."""
    slots = [
        (layer._buffers, name, one, one.clone())
        for layer in network.modules()
        for name, one in layer._buffers.items()
        if one is not None
    ]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for place, name, one, before in slots:
                    place[name] = one  # a layer may have put another there
                    one.copy_(before)


@contextmanager
def _aliased(network: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Inside, others are in the places of the parameters, with the same memory; by the usual ones.

    Else the graphs of losses that are still held would take part in what is recorded, on streams
    that are not, and hooks of parameters would be recorded.
    """
    slots = [
        (layer._parameters, name, one)
        for layer in network.modules()
        for name, one in layer._parameters.items()
        if one is not None
    ]
    leaves = {one: nn.Parameter(one.detach(), one.requires_grad) for _, _, one in slots}
    try:
        for place, name, one in slots:
            place[name] = leaves[one]
        yield leaves
    finally:
        for place, name, one in slots:
            place[name] = one


@contextmanager
def _weights_cast_anew() -> Iterator[None]:
    """Inside, autocast keeps no 16-bit copies of weights: a graph would repeat the old ones."""
    torch.clear_autocast_cache()
    usual = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(usual)


def _apart(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> bool:
    """Whether tensors are further apart, all together, than rounding brings them.

    All together, as of some, such as gradients of a bias before a normalization, rounding is all.
    """
    if [one is None for one in found] != [one is None for one in wanted]:
        return True
    apart = length = 0.0
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            continue
        ours, theirs = (torch.nan_to_num(each.double()) for each in (one, other))
        apart += float((ours - theirs).square().sum())
        length += float(theirs.square().sum())
    return apart > _FAR**2 * length


def _torch_version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))
