"""The learning task of a job: its network, starting weights and optimizer."""

from __future__ import annotations

import inspect
import json
import pickle
import sys
import sysconfig
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from batchwright.errors import FileError, JobError
from batchwright.records import DataFacts, Job, NetworkFacts
from batchwright.records.job import is_normalization
from batchwright.records.registries.networks import NETWORKS, network_spec
from batchwright.records.registries.optimizers import OPTIMIZERS
from batchwright.records.text.formatting import counted
from batchwright.workload.extras import (
    EXTRAS,
    import_library,
    in_words,
    is_installed,
    missing,
    nearest,
)
from batchwright.workload.host import is_out_of_memory

CHANNELS = 3  # of images; only data sets of the user's own may have other numbers
ALL_BUT_HEAD = "all-but-head"
"""The pattern of job key ``frozen`` for all parameters but those of the last layer."""
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


def import_object(text: str, what: str) -> Any:
    """The object that an import string names.

    Args:
        text: ``package.module:name``; the name may have dots.
        what: The job key that it comes from, for the message.

    Raises:
        JobError: The string has another form, the module cannot be imported, or it has no such
            name.
    """
    module_name, colon, path = text.partition(":")
    if not (colon and module_name and path):
        raise JobError(f"{what}={text}: an import string looks like package.module:function")
    failed = f"{what}={text}: module {module_name!r} cannot be imported"
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        raise JobError(f"{failed}: {_missing(error, module_name)}") from error
    except SystemExit as error:  # of a script that reads its own command line, for example
        raise JobError(
            f"{failed} (SystemExit: {error}): put what it runs as a script under "
            "`if __name__ == '__main__':`"
        ) from error
    except Exception as error:  # a module may fail in any way
        raise JobError(f"{failed} ({in_words(error)})") from error
    for name in path.split("."):
        if not hasattr(found, name):
            near = nearest(name, dir(found))
            raise JobError(f"{what}={text}: module {module_name!r} has no {path!r}{near}")
        found = getattr(found, name)
    return found


# ----------------------------------------------------------------------------------- the network


