"""The weights that a training starts from: their files, what is frozen of them, and what images
they expect.
"""

from __future__ import annotations

import json
import pickle
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.errors import BatchwrightError, FileError, JobError
from batchwright.records.job import is_normalization
from batchwright.records.job_fields import ALL_BUT_HEAD
from batchwright.records.registries.networks import network_spec
from batchwright.workload.extras import import_library, nearest, some_names
from batchwright.workload.host import is_out_of_memory
from batchwright.workload.task import heads_of, import_object

_SHOWN = 3  # names in a message
_PARTS_SHOWN, _FEW_PARTS = 10, 5  # parts of a network in a message: most, and fewest
_SAFETENSORS = ".safetensors"
# Where a checkpoint has its weights, in the order in which they are taken: averages first, as timm
# does, whose script writes the names with `state_dict`. `model_ema` and `model` are torchvision's,
# DeiT's and ours, `model_state_dict` that of PyTorch's tutorials.
_WEIGHTS_UNDER = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model")
# What DistributedDataParallel, `torch.compile` and Lightning's modules put before a name.
_WRAPPERS = ("module.", "_orig_mod.", "model.")
_COUNTER = "n_averaged"  # of `torch.optim.swa_utils.AveragedModel`, beside the weights


def load_weights(network: nn.Module, path: str | Path) -> list[str]:
    """Load starting weights into ``network`` from a file.

    The file is a plain state_dict, safetensors, or a checkpoint of ours, of timm, torchvision,
    Lightning and others (`_WEIGHTS_UNDER`); loading runs no code. Prefixes that wrappers leave
    (`_WRAPPERS`) are dropped where the network's own names lack them. A classifier for another
    number of classes is not loaded.

    Args:
        network: The network, changed in place.
        path: A file written by ``torch.save``, or one whose name ends in ``.safetensors``.

    Returns:
        Names of the network's tensors that were not loaded.

    Raises:
        FileError: The file cannot be read, or holds weights of another network.
        JobError: The file is safetensors, which is not installed.
    """
    own = network.state_dict()
    stored = {_unwrapped(name, own): value for name, value in _weights_in(path).items()}
    if _COUNTER not in own:
        stored.pop(_COUNTER, None)
    strange = [name for name in stored if name not in own]
    if strange:
        raise FileError(
            f"weights={path}: {len(strange)} of {len(stored)} tensors fit nowhere in the network: "
            f"{some_names(strange, _SHOWN)}; the network has {some_names(own, _SHOWN)}: is it a "
            "checkpoint of another network?"
        )
    heads = heads_of(network)
    other = [name for name in stored if stored[name].shape != own[name].shape]
    wrong = [name for name in other if name.rpartition(".")[0] not in heads]
    if wrong:
        name = wrong[0]
        raise FileError(
            f"weights={path}: {name} has shape {tuple(stored[name].shape)}, the network's is "
            f"{tuple(own[name].shape)} ({len(wrong)} such); is it a checkpoint of another network, "
            "or for another image size?"
        )
    network.load_state_dict({n: v for n, v in stored.items() if n not in other}, strict=False)
    return [name for name in own if name not in stored or name in other]


