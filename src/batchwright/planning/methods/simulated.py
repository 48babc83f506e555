"""Step times of a virtual cluster: those measured on one worker, or stated ones, and a stated link.

Every virtual worker has a machine of its own. So its steps take the time that was measured with the
fewest workers, and it exchanges over ``link``, whatever the host of the simulation is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batchwright.errors import JobError
from batchwright.planning.resolution import sides
from batchwright.prediction.fit import fit_line
from batchwright.records import (
    VIRTUAL_BANDWIDTH,
    VIRTUAL_LATENCY,
    Job,
    Link,
    Profile,
    StepTime,
)
from batchwright.records.text.formatting import counted


def with_link(job: Job) -> Job:
    """The job with the link's missing figures assumed, if it is for a virtual cluster."""
    if not job.launcher.simulated:
        return job
    given = {key: value for key, value in job.link.model_dump().items() if value is not None}
    assumed = {"latency": VIRTUAL_LATENCY, "bandwidth": VIRTUAL_BANDWIDTH}
    return job.model_copy(update={"link": Link(**(assumed | given))})


def slowest_link(job: Job) -> Link:
    """The link at whose pace an all-reduce goes: of virtual workers that of the slowest."""
    links = job.virtual.links if job.launcher.simulated else ()
    if not links or job.link.bandwidth is None:
        return job.link
    return job.link.model_copy(update={"bandwidth": min(links) * job.link.bandwidth})


def simulated(profile: Profile, job: Job, *, slowest: bool) -> Profile:
    """The profile of a virtual worker.

    Args:
        profile: What was measured.
        job: Resolved; ``virtual.*`` states times that replace the measured ones.
        slowest: Whether all workers wait for the slowest one in each step: then the profile has
            the times of the slowest, else those of a worker of speed and overhead 1.
    """
    least = min((point.workers for point in profile.steps), default=1)
    points = [point for point in profile.steps if point.workers == least]
    if job.virtual.sample_seconds is not None or job.virtual.step_seconds is not None:
        points = _stated(points, job)
    fixed = {side: max(line[1], 0.0) for side, line in _lines(points).items()}
    workers = _workers(job) if slowest else [(1.0, 1.0)]
    memory = min((point.workers for point in profile.memory), default=1)
    return profile.model_copy(
        update={
            "job": profile.job.model_copy(update={"workers": 1}),
            "steps": tuple(_alone(point, workers, fixed) for point in points),
            "pairs": (),
            "memory": tuple(
                point.model_copy(update={"workers": 1})
                for point in profile.memory
                if point.workers == memory
            ),
            "out_of_memory": tuple(
                one.model_copy(update={"workers": 1}) for one in profile.out_of_memory
            ),
            "collectives": (),
            "compilation": None,  # of this machine's time
        }
    )


def _workers(job: Job) -> list[tuple[float, float]]:
    """Speed and overhead of each worker that the job describes; of one usual worker without any."""
    speeds, overheads = len(job.virtual.speeds), len(job.virtual.overheads)
    if speeds and overheads and speeds != overheads:  # with workers=auto nobody has compared them
        raise JobError(
            f"virtual.speeds has {counted(speeds, 'value')}, virtual.overheads {overheads}: give "
            "one of each for each worker"
        )
    return list(job.virtual.relative_times(max(speeds, overheads, 1)))


def _lines(points: Sequence[StepTime]) -> dict[int, tuple[float, float]]:
    """Seconds per sample and fixed seconds by resolution, where several batches were measured."""
    found = {}
    for side in {point.resolution for point in points}:
        here = [point for point in points if point.resolution == side]
        sizes = [point.local_batch_size for point in here]
        if len(set(sizes)) > 1:
            line = fit_line(sizes, [point.compute_seconds for point in here])
            found[side] = line.slope, line.intercept
    return found


def _alone(
    point: StepTime, workers: Sequence[tuple[float, float]], fixed: Mapping[int, float]
) -> StepTime:
    """The point without exchange, on the slowest of ``workers``, given by speed and overhead."""
    usual, overhead_seconds = point.compute_seconds, fixed.get(point.resolution, 0.0)
    seconds = max((usual + (o - 1) * overhead_seconds) / speed for speed, o in workers)
    return point.scaled(seconds / point.step_seconds).model_copy(
        update={"workers": 1, "compute_seconds": seconds, "sync_seconds": 0.0}
    )


def _stated(points: Sequence[StepTime], job: Job) -> list[StepTime]:
    """The points with stated times.

    A time per sample that is stated for the top resolution alone is scaled to other resolutions: in
    proportion to the measured slopes, or to the pixels where only one resolution was measured.
    """
    lines = _lines(points)
    top = max((point.resolution for point in points), default=1)
    found = []
    for point in points:
        side, batch = point.resolution, point.local_batch_size
        slope, fixed = lines.get(side, (point.compute_seconds / batch, 0.0))
        (a, exact), (b, _) = _both_stated(job, side)
        if a is not None:
            usual = lines.get(top, (0.0, 0.0))[0]
            share = slope / usual if usual > 0 else (side / top) ** 2
            slope = a if exact else a * share
        if b is not None:
            fixed = b
        seconds = slope * batch + fixed
        found.append(
            point.model_copy(
                update={
                    "compute_seconds": seconds,
                    "sync_seconds": 0.0,
                    "step_seconds": seconds,
                    "step_low": seconds,
                    "step_high": seconds,
                    "visits": (),
                    "disturbed": False,
                    "beside_seconds": None,
                }
            )
        )
    return found


def usual_times(job: Job, line: tuple[float, float], batch: int) -> dict[str, float]:
    """Times of a worker of speed and overhead 1 for a row of the plan, as fields of a `Stage`.

    Args:
        job: Its ``virtual.*`` has the speeds and overheads of the workers.
        line: Seconds per sample and fixed seconds of a step on the slowest worker.
        batch: Local batch, in samples, at which that worker is the slowest.
    """
    a, b = line if line[0] >= 0 else (0.0, line[0] * batch + line[1])
    workers = _workers(job) if job.launcher.simulated else [(1.0, 1.0)]

    def seconds(usual: tuple[float, float]) -> float:
        return max((usual[0] * batch + o * usual[1]) / speed for speed, o in workers)

    # Of the usual times that follow from each worker, the right ones make no worker slower than
    # the line.
    each = [(a * speed, b * speed / o) for speed, o in workers]
    a, b = min(each, key=seconds)
    return {"sample_seconds": a, "step_seconds": b}


def stated_line(job: Job, side: int) -> tuple[float, float] | None:
    """Seconds per sample and fixed seconds of a step that the job states; `None` if it does not.

    A single time per sample is that at the top resolution, and is scaled to others by the area of
    the images.
    """
    (a, exact), (b, _) = _both_stated(job, side)
    if not job.launcher.simulated or a is None or b is None:
        return None
    return a if exact else a * (side / max(sides(job), default=side)) ** 2, b


def _both_stated(job: Job, side: int) -> tuple[tuple[float | None, bool], ...]:
    """`Virtual.stated` for the seconds per sample and for the fixed seconds of a step."""
    given = sides(job)
    return tuple(job.virtual.stated(key, side, given) for key in ("sample_seconds", "step_seconds"))
