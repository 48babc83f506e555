"""Measures a workload on its workers: job and hardware become a profile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from batchwright.distributed.joining.gathering import Gathering, stops_of_all
from batchwright.distributed.supervisor import noting_signals
from batchwright.errors import BatchwrightError, Interrupted, JobError
from batchwright.planning.validation import as_measured
from batchwright.prediction.drift import LATER_VISITS
from batchwright.probing.acquisition import worker_counts
from batchwright.probing.commands import Compare, Compared, Point, Prepared, ignored
from batchwright.probing.course.controller import (
    COMPILATION,
    GRAPHS,
    PRECISION,
    Controller,
    Progress,
)
from batchwright.probing.together import Together, with_links
from batchwright.probing.visiting import Visitor
from batchwright.probing.workers import Here, Killed, Measuring, Workers
from batchwright.records import (
    Cluster,
    Job,
    KindTimes,
    LinkTime,
    MemoryPoint,
    OutOfMemory,
    Profile,
    StepTime,
)
from batchwright.records.documents import read_record, write_record
from batchwright.records.text.formatting import size
from batchwright.workload.host import default_workers
from batchwright.workload.load import LoadWatch

LINK = 0.1
"""Share of the budget for the network between two workers."""


@dataclass(frozen=True)
class Measured:
    """Points that were asked for."""

    steps: tuple[StepTime, ...]  # step times, by workers, resolution and batch
    memory: tuple[MemoryPoint, ...]  # memory, in the same order
    cluster: Cluster  # where they were measured
    out_of_memory: tuple[OutOfMemory, ...]  # points that did not fit
    kinds: tuple[KindTimes, ...] = ()  # steps of each kind of worker, where there are several


def probe(
    job: Job,
    folder: Path,
    *,
    kept: Path | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] = ignored,
) -> Profile:
    """Step times, memory, exchange times, gradient noise and evaluation time of a job.

    Measuring takes about ``job.probe.budget`` seconds, less where all is known to
    ``job.probe.error`` before, more only if the fewest and smallest steps take longer; starting the
    workers comes on top, and so do trials.

    Args:
        job: What to measure; device and resolutions are concrete. ``workers=auto`` measures powers
            of two up to what this machine runs by default.
        folder: Takes logs and reports; it exists, and is used by nobody else.
        kept: File that holds the profile in the end. Before each trial it takes what is known by
            then, and if it holds such a profile of this job, made here, trials go on from there.
        progress: Called as progress(seconds done, seconds in all, what), and of trials as
            progress(percent done, 100, what).
        tell: Takes a line that whoever plans should know.

    Raises:
        BatchwrightError: What a worker found wrong with data, network, loss or device.
        WorkerError: Workers died, or were killed again and again.
        Interrupted: A stop signal came; the workers have ended.
    """
    started = time.perf_counter()
    counts = counts_of(job)
    reporter = Reporter(progress, job.probe.most_budget)
    begun = None if kept is None else unfinished(kept, job)
    with measuring(job, folder, counts) as workers:
        reporter.begin()
        links: tuple[LinkTime, ...] = ()
        if isinstance(workers, Together):
            reporter("the network")
            links = workers.links(LINK * job.probe.first_budget)
        places = workers.places if isinstance(workers, Together) else ()

        def controller(job: Job) -> tuple[Visitor, Controller]:
            visitor = Visitor(job, workers, max(counts), reporter, LoadWatch(), places)
            return visitor, Controller(
                visitor,
                counts,
                report=reporter,
                report_trial=reporter.trial,
                keep=ignored if kept is None else partial(write_record, path=kept),
                started=started,
                sleep=workers.pause,
            )

        profile = None
        if begun is not None:
            visitor, control = controller(begun.job)
            visitor.compilation, visitor.graphs = begun.compilation, begun.graphs
            visitor.prepare(seconds=0)  # how it computes is known
            kept_bytes = {"memory_bytes": begun.cluster.memory_bytes}  # these vary
            here = visitor.cluster().model_copy(update=kept_bytes)
            made = (visitor.prepared.data, visitor.prepared.network, here)
            if (begun.data, begun.network, begun.cluster) == made:
                profile = control.learn(begun)
        if profile is None:
            visitor, control = controller(job)
            profile = control.measure()
        profile = with_links(profile, links)
    reporter.finish()
    if profile.kinds:
        tell(_mixed(profile))
    elif line := unlike(visitor.prepared):
        tell(line)
    if kept is not None:
        write_record(profile, kept)
    return profile


def unfinished(kept: Path, job: Job) -> Profile | None:
    """What a probe of this very job left there that was stopped during its trials, if anything."""
    try:
        profile = read_record(kept, Profile)
    except BatchwrightError:  # nothing, or something else
        return None
    return profile if profile.trials_open and profile.job == as_measured(job, profile) else None


def measure_points(
    job: Job,
    points: Sequence[tuple[int, int, int]],
    folder: Path,
    *,
    visits: int = LATER_VISITS,
    accept: Callable[[Cluster], None] | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Step times and memory at chosen points, visited in turn, so that visits are apart in time.

    Job, folder and errors are those of `probe`; progress counts visits. ``points`` are (workers,
    resolution in pixels, local batch) each, at least one. ``accept`` is called before the first
    visit with where it is, and raises what speaks against it.
    """
    wanted = list(dict.fromkeys(Point(*point) for point in points))
    if not wanted:
        raise JobError("no points to measure: give (workers, resolution, local batch)")
    sides = tuple(sorted({point.resolution for point in wanted}))
    if job.resolutions == "auto":
        job = job.model_copy(update={"resolutions": sides})
    counts = tuple(sorted({point.workers for point in wanted}))
    total, done = visits * len(wanted), 0

    def report(what: str) -> None:
        if progress is not None:
            progress(done, total, f"measuring {what}")

    with measuring(job, folder, counts) as workers:
        places = workers.places if isinstance(workers, Together) else ()
        visitor = Visitor(job, workers, max(counts), report, places=places)
        visitor.prepare(seconds=PRECISION * job.probe.first_budget)
        visitor.choose_graphs(seconds=GRAPHS * job.probe.first_budget)
        visitor.choose_compilation(seconds=COMPILATION * job.probe.first_budget)
        if accept is not None:
            accept(visitor.cluster())
        for _ in range(visits):
            for point in wanted:
                if visitor.may_fit(point):
                    visitor.visit(point)
                done += 1
        if progress is not None:
            progress(total, total, "measured")
        return Measured(
            steps=visitor.step_times(),
            memory=visitor.memory_points(),
            cluster=visitor.cluster(),
            out_of_memory=visitor.lost_points(),
            kinds=visitor.kinds(),
        )


