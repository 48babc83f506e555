"""Unequal batches in another trainer's loop: which worker takes which samples, and their weight.

    sampler = bw.Sampler(dataset, 96, shares=(2, 1))
    loader = DataLoader(dataset, batch_sampler=sampler)
    for index, (images, labels) in enumerate(loader):
        bw.weight(criterion(model(images), labels), *sampler.part(index)).backward()

`DistributedDataParallel` averages the workers' gradients. That is the mean over all samples only if
all have as many; the weight makes it so whatever they have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from numbers import Number
from operator import index as whole
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils.data import Sampler as TorchSampler

from batchwright.algorithms.partition import apportion
from batchwright.errors import ArgumentError, PlanError
from batchwright.records.text.formatting import counted
from batchwright.training.batches.epoch_steps import EpochSteps, Shares
from batchwright.training.batches.feeding import refuse_iterable
from batchwright.training.batches.sampler import epoch_order, step_sizes


class Part(NamedTuple):
    """One forward pass as a part of its step; the last arguments of `weight`."""

    # Samples that count, or what stands for them; 0: the batch only keeps this worker in step.
    samples: float
    total: float  # samples of the step, over all workers and passes
    passes: int  # forward passes of each worker in the step

    def factor(self, workers: int) -> float:
        r"""Factor on the mean loss of the pass: :math:`n_i W k / \sum n`.

        Args:
            workers: Number of workers W, by which the gradients' sum is divided.
        """
        return self.samples * workers * self.passes / self.total


class Sampler(TorchSampler[list[int]]):
    """Batches of indices for this worker: unequal shares, each sample exactly once an epoch.

    For `torch.utils.data.DataLoader` as ``batch_sampler=``. In each epoch there is one seeded order
    of all samples; a step takes the next ``global_batch`` of them, each worker its share. So a step
    has the same samples whatever the shares and the number of workers. Every worker has equally
    many batches: in a last step of fewer samples than workers some get one that does not count.

    Each pass over the sampler is the next epoch, also after one that was left early; `set_epoch`
    says another.

    Args:
        data: The data set, or how many samples it has.
        global_batch: Samples of a step over all workers and passes.
        shares: The workers' shares, in rank order: numbers in any unit. ``None``: equal.
        passes: Forward passes of each worker in a step, for a loop that accumulates gradients.
        least: Fewest samples of a pass; 2 with batch normalization.
        fill: Whether some workers get a batch that does not count where a last step has fewer
            samples than passes; else it joins the one before. So it does with ``least=2``.
        shuffle: Whether each epoch has a random order of its own; else the data set's.
        seed: Seed of the order.
        rank: This worker. ``None``: as `torch.distributed` or the launcher's environment says.
        workers: Number of workers. ``None``: as `torch.distributed` or the environment says.

    Attributes:
        epoch: Zero-based.
        local_batch_sizes: Samples of each worker in a step, in rank order.

    Raises:
        ArgumentError: A number makes no sense; the message names it.
        DataError: The data set can only be iterated.
    """

    def __init__(
        self,
        data: Sized | int,
        global_batch: int,
        *,
        shares: Sequence[float] | None = None,
        passes: int = 1,
        least: int = 1,
        fill: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        workers: int | None = None,
    ) -> None:
        if not isinstance(data, Number):
            refuse_iterable(data)
            data = len(data)  # type: ignore[arg-type] # an int is a number
        own, count = place_among_workers()
        # Looked at again by each pass, unless it is known for good: a group may be joined later.
        settled = _in_group() or (rank, workers) != (None, None)
        self._found = None if settled else (own, count)
        rank, workers = own if rank is None else rank, count if workers is None else workers
        self.samples, self.rank, self.workers, global_batch, passes, least, seed = _whole_numbers(
            *(("data", data), ("rank", rank), ("workers", workers)),
            *(("global_batch", global_batch), ("passes", passes), ("least", least), ("seed", seed)),
        )
        if not 0 <= self.rank < self.workers:
            raise ArgumentError(f"rank={self.rank} of {self.workers} workers: count from 0")
        for key, number in (("passes", passes), ("least", least)):
            if number < 1:
                raise ArgumentError(f"{key}={number} of Sampler: give a number from 1")
        fewest = least * passes * self.workers
        if not fewest <= global_batch <= self.samples:
            raise ArgumentError(
                f"global_batch={global_batch} of Sampler: {self.workers} workers with {passes} "
                f"pass(es) of at least {least} samples each and {self.samples} samples in all want "
                f"a number from {fewest} to {self.samples}"
            )
        self.global_batch, self.passes = global_batch, passes
        self._least, self._shuffle, self._seed = least * passes, shuffle, seed
        self._fill = fill and least == 1
        self.epoch, self._done, self._handed, self._begun = 0, 0, 0, False
        self._steps: EpochSteps | None = None
        self.set_shares([1.0] * self.workers if shares is None else shares)

    def set_shares(self, shares: Sequence[float]) -> None:
        """Change the shares from the next pass over the sampler on; all workers alike."""
        shares = share_numbers(shares)
        if len(shares) != self.workers:
            workers = counted(self.workers, "worker")
            raise ArgumentError(f"{len(shares)} shares for {workers}: give one number for each")
        try:
            sizes = apportion(shares, self.global_batch, least=self._least)
        except ValueError as error:
            raise ArgumentError(f"shares={list(shares)} of Sampler: {error}") from None
        self.local_batch_sizes = tuple(sizes)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass this epoch; a state loaded within it goes on where it was left."""
        if epoch != self.epoch or self._begun:
            self._done = 0
        self.epoch, self._begun, self._steps = epoch, False, None

    def __len__(self) -> int:
        """Batches of this worker in a whole epoch."""
        return self.passes * len(self._sizes(0))

    @property
    def left(self) -> int:
        """Batches of this worker that are left in the epoch of the next pass."""
        return self.passes * len(self._sizes(self._done))

    def __iter__(self) -> Iterator[list[int]]:
        if self._found is not None and (now := place_among_workers()) != self._found:
            (was, of), (rank, workers) = self._found, now
            raise ArgumentError(
                f"Sampler was made as worker {was} of {of}, and this is worker {rank} of "
                f"{workers}: make it behind init_process_group, or give rank= and workers="
            )
        if self._begun:  # the pass before is over, whether or not it came to its end
            self.epoch, self._done = self.epoch + 1, 0
        self._begun = True
        order = (
            epoch_order(self.samples, self.epoch, self._seed)
            if self._shuffle
            else torch.arange(self.samples, device="cpu")
        )
        steps = self._steps = EpochSteps(
            order,
            self._sizes(self._done),
            Shares(0, self.local_batch_sizes, self.samples),
            start=self._done,
            ranks=(self.rank,),
            least=self._least,
        )
        self._handed = 0
        for index in range(len(steps)):
            step = steps.step(index)
            first, last = step.span(self.rank)
            for part in order[first:last].split(self._parts(last - first)):
                self._handed += 1
                # Where none is left for this worker it goes through some that do not count.
                yield part.tolist() or order[step.start :][: self._least // self.passes].tolist()

    def part(self, index: int) -> Part:
        """A batch as a part of its step; ``index`` counts the batches of this pass, from 0."""
        steps = self._steps
        if steps is None or not 0 <= index < len(steps) * self.passes:
            raise ArgumentError(f"part({index}) of Sampler: no such batch in the pass at hand")
        step = steps.step(index // self.passes)
        parts = self._parts(step.local_batch_sizes[self.rank])
        return Part(parts[index % self.passes], step.samples, self.passes)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position in the data, the same on all workers; any number of workers can resume.

        Args:
            batches: How many batches of this pass were trained on. ``None``: all that were asked
                for, which is right where no loader process asks for them ahead.
        """
        done, epoch = self._done, self.epoch
        if self._steps is not None:
            steps = (self._handed if batches is None else batches) // self.passes
            done = self.samples
            if steps < len(self._steps):
                done = self._steps.step(steps).start
        if done == self.samples:
            done, epoch = 0, epoch + 1
        return {
            "epoch": epoch,
            "done": done,
            "samples": self.samples,
            "seed": self._seed,
            "shares": list(self.local_batch_sizes),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, maybe with another number of workers.

        Shares are kept where there are as many workers as before.

        Raises:
            PlanError: The state is of other data or another seed.
        """
        for key, own in (("samples", self.samples), ("seed", self._seed)):
            if state[key] != own:
                raise PlanError(
                    f"the sampler's state is of {key}={state[key]} and here it is {own}: resume "
                    "with the same data and seed"
                )
        self.epoch, self._done = state["epoch"], state["done"]
        self._begun, self._steps = False, None
        if len(state["shares"]) == self.workers:
            self.set_shares(state["shares"])

    def _sizes(self, done: int) -> list[int]:
        """Samples of each step that is left after ``done`` of them.

        Where workers are filled up, a tail is a step however small, and steps are the same with any
        number of workers.
        """
        least = 1 if self._fill else self._least * self.workers
        return step_sizes(self.samples - done, self.global_batch, workers=1, least=least)

    def _parts(self, samples: int) -> list[int]:
        count = min(self.passes, max(1, samples * self.passes // self._least))  # the others: none
        return apportion([1.0] * count, samples) + [0] * (self.passes - count)


def weight(
    loss: Tensor,
    samples: float,
    total: float | None = None,
    passes: int = 1,
    *,
    workers: int = 0,
) -> Tensor:
    r"""The loss of a pass, such that the workers' average is the mean over all samples.

    With :math:`n` samples in this pass, :math:`N` in the step, W workers and k passes of each:

    .. math:: \ell\, n W k / N

    for a gradient that is averaged over workers and a loss that is divided by the passes, as
    trainers that accumulate do (divide it yourself otherwise). For a mean over something else
    (labelled pixels, tokens, weights of classes) give the sum of that in place of samples.

    Args:
        loss: Mean loss over the samples of this pass, a scalar.
        samples: Number of these samples. 0: the pass does not count, even if its loss is NaN.
        total: Samples of the step, over all workers and passes. ``None``: summed over the workers,
            which must then call this equally often.
        passes: Forward passes of each worker in the step.
        workers: Number of workers that average gradients. 0: as `torch.distributed` says, else 1.

    Raises:
        ArgumentError: Several passes without ``total``, which is not known before the last; or
            fewer samples than none, or some of a step that has none.
    """
    count = workers or place_among_workers()[1]
    if total is None:
        if passes > 1:
            raise ArgumentError(
                f"weight with passes={passes} needs total=, the samples of all passes of a step"
            )
        total = float(samples)
        if count > 1:  # in float64: pixels may be more than 2^24, class weights no whole numbers
            tally = torch.tensor(total, dtype=torch.float64, device=loss.device)
            distributed.all_reduce(tally)
            total = tally.item()
    if not samples >= 0 or passes < 1 or (samples and total <= 0):
        raise ArgumentError(
            f"weight of samples={samples}, total={total}, passes={passes}: give the samples of "
            "this pass and of the whole step, and how many passes it has, from 1"
        )
    if not samples:
        return torch.nan_to_num(loss) * 0
    return loss * Part(samples, total, passes).factor(count)


def share_numbers(shares: Any) -> tuple[float, ...]:
    """The workers' shares as numbers.

    Raises:
        ArgumentError: They are not numbers.
    """
    try:
        numbers = () if isinstance(shares, str) else tuple(map(float, shares))
    except (TypeError, ValueError):
        numbers = ()
    if not numbers:
        raise ArgumentError(f"shares={shares!r}: give a number for each worker, such as (2, 1)")
    return numbers


def _whole_numbers(*named: tuple[str, Any]) -> tuple[int, ...]:
    try:
        return tuple(whole(value) for _, value in named)
    except TypeError:
        key, value = next((k, v) for k, v in named if not hasattr(v, "__index__"))
        raise ArgumentError(f"{key}={value!r} of Sampler: give a whole number") from None


def place_among_workers() -> tuple[int, int]:
    """Rank and number of workers, by `torch.distributed`, else by the environment."""
    if _in_group():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _in_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def weigh_gradient(loss: Tensor, part: Part, workers: int) -> Callable[[], None]:
    """Weigh the gradient of a loss as `weight` does, without changing the loss's value.

    Returns:
        Ends that, to be called after the backward pass: the loss may be a part of another one.
    """
    if not loss.requires_grad:
        return lambda: None
    factor = part.factor(workers)
    end: Callable[[], None] = loss.register_hook(lambda gradient: gradient * factor).remove
    return end
