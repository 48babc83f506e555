"""Ray: runs the command on a Ray cluster by Ray Train, which starts and restarts the workers."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from signal import SIGTERM
from typing import Any

from batchwright.distributed.supervisor import noting_signals
from batchwright.errors import (
    DeadlineReached,
    Interrupted,
    JobError,
    WorkerError,
    one_line,
    stopped_by,
)
from batchwright.records import Job
from batchwright.records.run_folder import resuming_command
from batchwright.records.text.problems import to_stderr
from batchwright.storage.files import look_again, make_folder
from batchwright.storage.follow_lines import Tail
from batchwright.workflows.engines import show_log_line
from batchwright.workflows.engines.ray_worker import EXIT_CODE, HEARD, LOG, STOP, Work, look, work

_LOOK_SECONDS = 0.2  # between two looks at the log and at stop signals
_REACH_SECONDS = 5.0  # for the cluster's port to answer
_MACHINE_SECONDS = 120.0  # for each machine to start a process that imports this module
_UNHEARD_SECONDS = 60.0  # for a worker to see that the run is to stop
_MAX_MESSAGE = 300  # characters of Ray's own messages that are shown
# The error of `ray_worker.work` in the traceback that Ray's message consists of.
_KILLED = re.compile(rf"^{WorkerError.__module__}\.WorkerError: (.+)$", re.MULTILINE)


def check(job: Job) -> None:
    """Refuse a job that Ray cannot be given here.

    Raises:
        JobError: Ray Train is missing, or the job is for GPUs and asks for none.
    """
    if job.device == "cuda" and not job.ray.gpus_per_worker:
        raise JobError(
            "device=cuda with ray.gpus_per_worker=0: give ray.gpus_per_worker=1, or device=cpu"
        )
    try:
        import_module("ray.train.collective")
        import_module("ray.train.torch")
    except ImportError as error:
        raise JobError(
            f'launch=ray needs Ray Train: pip install "batchwright[ray]" ({one_line(error)})'
        ) from None


def submit(folder: Path, job: Job, command: Sequence[str]) -> None:
    """Have Ray Train run a command beside each of the job's workers, and wait for its end.

    Args:
        folder: The run folder.
        job: The job, with the number of workers, their resources and the cluster's address.
        command: The command of each worker.

    Raises:
        BatchwrightError: The cluster is too small, or the run failed; the exit code is the run's
            own.
        Interrupted: A stop signal came; a checkpoint was written if there were workers.
    """
    import ray

    order = Work(
        tuple(command), str(folder.resolve()), str(Path.cwd()), gpus=job.ray.gpus_per_worker
    )
    make_folder(order.logs)
    for name in (EXIT_CODE, STOP, HEARD):
        (order.logs / name).unlink(missing_ok=True)
    with _connected(ray, job.ray.address):
        workers = _workers(ray.nodes(), job)
        _check_machines(ray, order)
        to_stderr(f"ray: {workers} workers, logs in {order.logs}")
        if unused := _unused_gpus(ray.nodes(), job):
            to_stderr(unused)
        _fit(_trainer(order, job, workers), order.logs, resuming_command(folder, job))


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    """Inside, this process is connected to the cluster; an existing connection is kept."""
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
            f"no Ray cluster at {where or 'this machine'}: {one_line(error)[:_MAX_MESSAGE]}; give "
            "ray.address=HOST:PORT as `ray start --head` has printed it, on a machine of the "
            "cluster"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _workers(nodes: Sequence[Mapping[str, Any]], job: Job) -> int:
    """The number of workers to start: that of the job, or as many as the cluster has room for.

    Raises:
        JobError: The cluster has too little room for them. Ray would wait for ever.
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
            f"give {'fewer workers, or ' * (wanted > 1)}less to each, or start more machines first"
        )
    return wanted


def _each(job: Job) -> list[tuple[str, float]]:
    """The resources of each worker, by Ray's names."""
    asked = (("CPU", job.ray.cpus), ("GPU", job.ray.gpus_per_worker))
    return [(name, count) for name, count in asked if count]


def _unused_gpus(nodes: Sequence[Mapping[str, Any]], job: Job) -> str:
    """A note if workers compute on the CPU although the cluster has GPUs; else empty."""
    if job.device == "cpu" or job.ray.gpus_per_worker:
        return ""
    gpus = sum(node["Resources"].get("GPU", 0) for node in nodes if node["Alive"])
    if not gpus:
        return ""
    return (
        f"ray: the workers compute on the CPU, and the cluster has {gpus:g} GPUs: "
        "ray.gpus_per_worker=1 gives each worker one"
    )


