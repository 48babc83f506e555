"""`batchwright serve` as a process, and the commands around it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import uuid
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient
from pydantic import TypeAdapter

import batchwright as bw
from batchwright.errors import BatchwrightError, FileError
from batchwright.records.service import RecordBatch, RunIntroduction
from batchwright.service.app import create_app
from batchwright.service.operating import serving as process
from batchwright.service.operating.backup import backup
from batchwright.service.operating.local import (
    is_local,
    keep_local_token,
    local_name,
    local_token_file,
)
from batchwright.service.operating.serving import (
    address_of,
    build_routes,
    is_loopback,
    listen,
    public_parts,
    refuse_public_without_tokens,
)
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from batchwright.service.store.tokens import LOCAL
from clients import start_service, wait_until
from forked import Forked, forking
from samples import make_plan, make_profile
from services import new_database, step
from test_docs import briefly, entered, quickly, shown_for

LAST_SECONDS = 500


class Serving:
    """A service in a process of its own."""

    def __init__(self, folder: Path, *words: str, database: str | None = None) -> None:
        self._folder = folder
        self.database = database or f"sqlite:///{folder}/service.sqlite"
        read, written = os.pipe()
        variables = {"BATCHWRIGHT_DATABASE": self.database, "XDG_DATA_HOME": str(folder)}
        self.process = start_service("--port", "0", *words, log=written, **variables)
        os.close(written)
        self._said = os.fdopen(read)
        self.lines: list[str] = []
        self._begun = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._begun.wait(LAST_SECONDS), self.lines
        assert "serves at" in self.lines[0], "\n".join(self.lines)
        self.address = self.lines[0].partition("serves at ")[2].partition(",")[0]

    def _read(self):
        with self._said:
            for line in self._said:
                self.lines.append(line.rstrip("\n"))
                if len(self.lines) == 2:
                    self._begun.set()
        self._begun.set()

    def client(self, token: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.address, headers=headers, timeout=300, trust_env=False)

    def token(self) -> str:
        beside = self._folder / "local-token"
        return (beside if beside.exists() else self._users()).read_text().strip()

    def _users(self) -> Path:
        return self._folder / "batchwright" / "local-token"

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(LAST_SECONDS)
        self._reader.join(LAST_SECONDS)
        return code


@contextmanager
def serving(folder, *words, **options):
    one = Serving(folder, *words, **options)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            try:
                one.process.wait(10)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait(10)


def introduce(client) -> str:
    run = f"/v1/runs/{uuid.uuid4()}"
    body = {"name": "digits", "plan": make_plan().model_dump(mode="json")}
    client.put(run, json=body).raise_for_status()
    return run


def send(client, run, first, count):
    body = {"first": first, "records": [step(first + i) for i in range(count)]}
    return client.post(f"{run}/records", json=body)


@pytest.mark.slow
def test_a_service_starts_says_where_it_is_and_ends_in_good_order(tmp_path):
    with serving(tmp_path) as service:
        client = service.client(service.token())
        assert client.get("/healthz").json() == {"status": "ok"}
        run = introduce(client)
        assert send(client, run, 0, 5).json()["next"] == 5
        assert "sign in within 10 minutes: http://127.0.0.1:" in service.lines[1]
        body = b'{"first": 5, "records": [' + json.dumps(step(5)).encode() + b"]}"
        with slow_request(service, run, body) as finish:
            service.process.send_signal(signal.SIGTERM)
            wait_until_closed(service)
            assert service.process.poll() is None  # it waits for the request in progress
            assert b"200 OK" in finish()
        assert service.process.wait(LAST_SECONDS) == 0
        service._reader.join(LAST_SECONDS)
        logged = [json.loads(line) for line in service.lines[2:]]
        assert {"request"} <= {line["event"] for line in logged}
        assert not any("link=" in json.dumps(line) for line in logged)
    with serving(tmp_path) as service:  # what was there is there, the token too
        client = service.client(service.token())
        assert client.get(run).json()["records"] == 6
        assert service.end(signal.SIGINT) == 0


def test_no_request_waits_for_routes_to_be_built(tmp_path, monkeypatch):
    """FastAPI builds them when they are first asked for, and meanwhile answers nobody."""
    settings = Settings(database=f"sqlite:///{tmp_path}/service.sqlite")
    store, built, usual = Store.open(settings), [], TypeAdapter.__init__

    def noting(adapter, kind, **named):
        built.append(kind)
        usual(adapter, kind, **named)

    with closing(store):
        app = create_app(store, settings)
        build_routes(app)
        monkeypatch.setattr(TypeAdapter, "__init__", noting)
        with TestClient(app, base_url="http://127.0.0.1") as client:
            for path in ("/healthz", "/v1/jobs", "/v1/plans", "/v1/agents", "/runs", "/planner"):
                assert client.get(path).status_code in (200, 401, 405)
    assert built == []


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_a_signal_that_comes_before_the_server_has_begun_ends_it(tmp_path, monkeypatch, number):
    begun = []
    monkeypatch.setattr(
        uvicorn.Server, "run", lambda server, sockets: begun.append(server.should_exit)
    )
    monkeypatch.setattr(process, "gc", mock.Mock())
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    settings = Settings(database=f"sqlite:///{tmp_path}/service.sqlite", port=0)
    try:
        process.serve(settings, on_start=lambda *_: signal.raise_signal(number))
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert begun == [True]


@pytest.mark.slow
def test_who_connects_and_does_not_ask_is_sent_away(monkeypatch):
    """Else a thousand silent connections would keep everybody out."""
    monkeypatch.setattr(process, "HEAD_SECONDS", 3.0)
    released = threading.Event()

    async def app(scope, receive, send):
        await asyncio.to_thread(released.wait, LAST_SECONDS)
        headers = [(b"content-length", b"4")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"done"})

    with listen("127.0.0.1", 0) as listener, answering(app, listener):

        def connect():
            return socket.create_connection(listener.getsockname(), timeout=LAST_SECONDS)

        with connect() as asking, connect() as half:
            half.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
            for _ in range(2):  # the connection is used again
                released.clear()
                asking.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                with connect() as silent:
                    assert silent.recv(1000) == b""  # so long a request may take to be answered
                released.set()
                told = b""
                while not told.endswith(b"done"):
                    told += asking.recv(1000) or pytest.fail("closed while it was answered")
                assert told.startswith(b"HTTP/1.1 200")
            asking.sendall(b"GET / HT")
            assert [one.recv(1000) for one in (half, asking)] == [b"", b""]


@pytest.mark.slow
def test_who_does_not_take_an_answer_is_sent_away(monkeypatch):
    """Else a few such hold all places of files that come and go, and a thousand all connections."""
    monkeypatch.setattr(process, "TAKE_SECONDS", 0.5)
    gone = threading.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(200):
            await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
        if (await receive())["type"] == "http.request":
            assert (await receive())["type"] == "http.disconnect"
        gone.set()

    with (
        listen("127.0.0.1", 0) as listener,
        answering(app, listener),
        socket.create_connection(listener.getsockname(), timeout=LAST_SECONDS) as wire,
    ):
        wire.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert gone.wait(LAST_SECONDS)


@contextmanager
def answering(app, listener):
    """uvicorn with our protocol; it would keep idle connections for a minute by itself."""
    config = uvicorn.Config(
        app,
        http=process.TimedProtocol,
        lifespan="off",
        log_config=None,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(LAST_SECONDS)


def wait_until_closed(service):
    """Until the service takes no connection any more: it has heard that it is to end."""
    port, end = int(service.address.rpartition(":")[2]), time.monotonic() + LAST_SECONDS
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=LAST_SECONDS).close()
        except ConnectionError:
            return
        time.sleep(0.01)
    pytest.fail(f"still open after {LAST_SECONDS} s")


@contextmanager
def slow_request(service, run, body):
    """A request of which half has come; what is yielded sends the rest and reads the answer."""
    port = int(service.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=LAST_SECONDS) as connection:
        head = (
            f"POST {run}/records HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            f"Authorization: Bearer {service.token()}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
        )
        connection.sendall(head.encode())
        assert b"100 Continue" in connection.recv(4096)  # somebody waits for the body
        connection.sendall(body[:10])

        def finish():
            connection.sendall(body[10:])
            return connection.recv(4096)

        yield finish


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database(request, tmp_path):
    """URL of an empty database of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/service.sqlite"
    return request.getfixturevalue("postgres")()


