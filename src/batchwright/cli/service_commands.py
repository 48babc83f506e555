"""Commands for operators of a service: `serve`, `token`, `sign-in`, `backup`.

They need the packages of ``pip install "batchwright[serve]"``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from batchwright.cli.client_commands import LOCAL_SERVICE
from batchwright.cli.output import amount
from batchwright.errors import BatchwrightError, not_installed

if TYPE_CHECKING:
    from batchwright.service.store import Store

PACKAGES = {"alembic", "fastapi", "multipart", "prometheus_client", "psycopg", "python_multipart"}
PACKAGES |= {"fsspec", "jinja2", "sqlalchemy", "starlette", "uvicorn"}
"""Modules that the extra ``serve`` installs."""

Database = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="BATCHWRIGHT_DATABASE",
        help="sqlite:////FOLDER/FILE or postgresql://USER:PASSWORD@HOST/NAME.",
        show_envvar=False,
    ),
]


def serve(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="0: any that is free.")
    ] = 8400,
    database: Database = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name that clients use; may be repeated."),
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Address for browsers, such as https://plans.example.org behind a proxy. Its host "
            "name is allowed; with https, cookies are sent over HTTPS only.",
        ),
    ] = None,
    secure_cookies: Annotated[
        bool, typer.Option("--secure-cookies", help="Browsers send cookies over HTTPS only.")
    ] = False,
    proxy: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Proxy whose word on its clients' addresses is trusted."
        ),
    ] = None,
    retention_days: Annotated[
        str | None,
        typer.Option(
            metavar="DAYS", help="Days after which runs, jobs and profiles are deleted; else never."
        ),
    ] = None,
    lease_seconds: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds of silence after which an agent may lose its job; else 30.",
        ),
    ] = None,
    keep_seconds: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds more that a training waits for its silent agent; else 600.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Requests per second that one token or address may make; else 200.",
        ),
    ] = None,
    artifacts: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Store for jobs' checkpoints and logs: a folder, s3://BUCKET/FOLDER, or `none`. "
            "Without it, a folder beside the SQLite file.",
        ),
    ] = None,
    artifacts_gib: Annotated[
        str | None,
        typer.Option(
            metavar="GIB",
            help="Size of that store, also as 500GB; else 64. One job may use a quarter of it.",
        ),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="BATCHWRIGHT_WEBHOOK",
            help="Address that failed jobs, silent runs and missed predictions are posted to.",
            show_envvar=False,
        ),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option(help="Lowest level that is logged; else info, and warning at a terminal."),
    ] = None,
) -> None:
    """Serve runs, plans, jobs and pages. Needs no torch."""
    with _with_serve():
        from batchwright.service.database.engine import shown
        from batchwright.service.operating.local import default_artifacts, default_database
        from batchwright.service.operating.serving import check_names, log_to_stderr, public_parts
        from batchwright.service.operating.serving import serve as serve_until_stopped
        from batchwright.service.settings import GIB, Limits, Settings
        from batchwright.service.store.tokens import new_name, sign_in_address
        from batchwright.service.webhook import SECRET, checked_webhook

    times: dict[str, Any] = {
        "retention_days": amount("--retention-days", retention_days, "days"),
        "lease_seconds": amount("--lease-seconds", lease_seconds, "seconds", least=5),
        "keep_seconds": amount("--keep-seconds", keep_seconds, "seconds", least=0),
    }
    defaults = Limits()
    requests = amount("--rate", rate) or defaults.requests_per_second
    gib = amount("--artifacts-gib", artifacts_gib, "GiB")
    size = max(1, round(gib * GIB)) if gib else defaults.artifact_bytes
    limits = Limits(
        requests_per_second=requests,
        burst=max(defaults.burst, round(4 * requests)),
        artifact_bytes=size,
        artifact_bytes_per_job=max(1, size // 4),
    )
    check_names(allowed_host or (), proxy)
    scheme, name = public_parts(public_url) if public_url else ("", "")
    database = database or default_database()
    settings = Settings(
        database=database,
        host=host,
        port=port,
        allowed_hosts=tuple(filter(None, (*(allowed_host or ()), name))),
        public_url=public_url and public_url.rstrip("/"),
        secure_cookies=secure_cookies or scheme == "https",
        **{key: value for key, value in times.items() if value is not None},
        artifacts=None if artifacts == "none" else artifacts or default_artifacts(database),
        webhook=checked_webhook(webhook),
        webhook_secret=os.environ.get(SECRET) or None,
        limits=limits,
    )

    def announce(address: str, store: Store) -> None:
        _say(f"batchwright serves at {address}, from {shown(settings.database)}")
        if sys.stderr.isatty() or not store.sign_in.ever():
            name = new_name()
            link = sign_in_address(address, store.sign_in.link(["admin"], name))
            store.audit.note("operator", "sign-in.link", f"browser {name}", "admin")
            _say(f"sign in within {round(settings.link_seconds / 60)} minutes: {link}")
        else:  # a log is no place for a link that signs in
            _say(f"sign in: `batchwright sign-in --server {address}` prints a link")
        log_to_stderr(log_level)

    serve_until_stopped(settings, on_start=announce, proxy=proxy)


def token(
    action: Annotated[
        Literal["create", "list", "revoke"],
        typer.Argument(metavar="create|list|revoke", help="What to do."),
    ],
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The token's name.")] = None,
    scopes: Annotated[
        str | None,
        typer.Option(metavar="SCOPE,...", help="Some of read, report, submit, admin."),
    ] = None,
    database: Database = None,
) -> None:
    """Create, list or revoke the tokens by which programs use a service."""
    if action == "list":
        with _store(database) as store:
            for one in store.tokens.list():
                state = "revoked" if one.revoked else f"used {_when(one.used)}"
                print(f"{one.name}\t{','.join(one.scopes)}\tcreated {_when(one.created)}\t{state}")
        return
    if name is None:
        raise BatchwrightError(f"which token? write `batchwright token {action} NAME`")
    if action == "create" and scopes is None:
        raise BatchwrightError(
            f"what may {name} do? add --scopes with some of read, report, submit, admin"
        )
    with _store(database) as store:
        if action == "revoke":
            store.tokens.revoke(name)
            store.audit.note("operator", "token.revoke", name)
            _say(f"{name} is refused from now on")
            return
        words = _scopes(scopes or "")
        secret = store.tokens.create(name, words)
        store.audit.note("operator", "token.create", name, " ".join(words))
        _say(f"the token of {name}, shown this once; for BATCHWRIGHT_TOKEN:")
        print(secret)


def sign_in(
    scopes: Annotated[
        str, typer.Option(metavar="SCOPE,...", help="Some of read, report, submit, admin.")
    ] = "admin",
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Who will use the link: their jobs stay theirs when they sign in again.",
        ),
    ] = None,
    server: Annotated[
        str, typer.Option(metavar="URL", help="Address of the service, for the link.")
    ] = LOCAL_SERVICE,
    sign_out: Annotated[
        bool,
        typer.Option("--sign-out", help="Instead sign all browsers out, and void all links."),
    ] = False,
    database: Database = None,
) -> None:
    """Print a link that signs in one browser, once; or sign all browsers out."""
    with _store(database) as store:
        if sign_out:
            _say(f"signed in until now: {store.sign_in.leave_all()}; nobody is any more")
            store.audit.note("operator", "sign-in.out", "browser")
            return
        from batchwright.client.http import checked_url
        from batchwright.service.store.tokens import new_name, sign_in_address

        words, name = _scopes(scopes), name or new_name()
        server = checked_url(server)
        link = store.sign_in.link(words, name)
        store.audit.note("operator", "sign-in.link", f"browser {name}", " ".join(words))
        print(sign_in_address(server, link))


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file for the copy.")],
    database: Database = None,
) -> None:
    """Copy a service's database while the service runs."""
    with _with_serve():
        from batchwright.service.operating.backup import backup as copy
        from batchwright.service.operating.local import default_database

    size = copy(database or default_database(), file)
    _say(f"{file}: {size / 2**20:.1f} MiB")


@contextmanager
def _with_serve() -> Iterator[None]:
    """Turn a failed import of a package of the extra ``serve`` into a hint to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in PACKAGES:
            raise
        raise BatchwrightError(not_installed(missing, "serve")) from None


@contextmanager
def _store(database: str | None) -> Iterator[Store]:
    """Open the store in a database: the given one, or the user's default one."""
    with _with_serve():
        from batchwright.service.operating.local import default_database
        from batchwright.service.settings import Settings
        from batchwright.service.store import Store

    store = Store.open(Settings(database=database or default_database()))
    try:
        yield store
    finally:
        store.close()


def _scopes(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def _when(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    return datetime.fromtimestamp(seconds).isoformat(" ", timespec="minutes")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
