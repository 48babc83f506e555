"""Networks of libraries, by the libraries' own names: timm, torchvision, Transformers.

Each function builds a network for a number of classes, with fresh weights or, with
``pretrained=True``, with the library's trained weights and a new classifier. The library finds
trained weights by its own rules: in its cache, or else it downloads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from math import isclose
from typing import Any

from torch import nn

from batchwright.errors import JobError
from batchwright.workload.extras import (
    import_library,
    in_words,
    nearest,
    without_waiting_for_the_hub,
)
from batchwright.workload.starting_weights import mean_and_std

_AUXILIARY = "aux_logits"  # auxiliary classifiers, which no loss of ours would train


def timm_network(
    name: str,
    num_classes: int,
    *,
    dropout: float = 0.0,
    top_resolution: int = 32,
    pretrained: bool = False,
    **arguments: Any,
) -> nn.Module:
    """A network of timm, by a name such as ``resnet18`` or ``hf-hub:timm/resnet18.a1_in1k``.

    Args:
        name: A name of ``timm.list_models()``, or of the Hub.
        num_classes: Number of logits.
        dropout: The network's ``drop_rate``.
        top_resolution: Largest training image side, in pixels, for networks of a fixed image size.
        pretrained: Whether to start from trained weights.
        **arguments: Further arguments of ``timm.create_model``.

    Raises:
        JobError: There is no such network, or its weights cannot be loaded.
    """
    timm = import_library("timm")
    plain = name.partition(".")[0]
    if ":" not in name and not timm.is_model(plain):
        raise JobError(f"timm has no {name}{nearest(plain, timm.list_models())}")
    if dropout:
        arguments["drop_rate"] = dropout
    known = None if ":" in name else timm.get_pretrained_cfg(plain, allow_unregistered=True)
    if known is not None and known.fixed_input_size:
        arguments.setdefault("img_size", top_resolution)
    if not pretrained and known is not None:
        return timm.create_model(name, num_classes=num_classes, **arguments)  # type: ignore[no-any-return]
    try:
        with without_waiting_for_the_hub():
            return timm.create_model(  # type: ignore[no-any-return]
                name, pretrained=pretrained, num_classes=num_classes, **arguments
            )
    except Exception as error:
        weights = known and (known.hf_hub_id or known.url)
        raise _no_weights(weights or name, "HF_HOME", error) from error


def torchvision_network(
    name: str,
    num_classes: int,
    *,
    dropout: float = 0.0,
    top_resolution: int = 32,
    pretrained: bool = False,
    **arguments: Any,
) -> nn.Module:
    """A classifier of torchvision, by a name such as ``resnet18``.

    Args:
        name: A name of ``torchvision.models.list_models()``.
        num_classes: Number of logits.
        dropout: The argument ``dropout`` of the network's function, where it has one.
        top_resolution: Largest training image side, in pixels, for networks of a fixed image size.
        pretrained: Whether to start from the weights that torchvision calls ``DEFAULT``.
        **arguments: Further arguments of the network's function.

    Raises:
        JobError: There is no such network, it has no dropout, or its weights cannot be loaded.
    """
    models = import_library("torchvision.models")
    names = models.list_models(module=models)
    if name not in names:
        raise JobError(f"torchvision has no {name}{nearest(name, names)}")
    function = models.get_model_builder(name)
    known = inspect.signature(function).parameters
    if dropout:
        arguments["dropout"] = dropout
    if name.startswith("vit_"):
        arguments.setdefault("image_size", top_resolution)
    if name in ("googlenet", "inception_v3"):
        arguments = {_AUXILIARY: False, "init_weights": True, **arguments}
    if "kwargs" not in known and (strange := arguments.keys() - known.keys()):
        raise JobError(f"{name} takes no {', '.join(sorted(strange))}")
    network: nn.Module = function(num_classes=num_classes, **arguments)
    if pretrained:
        weights = models.get_model_weights(name).DEFAULT
        try:
            stored = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        except Exception as error:
            raise _no_weights(weights.url, "TORCH_HOME", error) from error
        _load(network, stored, classes=len(weights.meta["categories"]))
    return network


def _load(network: nn.Module, stored: Mapping[str, Any], classes: int) -> None:
    """Load trained weights, except classifiers, whose first dimension is the number of classes."""
    own = network.state_dict()
    fitting = {}
    for name, value in stored.items():
        if name not in own:
            continue  # an auxiliary classifier
        if own[name].shape == value.shape:
            fitting[name] = value
        elif value.shape[:1] != (classes,):
            raise JobError(
                f"the trained weights do not fit: {name} has shape {tuple(value.shape)}, here it "
                f"is {tuple(own[name].shape)}; leave out the arguments that change it, and train "
                "at the resolution that they were trained at"
            )
    network.load_state_dict(fitting, strict=False)


def transformers_network(
    name: str,
    num_classes: int,
    *,
    dropout: float = 0.0,
    top_resolution: int = 32,
    pretrained: bool = False,
    **arguments: Any,
) -> nn.Module:
    """An image classifier of Transformers, by the name of its kind, of a folder, or on the Hub.

    Args:
        name: A kind such as ``resnet`` or ``vit``, with the library's usual sizes; or a folder
            with a ``config.json``, or a name on the Hub such as ``microsoft/resnet-18``.
        num_classes: Number of logits.
        dropout: Refused unless it is 0: each kind has its own dropouts, among its arguments.
        top_resolution: Largest training image side, in pixels, for networks of a fixed image size
            with fresh weights.
        pretrained: Whether to start from the weights in the folder or on the Hub.
        **arguments: Keys of the network's configuration, such as ``depths``.

    Raises:
        JobError: There is no such network, or its weights cannot be loaded.
    """
    library = import_library("transformers")
    if classes := arguments.keys() & {"num_labels", "id2label", "label2id"}:
        raise JobError(
            f"network_args.{min(classes)} is not for a job to give: classes come from the data"
        )
    if dropout:
        raise JobError(
            f"dropout={dropout}: each kind of Transformers has names of its own for it: leave "
            "dropout out and give, say, network_args.hidden_dropout_prob"
        )
    if arguments.pop("trust_remote_code", False):
        raise JobError("trust_remote_code would run code of others: leave it out")
    if pretrained and name in _kinds(library):
        raise JobError(
            f"{name} is a kind of network without trained weights: give a folder, or a name on "
            "the Hub such as microsoft/resnet-18"
        )
    sizes = {"num_labels": num_classes}
    usual = _usual_configuration(library, name, **sizes)
    unknown = [key for key in arguments if not hasattr(usual, key)]
    if unknown:
        raise JobError(
            f"its configuration has no {unknown[0]}{nearest(unknown[0], usual.to_dict())}"
        )
    if not pretrained and hasattr(usual, "image_size"):
        arguments.setdefault("image_size", top_resolution)
    config = _configure(library, name)(**sizes, **arguments) if arguments else usual
    level = library.logging.get_verbosity()
    library.logging.set_verbosity_error()  # it would warn that the classifier is new
    try:
        auto = library.AutoModelForImageClassification
        if not pretrained:
            return auto.from_config(config, trust_remote_code=False)  # type: ignore[no-any-return]
        with without_waiting_for_the_hub():
            return auto.from_pretrained(  # type: ignore[no-any-return]
                name,
                config=config,
                ignore_mismatched_sizes=True,
                dtype="float32",
                trust_remote_code=False,
            )
    except Exception as error:
        if not pretrained:
            raise
        raise _no_weights(name, "HF_HOME", error) from error
    finally:
        library.logging.set_verbosity(level)


def _kinds(library: Any) -> Mapping[str, str]:
    """The kinds of image classifiers that Transformers has, by name."""
    auto = library.models.auto.modeling_auto
    return auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES  # type: ignore[no-any-return]


def _configure(library: Any, name: str) -> Callable[..., Any]:
    """Makes the configuration of a network of Transformers, with the given keys changed."""
    if name in _kinds(library):
        return partial(library.AutoConfig.for_model, name)
    # Unless it is given, the library would ask the user in the terminal.
    return partial(library.AutoConfig.from_pretrained, name, trust_remote_code=False)


def _usual_configuration(library: Any, name: str, **sizes: int) -> Any:
    """The configuration of a network of Transformers as the library has it.

    Raises:
        JobError: There is none of that name.
    """
    try:
        with without_waiting_for_the_hub():
            return _configure(library, name)(**sizes)
    except Exception as error:
        near = nearest(name, _kinds(library))
        raise JobError(
            f"no configuration of that name can be had{near}: looked among the kinds of "
            f"Transformers, for {name}/config.json here, in the cache of the Hub (HF_HOME) and "
            f"on the Hub ({in_words(error)})"
        ) from error


def timm_normalization(name: str, network: nn.Module) -> tuple[float, ...] | None:
    """What images are normalized by for timm's trained weights; see `NetworkSpec`."""
    del name
    told = getattr(network, "pretrained_cfg", None) or {}
    return mean_and_std(told.get("mean"), told.get("std"))


