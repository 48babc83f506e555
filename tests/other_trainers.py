"""What tests inside other people's trainers share: samples, and the comparison of two trainings."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 61, 8


def data(samples=SAMPLES):
    """Inputs, labels and numbers."""
    random = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 6, generator=random)
    return TensorDataset(
        inputs, torch.randint(3, (samples,), generator=random), torch.arange(samples)
    )


def loader(batch=BATCH, **how):
    return DataLoader(data(), batch, **{"shuffle": True, **how})


def alike(one, other, rtol=1e-4):
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-6)


def closed():
    """Leave the process group and accelerate's state as they were before a training."""
    import accelerate  # here, as it takes long

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
