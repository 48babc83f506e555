"""A sweep in processes that another launcher has started: of n processes each runs every nth cell.

Cells know nothing of each other, so nothing but their start and their end is told between the
processes: worker 0 plans, hands out names of plans that all find on the shared disk, runs its own
share, and records how the others' cells ended.
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
Gpus = Sequence[Sequence[str]]  # what each process sees, in rank order
_BINDING = ("mpirun", "srun")  # launchers that may give a process cores of its own


def own_machine(plans: Sequence[Plan], seen: Gpus | None = None) -> Machine:
    """What cells of this process may use: its part of the host, if others share it.

    Args:
        plans: Of the cells.
        seen: The GPUs that each of the processes sees; unset: worker 0 asks.
    """
    machine, started = machine_for(plans), joined()
    if started is None:
        return machine
    if seen is None:
        seen = _seen_by_all() if machine.gpus else ()
    return part_of(machine, started, os.cpu_count() or 1, seen)


def part_of(machine: Machine, started: Started, cores: int, seen: Gpus = ()) -> Machine:
    """The part of a process in what it sees of a host with so many cores.

    A launcher may have bound it to cores and GPUs of its own already, as Slurm does. Cores say so
    by their number. Names of GPUs do not, as each process may call its own by 0 and up: those that
    see the same GPUs share them, whoever sees others alone has them all.
    """
    # torchrun binds nobody: fewer cores than the host has are the allocation's, for all of them.
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
    """What the GPUs that this process sees are called by everybody."""
    import torch

    from batchwright.workload.host import identity

    whole = (identity(torch.device("cuda", n)) for n in range(torch.cuda.device_count()))
    return [*(named_slices() or whole)]


def _seen_by_all() -> Gpus:
    from batchwright.distributed.joining.gathering import Gathering

    assert Gathering.current is not None  # noqa: S101 - or this process had joined none
    return [seen_gpus(), *Gathering.current.ask("gpus")]


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
    """Record how the others' cells ended, once they have, or have had time to stop."""
    from batchwright.distributed.joining.gathering import Gathering

    if Gathering.current is None:
        return
    try:
        answers = Gathering.current.answers(number, LAST_SECONDS)
    except BatchwrightError as error:
        for cell in others:  # whose own process will not tell any more
            if run_folder_of(folder, cell).exists():
                watcher.ended(cell.name, "done" if is_done(folder, cell) else "stopped", "")
        if stops() and isinstance(error, Interrupted | LostWorkerError):
            return
        raise
    for answer in answers:
        for ended in answer:
            watcher.ended(*ended)


def run_share(gathering: Gathering, order: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Another worker's part: run its share of the cells; name, state and error of what ended."""
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
