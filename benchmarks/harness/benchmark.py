"""A benchmark: its declaration, its command line, its reports.

Each runs from the project's root as

    python -m benchmarks.TOPIC.NAME [--quick|--full] [--data DIR] [--json FILE] [--keep DIR]

and prints a table of figures. --full measures all figures and keeps the report in
benchmarks/results. --quick copies the figures that only --full measures from the newest report
there, and, where it can, measures them with few seeds as a check. --keep keeps each finished run of
benchmarks that take hours, and goes on from the runs that are kept. A figure that was neither
measured nor kept is left out, never filled in.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.harness.figures import Figure, Value, print_values

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SINCE = "2026-11-24"
"""Reports of earlier days do not count: since then the package was laid out anew (decision 48), and
steps, exchange and planner changed. docs/log.md has their figures, each benchmark's below its name.
When another change as large moves this day, the figures that drop out move there as well."""
KEPT = "kept: "
"""Prefix of the source of a figure that was copied from an older report."""

_PEERS = (
    *("torch", "numpy", "lightning", "transformers", "accelerate", "pytorch-optimizer"),
    *("tensorboard", "mlflow", "wandb", "trackio"),
)  # packages whose versions a report records, where they are installed
COMMITS = "commits of the runs"  # key of measurements: number of runs by commit, where several ran
BUSY_LOAD = 0.5  # load average of the last minute above which the machine counts as busy

Measurements = dict[str, Any]
"""The single values behind the figures, by name."""
Found = tuple[Mapping[str, Sequence[float] | Value], Measurements]
"""By figure, its measurements or its value; and the single values behind them."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of the command line.

    Attributes:
        full: Whether to measure all figures and keep the report; else the timing figures are
            measured, and the kept ones checked.
        data: Folder with ``cifar-100-python/`` and ``imagenette2-160/``; ``None``: figures that
            need them are left out.
        json: File for the report; ``None``: none is written.
        keep: Folder for finished runs, for benchmarks that can go on from them.
    """

    full: bool
    data: Path | None
    json: Path | None
    keep: Path | None = None


@dataclass(frozen=True)
class Benchmark:
    """The declaration of a benchmark.

    Attributes:
        name: Name of its module and its reports.
        title: Title of its table.
        remark: A remark below the title, about all figures.
        figures: Its figures, in the order of the table.
        seeds: Seeds used with --full, besides 0.
        needs_data: When it needs --data: ``always``, ``full`` (with --full alone), or empty: never.
        copies: Whether --quick copies all figures that it does not measure.
    """

    name: str
    title: str
    remark: str
    figures: tuple[Figure, ...]
    seeds: Sequence[int] = ()
    needs_data: str = ""
    copies: bool = False

    def __getitem__(self, name: str) -> Figure:
        return next(one for one in self.figures if one.name == name)

    def values(self, found: Mapping[str, Sequence[float] | Value]) -> dict[str, Value]:
        """By name, the value of each measured figure; figures without measurements are left out.

        A name with the suffix ``_check`` is a figure that was measured again with few seeds.
        """
        made = {}
        for name, some in found.items():
            if isinstance(some, Value):
                made[name] = some
            elif some:
                figure = self[name.removesuffix("_check")]
                made[name] = figure.of(some, suffix=name.removeprefix(figure.name))
        return made

    def run(
        self,
        measure: Callable[[Arguments, Path], Found],
        description: str | None,
        words: Sequence[str] | None = None,
    ) -> None:
        """Measure, print, and write the report; with --full it is kept.

        Args:
            measure: f(arguments, temporary folder) measures. The cache of decoded images is in that
                folder, too, and not the user's own.
            description: The module's docstring, for --help.
            words: Command line; unset: that of this process.
        """
        arguments = parse_arguments(description or "", words)
        needed = ("always", "full") if arguments.full else ("always",)
        if arguments.data is None and self.needs_data in needed:
            refuse(f"{module_of(self.name)} needs --data DIR here, see --help")
        warn_if_busy()
        sources = commit()
        with scratch() as folder:
            keep = arguments.keep or folder / "kept"
            found, measurements = measure(replace(arguments, keep=keep), folder)
        values = self.values(found)
        if not arguments.full:
            copied = [one.name for one in self.figures if one.full or self.copies]
            values |= {one.name: one for one in kept_values(self.name, copied)}
        print_values(values.values())
        seeds = {0, *(self.seeds if arguments.full else ())}
        report = make_report(self.name, arguments, values.values(), sources, seeds, measurements)
        if arguments.json is not None:
            write_report(report, arguments.json)
        if arguments.full:
            say(f"kept as {keep_report(report)}")


# ---------------------------------------------------------------------------------- command lines


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser that shows a module's docstring as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_data(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add --data DIR, whose default is BATCHWRIGHT_DATA."""
    named = os.environ.get("BATCHWRIGHT_DATA")
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        default=Path(named) if named else None,
        required=required and not named,
        help="folder with cifar-100-python/ and imagenette2-160/ (default: BATCHWRIGHT_DATA)",
    )


def add_gathering(parser: argparse.ArgumentParser, lines: Path | None) -> None:
    """Add the options of commands that gather runs as lines of a file.

    They are --data, --lines and --limit-minutes; the last one gives ``until``, the time
    (`time.monotonic`) after which no run is started.
    """
    add_data(parser, required=True)
    parser.add_argument("--lines", type=Path, metavar="FILE", default=lines)
    parser.add_argument(
        "--limit-minutes",
        dest="until",
        type=lambda minutes: time.monotonic() + 60 * float(minutes),
        default=inf,
        metavar="M",
    )


