"""What an agent carries out: by its rules, such as ``data=imagefolder:/sets/*``, and by what its
machine offers; and whether a profile or plan is of the job that it comes with.

The service hands an agent only what its rules name, and the agent looks again before it starts
anything: a job may name code to import and places to read, so nothing is allowed that is not named.
What comes back is looked at likewise, on both sides, since another agent may follow it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import zip_longest
from math import isclose
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError

from batchwright.records.base import Count, Index, Record
from batchwright.records.job import PASS_KEYS, Job
from batchwright.records.registries.data_sources import DATA
from batchwright.records.registries.networks import NETWORKS
from batchwright.records.text.formatting import counted
from batchwright.records.text.problems import first_problem, shorten

DEFAULTS = {
    "data": tuple(name for name, one in DATA.own.items() if not one.takes_path),
    "network": tuple(sorted(name for name, one in NETWORKS.own.items() if not one.takes_name)),
    "loss": ("cross_entropy",),
    "weights": (),
    "data_args": (),
    "network_args": (),
}
"""What is allowed where no rule names the key; without weights or arguments a job always is."""


_RANGE = re.compile(r"\{\d+\.\.\d+\}")  # of a pattern of files
_BRACES = re.compile(r"\{[^{}]*\}")
MAX_BRACES = 20
"""Levels of braces in each other that no name has; each is another look at the whole of it."""

Rules = Mapping[str, tuple[str, ...]]
"""Patterns by job key."""


def rules_of(texts: Iterable[str]) -> Rules:
    """Patterns by job key; a key that is named loses its default, the others keep theirs.

    Args:
        texts: Each ``KEY=PATTERN`` with a key of `DEFAULTS`; ``*``, ``?`` and ``[...]`` as in a
            shell.

    Raises:
        ValueError: A text is not of that form.
    """
    named: dict[str, list[str]] = {}
    for text in texts:
        key, equals, pattern = text.partition("=")
        if key not in DEFAULTS or not equals or not pattern:
            raise ValueError(
                f"allow {text!r}: write KEY=PATTERN with one of {', '.join(DEFAULTS)}, such as "
                "data=imagefolder:/sets/*"
            )
        named.setdefault(key, []).append(pattern)
    return DEFAULTS | {key: tuple(patterns) for key, patterns in named.items()}


def not_allowed(texts: Iterable[str], job: Job) -> str:
    """Why an agent with these rules does not carry out a job, in a line; empty if it does.

    Raises:
        ValueError: A rule is not of the form that `rules_of` takes.
    """
    return refusal(rules_of(texts), job)


def refusal(rules: Rules, job: Job) -> str:
    """`not_allowed` with rules that were read already."""
    if job.launcher.submit:
        return f"launch={job.launch}: an agent trains on its own machine; leave launch out"
    if job.goal.prices is not None:
        return (
            f"goal.prices={job.goal.prices}: an agent reads no file of prices: give the kinds "
            "themselves, as goal.kinds='[{kind: t4, count: 4, price: 0.35}]'"
        )
    for key, patterns in rules.items():
        value = getattr(job, key)
        text = json.dumps(value) if isinstance(value, dict) else value
        if text not in (None, "{}") and not any(_matches(value, text, one) for one in patterns):
            return f"{key}={text} is not allowed: start an agent with --allow {key}=PATTERN for it"
    return ""


def _matches(value: Any, text: str, pattern: str) -> bool:
    """A pattern never leads out of the folder that it names."""
    if text == pattern:
        return True
    return fnmatchcase(text, pattern) and not any(map(_climbs, _strings(value)))


def _strings(value: Any) -> Iterator[str]:
    """All texts inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)


def _climbs(text: str) -> bool:
    """Whether a name may lead to the folder above, be it by braces, as ``{a,.}{b,.}`` does."""
    plain = _RANGE.sub("0", text)
    for _ in range(MAX_BRACES):
        if any(set("./\\") & set(group) for group in _BRACES.findall(plain)):
            return True
        plain, count = _BRACES.subn("", plain)
        if not count:
            return ".." in re.split(r"[:/\\]", plain)
    return True  # nobody writes such a name, and to read it takes long


# ------------------------------------------------------------------------------ what machines offer

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=-]{0,59}$")]
"""A word that operators give their machines, such as ``room-2`` or ``site=berlin``."""


def label_problem(error: ValidationError) -> str:
    """What is wrong with `--label`, in a line."""
    problem = error.errors()[0]
    if problem["type"] == "string_pattern_mismatch":
        told = "write letters, digits and . _ = -, the first a letter or digit, 60 at most"
        return f"--label {shorten(problem['input'])}: {told}"
    return f"--label: {first_problem(error, '')}"


