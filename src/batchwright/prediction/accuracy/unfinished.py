r"""Accuracy before a training's end, whose rate has not come down yet, against whole trainings.

Where the rate has come down to the share f of its peak, and ends at :math:`f_E`,

.. math:: \operatorname{logit} u = \text{law} - d \, (f - f_E)

The law (`prediction.accuracy.learning`) is that of a whole training of as many samples. Trials of
a job whose rate never comes down were trained in that way, too, so nothing is missing there.
"""

from __future__ import annotations

from batchwright.prediction.accuracy.learning import Normal

AT_PEAK = Normal(0.0, 0.3)
"""By how much the logit is below the law at the peak of the rate: mean, and spread over tasks,
optimizers and batches (`benchmarks.planning.epoch_curves`; docs/log.md). Noise of a high rate costs
about as much as the short training loses by its few steps at a low one, here a little less and
there a little more, so what is left is the spread."""


def falls_short(factor: float, last: float) -> Normal:
    """By how much logit u is below that of a whole training of as many samples.

    Args:
        factor: Share of the peak rate that holds now.
        last: That at the training's end.
    """
    share = max(0.0, factor - last)
    return Normal(AT_PEAK.mean * share, AT_PEAK.error * share)
