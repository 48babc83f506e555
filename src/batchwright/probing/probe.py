"""Measures a job on its workers; the result is a profile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from batchwright.distributed.joining.environments import outside_of_group
from batchwright.distributed.joining.gathering import Gathering, stops_of_all
from batchwright.distributed.supervisor import noting_signals
from batchwright.errors import BatchwrightError, JobError
from batchwright.planning.validation import as_measured
from batchwright.prediction.drift import LATER_VISITS
from batchwright.probing.commands import Compare, Compared, Point, Prepared, ignored
from batchwright.probing.course.acquisition import worker_counts
from batchwright.probing.course.controller import (
    COMPILATION,
    GRAPHS,
    PRECISION,
    Controller,
    Progress,
)
from batchwright.probing.kinds import Place
from batchwright.probing.together import LaunchedWorkers, with_links
from batchwright.probing.visiting import Visitor
from batchwright.probing.workers import (
    CommandRunner,
    InProcess,
    Killed,
    Workers,
    end_if_stopped,
)
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
"""Share of the budget for measuring the network between two workers."""


@dataclass(frozen=True)
class Measured:
    """Measurements of chosen points, in the order of workers, resolution and batch."""

    steps: tuple[StepTime, ...]
    memory: tuple[MemoryPoint, ...]
    cluster: Cluster
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

    Measuring takes about ``job.probe.budget`` seconds: less where all errors are below
    ``job.probe.error`` earlier, more only if the fewest and smallest steps take longer. Starting
    the workers takes time besides, and so do trials.

    Args:
        job: What to measure; device and resolutions are concrete. ``workers=auto`` measures powers
            of two up to the number of workers that this machine runs by default.
        folder: Takes logs and reports; it exists, and nothing else uses it.
        kept: File for the profile. Before each trial the profile so far is written there; if the
            file already holds such a profile of this job, made on this machine, the trials go on
            from there.
        progress: Called as progress(seconds done, seconds in all, what), and during trials as
            progress(percent done, 100, what).
        tell: Called with a line about the workers that whoever plans should know.

    Raises:
        BatchwrightError: A worker found something wrong with data, network, loss or device.
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
        places: Sequence[Place] = ()
        if isinstance(workers, LaunchedWorkers):
            reporter("the network")
            links, places = workers.links(LINK * job.probe.first_budget), workers.places

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
            visitor.prepare(seconds=0)  # the number format is chosen already
            free = {"memory_bytes": begun.cluster.memory_bytes}  # varies from time to time
            here = visitor.cluster().model_copy(update=free)
            found = (visitor.prepared.data, visitor.prepared.network, here)
            if (begun.data, begun.network, begun.cluster) == found:
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
    """The profile in ``kept``, if a probe of this very job was stopped during its trials."""
    try:
        profile = read_record(kept, Profile)
    except BatchwrightError:  # there is no file, or it is no profile
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

    Args:
        job: As for `probe`.
        points: (workers, resolution in pixels, local batch) each, at least one.
        folder: As for `probe`.
        visits: Number of visits to each point.
        accept: Called with the cluster before the first visit; raises if it is the wrong one.
        progress: Called as progress(visits done, visits in all, what).

    Raises:
        BatchwrightError: As `probe` raises, or ``accept``.
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
        places = workers.places if isinstance(workers, LaunchedWorkers) else ()
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

    Arguments and errors are those of `probe`.
    """
    workers = max(counts_of(job))
    command = Compare(workers=workers, seconds=PRECISION * job.probe.first_budget)
    with measuring(job, folder, (workers,)) as measurer:
        try:
            return measurer.ask(command, Compared)
        except Killed:
            return Compared(precision="float32")


def counts_of(job: Job) -> tuple[int, ...]:
    """Numbers of workers that a probe of the job measures, rising."""
    if not job.launcher.processes:  # each virtual worker is measured with the whole machine
        return (1,)
    if job.launcher.joins and Gathering.current is not None and job.workers == "auto":
        return (Gathering.current.started.size,)
    return worker_counts(default_workers(job.device)) if job.workers == "auto" else (job.workers,)


