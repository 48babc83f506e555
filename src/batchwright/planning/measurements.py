"""A plan's reasons that describe the measurements: a busy machine, precision, memory, loading."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.chosen import Chosen
from batchwright.planning.merging import kind_of
from batchwright.prediction.drift import least_share, point_seconds
from batchwright.prediction.loading import nearest_loaded
from batchwright.records import (
    Alternative,
    Cluster,
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
"""Cores of a worker on a GPU besides those of its loader processes: for its own thread, the thread
of the backward pass, and the threads that prepare batches ahead. Assumed."""

WORTH_A_REMEDY = 0.1
"""Share of a step that loading must add before the plan says what to try."""

IDLE_CORES = 0.8
"""Share of the cores that steps and loading together keep busy, below which more processes help."""


def machine(profiles: Sequence[Profile], workers: int) -> tuple[Reason, ...]:
    """What disturbed the measurements; empty where the machines were quiet.

    Args:
        profiles: One for each kind of worker.
        workers: Number of workers in the plan.
    """
    return tuple(
        Chosen(
            "busy while it was measured",
            f"On {kind_of(profile)} {words}. Times may be too long or too short"
            f"{_widened(profile)}: probe again while it is quiet{_one_thread(profile, workers)}.",
            "measured",
        ).reason("machine")
        for profile in profiles
        if (words := load_words(profile.load))
    )


def _widened(profile: Profile) -> str:
    """What the intervals of times do about the machine's load."""
    share = least_share(profile)
    if share == 1:
        return ", and more than the intervals say"
    waited = any(point.beside_seconds for point in profile.steps)
    return (
        f". The intervals of times allow for any share of the cores from {percent(share, 0)} to "
        f"all of them{', and for the longest wait of a step beside others' * waited}"
    )


def _one_thread(profile: Profile, workers: int) -> str:
    """Advice for a machine that is never quiet; empty where a worker has one thread anyway."""
    threads = threads_of(profile.cluster, workers)
    busy = profile.load is not None and disturbances(profile.load)
    if profile.cluster.device != "cpu" or threads < 2 or not busy:
        return ""
    return ", or with BATCHWRIGHT_THREADS=1: a worker's threads wait for one that has no core"


