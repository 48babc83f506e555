"""Short trainings: how well the network learns with an optimizer, a global batch and a rate.

    starting weights --> steps on one part of the training images, the rate rising and falling as in
    a whole training of this length --> accuracy and loss on the other part

Every trial begins with the same weights and takes the same images in the same order, so two trials
differ only in the settings asked for. Trials do not use the job's own held-out images: a choice by
those would make the accuracy on them look better than it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, groupby
from math import inf, isfinite, isnan, nan

import torch
from torch import Tensor

from batchwright.algorithms.learning_rate import make_rule, rate_factor
from batchwright.algorithms.partition import apportion
from batchwright.errors import BatchwrightError, JobError
from batchwright.probing.batches import Batch
from batchwright.probing.bench import Bench, StepResult, if_it_fits
from batchwright.probing.commands import RunTrial, ignored
from batchwright.probing.measure.evaluation import answers
from batchwright.probing.measure.timing import now
from batchwright.records import Job, LearningRateRule, Trial
from batchwright.records.text.formatting import counted
from batchwright.training.batches.randomness import seed_worker
from batchwright.training.batches.sampler import Step, epoch_order, micro_batches, step_sizes
from batchwright.training.evaluate.evaluation import (
    evaluation_mode,
    merged_batch_norm,
    without_gradients,
)
from batchwright.workload.data.random_numbers import put_aside
from batchwright.workload.task import has_batch_norm

_PAUSE = 0.5  # seconds between two reports of a trial's progress


class GivenUp(BatchwrightError):  # noqa: N818 - the probe goes on
    """A trial took longer than it may."""


class NoAccuracy(BatchwrightError):  # noqa: N818 - the probe goes on
    """The network's outputs are not a number for each class, or the labels are not classes."""


def run_trial(
    bench: Bench, command: RunTrial, on_progress: Callable[[float], None] = ignored
) -> Trial | None:
    """Train and evaluate; all workers of the bench's group call this together.

    The learning rate is that of a training of one epoch of ``command.samples``. The evaluation is
    at the resolution of the training. Afterwards the bench has its starting weights and its former
    optimizer again. ``on_progress`` is called now and then with the share of the trial that is
    done.

    Returns:
        The trial; `None` if memory ran out on some worker. Where a gradient or the held-out loss is
        not finite, the trial is recorded at its whole length with the accuracy of guessing.

    Raises:
        JobError: The network has nothing for this optimizer to do, or there are too few samples.
        GivenUp: The trial took too long on some worker; raised on all workers, and the bench is as
            it was before.
        NoAccuracy: Raised on all workers; the bench is as it was before.
    """
    batch_norm = has_batch_norm(bench.network)
    least, workers = 2 if batch_norm else 1, bench.group.size
    images = bench.batches.shuffled()
    if command.held_out >= len(images):
        raise JobError(f"a trial cannot hold out {command.held_out} of {len(images)} images")
    if min(command.samples, command.global_batch_size) < least * workers:
        raise JobError(
            f"a step of a trial on {counted(workers, 'worker')} takes {least * workers} samples"
        )
    rest, held = images[: -command.held_out], images[-command.held_out :]
    rule = _rule(bench.job, command, batch_norm=batch_norm)
    rate = rule.peak * command.rate_scale
    sizes = step_sizes(command.samples, command.global_batch_size, workers=workers, least=least)
    course = _Course(bench, rest, sizes, command, least)
    with put_aside():
        seed_worker(bench.job.seed, 0, bench.group.rank)  # as a training does, for its dropout
        with bench.training(command.optimizer, rate) as optimizer:
            began = now(bench.device)
            done = _train(bench, optimizer, course, rule, _Watch(command.most_seconds, on_progress))
            evaluated: tuple[float, float] | None = (0.0, inf)
            if not done.stopped:  # a diverged trial is evaluated too: its outputs may be no classes
                evaluated = _judge(bench, held, command, fits=done.fits)
            seconds = now(bench.device) - began
    if done.stopped:
        raise GivenUp(f"a trial was given up after {seconds:.3g} s")
    if evaluated is None:
        return None
    accuracy, loss = evaluated
    if isnan(accuracy):
        raise NoAccuracy("a trial has no accuracy to be judged by")
    finite = done.finite and isfinite(loss)
    return Trial(
        optimizer=command.optimizer,
        global_batch_size=command.global_batch_size,
        rate=rate,
        usual_rate=rule.peak,
        resolution=command.resolution,
        samples=command.samples,
        steps=len(sizes),
        accuracy=accuracy if finite else 1 / bench.classes,
        loss=loss if finite else None,
        held_out=command.held_out,
        seconds=seconds,
    )


def _rule(job: Job, command: RunTrial, *, batch_norm: bool) -> LearningRateRule:
    """The learning-rate rule of a plan for the trial's samples.

    A warm-up given in epochs keeps its share of the training.
    """
    if job.warmup_epochs != "auto":
        job = job.model_copy(update={"warmup_epochs": min(1.0, job.warmup_epochs / job.epochs)})
    return make_rule(
        job,
        command.global_batch_size,
        1,
        command.optimizer,
        samples=command.samples,
        batch_norm=batch_norm,
    )


