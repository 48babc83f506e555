"""A plan inside Transformers' Trainer: ``bw.ForTransformers(trainer, ...)`` before ``train()``.

The Trainer keeps its loop, DDP, precision, checkpoints and logging. Methods of this one Trainer are
replaced: for the order of the training data, the weights of unequal batches in the gradient, and
the shares of the next epoch.
"""

from __future__ import annotations

from functools import partial
from inspect import unwrap
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from batchwright.errors import PlanError
from batchwright.records import Plan, Profile
from batchwright.records.text.formatting import counted
from batchwright.training.batches.following import Follower
from batchwright.training.batches.recovering import Recovering, parts_of, samples_in
from batchwright.training.batches.unequal import Part, Sampler, weigh_gradient
from batchwright.training.evaluate.evaluation import evaluation_mode, without_gradients
from batchwright.workflows.trainers.arrangement import (
    Arrangement,
    Shares,
    arranged,
    automatic,
    batch_of,
    divide_next_epoch,
    fewest_samples,
    leave_group_at_exit,
    probed,
    read_shares,
    recovering,
    refuse_unused,
    refused_in_a_line,
    scale_rates,
    shuffled,
    stay_in_group,
    tell,
    tell_taken_over,
    with_sampler,
)
from batchwright.workload.data.random_numbers import put_aside
from batchwright.workload.extras import import_library

_Callback: Any = import_library("transformers").TrainerCallback
import_library("accelerate", "transformers")

_WORDS = {
    "batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
}


