"""The service under load, killed, full, and given nonsense.

Records lost and doubled: 64 reporters at once bring 200,000 records while the service is killed
(`kill -9`) and started again ten times, on SQLite and on PostgreSQL; what was acknowledged and is
not stored just as it was sent, and what is stored more than once. Records per second: the same
without kills, in batches of 100, over the time from the first request to the last answer; of these
requests the time that 99 in 100 are answered within, the worse of both databases.

A page: of a run with 1,000,000 records its page, or its records over the API at most 1,000 of them,
whichever is slower, each time after one more has come; 20 each. A live update: from a training's
line in its run folder, through its reporter, until the run's page in a headless Chromium shows it;
20. Fuzz: requests made by schemathesis from the service's own OpenAPI description, with a token of
every scope, that end in a status of 500 or above, or in an answer that is not declared.

Reporters run in one process of their own, beside the service, so both share the cores. With --quick
a tenth of the records, two kills, 100,000 records on the page and 10 cases for each operation
are measured, for a minute; with --full all of it, with 100 cases, for ten minutes. PostgreSQL is
left out where it is not installed (Debian: apt-get install postgresql), and so is the live page
without Chromium.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
from sqlalchemy import func, select

from batchwright.records import Job, Plan
from batchwright.records.service import MOST_RECORDS, RecordBatch, RunIntroduction
from batchwright.service.access import COOKIE
from batchwright.service.caller import Caller
from batchwright.service.database.engine import open_engine
from batchwright.service.database.tables import records as stored
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from benchmarks.harness.benchmark import ROOT, Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, Value
from benchmarks.harness.loads import free_port
from benchmarks.harness.plans import opened, planned
from benchmarks.service.reporters import record
from benchmarks.service.service_live import live
from benchmarks.service.service_process import Service, make_tokens, postgres, postgres_programs

REPORTERS, AT_ONCE = 64, 100
LOOKS = 20
OWNER = Caller("benchmark", frozenset({"report", "admin"}))

BENCHMARK = Benchmark(
    "service",
    "The service",
    "Reporters and service share the two cores",
    (
        Figure("records_lost", "records", "mean", "records acknowledged and not stored as they "
               "were sent, the service killed ten times on each database", at_most=0),
        Figure("records_doubled", "records", "mean", "records stored twice in these runs",
               at_most=0),
        Figure("records_per_second_sqlite", "records/s", "mean",
               "records taken in from 64 reporters, SQLite"),
        Figure("records_per_second_postgresql", "records/s", "mean", "the same, PostgreSQL"),
        Figure("p99_seconds", "s", "mean",
               "99 of 100 of these requests of 100 records are answered within"),
        Figure("page_seconds_million_records", "s", "median",
               "page or API answer of a run with a million records", at_most=1.0),
        Figure("live_update_worst_seconds", "s", "worst", "from a line in the run folder until the "
               "run's page in a browser shows it, the longest of 20", at_most=2.0),
        Figure("fuzz_server_errors", "answers", "mean", "requests made up from the description "
               "that end in a server error or an undeclared answer", at_most=0),
        Figure("live_update_seconds", "s", "median"),
        *(Figure(f"p99_seconds_{name}", "s", "mean") for name in ("sqlite", "postgresql")),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Extent:
    """How much of everything is measured."""

    records: int
    kills: int
    page_records: int
    cases: int
    fuzz_seconds: int


QUICK, FULL = Extent(20_000, 2, 100_000, 10, 60), Extent(200_000, 10, 1_000_000, 100, 600)


def measure(arguments: Arguments, folder: Path) -> Found:
    """Load and kills on each database, then pages and nonsense."""
    extent = FULL if arguments.full else QUICK
    job = Job(data="digits", workers=2, global_batch=32, epochs=1000, precision="float32")
    plan = planned(job, opened(job.data, job.network, 8))
    loads: dict[str, Load] = {}
    kept: list[Kept] = []
    for name, database in databases(folder):
        with database() as url:
            say(f"{name}: {REPORTERS} reporters, {extent.records} records")
            loads[name] = load(url, plan, extent.records, folder / f"{name}-load")
        with database() as url:
            say(f"{name}: the same, killed {extent.kills} times")
            kept.append(killed(url, plan, extent, folder / f"{name}-killed"))
    say(f"a run of {extent.page_records} records")
    looks = full_page(plan, extent.page_records, folder)
    say("a page that is looked at")
    updates = live(plan, folder / "live")
    say("nonsense")
    answered, errors = fuzz(extent, folder)
    return found_of(loads, kept, looks, updates, answered, errors), {
        "seconds": {name: one.seconds for name, one in loads.items()},
        "looks": looks,
        "updates": updates,
        "fuzzed": errors,
    }


def found_of(
    loads: dict[str, Load],
    kept: list[Kept],
    looks: dict[str, list[float]],
    updates: list[float],
    answered: int,
    errors: list[str],
) -> dict[str, Sequence[float] | Value]:
    """The figures, from what was measured."""
    late = {name: quantiles(one.answers, n=100)[98] for name, one in loads.items()}
    sent = sum(one.sent for one in kept)
    counts = {
        "records_lost": (sum(one.lost for one in kept), sent),
        "records_doubled": (sum(one.doubled for one in kept), sent),
        "p99_seconds": (max(late.values()), sum(len(one.answers) for one in loads.values())),
        **{f"p99_seconds_{name}": (late[name], len(loads[name].answers)) for name in loads},
        "fuzz_server_errors": (len(errors), answered),
    }
    return {
        **{
            name: BENCHMARK[name].made(count, count, count, repeats)
            for name, (count, repeats) in counts.items()
        },
        **{f"records_per_second_{name}": [one.rate] for name, one in loads.items()},
        "page_seconds_million_records": max(looks.values(), key=median),
        "live_update_seconds": updates,
        "live_update_worst_seconds": updates,
    }


# ------------------------------------------------------------------------------------- databases


def databases(folder: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Name, and what opens a new empty database of that kind and gives its URL."""
    numbers = iter(range(100))

    @contextmanager
    def sqlite() -> Iterator[str]:
        yield f"sqlite:///{folder}/service-{next(numbers)}.sqlite"

    @contextmanager
    def server() -> Iterator[str]:
        place = folder / f"postgres-{next(numbers)}"
        place.mkdir()
        with postgres(programs, place) as url:  # type: ignore[arg-type] # looked at below
            yield url

    programs = postgres_programs()
    found: list[tuple[str, Callable[[], Any]]] = [("sqlite", sqlite)]
    if programs is None:
        say("PostgreSQL is not installed: apt-get install postgresql")
        return found
    return [*found, ("postgresql", server)]


