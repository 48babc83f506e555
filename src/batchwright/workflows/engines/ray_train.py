"""Ray: a run handed to Ray Train, which starts its workers, and starts them again."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from signal import SIGTERM
from typing import Any

from batchwright.distributed.supervisor import noting_signals
from batchwright.errors import Interrupted, JobError, WorkerError, one_line
from batchwright.records import Job
from batchwright.records.run_folder import resuming_command
from batchwright.records.text.problems import printable
from batchwright.storage.files import make_folder
from batchwright.storage.follow_lines import Tail
from batchwright.workflows.engines.ray_worker import EXIT_CODE, HEARD, LOG, STOP, Work, look, work

_LOOK_SECONDS = 0.2
_REACH_SECONDS = 5.0  # for the cluster's port to answer
_MACHINE_SECONDS = 120.0  # for each machine to start a process that imports this
_UNHEARD_SECONDS = 60.0  # after which nobody is there to hear that the run is to stop
_SAID = 300  # characters of Ray's own messages
# What `ray_worker.work` raises, in the traceback that Ray makes its message of.
_KILLED = re.compile(rf"^{WorkerError.__module__}\.WorkerError: (.+)$", re.MULTILINE)


def submit(folder: Path, job: Job, command: Sequence[str]) -> None:
    """Have Ray Train run a command beside each of the job's workers, and wait for its end.

    Args:
        folder: The run folder.
        job: How many workers, what each needs, and where.
        command: What each worker runs.

    Raises:
        BatchwrightError: Ray is not there, has too little, or the run ended badly; with its exit
            code.
        Interrupted: A stop signal came; a checkpoint was written if there were workers.
    """
    if job.device == "cuda" and not job.ray.gpus_per_worker:
        raise JobError(
            "device=cuda with ray.gpus_per_worker=0: give ray.gpus_per_worker=1, or device=cpu"
        )
    try:
        import ray
        import ray.train.collective
        import ray.train.torch
    except ImportError as error:
        raise JobError(
            f'launch=ray needs Ray Train: pip install "batchwright[ray]" ({one_line(error)})'
        ) from None
    told = Work(
        tuple(command), str(folder.resolve()), str(Path.cwd()), gpus=job.ray.gpus_per_worker
    )
    make_folder(told.logs)
    for name in (EXIT_CODE, STOP, HEARD):
        (told.logs / name).unlink(missing_ok=True)
    with _connected(ray, job.ray.address):
        workers = _workers(ray.nodes(), job)
        _look_at_machines(ray, told)
        _tell(f"ray: {workers} workers, logs in {told.logs}")
        if unused := _unused_gpus(ray.nodes(), job):
            _tell(unused)
        _fit(_trainer(told, job, workers), told, resuming_command(folder, job))


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    """Inside, this process belongs to the cluster; it stays there if it did so before."""
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS", "")
    host, _, port = where.rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would try for a minute
            socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
        ray.init(address=address or None, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        raise JobError(
            f"no Ray cluster at {where or 'this machine'}: {one_line(error)[:_SAID]}; give "
            "ray.address=HOST:PORT as `ray start --head` has printed it, on a machine of the "
            "cluster"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _workers(nodes: Sequence[Mapping[str, Any]], job: Job) -> int:
    """How many to start: as the job says, or as many as there is room for.

    Raises:
        JobError: There is no room for them; Ray would wait for ever.
    """
    room = sum(
        min(int(node["Resources"].get(name, 0) / count + 1e-9) for name, count in _each(job))
        for node in nodes
        if node["Alive"]
    )
    wanted = max(room, 1) if job.workers == "auto" else job.workers
    if (min(job.ray.min_workers, wanted) or wanted) > room:
        raise JobError(
            f"workers={wanted} with ray.cpus_per_worker={job.ray.cpus:g} and "
            f"ray.gpus_per_worker={job.ray.gpus_per_worker}: the Ray cluster has room for {room}; "
            "give fewer workers, or less to each, or start more machines first"
        )
    return wanted


def _each(job: Job) -> list[tuple[str, float]]:
    """What a worker needs of each kind, as Ray names them."""
    asked = (("CPU", job.ray.cpus), ("GPU", job.ray.gpus_per_worker))
    return [(name, count) for name, count in asked if count]


def _unused_gpus(nodes: Sequence[Mapping[str, Any]], job: Job) -> str:
    """That workers compute on the CPU though there are GPUs, in a line; empty: they do not."""
    if job.device == "cpu" or job.ray.gpus_per_worker:
        return ""
    gpus = sum(node["Resources"].get("GPU", 0) for node in nodes if node["Alive"])
    if not gpus:
        return ""
    return (
        f"ray: the workers compute on the CPU, and the cluster has {gpus:g} GPUs: "
        "ray.gpus_per_worker=1 gives each worker one"
    )


def _look_at_machines(ray: Any, told: Work) -> None:
    """Refuse machines that do not see the run folder, or have no Batchwright."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    token = told.logs / f".shared-{secrets.token_hex(8)}"
    token.write_bytes(b"")
    machines = [one for one in ray.nodes() if one["Alive"]]
    try:
        asked = [
            ray.remote(look)
            .options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(one["NodeID"], soft=False),
            )
            .remote(str(token), told.place, told.command[0])
            for one in machines
        ]
        for one, answer in zip(machines, asked, strict=True):
            try:
                problem = ray.get(answer, timeout=_MACHINE_SECONDS)
            except Exception as error:  # noqa: BLE001 - Ray's own, or of what runs there
                raise JobError(
                    f"{one['NodeManagerHostname']} cannot take part in the run: "
                    f"{str(error).strip().splitlines()[-1][:_SAID]}; install Batchwright there as "
                    "here, in the environment of `ray start`"
                ) from None
            if problem:
                raise JobError(problem)
    finally:
        token.unlink(missing_ok=True)


