"""Why what was not predicted is what it is: resolution, precision, rate, an unmeasured batch.

The planner decides; nothing here does.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.algorithms.learning_rate import (
    ONE_CYCLE_END,
    ONE_CYCLE_RISE,
    fitted_warmup,
    raises_nothing,
    remark_on_rate,
)
from batchwright.algorithms.rebalancing import DEAD_BAND
from batchwright.planning.merging import kind_of
from batchwright.prediction.drift import point_seconds
from batchwright.prediction.loading import nearest_loaded
from batchwright.records import (
    Alternative,
    Cluster,
    DataFacts,
    Job,
    LearningRateRule,
    OptimizerName,
    Precision,
    Profile,
    Reason,
    Stage,
    StepLoading,
    StepTime,
)
from batchwright.records.text.load_text import load_words

GOYAL = "Goyal et al. 2017, arXiv 1706.02677"
KRIZHEVSKY = "Krizhevsky 2014, arXiv 1404.5997"
JOHNSON = "Johnson et al. 2020, arXiv 2007.05105"
LOSHCHILOV = "Loshchilov and Hutter 2017, arXiv 1608.03983"
POSTER = "McCord and Dash, SC21 poster"
SMITH = "Smith and Topin 2018, arXiv 1708.07120"
YE = "Ye et al. 2020, arXiv 2007.11831"

WORTH_A_REMEDY = 0.1
"""Part of a step that loading must add before the plan says what to try."""

IDLE_CORES = 0.8
"""Share of the cores that steps and loading together keep busy, below which more processes help."""


def resolution(side: int, data: DataFacts, alternatives: tuple[Alternative, ...] = ()) -> Reason:
    """The data's own size, or the one asked for."""
    own = side == data.side
    why = "The size of the data's own images." if own else f"Asked for; the data has {data.side}."
    if alternatives:
        why += " The highest of those asked for, at which `plain` trains."
    return Reason(
        choice="resolution",
        value=f"{side} px",
        why=why,
        source="assumed" if own else "asked",
        alternatives=alternatives,
    )


def machine(profiles: Sequence[Profile]) -> tuple[Reason, ...]:
    """What disturbed the measurements; nothing to say of quiet machines."""
    return tuple(
        Reason(
            choice="machine",
            value="busy while it was measured",
            why=f"On {kind_of(profile)} {told}. Times may be too long or too short, and more than "
            "the intervals say: probe again while it is quiet.",
            source="measured",
        )
        for profile in profiles
        if (told := load_words(profile.load))
    )


def measured_precision(profile: Profile, precision: Precision) -> Reason:
    """The number format in which the profile was taken."""
    why = f"The one the profile was taken in, on {profile.cluster.device_name}."
    if profile.precisions:
        size = profile.precisions[0].local_batch_size
        times = " and ".join(
            f"{1e3 * one.step_seconds:.3g} ms in {one.precision}" for one in profile.precisions
        )
        why = f"A step of {size} images on each worker took {times}{_ratio_words(profile)}."
    return Reason(choice="precision", value=precision, why=why, source="measured")


def _ratio_words(profile: Profile) -> str:
    """How the formats compare, how surely, and why at no larger batch."""
    if profile.precision_ratio is None:
        return ""
    told, size = profile.precision_ratio, profile.precisions[0].local_batch_size
    ratio = told.ratio
    words = f": {ratio.value:.2f} times as long ({ratio.low:.2f} to {ratio.high:.2f}), in turns"
    if ratio.low <= 1 <= ratio.high:
        words += (
            ", which is not certain to be a difference; bfloat16 is taken where it seems to save "
            "1 % or more, else float32, which rounds less"
        )
    if size < told.wanted_batch_size:
        words += (
            f". The choice is for {told.wanted_batch_size} images, which time or memory did not "
            "allow to try"
        )
    return words


def loading(profile: Profile, stages: Sequence[Stage]) -> tuple[Reason, ...]:
    """What loading has to do with the times; nothing to say where a step makes its own batch."""
    stage = max(stages, key=lambda one: one.resolution)
    size = stage.micro_batch_size
    point = nearest_loaded(profile.steps, stage.workers, stage.resolution, size)
    if point is None or point.loading is None:
        return ()
    told, batch, step = point.loading, point.local_batch_size, point_seconds(point)
    processes = f"{told.loaders or 'no'} loader process{'es' * (told.loaders != 1)}"
    whose = "the worker" if point.workers == 1 else f"each of {point.workers} workers"
    by = "a process takes" if told.loaders else "it takes"
    # What a step waits is loading's for sure; the rest is a difference of two measurements.
    longer = step / min(told.alone_seconds, step - told.input_seconds) - 1
    why = (
        f"Measured with {processes} for {whose}, {batch} images in a step: {by} "
        f"{1e3 * told.batch_seconds / batch:.2g} ms an image. With its images at hand a step takes "
        f"{1e3 * told.alone_seconds:.3g} ms, beside loading {1e3 * step:.3g} ms, of which it waits "
        f"{1e3 * told.input_seconds:.3g} ms for images. That is in all predicted times."
        f"{_remedy(profile.cluster, point, told, longer)}"
    )
    return (Reason(choice="loading", value=processes, why=why, source="measured"),)


