"""The networks of Tula's paper at ImageNet's resolution: are time and memory predicted correctly?

ResNet-50, VGG-11, AlexNet and MobileNetV3 (large) are torchvision's, and a job names them by their
import path, as a user would. Images are photographs of imagenette2-160 scaled to 224 px; two
workers have one core each. Each network is trained by one command, `batchwright run`, with 10
classes, at most 3 GiB for the tensors of each worker and a probe of 60 seconds without trials; the
plan chooses batch, optimizer and rate. 320 training images are few, but accuracy is not compared.

Compared are the predicted seconds of an epoch with the median of the measured epochs without the
first, and the predicted peak memory of a worker's tensors with the largest measured one. An error
is |predicted - measured| / measured. --quick trains AlexNet and MobileNetV3 for two epochs, --full
all networks for three.

torchvision is no dependency of the project. It has no CPU build; its standard build installs beside
the CPU build of PyTorch, but its compiled operators do not load there. These networks use none of
them.
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
QUICK = 2  # networks with --quick, the first of `NETWORKS`
SIDE, IMAGES, HELD_OUT, WORKERS = 224, 320, 80, 2
EPOCHS = {False: 2, True: 3}  # by --full
TIMEOUT_SECONDS = 900.0

BENCHMARK = Benchmark(
    "large_networks",
    "Networks of Tula's paper",
    "Photographs at 224 px, two workers of one core each, `batchwright run` with a probe of 60 "
    "seconds. An error is |predicted - measured| / measured. Spread: quartiles over the networks, "
    "or over the epochs",
    (
        Figure("large_epoch_error", "share", "median", "error of the predicted seconds of an "
               "epoch, median of four networks", at_most=0.10),
        Figure("large_memory_error", "share", "median", "error of the predicted peak memory of a "
               "worker's tensors, median of four networks", at_most=0.10),
        *(
            figure
            for name, words in NETWORKS.items()
            for figure in (
                Figure(f"images_per_second_{name}", "images/s", "median",
                       f"{words}: training speed"),
                Figure(f"epoch_over_predicted_{name}", "ratio", "mean",
                       f"{words}: measured over predicted seconds of an epoch"),
                Figure(f"peak_over_predicted_{name}", "ratio", "mean",
                       f"{words}: measured over predicted peak memory of a worker's tensors"),
                Figure(f"chosen_batch_{name}", "samples", "mean",
                       f"{words}: global batch that the plan chose"),
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
    """A function that builds one of torchvision's networks, for a job's `network`."""

    def build(num_classes: int) -> nn.Module:
        network: nn.Module = getattr(_models(), name)(num_classes=num_classes)
        return network

    return build


alexnet, mobilenet_v3_large, resnet50, vgg11 = map(_network, NETWORKS)


def measure(arguments: Arguments, folder: Path) -> Found:
    """Run each network and compare with its plan."""
    _models()  # refuses at once where torchvision is missing, not only in the first run
    data = folder / "images"
    smaller_folder(arguments.data / "imagenette2-160", IMAGES, data, held_out=HELD_OUT)
    names = list(NETWORKS)[: None if arguments.full else QUICK]
    runs = {
        name: trained(name, data, EPOCHS[arguments.full], arguments.keep / name) for name in names
    }
    return found_of(runs), {name: told_of(one) for name, one in runs.items()}


def trained(name: str, data: Path, epochs: int, out: Path) -> RunSummary:
    """The summary of `batchwright run` on a network; a finished run in ``out`` is reused."""
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
    """All figures, by name, from a run of each network."""
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
    """What a report has of a run: predicted and measured values, and what the plan chose."""
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
