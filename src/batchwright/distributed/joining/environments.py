"""Environment variables of other launchers: torchrun, mpirun, srun, Ray.

Each launcher has its own variables for the same few numbers. A process that takes part in a group
calls `adopt`, which sets torchrun's variables, the only ones that all other code reads.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from batchwright.distributed.processes import ENGINE_PARENT, LAUNCH, PARENT_PID, VERB_PARENT
from batchwright.errors import BatchwrightError
from batchwright.records.registries.registry import Registry
from batchwright.records.run_folder import LAUNCH_FILE

_FIRST_PORT, _PORTS = 20_000, 10_000  # where a port is made of a job's number
_APART = 7919  # ports between those of two jobs in a row: prime, so that 10,000 jobs have their own
_LAST_PORT = 65_535
_LOCAL_NAME = "localhost"
_process = ""
_joined: Started | None = None
_adopted: Started | None = None


def _name_process() -> None:
    global _process
    _process = os.urandom(8).hex()


_name_process()
os.register_at_fork(after_in_child=_name_process)


@dataclass(frozen=True)
class Started:
    """This process's place in the group that a launcher has started.

    Attributes:
        rank: This process, from 0.
        size: Number of processes.
        local_rank: This process among those of its host.
        local_size: Number of processes of its host; 0: the launcher does not say, and they count
            themselves once they have met.
        address: Host at which the processes meet.
        port: Port of that host.
        by: The launcher, in words; filled in by `found`, like ``how``.
        launch: Name of the launch, kept over its restarts; empty: see `launch_name`.
        how: Option to change for another number of processes.
        cores: Cores of this process; 0: the launcher does not say.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    by: str = ""
    launch: str = ""
    how: str = ""
    cores: int = 0

    def __str__(self) -> str:
        """Such as ``worker 2 (node1)``."""
        return f"worker {self.rank} ({socket.gethostname()})"


@dataclass(frozen=True)
class Environment:
    """A launcher, recognized by the variables that it sets.

    Attributes:
        name: One word.
        by: Name in words.
        needs: Variables that all of its processes have.
        read: Reads this process's place from the variables.
        how: Option to change for another number of processes.
        agent: Variable that shows that the launcher is there. A single process then is a group,
            which others may join later; empty: a single process is no group.
    """

    name: str
    by: str
    needs: tuple[str, ...]
    read: Callable[[Mapping[str, str]], Started]
    how: str
    agent: str = ""


def found(variables: Mapping[str, str] | None = None) -> Started | None:
    """The group that another launcher has started this process in; ``None``: there is none.

    Processes that Batchwright has started belong to no other launcher, and a single process of srun
    or mpirun has its host to itself. If torchrun's variables are of a single process and its
    agent's is not set, they may be left over: then several processes of another launcher count.

    Raises:
        BatchwrightError: A variable is no number, or they contradict each other.
    """
    env = os.environ if variables is None else variables
    if any(one in env for one in (PARENT_PID, VERB_PARENT, LAUNCH)):
        return None
    alone: Started | None = None
    for environment in ENVIRONMENTS.values():
        if not all(one in env for one in environment.needs):
            continue
        started = replace(environment.read(env), by=environment.by, how=environment.how)
        _check(started)
        if started.size > 1 or environment.agent in env:
            return started
        alone = alone or (started if environment.agent else None)
    return alone


def adopt(started: Started) -> None:
    """Set torchrun's variables, for this process and those that it starts."""
    global _adopted
    _adopted = started
    os.environ.update(
        RANK=str(started.rank),
        WORLD_SIZE=str(started.size),
        LOCAL_RANK=str(started.local_rank),
        MASTER_ADDR=started.address,
        MASTER_PORT=str(started.port),
    )
    if started.local_size:
        os.environ["LOCAL_WORLD_SIZE"] = str(started.local_size)
    if started.cores:  # the cores that it sees may be these already, not to be divided again
        os.environ.setdefault("OMP_NUM_THREADS", str(started.cores))
    # Hosts that cannot be reached are reported in a line of our own.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def by_itself(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables without the group's, for a process outside the group."""
    group = {*_TORCHRUNS, "LOCAL_WORLD_SIZE"}
    return {name: value for name, value in variables.items() if name not in group}


