"""Profiles to plan from: stored ones, uploaded ones, and those that runs and jobs brought along."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from batchwright.errors import BatchwrightError, one_line
from batchwright.records import Profile
from batchwright.records.documents import parse_record
from batchwright.records.service import Identifier
from batchwright.records.text.problems import printable
from batchwright.service.problems import NotFound
from batchwright.service.store import Store

_IDENTIFIER: TypeAdapter[str] = TypeAdapter(Identifier)


class ProfileError(ValueError):
    """An upload that is no profile, in a sentence."""


def chosen_profile(store: Store, chosen: str) -> Profile:
    """A profile by what the form says: its identifier, or `run:` or `job:` and that of one.

    Raises:
        NotFound: There is no such profile.
    """
    kind, _, identifier = chosen.rpartition(":")
    try:
        _IDENTIFIER.validate_python(identifier)
    except ValidationError:
        raise NotFound("there is no such profile: choose one from the list") from None
    if kind == "run":
        found = store.runs.profile(identifier)
    elif kind == "job":
        found = store.jobs.profile(identifier)
    elif kind:
        found = None
    else:
        found = store.profiles.get(identifier)
    if found is None:
        raise NotFound("that one came without a profile: choose another")
    return found


def read_profile(content: bytes, name: str) -> tuple[Profile, str]:
    """An uploaded profile, and what it is called.

    Args:
        content: The file.
        name: What it shall be called; empty: what it measured.

    Raises:
        ProfileError: It is none.
    """
    if not content.strip():
        raise ProfileError("Choose a file: `batchwright probe --out profile.json` writes one.")
    try:
        text = content.decode("utf-8")
        profile = parse_record(text, "this file", Profile)
    except UnicodeDecodeError:
        raise ProfileError("This file is not text in UTF-8, as profiles are.") from None
    except BatchwrightError as error:
        words = one_line(error)
        raise ProfileError(f"{words[:1].upper()}{words[1:]}.") from None
    told = " ".join(name.split()) or f"{profile.network.name} on {profile.data.name}"
    return profile, printable(told)[:120]
