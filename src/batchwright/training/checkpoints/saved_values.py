"""Conversion of values for checkpoints, and refusal of those that could not be read back.

``torch.load(path, weights_only=True)`` builds tensors and a few plain types, by their exact names.
NumPy's numbers become Python's; arrays and paths are written as stand-ins of such types, from which
they are made again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchwright.errors import FileError

_SIMPLE = {type(None), bool, int, float, complex, str, bytes, bytearray} | {
    torch.dtype, torch.device, torch.Size
}  # fmt: skip
_DICTS = (dict, OrderedDict, Counter)
_KIND, _ARRAY, _PATH = "batchwright/kind", "numpy.ndarray", "pathlib.Path"


def copied(value: Tensor) -> Tensor:
    """A copy on the CPU, which training does not change."""
    return value.detach().to("cpu", copy=True)


def to_plain(value: Any, where: str, tensors: Callable[[Tensor], Tensor] = copied) -> Any:
    """A value as plain types alone, in new containers.

    Args:
        value: Tensors, numbers, text, NumPy arrays, paths, and containers of them.
        where: Names the value to the user, as in ``the optimizer's state_dict()``.
        tensors: Converts each tensor.

    Raises:
        FileError: It holds something else.
    """
    kind = type(value)
    if kind in _SIMPLE:
        return value
    if isinstance(value, Tensor):
        if value.is_meta:
            raise FileError(
                f"{where} is a tensor on the meta device, which holds no numbers to keep"
            )
        value = tensors(value)
        if type(value) in (Tensor, torch.nn.Parameter):
            return value
    elif kind in _DICTS:
        if _KIND in value and set(value) != {_KIND, "value"}:  # else it is plain already
            raise FileError(
                f"{where} has the key {_KIND!r}, which stands for arrays and paths here"
            )
        made: Any = kind()
        for key, part in value.items():
            if isinstance(key, Tensor):  # one that comes back could not be found again
                kind_of_key = type(key).__name__
                raise FileError(f"{where} has a key of type {kind_of_key}: take numbers or text")
            plain = _hashable(key, "key", where, copied)
            made[plain] = to_plain(part, f"{where}[{key!r}]", tensors)
        if kind is OrderedDict and vars(value):  # of a module's state: the versions of its layers
            vars(made).update(to_plain(vars(value), f"{where}.__dict__", tensors))
        return made
    elif kind is set:
        return {_hashable(part, "member", where, tensors) for part in value}
    elif kind in (list, tuple):
        return kind(to_plain(part, f"{where}[{i}]", tensors) for i, part in enumerate(value))
    elif isinstance(value, np.generic) and type(value.item()) in _SIMPLE:
        return value.item()
    elif kind is np.ndarray and (numbers := _as_tensor(value)) is not None:
        return {_KIND: _ARRAY, "value": numbers}
    elif isinstance(value, Path):
        return {_KIND: _PATH, "value": str(value)}
    raise FileError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot give "
        "back as it was: take numbers, text, tensors, NumPy arrays, paths, and plain lists, "
        "tuples, sets and dicts of them"
    )


def from_plain(value: Any) -> Any:
    """The value that `to_plain` was given; dicts and lists are changed in place."""
    if isinstance(value, dict):
        if value.get(_KIND) == _ARRAY:
            return value["value"].numpy()
        if value.get(_KIND) == _PATH:
            return Path(value["value"])
        for key, part in value.items():
            value[key] = from_plain(part)
    elif type(value) is list:
        value[:] = map(from_plain, value)
    elif type(value) is tuple:
        return tuple(map(from_plain, value))
    return value


def refuse_unsaveable(value: Any, where: str) -> None:
    """Raise `FileError` for a value that `to_plain` would refuse; nothing is copied."""
    to_plain(value, where, lambda tensor: tensor)


def _as_tensor(array: np.ndarray[Any, Any]) -> Tensor | None:
    """A copy as a tensor; ``None`` if PyTorch lacks the array's type."""
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        return None


def _hashable(value: Any, role: str, where: str, tensors: Callable[[Tensor], Tensor]) -> Any:
    plain = to_plain(value, f"a {role} of {where}", tensors)
    try:
        hash(plain)
    except TypeError:  # a stand-in is a dict
        kind = type(value).__name__
        raise FileError(f"{where} has a {role} of type {kind}: take numbers or text") from None
    return plain
