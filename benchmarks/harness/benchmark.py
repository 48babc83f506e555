"""A benchmark: its declaration, its command line, its reports.

Each runs from the project's root as

    python -m benchmarks.TOPIC.NAME [--quick|--full] [--data DIR] [--json FILE] [--keep DIR]

and prints a table of figures. --full measures all of them and keeps the report in
benchmarks/results; --quick copies from the newest one there what only --full measures, and where it
can measures that once more with few seeds as a check. --keep keeps each finished run, where a
benchmark takes hours, and goes on from what is there. A figure that was neither measured nor kept
is left out, never filled in.
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
"""Reports of earlier days count no more: since then the package was laid out anew (decision 48),
and steps, exchange and planner changed. docs/log.md has their figures, each benchmark's below its
name. When a change as large moves this day on, what falls out then goes there, too."""
KEPT = "kept: "
"""How the source of a figure begins that is copied from an older report."""

_PEERS = (
    *("torch", "numpy", "lightning", "transformers", "accelerate", "pytorch-optimizer"),
    *("tensorboard", "mlflow", "wandb", "trackio"),
)  # whose versions a report tells, where they are installed
COMMITS = "commits of the runs"  # among measurements: how many each made, where several did
BUSY_LOAD = 0.5  # programs that want to compute, over the last minute

Measurements = dict[str, Any]
"""The single values behind the figures, by what they are of."""
Found = tuple[Mapping[str, Sequence[float] | Value], Measurements]
"""By figure what was measured of it, or the value itself; and what is behind them."""


@dataclass(frozen=True)
class Arguments:
    """What the command line says.

    Attributes:
        full: All figures, kept afterwards; else the timing figures and a check of the kept ones.
        data: Folder with ``cifar-100-python/`` and ``imagenette2-160/``; ``None``: figures that
            need them are left out.
        json: File for the report; ``None`` writes none.
        keep: Takes finished runs, where a benchmark can go on from them.
    """

    full: bool
    data: Path | None
    json: Path | None
    keep: Path | None = None


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as it is declared.

    Attributes:
        name: Of its module and its reports.
        title: Of its table.
        remark: Below the title: what holds for all figures.
        figures: In the order of the table.
        seeds: Used with --full, besides 0.
        needs_data: ``always``, with ``full`` alone, or not.
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
        """By name, the value of each figure that was measured; those without measurements lack.

        A name that ends in ``_check`` is that of a figure, measured once more with few seeds.
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
            measure: f(arguments, temporary folder) -> what was found. The cache of decoded images
                is in that folder too, and leaves the user's alone.
            description: The module's docstring, for --help.
            words: Command line; unset: this process's.
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
    """--data DIR, which BATCHWRIGHT_DATA may give, too."""
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
    """What gathers runs as lines of a file is told: --data, --lines, and when to stop.

    ``until`` is then when nothing is started any more (`time.monotonic`).
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
def scratch(folder: Path | None = None) -> Iterator[Path]:
    """A folder with a cache of decoded images of its own; gone afterwards, unless it is given."""
    with tempfile.TemporaryDirectory(prefix="batchwright-benchmark-") as made:
        folder = folder or Path(made)
        os.environ["BATCHWRIGHT_CACHE"] = str(folder / "cache")
        yield folder


def module_of(name: str) -> str:
    """The module of a benchmark, in the folder of its topic."""
    for path in (ROOT / "benchmarks").glob(f"*/{name}.py"):
        return f"benchmarks.{path.parent.name}.{name}"
    return f"benchmarks.{name}"


def batchwright(*words: object, cwd: Path = ROOT, shown: bool = False) -> dict[str, Any]:
    """What a command prints as JSON; its messages are told if it fails, or where ``shown``."""
    told = [sys.executable, "-m", "batchwright", *map(str, words), "--json"]
    out = None if shown else subprocess.PIPE
    done = subprocess.run(told, stdout=subprocess.PIPE, stderr=out, text=True, check=False, cwd=cwd)
    if done.returncode:
        raise SystemExit(f"{shlex.join(told[2:])} failed:\n{done.stderr or ''}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def say(text: str) -> None:
    """How far the run is, on standard error."""
    print(text, file=sys.stderr, flush=True)


def refuse(why: str) -> NoReturn:
    """End with a line and exit code 2, before anything is measured."""
    say(f"error: {why}")
    raise SystemExit(2)


def require(*packages: str) -> None:
    """Refuse to begin without packages, by the names imported, that would be missed only later."""
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
    """The JSON object of one run; its command is the same on every machine.

    Args:
        name: The benchmark.
        arguments: Its command line.
        values: What was measured or copied.
        sources: `commit` as it was when the run began; a long run may outlive it.
        seeds: Used in the run.
        measurements: The single values behind the figures, by what they are of.
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
    """Where the run took place: enough to repeat it, nothing that names the machine or its user."""
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
    """Model name, and what it computes with."""
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
    """A line on standard error where other programs compute besides."""
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
    # Lines that a benchmark has just kept are no change of what it measures.
    sources = ("src", "benchmarks", f":!{RESULTS.relative_to(ROOT)}")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *sources)
    return (name or "unknown") + ("+changes" if changed else "")


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """As indented JSON; NaN and infinity are refused."""
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def keep_report(report: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write the report of a full run among the kept results."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['name']}-{report['date']}-{report['environment']['commit']}.json"
    write_report(report, path)
    return path


def newest(name: str, folder: Path = RESULTS) -> tuple[dict[str, Any], Path] | None:
    """The newest kept report of a benchmark, and its file; none of a day before `SINCE`."""
    reports = [
        (report, path)
        for path in folder.glob(f"{name}-*.json")
        if (report := json.loads(path.read_text(encoding="utf-8")))["date"] >= SINCE
    ]
    return max(reports, key=lambda one: (one[0]["date"], one[1].name), default=None)


def of_its_own(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Its figures but for those that it copies from an older report, of older code."""
    return [one for one in report["figures"] if not one.get("from", "").startswith(KEPT)]


def kept_values(name: str, wanted: Iterable[str], folder: Path = RESULTS) -> list[Value]:
    """The ``wanted`` figures of the newest kept result, each saying where it is from."""
    found = newest(name, folder)
    if found is None:
        return []
    report, path = found
    where = f"{KEPT}{path.name}, {report['date']}, commit {report['environment']['commit']}"
    values = {one["name"]: Value.from_json(one) for one in of_its_own(report)}
    return [replace(values[one], source=where) for one in wanted if one in values]
