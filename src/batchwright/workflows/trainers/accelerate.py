"""A plan in a loop with accelerate: a feed replaces the loader, and has a `backward` of its own.

model, optimizer = accelerator.prepare(model, optimizer)
feed = bw.ForAccelerate(accelerator, model, optimizer, loader, "plan.json")
for epoch in range(epochs):
    for batch in feed:
        with accelerator.accumulate(model):
            feed.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

With ``"auto", loss=loss_of`` in place of the file, the step is probed and planned at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from batchwright.errors import ArgumentError, PlanError
from batchwright.records import Plan, Profile
from batchwright.training.batches.feeding import to_device
from batchwright.training.batches.following import Follower
from batchwright.training.batches.unequal import weigh_gradient
from batchwright.workflows.trainers.arrangement import (
    Arrangement,
    Shares,
    arranged,
    automatic,
    batch_of,
    divide_next_epoch,
    fewest_samples,
    probed,
    read_shares,
    recovering,
    refused_in_a_line,
    scale_rates,
    shuffled,
    tell,
    tell_taken_over,
    with_sampler,
)
from batchwright.workload.extras import import_library

import_library("accelerate")

_WORDS = {"batch": "batch_size", "accumulation": "gradient_accumulation_steps"}


class ForAccelerate:
    """Feeds a loop with accelerate as a plan says, under its own DDP; iterate it for each epoch.

    Each sample counts exactly once per epoch, with any number of workers, also if the training was
    resumed within the epoch. Gradients are means over samples, whatever the shares. Batches are on
    the device. If a loop leaves an epoch early (`break`), the next iteration is the next epoch.
    `accelerator.save_state` saves the place in the epoch, and `load_state` continues there.

    Args:
        accelerator: The accelerator; its `gradient_accumulation_steps` becomes the plan's.
        model: The prepared model.
        optimizer: The prepared optimizer; its rate is multiplied by the plan's factor.
        loader: The loader of the training data, not prepared.
        plan: A plan or its file. ``None``: your batch and accumulation stay. ``"auto"``: all
            workers probe model and ``loss`` at once, and a plan is made.
        shares: Shares of the workers: ``"follow"`` their speeds, epoch by epoch; ``"equal"``; or a
            number for each worker. ``None``: those of the plan; without a plan, or with an
            automatic one, ``"follow"``.
        seed: Seed of the order of the samples.
        loss: With ``"auto"``: a function f(model, batch) that returns the mean loss.
        keys: With ``"auto"``: job keys for probe and plan, such as ``epochs=10``.

    Attributes:
        plan: The plan that is followed; ``None``: no plan.
        arrangement: Batch, passes, shares and rate factor.
        sampler: The sampler of this worker.

    Raises:
        PlanError: The accelerator, the loader and the plan contradict each other.
        ArgumentError: ``"auto"`` without a loss, or a loss or keys without ``"auto"``.
        DataError: The data set can only be iterated.
    """

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        loader: Any,
        plan: Plan | str | Path | None = None,
        *,
        shares: Shares | None = None,
        seed: int = 0,
        loss: Callable[[Any, Any], Any] | None = None,
        **keys: Any,
    ) -> None:
        with refused_in_a_line(first=accelerator.is_main_process):
            shuffle = _checked(accelerator, model, optimizer, loader)
            shares = read_shares(shares)
        workers, first = accelerator.num_processes, accelerator.is_main_process
        self._given = None if isinstance(shares, str) else shares
        tell_taken_over(loader, first)
        self._auto = plan == "auto"
        if self._auto != (loss is not None) or (keys and not self._auto):
            raise ArgumentError(
                'bw.ForAccelerate takes loss= and job keys with "auto", which probes them: give '
                'bw.ForAccelerate(accelerator, model, optimizer, loader, "auto", loss=loss_of), '
                "where loss_of(model, batch) is the mean loss"
            )
        if loss is not None:
            plan = automatic(self.probe(accelerator, model, optimizer, loader, loss, **keys), None)
            shares = shares or "follow"
        self.plan = plan
        with refused_in_a_line(first=first):
            self.arrangement = arranged(
                plan,
                shares,
                trainer="accelerate",
                workers=workers,
                batch=batch_of(loader),
                # An automatic plan takes the place of the accelerator's accumulation.
                passes=1 if self._auto else accelerator.gradient_accumulation_steps,
                samples=len(loader.dataset),
                words=_WORDS,
            )
        if plan is not None:
            tell(self.arrangement.words(workers, **_WORDS), first=first)
        _scale_rates(accelerator, optimizer, self.arrangement.rate)
        self._accelerator, self._model, self._theirs = accelerator, model, loader
        self._optimizer = optimizer
        self._order = {"shuffle": shuffle, "seed": seed}
        self._follower: Follower | None = None
        with refused_in_a_line(first=first):
            self._arrange()
        self._recovering = recovering(
            list(model.parameters()), accelerator.process_index, accelerator.scaler
        )
        self._index, self._batch = -1, None
        self._open = False  # whether a loop goes through the batches
        self._weighed, self._told = 0, False  # losses since the last step; whether none was told
        inner = getattr(optimizer, "optimizer", optimizer)
        if hasattr(inner, "_optimizer_step_post_hooks"):  # not without `Optimizer.__init__`
            inner.register_step_post_hook(self._after_step)
        accelerator.register_for_checkpointing(self)

    def _arrange(self) -> None:
        """Make sampler, loader and follower for the arrangement."""
        made, accelerator, loader = self.arrangement, self._accelerator, self._theirs
        accelerator.gradient_accumulation_steps = made.passes
        self.sampler = made.sampler(
            loader.dataset,
            rank=accelerator.process_index,
            workers=accelerator.num_processes,
            least=fewest_samples(self._model),
            **self._order,
        )
        self._loader = with_sampler(loader, self.sampler)
        if self._follower is not None:
            self._follower.close()
        trained = list(self._model.parameters())
        self._follower = Follower(self.sampler, trained) if made.follow else None

    @staticmethod
    def probe(
        accelerator: Any,
        model: Any,
        optimizer: Any,
        loader: Any,
        loss: Callable[[Any, Any], Any],
        *,
        out: str | Path | None = None,
        **keys: Any,
    ) -> Profile:
        """Measure time and memory of a training step, with all workers; weights are restored.

        Args:
            accelerator: The accelerator, for its device and number format.
            model: The model, prepared or not; it is left in training mode.
            optimizer: The optimizer, prepared or not. Its rate is assumed to suit the loader's
                batch times workers and accumulated passes, unless ``base_batch=`` names another
                global batch.
            loader: The loader, not prepared.
            loss: A function f(model, batch) that returns the mean loss.
            out: File for the profile.
            keys: Job keys.

        Raises:
            SystemExit: A stop signal came; its code is 128 + the signal's number.
        """
        plain = accelerator.unwrap_model(model)
        inner = getattr(optimizer, "optimizer", optimizer)

        def step(batch: Any) -> None:
            inner.zero_grad()
            with accelerator.autocast():
                value = loss(plain, to_device(batch, accelerator.device))
            value.backward()
            inner.step()

        with refused_in_a_line(first=accelerator.is_main_process):
            base = batch_of(loader) * accelerator.num_processes
        base *= accelerator.gradient_accumulation_steps
        return probed(step, loader, base_batch=base, out=out, **keys)

    def __len__(self) -> int:
        """Batches of this worker in an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        first = self._accelerator.is_main_process
        if self._follower is not None and self._follower.timed:  # the last epoch was left early
            divide_next_epoch(self._follower, self.sampler, first=first)
        self._begin_with_a_step()
        self._open = True
        try:
            for batch in self._loader:
                self._batch = to_device(batch, self._accelerator.device)
                self._index += 1
                if self._follower is not None:
                    self._follower.begin()
                yield self._batch
        finally:
            self._open = False
        self._batch = None
        divide_next_epoch(self._follower, self.sampler, first=first)

    def backward(self, loss: Any, **how: Any) -> Any:
        """`accelerator.backward` with the gradient weighed so that all samples count equally.

        Args:
            loss: Mean loss of the current batch; or a function of a batch that computes it, which
                is called again with smaller batches if memory runs out.
            how: Further arguments of `accelerator.backward`.

        Returns:
            The loss.
        """
        again = callable(loss)
        if again:
            loss = self._recovering.loss(loss, self._batch, wrapper=self._model)
        self._weighed += 1
        part = self.sampler.part(self._index)
        end = weigh_gradient(loss, part, self._accelerator.num_processes)
        run = partial(self._accelerator.backward, loss, **how)
        if again:
            self._recovering.backward(run)
        else:
            run()
        end()
        if self._follower is not None:
            self._follower.exchanged()
        return loss

    def _after_step(self, *_: Any) -> None:
        """Print a line after a step whose losses `backward` never had, of batches of this feed.

        Not before it: a closure computes its losses within the step.

        Raises:
            PlanError: The optimizer steps before the last pass of a step.
        """
        if self._open and (self._index + 1) % self.sampler.passes:
            with refused_in_a_line(first=self._accelerator.is_main_process):
                raise PlanError(
                    f"the optimizer steps after pass {self._index % self.sampler.passes + 1} of "
                    f"{self.sampler.passes}, whose losses are divided by their number: put each "
                    "pass into `with accelerator.accumulate(model):`"
                )
        passes = self._accelerator.num_processes * self.sampler.passes
        if self._open and passes > 1 and not (self._weighed or self._told):
            self._told = True
            tell(
                "the optimizer steps without feed.backward(loss): give each loss to it, in place "
                "of accelerator.backward, or batches of unequal size count alike",
                first=self._accelerator.is_main_process,
            )
        self._weighed = 0

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch, for accelerate's checkpoints."""
        state = self.sampler.state_dict(self._index + 1) | {"rate": self.arrangement.rate}
        made = vars(self.arrangement) | {"shares": None}
        return state | ({"arrangement": made} if self._auto else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a checkpoint's place, with the batch of its automatic plan."""
        if self._auto and "arrangement" in state:  # divided as is asked for now
            own = {"shares": self._given, "follow": self.arrangement.follow}
            found, self.arrangement = self.arrangement, Arrangement(**state["arrangement"] | own)
            self._arrange()
            made, accelerator = self.arrangement, self._accelerator
            if (made.global_batch, made.passes) != (found.global_batch, found.passes):
                words = made.words(accelerator.num_processes, **_WORDS)
                tell(f"as before the stop: {words}", first=accelerator.is_main_process)
        self.sampler.load_state_dict(self.arrangement.resumed(state))
        # The restored optimizer has the rate factor of the plan that it was trained with.
        rate = self.arrangement.rate
        _scale_rates(self._accelerator, self._optimizer, rate / state.get("rate", rate))
        if self._follower is not None:
            self._follower.forget()
        self._begin_with_a_step()

    def _begin_with_a_step(self) -> None:
        """Make the next batch the first one of a step; gradients accumulated so far are dropped."""
        self._index = -1
        if ahead := self._accelerator.step % self.sampler.passes:
            self._accelerator.step -= ahead
            for parameter in self._model.parameters():
                parameter.grad = None


def _scale_rates(accelerator: Any, optimizer: Any, factor: float) -> None:
    """Multiply the optimizer's rates, and those that prepared schedulers have stored."""
    inner = getattr(optimizer, "optimizer", optimizer)
    prepared = [one.scheduler for one in accelerator._schedulers]
    schedulers = [one for one in prepared if getattr(one, "optimizer", None) is inner]
    noted = any("initial_lr" in group for group in inner.param_groups)
    if factor != 1 and noted and not schedulers:
        tell(
            "a scheduler has noted the optimizer's rate before the plan changed it, and would set "
            "it back: prepare it with the optimizer, or build it after bw.ForAccelerate",
            first=accelerator.is_main_process,
        )
    if factor != 1 and len(accelerator._optimizers) > 1:
        tell(
            f"only the optimizer that bw.ForAccelerate was given has its rates times {factor:.3g}: "
            "multiply those of your other optimizers, too, if they go with the batch",
            first=accelerator.is_main_process,
        )
    scale_rates([inner], schedulers, factor)


def _checked(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> bool:
    """Whether the loader shuffles; refuses settings with which samples would not count once."""
    from torch.nn.parallel import DistributedDataParallel

    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise PlanError(f"bw.ForAccelerate does not go with {kind}: use DDP, by torchrun")
    alone = accelerator.num_processes > 1 and not any(
        isinstance(one, DistributedDataParallel) for one in model.modules()
    )
    if alone or not any(optimizer is one for one in accelerator._optimizers):
        raise PlanError(
            "model or optimizer of bw.ForAccelerate is not prepared, so that workers would train "
            "apart and each pass would update: give it what "
            "accelerator.prepare(model, optimizer) returns"
        )
    if any(loader is one for one in accelerator._dataloaders):
        raise PlanError(
            "the loader of bw.ForAccelerate is prepared, which divides it another way: leave "
            "it out of accelerator.prepare(...)"
        )
    return shuffled(loader, "bw.ForAccelerate")
