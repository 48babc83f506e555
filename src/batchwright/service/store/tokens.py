"""Tokens of programs, created and revoked by an operator, and sessions of browsers, to which a link
leads that works once. Both are secrets that a client sends, of which a hash is stored, with scopes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from typing import NamedTuple, get_args

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import bindparam, delete, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from batchwright.records.service import Name, Scope
from batchwright.service.database.engine import Database
from batchwright.service.database.tables import audit, links, sessions, tokens
from batchwright.service.problems import Conflict, NotFound, Refused
from batchwright.service.settings import Settings
from batchwright.service.store.part import Clock, Part

SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "bw_"  # so that a token is recognized where it should not be, such as in a repository
USED_SECONDS = 60.0
"""How exactly it is known when a token was last used; each request would be a write else."""

LOCAL = "local"
"""Name of the token that `serve` makes for clients of the same user, beside a SQLite file. Beside a
database that is elsewhere, where others may have one as well, `@` and more follows."""

BROWSER = "browser"
"""Who a session is, in the audit log and as an owner; behind a blank follows the link's name."""

_VALID = select(tokens).where(tokens.c.hash == bindparam("hash"), tokens.c.revoked.is_(None))
"""Made once: each request asks it."""

RESERVED = (BROWSER, "operator")
"""Names that the audit log uses for others."""


class Caller(NamedTuple):
    """Who sent a request."""

    name: str
    """A token's name; `browser` and the link's name for a page that is signed in."""
    scopes: frozenset[str]

    def may(self, *scopes: str) -> bool:
        """Whether any of ``scopes`` is among the caller's; `admin` may do everything."""
        return "admin" in self.scopes or not self.scopes.isdisjoint(scopes)

    def owns(self, owner: str) -> bool:
        """Whether what belongs to ``owner`` may be changed: it is the caller's own, or all is."""
        return self.name == owner or "admin" in self.scopes


class TokenInfo(NamedTuple):
    """A token, without its secret. Times are Unix time in seconds; null: never."""

    name: str
    scopes: tuple[str, ...]
    created: float
    used: float | None
    revoked: float | None


class Tokens(Part):
    """The table of tokens.

    Who asks is found out without writing anything, so that a full disk stops no reader; when a
    token was used, `note_used` writes now and then.
    """

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        super().__init__(database, settings, clock)
        self._used: dict[str, float] = {}  # by name; threads replace whole values

    def create(self, name: str, scopes: Iterable[str]) -> str:
        """A new token; what it owned before it was revoked, if it was, it owns again.

        Returns:
            The secret, which is not stored: whoever loses it needs a new token.

        Raises:
            Refused: The name or a scope is none.
            Conflict: There is such a token.
        """
        _refuse_no_name(name, 120, "a token")
        if name in RESERVED or name.startswith(f"{BROWSER} "):
            raise Refused(f"{name!r} cannot name a token: the audit log uses it for others")
        self._used.pop(name, None)
        secret = new_secret(PREFIX)
        values = {
            "hash": hash_of(secret),
            "scopes": scope_words(scopes),
            "created": self._clock(),
            "used": None,
            "revoked": None,
        }
        with self._database.writing() as connection:
            mine = (tokens.c.name == name, tokens.c.revoked.is_not(None))
            if connection.execute(update(tokens).where(*mine).values(**values)).rowcount:
                return secret
            add = sqlite.insert if self._database.is_sqlite else postgresql.insert
            new = add(tokens).values(name=name, **values).on_conflict_do_nothing()
            if connection.execute(new.returning(tokens.c.id)).first() is None:
                raise Conflict(
                    f"there is a token {name!r} already; revoke it first, or take another name"
                )
        return secret

    def revoke(self, name: str) -> None:
        """Refuse a token from now on.

        Raises:
            NotFound: There is none of that name, or it was revoked before.
        """
        valid = (tokens.c.name == name, tokens.c.revoked.is_(None))
        if not self._write(update(tokens).where(*valid).values(revoked=self._clock())):
            raise NotFound(f"there is no token {name!r}; `batchwright token list` names them")

    def limit(self, name: str, scopes: Iterable[str]) -> None:
        """Have a token do so much from now on, and no more."""
        self._write(update(tokens).where(tokens.c.name == name).values(scopes=scope_words(scopes)))

    def list(self) -> list[TokenInfo]:
        """All tokens, revoked ones too, by name."""
        told = []
        for row in self._read(select(tokens).order_by(tokens.c.name)):
            used = max((one for one in (row.used, self._used.get(row.name)) if one), default=None)
            scopes = tuple(row.scopes.split())
            told.append(TokenInfo(row.name, scopes, row.created, used, row.revoked))
        return told

    def find(self, secret: str) -> Caller | None:
        """Who holds ``secret``; `None` if nobody does, or the token was revoked."""
        now = self._clock()
        found = self._database.ask(_VALID, {"hash": hash_of(secret)})
        if not found:
            return None
        row = found[0]
        if now - max(row.used or 0.0, self._used.get(row.name, 0.0)) >= USED_SECONDS:
            self._used[row.name] = now
        return Caller(row.name, frozenset(row.scopes.split()))

    def note_used(self) -> None:
        """Write when tokens were used since this was called last.

        Raises:
            SQLAlchemyError: The database takes no writes; they are written the next time.
        """
        used = dict(self._used)
        if not used:
            return
        with self._database.writing() as connection:
            for name, when in used.items():
                later = or_(tokens.c.used.is_(None), tokens.c.used < when)
                connection.execute(
                    update(tokens).where(tokens.c.name == name, later).values(used=when)
                )
        for name, when in used.items():
            if self._used.get(name) == when:
                del self._used[name]


class SignIn(Part):
    """The tables of links and sessions."""

    def link(self, scopes: Iterable[str], name: str | None = None) -> str:
        """The secret of a new link, which works once, for `Settings.link_seconds`.

        Args:
            scopes: What the browser may do.
            name: Whose it is. What a browser submits belongs to those of the same name.

        Raises:
            Refused: The name or a scope is none.
        """
        if name is not None:
            _refuse_no_name(name, 120 - len(BROWSER) - 1, "who is signed in")
        secret, words = new_secret(), scope_words(scopes)
        expires = self._clock() + self._settings.link_seconds
        told = {"scopes": words, "expires": expires, "name": name}
        self._write(insert(links).values(hash=hash_of(secret), **told))
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
                    name=row.name,
                    created=now,
                    expires=now + self._settings.session_seconds,
                )
            )
        return session

    def find(self, session: str) -> Caller | None:
        """Whose browser's cookie holds this session; `None` if there is none, or no longer."""
        valid = (sessions.c.hash == hash_of(session), sessions.c.expires > self._clock())
        found = self._read(select(sessions.c.scopes, sessions.c.name).where(*valid))
        if not found:
            return None
        name = BROWSER if found[0].name is None else f"{BROWSER} {found[0].name}"
        return Caller(name, frozenset(found[0].scopes.split()))

    def ever(self) -> bool:
        """Whether anybody is signed in, or was."""
        signed_in = select(audit.c.id).where(audit.c.action == "sign-in").limit(1)
        return bool(self._read(select(sessions.c.created).limit(1)) or self._read(signed_in))

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


def _refuse_no_name(name: str, longest: int, what: str) -> None:
    try:
        TypeAdapter(Name).validate_python(name)
        sound = len(name) <= longest
    except ValidationError:
        sound = False
    if not sound:
        raise Refused(f"{name[:40]!r} cannot name {what}: use 1 to {longest} visible characters")


def new_name() -> str:
    """A name for a browser whose link has none."""
    return secrets.token_hex(4)


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
