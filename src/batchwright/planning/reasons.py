"""Why each choice of a plan is what it is, in a sentence, with its numbers and where they are from.

The planner decides; nothing here does.
"""

from __future__ import annotations

from batchwright.prediction.collective import all_reduce_seconds
from batchwright.prediction.step_time import Curve
from batchwright.records import (
    DataFacts,
    Goal,
    Job,
    LearningRateRule,
    Precision,
    Prediction,
    Profile,
    Reason,
    Stage,
)

GOYAL = "Goyal et al. 2017, arXiv 1706.02677"
KRIZHEVSKY = "Krizhevsky 2014, arXiv 1404.5997"
LOSHCHILOV = "Loshchilov and Hutter 2017, arXiv 1608.03983"


def mebibytes(size: float) -> str:
    """Bytes for a person."""
    return f"{size / 2**20:.1f} MiB"


def measured_workers(profile: Profile, chosen: Prediction) -> Reason:
    """As many as were measured, and what their exchange costs."""
    workers = profile.cluster.workers
    why = "Measured with one worker: no gradients to exchange."
    if workers > 1 and profile.collectives:
        size = profile.network.trained_bytes
        exchange = all_reduce_seconds(size, profile.collectives)
        why = (
            f"Measured with {workers} computing at the same time; exchanging "
            f"{mebibytes(size)} of gradients takes {1e3 * exchange:.1f} ms alone, a step "
            f"{1e3 * chosen.step_seconds.value:.1f} ms."
        )
    elif workers > 1:
        why = f"Measured with {workers} computing at the same time."
    return Reason(choice="workers", value=str(workers), why=why, source="measured")


def resolution(side: int, data: DataFacts) -> Reason:
    """The data's own size, or the one asked for."""
    own = side == data.side
    why = "The size of the data's own images." if own else f"Asked for; the data has {data.side}."
    return Reason(
        choice="resolution", value=f"{side} px", why=why, source="assumed" if own else "asked"
    )


def measured_precision(profile: Profile, precision: Precision) -> Reason:
    """The number format in which the profile was taken."""
    why = f"The one the profile was taken in, on {profile.cluster.device_name}."
    if profile.precisions:
        size = profile.precisions[0].local_batch_size
        times = " and ".join(
            f"{1e3 * one.step_seconds:.3g} ms in {one.precision}" for one in profile.precisions
        )
        why = f"A step of {size} images on each worker took {times}."
    return Reason(choice="precision", value=precision, why=why, source="measured")


def asked_batch(chosen: Prediction, goal: Goal) -> Reason:
    """The job's own global batch."""
    why = f"Asked for; leaves {chosen.steps_per_epoch} steps an epoch"
    if chosen.steps_per_epoch < goal.least_steps:
        why += f", fewer than goal.least_steps={goal.least_steps}"
    return _batch(chosen, why + ".", source="asked")


def fastest_batch(chosen: Prediction, goal: Goal) -> Reason:
    """The least predicted epoch time."""
    why = (
        f"The least predicted epoch time, {chosen.epoch_seconds.value:.3g} s, of the batches "
        f"that fit the memory and leave at least {goal.least_steps} steps an epoch "
        "(goal.objective=time)."
    )
    return _batch(chosen, why)


def knee_batch(
    chosen: Prediction,
    doubled: Prediction | None,
    goal: Goal,
    *,
    kneedle_batch: int | None,
) -> Reason:
    """The knee of the predicted epoch time by the doubling rule, Kneedle's beside it."""
    batch = chosen.global_batch_size
    if doubled:
        gain = 1 - doubled.epoch_seconds.value / chosen.epoch_seconds.value
        why = (
            f"The smallest batch whose doubling saves less than {goal.doubling_gain:.1%} of the "
            f"epoch time: {doubled.global_batch_size} would save {gain:.1%} of "
            f"{chosen.epoch_seconds.value:.3g} s."
        )
    else:
        why = (
            f"Each doubling up to here saves at least {goal.doubling_gain:.1%} of the epoch time; "
            f"this is the largest batch that fits the memory and leaves at least "
            f"{goal.least_steps} steps an epoch."
        )
    if kneedle_batch is None:
        why += " Kneedle over log2 of the same batches finds no knee."
    elif kneedle_batch == batch:
        why += " Kneedle over log2 of the same batches says the same."
    else:
        why += f" Kneedle over log2 of the same batches says {kneedle_batch}."
    return _batch(chosen, why)


def _batch(chosen: Prediction, why: str, source: str = "predicted") -> Reason:
    value = f"{chosen.global_batch_size} samples"
    return Reason(choice="global batch", value=value, why=why, source=source)


def local_batches(stage: Stage) -> Reason:
    """Equal shares, in one go or accumulated."""
    passes = stage.accumulation_steps
    why = "Equal shares, each in one pass."
    if passes > 1:
        why = (
            f"Equal shares, each in {passes} passes of at most {stage.micro_batch_size} images "
            "whose gradients are added up."
        )
    sizes = "+".join(map(str, stage.local_batch_sizes))
    return Reason(choice="local batches", value=f"{sizes} samples", why=why, source="assumed")


