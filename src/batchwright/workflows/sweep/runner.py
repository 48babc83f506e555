"""Runs the cells of a sweep, each by `batchwright train` in a process of its own.

    this process --> python -m batchwright.cli.verb_child train plans/NAME.json --out cells/NAME

A cell that fails does not stop the others. A stop signal reaches this process, or another that
shares the sweep, and is passed on, so that each cell can write a checkpoint; a second signal ends
them at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchwright.distributed import fork_server
from batchwright.distributed.exit_reports import error_of
from batchwright.distributed.joining.environments import by_itself
from batchwright.distributed.processes import VERB_PARENT
from batchwright.distributed.supervisor import GRACE_SECONDS
from batchwright.distributed.worker_processes import POLL_SECONDS
from batchwright.errors import FileError
from batchwright.records import Plan, run_folder
from batchwright.records.lines.line_files import METRICS, sound_line
from batchwright.records.lines.run_lines import RunLine
from batchwright.records.text.formatting import job_value
from batchwright.storage.files import make_folder
from batchwright.storage.follow_lines import Tail
from batchwright.storage.locks import take
from batchwright.workflows.job_changes import differences, may_change, named_code
from batchwright.workflows.sweep.grid import Cell
from batchwright.workflows.sweep.slots import Slots, width_of

State = Literal["waiting", "stopped", "failed", "done"]

_VERBS = "batchwright.cli.verb_child"
LAST_SECONDS = GRACE_SECONDS + 15.0
"""Seconds from a stop signal until cells are killed; a cell itself waits `GRACE_SECONDS` for its
workers."""


@dataclass(frozen=True)
class Watcher:
    """Callbacks for the events of cells."""

    began: Callable[[str, int], None]  # a cell has started: (name, epochs)
    wrote: Callable[[str, RunLine], None]  # it has written a line of metrics: (name, line)
    ended: Callable[[str, State, str], None]  # it has ended: (name, state, error)


@dataclass(frozen=True)
class _Running:
    cell: Cell
    plan: Plan
    process: fork_server.Process
    gpus: tuple[str, ...]
    lines: Tail[RunLine]


class Runner:
    """Starts cells when there is room, until all have ended or a signal stops them."""

    def __init__(self, folder: Path, slots: Slots, watcher: Watcher) -> None:
        self._folder, self._slots, self._watcher = folder, slots, watcher
        self._running: list[_Running] = []

    def run(self, cells: Sequence[tuple[Cell, Plan]], stops: Callable[[], Sequence[int]]) -> None:
        """Run cells until all have ended, or until ``stops`` returns a stop signal.

        Of those that there is room for, the first in order starts first.
        """
        waiting = list(cells)
        try:
            while (waiting or self._running) and not stops():
                self._start(waiting)
                time.sleep(POLL_SECONDS)
                self._look()
            if self._running:
                self._stop(stops)
        finally:
            for one in self._running:
                one.process.kill()
            for one in self._running:
                one.process.wait()
            self._look(stopping=True)

    def _start(self, waiting: list[tuple[Cell, Plan]]) -> None:
        for one in list(waiting):
            cell, plan = one
            gpus = self._slots.take(width_of(plan))
            if gpus is None:
                continue
            waiting.remove(one)
            self._running.append(self._started(cell, plan, gpus))
            self._watcher.began(cell.name, plan.epochs)

    def _started(self, cell: Cell, plan: Plan, gpus: tuple[str, ...]) -> _Running:
        folder = run_folder_of(self._folder, cell)
        resumes = has_checkpoint(self._folder, cell)
        if not resumes and folder.exists():  # no checkpoint, and `train` needs an empty folder
            with suppress(FileError):  # if another process writes there, `train` will report it
                # Waits for a cell of a killed sweep that is still ending.
                take(folder, "another sweep's --out").close()
                # First: killed behind the mark of a lost `last`, a `best` would be gone on from.
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
                shutil.rmtree(folder)
        lines: Tail[RunLine] = Tail(folder / METRICS, sound_line, from_end=resumes)
        make_folder(self._folder / "logs")
        with log_of(self._folder, cell).open("wb") as log:
            words = words_of(self._folder, cell, plan, resumes=resumes)
            environment = self._environment(gpus)
            process = fork_server.start(_VERBS, words, environment=environment, log=log)
        return _Running(cell, plan, process, gpus, lines)

    def _environment(self, gpus: tuple[str, ...]) -> dict[str, str]:
        from batchwright.workload.host import THREADS

        own = {THREADS: str(self._slots.threads), VERB_PARENT: str(os.getpid())}
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return {**by_itself(os.environ), **own}

    def _look(self, *, stopping: bool = False) -> None:
        for one in list(self._running):
            one.lines(lambda line, name=one.cell.name: self._watcher.wrote(name, line))  # type: ignore[misc]
            code = one.process.poll()
            if code is not None:
                self._running.remove(one)
                self._slots.give_back(width_of(one.plan), one.gpus)
                state, error = self._outcome(one, code, stopping=stopping)
                self._watcher.ended(one.cell.name, state, error)

    def _outcome(self, one: _Running, code: int, *, stopping: bool) -> tuple[State, str]:
        if code == 0 and is_done(self._folder, one.cell):
            return "done", ""
        if stopping:
            return "stopped", ""
        return "failed", error_of(log_of(self._folder, one.cell), code, "it")

    def _stop(self, stops: Callable[[], Sequence[int]]) -> None:
        """Ask all cells to write a checkpoint and end; wait for them, or for a second signal."""
        for one in self._running:
            one.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + LAST_SECONDS
        while self._running and len(stops()) < 2 and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            self._look(stopping=True)


def words_of(folder: Path, cell: Cell, plan: Plan, *, resumes: bool) -> list[str]:
    """The command of a cell's process: keys that differ from the plan's, and import strings."""
    changed = {
        key: value
        for key, _, value in differences(plan.job, cell.job)
        if may_change(key) and key != "launch" and value != "auto"  # which the plan has decided
    }
    named = named_code(cell.job)
    return [
        "train",
        "--resume" if resumes else str(plan_file_of(folder, cell)),
        *("--out", str(run_folder_of(folder, cell))),
        *(f"{key}={job_value(value)}" for key, value in {**changed, **named}.items()),
    ]


def run_folder_of(folder: Path, cell: Cell) -> Path:
    """The cell's run folder."""
    return folder / "cells" / cell.name


def plan_file_of(folder: Path, cell: Cell) -> Path:
    """The file of the cell's plan."""
    return folder / "plans" / f"{cell.name}.json"


def log_of(folder: Path, cell: Cell) -> Path:
    """The output of the cell's process in its last run."""
    return folder / "logs" / f"{cell.name}.log"


def has_checkpoint(folder: Path, cell: Cell) -> bool:
    """Whether the cell can continue; else it is trained from the start."""
    return run_folder.has_checkpoint(run_folder_of(folder, cell))


def is_done(folder: Path, cell: Cell) -> bool:
    """Whether the cell has finished."""
    return (run_folder_of(folder, cell) / "summary.json").exists()
