"""Records of a run with a parameter server: of its rounds, and of the epochs that they make up."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.records import EpochRecord, Plan, RoundRecord, WorkerTime
from batchwright.records.lines.line_files import METRICS, sound_line
from batchwright.records.lines.run_lines import EvaluationLine, RoundLine
from batchwright.records.run import recorded_loss
from batchwright.storage.files import end_of_lines
from batchwright.training.parameter_server.messages import Trained
from batchwright.training.parameter_server.rounds import RoundAssignment
from batchwright.training.recorder import Recorder
from batchwright.training.step.epoch_totals import held_out_fields


def round_record(
    plan: Plan, assignment: RoundAssignment, trained: Trained, **known: Any
) -> RoundRecord:
    """Record of a round as it was assigned and trained; ``known`` are further fields."""
    stage = plan.stages[assignment.stage]
    return RoundRecord(
        worker=assignment.worker,
        number=assignment.number,
        epoch=assignment.epoch,
        resolution=stage.resolution,
        local_batch_size=assignment.batch or stage.local_batch_sizes[assignment.worker],
        samples=assignment.samples,
        steps=trained.steps,
        skipped_steps=trained.skipped,
        repeated_steps=trained.repeated,
        update_factor=assignment.factor,
        loss=trained.loss,
        compute_seconds=trained.compute,
        peak_bytes=trained.peak or None,
        **known,
    )


@dataclass
class _Ended:
    """A round that has ended, whose record may still lack fields."""

    record: RoundRecord
    rate: float
    committed: int
    complete: bool = False


@dataclass(frozen=True)
class _Scores:
    """Result of an evaluation: sums over the held-out samples, their number, its seconds."""

    sums: Mapping[str, float]
    count: int
    seconds: float


class RoundLog:
    """Records rounds in the order in which they end, and epochs as they are completed.

    Rounds of several workers overlap, and one may begin in one epoch and end in the next. So an
    epoch's record covers the rounds from the end of the epoch before until its samples' worth is
    committed, and its training seconds are the workers' time in these rounds over the number of
    workers, waits and exchanges included, evaluation not. Its learning rate is that of the round
    that ended last among those of the epoch: the one that brings the last of the samples may follow
    the next row.

    Each round is a line of metrics.jsonl, which only grows. So a checkpoint does not hold the
    rounds: it says between which bytes of the file they are, one stretch for each start of the run,
    and its length does not depend on how many rounds were before. Whenever the run is killed, what
    was written after the checkpoint lies outside of its stretches, and what comes after the resume
    is a stretch of its own. So no round is there twice, whichever checkpoint is resumed from.

    Args:
        recorder: Writes lines and the summary.
        plan: A plan with a parameter server.
        samples: Size of the data set.
        places: Host and device of each worker, in rank order.

    Attributes:
        rounds: The rounds, in the order in which they ended.
        places: Host and device of each worker; may be changed when one comes back elsewhere.
        gone: Workers that are lost for good; may be replaced by a set that the caller updates.
    """

    def __init__(self, recorder: Recorder, plan: Plan, samples: int, places: Sequence[str]) -> None:
        self.rounds: list[RoundRecord] = []
        self.places = list(places)
        self.gone: set[int] = set()
        self._recorder, self._plan, self._samples = recorder, plan, samples
        self._since: list[RoundRecord] = []  # rounds of the epoch in progress
        self._rates: dict[int, float] = {}  # by epoch, of its last round
        self._scores: dict[int, _Scores] = {}
        self._checkpoint = 0.0
        self._whole = True
        self._inherited: list[str] = []  # rounds that an earlier version's checkpoint holds
        self._stretches: list[tuple[int, int]] = []  # byte ranges of earlier starts
        self._first: int | None = None  # first byte of this start's stretch, once it has a round
        self._pending: deque[_Ended] = deque()  # in the order in which they ended

    def await_rest(self, record: RoundRecord, *, rate: float, committed: int) -> None:
        """Keep a round that has ended until `complete` says that its record lacks nothing.

        Args:
            record: The record so far.
            rate: Learning rate of its last step.
            committed: Samples of all rounds that have ended, this one included.
        """
        self._pending.append(_Ended(record, rate, committed))

    def note(self, worker: int, **known: float) -> None:
        """Fill in fields of the record of a worker's last round."""
        for ended in self._pending:  # at most one is the worker's and not complete
            if ended.record.worker == worker and not ended.complete:
                ended.record = ended.record.model_copy(update=known)

    def complete(self, worker: int | None = None, **known: float) -> None:
        """Add a worker's last round, or everybody's (``None``), as no more fields will come."""
        if worker is not None:
            self.note(worker, **known)
        for ended in self._pending:
            ended.complete = ended.complete or worker in (None, ended.record.worker)
        while self._pending and self._pending[0].complete:
            ended = self._pending.popleft()
            self.add(ended.record, rate=ended.rate, committed=ended.committed)

    def add(
        self, record: RoundRecord, *, rate: float, committed: int, complete: bool = True
    ) -> None:
        """Record a round that has ended and is merged, and the epochs that it completes.

        Args:
            record: Record of the round.
            rate: Learning rate of its last step.
            committed: Samples of all rounds that have ended, this one included.
            complete: Whether the record lacks nothing; else its epoch is not whole.
        """
        self.rounds.append(record)
        self._since.append(record)
        self._rates[record.epoch] = rate
        self._whole = self._whole and complete
        if self._first is None:
            self._first = self._end_of_file()
        self._recorder.line(
            RoundLine(kind="round", record=record, learning_rate=rate, committed=committed)
        )
        while (len(self._recorder.epochs) + 1) * self._samples <= committed:
            epoch = len(self._recorder.epochs)
            own = self._rates.pop(epoch, rate)  # a long round may leave an epoch without one
            self._recorder.epochs.append(self._epoch(epoch, own))
            self._since, self._checkpoint, self._whole = [], 0.0, True
            self._recorder.epoch(self._recorder.epochs[-1])

    def scored(self, epoch: int, sums: Mapping[str, float], count: int, seconds: float) -> None:
        """Record an evaluation of the model as it was at the end of an epoch.

        Args:
            epoch: Zero-based; its record may be there already or not.
            sums: Sum of each value over the held-out samples; ``top1`` and ``loss`` are recorded.
            count: Number of held-out samples.
            seconds: Seconds of the evaluation.
        """
        self._scores[epoch] = _Scores(dict(sums), count, seconds)
        if epoch < len(self._recorder.epochs):
            record = self._recorder.epochs[epoch]
            self._recorder.epochs[epoch] = record.model_copy(update=self._held_out(epoch))
            top1 = self._recorder.epochs[epoch].top1
            self._recorder.line(EvaluationLine(kind="evaluation", epoch=epoch, top1=top1))
            self._recorder.tell_end()

    def saved(self, seconds: float) -> None:
        """Add the seconds for which writing a checkpoint held the run up."""
        self._checkpoint += seconds

    # ----------------------------------------------------------------------------- checkpoints

    def values(self) -> dict[str, Any]:
        """Plain values for a checkpoint; the epochs are the recorder's."""
        stretches = list(self._stretches)
        if self._first is not None:
            stretches.append((self._first, self._end_of_file()))
        return {
            "rounds": self._inherited,
            "stretches": stretches,
            "count": len(self.rounds),
            "since": len(self._since),
            "rates": list(self._rates.items()),
            "scores": [
                (epoch, dict(one.sums), one.count, one.seconds)
                for epoch, one in self._scores.items()
            ],
        }

    def pending(self) -> list[tuple[str, float, int]]:
        """Plain values for a checkpoint: rounds whose records lack fields."""
        return [(one.record.model_dump_json(), one.rate, one.committed) for one in self._pending]

    def restore(
        self, values: Mapping[str, Any], pending: Iterable[tuple[str, float, int]] = ()
    ) -> None:
        """Go on from a checkpoint's `values`, in an epoch that is no longer whole.

        The recorder has its epochs already. Rounds that were `pending` are added as they are, since
        nobody can fill in their fields any more.
        """
        self._inherited = list(values["rounds"])
        end = self._end_of_file()  # lines that are gone, as with a machine, leave room for new ones
        known = [(first, min(last, end)) for first, last in values.get("stretches", ())]
        self._stretches = [(first, last) for first, last in known if first < last]
        self.rounds = [RoundRecord.model_validate_json(text) for text in self._inherited]
        self.rounds += self._read_rounds()
        missing = values.get("count", len(self.rounds)) - len(self.rounds)
        if missing:
            self._recorder.note(
                f"metrics.jsonl is not as the run left it: {missing} rounds of before are not on "
                "record any more"
            )
        since = values["since"]
        self._since = self.rounds[max(0, len(self.rounds) - since) :]
        self._rates = dict(values.get("rates", ()))
        self._whole = not since
        self._scores = {
            epoch: _Scores(sums, count, seconds)
            for epoch, sums, count, seconds in values.get("scores", ())
        }
        for text, rate, committed in pending:
            record = RoundRecord.model_validate_json(text)
            self.add(record, rate=rate, committed=committed, complete=False)

    def _end_of_file(self) -> int:
        """Position, in bytes, at which the last whole line of metrics.jsonl ends."""
        path = self._lines
        if path is None or not path.exists():
            return 0
        with path.open("rb") as file:
            return end_of_lines(file)

    def _read_rounds(self) -> Iterator[RoundRecord]:
        """Rounds of earlier starts that metrics.jsonl still has."""
        if self._lines is None or not self._lines.exists():
            return
        with self._lines.open("rb") as file:
            for first, last in self._stretches:
                file.seek(first)
                for text in file.read(last - first).splitlines():
                    line = sound_line(text)
                    if isinstance(line, RoundLine):
                        yield line.record

    @property
    def _lines(self) -> Path | None:
        folder = self._recorder.folder
        return folder and folder / METRICS

    # ---------------------------------------------------------------------------------- epochs

    def _epoch(self, epoch: int, rate: float) -> EpochRecord:
        stage = self._plan.stages[self._plan.stage_of(epoch)]
        present = len(self.places) - len(self.gone)
        by_worker: dict[int, list[RoundRecord]] = defaultdict(list)
        for record in self._since:
            by_worker[record.worker].append(record)
        known = [(one.loss, one.samples) for one in self._since if one.loss is not None]
        samples = sum(count for _, count in known)
        loss = sum(value * count for value, count in known) / samples if samples else math.nan
        scores = self._held_out(epoch) if epoch in self._scores else {"evaluation_seconds": 0.0}
        return EpochRecord(
            epoch=epoch,
            resolution=stage.resolution,
            global_batch_size=stage.global_batch_size,
            steps=sum(one.steps for one in self._since),
            skipped_steps=sum(one.skipped_steps for one in self._since),
            repeated_steps=sum(one.repeated_steps for one in self._since),
            samples=sum(one.samples for one in self._since),
            learning_rate=rate,
            train_loss=recorded_loss(loss),
            training_seconds=sum(map(seconds_of, self._since)) / max(1, present),
            checkpoint_seconds=self._checkpoint,
            workers=tuple(
                _worker_time(place, stage.local_batch_sizes[worker], by_worker[worker])
                for worker, place in enumerate(self.places)
            ),
            whole=self._whole,
            **scores,
        )

    def _held_out(self, epoch: int) -> dict[str, Any]:
        """Fields of an epoch's record that its evaluation fills in."""
        scores = self._scores[epoch]
        return {**held_out_fields(scores.sums, scores.count), "evaluation_seconds": scores.seconds}


def seconds_of(record: RoundRecord) -> float:
    """A round's time without evaluation, in seconds."""
    return record.compute_seconds + record.exchange_seconds + record.wait_seconds


def _worker_time(place: str, local_batch_size: int, rounds: Sequence[RoundRecord]) -> WorkerTime:
    return WorkerTime(
        place=place,
        local_batch_size=rounds[-1].local_batch_size if rounds else local_batch_size,
        samples=sum(one.samples for one in rounds),
        input_seconds=0.0,
        compute_seconds=sum(one.compute_seconds for one in rounds),
        wait_seconds=sum(one.wait_seconds for one in rounds),
        communication_seconds=sum(one.exchange_seconds for one in rounds),
        peak_bytes=max((one.peak_bytes or 0 for one in rounds), default=0) or None,
    )
