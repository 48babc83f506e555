"""Browsers: a link that works once becomes a session."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import delete, insert, select

from batchwright.service.caller import Caller
from batchwright.service.database.engine import Database
from batchwright.service.database.tables import links, sessions
from batchwright.service.settings import Settings
from batchwright.service.store.clock import Clock
from batchwright.service.store.secrets import hash_of, new_secret, scope_words

BROWSER = "browser"
"""Who a session is, in the audit log and as an owner."""


class Session(NamedTuple):
    """A browser that is signed in."""

    caller: Caller
    expires: float
    """Unix time in seconds."""


class SignIn:
    """The tables of links and sessions."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock

    def link(self, scopes: Iterable[str]) -> str:
        """The secret of a new link, which works once, for `Settings.link_seconds`."""
        secret = new_secret()
        expires = self._clock() + self._settings.link_seconds
        with self._database.writing() as connection:
            connection.execute(
                insert(links).values(
                    hash=hash_of(secret), scopes=scope_words(scopes), expires=expires
                )
            )
        return secret

    def enter(self, secret: str) -> str | None:
        """The secret of a new session, in exchange for a link's.

        Returns:
            `None` where the link is unknown, too old, or was used before.
        """
        now = self._clock()
        session = new_secret()
        with self._database.writing() as connection:
            row = connection.execute(
                delete(links).where(links.c.hash == hash_of(secret)).returning(links)
            ).one_or_none()
            if row is None or row.expires <= now:
                return None
            connection.execute(
                insert(sessions).values(
                    hash=hash_of(session),
                    scopes=row.scopes,
                    created=now,
                    expires=now + self._settings.session_seconds,
                )
            )
        return session

    def find(self, session: str) -> Session | None:
        """The session that a browser's cookie is of; `None` if there is none, or no longer."""
        with self._database.reading() as connection:
            row = connection.execute(
                select(sessions.c.scopes, sessions.c.expires).where(
                    sessions.c.hash == hash_of(session)
                )
            ).one_or_none()
        if row is None or row.expires <= self._clock():
            return None
        return Session(Caller(BROWSER, frozenset(row.scopes.split())), row.expires)

    def leave(self, session: str) -> None:
        """Sign out; nothing happens if that was so already."""
        with self._database.writing() as connection:
            connection.execute(delete(sessions).where(sessions.c.hash == hash_of(session)))

    def leave_all(self) -> int:
        """Sign all browsers out and void all links; returns how many were signed in."""
        with self._database.writing() as connection:
            connection.execute(delete(links))
            return connection.execute(delete(sessions)).rowcount

    def forget_expired(self) -> None:
        """Delete links and sessions that no longer work."""
        now = self._clock()
        with self._database.writing() as connection:
            connection.execute(delete(links).where(links.c.expires <= now))
            connection.execute(delete(sessions).where(sessions.c.expires <= now))
