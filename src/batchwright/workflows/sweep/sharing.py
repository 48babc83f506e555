"""A sweep in processes that another launcher has started: of n processes each runs every nth cell.

Cells know nothing of each other, so nothing but their start and their end is told between the
processes: worker 0 plans, hands out names of plans that all find on the shared disk, runs its own
share, and records how the others' cells ended.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.distributed.joining.environments import Started, joined
from batchwright.records import Job, Plan
from batchwright.records.documents import read_record
from batchwright.workflows.sweep.grid import Cell
from batchwright.workflows.sweep.runner import Runner, Watcher, plan_file_of
from batchwright.workflows.sweep.slots import AtOnce, Machine, Slots, machine_for

if TYPE_CHECKING:
    from batchwright.distributed.joining.gathering import Gathering

Share = Sequence[tuple[Cell, Plan]]
_BINDING = ("mpirun", "srun")  # launchers that may give a process cores of its own


def own_machine(plans: Sequence[Plan]) -> Machine:
    """What cells of this process may use: its part of the host, if others share it."""
    machine, started = machine_for(plans), joined()
    return machine if started is None else part_of(machine, started, os.cpu_count() or 1)


def part_of(machine: Machine, started: Started, cores: int) -> Machine:
    """The part of a process in what it sees of a host with so many cores.

    A launcher may have bound it to cores and a GPU of its own already, as Slurm does.
    """
    rank, size, seen = started.local_rank, started.local_size, machine.gpus
    # torchrun binds nobody: fewer cores than the host has are the allocation's, for all of them.
    bound = started.by in _BINDING and machine.cores * size <= cores
    return Machine(
        machine.cores if bound else max(1, machine.cores // size),
        seen[rank::size] or seen[rank % len(seen) :][:1] if seen else (),
    )


def hand_out(folder: Path, todo: Share, widths: Sequence[int], most: AtOnce) -> tuple[int, Share]:
    """Give the other processes their shares; returns the order's number and the own share."""
    from batchwright.distributed.joining.gathering import Gathering

    gathering = Gathering.current
    if gathering is None:
        return 0, todo
    number = gathering.order(
        "cells",
        folder=str(folder.absolute()),
        cells=[(cell.name, cell.seed, cell.job.model_dump_json()) for cell, _ in todo],
        widths=list(widths),
        most=most,
    )
    return number, todo[:: gathering.started.size]


def take_down(number: int, watcher: Watcher) -> int:
    """Record how the others' cells ended, once they have; returns a stop signal, or 0."""
    from batchwright.distributed.joining.gathering import Gathering

    if Gathering.current is None:
        return 0
    stopped = 0
    for answer in Gathering.current.answers(number):
        stopped = stopped or answer["stopped"]
        for ended in answer["ended"]:
            watcher.ended(*ended)
    return stopped


def run_share(gathering: Gathering, order: Mapping[str, Any]) -> dict[str, Any]:
    """Another worker's part: run its share of the cells, and say how each ended."""
    folder, started = Path(order["folder"]), gathering.started
    cells = [
        Cell(name, (), seed, Job.model_validate_json(job))
        for name, seed, job in order["cells"][started.rank :: started.size]
    ]
    todo = [(cell, read_record(plan_file_of(folder, cell), Plan)) for cell in cells]
    slots = Slots(own_machine([plan for _, plan in todo]), order["widths"], order["most"])
    ended: list[tuple[str, str, str]] = []
    watcher = Watcher(
        began=lambda *_: None, wrote=lambda *_: None, ended=lambda *how: ended.append(how)
    )
    return {"stopped": Runner(folder, slots, watcher).run(todo), "ended": ended}
