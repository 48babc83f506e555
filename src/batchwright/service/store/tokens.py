"""Tokens of programs: created and revoked by an operator, found by what a client sends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import insert, or_, select, update

from batchwright.records.service import Name
from batchwright.service.caller import Caller
from batchwright.service.database.engine import Database
from batchwright.service.database.tables import tokens
from batchwright.service.problems import Conflict, NotFound, Refused
from batchwright.service.settings import Settings
from batchwright.service.store.clock import Clock
from batchwright.service.store.secrets import hash_of, new_secret, scope_words

PREFIX = "bw_"  # so that a token is recognized where it should not be, such as in a repository
USED_SECONDS = 60.0
"""How exactly it is known when a token was last used; each request would be a write else."""

RESERVED = ("browser", "operator")
"""Names that the audit log uses for others."""


class TokenInfo(NamedTuple):
    """A token, without its secret. Times are Unix time in seconds; null: never."""

    name: str
    scopes: tuple[str, ...]
    created: float
    used: float | None
    revoked: float | None


class Tokens:
    """The table of tokens."""

    def __init__(self, database: Database, _settings: Settings, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def create(self, name: str, scopes: Iterable[str]) -> str:
        """A new token; what it owned before it was revoked, if it was, it owns again.

        Returns:
            The secret, which is not stored: whoever loses it needs a new token.

        Raises:
            Refused: The name or a scope is none.
            Conflict: There is such a token.
        """
        try:
            TypeAdapter(Name).validate_python(name)
        except ValidationError:
            raise Refused(
                f"{name[:40]!r} cannot name a token: use 1 to 120 visible characters"
            ) from None
        if name in RESERVED:
            raise Refused(f"{name!r} cannot name a token: the audit log uses it for others")
        secret = new_secret(PREFIX)
        values = {
            "hash": hash_of(secret),
            "scopes": scope_words(scopes),
            "created": self._clock(),
            "used": None,
            "revoked": None,
        }
        with self._database.writing() as connection:
            found = connection.execute(select(tokens.c.revoked).where(tokens.c.name == name)).all()
            if not found:
                connection.execute(insert(tokens).values(name=name, **values))
            elif found[0].revoked is not None:
                connection.execute(update(tokens).where(tokens.c.name == name).values(**values))
            else:
                raise Conflict(
                    f"there is a token {name!r} already; revoke it first, or take another name"
                )
        return secret

    def revoke(self, name: str) -> None:
        """Refuse a token from now on.

        Raises:
            NotFound: There is none of that name, or it was revoked before.
        """
        with self._database.writing() as connection:
            done = connection.execute(
                update(tokens)
                .where(tokens.c.name == name, tokens.c.revoked.is_(None))
                .values(revoked=self._clock())
            )
            if not done.rowcount:
                raise NotFound(f"there is no token {name!r}; `batchwright token list` names them")

    def list(self) -> list[TokenInfo]:
        """All tokens, revoked ones too, by name."""
        with self._database.reading() as connection:
            rows = connection.execute(select(tokens).order_by(tokens.c.name)).all()
        return [
            TokenInfo(row.name, tuple(row.scopes.split()), row.created, row.used, row.revoked)
            for row in rows
        ]

    def find(self, secret: str) -> Caller | None:
        """Who holds ``secret``; `None` if nobody does, or the token was revoked."""
        now = self._clock()
        with self._database.reading() as connection:
            row = connection.execute(
                select(tokens.c.id, tokens.c.name, tokens.c.scopes, tokens.c.used).where(
                    tokens.c.hash == hash_of(secret), tokens.c.revoked.is_(None)
                )
            ).one_or_none()
        if row is None:
            return None
        if row.used is None or now - row.used >= USED_SECONDS:
            self._note_use(row.id, now)
        return Caller(row.name, frozenset(row.scopes.split()))

    def _note_use(self, number: int, now: float) -> None:
        with self._database.writing() as connection:
            connection.execute(
                update(tokens)
                .where(
                    tokens.c.id == number,
                    or_(tokens.c.used.is_(None), tokens.c.used <= now - USED_SECONDS),
                )
                .values(used=now)
            )
