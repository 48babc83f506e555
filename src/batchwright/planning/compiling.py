"""Whether compiling the network pays for a training, and what the plan says about it."""

from __future__ import annotations

from batchwright.errors import PlanError
from batchwright.planning.chosen import Chosen
from batchwright.records import CompilationTimes, Job, Profile, Reason, Source
from batchwright.records.text.formatting import counted, duration, milliseconds, significant


def compile_seconds(profile: Profile) -> float:
    """Seconds that compiling takes once at the start of a training; 0 if it is not compiled."""
    times = profile.compilation
    return (times.compile_seconds or 0.0) if times is not None and times.chosen else 0.0


def check_compilation(profile: Profile, job: Job) -> None:
    """Refuse a training that is too short for compiling, where the probe compiled a longer one.

    A job with a target accuracy passes: the plan chooses its epochs later.

    Raises:
        PlanError: Compiling would take longer than what it saves, and the job left it open.
    """
    times = profile.compilation
    if times is None or times.asked or not times.chosen or job.goal.target is not None:
        return
    saved, paid = _saved(times, profile.job, job.epochs), times.compile_seconds or 0.0
    if saved <= paid:
        raise PlanError(
            f"the profile was measured compiled, for {counted(profile.job.epochs, 'epoch')}; "
            f"compiling takes {significant(paid)} s and saves {significant(saved)} s of "
            f"epochs={job.epochs}: probe again with epochs={job.epochs}, or with compile=off"
        )


def compilation(profile: Profile, job: Job) -> tuple[Reason, ...]:
    """Whether the network is compiled, and what that costs and saves.

    Args:
        profile: What was measured.
        job: The job to plan for; its ``epochs`` are those that the saved seconds are for.

    Returns:
        One reason; empty where the probe did not consider compiling.
    """
    times = profile.compilation
    if times is None:
        return ()
    value = "on" if times.chosen else "off"
    source: Source = "asked" if times.asked else "measured"
    return (Chosen(value, _words(times, profile.job, job.epochs), source).reason("compiling"),)


def _words(times: CompilationTimes, measured: Job, epochs: int) -> str:
    if times.failure:
        return f"The network cannot be compiled here: {times.failure}."
    if times.ratio is None or times.compile_seconds is None or times.compiled_seconds is None:
        return (
            f"Training for {counted(measured.epochs, 'epoch')} takes some "
            f"{duration(times.training_seconds)}, too little for compiling to pay, so it was not "
            "tried."
        )
    ratio, saved = times.ratio, _saved(times, measured, epochs)
    what = f"saves {significant(saved)} s" if saved >= 0 else f"loses {significant(-saved)} s"
    why = (
        f"Compiling took {significant(times.compile_seconds)} s. A step of "
        f"{times.local_batch_size} images takes {milliseconds(times.compiled_seconds)} compiled "
        f"and {milliseconds(times.plain_seconds)} as it is: {ratio.value:.2f} times as long "
        f"({ratio.low:.2f} to {ratio.high:.2f}), in turns. Over "
        f"{counted(epochs, 'epoch')} that {what}."
    )
    if times.asked:
        return f"{why} The job asks for it."
    if not times.chosen:
        return f"{why} At the interval's upper end compiling saves no more than it costs."
    return f"{why} The training time includes compiling, the time of an epoch does not."


def _saved(times: CompilationTimes, measured: Job, epochs: int) -> float:
    """Seconds that compiling saves in ``epochs`` epochs; ``measured`` is the probe's own job."""
    ratio = times.ratio.value if times.ratio else 1.0
    return (1 - ratio) * times.training_seconds * epochs / measured.epochs
