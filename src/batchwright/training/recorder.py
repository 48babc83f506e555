"""The records of a run: metrics.jsonl while it goes on, summary.json at its end.

Only rank 0 writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from batchwright.algorithms.learning_rate import rate_factor
from batchwright.distributed.processes import STARTED, seconds_since_launch
from batchwright.distributed.tally import WorkerNote
from batchwright.errors import FileError
from batchwright.prediction.accuracy.forecast import forecast, straying
from batchwright.records import EpochRecord, Plan, Profile, RunSummary
from batchwright.records.documents import write_record
from batchwright.records.lines.line_files import METRICS, line_text, lines_of
from batchwright.records.lines.lost_lines import newest_epoch
from batchwright.records.lines.run_lines import (
    EpochLine,
    RunLine,
    SharesLine,
    StepLine,
    WorkerShare,
    WorkerStep,
    note,
)
from batchwright.records.run import is_over, reached_epoch, stalled_words
from batchwright.records.text.formatting import percent
from batchwright.storage.files import end_of_lines
from batchwright.training.step.epoch_totals import EpochMeter

STEP_LINE_SECONDS = 0.5  # between two lines inside an epoch


class Recorder:
    """Writes the records of one run.

    Args:
        folder: The run folder; it exists. ``None`` writes nothing.
        plan: The plan that is followed.
    """

    def __init__(self, folder: Path | None, plan: Plan) -> None:
        self.folder = folder
        self.epochs: list[EpochRecord] = []
        self.resumed = 0
        self._plan = plan
        now = time.perf_counter()
        self._started = now - seconds_since_launch()
        # Since the first start, epochs may have been lost.
        self._set_up_from = now - seconds_since_launch(last=True)
        self._launch = os.environ.get(STARTED)
        self._earlier_seconds = 0.0  # before this launch
        self._setup_seconds: float | None = None
        self._last_line = 0.0
        self._mended = False
        self._told_end = False
        self._since_line = _StepTimes()

    def restore(self, content: dict[str, Any], where: str) -> None:
        """Go on from what a checkpoint holds of `values`.

        Args:
            content: What `values` returned.
            where: Note for the records on where the run goes on, if anything is left to do.
        """
        self.epochs = [EpochRecord.model_validate_json(text) for text in content["epochs"]]
        self.resumed = content["resumed"] + 1
        again = self._launch is not None and content.get("launch") == self._launch
        # Started again by the same launcher: the seconds since its start have all others in them.
        self._earlier_seconds = content["earlier_seconds" if again else "wall_seconds"]
        self._setup_seconds = content["setup_seconds"]
        self._write_missing()
        self._told_end = self.over
        done = len(self.epochs) >= self._plan.epochs or self.over
        self.note("the run was finished already" if done else where)

    def _write_missing(self) -> None:
        """Write lines of epochs that a checkpoint knows and metrics.jsonl does not yet have.

        A checkpoint may be on the disk before the line that tells how long it took, and a machine
        that goes down may lose lines that were written before it. An epoch before others that are
        there stays without a line, as an earlier version has left it: behind them, its line would
        say that a kill has taken them.
        """
        if self.folder is None:
            return
        newest = newest_epoch(lines_of(self.folder, lambda: self._plan.data, newest_first=True))
        known, self.epochs = self.epochs, []
        for record in known:
            self.epochs.append(record)
            if record.epoch > newest:
                self.epoch(record)

    @cached_property
    def _factors(self) -> list[float]:
        """Learning rate at the end of each epoch, relative to its peak."""
        plan = self._plan
        rule, samples, epochs = plan.learning_rate, plan.data.train_samples, plan.epochs
        return [
            rate_factor(samples * epoch, rule=rule, samples_per_epoch=samples, epochs=epochs)
            for epoch in range(1, epochs + 1)
        ]

    @property
    def over(self) -> bool:
        """Whether an evaluation has ended training."""
        return is_over(self._plan, self.epochs)

    def tell_end(self) -> None:
        """Note, once, that an evaluation has ended training, and why."""
        if self._told_end or not self.over:
            return
        self._told_end = True
        first, goal = reached_epoch(self._plan, self.epochs), self._plan.job.goal
        if first is None or first.top1 is None:
            self.note(stalled_words(self._plan, self.epochs))
        else:
            self.note(
                f"goal.accuracy={goal.accuracy:g} is reached: {percent(first.top1)} after epoch "
                f"{first.epoch + 1} of {self._plan.epochs}; training ends"
            )

    def values(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "epochs": [record.model_dump_json() for record in self.epochs],
            "resumed": self.resumed,
            "wall_seconds": self.wall_seconds,
            "earlier_seconds": self._earlier_seconds,
            "launch": self._launch,
            "setup_seconds": self._setup_seconds or 0.0,
        }

    def training_begins(self) -> None:
        """Note the time: set-up is over."""
        if self._setup_seconds is None:
            self._setup_seconds = time.perf_counter() - self._set_up_from

    def step(
        self,
        meter: EpochMeter,
        steps: int,
        local_batch_sizes: Sequence[int],
        notes: Sequence[WorkerNote],
    ) -> None:
        """Record a step of the epoch in progress; writes a line every half second at most.

        Args:
            meter: Sums of the epoch so far.
            steps: Steps of the whole epoch.
            local_batch_sizes: Samples of each worker in the step, in rank order.
            notes: What each worker said of itself, in rank order.
        """
        if self.folder is None:
            return
        self._since_line.add([note.seconds for note in notes])
        now = time.perf_counter()
        if now - self._last_line < STEP_LINE_SECONDS:
            return
        self._last_line = now
        means = zip(local_batch_sizes, *self._since_line.means(), strict=True)
        self._since_line = _StepTimes()
        self.line(
            StepLine(
                kind="step",
                epoch=meter.epoch,
                step=meter.steps,
                steps=steps,
                training_seconds=round(meter.training, 4),
                train_loss=meter.mean_loss,
                samples_per_second=round(meter.samples_per_second, 2),
                learning_rate=meter.rate,
                workers=tuple(
                    WorkerStep(
                        local_batch_size=size,
                        compute_seconds=round(compute, 6),
                        wait_seconds=round(wait, 6),
                    )
                    for size, compute, wait in means
                ),
            )
        )

    def shares(
        self,
        epoch: int,
        first: int,
        steps: int,
        local_batch_sizes: Sequence[int],
        places: Sequence[str],
        speeds: Mapping[str, float],
    ) -> None:
        """Write a line about the local batches from step ``first`` of an epoch on.

        Args:
            epoch: Zero-based.
            first: First step with these local batches, zero-based.
            steps: Steps of the epoch.
            local_batch_sizes: Samples per step of each worker, in rank order.
            places: Host and device of each worker, in rank order.
            speeds: Samples per second by place, as far as known.
        """
        workers = tuple(
            WorkerShare(
                place=place,
                local_batch_size=size,
                speed=round(speeds[place], 2) if place in speeds else None,
            )
            for size, place in zip(local_batch_sizes, places, strict=True)
        )
        self.line(SharesLine(kind="shares", epoch=epoch, step=first, steps=steps, workers=workers))

    def note(self, text: str) -> None:
        """Write a line that a person should read."""
        self.line(note(text))

    def epoch(self, record: EpochRecord) -> None:
        """Write a line about a finished epoch, the last of `epochs`, which ``record`` replaces."""
        self.epochs[-1] = record
        if self.folder is None:
            return
        row = self._plan.row(record.epoch, record.global_batch_size)
        predicted = row.predicted_epoch_seconds
        planned = self._plan.epoch_accuracy[record.epoch : record.epoch + 1]
        ahead = forecast(self._plan, self._factors, self.epochs)
        self.line(
            EpochLine(
                kind="epoch",
                record=record,
                epochs=self._plan.epochs,
                predicted_seconds=predicted.value if predicted else None,
                predicted_top1=planned[0] if planned else None,
                expected_top1=ahead.end,
                likely_epochs=ahead.epochs,
            )
        )
        self.tell_end()
        if text := straying(self._plan, self.epochs, ahead.end):
            self.note(text)

    def line(self, line: RunLine) -> None:
        """Append a line to metrics.jsonl.

        Raises:
            FileError: It cannot be written.
        """
        if self.folder is None:
            return
        path = self.folder / METRICS
        try:
            if not self._mended:
                mend(path)
                self._mended = True
            with path.open("a", encoding="utf-8") as file:
                file.write(line_text(line) + "\n")
        except OSError as error:
            self._mended = False  # a part of the line may be there, as on a full disk
            raise FileError(f"cannot write {path}: {error.strerror}") from None

    def summary(self, profile: Profile | None = None, **fields: Any) -> RunSummary:
        """Summary of the run so far; ``fields`` are further fields of the record."""
        return RunSummary(
            run_folder=str(self.folder or ""),
            plan=self._plan.as_trained({e.epoch: e.global_batch_size for e in self.epochs}),
            profile=profile,
            epochs=tuple(self.epochs),
            setup_seconds=self._setup_seconds or 0.0,
            wall_seconds=self.wall_seconds,
            resumed=self.resumed,
            **fields,
        )

    def finish(self, **fields: Any) -> None:
        """Write summary.json, atomically; ``fields`` as for `summary`."""
        if self.folder is not None:
            write_record(self.summary(**fields), self.folder / "summary.json")

    @property
    def training_seconds(self) -> float:
        """Seconds since training began, evaluation and checkpoints included; 0 before."""
        return max(0.0, self.wall_seconds - (self._setup_seconds or 0.0))

    @property
    def wall_seconds(self) -> float:
        """Seconds of the run so far, those before a resume included."""
        return self._earlier_seconds + time.perf_counter() - self._started


def mend(path: Path) -> None:
    """Cut off the unfinished line that a killed process has left at the end of a file.

    Whole lines stay as they are.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        whole = end_of_lines(file)
        if whole < file.seek(0, os.SEEK_END):
            file.truncate(whole)


class _StepTimes:
    """Sums of the workers' times over some steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._computed: list[float] = []
        self._waited: list[float] = []

    def add(self, computed: Sequence[float]) -> None:
        """Add a step: seconds of computing by rank; all wait for the slowest worker."""
        slowest = max(computed)
        if not self._steps:
            self._computed, self._waited = [0.0] * len(computed), [0.0] * len(computed)
        self._steps += 1
        for rank, seconds in enumerate(computed):
            self._computed[rank] += seconds
            self._waited[rank] += slowest - seconds

    def means(self) -> tuple[list[float], list[float]]:
        """Mean seconds of computing and of waiting in a step, by rank."""
        return [v / self._steps for v in self._computed], [v / self._steps for v in self._waited]
