"""The grid of a sweep: its keys, their values, and the cells of all combinations.

Errors are found before anything is started. Values are compared as the job holds them, so that
``0.1`` and ``1e-1`` are the same value.
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
from batchwright.records.documents import change_job, pairs_of
from batchwright.records.text.formatting import job_value, setting_words
from batchwright.records.text.job_keys import job_keys, unknown_key
from batchwright.records.text.job_values import LISTS, plain
from batchwright.records.text.problems import described
from batchwright.records.text.yaml_text import parse_yaml, yaml_problem
from batchwright.storage.files import beginning

Grid = Mapping[str, str | Sequence[Any]]

_EXAMPLE = "--grid warmup_epochs=0,5,10"
_FIXED = {  # keys that may not vary, and why
    "seed": "say how many seeds with --seeds",
    **dict.fromkeys(
        ("data", "data_args", "val", "unreadable"),
        "accuracy is compared on the same images: sweep over each data set by itself",
    ),
    **dict.fromkeys(
        (
            *("port", "timeout", "restarts"),
            *("checkpoint_epochs", "checkpoint_seconds", "checkpoint_steps"),
        ),
        "it does not change what a run learns",
    ),
    **dict.fromkeys(
        ("device", "evaluate_epochs"), "it would make the runs incomparable: set it for all"
    ),
}
_PLAIN = re.compile(r"[^\w.,=+-]")
_LONGEST_SETTING = 96  # characters of a cell's name before its digest and seed
_LONGEST_CELL = 240
"""Most bytes of a cell's name: a disk takes 255, and its plan is ``NAME.json``. With another number
cells of sweeps that exist would get other names, and be run again."""
MAX_RUNS = 100_000
"""Most runs of a sweep: each takes some seconds at least, and a row of its tables."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        name: Name of the run's folder; the same in every sweep with this cell.
        values: Value of each key, in the keys' order.
        seed: The run's seed.
        job: The job with these values and seed.
    """

    name: str
    values: tuple[JsonValue, ...]
    seed: int
    job: Job


def words_of_grid(texts: Iterable[str]) -> dict[str, str]:
    """The ``KEY=VALUES`` texts of the command line, by key.

    Raises:
        JobError: A text is malformed, or a key comes twice with different values.
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
        job: The job that the values will be set in.
        grid: Values by key: a sequence, or a text as on the command line: ``1,2,3``, or
            ``[1,2],[3,4]`` where values are lists, or a YAML list of all, ``[[1,2]]`` for one list.

    Raises:
        ArgumentError: ``grid`` is no dictionary.
        JobError: There are no keys, or a key is unknown, may not vary, or has no values, a wrong
            value, or the same value twice.
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
    if key in _FIXED:
        raise JobError(f"{key} cannot vary in a sweep: {_FIXED[key]}")
    found: list[JsonValue] = []
    for value in _listed(key, given):
        try:
            held = _held(job, key, value)
        except JobError as error:
            if not isinstance(given, str) or key not in LISTS or isinstance(value, list):
                raise
            raise JobError(
                f"{error}; commas in a grid separate values, so each list needs brackets: write "
                f"--grid '{key}=[V1,V2],[V3,V4]'"
            ) from None
        if job_value(held) in map(job_value, found):  # they would share a folder
            raise JobError(f"the grid repeats {key}={job_value(held)}: give each value once")
        found.append(held)
    if not found:
        raise JobError(f"the grid has no values for {key}: give some, such as {_EXAMPLE}")
    return tuple(found)


def _listed(key: str, given: str | Sequence[Any]) -> Sequence[Any]:
    """The values as a sequence; a text is split at its commas, or is YAML if it has brackets."""
    if not isinstance(given, str):
        if isinstance(given, Mapping) or not isinstance(given, Sequence):
            raise JobError(f"the grid's {key} = {given!r} is no list of values: write [{given!r}]")
        return given
    given = given.strip()
    whole = given.startswith("[")  # a list of all values, if it ends with that bracket's
    if not whole and not (key in LISTS and re.search(r",\s*\[", given)):
        return _split(given)
    values: Any = None
    problem = ""
    for text in (given, f"[{given}]") if whole else (f"[{given}]",):
        try:
            values = parse_yaml(text)
            break
        except yaml.YAMLError as error:
            problem = problem or f" ({yaml_problem(error)})"
    if not whole and values is None:  # such as a pattern of `frozen`
        return _split(given)
    if not isinstance(values, list):
        raise JobError(
            f"the grid's {key} = {given} is no YAML list{problem}: write '[32],[24,32]', or values "
            "without brackets, such as 1,2,3"
        )
    if key in LISTS and len(values) > 1 and not any(isinstance(one, list) for one in values):
        raise JobError(
            f"the grid's {key} = {given} may be one list or {len(values)} values: write "
            f"'[{given}]' for the list, or {given.strip('[ ]')} for the values"
        )
    return values


