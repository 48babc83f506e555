"""A device that is not there: tensors of it are kept on the CPU, and refuse what a GPU refuses.

    with far_device() as seen:
        model.to(FAR)
        ...
    seen.waits  # what made the host wait for the device, by the name of the operation
    seen.operations  # how many the device was given

The host waits where a number is read, a tensor comes back, its shape depends on what is in it, or
something goes across from memory that is not pinned. Tensors of the two sides do not mix, but for
numbers of the CPU. PyTorch's own kind for tensors without numbers, "meta", gives it its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

FAR = torch.device("meta")
aten = torch.ops.aten
_READ = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_SHAPED = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
_ACROSS = {aten.copy_.default, aten._foreach_copy_.default, aten._to_copy.default}
_INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


class Seen:
    """What made the host wait, what was copied across, and how much there was to do."""

    def __init__(self) -> None:
        self.operations = 0
        self.waits: Counter[str] = Counter()
        self.pinned = WeakTensorKeyDictionary()

    @property
    def count(self) -> int:
        return self.waits.total()


_seen = Seen()


class FarTensor(Tensor):
    """A tensor of the device, whose numbers are those of ``near``."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        far = Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=FAR,
        )
        far.near = near
        return far

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def tolist(self):
        return self.cpu().tolist()

    def __repr__(self):
        return f"far {self.near!r}"


class _Factories(TorchDispatchMode):
    """What is made on the device without a tensor of it, and pinned memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (aten.is_pinned.default, aten._pin_memory.default):
            return _pin(func, args[0])
        pin = kwargs.get("pin_memory")
        if pin:
            kwargs = kwargs | {"pin_memory": False}
        if _of(kwargs.get("device")):
            return _run(func, args, kwargs)
        made = func(*args, **kwargs)
        if pin:
            _seen.pinned[made] = True
        return made


def _pin(func, tensor):
    if func is aten.is_pinned.default:
        return tensor in _seen.pinned
    copied = tensor.clone()
    _seen.pinned[copied] = True
    return copied


def _of(device) -> bool:
    return device is not None and torch.device(device).type == FAR.type


def _run(func, args, kwargs):
    """Do on the CPU what the device would do, and note what it means there."""
    _seen.operations += 1
    flat, _ = tree_flatten((args, kwargs))
    tensors = [one for one in flat if isinstance(one, Tensor)]
    there = [one for one in tensors if isinstance(one, FarTensor)]
    here = [one for one in tensors if not isinstance(one, FarTensor) and one.dim()]
    goes = _of(kwargs["device"]) if kwargs.get("device") is not None else bool(there)
    name = func.name()
    if func in _READ or func in _SHAPED:
        _seen.waits[name] += 1
    elif func in _ACROSS:
        _across(func, args, kwargs, goes=goes)
    elif func in _INDEXED:
        indices = [one for one in args[1] if one is not None]
        if any(not isinstance(one, FarTensor) or one.dtype == torch.bool for one in indices):
            _seen.waits[name] += 1
    elif here and there and not name.startswith("c10d"):
        raise RuntimeError(f"{name}: tensors of the CPU and of the device together")
    if kwargs.get("device") is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    near = tree_map(lambda one: one.near if isinstance(one, FarTensor) else one, (args, kwargs))
    known = {id(one.near): one for one in there}
    done = func(*near[0], **near[1])
    if func in _READ or not goes:
        return done

    def back(one):
        if not isinstance(one, Tensor) or isinstance(one, FarTensor):
            return one
        return known[id(one)] if id(one) in known else FarTensor(one)

    return tree_map(back, done)


def _across(func, args, kwargs, *, goes):
    if func is aten._to_copy.default:
        pairs = [(args[0], goes)]
        left_alone = kwargs.get("non_blocking", False)
    else:
        left_alone = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        targets, sources = args[:2]
        if isinstance(targets, Tensor):
            targets, sources = [targets], [sources]
        pairs = [(s, isinstance(t, FarTensor)) for t, s in zip(targets, sources, strict=True)]
        if left_alone:
            pairs += [
                (t, True)
                for t, s in zip(targets, sources, strict=True)
                if isinstance(s, FarTensor) and not isinstance(t, FarTensor)
            ]
    for source, goes_there in pairs:
        comes = isinstance(source, FarTensor)
        if comes == goes_there:
            continue
        if comes:
            if not (left_alone and func is aten._to_copy.default):  # which takes pinned memory
                _seen.waits["back to the CPU"] += 1
        elif source.dim() and not (left_alone and source in _seen.pinned):
            _seen.waits["from memory that is not pinned"] += 1


class Operations(TorchDispatchMode):
    """Inside, counts what a GPU is given to do, by name: all but views and memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        done = func(*args, **(kwargs or {}))
        aliases = [one.alias_info for one in func._schema.arguments if one.alias_info]
        view = aliases and not any(one.is_write for one in aliases)
        computes = any(isinstance(one, Tensor) for one in tree_flatten((args, done))[0])
        if computes and not view and not func.name().startswith("aten::empty"):
            self.names[func.name().removeprefix("aten::").partition(".")[0]] += 1
        return done


def _tensor(make, *args, device=None, **kwargs):
    """`torch.tensor` calls no operation that is seen, and copies numbers as any other copy does."""
    made = make(*args, **kwargs)
    return made if device is None else made.to(device)


def in_this_thread(device: torch.device) -> torch.device:
    """For `host.enter`: each thread has to learn of the device by itself."""
    _Factories().__enter__()
    return device


@contextmanager
def far_device() -> Iterator[Seen]:
    """Inside, there is a device called "meta"; yields what was seen of it."""
    global _seen
    _seen = Seen()
    fused = ["cpu", FAR.type]
    with (
        _Factories(),
        mock.patch(
            "torch.optim.optimizer._get_fused_kernels_supported_devices", return_value=fused
        ),
        mock.patch.object(torch, "autocast", return_value=nullcontext()),
        mock.patch.object(torch, "tensor", partial(_tensor, torch.tensor)),
    ):
        yield _seen