class ForTransformers:
    """Runs a plan in a `transformers.Trainer`, under its own DDP.

    Each sample counts exactly once per epoch, with any number of workers, also if the training was
    resumed within the epoch. Gradients are means over samples, or over tokens where the Trainer
    counts these.

    Args:
        trainer: The Trainer, before its `train()`.
        plan: A plan or its file. ``None``: your batch and accumulation stay. ``"auto"``: when
            `train` begins, all workers probe the Trainer's own loss, and a plan is made.
        shares: Shares of the workers: ``"follow"`` their speeds, epoch by epoch; ``"equal"``; or a
            number for each worker. ``None``: those of the plan; without a plan, or with an
            automatic one, ``"follow"``.
        recover: Whether a batch for which memory runs out is computed again in smaller parts.
        keys: With ``"auto"``: job keys for probe and plan, such as ``probe={"budget": 10}``.

    Attributes:
        plan: The plan that is followed; ``None``: no plan.
        arrangement: Batch, passes, shares and rate factor, once `train` has begun.
        sampler: The sampler of this worker, once `train` has begun.

    Raises:
        ArgumentError: Job keys without ``"auto"``.
        PlanError: The Trainer's options, its sampler or the plan contradict each other.
        DataError: The data set can only be iterated; raised when `train` begins.
    """

    def __init__(
        self,
        trainer: Any,
        plan: Plan | str | Path | None = None,
        *,
        shares: Shares | None = None,
        recover: bool = True,
        **keys: Any,
    ) -> None:
        with refused_in_a_line(first=trainer.args.process_index == 0):
            auto, arguments = plan == "auto", "shares= and recover="
            refuse_unused(keys, "ForTransformers", auto=auto, others=arguments)
            _refuse_options(trainer)
            shares = read_shares(shares)
            if isinstance(getattr(trainer.get_train_dataloader, "__self__", None), ForTransformers):
                raise PlanError(
                    "this Trainer has a bw.ForTransformers already: give plan and shares to that "
                    "one, or make a new Trainer"
                )
        self.plan = None if plan == "auto" else plan
        self._auto, self._shares, self._keys = auto, shares, keys
        self._recover = recover
        self.arrangement: Arrangement | None = None
        self.sampler: Sampler | None = None
        self._trainer = trainer
        self._theirs = trainer.get_train_dataloader
        self._compute, self._step = trainer.compute_loss, trainer.training_step
        self._follower: Follower | None = None
        self._recovering: Recovering | None = None
        self._epoch: int | None = None  # the current epoch, once the training has begun one
        self._index, self._part = -1, Part(1, 1, 1)
        self._training, self._asked, self._told = False, False, False
        self._means: bool | None = None  # whether losses are, though labels are counted
        self._set: tuple[int, int] | None = None  # batch and passes that the arguments were given
        self._scaled: Any = None  # the optimizer whose learning rates are those of the plan
        self._rates: list[float] = []  # these rates
        trainer.get_train_dataloader = self._loader
        trainer.compute_loss, trainer.training_step = self._loss, self._pass
        trainer.add_callback(_callback_of(self))

    def probe(self, *, out: str | Path | None = None, **keys: Any) -> Profile:
        """Measure time and memory of the Trainer's own loss with its loader, with all workers.

        The learning rate is assumed to suit the loader's batch times workers and accumulated
        passes, unless ``base_batch=`` names another global batch. Weights and optimizer are
        restored.

        Raises:
            SystemExit: A stop signal came; its code is 128 + the signal's number.
        """
        return self._probed(self._their_loader(), out=out, **keys)

    # -------------------------------------------------------------------------------------- begin

    def _their_loader(self) -> Any:
        """The Trainer's own loader, removed again from its accelerator's list."""
        loader = self._theirs()
        kept = self._trainer.accelerator._dataloaders
        kept[:] = [one for one in kept if one is not loader]
        return loader

    def _loader(self) -> Any:
        """The loader for the Trainer's request for training data; makes plan and sampler first."""
        trainer, args, theirs = self._trainer, self._trainer.args, self._their_loader()
        self._means = None  # found anew: the model may be another one
        first, workers = args.process_index == 0, args.world_size
        with refused_in_a_line(first=first):
            shuffle = shuffled(theirs, "the Trainer")
        if args.dataloader_drop_last:
            tell("dataloader_drop_last=True is left out: the last step counts, too", first=first)
        else:
            tell_taken_over(theirs, first)
        shares = self._shares
        if self._auto and self.plan is None:
            epochs = self._epochs_planned(theirs, first=first)
            self.plan = automatic(self._probed(theirs, **self._keys), epochs)
            self._shares = shares = shares or "follow"
        found = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if self.arrangement is None or found != self._set:  # else that of the first `train()` stays
            with refused_in_a_line(first=first):
                self.arrangement = arranged(
                    self.plan,
                    shares,
                    trainer="the Trainer",
                    workers=workers,
                    batch=batch_of(theirs),
                    # An automatic plan takes the place of the Trainer's accumulation.
                    passes=1 if self._auto else args.gradient_accumulation_steps,
                    samples=len(theirs.dataset),
                    words=_WORDS,
                )
                _refuse_unknown_losses(trainer, workers * self.arrangement.passes)
            if self.plan is not None:
                tell(self.arrangement.words(workers, **_WORDS), first=first)
        made = self.arrangement
        if self.plan is not None:
            self._scale_rates(made.rate)
        args.gradient_accumulation_steps = made.passes
        args.per_device_train_batch_size = max(1, made.global_batch // workers // made.passes)
        self._set = args.per_device_train_batch_size, args.gradient_accumulation_steps
        with refused_in_a_line(first=args.process_index == 0):
            self.sampler = made.sampler(
                theirs.dataset,
                rank=args.process_index,
                workers=workers,
                least=fewest_samples(trainer.model),
                fill=not self._counts_items,  # else labels of filling samples would be counted
                shuffle=shuffle,
                seed=args.data_seed if args.data_seed is not None else args.seed,
            )
        return with_sampler(theirs, self.sampler)

    def _scale_rates(self, factor: float) -> None:
        """Multiply the optimizer's rates, once; with `model_init` each `train()` has another."""
        trainer = self._trainer
        trainer.create_optimizer()
        optimizer = trainer.optimizer
        if _package_of(type(optimizer)) == "accelerate":  # from the first `train()` on
            optimizer = optimizer.optimizer
        if optimizer is not self._scaled:
            scale_rates([optimizer], [trainer.lr_scheduler], factor)
            self._scaled, self._rates = optimizer, _first_rates(optimizer)

    def _epochs_planned(self, theirs: Any, *, first: bool) -> int | None:
        """The Trainer's epochs, rounded up, for the plan; ``None`` if the job keys set others."""
        args = self._trainer.args
        if "epochs" in self._keys:
            return None
        if args.max_steps <= 0:
            return ceil(float(args.num_train_epochs))
        epochs = ceil(int(args.max_steps) * self._base_batch(theirs) / len(theirs.dataset))
        tell(
            f"max_steps={args.max_steps} is {counted(epochs, 'epoch')} of your batch, for which is "
            "planned; it stays as many steps of the plan's batch",
            first=first,
        )
        return epochs

    def _base_batch(self, loader: Any) -> int:
        """Samples per step over all workers, in the Trainer's own settings."""
        args = self._trainer.args
        with refused_in_a_line(first=args.process_index == 0):
            return int(batch_of(loader) * args.world_size * args.gradient_accumulation_steps)

    @property
    def _counts_items(self) -> bool:
        """Whether losses are sums over labels, divided by the number of labels of all workers."""
        trainer = self._trainer
        said = _said_of_losses(trainer)
        if said is not None:
            return said
        return _counts_labels(trainer) and not self._means

    def _probed(self, loader: Any, **keys: Any) -> Profile:
        trainer, model = self._trainer, self._trainer.model
        optimizer = trainer.create_optimizer() or trainer.optimizer

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            inputs = trainer._prepare_inputs(dict(batch))
            with trainer.accelerator.autocast(), trainer.compute_loss_context_manager():
                loss = self._compute(model, inputs)
            loss.backward()
            optimizer.step()

        training = model.training
        model.train()
        try:
            return probed(step, loader, base_batch=self._base_batch(loader), **keys)
        finally:
            model.train(training)

    # -------------------------------------------------------------------------------- in training

    def begin_training(self) -> None:
        """Prepare to measure speeds and to recover; model and optimizer are ready by now.

        Raises:
            PlanError: The training resumes a checkpoint of steps with another batch.
        """
        self._let_go()  # of a training that an error has ended
        self._epoch = None
        assert self.sampler is not None  # noqa: S101 - the Trainer has requested its data
        assert self.arrangement is not None  # noqa: S101 - as above
        with refused_in_a_line(first=self._trainer.args.process_index == 0):
            _refuse_other_steps(self._trainer.state, len(self.sampler) // self.sampler.passes)
        found = _first_rates(self._trainer.optimizer)
        if self._rates and found != self._rates:
            tell(
                f"the checkpoint's learning rate stays, {found[0]:.3g} in place of the plan's "
                f"{self._rates[0]:.3g}: the Trainer keeps it, and learning_rate= likewise",
                first=self._trainer.args.process_index == 0,
            )
        stay_in_group()
        trained = list(self._trainer.model.parameters())
        if self.arrangement.follow:
            self._follower = Follower(self.sampler, trained)
        if self._recover:
            accelerator, back = self._trainer.accelerator, self._trainer.accelerator.backward
            parts = recovering(trained, self._trainer.args.process_index, accelerator.scaler)
            accelerator.backward = lambda *loss, **how: parts.backward(partial(back, *loss, **how))
            self._recovering = parts

    def begin_epoch(self, steps: int) -> None:
        """Set the sampler's epoch and place; ``steps`` are the training's steps so far."""
        assert self.sampler is not None  # noqa: S101 - as above
        if self._epoch is None:  # the start of the training, or the place of a checkpoint
            self._epoch, done = divmod(steps, len(self.sampler) // self.sampler.passes)
        else:  # not computed from steps, since `should_epoch_stop` may have ended an epoch early
            self._epoch, done = self._epoch + 1, 0
        self.sampler.set_epoch(self._epoch)
        self._index = done * self.sampler.passes - 1
        if self._follower is not None:
            self._follower.before = self._index + 1

    def pause(self) -> None:
        """Leave an evaluation or a checkpoint out of the clock."""
        if self._follower is not None:
            self._follower.leave_out()

    def end_epoch(self) -> None:
        """Compute the shares of the next epoch."""
        first = self._trainer.args.process_index == 0
        divide_next_epoch(self._follower, self.sampler, first=first)

    def end_training(self) -> None:
        """Stop measuring and recovering, and leave the process group at exit."""
        if self._trainer.args.world_size > 1:
            leave_group_at_exit()
        self._let_go()

    def _let_go(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        if self._recovering is not None:
            self._recovering.close()
            self._recovering = None
            vars(self._trainer.accelerator).pop("backward", None)

    def _pass(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, *more: Any, **named: Any
    ) -> Any:
        """One `training_step` of the Trainer, which is a single forward and backward pass."""
        assert self.sampler is not None  # noqa: S101 - as above
        self._index += 1
        self._part = self.sampler.part(self._index)
        if self._follower is not None:
            self._follower.begin()
        try:
            if num_items_in_batch is not None and self._means is None:
                self._means = self._found_means(inputs, num_items_in_batch)
            # Told the number, the Trainer would not divide a mean by the passes, and would multiply
            # it by the number of workers.
            number = num_items_in_batch if self._counts_items else None
            self._training, self._asked = True, False
            value = self._step(model, inputs, number, *more, **named)
            self._tell_of_own_losses()
            return value
        finally:
            self._training = False
            if self._follower is not None:
                self._follower.exchanged()

    @property
    def _parts(self) -> int:
        """Passes of all workers in a step."""
        assert self.sampler is not None  # noqa: S101 - as above
        return int(self._trainer.args.world_size) * self.sampler.passes

    def _found_means(self, inputs: Any, number: Any) -> bool | None:
        """Whether losses stay the same if the step has twice as many labels; ``None``: no telling.

        The Trainer believes each network whose `forward` takes any arguments to divide by the
        number of labels. Many of Transformers' own do not, such as ResNet and SegFormer.

        Raises:
            PlanError: It is a function of the user's, whose losses the Trainer takes for sums.
        """
        trainer, model = self._trainer, self._trainer.model
        if _said_of_losses(trainer) is not None:
            return False
        means: bool | None = None
        inputs = trainer._prepare_inputs(dict(inputs))

        def loss_of(part: Any, labels: Any) -> float:
            with put_aside(gpus=True):  # some networks draw in evaluation mode, too
                # A copy, as computing a loss may take the labels out.
                return float(self._compute(model, dict(part), num_items_in_batch=labels))

        # In evaluation mode no statistics change.
        with evaluation_mode(model), without_gradients(), trainer.compute_loss_context_manager():
            for part in (*parts_of(inputs, samples_in(inputs), 2), inputs):
                try:
                    once, twice = (loss_of(part, labels) for labels in (number, 2 * number))
                except Exception:  # noqa: BLE001, S112 - such as all images in one tensor, uncut
                    continue  # if the whole batch fails, too, the training pass says why
                if once and isfinite(once):  # else there is no label in it
                    means = abs(twice - once) < abs(once) / 4
                    break
        if means and trainer.compute_loss_func is not None and self._parts > 1:
            with refused_in_a_line(first=trainer.args.process_index == 0):
                raise PlanError(
                    "compute_loss_func ignores num_items_in_batch, so that parts of a step of "
                    "unequal size would count alike, and too much: let it return the sum over "
                    "labels divided by that number"
                )
        return means

    def _tell_of_own_losses(self) -> None:
        """Print a line after a pass whose loss did not come from `compute_loss`, once."""
        if self._asked or self._told or self._parts == 1:
            return
        self._told = True
        tell(
            f"training_step of {type(self._trainer).__name__} takes its loss from elsewhere than "
            "self.compute_loss(model, inputs): call that, or batches of unequal size count alike",
            first=self._trainer.args.process_index == 0,
        )

    def _loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        """The Trainer's loss; in training its gradient is weighed by the batch's samples."""
        if not self._training:
            return self._compute(model, inputs, *more, **named)
        self._asked = True
        known = named.get("num_items_in_batch") is not None or _said_of_losses(self._trainer)
        items = bool(known) and self._counts_items

        def compute(part: Any) -> Any:
            return self._compute(model, dict(part), *more, **named)

        if self._recovering is None:
            loss = compute(inputs)
        else:
            loss = self._recovering.loss(compute, inputs, wrapper=model, summed=items)
        if not items:  # else each label has the same weight already
            weigh_gradient(loss, self._part, self._trainer.args.world_size)
        return loss


def _counts_labels(trainer: Any) -> bool:
    """Whether a Trainer counts the labels of a step, for losses to be divided by their number."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def _said_of_losses(trainer: Any) -> bool | None:
    """Whether a Trainer's own losses are divided by a number of the whole step, if it says so."""
    said: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)  # older ones say nothing
    return said


def _package_of(kind: Any) -> str:
    return str(kind.__module__).partition(".")[0]


def _refuse_unknown_losses(trainer: Any, parts: int) -> None:
    """Refuse losses of a step's ``parts`` that may be sums over labels, or means.

    A `compute_loss` of the user's own is told the number of labels, and may divide by it or not.
    One that calls the Trainer's does.
    """
    if parts == 1 or not _counts_labels(trainer) or _said_of_losses(trainer) is not None:
        return
    for kind in type(trainer).__mro__:
        if _package_of(kind) == _package_of(_Callback):  # Transformers' own
            return
        own: Any = vars(kind).get("compute_loss")
        code = getattr(unwrap(own), "__code__", None)
        if code is not None and "compute_loss" not in code.co_names:
            raise PlanError(
                f"{kind.__name__} computes its loss by itself, in compute_loss: set in the class "
                "loss_is_scaled_for_ga = False if it is the mean over its batch, or True if it is "
                "a sum divided by num_items_in_batch, times the number of workers"
            )


def _first_rates(optimizer: Any) -> list[float]:
    """Learning rates of an optimizer's parameter groups, before any scheduler."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def _callback_of(training: ForTransformers) -> Any:
    """A callback that passes the Trainer's events to ``training``."""

    class Forwarding(_Callback):  # type: ignore[misc] # a class wherever it is installed
        """Passes the Trainer's events on."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            """When model and optimizer are ready."""
            training.begin_training()

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Before the loader is iterated."""
            del args, control
            training.begin_epoch(state.global_step)

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            """After an evaluation."""
            training.pause()

        def on_save(self, *_: Any, **__: Any) -> None:
            """After a checkpoint."""
            training.pause()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            """After the epoch's last step."""
            training.end_epoch()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            """After the last epoch."""
            training.end_training()

    return Forwarding()


def _refuse_other_steps(state: Any, each: int) -> None:
    """Refuse to resume a training whose epochs had another number of steps than ``each``.

    The Trainer finds its place by the number of steps: samples would be left out, or come twice.
    """
    if state.epoch and abs(state.epoch * each - state.global_step) > 0.5:
        before = state.global_step / state.epoch
        raise PlanError(
            f"the checkpoint is of a training with {before:.0f} steps an epoch, and here are "
            f"{each}, so samples would be left out or come twice: give "
            "per_device_train_batch_size= and gradient_accumulation_steps= the global batch of "
            "then; after an epoch that `should_epoch_stop` ended the Trainer cannot find its place"
        )


def _refuse_options(trainer: Any) -> None:
    """Refuse options with which samples would not count once, or not equally."""
    args, accelerator = trainer.args, trainer.accelerator
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    alone = not args.average_tokens_across_devices and args.world_size > 1
    local = alone and _counts_labels(trainer) and _said_of_losses(trainer) is not False
    for found, what, try_ in (
        (kind not in ("NO", "MULTI_CPU", "MULTI_GPU"), f"{kind}", "DDP, as torchrun starts it"),
        (args.n_gpu > 1, "DataParallel", "torchrun with a process for each GPU"),
        (args.accelerator_config.split_batches, "split_batches", "leaving it out"),
        (bool(args.accelerator_config.dispatch_batches), "dispatch_batches", "leaving it out"),
        (args.auto_find_batch_size, "auto_find_batch_size", 'bw.ForTransformers(trainer, "auto")'),
        (args.ignore_data_skip, "ignore_data_skip", "leaving it out"),
        (local, "average_tokens_across_devices=False", "leaving it at True"),
    ):
        if found:
            raise PlanError(f"bw.ForTransformers does not go with {what}: try {try_}")
