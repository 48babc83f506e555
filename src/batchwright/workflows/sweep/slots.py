"""Assigns cores and GPUs to the cells of a sweep, as many cells at once as there is room for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from batchwright.errors import JobError
from batchwright.records import Plan
from batchwright.records.text.formatting import counted

AtOnce = Literal["auto"] | int


@dataclass(frozen=True)
class Machine:
    """The resources for cells.

    Attributes:
        cores: Cores that this process may use.
        gpus: CUDA's names of the GPUs; empty if cells compute on the CPU.
    """

    cores: int
    gpus: tuple[str, ...] = ()


def machine_for(plans: Sequence[Plan]) -> Machine:
    """This machine, with its GPUs if the plans use them."""
    from batchwright.workload.host import usable_cores

    gpus: tuple[str, ...] = ()
    if any(plan.job.device == "cuda" for plan in plans):
        import torch

        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        numbers = map(str, range(torch.cuda.device_count()))
        gpus = tuple(named.split(",") if named else numbers)[: torch.cuda.device_count()]
        gpus = named_slices() or gpus
    return Machine(usable_cores(), gpus)


def named_slices() -> tuple[str, ...]:
    """The MIG slices in this process's CUDA_VISIBLE_DEVICES; empty if it has whole GPUs.

    CUDA shows a process only the first of them, but each cell is another process and may have one.
    """
    names = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return tuple(names) if all(one.startswith("MIG-") for one in names) else ()


def width_of(plan: Plan) -> int:
    """Processes of a cell that compute at the same time."""
    return plan.workers if plan.job.launcher.processes else 1


def read_at_once(value: str | int) -> AtOnce:
    """Parse the option ``at_once``: ``auto`` or a number of cells.

    Raises:
        JobError: The value is neither.
    """
    if value == "auto" or (isinstance(value, int) and value >= 1):
        return value  # type: ignore[return-value]  # a checked text is still a text to mypy
    if isinstance(value, str) and re.fullmatch("0*[1-9][0-9]{0,8}", value):
        return int(value)
    raise JobError(f"at_once={value} is no number of runs: give 1 or more, or auto")


class Slots:
    """Assigns resources to cells, and takes them back.

    On the CPU a cell occupies its worker processes times `threads` cores. With ``auto`` as many
    cells run at once as have room. They have one thread each as long as there are enough cells to
    keep all cores busy, since small networks gain more from another cell than from another thread.
    On GPUs each worker has its own GPU, unless so many cells are requested that they must share.

    A cell with more processes than the machine has cores runs alone, as it would outside a sweep.

    Args:
        machine: The resources.
        widths: Processes of each cell of the sweep, finished ones included, so that a resumed cell
            has as many threads as before.
        at_once: Most cells at once.

    Attributes:
        threads: Compute threads of each process.

    Raises:
        JobError: There are not enough cores, or GPUs, for that many cells at once.
    """

    def __init__(self, machine: Machine, widths: Sequence[int], at_once: AtOnce) -> None:
        self._machine, self._most = machine, at_once
        widest = max(widths, default=1)
        places = min(len(machine.gpus) or machine.cores, machine.cores)
        if at_once == "auto":
            together = max(1, min(sum(widths), places))
        else:
            together = at_once * widest
            if at_once > 1 and together > machine.cores:
                raise JobError(
                    f"at_once={at_once} runs of {counted(widest, 'worker')} need {together} cores, "
                    f"and there are {machine.cores}: give "
                    f"at_once={max(1, machine.cores // widest)} or auto"
                )
            if at_once > 1 and widest > 1 and machine.gpus and together > len(machine.gpus):
                raise JobError(
                    f"at_once={at_once} runs of {widest} workers need {together} GPUs, and there "
                    f"are {len(machine.gpus)}: give "
                    f"at_once={max(1, len(machine.gpus) // widest)} or auto"
                )
        self.threads = max(1, machine.cores // together)
        self._running = 0
        self._cores = 0
        self._users: Mapping[str, int] = dict.fromkeys(machine.gpus, 0)

    def take(self, width: int) -> tuple[str, ...] | None:
        """Reserve resources for a cell of ``width`` processes.

        Returns:
            Names of the cell's GPUs, empty on the CPU; `None` if there is no room now.
        """
        if self._running and not self._has_room(width):
            return None
        self._running += 1
        self._cores += width * self.threads
        gpus = tuple(sorted(self._users, key=lambda name: self._users[name])[:width])
        self._users = {name: n + (name in gpus) for name, n in self._users.items()}
        return gpus

    def give_back(self, width: int, gpus: Sequence[str]) -> None:
        """Free the resources of a cell; ``gpus`` are from `take`."""
        self._running -= 1
        self._cores -= width * self.threads
        self._users = {name: n - (name in gpus) for name, n in self._users.items()}

    def _has_room(self, width: int) -> bool:
        if self._most != "auto":
            return self._running < self._most
        if self._machine.gpus and sum(not users for users in self._users.values()) < width:
            return False
        return self._cores + width * self.threads <= self._machine.cores
