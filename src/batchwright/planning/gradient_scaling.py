"""Adaptive gradient scaling and AdaScale's gain in a plan: their rule, and how steps are cut.

Gradient noise is measured by comparing the gradients of several parts of a step: those of its
workers, or of its micro-batches. Where a step has too few parts, its micro-batches are made
smaller. Each further pass costs its fixed time, which the predicted times contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.algorithms.learning_rate import room_to_linear
from batchwright.errors import JobError, PlanError
from batchwright.planning.chosen import Chosen
from batchwright.records import AgsRule, Job, LearningRateRule, Plan, Reason, Stage
from batchwright.records.registries.optimizers import OPTIMIZERS

WANTED_PARTS = 4
"""Smallest number of parts of a step with which noise can be told from signal well."""
GROWTH_PARTS = 2
"""Smallest number of parts where noise only decides about the batch at the end of an epoch: a mean
over many steps needs no more, and each further pass costs time."""
OF_NOISE = ("ags.mode", "batch_growth", "scaling")
"""Job keys with which gradient noise is measured in each step."""
NORMALIZED = 8
"""Fewest samples of a part with which batch normalization costs little accuracy: Wu and He 2018,
arXiv 1803.08494, measured 1.2 points more error with 8 than with 32, 3.7 with 4 and 11.1 with 2."""


@dataclass(frozen=True)
class StepSplit:
    """Into how many parts a step is cut, at least."""

    parts: int  # parts of a step, over all its workers
    base_batch: int  # steps of at most so many samples are not cut: their factors are 1
    alone: bool  # whether each worker steps by itself, as under a parameter server
    key: str  # the job key that noise is measured for, with its value
    # Smallest number of parts that tells noise from signal well enough.
    enough: int = WANTED_PARTS

    @property
    def asked(self) -> str:
        """How many parts are asked for, in words."""
        return f"{self.parts}" if self.enough < WANTED_PARTS else f"ags.parts={self.parts}"

    def passes(self, workers: int, local: int | None = None) -> int:
        """Fewest micro-batches of each worker.

        Args:
            workers: Number of workers.
            local: Local batch, in samples; unset: any batch that is large enough to be cut.
        """
        batch = local if self.alone or local is None else workers * local
        if batch is not None and batch <= self.base_batch:
            return 1
        return self.parts if self.alone else -(-self.parts // workers)

    def most_at_once(self, local: Sequence[int], least: int) -> int:
        """Largest micro-batch with which a step has enough parts, or as many as it can have.

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


def step_split_of(job: Job) -> StepSplit | None:
    """How a job's steps are to be cut; `None` where the job does not use gradient noise."""
    factors, alone = job.ags.factors != "off", job.method_spec.served
    if factors or job.rate_scaling == "gain":
        key = f"ags.mode={job.ags.mode}" if factors else "scaling=gain"
        return StepSplit(job.ags.parts, job.base_batch, alone, key)
    if job.batch_growth == "off" or not job.method_spec.takes("batch_growth"):
        return None
    return StepSplit(GROWTH_PARTS, 0, alone, f"batch_growth={job.batch_growth}", GROWTH_PARTS)


