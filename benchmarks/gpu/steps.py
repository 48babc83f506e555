"""The steps of `benchmarks.gpu`, a function for each, which writes its findings as it runs.

python -m benchmarks.gpu.steps NAME --out DIR --work DIR --commit NAME [--data DIR] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw
from batchwright.prediction.memory import max_local_batch_size
from batchwright.probing.measure.timing import now
from batchwright.probing.probe import measure_points
from batchwright.records import Job, Plan, Profile, RunSummary
from batchwright.records.documents import read_record, write_record
from batchwright.training.parameter_server.merging import pack, unpack
from batchwright.workload.data.arrays import EDITIONS
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.host import arithmetic, dtype_of, enter, resolve_device
from batchwright.workload.task import build_network, build_optimizer, set_training
from benchmarks.gpu import papers
from benchmarks.gpu.findings import AGAIN, BEGAN, COMMIT, FAILED, FOLDER, SECONDS, Findings
from benchmarks.harness.benchmark import ROOT, batchwright
from benchmarks.harness.plans import ENDLESS, facts_of, fixed_plan, job_from, made_up_data

CLASSES = 100
MIDDLE = (0.5, 0.5, 0.5)
CAP = 24 * 2**30  # most bytes of a GPU for the step that exceeds its memory limit
WARM_UP = 14  # untimed first steps of an arm; graphs are recorded after the first ten
TINY_BUDGET = 1  # seconds of a probe with --tiny


@dataclass(frozen=True)
class Here:
    """The context of a step.

    Attributes:
        name: Name of the step.
        findings: Records the step's findings.
        work: Folder for all other files; it may be deleted after the command.
        data: Folder with ``cifar-100-python/``; ``None``: images are made up.
        tiny: Whether a tiny version runs, to show that the programme works.
    """

    name: str
    findings: Findings
    work: Path
    data: Path | None
    tiny: bool

    @cached_property
    def device(self) -> torch.device:
        """A GPU; with ``tiny`` the CPU where there is none."""
        return enter(resolve_device("auto" if self.tiny else "cuda"))

    @property
    def kind(self) -> str:
        """The key ``device`` of a job."""
        return self.device.type

    def found(self, what: str, value: Any) -> None:
        """Record a finding."""
        self.findings.add(self.name, what, value)

    def has(self, what: str) -> bool:
        """Whether a finding of this name is recorded already."""
        return what in self.findings.of(self.name)

    def image_data(self) -> str:
        """A job's key `data`: CIFAR-100, or as many made-up images of its size."""
        if self.data is not None:
            return f"cifar100:{self.data}"
        folder = self.work / EDITIONS["cifar100"].folder
        if not folder.exists():
            _make_up(folder, 2_000 if self.tiny else 50_000)
        return f"cifar100:{self.work}"


def _make_up(folder: Path, samples: int) -> None:
    """Write files in CIFAR-100's format, with noisy images of a pattern for each class."""
    random = np.random.default_rng(0)
    patterns = random.normal(size=(CLASSES, 3, 4, 4)).repeat(8, axis=2).repeat(8, axis=3)
    edition = EDITIONS["cifar100"]
    aside = folder.with_suffix(".writing")
    aside.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", samples), ("test", samples // 5)):
        labels = random.permutation(np.arange(count) % CLASSES)
        pixels = random.normal(scale=40, size=(count, 3, 32, 32)).astype(np.float32)
        pixels += 10 * patterns[labels].astype(np.float32) + 128
        flat = pixels.clip(0, 255).astype(np.uint8).reshape(count, -1)
        content = {"data": flat, edition.label_key: labels.tolist()}
        (aside / name).write_bytes(pickle.dumps(content, 4))
    names = {edition.name_key: [f"class {number}" for number in range(CLASSES)]}
    (aside / "meta").write_bytes(pickle.dumps(names, 4))
    aside.rename(folder)