GIB = 2**30


class Offer(Record):
    """What a machine offers to jobs, as its agent tells."""

    labels: tuple[Label, ...] = Field((), max_length=50, description="Words of its operator's.")
    gpus: Index = Field(0, description="GPUs that training may use.")
    gpu: str = Field("", max_length=120, description="Their model; empty without.")
    gpu_memory: Index = Field(0, description="Memory of the smallest of them, in bytes.")
    cores: Index = Field(0, description="CPU cores that training may use; 0: not told.")
    memory: Index = Field(0, description="Main memory, in bytes; 0: not told.")
    max_workers: Count | None = Field(None, description="Maximum of workers; null: any number.")


class Needs(Record):
    """What a job needs of a machine."""

    labels: tuple[Label, ...] = Field((), max_length=50, description="All of them.")
    gpus: Index = Field(0, description="Minimum of GPUs.")
    memory: Index = Field(
        0, description="Minimum of memory, in bytes: of each GPU where it needs any, else main."
    )
    workers: Index = Field(0, description="Workers that it says it trains with; 0: open.")


def needs_of(job: Job, asked: Needs) -> Needs:
    """What a job needs: as asked, and as its keys say."""
    if job.launcher.simulated:
        return asked
    workers = job.workers if isinstance(job.workers, int) else 0
    gpus = max(1, workers) if job.device == "cuda" else 0
    return asked.model_copy(update={"gpus": max(asked.gpus, gpus), "workers": workers})


def lacking(offer: Offer, needs: Needs) -> tuple[str, str] | None:
    """The first thing that a machine lacks, in words: what is needed, and what of it is offered.

    `None` if it offers all.
    """
    for label in needs.labels:
        if label not in offer.labels:
            return f"the label {label}", ", ".join(offer.labels) or "none"
    if offer.gpus < needs.gpus:
        return counted(needs.gpus, "GPU"), str(offer.gpus or "none")
    memory = offer.gpu_memory if needs.gpus else offer.memory
    if memory < needs.memory:
        of_what = "of memory on each GPU" if needs.gpus else "of memory"
        return f"{needs.memory / GIB:.3g} GiB {of_what}", f"{memory / GIB:.3g} GiB"
    if offer.max_workers is not None and needs.workers > offer.max_workers:
        return f"{needs.workers} workers", str(offer.max_workers)
    return None


# ---------------------------------------------------------------- whether a document is of its job

RESOLVED = (
    *PASS_KEYS,
    "augment",
    "device",
    "precision",
    "resolutions",
    "workers",
)
"""Job keys whose ``auto`` the measuring machine fills in."""


def misfit(job: Job, made: Job) -> str:
    """Which key of the job in a document is not that of the job it was made for, in a line; empty:
    none. Resolving fills in `RESOLVED`, and a published cycle its epochs and its recipe.
    """
    preset = {"epochs", *job.preset.recipe} - {*job.cycle.keep} if job.preset is not None else ()
    for key, field in Job.model_fields.items():
        asked, found = getattr(job, key), getattr(made, key)
        usual = key in preset and asked == field.default
        filled = (key in RESOLVED and asked == "auto") or usual
        if asked != found and not filled:
            return f"{key}={shorten(found)}, where the job has {key}={shorten(asked)}"
    return ""


def difference(made: Record, given: Record, *, without: Iterable[str] = ()) -> str:
    """Where two records differ, in a line; empty: nowhere.

    Figures may differ by a millionth, as between versions of libraries that compute them.

    Args:
        made: What it should be.
        given: What it is.
        without: Fields that are not compared.
    """
    left = set(without)
    found = next(_apart(made.model_dump(exclude=left), given.model_dump(exclude=left), ""), None)
    if found is None:
        return ""
    place, wanted, is_ = found
    return f"{place} = {shorten(is_)} instead of {shorten(wanted)}"


def _apart(made: Any, given: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(made, Mapping) and isinstance(given, Mapping):
        for key in made.keys() | given.keys():
            yield from _apart(made.get(key), given.get(key), f"{place}.{key}".lstrip("."))
    elif isinstance(made, tuple | list) and isinstance(given, tuple | list):
        for number, (one, other) in enumerate(zip_longest(made, given)):
            yield from _apart(one, other, f"{place}[{number}]")
    elif isinstance(made, float) and isinstance(given, float):
        if not isclose(made, given, rel_tol=1e-6):
            yield place, made, given
    elif made != given:
        yield place, made, given