def parse_arguments(description: str, words: Sequence[str] | None = None) -> Arguments:
    """Read the command line, or ``words``."""
    parser = make_parser(description)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="timing figures, about three minutes")
    mode.add_argument("--full", action="store_true", help="all figures, kept in benchmarks/results")
    add_data(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report here too")
    parser.add_argument(
        "--keep",
        metavar="DIR",
        type=Path,
        help="keep finished runs here and go on from them, where a benchmark takes hours",
    )
    found = parser.parse_args(words)
    return Arguments(full=found.full, data=found.data, json=found.json, keep=found.keep)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder with its own cache of decoded images; removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="batchwright-benchmark-") as made:
        os.environ["BATCHWRIGHT_CACHE"] = str(Path(made) / "cache")
        yield Path(made)


def module_of(name: str) -> str:
    """The module of a benchmark, in the folder of its topic."""
    for path in (ROOT / "benchmarks").glob(f"*/{name}.py"):
        return f"benchmarks.{path.parent.name}.{name}"
    return f"benchmarks.{name}"


def batchwright(*words: object, cwd: Path = ROOT, shown: bool = False) -> dict[str, Any]:
    """The JSON that a command prints; its messages are printed if it fails, or if ``shown``."""
    line = [sys.executable, "-m", "batchwright", *map(str, words), "--json"]
    err = None if shown else subprocess.PIPE
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=err, text=True, check=False, cwd=cwd)
    if done.returncode:
        raise SystemExit(f"{shlex.join(line[2:])} failed:\n{done.stderr or ''}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def say(text: str) -> None:
    """Print a line about the progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def refuse(why: str) -> NoReturn:
    """End with an error message and exit code 2, before anything is measured."""
    say(f"error: {why}")
    raise SystemExit(2)


def require(*packages: str) -> None:
    """End with a message if packages, by their import names, are not installed."""
    if missing := [one for one in packages if find_spec(one) is None]:
        refuse(f"{', '.join(missing)} not installed: pip install '.[benchmark]'")


# ---------------------------------------------------------------------------------------- reports


def make_report(
    name: str,
    arguments: Arguments,
    values: Iterable[Value],
    sources: str,
    seeds: Iterable[int],
    measurements: Measurements,
) -> dict[str, Any]:
    """The report of one run as a JSON object; its command does not depend on the machine.

    Args:
        name: Name of the benchmark.
        arguments: Arguments of its command line.
        values: The figures, measured or copied.
        sources: The result of `commit` at the start of the run, as the checkout may change later.
        seeds: Seeds used in the run.
        measurements: The single values behind the figures, by name.
    """
    words = ["python", "-m", module_of(name), "--full" if arguments.full else "--quick"]
    return {
        "name": name,
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join([*words, *(["--data", "DIR"] if arguments.data else [])]),
        "environment": {**environment(seeds), "commit": sources},
        "figures": [one.as_json() for one in values],
        "measurements": measurements,
    }


def environment(seeds: Iterable[int]) -> dict[str, Any]:
    """The environment of the run: enough to repeat it, without the machine's or the user's name."""
    versions = {}
    for package in _PEERS:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": versions["torch"],
        "versions": versions,
        "seeds": sorted(seeds),
    }


def _processor() -> str:
    """Model name of the processor, and its vector extensions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {key.strip(): value.strip() for key, value in facts.items()}
    flags = fields.get("flags", "").split()
    features = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(features)})"


def warn_if_busy() -> None:
    """Warn on standard error if other programs are computing."""
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        say(
            f"this machine is busy (load {load:.1f}): figures will be wide, or wrong where "
            "programs come and go; better wait until it is quiet"
        )


def commit() -> str:
    """Short name of the checked-out commit; ``+changes`` where tracked sources differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words],  # noqa: S607 - git is where the user's PATH has it
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    # Lines that a benchmark has just kept do not change what it measures.
    sources = ("src", "benchmarks", f":!{RESULTS.relative_to(ROOT)}")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *sources)
    return (name or "unknown") + ("+changes" if changed else "")


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Write a report as indented JSON; NaN and infinity are refused."""
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def keep_report(report: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write the report of a full run among the kept results."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['name']}-{report['date']}-{report['environment']['commit']}.json"
    write_report(report, path)
    return path


def newest(name: str, folder: Path = RESULTS) -> tuple[dict[str, Any], Path] | None:
    """The newest kept report of a benchmark since `SINCE`, and its file; `None`: there is none."""
    reports = [
        (report, path)
        for path in folder.glob(f"{name}-*.json")
        if (report := json.loads(path.read_text(encoding="utf-8")))["date"] >= SINCE
    ]
    return max(reports, key=lambda one: (one[0]["date"], one[1].name), default=None)


def of_its_own(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The figures of a report that were measured for it, without those copied from older ones."""
    return [one for one in report["figures"] if not one.get("from", "").startswith(KEPT)]


def kept_values(name: str, wanted: Iterable[str], folder: Path = RESULTS) -> list[Value]:
    """The ``wanted`` figures of the newest kept report, with that report as their source."""
    found = newest(name, folder)
    if found is None:
        return []
    report, path = found
    where = f"{KEPT}{path.name}, {report['date']}, commit {report['environment']['commit']}"
    values = {one["name"]: Value.from_json(one) for one in of_its_own(report)}
    return [replace(values[one], source=where) for one in wanted if one in values]
