"""The learning rate as a pure function of the samples seen.

Nothing here counts steps or keeps state, so a resume, another batch or another number of workers
does not change the schedule. The rate of a step is ``stage.learning_rate * rate_factor(...)``; with
``scaling=gain`` the updater multiplies it by the gain that it measures.
"""

from __future__ import annotations

from math import cos, exp, isclose, isfinite, log, pi, sqrt
from statistics import fmean
from typing import Literal, NamedTuple

from batchwright.errors import JobError
from batchwright.records import DataFacts, Job, LearningRateRule, NetworkFacts, OptimizerName
from batchwright.records.registries.optimizers import OPTIMIZERS

MAX_RAISED = 1.0
"""Largest peak to which a rate is raised for a training of few steps, see `make_rule`."""
DECAY_SHARES = (1 / 3, 2 / 3, 8 / 9)  # of the epochs; Goyal et al. decay at 30, 60, 80 of 90
DECAY_FACTOR = 0.1

POSTER_EPOCHS = 90
POSTER_OPTIMA = ((60.0, 5.0), (240.0, 10.0))
"""Best warm-up of the poster (McCord and Dash, SC21), ResNet-50 on ImageNet: global over base batch
(7,680 and 30,720 over 128, the local batch that its base rate is for), and epochs."""
POSTER_RANGES = ((2.5, 7.5), (7.5, 15.0))
"""Epochs around each optimum, half-way to its neighbours among the 0, 5, 10 and 20 tried."""
MAX_WARMUP = 0.5
"""Longest warm-up that the plan chooses by itself, as a share of the epochs."""

ONE_CYCLE_RISE = 0.3  # of the epochs; with the next two as torch.optim.lr_scheduler.OneCycleLR
ONE_CYCLE_START = 1 / 25  # of the peak
ONE_CYCLE_END = ONE_CYCLE_START / 10_000  # of the peak


def scaled_rate(
    base: float,
    base_batch: int,
    global_batch: int,
    scaling: Literal["linear", "sqrt", "gain", "none"],
) -> float:
    r"""Rate for ``global_batch``, from the rate known to work at ``base_batch``.

    .. math:: \eta = \eta_0 \cdot B / B_0, \quad \eta_0 \sqrt{B / B_0}, \quad \eta_0

    Args:
        base: Rate :math:`\eta_0` at the base batch, per step.
        base_batch: Global batch :math:`B_0` at which it holds, in samples.
        global_batch: Global batch :math:`B` wanted, in samples.
        scaling: ``linear``, ``sqrt`` or ``none``; ``gain`` is as ``none`` here, as it is known
            only while training.

    Returns:
        Rate per step.

    Example:
        >>> scaled_rate(0.1, 128, 512, "linear"), scaled_rate(0.1, 128, 512, "sqrt")
        (0.4, 0.2)

    References:
        linear: Goyal et al. 2017, arXiv 1706.02677.  sqrt: Krizhevsky 2014, arXiv 1404.5997.
    """
    ratio = global_batch / base_batch
    return base * {"linear": ratio, "sqrt": sqrt(ratio), "gain": 1.0, "none": 1.0}[scaling]


def room_to_linear(rule: LearningRateRule, base_batch: int, batch: int, gain: float = 1.0) -> float:
    """Largest factor, at least 1, that keeps the rate of a step within linear scaling.

    Twice as many samples call for at most twice the rate. The part by which the rate has been
    raised already is divided out.

    Args:
        rule: The learning rate, which the factor multiplies.
        base_batch: The batch that factors make up for, in samples.
        batch: Samples of the step.
        gain: Measured gain by which ``scaling=gain`` multiplies the rate.

    Example:
        >>> rate = dict(base=0.1, base_batch=64, warmup_epochs=0, decay="cosine")
        >>> room_to_linear(LearningRateRule(scaling="none", peak=0.1, **rate), 64, 256)
        4.0
        >>> room_to_linear(LearningRateRule(scaling="sqrt", peak=0.2, **rate), 64, 256)
        2.0
    """
    raised = scaled_rate(1.0, rule.base_batch, batch, rule.scaling)
    # Under a parameter server small batches have the rate of the large one, too.
    return max(1.0, batch / base_batch / max(gain, raised, rule.peak / rule.base))


