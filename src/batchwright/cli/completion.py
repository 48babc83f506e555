"""Shell completion: job keys with their values, trackers, and programs to export a plan for.

Files are completed by the shell itself, where none of these fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import typer


def job_words(ctx: typer.Context, incomplete: str) -> list[str]:
    """Job keys that begin with ``incomplete``; after the = the values that a key may have.

    Bash splits words at the =, other shells do not.
    """
    before = list(ctx.params.get("words") or ctx.params.get("overrides") or ())
    if before[1:] and before[-1] == "=":
        return [value for value in _values(before[-2]) if value.startswith(incomplete)]
    if not incomplete and before and _values(before[-1]):  # bash leaves out a trailing =
        return _values(before[-1])
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={one}" for one in _values(key) if one.startswith(value)]
    return _keys(incomplete)


def files_first(ctx: typer.Context, incomplete: str) -> list[str]:
    """Job keys once something is typed; before that nothing, so that the shell offers files."""
    return job_words(ctx, incomplete) if incomplete else []


def trackers(incomplete: str) -> list[str]:
    """Names of trackers; the place after the colon cannot be completed."""
    from batchwright.records.registries.trackers import TRACKERS

    return [name for name in TRACKERS if name.startswith(incomplete)]


def exports(incomplete: str) -> list[str]:
    """Names of programs that a plan can be exported for, and ``list``."""
    from batchwright.workflows.exports import EXPORTS

    return [name for name in ("list", *EXPORTS) if name.startswith(incomplete)]


def key_names(incomplete: str) -> list[str]:
    """Job keys that begin with ``incomplete``."""
    from batchwright.records import Job
    from batchwright.records.text.job_keys import job_keys

    return [key for key in job_keys(Job) if key.startswith(incomplete)]


def _keys(beginning: str) -> list[str]:
    """Keys with their =. A single match also gets its values: else a shell would end the word."""
    found = key_names(beginning)
    if len(found) == 1:
        return [f"{found[0]}={value}" for value in ("", *_values(found[0]))]
    return [f"{key}=" for key in found]


def _values(key: str) -> list[str]:
    """The values of a key that takes a few words; else its default, as an example."""
    from pydantic import TypeAdapter

    from batchwright.records import Job
    from batchwright.records.registries.data_sources import DATA
    from batchwright.records.registries.networks import NETWORKS
    from batchwright.records.text.job_keys import field_of, job_keys

    if key not in job_keys(Job):
        return []
    forms: dict[str, Mapping[str, Any]] = {"data": DATA, "network": NETWORKS}
    if key in forms:
        return [one.form.partition(":")[0] + ":" * (":" in one.form) for one in forms[key].values()]
    field = field_of(Job, key)
    words = list(_words(TypeAdapter(field.rebuild_annotation()).json_schema()))
    return words or [str(one) for one in [field.default] if isinstance(one, int | float)]


def _words(schema: dict[str, Any]) -> Iterator[str]:
    """The words that a field's JSON schema allows, over all its alternatives."""
    yield from schema.get("enum", ())
    if schema.get("type") == "boolean":
        yield from ("true", "false")
    for one in schema.get("anyOf", ()):
        yield from _words(one)
