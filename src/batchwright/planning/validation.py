"""Checks of a job and its profiles: whether they fit together, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil
from operator import attrgetter

from batchwright.errors import PlanError
from batchwright.planning.methods.simulated import with_link
from batchwright.planning.resolution import schedule_of, settled, sides
from batchwright.records import DataFacts, Job, NetworkFacts, Precision, Profile
from batchwright.records.job import PASS_KEYS, as_written, check_job, method_keys
from batchwright.records.registries.optimizers import AUTO
from batchwright.records.text.formatting import counted

PLANNING_KEYS = frozenset(
    (
        *("ags", "average_weights", "base_batch", "batch_growth", "checkpoint_seconds"),
        *("checkpoint_steps", "checkpoint_epochs", "clip_norm", "cycle", "decay", "dual"),
        *("epochs", "evaluate_epochs", "global_batch", "goal"),
        *("label_smoothing", "launch", "learning_rate", "least_local_batch", "link", "method"),
        *("micro_batch", "most_local_batch", "port", "rebalance", "rebalance_steps"),
        *("resolutions", "restarts", "sampling", "scaling", "seed", "server", "timeout", "virtual"),
        *("nodes", "ray", "slurm", "track", "warmup_epochs", "warmup_law", "warmup_start"),
        "workers",
    )
)
"""Job keys that may change after measuring, because they do not change what was measured.

