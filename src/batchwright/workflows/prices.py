"""Kinds of workers from a file of prices: our own columns, or those of SkyPilot's catalogues.

A file with our columns has a row for each kind: ``kind`` and ``price``, and optionally
``spot_price``, ``preemptions_per_hour``, ``count``, ``memory``, ``like`` and ``speed``. A catalogue
has a row for each instance type and place; for each measured accelerator the cheapest place counts.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from batchwright.errors import FileError, PlanError
from batchwright.planning.merging import kind_of, merge_profiles
from batchwright.planning.validation import planning_job, within_measured
from batchwright.records import Job, Profile, WorkerKind
from batchwright.records.documents import change_job

_KEY = "goal.kinds"
_SPOT = "-spot"  # end of the names of spot workers, which may be taken away
MAX_BYTES = 16 << 20
"""Largest file, in bytes: a cloud's whole catalogue has about one MiB."""
MIN_VALUE, MAX_VALUE, MAX_MEMORY = 1e-9, 1e9, 2**53
"""Smallest and largest price or speed, and largest memory in bytes, as `WorkerKind` allows."""
_CATALOGUE = (
    *("InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB"),
    *("Price", "SpotPrice", "Region", "AvailabilityZone"),
)
_OWN = ("kind", "price", "spot_price", "preemptions_per_hour", "count", "memory", "like", "speed")


class _Row(NamedTuple):
    """A row of the file, with its line number, for messages."""

    path: Path
    line: int
    values: Mapping[str, str]

    def wrong(self, column: str, what: str) -> FileError:
        """The error for the value of a column, with file and line."""
        value = self.values.get(column, "")
        return FileError(f"{self.path} line {self.line}, column {column}: {value!r} {what}")

    def number(
        self, column: str, kind: Callable[[str], float] = float, most: float = MAX_VALUE
    ) -> float | None:
        """The positive number in a column; `None` if the cell is empty.

        Raises:
            FileError: The cell holds something else, or a number out of range.
        """
        text = self.values.get(column, "")
        if not text:
            return None
        try:
            value = kind(text.replace("_", "?"))  # Python would read 1_0 as ten
        except ValueError:
            raise self.wrong(column, "is no number") from None
        if not 0 < value < inf:  # this comparison also works for integers too large for a float
            raise self.wrong(column, "is no positive number")
        if value < MIN_VALUE:
            raise self.wrong(column, f"is less than {MIN_VALUE:g}")
        if value > most:
            raise self.wrong(column, f"is more than {most:g}")
        return value


def priced_job(
    profiles: Sequence[Profile], keys: Mapping[str, Any], overrides: Iterable[str] = ()
) -> Job:
    """The job to plan, from profiles and keys, with the kinds of its file of prices, if any.

    Args:
        profiles: At least one profile.
        keys: Job keys to change.
        overrides: ``key=value`` texts, as on the command line.

    Raises:
        JobError: A key or a value is wrong.
        FileError: The file of prices is missing, or a row of it is wrong.
        PlanError: The profiles are of different workloads, or none of the file's kinds was
            measured.
    """
    measured = merge_profiles(profiles)
    job = change_job(planning_job(*measured), keys, overrides)
    if job.goal.prices is None:
        return job
    names = [kind_of(one) for one in measured]
    return _with_kinds(job, kinds_of_file(Path(job.goal.prices), names, job.goal.max_workers))


def job_here(job: Job, profile: Profile) -> Job:
    """The job of a run, which trains with the measured workers, with the prices of its file if any.

    `goal.max_workers` is no more than their number. Workers cost the on-demand price of their kind,
    or its spot price if their kind's name ends in ``-spot`` (``a100-spot``). A host that is a kind
    of its own because of its speed costs what others of its kind cost. Other kinds of the file are
    left out: the run cannot train with them.

    Args:
        job: The job to plan.
        profile: The profile of the workers here.

    Raises:
        FileError: The file of prices is missing, or a row of it is wrong.
        PlanError: The file has no price for a measured kind.
    """
    job = within_measured(job, profile)
    if job.goal.prices is None:
        return job
    path, found = Path(job.goal.prices), []
    for one in merge_profiles([profile]):
        name, count = kind_of(one), _count(one, job)
        called = list(dict.fromkeys((name, name.rpartition(" (")[0] or name)))
        usual = [each.removesuffix(_SPOT) for each in called]
        offered = kinds_of_file(path, usual, count, others=True)
        mine = next((kind for each in called for kind in offered if kind.kind == each), None)
        if mine is None:
            raise PlanError(
                f"{path} has no price for {name!r}, which is here: add a row for it, or say which "
                "of its kinds that is, with probe.kind or, where several hosts train together, by "
                "BATCHWRIGHT_KIND on each such host"
            )
        own = {"kind": name, "like": "", "speed": 1.0, "count": count}
        found.append(mine.model_copy(update=own))
    return _with_kinds(job, found)


