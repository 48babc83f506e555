"""What a run leaves behind: metrics.jsonl while it goes, summary.json at its end.

Only rank 0 writes. Metric names are slash-grouped, as trackers show them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from batchwright.documents import write_record
from batchwright.errors import FileError
from batchwright.processes import seconds_since_launch
from batchwright.records import EpochRecord, Plan, Profile, RunSummary
from batchwright.training.meter import EpochMeter

STEP_LINE_SECONDS = 0.5  # between two lines inside an epoch


class Recorder:
    """Writes the records of one run.

    Args:
        folder: The run folder; it exists. ``None`` writes nothing.
        plan: What is followed.
    """

    def __init__(self, folder: Path | None, plan: Plan) -> None:
        self.folder = folder
        self.epochs: list[EpochRecord] = []
        self.resumed = 0
        self._plan = plan
        self._started = time.perf_counter() - seconds_since_launch()
        self._earlier_seconds = 0.0
        self._setup_seconds: float | None = None
        self._last_line = 0.0

    def restore(self, content: dict[str, Any]) -> None:
        """Go on from what a checkpoint holds of `values`."""
        self.epochs = [EpochRecord.model_validate_json(text) for text in content["epochs"]]
        self.resumed = content["resumed"] + 1
        self._earlier_seconds = content["wall_seconds"]
        self._setup_seconds = content["setup_seconds"]
        done = len(self.epochs) >= self._plan.epochs
        text = (
            "the run was finished already" if done else f"resumed at epoch {len(self.epochs) + 1}"
        )
        self.line({"kind": "note", "text": text})

    def values(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "epochs": [record.model_dump_json() for record in self.epochs],
            "resumed": self.resumed,
            "wall_seconds": self._wall_seconds(),
            "setup_seconds": self._setup_seconds or 0.0,
        }

    def training_begins(self) -> None:
        """Set-up is over."""
        if self._setup_seconds is None:
            self._setup_seconds = time.perf_counter() - self._started

    def step(self, meter: EpochMeter, steps: int, batch: int) -> None:
        """A line about the epoch in progress, at most every half second."""
        now = time.perf_counter()
        if now - self._last_line < STEP_LINE_SECONDS:
            return
        self._last_line = now
        self.line(
            {
                "kind": "step",
                "epoch": meter.epoch,
                "step": meter.steps,
                "steps": steps,
                "time/train_s": round(meter.training, 4),
                "train/loss": meter.mean_loss,
                "throughput/samples_per_sec": round(meter.samples_per_second, 2),
                "lr": meter.rate,
                "batch/global": batch,
            }
        )

    def epoch(self, record: EpochRecord) -> None:
        """A line about a finished epoch, the last of `epochs`; ``record`` replaces it."""
        self.epochs[-1] = record
        predicted = self._plan.stages[self._plan.stage_of(record.epoch)].predicted_epoch_seconds
        seconds = record.training_seconds
        line: dict[str, Any] = {
            "kind": "epoch",
            "epoch": record.epoch,
            "epochs": self._plan.epochs,
            "train/loss": record.train_loss,
            "val/loss": record.val_loss,
            "val/top1": record.top1,
            "time/epoch_s": seconds,
            "time/eval_s": record.evaluation_seconds,
            "time/checkpoint_s": record.checkpoint_seconds,
            "throughput/samples_per_sec": record.samples / seconds if seconds else None,
            "lr": record.learning_rate,
            "resolution": record.resolution,
            "batch/global": record.global_batch_size,
            "steps/skipped": record.skipped_steps,
            "plan/predicted_epoch_s": predicted.value if predicted else None,
            "gns/simple": record.noise_scale,
        }
        for rank, worker in enumerate(record.workers):
            line[f"batch/local/{rank}"] = worker.local_batch_size
            line[f"time/rank{rank}/input_s"] = worker.input_seconds
            line[f"time/rank{rank}/compute_s"] = worker.compute_seconds
            line[f"time/rank{rank}/comm_s"] = worker.communication_seconds
        self.line(line)

    def line(self, values: dict[str, Any]) -> None:
        """Append one JSON object to metrics.jsonl.

        Raises:
            FileError: It cannot be written.
        """
        if self.folder is None:
            return
        try:
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise FileError(f"cannot write {self.folder}/metrics.jsonl: {error.strerror}") from None

    def summary(self, profile: Profile | None = None) -> RunSummary:
        """The run so far."""
        return RunSummary(
            run_folder=str(self.folder or ""),
            plan=self._plan,
            profile=profile,
            epochs=tuple(self.epochs),
            setup_seconds=self._setup_seconds or 0.0,
            wall_seconds=self._wall_seconds(),
            resumed=self.resumed,
        )

    def finish(self) -> None:
        """Write summary.json, atomically."""
        if self.folder is not None:
            write_record(self.summary(), self.folder / "summary.json")

    def _wall_seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._started
