"""A small job whose workers are killed: does it continue, and is every sample trained on once?

    torchrun --nproc-per-node 2 --max-restarts 9 -m benchmarks.cluster.kills FOLDER

is the job: a network with batch normalization and dropout, SGD with momentum, two workers,
``dynamic-batch``. The model counts its samples itself: beside the network it trains one number for
each sample. The loss contains the mean of the batch's numbers, and their rate is the global batch,
so each time that a sample is trained on, its number falls by exactly 1. The numbers are part of the
checkpoints, so they show every sample that a kill made the job lose or repeat.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import batchwright as bw
from batchwright.records import NetworkFacts, Plan
from benchmarks.harness.benchmark import ROOT
from benchmarks.harness.kept_runs import append_line, read_lines
from benchmarks.harness.loads import children, command_line, until
from benchmarks.harness.plans import fixed_plan, job_from, made_up_data

SAMPLES, SIDE, CLASSES = 2048, 16, 10
BATCH = 32  # divides the samples: a tail of another size would take other than 1 from a number
EPOCHS = 10
RATE = 0.1
CHECKPOINT_SECONDS = 0.5
WORKERS = 2
WINDOW_SECONDS = 8.0  # after the workers' start, in which one is killed: about half starting up
START_SECONDS, END_SECONDS = 60.0, 300.0  # most that starting, and training to the end, may take

# --------------------------------------------------------------------------------------- the job


class Samples(Dataset[tuple[Tensor, int, int]]):
    """Noise with a class, and the sample's own index."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        """Image (3, side, side), label, index."""
        image = torch.randn(3, SIDE, SIDE)
        label = index % CLASSES
        image[:, label] += 1
        return image, label, index


class Counting(nn.Module):
    """A small network, and the number of each sample."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(256, CLASSES),
        )
        self.numbers = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def loss(self, images: Tensor, labels: Tensor, indices: Tensor) -> Tensor:
        """Cross-entropy plus the samples' numbers, mean over the samples."""
        return functional.cross_entropy(self.network(images), labels) + self.numbers[indices].mean()

    def miscounted(self, epochs: int) -> int:
        """Samples left out or repeated in the first ``epochs`` epochs, each as often as it was."""
        times = -self.numbers.detach().round()  # off by rounding errors of the weights b_i / B
        return int((times - epochs).abs().sum())


def job_plan(workers: int = WORKERS, epochs: int = EPOCHS, samples: int = SAMPLES) -> Plan:
    """The plan of the job, made without measurements."""
    job = job_from(
        f"data=benchmarks.cluster.kills:Samples rebalance_steps=10 learning_rate={RATE} "
        f"base_batch={BATCH} warmup_epochs=0 decay=none augment=none precision=float32 device=cpu "
        f"workers={workers} global_batch={BATCH} micro_batch={BATCH} resolutions={SIDE} "
        f"epochs={epochs} checkpoint_seconds={CHECKPOINT_SECONDS} timeout=30",
        method="dynamic-batch" if workers > 1 else "plain",
    )
    facts = made_up_data("samples", samples, CLASSES, SIDE)
    network = NetworkFacts(name="counting", parameters=1, trained_bytes=1, batch_norm=True)
    batches = (BATCH // workers,) * workers
    row = {"dropout": 0.1, "micro_batch_size": BATCH}
    return fixed_plan(job, facts, network, row, batches=batches)


def train(folder: Path, plan: Plan) -> None:
    """Train as one worker; rank 0 writes the miscounted samples after each epoch."""
    torch.manual_seed(0)
    samples = Samples(plan.data.train_samples)
    model = Counting(len(samples))
    optimizer = torch.optim.SGD(
        [
            {"params": list(model.network.parameters()), "lr": RATE, "momentum": 0.9},
            {"params": [model.numbers], "lr": float(BATCH), "momentum": 0.0},
        ]
    )
    with bw.Session(
        model, optimizer, samples, plan=plan, run_folder=folder / "run", loaders=0
    ) as session:
        for epoch in session.epochs():
            for batch in session.batches():
                session.step(model.loss(*batch))
            if session.rank == 0:
                line = {"epoch": epoch, "miscounted": model.miscounted(epoch + 1)}
                append_line(folder / "counts.jsonl", line)


# ------------------------------------------------------------------------------------ the killing


@dataclass(frozen=True)
class KilledRun:
    """Result of a run with kills."""

    seconds: float  # from the start of the launcher to its end
    killed_after: tuple[float, ...]  # for each kill, seconds since the workers it hit had started
    recovered: int  # kills after which the run went on
    # samples left out or repeated by the end of its worst epoch; ``None`` where it did not end well
    miscounted: int | None


def run_and_kill(folder: Path, kills: int, moments: random.Random) -> KilledRun:
    """Run the job under torchrun in a new folder, and kill a worker at each of some random moments.

    A run that ends before all kills were made has fewer.
    """
    folder.mkdir(parents=True)
    started = time.monotonic()
    with (folder / "torchrun.log").open("wb") as log:
        launcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(WORKERS), "--max-restarts", str(kills)),
                *("--monitor-interval", "0.1", "-m", "benchmarks.cluster.kills", str(folder)),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    killed_after: list[float] = []
    try:
        struck: list[int] = []
        while len(killed_after) < kills:
            workers = _fresh_workers(launcher, struck)
            after = moments.uniform(0, WINDOW_SECONDS)
            if not workers or until(lambda: launcher.poll() is not None, after):
                break
            with suppress(ProcessLookupError):  # it may just have ended by itself
                os.kill(moments.choice(workers), signal.SIGKILL)
                killed_after.append(after)
            struck = workers
        until(lambda: launcher.poll() is not None, END_SECONDS)
    finally:
        code = _ended(launcher)
    seconds = time.monotonic() - started
    if code:
        return KilledRun(seconds, tuple(killed_after), max(0, len(killed_after) - 1), None)
    return KilledRun(seconds, tuple(killed_after), len(killed_after), miscounted(folder))


def miscounted(folder: Path, epochs: int = EPOCHS) -> int:
    """Samples left out or repeated by the end of the worst epoch of a run that has ended.

    Of an epoch that was repeated after a kill, the last pass counts.

    Raises:
        ValueError: An epoch is missing.
    """
    lines = read_lines(folder / "counts.jsonl")
    last = {line["epoch"]: int(line["miscounted"]) for line in lines}
    if sorted(last) != list(range(epochs)):
        raise ValueError(f"{folder}: the run has ended without {epochs} epochs: {sorted(last)}")
    return max(last.values())


def _fresh_workers(launcher: subprocess.Popen[bytes], struck: list[int]) -> list[int]:
    """Workers that are not among the ``struck``; none if the launcher ends or hangs first."""
    found: list[int] = []

    def there() -> bool:
        found[:] = [
            pid
            for pid in children(launcher.pid)
            if pid not in struck and b"benchmarks.cluster.kills" in command_line(pid)
        ]
        return len(found) == WORKERS or launcher.poll() is not None

    until(there, START_SECONDS)
    return found if len(found) == WORKERS else []


def _ended(launcher: subprocess.Popen[bytes]) -> int:
    """The launcher's exit code; a launcher that still runs is killed, with its workers."""
    left = children(launcher.pid)
    launcher.kill()
    code = launcher.wait()
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return code


if __name__ == "__main__":
    train(Path(sys.argv[1]), job_plan())
