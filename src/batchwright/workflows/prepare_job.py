"""Resolves a job for this machine, and refuses at once what cannot work.

A worker that finds a mistake was started in vain, so data, network and port are checked here first.
Modules that need torch are imported inside functions.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.algorithms.dual_batch import largest_extra_time
from batchwright.algorithms.partition import split_evenly
from batchwright.algorithms.simulated_clock import Cluster, step_times
from batchwright.distributed.joining.environments import Started, joined
from batchwright.distributed.launch import refuse_busy_port
from batchwright.errors import ArgumentError, DataError, JobError, PlanError
from batchwright.planning.candidates.learnt import ACCURACY_TAKES
from batchwright.planning.gradient_scaling import check_least, check_step
from batchwright.planning.methods.simulated import stated_line
from batchwright.planning.resolution import preset_doubts, settled, with_recipe
from batchwright.planning.validation import (
    check_batch,
    check_micro_batches,
    idle_keys,
    least_local,
    precision_of,
)
from batchwright.records import DataFacts, Job, Plan
from batchwright.records.agent_rules import room_for
from batchwright.records.documents import change_job, load_job
from batchwright.records.job import as_written, check_job, groups_known, other_keys_come
from batchwright.records.registries.data_sources import DRAWN, source_of
from batchwright.records.registries.networks import least_side
from batchwright.records.run_folder import has_checkpoint, resuming_words
from batchwright.records.text.formatting import counted, shares_between
from batchwright.records.text.problems import described, to_stderr
from batchwright.reporting.render.progress import steps
from batchwright.workflows.prices import check_prices

if TYPE_CHECKING:
    from torch import nn

# Largest factor on the images' side without a warning. Pretrained networks take small images at 7.
_MOST_ENLARGED = 16


def job_of(
    job: Job | str | Path | None, keys: Mapping[str, Any], overrides: Iterable[str] = ()
) -> Job:
    """A job, the job of a YAML file, or the default one, with keys changed.

    Raises:
        FileError: The file cannot be read.
        JobError: A key or a value is wrong.
        ArgumentError: ``job`` is something else.
    """
    if job is not None and not isinstance(job, Job | str | Path):
        raise ArgumentError(
            f"a job is expected, or the path of its YAML file, not {described(job)}: keys go by "
            "name, such as epochs=3, or as bw.Job(epochs=3)"
        )
    with other_keys_come():
        job = job if isinstance(job, Job) else load_job(job)
    return change_job(job, keys, overrides)


def ready(job: Job, *, judged: bool = False) -> Job:
    """Resolve the job for this machine; refuse at once a job that cannot be planned.

    Args:
        job: The job.
        judged: Whether to refuse a network whose outputs have no accuracy, which our own training
            evaluates.

    Raises:
        BatchwrightError: Port, prices, data, batch, warm-up, network or weights are missing or
            wrong.
    """
    _refuse_surroundings(job)
    _refuse_crowd(job)
    job = check_prices(job)
    job = ready_for(job, data_facts(job), judged=judged)
    warn_of_idle_keys(job)
    return job


def data_facts(job: Job) -> DataFacts:
    """Facts of the job's data; images that have not been decoded yet are decoded first.

    Raises:
        DataError: The data are unknown, missing, damaged or inconsistent.
    """
    from batchwright.workload.data.sources import open_data

    with steps() as show:
        return open_data(job, progress=show).facts


def ready_for(job: Job, facts: DataFacts, *, judged: bool = False) -> Job:
    """`ready` with the facts of the job's data.

    Raises:
        BatchwrightError: As `ready` raises.
    """
    if not facts.val_samples:
        raise DataError(f"data={job.data} has no held-out images: set val=0.1 to hold some out")
    if job.global_batch != "auto" and job.global_batch > facts.train_samples:
        raise JobError(
            f"global_batch={job.global_batch} is larger than the {facts.train_samples} training "
            f"images of data={job.data}: choose {facts.train_samples} or less"
        )
    from batchwright.workload.task import check_outputs, network_facts

    # Checked before `auto` is resolved: the warning is for a value that the user gave.
    if job.augment not in ("auto", "none") and source_of(job.data).as_they_come:
        to_stderr(
            f"warning: augment={job.augment} does nothing: images of "
            f"data={job.data} stay as they come, so change them there"
        )
    job = resolve(job, facts)
    built = _check_network(job, facts)
    job = _with_normalization(job, built)
    side = max(sides_of(job, facts))
    network = network_facts(job.network, built, side, facts.channels)
    check_outputs(job, built, side, facts)
    if judged:
        _refuse_without_accuracy(built, side, facts)
    _check_batch(job, facts, least_local(network))
    _check_stated_extra_time(job, facts, least_local(network))
    warn_of_doubts(job, facts)
    _warn_of_emulation(job)
    return job


def _with_normalization(job: Job, network: nn.Module) -> Job:
    """The job with the normalization that the weights it starts from were trained with.

    Where it is given, the job's own images tell it, or nothing is told, the job stays as it is. A
    line on stderr says which it is.
    """
    pretrained = bool(job.network_args.get("pretrained"))
    if job.normalize != "auto" or source_of(job.data).as_they_come:
        return job
    if not (pretrained or job.weights):
        return job
    from batchwright.workload.starting_weights import file_normalization, library_normalization

    told = file_normalization(job.weights) if job.weights else None
    if told is None and pretrained:
        told = library_normalization(job.network, network)
    if told is None:
        to_stderr(
            "note: the weights do not tell how images were normalized for them, so mean and "
            "standard deviation are those of the training images; normalize= gives others"
        )
        return job
    to_stderr(
        f"images are normalized as for the weights: normalize={as_written(told)}; normalize=data "
        "takes mean and standard deviation of the training images"
    )
    return job.model_copy(update={"normalize": told})


def _check_batch(job: Job, data: DataFacts, least: int) -> None:
    """Refuse given batches that are too small for workers, normalization or parts of a step."""
    if job.global_batch == "auto" and job.micro_batch == "auto":
        return
    # With goal.kinds or goal.max_workers the plan chooses the workers, and may choose one.
    open_ = job.workers == "auto" or job.goal.bounds_workers
    workers, local = 1 if open_ else int(job.workers), least
    if job.global_batch != "auto":
        check_batch(job.global_batch, workers, least, data)
        local = least if open_ else -(-job.global_batch // workers)
    if job.micro_batch != "auto":
        check_micro_batches(local, job.micro_batch, least)
    if job.global_batch != "auto" and not job.method_spec.served:
        check_step(job, split_evenly(job.global_batch, workers), least, least)
        check_least(job, job.global_batch)


def warn_of_idle_keys(job: Job) -> None:
    """Print a warning for each key that the job's method does not use."""
    for line in idle_keys(job):
        to_stderr(f"warning: {line}")


