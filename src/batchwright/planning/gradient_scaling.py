"""Adaptive gradient scaling and AdaScale's gain, in the plan: their rule, and parts to measure by.

Telling a gradient's noise from its signal takes several parts of each step: its workers' gradients,
or those of micro-batches. Where there are too few, micro-batches are made smaller; that costs the
fixed time of a pass each, which the predicted times contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.errors import JobError, PlanError
from batchwright.planning.inputs import SERVED
from batchwright.records import AgsRule, Job, Reason, Stage

_OTHERS = {
    "adamw": " AdamW divides each gradient by its own recent size, so a factor that changes slowly "
    "nearly cancels: expect little.",
    "muon": " Muon makes the updates of its matrices equally large whatever their gradients' size, "
    "so factors act on what is left to SGD only.",
}
"""What is to be said of optimizers that do not follow the gradient's size."""


@dataclass(frozen=True)
class Parting:
    """Into how many parts a step is cut, at least.

    Attributes:
        parts: Of a step, all its workers together.
        base_batch: Steps of at most so many samples are left whole: their factors are 1.
        alone: Whether each worker's step is its own, as under a parameter server.
    """

    parts: int
    base_batch: int
    alone: bool

    def passes(self, workers: int, local: int | None = None) -> int:
        """Micro-batches of each of so many workers; of any large batch if ``local`` is unset."""
        batch = local if self.alone or local is None else workers * local
        if batch is not None and batch <= self.base_batch:
            return 1
        return self.parts if self.alone else -(-self.parts // workers)

    def most_at_once(self, local: Sequence[int], least: int) -> int:
        """Largest micro-batch that leaves parts enough, or as many as there can be.

        Args:
            local: Samples per step of each worker.
            least: Fewest samples of a part.
        """
        largest, tried = max(local), 1
        batches = [(size,) for size in local] if self.alone else [tuple(local)]
        batches = [sizes for sizes in batches if sum(sizes) > self.base_batch]
        while batches:
            most = -(-largest // tried)
            if min(_parts(sizes, most, least) for sizes in batches) >= self.parts:
                return most
            if most <= least:
                break
            tried += 1
        return least if batches else largest


def parting_of(job: Job) -> Parting | None:
    """How a job's steps are to be cut; `None` where nothing is told from parts."""
    if job.ags.factors == "off" and job.rate_scaling != "gain":
        return None
    return Parting(job.ags.parts, job.base_batch, job.method in SERVED)


def small_parts(local: int, passes: int, least: int) -> list[int]:
    """A local batch in ``passes`` even parts of at least ``least``, or as many as there can be.

    Example:
        >>> small_parts(10, 4, 1), small_parts(9, 4, 2)
        ([3, 3, 2, 2], [3, 2, 2, 2])
    """
    possible = max(1, local // least)
    count = min(passes, possible)
    # Training cuts by the largest part: 9 in 4 parts of up to 3 would come out as 3 of them.
    while count < possible and -(-local // -(-local // count)) < min(passes, possible):
        count += 1
    part, larger = divmod(local, count)
    return [part + 1] * larger + [part] * (count - larger)


def ags_rule(job: Job) -> AgsRule | None:
    """The plan's rule for adaptive gradient scaling; `None` if the job does not want it.

    Raises:
        JobError: The smallest factor is larger than the largest.
    """
    asked, mode = job.ags, job.ags.factors
    if mode == "off":
        return None
    if asked.most != "auto" and asked.least > asked.most:
        raise JobError(
            f"ags.least={asked.least:g} is more than ags.most={asked.most:g}: give a smaller one"
        )
    return AgsRule(
        mode=mode,
        base_batch=job.base_batch,
        least=asked.least,
        most=None if asked.most == "auto" else asked.most,
        lookback=asked.lookback,
    )


def check_parts(job: Job, stages: Sequence[Stage], least: int) -> None:
    """Refuse a batch that nothing can be told from.

    Args:
        job: Resolved.
        stages: The plan's table.
        least: Fewest samples of a part.

    Raises:
        PlanError: A step that wants factors has one part only.
    """
    parting = parting_of(job)
    if parting is None:
        return
    for stage in stages:
        for sizes in _steps(parting, stage):
            if sum(sizes) > parting.base_batch and _parts(sizes, stage.micro_batch_size, least) < 2:
                key = f"ags.mode={job.ags.mode}" if job.ags.factors != "off" else "scaling=gain"
                raise PlanError(
                    f"{key} tells noise from signal by at least 2 parts of a step, and a batch of "
                    f"{sum(sizes)} is one part of at least {least}: give a larger global_batch"
                )


def reasons(job: Job, stages: Sequence[Stage], least: int) -> tuple[Reason, ...]:
    """Why gradients are scaled as they are, and how steps are cut for it.

    Args:
        job: Resolved.
        stages: The plan's table.
        least: Fewest samples of a part.
    """
    parting, rule = parting_of(job), ags_rule(job)
    if parting is None:
        return ()
    stage = stages[-1]
    sizes = max(_steps(parting, stage), key=sum)
    batch, larger = sum(sizes), sum(sizes) > parting.base_batch
    found = []
    if rule is not None:
        found.append(_scaling(job, rule, batch))
    if larger:
        parts = _parts(sizes, stage.micro_batch_size, least)
        found.append(
            Reason(
                choice="parts of a step",
                value=f"{parts} of up to {min(stage.micro_batch_size, max(sizes))} samples",
                why="Noise is told from signal by the gradients of a step's parts, workers times "
                f"micro-batches, of which there are to be at least ags.parts={job.ags.parts}.",
                source="assumed",
            )
        )
    return tuple(found)


def _scaling(job: Job, rule: AgsRule, batch: int) -> Reason:
    ratio = batch / rule.base_batch
    most = (ratio**0.5 if rule.mode == "norm" else ratio) if rule.most is None else rule.most
    value = f"{rule.mode}, factors of {rule.least:g} to {max(rule.least, most):.3g}"
    what = "ratio of its norms" if rule.mode == "norm" else "squared ratio of its norms"
    why = (
        f"Asked for. Each tensor's gradient times the {what} at {rule.base_batch} and at {batch} "
        f"samples, measured over the last {rule.lookback} steps or so."
    )
    if job.rate_scaling == "gain":
        why += " scaling=gain multiplies the rate by the same, of all tensors together: both act."
    if ratio <= 1:
        value = "none"
        why = (
            f"Asked for (ags.mode={rule.mode}), and a batch of {batch} is not above "
            f"base_batch={rule.base_batch}: there is nothing to make up for."
        )
    return Reason(
        choice="gradient scaling",
        value=value,
        why=why + _OTHERS.get(job.optimizer, ""),
        source="asked",
    )


def _steps(parting: Parting, stage: Stage) -> list[tuple[int, ...]]:
    """Local batches of each step of its own: one over all workers, or one of each."""
    sizes = stage.local_batch_sizes
    return [(size,) for size in sizes] if parting.alone else [sizes]


def _parts(local: Sequence[int], most: int, least: int) -> int:
    """Parts of a step, as training cuts it."""
    return sum(max(1, min(-(-size // most), size // least)) for size in local)
