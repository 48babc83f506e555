"""Collects the results of a sweep's runs into its record, with means over the seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from batchwright.records import (
    DataFacts,
    Job,
    Mean,
    Plan,
    RunSummary,
    Sweep,
    SweepCell,
    SweepSetting,
    SweptKey,
)
from batchwright.records.documents import read_record
from batchwright.workflows.sweep.grid import Cell
from batchwright.workflows.sweep.runner import State, is_done, run_folder_of


class Results:
    """The record of each cell while the sweep goes on; arguments are those of `Sweep`."""

    def __init__(
        self,
        folder: Path,
        job: Job,
        keys: tuple[SweptKey, ...],
        seeds: tuple[int, ...],
        cells: Sequence[Cell],
    ) -> None:
        self._folder, self._job, self._keys, self._seeds = folder, job, keys, seeds
        self._cells = {cell.name: cell for cell in cells}
        self._records = {
            one.name: SweepCell(name=one.name, values=one.values, seed=one.seed, state="waiting")
            for one in cells
        }
        self.data: DataFacts | None = None

    def planned(self, name: str, plan: Plan) -> None:
        """Record a cell's plan, and its results if it has finished already."""
        values: dict[str, object] = {
            "workers": plan.workers,
            "global_batch_size": plan.stages[-1].global_batch_size,
            "learning_rate": plan.stages[0].learning_rate,
            "warmup_epochs": plan.learning_rate.warmup_epochs,
        }
        self._records[name] = self._records[name].model_copy(update=values)
        self.data = self.data or plan.data
        if is_done(self._folder, self._cells[name]):
            self.ended(name, "done")

    def ended(self, name: str, state: State, error: str = "") -> None:
        """Record how a cell ended, and the results of one that has finished."""
        values: dict[str, object] = {"state": state, "error": error}
        if state == "done":
            path = run_folder_of(self._folder, self._cells[name]) / "summary.json"
            summary = read_record(path, RunSummary)
            best, last = summary.best_epoch, summary.epochs[-1] if summary.epochs else None
            values |= {
                "accuracy": summary.accuracy,
                "best_accuracy": summary.best_accuracy,
                "best_epoch": best.epoch + 1 if best else None,
                "accuracies": tuple(epoch.top1 for epoch in summary.epochs),
                "train_loss": last.train_loss if last else None,
                "noise_scale": last.noise_scale if last else None,
                "training_seconds": sum(epoch.training_seconds for epoch in summary.epochs),
                "simulated": summary.simulated,
            }
        self._records[name] = self._records[name].model_copy(update=values)

    def cell(self, name: str) -> SweepCell:
        """The record of a cell so far."""
        return self._records[name]

    def sweep(self) -> Sweep:
        """The record of the sweep so far."""
        records = tuple(self._records.values())
        return Sweep(
            folder=str(self._folder),
            job=self._job,
            data=self.data,
            keys=self._keys,
            seeds=self._seeds,
            cells=records,
            settings=settings_of(records),
        )


def settings_of(cells: Iterable[SweepCell]) -> tuple[SweepSetting, ...]:
    """The settings in order of appearance, with means over the finished cells."""
    groups: dict[str, list[SweepCell]] = {}
    for cell in cells:
        groups.setdefault(json.dumps(cell.values), []).append(cell)
    settings = []
    for group in groups.values():
        done = [cell for cell in group if cell.state == "done"]
        setting = SweepSetting(
            values=group[0].values,
            done=len(done),
            failed=sum(cell.state == "failed" for cell in group),
            accuracy=mean_of(cell.accuracy for cell in done),
            best_accuracy=mean_of(cell.best_accuracy for cell in done),
            training_seconds=mean_of(cell.training_seconds for cell in done),
        )
        settings.append(setting)
    return tuple(settings)


def mean_of(values: Iterable[float | None]) -> Mean | None:
    r"""Mean and standard error of the known values; `None` if no value is known.

    .. math:: \bar x, \quad \sqrt{\sum_i (x_i - \bar x)^2 / (n (n - 1))}

    Example:
        >>> mean_of([0.5, None, 0.7])
        Mean(value=0.6, standard_error=0.1, count=2)
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    error = stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    rounded = None if error is None else float(f"{error:.12g}")
    return Mean(value=float(f"{fmean(known):.12g}"), standard_error=rounded, count=len(known))
