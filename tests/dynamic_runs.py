"""Summaries and metric lines of runs whose shares follow the workers' speeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from batchwright.records import EpochRecord, LocalBatches, RunSummary, WorkerTime
from batchwright.records.lines.run_lines import RunLine
from run_lines import typed
from samples import make_epoch, make_job, make_plan, make_summary

STEPS = 12


def split(batch: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """``batch`` samples in shares proportional to ``speeds``, what is left over one by one."""
    sizes = [int(batch * speed / sum(speeds)) for speed in speeds]
    left = batch - sum(sizes)
    return tuple(size + (rank < left) for rank, size in enumerate(sizes))


def dynamic_epoch(
    epoch: int,
    speeds: Sequence[float],
    shares: Iterable[tuple[int, tuple[int, ...]]],
    places: Sequence[str] = (),
    **changes: Any,
) -> EpochRecord:
    """An epoch of `STEPS` steps; ``speeds`` in samples per second, ``shares`` as (step, sizes)."""
    told = [LocalBatches(step=step, sizes=sizes) for step, sizes in shares]
    ends = [*(one.step for one in told[1:]), STEPS]
    spans = [(end - one.step, one.sizes) for one, end in zip(told, ends, strict=True)]
    busy, waits = [0.0] * len(speeds), [0.0] * len(speeds)
    for steps, sizes in spans:
        seconds = [steps * size / speed for size, speed in zip(sizes, speeds, strict=True)]
        busy = [before + more for before, more in zip(busy, seconds, strict=True)]
        waits = [before + max(seconds) - more for before, more in zip(waits, seconds, strict=True)]
    workers = tuple(
        WorkerTime(
            place=places[rank] if places else f"node{rank // 8}/cpu:{rank % 8}",
            local_batch_size=told[-1].sizes[rank],
            samples=sum(steps * sizes[rank] for steps, sizes in spans),
            input_seconds=0.02,
            compute_seconds=busy[rank],
            wait_seconds=waits[rank],
            communication_seconds=0.04,
        )
        for rank in range(len(speeds))
    )
    fields = {
        "steps": STEPS,
        "samples": STEPS * sum(told[-1].sizes),
        "training_seconds": busy[0] + waits[0] + 0.06,
        "workers": workers,
        "shares": tuple(told),
    }
    return make_epoch(epoch, **(fields | changes))


def dynamic_summary(workers: int = 2, epochs: int = 8, **changes: Any) -> RunSummary:
    """The last worker is half as fast as the others in the middle half of the epochs."""
    batch = 48 * workers
    even, records = split(batch, [1] * workers), []
    before = even
    for epoch in range(epochs):
        slow = epochs // 4 <= epoch < 3 * epochs // 4
        speeds = [800.0] * (workers - 1) + [400.0 if slow else 800.0]
        after = split(batch, speeds)
        shares = [(0, before)] + ([(4, after)] if after != before else [])
        records.append(dynamic_epoch(epoch, speeds, shares, whole=epoch != 3))
        before = after
    job = make_job(method="dynamic-batch", workers=workers)
    stage = make_plan().stages[0].model_copy(update={"local_batch_sizes": even, "epochs": epochs})
    plan = make_plan(method="dynamic-batch", job=job, stages=(stage,))
    wall = 5.0 + sum(one.training_seconds + one.evaluation_seconds for one in records)
    return make_summary(
        **({"plan": plan, "epochs": tuple(records), "wall_seconds": wall} | changes)
    )


def step_line(step: int, sizes: Sequence[int], **more: Any) -> RunLine:
    """A line of a step inside the first epoch; ``more`` have flat names."""
    line: dict[str, Any] = {"kind": "step", "step": step}
    for rank, size in enumerate(sizes):
        line[f"batch/local/{rank}"] = size
        line[f"time/rank{rank}/compute_s"] = 0.001 * size
        line[f"time/rank{rank}/wait_s"] = 0.0005 * rank
    return typed(line | more)


def shares_line(step: int, sizes: Sequence[int], speeds: Sequence[float] = ()) -> RunLine:
    """The line that tells shares from ``step`` of the first epoch on."""
    line: dict[str, Any] = {"kind": "shares", "step": step}
    line |= {f"batch/local/{rank}": size for rank, size in enumerate(sizes)}
    return typed(line | {f"speed/{rank}": speed for rank, speed in enumerate(speeds)})
