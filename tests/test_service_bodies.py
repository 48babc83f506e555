"""Bodies that are made to cost much: they are refused early, read elsewhere, and stop nobody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import batchwright.records.service as messages
from batchwright.client.http import ServiceError
from batchwright.records import Job, Plan, Profile, RunSummary
from batchwright.records.base import Record
from batchwright.service import processes
from batchwright.service.middleware import bodies, unread
from batchwright.service.middleware.bodies import _HeldBytes, _RequestBytes
from batchwright.service.middleware.unread import Unread
from batchwright.service.operating.serving import FREE_PIECES, listen
from batchwright.service.problems import Refused, TooLarge, TooMany, Unavailable
from batchwright.service.processes import KEPT_BYTES, Workers
from batchwright.service.reading import MAX_ESCAPES, SMALL_BYTES, check_json, read, read_json
from batchwright.service.settings import Limits
from clients import SECONDS, wait_until
from samples import make_plan, make_profile
from services import ADDRESS, HandClock, serving_from
from test_service_serving import answering

MANY = Limits().values


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One service for tests that change nothing in it that others see."""
    for one in serving_from(tmp_path_factory.mktemp("shared"), HandClock()):
        with one.client:
            yield one


@pytest.fixture
def workers():
    made = Workers(most=1, waiting=1)
    yield made
    made.close()


# ------------------------------------------------------------------------------------- first error


def lists_in(part, path=""):
    """All lists of a schema, with where they are."""
    if isinstance(part, list | tuple):
        for number, inner in enumerate(part):
            yield from lists_in(inner, f"{path}/{number}")
    elif isinstance(part, dict):
        if part.get("type") in ("list", "tuple", "set", "frozenset"):
            yield path, part
        for key, inner in part.items():
            yield from lists_in(inner, f"{path}/{key}")


def free(part):
    """Whether a list takes whatever JSON has, so that nothing in it is wrong."""
    return part.get("items_schema", {}).get("schema_ref", "").startswith("pydantic.types.JsonValue")


@pytest.mark.parametrize(
    "model",
    [Job, Plan, Profile, RunSummary]
    + [one for one in vars(messages).values() if isinstance(one, type) and issubclass(one, Record)],
    ids=lambda model: model.__name__,
)
def test_every_list_that_is_read_ends_at_its_first_wrong_item(model):
    lists = lists_in(model.__pydantic_core_schema__)
    slow = [path for path, one in lists if not one.get("fail_fast") and not free(one)]
    assert not slow


def test_of_many_wrong_items_one_is_told():
    told = {"profiles": [{}] * 20_000}
    with pytest.raises(ValueError, match="validation error") as error:
        messages.PlanRequest.model_validate(told)
    assert error.value.error_count() < 50


# ---------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"{}," * MANY + b"{}]",
        b"[" + b"1," * MANY + b"1]",
        b"[" + b'"",' * MANY + b'""]',
        b"[" + b"[[[[]]]]," * (MANY // 4) + b"1]",
        b'{"a":' + b'{"b":1,"c":2},' * (MANY // 2) + b"}",
        b'"' * (5 * MANY),
    ],
    ids=("objects", "numbers", "texts", "lists", "keys", "quotes"),
)
def test_more_values_than_any_document_has_are_refused_before_they_are_parsed(body):
    with pytest.raises(Refused, match="400,000 values"):
        check_json(body, 32)


def test_commas_and_brackets_in_texts_are_no_values():
    check_json(json.dumps({"a": "[,{" * MANY}).encode(), 2, 3)
    with pytest.raises(Refused, match="more than 3 values"):
        check_json(b'{"a": [1, 2, 3]}', 2, 3)


def test_a_body_of_escapes_is_refused():
    with pytest.raises(Refused, match="escapes"):
        check_json(b'"' + b"\\\\" * MAX_ESCAPES + b'"', 2)


