"""Runs for `planning.time_to_accuracy`: one at a time on a quiet machine, kept line by line.

    python -m benchmarks.planning.time_to_accuracy_runs --data DIR [--lightning-python PATH]
        [--limit-minutes M] [--task NAME] [--lines FILE] [--anew] [--busy]

The head of `benchmarks.planning.time_to_accuracy` describes the runs and their order. A script's
full run and the run of our command to its accuracy are made one right after the other, as the
machine's speed varies from hour to hour, and are kept in FILE together or not at all. Runs that
FILE has already, from the same kind of processor, are not repeated, so that pairs can be gathered
over several days; --anew repeats those of other commits. Without --lightning-python, runs of the
Lightning script are left out. After M minutes no further pair is begun; a pair that has begun is
finished. --busy keeps runs although other programs use the machine: for trying things out, with
another FILE.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from batchwright.prediction.memory import fit_memory
from batchwright.records import Profile, RunSummary
from batchwright.records.documents import read_record
from batchwright.records.lines.line_files import METRICS, sound_line
from batchwright.records.lines.run_lines import EpochLine, RunLine
from batchwright.storage.follow_lines import Tail
from batchwright.workload.load import MIN_SECONDS, load_between, read_load
from benchmarks.harness.benchmark import (
    RESULTS,
    ROOT,
    add_gathering,
    commit,
    environment,
    make_parser,
    refuse,
    say,
    scratch,
)
from benchmarks.harness.kept_runs import append_line, read_lines
from benchmarks.harness.loads import Burner, children
from benchmarks.planning import decisions_runs

Script = Literal["torch", "lightning"]
Evaluations = list[tuple[float, float]]
"""For each evaluation: seconds since the process began, and accuracy in percent."""

SCRIPTS: tuple[Script, ...] = ("torch", "lightning")
SEEDS = (0, 1, 2)
LOADERS = (0, 1, 2)
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
FIRST_RATES = (0.03, 0.1, 0.3)  # others only beyond the best one
NEAR = 10.0  # points below the best look, within which a rate gets a whole training
LOOK_SEED, LOOK_PART, LOOK_EPOCHS = 10, 4, 2  # tuning: a quarter of the images, `plain_images.LOOK`
SHORT, LONG = 120.0, 640.0  # seconds that a script should take
LINES = RESULTS / "time-to-accuracy-runs.jsonl"

TRIES = 3  # most attempts of our command, each with twice the epochs of the one before
QUIET = 0.1  # cores that other programs may use
WATCH_SECONDS = 5.0
POLL_SECONDS = 0.1
MEMORY_SECONDS = 1.0  # between two readings of the processes' memory


@dataclass(frozen=True)
class Task(decisions_runs.Task):
    """A task: ``seconds`` that a script should take, ``uneven``: also run beside a busy program."""

    seconds: float = 0.0
    uneven: bool = False


CHECK = Task("cifar100-groups", "resnet8", 32, 1000)
TASKS = {
    "groups-resnet8": Task("cifar100-groups", "resnet8", 32, 25_000, seconds=SHORT, uneven=True),
    "imagenette-64": Task("imagenette", "resnet8", 64, 9469, seconds=SHORT, uneven=True),
    "groups-vgg8": Task("cifar100-groups", "vgg8", 32, 25_000, seconds=SHORT),
    "cifar-resnet8": Task("cifar100", "resnet8", 32, 50_000, seconds=LONG),
    "imagenette-96": Task("imagenette", "resnet8", 96, 9469, seconds=LONG),
}


@dataclass(frozen=True)
class Asked:
    """A run, by the fields that identify its kept line.

    A script has ``loaders`` and ``rate``. Our command has ``against``, the script that it is
    compared with, and ``target``, that script's accuracy in percent; ``epochs`` is the maximum
    of its first attempt. ``look`` marks a tuning run: it trains on a part of the training images
    and is evaluated on others of them. With ``burner``, a program that never waits runs on the
    last core.
    """

    task: str
    arm: Literal["torch", "lightning", "ours"]
    seed: int
    epochs: int
    loaders: int | None = None
    rate: float | None = None
    look: bool = False
    against: str | None = None
    target: float | None = None
    burner: bool = False

    @property
    def title(self) -> str:
        """Name of the run in file names and messages."""
        told = {name: value for name, value in asdict(self).items() if value not in (None, False)}
        return "-".join(
            f"{value}" if isinstance(value, str) else f"{name}{value:g}"
            for name, value in told.items()
        )


class TimeIsUpError(Exception):
    """The time limit has passed: no further run is started."""


# ------------------------------------------------------------------------------------------- lines


@dataclass
class Bench:
    """Makes runs and keeps a line of each."""

    lines: Path  # JSON lines, one a run, in the order in which they ended
    data: Path  # holds ``cifar-100-python/`` and ``imagenette2-160/``
    folder: Path  # folder for copies of images and for run folders
    lightning: Path | None = None  # Python of the environment that has Lightning, if there is one
    until: float = math.inf  # no run is started after this time (`time.monotonic`)
    busy: bool = False  # whether other programs may use the machine meanwhile
    anew: bool = False  # whether pairs of another commit are made again
    tasks: Mapping[str, Task] = field(default_factory=lambda: TASKS)

    def __post_init__(self) -> None:
        here = environment(())["processor"]
        # Tuned loader processes, rates and seconds hold for one processor: others are left out.
        self._found = [line for line in read_lines(self.lines) if line["processor"] == here]
        self._commit = commit()
        self._place = cache(
            lambda name: decisions_runs.copy_images(self.tasks[name], self.data, self.folder)
        )

    @property
    def scripts(self) -> tuple[Script, ...]:
        """The scripts that can be run here."""
        return SCRIPTS if self.lightning else SCRIPTS[:1]

    def made(self, asked: Asked) -> dict[str, Any]:
        """The kept line of a run, which is made if there is none.

        Raises:
            TimeIsUpError: There is none, and the time limit has passed.
        """
        kept = line_of(self._found, asked)
        while kept is None:
            self._wait_until_quiet()
            if (line := self._run(asked)) is not None:
                kept = self._keep(line)
        return kept

    def make_pair(self, theirs: Asked, ours: Callable[[float], Asked]) -> None:
        """Make a script's run and right after it our command's, unless both are kept already.

        If others used the machine in either run, both are made again. ``ours`` gives our run for
        the script's accuracy in percent.

        Raises:
            TimeIsUpError: They are not kept, and the time limit has passed.
        """
        if any(self._is_pair(lines, theirs, ours) for lines in pairwise(self._found)):
            return
        script = reply = None
        while script is None or reply is None:
            self._wait_until_quiet()
            script = self._run(theirs)
            reply = None if script is None else self._run(ours(script["accuracy"]))
        self._keep(script)
        self._keep(reply)

    def _is_pair(
        self,
        lines: tuple[Mapping[str, Any], Mapping[str, Any]],
        theirs: Asked,
        ours: Callable[[float], Asked],
    ) -> bool:
        """Whether two consecutive lines are this pair, made by one commit."""
        script, reply = lines
        commits = {self._commit} if self.anew else {script["commit"]}
        return (
            asdict(theirs).items() <= script.items()
            and asdict(ours(script["accuracy"])).items() <= reply.items()
            and {script["commit"], reply["commit"]} == commits
        )

    def _run(self, asked: Asked) -> dict[str, Any] | None:
        """Make a run: its line, or ``None`` if other programs used the machine meanwhile."""
        before, run = read_load(), self._ours if asked.arm == "ours" else self._script
        with Burner(max(os.sched_getaffinity(0))) if asked.burner else nullcontext():
            found = run(asked)
        others, stolen = load_since(before)
        if others > QUIET and not self.busy:
            say(f"{asked.title} does not count: others used {others:.2f} cores meanwhile")
            return None
        told = environment(())
        return {
            **asdict(asked),
            **found,
            "others": round(others, 3),
            "stolen": round(stolen, 3),
            "images": self.tasks[asked.task].images,
            **{name: told[name] for name in ("processor", "cores", "python", "torch")},
            "commit": self._commit,
        }

    def _keep(self, line: dict[str, Any]) -> dict[str, Any]:
        append_line(self.lines, line)
        self._found.append(line)
        asked = Asked(**{one.name: line[one.name] for one in fields(Asked)})
        say(f"{asked.title}: {line['accuracy']:.2f} % in {line['seconds']:.1f} s")
        return line

    def _wait_until_quiet(self) -> None:
        told = -math.inf
        while time.monotonic() < self.until:
            before = read_load()
            time.sleep(max(MIN_SECONDS, 0 if self.busy else WATCH_SECONDS))
            others, _ = load_since(before)
            if others <= QUIET or self.busy:
                return
            if time.monotonic() > told + 60:
                say(f"waiting: others use {others:.1f} cores")
                told = time.monotonic()
        raise TimeIsUpError

    # ------------------------------------------------------------------------------------- scripts

    def _script(self, asked: Asked) -> dict[str, Any]:
        task = self.tasks[asked.task]
        python = sys.executable if asked.arm == "torch" else self.lightning
        given = {
            "data": self._place(asked.task),
            "network": task.network,
            "side": task.side,
            **{name: getattr(asked, name) for name in ("epochs", "rate", "loaders", "seed")},
        }
        words = [python, "-m", f"benchmarks.planning.plain_{asked.arm}"]
        words += [f"--{name}={value}" for name, value in given.items()]
        words += ["--look"] if asked.look else []
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        evaluations: Evaluations = []
        with self._log(asked).open("wb") as log:
            began = time.monotonic()
            pipes = {"stdout": subprocess.PIPE, "stderr": log, "cwd": ROOT, "env": clean}
            with ending(subprocess.Popen(words, **pipes)) as process:
                for row in process.stdout:
                    passed, told = time.monotonic() - began, json.loads(row)
                    evaluations.append((passed, 100 * told["accuracy"]))
        if process.returncode or len(evaluations) != asked.epochs:
            raise self._failed(asked)
        last = evaluations[-1]
        return {
            "whole_seconds": round(last[0], 3),
            "seconds": round(reached(evaluations, last[1]) or last[0], 3),
            "accuracy": round(last[1], 4),
            "evaluations": rounded(evaluations),
            "precision": "float32",
            "versions": told["versions"],
        }

    # ---------------------------------------------------------------------------------------- ours

    def _ours(self, asked: Asked) -> dict[str, Any]:
        """Attempts until the target is reached, at most `TRIES`; the time of all of them counts."""
        tries: list[dict[str, Any]] = []
        while len(tries) < TRIES and not (tries and tries[-1]["reached"]):
            tries.append(self._command(asked, len(tries)))
        seconds, probing = (
            sum(one[name] for one in tries) for name in ("seconds", "probe_seconds")
        )
        last = tries[-1]
        return {
            "seconds": round(seconds, 3),
            "training_seconds": round(seconds - probing, 3),
            "accuracy": max(accuracy for _, accuracy in last["evaluations"] or [(0.0, 0.0)]),
            "reached": last["reached"],
            "precision": last.get("precision"),
            "tries": tries,
        }

    def _command(self, asked: Asked, number: int) -> dict[str, Any]:
        task = self.tasks[asked.task]
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            run = Path(name) / "run"
            keys = {
                "data": self._place(asked.task),
                "network": task.network,
                "resolutions": task.side,
                "epochs": asked.epochs * 2**number,
                "goal.accuracy": f"{asked.target / 100:.6f}",
                "seed": asked.seed,
            }
            words = [f"{key}={value}" for key, value in keys.items()]
            with self._log(asked).open("wb") as log:
                began = time.monotonic()
                process = subprocess.Popen(
                    [sys.executable, "-m", "batchwright", "run", *words, "--out", str(run)],
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "BATCHWRIGHT_CACHE": str(Path(name) / "cache")},
                )
                with ending(process):
                    evaluations, memory = followed(process, run, began)
            ended = time.monotonic() - began
            # Planning fails, after the probe, if no plan reaches the target: the attempt is a miss.
            refused = process.returncode == 2 and (run / "profile.json").exists()
            if process.returncode and not refused:
                raise self._failed(asked)
            at = reached(evaluations, asked.target)
            found = {"seconds": at or ended, "reached": at is not None, "resident_bytes": memory}
            told = refused_facts(run) if refused else trained_facts(run)
            return {**found, **told, "evaluations": rounded(evaluations)}

    def _log(self, asked: Asked) -> Path:
        return self.folder / f"{asked.title}.log"

    def _failed(self, asked: Asked) -> SystemExit:
        return SystemExit(f"{asked.title} failed:\n{self._log(asked).read_text()[-2000:]}")


def load_since(before: Any) -> tuple[float, float]:
    """Cores used by others, and cores stolen by the host; 0 where the system does not say."""
    after = read_load()
    load = load_between(before, after) if before and after else None
    return (load.others, load.stolen) if load else (0.0, 0.0)


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Wait for a process at the end of the block, and terminate it if the block raises."""
    try:
        yield process
    except BaseException:
        process.terminate()
        raise
    finally:
        process.wait()


