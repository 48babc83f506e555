"""The service under load, killed, with long histories, and with hostile or random requests.

Records lost and doubled: 64 reporters at once send 200,000 records while the service is killed
(`kill -9`) and started again ten times, on SQLite and on PostgreSQL. Lost are records that were
acknowledged and are not stored exactly as they were sent; doubled are those stored more than once.
Records per second: the same without kills, in batches of 100, over the time from the first request
to the last answer. Of these requests, the time within which 99 in 100 are answered, on the slower
database.

A page: of a run with 1,000,000 records, its page, or at most 1,000 of its records over the API,
whichever is slower, each time after one more record has come; 20 each.

A live update: from a line that a training writes to its run folder, through its reporter, until the
run's page in a headless Chromium shows it; 20.

Hostile requests: how long the requests of a well-behaved client take while another one, with a
token to read, report and submit, sends bodies of up to 8 MiB that are costly to read and check,
over four connections; and the memory of the service meanwhile.

Random requests: schemathesis makes requests from the service's own OpenAPI description, with a
token of every scope. Counted are answers with a status of 500 or above and answers that the
description does not declare; another figure is its exit code.

Jobs: see `benchmarks.service.jobs`.

Reporters run in one process of their own beside the service, so both share the cores. --quick
measures a tenth of the records, two kills, 100,000 records on the page and 10 cases for each
operation, for a minute; --full all of it, with 100 cases, for ten minutes. PostgreSQL is left out
where it is not installed (Debian: apt-get install postgresql), and so is the live page without
Chromium.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from benchmarks.harness.benchmark import ROOT, Arguments, Benchmark, Found, require, say

if __name__ == "__main__":  # what follows imports them
    require("fastapi", "sqlalchemy")

import httpx
from sqlalchemy import func, select

from batchwright.client.http import TOKEN
from batchwright.client.reporter_process import ReporterProcess
from batchwright.records import Job, Plan
from batchwright.records.documents import write_record
from batchwright.records.lines.line_files import line_text, read_line
from batchwright.records.service import MAX_RECORDS, RecordBatch, RunIntroduction
from batchwright.service.access import cookie_name
from batchwright.service.database.engine import open_engine
from batchwright.service.database.tables import records as stored
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from batchwright.service.store.tokens import Caller
from benchmarks.harness.figures import Figure, Value
from benchmarks.harness.loads import until
from benchmarks.harness.plans import opened, planned
from benchmarks.service import jobs
from benchmarks.service.hostile import hostile
from benchmarks.service.reporters import record
from benchmarks.service.service_process import DATABASES, Service, make_tokens

REPORTERS, AT_ONCE = 64, 100
LOOKS = EVENTS = 20
PAUSES = (0.3, 1.6)  # seconds between two lines, which so fall anywhere between the page's requests
PATIENCE_SECONDS = 30.0
SHOWN = "text => document.body.innerText.includes(text)"
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
          "response_schema_conformance")  # fmt: skip
OWNER = Caller("benchmark", frozenset({"report", "admin"}))

BENCHMARK = Benchmark(
    "service",
    "The service",
    "Reporters and service share the two cores",
    (
        Figure("records_lost", "records", "mean", "records that were acknowledged and are not "
               "stored as they were sent, the service killed ten times on each database",
               at_most=0),
        Figure("records_doubled", "records", "mean", "records stored more than once, the service "
               "killed ten times on each database", at_most=0),
        *(
            Figure(f"records_per_second_{name}", "records/s", "mean",
                   f"records stored a second, sent by 64 reporters, {words}", at_least=15_000)
            for name, words in (("sqlite", "SQLite"), ("postgresql", "PostgreSQL"))
        ),
        Figure("p99_seconds", "s", "mean", "time within which 99 of 100 requests of 100 records "
               "are answered, 64 reporters, slower database", at_most=0.3),
        Figure("healthz_ms", "ms", "median", "time of the smallest answer (`/healthz`), no other "
               "requests", at_most=3.0),
        Figure("worst_request_seconds", "s", "worst", "time of a well-behaved client's slowest "
               "request while another sends costly requests", at_most=0.5),
        Figure("hostile_peak_mib", "MiB", "mean", "peak memory of the service and its processes "
               "while a client sends costly requests", at_most=300),
        Figure("page_seconds_million_records", "s", "median", "time of the page, or of an API "
               "answer, of a run with a million records", at_most=1.0),
        Figure("live_update_worst_seconds", "s", "worst", "time from a line in the run folder "
               "until the run's page in a browser shows it, longest of 20", at_most=2.0),
        Figure("fuzz_server_errors", "answers", "mean", "server errors and undeclared answers to "
               "random requests that schemathesis makes from the API's description", at_most=0),
        *jobs.FIGURES,
        Figure("fuzz_exit_code", "code", "mean", "exit code of schemathesis after its random "
               "requests", at_most=0),
        Figure("live_update_seconds", "s", "median"),
        *(Figure(f"p99_seconds_{name}", "s", "mean") for name in ("sqlite", "postgresql")),
    ),
)  # fmt: skip


class Extent(NamedTuple):
    """How much is measured."""

    records: int
    kills: int
    page_records: int
    cases: int
    fuzz_seconds: int
    hostile_seconds: float


EXTENTS = {
    False: Extent(20_000, 2, 100_000, 10, 60, 10.0),
    True: Extent(200_000, 10, 1_000_000, 100, 600, 60.0),
}
"""What --quick and --full measure."""


def measure(arguments: Arguments, folder: Path) -> Found:
    """Load and kill the service on each database, then measure pages, jobs and requests."""
    require("schemathesis", *(["playwright"] if _chromium() else []))
    extent = EXTENTS[arguments.full]
    job = Job(data="digits", workers=2, global_batch=32, epochs=1000, precision="float32")
    plan = planned(job, opened(job.data, job.network, 8))
    loads: dict[str, Any] = {}
    kept: list[Kept] = []
    for name, database in DATABASES.items():
        for kills in (0, extent.kills):
            with database(folder / f"{name}-{kills}") as url:
                if url is None:
                    say("PostgreSQL is not installed: apt-get install postgresql")
                    break
                say(f"{name}: {REPORTERS} reporters, {extent.records} records, {kills} kills")
                told = load(url, plan, extent.records, folder / f"{name}-{kills}", kills)
                if kills:
                    kept.append(what_is_kept(url, told["acknowledged"]))
                else:
                    loads[name] = told
    say(f"a run of {extent.page_records} records")
    looks = full_page(plan, extent.page_records, folder / "page")
    say("live updates of a page")
    updates = live(plan, folder / "live")
    of_jobs, behind_jobs = jobs.measure(arguments.full, folder)
    say("costly requests")
    with DATABASES["sqlite"](folder / "hostile") as url:
        attacked = hostile(str(url), plan, extent.hostile_seconds, folder / "hostile")
    say("random requests")
    fuzzed = fuzz(extent, folder / "fuzz")
    return found_of(loads, kept, looks, updates, attacked, fuzzed) | of_jobs, {
        **behind_jobs,
        "seconds": {name: one["seconds"] for name, one in loads.items()},
        "looks": looks,
        "updates": updates,
        "hostile": attacked["hostile"],
        "fuzzed": fuzzed.errors,
    }


def found_of(
    loads: Mapping[str, Mapping[str, Any]],
    kept: Sequence[Kept],
    looks: Mapping[str, list[float]],
    updates: list[float],
    attacked: Mapping[str, Any],
    fuzzed: Fuzzed,
) -> dict[str, Sequence[float] | Value]:
    """All figures but those of jobs, by name."""
    late = {name: quantiles(one["answers"], n=100)[98] for name, one in loads.items()}
    answers = {name: len(one["answers"]) for name, one in loads.items()}
    sent = sum(one.sent for one in kept)
    counts = {
        "records_lost": (sum(one.lost for one in kept), sent),
        "records_doubled": (sum(one.doubled for one in kept), sent),
        "p99_seconds": (max(late.values()), sum(answers.values())),
        **{f"p99_seconds_{name}": (late[name], answers[name]) for name in loads},
        "fuzz_server_errors": (len(fuzzed.errors), fuzzed.answered),
        "fuzz_exit_code": (fuzzed.code, 1),
        "hostile_peak_mib": (attacked["mib"], attacked["hostile"]),
    }
    return {
        **{
            name: BENCHMARK[name].made(count, count, count, repeats)
            for name, (count, repeats) in counts.items()
        },
        **{
            f"records_per_second_{name}": [sum(one["acknowledged"].values()) / one["seconds"]]
            for name, one in loads.items()
        },
        "healthz_ms": [1000 * seconds for seconds in attacked["calm"]],
        "worst_request_seconds": attacked["answers"],
        "page_seconds_million_records": max(looks.values(), key=median),
        "live_update_seconds": updates,
        "live_update_worst_seconds": updates,
    }


# ------------------------------------------------------------------------------------------ loads


def load(url: str, plan: Plan, records: int, folder: Path, kills: int) -> dict[str, Any]:
    """Send records by all reporters while the service is killed ``kills`` times.

    Returns:
        ``seconds`` from the first request to the last answer; ``answers``: seconds of each request;
        ``acknowledged``: number of records by run.
    """
    tokens = make_tokens(url, REPORTERS, ("report",))
    given, out = folder / "given.json", folder / "told.json"
    content = {"tokens": tokens, "plan": plan.model_dump(mode="json")}
    given.write_text(json.dumps(content), encoding="utf-8")
    draws = random.Random(0)
    # Kills are due by acknowledged records, not by time: a fast service is killed as often.
    due = [records * (kill + draws.random()) / (kills + 1) for kill in range(kills)]
    acknowledged = 0
    with Service(url, folder) as service:
        numbers = (str(records // REPORTERS), str(AT_ONCE))
        words = [service.url, str(given), *numbers, str(out)]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.service.reporters", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                acknowledged += int(line)
                while due and acknowledged >= due[0]:
                    del due[0]
                    service.kill()
                    service.start()
            if process.wait():
                raise SystemExit("the reporters failed: see above")
        finally:
            process.kill()
            process.wait()
    told: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return told


class Kept(NamedTuple):
    """Stored records at the end: of ``sent`` ones, how many are missing or wrong, or doubled."""

    sent: int
    lost: int
    doubled: int


def what_is_kept(database: str, acknowledged: dict[str, int]) -> Kept:
    """Compare stored records with those sent, one by one."""
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
                    number not in bodies or read_line(bodies[number]) != record(number)
                    for number in range(count)
                )
                lost += sum(number >= count for number in bodies)  # stored, but not acknowledged
            total = connection.execute(select(func.count()).select_from(stored)).scalar_one()
    finally:
        engine.dispose()
    sent = sum(acknowledged.values())
    return Kept(sent, lost, doubled + max(0, total - sent))


# ------------------------------------------------------------------------------------------- page


def full_page(plan: Plan, records: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of requests about a long run: its page, and its records over the API."""
    with DATABASES["sqlite"](folder) as database:
        store = Store.open(Settings(database=database))
    try:
        run = str(uuid.uuid4())
        store.runs.introduce(run, RunIntroduction(name="long", plan=plan), OWNER.name)
        for first in range(0, records, MAX_RECORDS):
            some = tuple(record(n) for n in range(first, min(first + MAX_RECORDS, records)))
            store.records.append(run, RecordBatch(first=first, records=some), OWNER)
        token = store.tokens.create(OWNER.name, ["read", "report"])
        session = store.sign_in.enter(store.sign_in.link(["read"]))
    finally:
        store.close()
    api = {"authorization": f"Bearer {token}"}
    browser = {"cookie": f"{cookie_name(Settings(database=database))}={session}"}
    paths = {
        "page": (f"/runs/{run}", browser),
        "api": (f"/v1/runs/{run}/records?kind=step&most=1000", api),
    }
    looks: dict[str, list[float]] = {name: [] for name in paths}
    with (
        Service(database, folder) as service,
        httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client,
    ):
        for number in range(records, records + LOOKS):  # it is live: each look finds one more
            body = f'{{"first":{number},"records":[{line_text(record(number))}]}}'
            told = {**api, "content-type": "application/json"}
            client.post(f"/v1/runs/{run}/records", content=body, headers=told).raise_for_status()
            for name, (path, headers) in paths.items():
                before = time.perf_counter()
                answer = client.get(path, headers=headers)
                looks[name].append(time.perf_counter() - before)
                answer.raise_for_status()
    return looks