HOSTILE = {
    "objects": b"[" + b"{}," * (MANY - 2) + b"{}]",
    "numbers": b"[" + b"1," * (MANY - 2) + b"1]",
    "nested": b"[" + (b"[" * 30 + b"]" * 30 + b",") * (MANY // 32) + b"1]",
    "digits": b"[" + (b"9" * 4000 + b",") * 500 + b"1]",
    "too many digits": b"[" + b"9" * 2**20 + b"]",
    "exponents": b"[" + b"1e999," * 1000 + b"1" + b" " * SMALL_BYTES + b"]",
    "a long text": json.dumps("a" * 2**20).encode(),
    "a wide text": json.dumps("\U0001f600" * 2**18, ensure_ascii=False).encode(),
}


COSTLY_AT = (
    ("read", "POST", "/v1/plans", b'{"profiles": %s}'),
    ("read", "POST", "/v1/plans", b'{"profiles": [%s]}'),
    ("read", "POST", "/v1/plans", b'{"profiles": [], "keys": {"resolutions": %s}}'),
    ("submit", "POST", "/v1/profiles", b'{"name": "x", "profile": {"steps": %s}}'),
    ("submit", "POST", "/v1/jobs", b'{"name": "x", "job": {"resolutions": %s}}'),
    ("report", "PUT", "/v1/runs/{run}", b'{"name": "x", "plan": {"considered": %s}}'),
    ("report", "PUT", "/v1/runs/{run}/end", b'{"outcome": "finished", "summary": %s}'),
    ("report", "PUT", "/v1/agents/box", b'{"name": "box", "allow": %s}'),
)
"""Scope, method and path of requests, and the body that a hostile value stands in."""


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        pytest.param(kind, at, marks=() if at == place else pytest.mark.slow)
        for at in range(len(COSTLY_AT))
        for place, kind in enumerate(HOSTILE)
    ],
)
def test_what_is_made_to_cost_much_is_refused_in_a_short_line(shared, kind, at):
    scope, method, path, frame = COSTLY_AT[at]
    run = "5f0c2d1e-8a44-4a0b-9d0e-2f6f7c1f0a11"
    headers = {"content-type": "application/json"}
    body = frame.replace(b"%s", HOSTILE[kind])
    answer = shared.request(method, scope, path.format(run=run), content=body, headers=headers)
    assert answer.status_code == 422, answer.text[:300]
    assert list(answer.json()) == ["detail"]
    assert "\n" not in answer.json()["detail"]
    assert len(answer.text) < 1500


def test_an_object_of_very_many_keys_is_refused():
    wide = {f"k{number}": 1 for number in range(100_000)}
    for told in (wide, [wide], {"outcome": "stopped", "summary": {"plan": [[wide]]}}):
        with pytest.raises(Refused, match=r"an object of 100,000 keys"):
            read(messages.RunEnd, json.dumps(told).encode())
    with pytest.raises(Refused, match=r"^k: Extra inputs"):
        read(messages.RunEnd, b'{"outcome": "stopped", "k": 1}')
    with pytest.raises(Refused, match=r"^k{117}\.\.\.: Extra"):
        read(messages.RunEnd, json.dumps({"outcome": "stopped", "k" * 5000: 1}).encode())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x" * 2**20, 1),
        ("goal.kinds", "[" + "{kind: a, count: 1}, " * 2**15 + "]"),
        ("goal.kinds", "a, " * 2**18),
        ("resolutions", "8," * 2**18),
        ("resolutions", ["8"] * 2**17),
    ],
    ids=("key", "table", "text", "list", "items"),
)
def test_keys_of_a_job_that_are_longer_than_any_are_refused(shared, key, value):
    told = {"name": "x", "job": {key: value}}
    answer = shared.post("submit", "/v1/jobs", json=told)
    assert answer.status_code == 422
    assert len(answer.text) < 1500


def test_a_key_that_comes_twice_counts_once():
    body = b'{"outcome": "failed", "outcome": "stopped"}'
    assert read(messages.RunEnd, body).outcome == "stopped"


def test_a_large_record_is_the_same_read_elsewhere():
    plan = make_plan(reasons=make_plan().reasons * 300)
    told = messages.RunIntroduction(name="large", plan=plan, profile=make_profile())
    body = told.model_dump_json().encode()
    assert len(body) > SMALL_BYTES
    assert read_json(messages.RunIntroduction, body) == told
    assert read(messages.RunIntroduction, body) == told


# ----------------------------------------------------------------------------------- where


def large() -> bytes:
    return b'{"profiles": [%s' % (b" " * 2 * SMALL_BYTES) + b"{}]}"


def asynchronous(shared, scope):
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(shared.app), base_url=ADDRESS, headers=shared.headers(scope)
    )


