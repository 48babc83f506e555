"""What another launcher says to the processes that it starts: torchrun, mpirun, srun, Ray.

Each has variables of its own for the same few numbers. Whoever takes part in a group calls `adopt`,
after which they stand under the names that torchrun gives them, for everything else.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
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
    """This process among those that were started with it.

    Attributes:
        by: Who started them, in words.
        rank: This process, from 0.
        size: How many there are.
        local_rank: This process among those of its host.
        local_size: How many its host has.
        address: Host at which they meet.
        port: Of that host.
        launch: Names the launch, the same after each of its restarts; empty: see `launch_name`.
        how: What to change for another number of processes.
        cores: That it has to itself; 0: the launcher does not say.
    """

    by: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    launch: str
    how: str
    cores: int = 0

    def __str__(self) -> str:
        """Such as ``worker 2 (node1)``."""
        return f"worker {self.rank} ({socket.gethostname()})"


@dataclass(frozen=True)
class Environment:
    """A launcher, by the variables that it sets.

    Attributes:
        name: One word.
        by: In words.
        needs: Variables that all of its processes have.
        read: What they say of this process.
        how: What to change for another number of processes.
        agent: Variable that shows that the launcher is there. One process by itself is a group
            then, which may have others later; empty: it never is.
    """

    name: str
    by: str
    needs: tuple[str, ...]
    read: Callable[[Mapping[str, str]], Started]
    how: str
    agent: str = ""


def found(variables: Mapping[str, str] | None = None) -> Started | None:
    """The group that another launcher has started this process in; ``None``: there is none.

    Processes that Batchwright has started belong to no other launcher, and one process that srun or
    mpirun has started by itself has its host to itself. Where torchrun's variables tell of a single
    process and its agent's is not there, they may be left over: then several of another launcher
    count.

    Raises:
        BatchwrightError: A variable is no number, or they contradict each other.
    """
    said = os.environ if variables is None else variables
    if any(one in said for one in (PARENT_PID, VERB_PARENT, LAUNCH)):
        return None
    alone: Started | None = None
    for environment in ENVIRONMENTS.values():
        if not all(one in said for one in environment.needs):
            continue
        started = replace(environment.read(said), by=environment.by, how=environment.how)
        _check(started)
        if started.size > 1 or environment.agent in said:
            return started
        alone = alone or (started if environment.agent else None)
    return alone


def adopt(started: Started) -> None:
    """Set the variables that torchrun would set, for this process and those that it starts."""
    global _adopted
    _adopted = started
    os.environ.update(
        RANK=str(started.rank),
        WORLD_SIZE=str(started.size),
        LOCAL_RANK=str(started.local_rank),
        LOCAL_WORLD_SIZE=str(started.local_size),
        MASTER_ADDR=started.address,
        MASTER_PORT=str(started.port),
    )
    if started.cores:  # those that it sees may be these, and not to be divided once more
        os.environ.setdefault("OMP_NUM_THREADS", str(started.cores))
    # What cannot be reached is said in a line of our own.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def by_itself(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that is none of the group's, though one of these starts it."""
    group = {*_TORCHRUNS, "LOCAL_WORLD_SIZE"}
    return {name: value for name, value in variables.items() if name not in group}


def joined() -> Started | None:
    """This process in the group that carries out a command together; ``None``: there is none."""
    return _joined


def join(started: Started | None) -> None:
    """From now on carry out commands in this group; ``None``: in none."""
    global _joined
    _joined = started


def launch_name() -> str:
    """Names what started this process, the same after each of its restarts; empty: unknown.

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
    """Names this very process; a fork of it has another name.

    Tasks of srun are started again only where the whole job is: what else the same step starts is
    another command, and all of them have one name.
    """
    if _adopted is not None and _adopted.launch:
        return f"{_adopted.launch}#{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    return _process


@dataclass(frozen=True)
class Opened:
    """Who has opened a run folder.

    Attributes:
        launches: Their names.
        processes: Those of the last start of each.
        asked: What they were asked to do there; empty: a loop of somebody's own has not said it.
    """

    launches: frozenset[str]
    processes: frozenset[str]
    asked: str = ""

    def by_an_earlier_start(self, launches: Iterable[str], processes: Iterable[str]) -> bool:
        """Whether one of these launches has, by other processes than these."""
        return bool(self.launches & set(launches)) and not self.processes & set(processes)


def read_opened(folder: Path) -> Opened:
    """What is noted in a run folder; nothing where it cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads((folder / LAUNCH_FILE).read_text("utf-8"))
        asked = str(noted.get("asked", ""))
        return Opened(frozenset(noted["agents"]), frozenset(noted["processes"]), asked)
    return Opened(frozenset(), frozenset())


