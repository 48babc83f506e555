"""Sends a run folder by hand: what a reporter could not send, or a run that never reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from batchwright.client.http import Backoff, Service, ServiceError
from batchwright.client.outbox import METRICS, Lines, Report, new_report, read_report, write_report
from batchwright.client.sending import Sender
from batchwright.errors import FileError

ATTEMPTS = 4  # in a row that come to nothing, before it gives up


def report_to_send(folder: Path, url: str | None) -> Report:
    """What is known of a run's reporting, and where it goes now.

    Args:
        folder: The run folder.
        url: The service; ``None``: where it reported before.

    Raises:
        FileError: The folder holds no run, or never reported anywhere and no service is given.
    """
    if not (folder / "plan.json").exists() or not (folder / METRICS).exists():
        raise FileError(f"{folder} holds no run that has begun: name a run folder")
    report = read_report(folder)
    if report is None or (url is not None and url != report.url):
        if url is None:
            raise FileError(f"{folder} never reported anywhere: name the service with --to URL")
        report = new_report(folder, url)
    if (folder / "summary.json").exists():
        report = report.to(state="finished", error=None)
    return report


def send(folder: Path, report: Report, service: Service, tell: Callable[[str], None]) -> Report:
    """Send all that the service does not have, and how the run ended if that is known.

    Args:
        folder: The run folder.
        report: From `report_to_send`.
        service: Where it goes.
        tell: Takes a line for whoever watches.

    Returns:
        The report then; ``report.json`` holds it too.

    Raises:
        ServiceError: The service cannot be reached for a while, or refuses; what is sent is noted.
        FileError: The folder cannot be read or written.
    """
    sender, backoff = Sender(folder, report, service, tell), Backoff(0.5, 5.0)
    introduced, left = False, ATTEMPTS
    while True:
        try:
            if not introduced:
                sender.introduce()
                introduced = True
            while sender.send_some():
                left = ATTEMPTS
            sender.tell_taken()
            if report.state != "running":
                sender.end(report.state, report.error)
            break
        except ServiceError as error:
            left -= 1
            if not error.passing or not left:
                count = max(0, Lines(folder / METRICS).count() - sender.report.next)
                error.args = (f"{error}; {count} lines are left to send",)
                raise
            time.sleep(backoff.seconds(error))
        finally:
            write_report(folder, sender.report)
    return sender.report
