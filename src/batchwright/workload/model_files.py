"""Trained networks as files for other programs: weights as safetensors, and a description.

model = bw.load_model("model")
model.names(["a.jpg", "b.png"])  # the most likely class of each image
model(images)                    # logits of RGB images in [0, 1], (n, 3, side, side)
"""

from __future__ import annotations

import json
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from batchwright.errors import ArgumentError, DataError, FileError, PlanError
from batchwright.records.registries.networks import NETWORKS, network_spec
from batchwright.records.text.problems import described, printable
from batchwright.storage.files import refusal, write_whole
from batchwright.workload.data.decoding import decode, encoded, upright
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.listing import without_pillows_warnings
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.extras import import_library
from batchwright.workload.host import usable_cores
from batchwright.workload.task import build_network, logits_in

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FORMAT = "batchwright-model/1"
AT_ONCE = 32
"""Images that are decoded and computed at once, where many are to be classified."""

_Triple = tuple[float, float, float]
ImageLike = str | Path | Image.Image
"""A file's path, or an image that Pillow has opened."""


class TrainedModel(nn.Module):
    """A trained network that prepares images as its training prepared the held-out ones.

    Args:
        network: The network; it is in evaluation mode from here on.
        classes: Names of the classes, in label order.
        side: Side of its images, in pixels.
        mean: Mean of each channel, of RGB values in [0, 1]; empty: the input is not normalized.
        std: Standard deviation of each channel.
        prepared_side: Side of the squares that are resized to ``side``, in pixels: larger images
            are reduced to it first; unset: ``side``.

    Attributes:
        classes: As given.
        side: As given.
        prepared_side: As given, or ``side``.
        class_numbers: Number of each class, by its name; -1 for a name of several classes.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        classes: tuple[str, ...],
        side: int,
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        prepared_side: int | None = None,
    ) -> None:
        super().__init__()
        self.network, self.classes, self.side = network, classes, side
        self.prepared_side = prepared_side or side
        several = Counter(classes)
        self.class_numbers = {
            name: label if several[name] == 1 else -1 for label, name in enumerate(classes)
        }
        self.register_buffer("mean", torch.tensor(mean or (0.0,)).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std or (1.0,)).view(-1, 1, 1))
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of images (n, channels, side, side), for our data RGB in [0, 1]."""
        return logits_in(self.network((images - self.mean) / self.std))

    def names(self, images: Tensor | Sequence[ImageLike]) -> list[str]:
        """The most likely class of each image.

        Args:
            images: Paths of image files or images of Pillow, which are resized, cropped and
                normalized as the held-out images of the training were. Or a tensor, as for
                `forward`.

        Raises:
            ArgumentError: ``images`` is neither, or they are whole numbers, with which the network
                was not trained, or its training had images of a function of the user's own.
            DataError: An image cannot be read.
        """
        return [self.class_name(label) for label in self._logits(images).argmax(dim=1).tolist()]

    def probabilities(self, images: Tensor | Sequence[ImageLike]) -> Tensor:
        """Probability of each class for each image, (n, classes); takes what `names` takes."""
        return self._logits(images).float().softmax(dim=1)

    def class_name(self, label: int) -> str:
        """The name of a class; of outputs beyond the classes the number."""
        return self.classes[label] if label < len(self.classes) else f"output {label}"

    @property
    def normalizes(self) -> bool:
        """Whether its images are ours: RGB in [0, 1], to be normalized."""
        return len(self.mean) > 1

    @property
    def normalization(self) -> tuple[_Triple, _Triple]:
        """Mean and standard deviation of red, green and blue.

        Raises:
            ArgumentError: The network was trained on images of a function of the user's own.
        """
        if not self.normalizes:
            raise ArgumentError(
                "this network was trained on images that a function of yours prepared, so files "
                "cannot be prepared for it here: predict takes data=package.module:function, a "
                "function that returns new images in place of the held-out ones, and "
                "load_model(...).names a tensor of images as such a function makes them"
            )
        (m0, m1, m2), (s0, s1, s2) = (one.flatten().tolist() for one in (self.mean, self.std))
        return (m0, m1, m2), (s0, s1, s2)

    def _logits(self, images: Tensor | Sequence[ImageLike]) -> Tensor:
        with torch.inference_mode():
            if isinstance(images, Tensor):
                if self.normalizes and not images.is_floating_point():
                    raise ArgumentError(
                        "a tensor of images (n, 3, side, side) has values from 0 to 1, not "
                        f"{images.dtype}: divide pixels by 255"
                    )
                return self(images)  # type: ignore[no-any-return]
            if isinstance(images, ImageLike) or not isinstance(images, Sequence):
                hint = ": write [image]" if isinstance(images, ImageLike) else ""
                raise ArgumentError(
                    "images are a list of paths or Pillow images, or a tensor, not "
                    f"{described(images)}{hint}"
                )
            parts = [images[at : at + AT_ONCE] for at in range(0, len(images), AT_ONCE)]
            with without_pillows_warnings(), ThreadPoolExecutor(usable_cores()) as pool:
                read = partial(read_image, side=self.prepared_side)
                made = [self.logits_of(list(pool.map(read, part))) for part in parts]
            return torch.cat(made) if made else torch.empty(0, len(self.classes))

    def logits_of(self, pixels: Sequence[npt.NDArray[np.uint8]]) -> Tensor:
        """Logits (n, classes) of images from `read_image`."""
        sizes = torch.tensor([one.shape[:2] for one in pixels])
        flat = torch.from_numpy(np.concatenate([one.reshape(-1) for one in pixels]))
        store = ImageStore(flat, torch.zeros(len(pixels), dtype=torch.int64), sizes)
        images, _ = self.pipeline(store).evaluation_batch(
            torch.arange(len(pixels)), resolution=self.side
        )
        return logits_in(self.network(images))

    def pipeline(self, store: ImageStore) -> ImagePipeline:
        """The pipeline by which training evaluates, at ``side``, over other images.

        It normalizes them.

        Raises:
            ArgumentError: As `normalization` raises.
        """
        mean, std = self.normalization
        return ImagePipeline(
            store,
            device=self.mean.device,
            side=self.prepared_side,
            mean=mean,
            std=std,
            augmentation="none",
            seed=0,
        )


