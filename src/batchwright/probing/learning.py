"""How the network learns: trials, one after the other, as long as they pay and time allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from batchwright.planning.learnt import teaches
from batchwright.planning.optimizer import optimizers_to_try
from batchwright.planning.trial_choice import Arm, Question, Wanted
from batchwright.prediction.trainings import of_trials
from batchwright.probing.commands import RunTrial, TrialRun
from batchwright.probing.visiting import Visitor
from batchwright.records import Plan, Prediction, Profile, Trial


def run_trials(
    visitor: Visitor,
    profile: Profile,
    plan: Plan,
    *,
    report: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Trial, ...]:
    """Make the trials that the choice between the plan's candidates hangs on.

    Args:
        visitor: Has them made.
        profile: All that was measured besides.
        plan: Made of it, blind to how the network learns.
        report: Called with what is made next.
        clock: Seconds since any moment.

    Returns:
        In the order in which they were made; none where `probe.learning` leaves no time for one,
        where there is nothing to choose, and for methods that do not train as trials do.
    """
    budget, question = _seconds(profile, plan), _question(profile, plan)
    began, trials = clock(), list[Trial]()
    if budget == 0 or not question.arms or not teaches(profile.job):
        return ()
    while visitor.may_restart:  # or a worker that is killed would end the probe
        left = budget - (clock() - began)
        wanted = question.next_trial(of_trials(trials), budget=budget, left=left)
        if wanted is None:
            break
        report(f"learning: {wanted}")
        trial = _made(visitor, plan, wanted, question.held_out)
        if trial is not None:
            trials.append(trial)
            continue
        # It was too much for the memory, whatever the visits said.
        arms = tuple(arm for arm in question.arms if arm.batch < wanted.arm.batch)
        if not arms:
            break
        question = replace(question, arms=arms)
    return tuple(trials)


def _seconds(profile: Profile, plan: Plan) -> float:
    """Time for all trials."""
    asked = profile.job.probe.learning
    if asked >= 1:
        return asked
    chosen = plan.chosen
    if chosen is None or chosen.train_seconds is None:
        return 0.0
    return asked * chosen.train_seconds.value


def _question(profile: Profile, plan: Plan) -> Question:
    job, data = profile.job, profile.data
    quickest: dict[int, Prediction] = {}
    for one in _candidates(plan):
        batch = one.global_batch_size
        if batch not in quickest or (one.epoch_seconds.value < quickest[batch].epoch_seconds.value):
            quickest[batch] = one
    judging = profile.evaluation_seconds_per_image
    question = Question(
        arms=tuple(
            Arm(batch, one.workers, one.micro_batch_size, one.epoch_seconds.value)
            for batch, one in sorted(quickest.items())
            if job.global_batch in ("auto", batch)
        ),
        optimizers=optimizers_to_try(job, profile.updates),
        epochs=job.epochs,
        samples=data.train_samples,
        classes=len(data.classes),
        tolerance=job.goal.accuracy_tolerance,
        judging_seconds=0.0,
        rates=job.learning_rate == "auto",
    )
    return replace(question, judging_seconds=judging * question.held_out)


def _candidates(plan: Plan) -> list[Prediction]:
    """Those at the highest resolution that are within the limits and were measured so."""
    measured = [one for one in plan.considered if not one.assumed and not one.refused]
    return [one for one in measured if one.resolution == plan.top_resolution]


def _made(visitor: Visitor, plan: Plan, wanted: Wanted, held_out: int) -> Trial | None:
    """The trial; `None` if memory did not do for it."""
    arm = wanted.arm
    command = RunTrial(
        workers=arm.workers,
        resolution=plan.top_resolution,
        optimizer=wanted.optimizer,
        global_batch_size=arm.batch,
        samples=wanted.samples,
        held_out=held_out,
        micro_batch=arm.micro_batch,
        rate_scale=wanted.rate_scale,
        seconds=wanted.seconds,
    )
    answer = visitor.ask(command, TrialRun, str(wanted))
    return answer.trial if answer else None
