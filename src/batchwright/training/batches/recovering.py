"""Recovery where memory runs out in another trainer's loop: a batch is computed in smaller parts.

The worker concerned computes the parts' gradients one after the other; they enter its loss as

    loss + sum(g p) - detached(sum(g p))

whose value is the loss and whose gradient is :math:`g`. So whatever the trainer does with a loss
(scaling, accumulation, the exchange of gradients in its backward pass) holds for all parts, and the
other workers need not know. Where memory runs out in the backward pass itself, gradients that
were not computed yet come from parts in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from batchwright.training.batches.feeding import like_mapping, like_sequence
from batchwright.training.step.released_graph import release_graph
from batchwright.workload.host import is_out_of_memory, release_memory

Compute = Callable[[Any], Any]  # a batch to its mean loss, or a dict that holds it


class Recovering:
    """Computes a batch's loss, in smaller parts once memory has run out.

    Args:
        parameters: All parameters; those that require gradients at a batch are trained.
        tell: Called with a line of text whenever parts become smaller.
        scaler: `torch.amp.GradScaler` that the trainer scales the loss by; ``None``: it does not.

    Attributes:
        most: Most samples of a part; ``None``: a batch is computed as it comes.
    """

    most: int | None

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        tell: Callable[[str], None],
        scaler: Any = None,
    ) -> None:
        self._parameters = list(parameters)
        self._tell, self._scaler, self.most = tell, scaler, None
        self._whole: _WholeBatch | None = None  # what `backward` may have to compute again
        self._loss: Tensor | None = None  # its loss; the activations behind it would be in the way
        self._arrived: Tensor | None = None  # the gradient that flowed into the loss there
        self._done: set[int] = set()  # parameters whose gradients it has computed, by `id`
        # By `id` of their parameters; from the first batch on, so that nobody else pays for them.
        self._hooks: dict[int, Any] = {}

    @property
    def _trained(self) -> list[nn.Parameter]:
        """What is trained now; layers may be frozen and unfrozen on the way."""
        return [one for one in self._parameters if one.requires_grad]

    def loss(
        self,
        compute: Compute,
        batch: Any,
        *,
        wrapper: Any = None,
        summed: bool = False,
    ) -> Any:
        """The result of ``compute(batch)``, or the same result with the same gradient from parts.

        Args:
            compute: f(batch) -> mean loss, or a dict with the mean loss as ``loss``.
            batch: Tensors whose first dimension is the samples, in tuples, lists and dicts.
            wrapper: `DistributedDataParallel` that ``compute`` goes through, if it does: it has one
                forward pass, as on the other workers, and the parts before go past it.
            summed: Whether parts' losses add up to the batch's, in place of their mean.
        """
        samples = samples_in(batch)
        whole = self._whole = _WholeBatch(compute, batch, samples, wrapper, summed)
        while True:
            cut = samples if self.most is None else min(self.most, samples)
            try:
                with whole.noting_forward():
                    output = compute(batch) if cut >= samples else self._in_parts(whole, cut)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or cut < 2:  # nothing to halve
                    raise
            else:
                self._arrived = None
                loss = output.get("loss") if isinstance(output, dict) else output
                if isinstance(loss, Tensor) and loss.grad_fn is not None:
                    self._loss = loss
                    loss.grad_fn.register_prehook(partial(self._note_arrival, loss.output_nr))
                return output
            self._halve(cut)

    def backward(self, run: Callable[[], Any]) -> Any:
        """The backward pass of the loss returned last, in parts where memory runs out.

        Some gradients are computed by then, and may be on their way to other workers. The others
        are computed in smaller parts, and put in by a loss whose gradient they are. So each is
        computed once, in the order in which the workers exchange them.

        Args:
            run: Runs the backward pass as the trainer would.
        """
        self._done.clear()
        for one in self._trained:  # not earlier: a training step may unfreeze layers itself
            if id(one) not in self._hooks:
                self._hooks[id(one)] = one.register_post_accumulate_grad_hook(
                    lambda parameter: self._done.add(id(parameter))
                )
        whole, self._whole = self._whole, None  # nor is the batch held any longer
        failed, self._loss = self._loss, None
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            arrived = self._arrived
            cut = min(self.most or whole.samples, whole.samples) if whole is not None else 0
            if not is_out_of_memory(error) or whole is None or arrived is None or cut < 2:
                raise
        if failed is not None:  # the trainer holds it, and with it the activations
            release_graph(failed)
        self._halve(cut)
        while True:
            cut = self.most or 1
            try:
                with whole.autocast(), torch.enable_grad():
                    gradients, _ = self._gradients(whole, whole.parts(cut))
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or cut < 2:
                    raise
            self._halve(cut)
        left = [
            (gradient * parameter).sum()
            for parameter, gradient in gradients.items()
            if id(parameter) not in self._done
        ]
        if left:
            total = torch.stack([one.float() for one in left]).sum()
            total.backward(arrived.to(total.dtype).reshape(()))
        return None

    def close(self) -> None:
        """Remove the hooks from the parameters, and let go of a batch without a backward pass."""
        for one in self._hooks.values():
            one.remove()
        self._whole = self._loss = self._arrived = None

    def _note_arrival(self, number: int, gradients: Sequence[Tensor]) -> None:
        self._arrived = gradients[number].detach()

    def _halve(self, cut: int) -> None:
        release_memory(self._parameters[0].device)
        self.most = cut // 2
        self._tell(
            f"memory ran out with {cut} samples: they are computed again in parts of "
            f"{self.most}, and so from here on"
        )

    def _gradients(
        self, whole: _WholeBatch, parts: Sequence[_Part]
    ) -> tuple[dict[nn.Parameter, Tensor], Tensor | float]:
        """Sums over parts of the trained parameters' gradients, and of the loss."""
        gradients: dict[nn.Parameter, Tensor] = {}
        value: Tensor | float = 0.0
        for part in parts:
            found, loss = self._gradients_of(whole, part)
            for one, gradient in found.items():
                gradients[one] = gradients[one] + gradient if one in gradients else gradient
            value = value + loss
        return gradients, value

    def _gradients_of(
        self, whole: _WholeBatch, part: _Part
    ) -> tuple[dict[nn.Parameter, Tensor], Tensor]:
        """Gradients of a part's loss by the trained parameters that it uses, and the loss."""
        # As the trainer scales what it differentiates: small gradients are zero in float16.
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        while True:
            with whole.bypassing_wrapper():
                loss = _loss_of(whole.compute(part.batch)) * part.scale
            trained = self._trained  # as the training step may have just set
            with torch.autocast(loss.device.type, enabled=False):
                scaled = loss if scale == 1 else loss.float() * scale
                found = torch.autograd.grad(scaled, trained, allow_unused=True)
            there = {p: g for p, g in zip(trained, found, strict=True) if g is not None}
            if scale == 1:
                return there, loss.detach()
            sums = [one.sum() for one in there.values()]
            if not sums or bool(torch.stack(sums).isfinite().all()):
                return {one: g / scale for one, g in there.items()}, loss.detach()
            scale = max(1.0, scale / 2)

    def _in_parts(self, whole: _WholeBatch, cut: int) -> Any:
        *others, last = whole.parts(cut)
        gradients, value = self._gradients(whole, others)
        with whole.using_parameters(list(gradients)):
            output = whole.compute(last.batch)
        loss = _loss_of(output) * last.scale
        with torch.autocast(loss.device.type, enabled=False):
            for parameter, gradient in gradients.items():
                carried = (gradient * parameter).sum()
                loss = loss + (carried - carried.detach()).to(loss.dtype)
        loss = loss + value
        return {**output, "loss": loss} if isinstance(output, dict) else loss