def memory(chosen: Prediction, limit: int, *, asked: bool) -> Reason:
    """The predicted peak against the limit."""
    whose = "goal.memory" if asked else "what the device has free for one worker"
    return Reason(
        choice="memory",
        value=f"{mebibytes(chosen.peak_bytes.value)} per worker",
        why=f"At most {mebibytes(chosen.peak_bytes.high)} predicted for "
        f"{chosen.micro_batch_size} images at once; the limit is {mebibytes(limit)}, {whose}.",
        source="predicted",
    )


def trust(chosen: Prediction, compute: Curve) -> Reason:
    """How the time was predicted, and how well that describes the measurements."""
    count, residual = len(compute.batches), compute.line.largest_residual
    if compute.linear:
        how = f"Computing: a line through {count} measured batches, off by at most {residual:.1%}."
    else:
        how = (
            f"Computing: between {count} measured batches, as a line misses them by up to "
            f"{residual:.0%}."
        )
    if chosen.extrapolated:
        how += f" The batch lies outside {compute.batches[0]} to {compute.batches[-1]}."
    if compute.line.caveat:
        how += f" {compute.line.caveat[0].upper()}{compute.line.caveat[1:]}."
    estimate = chosen.epoch_seconds
    return Reason(
        choice="epoch time",
        value=f"{estimate.value:.3g} s ({estimate.low:.3g} to {estimate.high:.3g})",
        why=how,
        source="predicted",
    )


def unmeasured_batch(job: Job, stage: Stage, *, given: bool) -> Reason:
    """A batch chosen without measurements."""
    batch = stage.global_batch_size
    if given or job.global_batch != "auto":
        why, source = "Asked for; nothing was measured.", "asked"
    elif batch == job.base_batch:
        why, source = "The base batch of the learning rate; nothing was measured.", "assumed"
    else:
        why = f"The data is too small for base_batch={job.base_batch}; nothing was measured."
        source = "assumed"
    return Reason(choice="global batch", value=f"{batch} samples", why=why, source=source)


def learning_rate(job: Job, rule: LearningRateRule, stage: Stage) -> tuple[Reason, ...]:
    """Rate, warm-up and decay."""
    return _rate(rule, stage.global_batch_size), _warmup(job, rule), _decay(rule)


def _rate(rule: LearningRateRule, batch: int) -> Reason:
    ratio = f"{batch} / {rule.base_batch}"
    times, source, reference = {
        "linear": (f" x ({ratio}), linear in the batch", "published", GOYAL),
        "sqrt": (f" x sqrt({ratio}), the root of the batch", "published", KRIZHEVSKY),
        "none": (", not scaled with the batch", "asked", ""),
    }[rule.scaling]
    return Reason(
        choice="learning rate",
        value=f"{rule.peak:.4g} per step",
        why=f"{rule.base:g} at global batch {rule.base_batch}{times}.",
        source=source,
        reference=reference,
    )


def _warmup(job: Job, rule: LearningRateRule) -> Reason:
    value = f"{rule.warmup_epochs:g} epochs"
    if job.warmup_epochs != "auto":
        return Reason(choice="warm-up", value=value, why="Asked for.", source="asked")
    if rule.warmup_epochs == 0:
        why = f"The rate is not scaled up over {rule.base:g}."
        return Reason(choice="warm-up", value=value, why=why, source="assumed")
    return Reason(
        choice="warm-up",
        value=value,
        why=f"Linear from {rule.base:g} to {rule.peak:.4g}, over 5 epochs or a tenth of "
        f"{job.epochs} if that is less.",
        source="published",
        reference=GOYAL,
    )


def _decay(rule: LearningRateRule) -> Reason:
    why, source, reference = {
        "cosine": ("Half a cosine from the peak to 0.", "published", LOSHCHILOV),
        "steps": ("A tenth at 1/3, 2/3 and 8/9 of the epochs.", "published", GOYAL),
        "none": ("The rate stays at its peak.", "asked", ""),
    }[rule.decay]
    return Reason(choice="decay", value=rule.decay, why=why, source=source, reference=reference)


def noise_scale(batch: int, measured: float) -> Reason:
    """What the batch means against the gradient noise scale."""
    share = 1 / (1 + batch / measured)
    progress = f"a sample makes about {share:.0%} of the progress that it makes at tiny batches"
    if batch > 2 * measured:
        why = f"The batch is well above it: {progress}, and a larger batch costs more of it."
    elif batch > measured / 2:
        why = f"The batch is about as large: {progress}."
    else:
        why = f"The batch is well below it, so little progress per sample is lost: {progress}."
    return Reason(
        choice="gradient noise scale",
        value=f"{measured:.3g} samples",
        why=why + " Measured early; it usually grows in training (McCandlish et al. 2018).",
        source="measured",
    )
