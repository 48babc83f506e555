"""Finished runs of the task: progress with each optimizer, and which optimizer did better."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
    Plan,
    Profile,
    RunSummary,
)
from batchwright.records.registries.optimizers import AUTO
from batchwright.records.text.formatting import setting_words


@dataclass(frozen=True)
class Experience:
    """Finished runs of the task that are comparable with the job."""

    job: Job  # the job to plan for
    # Runs with an optimizer that the job may get, and with its method and resolutions.
    runs: tuple[RunSummary, ...]
    left_out: int = 0  # number of other runs that were given with such an optimizer

    @property
    def tells_accuracy(self) -> bool:
        """Whether any run kept its batch and was evaluated, so that its accuracy can be used."""
        return any(map(one_batch, self.runs))

    def compared(self) -> tuple[Compared, ...]:
        """Accuracies of batches that ran both with SGD and with Muon, at a plan's rates.

        Where the job leaves `scaling` and `ags.mode` open, the best combination with each optimizer
        is compared.
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
        """Runs that trained as trials do, as observations of the learning curve, with their jobs.

        They trained to their end with one batch, at the rate that a plan would give it or at one
        that trials found, and nothing was scaled by gradient noise.
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
                found.append((plan.job, seen._replace(loss=last.val_loss)))
        return found

    def tried(self) -> list[Tried]:
        """Accuracies by batch and number of epochs, of each recipe that the job allows.

        Runs that ended early are left out. They are sorted by the number of runs, rising.
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
            for (batch, _), one in sorted(
                found.items(), key=lambda pair: sum(map(len, pair[1].values()))
            )
        ]

    def progress(self, noise: GradientNoise | None, update: OptimizerName) -> ProgressModel:
        """Progress against the batch with one optimizer, by the runs most like the planned one.

        These are the runs with this optimizer, and with the planned rule, rate and gradient
        scaling; without such runs all with this optimizer; without these all runs.
        """
        same = [run for run in self.runs if run.plan.update == update]
        wanted = self.job.rate_scaling, self.job.ags.factors
        averages = averaged_epochs(self.job) is not None
        as_planned = [
            run
            for run in same
            if self._at_its_rate(run)
            and (run.plan.average_epochs is not None) == averages
            and ((recipe := recipe_of(run.plan)).scaling, recipe.ags) == wanted
        ]
        alike = as_planned or same or list(self.runs)
        notes = []
        if self.left_out:
            notes.append(
                f"left out of the runs given: {self.left_out} of another method or resolution, "
                "with other weights to start from or other layers frozen, or left before their end"
            )
        if self.runs and not same:
            notes.append(
                f"no run with optimizer={update} was given, so those with another stand in for it"
            )
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

    def _at_its_rate(self, run: RunSummary) -> bool:
        """Whether a run had the base rate of a plan with its optimizer."""
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


def _data_words(data: DataFacts) -> str:
    return f"data={data.name} (digest {data.digest[:12]})"


def _network(of: Profile | Plan) -> str:
    """The network with the arguments that it is built with, in words that differ where they do.

    ``pretrained`` is none of them: it says what the weights start from, as `_start` does.
    """
    arguments = {
        f"network_args.{key}": value
        for key, value in sorted(of.job.network_args.items())
        if key != "pretrained"
    }
    words = setting_words(list(arguments), list(arguments.values()))
    return f"network={of.network.name} {words}".rstrip()


def _size(of: Profile | Plan) -> str:
    return f"{_network(of)} ({of.network.parameters:,} weights)"


def _start(job: Job) -> tuple[object, ...]:
    """What a training starts from, and which layers stay as they were."""
    return job.weights, bool(job.network_args.get("pretrained")), job.frozen


def experience_of(profile: Profile, job: Job, runs: Sequence[RunSummary]) -> Experience:
    """The given runs that are comparable with the job.

    Left out are runs with an optimizer that the job cannot get, with another method, other
    resolutions, other weights to start from or other layers frozen, and runs that ended early
    without having reached the goal's accuracy.

    Raises:
        PlanError: A run is of other data or of another network, or has an accuracy above 1; or no
            run has such an optimizer.
    """
    resolutions = {*(sides(job) if job.method_spec.cycles else sides(job)[-1:])}
    for run in runs:
        ours, theirs = profile.data, run.plan.data
        at_these = {one.resolution for one in run.plan.stages} == resolutions
        same_size = profile.network.parameters == run.plan.network.parameters
        for same, one, other in (
            (ours.digest == theirs.digest, _data_words(ours), _data_words(theirs)),
            (_network(profile) == _network(run.plan), _network(profile), _network(run.plan)),
            # A transformer's number of weights may follow from the image side.
            (same_size or not at_these, _size(profile), _size(run.plan)),
        ):
            if not same:
                raise PlanError(
                    f"the run {run.run_folder} has {other}, the profile {one}: give runs of the "
                    "same task"
                )
        for epoch in run.epochs:
            if epoch.top1 is not None and epoch.top1 > 1:
                raise PlanError(
                    f"the run {run.run_folder} has top1={epoch.top1:.4g} after epoch "
                    f"{epoch.epoch + 1}, where an accuracy is 1 at most: leave the run out, and "
                    "have its loop count a sample that is right as 1"
                )
    wanted = optimizers_of(job)
    kept = tuple(run for run in runs if run.plan.update in wanted)
    if runs and not kept:
        raise PlanError(
            f"the run {runs[0].run_folder} has optimizer={runs[0].plan.update}, the job "
            f"optimizer={job.optimizer}: give runs of the same task"
        )
    same_steps = job.method_spec.same_steps
    target = job.goal.accuracy
    alike = tuple(
        run
        for run in kept
        if (run.plan.method_spec.same_steps if same_steps else run.plan.method == job.method)
        and {one.resolution for one in run.plan.stages} == resolutions
        and _start(run.plan.job) == _start(job)
        and (_ended(run) or (target is not None and epochs_to(run, target) is not None))
    )
    return Experience(job, alike, len(kept) - len(alike))


def _ended(run: RunSummary) -> bool:
    """Whether a run trained all its epochs, so that its rate has come down as planned."""
    return len(run.epochs) == run.plan.epochs


def _outcome(ends: Sequence[tuple[float, int]]) -> Outcome:
    """Mean accuracy of runs, given with the images that each was counted on, and its error."""
    values = [accuracy for accuracy, _ in ends]
    mean = fmean(values)
    counting = counting_error(mean, fmean(held_out for _, held_out in ends))
    error, _ = between_runs(values, counting)
    return Outcome(mean, error / sqrt(len(values)), len(values))