@pytest.mark.slow
def test_what_was_acknowledged_is_there_after_a_kill(tmp_path, database):
    acknowledged, many = 0, threading.Event()
    with serving(tmp_path, "--rate", "10000", database=database) as service:
        client = service.client(service.token())
        run = introduce(client)

        def kill():
            many.wait(LAST_SECONDS)
            service.process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            while True:
                answer = send(client, run, acknowledged, 20)
                answer.raise_for_status()
                acknowledged = answer.json()["next"]
                if acknowledged >= 200:
                    many.set()  # while more are being sent
        except httpx.TransportError:
            pass
        killer.join()
    assert acknowledged >= 200
    with serving(tmp_path, database=database) as service:
        stored = service.client(service.token()).get(run).json()["records"]
        assert acknowledged <= stored <= acknowledged + 20
        page = service.client(service.token()).get(f"{run}/records", params={"limit": 5000}).json()
        assert page["sequences"] == list(range(min(stored, 5000)))
        assert [one["step"] for one in page["records"]] == page["sequences"]


# ------------------------------------------------------------------------------------- commands


def test_tokens_are_made_listed_and_revoked_by_command(tmp_path, capsys, monkeypatch):
    database = f"sqlite:///{tmp_path}/s.sqlite"
    monkeypatch.setenv("BATCHWRIGHT_DATABASE", database)
    secret = run_here(capsys, "token", "create", "laptop", "--scopes", "read, report").out.strip()
    store = Store.open(Settings(database=database))
    assert store.tokens.find(secret).scopes == {"read", "report"}
    listed = run_here(capsys, "token", "list").out
    assert listed.startswith("laptop\tread,report\tcreated 2")
    assert secret not in listed
    assert "refused from now on" in run_here(capsys, "token", "revoke", "laptop").err
    assert "revoked" in run_here(capsys, "token", "list").out
    assert store.tokens.find(secret) is None
    link = run_here(capsys, "sign-in", "--scopes", "read", "--server", "https://x.org/").out.strip()
    assert link.startswith("https://x.org/sign-in?link=")
    session = store.sign_in.enter(link.partition("link=")[2])
    assert store.sign_in.find(session)
    assert "until now: 1" in run_here(capsys, "sign-in", "--sign-out").err
    assert store.sign_in.find(session) is None
    assert [one.action for one in store.audit.list()] == [
        "sign-in.out",
        "sign-in.link",
        "token.revoke",
        "token.create",
    ]
    store.close()


