"""Puts the choices together: a profile and a goal become a plan, with a reason for each choice.

Pure: no clock, no host, no random numbers, so the same input gives the same plan everywhere.

    batchwright plan PROFILE.json --explain
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from batchwright.errors import PlanError
from batchwright.planning import reasons
from batchwright.planning.batch_size import candidates, knee_point, kneedle, steps_per_epoch
from batchwright.planning.learning_rate import make_rule
from batchwright.planning.partition import apportion
from batchwright.prediction.fit import interval
from batchwright.prediction.memory import MemoryModel, fit_memory
from batchwright.prediction.step_time import StepTimeModel, fit_step_time
from batchwright.records import (
    DataFacts,
    Job,
    LearningRateRule,
    NetworkFacts,
    Plan,
    Precision,
    Prediction,
    Profile,
    Reason,
    Stage,
)

PLANNING_KEYS = frozenset(
    {
        "base_batch",
        "checkpoint_seconds",
        "clip_norm",
        "decay",
        "epochs",
        "evaluate_epochs",
        "global_batch",
        "goal",
        "label_smoothing",
        "launch",
        "learning_rate",
        "micro_batch",
        "port",
        "restarts",
        "scaling",
        "seed",
        "timeout",
        "warmup_epochs",
    }
)
"""Job keys that may change after measuring, because they do not change what was measured."""


def make_plan(profile: Profile, job: Job | None = None) -> Plan:
    """Decide how to train the profile's workload.

    Args:
        profile: What was measured.
        job: The job to plan for, if not the profile's own; may differ in `PLANNING_KEYS` only.

    Returns:
        A plan with a prediction for every batch considered and a reason for every choice.

    Raises:
        PlanError: The job is not the one measured, the profile contradicts itself or holds too
            little, or no batch fits the data and the memory.
        JobError: The warm-up asked for is longer than the training.
    """
    job = _measured_job(profile, job)
    _check_profile(profile, job)
    case = _Case.of(profile, job)
    considered = [case.predict(batch) for batch in case.global_batches()]
    chosen, why = _choose(case, considered)
    rule = make_rule(job, chosen.global_batch_size, job.epochs)
    stage = _stage(job, chosen.resolution, rule, case.local_batches(chosen.global_batch_size))
    stage = stage.model_copy(
        update={
            "micro_batch_size": chosen.micro_batch_size,
            "predicted_epoch_seconds": chosen.epoch_seconds,
            "predicted_bytes": chosen.peak_bytes,
        }
    )
    noise = profile.noise.noise_scale if profile.noise else None
    return _plan(
        job,
        profile.data,
        profile.network,
        rule,
        stage,
        considered=tuple(considered),
        reasons=(
            reasons.measured_workers(profile, chosen),
            reasons.resolution(chosen.resolution, profile.data),
            reasons.measured_precision(profile, _precision(job)),
            why,
            reasons.local_batches(stage),
            reasons.memory(chosen, case.limit, asked=job.goal.memory is not None),
            reasons.trust(chosen, case.times.compute),
            *reasons.learning_rate(job, rule, stage),
            *([reasons.noise_scale(stage.global_batch_size, noise)] if noise else []),
        ),
    )


def plan_without_profile(
    job: Job,
    data: DataFacts,
    network: NetworkFacts,
    *,
    local_batch_sizes: Sequence[int] | None = None,
) -> Plan:
    """A plan that trains as asked, where nothing was measured: it predicts nothing.

    What the job leaves open is assumed: one worker, float32, the base batch or, where the data is
    too small for it, the largest batch that leaves ``goal.least_steps`` steps per epoch.

    Args:
        job: What to train; its ``workers`` must fit ``local_batch_sizes`` if both are given.
        data: The data set.
        network: The network.
        local_batch_sizes: Samples per step of each worker, in rank order; unset: equal shares of
            the global batch.

    Raises:
        PlanError: Batches, workers and data do not fit together.
        JobError: The warm-up asked for is longer than the training.
    """
    local = tuple(local_batch_sizes or ())
    workers = len(local) if job.workers == "auto" and local else job.workers
    workers = 1 if workers == "auto" else workers
    if local and len(local) != workers:
        raise PlanError(f"{len(local)} local batches {list(local)} for workers={workers}")
    least = _least_local(network)
    if job.global_batch == "auto":
        most = data.train_samples // job.goal.least_steps
        batch = sum(local) or max(workers * least, min(job.base_batch, most))
    else:
        batch = job.global_batch
    if local and sum(local) != batch:
        raise PlanError(f"local batches {list(local)} do not add up to global_batch={batch}")
    _check_batch(batch, workers, least, data)
    local = local or tuple(apportion([1] * workers, batch))
    if min(local) < least:
        raise PlanError(f"local batches {list(local)}: each worker needs at least {least}")
    job = _resolved(job, data, workers, job.precision if job.precision != "auto" else "float32")
    side = _check_side(job, network)
    rule = make_rule(job, batch, job.epochs)
    stage = _stage(job, side, rule, local)
    if job.micro_batch != "auto":
        parts = _micro_batches(max(local), job.micro_batch, least)
        stage = stage.model_copy(update={"micro_batch_size": max(parts)})
    return _plan(
        job,
        data,
        network,
        rule,
        stage,
        reasons=(
            reasons.unmeasured_batch(job, stage, given=local_batch_sizes is not None),
            reasons.resolution(side, data),
            *reasons.learning_rate(job, rule, stage),
        ),
    )


# ---------------------------------------------------------------------------- the input, checked


def _measured_job(profile: Profile, job: Job | None) -> Job:
    """``job`` with what is `auto` taken from the profile's; refused where it was not measured."""
    measured = profile.job
    taken = {}
    for key in Job.model_fields if job else ():
        before, now = getattr(measured, key), getattr(job, key)
        if key in PLANNING_KEYS or before == now:
            continue
        if now != "auto":
            raise PlanError(
                f"the profile was measured with {key}={_shown(before)}, the job says "
                f"{key}={_shown(now)}: probe again"
            )
        taken[key] = before
    job = job.model_copy(update=taken) if job else measured
    if measured.workers not in ("auto", profile.cluster.workers):
        raise PlanError(
            f"the profile contradicts itself: workers={measured.workers} in its job, "
            f"{profile.cluster.workers} in its cluster: probe again"
        )
    if job.launch == "in-process" and profile.cluster.workers > 1:
        raise PlanError(
            f"launch=in-process runs one worker, the profile was measured with "
            f"{profile.cluster.workers}: probe again with workers=1, or give launch=local"
        )
    if job.precision == "auto":
        raise PlanError("the profile does not say in which precision it was measured: probe again")
    return _resolved(job, profile.data, profile.cluster.workers, job.precision)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _resolved(job: Job, data: DataFacts, workers: int, precision: Precision) -> Job:
    return job.model_copy(
        update={
            "workers": workers,
            "precision": precision,
            "augment": job.augmentation,
            "resolutions": (data.side,) if job.resolutions == "auto" else job.resolutions,
        }
    )


