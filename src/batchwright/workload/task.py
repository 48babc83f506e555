"""The learning task of a job: its network and optimizer."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from batchwright.errors import JobError
from batchwright.records import DataFacts, Job, NetworkFacts
from batchwright.records.registries.networks import NETWORKS, network_spec
from batchwright.records.registries.optimizers import OPTIMIZERS
from batchwright.records.text.formatting import counted
from batchwright.workload.extras import EXTRAS, in_words, is_installed, missing, nearest
from batchwright.workload.host import is_out_of_memory

CHANNELS = 3  # of images; only data sets of the user's own may have other numbers


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


def heads_of(network: nn.Module) -> set[str]:
    """Names of the layers that give the logits: the last layer with weights.

    Layers of the same shape and depth belong to it, since distilled networks have two heads. So do
    layers of as many outputs in the same list, as CrossViT has a head for each width.
    """
    layers = {
        name: [one.shape for one in module.parameters(recurse=False)]
        for name, module in network.named_modules()
    }
    layers = {name: shapes for name, shapes in layers.items() if shapes}
    if not layers:
        return set()
    last = [*layers][-1]
    place = last.rpartition(".")[0]
    is_in_list = isinstance(network.get_submodule(place), nn.ModuleList)

    def is_alike(name: str) -> bool:
        if is_in_list and name.rpartition(".")[0] == place:
            return [shape[:1] for shape in layers[name]] == [shape[:1] for shape in layers[last]]
        return layers[name] == layers[last]

    return {name for name in layers if name.count(".") == last.count(".") and is_alike(name)}


def check_sides(
    name: str, network: nn.Module, sides: Sequence[int], channels: int = CHANNELS
) -> None:
    """Refuse image sides, in pixels and rising, that ``network`` cannot take.

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


def outputs_of(
    network: nn.Module, side: int, channels: int, images: int = 1, *, gradients: bool = False
) -> Any:
    """Outputs of ``network``, in evaluation mode, for black images of ``side`` pixels."""
    was_training = network.training
    network.eval()
    try:
        with torch.set_grad_enabled(gradients):
            device = next(network.parameters()).device
            return network(torch.zeros(images, channels, side, side, device=device))
    finally:
        network.train(was_training)


def check_outputs(job: Job, network: nn.Module, side: int, data: DataFacts) -> None:
    """Refuse a network with fewer outputs than classes, where the loss is cross entropy.

    And one whose outputs depend on none of the parameters that `frozen` leaves to train. The
    network takes images of ``side`` pixels.

    Raises:
        JobError: The network has fewer outputs than the data have classes, or would not learn.
    """
    if job.frozen:
        _check_trained(job, network, outputs_of(network, side, data.channels, gradients=True))
    if job.loss != "cross_entropy":  # a loss of the user's own may take any outputs
        return
    outputs, classes = outputs_of(network, side, data.channels), len(data.classes)
    if isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] < classes:
        raise JobError(
            f"network={job.network}: gives {counted(outputs.shape[1], 'output')} for an image, and "
            f"data={job.data} has {classes} classes: have it give an output for each, as many as "
            "the num_classes that it is called with"
        )


def _check_trained(job: Job, network: nn.Module, outputs: Any) -> None:
    """Refuse ``outputs`` that depend on no parameter that is left to train."""
    if not isinstance(outputs, Tensor) or outputs.requires_grad:
        return
    left = [name for name, one in network.named_parameters() if one.requires_grad]
    shown = ", ".join(left[:4]) + (", ..." if len(left) > 4 else "")
    raise JobError(
        f"frozen={','.join(job.frozen)}: leaves {shown} to train, on which the answers of "
        f"network={job.network} do not depend: give patterns that leave parameters which they "
        "depend on"
    )


def set_training(network: nn.Module) -> None:
    """Put ``network`` into training mode; call this in place of ``network.train()``.

    Batch normalization whose weights are all frozen stays in evaluation mode: its running
    statistics belong to the frozen weights.
    """
    network.train()
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            module.train(any(parameter.requires_grad for parameter in module.parameters()))


# ------------------------------------------------------------------------------------- optimizer


def build_optimizer(
    network: nn.Module, job: Job, rate: float, *, name: str | None = None
) -> torch.optim.Optimizer:
    """The job's optimizer over the parameters that are trained.

    Args:
        network: The network, on its final device.
        job: Names the optimizer, its momentum and its weight decay.
        rate: Learning rate per step of the first parameter group; of all groups, but with Muon, and
            with job key ``body_rate`` for those of the last layer.
        name: The optimizer that the plan chose; unset: the job's, where `auto` is SGD.

    Raises:
        JobError: The network has nothing for the optimizer to do.
    """
    build = import_object(OPTIMIZERS[name or job.optimizer].build, "optimizer")
    optimizer: torch.optim.Optimizer = build(network, job, rate)
    if job.body_rate != 1:
        slow_body(optimizer, network, job.body_rate)
    return optimizer


def slow_body(optimizer: torch.optim.Optimizer, network: nn.Module, share: float) -> None:
    """Give all layers but the last a share of their rate, in parameter groups of their own.

    Args:
        optimizer: New. Its groups keep the last layer's parameters, or all if they have none.
        network: The network.
        share: Rate of the other layers over the rate that they were given.

    Raises:
        JobError: The last layer is not trained, or nothing else is.
    """
    heads = heads_of(network)
    own = {id(p) for name, p in network.named_parameters() if name.rpartition(".")[0] in heads}
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not (trained & own and trained - own):
        what = "is all that is trained" if trained & own else "is frozen, so all would be slower"
        raise JobError(
            f"body_rate={share:g}: the last layer ({', '.join(sorted(heads))}) {what}: leave "
            "body_rate out"
        )
    for group in list(optimizer.param_groups):
        head = [one for one in group["params"] if id(one) in own]
        body = [one for one in group["params"] if id(one) not in own]
        slower = {**group, "params": body, "lr": share * group["lr"]}
        if head and body:
            group["params"] = head
            optimizer.add_param_group(slower)
        elif body:
            group.update(slower)


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
