"""From sample indices to batches on the device, for our image store and for any data set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)

from batchwright.errors import DataError, PlanError
from batchwright.training.batches.copied_data import CopiedData
from batchwright.training.batches.randomness import seed_item
from batchwright.workload.data.copying import copy_to_device
from batchwright.workload.data.image_files import FilePipeline
from batchwright.workload.data.loading import (
    OWN_DATA_LOADERS,
    LoadingMeter,
    MeteredItems,
    batches_of,
    end_loaders,
    ignore_stop_signals,
)
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.data.random_numbers import put_aside

Batch = Any  # a tensor, or a tuple, list or dict of them, as the user's data set makes it
ImagePart = int | str  # where the image is in a tuple or dict batch


class Feed(Protocol):
    """Makes the batches of one data set.

    Attributes:
        shifts: Whether it shifts training images itself, as far as ``strength`` says.
        strength: Strength of the shifts, relative to the usual ones.
        loading: Counts batches and processor time of the loader processes, if there are any.
    """

    shifts: bool
    strength: float
    loading: LoadingMeter

    def __len__(self) -> int:
        """Number of samples."""

    def description(self) -> dict[str, Any]:
        """What a user of the trained network must know about its input; plain values."""

    def training(self, batches: Iterable[Tensor], epoch: int, resolution: int) -> Iterator[Batch]:
        """A training batch for each tensor of sample indices, in order; may fetch ahead."""

    def makes_on_gpu(self, resolution: int) -> bool:
        """Whether a GPU makes the batches, so that the host waits for nothing."""

    def single(self, indices: Tensor, epoch: int, resolution: int) -> Batch:
        """One training batch here and now, beside those that `training` fetches ahead."""

    def evaluation(self, batches: Sequence[Tensor], resolution: int | None) -> Iterator[Batch]:
        """A batch without augmentation for each tensor of sample indices, in order."""

    def close(self) -> None:
        """End the feed's loader processes; nothing can be fetched any more."""


def feed_of(
    dataset: Dataset[Any] | ImagePipeline | FilePipeline, device: torch.device, **how: Any
) -> Feed:
    """A pipeline of ours as it is, else the feed of a user's data set, which ``how`` is for."""
    if isinstance(dataset, ImagePipeline | FilePipeline):
        return dataset
    return DatasetFeed(dataset, device=device, **how)