def _remedy(cluster: Cluster, point: StepTime, told: StepLoading, longer: float) -> str:
    """What to try where loading takes a good part of a step."""
    if longer < WORTH_A_REMEDY:
        return ""
    cheaper = (
        "smaller files, a cheaper transform, or images that are decoded once (tensors kept in "
        "memory, or data=imagefolder: of a folder that fits the cache)"
    )
    step, cores = point_seconds(point), cluster.cores
    threads = max(1, cores // point.workers) if cluster.device == "cpu" else 1
    busy = point.workers * (threads * told.alone_seconds + told.cpu_seconds) / (cores * step)
    waits = told.input_seconds >= (step - told.alone_seconds) / 2
    share = f" Loading makes a step {longer:.0%} longer"
    if waits and busy < IDLE_CORES and point.workers * told.loaders < cores:
        return f"{share} while cores are idle: try loaders={max(1, 2 * told.loaders)}, {cheaper}."
    return f"{share}, and more loader processes would not help: try {cheaper}."


def method(job: Job) -> tuple[Reason, ...]:
    """How shares change while training; nothing to say where they stay as planned."""
    if not job.method_spec.follows_speed:
        return ()
    when = "at the end of each epoch"
    if job.rebalance_steps:
        when = f"every {job.rebalance_steps} steps and {when}"
    why = (
        f"Asked for. Local batches are where it starts: {when} each worker's share is made to "
        "follow its measured speed, if any would change by more than "
        f"{DEAD_BAND:.0%}; the global batch stays."
    )
    return (Reason(choice="method", value=job.method, why=why, source="published", reference=YE),)


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


def learning_rate(
    job: Job, rule: LearningRateRule, stage: Stage, update: OptimizerName, tried: str = ""
) -> tuple[Reason, ...]:
    """Rate, warm-up and decay; ``tried`` says what trials told of rates."""
    batch = stage.global_batch_size
    remark = remark_on_rate(job, rule, update)
    return rate(rule, batch, remark, tried), warmup(job, rule, batch), decay(rule)


def rate(rule: LearningRateRule, batch: int, remark: str = "", tried: str = "") -> Reason:
    """The peak rate, for a step of ``batch`` samples.

    A ``remark`` is on its base; ``tried`` says what trials told of rates.
    """
    ratio = f"{batch} / {rule.base_batch}"
    times, source, reference = {
        "linear": (f" x ({ratio}), linear in the batch", "published", GOYAL),
        "sqrt": (f" x sqrt({ratio}), the root of the batch", "published", KRIZHEVSKY),
        "gain": (_gain_words(rule, batch), "published", JOHNSON),
        "none": (", not scaled with the batch", "asked", ""),
    }[rule.scaling]
    why = f"{rule.base:.4g} at global batch {rule.base_batch}{times}."
    if remark:
        source, reference = "assumed", ""
        why += f" {remark}"
    if batch < rule.base_batch and rule.scaling in ("linear", "sqrt"):
        why += " The batch is below the one that the rate is for, so the rate is scaled down."
    if tried:
        source, reference = "measured", ""
        why += f" {tried}"
    return Reason(
        choice="learning rate",
        value=f"{rule.peak:.4g} per step",
        why=why,
        source=source,
        reference=reference,
    )


def _gain_words(rule: LearningRateRule, batch: int) -> str:
    if batch <= rule.base_batch:
        return "; the batch is not above that, so there is nothing to gain"
    return (
        ", times a gain that is measured in each step from the noise of the gradients: from 1 "
        f"where they agree to {batch} / {rule.base_batch} = {batch / rule.base_batch:.4g} where "
        "they are all noise"
    )


def warmup(job: Job, rule: LearningRateRule, batch: int) -> Reason:
    """How the rate begins, for a step of ``batch`` samples."""
    value = f"{rule.warmup_epochs:g} epochs"
    if job.warmup_epochs != "auto":
        why = "Asked for."
        if raises_nothing(rule):
            why += f" It raises nothing: it begins at {rule.base:g}, the peak is not above that."
        return Reason(choice="warm-up", value=value, why=why, source="asked")
    if rule.decay == "one-cycle":
        why = (
            f"The cycle's own rise: half a cosine from a 25th of the peak, over "
            f"{ONE_CYCLE_RISE:.0%} of the epochs."
        )
        return Reason(choice="warm-up", value=value, why=why, source="published", reference=SMITH)
    if rule.warmup_epochs == 0:
        why = f"The rate is not scaled up over {rule.base:g}."
        if rule.scaling == "gain":
            why = "None: the gain is 1 until it is measured, and small while gradients agree."
        return Reason(choice="warm-up", value=value, why=why, source="assumed")
    ratio = batch / rule.base_batch
    fitted = fitted_warmup(ratio, job.epochs)
    return Reason(
        choice="warm-up",
        value=value,
        why=f"Linear from {rule.base:g} to {rule.peak:.4g}. By the power of the batch that goes "
        "through the best of 0, 5, 10 and 20 epochs out of 90 with ResNet-50, 5 at 60 times the "
        f"base batch and 10 at 240 times, here {ratio:.4g} times. Two points leave "
        f"{fitted.least:g} to {fitted.most:g} epochs open; warmup_epochs= decides otherwise.",
        source="published",
        reference=POSTER,
    )


def decay(rule: LearningRateRule) -> Reason:
    """How the rate falls."""
    why, source, reference = {
        "cosine": ("Half a cosine from the peak to 0.", "published", LOSHCHILOV),
        "steps": ("A tenth at 1/3, 2/3 and 8/9 of the epochs.", "published", GOYAL),
        "one-cycle": (
            f"Half a cosine from the peak to {ONE_CYCLE_END:.0e} of it.",
            "published",
            SMITH,
        ),
        "none": ("The rate stays at its peak.", "asked", ""),
    }[rule.decay]
    return Reason(choice="decay", value=rule.decay, why=why, source=source, reference=reference)
