"""The reporter: a process beside a training, which reports the run while it goes on.

    python -m batchwright.client.reporter RUN_FOLDER

`client.reporter_process` starts it. It reads what training writes into the run folder and sends it
to the service, at a low priority; training never waits for it. The order to finish arrives on
standard input, which ends with the process that trains; messages for a person are lines on
standard output.
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
BATCH_SECONDS = 0.5  # for which a line waits for others, at most
ALIVE_SECONDS = 10.0  # without a request, after which the service is told that the run goes on
KEEP_SECONDS = 2.0  # between two writes of report.json
LAST_SECONDS = 5.0  # to send what is left, once the training process is gone
NICENESS = 10


class Order(NamedTuple):
    """The order to finish within some seconds."""

    outcome: str  # how the run ended; empty: not known
    error: str | None  # the error's line as the user saw it, if the run failed
    seconds: float


class Reporter:
    """Sends a run until it is ordered to finish.

    Args:
        folder: The run folder, with ``report.json``.
        orders: Queue in which the order arrives.
        out: Stream that takes lines for a person.

    Raises:
        FileError: ``report.json`` cannot be read.
        BatchwrightError: There is no ``report.json``.
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
        self._kept = 0.0  # when report.json was written last

    def run(self) -> bool:
        """Send until the order to finish is carried out, or its time is up.

        Returns:
            Whether all was sent.
        """
        end = float("inf")
        wait: float | None = 0.0
        while wait is not None:
            if self._order is not None:
                time.sleep(wait)
            else:
                with suppress(queue.Empty):
                    self._order = self._orders.get(timeout=wait)
                    end = time.monotonic() + self._order.seconds
            if time.monotonic() >= end:
                break
            wait = self._turn_safely()
            if wait is not None and self._order is not None:
                wait = max(0.0, min(wait, 1.0, end - time.monotonic()))
        self._keep()
        return wait is None

    def _turn_safely(self) -> float | None:
        """Take a turn; an error is told once. Returns the seconds until the next turn; ``None`` if
        nothing is left to do.
        """
        try:
            wait = self._turn()
        except (BatchwrightError, OSError, ValueError) as error:
            refusal = error if isinstance(error, ServiceError) else None
            if refusal is not None and refusal.status in (401, 404):
                # Another token is needed, or the service has deleted the run: begin anew.
                self._introduced = False
                self._close()
            text = one_line(error)
            if text != self._problem:
                self._problem = text
                self._tell(f"{text}; training goes on, and what is not sent is sent later")
            return self._backoff.seconds(refusal)
        self._backoff.reset()
        if self._problem:
            self._problem = ""
            self._tell("the service takes records again")
        return wait

    def _turn(self) -> float | None:
        """Introduce the run, send lines and advice, and its end, as each is due."""
        sender = self._open()
        if not self._introduced:
            sender.introduce()
            sender.report = sender.report.to(seal=self._seal)
            self._introduced = True
        now = time.monotonic()
        if sender.waiting and self._since is None:
            self._since = now
        due = self._since is not None and now - self._since >= BATCH_SECONDS
        if due or (self._order is not None and sender.waiting):
            more = sender.send_some()
            self._keep_sometimes()
            if more:
                return 0.0
            self._since = None
        if self._order is not None:
            sender.report_taken_advice()  # no more is fetched, as nobody would take it
            if self._order.outcome:
                sender.end(self._order.outcome, self._order.error)
            return None
        if now - sender.last_contact >= ALIVE_SECONDS:
            sender.alive()
        sender.exchange_advice()
        self._keep_sometimes()
        return LOOK_SECONDS

    # ------------------------------------------------------------------------------------ in here

    def _open(self) -> Sender:
        """The sender, with a token that is looked up when it is opened."""
        if self._sender is None:
            url, token = self._report.url, find_token(self._report.url)
            self._seal, self._service = seal_of(url, token), Service(url, token)
            self._sender = Sender(self._folder, self._report, self._service, self._tell)
        return self._sender

    def _close(self) -> None:
        """Close the connection: the next turn looks up the token anew."""
        if self._sender is not None:
            self._report, self._sender = self._sender.report, None
        if self._service is not None:
            self._service.close()
            self._service = None

    def _keep_sometimes(self) -> None:
        if self._order is not None or time.monotonic() - self._kept >= KEEP_SECONDS:
            self._keep()

    def _keep(self) -> None:
        """Write report.json; the service knows what it has, so losing the file costs nothing."""
        if self._sender is not None:
            self._report = self._sender.report
        if self._order is not None and self._order.outcome:
            state = self._order.outcome
            self._report = self._report.to(state=state, error=self._order.error)
        with suppress(BatchwrightError):
            write_report(self._folder, self._report)
        self._kept = time.monotonic()

    def _tell(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            print(text, file=self._out, flush=True)


def start_listening() -> queue.Queue[Order]:
    """Lower this process's priority, and have a thread read the order to finish from standard
    input.

    Returns:
        The queue in which the order arrives.
    """
    with suppress(OSError):
        os.nice(NICENESS)
    orders: queue.Queue[Order] = queue.Queue()
    threading.Thread(target=listen, args=(orders, sys.stdin.buffer), daemon=True).start()
    return orders


def listen(orders: queue.Queue[Order], source: IO[bytes]) -> None:
    """Put the order that ``source`` brings into a queue. If ``source`` ends without an order, the
    training process is gone.
    """
    for line in source:
        with suppress(ValueError, KeyError, TypeError):
            values: dict[str, Any] = json.loads(line)
            orders.put(Order(values["outcome"], values["error"], float(values["seconds"])))
            return
    orders.put(Order("", None, LAST_SECONDS))


def _main() -> None:
    try:
        done = Reporter(Path(sys.argv[1]), start_listening(), sys.stdout).run()
    except BatchwrightError as error:
        print(one_line(error), flush=True)
        sys.exit(error.exit_code)
    os._exit(0 if done else 1)  # a thread still reads standard input


if __name__ == "__main__":
    _main()