def run_here(capsys, *words):
    from batchwright.cli.commands import app

    app(list(words), standalone_mode=False)
    return capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("token", "create"), "which token"),
        (("token", "create", "x"), "add --scopes"),
        (("token", "create", "x", "--scopes", "all"), "unknown scope 'all'"),
        (("token", "revoke", "x"), "there is no token 'x'"),
        (("sign-in", "--scopes", ""), "may do nothing"),
        (("sign-in", "--server", "plans.org"), "'plans.org' is no address of a service"),
        (("serve", "--allowed-host", "https://x.org"), "--allowed-host https://x.org: give a name"),
        (("serve", "--allowed-host", "x.org:8443"), "without scheme and port"),
        (("serve", "--proxy", "proxy.org"), "--proxy proxy.org: give the address from which"),
        (("serve", "--retention-days", "-1"), "--retention-days -1: give a number of days above 0"),
        (("serve", "--rate", "nan"), "--rate nan: give a number above 0"),
        (("serve", "--lease-seconds", "inf"), "--lease-seconds inf: give .* seconds from 5 "),
        (("serve", "--artifacts-gib", "1e300"), "--artifacts-gib 1e300: give .* up to 1e.06"),
        (("submit", "--server", "http://x", "--memory", "inf"), "--memory inf: give a number"),
        (("submit", "--server", "http://x", "--keep-seconds", "inf"), "--keep-seconds inf: give"),
        (
            ("submit", "--memory", "8 bits"),
            "8 bits: give a number of GiB .*, or a size such as 8GB",
        ),
        (("submit", "--gpus", "10000000"), "--gpus"),
        (("agent", "--folder", "x", "--max-hours", "1 parsec"), "or a time such as 10min"),
        (("serve", "--artifacts-gib", "1e9"), "--artifacts-gib 1e9: give .* up to 1e.06"),
        (("serve", "--host", "203.0.113.9", "--port", "0"), "refuse to serve at 203.0.113.9"),
        (("serve", "--host", "0.0.0.0", "--port", "0"), "before anybody has a token"),  # noqa: S104
        (("backup", "/nowhere/x"), "cannot write /nowhere/x"),
        (("serve", "--database", "nothing"), "nothing:... is no database"),
        (("token", "list", "--database", "nothing"), "nothing:... is no database"),
        (("backup", "new", "--database", "mysql://a/b"), "mysql:... is no database"),
        (("backup", "new", "--database", "sqlite://"), "no file; give .* BATCHWRIGHT_DATABASE"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, words, told):
    from batchwright.cli.commands import app

    monkeypatch.setenv("BATCHWRIGHT_DATABASE", f"sqlite:///{tmp_path}/s.sqlite")
    with pytest.raises(BatchwrightError, match=told) as mistake:
        app(list(words), standalone_mode=False)
    assert mistake.value.exit_code == 2
    assert "\n" not in str(mistake.value)