def line_of(lines: Sequence[Mapping[str, Any]], asked: Asked) -> dict[str, Any] | None:
    """The newest kept line of a run; ``None`` if there is none."""
    wanted = asdict(asked)
    found = (line for line in reversed(lines) if wanted.items() <= line.items())
    return next((dict(line) for line in found), None)


def reached(evaluations: Sequence[tuple[float, float]], target: float) -> float | None:
    """Seconds until the first evaluation that reaches an accuracy in percent; ``None``: none does.

    The tolerance allows for the digits that a kept line rounds off.
    """
    return next((at for at, accuracy in evaluations if accuracy >= target - 1e-3), None)


def rounded(evaluations: Evaluations) -> list[list[float]]:
    """Evaluations with the digits of a kept line."""
    return [[round(at, 3), round(accuracy, 4)] for at, accuracy in evaluations]


# ------------------------------------------------------------------------------------ our command


def followed(
    process: subprocess.Popen[bytes], run: Path, began: float
) -> tuple[Evaluations, int | None]:
    """Follow our command until it ends: its evaluations, and the peak resident bytes of a worker.

    Workers are the command's descendants once there is a plan. ``began`` is its start
    (`time.monotonic`).
    """
    evaluations: Evaluations = []
    highest, looked = 0, 0.0
    lines = Tail(run / METRICS, sound_line)
    while True:
        alive = process.poll() is None
        passed = time.monotonic() - began
        lines(partial(_note_accuracy, evaluations, passed))
        if not alive:
            return evaluations, highest or None
        if passed > looked + MEMORY_SECONDS and (run / "plan.json").exists():
            looked = passed
            highest = max([highest, *map(_resident, _below(process.pid))])
        time.sleep(POLL_SECONDS)


