"""A sweep: one job run with every combination of some keys' values, several seeds of each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidatorFunctionWrapHandler, WrapValidator

from batchwright.records.base import Count, Document, Index, NonNegative, Positive, Record
from batchwright.records.job import Job, other_keys_come
from batchwright.records.profile import DataFacts
from batchwright.records.text.formatting import job_value, percent


class SweptKey(Record):
    """A job key and the values that it takes."""

    key: str = Field(min_length=1, description="As in the job, nested ones with a dot.")
    values: tuple[JsonValue, ...] = Field(min_length=1, description="As a job file writes them.")


class SweepCell(Record):
    """One run: a value for each key, and a seed."""

    name: str = Field(min_length=1, description="Of its folder under `cells/`.")
    values: tuple[JsonValue, ...] = Field(description="In the order of the sweep's keys.")
    seed: Index = Field(description="Of weights, order, split and augmentation.")
    state: Literal["waiting", "stopped", "failed", "done"] = Field(
        description="`stopped` goes on from its checkpoint when the sweep is resumed."
    )
    error: str = Field("", description="What ended it, in one line; empty if nothing did.")
    workers: Count | None = Field(None, description="As planned; null: not planned yet.")
    global_batch_size: Count | None = Field(
        None, description="Samples per step in the last stage, as planned."
    )
    learning_rate: Positive | None = Field(
        None, description="Rate of the first stage before warm-up and decay, per step, as planned."
    )
    warmup_epochs: NonNegative | None = Field(None, description="As planned, in epochs.")
    accuracy: float | None = Field(None, description="Held out, last evaluation, in [0, 1].")
    best_accuracy: float | None = Field(None, description="Held out, best evaluation, in [0, 1].")
    best_epoch: Count | None = Field(None, description="When that was, counted from one.")
    accuracies: tuple[float | None, ...] = Field(
        (), description="Held-out accuracy epoch by epoch; null where none was taken."
    )
    train_loss: float | None = Field(None, description="Mean loss over the last epoch.")
    noise_scale: Positive | None = Field(
        None, description="Gradient noise scale at the end, in samples."
    )
    training_seconds: NonNegative | None = Field(
        None, description="Of training, evaluation aside; real or simulated."
    )
    simulated: bool = Field(False, description="Whether those are of a simulated cluster.")


class Mean(Record):
    """A mean over seeds."""

    value: float = Field(description="In the unit of the field that holds it.")
    standard_error: NonNegative | None = Field(
        description="Standard deviation over the root of `count`; null for a single run."
    )
    count: Count = Field(description="Runs behind it.")


class SweepSetting(Record):
    """All runs with the same values: they differ in the seed alone."""

    values: tuple[JsonValue, ...] = Field(description="In the order of the sweep's keys.")
    done: Index = Field(description="Runs that ended well; only those count.")
    failed: Index = Field(description="Runs that did not.")
    accuracy: Mean | None = Field(description="Of the last held-out accuracy; null without any.")
    best_accuracy: Mean | None = Field(description="Of the best held-out accuracy.")
    training_seconds: Mean | None = Field(description="Of training, evaluation aside.")


def _of_all_cells(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """What cells share need not go together without the keys that vary."""
    with other_keys_come():
        return read(value)


class Sweep(Document):
    """A grid of runs, as far as it has come."""

    format: Literal["batchwright-sweep/1"] = "batchwright-sweep/1"
    folder: str = Field(description="Where the runs and their figures are.")
    job: Annotated[Job, WrapValidator(_of_all_cells)] = Field(
        description="What all cells share, as given; the keys below replace its own."
    )
    data: DataFacts | None = Field(description="The data; null before they were opened.")
    keys: tuple[SweptKey, ...] = Field(min_length=1, description="What varies.")
    seeds: tuple[Index, ...] = Field(min_length=1, description="The same for every setting.")
    cells: tuple[SweepCell, ...] = Field(description="Seed by seed, so that the first tell early.")
    settings: tuple[SweepSetting, ...] = Field(description="Means over the seeds.")

    def _facts(self) -> list[tuple[str, str]]:
        means = [one.accuracy.value for one in self.settings if one.accuracy]
        return [
            ("network", self.job.network),
            ("data", self.job.data),
            *((one.key, job_value(one.values)) for one in self.keys),
            ("seeds", job_value(self.seeds)),
            ("runs done", f"{len(self.done)} of {len(self.cells)}"),
            ("failed", str(len(self.failed))),
            ("best mean accuracy", percent(max(means)) if means else "none yet"),
            ("folder", self.folder),
        ]

    @property
    def failed(self) -> tuple[SweepCell, ...]:
        """The cells that ended by an error."""
        return tuple(cell for cell in self.cells if cell.state == "failed")

    @property
    def done(self) -> tuple[SweepCell, ...]:
        """The cells that ended well."""
        return tuple(cell for cell in self.cells if cell.state == "done")

    def runs_of(self, values: tuple[JsonValue, ...]) -> tuple[SweepCell, ...]:
        """The cells with these values that ended well, by seed."""
        return tuple(cell for cell in self.done if cell.values == values)
