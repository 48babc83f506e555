"""Tokens of programs, which an operator creates and revokes, and sessions of browsers, which a
one-time link opens. Both are secrets that a client sends; a hash and the scopes are stored.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from typing import NamedTuple, get_args

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import bindparam, delete, insert, or_, select, update

from batchwright.records.service import Name, Scope
from batchwright.service.database.tables import audit, links, sessions, tokens
from batchwright.service.problems import Conflict, NotFound, Refused
from batchwright.service.store.part import Common, Part

SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "bw_"  # so that a token is recognized where it should not be, such as in a repository
USED_SECONDS = 60.0
"""Precision of `TokenInfo.used`; a finer one would make each request a write."""

LOCAL = "local"
"""Name of the token that `serve` makes for clients of the same user, beside a SQLite file. Of any
other database, which services on several machines may share, ``@`` and more follows."""

BROWSER = "browser"
"""Name of a session in the audit log and as an owner; the link's name follows behind a blank."""

_VALID = select(tokens).where(tokens.c.hash == bindparam("hash"), tokens.c.revoked.is_(None))
"""Built once, as each request runs it."""

RESERVED = (BROWSER, "operator", "service")
"""Names in the audit log that no token may have."""

SIGN_IN = "/sign-in"
"""Path of a sign-in link; the link's secret is its parameter `link`."""


class Caller(NamedTuple):
    """The sender of a request."""

    name: str
    """A token's name; of a signed-in browser `browser` and the link's name."""
    scopes: frozenset[str]

    def may(self, *scopes: str) -> bool:
        """Whether the caller has any of ``scopes``, or `admin`, which allows everything."""
        return "admin" in self.scopes or not self.scopes.isdisjoint(scopes)

    def owns(self, owner: str) -> bool:
        """Whether the caller may change what belongs to ``owner``: as that owner, or as admin."""
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

    `find` writes nothing, so that a full disk stops no reader; `note_used` writes now and then when
    tokens were used.
    """

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self._used: dict[str, float] = {}  # by name, in Unix time; threads replace whole values

    def create(self, name: str, scopes: Iterable[str]) -> str:
        """Create a token. One with the name of a revoked token owns what that token owned.

        Returns:
            The secret, which is not stored: a lost one takes a new token.

        Raises:
            Refused: The name or a scope is invalid.
            Conflict: There is a token of this name.
        """
        _check_name(name, 120, "a token")
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
            revoked = (tokens.c.name == name, tokens.c.revoked.is_not(None))
            if connection.execute(update(tokens).where(*revoked).values(**values)).rowcount:
                return secret
            new = self._insert_if_new(tokens, name=name, **values)
            if connection.execute(new.returning(tokens.c.id)).first() is None:
                raise Conflict(
                    f"there is a token {name!r} already; revoke it first, or take another name"
                )
        return secret

    def revoke(self, name: str) -> None:
        """Refuse a token from now on.

        Raises:
            NotFound: There is no token of that name, or it was revoked before.
        """
        valid = (tokens.c.name == name, tokens.c.revoked.is_(None))
        if not self._write(update(tokens).where(*valid).values(revoked=self._clock())):
            raise NotFound(f"there is no token {name!r}; `batchwright token list` names them")

    def limit(self, name: str, scopes: Iterable[str]) -> None:
        """Replace the scopes of a token."""
        self._write(update(tokens).where(tokens.c.name == name).values(scopes=scope_words(scopes)))

    def list(self) -> list[TokenInfo]:
        """All tokens, revoked ones too, by name."""
        infos = []
        for row in self._read(select(tokens).order_by(tokens.c.name)):
            used = max((at for at in (row.used, self._used.get(row.name)) if at), default=None)
            scopes = tuple(row.scopes.split())
            infos.append(TokenInfo(row.name, scopes, row.created, used, row.revoked))
        return infos

    def find(self, secret: str) -> Caller | None:
        """The caller whose token is ``secret``; `None` if no valid token is."""
        now = self._clock()
        rows = self._database.ask(_VALID, {"hash": hash_of(secret)})
        if not rows:
            return None
        row = rows[0]
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
        """Create a link, which works once, for `Settings.link_seconds`; returns its secret.

        Args:
            scopes: Scopes of the browser's session.
            name: Name of the user. What a browser submits belongs to all sessions of that name.

        Raises:
            Refused: The name or a scope is invalid.
        """
        if name is not None:
            _check_name(name, 120 - len(BROWSER) - 1, "who is signed in")
        secret, words = new_secret(), scope_words(scopes)
        values = {
            "hash": hash_of(secret),
            "scopes": words,
            "expires": self._clock() + self._settings.link_seconds,
            "name": name,
        }
        self._write(insert(links).values(**values))
        return secret

    def enter(self, secret: str) -> str | None:
        """Open a session by a link's secret; returns the session's secret.

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
        """The caller whose browser's cookie is ``session``; `None` if there is no such session."""
        valid = (sessions.c.hash == hash_of(session), sessions.c.expires > self._clock())
        rows = self._read(select(sessions.c.scopes, sessions.c.name).where(*valid))
        if not rows:
            return None
        name = BROWSER if rows[0].name is None else f"{BROWSER} {rows[0].name}"
        return Caller(name, frozenset(rows[0].scopes.split()))

    def ever(self) -> bool:
        """Whether any browser is signed in, or was."""
        signed_in = select(audit.c.id).where(audit.c.action == "sign-in").limit(1)
        return bool(self._read(select(sessions.c.created).limit(1)) or self._read(signed_in))

    def leave(self, session: str) -> None:
        """End a session, if there is one."""
        self._write(delete(sessions).where(sessions.c.hash == hash_of(session)))

    def leave_all(self) -> int:
        """End all sessions and delete all links; returns the number of sessions."""
        with self._database.writing() as connection:
            connection.execute(delete(links))
            return connection.execute(delete(sessions)).rowcount

    def forget_expired(self) -> None:
        """Delete links and sessions that no longer work."""
        now = self._clock()
        with self._database.writing() as connection:
            connection.execute(delete(links).where(links.c.expires <= now))
            connection.execute(delete(sessions).where(sessions.c.expires <= now))


