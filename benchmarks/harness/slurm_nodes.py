"""A Slurm cluster of two nodes on this machine, without munge, systemd or cgroups."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.harness.loads import free_port, until

INSTALL = "apt-get install slurmctld slurmd slurm-client"
_LAST_SECONDS = 500.0  # to wait for nodes, on a busy machine, and for the end of jobs

_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=0
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
KillWait=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""


class NoSlurm(RuntimeError):  # noqa: N818 - what there is not
    """Slurm is not available; the message says why."""


@contextmanager
def slurm_nodes(folder: Path) -> Iterator[dict[str, str]]:
    """Inside, two nodes with two cores each; afterwards all their processes are ended.

    Args:
        folder: Takes the daemons' files.

    Yields:
        Environment variables by which commands find the cluster.

    Raises:
        NoSlurm: Slurm is not installed.
        TimeoutError: The nodes did not come up.
    """
    if missing := [one for one in ("slurmctld", "slurmd", "sbatch") if not shutil.which(one)]:
        raise NoSlurm(f"no {missing[0]}: {INSTALL}")
    (folder / "controller").mkdir()
    configuration = folder / "slurm.conf"
    values = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": folder}
    configuration.write_text(
        _CONF.format(**values, ports=[free_port() for _ in range(3)]), encoding="utf-8"
    )
    # The nodes' names cannot be resolved, so the address of rank 0 is given.
    names = {"SLURM_CONF": str(configuration), "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **names}
    commands = (["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"])
    with (folder / "daemons.log").open("wb") as log:
        daemons = [
            subprocess.Popen(words, env=environment, stdout=log, stderr=log) for words in commands
        ]
    try:
        states = ("sinfo", "-h", "-o", "%T")
        if not until(lambda: _said(environment, *states).split() == ["idle"], _LAST_SECONDS):
            raise TimeoutError(f"Slurm's nodes did not come: {folder / 'daemons.log'}")
        yield environment
    finally:
        with suppress(subprocess.TimeoutExpired):  # a command hangs: the daemons are ended anyway
            _said(environment, "scancel", "--user", getpass.getuser())
            until(lambda: not _said(environment, "squeue", "-h"), _LAST_SECONDS)
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=60)
            daemon.kill()
            daemon.wait()
        _kill_what_is_left(configuration)


def _said(environment: Mapping[str, str], *words: str) -> str:
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    return done.stdout


def _kill_what_is_left(configuration: Path) -> None:
    """Kill job steps that Slurm has not ended, found by the cluster's configuration they have."""
    mark = f"SLURM_CONF={configuration}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(process.name) != os.getpid() and mark in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
