"""The planner's form: its fields, and how their texts become job keys.

People write `2 h 30 min`, `8 GiB` and `0.35`; a job has seconds, bytes and numbers. An error is
shown beside its field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchwright.errors import BatchwrightError, one_line
from batchwright.records import Job, Plan, Profile
from batchwright.records.registries.methods import METHODS as METHOD_SPECS
from batchwright.records.service import PlanRequest
from batchwright.records.text.amounts import AMBIGUOUS, NUMBER, bytes_of, rate_of, seconds_of
from batchwright.records.text.job_keys import job_keys, meaning
from batchwright.service.plan_answers import planned
from batchwright.service.problems import TooMany, Unavailable

MAX_KEYS = 40
"""Maximum lines of the field of other job keys."""

OBJECTIVES = (
    ("", "as in the profile"),
    ("auto", "quickest of the most accurate"),
    ("knee", "knee: until more pays little"),
    ("time", "shortest"),
    ("cost", "cheapest"),
    ("accuracy", "most accurate"),
    ("target-accuracy", "shortest or cheapest to an accuracy"),
)
LEAST = (("", "as in the profile"), ("time", "shortest"), ("cost", "cheapest"))
METHODS = (
    ("", "as in the profile"),
    *(
        (one.name, f"{one.name}: {one.short}")
        for one in (*METHOD_SPECS.own.values(), METHOD_SPECS["auto"])
    ),
)


def _number(words: str) -> float:
    if not re.fullmatch(NUMBER, words) or AMBIGUOUS.search(words):
        raise ValueError("Write a number, such as 0.35 or 1500.")
    return float(words.replace(",", "."))


def _count(words: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", words) or not int(words):
        raise ValueError("Write a whole number, 1 or more.")
    return int(words)


def _share(words: str) -> float:
    value = _number(words.removesuffix("%").strip())
    value = value / 100 if words.endswith("%") else value
    if not 0 < value < 1:
        raise ValueError("Write a share between 0 and 1, such as 0.95, or 95 %.")
    return value


def _duration(words: str) -> float:
    if not (seconds := seconds_of(words)):
        raise ValueError("Write a time, such as 2 h 30 min, or a number of seconds.")
    return seconds


def _bytes(words: str) -> int:
    if (size := bytes_of(words)) is None:
        raise ValueError("Write a size, such as 8 GiB or 500 MB.")
    return size


def _rate(words: str) -> int:
    if (rate := rate_of(words)) is None:
        raise ValueError("Write a rate, such as 1.2 GB a second or 10 Gbit/s.")
    return max(1, round(rate))


def _lines(words: str) -> list[tuple[str, str]]:
    """Job keys and their values, from lines ``key=value``."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if len(lines) > MAX_KEYS:
        raise ValueError(f"Give at most {MAX_KEYS} keys.")
    known = job_keys(Job)
    pairs: list[tuple[str, str]] = []
    for line in lines:
        key, equals, value = line.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{line[:60]!r} is no job key: write key=value, such as epochs=3.")
        if key.strip() not in known:
            hint = meaning(key.strip()[:60], known) or "`docs/job.md` has them all."
            raise ValueError(f"There is no job key {key.strip()[:60]!r}: {hint}")
        if any(key.strip() == former and value.strip() != other for former, other in pairs):
            raise ValueError(f"{key.strip()} is given twice: leave one of the two lines out.")
        pairs.append((key.strip(), value.strip()))
    return pairs


@dataclass(frozen=True)
class Field:
    """A field of the form.

    Attributes:
        name: Name of the field: the job key that it sets.
        label: Label of the field.
        hint: Hint below the label.
        read: Parses the field's text; raises `ValueError` with a sentence for the user.
        options: Options to choose from, as (value, words); empty: a text field.
    """

    name: str
    label: str
    hint: str
    read: Callable[[str], Any] = str
    options: tuple[tuple[str, str], ...] = ()


