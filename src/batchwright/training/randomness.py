"""Random numbers of one process that a run can go on with: Python's, NumPy's and PyTorch's.

A training loop of a user's own may draw from any of the three, for dropout as for mixing images.
States are kept as tensors and plain values, as checkpoints need them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_STREAM = 1  # apart from the data set's items, whose seeds come from (seed, epoch, index)


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all generators; of the GPU's too where ``device`` is one."""
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
    """Go on from what `random_states` gave."""
    torch.set_rng_state(states["torch"])
    if states["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], device)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy = states["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})  # noqa: NPY002


def seed_worker(seed: int, steps: int, rank: int) -> None:
    """Seed all generators from the job's seed, the steps taken so far and the worker."""
    sequence = np.random.SeedSequence((seed, steps, rank), spawn_key=(_STREAM,))
    number = int(sequence.generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)  # the GPUs' too
