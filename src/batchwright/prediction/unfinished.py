r"""Accuracy before a training's end: below the law of whole trainings, as the rate is still high.

Within a training whose rate has come down to the share f of its peak, and ends at :math:`f_E`,

.. math:: \operatorname{logit} u = \text{law} - d \, (f^q - f_E^q)

The law (`prediction.learning`) is that of a whole training of as many samples. Trials of a job
whose rate never comes down were trained in that way, too, so nothing is missing there.
"""

from __future__ import annotations

from batchwright.prediction.learning import Normal

SHORT = {"sgd": Normal(0.5, 0.4), "muon": Normal(0.7, 0.4)}
"""By how much the logit is below the law at the peak of the rate: mean, and spread over tasks,
batches and epochs (`benchmarks.epoch_curves`). AdamW was not measured: as Muon."""

POWER = 1.0


def falls_short(optimizer: str, factor: float, last: float) -> Normal:
    """By how much logit u is below that of a whole training of as many samples.

    Args:
        optimizer: As in a job.
        factor: Share of the peak rate that holds now.
        last: That at the training's end.
    """
    share = max(0.0, factor**POWER - last**POWER)
    mean, error = SHORT.get(optimizer, SHORT["muon"])
    return Normal(mean * share, error * share)
