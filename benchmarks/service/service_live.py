"""How long after a run has written a line its page shows it.

Nothing between the run folder and the browser is made up: the reporter is the process that
`--report-to` starts beside a training, the browser a headless Chromium that was signed in. Only
the lines are.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path

from batchwright.client.reporter_process import ReporterProcess
from batchwright.client.tokens import TOKEN
from batchwright.records import Plan
from batchwright.records.documents import write_record
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from benchmarks.harness.benchmark import say
from benchmarks.harness.loads import free_port
from benchmarks.service.reporters import record
from benchmarks.service.service_process import Service, make_tokens

EVENTS = 20
PAUSES = (0.3, 1.6)  # seconds between two lines, so that they fall anywhere between two questions
PATIENCE_SECONDS = 30.0
SHOWN = "text => document.body.innerText.includes(text)"


def live(plan: Plan, folder: Path) -> list[float]:
    """Seconds from a line's writing until the page shows it; empty without Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        say("Chromium is not installed: apt-get install chromium")
        return []
    from playwright.sync_api import sync_playwright

    folder.mkdir()
    database = f"sqlite:///{folder}/live.sqlite"
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
        Service(database, folder, free_port()) as service,
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
            _until_there(page, f"{service.url}/runs/{companion.report.run}")
            for number in range(1 + EVENTS):
                time.sleep(draws.uniform(*PAUSES))
                lines.write(json.dumps(record(number)) + "\n")
                lines.flush()
                written = time.perf_counter()
                text = f"step {number:,} of 100"
                page.wait_for_function(SHOWN, arg=text, polling=20)
                seconds.append(time.perf_counter() - written)
        finally:
            browser.close()
            companion.end("finished", None)
    return seconds[1:]  # with the first line the page is made


def _until_there(page, address: str) -> None:  # type: ignore[no-untyped-def] # Playwright's
    """Open a run's page as soon as its reporter has introduced it."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not page.goto(address).ok:
        if time.monotonic() > end:
            raise SystemExit(f"{address} is not there")
        time.sleep(0.2)
