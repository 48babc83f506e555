"""The steps of `benchmarks.gpu`, one a function; each writes what it finds as it goes.

python -m benchmarks.gpu.steps NAME --out FOLDER [--data DIR] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw
from batchwright.prediction.memory import max_local_batch_size
from batchwright.probing.measure.timing import now
from batchwright.probing.probe import measure_points
from batchwright.records import Job, Plan
from batchwright.training.parameter_server.merging import pack, unpack
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.host import arithmetic, enter, resolve_device
from batchwright.workload.task import build_network, build_optimizer, set_training
from benchmarks.harness.benchmark import ROOT, batchwright
from benchmarks.harness.kept_runs import append_line, read_lines
from benchmarks.harness.plans import ENDLESS, facts_of, fixed_plan, job_from, made_up_data

CLASSES = 100
MIDDLE = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Here:
    """Where a step runs and what it is to take.

    Attributes:
        name: The step's.
        out: Folder that takes what is found.
        data: Folder with ``cifar-100-python/``; ``None``: there is none.
        tiny: Whether all is in little, to show that it works.
    """

    name: str
    out: Path
    data: Path | None
    tiny: bool

    @cached_property
    def device(self) -> torch.device:
        """A GPU, or in little whatever there is."""
        return enter(resolve_device("auto" if self.tiny else "cuda"))

    @property
    def kind(self) -> str:
        """The key ``device`` of a job."""
        return self.device.type

    def found(self, what: str, value: Any) -> None:
        """Write a finding."""
        line = {"what": what, "value": value, "time": round(time.time()), "tiny": self.tiny}
        append_line(self.out / f"{self.name}.jsonl", line)

    def has(self, what: str) -> bool:
        """Whether an earlier start has found it."""
        return any(one["what"] == what for one in read_lines(self.out / f"{self.name}.jsonl"))


@dataclass(frozen=True)
class Step:
    """A step of the programme: its name, its limit, what it tells, and how it is taken."""

    name: str
    minutes: float
    words: str
    take: Callable[[Here], None]


def tests(here: Here) -> None:
    """All tests that need a GPU."""
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    here.found("pytest -m gpu", done.stdout.strip().splitlines()[-1])
    if done.returncode not in (0, 5):
        raise SystemExit(done.returncode)


# ------------------------------------------------------------------------------------------ speed


def speed_32(here: Here) -> None:
    """`resnet18` at 32 px."""
    _speed(here, "resnet18", 32, 256)


def speed_224(here: Here) -> None:
    """`resnet50` of torchvision at 224 px."""
    network = "torchvision.models:resnet50" if find_spec("torchvision") else "resnet18"
    _speed(here, network, 224, 64)


def _speed(here: Here, network: str, side: int, batch: int) -> None:
    """Images per second of our loop and of others, in turns, in each number format."""
    if here.tiny:
        network, side, batch = "resnet8", 8, 16
    here.found("arithmetic", arithmetic(here.device) or "that of the CPU")
    steps, rounds = (3, 2) if here.tiny else (30, 6)
    for precision in ("bfloat16", "float32"):
        arms = {name: arm(here, network, side, batch, precision) for name, arm in ARMS.items()}
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for round_ in range(rounds):
            order = list(arms) if round_ % 2 else list(arms)[::-1]
            for name in order:
                for _ in range(2 if here.tiny else 8):  # what a pause has changed passes
                    next(arms[name])
                began = now(here.device)
                for _ in range(steps):
                    next(arms[name])
                rates[name].append(batch * steps / (now(here.device) - began))
        for name, each in rates.items():
            here.found(f"{network}, {side} px, {precision}, {name}: images/s", median(each))
        for name in set(rates) - {"session"}:
            ratio = median(a / b for a, b in zip(rates["session"], rates[name], strict=True))
            here.found(f"{network}, {side} px, {precision}: session over {name}", ratio)


def _plan(here: Here, network: str, side: int, batch: int, precision: str) -> Plan:
    job = job_from(
        f"network={network} device={here.kind} launch=in-process workers=1 precision={precision} "
        f"global_batch={batch} micro_batch={batch} base_batch={batch} learning_rate=0.05 "
        f"scaling=none warmup_epochs=0 decay=none epochs={ENDLESS} resolutions={side} "
        f"augment=crop-flip checkpoint_seconds={ENDLESS}"
    )
    facts = made_up_data("made up", 8 * batch, CLASSES, side)
    return fixed_plan(job, facts, facts_of(network, CLASSES, side), batches=(batch,))


def _images(samples: int, side: int) -> ImageStore:
    random = torch.Generator().manual_seed(0)
    shape = (samples, side, side, 3)
    images = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    return ImageStore.from_images(images, torch.arange(samples) % CLASSES)


def _network(here: Here, plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    side = plan.top_resolution
    network = build_network(plan.job.network, classes=CLASSES, side=side, seed=0).to(here.device)
    set_training(network)
    return network, build_optimizer(network, plan.job, 0.05)


def session(here: Here, network: str, side: int, batch: int, precision: str) -> Iterator[None]:
    """Our loop; a step at each turn."""
    plan = _plan(here, network, side, batch, precision)
    model, optimizer = _network(here, plan)
    pipeline = ImagePipeline(
        _images(8 * batch, side), device=here.device, side=side, mean=MIDDLE, std=MIDDLE,
        augmentation="crop-flip", seed=0,
        dtype=torch.bfloat16 if precision == "bfloat16" else torch.float32,
    )  # fmt: skip
    with bw.Session(model, optimizer, pipeline, plan=plan) as training:
        for _ in training.epochs():
            for images, labels in training.batches():
                training.step(functional.cross_entropy(model(images), labels))
                yield


def plain(here: Here, network: str, side: int, batch: int, precision: str) -> Iterator[None]:
    """The same steps on one batch that is there, with nothing around them."""
    model, optimizer = _network(here, _plan(here, network, side, batch, precision))
    images = torch.randn(batch, 3, side, side, device=here.device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.arange(batch, device=here.device) % CLASSES
    enabled = precision == "bfloat16"
    while True:
        with torch.autocast(here.kind, dtype=torch.bfloat16, enabled=enabled):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def lightning(here: Here, network: str, side: int, batch: int, precision: str) -> Iterator[None]:
    """Lightning's Fabric with a loader, as it is usually started."""
    import lightning

    kind = "bf16-mixed" if precision == "bfloat16" else "32-true"
    fabric = lightning.Fabric(accelerator=here.kind, devices=1, precision=kind)
    plan = _plan(here, network, side, batch, precision)
    model, optimizer = fabric.setup(*_network(here, plan))
    store = _images(8 * batch, side)
    assert store.images is not None
    images = store.images.permute(0, 3, 1, 2).float() / 127.5 - 1
    data = TensorDataset(images, store.labels)
    loader = fabric.setup_dataloaders(DataLoader(data, batch, shuffle=True, drop_last=True))
    while True:
        for some, labels in loader:
            loss = functional.cross_entropy(model(some), labels)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield


