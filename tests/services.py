"""A service in the test's own process, over a SQLite file; for all tests of the service.

def test_something(service):  # a fixture of conftest.py
    assert service.get("read", "/v1/runs").json() == []
"""

from __future__ import annotations

import functools
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import event
from starlette.routing import BaseRoute

from batchwright.records.lines.run_lines import RunLine
from batchwright.records.service import RecordBatch, RunIntroduction
from batchwright.service.access import cookie_name
from batchwright.service.app import create_app
from batchwright.service.settings import Limits, Settings
from batchwright.service.store import Store
from run_lines import typed, values_of
from samples import make_plan, make_profile

ADDRESS = "http://127.0.0.1:8400"
START = 1_790_000_000.0
"""When tests begin, in seconds of Unix time."""


class HandClock:
    """A clock that goes when a test says so."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += seconds


class Service:
    """An app, its store, its clock and a token of each scope.

    `client` is fastapi's test client without a token; `get`, `put`, `post`, `delete` take the
    scope whose token is sent, or none.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        clock: HandClock,
        tokens: dict[str, str] | None = None,
    ) -> None:
        self.store = store
        self.settings = settings
        self.clock = clock
        self.app = app_over(store, settings)
        self.client = TestClient(
            self.app, base_url=ADDRESS, raise_server_exceptions=True, follow_redirects=False
        )
        self.tokens = dict(tokens or tokens_of(store))

    def headers(self, scope: str | None) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens[scope]}"} if scope else {}

    def request(self, method: str, scope: str | None, path: str, **options: Any) -> Any:
        options["headers"] = {**self.headers(scope), **options.get("headers", {})}
        return self.client.request(method, path, **options)

    def get(self, scope: str | None, path: str, **options: Any) -> Any:
        return self.request("GET", scope, path, **options)

    def put(self, scope: str | None, path: str, **options: Any) -> Any:
        return self.request("PUT", scope, path, **options)

    def post(self, scope: str | None, path: str, **options: Any) -> Any:
        return self.request("POST", scope, path, **options)

    def delete(self, scope: str | None, path: str, **options: Any) -> Any:
        return self.request("DELETE", scope, path, **options)

    def sign_in(self, *scopes: str) -> TestClient:
        """A browser that is signed in."""
        session = self.store.sign_in.enter(self.store.sign_in.link(scopes or ("admin",)))
        assert session is not None
        browser = TestClient(self.app, base_url=ADDRESS, follow_redirects=False)
        browser.cookies.set(cookie_name(self.settings), session)
        return browser

    def a_run(self, owner: str = "report", **changes: Any) -> str:
        """The identifier of a run that was introduced by the token of that name."""
        run = str(uuid.uuid4())
        told = {"name": "digits", "plan": make_plan(), "profile": make_profile()}
        self.store.runs.introduce(run, RunIntroduction(**(told | changes)), owner)
        return run

    def report(self, run: str, *records: dict[str, Any]) -> int:
        """Store records of a run behind those that are there; returns what is wanted next."""
        first = self.store.runs.get(run).records
        return self.store.records.append(run, RecordBatch(first=first, records=records)).next


_ROUTES: list[BaseRoute] = []


def app_over(store: Store, settings: Settings) -> FastAPI:
    """`create_app`, with the routes of the first app of this process, which hold nothing of it.

    What a route takes and answers FastAPI works out at an app's first requests, for 0.1 to 0.3 s.
    """
    app = create_app(store, settings)
    if not _ROUTES:
        _ROUTES.extend(app.router.routes)
    assert len(app.router.routes) == len(_ROUTES)  # no setting leaves any out
    app.router.routes[:] = _ROUTES
    return app


def step(number: int, epoch: int = 0, **changes: Any) -> dict[str, Any]:
    """As `step_line`, as JSON has it."""
    return values_of(step_line(number, epoch, **changes))


def epoch(number: int, epochs: int = 30, **changes: Any) -> dict[str, Any]:
    """As `epoch_line`, as JSON has it."""
    return values_of(epoch_line(number, epochs, **changes))


