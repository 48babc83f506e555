"""Which jobs an agent carries out: by its rules, such as ``data=imagefolder:/sets/*``, and by what
its machine offers. Also whether a profile or plan belongs to the job that it comes with.

A job may name code to import and places to read, so only what a rule names is allowed. The service
gives an agent no other jobs, and the agent checks again before it starts anything. Profiles and
plans that agents send back are checked on both sides, too, since another agent may follow them.
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
from batchwright.records.plan import Plan
from batchwright.records.plan_fields import TOLD, TOLD_OF_A_ROW
from batchwright.records.profile import Profile
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
"""Patterns for keys that no rule names. A job without weights or arguments matches ``()``, too."""


_RANGE = re.compile(r"\{\d+\.\.\d+\}")  # a range in a pattern of files, such as {0..9}
_BRACES = re.compile(r"\{[^{}]*\}")
MAX_BRACES = 20
"""Nested braces from which a name is refused: each level costs another pass over the name."""

Rules = Mapping[str, tuple[str, ...]]
"""Patterns by job key."""


def rules_of(texts: Iterable[str]) -> Rules:
    """Patterns by job key: those of the rules, and the defaults of keys that no rule names.

    Args:
        texts: Rules ``KEY=PATTERN`` with a key of `DEFAULTS`; ``*``, ``?`` and ``[...]`` match as
            in a shell.

    Raises:
        ValueError: A rule is malformed.
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
        ValueError: A rule is malformed, see `rules_of`.
    """
    return refusal(rules_of(texts), job)


def refused_by_all(job: Job) -> str:
    """Why no agent carries a job out, whatever its rules, in a line; empty if one may."""
    if job.launcher.submit:
        return f"launch={job.launch}: an agent trains on its own machine; leave launch out"
    if job.goal.prices is not None:
        return (
            f"goal.prices={job.goal.prices}: an agent reads no file of prices: give the kinds "
            "themselves, as goal.kinds='[{kind: t4, count: 4, price: 0.35}]'"
        )
    return ""


def refusal(rules: Rules, job: Job) -> str:
    """`not_allowed` with parsed rules."""
    if problem := refused_by_all(job):
        return problem
    for key, patterns in rules.items():
        value = getattr(job, key)
        text = json.dumps(value) if isinstance(value, dict) else value
        if text in (None, "{}") or text in patterns:
            continue
        # A value that may leave a pattern's folder does not match it.
        if any(map(_climbs, _strings(value))) or not any(fnmatchcase(text, p) for p in patterns):
            return f"{key}={text} is not allowed: start an agent with --allow {key}=PATTERN for it"
    return ""


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)


def _climbs(text: str) -> bool:
    """Whether a name may contain ``..``, also by expanding braces, as ``{a,.}{b,.}`` does."""
    plain = _RANGE.sub("0", text)
    for _ in range(MAX_BRACES):
        if any(set("./\\") & set(group) for group in _BRACES.findall(plain)):
            return True
        plain, count = _BRACES.subn("", plain)
        if not count:
            return ".." in re.split(r"[:/\\]", plain)
    return True  # no real name nests braces so deeply


# ------------------------------------------------------------------------------ what machines offer

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=-]{0,59}$")]
"""A word by which operators name their machines, such as ``room-2`` or ``site=berlin``."""


def label_problem(error: ValidationError) -> str:
    """The error message for a wrong `--label`."""
    problem = error.errors()[0]
    if problem["type"] == "string_pattern_mismatch":
        hint = "write letters, digits and . _ = -, the first a letter or digit, 60 at most"
        return f"--label {shorten(problem['input'])}: {hint}"
    return f"--label: {first_problem(error, '')}"


GIB = 2**30
# Most worker processes: eight for each core, but sixteen on a machine of any size.
_WORKERS_PER_CORE, _MINIMUM_ROOM = 8, 16


class Offer(Record):
    """What an agent's machine offers to jobs."""

    labels: tuple[Label, ...] = Field(
        (), max_length=50, description="Labels that its operator gave the machine."
    )
    gpus: Index = Field(0, description="Number of GPUs that training may use.")
    gpu: str = Field("", max_length=120, description="Model of the GPUs; empty without.")
    gpu_memory: Index = Field(0, description="Memory of the smallest GPU, in bytes.")
    cores: Index = Field(0, description="CPU cores that training may use; 0: unknown.")
    memory: Index = Field(0, description="Main memory, in bytes; 0: unknown.")
    max_workers: Count | None = Field(None, description="Most workers of a job; null: any number.")


NO_OFFER = Offer()


