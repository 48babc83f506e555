"""The learning rate of a plan, with its reasons: peak, warm-up and decay."""

from __future__ import annotations

from math import exp, inf

from batchwright.algorithms.learning_rate import (
    ONE_CYCLE_END,
    ONE_CYCLE_RISE,
    make_rule,
    raises_nothing,
    remark_on_rate,
    rule_for,
    start_of,
    warmup_of,
)
from batchwright.planning.candidates.learnt import LearningCurve
from batchwright.planning.candidates.optimizer import chosen_optimizer
from batchwright.planning.chosen import Chosen
from batchwright.records import (
    DataFacts,
    Job,
    LearningRateRule,
    NetworkFacts,
    OptimizerName,
    Reason,
    Source,
)
from batchwright.records.registries.methods import PAPER
from batchwright.records.text.formatting import percent

GOYAL = "Goyal et al. 2017, arXiv 1706.02677"
KRIZHEVSKY = "Krizhevsky 2014, arXiv 1404.5997"
JOHNSON = "Johnson et al. 2020, arXiv 2007.05105"
LOSHCHILOV = "Loshchilov and Hutter 2017, arXiv 1608.03983"
POSTER = "McCord and Dash, SC21 poster"
SMITH = "Smith and Topin 2018, arXiv 1708.07120"

_DECAY: dict[str, tuple[str, Source, str]] = {
    "cosine": ("Half a cosine from the peak to 0.", "published", LOSHCHILOV),
    "steps": ("A tenth at 1/3, 2/3 and 8/9 of the epochs.", "published", GOYAL),
    "one-cycle": (f"Half a cosine from the peak to {ONE_CYCLE_END:.0e} of it.", "published", SMITH),
    "none": ("The rate stays at its peak.", "asked", ""),
}


def rate_of(
    job: Job,
    batch: int,
    data: DataFacts,
    network: NetworkFacts,
    update: OptimizerName,
    learnt: LearningCurve | None = None,
    *,
    by_runs: bool = False,
) -> tuple[LearningRateRule, tuple[Reason, ...]]:
    """The learning rate of a plan of one row, and the reasons for rate, warm-up and decay.

    Args:
        job: Resolved.
        batch: Global batch, in samples.
        data: The data set.
        network: The network.
        update: The optimizer.
        learnt: The learning curve, with the rates that trials had; `None` without trials.
        by_runs: Whether runs decided for the job's `scaling`, rather than the job itself.
    """
    scale = learnt.rate_scale(update, batch) if learnt else 1.0
    rule = rule_for(job, batch, data, network, update, scale)
    rate = _rate(rule, batch, remark_on_rate(job, rule, update))
    if by_runs and rate.source == "asked":
        rate = rate._replace(source="measured")
    if tried := _rates_tried(job, batch, update, learnt):
        rate = rate._replace(why=f"{rate.why} {tried}", source="measured", reference="")
    return rule, _reasons(job, rule, batch, rate, Chosen(rule.decay, *_DECAY[rule.decay]))


def rate_at_top(
    job: Job, batch: int, network: NetworkFacts
) -> tuple[LearningRateRule, tuple[Reason, ...]]:
    """The learning rate at the highest resolution, and the reasons for it.

    Stages of a cycle have their own rates in the plan's table, so the rule has no decay then.

    Args:
        job: Resolved.
        batch: Samples per step; under a parameter server those of one worker.
        network: The network.
    """
    preset, asked, by_stages = job.preset, job, job.method_spec.cycles
    published = preset is not None and job.learning_rate == "auto"
    if preset is not None and published:
        asked = asked.model_copy(update={"learning_rate": preset.rates[0], "scaling": "none"})
    if by_stages:
        asked = asked.model_copy(update={"decay": "none"})
    update = chosen_optimizer(asked, batch)
    rule = make_rule(asked, batch, job.epochs, update, batch_norm=network.batch_norm)
    steps = "a worker's own steps with the large batch" if job.method_spec.served else "steps"
    rate = _rate(rule, batch)
    rate = rate._replace(
        why=f"{rate.why} This is the rate of {steps} at the highest resolution; all other batches "
        "of the plan have it, too."
    )
    if published:
        why = "As published, whatever the batch; each stage has its own."
        rate = Chosen(rule.peak, why, "published", PAPER)
    decay = Chosen(str(rule.decay), *_DECAY[rule.decay])
    if by_stages:
        why = "Each stage has its own rate, in the table; nothing else decays it."
        decay = Chosen("by stages", why, "published", PAPER)
    return rule, _reasons(asked, rule, batch, rate, decay)


def _reasons(
    job: Job, rule: LearningRateRule, batch: int, rate: Chosen[float], decay: Chosen[str]
) -> tuple[Reason, ...]:
    if rule.decay != "none" and rule.warmup_epochs >= job.epochs:
        decay = decay._replace(why="The warm-up takes all epochs, so nothing is left to decay in.")
    return (
        rate.reason("learning rate", f"{rate.value:.4g} per step"),
        _warmup(job, rule, batch).reason(
            "warm-up", f"{rule.warmup_epochs:g} epoch{'s' * (rule.warmup_epochs != 1)}"
        ),
        decay.reason("decay"),
    )


