"""Secrets that clients hold, and what is stored of them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from typing import get_args

from batchwright.records.service import Scope
from batchwright.service.problems import Refused

SCOPES: tuple[Scope, ...] = get_args(Scope)


def new_secret(prefix: str = "") -> str:
    """256 random bits, as 43 characters that need no quoting."""
    return prefix + secrets.token_urlsafe(32)


def hash_of(secret: str) -> str:
    """What is stored: SHA-256, in hex. The secret is long and random; there is nothing to guess."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def scope_words(scopes: Iterable[str]) -> str:
    """Scopes as they are stored, each once and in order.

    Raises:
        Refused: One is unknown, or there is none.
    """
    given = set(scopes)
    unknown = sorted(given - set(SCOPES))
    if unknown:
        raise Refused(f"unknown scope {unknown[0]!r}: known are {', '.join(SCOPES)}")
    if not given:
        raise Refused(f"a token without scopes may do nothing: give some of {', '.join(SCOPES)}")
    return " ".join(scope for scope in SCOPES if scope in given)
