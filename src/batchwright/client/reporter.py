"""Reports a run while it goes: a process of its own, beside the training.

    python -m batchwright.client.reporter RUN_FOLDER

started by `client.reporter_process`. It reads what training writes into the run folder and sends
it on, at a low priority; training never waits for it. Standard input brings the order to finish, or
ends with the process that trains; what a person should know goes to standard output, a line each.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from batchwright.client.http import Backoff, Service, ServiceError, find_token
from batchwright.client.outbox import read_report, seal_of, write_report
from batchwright.client.sending import Sender
from batchwright.errors import BatchwrightError, one_line

LOOK_SECONDS = 0.2  # between two looks at the run folder
BATCH_SECONDS = 0.5  # a line waits so long for others, at most
ALIVE_SECONDS = 10.0  # without a word; then a sign of life
KEEP_SECONDS = 2.0  # between two notes of how far it is
LAST_SECONDS = 5.0  # to send what is left, once the training process is gone
NICENESS = 10


class Order(NamedTuple):
    """To come to an end within so many seconds."""

    outcome: str  # how the run ended; empty: nobody knows
    error: str | None  # the line that the user saw, if it failed
    seconds: float


class Reporter:
    """Sends until it is ordered to finish.

    Args:
        folder: The run folder, with ``report.json``.
        orders: Brings the order.
        out: Takes lines for a person.

    Raises:
        FileError: The folder holds no report.
    """

    def __init__(self, folder: Path, orders: queue.Queue[Order], out: IO[str]) -> None:
        self._folder, self._orders, self._out = folder, orders, out
        report = read_report(folder)
        if report is None:
            raise BatchwrightError(f"{folder} reports nowhere")
        self._service: Service | None = None
        self._sender: Sender | None = None
        self._report = report
        self._order: Order | None = None
        self._introduced = False
        self._backoff = Backoff()
        self._problem = self._seal = ""
        self._since: float | None = None  # when the oldest line that waits was seen
        self._kept = 0.0

    def run(self) -> bool:
        """Until all is sent after the order to finish, or its time is up; returns which."""
        end = float("inf")
        wait: float | None = 0.0
        while wait is not None:
            order = self._ordered(wait)
            if order is not None:
                self._order, end = order, time.monotonic() + order.seconds
            if time.monotonic() >= end:
                break
            wait = self._turn_safely()
            if wait is not None and self._order is not None:
                wait = max(0.0, min(wait, 1.0, end - time.monotonic()))
        self._keep()
        return wait is None

    def _ordered(self, seconds: float) -> Order | None:
        """The order, should it come within so many seconds."""
        if self._order is not None:
            time.sleep(seconds)
            return None
        with suppress(queue.Empty):
            return self._orders.get(timeout=seconds) if seconds else self._orders.get_nowait()
        return None

    def _turn_safely(self) -> float | None:
        """One turn; whatever goes wrong is told once, and tried again later."""
        try:
            wait = self._turn()
        except ServiceError as error:
            if error.status in (401, 404):  # another token, or a run that it has forgotten
                self._introduced = False
                self._close()
            self._tell_problem(error)
            return self._backoff.seconds(error)
        except (BatchwrightError, OSError, ValueError) as error:
            self._tell_problem(error)
            return self._backoff.seconds()
        self._backoff.reset()
        if self._problem:
            self._problem = ""
            self._tell("the service takes records again")
        return wait

    def _turn(self) -> float | None:
        """Do what is due; returns how long to wait then, or ``None`` if nothing is left to do."""
        sender = self._opened()
        if not self._introduced:
            sender.introduce()
            sender.report = sender.report.to(seal=self._seal)
            self._introduced = True
        now = time.monotonic()
        if sender.waiting and self._since is None:
            self._since = now
        ripe = self._since is not None and now - self._since >= BATCH_SECONDS
        if ripe or (self._order is not None and sender.waiting):
            more = sender.send_some()
            self._keep_sometimes()
            if more:
                return 0.0
            self._since = None
        sender.exchange_advice()
        if self._order is not None:
            if self._order.outcome:
                sender.end(self._order.outcome, self._order.error)
            return None
        if now - sender.heard >= ALIVE_SECONDS:
            sender.alive()
        self._keep_sometimes()
        return LOOK_SECONDS

    # ------------------------------------------------------------------------------------ in here

    def _opened(self) -> Sender:
        if self._sender is None:
            url, token = self._report.url, find_token(self._report.url)
            self._seal, self._service = seal_of(url, token), Service(url, token)
            self._sender = Sender(self._folder, self._report, self._service, self._tell)
        return self._sender

    def _close(self) -> None:
        """The next turn begins with a token that is looked for anew."""
        if self._sender is not None:
            self._report, self._sender = self._sender.report, None
        if self._service is not None:
            self._service.close()
            self._service = None

    def _keep_sometimes(self) -> None:
        if self._order is not None or time.monotonic() - self._kept >= KEEP_SECONDS:
            self._keep()

    def _keep(self) -> None:
        """Note how far it is; the service knows better, so a note that is lost is no loss."""
        if self._sender is not None:
            self._report = self._sender.report
        if self._order is not None and self._order.outcome:
            state = self._order.outcome
            self._report = self._report.to(state=state, error=self._order.error)
        with suppress(BatchwrightError):
            write_report(self._folder, self._report)
        self._kept = time.monotonic()

    def _tell_problem(self, error: Exception) -> None:
        text = one_line(error)
        if text != self._problem:
            self._problem = text
            self._tell(f"{text}; training goes on, and what is not sent is sent later")

    def _tell(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            print(text, file=self._out, flush=True)


def listen(orders: queue.Queue[Order], source: IO[bytes]) -> None:
    """Hand on the order on standard input; its end without one means that training is gone."""
    for line in source:
        with suppress(ValueError, KeyError, TypeError):
            values: dict[str, Any] = json.loads(line)
            orders.put(Order(values["outcome"], values["error"], float(values["seconds"])))
            return
    orders.put(Order("", None, LAST_SECONDS))


def _main() -> None:
    with suppress(OSError):
        os.nice(NICENESS)
    orders: queue.Queue[Order] = queue.Queue()
    source = sys.stdin.buffer
    threading.Thread(target=listen, args=(orders, source), daemon=True).start()
    try:
        done = Reporter(Path(sys.argv[1]), orders, sys.stdout).run()
    except BatchwrightError as error:
        print(one_line(error), flush=True)
        sys.exit(error.exit_code)
    os._exit(0 if done else 1)  # a thread still reads standard input


if __name__ == "__main__":
    _main()