class Needs(Record):
    """What a job needs of a machine."""

    labels: tuple[Label, ...] = Field(
        (), max_length=50, description="Labels, all of which the machine must have."
    )
    gpus: Index = Field(0, description="Fewest GPUs.")
    memory: Index = Field(
        0, description="Least memory, in bytes: of each GPU if it needs any, else main memory."
    )
    workers: Index = Field(0, description="Workers by the job's keys; 0: the plan decides.")


def needs_of(job: Job, asked: Needs) -> Needs:
    """What a job needs: ``asked``, and what its keys need."""
    if job.launcher.simulated:
        return asked
    workers = job.workers if isinstance(job.workers, int) else 0
    gpus = max(1, workers) if job.device == "cuda" else 0
    return asked.model_copy(update={"gpus": max(asked.gpus, gpus), "workers": workers})


def lacking(offer: Offer, needs: Needs) -> tuple[str, str] | None:
    """The first need that a machine does not meet: (need, offer) in words; `None` if it meets all.

    Labels come first, then GPUs, memory and workers.
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
    limits = [room_for(offer.cores)] if offer.cores else []
    limits += [] if offer.max_workers is None else [offer.max_workers]
    if needs.workers > (most := min(limits, default=needs.workers)):
        return f"{needs.workers} workers", str(most)
    return None


def room_for(cores: int) -> int:
    """Most worker processes that a machine with so many cores can sensibly run."""
    return max(_MINIMUM_ROOM, _WORKERS_PER_CORE * cores)


# ------------------------------------------------------ whether a profile or plan belongs to a job

RESOLVED = (
    *PASS_KEYS,
    "augment",
    "device",
    "normalize",
    "precision",
    "resolutions",
    "workers",
)
"""Job keys whose ``auto`` the measuring machine fills in."""


def misfit(job: Job, made: Job) -> str:
    """How the job in a profile or plan differs from the job it was made for; empty: not at all.

    Keys that resolving fills in (`RESOLVED`, epochs and recipe of a published cycle) may differ.

    Args:
        job: The job as submitted.
        made: The job in the profile or plan.

    Returns:
        The first key that differs with both values, in a line.
    """
    preset = {"epochs", *job.preset.recipe} - {*job.cycle.keep} if job.preset is not None else ()
    for key, field in Job.model_fields.items():
        asked, found = getattr(job, key), getattr(made, key)
        usual = key in preset and asked == field.default
        filled = (key in RESOLVED and asked == "auto") or usual
        if asked != found and not filled:
            return f"{key}={shorten(found)}, where the job has {key}={shorten(asked)}"
    return ""


def bounding_keys(profile: Profile) -> dict[str, int | None]:
    """Job keys to change for the plan of an agent, as for that of `run`: both train where was
    measured. Empty where the profile's own job is planned as it is.
    """
    most = profile.bound_for(profile.job)
    return {} if most == profile.job.goal.max_workers else {"goal.max_workers": most}


_TOLD: Any = {
    **dict.fromkeys(TOLD, True),
    **{rows: {"__all__": dict.fromkeys(TOLD_OF_A_ROW, True)} for rows in ("stages", "growth")},
    "job": {"goal": {"max_workers": True}},  # how many workers there are, the rows say
}
"""What is not compared, as ``exclude`` of `model_dump`."""


class _Nothing:
    """Stands where one of two compared values has no such part, which differs from `None` there."""

    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


def other_choice(made: Plan, given: Plan) -> str:
    """How two plans differ in what is trained, and until when: in all that is not merely told
    (`plan_fields.TOLD`).

    Floats may differ by a relative 1e-6, as with other versions of numerical libraries.

    Args:
        made: The expected plan.
        given: The plan to check.

    Returns:
        The first difference, in a line; empty if there is none.
    """
    expected, found = (plan.model_dump(exclude=_TOLD) for plan in (made, given))
    first = next(_differences(expected, found, ""), None)
    if first is None:
        return ""
    place, wanted, actual = first
    return f"{place} = {shorten(actual)} instead of {shorten(wanted)}"


def _differences(made: Any, given: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Differences between two nested values: (place, expected, actual)."""
    if isinstance(made, Mapping) and isinstance(given, Mapping):
        for key in {**made, **given}:  # in the order of the fields
            one, other = made.get(key, _NOTHING), given.get(key, _NOTHING)
            yield from _differences(one, other, f"{place}.{key}".lstrip("."))
    elif isinstance(made, tuple | list) and isinstance(given, tuple | list):
        for number, (one, other) in enumerate(zip_longest(made, given, fillvalue=_NOTHING)):
            yield from _differences(one, other, f"{place}[{number}]")
    elif isinstance(made, float) and isinstance(given, float):
        if not isclose(made, given, rel_tol=1e-6):
            yield place, made, given
    elif made != given:
        yield place, made, given