class Warmup(NamedTuple):
    """The warm-up of a learning rate."""

    epochs: float  # length, in epochs
    least: float  # shortest length that the poster's two optima allow, in epochs
    most: float  # longest length that they allow, in epochs
    # What decided it: ``job``: it was given; ``one-cycle``: the one-cycle rule; ``rate``: the rate
    # is not scaled up, so there is no warm-up; ``law``: the poster's law.
    by: Literal["job", "one-cycle", "rate", "law"] = "law"


def fitted_warmup(ratio: float, epochs: int, law: Literal["root", "linear"] = "root") -> Warmup:
    r"""Warm-up as a function of the global batch, fitted to two published optima.

    .. math::

        W = E \cdot \tfrac{5}{90} \sqrt{(B / B_0) / 60}, \quad
        W = \tfrac{E}{90} \left(5 + 5 \, \frac{B / B_0 - 60}{180}\right)

    A power law has as many unknowns as there are points: 5 epochs at 60 times the base batch and
    10 at 240 times give the exponent 1/2. The poster tried 0, 5, 10 and 20 epochs, so each optimum
    is known to half-way to its neighbours only, and the exponent lies between 0 and 1.3. ``least``
    and ``most`` are the ends over all such laws. The power law is ours; ``linear`` is a line
    through the same two points, as the authors report linear growth.

    Args:
        ratio: Global batch over base batch, :math:`B / B_0`.
        epochs: Length of the training :math:`E`, in epochs.
        law: ``root`` for the power law, ``linear`` for the line.

    Returns:
        At most half of the epochs; 0 where the batch is not above the base batch.

    Example:
        >>> fitted_warmup(60, 90).epochs, fitted_warmup(240, 90).epochs, fitted_warmup(8, 30).epochs
        (5.0, 10.0, 0.609)
        >>> fitted_warmup(120, 90, "linear").epochs, fitted_warmup(8, 30, "linear").epochs
        (6.67, 1.19)

    References:
        McCord and Dash, warm-up and linear scaling of ResNet-50, poster, SC21.
    """
    if ratio <= 1:
        return Warmup(0.0, 0.0, 0.0, "rate")
    (first, _), (second, _) = POSTER_OPTIMA
    laws = [POSTER_OPTIMA]
    laws += [((first, one), (second, two)) for one in POSTER_RANGES[0] for two in POSTER_RANGES[1]]
    shares = [max(0.0, _LAWS[law](points, ratio)) / POSTER_EPOCHS for points in laws]
    # Rounded to three digits, as the law is not known better.
    lengths = [min(float(f"{epochs * share:.3g}"), epochs * MAX_WARMUP) for share in shares]
    return Warmup(lengths[0], min(lengths), max(lengths))


def _power_law(points: tuple[tuple[float, float], tuple[float, float]], x: float) -> float:
    """The power law through two points, at ``x``."""
    (x0, y0), (x1, y1) = points
    return y0 * exp(log(y1 / y0) / log(x1 / x0) * log(x / x0))


def _line(points: tuple[tuple[float, float], tuple[float, float]], x: float) -> float:
    """The line through two points, at ``x``."""
    (x0, y0), (x1, y1) = points
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


_LAWS = {"root": _power_law, "linear": _line}


def warmup_of(job: Job, base: float, peak: float, global_batch: int, epochs: int) -> Warmup:
    """The warm-up: as the job gives it, or by the rule of its decay.

    Args:
        job: Its warm-up and decay are used.
        base: Rate at the base batch, per step.
        peak: Rate at ``global_batch``, per step.
        global_batch: Samples per step over all workers.
        epochs: Length of the training, in epochs.

    Returns:
        For ``warmup_epochs=auto``: 30 % of the epochs with ``one-cycle``; no warm-up if the rate is
        neither scaled up nor begins lower; else `fitted_warmup`.
    """
    asked, rise = job.warmup_epochs, ONE_CYCLE_RISE * epochs
    if asked != "auto":
        return Warmup(asked, asked, asked, "job")
    if job.decay == "one-cycle":
        return Warmup(rise, rise, rise, "one-cycle")
    if peak <= base and job.warmup_start == "auto":
        return Warmup(0.0, 0.0, 0.0, "rate")
    return fitted_warmup(global_batch / job.base_batch, epochs, job.warmup_law)


