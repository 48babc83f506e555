"""Runs of accuracy benchmarks: two at a time with a core each, or one at a time with all cores.

Such a benchmark takes hours. The result of each run is kept at once, and a run is not made again if
a kept one was made by an equal plan; so the benchmark can be stopped at any time and started again.
Runs are made in the given order.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from batchwright.errors import TrainingError
from batchwright.records import Plan, RunSummary
from batchwright.records.documents import read_record, write_record
from batchwright.training.loop import train
from batchwright.workload.host import THREADS
from benchmarks.harness.benchmark import ROOT, commit, say

AT_A_TIME = 2
POLL_SECONDS = 0.5
TRAIN = ("batchwright.cli.commands", "train")
DIVERGED = "gradients were infinite or not a number"  # how training says so when it gives up


@dataclass(frozen=True)
class Wanted:
    """A run to be made.

    Attributes:
        name: Name of the arm; with the seed it identifies the run in the benchmark.
        seed: Seed of the plan's job.
        plan: The plan that is trained.
        words: Module and first words of its command line; the plan's file and ``--out FOLDER``
            follow.
        facts: Further fields of the run's line in `RunLines`.
        alike: Plans whose kept runs count as this one's.
    """

    name: str
    seed: int
    plan: Plan
    words: tuple[str, ...] = TRAIN
    facts: Mapping[str, Any] = field(default_factory=dict)
    alike: tuple[Plan, ...] = ()

    @property
    def title(self) -> str:
        """Name of the run, for files and messages."""
        return f"{self.name}-{self.seed}"

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of the plan, without the place of the data, and of the command."""
        return self.digests[0]

    @property
    def digests(self) -> tuple[str, ...]:
        """`digest`, and the digests of other runs that count as this one."""
        plans = [self.plan, *self.alike]
        # Plans of earlier kept runs had "auto" where they now say that nothing is recomputed or
        # replayed from graphs.
        for key in ("cuda_graphs", "activation_checkpointing"):
            plans += [
                plan.model_copy(update={"job": plan.job.model_copy(update={key: "auto"})})
                for plan in plans
                if getattr(plan.job, key) == "off"
            ]
        return tuple(map(self._digest, plans))

    def _digest(self, plan: Plan) -> str:
        """Digest of a plan, without default values: runs stay kept when plans gain a field."""
        others = ""
        if self.words != TRAIN:
            # Modules have moved since runs were first kept, so their folder is left out.
            module, *rest = self.words
            others = " ".join([f"benchmarks.{module.rpartition('.')[2]}", *rest])
        job = plan.job.model_copy(update={"data": plan.data.name})
        # It follows from the data's digest, and plans of earlier kept runs did not have it.
        data = plan.data.model_copy(update={"largest_class": None})
        plan = plan.model_copy(update={"job": job, "data": data, "reasons": ()})
        return hashlib.sha256(
            (plan.model_dump_json(exclude_defaults=True) + others).encode()
        ).hexdigest()


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        accuracy: Held-out accuracy after the last epoch, in percent.
        seconds: Seconds of training; simulated ones in a virtual cluster.
        batches: Local batches of the last stage.
        diverged: Whether training gave up because gradients stayed infinite; the accuracy is then
            that of guessing.
        noise_scale: Last measured gradient noise scale, in samples; ``None``: never measured.
        curve: Held-out accuracy after each epoch, in percent; empty unless each was evaluated.
        losses: Held-out loss after each epoch, in nats; empty unless each was evaluated.
    """

    accuracy: float
    seconds: float
    batches: tuple[int, ...]
    diverged: bool = False
    noise_scale: float | None = None
    curve: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()


Runs = Mapping[str, Sequence[Run]]
"""By arm, a run for each seed."""


def accuracies_of(runs: Runs) -> dict[str, list[float]]:
    """By arm, the accuracies in percent."""
    return {name: [one.accuracy for one in some] for name, some in runs.items()}


def plain_runs(runs: Runs) -> dict[str, list[dict[str, Any]]]:
    """By arm, the runs as JSON values, for a report."""
    return {name: [asdict(one) for one in some] for name, some in runs.items()}


class KeptRuns:
    """Makes runs and keeps their results.

    Args:
        keep: Folder for a file of each finished run.
        folder: Takes run folders.
        alone: Whether a run has the machine to itself, as it has several workers or is timed.
    """

    def __init__(self, keep: Path, folder: Path, *, alone: bool = False) -> None:
        self._keep, self._folder, self._alone = keep, folder, alone
        keep.mkdir(parents=True, exist_ok=True)

    def make(self, wanted: Sequence[Wanted]) -> list[Run]:
        """The results of runs, in the given order; kept runs are not made again.

        Raises:
            SystemExit: A run failed without diverging; the end of its log is the message.
        """
        todo = [one for one in wanted if self.kept(one) is None]
        say(f"{len(todo)} of {len(wanted)} runs to make")
        self._carry_out(iter(todo))
        found = [self.kept(one) for one in wanted]
        return [one for one in found if one is not None]  # all of them, for the type checker

    def by_arm(self, wanted: Sequence[Wanted]) -> dict[str, list[Run]]:
        """The results of `make` by name, in the order of the seeds."""
        found: dict[str, list[Run]] = {}
        for one, run in zip(wanted, self.make(wanted), strict=True):
            found.setdefault(one.name, []).append(run)
        return found

    def kept(self, one: Wanted) -> Run | None:
        """The kept run that was made by an equal plan, if there is one."""
        try:
            values = json.loads(self._file(one).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        if values.pop("plan") not in one.digests:
            return None
        values.pop("loss", None)  # older code kept the last epoch's loss alone
        lists = {key: tuple(values.get(key, ())) for key in ("batches", "curve", "losses")}
        return Run(**{**values, **lists})

    def _carry_out(self, todo: Iterator[Wanted]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        places = [frozenset(cores)] if self._alone else [frozenset({one}) for one in cores]
        places = places[:AT_A_TIME]
        busy: dict[frozenset[int], tuple[subprocess.Popen[bytes], Wanted]] = {}
        # So that the runs are ended below.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            while True:
                for place in places:
                    if place not in busy and (one := next(todo, None)) is not None:
                        busy[place] = self._started(place, one), one
                if not busy:
                    return
                time.sleep(POLL_SECONDS)
                for place, (process, one) in list(busy.items()):
                    if process.poll() is not None:
                        del busy[place]
                        log = self._log(one).read_text(errors="replace")
                        self._finish(one, process.returncode, log)
        finally:
            for process, _ in busy.values():
                process.terminate()
                process.wait()

    def _started(self, cores: Iterable[int], one: Wanted) -> subprocess.Popen[bytes]:
        plan = self._folder / f"{one.title}.json"
        write_record(one.plan, plan)
        words = [*one.words, str(plan), "--out", str(self._run(one))]
        with self._log(one).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        os.sched_setaffinity(process.pid, cores)  # before it has any threads
        return process

    def _finish(self, one: Wanted, code: int, log: str) -> None:
        batches = one.plan.stages[-1].local_batch_sizes
        if not code:
            summary = read_record(self._run(one) / "summary.json", RunSummary)
            batches = summary.plan.stages[-1].local_batch_sizes  # they may have grown
            epochs = summary.epochs
            scales = [epoch.noise_scale for epoch in epochs if epoch.noise_scale]
            curve = tuple(100 * epoch.top1 for epoch in epochs if epoch.top1 is not None)
            losses = tuple(epoch.val_loss for epoch in epochs if epoch.val_loss is not None)
            run = Run(
                100 * summary.accuracy,
                sum(epoch.training_seconds for epoch in epochs),
                batches,
                noise_scale=scales[-1] if scales else None,
                curve=curve if len(curve) == len(epochs) > 1 else (),
                losses=losses if len(losses) == len(epochs) else (),
            )
        elif DIVERGED in log:
            run = Run(100 / len(one.plan.data.classes), 0.0, batches, diverged=True)
        else:
            raise SystemExit(
                f"{one.name}, seed {one.seed}, ended with exit code {code}:\n{log[-2000:]}"
            )
        self._store(one, run)
        words = "diverged" if run.diverged else f"{run.accuracy:.2f} % in {run.seconds:.0f} s"
        say(f"{one.name}, seed {one.seed}: {words}")

    def _store(self, one: Wanted, run: Run) -> None:
        aside = self._keep / f".{one.title}.writing"
        values = {"plan": one.digest, **asdict(run)}
        aside.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        aside.replace(self._file(one))

    def _file(self, one: Wanted) -> Path:
        return self._keep / f"{one.title}.json"

    def _log(self, one: Wanted) -> Path:
        return self._folder / f"{one.title}.log"

    def _run(self, one: Wanted) -> Path:
        return self._folder / f"run-{one.title}"


class RunLines(KeptRuns):
    """Runs kept as lines of one file, which may be in the repository.

    Args:
        lines: File of JSON lines, one for each run, in the order in which they ended.
        folder: Takes run folders.
    """

    def __init__(self, lines: Path, folder: Path) -> None:
        super().__init__(lines.parent, folder)
        self._lines, self._commit = lines, commit()
        self._found = {values["digest"]: values for values in read_lines(lines)}
        self._commits: dict[str, str] = {}  # by digest, the commits of runs that `kept` returned

    @property
    def commits(self) -> Counter[str]:
        """By commit, the number of runs returned by `kept` that it made."""
        return Counter(self._commits.values())

    def gather(self, wanted: Iterable[Wanted], until: float) -> None:
        """Make the runs that are not kept, and start none after ``until`` (`time.monotonic`)."""
        todo = (one for one in wanted if self.kept(one) is None)
        self._carry_out(takewhile(lambda _: time.monotonic() < until, todo))

    def kept(self, one: Wanted) -> Run | None:
        """The run of a line that was made by an equal plan, or by one of ``alike``."""
        values = next((self._found[name] for name in one.digests if name in self._found), None)
        if values is None:
            return None
        self._commits[one.digest] = values["commit"]
        return Run(
            values["accuracy"],
            values["seconds"],
            one.plan.stages[-1].local_batch_sizes,
            values.get("diverged", False),
            values.get("noise_scale"),
            tuple(values.get("curve", ())),
        )

    def _store(self, one: Wanted, run: Run) -> None:
        noise = run.noise_scale
        values = {
            **one.facts,
            "accuracy": round(run.accuracy, 4),
            "seconds": round(run.seconds, 3),
            **({"diverged": True} if run.diverged else {}),
            **({"noise_scale": float(f"{noise:.4g}")} if noise is not None else {}),
            **({"curve": [round(one, 4) for one in run.curve]} if run.curve else {}),
            "commit": self._commit,
            "digest": one.digest,
        }
        append_line(self._lines, values)
        self._found[one.digest] = values


class RunLinesHere(RunLines):
    """`RunLines` for runs of seconds, which are trained in this process, one after the other.

    They have one thread. Processes of their own would take longer to start than to train.
    """

    def __init__(self, lines: Path, folder: Path) -> None:
        super().__init__(lines, folder)
        os.environ[THREADS] = "1"  # by default a training takes all cores

    def _carry_out(self, todo: Iterator[Wanted]) -> None:
        for one in todo:
            folder, failure = self._run(one), ""
            try:
                train(one.plan, run_folder=folder, resume=False)
            except TrainingError as error:
                failure = str(error)
            self._finish(one, 1 if failure else 0, failure)
            shutil.rmtree(folder)


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Add a line of JSON to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The values of all lines of `append_line`; none without the file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
