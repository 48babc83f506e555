"""Forward and backward passes of a network, replayed from CUDA graphs.

A GPU that is given a small step kernel by kernel waits for the host: a step of `resnet18` at 32 px
is some 700 launches, which take the host longer than the kernels take the GPU. A CUDA graph holds
the kernels of a pass, and one launch starts all of them.

    first passes of a shape: as they are --> recorded, and checked against a pass as it is
    --> from then on: images are copied in, outputs and gradients copied out

A graph repeats what it has seen, with the memory it has seen. So a pass is replayed only where all
that it depends on is as it was when it was recorded: shapes, number formats, the places of weights
and buffers, which of them are trained, which layers train, shares of dropout. What no graph can
repeat, such as hooks, or a forward pass that reads a number back, is told apart beforehand or by
the check, and goes on as it is. What the check cannot see are numbers of Python's own that a
forward pass changes seldom; so networks of the user's own are recorded only where the job asks.
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
"""Passes of a shape in a training before it is recorded: that of an epoch's last batch comes once
an epoch, and to record one takes the time of some ten passes."""

_MOST = 16  # shapes, and virtual workers, that are kept
_IDLE = 1000  # passes in which a shape was not used, so that all are recorded anew as they come
_MOST_SEEN = 1000  # states that are counted: a rate of dropout that a schedule changes makes many
_NUMBERS = "p", "drop_prob", "drop_rate", "dropout", "attention_dropout", "momentum", "eps"
# Of layers, which a schedule may change.
_LONGEST_CAUSE = 200  # characters


class CudaGraphs:
    """Replays a network's passes, and keeps those that are recorded.

    Args:
        network: On its device.
        after: Passes of a shape before it is recorded.
        limit: As of `Recorder`.

    Attributes:
        on: Whether they are to be.
        failure: Why they cannot, in words; empty: nothing has failed.
    """

    def __init__(self, network: nn.Module, after: int = AFTER, limit: int | None = None) -> None:
        self.on, self.failure = True, ""
        self._network, self._after = network, after
        self._before = vars(network).get("forward")
        own = network.forward
        self._own: Callable[..., Any] = getattr(own, "__func__", own)
        self._recorder, self._layers = Recorder(limit), _Layers(network)
        self._known: OrderedDict[Hashable, Passes] = OrderedDict()  # last those used last
        self._count = 0  # of passes that may be replayed
        self._seen: Counter[Hashable] = Counter()
        self._refused: set[Hashable] = set()  # shapes that would leave too little memory
        self._open: ref[_Turn] | None = None  # of the last replayed pass, until its backward pass

    def take(self, network: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A forward pass of the network, replayed where that gives the same."""
        passes = None
        if self._may_replay(network, inputs, named):
            passes = self._passes(network, inputs[0])
        if passes is None:
            return self._own(network, *inputs, **named)
        turn = _Turn(passes)
        self._open = ref(turn)
        replay: Callable[..., Tensor] = _Replay.apply
        return replay(turn, inputs[0], *passes.parameters)

    def give_up(self, why: str) -> None:
        """Replay no more, and let all memory go; a line says why."""
        self.failure = why[:_LONGEST_CAUSE]
        self.forget()
        warnings.warn(
            f"the network is not replayed from CUDA graphs ({self.failure}): it goes on as it is",
            stacklevel=2,
        )

    @property
    def holds(self) -> int:
        """How many shapes are recorded."""
        return len(self._known)

    def end(self) -> None:
        """Let the network be as it was before."""
        self.on = False
        self.forget()
        if self._before is None:
            vars(self._network).pop("forward", None)
        else:
            self._network.forward = self._before

    def forget(self) -> None:
        """Let what is recorded go, and its memory."""
        self._let_go()
        self._seen.clear()
        self._refused.clear()

    def _may_replay(
        self, network: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> bool:
        """Whether it is a pass of images that is trained on, and the one before has ended.

        Its own backward pass would find the activations of this one.
        """
        if network is not self._network:  # a copy of it
            return False
        if self.failure or not (self.on and network.training and torch.is_grad_enabled()):
            return False
        if len(inputs) != 1 or named or torch.compiler.is_compiling():
            return False
        (images,) = inputs
        turn = None if self._open is None else self._open()
        return (
            isinstance(images, Tensor)
            and images.device.type == Recorder.device_type
            and not images.requires_grad
            and (turn is None or turn.passes is None)
        )

    def _passes(self, network: nn.Module, images: Tensor) -> Passes | None:
        key = self._layers.state(), _shape(images)
        if key not in self._seen:  # other layers, maybe
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
            refuse_unlike(network)
            passes = Passes(network, self._own, images, self._recorder)
        except NoRoomError:
            self._refused.add(key)
            return None
        except (CannotRecordError, RuntimeError) as error:  # the network's own comes again without
            if any(map(is_out_of_memory, _causes(error))):
                self._let_go()
                self._refused.add(key)
            else:
                self.give_up(str(error).partition("\n")[0] or type(error).__name__)
            return None
        except BaseException:  # what was recorded of it goes, so that all has to
            self._let_go()
            raise
        self._known[key], passes.used = passes, self._count
        return passes

    def _has_place(self) -> bool:
        """Whether one more may be kept: recording shapes in turns would take what it saves."""
        if len(self._known) < _MOST:
            return True
        oldest = next(iter(self._known.values()))
        if self._count - oldest.used <= _IDLE:
            return False
        self._let_go()
        return True

    def _let_go(self) -> None:
        """Of what is recorded, all at once: see `Recorder` on the memory that it shares."""
        self._known.clear()
        self._recorder.begin_anew()


def graph_training(
    network: nn.Module, *, after: int = AFTER, limit: int | None = None
) -> CudaGraphs:
    """Have passes of ``network`` that are trained on replayed from CUDA graphs, where they can be.

    Names and weights stay as they are. ``after`` so many passes of a shape it is recorded, where
    that leaves enough of the memory: of ``limit`` bytes, if they are given, or what is free.
    """
    graphs = CudaGraphs(network, after, limit)
    if getattr(network.forward, "__self__", None) is not network:
        graphs.give_up("its forward pass is not a method of its own, as after torch.compile")
        return graphs

    def forward(network: nn.Module, *inputs: Any, **named: Any) -> Any:
        return graphs.take(network, inputs, named)

    network.forward = MethodType(forward, network)
    return graphs


def refuse_unlike(network: nn.Module) -> None:
    """Refuse what a graph would leave out, or do once more.

    Raises:
        CannotRecordError: A layer has hooks, or exchanges statistics with other workers.
    """
    for name, layer in network.named_modules():
        hooks = (
            *(layer._forward_hooks, layer._forward_pre_hooks),
            *(layer._backward_hooks, layer._backward_pre_hooks),
        )
        if any(hooks) and layer is not network:  # those of the whole are called around the pass
            raise CannotRecordError(f"layer {name} has hooks")
        if isinstance(layer, nn.SyncBatchNorm):
            raise CannotRecordError("SyncBatchNorm exchanges statistics")
        if isinstance(layer, torch.jit.ScriptModule):  # what it depends on cannot be looked at
            raise CannotRecordError(f"layer {name} is a script")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it hides: a recording that memory ran out in ends with another."""
    while error is not None:
        yield error
        error = error.__context__


@dataclass(eq=False)
class _Turn:
    """A forward pass that is replayed.

    Attributes:
        passes: What replays it; ``None`` once its backward pass was, as losses may be held for
            long.
    """

    passes: Passes | None


class _Replay(torch.autograd.Function):
    """A replayed forward pass, whose backward pass is replayed."""

    @staticmethod
    def forward(ctx: Any, turn: _Turn, images: Tensor, *parameters: Tensor) -> Tensor:
        del parameters  # named here so that autograd asks for their gradients
        ctx.turn = turn
        assert turn.passes is not None  # noqa: S101 - its backward pass comes later
        return turn.passes.replay_forward(images)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        passes: Passes | None = ctx.turn.passes
        if passes is None:
            raise RuntimeError(
                "a second backward pass through one forward pass, which CUDA graphs do not keep: "
                "add the losses up before backward(), or plan with cuda_graphs=off"
            )
        ctx.turn.passes = None
        return (None, None, *passes.replay_backward(slope))


class _Layers:
    """Layers of a network, and all of them that a recorded pass depends on.

    They are read from the layers' dictionaries, as a module's attributes take ten times as long.
    """

    def __init__(self, network: nn.Module) -> None:
        self._layers = list(network.modules())  # held, so that no other has the place of one
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
        """Which layers and tensors there are and where, which train, and what schedules change.

        Those that train by themselves, too: another may have the same memory, and the gradients.
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
    """What a recorded pass depends on besides the layers."""
    kind = images.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return images.shape, images.stride(), images.dtype, images.device, dtype