FIELDS = (
    Field("goal.objective", "Objective", "what to aim for", options=OBJECTIVES),
    Field("goal.price", "Price", "of one worker for an hour, such as 0.35", _number),
    Field("goal.deadline", "Deadline", "for the whole training, such as 2 h 30 min", _duration),
    Field("goal.memory", "Maximum memory", "of one worker, such as 8 GiB", _bytes),
    Field("goal.max_workers", "Maximum workers", "such as 4", _count),
)
MORE_FIELDS = (
    Field(
        "goal.max_cost", "Maximum cost", "of the whole training, in the price's currency", _number
    ),
    Field("goal.accuracy", "Target accuracy", "to train to, such as 95 %", _share),
    Field("goal.confidence", "Confidence", "of reaching it, such as 80 %", _share),
    Field("goal.least", "To the target", "shortest or cheapest", options=LEAST),
    Field("method", "Method", "how batch and resolution are used", options=METHODS),
    Field("epochs", "Epochs", "to train; to a target, their maximum", _count),
    Field("link.latency", "Latency", "of the network between machines, such as 0.2 ms", _duration),
    Field("link.bandwidth", "Bandwidth", "of that network, such as 1.2 GB a second", _rate),
    Field("keys", "Other job keys", "one key=value a line", _lines),
)
ALL_FIELDS = (*FIELDS, *MORE_FIELDS)
LABELS = {"profile": "Profile", **{one.name: one.label for one in ALL_FIELDS}}


@dataclass
class FilledForm:
    """The form as it was filled in.

    Attributes:
        words: Text of each field, by name.
        keys: Job keys to change, with their values.
        texts: Other job keys to change, as (key, text of the value).
        errors: Errors, each a sentence, by field; under the empty name an error of no field.
    """

    words: dict[str, str]
    keys: dict[str, Any] = field(default_factory=dict)
    texts: list[tuple[str, str]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


def read_form(given: Mapping[str, str]) -> FilledForm:
    """Parse a form; empty fields change no job key."""
    form = FilledForm({each.name: given.get(each.name, "").strip() for each in ALL_FIELDS})
    for each in ALL_FIELDS:
        words = form.words[each.name]
        if not words:
            continue
        try:
            if each.name == "keys":
                form.texts = _lines(words)
            else:
                form.keys[each.name] = each.read(words)
        except ValueError as error:
            form.errors[each.name] = str(error)
    return form


def answer_form(profile: Profile, form: FilledForm) -> Plan | None:
    """The plan for a form, as `batchwright plan` makes it; `None` where the form has errors, or
    gets one here.

    Raises:
        TooMany: The service is busy with other plans; nothing is wrong with the form.
        Unavailable: Planning took too long, or the system ended its process.
    """
    if form.errors:
        return None
    # Null is written as on the command line.
    keys = form.keys | {key: None if raw in ("null", "~") else raw for key, raw in form.texts}
    try:
        return planned(PlanRequest(profiles=(profile,), keys=keys))
    except (TooMany, Unavailable):  # may pass: not to be kept as the answer to this form
        raise
    except BatchwrightError as error:
        words = one_line(error)
        form.errors[_field_of(words, form)] = words
        return None


def _field_of(words: str, form: FilledForm) -> str:
    """The field that a message is about: the first filled-in field that it names; else the field of
    other keys, if it names one of these; else the first field that it names; else none.
    """
    names = [each.name for each in ALL_FIELDS if each.name != "keys"]
    named = sorted((words.find(name), name) for name in names if _names(words, name))
    filled = [name for _, name in named if form.words[name]]
    if filled:
        return filled[0]
    if any(_names(words, key) for key, _ in form.texts):
        return "keys"
    return named[0][1] if named else ""


def _names(words: str, key: str) -> bool:
    """Whether a message names a job key."""
    return re.search(rf"(?<![\w.]){re.escape(key)}(?![\w])", words) is not None
