"""Networks to which something happens as they are probed, for `test_probe_workers`."""

import os
import signal
import time

import torch
from torch import nn


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


class Slow(nn.Module):
    """Takes its time for each step of training."""

    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.Linear(9, num_classes))

    def forward(self, images):
        if self.training:
            time.sleep(0.04)
        return self.layers(images)


class Broken(Deadly):
    """Cannot be trained."""

    def forward(self, images):
        if self.training:
            raise ValueError("no such thing")
        return self.layers(images)
