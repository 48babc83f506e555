"""From the job's ``data`` to images: how each source is opened, and how its images are identified.

Images in files and those that a user's own function returns are opened here, digits and CIFAR in
`arrays`, other libraries' in `libraries`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from operator import index as whole
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

from batchwright.errors import DataError
from batchwright.records import DataFacts, Job
from batchwright.records.registries.data_sources import (
    DATA,
    FETCH,
    FUNCTION,
    OWN_STEP,
    is_remote,
    source_of,
)
from batchwright.records.text.formatting import data_name
from batchwright.workload.data import image_folder
from batchwright.workload.data.image_files import ImageFiles, fits_the_disk
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.listing import (
    Listing,
    decode_all,
    index_all,
    natural_side,
    stored_bytes,
)
from batchwright.workload.data.random_numbers import drawing_alike
from batchwright.workload.data.store import (
    Progress,
    is_stored,
    open_index,
    open_store,
    stored_facts,
)
from batchwright.workload.data.store_writer import Header, Part, StoreWriter
from batchwright.workload.extras import in_words
from batchwright.workload.task import import_object

_IMPORT_STRING = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
# Part of the recipe of an index; a new number where other images are unreadable, or other values
# are kept. 2: long thin images are unreadable, and the mean is of readable images.
_IN_FILES = "decoded files, 2"


@dataclass(frozen=True)
class ImageData:
    """Training and held-out images, with facts and statistics.

    Attributes:
        train: Training images: an `ImageStore`; `ImageFiles` where they are too many for the cache;
            another map-style `Dataset` only where the job names an import string.
        val: Held-out images, of the class of ``train``.
        facts: Sizes, classes, split and digest.
        mean: What is subtracted from red, green and blue in [0, 1]: their mean over the training
            pixels, unless the job gives others; 0 for an import string, whose items are not
            normalized.
        std: What they are divided by: their standard deviation, at least one grey level (1/255);
            1 for an import string.
    """

    train: ImageStore | Dataset[Any]
    val: ImageStore | Dataset[Any]
    facts: DataFacts
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def open_data(job: Job, *, progress: Progress | None = None, verify: bool = True) -> ImageData:
    """The images of ``job.data``; decoded into the cache first where they are not there yet.

    Args:
        job: The job; its keys ``data``, ``data_args``, ``val``, ``unreadable``, ``resolutions``
            and ``normalize`` count.
        progress: Called as progress(done, total, what) while images are decoded.
        verify: Whether to compare cached images with their digests. Workers whose parent has just
            done so pass False.

    Raises:
        DataError: The data are unknown, missing, damaged or inconsistent.
        FileError: The cache cannot be written, or is full.
        JobError: An import string names nothing.
    """
    kind, colon, place = job.data.partition(":")
    source = source_of(job.data)
    if source is FUNCTION:
        unknown = not _IMPORT_STRING.fullmatch(job.data)
    else:
        unknown = bool(colon) and not source.takes_path
    if job.data == OWN_STEP:
        raise DataError(
            "data=step stands for a step of your own, which only your program has: follow the plan "
            "there, with bw.Sampler, bw.Session or one of docs/trainers.md"
        )
    if unknown:
        if Path(job.data).is_dir():  # first: a folder's name may be like that of a source
            raise DataError(
                f"data={job.data} is a folder: did you mean data=imagefolder:{job.data}?"
            )
        near = get_close_matches(kind, DATA, n=1, cutoff=0.5)
        if near:
            raise DataError(f"data={job.data} is unknown; did you mean {DATA[near[0]].form}?")
        forms = ", ".join(one.form for one in (*DATA.values(), FUNCTION))
        raise DataError(f"data={job.data} is unknown; choose one of {forms}")
    if source.takes_path and not place:
        what = "the folder" if source.place == "PATH" else source.place
        raise DataError(f"data={kind} needs {what}: data={source.form}")
    if job.data_args and not source.takes_args:
        given = ", ".join(job.data_args)
        raise DataError(f"data={job.data} takes no data_args: leave out {given}")
    if source.takes_path and place.startswith("~"):
        try:
            Path(place).expanduser()
        except RuntimeError:  # there is no such user, or this user has no home folder
            raise DataError(
                f"data={job.data}: there is no such home folder; give the whole path"
            ) from None
    if is_remote(place) and source.takes_path and not source.remote:
        place = str(import_object(FETCH, "data")(job.data, place, progress, verify))
    opened = import_object(source.open, "data")
    if source is FUNCTION:
        import_object(job.data, "data")  # now, as modules may seed when they are first imported
    # A function of the user's may split its images at random. Another split in another worker, or
    # when a run goes on, would hold out images that are trained on.
    with drawing_alike():
        found: ImageData = opened(job, place, progress, verify)
    if isinstance(job.normalize, tuple) and not source.as_they_come:
        found = _normalized_by(found, job.normalize)
    if not source.named_by_folder:
        return found
    # The cache may hold the folder's former name.
    return replace(found, facts=found.facts.model_copy(update={"name": data_name(job.data)}))


def _normalized_by(data: ImageData, six: tuple[float, ...]) -> ImageData:
    """The images with the means and deviations of a job in place of their own."""
    mean, std = (six[0], six[1], six[2]), (six[3], six[4], six[5])
    for part in (data.train, data.val):
        if isinstance(part, ImageFiles):
            part.mean, part.std = mean, std
    return replace(data, mean=mean, std=std)


def open_decoded(
    recipe: Mapping[str, object],
    build: Callable[[StoreWriter], DataFacts],
    progress: Progress | None,
    verify: bool,
) -> ImageData:
    """The images of a recipe from the cache, where ``build`` decodes them if they are not there."""
    train, val, header = open_store(recipe, build, progress=progress, verify=verify)
    return ImageData(train, val, header.facts, header.mean, header.std)


def open_image_folder(job: Job, place: str, progress: Progress | None, verify: bool) -> ImageData:
    """A folder of images: decoded into the cache, or in their files where they are too many."""
    listing = image_folder.list_images(Path(place).expanduser(), job)
    top = _top(listing, job)
    recipe = image_folder.recipe(listing, top, job.unreadable)
    return _open_listing(lambda: (listing, top), recipe, job, progress, verify)


def open_listed(
    make: Callable[[], Listing],
    identity: Mapping[str, object],
    job: Job,
    progress: Progress | None,
    verify: bool,
) -> ImageData:
    """Images of a library or of a special format, decoded as those of a folder are.

    Args:
        make: Lists the images; called only if they are not in the cache yet, or stay in their
            files.
        identity: JSON values that change whenever the images do.
        job: The job; its keys ``data_args``, ``val``, ``unreadable`` and ``resolutions`` count.
        progress: As for `open_data`.
        verify: As for `open_data`.
    """
    keys = {key: getattr(job, key) for key in ("data_args", "val", "unreadable")}
    recipe: dict[str, object] = {**identity, **keys, "resolutions": "auto"}
    if job.resolutions != "auto":
        # A plan's job has in place of `auto` the side that the images were decoded for.
        top = max(job.resolutions)
        made = [stored_facts(one) for one in (recipe, {**recipe, "kept": _IN_FILES})]
        if not any(facts is not None and facts.side == top for facts in made):
            recipe["resolutions"] = [top]

    @cache
    def listed() -> tuple[Listing, int]:
        listing = make()
        return listing, _top(listing, job)

    return _open_listing(listed, recipe, job, progress, verify)


def _top(listing: Listing, job: Job) -> int:
    """The highest resolution that is trained at, in pixels."""
    return natural_side(listing) if job.resolutions == "auto" else max(job.resolutions)


def _open_listing(
    listed: Callable[[], tuple[Listing, int]],
    recipe: Mapping[str, object],
    job: Job,
    progress: Progress | None,
    verify: bool,
) -> ImageData:
    def builder(add_all: Callable[..., DataFacts]) -> Callable[[StoreWriter], DataFacts]:
        def build(writer: StoreWriter) -> DataFacts:
            listing, top = listed()
            skip = job.unreadable == "skip"
            return add_all(
                listing, writer, top_resolution=top, skip_unreadable=skip, progress=progress
            )

        return build

    if not is_stored(recipe):  # images that were decoded once stay so, however full the disk is now
        listing, top = listed()
        in_files = {**recipe, "kept": _IN_FILES}
        found = open_index(in_files, None)
        if found is None and not fits_the_disk(stored_bytes(listing, top)):
            found = open_index(in_files, builder(index_all), progress=progress)
        if found is not None:
            return _in_files(listing, top, *found)
    return open_decoded(recipe, builder(decode_all), progress, verify)


def _in_files(listing: Listing, top: int, rows: Mapping[Part, Tensor], header: Header) -> ImageData:
    """The images that stay in their files; ``rows`` are those of `open_index`."""

    def part(name: Part) -> ImageFiles:
        kept = (rows[name][:, 1] > 0).nonzero().squeeze(1)
        names = [listing.files[name][i].name for i in kept.tolist()]
        labels, heights, widths = rows[name][kept].unbind(1)
        return ImageFiles(
            listing.root, names, labels.contiguous(), side=top, mean=header.mean, std=header.std,
            whole=bool(((heights == widths) & (heights <= top)).all()), read=listing.read,
        )  # fmt: skip

    return ImageData(part("train"), part("val"), header.facts, header.mean, header.std)


# --------------------------------------------------------------------------- images from a function


def open_function(job: Job, place: str, progress: Progress | None, verify: bool) -> ImageData:
    """The data sets that the function ``job.data`` returns; see `from_datasets`."""
    del place, progress, verify
    function = import_object(job.data, "data")
    try:
        returned = function()
    except Exception as error:
        raise DataError(f"data={job.data} failed: {in_words(error)}") from error
    return from_datasets(job.data, returned)


def from_datasets(text: str, returned: Any) -> ImageData:
    """Images of the user's own data sets: (train, validation, class names).

    Items are (image, label): a float tensor (channels, height, width), normalized by the data set's
    own transforms, all of one size, and a whole number. They become float32 and a Python int, and
    `OwnItems` checks each; they are not changed, except for their size where the plan has another
    resolution. They may be random, so the digest covers the job key, the lengths, the classes and
    the image size, but no pixels.

    Args:
        text: The job's name of the data.
        returned: Training and validation data set, and class names.

    Raises:
        DataError: ``returned`` is something else, or a data set is empty.
    """
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise DataError(f"data={text} must return (train, validation, class names)")
    train, val, names = returned
    for which, dataset in (("training", train), ("validation", val)):
        name = type(dataset).__name__
        map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not map_style:
            raise DataError(
                f"data={text}: the {which} data ({name}) cannot be indexed: using each sample "
                "exactly once, whatever the shares and after a resume, needs __len__ and "
                "__getitem__"
            )
        try:
            samples = len(dataset)
        except Exception as error:  # the user's code may fail in any way
            raise DataError(
                f"data={text}: the {which} data ({name}) have no length ({in_words(error)})"
            ) from error
        if not samples:
            raise DataError(f"data={text}: the {which} data ({name}) are empty")
    classes = tuple(map(str, names)) if isinstance(names, (tuple, list)) else ()
    if len(classes) < 2:
        raise DataError(f"data={text} must return the names of two or more classes, in label order")
    train = OwnItems(train, f"data={text}: training", len(classes))
    train.shape = shape = train.first_shape()
    channels, side = shape[0], min(shape[1:])
    # Their size may be another: at the training's resolution they must be alike.
    val = OwnItems(val, f"data={text}: held-out", len(classes), (channels, None, None))
    val.first = val.first_shape()
    identity = json.dumps([text, len(train), len(val), classes, side])
    facts = DataFacts(
        name=text,
        digest=hashlib.sha256(identity.encode()).hexdigest(),
        train_samples=len(train),
        val_samples=len(val),
        split="as the function returns it",
        classes=classes,
        side=side,
        channels=channels,
    )
    return ImageData(train, val, facts, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


class OwnItems(Dataset[Any]):
    """A user's data set, of which each item is checked: (image, label).

    Args:
        dataset: Gives such items.
        name: What they are, for messages.
        classes: Number of classes.
        shape: Channels, height and width that each image must have, as far as they are known.

    Attributes:
        name: As given.
        shape: As given.
        first: Shape of the first image, where others need not have it; `None`: unknown.
    """

    def __init__(
        self, dataset: Any, name: str, classes: int, shape: tuple[int | None, ...] = (None,) * 3
    ) -> None:
        self._dataset, self.name, self._classes, self.shape = dataset, name, classes, shape
        self.first: tuple[int, ...] | None = None

    def first_shape(self) -> tuple[int, ...]:
        """Channels, height and width of the first image.

        Raises:
            DataError: The first item cannot be used.
        """
        try:
            return tuple(self[0][0].shape)
        except DataError:
            raise
        except Exception as error:  # the user's code may fail in any way
            raise DataError(f"{self.name} item 0 fails ({in_words(error)})") from error

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        item, where = self._dataset[index], f"{self.name} item {index}"
        wanted = "(float tensor (channels, height, width), whole-number label)"
        try:
            image, label = item
            label = whole(label)
        except (TypeError, ValueError) as error:
            raise DataError(f"{where} is not {wanted}: {in_words(error)}") from error
        if not (isinstance(image, Tensor) and image.ndim == 3 and image.is_floating_point()):
            shown = f"a {type(image).__name__}"
            if isinstance(image, Tensor):
                shown = f"a {image.dtype} tensor {tuple(image.shape)}"
            raise DataError(f"{where} is not {wanted}: its image is {shown}")
        if any(size not in (None, own) for size, own in zip(self.shape, image.shape, strict=True)):
            usual = ", ".join("any" if size is None else str(size) for size in self.shape)
            raise DataError(
                f"{where} has an image of shape {tuple(image.shape)}, where the first training "
                f"image asks for ({usual}): give all images one shape"
            )
        if not 0 <= label < self._classes:
            raise DataError(f"{where}: label {label} is outside the {self._classes} class names")
        return image.float(), label


def to_resolution(images: torch.Tensor, resolution: int) -> torch.Tensor:
    """Images (n, channels, height, width) whose shorter side is ``resolution`` pixels.

    The aspect ratio is kept; images of that size are returned unchanged.
    """
    shorter = min(images.shape[-2:])
    if shorter == resolution:
        return images
    size = _size_at(resolution, images.shape[-2:])
    return functional.interpolate(images.float(), size=size, mode="bilinear", antialias=True)


def _size_at(resolution: int, size: Sequence[int]) -> tuple[int, int]:
    """Height and width of an image, in pixels, whose shorter side becomes ``resolution``."""
    height, width = (max(1, round(side * resolution / min(size))) for side in size)
    return height, width


def resized(batch: tuple[Tensor, Tensor], resolution: int) -> tuple[Tensor, Tensor]:
    """A training batch of a user's own data set, resized to a resolution in pixels."""
    images, labels = batch
    return to_resolution(images, resolution), labels


class AtResolution(Dataset[Any]):
    """A user's images, resized to a resolution; see `to_resolution`.

    Args:
        dataset: A data set of (image, label) items.
        resolution: Shorter side of the images, in pixels.

    Raises:
        DataError: An image of `OwnItems` has another shape than their first.
    """

    def __init__(self, dataset: Dataset[Any], resolution: int) -> None:
        self._dataset, self._resolution = dataset, resolution

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type] # it was refused without

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        image, label = self._dataset[index]
        made, own = to_resolution(image[None], self._resolution)[0], self._dataset
        # PyTorch would not say which images it cannot put into one batch.
        if (
            isinstance(own, OwnItems)
            and own.first is not None
            and made.shape[1:] != _size_at(self._resolution, own.first[1:])
        ):
            raise DataError(
                f"{own.name} item {index} has an image of shape {tuple(image.shape)} and item 0 "
                f"one of {own.first}, which stay different at {self._resolution} px: give all "
                "images one shape"
            )
        return made, label
