"""Trained networks as files for other programs: weights as safetensors, and a description.

model = bw.load_model("model")
model(images)           # logits of RGB images in [0, 1], (n, 3, side, side)
model.names(images)     # the classes that are most likely
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.errors import ArgumentError, FileError, PlanError
from batchwright.records.registries.networks import NETWORKS, network_spec
from batchwright.storage.files import refusal, write_whole
from batchwright.workload.extras import import_library
from batchwright.workload.task import build_network, logits_in

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FORMAT = "batchwright-model/1"


class TrainedModel(nn.Module):
    """A trained network with the normalization of its input.

    Args:
        network: The network; it is in evaluation mode from here on.
        classes: Names of the classes, in label order.
        mean: Mean of each channel, of RGB values in [0, 1]; empty: the input is not normalized.
        std: Standard deviation of each channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        classes: tuple[str, ...],
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
    ) -> None:
        super().__init__()
        self.network, self.classes = network, classes
        self.register_buffer("mean", torch.tensor(mean or (0.0,)).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std or (1.0,)).view(-1, 1, 1))
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of images (n, channels, side, side), for our data RGB in [0, 1]."""
        return logits_in(self.network((images - self.mean) / self.std))

    def names(self, images: Tensor) -> list[str]:
        """The most likely class of each image.

        Raises:
            ArgumentError: The images are whole numbers, with which the network was not trained.
        """
        if len(self.mean.flatten()) > 1 and not images.is_floating_point():
            raise ArgumentError(
                "names takes images (n, 3, side, side) with values from 0 to 1, not "
                f"{images.dtype}: divide pixels by 255"
            )
        with torch.inference_mode():
            return [self.classes[label] for label in self(images).argmax(dim=1).tolist()]


def save_model(folder: Path, weights: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write weights, and the description by which they are used.

    Args:
        folder: An existing folder.
        weights: A plain state_dict.
        config: ``network``, ``classes``, ``side`` of the images and ``built_side`` of the network
            in pixels, ``mean``, ``std``, ``dropout`` and ``network_args``.

    Raises:
        JobError: safetensors is not installed.
        FileError: The files cannot be written, or a weight is no tensor.
    """
    save = import_library("safetensors.torch").save
    others = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if others:
        raise FileError(f"{others[0]} of the network's state is no tensor: safetensors takes none")
    plain = {name: value.clone().contiguous() for name, value in weights.items()}
    write_whole(folder / WEIGHTS, save(plain, metadata={"format": "pt"}))
    text = json.dumps({"format": FORMAT, **config}, indent=2)
    write_whole(folder / CONFIG, (text + "\n").encode())


def load_model(
    folder: str | Path,
    network: str | nn.Module | Callable[..., nn.Module] | None = None,
    network_args: Mapping[str, Any] | None = None,
) -> TrainedModel:
    """A trained network that `deliver` has written, ready to classify, on the CPU.

    Args:
        folder: The folder that the network was delivered to.
        network: For a network of your own: the import string that it was trained with, the callable
            that the string names, or the network itself. A file alone does not get to run code.
        network_args: For a network of your own, or of a library, the arguments that it was built
            with, for the same reason.

    Raises:
        JobError: safetensors is not installed, or the network cannot be built.
        FileError: The folder holds no such model, or a damaged one.
        PlanError: ``network`` or ``network_args`` are missing for a network that needs them.
    """
    load = import_library("safetensors.torch").load
    place = Path(folder)
    try:
        config = json.loads((place / CONFIG).read_bytes())
        content = (place / WEIGHTS).read_bytes()
    except OSError as error:
        raise FileError(f"cannot read a model in {place}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise FileError(f"{place / CONFIG} is not JSON") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise FileError(f"{place / CONFIG} is none of ours ({FORMAT})")
    try:
        classes = tuple(map(str, config["classes"]))
        made = _made(network, network_args, config, len(classes))
        made.load_state_dict(load(content))
        return TrainedModel(made, classes, tuple(config["mean"]), tuple(config["std"]))
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise FileError(f"{place} is damaged, or of another network: {cause}") from None
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise FileError(f"{place / WEIGHTS} is damaged: {error}") from None


def _made(
    given: str | nn.Module | Callable[..., nn.Module] | None,
    given_args: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    classes: int,
) -> nn.Module:
    if isinstance(given, nn.Module):
        return given
    if callable(given):
        return given(num_classes=classes, **(given_args or {}))
    name, arguments = str(config["network"]), dict(config.get("network_args", {}))
    foreign = network_spec(name) is None
    # Some arguments of libraries name files that run code as they are read.
    unsaid = name not in NETWORKS and arguments != dict(given_args or {})
    if (foreign and given != name) or unsaid:
        more = f" and network_args={arguments!r}" if arguments else ""
        raise PlanError(
            f"network={name} in a file would run code: repeat network={name!r}{more} to allow it, "
            "or give the network itself"
        )
    return build_network(
        name,
        classes=classes,
        side=int(config.get("built_side", config["side"])),  # files of before have one side
        dropout=float(config.get("dropout", 0.0)),
        arguments=arguments,
    )


def write_onnx(model: TrainedModel, side: int, channels: int, path: Path) -> None:
    """Write a network with its normalization as ONNX, for batches of any size.

    Args:
        model: A network from `load_model`.
        side: Side of its images, in pixels.
        channels: Channels of its images.
        path: The file.

    Raises:
        JobError: A package for ONNX is not installed.
        FileError: The file cannot be written.
        PlanError: The network cannot be written as ONNX.
    """
    for module in ("onnx", "onnxscript"):
        import_library(module)
    example = torch.rand(2, channels, side, side)
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of packages that the network does not need
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                (example,),
                str(path),
                input_names=["images"],
                output_names=["logits"],
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("n")},),
                external_data=False,
                verbose=False,
            )
    except OSError as error:
        raise refusal(path, error) from None
    except Exception as error:  # noqa: BLE001 - a network may use operations that ONNX lacks
        cause = str(error).strip().partition("\n")[0]
        raise PlanError(f"this network cannot be written as ONNX ({cause}): leave it out") from None
    finally:
        log.setLevel(level)
