"""What runs on the machines of a Ray cluster: the command beside each worker of Ray Train.

    worker of Ray, a thread: notices, reports --signals--> `batchwright run --resume`, a process

The workers move in step: every second the first one tells all others how its process is, whether to
stop and whether there is an epoch to report. So they report equally often, as Ray wants it. A
worker whose process is killed fails, and whoever has lost another waits until Ray starts all again.
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
from batchwright.storage.follow_lines import Tail

EXIT_CODE, STOP, HEARD, LOG = "exit-code", "stop", "stopping", "worker-{rank}.log"
"""Files in the run's logs/ray: how the run has ended, that it is to stop, that a worker has heard
so, what each worker has printed."""

_STEP_SECONDS = 1.0  # between two words of the first worker
_LAST_SECONDS = 60.0  # for a process to end, once the first one has
_SHARED_SECONDS = 10.0  # for a file to be seen on a shared disk


@dataclass(frozen=True)
class Work:
    """What each of Ray's workers is told, in plain values.

    Attributes:
        command: What it runs in a process of its own.
        folder: The run folder.
        place: Folder in which the command was given.
        gpus: That it reserves.
    """

    command: tuple[str, ...]
    folder: str
    place: str
    gpus: int

    @property
    def logs(self) -> Path:
        """Where Ray's workers write."""
        return Path(self.folder) / "logs" / "ray"


def look(token: str, *needed: str) -> str:
    """What keeps this machine from taking part in a run; empty: nothing does.

    Args:
        token: A file that the machine which starts the run has just written into its ``logs/ray``.
        needed: Paths that must be there, too.
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
    """Carry out a run beside this worker of Ray Train, which calls it in each of them.

    Where Ray announces that a machine is about to go, all processes stop with a checkpoint, and
    start again at once, to make use of the time that is left.

    Args:
        given: Values of a `Work`.

    Raises:
        WorkerError: The process was killed: Ray is to start all again.
    """
    from ray import train

    told, leaving, code = Work(**given), frozenset[str](), 0
    while True:
        code, noticed = _carry_out(told, leaving)
        if noticed == leaving or code != 128 + SIGTERM:
            break
        leaving = noticed
    if train.get_context().get_world_rank() == 0:
        (told.logs / EXIT_CODE).write_text(str(code), encoding="utf-8")


def _carry_out(told: Work, leaving: frozenset[str]) -> tuple[int, frozenset[str]]:
    """Run the command once, from all workers.

    Args:
        told: What to run.
        leaving: Machines whose end was announced before.

    Returns:
        The exit code of the first worker's process, and all machines whose end was announced; as
        before where the run is to stop.
    """
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    rank = train.get_context().get_world_rank()
    where = f"worker {rank} on {socket.gethostname()}"
    lines: Tail[dict[str, Any]] = Tail(Path(told.folder) / METRICS, _epoch, from_end=True)
    epochs: list[dict[str, Any]] = []
    process = _start(told, rank)
    stop = stopping = False
    try:
        while True:
            time.sleep(_STEP_SECONDS)
            ended = process.poll()
            if rank == 0:
                lines(epochs.append)
            elif ended is not None and ended < 0 and not stopping:
                raise WorkerError(f"{where} was killed")  # the first may long not see it by itself
            own = (ended, bool(epochs), _stop(told)) if rank == 0 else None
            ended, known, asked = broadcast_from_rank_zero(own)
            stop = stop or asked
            if not stopping:
                notice = train.get_preemption_info()
                noticed = leaving.union(() if notice is None else notice.preempted_node_ids)
                if stopping := stop or noticed > leaving:
                    process.send_signal(SIGTERM)  # Ray keeps SIGINT from all its processes
            if known:  # the latest alone: Ray takes seconds for each
                train.report(epochs[-1] if rank == 0 else {})
                epochs.clear()
            if ended is not None:
                break
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_LAST_SECONDS)
            if code < 0 and not stop and not (stopping and code == -SIGTERM):  # that stops it
                raise WorkerError(f"{where} was killed")
    finally:
        process.kill()
        process.wait()
    return ended if ended >= 0 else 128 - ended, leaving if stop else noticed


def _start(told: Work, rank: int) -> subprocess.Popen[bytes]:
    """The process beside this worker; all meet at a port that the first one holds open already."""
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    context = train.get_context()
    with socket.create_server(("", 0), backlog=128) if rank == 0 else nullcontext() as listener:
        own = None if listener is None else (get_node_ip_address(), listener.getsockname()[1])
        address, port = broadcast_from_rank_zero(own)
        environment = {
            # A cluster that was started inside of torchrun has these: no agent keeps the store.
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
        if not told.gpus:  # some of Ray's versions show it GPUs that others have reserved
            environment["CUDA_VISIBLE_DEVICES"] = ""
        files = () if listener is None else (listener.fileno(),)
        if files:
            environment[STORE_SOCKET] = str(files[0])
        with (told.logs / LOG.format(rank=rank)).open("ab") as log:
            return subprocess.Popen(
                told.command,
                cwd=told.place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=files,
            )


def _stop(told: Work) -> bool:
    """Whether the run is to stop, even if Ray has started all again since that was heard."""
    with suppress(OSError):
        (told.logs / STOP).replace(told.logs / HEARD)
    return (told.logs / HEARD).exists()


def _epoch(line: bytes) -> dict[str, Any] | None:
    """An epoch's figures under flat names; ``None`` of all other lines."""
    said = sound_line(line)
    return flat_values(said) if said is not None and said.kind == "epoch" else None
