"""How the method of this package lays out a plan."""

from batchwright.planning.learning_rates import rate_at_top
from batchwright.planning.methods.layout import Layout
from batchwright.planning.methods.time_models import Measured, Stated
from batchwright.planning.resolution import sides
from batchwright.records import Job, Reason, Stage


def lay_out(job: Job, times: Measured | Stated, optimizer: tuple[Reason, ...]) -> Layout:
    """As `MethodSpec.plan` wants it: two rows."""
    rule, rates = rate_at_top(job, times.batch, times.network)
    first = job.epochs // 2
    stages = tuple(
        Stage(
            epochs=epochs,
            learning_rate=rule.peak,
            dropout=job.dropout,
            augmentation=job.augmentation,
            **times.level(max(sides(job)), batch),
        )
        for epochs, batch in ((first, times.batch), (job.epochs - first, 2 * times.batch))
    )
    return Layout(stages, rule, (*optimizer, *rates))
