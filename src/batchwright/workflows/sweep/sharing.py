"""A sweep shared by processes that another launcher has started: each runs every nth cell.

Worker 0 plans, sends the other processes their cells, whose plans are on the shared disk, runs its
own share, and records how the others' cells ended. Cells do not depend on each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.distributed.joining.environments import Started, joined
from batchwright.errors import BatchwrightError, Interrupted, LostWorkerError
from batchwright.records import Job, Plan
from batchwright.records.documents import read_record
from batchwright.workflows.sweep.grid import Cell
from batchwright.workflows.sweep.runner import (
    LAST_SECONDS,
    Runner,
    Watcher,
    is_done,
    plan_file_of,
    run_folder_of,
)
from batchwright.workflows.sweep.slots import AtOnce, Machine, Slots, machine_for, named_slices

if TYPE_CHECKING:
    from batchwright.distributed.joining.gathering import Gathering

Share = Sequence[tuple[Cell, Plan]]
Gpus = Sequence[Sequence[str]]  # GPUs that each process sees, in rank order
_BINDING = ("mpirun", "srun")  # launchers that may bind a process to cores of its own


def own_machine(plans: Sequence[Plan], seen: Gpus | None = None) -> Machine:
    """The resources for cells of this process: its part of the host, if other processes share it.

    Args:
        plans: Plans of the cells.
        seen: GPUs that each of the processes sees; unset: worker 0 asks all of them.
    """
    machine, started = machine_for(plans), joined()
    if started is None:
        return machine
    if seen is None:
        seen = _seen_by_all() if machine.gpus else ()
    return part_of(machine, started, os.cpu_count() or 1, seen)


def part_of(machine: Machine, started: Started, cores: int, seen: Gpus = ()) -> Machine:
    """One process's part of the resources that it sees.

    A launcher such as Slurm may have bound the process to cores and GPUs of its own already. The
    number of visible cores shows that. Local names of GPUs do not, since each process may number
    its own from 0; so processes that see the same GPUs (by ``seen``) divide them.

    Args:
        machine: The resources that the process sees.
        started: The process among those of its start.
        cores: Cores of the host.
        seen: GPUs that each process sees, under names that are the same in all processes.
    """
    # torchrun does not bind processes: if fewer cores than the host's are visible, all share these.
    bound = started.by in _BINDING and machine.cores * started.local_size <= cores
    own = machine.cores if bound else max(1, machine.cores // started.local_size)
    if not machine.gpus:
        return Machine(own)
    mine = seen[started.rank]
    sharing = [rank for rank, gpus in enumerate(seen) if {*gpus} & {*mine}]
    nth = sharing.index(started.rank)
    gpus = tuple(name for _, name in sorted(zip(mine, machine.gpus, strict=True)))
    return Machine(own, gpus[nth :: len(sharing)] or gpus[nth % len(gpus) :][:1])


def seen_gpus(*_: object) -> list[str]:
    """Names of the GPUs that this process sees, the same in all processes."""
    import torch

    from batchwright.workload.host import identity

    whole = (identity(torch.device("cuda", n)) for n in range(torch.cuda.device_count()))
    return [*(named_slices() or whole)]


def _seen_by_all() -> Gpus:
    from batchwright.distributed.joining.gathering import Gathering

    assert Gathering.current is not None  # noqa: S101 - this process has joined a start
    return [seen_gpus(), *Gathering.current.ask("gpus")]


def hand_out(folder: Path, todo: Share, widths: Sequence[int], most: AtOnce) -> tuple[int, Share]:
    """Send the other processes their shares; returns the order's number and the own share."""
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
        gpus=_seen_by_all() if machine_for([plan for _, plan in todo]).gpus else [],
    )
    return number, todo[:: gathering.started.size]


def take_down(
    number: int,
    folder: Path,
    others: Iterable[Cell],
    watcher: Watcher,
    stops: Callable[[], Sequence[int]],
) -> None:
    """Wait for the other processes' cells, and tell the watcher how they ended.

    ``number`` is that of the order, from `hand_out`; ``stops`` returns the stop signals so far.
    """
    from batchwright.distributed.joining.gathering import Gathering

    if Gathering.current is None:
        return
    try:
        answers = Gathering.current.answers(number, LAST_SECONDS)
    except BatchwrightError as error:
        for cell in others:  # their processes are gone: see what they have left
            if run_folder_of(folder, cell).exists():
                watcher.ended(cell.name, "done" if is_done(folder, cell) else "stopped", "")
        if stops() and isinstance(error, Interrupted | LostWorkerError):
            return
        raise
    for answer in answers:
        for ended in answer:
            watcher.ended(*ended)


def run_share(gathering: Gathering, order: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Run this process's share of the cells of an order; returns (name, state, error) of each."""
    folder, started = Path(order["folder"]), gathering.started
    cells = [
        Cell(name, (), seed, Job.model_validate_json(job))
        for name, seed, job in order["cells"][started.rank :: started.size]
    ]
    todo = [(cell, read_record(plan_file_of(folder, cell), Plan)) for cell in cells]
    machine = own_machine([plan for _, plan in todo], order["gpus"])
    slots = Slots(machine, order["widths"], order["most"])
    ended: list[tuple[str, str, str]] = []
    watcher = Watcher(
        began=lambda *_: None, wrote=lambda *_: None, ended=lambda *how: ended.append(how)
    )
    Runner(folder, slots, watcher).run(todo, gathering.stops)
    return ended
