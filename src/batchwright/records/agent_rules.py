"""What an agent carries out: rules such as ``data=imagefolder:/sets/*`` against a job.

The service hands an agent only what its rules name, and the agent looks again before it starts
anything: a job may name code to import and places to read, so nothing is allowed that is not named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from batchwright.records.job import Job
from batchwright.records.registries.data_sources import DATA
from batchwright.records.registries.networks import NETWORKS

DEFAULTS = {
    "data": tuple(name for name, one in DATA.own.items() if not one.takes_path),
    "network": tuple(sorted(NETWORKS.own)),
    "loss": ("cross_entropy",),
    "weights": (),
}
"""What is allowed where no rule names the key; ``weights`` unset is always allowed."""


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
    """As `not_allowed`, of rules that were read already."""
    for key, patterns in rules.items():
        value = getattr(job, key)
        if value is not None and not any(_matches(value, pattern) for pattern in patterns):
            return f"{key}={value} is not allowed: start an agent with --allow {key}=PATTERN for it"
    return ""


def _matches(value: str, pattern: str) -> bool:
    """A pattern never leads out of the folder that it names."""
    if value == pattern:
        return True
    climbs = ".." in value.replace(":", "/").replace("\\", "/").split("/")
    return not climbs and fnmatchcase(value, pattern)