# ------------------------------------------------------------------------------------------ loads


@dataclass(frozen=True)
class Load:
    """What reporters saw."""

    records: int  # acknowledged
    seconds: float  # from the first request to the last answer
    answers: list[float]  # seconds of each request
    acknowledged: dict[str, int]  # records by run

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / self.seconds


@dataclass(frozen=True)
class Kept:
    """What is stored in the end: of ``sent`` records so many are missing or wrong, or too many."""

    sent: int
    lost: int
    doubled: int


@contextmanager
def reporting(url: str, tokens: list[str], plan: Plan, records: int, folder: Path) -> Iterator[Any]:
    """Reporters at work; when the block has ended, so have they: ``f() -> Load``."""
    given, out = folder / "given.json", folder / "told.json"
    given.write_text(
        json.dumps({"tokens": tokens, "plan": plan.model_dump(mode="json")}), encoding="utf-8"
    )
    each = records // REPORTERS
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks.service.reporters"),
            *(url, str(given), str(each), str(AT_ONCE), str(out)),
        ],
        cwd=ROOT,
    )

    def told() -> Load:
        if process.wait():
            raise SystemExit("the reporters failed: see above")
        values = json.loads(out.read_text(encoding="utf-8"))
        acknowledged = values["acknowledged"]
        return Load(sum(acknowledged.values()), values["seconds"], values["answers"], acknowledged)

    try:
        yield process, told
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def load(database: str, plan: Plan, records: int, folder: Path) -> Load:
    """All reporters, nobody killed."""
    folder.mkdir()
    tokens = make_tokens(database, REPORTERS, ("report",))
    with (
        Service(database, folder, free_port()) as service,
        reporting(service.url, tokens, plan, records, folder) as (_, told),
    ):
        return told()  # type: ignore[no-any-return] # a Load


def killed(database: str, plan: Plan, extent: Extent, folder: Path) -> Kept:
    """All reporters while the service is killed again and again, and what is stored then."""
    folder.mkdir()
    tokens = make_tokens(database, REPORTERS, ("report",))
    draws = random.Random(0)
    with (
        Service(database, folder, free_port()) as service,
        reporting(service.url, tokens, plan, extent.records, folder) as (process, told),
    ):
        kills = 0
        while kills < extent.kills and process.poll() is None:
            time.sleep(draws.uniform(0.3, 1.5))
            service.kill()
            service.start()
            kills += 1
        if kills < extent.kills:
            raise SystemExit(f"all records were there after {kills} kills: give more of them")
        found = told()
    return what_is_kept(database, found.acknowledged)