def live(plan: Plan, folder: Path) -> list[float]:
    """Seconds from writing a line until the page shows it; empty without Chromium.

    Only the lines are made up: the reporter is the process that `--report-to` starts beside a
    training, and the browser is a headless Chromium that signs in.
    """
    program = _chromium()
    if program is None:
        say("Chromium is not installed: apt-get install chromium")
        return []
    from playwright.sync_api import sync_playwright

    with DATABASES["sqlite"](folder) as database:
        (os.environ[TOKEN],) = make_tokens(database, 1, ("report",))
        store = Store.open(Settings(database=database))
    link = store.sign_in.link(["read"])
    store.close()
    run = folder / "run"
    run.mkdir()
    write_record(plan, run / "plan.json")
    draws = random.Random(0)
    seconds: list[float] = []
    with (
        Service(database, folder) as service,
        (run / "metrics.jsonl").open("a", encoding="utf-8") as lines,
        sync_playwright() as started,
    ):
        companion = ReporterProcess(run, service.url)
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            page = browser.new_page()
            page.set_default_timeout(1000 * PATIENCE_SECONDS)
            page.goto(f"{service.url}/sign-in?link={link}")
            page.get_by_role("button", name="Sign in").click()
            page.get_by_role("heading", name="Runs").wait_for()
            address = f"{service.url}/runs/{companion.report.run}"
            if not until(lambda: page.goto(address).ok, PATIENCE_SECONDS, every=0.2):
                raise SystemExit(f"{address} is not there")
            for number in range(1 + EVENTS):
                time.sleep(draws.uniform(*PAUSES))
                lines.write(line_text(record(number)) + "\n")
                lines.flush()
                written = time.perf_counter()
                page.wait_for_function(SHOWN, arg=f"step {number:,} of 100", polling=20)
                seconds.append(time.perf_counter() - written)
        finally:
            browser.close()
            companion.end("finished", None)
    return seconds[1:]  # the first line builds the page


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


