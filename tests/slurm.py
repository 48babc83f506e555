"""A Slurm of two nodes on this machine, of the tests' own, where it is installed."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from forked import Forked
from gloo import free_port

INSTALL = "apt-get install slurmctld slurmd slurm-client"
LAST_SECONDS = 500  # on a busy machine

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


class Slurm:
    """The running cluster.

    Attributes:
        environment: For commands that are to find it.
    """

    def __init__(self, configuration: Path) -> None:
        self._prints = configuration.parent
        names = {"SLURM_CONF": str(configuration), "MASTER_ADDR": "127.0.0.1"}  # nodes have none
        self.environment = {**os.environ, **names}

    def ask(self, *words: str) -> str:
        """What one of Slurm's commands says; it must succeed."""
        done = self.call(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands."""
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=100, check=False
        )

    def batchwright(self, *words: object, folder: Path) -> Forked:
        """Our command, on the cluster's login node."""
        return Forked([*map(str, words)], cwd=folder, env=self.environment, prints=self._prints)

    def start_again_at_once(self, number: str) -> None:
        """Spare a job that was queued again its two minutes."""
        until(lambda: "BeginTime" in self.ask("squeue", "-h", "-j", number, "-o", "%r"))
        time.sleep(1.1)  # a node refuses a job in the very second in which it ended there
        self.ask("scontrol", "update", f"JobId={number}", "StartTime=now")


def until(reached, what: str = "it") -> None:
    """Wait for something that comes."""
    last = time.monotonic() + LAST_SECONDS
    while not reached():
        assert time.monotonic() < last, f"{what} did not come"
        time.sleep(0.1)


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Two nodes with two cores each; afterwards nothing of it is left."""
    if missing := [one for one in ("slurmctld", "slurmd", "sbatch") if not shutil.which(one)]:
        pytest.skip(f"no {missing[0]}: {INSTALL}")
    (folder / "controller").mkdir()
    configuration = folder / "slurm.conf"
    values = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": folder}
    configuration.write_text(
        _CONF.format(**values, ports=[free_port() for _ in range(3)]), encoding="utf-8"
    )
    slurm = Slurm(configuration)
    commands = (["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"])
    with (folder / "daemons.log").open("wb") as log:
        daemons = [
            subprocess.Popen(words, env=slurm.environment, stdout=log, stderr=log)
            for words in commands
        ]
    try:
        until(lambda: slurm.call("sinfo", "-h", "-o", "%T").stdout.split() == ["idle"], "a node")
        yield slurm
    finally:
        slurm.call("scancel", "--user", getpass.getuser())
        with suppress(AssertionError):
            until(lambda: not slurm.call("squeue", "-h").stdout, "the jobs' end")
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=60)
            daemon.kill()
            daemon.wait()
        _kill_what_is_left(configuration)


def _kill_what_is_left(configuration: Path) -> None:
    """Steps that Slurm has not ended: each has the cluster's configuration in its environment."""
    mark = f"SLURM_CONF={configuration}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(process.name) != os.getpid() and mark in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