def what_is_kept(database: str, acknowledged: dict[str, int]) -> Kept:
    """Compares what is stored with what was sent, record by record."""
    engine = open_engine(database)
    lost, doubled = 0, 0
    try:
        with engine.connect() as connection:
            for run, count in acknowledged.items():
                where = stored.c.run_id == run
                rows = connection.execute(select(stored.c.sequence, stored.c.body).where(where))
                bodies: dict[int, str] = {}
                for sequence, body in rows:
                    doubled += sequence in bodies
                    bodies[sequence] = body
                lost += sum(
                    number not in bodies or json.loads(bodies[number]) != record(number)
                    for number in range(count)
                )
                lost += sum(number >= count for number in bodies)  # nobody was told of them
            total = connection.execute(select(func.count()).select_from(stored)).scalar_one()
    finally:
        engine.dispose()
    sent = sum(acknowledged.values())
    return Kept(sent, lost, doubled + max(0, total - sent))


# ------------------------------------------------------------------------------------------- page


def full_page(plan: Plan, records: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of looks at a long run: its page, and its records over the API."""
    settings = Settings(database=f"sqlite:///{folder}/page.sqlite")
    store = Store.open(settings)
    try:
        run = str(uuid.uuid4())
        store.runs.introduce(run, RunIntroduction(name="long", plan=plan), OWNER.name)
        for first in range(0, records, MOST_RECORDS):
            some = tuple(record(n) for n in range(first, min(first + MOST_RECORDS, records)))
            store.records.append(run, RecordBatch(first=first, records=some), OWNER)
        token = store.tokens.create(OWNER.name, ["read", "report"])
        session = store.sign_in.enter(store.sign_in.link(["read"]))
    finally:
        store.close()
    (folder / "page").mkdir()
    api = {"authorization": f"Bearer {token}"}
    browser = {"cookie": f"{COOKIE}={session}"}
    paths = {
        "page": (f"/runs/{run}", browser),
        "api": (f"/v1/runs/{run}/records?kind=step&most=1000", api),
    }
    looks: dict[str, list[float]] = {name: [] for name in paths}
    with (
        Service(settings.database, folder / "page", free_port()) as service,
        httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client,
    ):
        for number in range(records, records + LOOKS):  # it is live: each look finds one more
            batch = {"first": number, "records": [record(number)]}
            client.post(f"/v1/runs/{run}/records", json=batch, headers=api).raise_for_status()
            for name, (path, headers) in paths.items():
                looks[name].append(_look(client, path, headers))
    return looks


def _look(client: httpx.Client, path: str, headers: dict[str, str]) -> float:
    before = time.perf_counter()
    answer = client.get(path, headers=headers)
    seconds = time.perf_counter() - before
    answer.raise_for_status()
    return seconds


# ------------------------------------------------------------------------------------------- fuzz

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


def fuzz(extent: Extent, folder: Path) -> tuple[int, list[str]]:
    """How many requests were answered, and titles of what schemathesis found."""
    (folder / "fuzz").mkdir()
    database = f"sqlite:///{folder}/fuzz.sqlite"
    scopes = ("read", "report", "submit", "admin")
    (token,) = make_tokens(database, 1, scopes)
    with Service(database, folder / "fuzz", free_port()) as service:
        headers = {"authorization": f"Bearer {token}"}
        description = folder / "fuzz" / "openapi.json"
        answer = httpx.get(f"{service.url}/v1/openapi.json", headers=headers, timeout=30)
        description.write_text(answer.text, encoding="utf-8")
        report = folder / "fuzz" / "report.xml"
        words = ["run", str(description), "--url", service.url, "--checks", ",".join(CHECKS)]
        words += ["-H", f"Authorization: Bearer {token}", "--max-examples", str(extent.cases)]
        words += ["--max-time", str(extent.fuzz_seconds)]
        words += ["--seed", "0", "--no-color", "--report", "junit"]
        words += ["--report-junit-path", str(report), "--continue-on-failure"]
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", *words],
            cwd=folder / "fuzz",
            capture_output=True,
            text=True,
            check=False,
        )
    if not report.exists():
        raise SystemExit(f"schemathesis did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = re.findall(r"<failure[^>]*message=\"([^\"]*)\"", report.read_text(encoding="utf-8"))
    for one in found:
        say(one)
    logs = (folder / "fuzz").glob("service-*.log")
    answered = sum(log.read_text(encoding="utf-8").count('"status":') for log in logs)
    return answered, found


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