ARMS = {"session": session, "resident batch": plain}
if find_spec("lightning"):
    ARMS["lightning"] = lightning


# ------------------------------------------------------------------------------------ predictions


def predictions(here: Here) -> None:
    """Step time and memory against measurements, and the batch at which memory really runs out."""
    job = _probed(here, 60)
    profile = bw.probe(job)
    check = bw.check(bw.plan(profile), points=2 if here.tiny else 6)
    for point in check.points:
        where = f"{point.quantity}, batch {point.local_batch_size}, {point.resolution} px"
        here.found(f"{where}: error of the prediction", point.error)
        here.found(f"{where}: inside its interval", point.inside)
    side = max(point.resolution for point in profile.memory)
    free = profile.cluster.memory_bytes
    limit = int(1.5 * max(one.peak_bytes for one in profile.memory)) if here.tiny else free
    most = max_local_batch_size(profile, limit=limit, resolution=side, workers=1)
    here.found(f"largest batch that fits {limit / 2**20:.0f} MiB, predicted", most)
    folder = here.out / "limits"
    folder.mkdir(exist_ok=True)
    for factor in (0.97, 1.0, 1.05):
        batch = max(2, int(factor * most))
        found = measure_points(job, [(1, side, batch)], folder, visits=1)
        peak = found.memory[0].peak_bytes if found.memory else None
        told = "does not fit" if peak is None else f"{peak / limit:.3f} of the limit"
        here.found(f"batch {batch} ({factor:g} of it) takes", told)


def _data(here: Here) -> str:
    return "digits" if here.data is None else f"cifar100:{here.data / 'cifar-100-python'}"


def _probed(here: Here, budget: float) -> Job:
    network, epochs, budget = ("resnet8", 2, 5) if here.tiny else ("resnet18", 100, budget)
    words = f"network={network} device={here.kind} launch=in-process workers=1 epochs={epochs}"
    return job_from(words, data=_data(here), probe={"budget": budget, "learning": 0})


