"""The learning rate as a pure function of samples seen.

Nothing here counts steps or holds state, so a resume, another batch or another number of workers
cannot bend the schedule. The rate of a step is ``stage.learning_rate * rate_factor(...)``.
"""

from math import cos, pi, sqrt
from typing import Literal

from batchwright.errors import JobError
from batchwright.records import Job, LearningRateRule

DEFAULT_RATE = {"sgd": 0.1, "adamw": 0.001, "muon": 0.1}  # at the base batch, per step
LONGEST_DEFAULT_WARMUP = 5.0  # epochs; Goyal et al. 2017
DECAY_SHARES = (1 / 3, 2 / 3, 8 / 9)  # of the epochs; Goyal et al. decay at 30, 60, 80 of 90
DECAY_FACTOR = 0.1


def scaled_rate(
    base: float, base_batch: int, global_batch: int, scaling: Literal["linear", "sqrt", "none"]
) -> float:
    r"""Rate for ``global_batch``, from the rate known to work at ``base_batch``.

    .. math:: \eta = \eta_0 \cdot B / B_0, \quad \eta_0 \sqrt{B / B_0}, \quad \eta_0

    Args:
        base: Rate :math:`\eta_0` at the base batch, per step.
        base_batch: Global batch :math:`B_0` at which it holds, in samples.
        global_batch: Global batch :math:`B` wanted, in samples.
        scaling: ``linear``, ``sqrt`` or ``none``.

    Returns:
        Rate per step.

    Example:
        >>> scaled_rate(0.1, 128, 512, "linear"), scaled_rate(0.1, 128, 512, "sqrt")
        (0.4, 0.2)

    References:
        linear: Goyal et al. 2017, arXiv 1706.02677.  sqrt: Krizhevsky 2014, arXiv 1404.5997.
    """
    ratio = global_batch / base_batch
    return base * {"linear": ratio, "sqrt": sqrt(ratio), "none": 1.0}[scaling]


def default_warmup_epochs(base: float, peak: float, epochs: int) -> float:
    """Warm-up length in epochs: none if the rate is not scaled up, else 5 or a tenth if less."""
    return min(LONGEST_DEFAULT_WARMUP, epochs / 10) if peak > base else 0.0


def make_rule(job: Job, global_batch: int, epochs: int) -> LearningRateRule:
    """The rule for a job at the global batch that was chosen.

    Args:
        job: Gives the base rate and batch, scaling, warm-up and decay.
        global_batch: Samples per step over all workers.
        epochs: Length of the training, in epochs.

    Raises:
        JobError: The warm-up asked for is longer than the training.
    """
    asked = job.learning_rate
    base = DEFAULT_RATE[job.optimizer] if asked == "auto" else asked
    peak = scaled_rate(base, job.base_batch, global_batch, job.scaling)
    if job.warmup_epochs == "auto":
        warmup = default_warmup_epochs(base, peak, epochs)
    else:
        warmup = job.warmup_epochs
    if warmup > epochs:
        raise JobError(
            f"warmup_epochs={warmup:g} is longer than epochs={epochs}: give at most {epochs}"
        )
    return LearningRateRule(
        base=base,
        base_batch=job.base_batch,
        scaling=job.scaling,
        peak=peak,
        warmup_epochs=warmup,
        decay=job.decay,
    )


def rate_factor(
    samples_seen: float, *, rule: LearningRateRule, samples_per_epoch: int, epochs: int
) -> float:
    r"""Share of the peak rate that holds after ``samples_seen`` samples.

    With :math:`e` epochs seen, :math:`W` of warm-up and :math:`E` in all, first a line from the
    small-batch rate (the factor starts at :math:`s = \min(1, \eta_0 / \eta)`) to the peak,

    .. math:: s + (1 - s) \, e / W \quad (e < W),

    exactly 1 at :math:`e = W`, then ``cosine``: :math:`(1 + \cos(\pi (e - W) / (E - W))) / 2`;
    ``steps``: a tenth at each of 1/3, 2/3 and 8/9 of :math:`E` that has passed; ``none``: 1.

    Args:
        samples_seen: Training samples seen before the step, over all workers and epochs.
        rule: Base and peak rate, warm-up and decay.
        samples_per_epoch: Training samples in one epoch.
        epochs: Length of the training, in epochs.

    Returns:
        A number in [0, 1]; past the end, what holds at the end.

    References:
        Warm-up and steps: Goyal et al. 2017, arXiv 1706.02677. Cosine: Loshchilov and Hutter 2017,
        arXiv 1608.03983, without restarts.
    """
    epoch = min(samples_seen / samples_per_epoch, float(epochs))
    if epoch < rule.warmup_epochs:
        start = min(1.0, rule.base / rule.peak)
        return start + (1.0 - start) * epoch / rule.warmup_epochs
    if rule.decay == "steps":
        return DECAY_FACTOR ** sum(epoch >= share * epochs for share in DECAY_SHARES)
    if rule.decay == "cosine" and epoch > rule.warmup_epochs:
        return (1 + cos(pi * (epoch - rule.warmup_epochs) / (epochs - rule.warmup_epochs))) / 2
    return 1.0
