"""What a shell is offered: job keys with their values, trackers, programs that take a plan.

Files are the shell's own part: where nothing of this fits, it offers them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import typer


def job_words(ctx: typer.Context, incomplete: str) -> list[str]:
    """Job keys that begin so; behind the = the values that a key may have.

    Bash takes the = for a word of its own, other shells do not.
    """
    before = list(ctx.params.get("words") or ctx.params.get("overrides") or ())
    if before[1:] and before[-1] == "=":
        return [value for value in _values(before[-2]) if value.startswith(incomplete)]
    if not incomplete and before and _values(before[-1]):  # an = that nothing follows is left out
        return _values(before[-1])
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={one}" for one in _values(key) if one.startswith(value)]
    return _keys(incomplete)


def files_first(ctx: typer.Context, incomplete: str) -> list[str]:
    """Files first; job keys only once something is typed."""
    return job_words(ctx, incomplete) if incomplete else []


def trackers(incomplete: str) -> list[str]:
    """Names of trackers; what stands behind the colon is anybody's."""
    from batchwright.records.registries.trackers import TRACKERS

    return [name for name in TRACKERS if name.startswith(incomplete)]


def exports(incomplete: str) -> list[str]:
    """Programs that a plan can be written for."""
    from batchwright.workflows.exports import EXPORTS

    return [name for name in ("list", *EXPORTS) if name.startswith(incomplete)]


def _keys(beginning: str) -> list[str]:
    """Keys with their =. A key alone has its values as well: else a shell would end the word."""
    from batchwright.records import Job
    from batchwright.records.text.job_keys import job_keys

    found = [key for key in job_keys(Job) if key.startswith(beginning)]
    if len(found) == 1:
        return [f"{found[0]}={value}" for value in ("", *_values(found[0]))]
    return [f"{key}=" for key in found]


def _values(key: str) -> list[str]:
    """What a key may be, where that is a few words; else its default, as an example."""
    from pydantic import TypeAdapter

    from batchwright.records import Job
    from batchwright.records.registries.data_sources import DATA
    from batchwright.records.registries.networks import NETWORKS
    from batchwright.records.text.job_keys import job_keys

    if key not in job_keys(Job):
        return []
    forms: dict[str, Mapping[str, Any]] = {"data": DATA, "network": NETWORKS}
    if key in forms:
        return [one.form.partition(":")[0] + ":" * (":" in one.form) for one in forms[key].values()]
    section, _, name = key.rpartition(".")
    model: Any = Job.model_fields[section].annotation if section else Job
    field = model.model_fields[name]
    words = list(_words(TypeAdapter(field.rebuild_annotation()).json_schema()))
    return words or [str(one) for one in [field.default] if isinstance(one, int | float)]


def _words(schema: dict[str, Any]) -> Iterator[str]:
    """The words of a field's schema, those of each of its alternatives."""
    yield from schema.get("enum", ())
    if schema.get("type") == "boolean":
        yield from ("true", "false")
    for one in schema.get("anyOf", ()):
        yield from _words(one)
