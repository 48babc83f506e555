"""Reporters of many runs at once, for `benchmarks.service.service`.

    python -m benchmarks.service.reporters URL TOKENS.json RECORDS AT_ONCE OUT.json

Each reporter has a run and a token of its own, and sends its records in batches of at most AT_ONCE,
as the protocol asks: it continues after the last acknowledged record, whatever the service does
meanwhile. It prints the number of records of each acknowledgement. OUT.json gets the seconds of
each answered request, of all together, and the number of acknowledged records of each run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
import uuid
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from batchwright.records import EpochRecord, WorkerTime
from batchwright.records.lines.line_files import line_text
from batchwright.records.lines.run_lines import EpochLine, RunLine, StepLine, WorkerStep
from batchwright.records.service import RecordBatch

RETRY_SECONDS = 0.05
MAX_SECONDS = 600.0
"""A request without an answer for so long ends the reporters with an error."""


def record(number: int) -> RunLine:
    """Line ``number`` of a made-up run with two workers."""
    epoch, seconds = number // 100, round(0.0101 * number, 4)
    if number % 100 < 99:
        return StepLine(
            kind="step",
            epoch=epoch,
            step=number,
            steps=100,
            training_seconds=seconds,
            train_loss=2.3 / (1 + number),
            samples_per_second=3200.5,
            learning_rate=0.1,
            workers=2 * (WorkerStep(local_batch_size=16, compute_seconds=0.0091, wait_seconds=0),),
        )
    worker = WorkerTime(
        place="node1/cpu",
        local_batch_size=16,
        samples=720,
        input_seconds=0.0101,
        compute_seconds=0.4102,
        communication_seconds=0.0797,
    )
    finished = EpochRecord(
        epoch=epoch,
        resolution=32,
        global_batch_size=32,
        steps=45,
        skipped_steps=0,
        samples=1440,
        learning_rate=0.1,
        train_loss=2.3 / (1 + number),
        val_correct=180,
        val_count=360,
        training_seconds=0.5,
        evaluation_seconds=0.05,
        checkpoint_seconds=0.01,
        workers=(worker, worker),
    )
    return EpochLine(kind="epoch", record=finished, epochs=1000)


@cache
def batch_of(start: int, stop: int) -> bytes:
    """The body with these records, made once for all runs, so that the service is timed."""
    lines = tuple(record(number) for number in range(start, stop))
    batch = RecordBatch(first=start, before=_digest(start), after=_digest(stop), records=lines)
    return batch.model_dump_json(exclude_defaults=True).encode()


@cache
def _digest(stop: int) -> str:
    return hashlib.sha256(b"".join(map(_text, range(stop)))).hexdigest()


@cache
def _text(number: int) -> bytes:
    return line_text(record(number)).encode() + b"\n"


class Reporter:
    """One run's reporter.

    Attributes:
        run: Identifier of the run.
        acknowledged: Number of records that the service has acknowledged.
        seconds: Seconds of each answered request.
    """

    def __init__(self, client: httpx.AsyncClient, token: str, plan: Any) -> None:
        self.run, self.acknowledged = str(uuid.uuid4()), 0
        self.seconds: list[float] = []
        self._client, self._plan = client, plan
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}

    async def introduce(self) -> None:
        """Introduce the run to the service."""
        body = json.dumps({"name": "benchmark", "plan": self._plan}).encode()
        await self._answer("PUT", "", body)

    async def send(self, records: int, at_once: int) -> None:
        """Send all records, in order."""
        while self.acknowledged < records:
            numbers = range(self.acknowledged, min(self.acknowledged + at_once, records))
            answer = await self._answer("POST", "/records", batch_of(numbers.start, numbers.stop))
            print(answer["next"] - self.acknowledged, flush=True)
            self.acknowledged = answer["next"]

    async def _answer(self, method: str, path: str, body: bytes) -> Any:
        end = time.monotonic() + MAX_SECONDS
        while time.monotonic() < end:
            before = time.perf_counter()
            try:
                answer = await self._client.request(
                    method, f"/v1/runs/{self.run}{path}", content=body, headers=self._headers
                )
            except httpx.TransportError:  # the service was killed, or has not started
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if answer.status_code in (429, 500, 502, 503):
                await asyncio.sleep(RETRY_SECONDS)
                continue
            answer.raise_for_status()
            self.seconds.append(time.perf_counter() - before)
            return answer.json()
        raise TimeoutError(f"run {self.run}: no answer in {MAX_SECONDS:g} s")


async def report(url: str, tokens: list[str], plan: Any, records: int, at_once: int) -> Any:
    """Run one reporter for each token, all at once."""
    async with AsyncExitStack() as clients:
        reporters = []
        for token in tokens:  # one client looks through all its connections at every request
            client = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False)  # noqa: S501 - no TLS on loopback
            reporters.append(Reporter(await clients.enter_async_context(client), token, plan))
        await asyncio.gather(*(one.introduce() for one in reporters))
        for one in reporters:
            one.seconds.clear()
        for first in range(0, records, at_once):
            batch_of(first, min(first + at_once, records))
        before = time.perf_counter()
        await asyncio.gather(*(one.send(records, at_once) for one in reporters))
        seconds = time.perf_counter() - before
    return {
        "seconds": seconds,
        "answers": [one for reporter in reporters for one in reporter.seconds],
        "acknowledged": {one.run: one.acknowledged for one in reporters},
    }


def main() -> None:
    """Read the command line and send all records."""
    url, given, records, at_once, out = sys.argv[1:]
    values = json.loads(Path(given).read_text(encoding="utf-8"))
    told = asyncio.run(report(url, values["tokens"], values["plan"], int(records), int(at_once)))
    Path(out).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