@contextmanager
def measuring(job: Job, folder: Path, counts: Sequence[int]) -> Iterator[CommandRunner]:
    """Inside, workers that carry out commands; they end afterwards.

    The workers are this process alone where the job says so; else the processes that another
    launcher has started, unless the job says otherwise; else processes of the probe's own.

    Args:
        job: As for `probe`.
        folder: As for `probe`.
        counts: Numbers of workers that commands may name.

    Raises:
        BatchwrightError: As `probe` raises.
        JobError: Several workers in one process.
        Interrupted: A stop signal came since the last command began.
    """
    if job.launcher.one_worker:
        if max(counts) > 1:
            raise JobError(f"workers={max(counts)} with launch=in-process: that is one worker")
        with outside_of_group(), closing(InProcess(job)) as here:
            yield here
        return
    gathering = Gathering.current
    with noting_signals() as noted:
        stops = stops_of_all(noted)
        if job.launcher.joins and gathering is not None:
            with closing(LaunchedWorkers(gathering, job, counts, stops)) as launched:
                yield launched
        else:
            with Workers(job, folder, counts, stops) as workers:
                yield workers
        end_if_stopped(stops)  # a signal may have come during the last command, or since


def _mixed(profile: Profile) -> str:
    """A line that workers of several kinds were measured together."""
    counts = ", ".join(f"{one.workers} of {one.kind}, {one.pace:.2g}" for one in profile.kinds)
    return (
        "workers of several kinds, each with the time of its steps over the mean: "
        f"{counts}; a plan gives each kind a batch of its own"
    )


def unlike(prepared: Prepared) -> str:
    """A line that workers have devices of several models; empty where they have not."""
    if not prepared.other_devices:
        return ""
    models = ", ".join((prepared.device_name, *prepared.other_devices))
    return (
        f"workers have unlike devices ({models}): they are measured at the pace of the slowest, "
        f"with the memory of the one that has least, {size(prepared.memory_bytes)}"
    )


class Reporter:
    """Reports how much of the budget is spent, in whole seconds, and at the end all seconds.

    Trials do not count in the budget. Where the fewest and smallest steps take longer than the
    budget, the seconds in all grow by a whole budget at a time.

    Args:
        progress: As for `probe`; `None`: nothing is reported.
        budget: Seconds in all.
    """

    def __init__(self, progress: Progress | None, budget: float) -> None:
        self._progress, self._total = progress, max(1, math.ceil(budget))
        self._clock: Callable[[], float] = time.perf_counter
        self._began = self._clock()
        self._trials_seconds, self._trials_since = 0.0, math.inf  # finite while trials are made
        self("the start of the workers")

    def begin(self) -> None:
        """Count the seconds from now on."""
        self._began = self._clock()

    def __call__(self, what: str) -> None:
        """Report what is measured next."""
        now = self._clock()
        self._trials_seconds += max(0.0, now - self._trials_since)
        self._trials_since = math.inf
        spent = int(now - self._began - self._trials_seconds)
        budgets = 1 + spent // self._total
        past = ", past probe.budget" if budgets > 1 else ""
        self._tell(spent, f"measuring {what}{past}, seconds", budgets * self._total)

    def trial(self, name: str, share: float, left: float) -> None:
        """Report the share of a trial that is done, and the seconds ``left`` for all trials."""
        self._trials_since = min(self._trials_since, self._clock())
        if self._progress is not None:
            # `probe.learning` may be more seconds than a `timedelta` holds.
            most = int(timedelta.max.total_seconds()) - 1
            time_left = timedelta(seconds=max(0, min(most, math.ceil(left))))
            words = f"{name}, up to {time_left} left for trials" if share < 1 else name
            self._progress(int(100 * share), 100, f"{words}, percent done")

    def finish(self) -> None:
        """Report that the measurements are complete."""
        spent = max(1, math.ceil(self._clock() - self._began))
        self._tell(spent, "measured, seconds", spent)

    def _tell(self, done: int, what: str, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total, what)