def build_network(
    name: str,
    *,
    classes: int,
    side: int,
    dropout: float = 0.0,
    seed: int = 0,
    arguments: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A network with fresh weights, in channels-last memory format, on the CPU.

    Args:
        name: A name in `NETWORKS`, such as ``resnet8`` or ``timm:NAME``, or the import string of a
            callable that takes ``num_classes=``.
        classes: Number of classes.
        side: Largest training image side, in pixels.
        dropout: Share of features dropped; an imported callable gets it if it has a parameter
            called ``dropout``.
        seed: Equal seeds give equal weights. The caller's random state is not changed.
        arguments: Further arguments of the network, by name.

    Returns:
        The network. If it is not one of ours and returns a record, a dict or a tuple, it returns
        the logits alone from here on, see `logits_in`.

    Raises:
        JobError: There is no such network, it cannot be built, or ``side`` is too small for it.
    """
    spec = network_spec(name)
    if spec is not None:
        if side < (spec.least_side or 1):
            raise JobError(
                f"network={name}: takes images of at least {spec.least_side} pixels, not {side}"
            )
        constructor = import_object(spec.build, "network")
        if spec.takes_name:
            constructor = partial(constructor, name.partition(":")[2])
        options: dict[str, Any] = {"dropout": dropout, "top_resolution": side}
    elif ":" in name and name.partition(":")[0] not in NETWORKS:
        constructor = import_object(name, "network")
        options = {"dropout": dropout} if _takes(constructor, "dropout") else {}
        if dropout and not options:
            raise JobError(f"dropout={dropout}: {name} has no parameter `dropout`; try dropout=0")
    else:
        forms = [one.form for one in NETWORKS.values()]
        near = nearest(name, forms) or f"; there are {', '.join(forms)}"
        theirs = "NAME" if ":" in name or name in NETWORKS else name
        raise JobError(
            f"network={name}: unknown{near}; one of a library is written timm:{theirs} or "
            f"torchvision:{theirs}, your own as an import string module:function, such as "
            "my_models:small"
        )
    ours = arguments.keys() & {"num_classes", *options} if arguments else ()
    if ours:
        raise JobError(
            f"network={name}: network_args.{min(ours)} is not for a job to give: "
            "classes come from the data, image size and dropout from job keys resolutions, dropout"
        )
    asked = (arguments or {}).get("pretrained", False)
    if spec is not None and not isinstance(asked, bool):  # "no" would be taken for yes
        raise JobError(f"network={name}: network_args.pretrained is true or false, not {asked!r}")
    # By default PyTorch would save the random state of every GPU, and open a context on each.
    used = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(used):
        torch.manual_seed(seed)
        try:
            network = constructor(num_classes=classes, **options, **(arguments or {}))
        except JobError as error:
            raise JobError(f"network={name}: {error}") from error
        except Exception as error:  # the user's code may fail in any way
            raise JobError(f"network={name}: cannot be built ({in_words(error)})") from error
    if not isinstance(network, nn.Module):
        raise JobError(f"network={name}: gave a {type(network).__name__}, not a torch.nn.Module")
    if any(isinstance(p, UninitializedParameter) for p in network.parameters()):
        raise JobError(
            f"network={name}: has lazy layers, whose weights have no size yet; "
            "give every layer its sizes"
        )
    if next(network.parameters(), None) is None:
        raise JobError(f"network={name}: has no weights to train")
    if name not in NETWORKS.own:
        network.register_forward_hook(_logits_only)
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.ndim == 4:  # `Module.to` would fail at kernels of three dimensions
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return network


def logits_in(outputs: Any) -> Tensor:
    """The logits (n, classes) in the outputs of a network.

    They are the outputs themselves if these are a tensor; the entry ``logits`` of a record or a
    dict, or the only tensor of a dict; and the first entry of a tuple. Further outputs, as for
    auxiliary losses, are left out.

    Raises:
        JobError: The outputs have no logits.
    """
    found = outputs
    if isinstance(found, Mapping):
        tensors = [one for one in found.values() if isinstance(one, Tensor)]
        found = found.get("logits", tensors[0] if len(tensors) == 1 else None)
    elif hasattr(found, "logits"):
        found = found.logits
    elif isinstance(found, tuple | list) and found:
        found = found[0]
    if isinstance(found, Tensor):
        return found
    raise JobError(
        f"the network gives a {type(outputs).__name__} without logits: give a tensor (n, classes), "
        "or one called logits"
    )


def _logits_only(_network: nn.Module, _inputs: Any, outputs: Any) -> Tensor | None:
    """A forward hook of a network; it does not change outputs that are a tensor."""
    return None if isinstance(outputs, Tensor) else logits_in(outputs)


def network_facts(
    name: str, network: nn.Module, side: int, channels: int = CHANNELS
) -> NetworkFacts:
    """What a plan needs to know of a network.

    Args:
        name: Name of the network in the job.
        network: The network, on any device; its frozen parameters are not exchanged.
        side: Largest training image side, in pixels.
        channels: Channels of an image.

    Raises:
        JobError: The network does not take such images.
    """
    known = _known_side(name)
    if (known or channels != CHANNELS) and (
        why := _failure(network, max(side, known or 1), channels)
    ):
        raise JobError(
            f"network={name}: cannot take images of {counted(channels, 'channel')}, as the data "
            f"have ({why}): give network_args.channels={channels} to one of ours, in_chans to "
            "timm's, num_channels to Transformers', or name a network of your own"
        )
    # Found by trying: the first of 1, 2, 4, ... and ``side`` pixels that the network takes.
    tried = (1 << k for k in range((side - 1).bit_length()))
    least = known or next((n for n in tried if _failure(network, n, channels) is None), side)
    if not known and least == side and (why := _failure(network, side, channels)):
        raise JobError(
            f"network={name}: cannot take images of {side} pixels ({why}); try a larger side in "
            "resolutions="
        )
    parameters = list(network.parameters())
    return NetworkFacts(
        name=name,
        parameters=sum(p.numel() for p in parameters),
        trained_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        batch_norm=has_batch_norm(network),
        least_side=least,
    )


def has_batch_norm(network: nn.Module) -> bool:
    """Whether any layer is batch normalization, which needs at least two samples."""
    return any(isinstance(module, _BatchNorm) for module in network.modules())


def check_sides(
    name: str, network: nn.Module, sides: Sequence[int], channels: int = CHANNELS
) -> None:
    """Refuse image sides that ``network`` cannot take.

    Args:
        name: Name of the network in the job.
        network: The network, on any device.
        sides: Image sides, in pixels, rising.
        channels: Channels of an image.

    Raises:
        JobError: A side is too small, or the network takes the highest side only.
    """
    facts = network_facts(name, network, sides[-1], channels)
    failures = {side: _failure(network, side, channels) for side in sides[:-1]}
    failed = [side for side, failure in failures.items() if failure or side < facts.least_side]
    if not failed:
        return
    if _known_side(name):
        raise JobError(
            f"network={name}: takes images of at least {facts.least_side} pixels, not {failed[0]}: "
            f"give resolutions={facts.least_side} or more"
        )
    why = failures[failed[-1]]
    if facts.least_side < failed[-1]:  # smaller sides work, so its size is not the reason
        raise JobError(
            f"network={name}: cannot take images of {failed[-1]} pixels ({why}), though it takes "
            f"{facts.least_side} and its own {sides[-1]}: its grid of positions or features seems "
            f"to be fixed; give resolutions={sides[-1]}, or others that suit it"
        )
    if facts.least_side < sides[-1]:
        raise JobError(
            f"network={name}: cannot take images of {failed[-1]} pixels ({why}), though it takes "
            f"{facts.least_side}: give resolutions= that suit it"
        )
    raise JobError(
        f"network={name}: takes images of {sides[-1]} pixels only, not {failed[-1]} ({why}): its "
        "grid of positions or features is fixed, so it cannot change resolution; give "
        f"resolutions={sides[-1]} with method=plain, dynamic-batch or dual-batch"
    )


def _known_side(name: str) -> int | None:
    """The least image side of a network, in pixels, if the registry states it."""
    spec = network_spec(name)
    return None if spec is None else spec.least_side


def _failure(network: nn.Module, side: int, channels: int) -> str | None:
    """Why ``network`` cannot take an image of ``side`` pixels; `None` if it can.

    Raises:
        JobError: The image does not fit the memory, which says nothing about the network.
    """
    try:
        outputs_of(network, side, channels)
    except Exception as error:  # noqa: BLE001 - the user's code may fail in any way
        if is_out_of_memory(error):
            raise JobError(
                f"resolutions={side}: there is no memory for a single image of that side in the "
                "network: give a smaller one"
            ) from None
        return in_words(error)
    return None


def outputs_of(network: nn.Module, side: int, channels: int, images: int = 1) -> Any:
    """Outputs of ``network``, in evaluation mode, for black images of ``side`` pixels."""
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            device = next(network.parameters()).device
            return network(torch.zeros(images, channels, side, side, device=device))
    finally:
        network.train(was_training)


def check_outputs(job: Job, network: nn.Module, side: int, data: DataFacts) -> None:
    """Refuse a network with fewer outputs than classes, where the loss is cross entropy.

    Args:
        job: The job.
        network: The network, on any device; it takes images of ``side`` pixels.
        side: Image side, in pixels.
        data: Facts of the data.

    Raises:
        JobError: The network has fewer outputs than the data have classes.
    """
    if job.loss != "cross_entropy":  # a loss of the user's own may take any outputs
        return
    outputs, classes = outputs_of(network, side, data.channels), len(data.classes)
    if isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] < classes:
        raise JobError(
            f"network={job.network}: gives {counted(outputs.shape[1], 'output')} for an image, and "
            f"data={job.data} has {classes} classes: have it give an output for each, as many as "
            "the num_classes that it is called with"
        )


# ----------------------------------------------------------------------------------- fine-tuning


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
            f"{_some(strange)}; the network has {_some([*own])}: is it a checkpoint of another "
            "network?"
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


def heads_of(network: nn.Module) -> set[str]:
    """Names of the layers that give the logits: the last layer with weights.

    Layers of the same shape and depth belong to it, since distilled networks have two heads.
    """
    layers = {
        name: [one.shape for one in module.parameters(recurse=False)]
        for name, module in network.named_modules()
    }
    layers = {name: shapes for name, shapes in layers.items() if shapes}
    if not layers:
        return set()
    last = [*layers][-1]
    return {
        name
        for name, shapes in layers.items()
        if name.count(".") == last.count(".") and shapes == layers[last]
    }


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
            shown = ", ".join(parts[:_PARTS_SHOWN]) + (", ..." if parts[_PARTS_SHOWN:] else "")
            raise JobError(
                f"frozen={pattern}: matches no parameter{nearest(pattern, parts)}; the network has "
                f"{shown}; {ALL_BUT_HEAD} freezes all but {', '.join(sorted(heads))}"
            )
    for name, parameter in network.named_parameters():
        if any(matches(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise JobError(f"frozen={','.join(patterns)}: leaves no parameter to train")


def _parts(names: Sequence[str]) -> list[str]:
    """Patterns for the parts of a network, as few as tell them apart: ``stem.*``, ``stages.0.*``.

    Args:
        names: Names of its parameters.
    """
    layers = [name.split(".")[:-1] or [name] for name in names]
    found: list[str] = []
    for depth in range(1, max(map(len, layers)) + 1):
        parts = (".".join(layer[:depth]) for layer in layers)
        found = [*dict.fromkeys(one if one in names else f"{one}.*" for one in parts)]
        if len(found) >= _FEW_PARTS:
            break
    return found


def set_training(network: nn.Module) -> None:
    """Put ``network`` into training mode; call this in place of ``network.train()``.

    Batch normalization whose weights are all frozen stays in evaluation mode: its running
    statistics belong to the frozen weights.
    """
    network.train()
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            module.train(any(parameter.requires_grad for parameter in module.parameters()))


def load_tensors(path: str | Path, *, mapped: bool = False) -> Any:
    """The content of a file of `torch.save`, on the CPU; loading runs no code and prints nothing.

    Args:
        path: The file.
        mapped: Whether to map the file, if possible, so that tensors are read when they are used.

    Raises:
        Exception: Any error of `torch.load` and its unpickler, for a file of another kind.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if mapped:
            with suppress(Exception):  # the error, if it is not the mapping's, comes again below
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return torch.load(path, map_location="cpu", weights_only=True)


def trained_weights(checkpoint: Mapping[str, Any]) -> Any:
    """The weights of a checkpoint's held-out accuracy: the average of weights, if there is one."""
    average = checkpoint.get("average")
    return average if isinstance(average, Mapping) and average else checkpoint["model"]


def library_normalization(network: str, built: nn.Module) -> tuple[float, ...] | None:
    """What images are normalized by for a library's trained weights: three means, three deviations.

    Args:
        network: The job's network.
        built: The network with trained weights.

    Returns:
        Six numbers, for red, green and blue from 0 to 1; `None` where nobody tells them.
    """
    spec = network_spec(network)
    if spec is None or not spec.normalization:
        return None
    ask = import_object(spec.normalization, "network")
    return ask(network.partition(":")[2], built)  # type: ignore[no-any-return]


def built_side(network: str, arguments: Mapping[str, Any], side: int) -> int:
    """The image side, in pixels, that a job's network was built for.

    Args:
        network: The job's network.
        arguments: The job's ``network_args``.
        side: Largest training image side, in pixels.

    Raises:
        JobError: The library is missing, or has the network no more.
    """
    spec = network_spec(network)
    if spec is None or not (spec.pretrained_side and arguments.get("pretrained")):
        return side
    own = import_object(spec.pretrained_side, "network")(network.partition(":")[2])
    return side if own is None else int(own)


def file_normalization(path: str | Path) -> tuple[float, ...] | None:
    """How images were normalized for the weights in a file: three means and three deviations.

    Our checkpoints say it, and so does the ``config.json`` that `deliver` writes beside the
    weights; `None` for other files.

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
        content = _content_of(path)
        content = content.get("input") if isinstance(content, Mapping) else None
    told = content if isinstance(content, Mapping) else {}
    return mean_and_std(told.get("mean"), told.get("std"))


def mean_and_std(mean: Any, std: Any) -> tuple[float, ...] | None:
    """Means and deviations of red, green and blue as a job has them; `None` if they are no such."""
    try:
        found = tuple(float(one) for one in (*mean, *std))
    except (TypeError, ValueError):
        return None
    return found if is_normalization(found) else None


def _content_of(path: str | Path) -> Any:
    """What a file of `torch.save` or of safetensors holds, on the CPU."""
    try:
        if Path(path).suffix == _SAFETENSORS:
            return import_library("safetensors.torch").load(Path(path).read_bytes())
        # timm and torchvision keep their arguments in their checkpoints. A namespace runs no code.
        with torch.serialization.safe_globals([Namespace]):
            return load_tensors(path)
    except JobError:
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
            f"{', '.join(_WEIGHTS_UNDER[:-1])} or {_WEIGHTS_UNDER[-1]}"
        )
    return dict(content)


def _unwrapped(name: str, own: Mapping[str, Any]) -> str:
    """The name of a stored tensor without prefixes of wrappers, as far as ``own`` lacks it."""
    while name not in own and (prefix := next(filter(name.startswith, _WRAPPERS), "")):
        name = name.removeprefix(prefix)
    return name


# ------------------------------------------------------------------------------------- optimizer


def build_optimizer(
    network: nn.Module, job: Job, rate: float, *, name: str | None = None
) -> torch.optim.Optimizer:
    """The job's optimizer over the parameters that are trained.

    Args:
        network: The network, on its final device.
        job: Names the optimizer, its momentum and its weight decay.
        rate: Learning rate per step of the first parameter group; with all optimizers but Muon, of
            all groups.
        name: The optimizer that the plan chose; unset: the job's, where `auto` is SGD.

    Raises:
        JobError: The network has nothing for the optimizer to do.
    """
    build = import_object(OPTIMIZERS[name or job.optimizer].build, "optimizer")
    return build(network, job, rate)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------- messages


def _missing(error: ModuleNotFoundError, wanted: str) -> str:
    """A message: the missing module, where Python looked for it, and what to do."""
    if not error.name:  # a module raised the error with a message of its own
        return in_words(error)
    package = error.name.partition(".")[0]
    if package in EXTRAS and not is_installed(package):
        return missing(package)
    library = Path(sysconfig.get_path("stdlib"))
    folders = dict.fromkeys(Path(one).absolute() for one in sys.path)
    own = (library, library / "lib-dynload")  # Python's own folders
    places = ", ".join(str(one) for one in folders if one.is_dir() and one not in own)
    if wanted == error.name or wanted.startswith(f"{error.name}."):
        return f"there is no {error.name} in {places}; start in its folder, or install it"
    return f"it imports {error.name}, and there is none in {places}; install it"


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` has a parameter called ``name``; a bare ``**kwargs`` does not count."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _some(names: Sequence[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
