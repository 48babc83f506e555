"""A sweep: one job run with every combination of some keys' values, with several seeds each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidatorFunctionWrapHandler, WrapValidator

from batchwright.records.base import Count, Document, Index, NonNegative, Positive, Record
from batchwright.records.job import Job, other_keys_come
from batchwright.records.profile import DataFacts
from batchwright.records.text.formatting import job_value, percent


class SweptKey(Record):
    """A job key and its values in the sweep."""

    key: str = Field(min_length=1, description="The job key, nested ones with a dot.")
    values: tuple[JsonValue, ...] = Field(
        min_length=1, description="Values, as a job file writes them."
    )


class SweepCell(Record):
    """One run: a value for each key, and a seed."""

    name: str = Field(min_length=1, description="Name of the run's folder under `cells/`.")
    values: tuple[JsonValue, ...] = Field(
        description="Value of each key, in the order of the sweep's keys."
    )
    seed: Index = Field(description="Seed of weights, order and augmentation.")
    state: Literal["waiting", "stopped", "failed", "done"] = Field(
        description="State of the run; a `stopped` one continues when the sweep is resumed."
    )
    error: str = Field("", description="Error that ended the run, in one line; empty: none.")
    workers: Count | None = Field(None, description="Planned workers; null: not planned yet.")
    global_batch_size: Count | None = Field(
        None, description="Planned samples per step in the last stage."
    )
    learning_rate: Positive | None = Field(
        None, description="Planned rate of the first stage before warm-up and decay, per step."
    )
    warmup_epochs: NonNegative | None = Field(
        None, description="Planned length of the warm-up, in epochs."
    )
    accuracy: float | None = Field(
        None, description="Held-out accuracy of the last evaluation, in [0, 1]."
    )
    best_accuracy: float | None = Field(
        None, description="Held-out accuracy of the best evaluation, in [0, 1]."
    )
    best_epoch: Count | None = Field(
        None, description="Epoch of the best evaluation, counted from one."
    )
    accuracies: tuple[float | None, ...] = Field(
        (), description="Held-out accuracy of each epoch; null where it was not evaluated."
    )
    train_loss: float | None = Field(None, description="Mean loss over the last epoch.")
    noise_scale: Positive | None = Field(
        None, description="Gradient noise scale at the end, in samples."
    )
    training_seconds: NonNegative | None = Field(
        None, description="Seconds of training, without evaluation; real or simulated."
    )
    simulated: bool = Field(
        False, description="Whether these seconds are those of a simulated cluster."
    )


class Mean(Record):
    """A mean over seeds."""

    value: float = Field(description="The mean, in the unit of the field that holds it.")
    standard_error: NonNegative | None = Field(
        description="Standard deviation over the root of `count`; null for a single run."
    )
    count: Count = Field(description="Number of runs in the mean.")


class SweepSetting(Record):
    """All runs with the same values: they differ in the seed alone."""

    values: tuple[JsonValue, ...] = Field(
        description="Value of each key, in the order of the sweep's keys."
    )
    done: Index = Field(description="Runs that ended well; the means are over these.")
    failed: Index = Field(description="Runs that ended by an error.")
    accuracy: Mean | None = Field(
        description="Mean of the last held-out accuracy; null if unknown."
    )
    best_accuracy: Mean | None = Field(
        description="Mean of the best held-out accuracy; null if unknown."
    )
    training_seconds: Mean | None = Field(
        description="Mean seconds of training, without evaluation; null if unknown."
    )


def _job_of_all_cells(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Accept a job whose keys contradict each other without those that vary."""
    with other_keys_come():
        return read(value)


class Sweep(Document):
    """A grid of runs, finished or not."""

    format: Literal["batchwright-sweep/1"] = "batchwright-sweep/1"
    folder: str = Field(description="Folder of the runs and their figures.")
    job: Annotated[Job, WrapValidator(_job_of_all_cells)] = Field(
        description="Job that all cells share, as given; `keys` replace its own values."
    )
    data: DataFacts | None = Field(description="Facts of the data; null before they were opened.")
    keys: tuple[SweptKey, ...] = Field(min_length=1, description="The keys that vary.")
    seeds: tuple[Index, ...] = Field(min_length=1, description="Seeds, the same for every setting.")
    cells: tuple[SweepCell, ...] = Field(
        description="The runs, all of one seed before the next, so that first results come early."
    )
    settings: tuple[SweepSetting, ...] = Field(description="Means over the seeds of each setting.")

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