def compare_formats(job: Job, folder: Path) -> Compared:
    """The number format for a job with a batch and workers, where nothing else is measured.

    Folder and errors are those of `probe`.
    """
    workers = max(counts_of(job))
    command = Compare(workers=workers, seconds=PRECISION * job.probe.first_budget)
    with measuring(job, folder, (workers,)) as measurer:
        try:
            return measurer.ask(command, Compared)
        except Killed:
            return Compared(precision="float32", times=(), ratio=None)


def counts_of(job: Job) -> tuple[int, ...]:
    """Numbers of workers that a probe of the job measures, rising."""
    if not job.launcher.processes:  # a virtual worker has the machine to itself
        return (1,)
    if job.launcher.joins and Gathering.current is not None and job.workers == "auto":
        return (Gathering.current.started.size,)
    return worker_counts(default_workers(job.device)) if job.workers == "auto" else (job.workers,)


@contextmanager
def measuring(job: Job, folder: Path, counts: Sequence[int]) -> Iterator[Measuring]:
    """Worker processes, or this one where the job says so; commands may ask for these ``counts``.

    Processes that another launcher has started are the workers, where the job does not say
    otherwise.

    Folder and errors are those of `probe`.

    Raises:
        JobError: Several workers in one process.
        Interrupted: A stop signal came since the last command began.
    """
    if job.launcher.one_worker:
        if max(counts) > 1:
            raise JobError(f"workers={max(counts)} with launch=in-process: that is one worker")
        with closing(Here(job)) as here:
            yield here
        return
    gathering = Gathering.current
    with noting_signals() as noted:
        stops = stops_of_all(noted)
        if job.launcher.joins and gathering is not None:
            with closing(Together(gathering, job, counts, stops)) as all_:
                yield all_
        else:
            with Workers(job, folder, counts, stops) as workers:
                yield workers
        if asked := stops():  # while the last command was carried out, or since
            raise Interrupted(asked[0], f"stopped by signal {asked[0]}")


def _mixed(profile: Profile) -> str:
    """That workers of several kinds were measured together."""
    counts = ", ".join(f"{one.workers} of {one.kind}, {one.pace:.2g}" for one in profile.kinds)
    return (
        "workers of several kinds, each with the time of its steps over the mean: "
        f"{counts}; a plan gives each kind a batch of its own"
    )


def unlike(prepared: Prepared) -> str:
    """That workers have devices of several models; empty: they have not."""
    if not prepared.other_devices:
        return ""
    models = ", ".join((prepared.device_name, *prepared.other_devices))
    return (
        f"workers have unlike devices ({models}): they are measured at the pace of the slowest, "
        f"with the memory of the one that has least, {size(prepared.memory_bytes)}"
    )


class Reporter:
    """Tells how much of the budget is spent, in whole seconds."""

    def __init__(self, progress: Progress | None, budget: float) -> None:
        self._progress, self._total = progress, max(1, math.ceil(budget))
        self._clock: Callable[[], float] = time.perf_counter
        self._began = self._clock()
        self("the start of the workers")

    def begin(self) -> None:
        """Count from now on."""
        self._began = self._clock()

    def __call__(self, what: str) -> None:
        """Say what is measured now."""
        spent = min(self._total - 1, int(self._clock() - self._began))
        self._tell(spent, f"measuring {what}, seconds")

    def trial(self, name: str, share: float, left: float) -> None:
        """Say how far a trial has come, and for how long all of them may still go on."""
        if self._progress is not None:
            time_left = timedelta(seconds=max(0, math.ceil(left)))
            words = f"{name}, up to {time_left} left for trials" if share < 1 else name
            self._progress(int(100 * share), 100, f"{words}, percent done")

    def finish(self) -> None:
        """Say that all is measured."""
        self._total = max(1, math.ceil(self._clock() - self._began))
        self._tell(self._total, "measured, seconds")

    def _tell(self, done: int, what: str) -> None:
        if self._progress is not None:
            self._progress(done, self._total, what)