def torchvision_normalization(name: str, network: nn.Module) -> tuple[float, ...] | None:
    """The same for torchvision's."""
    del network
    weights = import_library("torchvision.models").get_model_weights(name).DEFAULT
    preset = weights.transforms()
    return mean_and_std(getattr(preset, "mean", None), getattr(preset, "std", None))


def transformers_normalization(name: str, network: nn.Module) -> tuple[float, ...] | None:
    """The same for those of Transformers, by ``preprocessor_config.json``."""
    del network
    kind = import_library("transformers.image_processing_base").ImageProcessingMixin
    try:
        with without_waiting_for_the_hub():
            told = kind.get_image_processor_dict(name)[0]
    except Exception:  # noqa: BLE001 - there is none, or it cannot be downloaded
        return None
    # Others see pixels of another range.
    usual = told.get("do_rescale", True) and isclose(told.get("rescale_factor") or 1 / 255, 1 / 255)
    if not usual or told.get("rescale_offset"):
        return None
    if told.get("do_normalize", True):
        return mean_and_std(told.get("image_mean"), told.get("image_std"))
    return (0.0, 0.0, 0.0, 1.0, 1.0, 1.0)


def transformers_side(name: str) -> int | None:
    """The image side of a pretrained network of Transformers, which keeps its configuration's.

    Raises:
        JobError: Transformers is missing, or has the configuration no more.
    """
    usual = _usual_configuration(import_library("transformers"), name)
    own = getattr(usual, "image_size", None)
    if isinstance(own, list | tuple) and len({*own}) == 1:
        own = own[0]
    return own if isinstance(own, int) else None


def _no_weights(what: str, variable: str, error: Exception) -> JobError:
    return JobError(
        f"pretrained: the weights {what} are neither in the library's cache ({variable}) nor to be "
        f"downloaded from here ({in_words(error)}): fetch them where there is a network, or train "
        "from fresh weights with network_args.pretrained=false"
    )
