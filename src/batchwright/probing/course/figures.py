"""A probe's measurements besides steps: exchanges, gradient noise, evaluation, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchwright.prediction.collective import Operation
from batchwright.probing import commands
from batchwright.probing.course.curves import Curves
from batchwright.probing.measure.collective import SIZES
from batchwright.probing.measure.evaluation import passes
from batchwright.records import CollectiveTime, GradientNoise, UpdateTime

# Shares of the budget.
_EXCHANGE = 0.05
_NOISE = 0.1
_EVALUATION = 0.05
_UPDATES = 0.01  # for each optimizer

_PART = 16  # samples in each part, whose gradients give the noise scale
_EVALUATION_BATCH = 256
_EVALUATION_REPEATS = 4


def measure_figures(curves: Curves, report: Callable[[str], None]) -> dict[str, Any]:
    """Fields of a profile that are measured once each curve has been visited.

    Args:
        curves: The curves.
        report: Called with what is measured next.
    """
    return {
        "collectives": _exchanges(curves, report),
        "noise": _noise(curves, report),
        **_evaluation(curves, report),
        "updates": _updates(curves, report),
    }


def _exchanges(curves: Curves, report: Callable[[str], None]) -> tuple[CollectiveTime, ...]:
    sizes = sorted({*SIZES, curves.visitor.prepared.network.trained_bytes})
    operations: tuple[Operation, ...] = ("all-reduce", "push-pull")
    asked = [
        (operation, count, size)
        for operation in operations
        for count in curves.counts
        if count > 1
        for size in sizes
    ]
    times = []
    for operation, count, size in asked:
        report(f"exchange of {size:,} bytes, {count} workers")
        seconds = _EXCHANGE * curves.budget / len(asked)
        command = commands.Exchange(operation=operation, workers=count, bytes=size, seconds=seconds)
        time = curves.visitor.ask(command, CollectiveTime, "exchanging gradients")
        if time is not None:
            times.append(time)
    return tuple(times)


def _noise(curves: Curves, report: Callable[[str], None]) -> GradientNoise | None:
    report("gradient noise")
    curve = curves.all[-1]
    visited = [p.local_batch_size for p in curves.visitor.ledger.steps if p[:2] == curve]
    command = commands.MeasureNoise(
        workers=curve[0],
        resolution=curve[1],
        # Larger parts take hardly longer, and include more samples.
        part_size=max(curves.smallest[curve], min(_PART, max(visited, default=0))),
        seconds=_NOISE * curves.budget,
    )
    answer = curves.visitor.ask(command, commands.NoiseMeasured, "measuring gradient noise")
    return answer.noise if answer else None


def _evaluation(curves: Curves, report: Callable[[str], None]) -> dict[str, Any]:
    report("evaluation")
    curve = curves.all[-1]
    each = passes(_EVALUATION_REPEATS, curves.visitor.prepared.loaders or 0)
    affordable = _EVALUATION * curves.budget / sum(each)
    size = max(1, min(_EVALUATION_BATCH, int(affordable / curves.sample_seconds[curve])))
    while True:
        command = commands.Evaluate(workers=curve[0], batch_size=size, repeats=_EVALUATION_REPEATS)
        answer = curves.visitor.ask(command, commands.Evaluated, "evaluating")
        if answer is not None:
            return {
                "evaluation_seconds_per_image": answer.seconds_per_image,
                "first_answers": answer.first_answers,
            }
        size = max(1, size // 4)  # memory ran out; `ask` gives up after some restarts


def _updates(curves: Curves, report: Callable[[str], None]) -> tuple[UpdateTime, ...]:
    """Update times of the optimizers, where the plan is to choose one."""
    if curves.visitor.job.optimizer != "auto":
        return ()
    report("optimizers")
    seconds = _UPDATES * curves.budget / len(curves.counts)
    times: list[UpdateTime] = []
    for count in curves.counts:
        command = commands.TimeUpdates(workers=count, seconds=seconds)
        answer = curves.visitor.ask(command, commands.UpdatesTimed, "updating weights")
        times += answer.times if answer else ()
    return tuple(times)
