r"""The clock of a virtual cluster: seconds of computing and exchanging, and a queue of events.

A step of :math:`b` samples takes :math:`(a b + o c) / v` seconds on a worker of speed :math:`v` and
overhead :math:`o`; a disturbance multiplies that while it lasts. With K workers, G bytes, latency
:math:`\alpha` and bandwidth :math:`\beta_i` of worker :math:`i`:

.. math::
    t_{ring} = 2 (K - 1) \Big( \alpha + \frac{G}{K \min_i \beta_i} \Big), \quad
    t_{push} = t_{pull} = \alpha + \frac{G}{\beta_i}

A ring all-reduce (Patarasuk and Yuan 2009) goes at the pace of its slowest link. Models pushed to a
server, or pulled from it, also pass the server's own link, one after the other. Merging at the
server is taken to cost nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from batchwright.errors import JobError, PlanError
from batchwright.records import (
    VIRTUAL_BANDWIDTH,
    VIRTUAL_LATENCY,
    Disturbance,
    Job,
    Plan,
    Stage,
)


class StepTime(NamedTuple):
    """Seconds of a step on a worker of speed and overhead 1: per sample, and fixed ones."""

    sample_seconds: float
    step_seconds: float

    def work(self, samples: int, overhead: float = 1.0) -> float:
        """Seconds of a step with ``samples`` samples at speed 1; 0 without samples."""
        return self.sample_seconds * samples + overhead * self.step_seconds if samples else 0.0


def step_times(plan: Plan) -> tuple[StepTime, ...]:
    """Seconds of a step in each row of the plan, then in each of its growth rows.

    Times that the job states for its virtual workers come first. A single time per sample is that
    at the highest resolution; it is scaled to others in proportion to the rows' own times, or else
    to the area of the images. Times that the job does not state are those of the rows, or else
    follow from the rows' predicted epochs.

    Raises:
        PlanError: Some time follows from none of these.
    """
    virtual, stages = plan.job.virtual, (*plan.stages, *plan.growth)
    rows = [_of_row(plan, stage) for stage in stages]
    sides = sorted({stage.resolution for stage in stages})
    if plan.job.resolutions != "auto":
        sides = list(plan.job.resolutions)
    top = max(range(len(rows)), key=lambda index: stages[index].resolution)
    found = []
    for stage, row in zip(stages, rows, strict=True):
        sample, step = row or (None, None)
        per_sample, exact = virtual.stated("sample_seconds", stage.resolution, sides)
        fixed, _ = virtual.stated("step_seconds", stage.resolution, sides)
        if per_sample is not None:
            above = rows[top]
            ratio = (stage.resolution / plan.top_resolution) ** 2
            if row is not None and above is not None and above.sample_seconds > 0:
                ratio = row.sample_seconds / above.sample_seconds
            sample = per_sample if exact else per_sample * ratio
        if fixed is not None:
            step = fixed
        if sample is None or step is None:
            unset = [
                f"virtual.{key}=..."
                for key, value in (("sample_seconds", sample), ("step_seconds", step))
                if value is None
            ]
            raise PlanError(
                f"the plan does not say how long a step takes at {stage.resolution} px, so a "
                f"virtual cluster has no clock: state {' and '.join(unset)}, or plan from a "
                "profile"
            )
        found.append(StepTime(sample, step))
    return tuple(found)


def _of_row(plan: Plan, stage: Stage) -> StepTime | None:
    """The step times of a row, or else those by its predicted epoch; `None` without either."""
    if stage.sample_seconds is not None:
        return StepTime(stage.sample_seconds, stage.step_seconds or 0.0)
    if stage.predicted_epoch_seconds is None:
        return None
    batch, samples = stage.local_batch_sizes[0], plan.data.train_samples
    steps = samples / stage.global_batch_size
    if stage.samples_per_round:
        steps = stage.samples_per_round[0] / batch
    seconds = stage.predicted_epoch_seconds.value / steps
    sample = seconds / (batch + stage.fixed_samples)
    return StepTime(sample, sample * stage.fixed_samples)


@dataclass(frozen=True)
class Worker:
    """A virtual worker."""

    speed: float  # speed relative to the step times
    bandwidth: float  # bandwidth of its link, in bytes per second
    # Times in which it is slower; overlapping ones multiply.
    disturbances: tuple[Disturbance, ...] = ()
    overhead: float = 1.0  # fixed time of a step relative to that of the step times

    def finish(self, start: float, work: float) -> float:
        """The time at which work is done, in simulated seconds.

        Args:
            start: Time at which it begins, in simulated seconds.
            work: Seconds that it takes at speed 1; a disturbance that begins or ends meanwhile
                slows only the part in which it lasts.
        """
        now, left = start, work
        edges = {at for one in self.disturbances for at in (one.start, one.end) if at is not None}
        for edge in sorted(at for at in edges if at > start):
            rate = self._rate(now)
            if left <= (edge - now) * rate:
                return now + left / rate
            left -= (edge - now) * rate
            now = edge
        return now + left / self._rate(now)

    def _rate(self, now: float) -> float:
        slower = (
            one.slowdown
            for one in self.disturbances
            if one.start <= now and (one.end is None or now < one.end)
        )
        return self.speed / math.prod(slower)


class Cluster:
    """The workers of a job, and the network between them.

    Args:
        job: Its ``virtual.*`` and ``link.*`` are used.
        workers: Number of workers.

    Attributes:
        workers: The workers, in rank order.

    Raises:
        JobError: The job's ``virtual.*`` is for another number of workers.
    """

    def __init__(self, job: Job, workers: int) -> None:
        if conflict := next(job.virtual.conflicts(workers), ""):
            raise JobError(conflict)
        virtual, link = job.virtual, job.link
        self._latency = VIRTUAL_LATENCY if link.latency is None else link.latency
        self._bandwidth = VIRTUAL_BANDWIDTH if link.bandwidth is None else link.bandwidth
        links = virtual.links or (1.0,) * workers
        self.workers = tuple(
            Worker(
                speed,
                relative * self._bandwidth,
                tuple(one for one in virtual.disturbances if one.worker == rank),
                overhead,
            )
            for rank, ((speed, overhead), relative) in enumerate(
                zip(virtual.relative_times(workers), links, strict=True)
            )
        )

    def all_reduce_seconds(self, size: int) -> float:
        """Seconds of summing ``size`` bytes over all workers; see above. For one worker it is 0."""
        count = len(self.workers)
        slowest = min(worker.bandwidth for worker in self.workers)
        return 2 * (count - 1) * (self._latency + size / count / slowest)

    def transfer_seconds(self, worker: int, size: int) -> float:
        """Seconds that ``size`` bytes take over a worker's own link."""
        return self._latency + size / self.workers[worker].bandwidth

    def server_link(self, size: int) -> ServerLink:
        """The link of a server, for models of ``size`` bytes."""
        return ServerLink(size / self._bandwidth)