def _refuse_without_accuracy(network: nn.Module, side: int, data: DataFacts) -> None:
    """Refuse a network whose outputs have no accuracy, which the first evaluation would find."""
    import torch

    from batchwright.probing.measure.evaluation import answers
    from batchwright.workload.task import outputs_of

    labels = torch.zeros(2)  # two, since networks may drop the batch dimension of a single image
    outputs = outputs_of(network, side, data.channels, images=len(labels))
    if answers(outputs, labels, len(data.classes)) is None:
        raise JobError(
            "the network's answers have no held-out accuracy, which takes "
            f"{ACCURACY_TAKES}: give such a network, or train in a loop of your own, which "
            "evaluates by its own measures"
        )


def warn_of_shortfall(plan: Plan) -> None:
    """Print a warning if a plan is expected to stay below its `goal.accuracy`.

    Where trials make that nearly certain of a target, no plan is made; elsewhere one may promise
    far less than its target.
    """
    goal, reached = plan.job.goal, plan.chosen and plan.chosen.accuracy
    if goal.accuracy is None or not reached or reached.value >= goal.accuracy:
        return
    aimed = goal.target is not None
    more = "; more epochs or time may reach it: --explain says how likely it is" if aimed else ""
    to_stderr(
        f"warning: the plan is expected to reach {shares_between(reached)}, which is below "
        f"goal.accuracy={goal.accuracy:g}{more}"
    )


