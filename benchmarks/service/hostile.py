"""Requests that are costly for the service, for `benchmarks.service.service`.

    python -m benchmarks.service.hostile URL TOKEN SECONDS

sends them over several connections, one after the other in each, again and again for SECONDS. They
are up to as large as the service accepts, and shaped so that reading or checking them takes long.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx

from batchwright.records import Plan
from batchwright.service.settings import Limits
from benchmarks.harness.benchmark import ROOT
from benchmarks.harness.loads import until
from benchmarks.service.reporters import batch_of
from benchmarks.service.service_process import Service, make_tokens

CONNECTIONS = 4
LARGEST = Limits().body_bytes
SMALL = 64 * 1024 - 100  # bodies of this size are read without waiting for a turn
CALM_SECONDS, WATCH_SECONDS = 3.0, 0.1
CALM_REQUESTS = 200
MIB = 2**20


def full(frame: bytes, piece: bytes, size: int = LARGEST) -> bytes:
    """``frame`` with its ``%`` replaced by repetitions of ``piece``, up to ``size`` bytes."""
    return frame.replace(b"%", piece * ((size - len(frame)) // len(piece)) + b"0")


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Method, path and body of each costly request."""
    plans, run = "/v1/plans", f"/v1/runs/{uuid.uuid4()}"
    pieces = {
        "objects": b"{},",
        "numbers": b"1,",
        "texts": b'"",',
        "long numbers": b"9" * 4000 + b",",
        "escapes": rb'"\u00e9",',
        "levels": b"[" * 30 + b"]" * 30 + b",",
        "spaces": b" " * 1000 + b"1,",
    }
    for piece in pieces.values():
        for size in (SMALL, LARGEST // 16, LARGEST):
            yield "POST", plans, full(b'{"profiles": [%]}', piece, size)
            yield "PUT", run, full(b'{"name": "x", "plan": {"considered": [%]}}', piece, size)
            yield "POST", "/v1/jobs", full(b'{"name": "x", "job": {"data": [%]}}', piece, size)
    yield "POST", plans, b'{"keys": {' + b'"a":1,' * (SMALL // 6) + b'"b":1}}'
    yield "POST", plans, b"{" + b'"a":1,' * (LARGEST // 6 - 1) + b'"b":1}'
    yield "POST", plans, json.dumps({f"key{n}": n for n in range(300_000)}).encode()
    yield "POST", plans, b"[" * LARGEST
    yield "POST", plans, b'"' + b"\\\\" * (LARGEST // 2 - 1) + b'"'
    yield "POST", plans, b'"' * LARGEST


async def attack(url: str, token: str, seconds: float) -> int:
    """Send all of them over `CONNECTIONS` for ``seconds``; return the number of answers."""
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    kinds, end, answered = list(bodies()), time.monotonic() + seconds, 0

    async def one(start: int) -> None:
        nonlocal answered
        number = start * len(kinds) // CONNECTIONS
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            while time.monotonic() < end:
                method, path, body = kinds[number % len(kinds)]
                number += 1
                with suppress(httpx.TransportError):
                    await client.request(method, path, content=body, headers=headers)
                    answered += 1

    await asyncio.gather(*(one(start) for start in range(CONNECTIONS)))
    return answered


class Memory:
    """Peak memory of a process and its descendants together; a shared page counts once.

    Attributes:
        mib: The peak so far, in MiB.
    """

    def __init__(self, process: int) -> None:
        self._process, self.mib = process, 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(WATCH_SECONDS):
            self.mib = max(self.mib, sum(map(proportional, family(self._process))) / MIB)


def family(process: int) -> list[int]:
    """A process and its descendants."""
    found = [process]
    for one in found:
        with suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def proportional(process: int) -> int:
    """Bytes of a process, with its part of shared pages; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


@contextmanager
def attacked(url: str, token: str, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A process that sends costly requests; it is killed at the end of the block."""
    words = [sys.executable, "-m", "benchmarks.service.hostile", url, token, str(seconds)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def hostile(database: str, plan: Plan, seconds: float, folder: Path) -> dict[str, Any]:
    """Times of a well-behaved client's requests, with and without costly requests beside them.

    Returns:
        ``calm``: seconds of each `/healthz` without other requests; ``answers``: seconds of each
        request beside costly ones: health, a list, a batch of 100 records; ``mib``: peak memory of
        the service meanwhile; ``hostile``: number of costly requests that were answered.
    """
    (other,) = make_tokens(database, 1, ("report", "submit", "read"))
    (owner,) = make_tokens(database, 1, ("report", "read"))
    run, headers = f"/v1/runs/{uuid.uuid4()}", {"authorization": f"Bearer {owner}"}
    calm: list[float] = []
    answers: list[float] = []
    with (
        Service(database, folder) as service,
        httpx.Client(base_url=service.url, timeout=120, trust_env=False, headers=headers) as client,
    ):

        def ask(times: list[float], method: str, path: str, **options: Any) -> None:
            before = time.perf_counter()
            answer = client.request(method, path, **options)
            times.append(time.perf_counter() - before)
            answer.raise_for_status()

        introduction = {"name": "well", "plan": plan.model_dump(mode="json")}
        ask([], "PUT", run, json=introduction)
        for _ in range(CALM_REQUESTS):
            ask(calm, "GET", "/healthz")
        with (
            Memory(service.pid) as memory,
            attacked(service.url, other, seconds + CALM_SECONDS) as process,
        ):
            time.sleep(CALM_SECONDS)  # until the process has made its bodies
            end, first = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                ask(answers, "GET", "/healthz")
                ask(answers, "GET", "/v1/runs")
                batch = {**headers, "content-type": "application/json"}
                body = batch_of(first, first + 100)
                ask(answers, "POST", f"{run}/records", content=body, headers=batch)
                first += 100
            until(lambda: process.poll() is not None, 120)
            told = process.stdout.read() if process.stdout else ""
    return {"calm": calm, "answers": answers, "mib": memory.mib, "hostile": int(told or 0)}


if __name__ == "__main__":
    print(asyncio.run(attack(sys.argv[1], sys.argv[2], float(sys.argv[3]))))