class ServerLink:
    """The server's own link, which passes one model after the other in each direction.

    Args:
        seconds: Seconds of one model.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._in_free = self._out_free = 0.0

    def receive(self, arrival: float) -> float:
        """Time at which a model is received that a free link would deliver at ``arrival``.

        Calls have to be in the order of ``arrival``.
        """
        done = max(arrival, self._in_free + self._seconds)
        self._in_free = done
        return done

    def send(self, start: float) -> float:
        """Time at which the link begins to send a model that was requested at ``start``.

        Calls have to be in the order of ``start``.
        """
        begun = max(start, self._out_free)
        self._out_free = begun + self._seconds
        return begun

    def state_dict(self) -> dict[str, float]:
        """The state as plain values, for a checkpoint."""
        return {"in": self._in_free, "out": self._out_free}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state_dict` gave."""
        self._in_free, self._out_free = state["in"], state["out"]


class Event(NamedTuple):
    """An event of a worker; ``time`` is in simulated seconds."""

    time: float
    worker: int
    kind: str


class Events:
    """Queue of future events, earliest first; of events at the same time, lowest rank first."""

    def __init__(self) -> None:
        self._queue: list[Event] = []

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, time: float, worker: int, kind: str) -> None:
        """Add an event at ``time``, in simulated seconds."""
        heapq.heappush(self._queue, Event(time, worker, kind))

    def next(self) -> Event:
        """Remove and return the first event.

        Raises:
            IndexError: The queue is empty.
        """
        return heapq.heappop(self._queue)

    def state_dict(self) -> list[list[Any]]:
        """The events as plain values, for a checkpoint."""
        return [list(event) for event in sorted(self._queue)]

    def load_state_dict(self, state: Sequence[Sequence[Any]]) -> None:
        """Restore the events that `state_dict` gave."""
        self._queue = [Event(*values) for values in state]