def warn_of_doubts(job: Job, data: DataFacts) -> None:
    """Print warnings for keys that do not suit the data: val, accuracy, resolutions, preset.

    The plan's reasons name doubts about a preset, too.
    """
    drawn = source_of(job.data).takes_val and data.split.endswith(DRAWN)
    if job.val is not None and not drawn:
        to_stderr(
            f"warning: val={job.val:g} does nothing: {data.name} has held-out images of its own "
            f"({data.split})"
        )
    target, guessed = job.goal.target, data.guessing
    if target is not None and target <= guessed:
        even = data.even_classes == len(data.classes)
        where = f"classes={len(data.classes)}" if even else "the commonest class has that share"
        to_stderr(
            f"warning: goal.accuracy={target:g} is reached by guessing, which is right in "
            f"{guessed:.3g} of all cases where {where}: give more, or training "
            "ends with its first evaluation"
        )
    top = max(sides_of(job, data))
    if top > _MOST_ENLARGED * data.side:
        to_stderr(
            f"warning: resolutions={top} for images of {data.name}, which have {data.side} px: "
            "enlarging adds time and memory by the square, and nothing to see"
        )
    for doubt in preset_doubts(job.preset, data) if job.preset else ():
        to_stderr(f"warning: cycle.preset={job.cycle.preset} {doubt}")


def _warn_of_emulation(job: Job) -> None:
    """Print a warning if the job names a number format that this processor emulates."""
    from batchwright.workload.host import emulates, resolve_device

    if resolve_device(job.device).type == "cpu" and emulates(precision_of(job)):
        to_stderr(
            f"warning: precision={job.precision}: this processor has no instructions for it, so "
            "steps take several times as long as in float32; precision=auto takes the fastest "
            "format that it has"
        )


def resolve(job: Job, data: DataFacts) -> Job:
    """The job with every ``auto`` replaced that needs no measurements.

    ``workers=auto`` stays, and the probe measures several numbers of workers, unless another
    launcher has started the workers: then it becomes their number.

    Raises:
        JobError: The device is missing, or keys contradict the machine or what was started.
    """
    from batchwright.workload.host import resolve_device
    from batchwright.workload.passes.compilation import what_is_missing

    device = resolve_device(job.device)
    if job.batch_norm == "synchronized" and device.type == "cpu":
        raise JobError(
            "batch_norm=synchronized computes on GPUs only: on the CPU leave it at worker; the "
            "statistics are merged over the workers for evaluation in any case"
        )
    if job.compile == "on" and (missing := what_is_missing(device)):
        raise JobError(f"compile=on needs {missing}: get one, or give compile=auto or off")
    if job.cuda_graphs == "on" and device.type == "cpu":
        raise JobError("cuda_graphs=on is for GPUs: on the CPU leave it at auto")
    workers = 1 if job.launcher.one_worker else job.workers
    started = joined() if job.launcher.joins else None
    if started is not None and workers != started.size:
        if workers != "auto":
            raise JobError(
                f"workers={workers}, and {started.by} has started {started.size}: start {workers} "
                f"({started.how}), or say workers={started.size}"
            )
        workers = started.size
    if started is None and workers != "auto" and job.launcher.processes and not job.launcher.submit:
        resolve_device(job.device, workers - 1)  # refuses if the last worker has no GPU of its own
    known = {"device": device.type, "workers": workers, "augment": job.augmentation}
    # The least side of networks that are not ours is found later, once they are built.
    job = settled(with_recipe(job), data, least_side=least_side(job.network))
    job = job.model_copy(update=known)
    check_job(job)
    return job


