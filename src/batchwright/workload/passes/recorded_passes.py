"""Forward and backward pass of a network for one shape, recorded as CUDA graphs and checked."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.workload.data.copying import copy_stream

_WARM_UP = 3  # passes, as PyTorch advises: kernels are loaded and chosen in the first
_FAR = 0.02  # relative distance, more than rounding in 16 bits makes

# By GPU, the stream to record in, for all networks of this process. Streams are kept, as cuBLAS
# keeps some 32 MiB for each stream and thread that it has seen.
_SHARED_STREAMS: dict[int, torch.cuda.Stream] = {}


class CannotRecordError(Exception):
    """A pass cannot be replayed from a graph; the message says why."""


class NoRoomError(CannotRecordError):
    """A recorded pass would leave too little memory for everything else."""


class Recorder:
    """Records work of a GPU, in memory that all graphs of a network share.

    The graphs may share it because each pass, with its backward pass, ends before the next begins.

    Args:
        limit: Bytes that the process may use on the GPU; ``None``: all free bytes.
    """

    device_type = "cuda"

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._pool: Any = None
        # From PyTorch 2.12 on networks do not share a stream: cuBLAS's memory for a stream is freed
        # with any graph that was recorded in it, though other graphs still use it. Before, it stays
        # until the process ends, so that a probe's next network would be weighed with that of the
        # ones before.
        self._streams = {} if _torch_version() >= (2, 12) else _SHARED_STREAMS

    def begin_anew(self) -> None:
        """Record in new memory from now on; all recorded graphs have been dropped."""
        self._pool = None

    def warm_up(self, work: Callable[[], Any]) -> None:
        """Call ``work`` a few times in the recording stream, without recording it.

        Raises:
            NoRoomError: The memory left is less than twice what the work takes. A graph keeps its
                memory, which evaluations and batches that are not recorded cannot use.
        """
        gc.collect()  # a graph must not be freed while another is recorded
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        stream, current = self._stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    work()
        finally:
            # Also after an error, as where memory runs out: passes that are queued by then still
            # read the weights and write statistics, which are put back and updated next.
            current.wait_stream(stream)
        taken = torch.cuda.memory_reserved() - before
        torch.cuda.empty_cache()
        left = torch.cuda.mem_get_info()[0]
        if self._limit is not None:
            left = min(left, max(0, self._limit - torch.cuda.memory_reserved()))
        if 2 * taken > left:
            raise NoRoomError(f"it takes {taken >> 20} MiB, and {left >> 20} MiB are left")

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record ``work``; the tensors that it returns, once replayed, and a replaying function."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        collects, begun = gc.isenabled(), False
        gc.disable()
        try:
            # "thread_local" lets other threads, such as one that pins batches, go on meanwhile. The
            # outer context is for errors, after which the recorded stream would stay current.
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
        """Release what PyTorch keeps of a failed recording.

        Before 2.14 it keeps the pool in use. Up to 2.12 it does not end the recording either, so
        that the allocator would give no memory back; up to 2.11 random numbers would be refused.
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
        except RuntimeError:  # the graph has not ended; else it releases the pool when it is freed
            with suppress(RuntimeError, AttributeError):  # raises where PyTorch has done it already
                torch._C._cuda_endAllocateToPool(device, self._pool)
                begun = True
            # Never twice, or the pool would be freed while other graphs use it: some releases of
            # PyTorch for AMD before 2.14 do it by themselves.
            if begun and torch.version.hip is None:
                with suppress(RuntimeError, AttributeError):
                    torch._C._cuda_releasePool(device, self._pool)

    def _stream(self) -> torch.cuda.Stream:
        device = torch.cuda.current_device()
        if device not in self._streams:
            stream = torch.cuda.Stream()
            # PyTorch hands out 32 streams in turn; in the stream of a thread that copies batches,
            # the copies would be recorded.
            if stream == copy_stream(torch.device("cuda", device)):
                stream = torch.cuda.Stream()
            self._streams[device] = stream
        return self._streams[device]


