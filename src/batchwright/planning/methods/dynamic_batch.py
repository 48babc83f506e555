r"""`dynamic-batch`: shares by speed, and the time that they save.

The method begins with even shares, and its plan predicts the time with these. Then worker i, whose
step takes :math:`(b_i + o_i) / v_i` seconds, gets a share by its speed, and a step takes

.. math:: \frac{B + \sum_i o_i}{\sum_i v_i} \le \max_i \frac{B / n + o_i}{v_i}
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.algorithms.rebalancing import DEAD_BAND
from batchwright.records import Job, Plan, RunSummary, Stage
from batchwright.records.text.formatting import counted, percent
from batchwright.records.text.plan_text import chosen_candidate


def reason(job: Job) -> str:
    """When and how shares change, in a sentence."""
    when = "at the end of each epoch"
    if job.rebalance == "published":
        how = "each worker's share becomes its samples over its time in that epoch"
    else:
        how = (
            "each worker's share is made to follow its measured speed, if any would change by more "
            f"than {percent(DEAD_BAND, 0)}"
        )
        if job.rebalance_steps:
            when = f"every {counted(job.rebalance_steps, 'step')} and {when}"
    return f"Local batches are those at the start: {when} {how}. The global batch stays."


def saved_by_shares(plan: Plan, runs: Sequence[RunSummary]) -> float:
    """Seconds of a training that shares by speed save; 0 where speeds are not known.

    They are for the epochs that the training is likely to take. Speeds of a run may be lower than
    those of the prediction: then the share that is saved is taken of the predicted seconds.

    Args:
        plan: The plan, with even shares.
        runs: Finished runs of the same task; the last one with as many workers gives the speeds.
    """
    (stage,) = plan.stages
    workers = _speeds(plan, stage, runs)
    if len({*stage.local_batch_sizes}) > 2 or len(plan.kinds) > 1 or not workers:
        return 0.0
    batch, one = stage.global_batch_size, chosen_candidate(plan)
    even = max((batch / len(workers) + fixed) / speed for speed, fixed in workers)
    level = (batch + sum(fixed for _, fixed in workers)) / sum(speed for speed, _ in workers)
    computing = min(one.steps_per_epoch * even, one.epoch_seconds.value)
    return plan.likely_epochs() * computing * (1 - level / even)


def _speeds(plan: Plan, stage: Stage, runs: Sequence[RunSummary]) -> list[tuple[float, float]]:
    """Speed of each worker, in samples a second, and the fixed time of its step, in samples.

    They are stated by the job of a virtual cluster, or taken from the last run; empty: not known.
    """
    if plan.job.launcher.simulated:
        a, b = stage.sample_seconds, stage.step_seconds
        if not a or b is None:
            return []
        each = plan.job.virtual.relative_times(plan.workers)
        return [(speed / a, overhead * b / a) for speed, overhead in each]
    for run in reversed(runs):
        if not run.plan.method_spec.same_steps or not run.epochs:
            continue
        last = run.epochs[-1]
        fixed = run.plan.stages[-1].fixed_samples
        times = [one.input_seconds + one.compute_seconds for one in last.workers]
        if len(times) == plan.workers and last.steps and min(times) > 0:
            return [
                ((one.samples + last.steps * fixed) / seconds, fixed)
                for one, seconds in zip(last.workers, times, strict=True)
            ]
    return []
