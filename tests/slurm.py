"""A Slurm of two nodes on this machine, of the tests' own, where it is installed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forked import Forked, with_tests

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed
from benchmarks.harness.slurm_nodes import NoSlurm, slurm_nodes

LAST_SECONDS = 500  # on a busy machine


class Slurm:
    """The running cluster.

    Attributes:
        environment: For commands that are to find it.
    """

    def __init__(self, prints: Path, environment: dict[str, str]) -> None:
        self._prints, self.environment = prints, environment

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

    def with_variables(self, more: dict[str, str]) -> Slurm:
        """The same cluster for commands that have these, too, as their tasks then do."""
        return Slurm(self._prints, {**self.environment, **more})

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
    try:
        with slurm_nodes(folder) as environment:
            yield Slurm(folder, {**environment, "PYTHONPATH": with_tests(environment)})
    except NoSlurm as reason:
        pytest.skip(str(reason))
