"""What the measurements say of themselves in a plan: a busy machine, precision, loading."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.planning.chosen import Chosen
from batchwright.planning.merging import kind_of
from batchwright.prediction.drift import point_seconds
from batchwright.prediction.loading import nearest_loaded
from batchwright.records import (
    Cluster,
    Precision,
    Profile,
    Reason,
    Stage,
    StepLoading,
    StepTime,
)
from batchwright.records.text.load_text import load_words

WORTH_A_REMEDY = 0.1
"""Part of a step that loading must add before the plan says what to try."""

IDLE_CORES = 0.8
"""Share of the cores that steps and loading together keep busy, below which more processes help."""


def machine(profiles: Sequence[Profile]) -> tuple[Reason, ...]:
    """What disturbed the measurements; nothing to say of quiet machines."""
    return tuple(
        Chosen(
            "busy while it was measured",
            f"On {kind_of(profile)} {told}. Times may be too long or too short, and more than "
            "the intervals say: probe again while it is quiet.",
            "measured",
        ).reason("machine")
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
    return Chosen(precision, why, "measured").reason("precision")


def _ratio_words(profile: Profile) -> str:
    """How the formats compare, how surely, and why at no larger batch."""
    if profile.precision_ratio is None:
        return ""
    told, size = profile.precision_ratio, profile.precisions[0].local_batch_size
    ratio = told.ratio
    words = f": {ratio.value:.2f} times as long ({ratio.low:.2f} to {ratio.high:.2f}), in turns"
    if ratio.low <= 1 <= ratio.high:
        words += (
            f", which is not certain to be a difference; {profile.precisions[-1].precision} is "
            "taken where it seems to save 1 % or more, else float32, which rounds less"
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
    return (Chosen(processes, why, "measured").reason("loading"),)


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
