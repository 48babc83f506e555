"""What finished runs of the task tell: progress with each optimizer, and which did better."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot, isclose, sqrt
from statistics import fmean

from batchwright.algorithms.learning_rate import rule_for
from batchwright.errors import PlanError
from batchwright.planning.averaging import averaged_epochs
from batchwright.planning.candidates.optimizer import Compared, optimizers_of
from batchwright.planning.methods.update_rule import Outcome, Recipe, Tried, recipe_of
from batchwright.planning.resolution import sides
from batchwright.prediction.accuracy.outcomes import counting_error, epochs_to, one_batch
from batchwright.prediction.accuracy.quality import ProgressModel, between_runs, fit_progress
from batchwright.prediction.accuracy.trainings import Observed, offset_of
from batchwright.records import (
    DataFacts,
    GradientNoise,
    Job,
    OptimizerName,
    Profile,
    RunSummary,
)
from batchwright.records.registries.optimizers import AUTO


@dataclass(frozen=True)
class Experience:
    """Finished runs of the task, each with its optimizer.

    Attributes:
        job: To plan for.
        runs: With any optimizer that the job can come to, trained in the way that it trains.
        left_out: How many others were given, with such an optimizer.
    """

    job: Job
    runs: tuple[RunSummary, ...]
    left_out: int = 0

    @property
    def tells_accuracy(self) -> bool:
        """Whether any run tells accuracy after its epochs."""
        return any(map(one_batch, self.runs))

    def compared(self) -> tuple[Compared, ...]:
        """Batches that ran with SGD and with Muon, each at the rate that a plan would give it.

        Where the job leaves open how the rate is scaled and gradients with it, the way that did
        best with each.
        """
        kept: dict[int, Compared] = {}
        for tried in self.tried():
            sgd, muon = (tried.best(name) for name in AUTO)
            if sgd is not None and muon is not None:
                error = hypot(sgd.error, muon.error)
                kept[tried.batch] = Compared(
                    tried.batch, sgd.mean, muon.mean, error, sgd.runs + muon.runs
                )
        return tuple(kept[batch] for batch in sorted(kept))

    def observed(self) -> list[tuple[Job, Observed]]:
        """Runs that trained as trials do, with the job of each.

        To their end, with one batch at the rate that a plan would give it, or at one that trials
        found, nothing scaled by gradient noise.
        """
        found = []
        for run in self.runs:
            plan, last = run.plan, run.epochs[-1] if run.epochs else None
            batches = {epoch.global_batch_size for epoch in run.epochs}
            if last is None or last.top1 is None or not last.val_count or len(batches) > 1:
                continue
            scaled = plan.ags is not None or plan.learning_rate.scaling == "gain"
            if _ended(run) and self._at_its_rate(run) and not scaled:
                samples = sum(epoch.samples for epoch in run.epochs)
                batch = batches.pop()
                offset = offset_of(plan.learning_rate.tried)
                seen = Observed(plan.update, batch, samples, last.top1, last.val_count, offset)
                found.append((plan.job, seen))
        return found

    def tried(self) -> list[Tried]:
        """What runs of one batch and length reached, each in a way that the job may come to.

        Runs left before their end are not comparable. Of several lengths that with most runs comes
        last.
        """
        found: dict[tuple[int, int], dict[Recipe, list[tuple[float, int]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for run in self.runs:
            reached = [
                (e.top1, e.val_count) for e in run.epochs if e.top1 is not None and e.val_count
            ]
            batches = {epoch.global_batch_size for epoch in run.epochs}
            if reached and len(batches) == 1 and _ended(run) and self._at_its_rate(run):
                recipe = recipe_of(run.plan)
                if recipe.allowed(self.job):
                    found[batches.pop(), run.plan.epochs][recipe].append(reached[-1])
        return [
            Tried(batch, {recipe: _outcome(ends) for recipe, ends in one.items()})
            for (batch, _), one in sorted(found.items(), key=lambda pair: _count(pair[1].values()))
        ]

    def progress(self, noise: GradientNoise | None, update: OptimizerName) -> ProgressModel:
        """Progress against the batch with one optimizer, by the runs most like what is planned.

        Those with this optimizer, its rule, rate and gradient scaling; where there are none those
        with this optimizer, and else all.
        """
        same = [run for run in self.runs if run.plan.update == update]
        alike = [run for run in same if self._as_planned(run)] or same or list(self.runs)
        notes = []
        if self.left_out:
            notes.append(
                f"of the runs given, {self.left_out} of another method or resolution, or left "
                "before their end, count for nothing"
            )
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
            scaling=self.job.rate_scaling,
            notes=notes,
        )

    def _as_planned(self, run: RunSummary) -> bool:
        """Whether a run had rule, rate and gradient scaling as a plan with its optimizer has."""
        recipe, job = recipe_of(run.plan), self.job
        wanted = (job.rate_scaling, job.ags.factors)
        averages = (run.plan.average_epochs is None) == (averaged_epochs(job) is None)
        return self._at_its_rate(run) and averages and (recipe.scaling, recipe.ags) == wanted

    def _at_its_rate(self, run: RunSummary) -> bool:
        """Whether a run had the base rate that a plan with its optimizer has."""
        plan, rule = run.plan, run.plan.learning_rate
        asked = plan.job.model_copy(
            update={
                "learning_rate": self.job.learning_rate,
                "base_batch": self.job.base_batch,
                "scaling": rule.scaling,
                "epochs": plan.epochs,
            }
        )
        batch = plan.stages[0].global_batch_size
        meant = rule_for(asked, batch, plan.data, plan.network, plan.update, rule.tried)
        return rule.base_batch == meant.base_batch and isclose(rule.base, meant.base)


def _told(data: DataFacts) -> str:
    return f"data={data.name} (digest {data.digest[:12]})"


def experience_of(profile: Profile, job: Job, runs: Sequence[RunSummary]) -> Experience:
    """Runs of the profile's task, those left out that tell nothing of how the job trains.

    They had an optimizer that the job cannot come to, another method or resolution, or were left
    before their end without having reached the goal's accuracy.

    Raises:
        PlanError: A run is of other data or of another network, or none has such an optimizer.
    """
    for run in runs:
        ours, theirs = profile.data, run.plan.data
        for same, one, other in (
            (ours.digest == theirs.digest, _told(ours), _told(theirs)),
            (
                profile.network.name == run.plan.network.name,
                f"network={profile.network.name}",
                f"network={run.plan.network.name}",
            ),
        ):
            if not same:
                raise PlanError(
                    f"the run {run.run_folder} has {other}, the profile {one}: give runs of the "
                    "same task"
                )
    wanted = optimizers_of(job)
    kept = tuple(run for run in runs if run.plan.update in wanted)
    if runs and not kept:
        raise PlanError(
            f"the run {runs[0].run_folder} has optimizer={runs[0].plan.update}, the job "
            f"optimizer={job.optimizer}: give runs of the same task"
        )
    resolutions = {*(sides(job) if job.method_spec.cycles else sides(job)[-1:])}
    same_steps = job.method_spec.same_steps
    target = job.goal.accuracy
    alike = tuple(
        run
        for run in kept
        if (run.plan.method_spec.same_steps if same_steps else run.plan.method == job.method)
        and {one.resolution for one in run.plan.stages} == resolutions
        and (_ended(run) or (target is not None and epochs_to(run, target) is not None))
    )
    return Experience(job, alike, len(kept) - len(alike))


def _ended(run: RunSummary) -> bool:
    """Whether a run trained all its epochs: the rate has fallen by then as planned."""
    return len(run.epochs) == run.plan.epochs


def _count(groups: Iterable[Sequence[object]]) -> int:
    return sum(map(len, groups))


def _outcome(ends: Sequence[tuple[float, int]]) -> Outcome:
    """Mean of what single seeds reached, each on so many images, and the error of that."""
    values = [accuracy for accuracy, _ in ends]
    mean = fmean(values)
    counting = counting_error(mean, fmean(held_out for _, held_out in ends))
    error, _ = between_runs(values, counting)
    return Outcome(mean, error / sqrt(len(values)), len(values))
