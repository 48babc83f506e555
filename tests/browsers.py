"""A real browser against a real server, both ended by the test that began them."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from batchwright.service.app import create_app
from batchwright.service.settings import Limits, Settings
from batchwright.service.store import Store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 20_000  # ms for anything that a page is to show


class Server:
    """The service on a port of its own; it may be stopped and started again."""

    def __init__(self, database: str) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        limits = Limits(requests_per_second=1000.0, burst=10_000)
        self.settings = Settings(database=database, port=self.port, limits=limits)
        self.address = f"http://127.0.0.1:{self.port}"
        self.store = Store.open(self.settings)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        app = create_app(self.store, self.settings)
        config = uvicorn.Config(
            app, port=self.port, log_level="error", timeout_graceful_shutdown=2, access_log=False
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until = time.monotonic() + 300
        while not self._server.started:
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.02)

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(300)
            self._server = self._thread = None


@contextmanager
def serving(database: str) -> Iterator[Server]:
    """A server that is stopped at the end, whatever happens."""
    server = Server(database)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        server.store.close()


@contextmanager
def browsing(**options: Any) -> Iterator[Any]:
    """A page of a headless Chromium; what it complains of in its console is in ``page.complaints``.

    Skips where Playwright or Chromium is missing.
    """
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install playwright"
    )
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = browser.new_context(**options).new_page()
            page.set_default_timeout(PATIENCE)
            page.complaints = complaints = []
            page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            yield page
        finally:
            browser.close()


def violations(page: Any) -> list[str]:
    """What axe-core finds on a page, as ``impact rule: elements``; all impacts."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright",
        reason="needs axe-core: pip install axe-playwright-python",
    )
    found = axe.Axe().run(page).response["violations"]
    return [
        f"{one['impact']} {one['id']}: {[node['target'] for node in one['nodes']][:4]}"
        for one in found
    ]