def step_line(number: int, epoch: int = 0, **changes: Any) -> RunLine:
    """A line of a step with two workers; ``changes`` have flat names."""
    return typed(flat_step(number, epoch, **changes))


def epoch_line(number: int, epochs: int = 30, **changes: Any) -> RunLine:
    """A line of a finished epoch with two workers; ``changes`` have flat names."""
    return typed(flat_epoch(number, epochs, **changes))


def flat_step(number: int, epoch: int = 0, **changes: Any) -> dict[str, Any]:
    """A step's line as earlier versions wrote it."""
    line = {
        "kind": "step",
        "epoch": epoch,
        "step": number,
        "steps": 45,
        "time/train_s": round(0.01 * (number + 1), 4),
        "train/loss": 2.3 / (number + 1),
        "throughput/samples_per_sec": 3200.0,
        "lr": 0.1,
        "batch/global": 32,
    }
    for rank in (0, 1):
        line |= {
            f"batch/local/{rank}": 16,
            f"time/rank{rank}/compute_s": 0.009,
            f"time/rank{rank}/wait_s": 0.001 * rank,
        }
    return line | changes


def flat_epoch(number: int, epochs: int = 30, **changes: Any) -> dict[str, Any]:
    """An epoch's line as earlier versions wrote it."""
    line = {
        "kind": "epoch",
        "epoch": number,
        "epochs": epochs,
        "train/loss": 2.0 / (number + 1),
        "val/loss": 2.1 / (number + 1),
        "val/top1": 1 - 0.9 / (number + 1),
        "time/epoch_s": 0.5,
        "time/eval_s": 0.05,
        "time/checkpoint_s": 0.01,
        "throughput/samples_per_sec": 2874.0,
        "lr": 0.1,
        "resolution": 32,
        "batch/global": 32,
        "steps/skipped": 0,
        "steps/repeated": 0,
        "plan/predicted_epoch_s": 0.48,
        "gns/simple": 200.0,
    }
    for rank in (0, 1):
        line |= {f"batch/local/{rank}": 16}
        line |= {f"time/rank{rank}/{part}_s": 0.1 for part in ("input", "compute", "wait", "comm")}
    return line | changes


def tokens_of(store: Store) -> dict[str, str]:
    """New tokens, one of each scope and named for it."""
    return {s: store.tokens.create(s, [s]) for s in ("read", "report", "submit", "admin")}


@functools.cache
def template() -> tuple[bytes, bytes, dict[str, str]]:
    """A database with nothing in it, the same with tokens, and these; made once, for that takes a
    while."""
    with tempfile.TemporaryDirectory() as folder:
        file, made = Path(folder) / "service.sqlite", []
        for fill in (lambda store: None, tokens_of):
            store = Store.open(Settings(database=f"sqlite:///{file}"), HandClock())
            tokens = fill(store)
            store.close()
            made.append(file.read_bytes())
        return *made, tokens


def new_database(folder: Path, *, tokens: bool = True) -> str:
    """The URL of a SQLite database with nothing in it, or nothing but tokens."""
    (folder / "service.sqlite").write_bytes(template()[tokens])
    return f"sqlite:///{folder}/service.sqlite"


def leave_unsynced(store: Store) -> Store:
    """Have a store sync its disk no more: nobody pulls the plug of a test."""
    if store.database.is_sqlite:
        event.listen(store.database.engine, "connect", _leave_unsynced)
        store.database.engine.dispose()  # connections that are there already
    return store


def _leave_unsynced(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA synchronous=OFF")


def serving_from(folder: Path, clock: HandClock) -> Iterator[Service]:
    """A service over a new database in ``folder``, for a fixture of any scope; with limits that no
    test meets by accident."""
    limits = Limits(requests_per_second=100_000.0, burst=100_000)
    settings = Settings(database=new_database(folder), limits=limits)
    store = leave_unsynced(Store.open(settings, clock))
    made = Service(store, settings, clock, template()[2])
    yield made
    made.app.state.adviser.close()
    made.app.state.remover.close()
    store.close()