def _check_machines(ray: Any, order: Work) -> None:
    """Refuse machines that do not see the run folder, or have no Batchwright.

    Raises:
        JobError: A machine cannot take part; the message says why.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    token = order.logs / f".shared-{secrets.token_hex(8)}"
    token.write_bytes(b"")
    machines = [one for one in ray.nodes() if one["Alive"]]
    try:
        asked = [
            ray.remote(look)
            .options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(one["NodeID"], soft=False),
            )
            .remote(str(token), order.place, order.command[0])
            for one in machines
        ]
        for one, answer in zip(machines, asked, strict=True):
            try:
                problem = ray.get(answer, timeout=_MACHINE_SECONDS)
            except Exception as error:  # noqa: BLE001 - an error of Ray, or of the process there
                why = (str(error).strip() or type(error).__name__).splitlines()[-1]
                raise JobError(
                    f"{one['NodeManagerHostname']} cannot take part in the run: "
                    f"{why[:_MAX_MESSAGE]}; install Batchwright there as here, in the environment "
                    "of `ray start`"
                ) from None
            if problem:
                raise JobError(problem)
    finally:
        token.unlink(missing_ok=True)


def _trainer(order: Work, job: Job, workers: int) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.backend import Backend, BackendConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    class NoGroup(TorchConfig):  # type: ignore[misc] # the type checker runs without Ray
        """Makes no process group: the run's processes have their own, and one takes GPU memory."""

        backend_cls = Backend
        train_func_context = BackendConfig.train_func_context

    fewest = job.ray.min_workers
    return TorchTrainer(
        work,
        train_loop_config=asdict(order),
        torch_config=NoGroup(),
        scaling_config=ScalingConfig(
            num_workers=(min(fewest, workers), workers) if fewest else workers,
            use_gpu=job.ray.gpus_per_worker > 0,
            resources_per_worker=dict(_each(job)),
        ),
        run_config=RunConfig(
            storage_path=str(order.logs / "storage"),
            failure_config=FailureConfig(max_failures=job.restarts),
        ),
    )


def _fit(trainer: Any, logs: Path, again: str) -> None:
    """Train, while this process shows the first worker's log and passes on a request to stop.

    ``again`` is the command that continues the run.

    Raises:
        WorkerError: The run failed.
        Interrupted: A stop signal came.
    """
    failures: list[Exception] = []

    def fit() -> None:
        try:
            trainer.fit()
        except Exception as error:  # noqa: BLE001 - of Ray or its workers; handled below
            failures.append(error)

    tail: Tail[bytes] = Tail(logs / LOG.format(rank=0), bytes, from_end=True)
    # Not in the main thread: there Ray would handle Ctrl-C itself, and kill the workers.
    thread = threading.Thread(target=fit, daemon=True)
    given_up, stop = float("inf"), logs / STOP
    with noting_signals() as noted:
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            tail(show_log_line)
            if noted and given_up == float("inf"):
                stop.touch()
                given_up = time.monotonic() + _UNHEARD_SECONDS
            if len(noted) > 1 or (time.monotonic() > given_up and stop.exists()):
                raise Interrupted(
                    noted[0], f"{stopped_by(noted[0])} at once; continue with `{again}`"
                )
    look_again(logs)
    tail(show_log_line)
    code = _exit_code(logs / EXIT_CODE)
    if noted and code == 128 + SIGTERM:
        raise Interrupted(noted[0], f"{stopped_by(noted[0])}; continue with `{again}`")
    if code == DeadlineReached.exit_code:
        raise DeadlineReached(
            f"the run has ended at goal.deadline, with a checkpoint; continue with `{again}` and a "
            "later one"
        )
    if failures or code:
        why = _why(failures[0]) if failures else f"exit code {code}"
        on = f"; continue with `{again}`" if failures else ""
        ended = WorkerError(f"the run under Ray has failed ({why}), its logs are in {logs}{on}")
        ended.exit_code = code or WorkerError.exit_code
        raise ended


def _why(failure: Exception) -> str:
    """Why Ray has given up, in a line: our own worker's error without the traceback around it."""
    killed = _KILLED.findall(str(failure))
    if killed:
        return f"{killed[-1]}, and `restarts` allows no other start"
    return one_line(failure)[:_MAX_MESSAGE]


def _exit_code(path: Path) -> int:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the run has not ended by itself
        return WorkerError.exit_code
