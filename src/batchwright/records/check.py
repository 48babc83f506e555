"""A plan's predictions, and what was then measured."""

from __future__ import annotations

from statistics import median
from typing import Literal

from pydantic import Field

from batchwright.records.base import Count, Document, Positive, Record
from batchwright.records.profile import Cluster, OutOfMemory, PairTime, Profile
from batchwright.records.text.formatting import percent


class CheckPoint(Record):
    """One prediction and its measurement."""

    quantity: Literal["step_seconds", "peak_bytes", "resident_bytes"] = Field(
        description="What was predicted; its name tells the unit."
    )
    network: str = Field(description="As in the job.")
    local_batch_size: Count = Field(description="Samples per step on each worker.")
    resolution: Count = Field(description="Image side, in pixels.")
    workers: Count = Field(description="Workers that computed at the same time.")
    predicted: Positive = Field(description="Best guess.")
    low: float = Field(description="Lower end of the 95 % interval.")
    high: float = Field(description="Upper end of the 95 % interval.")
    measured: Positive = Field(description="Median over the visits, or peak.")
    visits: tuple[Positive, ...] = Field((), description="What each visit gave; apart in time.")
    planned: bool = Field(False, description="Whether it is a step that the plan itself takes.")

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted - self.measured) / self.measured

    @property
    def inside(self) -> bool:
        """Whether the measurement fell inside the interval."""
        return self.low <= self.measured <= self.high


class RoundCheck(Record):
    """A round of a row with two batch sizes, planned so that both groups end it together."""

    pair: PairTime = Field(description="What was measured side by side.")
    large_samples: Positive = Field(
        description="Samples per round of a worker with the large batch, on average."
    )
    small_samples: Positive = Field(description="The same with the small batch.")

    @property
    def large_seconds(self) -> float:
        """Round of a worker with the large batch, exchange aside."""
        return self.pair.large_seconds * self.large_samples / self.pair.large_batch

    @property
    def small_seconds(self) -> float:
        """Round of a worker with the small batch, exchange aside."""
        return self.pair.small_seconds * self.small_samples / self.pair.small_batch

    @property
    def difference(self) -> float:
        """How much longer the small batch's round takes than planned: small / large - 1."""
        return self.small_seconds / self.large_seconds - 1


class Check(Document):
    """How right a plan's predictions were."""

    format: Literal["batchwright-check/1"] = "batchwright-check/1"
    points: tuple[CheckPoint, ...] = Field(description="Predicted and measured.")
    rounds: tuple[RoundCheck, ...] = Field(
        (),
        description="Rounds with two batch sizes, by resolution; as planned again, if they were.",
    )
    tolerance: float = Field(description="Error of a step time beyond which to fit again.")
    cluster: Cluster = Field(description="Where it was measured.")
    out_of_memory: tuple[OutOfMemory, ...] = Field(
        (), description="Points that did not fit, though the plan said that they would."
    )
    profile: Profile | None = Field(
        None, description="The profile with the new points; null if none was given."
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
        """Of the step times, as a share of the measured one; `None` where there are none."""
        errors = [abs(one.error) for one in self.points if one.quantity == "step_seconds"]
        return median(errors) if errors else None

    @property
    def missed(self) -> bool:
        """Whether the median step time's error passes the tolerance."""
        return self.median_error is not None and self.median_error > self.tolerance