def machine(here: Here) -> None:
    """Record the machine: GPU, memory, versions."""
    here.found("Python", platform.python_version())
    here.found("PyTorch", torch.__version__)
    here.found("cores", len(os.sched_getaffinity(0)))
    here.found("arithmetic", arithmetic(here.device) or "that of the CPU")
    for name, without in (
        (FABRIC, "speeds are compared with plain steps alone"),
        ("torchvision", "resnet18 stands in for resnet50"),
    ):
        failure = why_not(name)
        here.found(name, f"{without} ({failure})" if failure else "there")
    if here.kind != "cuda":
        return
    about = torch.cuda.get_device_properties(here.device)
    free, whole = torch.cuda.mem_get_info(here.device)
    here.found("GPU", f"{about.name}, compute capability {about.major}.{about.minor}")
    here.found("memory, GiB", f"{whole / 2**30:.1f}, {free / 2**30:.1f} of it free")
    here.found("CUDA", torch.version.cuda)
    here.found("cuDNN", torch.backends.cudnn.version())
    here.found("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def tests(here: Here) -> None:
    """Run all tests that need a GPU, and record each as it ends; see `pytest_plugin`."""
    resolve_device("auto" if here.tiny else "cuda")  # else all are skipped, and count as done
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").glob("test_*.py")
        if "mark.gpu" in path.read_text(encoding="utf-8")
    )
    words = [
        *(sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "--capture=sys"),
        *("-o", "addopts=", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.pytest_plugin"),
        *("--continue-on-collection-errors", *files),
    ]
    told = {FOLDER: str(here.findings.folder), COMMIT: here.findings.commit}
    for name, value in here.findings.of(here.name).items():
        if str(value).startswith(FAILED):  # in an earlier command: it gets another chance
            here.found(name, BEGAN)
    code = AGAIN
    while code == AGAIN:
        code = subprocess.run(words, cwd=ROOT, env={**os.environ, **told}, check=False).returncode
        for name, value in here.findings.of(here.name).items():
            if value == BEGAN:
                here.found(name, f"{FAILED}took {SECONDS} s, or ended the process")
                code = AGAIN
    found = here.findings.of(here.name).values()
    if code not in (0, 1, 5) or any(str(value).startswith(FAILED) for value in found):
        raise SystemExit(1)


# ------------------------------------------------------------------------------------------ speed


def speed_32(here: Here) -> None:
    """Time `resnet18` at 32 px."""
    _overhead(here)
    _speed(here, "resnet18", 32, 256)


def speed_224(here: Here) -> None:
    """Time torchvision's `resnet50` at 224 px."""
    network = large_network()
    _speed(here, network, 224, 64)


def _overhead(here: Here) -> None:
    """Host time of our step minus that of a plain one, on a batch that hardly occupies the GPU."""
    what = "resnet18, 32 px, batch 8: ms of a step that are ours"
    if here.has(what):
        return
    network, side = ("resnet8", 8) if here.tiny else ("resnet18", 32)
    arms = {name: ARMS[name](here, network, side, 8, "float32") for name in ("session", PLAIN)}
    rates = _rates(here, arms, 8, "resnet18, 32 px, batch 8")
    here.found(what, 1000 * (8 / median(rates["session"]) - 8 / median(rates[PLAIN])))


def _speed(here: Here, network: str, side: int, batch: int) -> None:
    """Time our loop and others, in turns, in each number format: images per second."""
    if here.tiny:
        network, side, batch = "resnet8", 8, 16
    for precision in ("bfloat16", "float32"):
        where = f"{network}, {side} px, {precision}"
        if here.has(f"{where}: session over {PLAIN}"):
            continue
        every = ARMS if why_not(FABRIC) else ARMS | OTHERS
        arms = {name: arm(here, network, side, batch, precision) for name, arm in every.items()}
        rates = _rates(here, arms, batch, where)
        del arms
        for name, each in rates.items():
            here.found(f"{where}, {name}: images/s", median(each))
        for name in sorted(set(rates) - {"session"}):
            ratios = [a / b for a, b in zip(rates["session"], rates[name], strict=True)]
            here.found(f"{where}: session over {name}, in each turn", ratios)
            here.found(f"{where}: session over {name}", median(ratios))


def _rates(
    here: Here, arms: dict[str, Iterator[None]], batch: int, where: str
) -> dict[str, list[float]]:
    """Images per second of each arm, turn by turn.

    An arm that fails is recorded and left out; without ``session`` or `PLAIN` the step fails.
    """
    steps, rounds = (3, 2) if here.tiny else (20, 12)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(rounds):
        order = list(rates) if round_ % 2 else list(rates)[::-1]
        for name in order:
            try:
                # Untimed steps after the pause.
                for _ in range(2 if here.tiny else WARM_UP if round_ == 0 else 8):
                    next(arms[name])
                began = now(here.device)
                for _ in range(steps):
                    next(arms[name])
                rates[name].append(batch * steps / (now(here.device) - began))
            except Exception as error:  # whatever a peer raises must not cost our figures
                if name in ("session", PLAIN):
                    raise
                here.found(f"{where}, {name}: failed", _in_a_line(error))
                del rates[name], arms[name]  # with its loader processes and its memory
    return rates


def _plan(
    here: Here, network: str, side: int, batch: int, precision: str, graphs: str = "off"
) -> Plan:
    job = job_from(
        f"network={network} device={here.kind} launch=in-process workers=1 precision={precision} "
        f"cuda_graphs={graphs} "
        f"global_batch={batch} micro_batch={batch} base_batch={batch} learning_rate=0.05 "
        f"scaling=none warmup_epochs=0 decay=none epochs={ENDLESS} resolutions={side} "
        f"augment=crop-flip checkpoint_seconds={ENDLESS}"
    )
    facts = made_up_data("made up", _samples(here, batch), CLASSES, side)
    return fixed_plan(job, facts, facts_of(network, CLASSES, side), batches=(batch,))


def _samples(here: Here, batch: int) -> int:
    """Images of an epoch: so many that its end takes little of the time."""
    return (8 if here.tiny else 64) * batch


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


def session(
    here: Here,
    network: str,
    side: int,
    batch: int,
    precision: str,
    *,
    replays: bool = True,
) -> Iterator[None]:
    """Our loop, a step for each `next`; on a GPU from CUDA graphs, as `auto` mostly chooses."""
    graphs = "on" if replays and here.kind == "cuda" else "off"
    plan = _plan(here, network, side, batch, precision, graphs)
    model, optimizer = _network(here, plan)
    pipeline = ImagePipeline(
        _images(_samples(here, batch), side),
        device=here.device, side=side, mean=MIDDLE, std=MIDDLE, augmentation="crop-flip", seed=0,
        dtype=dtype_of(plan.precision),
    )  # fmt: skip
    with bw.Session(model, optimizer, pipeline, plan=plan) as training:
        steps = 0
        for _ in training.epochs():
            for images, labels in training.batches():
                training.step(functional.cross_entropy(model(images), labels))
                steps += 1
                if graphs == "on" and steps == WARM_UP:
                    # Without room for a graph the session goes on without, and says nothing.
                    recorded = training._setup.graphs
                    what = f"{network}, {side} px, batch {batch}, {precision}: shapes replayed"
                    here.found(what, 0 if recorded is None else recorded.holds)
                yield


def plain(here: Here, network: str, side: int, batch: int, precision: str) -> Iterator[None]:
    """Plain PyTorch steps on one batch that lies on the device, a step for each `next`."""
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


def lightning(
    here: Here, network: str, side: int, batch: int, precision: str, *, loaders: int
) -> Iterator[None]:
    """A loop with Lightning's Fabric and a DataLoader, a step for each `next`."""
    if here.tiny:
        loaders = min(loaders, 2)  # starting them takes time
    kind = "bf16-mixed" if precision == "bfloat16" else "32-true"
    fabric = import_module(FABRIC).Fabric(accelerator=here.kind, devices=1, precision=kind)
    plan = _plan(here, network, side, batch, precision)
    model, optimizer = fabric.setup(*_network(here, plan))
    store = _images(_samples(here, batch), side)
    assert store.images is not None
    images = store.images.permute(0, 3, 1, 2).float() / 127.5 - 1
    data = TensorDataset(images, store.labels)
    options: dict[str, Any] = {"num_workers": loaders, "persistent_workers": loaders > 0}
    loader = fabric.setup_dataloaders(
        DataLoader(
            data, batch, shuffle=True, drop_last=True, pin_memory=here.kind == "cuda", **options
        )
    )
    while True:
        for some, labels in loader:
            loss = functional.cross_entropy(model(some), labels)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield


PLAIN = "resident batch"
ARMS: dict[str, Callable[..., Iterator[None]]] = {
    "session": session,
    "session, no graphs": partial(session, replays=False),
    PLAIN: plain,
}
# Fabric is part of `lightning`, or a package of its own beside PyTorch Lightning.
FABRIC = "lightning.fabric" if find_spec("lightning") else "lightning_fabric"
OTHERS: dict[str, Callable[..., Iterator[None]]] = {
    "lightning": partial(lightning, loaders=0),
    "lightning, 8 loaders": partial(lightning, loaders=8),
}


@cache
def why_not(package: str) -> str:
    """The error of importing a package, in a line; empty if there is none."""
    try:
        import_module(package)
    except Exception as error:  # noqa: BLE001 - a package may raise anything
        return _in_a_line(error)
    return ""


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def large_network() -> str:
    """The job's key `network` for images of 224 px."""
    return "resnet18" if why_not("torchvision") else "torchvision.models:resnet50"


# ------------------------------------------------------------------------------------ predictions


def predictions(here: Here) -> None:
    """Check predicted step time and memory, and the largest batch that fits a memory limit."""
    job = _probed(here, 60)
    kept = here.findings.folder / "profile.json"
    measured = "seconds of the probe"
    # A profile of another machine predicts nothing about this one.
    if not (kept.exists() and here.findings.is_of_this_machine(here.name, measured)):
        began = time.monotonic()
        write_record(bw.probe(job), kept)
        here.found(measured, time.monotonic() - began)
    profile = read_record(kept, Profile)
    if not here.findings.is_of_this_machine(here.name, "points checked"):
        check = bw.check(bw.plan(profile), points=2 if here.tiny else 6)
        for point in check.points:
            where = f"{point.quantity}, batch {point.local_batch_size}, {point.resolution} px"
            here.found(f"{where}: error of the prediction", point.error)
            here.found(f"{where}: inside its interval", point.inside)
        here.found("points checked", len(check.points))
    limit = 3 * max(one.peak_bytes for one in profile.memory) // 2
    if here.kind == "cuda":
        free, whole = torch.cuda.mem_get_info(here.device)
        limit = min(CAP, 3 * free // 4)
        torch.cuda.set_per_process_memory_fraction(limit / whole)
    _run_out(here, profile, limit)


def _run_out(here: Here, profile: Profile, limit: int) -> None:
    """Measure steps with batches around the largest one that is predicted to fit ``limit``."""
    side = max(point.resolution for point in profile.memory)
    most = max_local_batch_size(profile, limit=limit, resolution=side, workers=1)
    here.found(f"largest batch that fits {limit / 2**30:.1f} GiB, predicted", most)
    folder = here.work / "limits"
    folder.mkdir(exist_ok=True)
    for factor in (0.97, 1.0, 1.05):
        batch = max(2, int(factor * most))
        what = f"batch {batch} ({factor:g} of it) takes"
        if here.has(what):
            continue
        found = measure_points(profile.job, [(1, side, batch)], folder, visits=1)
        peak = found.memory[0].peak_bytes if found.memory else None
        here.found(what, "does not fit" if peak is None else f"{peak / limit:.3f} of it, and fits")


def card(here: Here) -> None:
    """Check the largest batch that fits the whole GPU, with images and a network that fill it."""
    words = ["epochs=100", "resolutions=224"]
    network = large_network()
    job = _job(here, network, *words) if not here.tiny else _job(here, "resnet8", "epochs=2")
    profile = bw.probe(job.model_copy(update={"probe": _budget(here, 40)}))
    tiny = 2 * max(one.peak_bytes for one in profile.memory)
    _run_out(here, profile, tiny if here.tiny else profile.cluster.memory_bytes)


def _budget(here: Here, seconds: float) -> Any:
    return Job(probe={"budget": TINY_BUDGET if here.tiny else seconds, "learning": 0}).probe


def _job(here: Here, network: str, *words: str) -> Job:
    told = f"network={network} device={here.kind} launch=in-process workers=1 {' '.join(words)}"
    return job_from(told, data=here.image_data())


def _probed(here: Here, seconds: float) -> Job:
    network, epochs = ("resnet8", 2) if here.tiny else ("resnet18", 100)
    job = _job(here, network, f"epochs={epochs}")
    return job.model_copy(update={"probe": _budget(here, seconds)})


def autocast(here: Here) -> None:
    """Record the number format that the probe chooses, and the step time in each."""
    profile = bw.probe(_probed(here, 30))
    here.found("number format chosen", profile.job.precision)
    for one in profile.precisions:
        here.found(f"{one.precision}, batch {one.local_batch_size}: s a step", one.step_seconds)


# ----------------------------------------------------------------------------------------- methods


def server(here: Here) -> None:
    """Train with a parameter server beside one GPU; weights go to the host and back each round.

    One worker trains, since two cannot share one GPU: without a server, with a server and the large
    batch, and with a server and the small batch.
    """
    batch = _batch(here)
    network, epochs = ("resnet8", 1) if here.tiny else ("resnet18", 3)
    _weights_to_the_host(here, network)
    for what, method in (
        (
            "without a server",
            ("method=plain", "launch=in-process", f"global_batch={batch}", "optimizer=sgd"),
        ),
        ("a server, large batch", ("method=dual-batch", "dual.small_workers=0", "launch=local")),
        ("a server, small batch", ("method=dual-batch", "dual.small_workers=1", "launch=local")),
    ):
        if here.has(f"{network}, {what}: accuracy"):
            continue
        if "method=dual-batch" in method:
            method = (*method, f"dual.large_batches={batch}")
        summary = _run(here, network, epochs, *method, "workers=1", probe=15)
        last = summary.epochs[-1]
        _trained(here, f"{network}, {what}", summary)
        here.found(f"{network}, {what}: s of the last epoch", last.training_seconds)
        exchange = sum(one.communication_seconds for one in last.workers)
        here.found(f"{network}, {what}: s of it for the exchange", exchange)
        here.found(f"{network}, {what}: accuracy", summary.accuracy)


def _batch(here: Here) -> int:
    """The large batch of the compared trainings, with which three epochs learn something."""
    return 64 if here.tiny else 256


def _trained(here: Here, what: str, summary: RunSummary) -> None:
    """Record batches and rate of a training: accuracies with different ones cannot be compared."""
    stage = summary.plan.stages[-1]
    batches = ", ".join(map(str, stage.local_batch_sizes))
    here.found(f"{what}: local batches", batches)
    here.found(f"{what}: rate", stage.learning_rate)


def _weights_to_the_host(here: Here, network: str) -> None:
    """Time copying all weights to the host and back, which is the worker's part of an exchange."""
    if here.has(f"{network}, weights taken: s"):
        return
    model = build_network(network, classes=CLASSES, side=32, seed=0).to(here.device)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    here.found(f"{network}, weights: MiB", size / 2**20)
    weights = pack(model)
    for name, work in (
        ("handed in", lambda: pack(model)),
        ("taken", lambda: unpack(weights, model)),
    ):
        work()
        seconds = []
        for _ in range(3 if here.tiny else 20):
            began = now(here.device)
            work()
            seconds.append(now(here.device) - began)
        here.found(f"{network}, weights {name}: s", median(seconds))


def virtual(here: Here) -> None:
    """Train on a virtual cluster of four, with 0 and 3 workers with the small batch.

    The large batch is that of `server`.
    """
    network, epochs = ("resnet8", 1) if here.tiny else ("resnet18", 3)
    for small in (0, 3):
        what = f"{network}, {small} of 4 workers with the small batch"
        if here.has(f"{what}: accuracy"):
            continue
        method = (
            *("method=dual-batch", f"dual.small_workers={small}"),
            *(f"dual.large_batches={_batch(here)}", "launch=virtual", "workers=4"),
        )
        began = time.monotonic()
        summary = _run(here, network, epochs, *method, probe=20)
        _trained(here, what, summary)
        here.found(f"{what}: real seconds", time.monotonic() - began)
        simulated = sum(epoch.training_seconds for epoch in summary.epochs)
        here.found(f"{what}: simulated seconds", simulated)
        here.found(f"{what}: accuracy", summary.accuracy)


def _run(here: Here, network: str, epochs: int, *words: str, probe: float) -> RunSummary:
    """The summary of a `batchwright run` on CIFAR-100 or made-up images."""
    folder = here.work / f"{here.name}-{len(list(here.work.iterdir()))}"
    budget = TINY_BUDGET if here.tiny else probe
    batchwright(
        "run", f"data={here.image_data()}", f"network={network}", f"device={here.kind}", *words,
        f"epochs={epochs}", "probe.learning=0", f"probe.budget={budget}",
        "--out", folder, cwd=here.work, shown=True,
    )  # fmt: skip
    return read_record(folder / "summary.json", RunSummary)


def accuracy(here: Here) -> None:
    """Time `batchwright run`, probe included, and a plain script to the same accuracy."""
    target, epochs = (0.02, 2) if here.tiny else (0.5, 60)
    images = "made-up images" if here.data is None else "CIFAR-100"
    where = f"{images}, resnet8, seconds to {target:g}"
    if not here.has(f"{where}: `batchwright run`"):
        began = time.monotonic()
        result = batchwright(
            "run", f"data={here.image_data()}", "network=resnet8", f"device={here.kind}",
            f"goal.accuracy={target}", f"epochs={epochs}",
            *([f"probe.budget={TINY_BUDGET}", "probe.learning=0"] if here.tiny else []),
            "--out", here.work / "accuracy", cwd=here.work, shown=True,
        )  # fmt: skip
        here.found("accuracy at the end", result["test_accuracy"])
        here.found(f"{where}: `batchwright run`", time.monotonic() - began)
    plain_script = f"{where}: a plain script at rate 0.1"
    if here.has(plain_script):
        return
    words = [
        *(sys.executable, "-m", "benchmarks.planning.plain_torch", "--data", here.image_data()),
        *("--network", "resnet8", "--side", "32", "--epochs", str(epochs), "--rate", "0.1"),
        *("--loaders", "0" if here.tiny else "8", "--device", here.kind),
    ]
    began, best = time.monotonic(), 0.0
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as script:
        assert script.stdout is not None
        for line in script.stdout:
            best = max(best, json.loads(line)["accuracy"])
            if best >= target:
                here.found(plain_script, time.monotonic() - began)
                break
        else:
            if script.wait():
                raise SystemExit(f"the plain script ended with {script.returncode}")
            here.found(plain_script, f"never reached; best {best:g}")
        script.kill()


RUN: dict[str, Callable[[Here], None]] = {
    "machine": machine,
    "tests": tests,
    "speed-32": speed_32,
    "predictions": predictions,
    "speed-224": speed_224,
    "autocast": autocast,
    "server": server,
    "virtual": virtual,
    "accuracy": accuracy,
    "card": card,
    "papers": papers.short,
    "hybrid-3": partial(papers.published, small=3, cycles=True),
    "large": partial(papers.published, small=0, cycles=False),
    "hybrid-0": partial(papers.published, small=0, cycles=True),
    "dual-3": partial(papers.published, small=3, cycles=False),
    "poster": papers.poster,
}
"""The function of each step of `benchmarks.gpu.programme`."""


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=RUN)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    findings = Findings(asked.out, asked.commit)
    RUN[asked.name](Here(asked.name, findings, asked.work, asked.data, asked.tiny))


if __name__ == "__main__":
    main()
