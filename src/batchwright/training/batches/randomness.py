"""States of one process's random generators, for a run to go on with: Python, NumPy, PyTorch.

A training loop of a user's own may draw from any of the three, for dropout as for mixing images.
States are kept as tensors and plain values, as checkpoints need them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_STREAM = 1  # spawn key of workers, apart from other uses of the job's seed
_BITS = 2**64 - 1


def random_states(device: torch.device) -> dict[str, Any]:
    """States of all generators, of the GPU's too if ``device`` is one."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - the user's code may draw from it
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": (version, torch.tensor(words), gauss),
        "numpy": {**numpy, "state": {**numpy["state"], "key": key}},
    }


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_states` returned."""
    torch.set_rng_state(states["torch"])
    if states["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], device)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy = states["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})  # noqa: NPY002


def seed_item(seed: int, epoch: int, index: int) -> None:
    """Seed all generators except a GPU's for one item of a data set.

    The seeds are halves of one 64-bit output of SplitMix64, so that NumPy's and PyTorch's streams,
    which are of one kind, differ. That takes microseconds (docs/log.md, seeds of items).

    References:
        Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators, OOPSLA.
    """
    number = _split_mix(_split_mix(_split_mix(0, seed), epoch), index)
    random.seed(number)
    np.random.seed(number >> 32)  # noqa: NPY002 - the user's code may draw from it
    torch.default_generator.manual_seed(number & 0xFFFFFFFF)


def _split_mix(state: int, position: int) -> int:
    """Output of SplitMix64 started from ``state``, at zero-based ``position``."""
    mixed = state + (position + 1) * 0x9E3779B97F4A7C15 & _BITS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _BITS
    return mixed ^ mixed >> 31


def seed_worker(seed: int, steps: int, rank: int) -> None:
    """Seed all generators from the job's seed, the steps taken so far and the worker."""
    sequence = np.random.SeedSequence((seed, steps, rank), spawn_key=(_STREAM,))
    number = int(sequence.generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)  # the GPUs' too
