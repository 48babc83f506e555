"""Batch, accumulation, rate and shares for a trainer with its own loop; checks of its loader."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal
from weakref import ref

from batchwright.errors import ArgumentError, BatchwrightError, Interrupted, PlanError, one_line
from batchwright.records import Plan, Profile
from batchwright.records.documents import record_of
from batchwright.records.text.formatting import counted
from batchwright.records.text.problems import to_stderr
from batchwright.training.batches.feeding import refuse_iterable
from batchwright.training.batches.following import Follower
from batchwright.training.batches.recovering import Recovering
from batchwright.training.batches.unequal import Sampler, place_among_workers, share_numbers
from batchwright.workflows.exports.trainers import refuse_what_trainers_cannot
from batchwright.workflows.verbs import plan as decide
from batchwright.workflows.verbs import probe

Shares = Literal["follow", "equal"] | Sequence[float]

_ORDERS = {"RandomSampler": True, "SeedableRandomSampler": True, "SequentialSampler": False}
"""Samplers of a user's loader that ours can replace, and whether they shuffle."""

_LOADERS = ("torch", "torchdata", "accelerate")
"""Packages whose loaders return batches just as data set and `collate_fn` make them."""

_LOADING = (  # attributes of a user's loader that ours gets, too
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "generator"),
)


