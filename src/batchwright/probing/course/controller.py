"""The course of a probe: the order of its measurements, within the budget.

    a quiet moment, if one comes soon --> memory and a first step -->
    three batches of each curve --> exchange, noise, evaluation -->
    visits wherever the fitted model is least certain, until it is certain enough or time is up -->
    further visits to points that contradict each other --> trials

Where training ends at a target, trials show how long it is going to take, and so for how long it
pays to measure: they come after a first round of visits with the least budget, and the remaining
visits after them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from batchwright.errors import BatchwrightError, one_line
from batchwright.planning.candidates.learnt import teaches
from batchwright.planning.planner import plan_to_measure
from batchwright.probing.commands import ignored
from batchwright.probing.course.curves import Curves
from batchwright.probing.course.figures import measure_figures
from batchwright.probing.course.refinement import Refinement
from batchwright.probing.learning import TrialProgress, run_trials
from batchwright.probing.visiting import Visitor
from batchwright.records import Profile, Trial
from batchwright.workload.load import MIN_SECONDS

Progress = Callable[[int, int, str], None]

# Shares of the budget.
PRECISION = 0.1
RECOMPUTATION = 0.1  # where memory is short
COMPILATION = 0.1  # where it is asked for, besides compiling
GRAPHS = 0.05  # on a GPU

_WAITING = 0.1  # most of the budget to wait while other programs use the machine
_PAUSE = MIN_SECONDS  # between two looks at the machine's load


class Controller:
    """Runs one probe.

    Args:
        visitor: Has points visited; not prepared yet.
        counts: Numbers of workers to measure, rising.
        report: Called with what is measured next.
        report_trial: Called with a trial's name and progress, see `TrialProgress`.
        keep: Called with the profile so far before each trial.
        clock: Returns seconds since any fixed moment.
        sleep: Waits for seconds of that clock.
        started: When the probe began, by that clock.
    """

    def __init__(
        self,
        visitor: Visitor,
        counts: Sequence[int],
        *,
        report: Callable[[str], None],
        report_trial: TrialProgress = ignored,
        keep: Callable[[Profile], None] = ignored,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        started: float,
    ) -> None:
        self._visitor, self._job = visitor, visitor.job
        self._report = report
        self._report_trial, self._keep = report_trial, keep
        self._clock, self._sleep = clock, sleep
        self._started = started
        self._curves = Curves(visitor, counts, clock)
        self._figures: dict[str, Any] = {}
        self._trials: tuple[Trial, ...] = ()

    def measure(self) -> Profile:
        """Measure everything that a profile holds.

        Raises:
            JobError: The job cannot be measured as asked.
            WorkerError: The workers were killed too often.
        """
        visitor = self._visitor
        visitor.prepare(seconds=PRECISION * self._job.probe.first_budget)
        visitor.choose_recomputation(
            self._curves.counts[0], seconds=RECOMPUTATION * self._job.probe.first_budget
        )
        visitor.choose_graphs(seconds=GRAPHS * self._job.probe.first_budget)
        visitor.choose_compilation(seconds=COMPILATION * self._job.probe.first_budget)
        self._wait_for_others()
        curves = self._curves
        may_lengthen = self._job.probe.budget == "auto" and not self._trials_first
        curves.begin(may_lengthen=may_lengthen)
        self._figures = measure_figures(curves, self._report)
        self._refine()
        left = curves.left()
        profile = self.learn(self._profile().model_copy(update={"load": visitor.load()}))
        if not self._trials_first:
            return profile
        self._trials, curves.trials_seconds = profile.trials, left - curves.left()
        if curves.lengthen(self._likely_epochs(profile)):
            self._refine()
        update = {"load": visitor.load(), "trials_note": profile.trials_note}
        return self._profile().model_copy(update=update)

    @property
    def _trials_first(self) -> bool:
        """Whether trials come early, as their estimate of the training's time sets the budget."""
        probe = self._job.probe
        to_target = self._job.goal.target is not None and teaches(self._job)
        return probe.budget == "auto" and probe.learning > 0 and to_target

    def _likely_epochs(self, profile: Profile) -> int:
        """Epochs that the training is likely to take, by its trials; without trials, all epochs."""
        if profile.trials:
            with suppress(BatchwrightError):
                return plan_to_measure(profile).likely_epochs()
        return self._job.epochs

    def _refine(self) -> None:
        # A new object each time: a choice made without trials no longer counts after them.
        refinement = Refinement(self._curves, self._profile, self._clock)
        refinement.refine()
        refinement.reconcile()

    def _profile(self) -> Profile:
        visitor, prepared = self._visitor, self._visitor.prepared
        return Profile(
            job=visitor.job,
            data=prepared.data,
            network=prepared.network,
            cluster=visitor.cluster(),
            precisions=visitor.precisions,
            precision_ratio=visitor.precision_ratio,
            recomputation=visitor.recomputation,
            compilation=visitor.compilation,
            graphs=visitor.graphs,
            steps=visitor.step_times(),
            kinds=visitor.kinds(),
            memory=visitor.memory_points(),
            memory_parts=prepared.parts,
            out_of_memory=visitor.lost_points(),
            **self._figures,
            trials=self._trials,
            probe_seconds=self._clock() - self._started,
        )

    def _wait_for_others(self) -> None:
        """Wait briefly while other programs use the machine: they may be about to end."""
        waited = 0.0
        while (
            self._visitor.is_disturbed(waiting=True)
            and waited + _PAUSE <= _WAITING * self._curves.budget
        ):
            self._report("nothing: waiting for other programs")
            self._sleep(_PAUSE)
            waited += _PAUSE

    def learn(self, profile: Profile) -> Profile:
        """The profile with trials, whose time the budget leaves out; its own trials are kept."""
        earlier = profile.probe_seconds - (self._clock() - self._started)

        def timed(known: Profile) -> Profile:
            seconds = earlier + (self._clock() - self._started)
            return known.model_copy(update={"probe_seconds": seconds})

        try:
            plan = plan_to_measure(profile.model_copy(update={"trials": ()}))
        except BatchwrightError as error:  # no plan, nothing to choose
            note = f"there are no trials, as there is no plan: {one_line(error)}"
            wanted = profile.job.probe.learning and teaches(profile.job)
            return profile.model_copy(
                update={"trials_open": False, "trials_note": note if wanted else ""}
            )
        learned = run_trials(
            self._visitor,
            profile,
            plan,
            report=self._report_trial,
            keep=lambda known: self._keep(timed(known)),
            clock=self._clock,
        )
        return timed(learned)
