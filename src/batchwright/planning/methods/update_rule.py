"""How the rate follows the batch, and whether gradients are scaled: what runs say of `auto`."""

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
    """A way to use a batch.

    Attributes:
        update: The optimizer.
        scaling: How the rate follows the batch.
        ags: Factors on gradients.
    """

    update: OptimizerName
    scaling: Scaling
    ags: AgsMode

    def __str__(self) -> str:
        factors = "" if self.ags == "off" else f" ags.mode={self.ags}"
        return f"scaling={self.scaling}{factors}"

    def allowed(self, job: Job) -> bool:
        """Whether the job asks for nothing else; of optimizers runs are sorted out before."""
        return job.scaling in ("auto", self.scaling) and job.ags.mode in ("auto", self.ags)


@dataclass(frozen=True)
class Outcome:
    """Held-out accuracy that runs reached.

    Attributes:
        mean: Over the runs, a share.
        error: Standard error of that.
        runs: How many.
    """

    mean: float
    error: float
    runs: int


@dataclass(frozen=True)
class Tried:
    """What was tried with a batch, in as many epochs.

    Attributes:
        batch: Global batch, in samples.
        outcomes: By recipe.
    """

    batch: int
    outcomes: Mapping[Recipe, Outcome]

    def best(self, update: OptimizerName) -> Outcome | None:
        """What the best recipe with an optimizer reached; `None` if none was tried."""
        means = [one for recipe, one in self.outcomes.items() if recipe.update == update]
        return max(means, key=lambda one: one.mean, default=None)


def recipe_of(plan: Plan) -> Recipe:
    """What a run was trained by."""
    ags: AgsMode = "off" if plan.ags is None else plan.ags.mode
    return Recipe(plan.update, plan.learning_rate.scaling, ags)


def settle(
    job: Job, tried: Sequence[Tried], compared: Sequence[Compared]
) -> tuple[Job, tuple[Reason, ...]]:
    """The job with `scaling` and `ags.mode` as did best, where it leaves them open.

    The batch that it asks for counts, or one within a factor of two; else the largest that was
    tried. Only runs with the optimizer that the batch is given are looked at, and the usual way
    stays unless another is better by more than chance.

    Returns:
        The job, and why; no reason where no runs tell.
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
    """What a plan would have without these runs but for the optimizer."""
    update = chosen_optimizer(job, batch, compared)
    return Recipe(update, job.rate_scaling, job.ags.factors)


def _judged(job: Job, tried: Sequence[Tried], compared: Sequence[Compared]) -> Tried | None:
    """The batch that decides, with its optimizer's recipes; of several lengths the last one's."""
    telling: dict[int, Tried] = {}
    for one in tried:
        usual = _usual(job, one.batch, compared)
        same = {r: outcome for r, outcome in one.outcomes.items() if r.update == usual.update}
        if same.keys() - {usual}:
            telling[one.batch] = Tried(one.batch, same)
    if job.global_batch == "auto":
        return telling[max(telling)] if telling else None
    asked = job.global_batch
    away, nearest = min(((abs(log2(batch / asked)), batch) for batch in telling), default=(2.0, 0))
    return telling[nearest] if away <= 1 else None