def make_rule(
    job: Job,
    global_batch: int,
    epochs: int,
    update: OptimizerName,
    *,
    samples: int | None = None,
    batch_norm: bool = True,
    tried: float = 1.0,
) -> LearningRateRule:
    """The rule for a job at the global batch that was chosen.

    A batch below the base batch is allowed: both scaling rules hold in that direction, too, and
    small data sets have no larger batches. The rate is then scaled down, and reasons and schedule
    say so.

    Args:
        job: Its base rate and batch, scaling, warm-up and decay are used.
        global_batch: Samples per step over all workers.
        epochs: Length of the training, in epochs.
        update: The optimizer, which has a default rate.
        samples: Samples of an epoch. With them, the default rate of an optimizer with a `reach` is
            raised in trainings with so few steps that weights would not get far.
        batch_norm: Whether the network has batch normalization.
        tried: The best rate over the usual one, by trials. A rate that the job gives is kept.

    Raises:
        JobError: The scaled rate is no finite number above 0.
    """
    asked, spec = job.learning_rate, OPTIMIZERS[update]
    cautious = spec.unnormalized_rate if not batch_norm else None
    base = (cautious or spec.rate) if asked == "auto" else asked
    scaling = job.rate_scaling
    peak = scaled_rate(base, job.base_batch, global_batch, scaling)
    if not (isfinite(peak) and peak > 0):
        raise JobError(
            f"learning_rate={base:g} with scaling={scaling} comes to {peak:g} at global batch "
            f"{global_batch}: give another rate"
        )
    rule = LearningRateRule(
        base=base,
        base_batch=job.base_batch,
        scaling=scaling,
        peak=peak,
        warmup_epochs=warmup_of(job, base, peak, global_batch, epochs).epochs,
        decay=job.decay,
        warmup_start=None if job.warmup_start == "auto" else job.warmup_start,
    )
    if asked != "auto":
        return rule
    raised = 1.0
    if spec.reach and not cautious and samples is not None:
        needed = spec.reach / reach(rule, global_batch, samples=samples, epochs=epochs)
        raised = max(1.0, min(needed, MAX_RAISED / peak))
    factor = raised * tried
    return rule.model_copy(update={"base": base * factor, "peak": peak * factor, "tried": tried})


def rule_for(
    job: Job,
    batch: int,
    data: DataFacts,
    network: NetworkFacts,
    update: OptimizerName,
    tried: float = 1.0,
) -> LearningRateRule:
    """`make_rule` for a job, a data set and a network; ``batch`` is the global batch."""
    return make_rule(
        job,
        batch,
        job.epochs,
        update,
        samples=data.train_samples,
        batch_norm=network.batch_norm,
        tried=tried,
    )


def remark_on_rate(job: Job, rule: LearningRateRule, update: OptimizerName) -> str:
    """Why the default rate is not the usual one, in a sentence; empty if it is."""
    spec = OPTIMIZERS[update]
    name = spec.title or spec.name
    if job.learning_rate != "auto":
        return ""
    base = rule.base / rule.tried
    if spec.unnormalized_rate and isclose(base, spec.unnormalized_rate):
        return (
            f"It is {name}'s for networks without batch normalization, where {spec.rate:g} "
            "lets outputs grow until nothing is learnt."
        )
    if base > 1.000001 * spec.rate:
        return (
            f"{name}'s usual {spec.rate:g} was raised, as there are few steps: a step moves a "
            f"matrix by the rate at most, and rates that add up to less than {spec.reach:g} leave "
            "weights near where they began."
        )
    return ""