def test_what_to_install_is_said_where_it_is_missing(monkeypatch):
    from batchwright.cli.commands import app

    for name in ("sqlalchemy", "batchwright.service.store", "batchwright.service.operating.local"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    told = r'sqlalchemy is missing: pip install "batchwright\[serve\]"'
    with pytest.raises(BatchwrightError, match=told):
        app(["token", "list"], standalone_mode=False)


# ------------------------------------------------------------------------------- the local token


def test_the_local_token_is_private_kept_and_made_again_when_lost(tmp_path):
    settings = Settings(database=f"sqlite:///{tmp_path}/data/s.sqlite")
    store = Store.open(settings)
    file = keep_local_token(store)
    assert file == tmp_path / "data" / "local-token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first = file.read_text().strip()
    assert store.tokens.find(first).name == LOCAL
    assert store.tokens.find(first).scopes == {"read", "report", "submit"}
    assert keep_local_token(store) == file
    assert file.read_text().strip() == first
    file.write_text("something else")
    keep_local_token(store)
    second = file.read_text().strip()
    assert store.tokens.find(second).name == LOCAL
    assert store.tokens.find(first) is None
    store.tokens.revoke(LOCAL)
    assert keep_local_token(store) is None
    assert store.tokens.find(second) is None
    store.close()


def test_a_local_token_that_could_do_more_is_limited_and_stays(tmp_path):
    """Older versions made it an admin's; runs that report hold it."""
    store = Store.open(Settings(database=f"sqlite:///{tmp_path}/s.sqlite"))
    secret = store.tokens.create(LOCAL, ["admin"])
    (tmp_path / "local-token").write_text(f"{secret}\n")
    keep_local_token(store)
    assert (tmp_path / "local-token").read_text().strip() == secret
    assert store.tokens.find(secret).scopes == {"read", "report", "submit"}
    store.close()


def test_services_of_several_machines_have_local_tokens_of_their_own(tmp_path, monkeypatch):
    database = "postgresql://me@host/name"
    names = set()
    for host, folder in (("one", "a"), ("two", "a"), ("one", "b")):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / folder))
        names.add(local_name(database))
    assert len(names) == 3
    assert all(is_local(name) for name in names)
    assert local_name(f"sqlite:///{tmp_path}/s.sqlite") == LOCAL
    assert not is_local("localhost")