def _rate(rule: LearningRateRule, batch: int, remark: str = "") -> Chosen[float]:
    """The peak rate for a step of ``batch`` samples; ``remark`` is a sentence about its base."""
    ratio = f"{batch} / {rule.base_batch}"
    gains = "; the batch is not above that, so there is nothing to gain"
    if batch > rule.base_batch:
        gains = (
            ", times a gain that is measured in each step from the noise of the gradients: from 1 "
            f"where they agree to {ratio} = {batch / rule.base_batch:.4g} where they are all noise"
        )
    known: dict[str, tuple[str, Source, str]] = {
        "linear": (f" x ({ratio}), linear in the batch", "published", GOYAL),
        "sqrt": (f" x sqrt({ratio}), the root of the batch", "published", KRIZHEVSKY),
        "gain": (gains, "published", JOHNSON),
        "none": (", not scaled with the batch", "asked", ""),
    }
    times, source, reference = known[rule.scaling]
    why = f"{rule.base:.4g} at global batch {rule.base_batch}{times}."
    if remark:
        why, source, reference = f"{why} {remark}", "assumed", ""
    if batch < rule.base_batch and rule.scaling in ("linear", "sqrt"):
        why += " The batch is below the one that the rate is for, so the rate is scaled down."
    return Chosen(rule.peak, why, source, reference)


def _warmup(job: Job, rule: LearningRateRule, batch: int) -> Chosen[float]:
    found = warmup_of(job, rule.base, rule.peak, batch, job.epochs)
    first = start_of(rule) * rule.peak
    low = "" if rule.warmup_start is None else f", {rule.warmup_start:g} of the peak as asked"
    law = "power of" if job.warmup_law == "root" else "line in"
    reasons: dict[str, tuple[str, Source, str]] = {
        "job": (f"Asked for. It begins at {first:.4g}{low}." if low else "Asked for.", "asked", ""),
        "one-cycle": (
            f"The cycle's own rise: half a cosine from {low[2:] or 'a 25th of the peak'}, over "
            f"{percent(ONE_CYCLE_RISE, 0)} of the epochs.",
            "published",
            SMITH,
        ),
        "rate": (f"None: the rate is not scaled up over {rule.base:.4g}.", "assumed", ""),
        "law": (
            f"Linear from {first:.4g}{low}, to {rule.peak:.4g}. Trainings of ResNet-50 over 90 "
            "epochs, of which 0, 5, 10 or 20 were warm-up, did best with 5 at 60 times the base "
            f"batch and with 10 at 240 times. A {law} the batch goes through both, and the batch "
            f"here is {batch / rule.base_batch:.4g} times the base batch. Two points leave "
            f"{found.least:g} to {found.most:g} epochs open; warmup_epochs= decides otherwise.",
            "published",
            POSTER,
        ),
    }
    why, source, reference = reasons[found.by]
    if found.by == "job" and raises_nothing(rule):
        why += (
            f" The warm-up raises nothing: the rate stays at {rule.peak:.4g}, as the peak is not "
            f"above the rate of base_batch, {rule.base:.4g}."
        )
    if found.by == "rate" and rule.scaling == "gain":
        why = "None: the gain is 1 until it is measured, and small while gradients agree."
    if found.by == "rate" and rule.warmup_start is not None:
        why += " So warmup_start does nothing: warmup_epochs= would make a warm-up."
    return Chosen(rule.warmup_epochs, why, source, reference)


def _rates_tried(
    job: Job, batch: int, optimizer: OptimizerName, learnt: LearningCurve | None
) -> str:
    """What trials at several rates showed, in sentences; empty where all had the usual rate."""
    if learnt is None:
        return ""
    first = learnt.predictable_from(batch)
    few = "" if job.epochs >= first else f" to {learnt.steps} steps, the fewest that it predicts"
    model, planned = learnt.model, learnt.candidate(optimizer, batch, max(job.epochs, first))
    scales = sorted({exp(one.offset) for one in model.observed if one.optimizer == optimizer})
    if len({1.0, *scales}) == 1:
        return ""
    best, usual = (model.accuracy(one).value for one in (planned, planned._replace(offset=0.0)))
    whence = learnt.by.removeprefix("the ").capitalize()
    bounded = model.offset(optimizer) > planned.offset
    does_best = "the usual rate reaches most"
    if bounded:
        does_best = "higher rates than the usual one reached more with smaller batches"
    if planned.offset:
        more = f"{100 * (best - usual):.1f} points more than"
        more = "as much as" if more.startswith("0.0 ") else more
        does_best = f"{exp(planned.offset):.3g} times the usual rate reaches {more} that rate"
    words = (
        f"{whence} at {', '.join(f'{one:.3g}' for one in scales)} times the usual rate, continued "
        f"by the learning curve{few}: {does_best}."
    )
    if bounded:
        words += (
            " The network has no batch normalization, so no rate above the highest one at which "
            "something was learnt is taken, except for the usual one."
        )
    if (failing := model.lowest_failing(optimizer)) < inf:
        words += f" At {exp(failing):.3g} times the usual rate nothing was learnt."
    return words