def reach(rule: LearningRateRule, global_batch: int, *, samples: int, epochs: int) -> float:
    r"""Sum of the rates of a training: how far Muon can move a matrix, in spectral norm.

    .. math:: \sum_t \eta_t \approx \frac{E N}{B} \, \eta \, \overline{\eta_t / \eta}

    Args:
        rule: The learning rate.
        global_batch: Samples per step, :math:`B`.
        samples: Of an epoch, :math:`N`.
        epochs: Length of the training, :math:`E`.
    """
    points = 200
    shares = (
        rate_factor(
            (point + 0.5) / points * samples * epochs,
            rule=rule,
            samples_per_epoch=samples,
            epochs=epochs,
        )
        for point in range(points)
    )
    return epochs * samples / global_batch * rule.peak * fmean(shares)


def start_of(rule: LearningRateRule) -> float:
    """Share of the peak at which the warm-up begins: as given, else that of the base rate."""
    if rule.warmup_start is not None:
        return rule.warmup_start
    return ONE_CYCLE_START if rule.decay == "one-cycle" else min(1.0, rule.base / rule.peak)


def raises_nothing(rule: LearningRateRule) -> bool:
    """Whether there is a warm-up that begins at the peak, and so has no effect."""
    return rule.warmup_epochs > 0 and start_of(rule) >= 1


def drops(rule: LearningRateRule, epochs: int) -> tuple[float, ...]:
    """Epochs at which the rate falls at once by `DECAY_FACTOR`."""
    return tuple(share * epochs for share in DECAY_SHARES) if rule.decay == "steps" else ()


def rate_factor(
    samples_seen: float, *, rule: LearningRateRule, samples_per_epoch: int, epochs: int
) -> float:
    r"""Share of the peak rate that holds after ``samples_seen`` samples.

    With :math:`e` epochs seen, :math:`W` of warm-up and :math:`E` in all, first a line from the
    small-batch rate (the factor starts at :math:`s = \min(1, \eta_0 / \eta)`, or where the rule
    says) to the peak,

    .. math:: s + (1 - s) \, e / W \quad (e < W),

    exactly 1 at :math:`e = W`, then ``cosine``: :math:`(1 + \cos(\pi (e - W) / (E - W))) / 2`;
    ``steps``: a tenth at each of 1/3, 2/3 and 8/9 of :math:`E` that has passed; ``none``: 1.
    ``one-cycle`` rises over :math:`W` from :math:`s = 1/25` by half a cosine,
    :math:`1 - (1 - s) (1 + \cos(\pi e / W)) / 2`, and falls as ``cosine`` does, to
    :math:`s / 10\,000` instead of 0.

    Args:
        samples_seen: Training samples seen before the step, over all workers and epochs.
        rule: Base and peak rate, warm-up and decay.
        samples_per_epoch: Training samples in one epoch.
        epochs: Length of the training, in epochs.

    Returns:
        A share from 0 to 1; past the end, that at the end.

    References:
        Warm-up and steps: Goyal et al. 2017, arXiv 1706.02677. Cosine: Loshchilov and Hutter 2017,
        arXiv 1608.03983, without restarts. One cycle: Smith and Topin 2018, arXiv 1708.07120, with
        the cosines and constants of PyTorch's `OneCycleLR`.
    """
    epoch = min(samples_seen / samples_per_epoch, float(epochs))
    warmup, one_cycle = rule.warmup_epochs, rule.decay == "one-cycle"
    if epoch < warmup:
        start = start_of(rule)
        if one_cycle:
            return 1.0 - (1.0 - start) * _falling(epoch / warmup)
        return start + (1.0 - start) * epoch / warmup
    if rule.decay == "steps":
        return DECAY_FACTOR ** sum(epoch >= place for place in drops(rule, epochs))
    if epoch > warmup and rule.decay in ("cosine", "one-cycle"):
        end = ONE_CYCLE_END if one_cycle else 0.0
        return end + (1.0 - end) * _falling((epoch - warmup) / (epochs - warmup))
    return 1.0


def _falling(share: float) -> float:
    """Half a cosine from 1 to 0."""
    return (1 + cos(pi * share)) / 2