@pytest.mark.slow
def test_services_that_share_a_database_leave_each_others_local_token(
    postgres, tmp_path, monkeypatch
):
    database = postgres()
    store = Store.open(Settings(database=database))
    secrets = []
    for folder in ("a", "b", "a"):
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / folder))
        secrets.append(keep_local_token(store).read_text().strip())
    assert secrets[0] == secrets[2]
    assert all(store.tokens.find(secret) for secret in secrets)
    with pytest.raises(BatchwrightError, match="before anybody has a token"):
        refuse_public_without_tokens(
            store.settings.model_copy(update={"host": "203.0.113.9"}), store
        )
    store.close()


@pytest.mark.slow
def test_several_that_open_a_new_database_at_once_all_get_it(tmp_path):
    """Forked from one that has imported all, and held until the last of them is there."""
    code = (
        "import os, sys\n"
        "from batchwright.service.settings import Settings\n"
        "from batchwright.service.store import Store\n"
        "from batchwright.service.operating.local import keep_local_token\n"
        "held, go = os.pipe()\n"
        "children = [0]\n"
        "while len(children) <= 6 and (pid := os.fork()):\n"
        "    children.append(pid)\n"
        "os.close(go)\n"
        "if len(children) > 6:\n"
        "    sys.exit(any(os.waitpid(one, 0)[1] for one in children[1:]))\n"
        "os.read(held, 1)\n"
        "for _ in range(5):\n"
        "    store = Store.open(Settings(database=sys.argv[1]))\n"
        "    keep_local_token(store)\n"
        "    store.audit.note('me', 'start', '')\n"
        "    store.close()\n"
    )
    words = [sys.executable, "-c", code, f"sqlite:///{tmp_path}/s.sqlite"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LAST_SECONDS, check=False)
    assert done.returncode == 0, done.stderr


def test_the_local_token_of_another_kind_of_database_is_in_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    file = local_token_file("postgresql://me@host/name")
    assert file == tmp_path / "batchwright" / "local-token"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "", "127.0.0.1.x")],  # noqa: S104
)
def test_only_loopback_is_served_before_somebody_has_a_token(tmp_path, host, loopback):
    store = Store.open(Settings(database=new_database(tmp_path, tokens=False)))
    keep_local_token(store)
    settings = store.settings.model_copy(update={"host": host})
    assert is_loopback(host) == loopback
    if loopback:
        refuse_public_without_tokens(settings, store)
    else:
        with pytest.raises(BatchwrightError, match="batchwright token create"):
            refuse_public_without_tokens(settings, store)
        store.tokens.create("laptop", ["read"])
        refuse_public_without_tokens(settings, store)
        store.tokens.revoke("laptop")
        with pytest.raises(BatchwrightError):
            refuse_public_without_tokens(settings, store)
    store.close()


def test_an_address_that_is_taken_is_told_in_a_line():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BatchwrightError, match="address already in use; name another"):
            listen("127.0.0.1", port)
        settings = Settings(database="x", host="0.0.0.0", allowed_hosts=("plans.org",))  # noqa: S104
        assert address_of(settings, taken) == f"http://plans.org:{port}"
    for name in ("no-such-host.invalid", "127.0.0..1", "a" * 64):
        with pytest.raises(BatchwrightError, match=f"cannot listen on {name} port 0: "):
            listen(name, 0)


