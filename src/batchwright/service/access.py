"""Access: programs by a token, browsers by a cookie.

Each route names the scopes that it needs by a dependency, `need`, `need_page` or `open_to_all`; a
test walks all routes and finds one without. The middleware `identify` has found the caller before.
The dependencies are coroutines that wait for nothing: functions would each be run in a thread.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Any

from fastapi import Depends, Request, Response, Security
from fastapi.security import HTTPBearer

from batchwright.records.service import Scope
from batchwright.service.database.engine import shown
from batchwright.service.problems import Forbidden, Unauthorized
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from batchwright.service.store.tokens import Caller

COOKIE = "batchwright_session"
"""First part of the cookie's name."""
CSRF_FIELD = "csrf"

_bearer = HTTPBearer(
    auto_error=False, description="A token made by `batchwright token create NAME --scopes ...`."
)


def store_of(request: Request) -> Store:
    """The app's store."""
    store: Store = request.app.state.store
    return store


async def _store_of(request: Request) -> Store:
    return store_of(request)


StoreDep = Annotated[Store, Depends(_store_of)]
"""The store, as a parameter of a route."""


def settings_of(request: Request) -> Settings:
    """The app's settings."""
    settings: Settings = request.app.state.settings
    return settings


def need(*scopes: Scope) -> Any:
    """A dependency of an API route: the `Caller`, whose token has any of ``scopes``, or `admin`.

    Raises:
        Unauthorized: The request has no token, or an unknown one.
        Forbidden: The token lacks the scope.
    """

    async def check(request: Request, _shown: Annotated[Any, Security(_bearer)]) -> Caller:
        unknown = "a token is needed, as `Authorization: Bearer TOKEN`"
        if "authorization" in request.headers:
            unknown = "this token is unknown or was revoked"
        return _allowed(request, "caller", scopes, "this token", unknown)

    check.needed = scopes  # type: ignore[attr-defined] # for the walk over all routes
    return Depends(check)


def need_page(*scopes: Scope) -> Any:
    """A dependency of a page: the `Caller`, whose session has any of ``scopes``, or `admin`.

    Raises:
        Unauthorized: The browser is not signed in, or no longer.
        Forbidden: The session lacks the scope.
    """

    async def check(request: Request) -> Caller:
        unknown = "sign in first: `batchwright sign-in` prints a link"
        return _allowed(request, "visitor", scopes, "this browser", unknown)

    check.needed = scopes  # type: ignore[attr-defined]
    return Depends(check)


def _allowed(
    request: Request, state: str, scopes: tuple[Scope, ...], who: str, unknown: str
) -> Caller:
    """The caller in a request's ``state``, if it has any of ``scopes``; messages name it ``who``,
    or are ``unknown``.
    """
    caller: Caller | None = getattr(request.state, state, None)
    if caller is None:
        raise Unauthorized(unknown)
    if scopes and not caller.may(*scopes):
        raise Forbidden(f"{who} may not do this: it needs the scope {' or '.join(scopes)}")
    return caller


def open_to_all() -> Any:
    """A dependency of a route that anybody may call; it does nothing."""

    async def check() -> None: ...

    check.needed = ()  # type: ignore[attr-defined]
    return Depends(check)


Reader = Annotated[Caller, need("read")]
Reporter = Annotated[Caller, need("report")]
Submitter = Annotated[Caller, need("submit")]
PageReader = Annotated[Caller, need_page("read")]
PageSubmitter = Annotated[Caller, need_page("submit")]


def require_owner(caller: Caller, owner: str) -> None:
    """Refuse a caller that may not change what belongs to ``owner``.

    Raises:
        Forbidden: The owner is another one.
    """
    if not caller.owns(owner):
        raise Forbidden("this belongs to another token")


def cookie_name(settings: Settings) -> str:
    """Name of the session's cookie, another one for each database. As browsers send a cookie to all
    ports of a host, two services with one name would overwrite each other's session.
    """
    return f"{COOKIE}_{hashlib.sha256(shown(settings.database).encode()).hexdigest()[:8]}"


def session_of(request: Request) -> str:
    """The secret of the browser's session; empty without one."""
    return request.cookies.get(cookie_name(settings_of(request)), "")


def csrf_of(request: Request) -> str:
    """Value of the field `csrf` in each form of a page; empty where nobody is signed in.

    It is computed from the session's secret, which other sites cannot read, and does not reveal it.
    """
    session = session_of(request)
    return _csrf(session) if session else ""


async def check_form(request: Request) -> None:
    """A dependency of a route that takes a form: the form comes from a page of this session.

    Raises:
        Forbidden: The form does not, or the session has ended since.
    """
    form = await request.form()
    csrf, session = form.get(CSRF_FIELD), session_of(request)
    if (
        not session
        or not isinstance(csrf, str)
        or not hmac.compare_digest(csrf.encode("utf-8", "replace"), _csrf(session).encode())
    ):
        raise Forbidden("this form is out of date: load the page again and repeat what you did")


def remember(response: Response, session: str, settings: Settings) -> None:
    """Set the cookie of a session, whose secret is from `SignIn.enter`."""
    response.set_cookie(
        cookie_name(settings),
        session,
        max_age=int(settings.session_seconds),
        path="/",
        httponly=True,
        samesite="strict",
        secure=settings.secure_cookies,
    )


def forget(response: Response, settings: Settings) -> None:
    """Delete the cookie of the session."""
    response.delete_cookie(
        cookie_name(settings),
        path="/",
        httponly=True,
        samesite="strict",
        secure=settings.secure_cookies,
    )


def _csrf(session: str) -> str:
    key = session.encode("utf-8", "replace")
    return hmac.new(key, b"batchwright form", hashlib.sha256).hexdigest()
