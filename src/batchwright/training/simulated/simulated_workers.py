"""What each simulated worker has of its own: buffers and random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchwright.distributed.group import Group
from batchwright.training.batches.randomness import (
    random_states,
    restore_random_states,
    seed_worker,
)
from batchwright.training.recorder import Recorder


def note_cluster(recorder: Recorder, workers: int) -> None:
    """Note in the records that the seconds are simulated."""
    recorder.note(
        f"a virtual cluster of {workers} workers in one process: all training seconds are simulated"
    )


class SimulatedGroup(Group):
    """A group whose workers are all in this process; nothing is exchanged through it.

    Args:
        device: Device on which all workers compute.
        workers: Number of workers.
        rank: The worker that `alone` returns.
    """

    def __init__(self, device: torch.device, workers: int, rank: int = 0) -> None:
        self.device, self.handle = device, None
        self.rank, self.size = rank, workers
        self.places = tuple(f"virtual/{rank}" for rank in range(workers))
        self._owned, self._roll_call = False, None

    @property
    def here(self) -> Sequence[int]:
        """Ranks of all workers."""
        return range(self.size)

    def gather(self, value: Any) -> list[Any]:
        """The process's value, once for each worker."""
        return [value] * self.size


class Randomness:
    """The random numbers of each worker, seeded as a worker process seeds its own.

    Args:
        seed: The job's seed.
        workers: Number of workers.
        device: Device on which they compute.
    """

    def __init__(self, seed: int, workers: int, device: torch.device) -> None:
        self._device = device
        self._states: list[_States] = []
        for rank in range(workers):
            seed_worker(seed, 0, rank)
            self._states.append(_take(device))

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Inside, random numbers are drawn from a worker's own generators."""
        _put(self._states[rank], self._device)
        try:
            yield
        finally:
            self._states[rank] = _take(self._device)

    def state_dict(self) -> list[dict[str, Any]]:
        """Plain values and tensors, by rank."""
        found = []
        for states in self._states:
            _put(states, self._device)
            found.append(random_states(self._device))
        return found

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Go on from a checkpoint."""
        self._states = []
        for states in state:
            restore_random_states(states, self._device)
            self._states.append(_take(self._device))


class _States(NamedTuple):
    """States of all generators, in their own formats: to convert them costs a small step's time."""

    torch: Tensor
    device: Tensor | None
    python: Any
    numpy: Any


def _take(device: torch.device) -> _States:
    return _States(
        torch.get_rng_state(),
        torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002 - the user's code may draw from it
    )


def _put(states: _States, device: torch.device) -> None:
    torch.set_rng_state(states.torch)
    if states.device is not None:
        torch.cuda.set_rng_state(states.device, device)
    random.setstate(states.python)
    np.random.set_state(states.numpy)  # noqa: NPY002


class Buffers:
    """Each worker's buffers, such as statistics of batch normalization; swapped, not copied.

    Args:
        network: The network that all workers share.
        workers: Number of workers; all begin with the network's buffers.
    """

    def __init__(self, network: nn.Module, workers: int) -> None:
        self._network = network
        self._slots = [
            (module, name)
            for module in network.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        first = self._get()
        self._own = [first, *([b.clone() for b in first] for _ in range(workers - 1))]

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Inside, the network has a worker's buffers."""
        self._set(self._own[rank])
        try:
            yield
        finally:
            self._own[rank] = self._get()  # a module may have put others in their place

    def merge(self, shares: Sequence[int]) -> None:
        """Give the network worker 0's buffers, with all workers' batch normalization statistics.

        For evaluation and checkpoints; the formula is that of `evaluation.merged_batch_norm`.

        Args:
            shares: Samples of each worker, in rank order.
        """
        merged = [buffer.clone() for buffer in self._own[0]]
        places = {(id(module), name): i for i, (module, name) in enumerate(self._slots)}
        several = len(self._own) > 1
        for layer in (one for one in self._network.modules() if isinstance(one, _BatchNorm)):
            mean_at = places.get((id(layer), "running_mean"))
            variance_at = places.get((id(layer), "running_var"))
            if not several or mean_at is None or variance_at is None:
                continue
            parts = []
            for own, share in zip(self._own, shares, strict=True):
                mean = own[mean_at].double()
                moments = torch.stack([mean, own[variance_at].double() + mean.square()])
                parts.append(share / sum(shares) * moments)
            mean, moment = sum(parts[1:], parts[0])
            merged[mean_at].copy_(mean)
            merged[variance_at].copy_((moment - mean.square()).clamp(min=0))
        self._set(merged)

    def state_dict(self) -> list[list[Tensor]]:
        """The buffers by rank, in the order of the network's modules."""
        return self._own

    def load_state_dict(self, state: Sequence[Sequence[Tensor]]) -> None:
        """Go on from a checkpoint."""
        for own, kept in zip(self._own, state, strict=True):
            for buffer, value in zip(own, kept, strict=True):
                buffer.copy_(value)

    def _get(self) -> list[Tensor]:
        found = [module._buffers[name] for module, name in self._slots]
        return [buffer for buffer in found if buffer is not None]

    def _set(self, buffers: Sequence[Tensor]) -> None:
        for (module, name), buffer in zip(self._slots, buffers, strict=True):
            module._buffers[name] = buffer