@pytest.mark.parametrize(
    "url", ["plans.org", "ftp://x.org", "https://me@x.org", "https://x/y", "https://", "//x"]
)
def test_a_public_address_is_one(url):
    assert public_parts("https://plans.org:8443/") == ("https", "plans.org")
    with pytest.raises(BatchwrightError, match=r"write it as https://plans\.example\.org"):
        public_parts(url)


@pytest.mark.slow
def test_a_link_is_printed_at_the_first_start_only_for_the_address_that_browsers_use(tmp_path):
    words = ("--public-url", "https://plans.example.org/")
    with serving(tmp_path, *words) as service:
        assert "serves at https://plans.example.org" in service.lines[0]
        link = service.lines[1].partition("10 minutes: ")[2]
        assert link.startswith("https://plans.example.org/sign-in?link=")
        store = Store.open(Settings(database=service.database))
        (noted,) = store.audit.list()
        assert (noted.who, noted.action, noted.detail) == ("operator", "sign-in.link", "admin")
        assert store.sign_in.enter(link.partition("link=")[2])
        store.close()
    with serving(tmp_path, *words) as service:
        told = "sign in: `batchwright sign-in --server https://plans.example.org` prints a link"
        assert service.lines[1] == told


# -------------------------------------------------------------------------------------- backups


def test_a_backup_taken_while_records_come_is_whole(tmp_path, database):
    store = Store.open(Settings(database=database))
    run = str(uuid.uuid4())
    store.runs.introduce(run, RunIntroduction(name="x", plan=make_plan()), "me")
    stop, sent = threading.Event(), [0]

    def report():
        while not stop.is_set():
            lines = tuple(step(sent[0] + i) for i in range(10))
            sent[0] = store.records.append(run, RecordBatch(first=sent[0], records=lines)).next

    reporter = threading.Thread(target=report)
    reporter.start()
    try:
        target = tmp_path / "copy"
        while sent[0] < 50:
            time.sleep(0.01)
        before = sent[0]
        size = backup(database, target)
        after = sent[0] + 10
    finally:
        stop.set()
        reporter.join(LAST_SECONDS)
        store.close()
    assert size == target.stat().st_size > 0
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert not list(tmp_path.glob(".copy*"))
    if database.startswith("postgresql"):
        assert target.read_bytes()[:5] == b"PGDMP"
        return
    copied = Store.open(Settings(database=f"sqlite:///{target}"))
    stored = copied.runs.get(run).records
    assert before <= stored <= after
    assert len(copied.records.after(run, limit=10**6).sequences) == stored
    copied.close()


def test_a_backup_overwrites_nothing_and_leaves_nothing_half_done(tmp_path):
    store = Store.open(Settings(database=f"sqlite:///{tmp_path}/s.sqlite"))
    store.close()
    (tmp_path / "there").write_text("mine")
    with pytest.raises(FileError, match="a new file"):
        backup(f"sqlite:///{tmp_path}/s.sqlite", tmp_path / "there")
    with pytest.raises(BatchwrightError, match="there is no database"):
        backup(f"sqlite:///{tmp_path}/nothing.sqlite", tmp_path / "copy")
    (tmp_path / "damaged").write_bytes(b"no database at all, but long enough to look at" * 100)
    with pytest.raises(BatchwrightError, match="cannot back up"):
        backup(f"sqlite:///{tmp_path}/damaged", tmp_path / "copy")
    assert (tmp_path / "there").read_text() == "mine"
    assert not list(tmp_path.glob("*copy*"))
    assert not (tmp_path / "nothing.sqlite").exists()


