"""Browsers: a link that works once becomes a session."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import delete, insert, select

from batchwright.service.caller import Caller
from batchwright.service.database.tables import links, sessions
from batchwright.service.store.part import Part
from batchwright.service.store.tokens import hash_of, new_secret, scope_words

BROWSER = "browser"
"""Who a session is, in the audit log and as an owner."""


class SignIn(Part):
    """The tables of links and sessions."""

    def link(self, scopes: Iterable[str]) -> str:
        """The secret of a new link, which works once, for `Settings.link_seconds`."""
        secret, words = new_secret(), scope_words(scopes)
        expires = self._clock() + self._settings.link_seconds
        self._write(insert(links).values(hash=hash_of(secret), scopes=words, expires=expires))
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

    def find(self, session: str) -> Caller | None:
        """Whose browser's cookie holds this session; `None` if there is none, or no longer."""
        valid = (sessions.c.hash == hash_of(session), sessions.c.expires > self._clock())
        found = self._read(select(sessions.c.scopes).where(*valid))
        return Caller(BROWSER, frozenset(found[0].scopes.split())) if found else None

    def leave(self, session: str) -> None:
        """Sign out; nothing happens if that was so already."""
        self._write(delete(sessions).where(sessions.c.hash == hash_of(session)))

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
