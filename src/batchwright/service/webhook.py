"""The webhook: posts notices of problems to an address of the operator's, each signed.

    POST URL      Batchwright-Event: job.failed
                  Batchwright-Timestamp: 1790000000
                  Batchwright-Signature: sha256=HEX     of "TIMESTAMP." and the body
    {"id": "...", "event": "job.failed", ...}           a `records.service.Notice`

A notice is sent again until an answer has a status from 200 to 299. The address is the operator's
alone: nothing that clients send changes it, and a redirect counts as a refusal, so nobody leads
these requests into a private network. The address itself may be a private one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from batchwright.errors import BatchwrightError, one_line
from batchwright.records.service import Notice
from batchwright.service.store import Store

log = logging.getLogger("batchwright.service")

SECRET = "BATCHWRIGHT_WEBHOOK_SECRET"  # noqa: S105 - the name of a variable
LOOK_SECONDS = 5.0  # between two looks for events
ANSWER_SECONDS = 10.0  # for an answer

Post = Callable[[str, bytes, dict[str, str]], int]
"""Posts a body with headers to an address, and returns the status of the answer."""


def checked_webhook(url: str | None) -> str | None:
    """The address of a webhook, checked; `None` where there is none.

    Raises:
        BatchwrightError: The address is invalid.
    """
    if not url:
        return None
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        whole = False
    if not whole or not url.isprintable() or " " in url:
        raise BatchwrightError(
            "--webhook, or BATCHWRIGHT_WEBHOOK, is no address: write it as "
            "https://hooks.example.org/batchwright"
        )  # not in its own words: it may hold a secret
    return url


def signed(body: bytes, timestamp: int, secret: str) -> str:
    """The signature of a request, which its receiver computes too and compares."""
    text = str(timestamp).encode() + b"." + body
    return f"sha256={hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()}"


class Webhook:
    """Finds events and sends notices, in a thread of its own, for which no request waits.

    Args:
        store: The store, whose settings have the address.
        post: Sends a request; tests have their own.
    """

    def __init__(self, store: Store, post: Post | None = None) -> None:
        self._store, self._post = store, post or _post
        self._url = store.settings.webhook
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)

    def start(self) -> None:
        """Start the thread, if there is a webhook."""
        if self._url is not None:
            self._thread.start()

    def close(self) -> None:
        """End the thread; notices that are left are sent after the next start."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(ANSWER_SECONDS)

    def turn(self) -> None:
        """Look for events once, and send the notices that are due."""
        self._store.notices.look()
        for due in self._store.notices.due():
            why = self._send(due.notice)
            if why:
                again = self._store.notices.not_sent(due)
                fields = {"event_told": due.notice.event, "why": why, "given_up": not again}
                log.warning("the webhook took no notice", extra={"fields": fields})
            else:
                self._store.notices.sent(due.key)
            if self._closed.is_set():
                return

    def _work(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            try:
                self.turn()
            except Exception as error:
                log.error("the webhook failed", exc_info=error)

    def _send(self, notice: Notice) -> str:
        """Send a notice; returns why the webhook did not take it, empty if it did."""
        body, timestamp = notice.model_dump_json().encode(), int(self._store.clock())
        headers = {
            "Content-Type": "application/json",
            "Batchwright-Event": notice.event,
            "Batchwright-Timestamp": str(timestamp),
        }
        secret = self._store.settings.webhook_secret
        if secret is not None:
            headers["Batchwright-Signature"] = signed(body, timestamp, secret.get_secret_value())
        try:
            status = self._post(str(self._url), body, headers)
        except Exception as error:  # noqa: BLE001 - whatever it is, the notice is tried again
            return type(error).__name__ if not isinstance(error, OSError) else one_line(error)
        return "" if 200 <= status < 300 else f"it answered {status}"


def _post(url: str, body: bytes, headers: dict[str, str]) -> int:
    import httpx

    with (
        httpx.Client(follow_redirects=False, timeout=ANSWER_SECONDS) as client,
        client.stream("POST", url, content=body, headers=headers) as answer,
    ):
        return answer.status_code  # the body is not read