@pytest.mark.parametrize("place", ["me:secret@host/name", "me@host/name?password=secret"])
def test_a_password_is_not_on_the_command_line_of_a_backup(tmp_path, monkeypatch, place):
    def run(words, *, env, **_):
        assert "secret" not in " ".join(words)
        assert env["PGPASSWORD"] == "secret"
        return subprocess.CompletedProcess(words, 1, stderr="no such host")

    monkeypatch.setattr(shutil, "which", lambda _: "pg_dump")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(BatchwrightError, match="no such host") as refusal:
        backup(f"postgresql://{place}", tmp_path / "copy")
    assert "secret" not in str(refusal.value)


def test_a_copy_is_a_database_in_one_file(tmp_path):
    store = Store.open(Settings(database=f"sqlite:///{tmp_path}/s.sqlite"))
    store.tokens.create("x", ["read"])
    backup(f"sqlite:///{tmp_path}/s.sqlite", tmp_path / "copy")
    store.close()
    with closing(sqlite3.connect(f"file:{tmp_path}/copy?mode=ro", uri=True)) as connection:
        assert connection.execute("SELECT name FROM tokens").fetchall() == [("x",)]
    assert {path.name for path in tmp_path.iterdir()} == {"s.sqlite", "copy"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_pages_run_at_a_service(tmp_path, monkeypatch):
    """The tutorial's and the page's, and an agent that does what they submit."""
    lines = [*dict.fromkeys(line for _, line in shown_for("test_service_serving"))]
    job = "{epochs: 1, precision: float32, probe: {budget: 0.3, learning: 0}}"
    (tmp_path / "job.yaml").write_text(job)
    make_profile().save(tmp_path / "profile.json")
    prints, other = tmp_path / "prints", tmp_path / "other"
    prints.mkdir()
    other.mkdir()
    with serving(tmp_path) as service, forking():
        monkeypatch.setenv("BATCHWRIGHT_DATABASE", service.database)
        monkeypatch.setenv("BATCHWRIGHT_TOKEN", service.token())
        lines = [one.replace("http://127.0.0.1:8400", service.address) for one in lines]
        agents = [one for one in lines if " agent " in one]
        serves = [one for one in lines if one.startswith("batchwright serve")]
        (waits,) = [one for one in lines if one.endswith("--wait")]
        for line in lines:
            if line not in (*agents, *serves, waits):
                line = re.sub("--auto|batchwright run", r"\g<0> epochs=1", briefly(line))
                entered(quickly(line), tmp_path, prints)
        assert bw.load(tmp_path / "plan.json").job.goal.deadline == 600
        with service.client(service.token()) as client:
            for line in sorted(agents, key=len, reverse=True):  # the last has no rules of its own
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                words = shlex.split(line)[1:]
                agent = Forked(words, cwd=tmp_path, env=env, prints=prints)
                wait_until(lambda: client.get("/v1/agents").json(), "an agent is there")
                if line != min(agents, key=len):
                    agent.send_signal(signal.SIGTERM)
                    agent.wait(LAST_SECONDS)
            waiting = Forked(shlex.split(waits)[1:], cwd=tmp_path, env=env, prints=prints)
            end = time.monotonic() + 2 * LAST_SECONDS
            while not all_done(client):
                assert time.monotonic() < end, waiting.said()
            assert waiting.wait(LAST_SECONDS) == 0, waiting.said()
            agent.send_signal(signal.SIGTERM)
            agent.wait(LAST_SECONDS)
    for line in serves[1:]:
        with serving(other, *shlex.split(line)[2:]) as another:
            assert another.end() == 0


def all_done(client):
    """Whether they are, after what waits for its owner was approved."""
    time.sleep(0.5)  # a service limits how often it is asked
    jobs = client.get("/v1/jobs").json()
    for job in jobs:
        if job["state"] == "planned":
            client.post(f"/v1/jobs/{job['id']}/approve").raise_for_status()
        assert job["state"] not in ("failed", "cancelled"), job
    return len(jobs) == 3 and all(job["state"] == "done" for job in jobs)
