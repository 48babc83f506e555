"""A plan inside Lightning's Trainer: ``Trainer(callbacks=[bw.ForLightning(...)])`` is all it takes.

Lightning keeps its loop, DDP, precision, checkpoints and logging. The callback replaces the sampler
of the training data, weighs gradients of unequal batches, and divides each epoch by the workers'
speeds in the previous one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from batchwright.errors import PlanError
from batchwright.records import Plan, Profile
from batchwright.training.batches.following import Follower
from batchwright.training.batches.unequal import Part, Sampler, place_among_workers, weigh_gradient
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
from batchwright.workload.extras import import_library

_Callback: Any = import_library("lightning.pytorch").Callback
_connector = import_library("lightning.pytorch.trainer.connectors.data_connector")
_Source: Any = _connector._DataLoaderSource

_STRATEGIES = ("DDPStrategy", "SingleDeviceStrategy")
_WORDS = {"batch": "batch_size", "accumulation": "accumulate_grad_batches"}


class ForLightning(_Callback):  # type: ignore[misc] # a class wherever Lightning is installed
    """Runs a plan under Lightning's own DDP.

    Each sample counts exactly once per epoch, with any number of workers, also if the training was
    resumed within the epoch. Gradients are means over samples, whatever the shares. Loggers and
    progress bars see the loss that your `training_step` returns.

    Args:
        plan: A plan or its file. ``None``: your batch and accumulation stay. ``"auto"``: when `fit`
            begins, all workers probe your `training_step`, and a plan is made.
        shares: Shares of the workers: ``"follow"`` their speeds, epoch by epoch; ``"equal"``; or a
            number for each worker. ``None``: those of the plan; without a plan, or with an
            automatic one, ``"follow"``.
        seed: Seed of the order of the samples.
        recover: Whether a batch for which memory runs out is computed again in smaller parts.
        keys: With ``"auto"``: job keys for probe and plan, such as ``probe={"budget": 10}``.

    Attributes:
        plan: The plan that is followed; ``None``: no plan.
        arrangement: Batch, passes, shares and rate factor, once `fit` has begun.
        sampler: The sampler of this worker, once `fit` has begun.

    Raises:
        ArgumentError: Job keys without ``"auto"``.
        PlanError: The Trainer's options contradict the plan; raised when `fit` begins.
        DataError: The data set can only be iterated; raised when `fit` begins.
    """

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        *,
        shares: Shares | None = None,
        seed: int = 0,
        recover: bool = True,
        **keys: Any,
    ) -> None:
        self.plan = None if plan == "auto" else plan
        self._auto, self._shares, self._seed = plan == "auto", shares, seed
        with refused_in_a_line(first=place_among_workers()[0] == 0):
            arguments = "shares=, seed= and recover="
            refuse_unused(keys, "ForLightning", auto=self._auto, others=arguments)
        self._recover, self._keys = recover, keys
        self.arrangement: Arrangement | None = None
        self.sampler: Sampler | None = None
        self._follower: Follower | None = None
        self._undo, self._probing = ExitStack(), False
        self._index, self._part = -1, Part(1, 1, 1)
        self._weighed, self._told = False, False  # a loss of the batch; whether none was told
        self._end_weighing: Callable[[], None] | None = None  # of a loss in its backward pass
        # Lightning's counts of batches, and those processed before the current one.
        self._counts: Any = None
        self._before = 0
        self._kept: dict[str, Any] | None = None  # the arrangement of a checkpoint
        self._scaled = 1.0  # factor that is part of the rates of a checkpoint already

    # --------------------------------------------------------------------------- before and after

    @staticmethod
    def probe(module: Any, loader: Any, *, out: str | Path | None = None, **keys: Any) -> Profile:
        """Measure time and memory of a module's `training_step` with its loader, without a Trainer.

        Args:
            module: A LightningModule with automatic optimization, on its device.
            loader: Its training loader. The optimizer's rate is assumed to suit the loader's batch
                times the number of workers, unless ``base_batch=`` names another global batch.
            out: File for the profile.
            keys: Job keys.

        Raises:
            SystemExit: A stop signal came; its code is 128 + the signal's number.
        """
        optimizers = _configured(module)
        rank, workers = place_among_workers()
        with refused_in_a_line(first=rank == 0):
            base = batch_of(loader) * workers
        return _probe(module, optimizers, loader, base, nullcontext, out=out, **keys)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the Trainer's options, and replace the source of its training data."""
        if stage != "fit":
            return
        with refused_in_a_line(first=trainer.global_rank == 0):
            _refuse_options(trainer, planned=self._auto or self.plan is not None)
            self._shares = read_shares(self._shares)
            if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
                raise PlanError(
                    "training_step takes dataloader_iter, and so fetches its batches by itself: "
                    "bw.ForLightning needs training_step(self, batch, batch_idx)"
                )
        stay_in_group()
        loop, theirs = trainer.fit_loop, trainer.fit_loop._data_source

        def request() -> Any:
            # A probe configures optimizers, which may ask the Trainer for its number of steps.
            return theirs.dataloader() if self._probing else self._loader(trainer, theirs)

        loop._data_source = _ReplacedSource(theirs.instance, theirs.name, request)
        passes = trainer.accumulate_grad_batches

        def put_back() -> None:
            loop._data_source, trainer.accumulate_grad_batches = theirs, passes

        self._undo.callback(put_back)

    def _loader(self, trainer: Any, source: Any) -> Any:
        """The loader for Lightning's request for training data; makes plan and sampler first."""
        theirs, module = source.dataloader(), trainer.lightning_module
        first, workers = trainer.global_rank == 0, trainer.world_size
        with refused_in_a_line(first=first):
            shuffle = shuffled(theirs, "Lightning")
        tell_taken_over(theirs, first)
        if self._auto and self.plan is None and self._kept is None:
            with refused_in_a_line(first=first):
                epochs = _epochs_planned(trainer, self._keys)
            self.plan = automatic(self._probed(trainer, theirs), epochs)
        planned = self._auto and self.plan is not None  # in this fit or in one before
        shares = self._shares or ("follow" if planned else None)
        with refused_in_a_line(first=first):
            self.arrangement = arranged(
                self.plan,
                shares,
                trainer="Lightning",
                workers=workers,
                batch=batch_of(theirs),
                # An automatic plan takes the place of the Trainer's accumulation.
                passes=1 if planned else trainer.accumulate_grad_batches,
                samples=len(theirs.dataset),
                words=_WORDS,
            )
        if self._kept is not None:  # that of the resumed run, divided as is asked for now
            own = {"shares": self.arrangement.shares, "follow": self.arrangement.follow}
            self.arrangement = Arrangement(**self._kept | own)
        if self.arrangement.passes > 1 and not module.automatic_optimization:
            with refused_in_a_line(first=first):
                raise PlanError(
                    f"the plan accumulates over {self.arrangement.passes} passes, and a "
                    "training_step that optimizes by itself takes one: plan again with a "
                    "micro_batch= of the local batch"
                )
        trainer.accumulate_grad_batches = self.arrangement.passes
        if self.plan is not None:
            tell(self.arrangement.words(workers, **_WORDS), first=first)
        with refused_in_a_line(first=first):
            self.sampler = self.arrangement.sampler(
                theirs.dataset,
                rank=trainer.global_rank,
                workers=workers,
                least=fewest_samples(module),
                shuffle=shuffle,
                seed=self._seed,
            )
        return _Feed(with_sampler(theirs, self.sampler), self.sampler, self)

    def _probed(self, trainer: Any, theirs: Any) -> Profile:
        module, self._probing = trainer.lightning_module, True
        try:
            optimizers = trainer.optimizers or _configured(module)
            base = batch_of(theirs) * trainer.world_size * trainer.accumulate_grad_batches
            module.to(trainer.strategy.root_device)
            return _probe(
                module,
                optimizers,
                theirs,
                base,
                trainer.precision_plugin.train_step_context,
                move=partial(trainer.strategy.batch_to_device, device=trainer.strategy.root_device),
                **self._keys,
            )
        finally:
            self._probing = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Scale the rates, and prepare to measure speeds and to recover from lack of memory."""
        assert self.arrangement is not None  # noqa: S101 - Lightning has requested its data
        assert self.sampler is not None  # noqa: S101 - as above
        # Lightning loads a loader's state when it makes the loader. `estimated_stepping_batches` in
        # `configure_optimizers` has that made before the checkpoint's loops are read.
        trainer.fit_loop._load_combined_loader_states()
        _align_progress(trainer.fit_loop.epoch_loop.batch_progress, self.sampler)
        schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
        scale_rates(trainer.optimizers, schedulers, self.arrangement.rate / self._scaled)
        trained = list(pl_module.parameters())
        if self.arrangement.follow:
            self._follower = Follower(self.sampler, trained)
            self._undo.callback(self._follower.close)
        if self._recover and pl_module.automatic_optimization:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            parts = recovering(trained, trainer.global_rank, scaler)
            step = pl_module.training_step

            def training_step(batch: Any, *more: Any, **named: Any) -> Any:
                return parts.loss(lambda part: step(part, *more, **named), batch)

            back = pl_module.backward

            def backward(loss: Any, *more: Any, **named: Any) -> None:
                parts.backward(lambda: back(loss, *more, **named))

            self._undo.callback(parts.close)
            # Lightning inspects the signature.
            training_step.__wrapped__ = step  # type: ignore[attr-defined]
            _replace(pl_module, self._undo, training_step=training_step, backward=backward)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the process group at exit, since the training has ended well."""
        del pl_module
        if trainer.world_size > 1:
            leave_group_at_exit()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore Trainer and module."""
        del trainer, pl_module, stage
        self._undo.close()
        self._follower = None
        self._scaled = 1.0  # a later `fit` has new optimizers

    on_exception = teardown

    # -------------------------------------------------------------------------------- in training

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the sampler's epoch."""
        del pl_module
        assert self.sampler is not None  # noqa: S101 - as above
        self.sampler.set_epoch(trainer.current_epoch)
        self._index = -1

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Find the weight of the batch, and start its clock."""
        del pl_module, batch, batch_idx
        assert self.sampler is not None  # noqa: S101 - as above
        self._counts = trainer.fit_loop.epoch_loop.batch_progress.current
        self._before = self._counts.processed
        self._index += 1
        self._part, self._weighed = self.sampler.part(self._index), False
        if self._follower is not None:
            self._follower.begin()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Weigh the gradient of each loss of the batch."""
        del pl_module
        self._weighed = True
        self._end_weighing = weigh_gradient(loss, self._part, trainer.world_size)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Print a line before a step of a batch whose loss was never weighed, once."""
        del optimizer
        if pl_module.automatic_optimization or self._weighed or self._told:
            return
        self._told = True
        tell(
            "the optimizer steps without self.manual_backward(loss): call that in place of "
            "loss.backward(), or batches of unequal size count alike",
            first=trainer.global_rank == 0 and trainer.world_size > 1,
        )

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Weigh that loss no longer, and note the end of the exchange for the clock."""
        del trainer, pl_module
        if self._end_weighing is not None:
            self._end_weighing()
            self._end_weighing = None
        if self._follower is not None:
            self._follower.exchanged()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the validation out of the clock."""
        del trainer, pl_module
        if self._follower is not None:
            self._follower.leave_out()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Compute the shares of the next epoch."""
        del pl_module
        divide_next_epoch(self._follower, self.sampler, first=trainer.global_rank == 0)

    # --------------------------------------------------------------------------------- checkpoints

    @property
    def trained(self) -> int:
        """Batches of this epoch that were trained on, without one that an error has interrupted."""
        if self._index < 0:
            return 0
        return self._index + int(self._counts.processed > self._before)

    def state_dict(self) -> dict[str, Any]:
        """The arrangement, so that a resumed run keeps the batch of an automatic plan."""
        made = self.arrangement
        return {} if made is None else {"arrangement": vars(made) | {"shares": None}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the arrangement of a checkpoint."""
        made = state_dict.get("arrangement")
        self._scaled = 1.0 if made is None else made["rate"]
        if self._auto:
            self._kept = made


class _ReplacedSource(_Source):  # type: ignore[misc] # as above
    """The source of Lightning's training loader, in place of the user's."""

    def __init__(self, instance: Any, name: str, request: Callable[[], Any]) -> None:
        super().__init__(instance, name)
        self._request = request

    def dataloader(self) -> Any:
        """Our loader."""
        return self._request()


class _Feed:
    """A loader that Lightning does not replace, since its class is not PyTorch's.

    Its state is that of the sampler; Lightning saves it in checkpoints.
    """

    def __init__(self, loader: Any, sampler: Sampler, training: ForLightning) -> None:
        self._loader, self._sampler, self._training = loader, sampler, training
        self.dataset, self.batch_sampler = loader.dataset, sampler

    @property
    def worker_init_fn(self) -> Callable[[int], None] | None:
        """First function of a loader process; if unset, Lightning sets one that seeds by rank."""
        function: Callable[[int], None] | None = self._loader.worker_init_fn
        return function

    @worker_init_fn.setter
    def worker_init_fn(self, begin: Callable[[int], None]) -> None:
        self._loader.worker_init_fn = begin

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)  # a module may ask for anything that loaders have

    @property
    def batch_size(self) -> int:
        """Most samples of a pass of this worker, where PyTorch's loader has ``None``."""
        own = self._sampler.local_batch_sizes[self._sampler.rank]
        return -(-own // self._sampler.passes)

    @property
    def _iterator(self) -> Any:
        """PyTorch's iterator with `persistent_workers`, whose processes Lightning ends with fit."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._loader._iterator = iterator

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader  # loading starts with the first batch, when the epoch is known

    def state_dict(self) -> dict[str, Any]:
        """The place of the training in the epoch, not that of loader processes."""
        return self._sampler.state_dict(self._training.trained)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the place of a checkpoint."""
        made = self._training.arrangement
        assert made is not None  # noqa: S101 - this feed is made after it
        self._sampler.load_state_dict(made.resumed(state))


def _align_progress(progress: Any, sampler: Sampler) -> None:
    """Set Lightning's counts of batches to the place where the sampler continues.

    That is the start of the step in which a checkpoint was written, since accumulated gradients are
    lost. A checkpoint counts batches of its own training, whose global batch may have been another;
    after a whole epoch the counts are set to whole steps.
    """
    if sampler.left < len(sampler):
        ahead = progress.current.processed - (len(sampler) - sampler.left)
    else:
        ahead = progress.current.processed % sampler.passes
    for counts in (progress.current, progress.total):
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) - ahead)


