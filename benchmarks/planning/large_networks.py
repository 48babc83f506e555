"""Networks that Tula's paper trains, at the side of ImageNet: probed, planned, trained, checked.

ResNet-50, VGG-11, AlexNet and MobileNetV3 (large) as torchvision has them, imported by name as a
user would, on photographs of imagenette2-160 scaled to 224 px, two workers of one core each. One
command trains each, `batchwright run`, with 10 classes, at most 3 GiB for each worker's tensors, a
probe of 60 seconds without trials, and nothing else said: the plan chooses batch, optimizer and
rate. 320 training images are few, but what is compared are seconds and bytes: of an epoch as the
plan predicted it against the median of the epochs but the first, and of the largest peak of a
worker's tensors. An error is |predicted - measured| / measured. Two epochs with --quick, which
takes AlexNet and MobileNetV3, three with --full, which takes all.

torchvision is no dependency of the project, and has no build for CPUs: with that of PyTorch, its
compiled operators do not load. The networks need none of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from batchwright.records import RunSummary
from batchwright.records.run_folder import read_summary
from benchmarks.harness.benchmark import ROOT, Arguments, Benchmark, Found, refuse, say
from benchmarks.harness.figures import Figure
from benchmarks.harness.images import smaller_folder

NETWORKS = {
    "alexnet": "AlexNet",
    "mobilenet_v3_large": "MobileNetV3",
    "resnet50": "ResNet-50",
    "vgg11": "VGG-11",
}
QUICK = 2  # so many of them
SIDE, IMAGES, HELD_OUT, WORKERS = 224, 320, 80, 2
EPOCHS = {False: 2, True: 3}  # by --full
TIMEOUT_SECONDS = 900.0

BENCHMARK = Benchmark(
    "large_networks",
    "Networks of Tula's paper",
    "Photographs at 224 px, two workers of one core each, `batchwright run` with a probe of 60 "
    "seconds; spread: quartiles over the networks, or over the epochs",
    (
        Figure("large_epoch_error", "share", "median", "predicted against measured seconds of an "
               "epoch, median error", at_most=0.10),
        Figure("large_memory_error", "share", "median", "predicted against measured peak of a "
               "worker's tensors, median error", at_most=0.10),
        *(
            figure
            for name, words in NETWORKS.items()
            for figure in (
                Figure(f"images_per_second_{name}", "images/s", "median", f"{words}: training"),
                Figure(f"epoch_over_predicted_{name}", "ratio", "mean",
                       f"{words}: measured over predicted seconds of an epoch"),
                Figure(f"peak_over_predicted_{name}", "ratio", "mean",
                       f"{words}: measured over predicted peak"),
                Figure(f"chosen_batch_{name}", "samples", "mean", f"{words}: global batch chosen"),
            )
        ),
    ),
    needs_data="always",
    copies=True,
)  # fmt: skip


def _models() -> Any:
    """Torchvision's networks, also where its compiled operators do not load."""
    try:
        from torchvision import models
    except ModuleNotFoundError:
        refuse("torchvision not installed: pip install --no-deps torchvision==0.28.0 (torch 2.13)")
    except RuntimeError:  # torchvision declares what its own library would have defined
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        _KEPT.append(library)
        from torchvision import models
    return models


_KEPT: list[object] = []  # a library's operators go with it


def _network(name: str) -> Callable[[int], nn.Module]:
    """A function that a job's `network` may name."""

    def build(num_classes: int) -> nn.Module:
        network: nn.Module = getattr(_models(), name)(num_classes=num_classes)
        return network

    return build


alexnet, mobilenet_v3_large, resnet50, vgg11 = map(_network, NETWORKS)


def measure(arguments: Arguments, folder: Path) -> Found:
    """A run of each network."""
    _models()  # else the first run would miss them, once the images are made
    data = folder / "images"
    smaller_folder(arguments.data / "imagenette2-160", IMAGES, data, held_out=HELD_OUT)
    names = list(NETWORKS)[: None if arguments.full else QUICK]
    runs = {
        name: trained(name, data, EPOCHS[arguments.full], arguments.keep / name) for name in names
    }
    return found_of(runs), {name: told_of(one) for name, one in runs.items()}


def trained(name: str, data: Path, epochs: int, out: Path) -> RunSummary:
    """What `batchwright run` made of a network; a finished run in its folder is not made again."""
    if not (out / "summary.json").exists():
        say(f"{NETWORKS[name]}: batchwright run")
        words = {
            "data": f"imagefolder:{data}",
            "network": f"benchmarks.planning.large_networks:{name}",
            "resolutions": SIDE,
            "workers": WORKERS,
            "epochs": epochs,
            "evaluate_epochs": epochs,
            "goal.memory": 3 * 2**30,
            "probe.budget": 60,
            "probe.learning": 0,
        }
        keys = [f"{key}={value}" for key, value in words.items()]
        command = [sys.executable, "-m", "batchwright", "run", *keys, "--out", str(out)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT_SECONDS)
    return read_summary(out)


def found_of(runs: dict[str, RunSummary]) -> dict[str, list[float]]:
    """The figures of the runs, by network."""
    found: dict[str, list[float]] = {"large_epoch_error": [], "large_memory_error": []}
    for name, one in runs.items():
        told = told_of(one)
        epochs = median(told["epoch_seconds"]) / told["predicted_seconds"]
        peak = told["peak_bytes"] / told["predicted_bytes"]
        found["large_epoch_error"].append(abs(1 / epochs - 1))
        found["large_memory_error"].append(abs(1 / peak - 1))
        found |= {
            f"images_per_second_{name}": [told["images"] / s for s in told["epoch_seconds"]],
            f"epoch_over_predicted_{name}": [epochs],
            f"peak_over_predicted_{name}": [peak],
            f"chosen_batch_{name}": [told["global_batch"]],
        }
    return found


def told_of(run: RunSummary) -> dict[str, Any]:
    """What of a run is compared, and what was chosen."""
    (stage,) = run.plan.stages
    assert stage.predicted_epoch_seconds is not None
    assert stage.predicted_bytes is not None
    epochs = run.epochs[1:]
    return {
        "parameters": run.plan.network.parameters,
        "optimizer": run.plan.update,
        "precision": run.plan.precision,
        "global_batch": stage.global_batch_size,
        "images": epochs[0].samples,
        "predicted_seconds": stage.predicted_epoch_seconds.value,
        "predicted_seconds_interval": [
            stage.predicted_epoch_seconds.low,
            stage.predicted_epoch_seconds.high,
        ],
        "epoch_seconds": [round(one.training_seconds, 3) for one in epochs],
        "predicted_bytes": stage.predicted_bytes.value,
        "peak_bytes": max(one.peak_bytes or 0 for epoch in run.epochs for one in epoch.workers),
        "accuracy": run.accuracy,
    }


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