def autocast(here: Here) -> None:
    """The number format that the probe chooses, and what a step takes in each."""
    profile = bw.probe(_probed(here, 30))
    here.found("number format chosen", profile.job.precision)
    for one in profile.precisions:
        here.found(f"{one.precision}, batch {one.local_batch_size}: s a step", one.step_seconds)


# ----------------------------------------------------------------------------------------- methods


def server(here: Here) -> None:
    """What a round with a parameter server costs a GPU: weights to the host and back."""
    network = "resnet8" if here.tiny else "resnet18"
    model = build_network(network, classes=CLASSES, side=32, seed=0).to(here.device)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    for name, work in (("handed in", lambda: pack(model)), ("taken", None)):
        weights = pack(model)
        call = work or (lambda kept=weights: unpack(kept, model))
        call()
        seconds = []
        for _ in range(3 if here.tiny else 20):
            began = now(here.device)
            call()
            seconds.append(now(here.device) - began)
        here.found(f"{network}, {size / 2**20:.1f} MiB {name}: s", median(seconds))


def virtual(here: Here) -> None:
    """Dual batch on a virtual cluster of four, with 0 and 3 workers on the small batch."""
    network, epochs = ("resnet8", 1) if here.tiny else ("resnet18", 3)
    for small in (0, 3):
        what = f"{network}, {small} of 4 workers with the small batch"
        if here.has(f"{what}: accuracy"):
            continue
        method = ["method=dual-batch", f"dual.small_workers={small}"] if small else ["method=plain"]
        began = time.monotonic()
        result = batchwright(
            "run", f"data={_data(here)}", f"network={network}", f"device={here.kind}",
            *method, "launch=virtual", "workers=4", f"epochs={epochs}", "probe.learning=0",
            f"probe.budget={5 if here.tiny else 20}", "--out", here.out / f"virtual-{small}",
            cwd=here.out,
        )  # fmt: skip
        here.found(f"{what}: real seconds", time.monotonic() - began)
        here.found(f"{what}: accuracy", result["test_accuracy"])


def accuracy(here: Here) -> None:
    """Seconds to an accuracy, probe and all, and those of a plain script to the same."""
    if here.data is None and not here.tiny:
        here.found("left out", "no --data")
        return
    target, epochs = (0.9, 30) if here.data is None or here.tiny else (0.5, 60)
    began = time.monotonic()
    result = batchwright(
        "run", f"data={_data(here)}", "network=resnet8", f"device={here.kind}",
        f"goal.accuracy={target}", f"epochs={epochs}",
        *(["probe.budget=5", "probe.learning=0"] if here.tiny else []),
        "--out", here.out / "accuracy", cwd=here.out,
    )  # fmt: skip
    here.found(f"seconds to {target:g} with `batchwright run`", time.monotonic() - began)
    here.found("accuracy at the end", result["test_accuracy"])
    if here.data is None or here.tiny:
        return
    words = [
        *(sys.executable, "-m", "benchmarks.planning.plain_torch", "--data", _data(here)),
        *("--network", "resnet8", "--side", "32", "--epochs", "30", "--rate", "0.1"),
        *("--loaders", "8"),
    ]
    began = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as script:
        assert script.stdout is not None
        for line in script.stdout:
            if json.loads(line)["accuracy"] >= target:
                here.found(f"seconds to {target:g} with a plain script", time.monotonic() - began)
                break
        script.kill()


STEPS = (
    Step("tests", 8, "pytest -m gpu: does the CUDA path work at all", tests),
    Step("speed-32", 6, "our loop against plain steps and Lightning, resnet18 at 32 px", speed_32),
    Step("predictions", 7, "step, memory and batch limit, memory really running out", predictions),
    Step("speed-224", 6, "the same speeds, resnet50 at 224 px", speed_224),
    Step("autocast", 3, "bfloat16 against float32", autocast),
    Step("server", 2, "dual batch: a parameter server beside one GPU", server),
    Step("virtual", 6, "virtual cluster, resnet18, 0 and 3 workers with small batches", virtual),
    Step("accuracy", 7, "time to accuracy against a plain script", accuracy),
)
"""Most valuable first; the limits add up to 45 minutes."""


def main() -> None:
    """Take one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[one.name for one in STEPS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    (step,) = (one for one in STEPS if one.name == asked.name)
    step.take(Here(step.name, asked.out, asked.data, asked.tiny))


if __name__ == "__main__":
    main()
