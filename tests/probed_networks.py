"""Networks and data to which something happens as they are probed, for `test_probe_workers`."""

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info


class Deadly(nn.Module):
    """Kills the process of a worker where a batch is too large, as the kernel would."""

    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
        self.layers(torch.zeros(1, 3, 8, 8))

    def forward(self, images):
        if self.training and len(images) >= int(os.environ["DEADLY_BATCH"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layers(images)


class Small(nn.Module):
    """Two layers."""

    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.Linear(9, num_classes))

    def forward(self, images):
        if self.training:
            self.wait()
        return self.layers(images)

    def wait(self):
        """Something that a step of training waits for."""


class Slow(Small):
    """Takes its time for each step of training."""

    def wait(self):
        time.sleep(0.04)


class Held(Small):
    """Stands still while a file ``held`` names a profile that has a trial: in the second one."""

    def wait(self):
        profile = Path(Path("held").read_text(encoding="utf-8")) if Path("held").exists() else None
        if profile and profile.exists() and json.loads(profile.read_text("utf-8")).get("trials"):
            time.sleep(300)


class Broken(Deadly):
    """Cannot be trained."""

    def forward(self, images):
        if self.training:
            raise ValueError("no such thing")
        return self.layers(images)


class Unshared(Dataset):
    """Images that no loader process can hand over, as where shared memory is too small."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGBUS)
        return torch.zeros(3, 8, 8), index % 10


def unshared_images():
    """The same to train on and held out."""
    return Unshared(), Unshared(), tuple("0123456789")
