"""Carries out the controller's commands, in each worker."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from batchwright.distributed.group import Group
from batchwright.probing import commands
from batchwright.probing.bench import Bench
from batchwright.probing.measure.collective import time_exchange
from batchwright.probing.measure.compilation import compare_compilation
from batchwright.probing.measure.evaluation import evaluate
from batchwright.probing.measure.gradient_noise import measure_noise
from batchwright.probing.measure.graphs import compare_graphs
from batchwright.probing.measure.link import time_link
from batchwright.probing.measure.memory import estimate_peak, held_bytes, memory_of_each, weigh
from batchwright.probing.measure.pair_time import visit_pair
from batchwright.probing.measure.precision import choose_precision, formats_of
from batchwright.probing.measure.recomputation import compare_recomputation
from batchwright.probing.measure.step_time import visit, visit_beside_loading
from batchwright.probing.measure.timing import on_any_worker
from batchwright.probing.measure.trials import GivenUp, NoAccuracy, run_trial
from batchwright.probing.measure.update_time import update_times
from batchwright.records import Job, Record
from batchwright.workload.data.sources import open_data
from batchwright.workload.host import (
    arithmetic,
    local_workers,
    release_memory,
    worker_threads,
)
from batchwright.workload.passes.recomputation import may_recompute
from batchwright.workload.task import network_facts, set_training


class Executor:
    """One worker's part in every command.

    Args:
        job: What is measured; its resolutions are concrete.
        group: All workers.
        counts: Numbers of workers that commands may name.
        allocator: State of the memory allocator, in words.

    Raises:
        DataError: The data are missing or damaged.
    """

    def __init__(self, job: Job, group: Group, counts: Sequence[int], allocator: str) -> None:
        self._job, self._group, self._allocator = job, group, allocator
        self._parts = {count: group.part(count) for count in sorted({*counts, group.size})}
        self._own = group.alone()
        self._data = open_data(job, verify=False)  # the parent has just verified them
        self._bench: Bench | None = None

    def carry_out(
        self, command: commands.Command, on_progress: Callable[[float], None] = commands.ignored
    ) -> Record:
        """Carry out a command, together with the other workers that it names.

        ``on_progress`` is called with the share of a trial that is done.

        Raises:
            BatchwrightError: The user can mend something, such as a network that does not take
                these images; or another worker is gone.
        """
        match command:
            case commands.Compare():
                group = self._part(command.workers)
                return choose_precision(self._job, self._data, group, seconds=command.seconds)
            case commands.Prepare():
                return self._prepare(command)
            case commands.Recompute():
                bench = self._joined(command.workers)
                if not may_recompute(bench.network):
                    return commands.Recomputed(times=None)
                return commands.Recomputed(times=compare_recomputation(bench, command))
            case commands.Compile():
                return compare_compilation(self._joined(command.workers), command)
            case commands.Replay():
                return compare_graphs(self._joined(command.workers), command)
            case commands.Guess():
                size = command.resolution, command.local_batch_size
                job = self._job
                if command.recompute:
                    job = job.model_copy(update={"activation_checkpointing": "on"})
                return commands.Guessed(peak_bytes=estimate_peak(job, self._data.facts, *size))
            case commands.Weigh():
                bench = self._joined(command.workers)
                peak, resident = weigh(
                    bench,
                    bench.supply(command.local_batch_size, command.resolution),
                    alone=self._job.method_spec.served,
                )
                return commands.Weighed(peak_bytes=peak, resident_bytes=resident)
            case commands.Visit():
                return self._visit(command)
            case commands.VisitPair():
                stretches = visit_pair(
                    self._alone(command.workers), self._part(command.workers), command
                )
                return commands.PairVisited(stretches=stretches)
            case commands.Exchange():
                group = self._part(command.workers)
                return time_exchange(
                    group, command.operation, command.bytes, seconds=command.seconds
                )
            case commands.TimeLink():
                return time_link(self._part(command.workers), command)
            case commands.MeasureNoise():
                noise = measure_noise(
                    self._joined(command.workers),
                    command.resolution,
                    command.part_size,
                    seconds=command.seconds,
                )
                return commands.NoiseMeasured(noise=noise)
            case commands.Evaluate():
                bench = self._joined(command.workers)
                return evaluate(bench, command.batch_size, command.repeats)
            case commands.TimeUpdates():
                times = update_times(self._joined(command.workers), seconds=command.seconds)
                return commands.UpdatesTimed(times=times)
            case commands.RunTrial():
                try:
                    trial = run_trial(self._joined(command.workers), command, on_progress)
                except GivenUp:
                    return commands.TrialRun(given_up=True)
                except NoAccuracy:
                    return commands.TrialRun(no_accuracy=True)
                return commands.TrialRun(trial=trial)

    def _prepare(self, command: commands.Prepare) -> commands.Prepared:
        group = self._part(command.workers)
        settled = {
            "precision": command.precision,
            "activation_checkpointing": "on" if command.recompute else "off",
            "compile": "on" if command.compile else "off",
            "cuda_graphs": "on" if command.cuda_graphs else "off",
        }
        self._job = self._job.model_copy(update=settled)
        bench = self._bench = Bench(self._job, self._data, group)
        channels = self._data.facts.channels
        facts = network_facts(self._job.network, bench.network, bench.side, channels)
        set_training(bench.network)
        bench.batches.hold_images()
        bench.release()
        feed = bench.batches.feed(command.workers)
        return commands.Prepared(
            data=self._data.facts,
            network=facts,
            parts=bench.parts(),
            held_bytes=held_bytes(bench),
            **devices(group, local_workers(group.size)),
            threads=torch.get_num_threads(),
            allocator=self._allocator,
            arithmetic=arithmetic(group.device),
            formats=formats_of(group),
            no_graphs=next(filter(None, group.gather(bench.graphs.failure)), ""),
            loaders=feed.loading.loaders if feed else None,
        )

    def _visit(self, command: commands.Visit) -> commands.Visited:
        bench = self._joined(command.workers)
        size, side = command.local_batch_size, command.resolution
        seconds, most = command.seconds, command.most_steps
        feed = bench.batches.feed(command.workers)
        # Not each host may have had the room to decode all images beforehand.
        if not on_any_worker(bench.group, feed is not None):
            supply = bench.supply(size, side)
            steps, by_worker = visit(bench, supply, seconds=seconds, most_steps=most)
            return commands.Visited(steps=tuple(steps), by_worker=by_worker)
        if feed is None:
            feed = bench.batches.training_feed(command.workers)
        steps, by_worker, loading = visit_beside_loading(
            bench, feed, size, side, seconds=seconds, most_steps=most
        )
        return commands.Visited(steps=tuple(steps), by_worker=by_worker, loading=loading)

    def close(self) -> None:
        """End the loader processes, and give the GPU's memory back.

        A sweep that has measured in its own process leaves the GPU to its cells.
        """
        if self._bench is not None:
            self._bench.close()
            self._bench = None
            with suppress(RuntimeError):  # of a GPU that has failed, which was told before
                release_memory(self._group.device)

    def _joined(self, workers: int) -> Bench:
        """The bench, which takes its steps with the first ``workers`` workers."""
        assert self._bench is not None  # noqa: S101 - the controller prepares first
        group = self._part(workers)
        # All join anew if one has to: a worker that sat out the last command has older weights.
        if on_any_worker(group, self._bench.group is not group):
            self._bench.join(group)
        return self._bench

    def _alone(self, workers: int) -> Bench:
        """The bench, which takes its steps by itself beside ``workers`` - 1 others."""
        assert self._bench is not None  # noqa: S101 - the controller prepares first
        self._part(workers)  # sets this worker's share of the cores
        if self._bench.group is not self._own:
            self._bench.join(self._own)
        return self._bench

    def _part(self, workers: int) -> Group:
        """The group of the first ``workers`` workers; sets this worker's share of the cores."""
        group = self._parts[workers]
        assert group is not None  # noqa: S101 - other workers do not get the command
        threads = worker_threads(local_workers(workers))
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        return group


def devices(group: Group, neighbours: int) -> dict[str, Any]:
    """Fields of `Prepared` about the devices of a group, with ``neighbours`` workers a machine."""
    names = group.gather(device_name(group.device))
    return {
        "device_name": names[0],
        "other_devices": tuple(sorted(set(names) - {names[0]})),
        "memory_bytes": memory_of_each(group, neighbours),
    }


def device_name(device: torch.device) -> str:
    """Model name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
