"""Who may do what: programs by a token, browsers by a cookie.

Each route says what it needs as a dependency, `need`, `need_page` or `open_to_all`; a test walks
all routes and finds one that says nothing. Who asks was found out before, by `identify`. These are
coroutines, and wait for nothing: as functions each would be handed to a thread.
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
"""Begin of the cookie's name."""
CSRF_FIELD = "csrf"
SIGN_IN = "/sign-in"
"""The page that a sign-in link leads to; the link's secret is its `link` parameter."""

_bearer = HTTPBearer(
    auto_error=False, description="A token made by `batchwright token create NAME --scopes ...`."
)


def store_of(request: Request) -> Store:
    """The store that the app was made with."""
    store: Store = request.app.state.store
    return store


async def _store_of(request: Request) -> Store:
    return store_of(request)


StoreDep = Annotated[Store, Depends(_store_of)]
"""The store, as a parameter of a route."""


def settings_of(request: Request) -> Settings:
    """The settings that the app was made with."""
    settings: Settings = request.app.state.settings
    return settings


def need(*scopes: Scope) -> Any:
    """A dependency of an API route: the `Caller`, whose token has any of ``scopes``, or `admin`.

    Raises:
        Unauthorized: There is no token, or it is unknown.
        Forbidden: It lacks the scope.
    """

    async def check(request: Request, _shown: Annotated[Any, Security(_bearer)]) -> Caller:
        unknown = "a token is needed, as `Authorization: Bearer TOKEN`"
        if "authorization" in request.headers:
            unknown = "this token is unknown or was revoked"
        return _allowed(request, "caller", scopes, "this token", unknown)

    check.needed = scopes  # type: ignore[attr-defined] # for the walk over all routes
    return Depends(check)


def need_page(*scopes: Scope) -> Any:
    """A dependency of a page: the `Caller`, signed in with any of ``scopes``, or with `admin`.

    Raises:
        Unauthorized: The browser is not signed in, or no longer.
        Forbidden: It was signed in with less.
    """

    async def check(request: Request) -> Caller:
        unknown = "sign in first: `batchwright sign-in` prints a link"
        return _allowed(request, "visitor", scopes, "this browser", unknown)

    check.needed = scopes  # type: ignore[attr-defined]
    return Depends(check)


def _allowed(
    request: Request, state: str, scopes: tuple[Scope, ...], who: str, unknown: str
) -> Caller:
    caller: Caller | None = getattr(request.state, state, None)
    if caller is None:
        raise Unauthorized(unknown)
    if scopes and not caller.may(*scopes):
        raise Forbidden(f"{who} may not do this: it needs the scope {' or '.join(scopes)}")
    return caller


def open_to_all() -> Any:
    """A dependency of a route that anybody may call; it says so, and does nothing."""

    async def check() -> None: ...

    check.needed = ()  # type: ignore[attr-defined]
    return Depends(check)


Reader = Annotated[Caller, need("read")]
Reporter = Annotated[Caller, need("report")]
Submitter = Annotated[Caller, need("submit")]
PageReader = Annotated[Caller, need_page("read")]
PageSubmitter = Annotated[Caller, need_page("submit")]


def sign_in_address(base: str, secret: str) -> str:
    """The link to hand to a person; ``secret`` is `SignIn.link`'s."""
    return f"{base.rstrip('/')}{SIGN_IN}?link={secret}"


def require_owner(caller: Caller, owner: str) -> None:
    """Nothing, if ``caller`` may change what belongs to ``owner``.

    Raises:
        Forbidden: It is another's.
    """
    if not caller.owns(owner):
        raise Forbidden("this belongs to another token")


def cookie_name(settings: Settings) -> str:
    """Name of the cookie with the session, one for each database. Browsers send a cookie to all
    ports of a host: two services there would sign people out of each other.
    """
    return f"{COOKIE}_{hashlib.sha256(shown(settings.database).encode()).hexdigest()[:8]}"


def session_of(request: Request) -> str:
    """The session that a browser holds; empty without one."""
    return request.cookies.get(cookie_name(settings_of(request)), "")


def csrf_of(request: Request) -> str:
    """What each form of a page holds in the field `csrf`; empty where nobody is signed in.

    It is made from the session's secret, which no other site can read, and does not give it away.
    """
    session = session_of(request)
    return _csrf(session) if session else ""


async def check_form(request: Request) -> None:
    """A dependency of a route that takes a form: it was filled in on a page of this session.

    Raises:
        Forbidden: It was not, or the session has ended since.
    """
    form = await request.form()
    given, session = form.get(CSRF_FIELD), session_of(request)
    if (
        not session
        or not isinstance(given, str)
        or not hmac.compare_digest(given.encode("utf-8", "replace"), _csrf(session).encode())
    ):
        raise Forbidden("this form is out of date: load the page again and repeat what you did")


def remember(response: Response, session: str, settings: Settings) -> None:
    """Have the browser keep the session that `SignIn.enter` gave."""
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
    """Have the browser drop its session."""
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
