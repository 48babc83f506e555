"""What tests of clients share: a wire with faults, run folders, a real server."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
from fastapi.testclient import TestClient

from batchwright.client.http import Service as Remote
from batchwright.client.outbox import METRICS, Report, new_report, write_report
from batchwright.distributed.fork_server import Process
from batchwright.records import Plan, Profile
from batchwright.records.documents import write_record
from forked import LightServer
from samples import make_plan, make_profile
from services import ADDRESS, Service, epoch, step

SECONDS = 300
"""Until a wait in a test has failed; a busy machine may take long."""


class Wire:
    """Stands between a client and the app: each request takes the next fault, or none.

    ``refused`` and ``lost`` never arrive, of ``answered`` only the answer is lost; ``page`` and
    ``nowhere`` are answers of a proxy in place of the app's.
    """

    def __init__(self, client: TestClient, faults: Iterable[str] = ()) -> None:
        self.client = client
        self.faults = iter(faults)
        self.asked: list[tuple[str, str]] = []

    def request(self, method: str, path: str, **options: Any) -> Any:
        self.asked.append((method, path))
        options.pop("timeout", None)  # a test's client has none
        if isinstance(options.get("content"), Iterator):  # read by the client, not within the app
            options["content"] = b"".join(options["content"])
        fault = next(self.faults, "")
        if fault == "refused":
            raise httpx.ConnectError("all connection attempts failed")
        if fault == "lost":
            raise httpx.ReadTimeout("timed out")
        if fault == "page":
            return httpx.Response(200, html="<html>back soon</html>")
        if fault == "nowhere":
            return httpx.Response(404, text="404 page not found")
        if fault.isdecimal():
            return httpx.Response(int(fault), json={"detail": f"asked for {fault}"})
        answer = self.client.request(method, path, **options)
        if fault == "answered":
            raise httpx.ReadError("connection reset by peer")
        return answer

    def stream(self, method: str, path: str, **options: Any) -> Any:
        return nullcontext(self.request(method, path, **options))

    def close(self) -> None:
        pass


def remote(service: Service, scope: str = "report", faults: Iterable[str] = ()) -> Remote:
    """A client of the test's own service, over a wire with faults."""
    found = Remote(ADDRESS, service.tokens[scope])
    headers = {"authorization": f"Bearer {service.tokens[scope]}"}
    client = TestClient(
        service.app, base_url=ADDRESS, headers=headers, raise_server_exceptions=False
    )
    found._client = Wire(client, faults)  # type: ignore[assignment]
    return found


def run_folder(
    place: Path, *, plan: Plan | None = None, profile: Profile | None = None, lines: int = 0
) -> Path:
    """A run folder as training leaves it after so many steps."""
    place.mkdir(parents=True, exist_ok=True)
    write_record(plan or make_plan(), place / "plan.json")
    write_record(profile or make_profile(), place / "profile.json")
    write_lines(place, *(step(number) for number in range(lines)))
    return place


def write_lines(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def a_report(folder: Path, url: str = ADDRESS, **changes: Any) -> Report:
    report = new_report(folder, url).to(**changes)
    write_report(folder, report)
    return report


def wait_until(true: Any, what: str = "") -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


_SERVERS: list[LightServer] = []


def _services() -> LightServer:
    """What services are forked from; another where the last one is gone."""
    if not _SERVERS or _SERVERS[-1]._gone:
        _SERVERS.append(LightServer(["bare_service"]))
        atexit.register(_SERVERS[-1].close)
    return _SERVERS[-1]


def start_service(*words: str, log: int, **variables: str) -> Process:
    """``batchwright serve WORDS``, forked from what has imported it; ``log`` is open to be written.

    Args:
        words: Its options.
        log: Descriptor that takes what it prints.
        variables: Beside those of this process.
    """
    return _services().start("bare_service", ["serve", *words], {**os.environ, **variables}, [log])


class Server:
    """`batchwright serve` as a process, over a SQLite file, on a port that stays the same.

    Args:
        folder: Of the file, and of its log.
        program: What Python runs; nothing: it is forked (`start_service`).
    """

    def __init__(self, folder: Path, *program: str) -> None:
        self.folder = folder
        self._program = program
        self.home = folder / "home"
        self.database = f"sqlite:///{folder}/service.sqlite"
        self.port = 0
        self.process: subprocess.Popen[bytes] | Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def token(self) -> str:
        return (self.folder / "local-token").read_text().strip()

    def start(self) -> None:
        log = self.folder / "server.log"
        with log.open("ab") as file:
            start = file.tell()
            words = ("--database", self.database, "--port", str(self.port), "--rate", "10000")
            self.process = (
                subprocess.Popen(
                    [sys.executable, *self._program, "serve", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=os.environ,
                )
                if self._program
                else start_service(*words, log=file.fileno())
            )
        wait_until(lambda: self._port_in(log, start) is not None, log.read_text()[-2000:])
        self.port = self._port_in(log, start) or 0

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()

    @staticmethod
    def _port_in(log: Path, start: int) -> int | None:
        found = re.search(r"serves at http://127\.0\.0\.1:(\d+)", log.read_text()[start:])
        return int(found[1]) if found else None


@contextmanager
def a_server(folder: Path, *program: str) -> Iterator[Server]:
    server = Server(folder, *program)
    try:
        server.start()
        yield server
    finally:
        server.close()


__all__ = ["epoch", "step"]