# ------------------------------------------------------------------------------------------- fuzz


class Fuzzed(NamedTuple):
    """Number of answered requests, titles of schemathesis's findings and of its own errors, and
    its exit code.
    """

    answered: int
    errors: list[str]
    code: int


def fuzz(extent: Extent, folder: Path) -> Fuzzed:
    """Send the requests that schemathesis makes from the API's description."""
    with DATABASES["sqlite"](folder) as database:
        (token,) = make_tokens(database, 1, ("read", "report", "submit", "admin"))
    description, report = folder / "openapi.json", folder / "report.xml"
    with Service(database, folder) as service:
        headers = {"authorization": f"Bearer {token}"}
        answer = httpx.get(f"{service.url}/v1/openapi.json", headers=headers, timeout=30)
        description.write_text(answer.text, encoding="utf-8")
        words = ["run", str(description), "--url", service.url, "--checks", ",".join(CHECKS)]
        words += ["-H", f"Authorization: Bearer {token}", "--max-examples", str(extent.cases)]
        words += ["--max-time", str(extent.fuzz_seconds), "--seed", "0", "--no-color"]
        words += ["--report", "junit", "--report-junit-path", str(report), "--continue-on-failure"]
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if not report.exists():
        raise SystemExit(f"schemathesis did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    told = report.read_text(encoding="utf-8")
    found = re.findall(r"<(?:failure|error)\b[^>]*message=\"([^\"]*)\"", told)
    for one in found:
        say(one)
    if done.returncode:
        say(done.stdout[-4000:])  # not all that it finds is in its report
    logs = folder.glob("service-*.log")
    answered = sum(log.read_text(encoding="utf-8").count('"status":') for log in logs)
    return Fuzzed(answered, found, done.returncode)


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