def test_while_a_large_body_is_read_others_are_answered(shared, monkeypatch):
    """All of this is on one event loop: were it read there, nobody would set `answered`."""
    answered, begun = threading.Event(), threading.Event()

    def slow(model, body):
        begun.set()
        assert answered.wait(SECONDS)
        raise Refused("too late")

    monkeypatch.setattr("batchwright.service.api.body_route.read", slow)

    async def ask():
        headers = {"content-type": "application/json"}
        async with asynchronous(shared, "read") as client:
            posting = asyncio.create_task(
                client.post("/v1/plans", content=large(), headers=headers)
            )
            assert await asyncio.to_thread(begun.wait, SECONDS)
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/v1/runs")).status_code == 200
            answered.set()
            return await posting

    assert asyncio.run(ask()).json() == {"detail": "too late"}


@pytest.mark.parametrize("scope", [None, "report"])
def test_who_may_not_ask_is_told_so_before_anything_is_read(shared, monkeypatch, scope):
    def read_it(*_):
        pytest.fail("read")

    for name in ("read", "read_json"):
        monkeypatch.setattr(f"batchwright.service.api.body_route.{name}", read_it)
    body = large() if scope else b'{"profiles": [{}]}'
    headers = {"content-type": "application/json"}
    answer = shared.post(scope, "/v1/plans", content=body, headers=headers)
    assert answer.status_code == (403 if scope else 401)


def test_large_bodies_that_are_held_at_once_are_few(shared, monkeypatch):
    """A body that never ends is held until its time is over; of one token so much is taken."""
    monkeypatch.setattr(bodies, "BODY_SECONDS", float(SECONDS))

    async def ask():
        end = asyncio.Event()

        async def endless():
            yield b" " * (8 * 2**20 - 10)
            await end.wait()
            yield b"[]"

        headers = {"content-type": "application/json"}
        async with asynchronous(shared, "read") as client:

            def post(content):
                return client.post("/v1/plans", content=content, headers=headers)

            held = [asyncio.create_task(post(endless())) for _ in range(2)]
            share = held_of(shared.app)
            while share.total() < 15 * 2**20:
                await asyncio.sleep(0.01)
            refused = await post(large())
            small = await post(b"[]")
            end.set()
            return [await one for one in held], refused, small

    held, refused, small = asyncio.run(ask())
    assert (refused.status_code, small.status_code) == (429, 422)
    assert int(refused.headers["retry-after"]) >= 1
    assert [one.status_code for one in held] == [422, 422]
    assert held_of(shared.app).total() == 0
    assert shared.post("read", "/v1/plans", content=large()).status_code == 422


def test_a_body_that_is_late_may_be_sent_again(shared, monkeypatch):
    """Its sender, such as an agent with its plan, would give up after another answer."""
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)

    async def ask():
        async def endless():
            yield b"["
            await asyncio.Event().wait()

        headers = {"content-type": "application/json"}
        async with asynchronous(shared, "read") as client:
            return await client.post("/v1/plans", content=endless(), headers=headers)

    answer = asyncio.run(ask())
    assert ServiceError("late", status=answer.status_code).passing
    assert "did not come within" in answer.json()["detail"]


def held_of(app):
    """What the middleware of an app holds."""
    one = app.middleware_stack
    while not isinstance(one, bodies.Bodies):
        one = getattr(one, "app", None) or one._app
    return one._held


def test_all_together_hold_so_much_and_one_token_half_of_it():
    held = _HeldBytes(100)
    one, same, other = _RequestBytes(held, "a"), _RequestBytes(held, "a"), _RequestBytes(held, "b")
    one.grow(30)
    one.grow(40)
    with pytest.raises(TooMany):
        same.grow(11)
    other.grow(50)
    with pytest.raises(TooMany):
        _RequestBytes(held, "c").grow(11)
    one.give_back()
    one.give_back()
    same.grow(50)
    for share in (same, other):
        share.give_back()
    assert held.total() == 0
    assert not held.of


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "multipart/form-data"])
def test_of_a_strangers_form_a_few_kilobytes_are_read(shared, kind):
    body = b"&" * (bodies.STRANGERS_FORM_BYTES + 1)
    answer = shared.post(None, "/sign-in", content=body, headers={"content-type": kind})
    assert answer.status_code == 413
    assert "sign in before" in answer.text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "x"])
