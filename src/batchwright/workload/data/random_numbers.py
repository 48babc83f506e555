"""Random numbers of samples, functions of seed, epoch and sample index alone.

And generators of this process that are left as they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FIELD_BITS = 24
"""Bits of each random number."""

_TORCHS_OWN = 67280421310721  # PyTorch's seed in a process that gives it none


@contextmanager
def put_aside(*, gpus: bool = False) -> Iterator[None]:
    """Inside, draw and seed freely: afterwards all generators are as they were.

    Generators of GPUs are put back only if ``gpus`` says so: of all visible ones, if any is used.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    on_gpus = torch.cuda.get_rng_state_all() if gpus and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


@contextmanager
def drawing_alike() -> Iterator[None]:
    """Inside, Python's, NumPy's and PyTorch's generators draw the same in every process.

    PyTorch's begins as in a new process. Afterwards they are as they were. Generators of GPUs are
    left alone.
    """
    with put_aside():
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the user's code may draw from it
        torch.default_generator.manual_seed(_TORCHS_OWN)
        yield


class Draws(NamedTuple):
    """Random numbers of each sample of a batch; tensors (n,) on the CPU."""

    vertical: Tensor
    """Uniform integers below 2^24."""
    horizontal: Tensor
    """Uniform integers below 2^24, independent of ``vertical``."""
    flip: Tensor
    """True for half of the samples."""


def draw(seed: int, epoch: int, indices: Tensor) -> Draws:
    """Random numbers that depend on nothing but seed, epoch and sample index.

    All are bits of one 64-bit output of SplitMix64, started from the mixed seed and epoch, at the
    position of the sample's index.

    References:
        Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators, OOPSLA.
    """
    state = split_mix(start_of(seed, epoch), indices.numpy().astype(np.uint64))
    vertical, horizontal = (field.astype(np.int64) for field in fields(state))
    flip = (state >> np.uint64(63)).astype(np.bool_)
    return Draws(*map(torch.from_numpy, (vertical, horizontal, flip)))


def start_of(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """Start of the generator for an epoch, uint64 (1,)."""
    return split_mix(np.array([seed % 2**64], np.uint64), np.array([epoch], np.uint64))


def split_mix(
    state: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Output of SplitMix64 started from ``state``, at zero-based ``position``."""
    mixed: npt.NDArray[np.uint64] = state + (position + np.uint64(1)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def fields(state: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Two independent integers below 2^24 out of each output of `split_mix`."""
    mask = np.uint64(2**FIELD_BITS - 1)
    return state & mask, state >> np.uint64(FIELD_BITS) & mask


def scaled(field: Tensor, choices: int | Tensor) -> Tensor:
    """Integers below ``choices`` from integers below 2^24, uniform to within choices / 2^24."""
    return field * choices >> FIELD_BITS
