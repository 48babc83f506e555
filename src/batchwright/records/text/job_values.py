"""Values of job keys as people write them: lists, tables and arguments, parsed from texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from batchwright.errors import JobError
from batchwright.records.job import Job, as_written
from batchwright.records.job_sections import names_prices
from batchwright.records.text.job_keys import job_keys, unknown_key
from batchwright.records.text.problems import shorten
from batchwright.records.text.yaml_text import parse_yaml, yaml_problem

LISTS = (
    *("betas", "frozen", "normalize", "resolutions", "track", "dual.large_batches"),
    *("virtual.speeds", "virtual.overheads", "virtual.links"),
    *("virtual.sample_seconds", "virtual.step_seconds"),
    *("cycle.keep", "cycle.stage_epochs", "cycle.stage_rates", "cycle.shares"),
    *("cycle.batches", "cycle.dropouts", "cycle.strengths", "slurm.lines"),
)
"""Job keys that take several values, separated by commas."""
ARGUMENTS = ("data_args", "network_args")
"""Job keys whose parts may have any name."""
# Of `LISTS`: keys that keep a single value as it is, since it holds for all resolutions.
_ONE_OR_EACH = ("virtual.sample_seconds", "virtual.step_seconds")
# Values that keys of `LISTS` may have in place of a list.
_WORDS = ("auto", "data", "knee", "memory")
_MAX_BRACKETS = 500
"""Most open brackets in the text of a table: the parser's time grows with their square."""
_MAX_CHARACTERS = 16 * 1024
"""Longest text that is read as a table or a list."""
TABLES = {
    "goal.kinds": "[{kind: t4, count: 4, price: 0.35}]",
    "virtual.disturbances": "[{worker: 0, start: 10, end: 20, slowdown: 3}]",
}
"""Job keys that take several items, each with keys of its own, and an example of each."""


def flattened(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(key, value) pairs of nested values, with dots in the keys, such as ``goal.price``."""
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        # A section of the job may be given as a record, and a key in a YAML file may be a number.
        name, value = f"{prefix}{key}", plain(value)
        if isinstance(value, Mapping) and name not in TABLES and prefix[:-1] not in ARGUMENTS:
            pairs += flattened(value, f"{name}.")
        else:
            pairs.append((name, value))
    return pairs


def plain(value: Any) -> Any:
    """The value with records, NumPy arrays and numbers, also in lists, turned into Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump()
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def set_key(values: dict[str, Any], key: str, value: Any, place: str) -> None:
    """Set a key with dots in the nested ``values`` of a job, lists and tables parsed from text.

    ``place`` is where it was written, for messages; empty on a command line.

    Raises:
        JobError: There is no such key, or its value cannot be parsed.
    """
    known = job_keys(Job)
    section, argument = section_of(key)
    if section:
        before = values[section] if isinstance(values[section], dict) else {}
        whole = {} if value is None else value
        values[section] = {**before, argument: value} if argument else whole
        return
    if key not in known:
        raise JobError(unknown_key(key, known, place))
    *parents, last = key.split(".")
    for parent in parents:
        values = values[parent]
    if key == "goal.kinds":  # `kinds` and `prices` replace each other: the last given counts
        values["prices"] = None
        if names_prices(value):
            key, last, value = "goal.prices", "prices", str(value).strip()
    if key == "goal.prices" and value is not None:
        values["kinds"] = []
    if key in TABLES:
        value = _as_table(key, value, place)
    if key in LISTS:  # ``24,32``, or a single value
        if isinstance(value, str) and len(value) > _MAX_CHARACTERS:
            raise JobError(f"job key {key} = {shorten(value)}{place}: too long a text for a list")
        word = value in _WORDS and key != "frozen"
        if isinstance(value, str) and not word:
            comma = r",(?=\s*--)" if key == "slurm.lines" else ","  # sbatch's options may have one
            value = [part.strip() for part in re.split(comma, value) if part.strip()]
            value = value[0] if key in _ONE_OR_EACH and len(value) == 1 else value
        value = [value] if isinstance(value, int | float) and key not in _ONE_OR_EACH else value
    values[last] = value


def section_of(key: str) -> tuple[str, str]:
    """A key of `ARGUMENTS` split at its dot: (key, argument); for other keys two empty texts."""
    section, _, argument = key.replace(".args", "_args", 1).partition(".")
    return (section, argument) if section in ARGUMENTS else ("", "")


def parsed_argument(key: str, value: str) -> Any:
    """The value of an argument of data or network, parsed as YAML.

    Raises:
        JobError: The value is no YAML, too long, or too deep.
    """
    if not _soon_read(value):
        raise JobError(f"job key {key} = {shorten(value)}: too long or too deep a value")
    try:
        return parse_yaml(value, references=False)
    except yaml.YAMLError as error:
        raise JobError(f"job key {key} = {shorten(value)}: {yaml_problem(error)}") from None


def _soon_read(text: str) -> bool:
    """Whether a text is short and flat enough to be parsed at once."""
    brackets = text.count("[") + text.count("{")
    return len(text) <= _MAX_CHARACTERS and brackets < _MAX_BRACKETS


def _as_table(key: str, value: Any, place: str) -> Any:
    """The items of a key of `TABLES`, from a parsed value or a YAML text; null: no items.

    A single item need not stand in brackets. The record itself checks the items' keys.
    """
    items, problem = value, "not a list of items"
    if isinstance(value, str) and _soon_read(value):
        try:
            items = parse_yaml(value, references=False)
        except yaml.YAMLError as error:
            items, problem = value, f"not a list of items ({yaml_problem(error)})"
    if items is None:
        return []
    items = [items] if isinstance(items, Mapping) else items
    if not isinstance(items, list | tuple):
        raise JobError(
            f"job key {key} = {shorten(value)}{place}: {problem}: write {key}='{TABLES[key]}'"
        )
    for number, item in enumerate(items):
        if not isinstance(item, Mapping | BaseModel):
            raise JobError(
                f"job key {key}.{number} = {shorten(item)}{place}: an item has keys: write "
                f"{key}='{TABLES[key]}'"
            )
    return items


def text_of(key: str, value: Any) -> str:
    """The text by which `load_job` sets a job key to a value that `flattened` has returned."""
    if section_of(key)[0]:  # any JSON value, such as a list of lists
        return json.dumps(value)
    if isinstance(value, list) and not any(isinstance(one, dict) for one in value):
        return as_written(tuple(value))
    return json.dumps(value) if value is None or isinstance(value, dict | list) else str(value)
