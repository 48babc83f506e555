"""Batches on their way to a device: copied without waiting, and made one ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from batchwright.workload.host import enter, is_out_of_memory, release_memory

Request = TypeVar("Request")
Made = tuple[Tensor, ...]


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; work on the device waits for the copy, the host does not.

    Only copies from pinned memory run by themselves. On the CPU the tensor itself is returned.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU in which `prefetched` works.

    All calls use one stream: PyTorch's allocator keeps memory freed in a stream for that stream.
    """
    return torch.cuda.Stream(device)


def prefetched(
    make: Callable[[Request], Made], requests: Iterable[Request], device: torch.device
) -> Iterator[Made]:
    """The results of ``make`` for each request, made in a thread while the one before is in use.

    On CUDA the thread's copies and kernels run beside those of the training, in a stream of their
    own. One more request is taken than results are given out. If memory runs out while the training
    is at its peak, the result is made once more when it is due.

    Args:
        make: Makes tensors on the device for a request; called by one thread at a time.
        requests: Requests, in order.
        device: Device of the tensors.
    """
    side_stream: torch.cuda.Stream | None = None
    if device.type == "cuda":
        # ``cuda`` alone is this thread's current GPU, and in a new thread would be the first.
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        side_stream = copy_stream(device)

    def work(request: Request) -> tuple[Made, torch.Event | None]:
        with torch.cuda.stream(side_stream):
            return make(request), None if side_stream is None else side_stream.record_event()

    def taken(future: Future[tuple[Made, torch.Event | None]], request: Request) -> Made:
        failed = future.exception()
        if failed is not None and is_out_of_memory(failed):
            failed.__traceback__ = None  # its frames hold the tensors made so far
            release_memory(device)
            future = pool.submit(work, request)
        made, copied = future.result()
        if copied is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(copied)
            for tensor in made:
                tensor.record_stream(stream)  # keeps its memory until this stream has used it
        return made

    # A new thread's current device would be the first GPU.
    with ThreadPoolExecutor(1, "batches", enter, (device,)) as pool:
        ahead: tuple[Future[tuple[Made, torch.Event | None]], Request] | None = None
        for request in requests:
            following = pool.submit(work, request), request
            if ahead is not None:
                yield taken(*ahead)
            ahead = following
        if ahead is not None:
            yield taken(*ahead)