def test_what_is_neither_json_nor_a_file_is_short(shared, kind):
    body = b"x" * (bodies.FORM_BYTES + 1)
    answer = shared.post("submit", "/v1/jobs", content=body, headers={"content-type": kind})
    assert answer.status_code == 413


# --------------------------------------------------------------------------------- processes


def test_work_is_done_in_a_process_that_stays(workers):
    first = workers.call(SECONDS, os.getpid)
    assert first != os.getpid()
    assert workers.call(SECONDS, os.getpid) == first
    assert workers.call(SECONDS, sorted, [3, 1], reverse=True) == [3, 1]


def test_what_takes_too_long_is_ended_and_others_go_on(workers):
    with pytest.raises(Unavailable, match="takes longer than 0 s"):
        workers.call(0.2, time.sleep, SECONDS)
    assert workers.call(SECONDS, abs, -1) == 1


def test_what_takes_too_much_memory_is_refused(workers):
    with pytest.raises(TooLarge, match="more memory than a request may"):
        workers.call(SECONDS, bytearray, 2**30)
    assert workers.call(SECONDS, abs, -1) == 1


def test_a_process_that_has_become_large_is_replaced(workers):
    first = workers.call(SECONDS, os.getpid)
    workers.call(SECONDS, eval, f"setattr(__import__('sys'), 'kept', b'x' * {KEPT_BYTES})")
    assert workers.call(SECONDS, os.getpid) != first


@pytest.mark.parametrize(
    ("number", "problem", "line"),
    [
        (signal.SIGKILL, Unavailable, "being short of memory maybe: come again"),
        (signal.SIGALRM, Unavailable, "the service stood still meanwhile: come again"),
        (signal.SIGABRT, TooLarge, "more memory than a request may"),
    ],
)
def test_a_process_that_is_killed_costs_one_request(workers, number, problem, line):
    pid = workers.call(SECONDS, os.getpid)
    with pytest.raises(problem, match=line):
        workers.call(SECONDS, os.kill, pid, number)
    assert workers.call(SECONDS, abs, -1) == 1
    os.kill(workers.call(SECONDS, os.getpid), signal.SIGKILL)  # while it has nothing to do
    wait_until(lambda: not workers._idle[0].is_running())
    assert workers.call(SECONDS, abs, -1) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_end_that_all_processes_get_breaks_nothing_off(workers, number):
    """So supervisors and terminals do; an agent would hear that its plan is refused, and fail."""
    pid = workers.call(SECONDS, os.getpid)
    workers.call(SECONDS, os.kill, pid, number)
    assert workers.call(SECONDS, os.getpid) == pid


def test_errors_come_back_as_what_they_are(workers):
    with pytest.raises(Refused, match=r"^the body is no JSON"):
        workers.call(SECONDS, read_json, messages.RunEnd, b"{")
    with pytest.raises(RuntimeError, match="invalid literal for int"):
        workers.call(SECONDS, int, "x")


@contextmanager
def busy(workers, callers, folder):
    """So many callers, whose work lasts as long as the block."""
    os.mkfifo(gate := folder / "gate")
    work = (SECONDS, os.open, str(gate), os.O_RDONLY)  # which waits for one that may write
    asked = [threading.Thread(target=workers.call, args=work, daemon=True) for _ in range(callers)]
    for one in asked:
        one.start()
    try:
        yield
    finally:
        writer = os.open(gate, os.O_RDWR)
        for one in asked:
            one.join(SECONDS)
        os.close(writer)


def test_further_callers_are_sent_away(workers, tmp_path):
    with busy(workers, 2, tmp_path):
        wait_until(lambda: not workers._places._value)
        with pytest.raises(TooMany):
            workers.call(SECONDS, abs, -1)
    assert workers.call(SECONDS, abs, -1) == 1


