"""Starts worker processes under torchrun's elastic agent and stays with them until they end.

    this process --> agent (python -m batchwright.launch) --> workers (one per rank)

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
from typing import Any, NoReturn

from batchwright.errors import BatchwrightError, Interrupted, JobError, WorkerError
from batchwright.processes import (
    AGENT_PID,
    ERRORS_FOLDER,
    PARENT_PID,
    STARTED,
    die_with_parent,
    spinning_shortly,
)

POLL_SECONDS = 0.1
GRACE_SECONDS = 20.0  # from a stop signal until the agent is killed, workers with it
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
) -> None:
    """Run ``python -m module arguments`` in every worker until all have ended well.

    Args:
        module: A module whose main calls `processes.worker_main`.
        arguments: Its command line.
        workers: Number of processes on this machine.
        threads: Compute threads of each.
        folder: Where logs and error reports go; it exists.
        port: Rendezvous port on this machine; 0: any free one.
        restarts: How often the agent starts all of them again after one died.
        poll: Called about ten times a second while they run.

    Raises:
        WorkerError: A worker died; the message is its own last error.
        BatchwrightError: A worker refused its input.
        Interrupted: A stop signal came; the workers have ended.
        JobError: The port is in use.
    """
    refuse_busy_port(port)
    for report in [*folder.glob("rank*.json"), *folder.glob("agent.json")]:
        report.unlink()
    specification = {
        "module": module,
        "arguments": list(arguments),
        "workers": workers,
        "port": port,
        "restarts": restarts,
        "logs": str(folder),
    }
    environment = {
        **spinning_shortly(os.environ),
        "OMP_NUM_THREADS": str(threads),
        ERRORS_FOLDER: str(folder),
        PARENT_PID: str(os.getpid()),
        STARTED: str(time.time()),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(GRACE_SECONDS / 2)),
    }
    with (folder / "agent.log").open("wb") as log, noting_signals() as noted:
        agent = subprocess.Popen(
            [sys.executable, "-m", "batchwright.launch", json.dumps(specification)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
        )
        _wait(agent, poll, noted)
    if noted:
        raise Interrupted(noted[0], f"stopped by signal {noted[0]}")
    if agent.returncode:
        ended = folder / "agent.json"
        codes = _read_report(ended) if ended.exists() else {}
        raise_failure(folder, {int(rank): code for rank, code in codes.items()})


def _wait(agent: subprocess.Popen[bytes], poll: Callable[[], None], noted: list[int]) -> None:
    told: float | None = None
    try:
        while agent.poll() is None:
            poll()
            if noted and told is None:
                agent.terminate()
                told = time.monotonic()
            if (told is not None and time.monotonic() - told > GRACE_SECONDS) or len(noted) > 1:
                agent.kill()
            time.sleep(POLL_SECONDS)
        poll()
    finally:
        if agent.poll() is None:
            agent.kill()
            agent.wait()


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
    reports = [_read_report(path) for path in folder.glob("rank*.json")]
    reports.sort(key=lambda report: (report["secondary"], report["time"]))
    for rank, exit_code in codes.items():
        if exit_code < 0 and -exit_code != signal.SIGTERM:
            name = signal.Signals(-exit_code).name
            raise WorkerError(
                f"worker {rank} was killed by {name}"
                + (" (out of memory?)" if name == "SIGKILL" else "")
                + f"; logs are in {folder}"
            )
    if reports:
        first = reports[0]
        kind = BatchwrightError if first["exit_code"] == 2 else WorkerError
        prefix = "" if first["exit_code"] == 2 else f"worker {first['rank']}: "
        raise kind(prefix + first["message"])
    last = _last_line(folder)
    raise WorkerError(f"the workers ended: {last}; logs are in {folder}")


def _read_report(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def _last_line(folder: Path) -> str:
    for path in [*sorted(folder.glob("**/stderr.log")), *folder.glob("*.log")]:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        if written:
            return written[-1]
    return "no output"


def agent_main(specification: dict[str, Any]) -> int:
    """The agent's process: hand the workers to torch's elastic agent; returns the exit code."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ[AGENT_PID] = str(os.getpid())
    logs = Path(specification["logs"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=specification["workers"],
        run_id="workers",
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{specification['port']}",
        local_addr="localhost",
        max_restarts=specification["restarts"],
        monitor_interval=POLL_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    command = ["-m", specification["module"], *specification["arguments"]]
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        codes = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        (logs / "agent.json").write_text(json.dumps(codes), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent(PARENT_PID)
    sys.exit(agent_main(json.loads(sys.argv[1])))
