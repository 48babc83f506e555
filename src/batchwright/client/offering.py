"""What this machine offers to jobs: GPUs, cores, memory; and the limits that the agent's user sets
to what jobs take of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchwright.distributed.processes import has_gpu_driver
from batchwright.errors import BatchwrightError
from batchwright.records import Plan
from batchwright.records.agent_rules import GIB, Offer, label_problem
from batchwright.storage.control_groups import usable_cores, usable_memory

_LIST_GPUS = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([[gpu.name, gpu.total_memory] for gpu in found]))
"""
_LIST_SECONDS = 120.0

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Names the GPUs that a process sees; CUDA ignores those behind a name that does not exist."""


@dataclass(frozen=True)
class Limits:
    """What a job may take of this machine; `None`: any amount.

    Attributes:
        workers: Maximum number of training processes.
        hours: Maximum hours from when the agent gets a job until the job is done.
        disk: Maximum size of the job's folder, in GiB.
    """

    workers: int | None = None
    hours: float | None = None
    disk: float | None = None

    def refusal(self, plan: Plan) -> str:
        """Why a plan is not trained here, in a line; empty where nothing speaks against it."""
        if self.workers is not None and plan.workers > self.workers:
            return (
                f"the plan is for {plan.workers} workers, and this agent takes a maximum of "
                f"{self.workers} (--max-workers)"
            )
        return ""

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Variables by which the verbs see no more GPUs than `workers`, which bounds what a job
        that leaves the workers open takes.

        Args:
            given: The environment so far.
        """
        if self.workers is None:
            return {}
        named = given.get(VISIBLE)
        if named is not None and not named.strip():
            return {}  # no GPU is visible as it is
        ids = named.split(",") if named else [str(number) for number in range(self.workers)]
        return {VISIBLE: ",".join(ids[: self.workers])}

    def exceeded(self, folder: Path, began: float) -> str:
        """Which limit a job has exceeded, in a line; empty: none.

        Args:
            folder: The job's folder.
            began: When the agent got the job, by `time.monotonic`.
        """
        if self.hours is not None and time.monotonic() - began > 3600 * self.hours:
            return f"it took longer than {self.hours:g} h, this agent's maximum (--max-hours)"
        if self.disk is not None and size_of(folder) > GIB * self.disk:
            return f"its folder grew beyond {self.disk:g} GiB, this agent's maximum (--max-disk)"
        return ""


NO_LIMITS = Limits()


def size_of(folder: Path) -> int:
    """Bytes on disk of all files in a folder; files that are removed meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512  # noqa: PTH118 - many
            except OSError:
                continue
    return total


def offer(labels: Sequence[str] = (), limits: Limits = NO_LIMITS) -> Offer:
    """What this machine offers.

    Args:
        labels: Words that jobs may ask for.
        limits: What a job may take of the machine.

    Raises:
        BatchwrightError: A label is invalid.
    """
    from pydantic import ValidationError

    gpus = _gpus()[: limits.workers]  # as many as `Limits.environment` shows a job
    try:
        return Offer(
            labels=tuple(labels),
            gpus=len(gpus),
            gpu=gpus[0][0][:120] if gpus else "",
            gpu_memory=min((memory for _, memory in gpus), default=0),
            cores=usable_cores(),
            memory=usable_memory(),
            max_workers=limits.workers,
        )
    except ValidationError as error:
        raise BatchwrightError(label_problem(error)) from None


def _gpus() -> list[tuple[str, int]]:
    """Model and memory in bytes of each GPU that PyTorch sees, by a process of its own, so that
    this one needs no torch; empty without a driver, or where that process fails.
    """
    if not has_gpu_driver():
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LIST_GPUS],
            capture_output=True,
            timeout=_LIST_SECONDS,
            check=True,
        )
        return [(str(name), int(memory)) for name, memory in json.loads(done.stdout)]
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):
        return []
