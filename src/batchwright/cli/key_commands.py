"""The command `keys`: what the keys of a job mean."""

from __future__ import annotations

import json
import re
import sys
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated

import typer

from batchwright.cli import completion
from batchwright.cli.options import JsonFlag
from batchwright.errors import ArgumentError

_LINK = re.compile(r"\[[^]]*\]\(([\w-]+\.md)[^)]*\)")  # to another page of docs/


def keys(
    word: Annotated[
        str | None,
        typer.Argument(
            metavar="WORD",
            help="Only keys with this in their name or meaning.",
            autocompletion=completion.key_names,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the job keys, such as epochs and data, with default and meaning. Needs no torch."""
    from batchwright.records import Job
    from batchwright.records.text.job_keys import (
        ABSENT_WORDS,
        LONGEST_WORD,
        OTHER_WORDS,
        default_words,
        described_field,
        field_of,
        job_keys,
        meaning,
    )
    from batchwright.records.text.problems import shorten

    known, asked = job_keys(Job), (word or "").lower()
    fields = {key: field_of(Job, key) for key in known}
    texts = {key: _LINK.sub(r"docs/\1", described_field(fields[key])) for key in known}
    named = [key for key in known if asked.replace("-", "_") in key]
    found = named + [key for key in known if asked in texts[key].lower() and key not in named]
    hint = meaning(asked[:LONGEST_WORD], known)
    if not found:
        hint = hint or "`batchwright keys` lists all"
        raise ArgumentError(f"no job key has {shorten(word)} in its name or meaning: {hint}")
    if asked in {*OTHER_WORDS, *ABSENT_WORDS}:
        print(f"{asked}: {hint}", file=sys.stderr)
    if as_json:
        rows = [{"key": k, "default": fields[k].default, "meaning": texts[k]} for k in found]
        print(json.dumps({"keys": rows}, indent=2))
        return
    width = get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for key in found:
        print(f"{key}  (default: {default_words(fields[key].default).strip('`')})")
        print(fill(texts[key], width, initial_indent="    ", subsequent_indent="    "))
