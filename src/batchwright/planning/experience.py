"""What finished runs of the task tell: progress with each optimizer, and which did better."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean, stdev

from batchwright.errors import PlanError
from batchwright.planning.gradient_scaling import ags_rule
from batchwright.planning.learning_rate import DEFAULT_RATE
from batchwright.planning.optimizer import Compared, OptimizerName, optimizers_of
from batchwright.prediction.quality import ProgressModel, fit_progress
from batchwright.records import GradientNoise, Job, Profile, RunSummary

SEED_ERROR = 0.01
"""Least standard deviation of a held-out accuracy from seed to seed: few seeds may show less."""


@dataclass(frozen=True)
class Experience:
    """Finished runs of the task, each with its optimizer.

    Attributes:
        job: To plan for.
        runs: With any optimizer that the job can come to.
    """

    job: Job
    runs: tuple[RunSummary, ...]

    def compared(self) -> tuple[Compared, ...]:
        """Batches that ran with SGD and with Muon, each at the rate that a plan would give it.

        Runs of other lengths are not comparable; of several, the one with most runs counts.
        """
        found: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for run in self.runs:
            reached = [epoch.top1 for epoch in run.epochs if epoch.top1 is not None]
            batches = {epoch.global_batch_size for epoch in run.epochs}
            if reached and len(batches) == 1 and self._as_planned(run):
                found[batches.pop(), run.plan.epochs][run.plan.update].append(reached[-1])
        kept: dict[int, Compared] = {}
        for (batch, _), by_name in sorted(found.items(), key=lambda one: _count(one[1].values())):
            if {"sgd", "muon"} <= by_name.keys():
                sgd, muon = by_name["sgd"], by_name["muon"]
                error = hypot(_standard_error(sgd), _standard_error(muon))
                kept[batch] = Compared(batch, fmean(sgd), fmean(muon), error, _count((sgd, muon)))
        return tuple(kept[batch] for batch in sorted(kept))

    def progress(self, noise: GradientNoise | None, update: OptimizerName) -> ProgressModel:
        """Progress against the batch with one optimizer, by the runs most like what is planned.

        Those with this optimizer, its rule, rate and gradient scaling; where there are none those
        with this optimizer, and else all.
        """
        same = [run for run in self.runs if run.plan.update == update]
        alike = [run for run in same if self._as_planned(run)] or same or list(self.runs)
        notes = []
        if self.runs and not same:
            notes.append(f"no run with optimizer={update} was given: those with another stand in")
        elif len(alike) < len(same):
            notes.append(
                f"of the runs with optimizer={update}, {len(same) - len(alike)} with another rate, "
                "scaling or gradient scaling are left out"
            )
        return fit_progress(
            noise,
            base_batch=self.job.base_batch,
            target=self.job.goal.accuracy,
            runs=alike,
            scaling=self.job.scaling,
            notes=notes,
        )

    def _as_planned(self, run: RunSummary) -> bool:
        """Whether a run had rule, rate and gradient scaling as a plan with its optimizer has."""
        plan, job, ags = run.plan, self.job, ags_rule(self.job)
        base = DEFAULT_RATE[plan.update] if job.learning_rate == "auto" else job.learning_rate
        rule = plan.learning_rate
        return (rule.base, rule.base_batch, rule.scaling) == (
            base,
            job.base_batch,
            job.scaling,
        ) and (plan.ags and plan.ags.mode) == (ags and ags.mode)


def experience_of(profile: Profile, job: Job, runs: Sequence[RunSummary]) -> Experience:
    """Runs of the profile's task, those with an optimizer that the job cannot come to left out.

    Raises:
        PlanError: A run is of other data or of another network, or none has such an optimizer.
    """
    for run in runs:
        for name, one, other in (
            ("data", profile.data.digest, run.plan.data.digest),
            ("network", profile.network.name, run.plan.network.name),
        ):
            if one != other:
                raise PlanError(
                    f"the run {run.run_folder} has {name}={other}, the profile {name}={one}: give "
                    "runs of the same task"
                )
    wanted = optimizers_of(job)
    kept = tuple(run for run in runs if run.plan.update in wanted)
    if runs and not kept:
        raise PlanError(
            f"the run {runs[0].run_folder} has optimizer={runs[0].plan.update}, the job "
            f"optimizer={job.optimizer}: give runs of the same task"
        )
    return Experience(job, kept)


def _count(groups: Iterable[Sequence[float]]) -> int:
    return sum(map(len, groups))


def _standard_error(values: Sequence[float]) -> float:
    """Of the mean of what single seeds reached."""
    spread = stdev(values) if len(values) > 1 else 0.0
    return max(SEED_ERROR, spread) / sqrt(len(values))