def _refuse_surroundings(job: Job) -> None:
    """Refuse a wrong number of threads in the environment, and a port that is in use.

    If another launcher has started the workers, the port may be its own, and is not checked.
    """
    from batchwright.workload.host import given_threads, openmp_threads

    given_threads()
    openmp_threads()
    if not (job.launcher.joins and joined()):
        refuse_busy_port(job.port)


def _refuse_crowd(job: Job) -> None:
    """Refuse more worker processes than a machine of this size can sensibly run."""
    from batchwright.workload.host import usable_cores

    if job.workers == "auto" or not job.launcher.processes or (job.launcher.joins and joined()):
        return
    cores = usable_cores()
    room = room_for(cores)
    if job.workers > room:
        raise JobError(
            f"workers={job.workers} on this machine, which has {counted(cores, 'core')}: say "
            f"workers={room} or less, start them on several hosts (torchrun, srun), or plan for "
            "more than are measured with goal.max_workers and link"
        )


def _check_stated_extra_time(job: Job, data: DataFacts, least: int) -> None:
    """Refuse an extra time that, by the stated time of a step, makes the small batch too small."""
    line = stated_line(job, max(sides_of(job, data)))
    if line is None or not line[1] or not groups_known(job):
        return
    small, extra = int(job.dual.small_workers), float(job.dual.extra_time)
    given = job.dual.large_batches
    most = largest_extra_time(
        *line,
        given[-1] if isinstance(given, tuple) else data.train_samples,
        small_workers=small,
        large_workers=int(job.workers) - small,
        least=least,
    )
    if small and extra > max(1.0, most):
        raise JobError(
            f"dual.extra_time={extra:g} with the small batch on {small} of {job.workers} workers "
            f"wants a local batch below {least} by the stated time of a step: give at most "
            f"{floor(1e4 * most) / 1e4:g}, or more small-batch workers"
        )


def check_training(plan: Plan, *, resumed: Path | None = None) -> None:
    """Refuse a plan that cannot be trained here, before anything is written or started.

    Args:
        plan: The plan.
        resumed: Folder of the run that goes on, for which another launcher may have started another
            number of workers than planned; `None`: a run begins.

    Raises:
        BatchwrightError: Port, workers, data, network or weights do not suit the plan, or the
            network's outputs have no accuracy.
    """
    if plan.workers > 1 and plan.job.launcher.one_worker:
        raise PlanError(f"the plan is for {plan.workers} workers: launch=in-process is one")
    if isinstance(plan.job.workers, int) and plan.job.workers != plan.workers:
        raise PlanError(
            f"the plan's table has {plan.workers} workers and its job {plan.job.workers}: "
            "plan again"
        )
    if plan.job.launcher.simulated:
        Cluster(plan.job, plan.workers)
        step_times(plan)
    elif plan.job.launcher.joins and (started := joined()) is not None:
        if resumed is None:
            check_size(plan, started)
    else:
        _refuse_other_machines(plan)
        if resumed is not None:
            _refuse_fewer_gpus(plan, resumed)
    goes_on = resumed is not None and has_checkpoint(resumed)
    network = check_workload(plan, goes_on=goes_on)
    _refuse_without_accuracy(network, plan.top_resolution, plan.data)


def check_size(plan: Plan, started: Started) -> None:
    """Refuse a plan whose number of workers another launcher has not started.

    Raises:
        PlanError: The numbers differ.
    """
    if plan.workers != started.size:
        raise PlanError(
            f"the plan is for {counted(plan.workers, 'worker')}, and {started.by} has started "
            f"{started.size}: start {plan.workers} ({started.how}), or plan again with "
            f"workers={started.size}"
        )


