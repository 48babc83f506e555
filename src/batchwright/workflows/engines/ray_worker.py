"""Runs on the machines of a Ray cluster: starts the command beside each worker of Ray Train.

    worker of Ray, a thread: notices, reports --signals--> `batchwright run --resume`, a process

Every second the first worker broadcasts the state of its process, whether to stop, and whether
there is an epoch to report. So all workers report equally often, as Ray requires. A worker whose
process is killed fails; the others wait until Ray starts all of them again.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Any

from batchwright.distributed.processes import ENGINE_PARENT, STORE_SOCKET
from batchwright.errors import WorkerError
from batchwright.records.lines.flat_lines import flat_values
from batchwright.records.lines.line_files import METRICS, sound_line
from batchwright.records.registries.launchers import STARTED_BY
from batchwright.storage.files import look_again
from batchwright.storage.follow_lines import Tail

EXIT_CODE, STOP, HEARD, LOG = "exit-code", "stop", "stopping", "worker-{rank}.log"
"""Files in the run's logs/ray: the run's exit code; a request to stop; the same once a worker has
seen it; the output of each worker."""

_STEP_SECONDS = 1.0  # between two broadcasts of the first worker
_LAST_SECONDS = 60.0  # for a process to end after the first one's has
_STUCK_SECONDS = 600.0  # for the first one to end after another that has failed
_SHARED_SECONDS = 10.0  # until a file must be visible on a shared disk


@dataclass(frozen=True)
class Work:
    """The order to each of Ray's workers, in plain values.

    Attributes:
        command: The command that it runs in a process of its own.
        folder: The run folder.
        place: The working folder of the command.
        gpus: GPUs that the worker reserves.
    """

    command: tuple[str, ...]
    folder: str
    place: str
    gpus: int

    @property
    def logs(self) -> Path:
        """The folder for the logs of Ray's workers."""
        return Path(self.folder) / "logs" / "ray"


def look(token: str, *needed: str) -> str:
    """Why this machine cannot take part in a run, in a line; empty if it can.

    Args:
        token: A file that the machine which starts the run has just written into ``logs/ray``.
        needed: Other paths that must exist.
    """
    limit = time.monotonic() + _SHARED_SECONDS
    while not Path(token).exists():
        if time.monotonic() > limit:
            return (
                f"{Path(token).parents[2]} on {socket.gethostname()} is not the run folder that "
                "the command writes: give --out a folder on a disk that all machines of the "
                "cluster share, under the same path"
            )
        time.sleep(0.1)
    return next(
        (
            f"{socket.gethostname()} has no {path}: Python's environment and the folder where the "
            "command is given must be there on all machines of the cluster, under the same paths"
            for path in needed
            if not Path(path).exists()
        ),
        "",
    )


def work(given: dict[str, Any]) -> None:
    """Carry out a run beside this worker; Ray Train calls it in each of its workers.

    When Ray announces that a machine is about to be taken away, all processes stop with a
    checkpoint and start again at once, to use the time that is left. ``given`` has the values of a
    `Work`.

    Raises:
        WorkerError: A process was killed or fell silent, after which Ray starts all workers again.
    """
    from ray import train

    order, leaving, code = Work(**given), frozenset[str](), 0
    while True:
        code, noticed = _carry_out(order, leaving)
        if noticed == leaving or code != 128 + SIGTERM:
            break
        leaving = noticed
    if train.get_context().get_world_rank() == 0:
        (order.logs / EXIT_CODE).write_text(str(code), encoding="utf-8")


def _carry_out(order: Work, leaving: frozenset[str]) -> tuple[int, frozenset[str]]:
    """Run the command once beside each worker; the loss of ``leaving`` was announced before.

    Returns:
        The exit code of the first worker's process, and all machines whose loss was announced; or
        ``leaving`` unchanged if the run is to stop.
    """
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    rank = train.get_context().get_world_rank()
    where = f"worker {rank} on {socket.gethostname()}"
    lines: Tail[dict[str, Any]] = Tail(Path(order.folder) / METRICS, _epoch, from_end=True)
    epochs: list[dict[str, Any]] = []
    process = _start(order, rank)
    stop = stopping = False
    since = 0.0  # when this process was first seen to have ended
    try:
        while True:
            time.sleep(_STEP_SECONDS)
            ended = process.poll()
            if rank == 0:
                lines(epochs.append)
            elif ended is not None and not stopping:
                # Worker 0 itself may notice the loss only after a long time.
                if ended < 0:
                    raise WorkerError(f"{where} was killed")
                since = since or time.monotonic()
                if ended and time.monotonic() > since + _STUCK_SECONDS:
                    raise WorkerError(f"worker 0 fell silent, which {where} has waited for")
            own = (ended, bool(epochs), _stop(order)) if rank == 0 else None
            ended, known, asked = broadcast_from_rank_zero(own)
            stop = stop or asked
            if not stopping:
                notice = train.get_preemption_info()
                noticed = leaving.union(() if notice is None else notice.preempted_node_ids)
                if stopping := stop or noticed > leaving:
                    process.send_signal(SIGTERM)  # Ray makes its processes ignore SIGINT
            if known:  # only the latest epoch, since Ray takes seconds for each report
                train.report(epochs[-1] if rank == 0 else {})
                epochs.clear()
            if ended is not None:
                break
        try:
            code = process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            if ended == WorkerError.exit_code and not stopping:  # worker 0 has missed this one
                raise WorkerError(f"{where} fell silent") from None
        else:
            if code < 0 and not stop and not (stopping and code == -SIGTERM):
                raise WorkerError(f"{where} was killed")
    finally:
        process.kill()
        process.wait()
    return ended if ended >= 0 else 128 - ended, leaving if stop else noticed


def _start(order: Work, rank: int) -> subprocess.Popen[bytes]:
    """Start the process beside this worker; the first one gets the open port of the rendezvous."""
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    context = train.get_context()
    with socket.create_server(("", 0), backlog=128) if rank == 0 else nullcontext() as listener:
        own = None if listener is None else (get_node_ip_address(), listener.getsockname()[1])
        address, port = broadcast_from_rank_zero(own)
        environment = {
            # A cluster that was started by torchrun has these variables, by which each process
            # would expect torchrun's agent to keep the store.
            **{key: one for key, one in os.environ.items() if not key.startswith("TORCHELASTIC_")},
            STARTED_BY: "ray",
            ENGINE_PARENT: str(os.getpid()),
            "RANK": str(rank),
            "WORLD_SIZE": str(context.get_world_size()),
            "LOCAL_RANK": str(context.get_local_rank()),
            "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        if not order.gpus:  # some versions of Ray show a worker GPUs that others have reserved
            environment["CUDA_VISIBLE_DEVICES"] = ""
        files = () if listener is None else (listener.fileno(),)
        if files:
            environment[STORE_SOCKET] = str(files[0])
        with (order.logs / LOG.format(rank=rank)).open("ab") as log:
            return subprocess.Popen(
                order.command,
                cwd=order.place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=files,
            )


def _stop(order: Work) -> bool:
    """Whether the run is to stop, also where Ray restarted all workers since the request."""
    look_again(order.logs)
    with suppress(OSError):
        (order.logs / STOP).replace(order.logs / HEARD)
    return (order.logs / HEARD).exists()


def _epoch(line: bytes) -> dict[str, Any] | None:
    """The values of an epoch's line under flat names; ``None`` for other lines."""
    parsed = sound_line(line)
    return flat_values(parsed) if parsed is not None and parsed.kind == "epoch" else None
