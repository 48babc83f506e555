"""What a plan says of compiling, and when it no longer pays for a training."""

from __future__ import annotations

from batchwright.errors import PlanError
from batchwright.planning.chosen import Chosen
from batchwright.records import CompilationTimes, Job, Profile, Reason, Source
from batchwright.records.text.formatting import counted, duration, milliseconds, significant


def compile_seconds(profile: Profile) -> float:
    """What a training pays once for being compiled; 0 where it is not."""
    told = profile.compilation
    return (told.compile_seconds or 0.0) if told is not None and told.chosen else 0.0


def check_compilation(profile: Profile, job: Job) -> None:
    """Refuse a training that is too short for what the probe has compiled for a longer one.

    Epochs that a plan chooses itself, to reach a target, are not known yet: its reason tells.

    Raises:
        PlanError: Compiling would take longer than what it saves, and the job left it open.
    """
    told = profile.compilation
    if told is None or told.asked or not told.chosen or job.goal.target is not None:
        return
    saved, paid = _saved(told, profile.job, job.epochs), told.compile_seconds or 0.0
    if saved <= paid:
        raise PlanError(
            f"the profile was measured compiled, for {counted(profile.job.epochs, 'epoch')}; "
            f"compiling takes {significant(paid)} s and saves {significant(saved)} s of "
            f"epochs={job.epochs}: probe again with epochs={job.epochs}, or with compile=off"
        )


def compilation(profile: Profile, job: Job) -> tuple[Reason, ...]:
    """Whether the network is compiled, by both numbers; nothing to say where it was no question.

    ``job`` says how many epochs are trained.
    """
    told = profile.compilation
    if told is None:
        return ()
    value = "on" if told.chosen else "off"
    source: Source = "asked" if told.asked else "measured"
    return (Chosen(value, _words(told, profile.job, job.epochs), source).reason("compiling"),)


def _words(told: CompilationTimes, measured: Job, epochs: int) -> str:
    if told.failure:
        return f"The network cannot be compiled here: {told.failure}."
    if told.ratio is None or told.compile_seconds is None or told.compiled_seconds is None:
        return (
            f"To train {counted(measured.epochs, 'epoch')} takes some "
            f"{duration(told.training_seconds)}, too short a time for compiling to pay: it was not "
            "tried."
        )
    ratio, saved = told.ratio, _saved(told, measured, epochs)
    what = f"saves {significant(saved)} s" if saved >= 0 else f"loses {significant(-saved)} s"
    why = (
        f"Compiling took {significant(told.compile_seconds)} s. A step of "
        f"{told.local_batch_size} images takes {milliseconds(told.compiled_seconds)} compiled and "
        f"{milliseconds(told.plain_seconds)} as it is: {ratio.value:.2f} times as long "
        f"({ratio.low:.2f} to {ratio.high:.2f}), in turns. Over "
        f"{counted(epochs, 'epoch')} that {what}."
    )
    if told.asked:
        return f"{why} The job asks for it."
    if not told.chosen:
        return f"{why} At the interval's upper end that is not more than it costs."
    return f"{why} What compiling takes is in the training time, not in an epoch's."


def _saved(told: CompilationTimes, measured: Job, epochs: int) -> float:
    """Seconds that a training of so many epochs is shorter compiled."""
    ratio = told.ratio.value if told.ratio else 1.0
    return (1 - ratio) * told.training_seconds * epochs / measured.epochs