class _Course:
    """The samples that this worker takes at each step.

    The orders of the data's epochs follow one another, and a step may reach from one epoch into the
    next: the trial itself is one epoch, whatever the length of the data. A step's images are
    augmented as in the epoch in which the step begins. The workers of the bench's group share each
    step as evenly as possible.
    """

    def __init__(
        self, bench: Bench, images: Tensor, sizes: Sequence[int], command: RunTrial, least: int
    ) -> None:
        self._feed, self._rank = bench.batches.training_feed(bench.group.size), bench.group.rank
        self._images, self._sizes, self._command, self._least = images, sizes, command, least
        self.samples = sum(sizes)
        shares = [1.0] * bench.group.size
        self._shares = {size: tuple(apportion(shares, size)) for size in set(sizes)}
        weights, seed = bench.batches.sampling_weights(images), bench.job.seed
        # A step rarely takes samples from more than its epoch and the next.
        self._order = lru_cache(maxsize=2)(
            lambda epoch: images[epoch_order(len(images), epoch, seed, weights)]
        )

    def __iter__(self) -> Iterator[tuple[int, list[float], Iterator[Batch]]]:
        """Per step: samples seen before it, each micro-batch's share of it, and the batches."""
        starts = accumulate(self._sizes, initial=0)
        steps = (
            Step(start, self._shares[size])
            for start, size in zip(starts, self._sizes, strict=False)
        )
        for epoch, together in groupby(steps, lambda step: step.start // len(self._images)):
            of_epoch = list(together)
            parts = (self._taken(*part) for step in of_epoch for part in self._parts(step))
            batches = self._feed.training(parts, epoch, self._command.resolution)
            for step in of_epoch:
                shares = [count / step.samples for _, count in self._parts(step)]
                yield step.start, shares, batches

    def _parts(self, step: Step) -> list[tuple[int, int]]:
        """First position and number of samples of each of this worker's micro-batches."""
        first, last = step.span(self._rank)
        counts = micro_batches(last - first, self._command.micro_batch, self._least)
        return list(zip(accumulate(counts, initial=first), counts, strict=False))

    def _taken(self, place: int, count: int) -> Tensor:
        """Indices of the ``count`` samples from position ``place`` on."""
        epoch, first = divmod(place, len(self._images))
        found = self._order(epoch)[first : first + count]
        if len(found) == count:
            return found
        return torch.cat([found, self._taken(place + len(found), count - len(found))])


class _Watch:
    """Reports a trial's progress, and whether its time is up, by this worker's clock."""

    def __init__(self, most_seconds: float | None, on_progress: Callable[[float], None]) -> None:
        self._on_progress, self._reported = on_progress, time.perf_counter()
        self._end = inf if most_seconds is None else self._reported + most_seconds

    def is_late(self, share: float) -> bool:
        """Whether the time is up before a step; ``share`` of the trial is done."""
        now = time.perf_counter()
        if now - self._reported >= _PAUSE:
            self._reported = now
            self._on_progress(share)
        return now > self._end


def _train(
    bench: Bench,
    optimizer: torch.optim.Optimizer,
    course: _Course,
    rule: LearningRateRule,
    watch: _Watch,
) -> StepResult:
    """Train until the end, or until a step does not fit, is not finite, or is late on any worker.

    Where memory runs out in the update, only this worker notices: the others learn of it at the
    next step, or in the evaluation. Returns the result of the last step.
    """
    first_rates = [float(parameters["lr"]) for parameters in optimizer.param_groups]
    fits = True
    for seen, shares, batches in course:
        factor = rate_factor(seen, rule=rule, samples_per_epoch=course.samples, epochs=1)
        for parameters, first in zip(optimizer.param_groups, first_rates, strict=True):
            parameters["lr"] = factor * first
        supplies = [batches.__next__ if fits else _no_memory] * len(shares)
        late = watch.is_late(seen / course.samples)
        taken = if_it_fits(partial(bench.train, supplies, shares, float(late)))
        fits = taken is not None
        if taken is not None and (taken.stopped or not (taken.fits and taken.finite)):
            return taken
    return StepResult(fits=fits)


def _no_memory() -> Batch:
    raise MemoryError


def _judge(
    bench: Bench, held: Tensor, command: RunTrial, *, fits: bool
) -> tuple[float, float] | None:
    """Accuracy and mean loss on the held-out images, which the workers share.

    `None` if memory ran out on some worker; not a number where there is no accuracy.
    """
    group, network = bench.group, bench.network
    first, last = Step(0, tuple(apportion([1.0] * group.size, len(held)))).span(group.rank)
    parts = held[first:last].split(command.micro_batch) if first < last else ()
    batches = bench.batches.training_feed(group.size).evaluation(parts, command.resolution)
    with evaluation_mode(network), merged_batch_norm(network, group, 1 / group.size):
        sums = if_it_fits(partial(_sums, bench, batches)) if fits else None
    own = torch.tensor(
        [*(sums or (0.0, 0.0)), float(sums is None)], dtype=torch.float64, device=bench.device
    )
    right, loss, failed = group.sum(own).tolist()
    return None if failed else (right / len(held), loss / len(held))


def _sums(bench: Bench, batches: Iterator[Batch]) -> tuple[float, float]:
    """Number of right answers, and sum of the losses; both not a number without accuracy."""
    right = loss = 0.0
    with without_gradients():
        for images, labels in batches:
            outputs, mean = bench.outputs_and_loss((images, labels))
            found = answers(outputs, labels, bench.classes)
            if found is None:
                return nan, nan
            right += float((found == labels).sum())
            loss += len(labels) * float(mean)
    return right, loss
