"""Connections that have not proved yet that they know the key."""

from __future__ import annotations

import threading
import time

from batchwright.training.parameter_server.transport import Transport

# A worker proves itself in a few milliseconds, over a slow network or on a busy machine in a second
# or two. Whoever takes longer is no worker but a port scanner, say. The job's timeout would be too
# long for it, since that allows for a worker that computes.
MOST = 64  # at once: each has a thread
SECONDS = 10.0  # for each
CROWDED_SECONDS = 3.0  # for each, where others have to wait for it
_POLL_SECONDS = 0.1


class Strangers:
    """Keeps them few, and each of them for a short time.

    So however many there are, a worker that connects waits for one round of them at most, which is
    `CROWDED_SECONDS`.
    """

    def __init__(self) -> None:
        self._since: dict[Transport, float] = {}  # when each came, the first first
        self._changed = threading.Condition()

    def admit(self, link: Transport) -> None:
        """Another has come; waits until there is room for it."""
        with self._changed:
            while len(self._since) >= MOST:
                self.cut_late(CROWDED_SECONDS)
                self._changed.wait(_POLL_SECONDS)
            self._since[link] = time.monotonic()

    def remove(self, link: Transport) -> None:
        """This one has proved itself, or is gone."""
        with self._changed:
            self._since.pop(link, None)
            self._changed.notify_all()

    def cut_late(self, seconds: float) -> None:
        """End those that came more than so many seconds ago; their threads then remove them."""
        with self._changed:
            now = time.monotonic()
            for link in [one for one, since in self._since.items() if now - since >= seconds]:
                link.cut()
