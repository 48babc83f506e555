"""Starts a reporter beside a run, and ends it with the run; training never waits for it.

    with reported(run_folder, "http://127.0.0.1:8400", tell=print) as reporter:
        ...                       # train; reporter.lines() are the reporter's messages

At the end the reporter gets a few seconds to send what is left. What it cannot send stays in the
run folder, for `batchwright send` or the next time that the run is resumed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchwright.client.http import checked_url, find_token, is_loopback
from batchwright.client.outbox import (
    METRICS,
    Lines,
    new_report,
    read_report,
    seal_of,
    write_report,
)
from batchwright.distributed.worker_processes import Companion
from batchwright.errors import BatchwrightError, Interrupted, NewPlan, one_line, said_by

REPORT_TO = "BATCHWRIGHT_REPORT_TO"  # address of the service, for runs that name none
RUN_NAME = "BATCHWRIGHT_RUN_NAME"  # name of the run, set by an agent
RUN_JOB = "BATCHWRIGHT_RUN_JOB"  # identifier of the run's job, set by an agent
LAST_SECONDS = 5.0  # for what is left at the end of the run
_GRACE_SECONDS = 1.0  # beyond that, before the reporter is killed


def destination(former: Path | None, wanted: str | None) -> str | None:
    """Address of the service that a run reports to; ``None``: the run is not reported.

    Args:
        former: Folder of the run, if it is resumed.
        wanted: Address that the user names; empty: the run is not reported; ``None``: the address
            to which a resumed run was reported before, else that of the environment.

    Raises:
        BatchwrightError: The address is invalid, or there is no token for it.
    """
    set_to = os.environ.get(REPORT_TO)
    if set_to and wanted is None:
        with said_by(REPORT_TO):
            checked_url(set_to)
    if wanted is None and former is not None:
        wanted = _remembered(former, set_to)
    if wanted is None:
        wanted = set_to
    if not wanted:
        return None
    url = checked_url(wanted)
    if find_token(url) is None and not is_loopback(url):  # a service here may leave one later
        raise BatchwrightError(
            f"there is no token to report to {url} with: set BATCHWRIGHT_TOKEN to one that "
            "`batchwright token create` made there"
        )
    return url


def _remembered(folder: Path, set_to: str | None) -> str | None:
    """Address to which the run of a folder was reported before; ``set_to`` if it was not reported.

    Raises:
        BatchwrightError: It was reported with another token than this user's.
    """
    try:
        report = read_report(folder)
    except BatchwrightError:
        return None
    if report is None or (set_to and checked_url(set_to) == report.url):
        return set_to
    if report.seal != seal_of(report.url, find_token(report.url)):
        raise BatchwrightError(
            f"{folder} reported to {report.url} with another token than yours: say --report-to "
            f"{shlex.quote(report.url)} if yours is meant for it, or --report-to '' to report "
            "nowhere"
        )
    return report.url


class ReporterProcess:
    """The reporter of a run, as a process. A failure to start it is told, and the run goes on.

    Args:
        folder: The run folder, with the plan in it.
        url: Address of the service.
        follow_advice: Whether training takes a new plan at the end of an epoch.
    """

    def __init__(self, folder: Path, url: str, *, follow_advice: bool = False) -> None:
        self._folder = folder
        self._own: deque[str] = deque()  # messages of this object, beside the reporter's
        self._process: Companion | None = None
        try:
            report = read_report(folder)
            if report is None or report.url != url:
                job = os.environ.get(RUN_JOB) or None
                report = new_report(folder, url, name=os.environ.get(RUN_NAME, ""), job=job)
            report = report.to(state="running", error=None, told=False)
            seal = seal_of(url, find_token(url))
            self.report = report.to(follows_advice=follow_advice, seal=seal)
            write_report(folder, self.report)
            self._process = Companion(
                "batchwright.client.reporter",
                [str(folder)],
                environment={**os.environ, "OMP_NUM_THREADS": "1"},
                log=subprocess.DEVNULL,
            )
        except (BatchwrightError, OSError) as error:  # a run is worth more than its report
            self._own.append(f"this run is not reported: {one_line(error)}")
            return
        self._own.append(f"reporting to {url}/runs/{self.report.run}")

    def lines(self) -> Iterator[str]:
        """Messages since this was called last, for a person."""
        while self._own:
            yield self._own.popleft()
        if self._process is not None:
            yield from self._process.lines()

    def end(self, outcome: str, error: str | None) -> None:
        """Give the reporter a few seconds to send what is left, and how the run ended.

        Args:
            outcome: ``finished``, ``stopped`` or ``failed``.
            error: The error's line as the user sees it, if the run failed.
        """
        if self._process is None:
            return
        self._process.say({"outcome": outcome, "error": error, "seconds": LAST_SECONDS})
        with suppress(KeyboardInterrupt):  # Ctrl-C ends the waiting: the run itself has ended
            self._process.wait(LAST_SECONDS + _GRACE_SECONDS)
        self._process.close()
        self._own.extend(self._process.lines())
        self._process = None
        with suppress(BatchwrightError):
            report = read_report(self._folder)
            if report is None or report.told:
                return
            if report.state != outcome:  # the reporter had no time to write it, or had ended
                report = report.to(state=outcome, error=error)
                write_report(self._folder, report)
            left = max(0, Lines(self._folder / METRICS).count() - report.next)
            what = f"{left} line{'s' if left != 1 else ''}" if left else "the end"
            self._own.append(
                f"{what} of this run could not be sent to {report.url} yet; "
                f"`{shlex.join(['batchwright', 'send', str(self._folder)])}` sends what is left"
            )


@contextmanager
def reported(
    folder: Path,
    url: str | None,
    *,
    follow_advice: bool = False,
    tell: Callable[[str], None],
) -> Iterator[ReporterProcess | None]:
    """Inside, the run is reported; at the end the reporter sends how the run ended.

    Args:
        folder: The run folder, with the plan in it.
        url: Address of the service; ``None``: the run is not reported.
        follow_advice: Whether training takes a new plan at the end of an epoch.
        tell: Called with each message that is left after the end.
    """
    if url is None:
        yield None
        return
    reporter = ReporterProcess(folder, url, follow_advice=follow_advice)
    ending: BaseException | None = None
    try:
        yield reporter
    except BaseException as error:
        ending = error
        raise
    finally:
        reporter.end(*outcome_of(ending))
        for line in reporter.lines():
            tell(line)


def outcome_of(error: BaseException | None) -> tuple[str, str | None]:
    """How a run ended: its outcome, and the error's line if it failed.

    Args:
        error: The exception that ended the run; `None`: none did.
    """
    if error is None:
        return "finished", None
    if isinstance(error, Interrupted | NewPlan | KeyboardInterrupt):
        return "stopped", None
    return "failed", one_line(error)