def threads_of(cluster: Cluster, workers: int) -> int:
    """Compute threads of each of ``workers`` workers.

    It is as measured for the workers that were measured together, and for more. Fewer workers share
    all cores of the machine, so each has more threads, unless the number of threads was given.
    """
    share = max(1, cluster.cores // cluster.workers)
    if workers >= cluster.workers or cluster.threads != share:
        return cluster.threads
    return max(1, cluster.cores // workers)


def threads_of_all(cluster: ClusterOption) -> int | None:
    """Compute threads of each worker of a cluster; `None` where they had different numbers."""
    found = {
        threads_of(kind.profile.cluster, cluster.workers if kind.together else count)
        for kind, count in cluster.members
    }
    return found.pop() if len(found) == 1 else None


def fewer_cores(profile: Profile, stages: Sequence[Stage], threads: int) -> int | None:
    """Cores that a worker on a GPU needs, if these are fewer than its threads; else `None`.

    A worker that was probed alone had all cores of its machine and uses few of them: `_HOST_CORES`,
    and twice the loader processes that keep up with its steps, at most as many as it had.
    """
    if profile.cluster.device == "cpu":
        return None
    needed = _HOST_CORES
    for stage in stages:
        size = stage.micro_batch_size
        point = nearest_loaded(profile.steps, stage.workers, stage.resolution, size)
        if point is not None and point.loading is not None:
            times = point.loading
            busy = ceil(2 * times.batch_seconds / point_seconds(point))
            needed = max(needed, _HOST_CORES + min(times.loaders, busy))
    return needed if needed < threads else None


def measured_precision(profile: Profile, precision: Precision) -> Reason:
    """The number format in which the profile was taken."""
    formats, name = profile.cluster.formats, profile.cluster.device_name
    why = f"The one the profile was taken in, on {name}."
    if formats == (precision,):
        why = f"{name} computes in {precision} alone: it has no instructions for 16-bit formats."
    elif precision in formats:
        why = f"{why[:-1]}, which computes in {' and '.join(formats)}."
    elif len(formats) == 1:  # of several, a GPU may have instructions for others, too
        why = f"{why[:-1]}, which has no instructions for 16-bit formats."
    if profile.precisions:
        size = profile.precisions[0].local_batch_size
        times = " and ".join(
            f"{milliseconds(one.step_seconds)} in {one.precision}" for one in profile.precisions
        )
        why = f"A step of {size} images on each worker took {times}{_ratio_words(profile)}."
    return Chosen(precision, why, "measured").reason("precision")


def _ratio_words(profile: Profile) -> str:
    """The ratio of the times in both formats, its error, and why no larger batch was tried."""
    if profile.precision_ratio is None:
        return ""
    compared, size = profile.precision_ratio, profile.precisions[0].local_batch_size
    ratio = compared.ratio
    words = (
        f", each in the median; turn by turn the latter took {ratio.value:.2f} times as long "
        f"({ratio.low:.2f} to {ratio.high:.2f})"
    )
    if not compared.finite:
        words += (
            f". Gradients in {profile.precisions[-1].precision} were infinite or not a number "
            "where those in float32 were not, so float32 is taken"
        )
    elif ratio.low <= 1 <= ratio.high:
        words += (
            f", which is not certain to be a difference; {profile.precisions[-1].precision} is "
            "taken where it seems to save 1 % or more, else float32, which rounds less"
        )
    if size < compared.wanted_batch_size:
        words += (
            f". The choice is for {compared.wanted_batch_size} images, which time or memory did "
            "not allow to try"
        )
    return words


def recomputation(profile: Profile) -> tuple[Reason, ...]:
    """Whether blocks are computed again in the backward pass; empty if that was not considered.

    Times and memory of the profile were measured in the way that was chosen.
    """
    asked, times = profile.job.activation_checkpointing, profile.recomputation
    if times is None:
        if asked != "on":
            return ()
        why = (
            "Asked for. Blocks of the network keep only their input and are computed again in the "
            "backward pass, uncompiled. Steps were measured like that, so all predicted times and "
            "bytes include it."
        )
        return (Chosen("on", why, "measured").reason("activation checkpointing"),)
    other, seconds, size = "on", times.recomputing_sample_seconds, times.recomputing_batch_size
    if times.chosen:
        other, seconds, size = "off", times.plain_sample_seconds, times.plain_batch_size
    loss = f"{milliseconds(seconds or 0)} an image, {size} of them at once"
    return (
        Chosen(
            asked,
            _fitting_words(times) + (" Such blocks are not compiled." if times.chosen else ""),
            "measured",
            _RECOMPUTED if times.chosen else "",
            () if times.ratio is None else (Alternative(value=other, loss=loss),),
        ).reason("activation checkpointing"),
    )


def graphs(profiles: Sequence[Profile]) -> tuple[Reason, ...]:
    """Whether GPUs replay passes from CUDA graphs; empty where that was not considered.

    Of several kinds of workers the first one that replays passes is described.
    """
    profile = next((one for one in profiles if one.job.cuda_graphs == "on"), profiles[0])
    times, asked = profile.graphs, profile.job.cuda_graphs == "on"
    if times is None:
        why = "Asked for. Steps were measured like that."
        return (Chosen("on", why, "asked").reason("CUDA graphs"),) if asked else ()
    ratio, replayed = times.ratio, times.replayed_seconds
    if times.failure:
        why = f"Passes of the network cannot be replayed here: {times.failure}."
    elif ratio is None or replayed is None:
        why = (
            "There is not enough memory to keep a step's passes recorded and take other steps "
            "beside them."
        )
    else:
        gained = "The host keeps up with the GPU here, so nothing is gained."
        if times.chosen:
            gained = "The results are the same, and the GPU waits less for the host."
        why = (
            f"A step of {times.local_batch_size} images takes {milliseconds(replayed)} where "
            f"forward and backward pass are replayed, and {milliseconds(times.plain_seconds)} as "
            f"it is: {ratio.value:.2f} times as long ({ratio.low:.2f} to {ratio.high:.2f}), in "
            f"turns. {gained}"
        )
    value = "on" if times.chosen else "off"
    return (Chosen(value, why, "measured").reason("CUDA graphs"),)


_RECOMPUTED = "Chen et al. 2016, Training deep nets with sublinear memory cost, arXiv 1604.06174"


def _fitting_words(times: RecomputationTimes) -> str:
    """How many images fit into the memory with and without recomputation, and what each takes."""
    plain = times.plain_batch_size
    why = (
        f"Of {times.wanted_batch_size} images on a worker {plain or 'not even the fewest'} fit at "
        f"once into {times.limit_bytes / 2**20:,.0f} MiB, and "
        f"{times.recomputing_batch_size or 'not even these'} where blocks of the network are "
        "computed again in the backward pass. "
    )
    if times.ratio is None or times.compared_batch_sizes is None:
        if times.chosen:
            return f"{why}There is no other way to train it here."
        return why + (
            "So there is nothing to gain from it."
            if plain
            else "More memory is needed, or a smaller network or resolution."
        )
    sizes, ratio = times.compared_batch_sizes, times.ratio
    why += (
        f"A step of {sizes[0]} takes {milliseconds(times.plain_sample_seconds or 0)} an image, "
        f"one of {sizes[1]} computed again {milliseconds(times.recomputing_sample_seconds or 0)}: "
        f"{ratio.value:.2f} times as long ({ratio.low:.2f} to {ratio.high:.2f}), in turns. "
    )
    chosen = "So blocks are computed again."
    return why + (chosen if times.chosen else "So a larger batch goes in micro-batches.")


def loading(profile: Profile, stages: Sequence[Stage]) -> tuple[Reason, ...]:
    """What loading adds to the step times; empty where it was not measured beside the steps."""
    stage = max(stages, key=lambda one: one.resolution)
    size = stage.micro_batch_size
    point = nearest_loaded(profile.steps, stage.workers, stage.resolution, size)
    if point is None or point.loading is None:
        return ()
    times, batch, step = point.loading, point.local_batch_size, point_seconds(point)
    processes = f"{times.loaders or 'no'} loader process{'es' * (times.loaders != 1)}"
    whose = "the worker" if point.workers == 1 else f"each of {point.workers} workers"
    by = "a process takes" if times.loaders else "it takes"
    # The wait for images is loading's for sure; the rest is a difference of two measurements.
    longer = step / min(times.alone_seconds, step - times.input_seconds) - 1
    why = (
        f"Measured with {processes} for {whose}, {batch} images in a step: {by} "
        f"{milliseconds(times.batch_seconds / batch, 2)} an image. With its images at hand a step "
        f"takes {milliseconds(times.alone_seconds)}, beside loading {milliseconds(step)}, of which "
        f"it waits {milliseconds(times.input_seconds)} for images. That is in all predicted times."
        f"{_remedy(profile.cluster, point, times, longer)}"
    )
    return (Chosen(processes, why, "measured").reason("loading"),)


def _remedy(cluster: Cluster, point: StepTime, times: StepLoading, longer: float) -> str:
    """What to try where loading makes a step much longer; empty elsewhere.

    ``longer``: By how much loading lengthens a step, as a share.
    """
    if longer < WORTH_A_REMEDY:
        return ""
    cheaper = (
        "smaller files, a cheaper transform, or images that are decoded once (tensors kept in "
        "memory, or data=imagefolder: of a folder that fits the cache)"
    )
    step, cores = point_seconds(point), cluster.cores
    threads = max(1, cores // point.workers) if cluster.device == "cpu" else 1
    busy = point.workers * (threads * times.alone_seconds + times.cpu_seconds) / (cores * step)
    waits = times.input_seconds >= (step - times.alone_seconds) / 2
    share = f" Loading makes a step {percent(longer, 0)} longer"
    if waits and busy < IDLE_CORES and point.workers * times.loaders < cores:
        return f"{share} while cores are idle: try loaders={max(1, 2 * times.loaders)}, {cheaper}."
    return f"{share}, and more loader processes would not help: try {cheaper}."
