"""Batches for measured steps: the job's own data, on the path to the device of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, cycle
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import default_collate

from batchwright.records import Job
from batchwright.training.batches.feeding import DatasetFeed, Feed
from batchwright.training.batches.sampler import balancing_weights
from batchwright.training.step.early_batches import Early
from batchwright.workload.data.image_files import FilePipeline, ImageFiles
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.loading import loader_processes
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.data.sources import AtResolution, ImageData, resized, to_resolution

_MAX_RESIDENT = 64  # samples of a user's data set that are loaded, and repeated

Batch = tuple[Tensor, Tensor]


class RandomBatches(Early):
    """Makes a training batch each time it is called.

    Args:
        source: The pipeline of the images.
        indices: Draws the indices of a batch.
        resolution: Image side, in pixels.

    Attributes:
        made_on_gpu: Whether a GPU makes the batches; see `ImagePipeline.makes_on_gpu`.
    """

    def __init__(
        self, source: ImagePipeline, indices: Callable[[], Tensor], resolution: int
    ) -> None:
        make = partial(source.training_batch, epoch=0, resolution=resolution)
        super().__init__((indices() for _ in count()), make)
        self.made_on_gpu = source.makes_on_gpu(resolution)

    def __call__(self) -> Batch:
        """The next batch."""
        batch: Batch = next(self)
        return batch


class Batches:
    """Makes batches of random samples for timed steps, and feeds for chosen samples.

    Batches of an `ImageStore` come from the real pipeline. Other data are loaded beside the
    training, by processes of their own: `stream` gives batches as a training gets them, `supply`
    those of a few samples that are loaded already, repeated to the batch's size.

    Args:
        job: The job that is measured.
        data: The job's data.
        sides: Resolutions of the job, in pixels.
        device: Device of the batches.
        dtype: Format of the images.
        rank: Number of this worker; each draws other samples.
    """

    def __init__(
        self,
        job: Job,
        data: ImageData,
        *,
        sides: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        rank: int,
    ) -> None:
        self._job, self._data, self._device, self._dtype = job, data, device, dtype
        self._sides, self._side = sides, max(sides)
        self._random = torch.Generator().manual_seed(1 + rank)
        self._train = self._source(data.train)
        self._held_out: ImagePipeline | None = None
        self._feeds = dict[int, Feed]()

    def hold_images(self) -> None:
        """Bring all images that a training keeps on a GPU there, as they are part of each peak."""
        if self._device.type == "cpu" or not isinstance(self._train, ImagePipeline):
            return
        self._train.prepare(self._sides)
        if isinstance(self._data.val, ImageStore):
            self._held_out = cast("ImagePipeline", self._source(self._data.val))

    def supply(self, size: int, resolution: int) -> Callable[[], Batch]:
        """A function that makes a training batch of ``size`` samples each time it is called."""
        source = self._train
        if isinstance(source, ImagePipeline):
            indices = partial(self._random_indices, size, len(source))
            return RandomBatches(source, indices, resolution)
        images, labels = source
        rows = torch.arange(size, device=images.device) % len(labels)

        def made() -> Batch:
            # Anew for each step, as in a training, so that a step's peak contains its images.
            batch = to_resolution(images[rows], resolution)
            return batch.contiguous(memory_format=torch.channels_last), labels[rows]

        return made

    def evaluation_supply(self, size: int) -> Callable[[], Batch]:
        """`supply` for held-out images of a store: not augmented, at the highest resolution."""
        source = self._held_out or self._source(self._data.val)
        assert isinstance(source, ImagePipeline)  # noqa: S101 - other data have a feed
        return lambda: source.evaluation_batch(
            self._random_indices(size, len(source)), resolution=self._side
        )

    def feed(self, workers: int) -> Feed | None:
        """The feed that loads beside the steps of ``workers`` workers.

        `None` where a step makes its batch itself. Fewer batches are loaded ahead than in a
        training: those that a visit leaves unused are lost, and those that are ready at its start
        have to be used up before steps are timed (docs/log.md has figures).
        """
        part = self._data.train
        if isinstance(part, ImageStore):
            return None
        loaders = loader_processes(self._job, workers, files=isinstance(part, ImageFiles))
        if loaders not in self._feeds:
            self._feeds[loaders] = self._make_feed(part, loaders)
        return self._feeds[loaders]

    def training_feed(self, workers: int) -> Feed:
        """The feed of a training on ``workers`` workers."""
        if isinstance(self._train, ImagePipeline):
            return self._train
        feed = self.feed(workers)
        assert feed is not None  # noqa: S101 - data other than a store have a feed
        return feed

    def evaluation_feed(self, workers: int) -> Feed | None:
        """`feed` for held-out images; the caller closes it."""
        part = self._data.val
        if isinstance(part, ImageStore):
            return None
        files = isinstance(part, ImageFiles)
        loaders = loader_processes(self._job, workers, files=files)
        return self._make_feed(part if files else AtResolution(part, self._side), loaders)

    def stream(self, feed: Feed, sizes: Sequence[int], resolution: int) -> Iterator[Batch]:
        """Endless batches of random samples, whose sizes cycle through ``sizes``."""
        indices = (self._random_indices(size, len(feed)) for size in cycle(sizes))
        return feed.training(indices, epoch=0, resolution=resolution)

    def evaluation_stream(self, feed: Feed, size: int, batches: int) -> Iterator[Batch]:
        """``batches`` batches of random held-out samples, at the highest resolution."""
        indices = [self._random_indices(size, len(feed)) for _ in range(batches)]
        return feed.evaluation(indices, self._side)

    def shuffled(self) -> Tensor:
        """Indices of the training samples in random order, the same on all workers."""
        random = torch.Generator().manual_seed(self._job.seed)
        return torch.randperm(self._data.facts.train_samples, generator=random)

    def sampling_weights(self, indices: Tensor) -> Tensor | None:
        """How often a training draws each of these samples; `None`: once per epoch."""
        part = self._data.train
        if self._job.sampling == "shuffle" or not isinstance(part, ImageStore | ImageFiles):
            return None
        return balancing_weights(part.labels[indices])

    def close(self) -> None:
        """End the loader processes."""
        while self._feeds:
            self._feeds.popitem()[1].close()

    def _source(self, part: Any) -> ImagePipeline | Batch:
        if not isinstance(part, ImageStore):
            first = [part[index] for index in range(min(len(part), _MAX_RESIDENT))]
            images, labels = default_collate(first)
            images = images.to(self._device, memory_format=torch.channels_last)
            return images, labels.to(self._device)
        return ImagePipeline(
            part,
            device=self._device,
            side=self._side,
            mean=self._data.mean,
            std=self._data.std,
            augmentation=self._job.augmentation,
            rotation=self._job.rotation,
            zoom=self._job.zoom,
            crop_scale=self._job.crop_scale,
            seed=self._job.seed,
            dtype=self._dtype,
            limit=self._job.goal.memory,
        )

    def _make_feed(self, part: Any, loaders: int) -> Feed:
        if not isinstance(part, ImageFiles):
            return DatasetFeed(
                part,
                device=self._device,
                seed=self._job.seed,
                loaders=loaders,
                ahead=1,
                resize=resized,
            )
        return FilePipeline(
            part,
            device=self._device,
            augmentation=self._job.augmentation,
            rotation=self._job.rotation,
            zoom=self._job.zoom,
            crop_scale=self._job.crop_scale,
            seed=self._job.seed,
            dtype=self._dtype,
            loaders=loaders,
            ahead=1,
        )

    def _random_indices(self, size: int, samples: int) -> Tensor:
        return torch.randint(samples, (size,), generator=self._random)
