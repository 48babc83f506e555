"""What those members name, which needs torch."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from batchwright.records import Job
from batchwright.workflows.run_training import Begun, train_here
from batchwright.workload.data.sources import ImageData, from_datasets


class Lion(torch.optim.Optimizer):
    """The sign of a momentum (Chen et al. 2023, arXiv 2302.06675)."""

    def __init__(self, params, lr: float, beta: float) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update."""
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["beta"])
                weight.sub_(momentum.sign(), alpha=group["lr"])


def lion(network: nn.Module, job: Job, rate: float) -> torch.optim.Optimizer:
    """As `OptimizerSpec.build` wants it."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return Lion(trained, rate, job.momentum)


def tiny(num_classes: int, *, dropout: float, top_resolution: int) -> nn.Module:
    """As `NetworkSpec.build` wants it."""
    del top_resolution
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(3, num_classes)
    )


def open_plates(job: Job, place: str, progress: object, verify: bool) -> ImageData:
    """As `DataSource.open` wants it; the place is how many images there are."""
    del progress, verify
    images, labels = torch.rand(int(place), 3, 8, 8), torch.arange(int(place)) % 2
    plates = TensorDataset(images, labels)
    return from_datasets(job.data, (plates, plates, ("no", "yes")))


def train_noted(run: Begun) -> None:
    """As `Launcher.train` wants it."""
    (run.folder / "noted.txt").write_text(f"{run.plan.method} on {run.plan.workers}")
    train_here(run)