class DatasetFeed:
    """Batches of a user's map-style data set, through loader processes.

    Every item is fetched with Python's, numpy's and torch's random numbers seeded from (seed,
    epoch, index), so it is the same whichever process, worker or resumed run fetches it.

    Args:
        dataset: Map-style; its items are collated as `torch.utils.data.default_collate` does.
        device: Device on which batches arrive.
        seed: The job's seed.
        loaders: Loader processes; 0 fetches in this process.
        ahead: Batches that each of them fetches ahead.
        images: Where the image is in a tuple or dict batch, to be resized; ``None``: nowhere.
        resize: Resizes a whole batch instead: f(batch, resolution) -> batch.
        sides: Training resolutions of the plan, in pixels.
        collate: Makes a batch of items; ``None``: `torch.utils.data.default_collate`.

    Raises:
        DataError: The data set is iterable only, so "each sample once" cannot be kept.
        PlanError: Several resolutions, and nothing says what to resize.
    """

    shifts, strength = False, 1.0

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        device: torch.device,
        seed: int,
        loaders: int = OWN_DATA_LOADERS,
        ahead: int = 2,
        images: ImagePart | None = None,
        resize: Callable[[Batch, int], Batch] | None = None,
        sides: Sequence[int] = (),
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        refuse_iterable(dataset)
        if len(set(sides)) > 1 and images is None and resize is None:
            raise PlanError(
                f"the plan has several resolutions ({', '.join(map(str, sorted(set(sides))))}): "
                "say which part of a batch is the image with images=, or give resize="
            )
        self._items = SeededItems(dataset, seed)
        self._device = device
        self._images, self._collate = images, collate
        self._resize = resize
        self._order = _EpochOrder()
        self.loading = LoadingMeter(loaders)
        self._loader = self._make_loader(loaders, ahead)
        self._dataset, self._told = dataset, False
        self._copied: CopiedData | None = None  # as the loader processes have it

    def __len__(self) -> int:
        return len(self._items)

    def description(self) -> dict[str, Any]:
        """Nothing: the data set prepares its images itself."""
        return {}

    def training(self, batches: Iterable[Tensor], epoch: int, resolution: int) -> Iterator[Batch]:
        """The data set's own batches, resized if asked."""
        for batch in self._fetch(batches, epoch):
            yield self._resized(batch, resolution)

    def makes_on_gpu(self, resolution: int) -> bool:
        """No: the data set makes them on the CPU."""
        del resolution
        return False

    def single(self, indices: Tensor, epoch: int, resolution: int) -> Batch:
        """One such batch, fetched in this process."""
        if self._copied is not None:
            self._warn_of_changes()
        items = self._items.__getitems__([(epoch, index) for index in indices.tolist()])
        if self._copied is not None:  # what the data set counts or keeps here, no loop has changed
            self._copied = CopiedData(self._dataset)
        batch = (self._collate or default_collate)(items)
        return self._resized(to_device(batch, self._device), resolution)

    def evaluation(self, batches: Sequence[Tensor], resolution: int | None) -> Iterator[Batch]:
        """The data set's own batches; resized only if ``resolution`` is given."""
        for batch in self._fetch(batches, 0):
            yield batch if resolution is None else self._resized(batch, resolution)

    def close(self) -> None:
        """End the loader processes."""
        end_loaders(self.__dict__.pop("_loader", None))  # closing twice does no harm

    def _make_loader(self, loaders: int, ahead: int) -> DataLoader[Any]:
        metered = MeteredItems(self._items, self._collate, self.loading)
        return DataLoader(
            metered,
            batch_sampler=self._order,
            num_workers=loaders,
            prefetch_factor=ahead if loaders else None,
            collate_fn=metered.collate,
            worker_init_fn=ignore_stop_signals,
            # This process pins by itself what it fetches: PyTorch would refuse samples on the GPU.
            pin_memory=loaders > 0 and self._device.type == "cuda",
            persistent_workers=loaders > 0,
            generator=torch.Generator(),  # or each epoch would draw from the global one
        )

    def _warn_of_changes(self) -> None:
        """Warn once of a data set that has changed since the loader processes have copies of it."""
        if not self.loading.loaders or self._told:
            return
        if self._copied is None:
            self._copied = CopiedData(self._dataset)
        elif changed := self._copied.changed:
            self._told, self._copied = True, None
            warnings.warn(
                f"the data set's {changed} has changed, and the loader processes go on with what "
                "it was when they began: keep what changes in a tensor of shared memory "
                "(torch.tensor(...).share_memory_()), or give loaders=0",
                stacklevel=2,
            )

    def _fetch(self, batches: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        self._warn_of_changes()
        self._order.batches = _keys(batches, epoch, self.loading)
        for batch in batches_of(self._loader):
            yield to_device(batch, self._device)

    def _resized(self, batch: Batch, resolution: int) -> Batch:
        if self._resize is not None:
            return self._resize(batch, resolution)
        if self._images is None:
            return batch
        try:
            images = batch[self._images]
        except (LookupError, TypeError):
            parts = ", ".join(map(repr, batch)) if isinstance(batch, Mapping) else len(batch)
            raise PlanError(
                f"images={self._images!r} of Session, and a batch is a {type(batch).__name__} of "
                f"{parts}: give the key or the index of the image in it"
            ) from None
        if tuple(images.shape[-2:]) != (resolution, resolution):
            images = functional.interpolate(
                images.float(), size=(resolution, resolution), mode="bilinear", antialias=True
            )
        return _replace(batch, self._images, images)


def _keys(
    batches: Iterable[Tensor], epoch: int, loading: LoadingMeter
) -> Iterator[list[tuple[int, int]]]:
    for indices in batches:
        loading.asked += 1
        yield [(epoch, index) for index in indices.tolist()]


class SeededItems(Dataset[Any]):
    """A data set whose item (epoch, index) is fetched with random numbers seeded from both."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type] # map-style, the feed has checked

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Any]:
        """The items of a whole batch at once: keeping the generators' states costs the most."""
        alone = get_worker_info() is not None  # nobody else draws in a loader process
        with nullcontext() if alone else put_aside():
            items = []
            for epoch, index in keys:
                seed_item(self._seed, epoch, index)
                items.append(self._dataset[index])
            return items


class _EpochOrder(Sampler[list[tuple[int, int]]]):
    """Batch sampler that hands the loader the batches of the epoch in progress."""

    def __init__(self) -> None:
        self.batches: Iterable[list[tuple[int, int]]] = ()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.batches)


def refuse_iterable(dataset: Any) -> None:
    """Raise `DataError` for a data set without length and indices."""
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise DataError(
            f"{type(dataset).__name__} can only be iterated: each sample exactly once, under "
            "unequal shares and after a resume, needs a data set with __len__ and __getitem__"
        )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor in a batch to the device, and whatever else has ``.to(device)``."""
    dense = isinstance(batch, Tensor) and batch.layout is torch.strided  # no other can be pinned
    if dense and (batch.device.type, device.type) == ("cpu", "cuda"):
        return copy_to_device(batch, device)
    if callable(getattr(batch, "to", None)):
        try:
            return batch.to(device, non_blocking=True)
        except TypeError:  # one that takes the device alone
            return batch.to(device)
    if isinstance(batch, Mapping):
        return like_mapping(batch, {key: to_device(one, device) for key, one in batch.items()})
    if isinstance(batch, (tuple, list)):
        return like_sequence(batch, [to_device(value, device) for value in batch])
    return batch


def _replace(batch: Batch, part: ImagePart, value: Tensor) -> Batch:
    if isinstance(batch, Mapping):
        return like_mapping(batch, {**batch, part: value})
    values = list(batch)
    values[int(part)] = value
    return like_sequence(batch, values)


def like_mapping(batch: Any, values: dict[Any, Any]) -> Any:
    """A mapping of the same class as ``batch`` with other values."""
    if type(batch) is dict:
        return values
    if isinstance(batch, MutableMapping):  # copied, as not each class is made from a dict
        copied = copy(batch)
        for key, value in values.items():
            copied[key] = value
        return copied
    return type(batch)(values)


def like_sequence(batch: Any, values: list[Any]) -> Any:
    """A list or tuple of the same class as ``batch`` with other values."""
    named = hasattr(batch, "_fields")  # a named tuple takes its fields one by one
    return type(batch)(*values) if named else type(batch)(values)
