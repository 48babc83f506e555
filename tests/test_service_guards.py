"""What every request must pass: its host and origin, its size and shape, its rate; and what every
answer carries."""

from __future__ import annotations

import errno
import io
import json
import logging
import re
import sys

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event, update
from sqlalchemy.exc import OperationalError

from batchwright.service.database.tables import runs
from batchwright.service.middleware.bodies import STRANGERS_BYTES
from batchwright.service.middleware.hosts import HEADERS
from batchwright.service.middleware.identify import MAX_KEYS, Rates
from batchwright.service.operating.serving import LOGGERS, JsonLines, log_to_stderr
from batchwright.service.problems import Refused
from batchwright.service.reading import check_json
from batchwright.service.settings import Limits
from batchwright.service.store.lines import MAX_BYTES
from example_counts import examples
from samples import make_plan, make_summary
from services import ADDRESS, HandClock, app_over, serving_from, step

LOOPBACK = ["127.0.0.1", "127.0.0.1:8400", "127.8.8.8", "localhost", "LOCALHOST:1", "[::1]:8400"]
STRANGE = [
    "",
    "evil.example",
    "evil.example:8400",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "localhost@evil.example",
    "127.0.0.1/evil",
    "0.0.0.0:8400",
    "192.168.1.9",
    "127.0.0.1:port",
    "[::1",
    "*",
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One service for tests that change nothing in it that others see."""
    for one in serving_from(tmp_path_factory.mktemp("shared"), HandClock()):
        with one.client:
            yield one


@pytest.mark.parametrize("host", LOOPBACK)
def test_the_service_goes_by_loopbacks_names(shared, host):
    assert shared.get("read", "/v1/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", STRANGE)
@pytest.mark.parametrize("path", ["/healthz", "/v1/runs", "/nothing"])
def test_a_name_that_was_made_to_point_here_is_refused(shared, host, path):
    answer = shared.get("admin", path, headers={"host": host})
    assert answer.status_code == 403
    assert "--allowed-host" in answer.text


def test_names_that_were_allowed_are_its_own(service):
    settings = service.settings.model_copy(
        update={"allowed_hosts": ("Plans.example.org",), "host": "10.0.0.7"}
    )
    client = TestClient(app_over(service.store, settings), base_url=ADDRESS)
    for host in ("plans.example.org", "plans.example.org:443", "10.0.0.7:8400", "localhost"):
        assert client.get("/healthz", headers={"host": host}).status_code == 200
    assert client.get("/healthz", headers={"host": "example.org"}).status_code == 403


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8400", 200),
        ("https://127.0.0.1:8400", 200),
        ("http://127.0.0.1:8401", 403),
        ("http://127.0.0.1", 403),
        ("http://localhost:8400", 403),
        ("http://evil.example", 403),
        ("http://127.0.0.1:8400.evil.example", 403),
        ("http://127.0.0.1:8400@evil.example", 403),
        ("http://127.0.0.1:8400/path", 403),
        ("null", 403),
        ("", 403),
        ("file://127.0.0.1:8400", 403),
        ("chrome-extension://abcdef", 403),
    ],
)
def test_pages_of_other_sites_are_not_answered(shared, origin, status):
    answer = shared.get("read", "/v1/runs", headers={"origin": origin})
    assert answer.status_code == status


def test_an_origin_without_a_port_has_its_schemes(service):
    settings = service.settings.model_copy(update={"allowed_hosts": ("plans.example.org",)})
    client = TestClient(app_over(service.store, settings), base_url=ADDRESS)
    for origin, host in (
        ("https://plans.example.org", "plans.example.org"),
        ("https://plans.example.org:443", "plans.example.org"),
        ("https://plans.example.org", "plans.example.org:443"),
        ("http://plans.example.org", "plans.example.org:80"),
    ):
        headers = {"origin": origin, "host": host}
        assert client.get("/healthz", headers=headers).status_code == 200, headers


@pytest.mark.parametrize("path", ["/healthz", "/v1/runs", "/nothing", "/metrics"])
def test_every_answer_carries_the_headers(shared, path):
    for scope in (None, "admin"):
        answer = shared.get(scope, path)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers
        assert len(answer.headers["x-request-id"]) == 32


# ---------------------------------------------------------------------------------------- bodies


def body_of(size: int) -> bytes:
    return b'"' + b"x" * (size - 2) + b'"'


def post(service, scope, body, kind="application/json"):
    path = f"/v1/runs/{service.a_run()}/records"
    return service.post(scope, path, content=body, headers={"content-type": kind})


def test_a_body_is_read_up_to_the_limit(shared):
    most = shared.settings.limits.body_bytes
    answer = post(shared, "report", body_of(most))  # read, and too large for records
    assert (answer.status_code, f"{MAX_BYTES:,}" in answer.json()["detail"]) == (413, True)
    answer = post(shared, "report", body_of(most + 1))
    assert answer.status_code == 413
    assert str(most) in answer.json()["detail"]


def test_a_body_that_does_not_say_its_length_is_cut_off_too(shared):
    def endless():
        for _ in range(20):
            yield b" " * 2**20

    assert post(shared, "report", endless()).status_code == 413


def test_little_is_read_of_a_strangers_body(shared):
    assert post(shared, None, body_of(STRANGERS_BYTES + 1)).status_code == 401
    path = {"url": "/nothing", "headers": {"content-type": "application/json"}}
    assert shared.client.post(content=body_of(STRANGERS_BYTES + 1), **path).status_code == 413


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe",
        b'"\xed\xa0\x80"',
        '{"first": 0}'.encode("utf-16"),
        '{"first": 0}'.encode("utf-16-le"),
        b'{"first": 0, "records": [{"kind": "note", "text": "\\u0000"}]}',
        b'{"first": 0, "records": [{"kind": "note", "text": "\\ud800"}]}',
        b'{"first": 0, "records": [{"kind": "note", "text": "\\udc00\\ud800"}]}',
        b"[" * 100_000,
        b"]" * 10,
        b"{" * 33 + b"}" * 33,
        b'{"a":' * 40 + b"1" + b"}" * 40,
        b"",
        b"nothing",
        b"[]",
        b'{"first": 0, "records": []}',
        b'{"first": 1e400, "records": [{"kind": "note"}]}',
        b'{"first": 0, "records": [{"kind": "note", "lr": NaN}]}',
        b'{"first": 0, "records": [{"kind": "note", "lr": 1e400}]}',
        b'{"first": 0, "records": [{"kind": "note", "lr": ' + b"9" * 5000 + b"}]}",
        b'{"first": -1, "records": [{"kind": "note"}]}',
        b'{"first": 0, "records": [{"kind": "note"}], "extra": 1}',
        b'{"first": 0, "records": [{"kind": "note", "deep": [1]}]}',
        b'{"first": 0, "records": [{}]}',
    ],
)
def test_a_body_that_is_no_batch_is_refused_in_one_line(shared, body):
    answer = post(shared, "report", body)
    assert answer.status_code in (400, 422)
    assert list(answer.json()) == ["detail"]
    assert "\n" not in answer.json()["detail"]
    assert len(answer.json()["detail"]) < 300


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "x", "text/json", "x; json"]
)
def test_a_batch_must_say_that_it_is_json(shared, kind):
    batch = json.dumps({"first": 0, "records": [step(0)]}).encode()
    assert post(shared, "report", batch, kind).status_code == 422


PLAIN = st.none() | st.booleans() | st.integers() | st.text("[]{}\\\"'\x01a\u00e9\U0001f600")


@examples(40)
@given(
    st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text('[{"\\'), inner)),
    st.booleans(),
)
def test_what_is_sound_passes_and_its_levels_are_counted(value, escaped):
    body = json.dumps(value, ensure_ascii=escaped).encode()

    def depth(one):
        if isinstance(one, dict):
            return 1 + max(map(depth, one.values()), default=0)
        return 1 + max(map(depth, one), default=0) if isinstance(one, list) else 0

    levels = depth(value)
    check_json(body, levels)
    if levels:
        with pytest.raises(Refused, match="levels"):
            check_json(body, levels - 1)


@pytest.mark.parametrize(
    "text", ["\\u0000", "a\\\\\\u0000", "\\uD800", "\\ud83d\\u0041", "\\uDE00"]
)
def test_escapes_of_what_cannot_be_stored_are_refused(text):
    with pytest.raises(Refused, match="NUL or half"):
        check_json(f'"{text}"'.encode(), 1)


@pytest.mark.parametrize("text", ["\\\\u0000", "\\ud83d\\ude00", "\\u00e9", "\\\\ud800", "\\n"])
def test_escapes_of_what_can_are_not(text):
    check_json(f'"{text}"'.encode(), 1)


# ----------------------------------------------------------------------------------------- rates


class Ticks:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_bucket_empties_and_fills_again():
    ticks = Ticks()
    rates = Rates(2.0, 3, ticks)
    assert [rates.take("a") for _ in range(4)] == [True, True, True, False]
    assert rates.take("b")
    assert rates.wait("a") == pytest.approx(0.5)
    ticks.now = 0.5
    assert rates.take("a")
    assert rates.is_empty("a")
    ticks.now = 1000.0
    assert [rates.take("a") for _ in range(4)] == [True, True, True, False]


def test_what_is_remembered_of_rates_stays_small():
    ticks = Ticks()
    rates = Rates(1.0, 2, ticks)
    for number in range(3 * MAX_KEYS):
        ticks.now += 1e-6
        assert rates.take(f"address {number}")
    assert len(rates._left) <= MAX_KEYS


def test_too_many_requests_are_told_when_to_come_again(service):
    limits = Limits(requests_per_second=0.5, burst=3)
    settings = service.settings.model_copy(update={"limits": limits})
    service.client = TestClient(app_over(service.store, settings), base_url=ADDRESS)
    statuses = [service.get("read", "/v1/runs").status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    answer = service.get("read", "/v1/runs")
    assert int(answer.headers["retry-after"]) >= 1
    assert 0 < answer.json()["retry_after"] <= 2
    assert service.get("admin", "/v1/runs").status_code == 200  # has a bucket of its own


def test_who_guesses_tokens_is_slowed_down_and_nobody_else(service):
    limits = Limits(requests_per_second=0.5, burst=3)
    settings = service.settings.model_copy(update={"limits": limits})
    service.client = TestClient(app_over(service.store, settings), base_url=ADDRESS)
    guesses = [
        service.get(None, "/v1/runs", headers={"authorization": f"Bearer bw_{i}"}).status_code
        for i in range(5)
    ]
    assert guesses == [401, 401, 401, 429, 429]
    assert service.store.tokens.find(service.tokens["read"])


def test_a_flood_from_an_address_keeps_out_nobody_there_who_has_a_token(service):
    limits = Limits(requests_per_second=0.001, burst=3)
    settings = service.settings.model_copy(update={"limits": limits})
    browser = service.sign_in("read").cookies
    service.client = TestClient(app_over(service.store, settings), base_url=ADDRESS)
    flood = [service.get(None, "/v1/runs").status_code for _ in range(5)]
    assert flood == [401, 401, 401, 429, 429]
    assert service.get("read", "/v1/runs").status_code == 200
    wrong = {"authorization": "Bearer bw_wrong"}
    guesses = [service.get(None, "/v1/runs", headers=wrong).status_code for _ in range(4)]
    assert guesses == [401, 401, 401, 429]
    assert service.get("read", "/v1/runs").status_code == 200  # it was known a moment ago
    assert service.get("report", "/v1/runs").status_code == 429  # this one was not
    service.client.cookies = browser
    assert service.client.get("/runs").status_code == 429
    service.client.cookies.clear()
    service.store.tokens.revoke("read")
    assert service.get("read", "/v1/runs").status_code == 429  # now it is one that is guessed


# ------------------------------------------------------------------- a disk that takes no writes


def refuse_writes(service):
    """As on a full disk: whoever writes gets an error."""
    engine = service.store.database.engine
    event.listen(engine, "connect", lambda link, _: link.execute("PRAGMA query_only=ON"))
    engine.dispose()


def test_a_disk_that_takes_no_writes_stops_no_reader(service):
    run = service.a_run()
    browser = service.sign_in("read")
    with service.client:  # ends without an error, too
        refuse_writes(service)
        assert service.get("read", f"/v1/runs/{run}").status_code == 200  # the token's first use
        assert browser.get(f"/runs/{run}").status_code == 200
        assert service.put("report", f"/v1/runs/{run}/alive").status_code == 503
        with pytest.raises(OperationalError):
            service.store.tokens.note_used()


def test_the_process_answers_for_itself_whoever_asks_and_wherever_the_database_is(
    service, monkeypatch
):
    def away(_secret):
        raise OperationalError("SELECT", None, Exception("the server closed the connection"))

    monkeypatch.setattr(service.store.tokens, "find", away)
    assert service.get("read", "/healthz").status_code == 200
    assert service.get("read", "/v1/runs").status_code == 503


def test_that_nothing_can_be_written_is_told_to_whoever_asks_whether_it_is_ready(
    service, monkeypatch
):
    monkeypatch.setattr("batchwright.service.database.engine.LOOK_SECONDS", 0.0)
    assert service.get(None, "/readyz").status_code == 200
    refuse_writes(service)
    answer = service.get(None, "/readyz")
    assert answer.status_code == 503
    assert "takes no writes" in answer.json()["detail"]
    assert service.get(None, "/healthz").status_code == 200


def test_nobody_who_asks_whether_it_is_ready_waits_for_another_who_asks(service, monkeypatch):
    database = service.store.database
    assert service.get(None, "/readyz").status_code == 200
    with database._looking:  # as while somebody waits for a database that is locked
        assert service.get(None, "/readyz").status_code == 200
        monkeypatch.setattr(database, "_looked", database._looked - 3600)
        assert service.get(None, "/readyz").status_code == 503


# ---------------------------------------------------------------- documents of another version


def test_what_another_version_has_stored_is_told_in_a_line(service):
    run = service.a_run()
    other = service.a_run()
    newer = make_plan().model_dump(mode="json") | {"invented": 1}
    with service.store.database.writing() as connection:
        connection.execute(update(runs).where(runs.c.id == run).values(plan=json.dumps(newer)))
    assert service.get("read", "/v1/runs").status_code == 200
    browser = service.sign_in("read")
    for answer in (
        service.get("read", f"/v1/runs/{run}/plan"),
        browser.get(f"/runs/{run}"),
        browser.get(f"/runs/{run}/live"),
        browser.get(f"/compare?run={run}&run={other}"),
    ):
        assert answer.status_code == 409, answer.url
        assert "another version" in answer.text
        assert "invented" in answer.text
    assert service.get("read", f"/v1/runs/{run}").status_code == 200


def test_a_summary_does_not_tell_where_the_files_are(service):
    run = service.a_run(name="mine")
    summary = make_summary(run_folder="/home/me/secret/place")
    told = {"outcome": "finished", "summary": summary.model_dump(mode="json")}
    assert service.put("report", f"/v1/runs/{run}/end", json=told).is_success
    browser = service.sign_in("read")
    for answer in (
        service.get("read", f"/v1/runs/{run}/summary"),
        browser.get(f"/runs/{run}/files/summary.json"),
        browser.get(f"/runs/{run}/files/report.html"),
    ):
        assert answer.status_code == 200
        assert "secret" not in answer.text
    assert service.get("read", f"/v1/runs/{run}/summary").json()["run_folder"] == "mine"


# ------------------------------------------------------------------------------- problems and logs


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1", 404),
        ("PATCH", "/v1/runs", 405),
        ("GET", "/v1/runs/", 404),
    ],
)
def test_what_is_not_there_is_told_as_any_problem(shared, method, path, status):
    answer = shared.request(method, "admin", path)
    assert answer.status_code == status
    assert list(answer.json()) == ["detail"]
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize(
    "path",
    ["/v1/runs/..%2f..%2fetc%2fpasswd", "/v1/runs/%00", "/v1/runs/' OR 1=1 --", "/v1/runs/%ff"],
)
def test_hostile_identifiers_are_refused(shared, path):
    assert shared.get("admin", path).status_code in (404, 422)


@pytest.mark.parametrize("query", ["%", "_", "'; DROP TABLE runs; --", "\\", "\u202e", "<script>"])
def test_a_query_is_text_to_look_for(service, query):
    service.a_run(name="plain")
    assert service.get("read", "/v1/runs", params={"query": query}).json() == []
    named = service.a_run(name=f"a {query} b")
    (found,) = service.get("read", "/v1/runs", params={"query": query}).json()
    assert found["id"] == named
    assert service.get("read", "/v1/runs", params={"query": "\x00"}).status_code == 422


def test_a_mistake_of_ours_gives_nothing_away_and_is_in_the_log(service, caplog, monkeypatch):
    def broken(*_arguments):
        raise ZeroDivisionError("secret of the house")

    monkeypatch.setattr(service.store.runs, "list", broken)
    with caplog.at_level(logging.ERROR, "batchwright.service"):
        answer = service.get("read", "/v1/runs")
    assert answer.status_code == 500
    assert answer.json() == {"detail": "something went wrong inside the service; its log says what"}
    assert answer.headers["content-security-policy"]
    (record,) = caplog.records
    assert record.fields["request_id"] == answer.headers["x-request-id"]
    assert "secret of the house" in JsonLines().format(record)


@pytest.mark.parametrize(
    "error",
    [BlockingIOError(errno.EAGAIN, "no process"), RuntimeError("can't start new thread")],
    ids=["process", "thread"],
)
def test_a_machine_that_is_short_of_processes_is_no_mistake_of_ours(service, monkeypatch, error):
    def broken(*_arguments):
        raise error

    monkeypatch.setattr(service.store.runs, "list", broken)
    answer = service.get("read", "/v1/runs")
    assert answer.status_code == 503
    assert answer.json()["detail"].startswith(
        "the machine is short of processes, files or memory: "
    )
    assert int(answer.headers["retry-after"]) > 0


def test_at_a_terminal_the_log_is_quiet_or_in_words(service, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(one.level, one.handlers, one.propagate) for one in loggers]
    try:
        log_to_stderr(None)
        service.get("read", "/v1/runs")
        assert terminal.getvalue() == ""
        log_to_stderr("info")
        service.get("read", "/v1/runs")
        logging.getLogger(LOGGERS[0]).error("failed", extra={"fields": {"why": "\x1b[2J"}})
    finally:
        for one, (level, handlers, propagate) in zip(loggers, before, strict=True):
            one.setLevel(level)
            one.handlers, one.propagate = handlers, propagate
    line, error = terminal.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d GET /v1/runs 200, \d+ ms for read", line)
    assert error[8:] == r" error: failed, why \x1b[2J"


def test_a_line_of_the_log_is_json_and_holds_no_parameter(service, caplog):
    with caplog.at_level(logging.INFO, "batchwright.service"):
        service.get("read", "/v1/runs", params={"query": "hidden"})
        service.get(None, "/sign-in-or-so", params={"link": "hidden"})
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert [line["route"] for line in lines] == ["/v1/runs", "none"]
    assert [line["caller"] for line in lines] == ["read", None]
    assert lines[0]["status"] == 200
    assert "hidden" not in json.dumps(lines)


def test_metrics_count_requests_by_route_and_never_by_address(service):
    service.get("read", "/v1/runs")
    service.get("read", f"/v1/runs/{service.a_run()}")
    service.get(None, "/made/up/address")
    text = service.get("read", "/metrics").text
    assert 'route="/v1/runs/{run}",status="200"} 1.0' in text
    assert 'route="none",status="404"} 1.0' in text
    assert "made" not in text