def check_prices(job: Job) -> Job:
    """Check the file of prices that a job names, before the kinds of workers are known.

    Returns:
        The job with the file's absolute path, so that the run can be resumed from any folder.

    Raises:
        FileError: The file of prices is missing, or a row of it is wrong.
    """
    if job.goal.prices is None:
        return job
    path = Path(job.goal.prices)
    kinds_of_file(path, (), job.goal.max_workers or 1, others=True)
    goal = job.goal.model_copy(update={"prices": str(path.absolute())})
    return job.model_copy(update={"goal": goal})


def _count(profile: Profile, job: Job) -> int:
    """Number of workers of a profile's kind; with a simulated cluster, of its virtual workers."""
    if profile.kinds:
        return profile.kinds[0].workers
    measured = max(one.workers for one in profile.steps)
    asked = job.workers if isinstance(job.workers, int) else 1
    return max(measured, asked, job.goal.max_workers or 1) if job.launcher.simulated else measured


def _with_kinds(job: Job, kinds: Sequence[WorkerKind]) -> Job:
    goal = job.goal.model_copy(update={"kinds": tuple(kinds), "prices": None})
    return job.model_copy(update={"goal": goal})


def kinds_of_file(
    path: Path, measured: Sequence[str], most: int | None, *, others: bool = False
) -> tuple[WorkerKind, ...]:
    """The kinds of workers in a file of prices; spot workers are kinds of their own.

    Args:
        path: A CSV file with our own columns or a catalogue's.
        measured: Names of the measured kinds.
        most: Number of workers of a kind where the file does not say it.
        others: Whether the file may hold kinds that are like no measured one.

    Raises:
        FileError: The file is missing, or a row of it is wrong.
        PlanError: None of its kinds was measured.
    """
    rows, columns = _read(path)
    if "InstanceType" in columns:
        return _of_catalogue(path, rows, columns, measured, most, others=others)
    return _of_own(path, rows, columns, measured, most, others=others)


