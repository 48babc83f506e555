"""The steps of `benchmarks.gpu`, in their order; `benchmarks.gpu.steps` runs them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A step of the programme: its name, its time limit, and what it measures."""

    name: str
    minutes: float
    words: str


FIRST = (
    Step("machine", 1, "the machine: GPU, memory, versions"),
    Step("tests", 7, "pytest -m gpu: whether the CUDA path works"),
    Step("speed-32", 5, "images/s of our loop against plain steps, Lightning, resnet18, 32 px"),
    Step("predictions", 6, "errors of predicted step time and memory; batches around the limit"),
    Step("speed-224", 5, "images/s of our loop against plain steps, Lightning, resnet50, 224 px"),
    Step("autocast", 2, "step time in bfloat16 against float32"),
    Step("server", 3, "two batch sizes with a server beside one GPU, against a run without"),
    Step("virtual", 5, "virtual cluster of four, resnet18, 0 and 3 workers with the small batch"),
    Step("accuracy", 7, "seconds to an accuracy against a plain script"),
    Step("card", 4, "batch at which the whole memory of the GPU runs out"),
)
"""Most valuable first; the limits add up to 45 minutes, and none is longer than 8."""

AFTERWARDS = (
    Step("papers", 5, "a tenth of the papers' trainings: hybrid and large batches; two warm-ups"),
    Step("hybrid-3", 8, "hybrid, resnet18, 140 epochs, 3 of 4 workers with the small batch"),
    Step("large", 8, "large batches, resnet18, 140 epochs, 32 px"),
    Step("hybrid-0", 8, "large batches, resnet18, 140 epochs, through 24 and 32 px"),
    Step("dual-3", 8, "3 of 4 workers with the small batch, resnet18, 140 epochs, 32 px"),
    Step("poster", 8, "warm-ups of the poster, all of CIFAR-100, at least 1,000 steps"),
)
"""Trainings at the papers' scale, 45 minutes more; each ends within its step's limit."""

STEPS = FIRST + AFTERWARDS
