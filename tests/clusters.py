"""Plans over several cluster sizes, by hand: a fixed time per step and one per image."""

from __future__ import annotations

from typing import Any

from batchwright.records import (
    Alternative,
    Estimate,
    HeldOut,
    KindCount,
    Knee,
    Plan,
    Prediction,
    Profile,
    StepTime,
)
from samples import make_data, make_plan, make_profile

TRAIN, EPOCHS = 50_000, 30
EVALUATION = 78.0  # seconds of the whole training on one worker
LOCAL_BATCHES = (8, 16, 32, 64, 128, 256, 512, 1024)


def step_seconds(workers: int, local_batch: int) -> float:
    if workers == 1:
        return 0.011 + 0.00052 * local_batch
    return 0.0175 + 0.00083 * local_batch


def estimate(value: float, share: float = 0.04) -> Estimate:
    return Estimate(value=value, low=value * (1 - share), high=value * (1 + share))


def make_candidate(
    workers: int, local: int, *, price: float | None = 0.4, **changes: Any
) -> Prediction:
    batch = workers * local
    step = step_seconds(workers, local)
    epoch = TRAIN / batch * step
    training = EPOCHS * epoch + EVALUATION / workers
    fields = {
        "workers": workers,
        "global_batch_size": batch,
        "local_batch_size": local,
        "micro_batch_size": local,
        "resolution": 32,
        "steps_per_epoch": -(-TRAIN // batch),
        "step_seconds": estimate(step),
        "epoch_seconds": estimate(epoch),
        "peak_bytes": estimate(4e6 + 668_000 * local, 0.02),
        "efficiency": estimate(1 / (1 + batch / 2000), 0.1),
        "train_seconds": estimate(training),
        "cost": estimate(price * workers * training / 3600) if price else None,
        "extrapolated": local > 512,
        "frontier": local == 256,
    }
    return Prediction(**(fields | changes))


def make_choice(
    workers: tuple[int, ...] = (1, 2),
    chosen: tuple[int, int] = (2, 256),
    *,
    price: float | None = 0.4,
    kinds: tuple[KindCount, ...] = (),
    **changes: Any,
) -> Plan:
    """A plan that chose ``chosen`` (workers, local batch) of candidates for several clusters."""
    considered = tuple(
        make_candidate(count, local, price=price) for count in workers for local in LOCAL_BATCHES
    )
    count, local = chosen
    one = make_candidate(count, local, price=price)
    plan = make_plan()
    stage = plan.stages[0].model_copy(
        update={
            "local_batch_sizes": (local,) * count,
            "micro_batch_size": local,
            "predicted_epoch_seconds": one.epoch_seconds,
            "predicted_bytes": one.peak_bytes,
        }
    )
    first, *others = plan.reasons
    instead = Alternative(value="256 samples", loss="7 % more time: 764 s instead of 713 s")
    fields = {
        "job": plan.job.model_copy(update={"workers": count}),
        "data": make_data(name="cifar100", train_samples=TRAIN, val_samples=10_000),
        "considered": considered,
        "stages": (stage,),
        "knees": tuple(
            Knee(
                workers=n,
                resolution=32,
                global_batch_size=256 * n,
                low=180.0 * n,
                high=310.0 * n,
                closed_form=214.2 * n,
                kneedle=128 * n,
            )
            for n in workers
        ),
        "held_out": tuple(make_held_out(n, b) for n in workers for b in (12, 24, 46, 92, 182, 362)),
        "reasons": (first.model_copy(update={"alternatives": (instead,)}), *others),
        "kinds": kinds,
    }
    return make_plan(**(fields | changes))


def make_held_out(workers: int, local: int, resolution: int = 32) -> HeldOut:
    return HeldOut(
        workers=workers,
        resolution=resolution,
        local_batch_size=local,
        step_seconds=estimate(step_seconds(workers, local)),
        peak_bytes=estimate(4e6 + 668_000 * local, 0.01),
        resident_bytes=estimate(4e8 + 700_000 * local, 0.1),
    )


def make_step(workers: int, local: int, factor: float = 1.0, **changes: Any) -> StepTime:
    seconds = factor * step_seconds(workers, local)
    fields = {
        "resolution": 32,
        "local_batch_size": local,
        "workers": workers,
        "compute_seconds": 0.9 * seconds,
        "sync_seconds": 0.1 * seconds if workers > 1 else 0.0,
        "step_seconds": seconds,
        "step_low": 0.97 * seconds,
        "step_high": 1.04 * seconds,
        "repeats": 20,
        "visits": (0.98 * seconds, seconds, 1.03 * seconds),
    }
    return StepTime(**(fields | changes))


def make_measured(workers: tuple[int, ...] = (1, 2), **changes: Any) -> Profile:
    """The profile behind `make_choice`."""
    steps = tuple(make_step(n, b) for n in workers for b in (8, 32, 96, 256, 512))
    return make_profile(**({"steps": steps} | changes))
