"""The steps of `benchmarks.gpu`, in their order; `benchmarks.gpu.steps` takes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A step of the programme: its name, its limit, what it tells."""

    name: str
    minutes: float
    words: str


FIRST = (
    Step("machine", 1, "what all else is measured on"),
    Step("tests", 7, "pytest -m gpu: does the CUDA path work at all"),
    Step("speed-32", 5, "our loop against plain steps and Lightning, resnet18 at 32 px"),
    Step("predictions", 6, "step, memory and batch limit, memory really running out"),
    Step("speed-224", 5, "the same speeds, resnet50 at 224 px"),
    Step("autocast", 2, "bfloat16 against float32"),
    Step("server", 3, "dual batch with the server beside one GPU, against a run without one"),
    Step("virtual", 5, "a virtual cluster of four, resnet18, 0 and 3 workers on the small batch"),
    Step("accuracy", 7, "time to accuracy against a plain script"),
    Step("card", 4, "the batch at which the whole memory of the GPU runs out"),
)
"""Most valuable first; the limits add up to 45 minutes, and none is longer than 8."""

AFTERWARDS = (
    Step("papers", 5, "the papers' trainings in short: hybrid and large batches, two warm-ups"),
    Step("hybrid-3", 8, "the papers' scale: hybrid, resnet18, 140 epochs, 3 of 4 small batches"),
    Step("large", 8, "the same with large batches alone, at 32 px"),
    Step("hybrid-0", 8, "large batches alone, through 24 and 32 px"),
    Step("dual-3", 8, "3 of 4 small batches, at 32 px"),
    Step("poster", 8, "warm-ups of the poster, full CIFAR-100, a thousand steps and more"),
)
"""What the papers' own scale takes, 45 minutes more; each training ends within its step."""

STEPS = FIRST + AFTERWARDS
