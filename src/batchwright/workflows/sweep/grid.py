"""The grid of a sweep: which keys take which values, and the cells that come of it.

Whatever is wrong is said before anything is started. Values are compared as the job holds them, so
that ``0.1`` and ``1e-1`` count as one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import yaml
from pydantic import JsonValue

from batchwright.errors import ArgumentError, JobError
from batchwright.records import Job, SweptKey
from batchwright.records.documents import change_job, pairs_of, plain
from batchwright.records.text.formatting import job_value
from batchwright.records.text.job_keys import job_keys, unknown_key
from batchwright.records.text.problems import described
from batchwright.records.text.yaml_text import parse_yaml, yaml_problem

Grid = Mapping[str, str | Sequence[Any]]

_EXAMPLE = "--grid warmup_epochs=0,5,10"
_UNCHANGING = {  # key -> why it may not vary
    "seed": "say how many seeds with --seeds",
    **dict.fromkeys(
        ("data", "val", "unreadable"),
        "accuracy is compared on the same images: sweep over each data set by itself",
    ),
    **dict.fromkeys(
        ("port", "timeout", "restarts", "checkpoint_seconds", "checkpoint_steps"),
        "it does not change what a run learns",
    ),
    **dict.fromkeys(
        ("device", "evaluate_epochs"), "it would make the runs incomparable: set it for all"
    ),
}
_PLAIN = re.compile(r"[^\w.,=+-]")
_LONGEST_NAME = 96  # of a folder, in characters
MAX_RUNS = 100_000
"""Of a sweep: each takes seconds at least, and a place in its tables."""


@dataclass(frozen=True)
class Cell:
    """One run to be made."""

    name: str  # of its folder; the same in every sweep that has the cell
    values: tuple[JsonValue, ...]  # of the keys, in their order
    seed: int  # of the run
    job: Job  # with values and seed


def words_of_grid(texts: Iterable[str]) -> dict[str, str]:
    """The ``KEY=VALUES`` texts of the command line, by key.

    Raises:
        JobError: One is no such text, or a key is there twice with different values.
    """
    return pairs_of(
        texts,
        lambda text: JobError(f"--grid {text!r} is no key with values: write {_EXAMPLE}"),
        option="--grid",
        twice="put all its values behind one",
    )


def read_grid(job: Job, grid: Grid) -> tuple[SweptKey, ...]:
    """The keys and values of a grid, checked.

    Args:
        job: That the values will be put into.
        grid: By key its values: a sequence, or a text as on the command line, ``1,2,3`` or a YAML
            list where values hold commas.

    Raises:
        JobError: There are no keys, or a key is unknown, may not vary, has no values, one that it
            does not take, or the same one twice.
    """
    if not grid:
        raise JobError(f"a sweep needs something to vary: give {_EXAMPLE}, say")
    if not isinstance(grid, Mapping):
        raise ArgumentError(
            "sweep takes values by key, such as {'warmup_epochs': [0, 5, 10]}, not "
            f"{described(grid)}"
        )
    return tuple(SweptKey(key=key, values=_values(job, key, plain(grid[key]))) for key in grid)


def _values(job: Job, key: str, given: str | Sequence[Any]) -> tuple[JsonValue, ...]:
    known = job_keys(Job)
    if key not in known:
        raise JobError(unknown_key(key, known))
    if key in _UNCHANGING:
        raise JobError(f"{key} cannot vary in a sweep: {_UNCHANGING[key]}")
    found: list[JsonValue] = []
    for value in _listed(key, given):
        held = _held(job, key, value)
        if held in found:
            raise JobError(f"the grid repeats {key}={job_value(held)}: give each value once")
        found.append(held)
    if not found:
        raise JobError(f"the grid has no values for {key}: give some, such as {_EXAMPLE}")
    return tuple(found)


def _listed(key: str, given: str | Sequence[Any]) -> Sequence[Any]:
    """The single values; a text is split at its commas unless it is a YAML list."""
    if not isinstance(given, str):
        if isinstance(given, Mapping) or not isinstance(given, Sequence):
            raise JobError(f"the grid's {key} = {given!r} is no list of values: write [{given!r}]")
        return given
    if not given.startswith("["):
        return [part.strip() for part in given.split(",")] if given else []
    try:
        values = parse_yaml(given)
        problem = ""
    except yaml.YAMLError as error:
        values, problem = None, f" ({yaml_problem(error)})"
    if not isinstance(values, list):
        raise JobError(
            f"the grid's {key} = {given} is no YAML list{problem}: write '[[32], [24, 32]]', or "
            "values without brackets, such as 1,2,3"
        )
    return values


def _held(job: Job, key: str, value: Any) -> JsonValue:
    """The value as a job holds it."""
    held: Any = _with(job, {key: value}).model_dump(mode="json")
    for part in key.split("."):
        held = held[part]
    return held  # type: ignore[no-any-return]


def _with(job: Job, values: Mapping[str, Any]) -> Job:
    """The job with these keys; a text means what it does on the command line."""
    texts = [f"{key}={value}" for key, value in values.items() if isinstance(value, str)]
    return change_job(job, {k: v for k, v in values.items() if not isinstance(v, str)}, texts)


def widened(before: Sequence[SweptKey], more: Sequence[SweptKey]) -> tuple[SweptKey, ...]:
    """A sweep's keys with the values of another grid over the same keys added.

    Raises:
        JobError: The keys differ.
    """
    added = {one.key: one.values for one in more}
    if set(added) - {one.key for one in before}:
        strange = next(key for key in added if key not in {one.key for one in before})
        raise JobError(
            f"this sweep is over {', '.join(one.key for one in before)}: {strange} cannot join it; "
            "begin another one in another --out"
        )
    return tuple(
        SweptKey(
            key=one.key,
            values=(
                *one.values,
                *(value for value in added.get(one.key, ()) if value not in one.values),
            ),
        )
        for one in before
    )


def seeds_of(job: Job, seeds: int | Sequence[int]) -> tuple[int, ...]:
    """The seeds of a sweep: so many from the job's own on, or those that are given.

    Raises:
        JobError: There are none, or one is there twice or is no seed.
    """
    if not isinstance(seeds, int | Sequence) or isinstance(seeds, str):
        raise ArgumentError(
            f"seeds= takes how many, such as 3, or which, such as [0, 1, 2], not {described(seeds)}"
        )
    count = seeds if isinstance(seeds, int) else len(seeds)
    if count > MAX_RUNS:
        raise JobError(f"seeds={count:,}: a sweep has {MAX_RUNS:,} runs at most")
    listed = range(job.seed, job.seed + seeds) if isinstance(seeds, int) else tuple(seeds)
    if not listed:
        raise JobError(f"seeds={seeds}: a sweep needs one or more")
    for seed in listed:
        change_job(job, {"seed": seed})
    if len(set(listed)) < len(listed):
        raise JobError(f"seeds={','.join(map(str, listed))} repeat one: give each once")
    return tuple(listed)


def cells_of(job: Job, keys: Sequence[SweptKey], seeds: Sequence[int]) -> list[Cell]:
    """Every combination of the values with every seed: all of the first seed come first.

    Raises:
        JobError: Values do not go together; the message names them.
    """
    names = [one.key for one in keys]
    count = prod(len(one.values) for one in keys) * len(seeds)
    if count > MAX_RUNS:
        raise JobError(
            f"the grid has {count:,} runs with its seeds: give fewer values or seeds, {MAX_RUNS:,} "
            "runs at most"
        )
    combinations = list(itertools.product(*(one.values for one in keys)))
    found = []
    for seed in seeds:
        for values in combinations:
            settings = dict(zip(names, values, strict=True))
            try:
                whole = _with(job, {**settings, "seed": seed})
            except JobError as error:
                raise JobError(f"setting {setting_words(names, values)}: {error}") from None
            found.append(Cell(name=_name(settings, seed), values=values, seed=seed, job=whole))
    return found


def setting_words(keys: Sequence[str], values: Sequence[JsonValue]) -> str:
    """A setting as on the command line: ``scaling=sqrt warmup_epochs=5``."""
    return " ".join(f"{key}={job_value(value)}" for key, value in zip(keys, values, strict=True))


def _name(settings: Mapping[str, JsonValue], seed: int) -> str:
    """Such as ``scaling=sqrt,epochs=5,seed=0``; what a folder cannot hold becomes a digest."""
    words = {key: job_value(value).replace(",", "+") for key, value in settings.items()}
    told = ",".join(f"{key}={value}" for key, value in words.items())
    plain = _PLAIN.sub("_", told)
    if plain != told or len(told) > _LONGEST_NAME:
        digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        plain = f"{plain[:_LONGEST_NAME]},{digest[:8]}"
    return f"{plain},seed={seed}"
