"""Sections of a job that describe a cluster: its workers and network, and who starts it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from batchwright.records.base import (
    Count,
    Index,
    Keys,
    NonNegative,
    Positive,
    PositiveTime,
    Price,
    Rate,
    RelativeSpeed,
    Size,
    StatedPositive,
    StatedTime,
    Time,
)
from batchwright.records.text.problems import shorten


class WorkerKind(Keys):
    """Some workers of one kind that a plan may use (an item of job key ``goal.kinds``)."""

    kind: str = Field(min_length=1, description="Name; that of a profile, or one of your own.")
    count: Count = Field(description="How many there are.")
    price: Price | None = Field(
        None, description="Price of one of them for an hour, in any currency."
    )
    memory: Size | None = Field(None, description="Bytes one may use; unset: as measured.")
    like: str = Field("", description="Profile it behaves like, where it was not measured itself.")
    speed: RelativeSpeed = Field(1.0, description="How many times as fast as `like`; assumed.")
    spot: bool = Field(False, description="Whether such a worker may be taken away at any time.")
    preemptions_per_hour: NonNegative | None = Field(
        None,
        description="How often one is taken away in an hour; unset: "
        "`goal.preemptions_per_hour` for `spot` workers, never for others.",
    )


class Link(Keys):
    """The network between workers that were not measured together (job keys ``link.*``)."""

    latency: StatedTime | None = Field(None, description="Time of an empty message, in seconds.")
    bandwidth: Rate | None = Field(None, description="Bytes per second, in one direction.")


VIRTUAL_LATENCY, VIRTUAL_BANDWIDTH = 5e-4, 125e6
"""Default links of virtual workers: half a millisecond per message, and 125e6 bytes per second, the
1 Gb/s Ethernet of the dual-batch paper's experiments."""


class Disturbance(Keys):
    """A virtual worker slower for a while (an item of job key ``virtual.disturbances``)."""

    worker: Index = Field(description="Its rank.")
    start: Time = Field(0.0, description="From when, in simulated seconds of training.")
    end: PositiveTime | None = Field(None, description="Until when; unset: to the end.")
    slowdown: RelativeSpeed = Field(description="By what factor its computing takes longer.")


class Virtual(Keys):
    """The simulated cluster of ``launch=virtual`` (job keys ``virtual.*``)."""

    sample_seconds: StatedPositive | tuple[StatedPositive, ...] | None = Field(
        None,
        description="Time per sample of a step, in seconds. One value: at the highest "
        "resolution, and at others in proportion as measured, else by their area. Or one for "
        "each. Unset: as measured.",
    )
    step_seconds: StatedTime | tuple[StatedTime, ...] | None = Field(
        None,
        description="Fixed time of a step, in seconds: at all resolutions, or one for each. Unset: "
        "as measured.",
    )
    speeds: tuple[RelativeSpeed, ...] = Field(
        (), description="Speed of each worker relative to these times; unset: all 1."
    )
    overheads: tuple[RelativeSpeed, ...] = Field(
        (),
        description="Fixed time of each worker's step relative to that of equally fast ones; "
        "unset: all 1.",
    )
    links: tuple[RelativeSpeed, ...] = Field(
        (),
        description="Bandwidth of each worker's link relative to `link.bandwidth`; unset: all 1.",
    )
    disturbances: tuple[Disturbance, ...] = Field(
        (), description="Workers that are slower for a while."
    )

    def stated(
        self, key: Literal["sample_seconds", "step_seconds"], side: int, sides: Sequence[int]
    ) -> tuple[float | None, bool]:
        """A stated time, and whether it was stated for this very resolution.

        Args:
            key: Which time.
            side: The resolution, in pixels.
            sides: All resolutions of the training, low to high.

        Returns:
            The time in seconds, `None` if none is stated; and false if it is that of the highest
            resolution.
        """
        value = getattr(self, key)
        if not isinstance(value, tuple):
            return value, False
        if side in sides and len(sides) == len(value):
            return value[sides.index(side)], True
        return value[-1], False

    def conflicts(self, workers: int) -> Iterator[str]:
        """Error messages for values that do not fit a number of workers."""
        for key in ("speeds", "overheads", "links"):
            values = getattr(self, key)
            if values and len(values) != workers:
                listed = ",".join(f"{value:g}" for value in values)
                yield (
                    f"virtual.{key}={listed}: {len(values)} values for workers={workers}: give "
                    "one for each"
                )
        for one in self.disturbances:
            if one.worker >= workers:
                yield (
                    f"virtual.disturbances: worker {one.worker} of workers={workers}: give 0 to "
                    f"{workers - 1}"
                )
            if one.end is not None and one.end <= one.start:
                yield (
                    f"virtual.disturbances: worker {one.worker} from {one.start:g} s until "
                    f"{one.end:g} s: the end must be later than the start"
                )

    def relative_times(self, workers: int) -> tuple[tuple[float, float], ...]:
        """Relative speed and overhead of each worker, in rank order."""
        speeds, overheads = self.speeds or (1.0,) * workers, self.overheads or (1.0,) * workers
        return tuple(zip(speeds, overheads, strict=True))


