"""How the network learns: trials, one after the other, while they are useful and time is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf

from batchwright.errors import BatchwrightError, PlanError
from batchwright.planning.candidates.learnt import (
    NO_ACCURACY,
    bounded_rate,
    learnt_of,
    teaches,
    untaught,
)
from batchwright.planning.candidates.optimizer import optimizers_to_try
from batchwright.planning.candidates.trial_choice import MIN_BATCH, MIN_SAMPLES, Arm, Question
from batchwright.planning.planner import plan_to_measure
from batchwright.prediction.accuracy.trainings import MIN_STEPS, of_trials
from batchwright.prediction.step_time import fit_step_time
from batchwright.probing.commands import RunTrial, TrialRun
from batchwright.probing.visiting import Visitor
from batchwright.records import Job, OptimizerName, Plan, Prediction, Profile, Trial
from batchwright.records.registries.optimizers import SGD
from batchwright.records.text.formatting import counted, duration, percent

MAX_TIMES = 2
"""Multiple of the time for all trials after which they end, should they take longer than expected,
as beside other programs."""

TrialProgress = Callable[[str, float, float], None]
"""Called with a trial's name, the share of it that is done, and the seconds left for all trials."""

Slowness = Callable[[Prediction, OptimizerName], float]
"""By candidate and optimizer: real seconds of a training here over the planned seconds."""