def note_opened(
    folder: Path, launches: Iterable[str], processes: Iterable[str], asked: str | None = None
) -> None:
    """Note in a run folder, which is made, who opens it; whoever writes there says if it cannot.

    Args:
        folder: The run folder.
        launches: As `Opened` has them, like the rest.
        processes: Of this start.
        asked: What they were asked to do; ``None``: as noted before.
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


def _torchrun(said: Mapping[str, str]) -> Started:
    return Started(
        by="",
        rank=_number(said, "RANK"),
        size=_number(said, "WORLD_SIZE"),
        local_rank=_number(said, "LOCAL_RANK"),
        local_size=_number(said, "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
        address=said["MASTER_ADDR"],
        port=_number(said, "MASTER_PORT"),
        launch="",  # what its agent's files are called, if there is one
        how="",
    )


def _open_mpi(said: Mapping[str, str]) -> Started:
    # It starts nothing again, and not every version names the job: another launch may look alike.
    job = said.get("OMPI_MCA_ess_base_jobid") or said.get("PMIX_NAMESPACE", "0")
    here = _number(said, "OMPI_COMM_WORLD_LOCAL_SIZE")
    size = _number(said, "OMPI_COMM_WORLD_SIZE")
    address = said.get("MASTER_ADDR", "")
    if not address and here != size:
        raise BatchwrightError(
            "mpirun started processes on several hosts and does not tell the first one's address: "
            "name it, with mpirun -x MASTER_ADDR=HOST"
        )
    return Started(
        by="",
        rank=_number(said, "OMPI_COMM_WORLD_RANK"),
        size=size,
        local_rank=_number(said, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=here,
        address=address or _LOCAL_NAME,
        port=_port(said, job),
        launch="",
        how="",
    )


def _slurm(said: Mapping[str, str]) -> Started:
    job, step = said["SLURM_JOB_ID"], said.get("SLURM_STEP_ID", "0")
    nodes = said.get("SLURM_STEP_NODELIST") or said.get("SLURM_JOB_NODELIST", "")
    tasks = said.get("SLURM_STEP_TASKS_PER_NODE") or said.get("SLURM_TASKS_PER_NODE", "")
    # Tasks host by host: "2(x3),1" is 2, 2, 2, 1.
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(number)] * int(times or 1)
    # The first host of a list such as "gpu[03-05,9],login1".
    first = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    host = "".join(part or "" for part in first.groups()) if first else _LOCAL_NAME
    node, size = _number(said, "SLURM_NODEID", default=0), _number(said, "SLURM_STEP_NUM_TASKS")
    return Started(
        by="",
        rank=_number(said, "SLURM_PROCID"),
        size=size,
        local_rank=_number(said, "SLURM_LOCALID"),
        local_size=counts[node] if node < len(counts) else size,
        address=said.get("MASTER_ADDR") or host,
        port=_port(said, job, step),
        launch=f"slurm:{job}.{step}",
        how="",
        cores=_number(said, "SLURM_CPUS_PER_TASK", default=0),
    )


def _port(said: Mapping[str, str], job: str, step: str = "0") -> int:
    """The port that was said, else one that depends on the job and on its step."""
    if "MASTER_PORT" in said:
        return _number(said, "MASTER_PORT")
    number, nth = (int(re.sub(r"\D", "", text) or 0) for text in (job, step))
    return _FIRST_PORT + (_APART * number + nth) % _PORTS


def _number(said: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        if name in said:
            if not (said[name].isascii() and said[name].isdigit()):
                raise BatchwrightError(f"{name}={said[name]}: a whole number is expected")
            return int(said[name])
    if default is None:
        raise BatchwrightError(f"{names[0]} is not set, which the launcher of this process sets")
    return default


def _check(started: Started) -> None:
    if not 0 < started.port <= _LAST_PORT:
        raise BatchwrightError(f"MASTER_PORT={started.port}: a port is from 1 to {_LAST_PORT}")
    if not started.address.strip():
        raise BatchwrightError("MASTER_ADDR is empty: give it the name of the first process's host")
    if not (started.rank < started.size and started.local_rank < started.local_size):
        raise BatchwrightError(
            f"{started.by} says that this is process {started.rank} of {started.size}, and "
            f"{started.local_rank} of {started.local_size} on {socket.gethostname()}: numbers "
            "begin with 0 and end below the count"
        )


_TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

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
    Environment(
        "mpirun",
        "mpirun",
        (
            *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ),
        _open_mpi,
        "-np",
    ),
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
