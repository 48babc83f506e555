"""The service under load, killed, full, and given nonsense.

    records_lost, records_doubled   64 reporters at once bring 200,000 records while the service is
                                    killed (`kill -9`) and started again ten times, on SQLite and on
                                    PostgreSQL; what was acknowledged and is not stored just as it
                                    was sent, and what is stored more than once; both 0
    records_per_second_DATABASE     the same without kills, in batches of 100: records over the time
                                    from the first request to the last answer
    p99_seconds, p99_seconds_DATABASE   of these requests, the time that 99 in 100 are answered
                                    within; the first is the worse of both
    page_seconds_million_records    of a run with 1,000,000 records: its page, or its records over
                                    the API at most 1,000 of them, whichever is slower, each time
                                    after one more has come; median of 20 each; below 1
    live_update_seconds             from a training's line in its run folder, through its reporter,
                                    until the run's page in a headless Chromium shows it; median and
                                    quartiles of 20, and live_update_worst_seconds, below 2
    fuzz_server_errors              requests made by schemathesis from the service's own OpenAPI
                                    description, with a token of every scope, that end in a status
                                    of 500 or above, or in an answer that is not declared; 0

Reporters run in one process of their own, beside the service, so both share the cores. With --quick
a tenth of the records, two kills, 100,000 records on the page and 10 cases for each operation
are measured, for a minute; with --full all of it, with 100 cases, for ten minutes, kept in
benchmarks/results. PostgreSQL is left out where it is not installed (Debian: apt-get install
postgresql), and so is the live page without Chromium.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
from sqlalchemy import func, select

from batchwright.planning.planner import plan_without_profile
from batchwright.records import Job, Plan
from batchwright.records.service import MOST_RECORDS, RecordBatch, RunIntroduction
from batchwright.service.access import COOKIE
from batchwright.service.caller import Caller
from batchwright.service.database.engine import open_engine
from batchwright.service.database.tables import records as stored
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from batchwright.workflows.prepare_job import resolve
from batchwright.workload.data.sources import open_data
from batchwright.workload.task import build_network, network_facts
from benchmarks.harness.common import (
    ROOT,
    Arguments,
    Figure,
    Measurements,
    median_figure,
    run_benchmark,
    say,
)
from benchmarks.service.reporters import record
from benchmarks.service.service_live import live
from benchmarks.service.service_process import (
    Service,
    free_port,
    make_tokens,
    postgres,
    postgres_programs,
)

REPORTERS, AT_ONCE = 64, 100
LOOKS = 20
PAGE_GOAL, UPDATE_GOAL = 1.0, 2.0
OWNER = Caller("benchmark", frozenset({"report", "admin"}))


@dataclass(frozen=True)
class Extent:
    """How much of everything is measured."""

    records: int
    kills: int
    page_records: int
    cases: int
    fuzz_seconds: int


QUICK, FULL = Extent(20_000, 2, 100_000, 10, 60), Extent(200_000, 10, 1_000_000, 100, 600)


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("service", __doc__, _measure, full_seeds=())


def _measure(arguments: Arguments, folder: Path) -> tuple[list[Figure], Measurements]:
    extent = FULL if arguments.full else QUICK
    plan = a_plan()
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
    return figures_of(loads, kept, looks, updates, answered, errors), {
        "seconds": {name: one.seconds for name, one in loads.items()},
        "looks": looks,
        "updates": updates,
        "fuzzed": errors,
    }


def figures_of(
    loads: dict[str, Load],
    kept: list[Kept],
    looks: dict[str, list[float]],
    updates: list[float],
    answered: int,
    errors: list[str],
) -> list[Figure]:
    """The figures, from what was measured."""
    late = {name: quantiles(one.answers, n=100)[98] for name, one in loads.items()}
    slowest = max(looks.values(), key=lambda some: sorted(some)[len(some) // 2])
    return [
        _count("records_lost", sum(one.lost for one in kept), "records", sum(k.sent for k in kept)),
        _count(
            "records_doubled",
            sum(one.doubled for one in kept),
            "records",
            sum(k.sent for k in kept),
        ),
        *(
            Figure(f"records_per_second_{name}", one.rate, "records/s", one.rate, one.rate, 1)
            for name, one in loads.items()
        ),
        _plain("p99_seconds", max(late.values()), "s", sum(len(o.answers) for o in loads.values())),
        *(
            _plain(f"p99_seconds_{name}", value, "s", len(loads[name].answers))
            for name, value in late.items()
        ),
        median_figure("page_seconds_million_records", slowest, "s", at_most=PAGE_GOAL),
        *_updates(updates),
        _count("fuzz_server_errors", len(errors), "answers", answered),
    ]


def _updates(seconds: list[float]) -> list[Figure]:
    if not seconds:
        return []
    worst = max(seconds)
    met = worst <= UPDATE_GOAL
    return [
        median_figure("live_update_seconds", seconds, "s"),
        Figure(
            *("live_update_worst_seconds", worst, "s", min(seconds), worst, len(seconds)),
            goal=UPDATE_GOAL,
            met=met,
        ),
    ]


def _plain(name: str, value: float, unit: str, repeats: int) -> Figure:
    return Figure(name, value, unit, value, value, repeats)


def _count(name: str, value: int, unit: str, repeats: int) -> Figure:
    return Figure(name, value, unit, value, value, repeats, 0, value == 0)


def a_plan() -> Plan:
    """That of handwritten digits on two workers."""
    job = Job(data="digits", workers=2, global_batch=32, epochs=1000, precision="float32")
    data = open_data(job)
    network = build_network(job.network, classes=len(data.facts.classes), side=data.facts.side)
    facts = network_facts(job.network, network, data.facts.side)
    return plan_without_profile(resolve(job, data.facts), data.facts, facts)


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
    """What reporters saw.

    Attributes:
        records: Acknowledged.
        seconds: From the first request to the last answer.
        answers: Seconds of each request.
        acknowledged: Records by run.
    """

    records: int
    seconds: float
    answers: list[float]
    acknowledged: dict[str, int]

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
    main()