def run_trials(
    visitor: Visitor,
    profile: Profile,
    plan: Plan,
    *,
    report: TrialProgress,
    keep: Callable[[Profile], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Make the trials that decide between the plan's candidates.

    Args:
        visitor: Has the trials made.
        profile: All other measurements, and earlier trials if there are any.
        plan: A plan by ``profile`` without trials, from the trainings of other tasks.
        report: Called with each trial's name and progress.
        keep: Called with the profile so far before each trial.
        clock: Returns seconds since any fixed moment.

    Returns:
        The profile with its trials, in the order in which they were made. There are none where
        `probe.learning` leaves no time for one, where there is nothing to choose, and for methods
        that do not train as trials do.
    """
    profile = profile.model_copy(update={"trials_open": False, "trials_note": ""})
    job = profile.job
    if not job.probe.learning:
        return profile
    if not teaches(job):
        note = f"there are no trials, as they do not train {untaught(job)}"
        asked = job.probe.learning != Job().probe.learning
        return profile.model_copy(update={"trials_note": note if asked else ""})
    try:
        slowness = _slowness(profile)
    except PlanError as error:  # too little was measured
        return profile.model_copy(update={"trials_note": f"there are no trials: {error}"})
    question = _question(profile, plan, slowness)
    trials = list(profile.trials)
    budget = _seconds(profile, plan, slowness, question, trials)
    note = "" if trials else _why_none(profile, question, budget)
    began = clock() - sum(one.seconds for one in trials)

    while not note and visitor.may_restart:  # or a worker that is killed would end the probe
        spent = clock() - began
        wanted = question.next_trial(of_trials(trials), budget=budget, left=budget - spent)
        if wanted is None:
            break
        profile = profile.model_copy(update={"trials": tuple(trials)})
        keep(profile.model_copy(update={"trials_open": True}))
        name = f"trial {len(trials) + 1}: {wanted}"
        command = RunTrial(
            workers=wanted.arm.workers,
            resolution=plan.top_resolution,
            optimizer=wanted.arm.optimizer,
            global_batch_size=wanted.arm.batch,
            samples=wanted.samples,
            held_out=question.held_out,
            micro_batch=wanted.arm.micro_batch,
            rate_scale=wanted.rate_scale,
            most_seconds=MAX_TIMES * budget - spent,
        )
        on_progress = _progress_of(report, name, budget - spent, clock)
        run = visitor.ask(command, TrialRun, str(wanted), on_progress)
        if run is not None and run.trial is not None:
            trials.append(run.trial)
            budget = _seconds(profile, plan, slowness, question, trials)
            right = f"{name}, {percent(run.trial.accuracy)} right"
            report(right, 1.0, budget - (clock() - began))
        elif run is not None and run.given_up:
            note = (
                f"the trials were given up after {duration(clock() - began)}, {MAX_TIMES} times "
                "what they should take: probe again while the machine is quiet"
            )
        elif run is not None and run.no_accuracy:
            note = NO_ACCURACY
        else:  # memory ran out, though the visits fitted
            why = "a worker was killed (out of memory?)" if run is None else "out of memory"
            report(f"{name}, {why}", 1.0, budget - (clock() - began))
            arms = tuple(arm for arm in question.arms if arm.batch < wanted.arm.batch)
            question = replace(question, arms=arms)
            if not (arms and visitor.may_restart):
                less = "fewer workers" if wanted.arm.workers > 1 else "a smaller network"
                note = f"no trial followed one of {wanted}: {why}; choose {less}"
    return profile.model_copy(update={"trials": tuple(trials), "trials_note": note})


def _progress_of(
    report: TrialProgress, name: str, left: float, clock: Callable[[], float]
) -> Callable[[float], None]:
    """Report a trial that begins now; returns a function that reports the share that is done."""
    began = clock()
    report(name, 0.0, left)

    def on_progress(share: float) -> None:
        spent = clock() - began
        own = spent * (1 - share) / share if share else 0.0
        report(name, share, max(left - spent, own))

    return on_progress


def _why_none(profile: Profile, question: Question, budget: float) -> str:
    """Why no trial is possible, and what the job should say instead; empty if trials are."""
    job = profile.job
    asked, least = job.probe.learning, question.least_budget
    if len(profile.data.classes) < 2 or profile.without_accuracy:  # more time would not help
        return NO_ACCURACY
    if not question.arms:
        return "there are no trials, as no candidate within the limits can be trained here"
    if not question.held_out:
        return (
            f"there are no trials, as {question.samples} training images are too few to hold any "
            "out for them"
        )
    if question.target is not None and question.target <= 1 / question.classes:
        return f"there are no trials, as guessing reaches goal.accuracy={question.target:g}"
    if least == inf:
        return (
            f"there are no trials, as the whole training, {question.epochs * question.samples} "
            f"images, is shorter than the least of them ({MIN_STEPS} steps and {MIN_SAMPLES} "
            "images): give more epochs or a smaller batch"
        )
    if least > budget:
        given = f"probe.learning={asked:g}s is"
        if asked < 1:  # a plan of other epochs shows this, too
            whole = f"the {counted(question.epochs, 'epoch')} that the probe was for"
            if question.target is not None:
                whole = f"the training to goal.accuracy={question.target:g}"
            given = f"{100 * asked:g} % (probe.learning={asked:g}) of {whole} is "
            given += f"{duration(budget)},"
        return (
            f"there are no trials, as {given} too little for one: "
            f"probe.learning={ceil(max(1.0, least))}s gives it time"
        )
    return ""


def _seconds(
    profile: Profile,
    plan: Plan,
    slowness: Slowness,
    question: Question,
    trials: Sequence[Trial],
) -> float:
    """Seconds for all trials, from the training's time as the trials so far predict it."""
    asked = profile.job.probe.learning
    if asked >= 1:
        return asked
    if question.target is not None:  # the plan cannot tell yet how many epochs the target takes
        return question.time_to_target(of_trials(trials), asked)
    chosen = plan.chosen
    if chosen is None or chosen.train_seconds is None:
        return 0.0
    return asked * chosen.train_seconds.value * slowness(chosen, plan.update)


def _plans(profile: Profile, plan: Plan) -> dict[OptimizerName, Plan]:
    """The plan for each optimizer that is worth a trial, as their steps take different times."""
    names = optimizers_to_try(profile.job, profile.updates)
    if len(names) == 1:
        return {names[0]: plan}
    found: dict[OptimizerName, Plan] = {}
    bare = profile.model_copy(update={"trials": ()})
    for name in names:
        with suppress(BatchwrightError):  # no candidate with this optimizer is within the limits
            found[name] = plan_to_measure(bare, name)
    return found


def _question(profile: Profile, plan: Plan, slowness: Slowness) -> Question:
    """The candidates that trials decide between, and what the decision depends on."""
    job, data = profile.job, profile.data
    # Candidates within the limits that can be trained here. One worker trains those of a virtual
    # cluster, however many workers they have.
    virtual = job.launcher.simulated
    quickest: dict[tuple[int, OptimizerName], Prediction] = {}
    for name, made in _plans(profile, plan).items():
        for one in made.considered:
            if (one.assumed and not virtual) or one.refused:
                continue
            if job.workers not in ("auto", one.workers) or one.resolution != plan.top_resolution:
                continue
            arm = one.global_batch_size, name
            if arm not in quickest or one.epoch_seconds.value < quickest[arm].epoch_seconds.value:
                quickest[arm] = one
    judging = profile.evaluation_seconds_per_image
    least = min(MIN_BATCH, max((batch for batch, _ in quickest), default=0))
    question = Question(
        arms=tuple(
            Arm(
                name,
                batch,
                1 if virtual else one.workers,
                one.micro_batch_size,
                one.epoch_seconds.value,
                slowness(one, name),
            )
            for (batch, name), one in sorted(quickest.items(), key=lambda arm: arm[0][0])
            if batch == job.global_batch or (job.global_batch == "auto" and batch >= least)
        ),
        epochs=job.epochs,
        samples=data.train_samples,
        classes=data.even_classes,
        tolerance=job.goal.accuracy_tolerance,
        judging_seconds=0.0,
        rates=job.learning_rate == "auto",
        target=job.goal.target,
        confidence=job.goal.confidence,
        usual_rate=bounded_rate(job, profile.network),
        blind=learnt_of([profile.model_copy(update={"trials": ()})], job) is None,
    )
    return replace(question, judging_seconds=judging * question.held_out)


def _slowness(profile: Profile) -> Slowness:
    """Real seconds of a candidate over the planned ones, which a virtual cluster simulates.

    One worker makes the passes of all virtual workers, one after the other.
    """
    if not profile.job.launcher.simulated:
        return lambda *_: 1.0
    times = fit_step_time(profile.steps)
    updates = {one.optimizer: one.seconds for one in profile.updates}

    def slowness(one: Prediction, name: OptimizerName) -> float:
        passes = times.seconds(1, one.resolution, one.micro_batch_size) / one.micro_batch_size
        longer = max(0.0, updates.get(name, 0.0) - updates.get(SGD.name, 0.0))
        each = passes + longer / one.global_batch_size
        return each * profile.data.train_samples / one.epoch_seconds.value

    return slowness