def test_a_caller_whose_turn_does_not_come_is_sent_away(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE_SECONDS", 0.01)
    with busy(workers, 1, tmp_path):
        wait_until(lambda: not workers._turns._value)
        with pytest.raises(TooMany):
            workers.call(SECONDS, abs, -1)


def test_a_process_ends_with_its_service(tmp_path):
    code = (
        "import os, sys, time\n"
        "from batchwright.service.processes import Workers\n"
        "print(Workers(1).call(300, os.getpid), flush=True)\n"
        "time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        pid = int(one.stdout.readline())
        one.kill()
    wait_until(lambda: not runs(pid))


def runs(pid):
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return told.rpartition(")")[2].split()[0] not in "ZX"


# --------------------------------------------------------------------------------- on the wire


def test_small_answers_wait_for_no_acknowledgement():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("pieces", [FREE_PIECES, 3 * FREE_PIECES])
def test_a_body_in_very_small_pieces_is_refused(pieces):
    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with (
        listen("127.0.0.1", 0) as listener,
        answering(app, listener),
        socket.create_connection(listener.getsockname(), timeout=SECONDS) as connection,
    ):
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"1\r\nx\r\n" * pieces + b"0\r\n\r\n")
        told = connection.recv(1000)
    assert told.startswith(b"HTTP/1.1 200" if pieces == FREE_PIECES else b"HTTP/1.1 400")
    if pieces > FREE_PIECES:  # as every other problem is told
        assert b"content-type: application/json" in told.lower()
        assert list(json.loads(told.partition(b"\r\n\r\n")[2])) == ["detail"]


@pytest.mark.parametrize("sent", [0, 60, 100])
def test_a_connection_is_used_again_only_after_a_whole_body(shared, sent, monkeypatch):
    """What comes next on it would be taken for the rest of the body, and never be answered."""
    monkeypatch.setattr(unread, "REST_SECONDS", SECONDS if sent == 100 else 0.05)
    monkeypatch.setattr(unread, "LINGER_SECONDS", 0.1)
    job = "00000000-0000-4000-8000-000000000000"
    told = {"host": "127.0.0.1"} | shared.headers("report")
    upload = {"content-length": "100", "repr-digest": f"sha-256=:{'A' * 43}=:"}
    upload["batchwright-lease"] = job

    def request(first, headers):
        lines = [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([f"{first} HTTP/1.1", *lines, "", ""]).encode()

    with (
        listen("127.0.0.1", 0) as listener,
        answering(shared.app, listener),
        socket.create_connection(listener.getsockname(), timeout=SECONDS) as wire,
    ):
        head = request(f"PUT /v1/jobs/{job}/artifacts/last.pt", told | upload)
        wire.sendall(head + b"x" * sent)
        answer = b""
        while not answer.endswith(b"}"):  # its head may come before its body
            answer += (piece := wire.recv(4096).lower())
            assert piece
        assert answer.startswith(b"http/1.1 404")
        assert (b"connection: close" in answer) == (sent < 100)
        if sent == 100:
            wire.sendall(request("GET /healthz", told))
            assert wire.recv(4096).startswith(b"HTTP/1.1 200")
        else:
            while answer:
                answer = wire.recv(4096)


async def refusing(scope, receive, send):
    length = (b"content-length", b"7")
    await send({"type": "http.response.start", "status": 404, "headers": [length]})
    await send({"type": "http.response.body", "body": b"no room"})


def test_who_sends_a_large_body_to_its_end_gets_the_answer_that_came_before(monkeypatch):
    """As most clients and proxies do. Else the connection is reset while they send."""
    monkeypatch.setattr(unread, "LINGER_SECONDS", SECONDS)
    size, piece = 2**25, bytes(2**20)  # more than the buffers of two sockets
    with (
        listen("127.0.0.1", 0) as listener,
        answering(Unread(refusing), listener),
        socket.create_connection(listener.getsockname(), timeout=SECONDS) as wire,
    ):
        wire.sendall(f"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
        for _ in range(size // len(piece)):
            wire.sendall(piece)
        answer = wire.recv(4096)
        while more := wire.recv(4096):
            answer += more
    assert answer.startswith(b"HTTP/1.1 404")
    assert answer.endswith(b"no room")


def test_a_client_that_asks_before_it_sends_is_refused_without_its_body():
    with (
        listen("127.0.0.1", 0) as listener,
        answering(Unread(refusing), listener),
        socket.create_connection(listener.getsockname(), timeout=SECONDS) as wire,
    ):
        head = b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        wire.sendall(head)
        answer = wire.recv(4096)
        while more := wire.recv(4096):
            answer += more
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"connection: close" in answer.lower()