def _precision(job: Job) -> Precision:
    """The precision of a job that was resolved."""
    return "bfloat16" if job.precision == "bfloat16" else "float32"


def _check_profile(profile: Profile, job: Job) -> None:
    side = _check_side(job, profile.network)
    others = {point.workers for point in profile.steps} - {profile.cluster.workers}
    others |= {one.workers for one in profile.collectives} - {profile.cluster.workers}
    if others:
        raise PlanError(
            f"the profile contradicts itself: {profile.cluster.workers} workers in its cluster, "
            f"{sorted(others)[0]} in its measurements: probe again"
        )
    for what, points in (("step times", profile.steps), ("memory peaks", profile.memory)):
        keys = [(point.resolution, point.local_batch_size) for point in points]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice:
            raise PlanError(
                f"the profile holds two {what} for {twice[0]} px and local batch {twice[1]}: "
                "probe again"
            )
        if not any(resolution == side for resolution, _ in keys):
            raise PlanError(f"the profile holds no {what} at {side} px: probe again")


def _check_side(job: Job, network: NetworkFacts) -> int:
    """The highest resolution of a resolved job, in pixels."""
    side = max(job.resolutions)
    if not isinstance(side, int) or side < network.least_side:
        raise PlanError(
            f"{network.name} takes images of at least {network.least_side} px, not {side}: "
            f"give resolutions={network.least_side} or more"
        )
    return side


