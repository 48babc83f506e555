"""A plan's main values by name, for trackers and model cards."""

from __future__ import annotations

from itertools import accumulate

from batchwright.records.plan import Plan

Fact = str | int | float


def plan_facts(plan: Plan) -> dict[str, Fact]:
    """Choices and predictions of a plan, by name; seconds are those of its first stage's epochs."""
    stage, ends = plan.stages[0], accumulate(row.epochs for row in plan.stages)
    grown = (
        f"{row.global_batch_size} from epoch {end + 1} on at rate {row.learning_rate:.3g}"
        for row, end in zip(plan.stages[1:], ends, strict=False)
    )
    found: dict[str, Fact | None] = {
        "network": plan.network.name,
        "data": plan.data.name,
        "method": plan.method,
        "workers": plan.workers,
        "epochs": plan.epochs,
        "global_batch": stage.global_batch_size,
        "local_batches": ", ".join(map(str, stage.local_batch_sizes)),
        "learning_rate": stage.learning_rate,
        "batch_growth": ", ".join((plan.job.batch_growth, *grown)) if plan.growth else None,
        "decay": plan.learning_rate.decay,
        "resolution": stage.resolution,
        "precision": plan.precision,
        "optimizer": plan.update,
        "seed": plan.job.seed,
        "seconds": "simulated" if plan.job.launcher.simulated else None,
    }
    seconds = stage.predicted_epoch_seconds
    accuracy = plan.epoch_accuracy[-1] if plan.epoch_accuracy else None
    for name, one in (("epoch_seconds", seconds), ("accuracy", accuracy)):
        if one is not None:
            found |= {f"predicted_{name}": one.value}
            found |= {f"predicted_{name}_low": one.low, f"predicted_{name}_high": one.high}
    return {name: value for name, value in found.items() if value is not None}