@contextmanager
def outside_of_group() -> Iterator[None]:
    """Inside, this process is no part of a group, whatever its variables say.

    What one process computes by itself would wait for the others, which do not come.
    """
    group = {name: os.environ[name] for name in os.environ.keys() - by_itself(os.environ).keys()}
    for name in group:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(group)


def joined() -> Started | None:
    """This process's place in the group that runs a command together; ``None``: there is none."""
    return _joined


def join(started: Started | None) -> None:
    """Run commands in this group from now on; ``None``: in none."""
    global _joined
    _joined = started


def launch_name() -> str:
    """Name of the launch of this process, kept over its restarts; empty: unknown.

    torchrun gives each worker a file below a folder that each agent makes for itself:
    ``.../RUN_RANDOM/attempt_N/LOCAL_RANK/error.json``.
    """
    if LAUNCH in os.environ:
        return os.environ[LAUNCH]
    if _adopted is not None and _adopted.launch:  # whose variables look like torchrun's by now
        return _adopted.launch
    report = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if report:
        return f"{socket.gethostname()}:{Path(report).parent.parent.parent}"
    started = found()
    return "" if started is None else started.launch


def process_name() -> str:
    """Name of this very process; a fork of it has another name.

    Tasks of srun are started again only with the whole job: whatever else the same step starts is
    another command, so all of its tasks have one name.
    """
    if _adopted is not None and _adopted.launch:
        return f"{_adopted.launch}#{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    return _process


@dataclass(frozen=True)
class Opened:
    """The launches and processes that have opened a run folder.

    Attributes:
        launches: Names of the launches.
        processes: Names of the processes of the last start of each.
        asked: The command that they were to carry out there; empty: a user's own loop has none.
    """

    launches: frozenset[str]
    processes: frozenset[str]
    asked: str = ""

    def by_an_earlier_start(self, launches: Iterable[str], processes: Iterable[str]) -> bool:
        """Whether one of these launches has opened it, by other processes than these."""
        return bool(self.launches & set(launches)) and not self.processes & set(processes)