def _refuse_other_machines(plan: Plan) -> None:
    """Refuse a plan for more workers, or more kinds of workers, than this machine has.

    Only plans for workers that were not measured, or are of several kinds, can be such.
    """
    from batchwright.workload.host import usable_cores

    assumed = any(
        one.assumed and (one.workers, one.kinds) == (plan.workers, plan.kinds)
        for one in plan.considered
    )
    if not (assumed or len(plan.kinds) > 1):
        return
    here = usable_cores()
    if plan.job.device == "cuda":
        import torch

        here = torch.cuda.device_count()
    if plan.workers > here or len(plan.kinds) > 1:
        kinds = ", ".join(f"{one.count} of {one.kind}" for one in plan.kinds)
        raise PlanError(
            f"the plan is for {plan.workers} workers{f' ({kinds})' if kinds else ''}, and training "
            f"starts its workers on this machine, which has room for {here} of one kind: plan "
            f"with workers={here} or less"
        )


def _refuse_fewer_gpus(plan: Plan, folder: Path) -> None:
    """Refuse to continue a run with fewer GPUs than workers, and name the command that does."""
    if plan.job.device != "cuda":
        return
    import torch

    here = torch.cuda.device_count()
    if not 0 < here < plan.workers:
        return
    hint = f"start it when {plan.workers} are there"
    if plan.server is None:  # a parameter server's groups need all their workers
        launch = () if plan.job.launcher.joins else ("launch=auto",)
        words = shlex.join([*resuming_words(folder, plan.job), *launch])
        hint = (
            f"to continue with {here}, start `torchrun --standalone --nproc-per-node {here} "
            f"-m batchwright {words}`"
        )
    visible = "1 GPU is" if here == 1 else f"{here} GPUs are"
    raise PlanError(f"{folder} has {plan.workers} workers, and here {visible} visible: {hint}")


def check_workload(plan: Plan, *, goes_on: bool = False) -> nn.Module:
    """Refuse a plan made for other data than the job's, or whose network cannot be built here.

    Args:
        plan: The plan.
        goes_on: Whether a checkpoint replaces the weights that the job starts from.

    Returns:
        The network.

    Raises:
        BatchwrightError: Port, data, network or weights do not suit the plan.
    """
    _refuse_surroundings(plan.job)
    from batchwright.workload.task import check_outputs

    facts = data_facts(plan.job)
    if facts.digest != plan.data.digest:
        raise PlanError(
            f"the plan was made for other data than data={plan.job.data}: "
            f"{plan.data.train_samples} training images of {plan.data.name} "
            f"(digest {plan.data.digest[:12]}), here {facts.train_samples} of {facts.name} "
            f"({facts.digest[:12]}); probe and plan again, or say data=KIND:PATH"
        )
    job = plan.job.model_copy(update={"weights": None}) if goes_on else plan.job
    network = _check_network(job, facts)
    check_outputs(plan.job, network, plan.top_resolution, facts)
    _warn_of_emulation(job)
    return network


def sides_of(job: Job, data: DataFacts) -> tuple[int, ...]:
    """The training resolutions, in pixels, rising; with `auto` that of the data alone."""
    return (data.side,) if job.resolutions == "auto" else job.resolutions


def _check_network(job: Job, data: DataFacts) -> nn.Module:
    """Build the job's network and loss; a wrong name, file or pattern is refused at once."""
    from batchwright.workload.extras import some_names
    from batchwright.workload.loss import build_loss, check_loss
    from batchwright.workload.passes.recomputation import recompute
    from batchwright.workload.starting_weights import freeze, load_weights
    from batchwright.workload.task import build_network, check_sides

    sides = sides_of(job, data)
    network = build_network(
        job.network,
        classes=len(data.classes),
        side=max(sides),
        dropout=job.dropout,
        seed=job.seed,
        arguments=job.network_args,
    )
    if len(sides) > 1:
        check_sides(job.network, network, sides, data.channels)
    if job.weights is not None:
        left = load_weights(network, job.weights)
        if left:
            to_stderr(f"not in {job.weights}, so trained from scratch: {some_names(left, 4)}")
    freeze(network, job.frozen)
    if job.activation_checkpointing == "on":
        recompute(network)
    check_loss(job, build_loss(job), len(data.classes))
    return network
