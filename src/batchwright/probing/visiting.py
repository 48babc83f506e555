"""Visits to points, and how a probe goes on after points that do not fit into memory."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from batchwright.errors import TOO_LITTLE_SHARED, JobError, WorkerError
from batchwright.prediction.drift import visit_scatter
from batchwright.prediction.loading import pooled_loading
from batchwright.probing import commands
from batchwright.probing.bench import SMALLEST_BATCH, sides_of
from batchwright.probing.commands import Command, Point, ignored
from batchwright.probing.course.acquisition import VISIT_SECONDS, Ledger, Steps, expected_peak
from batchwright.probing.kinds import Place, common_kind, kinds_of
from batchwright.probing.measure.precision import planned_batch
from batchwright.probing.measure.step_time import WorkerMeans
from batchwright.probing.measure.timing import spread
from batchwright.probing.replays import may_replay
from batchwright.probing.workers import Answer, CommandRunner, Killed
from batchwright.records import (
    Cluster,
    CompilationTimes,
    GraphTimes,
    Job,
    KindTimes,
    MachineLoad,
    MemoryPoint,
    OutOfMemory,
    PrecisionRatio,
    PrecisionTime,
    RecomputationTimes,
    StepTime,
)
from batchwright.records.text.formatting import size
from batchwright.records.text.load_text import disturbances, load_words
from batchwright.workload.host import usable_cores
from batchwright.workload.load import LoadWatch

MAX_RESTARTS = 6
"""Number of times that killed workers are replaced before the probe gives up."""

_AMPLE = 0.5  # share of the limit below which a step is not weighed a second time
_GUESS_SHARE = 0.25  # of the limit: where a step's fixed bytes are less, its peak is not estimated


class Visitor:
    """Has points visited, and goes on with new workers where a point kills them.

    Args:
        job: The job; its resolutions are concrete.
        measuring: Carries commands out.
        workers: Number of workers.
        report: Called with each point before it is visited.
        watch: Observes the load by other programs; `None`: nobody does.
        places: The place of each worker, where they may be of several kinds.

    Attributes:
        job: The job, with the choices made so far.
        precisions: Step times of the number formats that were compared.
        precision_ratio: Ratio of these times.
        recomputation: Times with and without recomputed blocks, where memory is short.
        compilation: Times of compiling, and of steps with and without it, if it was tried.
        graphs: Times with and without CUDA graphs, if they were tried.
        prepared: The network, its data and the hardware.
        ledger: Step times so far.
        memory: Memory of the points weighed so far.
        out_of_memory: Points that did not fit, and whether shared memory was short.
        restart_seconds: Seconds spent on starting workers again, and on compiling.
    """

    def __init__(
        self,
        job: Job,
        measuring: CommandRunner,
        workers: int,
        report: Callable[[str], None],
        watch: LoadWatch | None = None,
        places: Sequence[Place] = (),
    ) -> None:
        self.job, self._measuring, self._workers, self._report = job, measuring, workers, report
        self.precisions: tuple[PrecisionTime, ...] = ()
        self.precision_ratio: PrecisionRatio | None = None
        self.recomputation: RecomputationTimes | None = None
        self.compilation: CompilationTimes | None = None
        self.graphs: GraphTimes | None = None
        self.ledger = Ledger()
        self._step_times: dict[Point, tuple[list[Steps], StepTime]] = {}
        self.memory: dict[Point, MemoryPoint] = {}
        self.out_of_memory: dict[Point, bool] = {}
        self.restart_seconds = 0.0
        self._restarts = 0
        self._too_little_shared = False  # whether the last command ended for want of shared memory
        self._watch, self._watched = watch, 0
        self._shares: list[float] = []  # of ours, in stretches beside others
        self._cores = usable_cores()  # a plan between visits asks for them each time
        self._places = [one.with_kind(job.probe.kind) for one in places]
        self._by_worker: dict[int, WorkerMeans] = {}  # by number of the visit

    @property
    def limit(self) -> int:
        """Bytes that one worker may use."""
        return self.job.goal.memory or self.prepared.memory_bytes

    def prepare(self, *, seconds: float) -> None:
        """Choose the number format, which takes about ``seconds``, and build the network.

        Raises:
            JobError: Network or loss cannot be built.
        """
        if self.job.precision == "auto":
            self._report("number formats")
            compare = commands.Compare(workers=self._workers, seconds=seconds)
            compared = self.ask(compare, commands.Compared, "comparing number formats")
            precision = compared.precision if compared else "float32"
            if compared:
                self.precisions, self.precision_ratio = compared.times, compared.ratio
            self.job = self.job.model_copy(update={"precision": precision})
        self._prepare()

    def choose_recomputation(self, workers: int, *, seconds: float) -> None:
        """Choose whether blocks are recomputed, where the job leaves that open.

        They are considered only where memory is short. A step of the fewest samples with
        ``workers`` workers shows whether it is; it would be weighed next anyway. A step that surely
        does not fit is not tried. The comparison takes about ``seconds``.
        """
        job = self.job
        if job.activation_checkpointing != "auto":
            return
        side = max(sides_of(job))
        wanted = planned_batch(job, self.prepared.data.train_samples, self._workers)
        first = Point(workers, side, SMALLEST_BATCH)
        hopeless = self._surely_too_large(first)
        possible = (
            job.batch_norm != "synchronized"
            and "on" not in (job.compile, job.cuda_graphs)  # recomputed blocks exclude both
            and not (hopeless and self._surely_too_large(first, recompute=True))
        )
        if possible and (hopeless or not (self.weigh(first) and self._has_room(first, wanted))):
            self._report("recomputation")
            command = commands.Recompute(
                workers=self._workers,
                resolution=side,
                wanted_batch_size=wanted,
                limit_bytes=self.limit,
                try_without=not hopeless,
                seconds=seconds,
            )
            answer = self.ask(command, commands.Recomputed, "comparing with recomputation")
            self.recomputation = answer.times if answer else None
        chosen = self.recomputation is not None and self.recomputation.chosen
        self.job = job.model_copy(update={"activation_checkpointing": "on" if chosen else "off"})
        if chosen:  # the points weighed so far were without recomputation
            self.memory, self.out_of_memory = {}, {}

    def choose_compilation(self, *, seconds: float) -> None:
        """Choose whether the network is compiled; the comparison takes about ``seconds``.

        The seconds leave compiling itself out. Where replayed passes were chosen before, compiled
        steps are compared with those, and are not replayed.

        Raises:
            JobError: The job asks for compiling, and the network cannot be compiled.
        """
        job = self.job
        if job.compile == "off":
            return
        replays = job.cuda_graphs == "on" and self.graphs is None  # the job asks for replaying
        if job.activation_checkpointing != "on" and not replays:
            self._report("compiling")
            command = commands.Compile(
                workers=self._workers,
                resolution=max(sides_of(job)),
                wanted_batch_size=self._at_once,
                asked=job.compile == "on",
                seconds=seconds,
            )
            self.compilation = self.ask(command, CompilationTimes, "compiling")
        times = self.compilation
        if times is not None:
            self.restart_seconds += times.compile_seconds or 0.0
        if job.compile == "on" and (times is None or times.failure):
            why = times.failure if times else "it took more memory than there is"
            raise JobError(
                f"compile=on: network={job.network} cannot be compiled ({why}): give compile=off"
            )
        chosen = times is not None and times.chosen
        self.job = job.model_copy(update={"compile": "on" if chosen else "off"})
        if chosen:
            self.job, self.graphs = self.job.model_copy(update={"cuda_graphs": "off"}), None
            self.memory, self.out_of_memory = {}, {}

    def choose_graphs(self, *, seconds: float) -> None:
        """Choose whether passes are replayed, where the job leaves that open.

        The comparison takes about ``seconds``.
        """
        job = self.job
        if job.cuda_graphs != "auto":
            return
        if may_replay(job):
            self._report("CUDA graphs")
            command = commands.Replay(
                workers=self._workers,
                resolution=max(sides_of(job)),
                wanted_batch_size=self._at_once,
                seconds=seconds,
            )
            self.graphs = self.ask(command, GraphTimes, "comparing with CUDA graphs")
        chosen = self.graphs is not None and self.graphs.chosen
        self.job = job.model_copy(update={"cuda_graphs": "on" if chosen else "off"})
        if chosen:
            # The points weighed so far were without graphs, which take more memory: points that
            # did not fit still do not.
            self.memory = {}

    @property
    def _at_once(self) -> int:
        """Samples that each worker is likely to take at once, as planned or as many as fit."""
        if self.recomputation is not None:
            return max(SMALLEST_BATCH, self.recomputation.plain_batch_size)
        return planned_batch(self.job, self.prepared.data.train_samples, self._workers)

    def _has_room(self, first: Point, samples: int) -> bool:
        """Whether ``samples`` samples fit if each takes as many bytes as each one at ``first``."""
        weighed = self.memory.get(first)
        if weighed is None:  # there was so much room that the point was not weighed
            return True
        each = max(0, weighed.peak_bytes - self.fixed_bytes) / first.local_batch_size
        return self.fixed_bytes + self.prepared.parts.reduction + each * samples <= self.limit

    def ask(
        self,
        command: Command,
        answer: type[Answer],
        what: str,
        on_progress: Callable[[float], None] = ignored,
    ) -> Answer | None:
        """`CommandRunner.ask`; `None` if the command killed a worker, and new ones were started.

        Args:
            command: As for `CommandRunner.ask`.
            answer: As for `CommandRunner.ask`.
            what: The measurement in words, for an error message.
            on_progress: As for `CommandRunner.ask`.

        Raises:
            WorkerError: The workers were killed too often.
        """
        self._too_little_shared = False
        try:
            return self._measuring.ask(command, answer, on_progress)
        except Killed as killed:
            self._restarts += 1
            self._too_little_shared = killed.shared
        if self._restarts > MAX_RESTARTS:
            remedy = " (out of memory?): set goal.memory to what a worker may use"
            remedy += ", or choose fewer workers" * (self._workers > 1)
            if self._too_little_shared:
                remedy = f": {TOO_LITTLE_SHARED}"
            times = f"workers were killed {self._restarts} times, last while {what}"
            raise WorkerError(f"{times}{remedy}")
        began = time.perf_counter()
        self._measuring.restart()
        if self.job.precision != "auto":
            self._prepare()
        self.restart_seconds += time.perf_counter() - began
        return None

    @property
    def may_restart(self) -> bool:
        """Whether killed workers would be replaced once more."""
        return self._restarts < MAX_RESTARTS

    def weigh(self, point: Point) -> bool:
        """Measure the memory of a step at ``point``, unless it is known; whether the step fits."""
        if point in self.memory:
            return True
        if not self.may_fit(point):
            return False
        # Another number of workers changes only the buffers for exchanging gradients, whose size is
        # known: where the same batch left ample room, it is not weighed again.
        same = [peak for known, peak in self.memory.items() if known[1:] == point[1:]]
        most = max((peak.peak_bytes for peak in same), default=self.limit)
        if most + self.prepared.parts.reduction <= _AMPLE * self.limit:
            return True
        weighed = self.ask(commands.Weigh(**point._asdict()), commands.Weighed, str(point))
        if weighed is None or weighed.peak_bytes is None:
            self.out_of_memory[point] = self._too_little_shared
            return False
        self.memory[point] = MemoryPoint(
            **point._asdict(),
            peak_bytes=weighed.peak_bytes,
            resident_bytes=weighed.resident_bytes,
        )
        return True

    def visit(self, point: Point) -> float | None:
        """Time a few steps at ``point``; seconds of the shortest, `None` if they do not fit."""
        visited = self.look(point)
        if visited is None:
            return None
        self.keep(point, visited)
        return visited.shortest

    def keep(self, point: Point, visited: commands.Visited) -> None:
        """Keep what `look` gave as a visit to ``point``."""
        self.ledger.add(point, visited.steps, visited.loading)
        self._by_worker[self.ledger.turn] = visited.by_worker
        self.is_disturbed()

    def is_disturbed(self, *, waiting: bool = False) -> bool:
        """Whether other programs use the machine, as far as can be seen.

        If so, marks the visits since the last call as disturbed.

        Args:
            waiting: Whether nothing was measured meanwhile: then idle cores do not show that the
                machine has room for all.
        """
        load = self._watch.stretch() if self._watch else None
        if load is None:
            return False
        disturbed = bool(disturbances(load) if waiting else load_words(load))
        if disturbed:
            self.ledger.disturb(self._watched)
            if not waiting:
                self._shares.append(load.share)
        self._watched = self.ledger.turn
        return disturbed

    def load(self) -> MachineLoad | None:
        """The load by others since the watch began, our least share, and the scatter of visits."""
        load = self._watch.whole() if self._watch else None
        if load is None:
            return None
        scatter, least = visit_scatter(self.step_times()), min(self._shares, default=None)
        return load.model_copy(update={"scatter": scatter, "least_share": least})

    def look(self, point: Point) -> commands.Visited | None:
        """Time a few steps at ``point``, without keeping them; `None` if they do not fit."""
        self._report(str(point))
        if not self.weigh(point):
            return None
        command = commands.Visit(
            **point._asdict(), seconds=VISIT_SECONDS, most_steps=self.job.probe.steps
        )
        visited = self.ask(command, commands.Visited, str(point))
        if visited is None:
            self.out_of_memory[point] = self._too_little_shared
        return visited

    def try_first(self, point: Point) -> float:
        """Seconds of the shortest of a few of the smallest steps, which are not kept.

        Where a step's fixed bytes take a good share of the memory, its peak is first estimated, as
        far as PyTorch can, and the step is not taken if it would not fit.

        Raises:
            JobError: Not even this step fits.
        """
        peak = self._guess(point)
        if peak is None or peak <= self.limit:
            visited = self.look(point)
            if visited is not None:
                return visited.shortest
        raise self.too_large(point, peak)

    def too_large(self, point: Point, peak: int | None = None) -> JobError:
        """An error for a step that was tried and did not fit, or that would take ``peak`` bytes."""
        if self._too_little_shared:
            return JobError(f"{point}: {TOO_LITTLE_SHARED}")
        needed = f"about {size(peak)}" if peak else "more memory than there is"
        return JobError(
            f"{point}: a step takes {needed}, and a worker may use {size(self.limit)}: "
            f"choose a smaller network or resolution, {'fewer workers, ' * (point.workers > 1)}or "
            "more goal.memory"
        )

    def _guess(self, point: Point, *, recompute: bool = False) -> int | None:
        """Estimated peak bytes at ``point``, where the fixed bytes are a good share of the limit.

        With ``recompute``, or once that is chosen, the estimate assumes recomputed blocks.
        """
        held = self.prepared.held_bytes  # the estimate leaves these out
        if self.fixed_bytes - held <= _GUESS_SHARE * self.limit:
            return None
        command = commands.Guess(
            resolution=point.resolution,
            local_batch_size=point.local_batch_size,
            recompute=recompute or self.job.activation_checkpointing == "on",
        )
        guessed = self.ask(command, commands.Guessed, "guessing the memory")
        return guessed.peak_bytes + held if guessed and guessed.peak_bytes else None

    def _surely_too_large(self, point: Point, *, recompute: bool = False) -> bool:
        """Whether even the estimated peak exceeds the limit."""
        return (self._guess(point, recompute=recompute) or 0) > self.limit

    def may_fit(self, point: Point) -> bool:
        """Whether a step at ``point`` may fit, by all that is known."""
        for lost in self.out_of_memory:
            if all(one <= other for one, other in zip(lost, point, strict=True)):
                return False
        expected = self._expected_peak(point)
        if point in self.memory or not expected:
            return True
        # A step that needs as much as one that did not fit on another curve does not fit either.
        peaks = [
            self._expected_peak(lost)
            for lost, shared in self.out_of_memory.items()
            if lost.workers == point.workers and not shared
        ]
        return expected <= min([self.limit, *(peak - 1 for peak in peaks if peak)])

    def _expected_peak(self, point: Point) -> float:
        here = [known for known in self.memory if known[:2] == point[:2]]
        weighed = {known.local_batch_size: self.memory[known].peak_bytes for known in here}
        return expected_peak(weighed, self.fixed_bytes, point.local_batch_size)

    @property
    def fixed_bytes(self) -> int:
        """Bytes in each peak that do not depend on the batch."""
        parts = self.prepared.parts
        of_step = parts.parameters + parts.buffers + parts.gradients + parts.optimizer
        return of_step + self.prepared.held_bytes

    def step_times(self) -> tuple[StepTime, ...]:
        """Step times of the visited points, rising."""
        return tuple(self._step_time(point) for point in sorted(self.ledger.steps))

    def kinds(self) -> tuple[KindTimes, ...]:
        """Step times of each kind of worker; empty where all are of one kind."""
        if not self._places:
            return ()
        visits = {
            point: [self._by_worker[turn] for turn in self.ledger.counted(point)]
            for point in self.ledger.steps
        }
        named = self.job.probe.kind
        return kinds_of(self._places, self.step_times(), visits, named=named)

    def memory_points(self) -> tuple[MemoryPoint, ...]:
        """Memory of the weighed points, rising."""
        return tuple(self.memory[point] for point in sorted(self.memory))

    def lost_points(self) -> tuple[OutOfMemory, ...]:
        """The points that did not fit, rising."""
        return tuple(
            OutOfMemory(**point._asdict(), short_of="shared memory" if shared else "memory")
            for point, shared in sorted(self.out_of_memory.items())
        )

    def cluster(self) -> Cluster:
        """Hardware and software of the workers."""
        prepared = self.prepared
        return Cluster(
            device="cuda" if self.job.device == "cuda" else "cpu",
            device_name=prepared.device_name,
            kind=common_kind(self._places, self.job.probe.kind),
            workers=self._workers,
            cores=self._cores,
            threads=prepared.threads,
            memory_bytes=prepared.memory_bytes,
            python=platform.python_version(),
            torch=torch.__version__,
            allocator=prepared.allocator,
            arithmetic=prepared.arithmetic,
            # Of several models together: of each by itself they are not known.
            formats=() if prepared.other_devices else prepared.formats,
        )

    def _step_time(self, point: Point) -> StepTime:
        """The step time of a point, computed once for each list of its visits."""
        visits = self.ledger.steps[point]
        known = self._step_times.get(point)
        if known is not None and known[0] is visits:
            return known[1]
        means = self.ledger.means(point)
        steps = [step for visit in visits for step in visit]
        low, _, high = spread([compute + sync for compute, sync in steps])
        found = StepTime(
            **point._asdict(),
            compute_seconds=median(one.compute for one in means),
            sync_seconds=median(one.sync for one in means),
            step_seconds=median(one.seconds for one in means),
            step_low=low,
            step_high=high,
            repeats=len(steps),
            visits=tuple(one.seconds for one in means),
            visit_error=median(one.error for one in means),
            disturbed=self.ledger.is_disturbed(point),
            beside_seconds=self.ledger.slowest_left_out(point),
            loading=pooled_loading(self.ledger.loading(point)),
        )
        self._step_times[point] = visits, found
        return found

    def _prepare(self) -> None:
        precision = self.job.precision
        assert precision != "auto"  # noqa: S101 - chosen before
        command = commands.Prepare(
            workers=self._workers,
            precision=precision,
            recompute=self.job.activation_checkpointing == "on",
            compile=self.job.compile == "on" and self.compilation is not None,
            cuda_graphs=self.job.cuda_graphs == "on",
        )
        try:
            self.prepared = self._measuring.ask(command, commands.Prepared)
        except Killed:
            fewer = ", or fewer workers" if self._workers > 1 else ""
            raise WorkerError(
                f"network={self.job.network}: a worker was killed while it built the network and "
                f"took a first step (out of memory?): choose a smaller one{fewer}"
            ) from None
        if self.prepared.no_graphs:
            raise JobError(
                f"cuda_graphs=on: passes of network={self.job.network} cannot be replayed "
                f"({self.prepared.no_graphs}): give cuda_graphs=off"
            )