def _trainer(told: Work, job: Job, workers: int) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.backend import Backend, BackendConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    class NoGroup(TorchConfig):  # type: ignore[misc] # Ray is not there for the checker
        """No process group beside the one of the run's own processes, and no GPU memory for it."""

        backend_cls = Backend
        train_func_context = BackendConfig.train_func_context

    fewest = job.ray.min_workers
    return TorchTrainer(
        work,
        train_loop_config=asdict(told),
        torch_config=NoGroup(),
        scaling_config=ScalingConfig(
            num_workers=(min(fewest, workers), workers) if fewest else workers,
            use_gpu=job.ray.gpus_per_worker > 0,
            resources_per_worker=dict(_each(job)),
        ),
        run_config=RunConfig(
            storage_path=str(told.logs / "storage"),
            failure_config=FailureConfig(max_failures=job.restarts),
        ),
    )


def _fit(trainer: Any, told: Work, again: str) -> None:
    """Train, while this process shows the first worker's log and passes on a request to stop."""
    failures: list[Exception] = []

    def fit() -> None:
        try:
            trainer.fit()
        except Exception as error:  # noqa: BLE001 - Ray's own and those of its workers: told below
            failures.append(error)

    logs = told.logs
    tail: Tail[bytes] = Tail(logs / LOG.format(rank=0), bytes, from_end=True)
    # In a main thread Ray takes Ctrl-C for itself, and kills the workers.
    thread = threading.Thread(target=fit, daemon=True)
    given_up, stop = float("inf"), logs / STOP
    with noting_signals() as noted:
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            tail(_show)
            if noted and given_up == float("inf"):
                stop.touch()
                given_up = time.monotonic() + _UNHEARD_SECONDS
            if len(noted) > 1 or (time.monotonic() > given_up and stop.exists()):
                raise Interrupted(
                    noted[0], f"stopped by signal {noted[0]} at once; continue with `{again}`"
                )
    tail(_show)
    code = _exit_code(logs / EXIT_CODE)
    if noted and code == 128 + SIGTERM:
        raise Interrupted(noted[0], f"stopped by signal {noted[0]}; continue with `{again}`")
    if failures or code:
        why = _why(failures[0]) if failures else f"exit code {code}"
        on = f"; continue with `{again}`" if failures else ""
        ended = WorkerError(f"the run under Ray has failed ({why}), its logs are in {logs}{on}")
        ended.exit_code = code or WorkerError.exit_code
        raise ended


def _why(failure: Exception) -> str:
    """Why Ray has given up, in a line: what our own worker says, not the traceback around it."""
    killed = _KILLED.findall(str(failure))
    if killed:
        return f"{killed[-1]}, and `restarts` allows no other start"
    return one_line(failure)[:_SAID]


def _exit_code(path: Path) -> int:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the run has not come to its end
        return WorkerError.exit_code


def _show(line: bytes) -> None:
    _tell(line.decode(errors="replace").rstrip("\n"))


def _tell(line: str) -> None:
    print(printable(line), file=sys.stderr)  # noqa: T201 - for the person who waits