class Passes:
    """Recorded forward and backward pass of one shape.

    Args:
        network: The network, on its device.
        own: The network's own forward pass.
        images: A batch of the shape.
        recorder: Records the passes.

    Attributes:
        parameters: The trained parameters.
        gradients: Their gradients after a replayed backward pass; `None` for those without one.
        output: The network's output after a replayed forward pass.
        used: Number of the pass that used it last; set by the caller.

    Raises:
        CannotRecordError: The network cannot be replayed from graphs.
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
        # What is recorded runs in streams of the current GPU, which may be another than theirs.
        with torch.cuda.device_of(self._images), _aliased(network) as leaves:
            self._leaves = [leaves[one] for one in self.parameters]
            self._record(recorder)
            # `nn.LSTM` does so on CUDA when it finds new parameters: the graph would read the new
            # memory, and the optimizer write into the old.
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
        """Replay the forward pass; a copy of the output."""
        self._images.copy_(images)
        self._forward()
        return self.output.clone()

    def replay_backward(self, slope: Tensor) -> list[Tensor | None]:
        """Replay the backward pass; copies of the gradients.

        Autograd would use uncopied ones as the parameters' gradients, and the next backward pass
        would then be added to itself.
        """
        self._slope.copy_(slope)
        self._backward()
        found = [one for one in self.gradients if one is not None]
        copies = iter(torch._foreach_mul(found, 1.0) if found else ())  # copies with few launches
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
        """Compare a replayed pass with the network's own, from equal inputs and random numbers.

        Raises:
            CannotRecordError: The passes differ, or the output depends on weights in places where
                they are not found.
        """
        device, count = self._images.device, self.output.numel()
        slope = torch.linspace(-1, 1, count, device=device).view(self.output.shape)
        slope = slope.to(self.output.dtype)
        with _as_before(self._network, device):
            output = self._run_forward()
            # The gradient of such weights would be missing in both passes. Only nodes that
            # accumulate a parameter's gradient have a ``variable``.
            behind = {id(one.variable) for one in graph_nodes(output) if hasattr(one, "variable")}
            if not behind.isdisjoint(map(id, self.parameters)):
                raise CannotRecordError("a layer keeps weights in a list or an attribute besides")
            output = output.detach()
            self._slope.copy_(slope)
            gradients = self._run_backward()
            self._live = self.output
            wanted: tuple[Sequence[Tensor | None], ...]
            wanted = [output], gradients, [one.clone() for one in self._network.buffers()]
        with _as_before(self._network, device):
            output = self.replay_forward(self._images.clone())
            gradients = self.replay_backward(slope)
            found: tuple[Sequence[Tensor | None], ...]
            found = [output], gradients, [one.clone() for one in self._network.buffers()]
        if any(_apart(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)):
            raise CannotRecordError("a replayed pass was not what the network computes itself")


def graph_nodes(output: Tensor) -> Iterator[Any]:
    """Each node of the autograd graph of ``output``, once: functions and parameters."""
    nodes: list[Any] = [output.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        yield node


@contextmanager
def _as_before(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, passes leave no trace: buffers and random numbers are restored afterwards."""
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
            for place, name, one, before in slots:
                place[name] = one  # a layer may have replaced the tensor
                # Its data: else autograd would refuse the backward pass of an earlier forward pass
                # that is still open, as where three images are compared.
                one.data.copy_(before)


@contextmanager
def _aliased(network: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Inside, new parameters with the same memory take the places of the network's parameters.

    With the network's own, the autograd graphs of losses that the user still holds would take part
    in the recording, on other streams, and hooks of parameters would be recorded.

    Yields:
        The new parameters, by the network's own.
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
    """Inside, autocast does not cache 16-bit copies of weights: a graph would keep old copies."""
    torch.clear_autocast_cache()
    usual = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(usual)


def _apart(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> bool:
    """Whether some tensors differ, taken together, by more than rounding.

    They are taken together because some, such as the gradient of a bias before a normalization,
    are nothing but rounding.
    """
    if [one is None for one in found] != [one is None for one in wanted]:
        return True
    distance = length = 0.0
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            continue
        ours, theirs = (torch.nan_to_num(each.double()) for each in (one, other))
        distance += float((ours - theirs).square().sum())
        length += float(theirs.square().sum())
    return distance > _FAR**2 * length


def _torch_version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))
