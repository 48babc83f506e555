"""What all benchmarks share: arguments, facts of the machine, figures, the kept results.

A benchmark runs from the project's root as

    python -m benchmarks.NAME [--quick|--full] [--data DIR] [--json FILE] [--keep DIR]

and prints a table of figures. A figure that was not measured is left out, never filled in.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import Any

from rich.console import Console
from rich.table import Table
from scipy.special import stdtrit

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
THIS_RUN = "measured in this run"
BUSY_LOAD = 0.5  # programs that want to compute, over the last minute

Measurements = dict[str, Any]
"""The single values behind the figures, by what they are of."""

# ------------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Arguments:
    """What the command line says.

    Attributes:
        full: All figures, kept afterwards; else the timing figures and a check of the kept ones.
        data: Folder with ``cifar-100-python/`` and ``imagenette2-160/``; ``None``: figures that
            need them are left out.
        json: File for the report; ``None`` writes none.
        keep: Takes finished runs, where a benchmark can go on from them; ``None`` keeps none.
    """

    full: bool
    data: Path | None
    json: Path | None
    keep: Path | None = None


def parse_arguments(description: str, words: Sequence[str] | None = None) -> Arguments:
    """Read the command line, or ``words``; the data folder may also be in BATCHWRIGHT_DATA."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="timing figures, about three minutes")
    mode.add_argument("--full", action="store_true", help="all figures, kept in benchmarks/results")
    named = os.environ.get("BATCHWRIGHT_DATA")
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        default=Path(named) if named else None,
        help="folder with cifar-100-python/ and imagenette2-160/ (default: BATCHWRIGHT_DATA)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report here too")
    parser.add_argument(
        "--keep",
        metavar="DIR",
        type=Path,
        help="keep finished runs here and go on from them, where a benchmark takes hours",
    )
    found = parser.parse_args(words)
    return Arguments(full=found.full, data=found.data, json=found.json, keep=found.keep)


def module_of(name: str) -> str:
    """The module of a benchmark, in the folder of its topic."""
    for path in (ROOT / "benchmarks").glob(f"*/{name}.py"):
        return f"benchmarks.{path.parent.name}.{name}"
    return f"benchmarks.{name}"


def command(name: str, arguments: Arguments) -> str:
    """The command line in a form that is the same on every machine: folders by their meaning."""
    words = ["python", "-m", module_of(name), "--full" if arguments.full else "--quick"]
    if arguments.data is not None:
        words += ["--data", "DIR"]
    return shlex.join(words)


# --------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        name: What was measured.
        value: In ``unit``.
        unit: ``ratio``, ``images/s``, ``s``, ``share``, ``points`` (hundredths of a share), or what
            was counted.
        low: Lower end of the spread; which spread, the function that made the figure says.
        high: Upper end.
        repeats: Measurements behind it.
        goal: The value to reach, if there is one.
        met: Whether it is reached; ``None`` without a goal.
        source: Where the value is from; ``from`` in JSON.
    """

    name: str
    value: float
    unit: str
    low: float
    high: float
    repeats: int
    goal: float | None = None
    met: bool | None = None
    source: str = THIS_RUN

    def as_json(self) -> dict[str, Any]:
        """Plain values; six significant digits say all that such measurements can."""
        values = asdict(self)
        values["from"] = values.pop("source")
        return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Figure:
        """What `as_json` gave."""
        values = dict(values)
        return cls(source=values.pop("from"), **values)


def median_figure(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Figure:
    """Median, and the quartiles as spread; the goal is on the median."""
    low, middle, high = quartiles(values)
    goal, met = _held(middle, at_least, at_most)
    return Figure(name, middle, unit, low, high, len(values), goal, met)


def ratio_figure(
    name: str,
    over: Sequence[float],
    under: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Figure:
    """Median over the rounds of ``over / under`` within a round, and the quartiles as spread."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return median_figure(name, ratios, "ratio", at_least=at_least, at_most=at_most)


