"""The batches that are measured with: the job's own data, on a training's path to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, cycle
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import default_collate

from batchwright.records import Job
from batchwright.training.batches.feeding import DatasetFeed, Feed, FileFeed, PipelineFeed
from batchwright.training.batches.sampler import balancing_weights
from batchwright.training.step.early_batches import Early
from batchwright.workload.data.image_files import FilePipeline, ImageFiles
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.loading import loader_processes
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.data.sources import AtResolution, ImageData, resized, to_resolution

_MAX_RESIDENT = 64  # samples of a user's data set that are loaded

Batch = tuple[Tensor, Tensor]


class RandomBatches(Early):
    """Makes a training batch each time it is called.

    Args:
        source: Of the images.
        indices: Draws those of a batch.
        resolution: Image side, in pixels.

    Attributes:
        made_there: See `ImagePipeline.makes_there`.
    """

    def __init__(
        self, source: ImagePipeline, indices: Callable[[], Tensor], resolution: int
    ) -> None:
        make = partial(source.training_batch, epoch=0, resolution=resolution)
        super().__init__((indices() for _ in count()), make)
        self.made_there = source.makes_there(resolution)

    def __call__(self) -> Batch:
        """The next one."""
        batch: Batch = next(self)
        return batch


class Batches:
    """Makes batches of random samples to be timed, and feeds whoever names the samples.

    Those of an `ImageStore` come from the real pipeline. Other data are loaded beside the training,
    by processes of their own: `stream` gives batches as a training gets them, `supply` a batch that
    is there already, a few samples repeated to the size wanted.

    Args:
        job: What is measured.
        data: The job's data.
        sides: Resolutions of the job, in pixels.
        device: Where batches are wanted.
        dtype: Of the images.
        rank: This worker: others draw other samples.
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
        """Bring to a GPU all images that a training keeps there: they are a part of each peak."""
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
        images = to_resolution(images[rows], resolution)
        batch = images.contiguous(memory_format=torch.channels_last), labels[rows]
        return lambda: batch

    def evaluation_supply(self, size: int) -> Callable[[], Batch]:
        """As `supply`, of held-out images in a store, without augmentation, at the highest side."""
        source = self._held_out or self._source(self._data.val)
        assert isinstance(source, ImagePipeline)  # noqa: S101 - others have a feed
        return lambda: source.evaluation_batch(
            self._random_indices(size, len(source)), resolution=self._side
        )

    def feed(self, workers: int) -> Feed | None:
        """What loads beside the steps of so many workers; `None` where a step makes its batch.

        Less is loaded ahead than in a training: what a visit leaves unused is lost, and what is
        ready at its begin has to be used up before steps are timed (docs/log.md has figures).
        """
        part = self._data.train
        if isinstance(part, ImageStore):
            return None
        loaders = loader_processes(self._job, workers, files=isinstance(part, ImageFiles))
        if loaders not in self._feeds:
            self._feeds[loaders] = self._make_feed(part, loaders)
        return self._feeds[loaders]

    def training_feed(self, workers: int) -> Feed:
        """Makes the batches of a training on so many workers."""
        if isinstance(self._train, ImagePipeline):
            return PipelineFeed(self._train)
        feed = self.feed(workers)
        assert feed is not None  # noqa: S101 - others have one
        return feed

    def evaluation_feed(self, workers: int) -> Feed | None:
        """As `feed`, of held-out images; the caller closes it."""
        part = self._data.val
        if isinstance(part, ImageStore):
            return None
        files = isinstance(part, ImageFiles)
        loaders = loader_processes(self._job, workers, files=files)
        return self._make_feed(part if files else AtResolution(part, self._side), loaders)

    def stream(self, feed: Feed, sizes: Sequence[int], resolution: int) -> Iterator[Batch]:
        """Batches of random samples without end, as large as ``sizes`` say, one after the other."""
        indices = (self._random_indices(size, len(feed)) for size in cycle(sizes))
        return feed.training(indices, epoch=0, resolution=resolution)

    def evaluation_stream(self, feed: Feed, size: int, batches: int) -> Iterator[Batch]:
        """So many batches of held-out samples at the highest resolution."""
        indices = [self._random_indices(size, len(feed)) for _ in range(batches)]
        return feed.evaluation(indices, self._side)

    def shuffled(self) -> Tensor:
        """Indices of the training samples in random order, the same on all workers."""
        random = torch.Generator().manual_seed(self._job.seed)
        return torch.randperm(self._data.facts.train_samples, generator=random)

    def sampling_weights(self, indices: Tensor) -> Tensor | None:
        """How often a training takes each of these samples; `None`: once per epoch."""
        part = self._data.train
        if self._job.sampling == "shuffle" or not isinstance(part, ImageStore | ImageFiles):
            return None
        return balancing_weights(part.labels[indices])

    def close(self) -> None:
        """Let the loader processes end."""
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
        pipeline = FilePipeline(
            part,
            device=self._device,
            augmentation=self._job.augmentation,
            rotation=self._job.rotation,
            zoom=self._job.zoom,
            seed=self._job.seed,
            dtype=self._dtype,
            loaders=loaders,
            ahead=1,
        )
        return FileFeed(pipeline)

    def _random_indices(self, size: int, samples: int) -> Tensor:
        return torch.randint(samples, (size,), generator=self._random)