SLURM_TIME = r"(\d+-\d+|\d+)(:\d+){0,2}|UNLIMITED|INFINITE"
SLURM_TIME_HINT = (
    "Slurm takes minutes, hours:minutes:seconds or days-hours, such as 90, 04:00:00 or 2-12"
)


def written(key: str, hint: str) -> WrapValidator:
    """A validator of a text whose error says how the key is written, not the raw pattern.

    A whole number is the text that a YAML file has without quotes, such as ``time: 90``.
    """

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        value = str(value) if type(value) is int else value
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"job key {key} = {shorten(value)}: {hint}") from None

    return WrapValidator(check)


class Slurm(Keys):
    """What ``launch=slurm`` asks Slurm for (job keys ``slurm.*``)."""

    partition: Annotated[str, written("slurm.partition", "`sinfo` lists the names")] = Field(
        "", pattern=r"^[\w.,:@+-]*$", description="Partition, or several; unset: Slurm's default."
    )
    account: Annotated[
        str, written("slurm.account", "`sacctmgr show associations user=$USER` lists yours")
    ] = Field("", pattern=r"^[\w.,:@+-]*$", description="Account that pays; unset: your default.")
    time: Annotated[str, written("slurm.time", SLURM_TIME_HINT)] = Field(
        "",
        pattern=f"^({SLURM_TIME}|)$",
        description="Time limit: minutes, hours:minutes:seconds or days-hours. Before it is over a "
        "checkpoint is written and the job queued again. Unset: the partition's.",
    )
    gpus_per_node: Index = Field(
        0, description="GPUs to ask for on each node, with a worker for each. 0: none."
    )
    lines: tuple[
        Annotated[
            str,
            Field(pattern=r"^--[a-z][^\n\r]*$"),
            written("slurm.lines", "write options of sbatch, as --cpus-per-task=8"),
        ],
        ...,
    ] = Field((), description="More options of `sbatch`, as they stand after `#SBATCH`.")


class Ray(Keys):
    """What ``launch=ray`` asks a Ray cluster for (job keys ``ray.*``)."""

    address: Annotated[
        str, written("ray.address", "give HOST:PORT as `ray start --head` has printed it")
    ] = Field(
        "",
        pattern=r"^(auto|local|[\w.\[\]:-]+:\d+|)$",
        description="The cluster's address. Unset: that of RAY_ADDRESS, else the cluster that "
        "runs on this machine, else a new one of this machine alone (`local`).",
    )
    cpus_per_worker: Literal["auto"] | Positive = Field(
        "auto",
        description="Cores that each worker reserves. `auto`: as many as the plan says that it "
        "needs, or one where there is no plan yet.",
    )

    @property
    def cpus(self) -> float:
        """Cores that each worker reserves, with `auto` as one."""
        return 1.0 if self.cpus_per_worker == "auto" else self.cpus_per_worker

    gpus_per_worker: Index = Field(0, description="GPUs that each worker reserves.")
    min_workers: Index = Field(
        0,
        description="Fewest workers with which the run goes on after a machine is lost. 0: it "
        "waits until there is room for all.",
    )
