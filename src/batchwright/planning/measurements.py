"""What the measurements say of themselves in a plan: a busy machine, precision, memory, loading."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from batchwright.planning.chosen import Chosen
from batchwright.planning.merging import kind_of
from batchwright.prediction.drift import point_seconds
from batchwright.prediction.loading import nearest_loaded
from batchwright.records import (
    Alternative,
    Cluster,
    GraphTimes,
    Precision,
    Profile,
    Reason,
    RecomputationTimes,
    Stage,
    StepLoading,
    StepTime,
)
from batchwright.records.text.formatting import milliseconds, percent
from batchwright.records.text.load_text import disturbances, load_words

_HOST_CORES = 4
"""Of a worker on a GPU, beside its loader processes: its own thread, that of the backward pass, and
those that make batches ready ahead. Assumed."""

WORTH_A_REMEDY = 0.1
"""Part of a step that loading must add before the plan says what to try."""

IDLE_CORES = 0.8
"""Share of the cores that steps and loading together keep busy, below which more processes help."""


def machine(profiles: Sequence[Profile], workers: int) -> tuple[Reason, ...]:
    """What disturbed measurements for a plan with ``workers``; nothing to say of quiet machines."""
    return tuple(
        Chosen(
            "busy while it was measured",
            f"On {kind_of(profile)} {told}. Times may be too long or too short, and more than "
            f"the intervals say: probe again while it is quiet{_one_thread(profile, workers)}.",
            "measured",
        ).reason("machine")
        for profile in profiles
        if (told := load_words(profile.load))
    )


def _one_thread(profile: Profile, workers: int) -> str:
    """What helps where it is never quiet, and a worker has several threads."""
    threads = threads_of(profile.cluster, workers)
    busy = profile.load is not None and disturbances(profile.load)
    if profile.cluster.device != "cpu" or threads < 2 or not busy:
        return ""
    return ", or with BATCHWRIGHT_THREADS=1: a worker's threads wait for one that has no core"


def threads_of(cluster: Cluster, workers: int) -> int:
    """Compute threads that each of so many workers had, or has where more were not measured.

    Fewer than measured together had more each, unless a number of threads was given.
    """
    share = max(1, cluster.cores // cluster.workers)
    if workers >= cluster.workers or cluster.threads != share:
        return cluster.threads
    return max(1, cluster.cores // workers)


def fewer_cores(profile: Profile, stages: Sequence[Stage], threads: int) -> int | None:
    """Cores that a worker on a GPU needs, where they are fewer than its threads; else `None`.

    One that was probed alone had all cores of its machine, and uses few: some of its own, and twice
    the loader processes that keep up with its steps, as far as there were so many.
    """
    if profile.cluster.device == "cpu":
        return None
    needed = _HOST_CORES
    for stage in stages:
        size = stage.micro_batch_size
        point = nearest_loaded(profile.steps, stage.workers, stage.resolution, size)
        if point is not None and point.loading is not None:
            told = point.loading
            busy = ceil(2 * told.batch_seconds / point_seconds(point))
            needed = max(needed, _HOST_CORES + min(told.loaders, busy))
    return needed if needed < threads else None


def measured_precision(profile: Profile, precision: Precision) -> Reason:
    """The number format in which the profile was taken."""
    why = f"The one the profile was taken in, on {profile.cluster.device_name}."
    if profile.precisions:
        size = profile.precisions[0].local_batch_size
        times = " and ".join(
            f"{milliseconds(one.step_seconds)} in {one.precision}" for one in profile.precisions
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
    if not told.finite:
        words += (
            f". Gradients in {profile.precisions[-1].precision} were infinite or not a number "
            "where those in float32 were not, so float32 is taken"
        )
    elif ratio.low <= 1 <= ratio.high:
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


def recomputation(profile: Profile) -> tuple[Reason, ...]:
    """Whether blocks are computed again in the backward pass; nothing to say where memory is ample.

    The times and the memory of the profile are with what it says.
    """
    asked, told = profile.job.activation_checkpointing, profile.recomputation
    if told is None:
        if asked != "on":
            return ()
        why = (
            "Asked for, and measured with it: blocks keep their input alone and are computed again "
            "in the backward pass, uncompiled. All predicted times and bytes are with it."
        )
        return (Chosen("on", why, "measured").reason("activation checkpointing"),)
    return (
        Chosen(
            asked,
            _fitting_words(told) + (" Such blocks are not compiled." if told.chosen else ""),
            "measured",
            _RECOMPUTED if told.chosen else "",
            () if told.ratio is None else (_way_not_taken(told),),
        ).reason("activation checkpointing"),
    )


def graphs(profiles: Sequence[Profile]) -> tuple[Reason, ...]:
    """Whether GPUs replay passes: by the first kind that does, if any.

    Nothing to say where there was no question.
    """
    profile = next((one for one in profiles if one.job.cuda_graphs == "on"), profiles[0])
    told, asked = profile.graphs, profile.job.cuda_graphs == "on"
    if told is not None:
        value = "on" if told.chosen else "off"
        return (Chosen(value, _graph_words(told), "measured").reason("CUDA graphs"),)
    why = "Asked for, and measured with it."
    return (Chosen("on", why, "asked").reason("CUDA graphs"),) if asked else ()


def _graph_words(told: GraphTimes) -> str:
    if told.failure:
        return f"Passes of the network cannot be replayed here: {told.failure}."
    if told.ratio is None or told.replayed_seconds is None:
        return (
            "There is not enough memory to keep a step's passes recorded and take other steps "
            "beside them."
        )
    ratio = told.ratio
    why = (
        f"A step of {told.local_batch_size} images takes {milliseconds(told.replayed_seconds)} "
        f"where forward and backward pass are replayed, and {milliseconds(told.plain_seconds)} as "
        f"it is: {ratio.value:.2f} times as long ({ratio.low:.2f} to {ratio.high:.2f}), in turns."
    )
    if told.chosen:
        return f"{why} The numbers are the same, the GPU waits less for the host."
    return f"{why} The host keeps up with the GPU here, so nothing is gained."


_RECOMPUTED = "Chen et al. 2016, Training deep nets with sublinear memory cost, arXiv 1604.06174"


def _fitting_words(told: RecomputationTimes) -> str:
    """What fits into the memory both ways, what it takes, and so what is done."""
    wanted, plain, again = (
        told.wanted_batch_size,
        told.plain_batch_size,
        told.recomputing_batch_size,
    )
    why = (
        f"Of {wanted} images on a worker {plain or 'not even the fewest'} fit at once into "
        f"{told.limit_bytes / 2**20:,.0f} MiB, and {again or 'not even these'} where blocks of "
        "the network are computed again in the backward pass. "
    )
    if told.ratio is None or told.compared_batch_sizes is None:
        if told.chosen:
            return f"{why}There is no other way to train it here."
        return why + (
            "So there is nothing to gain from it."
            if plain
            else "More memory is needed, or a smaller network or resolution."
        )
    sizes, ratio = told.compared_batch_sizes, told.ratio
    why += (
        f"A step of {sizes[0]} takes {milliseconds(told.plain_sample_seconds or 0)} an image, "
        f"one of {sizes[1]} computed again {milliseconds(told.recomputing_sample_seconds or 0)}: "
        f"{ratio.value:.2f} times as long ({ratio.low:.2f} to {ratio.high:.2f}), in turns. "
    )
    return why + ("So it is." if told.chosen else "So a larger batch goes in micro-batches.")


def _way_not_taken(told: RecomputationTimes) -> Alternative:
    """What the other way takes."""
    seconds = told.plain_sample_seconds if told.chosen else told.recomputing_sample_seconds
    size = told.plain_batch_size if told.chosen else told.recomputing_batch_size
    return Alternative(
        value="off" if told.chosen else "on",
        loss=f"{milliseconds(seconds or 0)} an image, {size} of them at once",
    )


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
        f"{milliseconds(told.batch_seconds / batch, 2)} an image. With its images at hand a step "
        f"takes {milliseconds(told.alone_seconds)}, beside loading {milliseconds(step)}, of which "
        f"it waits {milliseconds(told.input_seconds)} for images. That is in all predicted times."
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
    share = f" Loading makes a step {percent(longer, 0)} longer"
    if waits and busy < IDLE_CORES and point.workers * told.loaders < cores:
        return f"{share} while cores are idle: try loaders={max(1, 2 * told.loaders)}, {cheaper}."
    return f"{share}, and more loader processes would not help: try {cheaper}."