def mean_figure(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Figure:
    """Mean, and the range as spread; the goal is on the mean."""
    mean = fmean(values)
    goal, met = _held(mean, at_least, at_most)
    return Figure(name, mean, unit, min(values), max(values), len(values), goal, met)


def _held(
    value: float, at_least: float | None, at_most: float | None
) -> tuple[float | None, bool | None]:
    """The goal, if there is one, and whether ``value`` reaches it."""
    if at_least is not None:
        return at_least, value >= at_least
    if at_most is not None:
        return at_most, value <= at_most
    return None, None


def difference_figure(
    name: str, values: Sequence[float], reference: Sequence[float], unit: str, *, margin: float
) -> Figure:
    """Mean of paired differences, and Student's 95 % interval as spread.

    "No worse" means that the interval's lower end is above ``-margin``. A single pair has no
    interval: it is a check, without a goal.
    """
    differences = [a - b for a, b in zip(values, reference, strict=True)]
    figure = interval_figure(name, differences, unit)
    if len(differences) == 1:
        return figure
    return replace(figure, goal=-margin, met=figure.low > -margin)


def interval_figure(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Figure:
    """Mean, and Student's 95 % interval as spread, none for one value; the goal is on the mean."""
    mean, count, half = fmean(values), len(values), 0.0
    if count > 1:
        half = float(stdtrit(count - 1, 0.975)) * stdev(values) / math.sqrt(count)
    goal, met = _held(mean, at_least, at_most)
    return Figure(name, mean, unit, mean - half, mean + half, count, goal, met)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; all the same for a single value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def print_figures(figures: Iterable[Figure]) -> None:
    """A table for a person."""
    table = Table()
    for title in ("figure", "value", "spread", "unit", "repeats", "goal", "met", "from"):
        table.add_column(title, justify="left" if title in ("figure", "from") else "right")
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.value:.4g}",
            f"{figure.low:.4g} to {figure.high:.4g}",
            figure.unit,
            str(figure.repeats),
            "" if figure.goal is None else f"{figure.goal:g}",
            "" if figure.met is None else "yes" if figure.met else "NO",
            figure.source,
        )
    Console(width=None if os.isatty(1) else 140).print(table)


# -------------------------------------------------------------------------------------- a whole run


def run_benchmark(
    name: str,
    description: str | None,
    measure: Callable[[Arguments, Path], tuple[list[Figure], Measurements]],
    *,
    full_seeds: Iterable[int],
    words: Sequence[str] | None = None,
) -> None:
    """Measure, print, and write the report; with --full it is kept.

    Args:
        name: The benchmark.
        description: Its docstring; the first paragraph is its help.
        measure: f(arguments, temporary folder) -> figures and measurements. The cache of decoded
            images is in that folder too, and leaves the user's alone.
        full_seeds: Seeds used with --full, besides 0.
        words: Command line; unset: this process's.
    """
    arguments = parse_arguments((description or "").partition("\n\n")[0], words)
    warn_if_busy()
    sources = commit()
    with tempfile.TemporaryDirectory(prefix="batchwright-benchmark-") as folder:
        os.environ["BATCHWRIGHT_CACHE"] = str(Path(folder) / "cache")
        figures, measurements = measure(arguments, Path(folder))
    print_figures(figures)
    seeds = {0, *(full_seeds if arguments.full else ())}
    report = make_report(
        name, arguments, figures, sources=sources, seeds=seeds, measurements=measurements
    )
    if arguments.json is not None:
        write_report(report, arguments.json)
    if arguments.full:
        say(f"kept as {keep(report)}")


def say(text: str) -> None:
    """How far the run is, on standard error."""
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------- reports, results


def make_report(
    name: str,
    arguments: Arguments,
    figures: Iterable[Figure],
    *,
    sources: str,
    seeds: Iterable[int],
    measurements: Measurements,
) -> dict[str, Any]:
    """The JSON object of one run.

    Args:
        name: The benchmark.
        arguments: Its command line.
        figures: What was measured or copied.
        sources: `commit` as it was when the run began; a long run may outlive it.
        seeds: Used in the run.
        measurements: The single values behind the figures, by what they are of.
    """
    return {
        "name": name,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command(name, arguments),
        "environment": {**environment(seeds), "commit": sources},
        "figures": [figure.as_json() for figure in figures],
        "measurements": measurements,
    }


def environment(seeds: Iterable[int]) -> dict[str, Any]:
    """Where the run took place: enough to repeat it, nothing that names the machine or its user."""
    packages = ("torch", "numpy", "lightning", "accelerate", "pytorch-optimizer")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "versions": {name: version for name in packages if (version := _version(name))},
        "seeds": sorted(seeds),
    }


def warn_if_busy() -> None:
    """A line on standard error where other programs compute besides."""
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        print(
            f"this machine is busy (load {load:.1f}): figures will be wide, or wrong where "
            "programs come and go; better wait until it is quiet",
            file=sys.stderr,
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
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks")
    return (name or "unknown") + ("+changes" if changed else "")


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """As indented JSON; NaN and infinity are refused."""
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def keep(report: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write the report of a full run among the kept results."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['name']}-{report['date']}-{report['environment']['commit']}.json"
    write_report(report, path)
    return path


def kept_figures(name: str, wanted: Iterable[str], folder: Path = RESULTS) -> list[Figure]:
    """The ``wanted`` figures of the newest kept result, each saying where it is from."""
    reports = [
        (json.loads(p.read_text(encoding="utf-8")), p) for p in folder.glob(f"{name}-*.json")
    ]
    if not reports:
        return []
    report, path = max(reports, key=lambda found: (found[0]["date"], found[1].name))
    where = f"kept: {path.name}, {report['date']}, commit {report['environment']['commit']}"
    figures = {values["name"]: Figure.from_json(values) for values in report["figures"]}
    return [replace(figures[one], source=where) for one in wanted if one in figures]


def _processor() -> str:
    """Model name, and whether it computes in bfloat16."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {key.strip(): value.strip() for key, value in facts.items()}
    flags = fields.get("flags", "").split()
    features = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(features)})"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