def _split(given: str) -> Sequence[str]:
    """Values without brackets."""
    return [part.strip() for part in given.split(",")] if given else []


def _held(job: Job, key: str, value: Any) -> JsonValue:
    """The value as a job holds it."""
    held: Any = _with(job, {key: value}).model_dump(mode="json")
    for part in key.split("."):
        held = held[part]
    return held  # type: ignore[no-any-return]


def _with(job: Job, values: Mapping[str, Any]) -> Job:
    """The job with other values of some keys; texts are parsed as on the command line."""
    texts = [f"{key}={value}" for key, value in values.items() if isinstance(value, str)]
    return change_job(job, {k: v for k, v in values.items() if not isinstance(v, str)}, texts)


def widened(before: Sequence[SweptKey], more: Sequence[SweptKey]) -> tuple[SweptKey, ...]:
    """A sweep's keys with the values of another grid added.

    Raises:
        JobError: The other grid has a key that the sweep does not have.
    """
    added, known = {one.key: one.values for one in more}, [one.key for one in before]
    if other := next((key for key in added if key not in known), None):
        raise JobError(
            f"this sweep is over {', '.join(known)}: {other} cannot join it; begin another one in "
            "another --out"
        )
    found = []
    for one in before:
        names = {*map(job_value, one.values)}
        new = (value for value in added.get(one.key, ()) if job_value(value) not in names)
        found.append(SweptKey(key=one.key, values=(*one.values, *new)))
    return tuple(found)


def seeds_of(job: Job, seeds: int | Sequence[int]) -> tuple[int, ...]:
    """The seeds of a sweep: a number of them, counted up from the job's own, or a list.

    Raises:
        ArgumentError: ``seeds`` is neither a number nor a list.
        JobError: There are no seeds or too many, or one comes twice or is no seed.
    """
    seeds = plain(seeds)
    if not isinstance(seeds, int | Sequence) or isinstance(seeds, str | bool):
        raise ArgumentError(
            f"seeds= takes how many, such as 3, or which, such as [0, 1, 2], not {described(seeds)}"
        )
    count = seeds if isinstance(seeds, int) else len(seeds)
    if count > MAX_RUNS:
        raise JobError(f"seeds={count:,}: a sweep has {MAX_RUNS:,} runs at most")
    listed = range(job.seed, job.seed + seeds) if isinstance(seeds, int) else seeds
    if not listed:
        raise JobError(f"seeds={seeds}: a sweep needs one or more")
    held = tuple(change_job(job, {"seed": seed}).seed for seed in listed)
    if len(set(held)) < len(held):
        raise JobError(f"seeds={','.join(map(str, held))} repeat one: give each once")
    return held


def cells_of(job: Job, keys: Sequence[SweptKey], seeds: Sequence[int]) -> list[Cell]:
    """Cells for every combination of values and every seed; all cells of a seed follow each other.

    Raises:
        JobError: A combination contradicts itself, or there are too many cells.
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


def _name(settings: Mapping[str, JsonValue], seed: int) -> str:
    """A folder's name such as ``scaling=sqrt,epochs=5,seed=0``.

    A name with characters that a folder's cannot have, or that is too long, gets a digest.
    """
    words = {key: job_value(value).replace(",", "+") for key, value in settings.items()}
    whole = ",".join(f"{key}={value}" for key, value in words.items())
    plain = _PLAIN.sub("_", whole)
    end = f",seed={seed}"
    long = len(whole) > _LONGEST_SETTING or len(f"{whole}{end}".encode()) > _LONGEST_CELL
    if plain != whole or long:
        digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        end = f",{digest[:8]}{end}"
        plain = beginning(plain[:_LONGEST_SETTING], _LONGEST_CELL - len(end))
    return f"{plain}{end}"
