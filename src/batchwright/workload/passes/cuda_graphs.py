"""Forward and backward passes of a network, replayed from CUDA graphs.

A GPU that is given a small step kernel by kernel waits for the host: a step of `resnet18` at 32 px
is some 700 launches, which take the host longer than the kernels take the GPU. A CUDA graph holds
the kernels of a pass, and one launch starts all of them.

    first passes of a shape: as they are --> recorded, and checked against a pass as it is
    --> from then on: images are copied in, outputs and gradients copied out

A graph repeats the recorded kernels, with the recorded memory addresses. So a pass is replayed only
where everything that it depends on is as it was when it was recorded: shapes, number formats, the
addresses of weights and buffers, which of them are trained, which layers train, dropout rates. What
no graph can repeat, such as hooks, or a forward pass that reads a number back, is refused
beforehand or found by the check, and the network then computes without graphs. The check cannot
find Python numbers that a forward pass changes rarely; so networks of the user's own are recorded
only where the job asks for it.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from batchwright.workload.host import is_out_of_memory
from batchwright.workload.passes.recorded_passes import (
    CannotRecordError,
    NoRoomError,
    Passes,
    Recorder,
)

AFTER = 10
"""Passes of a shape in a training before it is recorded. The shape of an epoch's last batch occurs
once an epoch, and recording takes the time of some ten passes."""

_MOST = 16  # recorded shapes that are kept, over all virtual workers
_IDLE = 1000  # passes without a recorded shape, after which all shapes are recorded anew
_MOST_SEEN = 1000  # states that are counted: a schedule of dropout rates makes many
# Attributes of layers that a schedule may change.
_NUMBERS = "p", "drop_prob", "drop_rate", "dropout", "attention_dropout", "momentum", "eps"
_LONGEST_CAUSE = 200  # characters


class CudaGraphs:
    """Replays a network's passes, and keeps the recorded ones.

    Args:
        network: The network, on its device.
        after: Passes of a shape before it is recorded.
        limit: As for `Recorder`.

    Attributes:
        on: Whether passes are replayed, where that is possible.
        failure: Why passes cannot be replayed, in words; empty: nothing has failed.
    """

    def __init__(self, network: nn.Module, after: int = AFTER, limit: int | None = None) -> None:
        self.on, self.failure = True, ""
        self._network, self._after = network, after
        self._before = vars(network).get("forward")
        own = network.forward
        self._own: Callable[..., Any] = getattr(own, "__func__", own)
        self._recorder, self._layers = Recorder(limit), _Layers(network)
        self._known: OrderedDict[Hashable, Passes] = OrderedDict()  # the last used last
        self._count = 0  # number of passes so far that may be replayed
        self._seen: Counter[Hashable] = Counter()
        self._refused: set[Hashable] = set()  # shapes that would leave too little memory
        # The last replayed forward pass, while its backward pass may still come.
        self._open: ref[_ReplayedPass] | None = None

    def forward(self, network: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A forward pass of the network, replayed where that gives equal outputs."""
        passes = None
        if self._may_replay(network, inputs, named):
            passes = self._passes(network, inputs[0])
        if passes is None:
            return self._own(network, *inputs, **named)
        replayed = _ReplayedPass(passes)
        self._open = ref(replayed)
        replay: Callable[..., Tensor] = _Replay.apply
        return replay(replayed, inputs[0], *passes.parameters)

    def give_up(self, why: str) -> None:
        """Replay no more passes, free their memory, and warn with the reason."""
        self.failure = why[:_LONGEST_CAUSE]
        self.forget()
        warnings.warn(
            f"the network is not replayed from CUDA graphs ({self.failure}): it goes on as it is",
            stacklevel=2,
        )

    @property
    def holds(self) -> int:
        """Number of recorded shapes."""
        return len(self._known)

    def end(self) -> None:
        """Restore the network's own forward pass."""
        self.on = False
        self.forget()
        if self._before is None:
            vars(self._network).pop("forward", None)
        else:
            self._network.forward = self._before

    def forget(self) -> None:
        """Drop all recorded passes and their memory, and count passes anew."""
        self._drop_passes()
        self._seen.clear()
        self._refused.clear()

    def _may_replay(
        self, network: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> bool:
        """Whether this is a training pass of a batch of images, and the pass before has ended.

        If it had not, its backward pass would find the activations of this pass.
        """
        if network is not self._network:  # a copy of the network
            return False
        if self.failure or not (self.on and network.training and torch.is_grad_enabled()):
            return False
        if len(inputs) != 1 or named or torch.compiler.is_compiling():
            return False
        (images,) = inputs
        last = None if self._open is None else self._open()
        return (
            isinstance(images, Tensor)
            and images.device.type == Recorder.device_type
            and not images.requires_grad
            and (last is None or last.passes is None)
        )

    def _passes(self, network: nn.Module, images: Tensor) -> Passes | None:
        """The recorded passes for these images, maybe recorded just now; `None`: there are none."""
        key = self._layers.state(), _shape(images)
        if key not in self._seen:  # the network may have other layers now
            self._layers = _Layers(network)
            key = self._layers.state(), _shape(images)
            if len(self._seen) > _MOST_SEEN:
                self._seen = Counter(dict.fromkeys(self._known, self._after + 1))
        self._count += 1
        passes = self._known.get(key)
        if key in self._refused:
            return None
        if passes is not None:
            self._known.move_to_end(key)
            passes.used = self._count
            return passes
        self._seen[key] += 1
        if self._seen[key] <= self._after or not self._has_place():
            return None
        try:
            refuse_unrecordable(network)
            passes = Passes(network, self._own, images, self._recorder)
        except NoRoomError:
            self._refused.add(key)
            return None
        except (CannotRecordError, RuntimeError) as error:  # a network's own error comes again
            if any(map(is_out_of_memory, _causes(error))):
                self._drop_passes()
                self._refused.add(key)
            else:
                self.give_up(str(error).partition("\n")[0] or type(error).__name__)
            return None
        except BaseException:  # a part of the pass may be recorded: all graphs share its memory
            self._drop_passes()
            raise
        self._known[key], passes.used = passes, self._count
        return passes

    def _has_place(self) -> bool:
        """Whether one more shape may be recorded: recording shapes in turns would save nothing."""
        if len(self._known) < _MOST:
            return True
        oldest = next(iter(self._known.values()))
        if self._count - oldest.used <= _IDLE:
            return False
        self._drop_passes()
        return True

    def _drop_passes(self) -> None:
        """Drop all recorded passes at once, as they share memory; see `Recorder`."""
        self._known.clear()
        self._recorder.begin_anew()


def graph_training(
    network: nn.Module, *, after: int = AFTER, limit: int | None = None
) -> CudaGraphs:
    """Have training passes of ``network`` replayed from CUDA graphs, where they can be.

    Names and weights do not change.

    Args:
        network: The network, on its device.
        after: Passes of a shape before it is recorded.
        limit: Bytes that the process may use on the GPU; ``None``: all free bytes. A shape is
            recorded only if that leaves enough memory.
    """
    graphs = CudaGraphs(network, after, limit)
    if getattr(network.forward, "__self__", None) is not network:
        graphs.give_up("its forward pass is not a method of its own, as after torch.compile")
        return graphs

    def forward(network: nn.Module, *inputs: Any, **named: Any) -> Any:
        return graphs.forward(network, inputs, named)

    network.forward = MethodType(forward, network)
    return graphs


def refuse_unrecordable(network: nn.Module) -> None:
    """Refuse a network with operations that a graph would leave out or repeat wrongly.

    Raises:
        CannotRecordError: A layer has hooks, exchanges statistics with other workers, or is a
            script.
    """
    for name, layer in network.named_modules():
        hooks = (
            *(layer._forward_hooks, layer._forward_pre_hooks),
            *(layer._backward_hooks, layer._backward_pre_hooks),
        )
        if any(hooks) and layer is not network:  # the network's own are called around the pass
            raise CannotRecordError(f"layer {name} has hooks")
        if isinstance(layer, nn.SyncBatchNorm):
            raise CannotRecordError("SyncBatchNorm exchanges statistics")
        if isinstance(layer, torch.jit.ScriptModule):  # its state cannot be compared
            raise CannotRecordError(f"layer {name} is a script")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the earlier errors that it hides, as when memory runs out in a recording."""
    while error is not None:
        yield error
        error = error.__context__


@dataclass(eq=False)
class _ReplayedPass:
    """A replayed forward pass.

    Attributes:
        passes: Its recorded passes; ``None`` after its backward pass, as a loss may be held long
            after that.
    """

    passes: Passes | None


class _Replay(torch.autograd.Function):
    """A replayed forward pass, whose backward pass is replayed."""

    @staticmethod
    def forward(ctx: Any, replayed: _ReplayedPass, images: Tensor, *parameters: Tensor) -> Tensor:
        del parameters  # arguments only so that autograd asks for their gradients
        ctx.replayed = replayed
        assert replayed.passes is not None  # noqa: S101 - the backward pass comes later
        return replayed.passes.replay_forward(images)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        passes: Passes | None = ctx.replayed.passes
        if passes is None:
            raise RuntimeError(
                "a second backward pass through one forward pass, which CUDA graphs do not keep: "
                "add the losses up before backward(), or plan with cuda_graphs=off"
            )
        ctx.replayed.passes = None
        return (None, None, *passes.replay_backward(slope))


class _Layers:
    """The layers of a network, and their state that a recorded pass depends on.

    The state is read from the layers' dictionaries, as a module's attributes take ten times as
    long.
    """

    def __init__(self, network: nn.Module) -> None:
        self._layers = list(network.modules())  # held, so that no new layer gets an old one's `id`
        self._own = own = [layer.__dict__ for layer in self._layers]
        self._numbers = [
            (one, name)
            for one in own
            for name in _NUMBERS
            if name in one and isinstance(one[name], Hashable)
        ]
        self._children = [one["_modules"] for one in own]
        self._tensors = [one[kind] for one in own for kind in ("_parameters", "_buffers")]

    def state(self) -> Hashable:
        """The layers, the addresses of their tensors, which are trained, and scheduled numbers.

        Trained tensors count by their `id` as well: a new tensor may have an old one's memory.
        """
        tensors = [t for place in self._tensors for t in place.values() if t is not None]
        return (
            *(one.get("training") for one in self._own),
            *(one[name] for one, name in self._numbers),
            *(id(child) for place in self._children for child in place.values()),
            *(one.data_ptr() for one in tensors),
            *(one.requires_grad and id(one) for one in tensors),
        )


def _shape(images: Tensor) -> Hashable:
    """The properties of images, and of autocast, that a recorded pass depends on."""
    kind = images.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return images.shape, images.stride(), images.dtype, images.device, dtype
