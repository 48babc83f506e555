"""Requests to a service: addresses, tokens, and one line for whatever goes wrong."""

from __future__ import annotations

import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from batchwright.client import http as tokens
from batchwright.client.http import (
    Backoff,
    Service,
    ServiceError,
    checked_url,
    find_token,
    is_loopback,
)
from batchwright.errors import BatchwrightError, FileError
from clients import remote


@pytest.mark.parametrize(
    ("url", "checked"),
    [
        ("http://127.0.0.1:8400", "http://127.0.0.1:8400"),
        ("https://train.example/batch/ ", "https://train.example/batch"),
        ("http://[::1]:8400/", "http://[::1]:8400"),
    ],
)
def test_an_address_is_kept_without_its_last_slash(url, checked):
    assert checked_url(url) == checked


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "127.0.0.1:8400",
            "ftp://a",
            "http://",
            "http://a:99999",
            "http://a?b=c",
            "http://a\x00b",
        ),
        *("http://127.0.0.999:8400", "http://a..b", f"http://{'a' * 64}.org"),
    ],
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(BatchwrightError, match="is no address of a service"):
        checked_url(url)


def test_a_password_in_an_address_would_be_kept_and_is_refused():
    with pytest.raises(BatchwrightError, match="give the token in BATCHWRIGHT_TOKEN") as refused:
        checked_url("http://me:secret@train.example")
    assert "secret" not in str(refused.value)


def test_only_addresses_of_this_machine_are_loopback():
    assert all(map(is_loopback, ["http://localhost:1", "http://127.9.9.9", "http://[::1]:8"]))
    assert not any(map(is_loopback, ["http://127.evil.example", "http://10.0.0.1", "http://[::2]"]))


def test_a_token_comes_from_its_file_then_the_environment_then_this_machine(tmp_path, monkeypatch):
    local, given = tmp_path / "local-token", tmp_path / "given"
    monkeypatch.setattr(tokens, "local_token_path", lambda: local)
    monkeypatch.delenv("BATCHWRIGHT_TOKEN", raising=False)
    here, there = "http://localhost:8400", "https://train.example"
    assert find_token(here) is None
    local.write_text("bw_local\n")
    assert (find_token(here), find_token(there)) == ("bw_local", None)
    monkeypatch.setenv("BATCHWRIGHT_TOKEN", " bw_set ")
    assert find_token(here) == find_token(there) == "bw_set"
    given.write_text("bw_given\n")
    assert find_token(there, given) == "bw_given"
    given.write_text("two words")
    with pytest.raises(FileError, match="holds no token"):
        find_token(there, given)
    with pytest.raises(FileError, match="cannot read the token"):
        find_token(there, tmp_path / "nowhere")
    for wrong in ("two words", "bw_\u00e4"):  # a header of HTTP takes neither
        monkeypatch.setenv("BATCHWRIGHT_TOKEN", wrong)
        with pytest.raises(FileError, match="BATCHWRIGHT_TOKEN holds no token: `batchwright") as no:
            find_token(there)
        assert wrong not in str(no.value)


def test_waits_grow_up_to_a_limit_and_begin_again():
    backoff = Backoff(1.0, 8.0)
    waits = [backoff.seconds() for _ in range(6)]
    for wait, most in zip(waits, (1, 2, 4, 8, 8, 8), strict=True):
        assert most / 2 <= wait <= most
    backoff.reset()
    assert backoff.seconds() <= 1
    asked = ServiceError("later", status=429, retry_seconds=5.0)
    assert backoff.seconds(asked) >= 5


@pytest.mark.parametrize(
    ("url", "needed"), [("http://127.0.0.1:8400", 0), ("https://127.0.0.1", 1), ("http://a.b", 1)]
)
def test_certificates_are_read_only_where_one_may_be_shown(url, needed, monkeypatch):
    """Elsewhere by a proxy whose own address is of https."""
    usual, made = ssl.create_default_context, []
    monkeypatch.setattr(
        ssl, "create_default_context", lambda **how: made.append(how) or usual(**how)
    )
    Service(url, None).close()
    assert len(made) == needed


def test_nobody_there_is_said_in_a_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Service(url, "bw_x") as one, pytest.raises(ServiceError) as refused:
            one.get("/v1/runs")
    assert str(refused.value).startswith(f"cannot reach {url} (Connection refused): is `batchw")
    assert refused.value.passing
    assert not refused.value.sent


def test_refusals_are_passed_on_and_those_that_pass_are_known(service):
    assert remote(service, "read").get("/v1/runs") == []
    with pytest.raises(ServiceError, match="this token may not do this") as refused:
        remote(service, "report").get("/v1/runs")
    assert (refused.value.status, refused.value.passing) == (403, False)
    with pytest.raises(ServiceError, match="asked for 503") as refused:
        remote(service, "read", ["503"]).get("/v1/runs")
    assert refused.value.passing
    service.store.tokens.revoke("read")
    with pytest.raises(ServiceError, match="set BATCHWRIGHT_TOKEN"):
        remote(service, "read").get("/v1/runs")


class Other(BaseHTTPRequestHandler):
    """A web server that is something else."""

    def do_GET(self):
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "http://evil.example/")
        elif self.path in ("/nowhere", "/closed"):
            self.send_response(404 if self.path == "/nowhere" else 403)
        else:
            self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}" if self.path == "/json" else b"<html>welcome</html>")

    def log_message(self, *_):
        pass


def test_another_program_at_the_address_is_recognized_and_no_redirect_is_followed():
    server = HTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with Service(f"http://127.0.0.1:{server.server_port}", "bw_x") as one:
            for ask in (one.get, lambda path: list(one.get_file(path))):
                for path in ("/here", "/away", "/nowhere", "/closed"):
                    with pytest.raises(ServiceError, match="does not answer as `batchw") as refused:
                        ask(path)
                    assert (refused.value.status, refused.value.by_another) == (0, True)
                    assert refused.value.passing  # it may be a proxy whose service is away
            with pytest.raises(ServiceError, match="does not answer as `batchw"):
                list(one.get_file("/json"))
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