def small_parts(local: int, passes: int, least: int) -> int:
    """Number of even parts of a local batch: ``passes``, or fewer with ``least`` samples each.

    Example:
        >>> small_parts(10, 4, 1), small_parts(9, 4, 2), small_parts(9, 4, 3)
        (4, 4, 3)
    """
    possible = max(1, local // least)
    count = min(passes, possible)
    # Training cuts by the largest part: 9 in 4 parts of up to 3 would come out as 3 of them.
    while count < possible and -(-local // -(-local // count)) < min(passes, possible):
        count += 1
    return count


def ags_rule(job: Job) -> AgsRule | None:
    """The plan's rule for adaptive gradient scaling; `None` if the job does not ask for it."""
    asked, mode = job.ags, job.ags.factors
    if mode == "off":
        return None
    return AgsRule(
        mode=mode,
        base_batch=job.base_batch,
        least=asked.least,
        most=None if asked.most == "auto" else asked.most,
        lookback=asked.lookback,
    )


def most_factor(rule: AgsRule, rate: LearningRateRule, batch: int) -> float:
    """The largest factor that a tensor can get in a step of ``batch`` samples."""
    most = room_to_linear(rate, rule.base_batch, batch) if rule.most is None else rule.most
    return max(rule.least, min(_of_noise(rule, batch), most))


def largest_rate(
    rule: AgsRule, rate: LearningRateRule, peak: float, batch: int
) -> tuple[float, bool]:
    """The largest rate that factors can give a tensor in a step of ``batch`` samples.

    Args:
        rule: The rule for the factors.
        rate: The learning rate.
        peak: The rate that the factors multiply, per step.
        batch: Samples of the step.

    Returns:
        The largest product of rate and factor, per step; and whether that is more than linear
        scaling gives.
    """
    ratio = max(1.0, batch / rate.base_batch)
    factor = most_factor(rule, rate, batch)
    if rate.scaling == "gain":  # the larger the gain, the less room is left
        factor = max(factor, ratio * (max(1.0, rule.least) if rule.most is None else factor))
    largest = peak * factor
    return largest, largest > 1.001 * rate.base * ratio


def check_parts(job: Job, stages: Sequence[Stage], least: int) -> None:
    """Refuse steps whose gradient noise cannot be measured, and an `ags.least` that is too large.

    Raises:
        PlanError: A step that needs factors has one part only.
        JobError: The smallest factor is larger than any that noise can call for.
    """
    split = step_split_of(job)
    if split is None:
        return
    steps = [(sizes, stage) for stage in stages for sizes in _steps(split, stage)]
    for sizes, stage in steps:
        check_step(job, sizes, stage.micro_batch_size, least)
    check_least(job, max(sum(sizes) for sizes, _ in steps))


def check_step(job: Job, local: Sequence[int], micro_batch: int, least: int) -> None:
    """Refuse a step that needs factors and has one part only.

    Args:
        job: Resolved.
        local: Samples per step of each worker, or of one worker that steps by itself.
        micro_batch: Most samples in one forward pass.
        least: Fewest samples of a part.

    Raises:
        PlanError: The step is larger than the base batch, and cannot be cut into two parts.
    """
    split = step_split_of(job)
    if split is None or sum(local) <= split.base_batch:
        return
    if _parts(local, micro_batch, least) < 2:
        larger = "a larger batch" if split.alone else f"global_batch={2 * least} or more"
        raise PlanError(
            f"{split.key} tells noise from signal by at least 2 parts of a step, and "
            f"{sum(local)} samples cannot be cut into 2 of at least {least}: give {larger}"
        )


def check_least(job: Job, batch: int) -> None:
    """Refuse an `ags.least` above the largest factor that a step of ``batch`` samples can have.

    Raises:
        JobError: `ags.least` is larger, and `ags.most` is not given.
    """
    rule = ags_rule(job)
    if rule is None or rule.most is not None:
        return
    most = _of_noise(rule, batch)
    if rule.least > most:
        raise JobError(
            f"ags.least={rule.least:g} is more than the largest factor at a batch of {batch}, "
            f"{most:.3g}: give a smaller one, or ags.most, too"
        )


def reasons(
    job: Job,
    stages: Sequence[Stage],
    least: int,
    rate: LearningRateRule,
    update: str,
    *,
    by_runs: bool = False,
) -> tuple[Reason, ...]:
    """Why gradients are scaled or not, and into how many parts steps are cut.

    Args:
        job: Resolved.
        stages: The plan's table; its last row is described.
        least: Fewest samples of a part.
        rate: The learning rate.
        update: The optimizer.
        by_runs: Whether runs decided for the job's `ags.mode`, rather than the job itself.
    """
    split, rule = step_split_of(job), ags_rule(job)
    if split is None:
        return _no_factors(job, stages) if OPTIMIZERS[update].follows_gradients else ()
    stage = stages[-1]
    sizes = max(_steps(split, stage), key=sum)
    batch, larger = sum(sizes), sum(sizes) > split.base_batch
    found = []
    if rule is not None:
        followed = OPTIMIZERS[update].follows_gradients
        found.append(_scaling(job, rule, batch, rate, followed=followed, by_runs=by_runs))
    if larger:
        parts = _parts(sizes, stage.micro_batch_size, least)
        asked = split.asked
        how_many = f", of which there are to be at least {asked}"
        if parts < split.parts:
            how_many = f": {asked} of at least {least} samples do not come out of {batch}"
        few = f"; fewer than {split.enough} tell little" if parts < split.enough else ""
        why = (
            "Gradients of a step's parts are compared to tell noise from signal. The parts are "
            f"workers times micro-batches{how_many}{few}."
        )
        value = f"{parts} of up to {_largest(sizes, stage.micro_batch_size, least)} samples"
        found.append(Chosen(value, why, "assumed").reason("parts of a step"))
    return tuple(found)


def _no_factors(job: Job, stages: Sequence[Stage]) -> tuple[Reason, ...]:
    """Why gradients are not scaled, where the job leaves it open and the batch is a large one."""
    gather = max if job.method_spec.served else sum
    batch = max(gather(stage.local_batch_sizes) for stage in stages)
    if job.ags.mode != "auto" or batch <= job.base_batch:
        return ()
    why = (
        f"A batch of {batch} has less noise than base_batch={job.base_batch}, for which "
        "ags.mode=norm or gain make up tensor by tensor. Against the same batch at its own best "
        "rate, on two tasks, norm gained nothing that three seeds show, and gain was 1.2 points "
        "ahead after 64 steps of 64 and 1.2 behind after 1,024 of 256 (docs/measured.md); at rates "
        "that nobody tuned, norm with scaling=sqrt was ahead of that rate alone on some tasks of "
        "few epochs and not on all (docs/log.md). No run given tells whether it pays here: "
        "`batchwright sweep optimizer=sgd --grid ags.mode=off,norm` does, and `plan --run` follows."
    )
    return (Chosen("off", why, "assumed").reason("gradient scaling"),)


def doubts(plan: Plan, least: int) -> tuple[str, ...]:
    """Warnings about factors and parts that the user may not have meant, a line each.

    Args:
        plan: The plan.
        least: Fewest samples of a part.
    """
    split = step_split_of(plan.job)
    if split is None:
        return ()
    found: dict[str, None] = {}
    if plan.job.batch_growth != "off" and not plan.growth:
        cut = ", and steps are cut for it" if plan.stages[0].accumulation_steps > 1 else ""
        found[
            f"{split.key} leaves the batch at {plan.stages[0].global_batch_size}{cut}: twice as "
            "many samples leave too few steps an epoch, save too little time, or are more than "
            "most_local_batch allows; give a smaller global_batch, or leave batch_growth out"
        ] = None
    for stage in plan.stages:
        for sizes in _steps(split, stage):
            batch, most = sum(sizes), _largest(sizes, stage.micro_batch_size, least)
            if batch <= split.base_batch:
                continue
            parts = _parts(sizes, stage.micro_batch_size, least)
            cut = f"{split.key} with {split.asked} has {parts} parts of up to {most} samples"
            cut += f" in steps of {batch}"
            if parts < split.enough:
                how = "ags.parts=4" if split.parts < WANTED_PARTS else "a larger global_batch"
                found[
                    f"{cut}, and fewer than {WANTED_PARTS} tell noise from signal badly: give {how}"
                ] = None
            elif most < min(NORMALIZED, max(sizes)) and plan.network.batch_norm:
                how = "fewer ags.parts" if split.parts > WANTED_PARTS else "a larger global_batch"
                found[
                    f"{cut}, and batch normalization goes by each part: below "
                    f"{NORMALIZED} samples it costs accuracy; give {how}"
                ] = None
    return (*_doubts_of_rate(plan, split), *found)


def unmeasured_noise(stages: Sequence[Stage], least: int, *, served: bool) -> str:
    """Why a training cannot measure its gradient noise scale, and what would allow it to.

    Args:
        stages: The plan's table.
        least: Fewest samples of a part.
        served: Whether each worker steps by itself, under a parameter server.

    Returns:
        Two sentences; empty if some step has two parts or more.
    """
    largest = 0
    for stage in stages:
        local = stage.local_batch_sizes
        for sizes in [(size,) for size in local] if served else [local]:
            if _parts(sizes, stage.micro_batch_size, least) > 1:
                return ""
            largest = max(largest, *sizes)
    whose = "each worker steps by itself, in one pass" if served else "one worker in one pass"
    more = "" if served else ", and so would more workers"
    how = f"micro_batch={-(-largest // 2)} would cut it into two{more}"
    if largest < 2 * least:
        how = f"{largest} samples cannot be cut, so it takes a larger batch"
    return (
        "Training will not measure the gradient noise scale: that takes two parts of a step, and "
        f"here a step has one ({whose}); {how}."
    )


def _doubts_of_rate(plan: Plan, split: StepSplit) -> tuple[str, ...]:
    rule, rate = plan.ags, plan.learning_rate
    if rule is None or not OPTIMIZERS[plan.update].follows_gradients:
        return ()
    found, idle = [], True
    for stage in plan.stages:
        batch = max(sum(sizes) for sizes in _steps(split, stage))
        largest, beyond = largest_rate(rule, rate, stage.learning_rate, batch)
        if beyond:
            found.append((largest, batch))
        idle = idle and most_factor(rule, rate, batch) <= 1 and batch > rule.base_batch
    if idle and rule.most is None:
        return (
            f"ags.mode={rule.mode} has nothing to do on top of scaling={rate.scaling}, which "
            "raises the rate by all that noise can call for: scaling=sqrt or none leaves it room, "
            "and ags.most= insists",
        )
    if not found:
        return ()
    largest, batch = max(found)
    return (
        f"ags.mode={rule.mode} on top of scaling={rate.scaling} may step a tensor at "
        f"{largest:.3g}, {largest / rate.base:.3g} times the base rate, where linear scaling to "
        f"{batch} samples gives {batch / rate.base_batch:.3g} times: scaling=none or a smaller "
        "ags.most keeps it below",
    )


def _of_noise(rule: AgsRule, batch: int) -> float:
    """The factor of a gradient that is noise alone, without any signal."""
    ratio = max(1.0, batch / rule.base_batch)
    return ratio**0.5 if rule.mode == "norm" else ratio


def _scaling(
    job: Job, rule: AgsRule, batch: int, rate: LearningRateRule, *, followed: bool, by_runs: bool
) -> Reason:
    """The reason for the factors.

    ``followed`` says whether the optimizer's update follows the size of the gradient: then the
    reason names the largest rate that comes of it.
    """
    origin = "By the runs given" if by_runs else "Asked for"
    ratio = batch / rule.base_batch
    most = most_factor(rule, rate, batch)
    value = f"{rule.mode}, factors of {rule.least:g} to {most:.3g}"
    what = "ratio of its norms" if rule.mode == "norm" else "squared ratio of its norms"
    why = (
        f"{origin}. Each tensor's gradient is multiplied by the {what} at {rule.base_batch} and at "
        f"{batch} samples, measured over the last {rule.lookback} steps or so."
    )
    if job.rate_scaling == "gain":
        why += " scaling=gain multiplies the rate by that of all tensors together: both act."
    if followed:
        largest, beyond = largest_rate(rule, rate, rate.peak, batch)
        why += (
            f" With scaling={rate.scaling} a tensor's rate comes to {largest:.3g} per step at "
            f"most, {largest / rate.base:.3g} times the base rate; linear scaling gives "
            f"{ratio:.3g} times" + (", and noise calls for no more than that." if beyond else ".")
        )
    if rule.most is None and most <= 1 < ratio:
        why += f" scaling={rate.scaling} does all that already, so every factor is {most:g}."
    if ratio <= 1:
        value = "none"
        why = (
            f"{origin} (ags.mode={rule.mode}), and a batch of {batch} is not above "
            f"base_batch={rule.base_batch}: there is nothing to make up for."
        )
    why = f"{why} {OPTIMIZERS[job.optimizer].on_factors}".rstrip()
    return Chosen(value, why, "measured" if by_runs else "asked").reason("gradient scaling")


def _steps(split: StepSplit, stage: Stage) -> list[tuple[int, ...]]:
    """Local batches of each step: one step of all workers, or a step of each worker alone."""
    sizes = stage.local_batch_sizes
    return [(size,) for size in sizes] if split.alone else [sizes]


def _parts(local: Sequence[int], most: int, least: int) -> int:
    """Number of parts into which training cuts a step of these local batches."""
    return sum(_passes(size, most, least) for size in local)


def _largest(local: Sequence[int], most: int, least: int) -> int:
    return max(-(-size // _passes(size, most, least)) for size in local)


def _passes(size: int, most: int, least: int) -> int:
    return max(1, min(-(-size // most), size // least))
