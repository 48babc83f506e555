"""Chooses `scaling` and `ags.mode` where they are `auto`, by the accuracies of finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, log2
from typing import Any

from batchwright.planning.candidates.optimizer import Compared, chosen_optimizer
from batchwright.planning.chosen import Chosen
from batchwright.prediction.fit import Z_975
from batchwright.records import Alternative, Job, OptimizerName, Plan, Reason
from batchwright.records.job_fields import Scaling
from batchwright.records.job_sections import AgsMode
from batchwright.records.text.formatting import percent


@dataclass(frozen=True)
class Recipe:
    """An optimizer with its rules for rate and gradients."""

    update: OptimizerName  # the optimizer
    scaling: Scaling  # how the rate follows the batch
    ags: AgsMode  # how gradients are scaled

    def __str__(self) -> str:
        factors = "" if self.ags == "off" else f" ags.mode={self.ags}"
        return f"scaling={self.scaling}{factors}"

    def allowed(self, job: Job) -> bool:
        """Whether the job's `scaling` and `ags.mode` allow this recipe, whatever its optimizer.

        Where the batch grows with the gradient noise, nothing else may follow it.
        """
        if job.batch_growth != "off" and (self.scaling == "gain" or self.ags != "off"):
            return False
        return job.scaling in ("auto", self.scaling) and job.ags.mode in ("auto", self.ags)


@dataclass(frozen=True)
class Outcome:
    """Held-out accuracy that runs with a recipe reached."""

    mean: float  # mean over the runs, a share
    error: float  # standard error of the mean, a share
    runs: int  # number of runs


@dataclass(frozen=True)
class Tried:
    """Outcomes of the runs with one batch and one number of epochs."""

    batch: int  # global batch, in samples
    outcomes: Mapping[Recipe, Outcome]  # outcome of each recipe

    def best(self, update: OptimizerName) -> Outcome | None:
        """Outcome of the best recipe with an optimizer; `None` if none was tried."""
        means = [one for recipe, one in self.outcomes.items() if recipe.update == update]
        return max(means, key=lambda one: one.mean, default=None)


def recipe_of(plan: Plan) -> Recipe:
    """The recipe of a plan."""
    ags: AgsMode = "off" if plan.ags is None else plan.ags.mode
    return Recipe(plan.update, plan.learning_rate.scaling, ags)


def settle(
    job: Job, tried: Sequence[Tried], compared: Sequence[Compared]
) -> tuple[Job, tuple[Reason, ...]]:
    """The job with the best `scaling` and `ags.mode`, where it leaves them open.

    Runs are compared at the batch that the job asks for, or at the nearest one within a factor of
    two; if the job leaves the batch open, at the largest one that was tried. Only runs with the
    optimizer of that batch count. The usual recipe is kept unless another one is better by more
    than chance.

    Args:
        job: Resolved.
        tried: Outcomes of runs; of several with one batch the last one counts.
        compared: Accuracies with both optimizers, by which a batch gets its optimizer.

    Returns:
        The job, and the reason; no reason if no runs decide.
    """
    if "auto" not in (job.scaling, job.ags.mode):
        return job, ()
    judged = _judged(job, tried, compared)
    if judged is None:
        return job, ()
    usual, outcomes = _usual(job, judged.batch, compared), judged.outcomes
    best = max(outcomes, key=lambda recipe: outcomes[recipe].mean)
    chosen, remark = best, ""
    if usual in outcomes and best != usual:
        apart = outcomes[best].mean - outcomes[usual].mean
        if apart <= Z_975 * hypot(outcomes[best].error, outcomes[usual].error):
            chosen, remark = usual, f" {best} was ahead by no more than chance may make."
    count = sum(one.runs for one in outcomes.values())
    why = (
        f"Of the {count} runs given with batch {judged.batch} and optimizer={chosen.update}, "
        f"those with {chosen} reached {percent(outcomes[chosen].mean)} held out.{remark}"
    )
    others = tuple(
        Alternative(value=str(recipe), loss=f"reached {percent(outcomes[recipe].mean)}")
        for recipe in sorted(outcomes, key=lambda one: -outcomes[one].mean)
        if recipe != chosen
    )
    value = f"scaling={chosen.scaling} ags.mode={chosen.ags}"
    reason = Chosen(value, why, "measured", "", others).reason("rule for the batch")
    known: dict[str, Any] = {
        "scaling": chosen.scaling,
        "ags": job.ags.model_copy(update={"mode": chosen.ags}),
    }
    return job.model_copy(update=known), (reason,)


def _usual(job: Job, batch: int, compared: Sequence[Compared]) -> Recipe:
    """The recipe of a plan for this batch if `scaling` and `ags.mode` stay `auto`."""
    update = chosen_optimizer(job, batch, compared)
    return Recipe(update, job.rate_scaling, job.ags.factors)


def _judged(job: Job, tried: Sequence[Tried], compared: Sequence[Compared]) -> Tried | None:
    """The outcomes that decide, with recipes of the batch's optimizer alone; `None` without any."""
    by_batch: dict[int, Tried] = {}
    for one in tried:
        usual = _usual(job, one.batch, compared)
        same = {r: outcome for r, outcome in one.outcomes.items() if r.update == usual.update}
        if same.keys() - {usual}:
            by_batch[one.batch] = Tried(one.batch, same)
    if job.global_batch == "auto":
        return by_batch[max(by_batch)] if by_batch else None
    asked = job.global_batch
    away, nearest = min(((abs(log2(batch / asked)), batch) for batch in by_batch), default=(2.0, 0))
    return by_batch[nearest] if away <= 1 else None
