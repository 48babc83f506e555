r"""`dynamic-batch`: shares by speed, and the time that they save.

The method begins with even shares, of which its plan tells the time; then worker i, whose step
takes :math:`(b_i + o_i) / v_i`, gets a share by its speed, and a step takes

.. math:: \frac{B + \sum_i o_i}{\sum_i v_i} \le \max_i \frac{B / n + o_i}{v_i}
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.algorithms.rebalancing import DEAD_BAND
from batchwright.records import Job, Plan, RunSummary, Stage
from batchwright.records.text.formatting import percent
from batchwright.records.text.plan_text import chosen_candidate


def reason(job: Job) -> str:
    """When shares are made again."""
    when = "at the end of each epoch"
    if job.rebalance == "published":
        how = "each worker's share becomes its samples over its time in that epoch"
    else:
        how = (
            "each worker's share is made to follow its measured speed, if any would change by more "
            f"than {percent(DEAD_BAND, 0)}"
        )
        if job.rebalance_steps:
            when = f"every {job.rebalance_steps} steps and {when}"
    return f"Local batches are where it starts: {when} {how}; the global batch stays."


def saved_by_shares(plan: Plan, runs: Sequence[RunSummary]) -> float:
    """Seconds of a training that shares by speed save; 0 where speeds are not known.

    Of the epochs that it is likely to take. A run may have been slower than is predicted now: then
    the share of its steps that would have been saved is taken of what is predicted.
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
    """Samples a second and fixed samples' worth of each worker: stated, or from the last run."""
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