def _least_local(network: NetworkFacts) -> int:
    """Fewest samples that a worker can train on; batch statistics need two."""
    return 2 if network.batch_norm else 1


def _check_batch(batch: int, workers: int, least: int, data: DataFacts) -> None:
    if batch > data.train_samples:
        raise PlanError(
            f"global_batch={batch} is larger than the {data.train_samples} training images of "
            f"{data.name}: give at most {data.train_samples}"
        )
    if batch < workers * least:
        raise PlanError(
            f"global_batch={batch} is too small for {workers} worker(s) with at least {least} "
            f"images each: give at least {workers * least}"
        )


def _micro_batches(local: int, most: int, least: int) -> list[int]:
    """A local batch cut into as few and as even micro-batches of at most ``most`` as can be."""
    parts = apportion([1] * -(-local // most), local)
    if min(parts) < least:
        raise PlanError(
            f"micro_batch={most} cuts a local batch of {local} into parts of {min(parts)}, but "
            f"batch normalization needs {least}: give micro_batch={least + 1} or more"
        )
    return parts


# -------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class _Case:
    """What is known when batches are compared."""

    job: Job
    data: DataFacts
    workers: int
    least_local: int
    resolution: int
    times: StepTimeModel
    memory: MemoryModel
    limit: int  # bytes that one worker may use

    @classmethod
    def of(cls, profile: Profile, job: Job) -> _Case:
        side = _check_side(job, profile.network)
        return cls(
            job=job,
            data=profile.data,
            workers=profile.cluster.workers,
            least_local=_least_local(profile.network),
            resolution=side,
            times=fit_step_time([p for p in profile.steps if p.resolution == side]),
            memory=fit_memory([p for p in profile.memory if p.resolution == side]),
            limit=job.goal.memory or profile.cluster.memory_bytes,
        )

    def global_batches(self) -> list[int]:
        """Batches to compare, rising; the one asked for among them."""
        if self.data.train_samples < self.workers * self.least_local:
            raise PlanError(
                f"{self.data.name} has {self.data.train_samples} training images, too few for "
                f"{self.workers} worker(s) with at least {self.least_local} each: "
                "give fewer workers"
            )
        asked = self.job.global_batch
        found = self._candidates()
        if asked == "auto":
            if not found:
                raise PlanError(self._why_none())
            return found
        _check_batch(asked, self.workers, self.least_local, self.data)
        return sorted({*found, asked})

    def _candidates(self) -> list[int]:
        most_global = self.data.train_samples // self.job.goal.least_steps
        most_local = None if self.job.micro_batch != "auto" else self.largest_micro_batch
        for least in (max(self.least_local, self.times.compute.batches[0]), self.least_local):
            found = candidates(self.workers, most_global, least_local=least, most_local=most_local)
            if found:  # batches smaller than the measured ones only where nothing else is left
                return found
        return []

    def _why_none(self) -> str:
        most_global = self.data.train_samples // self.job.goal.least_steps
        smallest = self.workers * self.least_local
        if most_global < smallest:
            return (
                f"{self.data.train_samples} training images leave fewer than "
                f"goal.least_steps={self.job.goal.least_steps} steps an epoch even at the smallest "
                f"global batch of {smallest}: give goal.least_steps="
                f"{self.data.train_samples // smallest} or less, or fewer workers"
            )
        return self._does_not_fit(self.least_local)

    def _does_not_fit(self, micro: int) -> str:
        return (
            f"{micro} images at once on a worker may take "
            f"{reasons.mebibytes(self.memory.predict(micro).high)} "
            f"({reasons.mebibytes(self.memory.line.intercept)} of it whatever the batch), the "
            f"limit is {reasons.mebibytes(self.limit)}: raise goal.memory, or train a smaller "
            "network or resolution"
        )

    @property
    def largest_micro_batch(self) -> int:
        """Most samples at once on a worker, by memory; 0 if none fit."""
        return self.memory.largest_batch(self.limit, self.data.train_samples)

    def local_batches(self, batch: int) -> tuple[int, ...]:
        """Equal shares of a global batch."""
        return tuple(apportion([1] * self.workers, batch, least=self.least_local))

    def micro_batches(self, local: int) -> list[int]:
        """How a local batch is cut to fit the memory, or as asked."""
        asked = self.job.micro_batch
        most = max(self.largest_micro_batch, self.least_local) if asked == "auto" else asked
        parts = _micro_batches(local, most, self.least_local)
        if not self.memory.fits(max(parts), self.limit):
            raise PlanError(self._does_not_fit(max(parts)))
        return parts

    def predict(self, batch: int) -> Prediction:
        """What a global batch would cost."""
        local = max(self.local_batches(batch))
        parts = self.micro_batches(local)
        least = self.workers * self.least_local
        steps, last = steps_per_epoch(self.data.train_samples, batch, least)
        last_local = -(-last // self.workers)
        last_parts = apportion([1] * -(-last_local // max(parts)), last_local)
        step = self.times.predict(local, parts)
        last_step = self.times.predict(last_local, last_parts)
        seconds = (steps - 1) * step.value + last_step.value
        return Prediction(
            workers=self.workers,
            global_batch_size=batch,
            local_batch_size=local,
            micro_batch_size=max(parts),
            resolution=self.resolution,
            steps_per_epoch=steps,
            step_seconds=step,
            epoch_seconds=interval(seconds, step.high / step.value - 1),
            peak_bytes=self.memory.predict(max(parts)),
            extrapolated=self.times.extrapolates(max(parts)),
        )


def _choose(case: _Case, considered: Sequence[Prediction]) -> tuple[Prediction, Reason]:
    """The candidate to train with, and why."""
    by_batch = {one.global_batch_size: one for one in considered}
    seconds = {batch: one.epoch_seconds.value for batch, one in by_batch.items()}
    goal = case.job.goal
    if case.job.global_batch != "auto":
        chosen = by_batch[case.job.global_batch]
        return chosen, reasons.asked_batch(chosen, goal)
    if goal.objective == "time":
        chosen = by_batch[min(seconds, key=lambda batch: (seconds[batch], batch))]
        return chosen, reasons.fastest_batch(chosen, goal)
    knee = knee_point(seconds, goal.doubling_gain)
    chosen = by_batch[knee if knee is not None else max(by_batch)]
    doubled = by_batch.get(2 * chosen.global_batch_size) if knee is not None else None
    other = kneedle([log2(batch) for batch in seconds], list(seconds.values()))
    return chosen, reasons.knee_batch(
        chosen, doubled, goal, kneedle_batch=None if other is None else round(2**other)
    )


def _stage(job: Job, side: int, rule: LearningRateRule, local: tuple[int, ...]) -> Stage:
    return Stage(
        epochs=job.epochs,
        resolution=side,
        learning_rate=rule.peak,
        dropout=job.dropout,
        augmentation=job.augmentation,
        local_batch_sizes=local,
        micro_batch_size=max(local),
    )


def _plan(
    job: Job,
    data: DataFacts,
    network: NetworkFacts,
    rule: LearningRateRule,
    stage: Stage,
    *,
    reasons: tuple[Reason, ...],
    considered: tuple[Prediction, ...] = (),
) -> Plan:
    return Plan(
        job=job,
        data=data,
        network=network,
        method=job.method,
        update=job.optimizer,
        precision=_precision(job),
        learning_rate=rule,
        stages=(stage,),
        considered=considered,
        reasons=reasons,
    )
