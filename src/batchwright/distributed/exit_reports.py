"""Reports that workers leave in the launcher's folder about how they ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from batchwright.errors import (
    BatchwrightError,
    DeadlineReached,
    FileError,
    LostWorkerError,
    WorkerError,
    stopped_by,
)
from batchwright.storage.files import write_whole

ERRORS_FOLDER = "BATCHWRIGHT_ERRORS"  # names the folder to the workers
SERVER_RANK = -1  # in place of a worker's rank, for the parameter server


def leave_report(message: str, exit_code: int, *, secondary: bool) -> None:
    """Write this worker's last error for the launcher; without a launcher do nothing.

    Args:
        message: One line.
        exit_code: Exit code with which the worker is about to end.
        secondary: Whether it ends because another worker was lost or stopped.
    """
    folder = os.environ.get(ERRORS_FOLDER)
    if folder is None:
        return
    rank = int(os.environ.get("RANK", "0"))
    report = {
        "rank": rank,
        "message": message,
        "exit_code": exit_code,
        "secondary": secondary,
        "time": time.time(),
    }
    try:  # whole or not at all: the launcher may look at any time, and the disk may be full
        write_whole(_report_path(folder, rank), json.dumps(report).encode())
    except FileError:
        print(f"cannot leave a report in {folder}", file=sys.stderr)  # noqa: T201 - the worker's log


def reports_in(folder: Path) -> list[dict[str, Any]]:
    """Reports of `leave_report`, oldest first, but workers' own errors before secondary ones."""
    reports: list[dict[str, Any]] = [
        json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")
    ]
    return sorted(reports, key=lambda report: (report["secondary"], report["time"]))


def forget_reports(folder: Path) -> None:
    """Remove the reports of an earlier start."""
    for path in folder.glob("rank*.json"):
        path.unlink(missing_ok=True)


def stopped_where(folder: Path) -> str:
    """How far the run is that a signal stopped, such as " at epoch 2, step 7": what its processes'
    reports add to `stopped_by`. Empty if none does, as where the training had not begun.
    """
    for report in reports_in(folder):
        if report["exit_code"] > 128:
            said = stopped_by(report["exit_code"] - 128)
            where = str(report["message"]).removeprefix(said)
            if where and where != report["message"]:
                return where
    return ""


def name_of(rank: int) -> str:
    """Name of a worker, or of the parameter server, in words."""
    return "the parameter server" if rank == SERVER_RANK else f"worker {rank}"


def forget_report(folder: Path, rank: int) -> None:
    """Remove the report of one worker, before it is started again."""
    _report_path(str(folder), rank).unlink(missing_ok=True)


def killed(codes: Mapping[int, int]) -> list[tuple[int, str]]:
    """(rank, name of the signal) of each worker that a signal has killed, SIGTERM left out.

    ``codes`` are exit codes by rank, negative where a signal ended the worker.
    """
    return [
        (rank, signal.Signals(-code).name)
        for rank, code in codes.items()
        if code < 0 and -code != signal.SIGTERM
    ]


def killed_words(who: str, name: str) -> str:
    """In words, that a signal killed a process; the kernel sends SIGKILL if memory runs out."""
    return f"{who} was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def error_of(log: Path, code: int, who: str) -> str:
    """Error of a command that has ended: its line ``error: ...``, else the last line of its log.

    ``code`` is its exit code, negative if a signal ended it; ``who`` names it in that case.
    """
    if code < 0:
        return f"{killed_words(who, signal.Signals(-code).name)}; its log is {log}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    written = [line.strip() for line in lines if line.strip()]
    errors = [line.removeprefix("error: ") for line in written if line.startswith("error: ")]
    return (errors or written or ["it ended without a word"])[-1]


def raise_failure(folder: Path, codes: Mapping[int, int]) -> NoReturn:
    """Raise the cause of a failure: a killed worker first, then the first own error of a worker.

    A worker that has reported an error of its own is told by that, however it ended: libraries may
    end a process by a signal as it leaves, as NCCL's watchdog does where a GPU has failed.

    ``folder`` has reports and logs; ``codes`` are exit codes by rank, negative for signals.
    """
    reports = reports_in(folder)
    told = {report["rank"] for report in reports if not report["secondary"]}
    for rank, name in killed({rank: code for rank, code in codes.items() if rank not in told}):
        raise LostWorkerError(f"{killed_words(name_of(rank), name)}; logs are in {folder}")
    if reports:
        first = reports[0]
        if first["exit_code"] == DeadlineReached.exit_code:
            raise DeadlineReached(first["message"])
        if first["exit_code"] == 2:
            raise BatchwrightError(first["message"])
        kind = LostWorkerError if first["secondary"] else WorkerError
        raise kind(f"{name_of(first['rank'])}: {first['message']}")
    last = last_line(folder)
    raise WorkerError(f"the workers ended: {last}; logs are in {folder}")


def last_line(folder: Path) -> str:
    """Last line of the logs in a folder."""
    for path in [*sorted(folder.glob("**/stderr.log")), *folder.glob("*.log")]:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        if written:
            return written[-1]
    return "no output"


def _report_path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.json")