def _replace(module: Any, undo: ExitStack, **functions: Callable[..., Any]) -> None:
    """Replace methods of a module until ``undo``; then it has its class's or its own again."""
    own = vars(module)
    for name, function in functions.items():
        if name in own:  # as `torch.compile` gives it one
            undo.callback(own.__setitem__, name, own[name])
        else:
            undo.callback(own.pop, name, None)
        own[name] = function


def _refuse_options(trainer: Any, *, planned: bool) -> None:
    """Refuse options with which samples would not count once, or that set batch and rate, too."""
    strategy = type(trainer.strategy).__name__
    callbacks = {kind.__name__ for one in trainer.callbacks for kind in type(one).__mro__}
    if trainer.fast_dev_run:
        few = int(trainer.fast_dev_run)
        note = f"fast_dev_run={few}: an epoch is its first {few} batches, not all samples"
        tell(note, first=trainer.global_rank == 0)
    limit = None if trainer.fast_dev_run else trainer.limit_train_batches
    limited = limit is not None and (isinstance(limit, int) or limit != 1.0)  # 1 is one batch
    for found, what, try_ in (
        (strategy not in _STRATEGIES, f"strategy {strategy}", 'strategy="ddp"'),
        (bool(trainer.overfit_batches), "overfit_batches", "a smaller data set"),
        (limited, f"limit_train_batches={limit}", "a smaller data set"),
        (
            bool(trainer.reload_dataloaders_every_n_epochs),
            "reload_dataloaders_every_n_epochs",
            "a data set that changes by itself",
        ),
        (
            "GradientAccumulationScheduler" in callbacks,
            "GradientAccumulationScheduler",
            "accumulate_grad_batches=",
        ),
        ("BatchSizeFinder" in callbacks, "BatchSizeFinder", 'bw.ForLightning("auto")'),
        (
            planned and "LearningRateFinder" in callbacks,
            "LearningRateFinder, as the plan makes the rate follow the batch",
            "one of the two",
        ),
    ):
        if found:
            raise PlanError(f"bw.ForLightning does not go with {what}: try {try_}")