def freeze(network: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match any of ``patterns``.

    Args:
        network: The network; its matching parameters require no gradients from here on.
        patterns: Patterns as in a shell, such as ``stages.0.*``; or `ALL_BUT_HEAD`.

    Raises:
        JobError: A pattern matches nothing, or nothing is left to train.
    """
    names, heads = [name for name, _ in network.named_parameters()], heads_of(network)

    def matches(name: str, pattern: str) -> bool:
        if pattern == ALL_BUT_HEAD:
            return name.rpartition(".")[0] not in heads
        return fnmatchcase(name, pattern)

    for pattern in patterns:
        if pattern != ALL_BUT_HEAD and not any(matches(name, pattern) for name in names):
            parts = _parts(names)
            whole = f"{pattern.rstrip('.')}.*"  # a name like `body` is meant for all that is in it
            inside = any(fnmatchcase(name, whole) for name in names)
            hint = f"; did you mean {whole}" if inside else nearest(pattern, parts)
            raise JobError(
                f"frozen={pattern}: matches no parameter{hint}; the network has "
                f"{some_names(parts, _PARTS_SHOWN)}; {ALL_BUT_HEAD} freezes all but "
                f"{', '.join(sorted(heads))}"
            )
    for name, parameter in network.named_parameters():
        if any(matches(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise JobError(f"frozen={','.join(patterns)}: leaves no parameter to train")


def _parts(names: Sequence[str]) -> list[str]:
    """Patterns for parts of a network, as few as tell them apart: ``stem.*``, ``stages.0.*``."""
    layers = [name.split(".")[:-1] or [name] for name in names]
    found: list[str] = []
    for depth in range(1, max(map(len, layers)) + 1):
        parts = (".".join(layer[:depth]) for layer in layers)
        found = [*dict.fromkeys(one if one in names else f"{one}.*" for one in parts)]
        if len(found) >= _FEW_PARTS:
            break
    return found


def load_tensors(path: str | Path, *, mapped: bool = False) -> Any:
    """The content of a file of `torch.save`, on the CPU; loading runs no code and prints nothing.

    Args:
        path: The file.
        mapped: Whether to map the file, if possible, so that tensors are read when they are used.

    Raises:
        BatchwrightError: Memory ran out, which says nothing of the file.
        Exception: Any error of `torch.load` and its unpickler, for a file of another kind.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if mapped:
            with suppress(Exception):  # the error, if it is not the mapping's, comes again below
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise BatchwrightError(
                f"memory ran out while {path} was read: end what else runs, or give this process "
                "more"
            ) from error


def trained_weights(checkpoint: Mapping[str, Any]) -> Any:
    """The weights of a checkpoint's held-out accuracy: the average of weights, if there is one."""
    average = checkpoint.get("average")
    return average if isinstance(average, Mapping) and average else checkpoint["model"]


def library_normalization(network: str, built: nn.Module) -> tuple[float, ...] | None:
    """Mean and standard deviation that a library's trained weights expect images normalized by.

    Three means and three standard deviations, of red, green and blue from 0 to 1; `None` where
    nobody tells them. The network is the job's, ``built`` with trained weights.
    """
    spec = network_spec(network)
    if spec is None or not spec.normalization:
        return None
    ask = import_object(spec.normalization, "network")
    return ask(network.partition(":")[2], built)  # type: ignore[no-any-return]


def built_side(network: str, arguments: Mapping[str, Any], side: int) -> int:
    """The image side, in pixels, that a job's network was built for, with its ``network_args``.

    It is ``side``, the largest training image side, unless a library keeps its own.

    Raises:
        JobError: The library is missing, or has the network no more.
    """
    spec = network_spec(network)
    if spec is None or not (spec.pretrained_side and arguments.get("pretrained")):
        return side
    own = import_object(spec.pretrained_side, "network")(network.partition(":")[2])
    return side if own is None else int(own)


def file_normalization(path: str | Path) -> tuple[float, ...] | None:
    """Mean and standard deviation by which images were normalized for the weights in a file.

    Our checkpoints say it, and so does the ``config.json`` that `deliver` writes beside the
    weights; `None` for other files. The weights themselves are not read.

    Raises:
        FileError: The file cannot be read.
        JobError: As `load_weights` raises.
    """
    if Path(path).suffix == _SAFETENSORS:
        try:
            content = json.loads(Path(path).with_name("config.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
    else:
        content = _content_of(path, mapped=True)
        content = content.get("input") if isinstance(content, Mapping) else None
    told = content if isinstance(content, Mapping) else {}
    return mean_and_std(told.get("mean"), told.get("std"))


def mean_and_std(mean: Any, std: Any) -> tuple[float, ...] | None:
    """Means and standard deviations as a job has them; `None` if they are no three of each."""
    try:
        found = tuple(float(one) for one in (*mean, *std))
    except (TypeError, ValueError):
        return None
    return found if is_normalization(found) else None


def _content_of(path: str | Path, *, mapped: bool = False) -> Any:
    """What a file of `torch.save` or of safetensors holds, on the CPU; ``mapped``: see
    `load_tensors`.
    """
    try:
        if Path(path).suffix == _SAFETENSORS:
            return import_library("safetensors.torch").load(Path(path).read_bytes())
        # timm and torchvision keep their arguments in their checkpoints. A namespace runs no code.
        with torch.serialization.safe_globals([Namespace]):
            return load_tensors(path, mapped=mapped)
    except BatchwrightError:
        raise
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise FileError(f"weights={path}: cannot be read ({error.strerror})") from error
    except pickle.UnpicklingError as error:
        raise FileError(
            f"weights={path}: not plain tensors; save network.state_dict() with torch.save"
        ) from error
    except Exception as error:  # the unpickler may raise any error
        by = "safetensors" if Path(path).suffix == _SAFETENSORS else "torch.save"
        raise FileError(f"weights={path}: damaged, or not written by {by}") from error


def _weights_in(path: str | Path) -> dict[str, Tensor]:
    """The state_dict in a file, on the CPU."""
    content = _content_of(path)
    if isinstance(content, Mapping):
        under = next((k for k in _WEIGHTS_UNDER if isinstance(content.get(k), Mapping)), None)
        if under is not None:
            content = trained_weights(content) if under == "model" else content[under]
    plain = isinstance(content, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    )
    if not (plain and content):
        raise FileError(
            f"weights={path}: holds neither a state_dict nor a checkpoint with one under "
            f"{', '.join(_WEIGHTS_UNDER[:-1])} or {_WEIGHTS_UNDER[-1]}{_what_it_has(content)}"
        )
    return dict(content)


def _what_it_has(content: Any) -> str:
    """For an error message: the first keys of a file without weights where we look for them."""
    if not (isinstance(content, Mapping) and content):
        return ""
    keys = some_names(content, _SHOWN)
    return f"; it has {keys}: save the network's state_dict alone, or under state_dict"


def _unwrapped(name: str, own: Mapping[str, Any]) -> str:
    """The name of a stored tensor without prefixes of wrappers, as far as ``own`` lacks it."""
    while name not in own and (prefix := next(filter(name.startswith, _WRAPPERS), "")):
        name = name.removeprefix(prefix)
    return name
