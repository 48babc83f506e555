"""What a webhook is told, when and how often; and what `/metrics` says of jobs and database."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from sqlalchemy.exc import OperationalError

from artifacts import bring, lease_of, leased, over_postgresql, restarted
from batchwright.errors import BatchwrightError
from batchwright.records.service import JobProgress, Notice, RunEnd
from batchwright.service.store import Store
from batchwright.service.store.notices import CLAIM_SECONDS, WAITS
from batchwright.service.webhook import Webhook, _post, checked_webhook
from services import HandClock, epoch
from test_docs import blocks, read

URL = "https://hooks.example.org/T0/secret"


class Hook:
    """Stands at the other end; answers as it is told to, else 200."""

    def __init__(self, service, **settings):
        restarted(service, webhook=URL, **settings)
        self.service, self.asked, self.answers = service, [], []
        self.webhook = Webhook(service.store, self._take)

    def _take(self, url, body, headers):
        assert url == URL
        self.asked.append((body, headers))
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, Exception):
            raise answer
        return answer

    def turn(self):
        """What is told now."""
        before = len(self.asked)
        self.webhook.turn()
        return [Notice.model_validate_json(body) for body, _ in self.asked[before:]]


def failed(service, name="one"):
    lease = leased(service, name)
    told = JobProgress(key=lease.key, state="failed", error="no memory left")
    service.store.jobs.progress(lease.job.id, told)
    return lease.job.id


# ---------------------------------------------------------------------------------------- webhook


def test_a_job_that_failed_is_told_once(service):
    hook, job = Hook(service), failed(service)
    (notice,) = hook.turn()
    assert (notice.event, notice.subject, notice.name) == ("job.failed", job, "a job")
    assert (notice.detail, notice.path) == ("no memory left", f"/jobs/{job}")
    service.clock.go(30)
    assert hook.turn() == []


def test_a_run_that_fell_silent_is_told_and_again_when_it_does_so_again(service):
    hook, run, over = Hook(service), service.a_run(), service.a_run()
    service.store.runs.end(over, RunEnd(outcome="finished"))
    assert hook.turn() == []
    service.clock.go(service.settings.silent_seconds + 1)
    (notice,) = hook.turn()
    assert (notice.event, notice.subject, notice.path) == ("run.silent", run, f"/runs/{run}")
    service.clock.go(5)
    assert hook.turn() == []
    service.store.runs.alive(run)
    service.clock.go(service.settings.silent_seconds + 1)
    assert [one.subject for one in hook.turn()] == [run]


def test_a_run_that_could_not_report_while_the_service_was_away_is_not_silent_yet(service):
    gone, goes_on = service.a_run(), service.a_run()
    service.clock.go(600)  # the service is away
    hook = Hook(service)
    assert hook.turn() == []
    service.store.runs.alive(goes_on)
    service.clock.go(service.settings.silent_seconds)
    assert hook.turn() == []
    service.store.runs.alive(goes_on)
    service.clock.go(1)
    assert [one.subject for one in hook.turn()] == [gone]


def test_a_clock_that_is_set_forward_makes_no_run_silent(service):
    hook, steady = Hook(service), HandClock(0.0)
    store = Store(service.store.database.engine, service.settings, service.clock, steady)
    hook.webhook = Webhook(store, hook._take)

    def go(seconds):
        steady.go(seconds)
        service.clock.go(seconds)

    go(1000)
    goes_on, gone = service.a_run(), service.a_run()
    assert hook.turn() == []
    service.clock.go(600)  # of which the steady clock knows nothing
    go(5)
    assert hook.turn() == []
    store.runs.alive(goes_on)
    go(service.settings.silent_seconds)
    assert hook.turn() == []
    store.runs.alive(goes_on)
    go(1)
    assert [one.subject for one in hook.turn()] == [gone]


@pytest.mark.parametrize("lease_seconds", [30.0, 600.0])
def test_a_service_that_stood_still_makes_no_run_silent(service, lease_seconds):
    """As a process that is stopped, or on a laptop that sleeps: nobody could reach it."""
    hook = Hook(service, lease_seconds=lease_seconds)
    goes_on, gone = service.a_run(), service.a_run()

    def go(seconds):
        """As the service does all the time."""
        for _ in range(seconds):
            service.clock.go(1)
            service.store.tick()
            service.store.runs.alive(goes_on)

    service.store.tick()
    go(30)
    service.clock.go(90)
    assert hook.turn() == []
    go(round(service.settings.silent_seconds) + 1)  # the first of them ends the standstill
    assert hook.turn() == []
    go(1)
    assert [one.subject for one in hook.turn()] == [gone]


def test_a_prediction_that_was_missed_is_told_once_a_row(service):
    hook, run = Hook(service), service.a_run()
    for number in range(4):
        service.report(run, epoch(number, **{"time/epoch_s": 90.0 * (number + 1)}))
        service.app.state.adviser.consider(run)
    (notice,) = hook.turn()
    assert (notice.event, notice.subject) == ("prediction.missed", run)
    assert "were predicted" in notice.detail


def test_what_was_long_ago_is_told_of_no_more(service):
    job = failed(service)
    service.clock.go(2 * 3600)
    hook = Hook(service)
    assert hook.turn() == []
    assert failed(service) != job
    assert len(hook.turn()) == 1


def test_without_a_webhook_nothing_is_noted(service):
    failed(service)
    service.store.notices.look()
    assert list(service.store.notices.due()) == []
    with service.client:  # as a process that starts and ends
        assert not service.app.state.webhook._thread.is_alive()


def test_a_notice_is_signed_so_that_its_receiver_can_tell(service):
    hook = Hook(service, webhook_secret=SecretStr("between us"))
    failed(service)
    hook.turn()
    ((body, headers),) = hook.asked
    (shown,) = blocks(read("docs/service.md"), "python")
    scope = {}
    exec(shown, scope)  # noqa: S102 - our own document
    assert scope["is_ours"](body, headers, b"between us")
    assert not scope["is_ours"](body + b" ", headers, b"between us")
    assert headers["Batchwright-Event"] == "job.failed"
    assert headers["Content-Type"] == "application/json"
    assert "between us" not in repr(service.settings)


def test_a_webhook_that_takes_nothing_is_asked_again_later_and_then_no_more(service, caplog):
    hook = Hook(service)
    failed(service)
    hook.answers = [500, 302, 404, OSError(111, "Connection refused"), ValueError("x"), 429]
    assert len(hook.turn()) == 1
    for wait in WAITS:
        assert hook.turn() == []  # not yet
        service.clock.go(wait)
        assert len(hook.turn()) == 1
    service.clock.go(1e5)
    assert hook.turn() == []
    bodies = {body for body, _ in hook.asked}
    assert len(bodies) == 1  # the same each time, its identifier too
    fields = [record.fields for record in caplog.records if "webhook" in record.message]
    assert [one["given_up"] for one in fields] == [False] * len(WAITS) + [True]
    assert "secret" not in json.dumps(fields)


def test_of_two_services_one_tells(service):
    hook = Hook(service)
    other = Webhook(service.store, hook._take)
    failed(service)
    service.store.notices.look()
    (first,) = service.store.notices.due()
    other.turn()
    assert hook.asked == []
    service.store.notices.sent(first.key)
    service.clock.go(1e4)
    other.turn()
    assert hook.asked == []


def test_each_notice_is_claimed_when_its_turn_comes(service):
    """The ones before it may have taken minutes."""
    hook = Hook(service)
    other = Webhook(service.store, hook._take)
    for name in ("one", "two"):
        failed(service, name)
    service.store.notices.look()
    due = iter(service.store.notices.due())
    next(due)
    service.clock.go(CLAIM_SECONDS + 1)
    next(due)
    service.clock.go(CLAIM_SECONDS - 1)
    other.turn()
    assert len(hook.asked) == 1  # the first, whose teller never came to an end


def test_a_webhook_that_is_to_end_tells_no_more(service):
    hook = Hook(service)
    for name in ("one", "two"):
        failed(service, name)
    hook.webhook.close()
    assert len(hook.turn()) == 1


@pytest.mark.slow
def test_notices_are_kept_in_postgresql_too(service, request):
    hook = Hook(over_postgresql(service, request))
    job = failed(hook.service)
    hook.answers = [500]
    assert [one.subject for one in hook.turn()] == [job]
    assert hook.turn() == []
    service.clock.go(WAITS[0])
    assert [one.subject for one in hook.turn()] == [job]
    service.clock.go(1e4)
    assert hook.turn() == []


def test_a_redirect_is_a_refusal_and_is_not_followed():
    seen = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(307)
            self.send_header("location", "/inside")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Redirecting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        status = _post(f"http://127.0.0.1:{server.server_port}/hook", b"{}", {})
    finally:
        server.shutdown()
        server.server_close()
    assert status == 307
    assert seen == [("/hook", b"{}")]


@pytest.mark.parametrize(
    "url", ["hooks.example.com", "file:///etc/passwd", "http://", "http://a b"]
)
def test_a_webhook_has_an_address(url):
    with pytest.raises(
        BatchwrightError, match="--webhook, or BATCHWRIGHT_WEBHOOK, is no"
    ) as caught:
        checked_webhook(url)
    assert url not in str(caught.value)
    assert checked_webhook(URL) == URL
    assert checked_webhook(None) is None


# ---------------------------------------------------------------------------------------- figures


def figures(service):
    """Values by name and labels."""
    text = service.get("read", "/metrics").text
    return {
        (sample.name.removeprefix("batchwright_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def test_metrics_tell_of_queue_agents_and_artifacts(service, tmp_path, request, database):
    if database == "postgresql":
        service = over_postgresql(service, request)
    restarted(service, artifacts=str(tmp_path / "artifacts"))
    lease = leased(service)
    bring(service, lease, "train.log", b"x" * 100)
    failed(service, "two")
    service.store.jobs.submit("waits", lease_job(lease), auto=True, owner="submit")
    service.clock.go(7)
    found = figures(service)
    assert found["jobs", "probing"] == 1
    assert found["jobs", "failed"] == 1
    assert found["jobs", "queued"] == 1
    assert found["oldest_waiting_job_seconds",] == 7
    assert found["agents",] == 2
    assert found["agents_busy",] == 1
    assert found["artifact_bytes",] == 100
    assert found["database_bytes",] > 4096
    assert found["database_up",] == 1


def lease_job(lease):
    from batchwright.records import Job

    return Job.model_validate(lease.job.job)


def test_an_agent_heard_of_before_the_clock_was_set_back_is_not_counted(service):
    leased(service)
    service.clock.go(-3600)
    assert figures(service)["agents",] == 0


def test_metrics_count_leases_that_were_lost(service):
    lease = leased(service)
    service.store.jobs.progress(lease.job.id, JobProgress(key=lease.key))
    assert figures(service)["leases_lost_total",] == 0
    service.clock.go(10 * 24 * 3600)
    lease_of(service, "two")
    assert figures(service)["leases_lost_total",] == 1


def test_metrics_time_writes_and_count_those_that_were_refused(service, monkeypatch):
    before = figures(service)
    service.a_run()
    found = figures(service)
    for part in ("wait", "write"):
        assert count_of(found, part) > count_of(before, part)
    with pytest.raises(OperationalError), service.store.database.writing():
        raise OperationalError("BEGIN IMMEDIATE", {}, Exception("database is locked"))
    assert figures(service)["database_refused_total",] == 1


def count_of(found, part):
    return found.get(("database_write_seconds_count", part), 0)


def test_metrics_are_told_without_a_database_too(service, monkeypatch):
    found = service.get("read", "/metrics").text
    assert re.search(r"^batchwright_database_up 1\.0$", found, re.MULTILINE)

    def broken():
        raise OperationalError("BEGIN", {}, Exception("disk I/O error"))

    figures_of = service.app.state.meters.registry
    monkeypatch.setattr(service.store.database, "reading", broken)
    from prometheus_client import generate_latest

    text = generate_latest(figures_of).decode()
    assert "batchwright_database_up 0.0" in text
    assert "batchwright_requests_total" in text