class _Part(NamedTuple):
    """Some samples of a batch, and the factor on their loss."""

    batch: Any
    scale: float


class _WholeBatch:
    """A batch and the function of its loss, in the number format that it was first computed in."""

    def __init__(
        self,
        compute: Compute,
        batch: Any,
        samples: int,
        wrapper: Any,
        summed: bool,
    ) -> None:
        self.compute, self.samples = compute, samples
        self._batch, self._summed = batch, summed
        self._wrapper = wrapper if hasattr(wrapper, "no_sync") else None
        self._bypassed = False  # whether forward passes go past the wrapper
        self._formats = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in ("cpu", "cuda")
        }

    def parts(self, cut: int) -> list[_Part]:
        """The batch in parts of at most ``cut`` samples."""
        return [
            _Part(one, 1.0 if self._summed else samples_in(one) / self.samples)
            for one in parts_of(self._batch, self.samples, cut)
        ]

    @contextmanager
    def bypassing_wrapper(self) -> Iterator[None]:
        """Inside, forward passes go to the wrapped network itself: the wrapper counts its own."""
        if self._wrapper is None:
            yield
            return
        own = vars(self._wrapper)
        former = {key: own[key] for key in ("forward",) if key in own}
        own["forward"], self._bypassed = self._wrapper.module.__call__, True
        try:
            yield
        finally:
            del own["forward"]
            own.update(former)
            self._bypassed = False

    @contextmanager
    def using_parameters(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, the wrapper's forward pass uses these too, if it looks for unused parameters.

        A parameter that only other parts use would be exchanged as unused, and then come again.
        """
        wrapper = self._wrapper
        looks = getattr(wrapper, "find_unused_parameters", False)
        if wrapper is None or not parameters or not looks:
            yield
            return

        def use(module: nn.Module, inputs: Any, output: Any) -> Any:
            del module, inputs
            nothing = torch.stack([one.reshape(-1)[:0].sum().float() for one in parameters]).sum()
            return _with(output, nothing)

        hook = wrapper.module.register_forward_hook(use)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def noting_forward(self) -> Iterator[None]:
        """Inside, note whether the wrapper's forward pass began; if it fails, exchange no buffers.

        It begins by taking worker 0's buffers, with all workers; should it fail then, they have
        them, and another pass for the same batch must not ask again.
        """
        if self._wrapper is None:
            yield
            return
        begun: list[bool] = []
        hook = self._wrapper.module.register_forward_pre_hook(
            lambda *_: None if self._bypassed else begun.append(True)
        )
        try:
            yield
        except BaseException:
            if begun:
                self._wrapper.require_forward_param_sync = False
            raise
        finally:
            hook.remove()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Inside, autocast is as it was when the batch was first computed."""
        with ExitStack() as inside:
            for kind, (dtype, enabled) in self._formats.items():
                if enabled:
                    inside.enter_context(torch.autocast(kind, dtype=dtype))
            yield


def _with(output: Any, nothing: Tensor) -> Any:
    """The output of a forward pass, with a zero added to its first tensor with a gradient."""
    if isinstance(output, Tensor):
        return output + nothing.to(output.dtype) if output.requires_grad else output
    if isinstance(output, dict):
        for key, value in output.items():
            if (found := _with(value, nothing)) is not value:
                output[key] = found
                break
    elif isinstance(output, (list, tuple)):
        for at, value in enumerate(output):
            if (found := _with(value, nothing)) is not value:
                return like_sequence(output, [*output[:at], found, *output[at + 1 :]])
    elif is_dataclass(output) and not isinstance(output, type):
        for one in fields(output):
            value = getattr(output, one.name)
            if (found := _with(value, nothing)) is not value:
                return replace(output, **{one.name: found})
    return output


def _loss_of(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, dict) else output
    return loss


def samples_in(batch: Any) -> int:
    """Size of the first dimension of a batch's first tensor; 1 for a batch without tensors."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    values: Sequence[Any] = ()
    if hasattr(batch, "values"):
        values = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        values = batch
    may_hold_tensor = (
        v for v in values if isinstance(v, (Tensor, list, tuple)) or hasattr(v, "values")
    )
    return next(map(samples_in, may_hold_tensor), 1)


def parts_of(batch: Any, samples: int, cut: int) -> list[Any]:
    """A batch in parts of at most ``cut`` samples, as even as can be."""
    count = -(-samples // cut)
    edges = [samples * at // count for at in range(count + 1)]
    return [_rows(batch, low, high, samples) for low, high in pairwise(edges)]


def _rows(value: Any, low: int, high: int, samples: int) -> Any:
    if isinstance(value, Tensor):
        return value[low:high] if value.ndim and len(value) == samples else value
    if isinstance(value, dict) or hasattr(value, "items"):
        rows_of = {key: _rows(one, low, high, samples) for key, one in value.items()}
        return like_mapping(value, rows_of)
    if isinstance(value, (list, tuple)):
        if len(value) == samples and not any(isinstance(one, Tensor) for one in value):
            return value[low:high]  # texts, names, one for each sample
        return like_sequence(value, [_rows(one, low, high, samples) for one in value])
    return value
