"""What this machine offers to jobs: GPUs, cores, memory; and the limits that its operator sets."""

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

_LOOK = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([[one.name, one.total_memory] for one in found]))
"""
_LOOK_SECONDS = 120.0

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Names the GPUs that a process sees; one that is not there ends the list."""


@dataclass(frozen=True)
class Limits:
    """What jobs may take of this machine; `None`: any amount.

    Attributes:
        workers: Training processes.
        hours: From when the agent gets a job until it is to be done with it.
        disk: GiB of a job's folder.
    """

    workers: int | None = None
    hours: float | None = None
    disk: float | None = None

    def refusal(self, plan: Plan) -> str:
        """Why a plan is not trained here, in a line; empty if it is."""
        if self.workers is not None and plan.workers > self.workers:
            return (
                f"the plan is for {plan.workers} workers, and this agent takes a maximum of "
                f"{self.workers} (--max-workers)"
            )
        return ""

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Variables by which training, where a job leaves the workers open, sees so many GPUs."""
        if self.workers is None:
            return {}
        named = given.get(VISIBLE)
        if named is not None and not named.strip():
            return {}  # none is to be seen
        ids = named.split(",") if named else [str(number) for number in range(self.workers)]
        return {VISIBLE: ",".join(ids[: self.workers])}

    def passed(self, folder: Path, began: float) -> str:
        """Which limit a job has passed, in a line; empty: none.

        Args:
            folder: Of the job.
            began: When the agent got it, by `time.monotonic`.
        """
        if self.hours is not None and time.monotonic() - began > 3600 * self.hours:
            return f"it took longer than {self.hours:g} h, this agent's maximum (--max-hours)"
        if self.disk is not None and size_of(folder) > GIB * self.disk:
            return f"its folder grew beyond {self.disk:g} GiB, this agent's maximum (--max-disk)"
        return ""


NO_LIMITS = Limits()


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder; of those that go meanwhile, nothing."""
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

    Raises:
        BatchwrightError: A label is none.
    """
    from pydantic import ValidationError

    found = _gpus()
    try:
        return Offer(
            labels=tuple(labels),
            gpus=len(found),
            gpu=found[0][0][:120] if found else "",
            gpu_memory=min((memory for _, memory in found), default=0),
            cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 0,
            memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            max_workers=limits.workers,
        )
    except ValidationError as error:
        raise BatchwrightError(label_problem(error)) from None


def _gpus() -> list[tuple[str, int]]:
    """Model and bytes of each GPU that PyTorch sees, asked in a process of its own; none without a
    driver, or where PyTorch cannot tell.
    """
    if not has_gpu_driver():
        return []
    try:
        told = subprocess.run(
            [sys.executable, "-c", _LOOK],
            capture_output=True,
            timeout=_LOOK_SECONDS,
            check=True,
        )
        return [(str(name), int(memory)) for name, memory in json.loads(told.stdout)]
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):
        return []
