"""A job as people paste it: the YAML of a job file, read without trusting it."""

from __future__ import annotations

from typing import Any

import yaml

from batchwright.errors import BatchwrightError, one_line
from batchwright.records import Job
from batchwright.records.documents import change_job, parse_yaml, yaml_problem

LONGEST = 64 * 1024
"""Characters of a job."""
DEEPEST = 8
"""Levels of lists and maps; a job has four."""

EXAMPLE = """data: digits
network: resnet8
epochs: 10
method: dynamic-batch
goal:
  objective: knee
"""


class JobTextError(ValueError):
    """What is wrong with a job's text, in a sentence."""


def job_of_text(text: str) -> Job:
    """The job that a text describes.

    Raises:
        JobTextError: It is too long, not YAML with keys, or a key is wrong.
    """
    try:
        return change_job(Job(), keys_of_text(text))
    except BatchwrightError as error:
        raise JobTextError(_sentence(one_line(error))) from None


def keys_of_text(text: str) -> dict[str, Any]:
    """The keys of a YAML text. Anchors are refused: a few of them can stand for gigabytes.

    Raises:
        JobTextError: It is too long, too deep, or not YAML with keys.
    """
    if len(text) > LONGEST:
        raise JobTextError(f"A job has at most {LONGEST // 1024} KiB of text.")
    try:
        _check_shape(text)
        values = parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise JobTextError(f"This is not YAML{where}: {yaml_problem(error)}.") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise JobTextError("Write a key on each line, such as epochs: 3.")
    return values


def _check_shape(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise JobTextError("Anchors (& and *) are not taken: write the values out.")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEEPEST:
                raise JobTextError("This is more deeply nested than any job.")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
