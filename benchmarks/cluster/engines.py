"""Seconds from the command to the first training step, under torchrun, Slurm and Ray.

The same plan, `resnet8` on scikit-learn's digits with two workers and a global batch of 128, is
trained by `batchwright train`: in two processes that torchrun starts, as a job on a Slurm cluster
of two nodes, and on a Ray cluster of two nodes. All run on one machine. Both clusters are up and
idle while any of the three trains, so all figures include what their daemons take. Slurm schedules
by its defaults (`sched/builtin`); each node of Ray has one core, so one worker.

Time begins when the command is started and ends when the last worker has the first gradient of its
training, which a hook on a parameter notes. It includes the start of Python and its imports, once
in the command and once in each worker, the queue, the workers' rendezvous, and opening data and
network, in the command and in the workers. Nothing is probed.

One start of each engine is not counted, as it decodes the images and fills caches. Then all three
are started in turn, the order reversed from round to round; the spread is quartiles. A difference
is between two starts of the same round. There is no goal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from batchwright.records.documents import write_record
from batchwright.workload.networks import resnet8
from benchmarks.harness.benchmark import ROOT, Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure
from benchmarks.harness.plans import job_from, opened, planned
from benchmarks.harness.slurm_nodes import NoSlurm, slurm_nodes
from benchmarks.harness.turns import take_turns

STARTS = {False: 2, True: 7}
WORKERS, SIDE = 2, 8
NETWORK = "benchmarks.cluster.engines:network"
JOB = f"data=digits network={NETWORK} device=cpu precision=float32 workers={WORKERS} epochs=1 "
JOB += f"global_batch=128 resolutions={SIDE}"
MARKS = "BENCHMARK_MARKS"
"""Environment variable: folder where each worker leaves the time of its first gradient."""
MAX_SECONDS = 600.0  # for a command, on a busy machine
_STORE_BYTES = 100 * 2**20  # object store of a node of Ray, about the least that it takes

BENCHMARK = Benchmark(
    "engines",
    "Engines that start a run",
    "From the start of `batchwright train` to the first training step of two workers, all on one "
    "machine, `resnet8` on digits, in turn",
    (
        Figure("torchrun_seconds", "s", "median", "seconds to the first step under torchrun"),
        Figure("slurm_seconds", "s", "median",
               "seconds to the first step with `launch=slurm`, two nodes, empty queue"),
        Figure("ray_seconds", "s", "median",
               "seconds to the first step with `launch=ray`, two nodes that are up"),
        Figure("slurm_later_seconds", "s", "median",
               "seconds to the first step, `launch=slurm` minus torchrun"),
        Figure("ray_later_seconds", "s", "median",
               "seconds to the first step, `launch=ray` minus torchrun"),
    ),
)  # fmt: skip


def network(**keys: Any) -> nn.Module:
    """`resnet8`; in a worker it writes the time of its first gradient to a file in `MARKS`."""
    made = resnet8(**keys)
    marks, rank = os.environ.get(MARKS), os.environ.get("RANK")

    def note(_: object) -> None:
        path = Path(str(marks), str(rank))
        if not path.exists():
            path.write_text(repr(time.monotonic()), encoding="utf-8")

    if marks is not None and rank is not None:
        next(made.parameters()).register_hook(note)
    return made


def measure(arguments: Arguments, folder: Path) -> Found:
    """Time starts of all installed engines, in turn."""
    # Commands run in folders of their own, where Python does not find benchmarks and our sources.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    (folder / "marks").mkdir()
    os.environ[MARKS] = str(folder / "marks")
    with ExitStack() as running:
        engines = {"torchrun": Engine("torchrun", "auto", folder)}
        for name, start in (("slurm", _slurm), ("ray", _ray)):
            try:
                names = running.enter_context(start(folder))
            except (NoSlurm, TimeoutError, ImportError) as reason:
                say(f"{name} is left out: {reason}")
                continue
            engines[name] = Engine(name, name, folder, names)
        for name, engine in engines.items():
            say(f"{name}: {engine.start():.1f} s, which is not counted")
        arms: dict[str, Callable[[], float]] = {
            name: engine.start for name, engine in engines.items()
        }
        seconds = take_turns(arms, STARTS[arguments.full], form="{:.1f} s".format)
    return found_in(seconds), {"seconds": seconds}


def found_in(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """All figures, by name, from seconds by engine, one value for each round."""
    found = {f"{name}_seconds": list(some) for name, some in seconds.items()}
    base = seconds["torchrun"]
    for name, some in seconds.items():
        if name != "torchrun":
            later = [one - other for one, other in zip(some, base, strict=True)]
            found[f"{name}_later_seconds"] = later
    return found


@dataclass
class Engine:
    """Starts the training under one engine.

    Attributes:
        name: Name of the engine.
        launch: The job's key `launch`.
        folder: Folder of all engines' files.
        names: Environment variables by which commands find the cluster.
        starts: Number of starts so far.
    """

    name: str
    launch: str
    folder: Path
    names: Mapping[str, str] | None = None
    starts: int = 0

    def start(self) -> float:
        """Train once; seconds from the command to the first training step.

        Raises:
            SystemExit: It failed; what it said is in the message.
        """
        plan, marks = self.folder / f"{self.name}.json", self.folder / "marks"
        if not self.starts:
            nodes = {"nodes": WORKERS} if self.launch == "slurm" else {}
            job = job_from(JOB, launch=self.launch, **nodes)
            write_record(planned(job, opened("digits", NETWORK, SIDE)), plan)
        for old in marks.iterdir():
            old.unlink()
        self.starts += 1
        words = ["batchwright", "train", str(plan), f"network={NETWORK}"]
        words += ["--out", str(self.folder / f"{self.name}-{self.starts}")]
        front = []
        if self.launch == "auto":
            front = ["torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}", "-m"]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", *front, *words],
            cwd=self.folder,
            env={**os.environ, **(self.names or {})},
            capture_output=True,
            text=True,
            timeout=MAX_SECONDS,
            check=False,
        )
        ends = [float(path.read_text("utf-8")) for path in marks.iterdir()]
        if done.returncode or len(ends) != WORKERS:
            raise SystemExit(f"{self.name}: {len(ends)} workers began:\n{done.stderr}")
        return max(ends) - began


@contextmanager
def _slurm(folder: Path) -> Iterator[Mapping[str, str]]:
    place = folder / "slurm"
    place.mkdir()
    with slurm_nodes(place) as names:
        yield names


@contextmanager
def _ray(folder: Path) -> Iterator[Mapping[str, str]]:
    """A Ray cluster of two nodes with a core each, and the variable with its address."""
    del folder  # its sockets' names must be short
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)  # the address goes there
        node = {"num_cpus": 1, "object_store_memory": _STORE_BYTES}
        head = {**node, "include_dashboard": False, "temp_dir": short}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(**node)
            yield {"RAY_ADDRESS": cluster.address}
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