Resolutions and workers may change as far as the times of others follow from the measured ones."""


def planning_job(*profiles: Profile) -> Job:
    """The first profile's job, with `workers=auto` where several numbers of workers were measured.

    Such a profile comes from ``workers=auto``, whatever that was resolved to before measuring, or
    from merging several profiles.
    """
    job = profiles[0].job
    if any(profile.job.cuda_graphs == "on" for profile in profiles):
        job = job.model_copy(update={"cuda_graphs": "on"})  # replaying gives the same numbers
    if len({point.workers for profile in profiles for point in profile.steps}) > 1:
        return job.model_copy(update={"workers": "auto"})
    return job


def within_measured(job: Job, profile: Profile) -> Job:
    """The job with a `goal.max_workers` of at most the workers that were measured together; see
    `Profile.bound_for`.
    """
    most = profile.bound_for(job)
    if most == job.goal.max_workers:
        return job
    return job.model_copy(update={"goal": job.goal.model_copy(update={"max_workers": most})})


def as_measured(job: Job, profile: Profile) -> Job:
    """The job, with keys that the probe settles taken from the profile where the job has `auto`."""
    keys = ("precision", *PASS_KEYS)
    settled = {key: getattr(profile.job, key) for key in keys if getattr(job, key) == "auto"}
    return job.model_copy(update=settled)


def measured_job(profiles: Sequence[Profile], job: Job | None) -> Job:
    """The job to plan for: ``job``, with keys that are `auto` taken from the profiles' job.

    The number of workers may stay `auto`. It becomes `auto` where the goal bounds the workers and
    the job has the measured number: which numbers the goal allows is for the plan to see.

    Args:
        profiles: Merged profiles, one for each kind of worker.
        job: As given; `None`: the profiles' own.

    Raises:
        PlanError: The job differs from the measured one in a key that changes measurements.
    """
    measured = planning_job(*profiles)
    prices = (job or measured).goal.prices
    if prices is not None:
        raise PlanError(
            f"goal.prices={prices} is a file, which `batchwright plan` and `run` read: give the "
            "kinds themselves, as goal.kinds='[{kind: t4, count: 4, price: 0.35}]'"
        )
    taken = {}
    for key in Job.model_fields if job else ():
        before, now = getattr(measured, key), getattr(job, key)
        if before == now or (key in PLANNING_KEYS and (key, now) != ("resolutions", "auto")):
            continue
        if key == "optimizer" and before == "auto" and now in AUTO:
            continue  # the update's seconds were measured with each optimizer of `auto`
        if now != "auto":
            raise PlanError(
                f"the profile was measured with {key}={as_written(before)}, the job says "
                f"{key}={as_written(now)}: probe again"
            )
        taken[key] = before
    job = job.model_copy(update=taken) if job else measured
    if job.workers == measured.workers and job.goal.bounds_workers:
        job = job.model_copy(update={"workers": "auto"})
    if job.precision == "auto":
        raise PlanError("the profile does not say in which precision it was measured: probe again")
    return resolved(job, profiles[0].data, precision=job.precision)


def resolved(
    job: Job,
    data: DataFacts,
    *,
    precision: Precision,
    workers: int | None = None,
    least_side: int = 1,
) -> Job:
    """The job with precision, resolutions, epochs and link settled.

    Args:
        job: As given.
        data: The data set, whose image side is the top resolution.
        precision: Number format to compute in.
        workers: Number of workers; `None`: as in the job.
        least_side: Smallest image side that the network takes, in pixels.

    Raises:
        JobError: A list of values is for another number of workers or resolutions.
    """
    known: dict[str, object] = {"precision": precision, "augment": job.augmentation}
    for key in PASS_KEYS:
        if getattr(job, key) == "auto":  # no measurement shows that it pays
            known[key] = "off"
    if workers is not None:
        known["workers"] = workers
    job = with_link(settled(job, data, least_side=least_side).model_copy(update=known))
    check_job(job)
    return job


def idle_keys(job: Job) -> tuple[str, ...]:
    """Keys of the job that have no effect with its method or goal, a line each."""
    usual, found = Job(), []
    for key, methods in method_keys(job.method).items():
        value = attrgetter(key)(job)
        if job.method not in methods and value != attrgetter(key)(usual):
            found.append(
                f"{key}={as_written(value)} does nothing with method={job.method}: it is for "
                f"{' and '.join(methods)}"
            )
    steps = job.rebalance_steps
    if job.rebalance == "published" and steps not in (0, usual.rebalance_steps):
        found.append(
            f"rebalance_steps={steps} does nothing with rebalance=published: it makes the shares "
            "at the end of each epoch alone"
        )
    for key in ("goal.confidence", "goal.least"):
        value = attrgetter(key)(job)
        if job.goal.target is None and value != attrgetter(key)(usual):
            found.append(
                f"{key}={value} does nothing without a target: give goal.accuracy, with "
                "goal.objective=auto or target-accuracy"
            )
    for key in ("betas", "eps"):
        value = getattr(job, key)
        if job.optimizer in ("auto", *AUTO) and value != getattr(usual, key):
            found.append(
                f"{key}={as_written(value)} does nothing with optimizer={job.optimizer}: it is for "
                "adamw"
            )
    judged, where = _judged(job)
    if job.goal.patience is not None and job.goal.patience >= judged:
        advice = f"give at most {judged - 1}" if judged > 1 else "leave it out"
        found.append(
            f"goal.patience={job.goal.patience} does nothing with "
            f"{counted(judged, 'evaluation')}{where}: {advice}"
        )
    if job.checkpoint_epochs is not None and job.checkpoint_epochs > job.asked_epochs:
        found.append(
            f"checkpoint_epochs={job.checkpoint_epochs} does nothing with "
            f"epochs={job.asked_epochs}: give at most {job.asked_epochs}"
        )
    if job.goal.accuracy is not None and job.goal.target is None:
        found.append(
            f"goal.accuracy={job.goal.accuracy:g} does not end the training with "
            f"goal.objective={job.goal.objective}: auto and target-accuracy aim for it"
        )
    stated = job.goal.target is not None and not job.method_spec.same_steps
    if stated and job.goal.confidence != usual.goal.confidence:
        found.append(
            f"goal.confidence={job.goal.confidence:g} does nothing with method={job.method}, which "
            f"is laid out over epochs={job.epochs}: give the epochs that are to be trained"
        )
    if job.method_spec.served and job.workers == 1:
        found.append(
            f"method={job.method} with workers=1 has one group, and so one batch at a time: two "
            "take 2 workers or more"
        )
    return tuple(found)


def _judged(job: Job) -> tuple[int, str]:
    """Number of the evaluations that `goal.patience` counts, and which ones, in words."""
    epochs, every = job.asked_epochs, job.evaluate_epochs
    if not (job.method_spec.cycles and sides(job)):
        return ceil(epochs / every), ""
    before = epochs - schedule_of(job).parts[-1].epochs
    return ceil(epochs / every) - before // every, " at the last resolution and rate"


def precision_of(job: Job) -> Precision:
    """The precision of a job that was resolved."""
    return "float32" if job.precision == "auto" else job.precision


def least_local(network: NetworkFacts) -> int:
    """Fewest samples that a worker can train on; batch statistics need two."""
    return 2 if network.batch_norm else 1


def check_profiles(merged: Sequence[Profile], job: Job) -> None:
    """Refuse merged profiles that hold too little for the job.

    Raises:
        PlanError: The first problem, and what to measure.
    """
    if not all(profile.steps for profile in merged):
        raise PlanError("the profile holds no step times: probe again with a larger probe.budget")
    for profile, side in product(merged, sides(job)):
        check_side(side, profile.network)
        for what, points in (("step times", profile.steps), ("memory peaks", profile.memory)):
            measured = sorted({point.resolution for point in points})
            if side in measured or len(measured) > 1:  # from two on, others follow
                continue
            only = f", only {what} at {measured[0]} px" if measured else ""
            wanted = ",".join(map(str, sorted({side, *measured})))
            raise PlanError(
                f"the profile holds no {what} at {side} px{only}: probe with resolutions={wanted}"
            )


def check_side(side: int, network: NetworkFacts) -> None:
    """Refuse a resolution that the network cannot take."""
    if side < network.least_side:
        raise PlanError(
            f"{network.name} takes images of at least {network.least_side} px, not {side}: "
            f"give resolutions={network.least_side} or more; a network whose grid of positions or "
            "features is fixed takes one resolution only"
        )


def check_batch(batch: int, workers: int, least: int, data: DataFacts) -> None:
    """Refuse a global batch that is larger than the data or too small for the workers."""
    if batch > data.train_samples:
        raise PlanError(
            f"global_batch={batch} is larger than the {data.train_samples} training images of "
            f"{data.name}: give at most {data.train_samples}"
        )
    if batch < workers * least:
        raise PlanError(
            f"global_batch={batch} is too small for {counted(workers, 'worker')} with at "
            f"least {least} images each: give at least {workers * least}"
        )


def local_bounds(job: Job) -> tuple[int, int | None]:
    """Fewest and most samples per step of a worker, as the job bounds them; `None`: no limit."""
    if not job.method_spec.takes("least_local_batch"):
        return 1, None
    return job.least_local_batch or 1, job.most_local_batch


def check_bounds(job: Job, local: Sequence[int]) -> None:
    """Refuse bounds for `dynamic-batch` that leave no way to the global batch."""
    batch, workers = sum(local), len(local)
    least, most = local_bounds(job)
    most = most or batch
    for name, bound, missed, words in (
        ("least_local_batch", least, least * workers > batch, "or more"),
        ("most_local_batch", most, most * workers < batch, "or less"),
    ):
        if missed:
            raise PlanError(
                f"{name}={bound} leaves no way to share a global batch of {batch} between "
                f"{counted(workers, 'worker')}: an even share is {batch / workers:g}; give "
                f"global_batch={bound * workers} {words}, or another {name}"
            )


def check_micro_batches(local: int, most: int, least: int) -> None:
    """Refuse micro-batches of at most ``most`` that leave a part smaller than ``least``."""
    smallest = local // -(-local // most)
    if smallest < least:
        raise PlanError(
            f"micro_batch={most} cuts a local batch of {local} into parts of {smallest}, but "
            f"batch normalization needs {least}: give micro_batch={least + 1} or more"
        )