@dataclass(frozen=True)
class Arrangement:
    """How a trainer's steps are made up.

    Attributes:
        global_batch: Samples per step, over all workers and passes.
        passes: Forward passes of each worker in a step, over which gradients accumulate.
        shares: Relative share of each worker, in rank order; ``None``: equal.
        follow: Whether the shares follow the workers' speeds from epoch to epoch.
        rate: Factor on the user's own learning rates.
    """

    global_batch: int
    passes: int
    shares: tuple[float, ...] | None
    follow: bool
    rate: float = 1.0

    def sampler(self, data: Any, *, rank: int, workers: int, least: int, **order: Any) -> Sampler:
        """A worker's sampler; the other arguments are those of `Sampler`."""
        return Sampler(
            data,
            self.global_batch,
            shares=self.shares,
            passes=self.passes,
            rank=rank,
            workers=workers,
            least=least,
            **order,
        )

    def resumed(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A sampler's state to go on from: its shares count only if they follow speed here, too."""
        return state if self.follow else {**state, "shares": ()}

    def words(self, workers: int, *, batch: str, accumulation: str) -> str:
        """The arrangement in a line, by the trainer's names for batch and accumulation."""
        local = self.global_batch / workers / self.passes
        follow = ", shares follow speed" if self.follow and workers > 1 else ""
        return (
            f"{batch}={local:g} on each of {counted(workers, 'worker')}, "
            f"{accumulation}={self.passes}, learning rate times {self.rate:.3g}{follow}"
        )


def read_shares(shares: Shares | None) -> Shares | None:
    """The user's `shares`: a word or ``None`` unchanged, a list as numbers.

    Raises:
        ArgumentError: They are neither a word nor numbers.
    """
    return shares if shares is None or isinstance(shares, str) else share_numbers(shares)


def refuse_unused(keys: Mapping[str, Any], trainer: str, *, auto: bool, others: str) -> None:
    """Refuse job keys, or misspelled arguments, where no automatic plan would take them.

    Raises:
        ArgumentError: There are some; ``others`` names the arguments that need no such plan.
    """
    if keys and not auto:
        raise ArgumentError(
            f"{', '.join(f'{key}=' for key in keys)} of bw.{trainer}: job keys go with "
            f'"auto", which probes and plans; without it there are {others}'
        )


def arranged(
    plan: Plan | str | Path | None,
    shares: Shares | None,
    *,
    trainer: str,
    workers: int,
    batch: int,
    passes: int,
    samples: int,
    words: Mapping[str, str],
) -> Arrangement:
    """The arrangement of a plan, or without a plan that of the trainer's own settings.

    Args:
        plan: A plan, or its file; ``None``: the trainer's own batch and accumulation stay.
        shares: The user's choice; ``None``: that of the plan, or without a plan ``"follow"``.
        trainer: The trainer's name.
        workers: Number of the trainer's processes.
        batch: Samples of a pass on each of them, in the trainer's settings.
        passes: Passes that it accumulates over.
        samples: Size of its training set.
        words: The trainer's names for ``batch`` and ``accumulation``.

    Raises:
        ArgumentError: The shares are wrong.
        PlanError: The plan is for other workers or data, or no trainer can follow it; or a step of
            the trainer's own settings has more samples than the training set.
    """
    planned: tuple[int, ...] | None
    if plan is None:
        rate, total, planned = 1.0, batch * passes * workers, None
        follow = shares in (None, "follow")
        if total > samples:
            most = samples // (workers * passes)
            fewer = f"fewer {'workers or ' * (workers > 1)}passes"
            if most:
                fewer = f"{words['batch']}={most} or less"
            raise PlanError(
                f"{words['batch']}={batch} on {counted(workers, 'worker')} with "
                f"{words['accumulation']}={passes} makes steps of {total} samples, and the "
                f"training set has {samples}: try {fewer}"
            )
    else:
        plan = record_of(plan, Plan, trainer, "plan")
        refuse_what_trainers_cannot(plan, trainer)
        row = plan.stages[0]
        if plan.workers != workers:
            raise PlanError(
                f"the plan is for {counted(plan.workers, 'worker')} and {trainer} has {workers}: "
                f"start as many, or plan again with workers={workers}"
            )
        if plan.data.train_samples != samples:
            raise PlanError(
                f"the plan is for {plan.data.train_samples} training samples and the data set has "
                f"{samples}: probe and plan again for this data"
            )
        wanted = ceil(max(row.local_batch_sizes) / row.micro_batch_size)
        if passes not in (1, wanted):
            raise PlanError(
                f"{words['accumulation']}={passes} and the plan accumulates over {wanted}: leave "
                "it out, or plan again with another micro_batch="
            )
        total, passes, planned = row.global_batch_size, wanted, row.local_batch_sizes
        rate = plan.learning_rate.peak / plan.learning_rate.base
        follow = bool(plan.method_spec.balancer) if shares is None else shares == "follow"
    given = None if shares is None or isinstance(shares, str) else tuple(shares)
    if shares is not None and given is None and shares not in ("follow", "equal"):
        raise ArgumentError(
            f'shares={shares!r}: give "follow", "equal" or a number for each worker'
        )
    if shares == "equal":
        planned = None
    return Arrangement(total, passes, given or planned, follow and workers > 1, rate)


def shuffled(loader: Any, trainer: str) -> bool:
    """Whether a user's loader shuffles; refuses one whose order of samples cannot be replaced.

    Raises:
        DataError: Its data set can only be iterated.
        PlanError: It is no plain loader, changes its batches, or has a sampler of the user's own.
    """
    data = getattr(loader, "dataset", None)
    if data is None or not hasattr(loader, "collate_fn"):
        raise PlanError(
            f"{trainer} trains on {type(loader).__name__}: each sample exactly once takes one "
            "torch.utils.data.DataLoader; combine data sets, such as by ConcatDataset, not loaders"
        )
    refuse_iterable(data)
    _refuse_own_batches(loader)
    batches = _batches_of(loader)
    if batches is None:
        raise PlanError(
            "the loader has batch_size=None, so that its data set makes the batches: give it a "
            "batch_size, and a data set of single samples"
        )
    plain, sampler = type(batches).__name__ == "BatchSampler", getattr(batches, "sampler", None)
    name = type(sampler if plain else batches).__name__
    drawn = getattr(sampler, "replacement", False) or getattr(sampler, "_num_samples", None)
    if sampler is not None and name in _ORDERS:
        drawn = drawn or len(sampler) != len(data)  # a sampler that was made for other data
    if name == "DistributedSampler":
        return bool(getattr(sampler, "shuffle", True))
    if name not in _ORDERS or drawn:
        raise PlanError(
            f"the loader's {name} decides which samples come, so that each would not come exactly "
            "once: leave it out (shuffle=True or False), or train without bw.For..."
        )
    return _ORDERS[name]


def batch_of(loader: Any) -> int:
    """Samples per batch of a user's loader.

    Raises:
        PlanError: The loader does not say, or changes its batches, which our loader would not do.
    """
    _refuse_own_batches(loader)
    batches = _batches_of(loader)
    if loader.batch_size is not None:
        return int(loader.batch_size)
    if type(batches).__name__ != "BatchSampler":
        raise PlanError(
            f"the loader's {type(batches).__name__} does not say how many samples a batch has: "
            "give the loader batch_size= in place of batch_sampler="
        )
    return int(batches.batch_size)


def _batches_of(loader: Any) -> Any:
    """The batch sampler that the user has given, or PyTorch has made."""
    batches = loader.batch_sampler
    while type(batches).__name__ == "BatchSamplerShard":  # accelerate's, around the loader's own
        batches = batches.batch_sampler
    return batches


def _refuse_own_batches(loader: Any) -> None:
    """Refuse a loader class with iteration of its own: our loader would not do the same."""
    for name in ("__iter__", "_get_iterator"):
        made = getattr(type(loader), name, None)
        if getattr(made, "__module__", "torch").partition(".")[0] not in _LOADERS:
            raise PlanError(
                f"the loader's class {type(loader).__name__} has {name} of its own, which would "
                "not run here: do what it does in the data set or in collate_fn, and give a "
                "torch.utils.data.DataLoader"
            )


def tell_taken_over(loader: Any, first: bool) -> None:
    """Print that ``drop_last`` of a user's loader is ignored; ``first`` is true in worker 0."""
    if first and getattr(_batches_of(loader), "drop_last", False):
        tell("drop_last=True is left out: the last, smaller step counts by its samples", first=True)


def with_sampler(loader: Any, sampler: Sampler) -> Any:
    """A loader like the user's whose batches are those of a sampler."""
    return _loader_like(loader, batch_sampler=sampler)


def with_batch(loader: Any, size: int) -> Any:
    """A loader like the user's with shuffled batches of another size, for a probe."""
    return _loader_like(loader, batch_size=size, shuffle=True, drop_last=True)


def _loader_like(loader: Any, **batches: Any) -> Any:
    """PyTorch's own loader of the same data set, with the settings `_LOADING` of another one."""
    from torch.utils.data import DataLoader

    found: dict[str, Any] = {key: getattr(loader, key, None) for key in _LOADING}
    given = {key: value for key, value in found.items() if value is not None}
    return DataLoader(loader.dataset, **batches, **given)


def fewest_samples(model: Any) -> int:
    """Fewest samples of a pass: 2 with batch normalization."""
    from batchwright.workload.task import has_batch_norm

    return 2 if has_batch_norm(model) else 1


def probed(
    step: Callable[[Any], Any], loader: Any, *, base_batch: int, out: Any = None, **keys: Any
) -> Profile:
    """A profile of a trainer's own step with its own loader.

    Args:
        step: The training step, a function of a batch.
        loader: The trainer's loader.
        base_batch: Global batch that the trainer's learning rates are meant for.
        out: File for the profile.
        **keys: Job keys.

    Raises:
        SystemExit: A stop signal came; its code is 128 + the signal's number, as in a shell.
    """
    try:
        return probe(
            step=step,
            loader=lambda size: with_batch(loader, size),
            samples=len(loader.dataset),
            out=out,
            **{"base_batch": base_batch, **keys},
        )
    except Interrupted as stop:
        tell(f"error: probe {one_line(stop)}", first=place_among_workers()[0] == 0)
        raise SystemExit(stop.exit_code) from None


def automatic(profile: Profile, epochs: int | None) -> Plan:
    """The plan of a profile, for ``epochs`` epochs unless that is ``None``."""
    return decide(profile, epochs=epochs) if epochs else decide(profile)


def scale_rates(optimizers: Sequence[Any], schedulers: Sequence[Any], factor: float) -> None:
    """Multiply the learning rates of optimizers, and those that their schedulers have stored."""
    if factor == 1:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in ("lr", "initial_lr", "max_lr", "min_lr"):
                if key in group:
                    group[key] = group[key] * factor  # not in place: groups may share a tensor
    for scheduler in {id(one): one for one in _all_of(schedulers)}.values():
        for key in ("base_lrs", "max_lrs"):
            if hasattr(scheduler, key):
                setattr(scheduler, key, [rate * factor for rate in getattr(scheduler, key)])


def _all_of(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Schedulers and those that they take turns with, or chain; each has noted rates of its own."""
    for one in schedulers:
        yield one
        yield from _all_of(getattr(one, "_schedulers", ()))


def recovering(parameters: Sequence[Any], rank: int, scaler: Any) -> Recovering:
    """The `Recovering` of a worker, which computes batches in parts after memory runs out."""
    return Recovering(parameters, lambda line: tell(f"worker {rank}: {line}", first=True), scaler)


def divide_next_epoch(follower: Follower | None, sampler: Sampler | None, *, first: bool) -> None:
    """Compute the shares of the next epoch, if they follow speed; worker 0 prints changes."""
    if follower is None or sampler is None:
        return
    before = sampler.local_batch_sizes
    after = follower.end_epoch()
    if after != before:
        shown = ", ".join(map(str, after))
        tell(f"from the next epoch on the workers have {shown} samples of each step", first=first)


def leave_group_at_exit() -> None:
    """Leave gloo's process group when Python ends, after a training that ended well.

    Neither Lightning nor Transformers leaves it. A gloo thread that frees its last tensor while the
    interpreter shuts down aborts the process, and the exit code of a successful training says that
    it failed. After a failed training this is not done, since other workers may not answer.
    """
    atexit.register(_leave_group)


def stay_in_group() -> None:
    """Undo `leave_group_at_exit` of an earlier training when the next one begins."""
    atexit.unregister(_leave_group)


def _leave_group() -> None:
    from torch import distributed

    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


@contextmanager
def refused_in_a_line(*, first: bool) -> Iterator[None]:
    """Inside, an uncaught error ends the script with one line of worker 0, without tracebacks.

    Only for errors that all workers find alike: one of a single worker must be shown by that one.
    """
    try:
        yield
    except BatchwrightError as refusal:
        # A weak reference, so that an error which the script catches frees its frames.
        others, kept = sys.excepthook, ref(refusal)

        def hook(kind: Any, error: BaseException, trace: Any) -> None:
            if error is kept():
                tell(f"error: {one_line(error)}", first=first)
            else:
                others(kind, error, trace)

        sys.excepthook = hook
        raise


def tell(line: str, *, first: bool) -> None:
    """Print a line on standard error if ``first``, which is true in worker 0."""
    if first:
        to_stderr(f"batchwright: {line}")