def _note_accuracy(evaluations: Evaluations, passed: float, line: RunLine) -> None:
    """Append the accuracy of an epoch, in percent, if the line has one."""
    if isinstance(line, EpochLine) and line.record.top1 is not None:
        evaluations.append((passed, 100 * line.record.top1))


def _below(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _below(child)


def _resident(pid: int) -> int:
    """Peak resident size of a process, in bytes; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(1024 * int(row.split()[1]) for row in text.splitlines() if row.startswith("VmHWM"))


def trained_facts(run: Path) -> dict[str, Any]:
    """Facts for a kept line from a run folder: the choices, predicted and measured values."""
    summary = read_record(run / "summary.json", RunSummary)
    plan, stage, profile = summary.plan, summary.plan.stages[-1], summary.profile
    chosen = plan.chosen
    predicted = chosen.train_seconds if chosen else None
    # The prediction is for `trained_epochs`; training ends at the target, earlier or later.
    share = len(summary.epochs) / ((chosen and chosen.trained_epochs) or plan.epochs)
    memory = None
    if profile:
        cluster = profile.cluster
        model = fit_memory(
            profile.memory, profile.memory_parts, device=cluster.device, apart=cluster.pieces_apart
        )
        most = min(stage.micro_batch_size, max(stage.local_batch_sizes))
        memory = model.resident(stage.resolution, most, workers=stage.workers)
    measured = sum(one.training_seconds + one.evaluation_seconds for one in summary.epochs)
    return {
        "probe_seconds": sum(one.seconds for one in summary.before if one.name == "probe"),
        "trials_seconds": sum(one.seconds for one in profile.trials) if profile else 0.0,
        "trials_note": profile.trials_note if profile else "",
        "batch": stage.global_batch_size,
        "optimizer": plan.update,
        "method": plan.method,
        "workers": plan.workers,
        "precision": plan.precision,
        "rate": plan.learning_rate.peak,
        "planned_epochs": plan.epochs,
        "epochs": len(summary.epochs),
        "predicted_seconds": predicted.value * share if predicted else None,
        "measured_seconds": measured,
        "billed_seconds": summary.wall_seconds,
        "predicted_resident_bytes": memory.value if memory else None,
    }


def refused_facts(run: Path) -> dict[str, Any]:
    """Facts for a kept line from the folder of a run that found no plan."""
    profile = read_record(run / "profile.json", Profile)
    trials = sum(one.seconds for one in profile.trials)
    return {"probe_seconds": profile.probe_seconds, "trials_seconds": trials, "refused": True}


# ---------------------------------------------------------------------------------------- what runs


class Tuned(NamedTuple):
    """A task's tuned settings: epochs, peak rate, and loader processes of each script."""

    epochs: int
    rate: float
    loaders: Mapping[str, int]


def tuned(bench: Bench, name: str, task: Task) -> Tuned:
    """Tune a task: loader processes by time, epochs by that time, the rate by accuracy.

    Looks on a part of the images tell which rates are worth a whole training with `SEEDS`' first.
    """
    first = Asked(name, "torch", LOOK_SEED, LOOK_EPOCHS, 0, FIRST_RATES[1], look=True)
    seconds = {
        script: {
            count: epoch_seconds(bench.made(replace(first, arm=script, loaders=count)))
            for count in LOADERS
        }
        for script in bench.scripts
    }
    loaders = {script: min(found, key=found.__getitem__) for script, found in seconds.items()}
    epochs = math.ceil(task.seconds / (LOOK_PART * min(seconds["torch"].values())))
    look = replace(first, epochs=epochs, loaders=loaders["torch"])
    whole = replace(look, look=False, seed=SEEDS[0])

    def accuracy(run: Asked, rate: float) -> float:
        return float(bench.made(replace(run, rate=rate))["accuracy"])

    looks = look_at_rates(partial(accuracy, look))
    near = [rate for rate, found in looks.items() if found >= max(looks.values()) - NEAR]
    return Tuned(epochs, max(near, key=partial(accuracy, whole)), loaders)


def look_at_rates(accuracy: Callable[[float], float]) -> dict[float, float]:
    """Accuracy at `FIRST_RATES`, and at the next of `RATES` while the best is at one end."""
    found = {rate: accuracy(rate) for rate in FIRST_RATES}
    while True:
        best = max(found, key=found.__getitem__)
        near = RATES.index(best)
        beyond = {*RATES[max(near - 1, 0) : near + 2]} - found.keys()
        if not beyond:
            return found
        found |= {rate: accuracy(rate) for rate in beyond}


def epoch_seconds(line: Mapping[str, Any]) -> float:
    """Seconds of a run's last epoch: from one evaluation to the next."""
    (first, _), (second, _) = line["evaluations"][-2:]
    return float(second - first)


def pair(bench: Bench, name: str, script: Script, seed: int, best: Tuned, **more: bool) -> None:
    """Make a script's run and our command's run to the accuracy that it reached."""
    theirs = Asked(name, script, seed, best.epochs, best.loaders[script], best.rate, **more)

    def ours(accuracy: float) -> Asked:
        return Asked(name, "ours", seed, best.epochs, against=script, target=accuracy, **more)

    bench.make_pair(theirs, ours)


def gather(bench: Bench, tasks: Mapping[str, Task]) -> None:
    """Make the missing runs; a task is tuned before its first run.

    Raises:
        TimeIsUpError: Runs are missing, and the time limit has passed.
    """
    order = sorted(tasks, key=lambda name: tasks[name].seconds)
    for seed in SEEDS:
        for name in order:
            best = tuned(bench, name, tasks[name])
            for script in bench.scripts:
                pair(bench, name, script, seed, best)
    for name in order:
        if tasks[name].uneven:
            best = tuned(bench, name, tasks[name])
            pair(bench, name, "torch", SEEDS[0], best, burner=True)


def _has_lightning(python: Path) -> bool:
    words = [python, "-E", "-c", "import lightning, numpy, PIL, torch"]
    with suppress(OSError):
        return not subprocess.run(words, capture_output=True, check=False).returncode
    return False


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line and make the missing runs."""
    parser = make_parser(__doc__)
    add_gathering(parser, LINES)
    parser.add_argument("--lightning-python", type=Path, metavar="PATH")
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--busy", action="store_true")
    asked = parser.parse_args(words)
    if asked.lightning_python and not _has_lightning(asked.lightning_python):
        refuse(
            f"--lightning-python {asked.lightning_python} cannot import what the script needs: "
            "pip install torch==2.13.0 lightning pillow numpy there"
        )
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # runs end with it
    with scratch() as folder:
        bench = Bench(
            asked.lines,
            asked.data,
            folder,
            asked.lightning_python,
            asked.until,
            busy=asked.busy,
            anew=asked.anew,
        )
        try:
            gather(bench, {name: TASKS[name] for name in TASKS if asked.task in (None, name)})
        except TimeIsUpError:
            say("the time is up")
    say(f"kept in {asked.lines}")


if __name__ == "__main__":
    main()
