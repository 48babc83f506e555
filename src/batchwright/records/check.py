"""A plan's predictions beside the measurements that `check` took."""

from __future__ import annotations

from statistics import median
from typing import Literal

from pydantic import Field

from batchwright.records.base import Count, Document, Positive, Record
from batchwright.records.measured.steps import OutOfMemory, PairTime
from batchwright.records.profile import Cluster, Profile
from batchwright.records.text.formatting import percent


class CheckPoint(Record):
    """One prediction and its measurement."""

    quantity: Literal["step_seconds", "peak_bytes", "resident_bytes"] = Field(
        description="Quantity that was predicted; its name ends in the unit."
    )
    network: str = Field(description="Name of the network, as in the job.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    resolution: Count = Field(description="Image side, in pixels.")
    workers: Count = Field(description="Workers that computed at the same time.")
    predicted: Positive = Field(description="Predicted value, in the quantity's unit.")
    low: float = Field(description="Lower end of the prediction's 95 % interval.")
    high: float = Field(description="Upper end of the prediction's 95 % interval.")
    measured: Positive = Field(description="Measured value: median over the visits, or peak.")
    visits: tuple[Positive, ...] = Field(
        (), description="Value of each visit; the visits are apart in time."
    )
    planned: bool = Field(False, description="Whether the plan itself takes this step.")

    @property
    def error(self) -> float:
        """Relative error, (predicted - measured) / measured."""
        return (self.predicted - self.measured) / self.measured

    @property
    def inside(self) -> bool:
        """Whether the measurement fell inside the interval."""
        return self.low <= self.measured <= self.high


class RoundCheck(Record):
    """A round of a stage with two batch sizes, planned so that both groups end it together."""

    pair: PairTime = Field(description="Step times of both groups, measured side by side.")
    large_samples: Positive = Field(
        description="Samples per round of a worker with the large batch, on average."
    )
    small_samples: Positive = Field(
        description="Samples per round of a worker with the small batch, on average."
    )

    @property
    def large_seconds(self) -> float:
        """Seconds of a round of a worker with the large batch, without the exchange."""
        return self.pair.large_seconds * self.large_samples / self.pair.large_batch

    @property
    def small_seconds(self) -> float:
        """Seconds of a round of a worker with the small batch, without the exchange."""
        return self.pair.small_seconds * self.small_samples / self.pair.small_batch

    @property
    def difference(self) -> float:
        """Relative difference of the two rounds, small / large - 1; planned is 0."""
        return self.small_seconds / self.large_seconds - 1


class Check(Document):
    """How right a plan's predictions were."""

    format: Literal["batchwright-check/1"] = "batchwright-check/1"
    points: tuple[CheckPoint, ...] = Field(description="Predictions and their measurements.")
    rounds: tuple[RoundCheck, ...] = Field(
        (),
        description="Rounds with two batch sizes, by resolution; those of the new plan, if one was "
        "made.",
    )
    tolerance: float = Field(
        description="Relative error of a step time beyond which models should be fitted again."
    )
    cluster: Cluster = Field(description="The hardware and software of the measurements.")
    out_of_memory: tuple[OutOfMemory, ...] = Field(
        (), description="Points that did not fit the memory, against the plan's prediction."
    )
    profile: Profile | None = Field(
        None, description="The given profile with the new points added; null if none was given."
    )

    def _facts(self) -> list[tuple[str, str]]:
        steps = sum(one.quantity == "step_seconds" for one in self.points)
        inside = sum(one.inside for one in self.points)
        error = self.median_error
        return [
            ("step times", str(steps)),
            ("median error", "none measured" if error is None else percent(error)),
            ("inside the 95 % interval", f"{inside} of {len(self.points)}"),
            ("tolerance", percent(self.tolerance)),
            ("did not fit", str(len(self.out_of_memory))),
        ]

    @property
    def median_error(self) -> float | None:
        """Median relative error of the step times; `None` if no step was measured."""
        errors = [abs(one.error) for one in self.points if one.quantity == "step_seconds"]
        return median(errors) if errors else None

    @property
    def missed(self) -> bool:
        """Whether the step times' median error exceeds the tolerance."""
        return self.median_error is not None and self.median_error > self.tolerance
