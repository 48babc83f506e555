"""Starts worker processes under torchrun's elastic agent and stays with them until they end.

    this process --> agent (python -m batchwright.agent) --> workers (one per rank)

The agent and the workers each die with their parent. Signals reach this process only; it passes
them on, so that the workers can write a checkpoint before they end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from batchwright.errors import (
    BatchwrightError,
    DeadlineReached,
    Interrupted,
    JobError,
    WorkerError,
)
from batchwright.processes import PARENT_PID, STARTED, spinning_shortly
from batchwright.reports import (
    AGENT_REPORT,
    ERRORS_FOLDER,
    RESTARTS_LOG,
    forget_reports,
    killed,
    name_of,
    reports_in,
)

POLL_SECONDS = 0.1
GRACE_SECONDS = 60.0
"""From a stop signal until workers are killed: for the step in progress and a checkpoint."""

_AGENT_SECONDS = 10.0  # more, until their agent is
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_workers(
    module: str,
    arguments: Sequence[str],
    *,
    workers: int,
    threads: int,
    folder: Path,
    port: int = 0,
    restarts: int = 0,
    poll: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Run ``python -m module arguments`` in every worker until all have ended well.

    After one was killed, or fell silent, the agent starts all of them again; an error of a worker's
    own ends them at once, as it would only come again.

    Args:
        module: A module whose main calls `processes.worker_main`.
        arguments: Its command line.
        workers: Number of processes on this machine.
        threads: Compute threads of each.
        folder: Where logs and error reports go; it exists.
        port: Rendezvous port on this machine; 0: any free one.
        restarts: How often the agent may start all of them again.
        poll: Called about ten times a second while they run.
        tell: Takes the line that says why they were started again; unset: standard error.

    Raises:
        WorkerError: A worker died once more than ``restarts``, or ended by its own error, which is
            the message.
        BatchwrightError: A worker refused its input.
        Interrupted: A stop signal came; the workers have ended.
        JobError: The port is in use.
    """
    refuse_busy_port(port)
    forget_reports(folder)
    tell_restarts = _teller(folder / RESTARTS_LOG, tell or _to_stderr)

    def look() -> None:
        tell_restarts()
        poll()

    specification = {
        "module": module,
        "arguments": list(arguments),
        "workers": workers,
        "port": port,
        "restarts": restarts,
        "logs": str(folder),
        "grace": int(GRACE_SECONDS),
    }
    environment = {
        **spinning_shortly(os.environ),
        "OMP_NUM_THREADS": str(threads),
        ERRORS_FOLDER: str(folder),
        PARENT_PID: str(os.getpid()),
        STARTED: str(time.time()),
    }
    with (folder / "agent.log").open("wb") as log, noting_signals() as noted:
        agent = subprocess.Popen(
            [sys.executable, "-m", "batchwright.agent", json.dumps(specification)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
        )
        lost = _wait(agent, look, noted)
    if noted:
        raise Interrupted(noted[0], f"stopped by signal {noted[0]}{lost}")
    if agent.returncode:
        ended = folder / AGENT_REPORT
        codes = json.loads(ended.read_text(encoding="utf-8")) if ended.exists() else {}
        raise_failure(folder, {int(rank): code for rank, code in codes.items()})


def _teller(path: Path, tell: Callable[[str], None]) -> Callable[[], None]:
    """A function that tells the lines of a file, each once."""
    told = 0

    def tell_new() -> None:
        nonlocal told
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        for line in lines[told:]:
            tell(line)
        told = len(lines)

    return tell_new


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - a caller without a console of its own


def _wait(agent: subprocess.Popen[bytes], poll: Callable[[], None], noted: list[int]) -> str:
    """Until the workers have ended; returns what to add to the message of a stop."""
    told: float | None = None
    waited = 0.0
    try:
        while agent.poll() is None:
            poll()
            if noted and told is None:
                agent.terminate()
                told = time.monotonic()
            waited = 0.0 if told is None else time.monotonic() - told
            if waited > GRACE_SECONDS + _AGENT_SECONDS or len(noted) > 1:
                agent.kill()
            time.sleep(POLL_SECONDS)
        poll()
    finally:
        if agent.poll() is None:
            agent.kill()
            agent.wait()
    if len(noted) < 2 and waited < GRACE_SECONDS:
        return ""
    why = "a second one came" if len(noted) > 1 else f"{GRACE_SECONDS:.0f} s had passed"
    return f", and killed when {why}: what was done since the last checkpoint is lost"


@contextmanager
def noting_signals() -> Iterator[list[int]]:
    """Inside, stop signals are noted in the list instead of ending this process.

    Outside the main thread nothing is noted: there the caller handles signals.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        noted.append(number)

    try:
        former = {number: signal.signal(number, note) for number in _SIGNALS}
    except ValueError:  # not the main thread
        yield noted
        return
    try:
        yield noted
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def refuse_busy_port(port: int) -> None:
    """Raise `JobError` if ``port`` on this machine is taken; 0 stands for any free one."""
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except OSError as error:
            raise JobError(
                f"port={port} cannot be used ({error.strerror}): choose another, or port=0 for "
                "any free one"
            ) from None


def raise_failure(folder: Path, codes: Mapping[int, int]) -> NoReturn:
    """Raise what really went wrong: a killed worker first, then the first own error of a worker.

    Args:
        folder: Where the workers left reports and logs.
        codes: Exit code of each worker that failed, by rank; negative: killed by that signal.
    """
    for rank, name in killed(codes):
        raise WorkerError(
            f"{name_of(rank)} was killed by {name}"
            + (" (out of memory?)" if name == "SIGKILL" else "")
            + f"; logs are in {folder}"
        )
    reports = reports_in(folder)
    if reports:
        first = reports[0]
        if first["exit_code"] == DeadlineReached.exit_code:
            raise DeadlineReached(first["message"])
        kind = BatchwrightError if first["exit_code"] == 2 else WorkerError
        prefix = "" if first["exit_code"] == 2 else f"{name_of(first['rank'])}: "
        raise kind(prefix + first["message"])
    last = last_line(folder)
    raise WorkerError(f"the workers ended: {last}; logs are in {folder}")


def last_line(folder: Path) -> str:
    """What the processes whose logs are in a folder printed last."""
    for path in [*sorted(folder.glob("**/stderr.log")), *folder.glob("*.log")]:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        if written:
            return written[-1]
    return "no output"