def read_image(image: ImageLike, *, side: int) -> npt.NDArray[np.uint8]:
    """An image as training at ``side`` pixels stores it, uint8 (height, width, 3); see `decode`.

    Raises:
        ArgumentError: It is no path and no image of Pillow.
        DataError: It cannot be read.
    """
    if not isinstance(image, ImageLike):
        raise ArgumentError(f"an image is a path or an image of Pillow, not {described(image)}")
    try:
        if isinstance(image, Image.Image):  # its pixels come without the note how to turn them
            content = encoded(upright(image))
        else:
            content = Path(image).read_bytes()
        return decode(content, top_resolution=side)
    except Exception as error:  # of an opened image Pillow decodes the pixels only now
        name = "of Pillow" if isinstance(image, Image.Image) else str(image)
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(printable(f"unreadable image {name}: {cause}")) from error


def save_model(folder: Path, weights: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write weights, and the description by which they are used.

    Args:
        folder: An existing folder.
        weights: A plain state_dict.
        config: ``network``, ``classes``, ``side`` of the images, ``prepared_side`` of those that
            are resized to it and ``built_side`` of the network in pixels, ``mean``, ``std``,
            ``dropout`` and ``network_args``.

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
        return built_model(place, config, partial(load, content), network, network_args)
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise FileError(f"{place / WEIGHTS} is damaged: {error}") from None


def built_model(
    place: Path,
    config: Mapping[str, Any],
    weights: Callable[[], Mapping[str, Any]],
    network: str | nn.Module | Callable[..., nn.Module] | None = None,
    network_args: Mapping[str, Any] | None = None,
) -> TrainedModel:
    """A trained network from its description and weights, on the CPU.

    Args:
        place: Where both come from, for messages.
        config: As for `save_model`.
        weights: Returns the state_dict.
        network: As for `load_model`.
        network_args: As for `load_model`.

    Raises:
        JobError: The network cannot be built.
        FileError: Weights or description are damaged.
        PlanError: ``network`` or ``network_args`` are missing for a network that needs them.
    """
    try:
        classes = tuple(map(str, config["classes"]))
        made = _made(network, network_args, config, len(classes))
        made.load_state_dict(weights())
        side, mean, std = int(config["side"]), tuple(config["mean"]), tuple(config["std"])
        prepared_side = int(config.get("prepared_side", side))  # files of before have none
        return TrainedModel(made, classes, side, mean, std, prepared_side)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise FileError(f"{place} is damaged, or of another network: {cause}") from None


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
    if not foreign and given not in (None, name):
        raise PlanError(f"network={given}: the trained network is {name}; leave network= out")
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

    Its images are ``side`` pixels wide and high, and have ``channels`` channels.

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
