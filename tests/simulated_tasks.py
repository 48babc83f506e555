"""A tiny task, with everything that makes workers differ, for tests of virtual training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from batchwright.records import LearningRateRule, Plan, Stage
from batchwright.training.loop import Task
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.task import build_optimizer
from samples import make_data, make_job, make_plan
from servers import make_rule

CPU = torch.device("cpu")
SAMPLES, HELD_OUT, SIDE = 90, 40, 8
RULE = LearningRateRule(
    base=0.1, base_batch=16, scaling="none", peak=0.1, warmup_epochs=1, decay="cosine"
)


class Net(nn.Module):
    """Batch normalization and dropout: buffers and random numbers of a worker's own."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()
        )
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(24, 3)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(images))


def make_images(samples: int, seed: int) -> ImageStore:
    """Noise, a little brighter in the class's colour."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 3
    images = torch.randint(0, 160, (samples, SIDE, SIDE, 3), generator=generator)
    images[torch.arange(samples), ..., labels] += 60
    return ImageStore.from_images(images.to(torch.uint8), labels)


def make_pipeline(samples: int, seed: int, device: torch.device = CPU) -> ImagePipeline:
    return ImagePipeline(
        make_images(samples, seed),
        device=device,
        side=SIDE,
        mean=(0.4,) * 3,
        std=(0.25,) * 3,
        augmentation="crop-flip",
        seed=0,
    )


def make_task(*, dropout: float = 0.3) -> Task:
    torch.manual_seed(0)
    network = Net(dropout)
    return Task(
        network=network,
        optimizer=build_optimizer(network, make_job(), RULE.base),
        loss=functional.cross_entropy,
        training=make_pipeline(SAMPLES, 1),
        held_out=make_pipeline(HELD_OUT, 2),
        sample_weights=None,
    )


def make_virtual_plan(
    batches: tuple[int, ...] = (8, 8),
    *,
    consistency: str | None = None,
    shares: tuple[int, ...] = (),
    factors: tuple[float, ...] = (),
    epochs: int = 3,
    micro: int = 64,
    dropout: float = 0.3,
    rule: dict[str, Any] | None = None,
    virtual: dict[str, Any] | None = None,
    **job: Any,
) -> Plan:
    """A plan for the task; with ``consistency`` through a parameter server."""
    workers = len(batches)
    stage = Stage(
        epochs=epochs,
        resolution=SIDE,
        learning_rate=RULE.peak,
        dropout=dropout,
        augmentation="crop-flip",
        samples_per_round=(shares or (SAMPLES // workers,) * workers) if consistency else (),
        update_factors=(factors or (1.0,) * workers) if consistency else (),
        local_batch_sizes=batches,
        micro_batch_size=micro,
    )
    method = job.pop("method", "dual-batch" if consistency else "plain")
    return make_plan(
        job=make_job(
            workers=workers,
            launch="virtual",
            method=method,
            virtual={"sample_seconds": 0.01, "step_seconds": 0.05, **(virtual or {})},
            **job,
        ),
        data=make_data(train_samples=SAMPLES, val_samples=HELD_OUT, classes=tuple("abc")),
        method=method,
        merge="parameter server" if consistency else "sample-weighted all-reduce",
        server=make_rule(consistency, **(rule or {})) if consistency else None,
        precision="float32",
        learning_rate=RULE,
        stages=(stage,),
        considered=(),
        reasons=(),
    )
