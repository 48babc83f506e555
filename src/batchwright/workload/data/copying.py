"""Batches on their way to a device: nothing waits for a copy, and the next is made meanwhile."""

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


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device; what uses it there waits for the copy, the host does not.

    Only from pinned memory can a copy be left to itself. On the CPU it is the tensor.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@cache
def aside_of(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU in which `made_ahead` works.

    One for all its calls: PyTorch's allocator keeps what was freed in a stream for that stream.
    """
    return torch.cuda.Stream(device)


def made_ahead(
    make: Callable[[Request], Made], requests: Iterable[Request], device: torch.device
) -> Iterator[Made]:
    """What ``make`` gives for each request, made in a thread while the one before is in use.

    On CUDA the thread's copies and kernels run beside those of the training, in a stream of their
    own. One request more is asked for than was given out. Where that finds no memory beside the
    training, which is at its peak, it is made once more when its turn has come.

    Args:
        make: Tensors on the device for a request; called by one thread at a time.
        requests: In order.
        device: Where they go.
    """
    aside = aside_of(device) if device.type == "cuda" else None

    def work(request: Request) -> tuple[Made, torch.Event | None]:
        with torch.cuda.stream(aside):
            return make(request), None if aside is None else aside.record_event()

    def taken(future: Future[tuple[Made, torch.Event | None]], request: Request) -> Made:
        failed = future.exception()
        if failed is not None and is_out_of_memory(failed):
            failed.__traceback__ = None  # its frames hold what was made until then
            release_memory(device)
            future = pool.submit(work, request)
        made, copied = future.result()
        if copied is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(copied)
            for tensor in made:
                tensor.record_stream(stream)  # its memory is not given to others before
        return made

    # A thread has a current device of its own, the first GPU at first.
    with ThreadPoolExecutor(1, "batches", enter, (device,)) as pool:
        ahead: tuple[Future[tuple[Made, torch.Event | None]], Request] | None = None
        for request in requests:
            following = pool.submit(work, request), request
            if ahead is not None:
                yield taken(*ahead)
            ahead = following
        if ahead is not None:
            yield taken(*ahead)