def _read(path: Path) -> tuple[list[_Row], list[str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
                raise FileError(
                    f"{path} has {size >> 20} MiB, of at most {MAX_BYTES >> 20}: keep the rows of "
                    "the workers that you may take"
                )
            reader = csv.DictReader(file, strict=True)
            columns = [(name or "").strip() for name in reader.fieldnames or ()]
            if reader.fieldnames is not None and not any(columns):
                raise FileError(f"{path} line 1 is empty: it has to name the columns")
            reader.fieldnames = columns
            if len(columns) == 1 and ";" in columns[0]:
                raise FileError(f"{path} line 1: its columns are separated by semicolons: use ,")
            if twice := next((name for name in columns if columns.count(name) > 1), ""):
                raise FileError(f"{path} line 1: column {twice} comes twice")
            rows = []
            for values in reader:
                if None in values:
                    raise FileError(
                        f"{path} line {reader.line_num}: more than the {len(columns)} columns that "
                        "its first line names"
                    )
                cells = {name: (value or "").strip() for name, value in values.items()}
                rows.append(_Row(path, reader.line_num, cells))
            return rows, columns
    except FileNotFoundError:
        raise FileError(f"there is no file {path}, which {_KEY} names") from None
    except UnicodeDecodeError:
        raise FileError(f"cannot read {path}: it is not text in UTF-8") from None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    except csv.Error as error:
        raise FileError(f"{path} line {reader.line_num} is not CSV: {error}") from None


def _need(path: Path, columns: Sequence[str], *needed: str) -> None:
    missing = [name for name in needed if name not in columns]
    if missing:
        raise FileError(
            f"{path} line 1: no column {' and '.join(missing)}; a file of prices has "
            f"{','.join(_OWN)}, or is a catalogue with {','.join(_CATALOGUE)}"
        )


# ------------------------------------------------------------------------------------ our own file


def _of_own(
    path: Path,
    rows: Sequence[_Row],
    columns: Sequence[str],
    measured: Sequence[str],
    most: int | None,
    *,
    others: bool,
) -> tuple[WorkerKind, ...]:
    _need(path, columns, "kind", "price")
    if unknown := next((name for name in columns if name not in _OWN), None):
        raise FileError(f"{path} line 1: column {unknown!r} is unknown; known are {','.join(_OWN)}")
    found: list[WorkerKind] = []
    lines: dict[str, int] = {}
    for row in rows:
        name, like = row.values["kind"], row.values.get("like", "")
        if not name:
            raise row.wrong("kind", "is no name")
        if name in lines:
            raise row.wrong("kind", f"is there already, by line {lines[name]}")
        lines[name] = row.line
        if not others and (like or name) not in measured:
            column = "like" if like else "kind"
            known = ", ".join(map(repr, measured))
            raise row.wrong(column, f"was not measured, only {known}: say in `like` which of these")
        price = row.number("price")
        if price is None:
            raise row.wrong("price", "is no price of a worker for an hour")
        count = row.number("count", int) or most
        if count is None:
            raise row.wrong("count", "says not how many there are, nor does goal.max_workers")
        memory = row.number("memory", int, MAX_MEMORY)
        usual = WorkerKind(
            kind=name,
            count=int(count),
            price=price,
            memory=None if memory is None else int(memory),
            like=like,
            speed=row.number("speed") or 1.0,
        )
        found.append(usual)
        spot = row.number("spot_price")
        rate = row.values.get("preemptions_per_hour", "")
        often = 0.0 if rate and rate.strip("0.") == "" else row.number("preemptions_per_hour")
        if spot is not None:
            found.append(_spot(usual, spot, often))
            if (derived := found[-1].kind) in lines:
                line = lines[derived]
                raise row.wrong("spot_price", f"makes a kind {derived!r}, which line {line} names")
            lines[derived] = row.line
    if not found:
        raise FileError(f"{path} holds no kinds of workers, only its first line")
    return tuple(found)


def _spot(kind: WorkerKind, price: float, often: float | None = None) -> WorkerKind:
    """The kind as spot workers, which may be taken away."""
    changed = {
        "kind": f"{kind.kind}{_SPOT}",
        "price": price,
        "like": kind.like or kind.kind,
        "spot": True,
        "preemptions_per_hour": often,
    }
    return kind.model_copy(update=changed)


# ------------------------------------------------------------------------------------- a catalogue


def _of_catalogue(
    path: Path,
    rows: Sequence[_Row],
    columns: Sequence[str],
    measured: Sequence[str],
    most: int | None,
    *,
    others: bool,
) -> tuple[WorkerKind, ...]:
    _need(path, columns, "InstanceType", "AcceleratorName", "AcceleratorCount", "Price")
    offered: dict[str, list[tuple[float | None, float | None, int]]] = {}
    for row in rows:
        name = row.values["AcceleratorName"] or row.values["InstanceType"]
        if not name:
            raise row.wrong("InstanceType", "is no name")
        count = 1.0
        if row.values["AcceleratorName"]:
            count = row.number("AcceleratorCount") or 0.0
            if not count:
                raise row.wrong("AcceleratorCount", "says not how many there are")
        price, spot = (_of_one(row, column, count) for column in ("Price", "SpotPrice"))
        offered.setdefault(name, []).append((price, spot, max(1, int(count))))
    found = [one for kind in measured for one in _offers(kind, offered, most)]
    if not found and not others:
        names = sorted(offered)
        listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        raise PlanError(
            f"{path} has no price for {', '.join(map(repr, measured))}, only for "
            f"{listed or 'nothing'}: name the kind when probing, such as probe.kind=A100, or write "
            "a file with the columns kind,price"
        )
    return tuple(found)


def _of_one(row: _Row, column: str, count: float) -> float | None:
    """A row's price divided by its ``count`` accelerators; `None` if the row has no price.

    Raises:
        FileError: The result is too small or too large for a price.
    """
    price = row.number(column)
    if price is None:
        return None
    if not MIN_VALUE <= price / count <= MAX_VALUE:
        raise row.wrong(column, f"is no price of {count:g} of them")
    return price / count


def _offers(
    kind: str,
    offered: Mapping[str, Sequence[tuple[float | None, float | None, int]]],
    most: int | None,
) -> Iterator[WorkerKind]:
    """The offers for a measured kind: on demand, and spot."""
    # A catalogue's name is the kind's, or all its words are in the kind's name. Of several such
    # names, the longest: an A100-80GB is no A100.
    word = re.compile("[a-z0-9.]+")
    own = set(word.findall(kind.lower()))
    names = [
        name
        for name in offered
        if name.lower() == kind.lower() or set() < set(word.findall(name.lower())) <= own
    ]
    if not names:
        return
    rows = offered[max(names, key=len)]
    count = most or max(count for *_, count in rows)
    prices = [price for price, *_ in rows if price is not None]
    spots = [spot for _, spot, _ in rows if spot is not None]
    if prices:
        yield WorkerKind(kind=kind, count=count, price=min(prices))
    if spots:
        usual = WorkerKind(kind=kind, count=count, price=min(spots))
        yield _spot(usual, min(spots))