def _epochs_planned(trainer: Any, keys: Mapping[str, Any]) -> int | None:
    """The Trainer's epochs, for the plan; ``None`` if the job keys set others."""
    if "epochs" in keys:
        return None
    epochs: int = trainer.max_epochs
    if epochs == -1:
        raise PlanError(
            'bw.ForLightning("auto") plans for a number of epochs, and the Trainer has none '
            f"(max_epochs=-1, max_steps={trainer.max_steps}): set max_epochs=, or give "
            'bw.ForLightning("auto", epochs=...)'
        )
    return epochs


def _configured(module: Any) -> list[Any]:
    """The optimizers of a module, whatever the form of its `configure_optimizers`' result."""
    given = module.configure_optimizers()
    if isinstance(given, dict):
        given = given["optimizer"]
    if isinstance(given, tuple):
        given = given[0]
    several = given if isinstance(given, Sequence) else [given]
    return [one["optimizer"] if isinstance(one, dict) else one for one in several]


def _probe(
    module: Any,
    optimizers: Sequence[Any],
    loader: Any,
    base: int,
    context: Callable[[], Any],
    *,
    move: Callable[[Any], Any] | None = None,
    **keys: Any,
) -> Profile:
    """A profile of a step as Lightning takes it: `training_step`, backward pass and update."""
    if not module.automatic_optimization:
        raise PlanError(
            "a training_step that optimizes by itself cannot be probed: write its step as a "
            "function and give it to bw.probe(step=...)"
        )
    takes = len(inspect.signature(module.training_step).parameters)

    def step(batch: Any) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch = move(batch) if move else module.transfer_batch_to_device(batch, module.device, 0)
        with context():
            output = module.training_step(*(batch, 0)[: max(1, takes)])
        (output["loss"] if isinstance(output, dict) else output).backward()
        for optimizer in optimizers:
            optimizer.step()

    with ExitStack() as undo:
        nothing = dict.fromkeys(("log", "log_dict"), lambda *_, **__: None)
        _replace(module, undo, **nothing)  # there is no Trainer to log to
        modes = [(one, one.training) for one in module.modules()]
        module.train()
        try:
            return probed(step, loader, base_batch=base, **keys)
        finally:
            for one, mode in modes:
                one.training = mode