def read_opened(folder: Path) -> Opened:
    """Read the note in a run folder; empty where it cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads((folder / LAUNCH_FILE).read_text("utf-8"))
        asked = str(noted.get("asked", ""))
        return Opened(frozenset(noted["agents"]), frozenset(noted["processes"]), asked)
    return Opened(frozenset(), frozenset())


def note_opened(
    folder: Path, launches: Iterable[str], processes: Iterable[str], asked: str | None = None
) -> None:
    """Make a run folder and note who opens it; an error shows in later writes to the folder.

    Args:
        folder: The run folder.
        launches: Names of the launches.
        processes: Names of the processes of this start.
        asked: The command that they are to carry out; ``None``: as noted before.
    """
    if asked is None:
        asked = read_opened(folder).asked
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{LAUNCH_FILE}.writing"
        noted = {"agents": sorted(launches), "processes": sorted(processes), "asked": asked}
        aside.write_text(json.dumps(noted, indent=1), encoding="utf-8")
        aside.replace(folder / LAUNCH_FILE)


# ---------------------------------------------------------------------------------- each launcher


def _torchrun(env: Mapping[str, str]) -> Started:
    return Started(
        rank=_number(env, "RANK"),
        size=_number(env, "WORLD_SIZE"),
        local_rank=_number(env, "LOCAL_RANK"),
        local_size=_number(env, "LOCAL_WORLD_SIZE", default=0),
        address=env["MASTER_ADDR"],
        port=_number(env, "MASTER_PORT"),
    )


def _open_mpi(env: Mapping[str, str]) -> Started:
    # It restarts nothing, and not every version names the job: another launch may look alike.
    job = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE", "0")
    return _mpirun(env, _OPEN_MPIS, job, "-x MASTER_ADDR=HOST")


def _mpich(env: Mapping[str, str]) -> Started:
    # Its process manager, which is Intel's too, names no job, but a batch system may.
    job = env.get("SLURM_JOB_ID") or env.get("PBS_JOBID", "0")
    return _mpirun(env, _MPICHS, job, "-genv MASTER_ADDR HOST")


def _mpirun(env: Mapping[str, str], names: Sequence[str], job: str, option: str) -> Started:
    """The place that mpirun gives a process.

    Args:
        env: The variables.
        names: Those with rank, size, local rank and local size.
        job: Text with the number of the job, for the port.
        option: How mpirun is told the first host's address.
    """
    rank, size, local_rank, here = (_number(env, name) for name in names)
    address = env.get("MASTER_ADDR", "")
    if not address and here != size:
        raise BatchwrightError(
            "mpirun started processes on several hosts and does not tell the first one's address: "
            f"name it, with mpirun {option}"
        )
    port = _port(env, job)
    return Started(rank, size, local_rank, here, address=address or _LOCAL_NAME, port=port)


def _slurm(env: Mapping[str, str]) -> Started:
    job, step = env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID", "0")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    # Tasks host by host: "2(x3),1" is 2, 2, 2, 1.
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(number)] * int(times or 1)
    # The first host of a list such as "gpu[03-05,9],login1".
    first = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    host = "".join(part or "" for part in first.groups()) if first else _LOCAL_NAME
    node, size = _number(env, "SLURM_NODEID", default=0), _number(env, "SLURM_STEP_NUM_TASKS")
    return Started(
        rank=_number(env, "SLURM_PROCID"),
        size=size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_size=counts[node] if node < len(counts) else size,
        address=env.get("MASTER_ADDR") or host,
        port=_port(env, job, step),
        launch=f"slurm:{job}.{step}",
        cores=_number(env, "SLURM_CPUS_PER_TASK", default=0),
    )


def _port(env: Mapping[str, str], job: str, step: str = "0") -> int:
    """The given port, else one that depends on the job and its step."""
    if "MASTER_PORT" in env:
        return _number(env, "MASTER_PORT")
    number, nth = (int(re.sub(r"\D", "", text) or 0) for text in (job, step))
    return _FIRST_PORT + (_APART * number + nth) % _PORTS


def _number(env: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        if name in env:
            if not (env[name].isascii() and env[name].isdigit()):
                raise BatchwrightError(f"{name}={env[name]}: a whole number is expected")
            return int(env[name])
    if default is None:
        raise BatchwrightError(f"{names[0]} is not set, which the launcher of this process sets")
    return default


def _check(started: Started) -> None:
    if not 0 < started.port <= _LAST_PORT:
        raise BatchwrightError(f"MASTER_PORT={started.port}: a port is from 1 to {_LAST_PORT}")
    if not started.address.strip():
        raise BatchwrightError("MASTER_ADDR is empty: give it the name of the first process's host")
    try:
        started.address.encode("idna")
    except UnicodeError:  # from which no connection would make an error of its own
        raise BatchwrightError(
            f"MASTER_ADDR={started.address[:60]}: no host has such a name; give it the name of the "
            "first process's host alone"
        ) from None
    local_size = started.local_size or started.size
    if not (started.rank < started.size and started.local_rank < local_size):
        raise BatchwrightError(
            f"{started.by} says that this is process {started.rank} of {started.size}, and "
            f"{started.local_rank} of {local_size} on {socket.gethostname()}: numbers "
            "begin with 0 and end below the count"
        )


_TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OPEN_MPIS = (
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
_MPICHS = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # and Intel MPI's

ENVIRONMENTS = Registry(
    "the launcher",
    # The command beside a worker of Ray: `workflows.engines.ray_worker` sets these variables.
    Environment(
        "ray",
        "Ray",
        (ENGINE_PARENT, *_TORCHRUNS),
        _torchrun,
        "workers=",
        agent=ENGINE_PARENT,
    ),
    Environment(
        "torchrun",
        "torchrun",
        _TORCHRUNS,
        _torchrun,
        "--nproc-per-node, or another number of hosts with --nnodes",
        agent="TORCHELASTIC_RUN_ID",
    ),
    Environment("mpirun", "mpirun", _OPEN_MPIS, _open_mpi, "-np"),
    Environment("mpich", "mpirun", _MPICHS, _mpich, "-np"),
    # In a batch script's own shell the first two are there, too; the third is of srun's tasks.
    Environment(
        "slurm",
        "srun",
        ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
        _slurm,
        "--ntasks",
    ),
)
"""The first whose variables are there counts: torchrun and mpirun may run inside of srun."""
