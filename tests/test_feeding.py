"""Batches of a user's own data set on their way to a device."""

from __future__ import annotations

import warnings
from multiprocessing import active_children

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from batchwright.errors import DataError
from batchwright.training.batches.feeding import DatasetFeed, to_device

GPU = torch.device("cuda", 0)


class OnGpu(Tensor):
    """A tensor that says of itself that it lies on a GPU, and refuses what one there refuses."""

    device = property(lambda self: GPU)

    def pin_memory(self, device=None):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be")

    def to(self, *args, **kwargs):
        return self


class Noted(Tensor):
    """A tensor of the CPU that notes how it is sent."""

    noted: tuple[str, ...] = ()

    def pin_memory(self, device=None):
        self.noted = (*self.noted, "pinned")
        return self

    def to(self, *args, **kwargs):
        self.noted = (*self.noted, "sent")
        return self


class Refusing(Dataset):
    """A data set whose items cannot be fetched in a loader process, in PyTorch's words."""

    def __init__(self, words):
        self.words = words

    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise RuntimeError(self.words)


def test_samples_may_lie_on_the_gpu_without_loader_processes(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # else none would pin
    images, labels = (torch.arange(8.0).as_subclass(OnGpu) for _ in range(2))
    feed = DatasetFeed(TensorDataset(images, labels), device=GPU, seed=0, loaders=0)
    ((found, _),) = feed.training([torch.tensor([3, 1])], 0, 8)
    assert found.tolist() == [3, 1]
    assert feed.single(torch.tensor([2]), 0, 8)[0].tolist() == [2]


def test_what_this_process_fetches_it_pins_itself():
    image, near = (torch.ones(3).as_subclass(Noted) for _ in range(2))
    to_device({"image": (image,)}, GPU)
    assert image.noted == ("pinned", "sent")
    to_device(near, torch.device("cpu"))
    assert near.noted == ("sent",)


@pytest.mark.parametrize(
    "words",
    [
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you",
        "CUDA error: initialization error\nCUDA kernel errors might be asynchronously reported",
        "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
        "cannot pin 'CUDABFloat16Type' only dense CPU tensors can be pinned",
    ],
)
def test_samples_on_the_gpu_are_refused_to_loader_processes_in_a_line(words):
    before = {*active_children()}
    feed = DatasetFeed(Refusing(words), device=torch.device("cpu"), seed=0, loaders=1)
    try:
        with pytest.raises(DataError, match=r"samples are on the GPU.*give loaders=0") as caught:
            list(feed.training([torch.arange(4)], 0, 8))
    finally:
        feed.close()
    # Although the error, which is held here, still holds the loader.
    assert {*active_children()} <= before, caught


class Curriculum(Dataset):
    """Items that depend on the epoch, of which the data set is told."""

    def __init__(self):
        self.epoch, self.file = 0, None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(100 * self.epoch + index)


@pytest.mark.parametrize(
    ("loaders", "change", "told"),
    [
        (1, lambda data: setattr(data, "epoch", 1), "dataset.epoch"),
        (1, lambda data: setattr(data, "file", object()), ""),  # opened when it was first needed
        (0, lambda data: setattr(data, "epoch", 1), ""),
    ],
)
def test_what_a_loop_changes_in_a_data_set_loader_processes_do_not_see_and_it_is_told_once(
    loaders, change, told
):
    data = Curriculum()
    feed = DatasetFeed(Subset(data, range(8)), device=torch.device("cpu"), seed=0, loaders=loaders)
    seen = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for epoch in range(3):
            seen += [one.tolist() for one in feed.training([torch.tensor([3, 1])], epoch, 8)]
            change(data)
    feed.close()
    assert seen[-1] == ([103, 101] if data.epoch and not loaders else [3, 1])
    assert [f"the data set's {told} has changed" in str(one.message) for one in found] == (
        [True] if told else []
    )


class Counting(Curriculum):
    """Counts what is read of it in this process."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("changes", [False, True])
def test_what_a_data_set_counts_of_single_batches_here_no_loop_has_changed(changes):
    """Such are fetched in this process where memory has run out."""
    data, batch = Counting(), torch.tensor([3, 1])
    feed = DatasetFeed(data, device=torch.device("cpu"), seed=0, loaders=1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for epoch in range(3):
            list(feed.training([batch], epoch, 8))
            if changes:
                data.epoch = epoch + 1
            feed.single(batch, epoch, 8)
    feed.close()
    assert ["set's epoch has changed" in str(one.message) for one in found] == [True] * changes