def _check_name(name: str, longest: int, what: str) -> None:
    """Refuse a name for ``what`` that is empty, too long, or has control characters in it."""
    try:
        TypeAdapter(Name).validate_python(name)
        valid = len(name) <= longest
    except ValidationError:
        valid = False
    if not valid:
        raise Refused(f"{name[:40]!r} cannot name {what}: use 1 to {longest} visible characters")


def sign_in_address(base: str, secret: str) -> str:
    """The sign-in link for a person.

    Args:
        base: Address of the service.
        secret: The link's secret, from `SignIn.link`.
    """
    return f"{base.rstrip('/')}{SIGN_IN}?link={secret}"


def new_name() -> str:
    """A name for a browser whose link has none."""
    return secrets.token_hex(4)


def new_secret(prefix: str = "") -> str:
    """256 random bits, as 43 characters that need no quoting."""
    return prefix + secrets.token_urlsafe(32)


def hash_of(secret: str) -> str:
    """The hash of a secret that is stored: SHA-256, in hex. As secrets are long and random, no slow
    hash is needed.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def scope_words(scopes: Iterable[str]) -> str:
    """Scopes as they are stored: words with blanks between, each once, in the order of `SCOPES`.

    Raises:
        Refused: A scope is unknown, or there is none.
    """
    wanted = set(scopes)
    unknown = sorted(wanted - set(SCOPES))
    if unknown:
        raise Refused(f"unknown scope {unknown[0]!r}: known are {', '.join(SCOPES)}")
    if not wanted:
        raise Refused(f"a token without scopes may do nothing: give some of {', '.join(SCOPES)}")
    return " ".join(scope for scope in SCOPES if scope in wanted)
