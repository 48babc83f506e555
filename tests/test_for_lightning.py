"""`bw.ForLightning`: unequal, exactly-once batches under Lightning's own DDP."""

from __future__ import annotations

import atexit
import io
import os
import pickle
import signal
from contextlib import redirect_stderr
from importlib.util import find_spec
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import batchwright as bw
from batchwright.errors import ArgumentError, DataError, PlanError
from gloo import crew_with
from other_trainers import BATCH, SAMPLES, alike, data, loader
from paced import paced_passes
from test_session import make_tiny_plan

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="pip install 'batchwright[lightning]'"
)


def fitted(rank, workers, shares, *, passes=1, batch=BATCH, module=None, more=(), **how):
    from lightning_parts import Module, trainer

    module = Module(**(module or {}))
    callback = bw.ForLightning(shares=shares)
    try:
        made = trainer(workers, callback, *more, accumulate_grad_batches=passes, **how)
        made.fit(module, loader(batch))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    weights = [p.detach().clone() for p in module.parameters()]
    return module.seen, module.gradients, weights, callback.sampler.local_batch_sizes


@pytest.fixture(scope="module")
def crew():
    """Workers that have imported Lightning, which takes seconds."""
    with crew_with("pytest", "lightning_parts") as crew:
        yield crew


@pytest.fixture(scope="module")
def alone():
    return fitted(0, 1, "equal", batch=2 * BATCH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("passes", "module"),
    [
        (1, {}),
        (2, {}),
        (1, {"manual": True}),
        (1, {"manual": True, "halves": True}),
        (1, {"room": 4}),
        (1, {"back": 4}),
        (2, {"back": 2}),
    ],
    ids=[
        "plain",
        "accumulating",
        "two optimizers",
        "two backward passes",
        "out of memory",
        "in backward",
        "and accumulating",
    ],
)
def test_gradients_are_those_of_one_process(crew, alone, passes, module):
    how = {"passes": passes, "batch": BATCH // passes, "module": module}
    both = crew.together(fitted_with, (3, 1), how, workers=2)
    for epoch in range(2):
        if "back" in module:
            break  # what is computed again is seen again
        seen = [i for one in both for i in of_epoch(one[0], epoch)]
        assert sorted(set(seen)) == list(range(SAMPLES))
        assert len(seen) == SAMPLES
    for one in both:
        assert len(one[1]) == len(alone[1]) == 8
        for mine, whole in zip(one[1], alone[1], strict=True):
            alike(mine, whole)
        alike(one[2], alone[2])
        assert one[3] == (12, 4)


@pytest.mark.slow
@pytest.mark.parametrize("back", [None, 4], ids=["plain", "out of memory in backward"])
def test_parameters_that_some_batches_leave_unused_have_the_gradient_of_one_process(crew, back):
    strategy, module = "ddp_find_unused_parameters_true", {"rare": SAMPLES // 6, "back": back}
    alone = fitted(0, 1, "equal", batch=2 * BATCH, module={"rare": SAMPLES // 6})
    both = crew.together(fitted_with, (3, 1), {"module": module, "strategy": strategy}, workers=2)
    few = [sum(i < SAMPLES // 6 for i in batch) for one in both for batch in one[0]]
    assert {0} < set(few)
    for one in both:
        for mine, whole in zip((*one[1], one[2]), (*alone[1], alone[2]), strict=True):
            alike(mine, whole)


def of_epoch(seen, epoch):
    half = len(seen) // 2
    return [i for batch in seen[epoch * half : (epoch + 1) * half] for i in batch]


def fitted_with(rank, shares, how):
    return fitted(rank, 2, shares, **how)


@pytest.mark.slow
def test_shares_follow_a_slow_worker(crew):
    both = crew.together(slowed, workers=2)
    assert both[0] == both[1]
    slow, quick = both[0]
    assert slow + quick == 2 * BATCH
    assert slow < quick / 2


def slowed(rank):
    with paced_passes() as take:
        slow = {"take": lambda samples: take((0.008 if rank == 0 else 0.002) * samples)}
        return fitted(rank, 2, None, module=slow, max_epochs=3)[3]


def ended(rank):
    from batchwright.workflows.trainers.arrangement import stay_in_group
    from lightning_parts import Module, trainer

    with mock.patch.object(atexit, "register") as registered:
        trainer(2, bw.ForLightning(), max_epochs=1).fit(Module(), loader())
    try:
        assert torch.distributed.is_initialized()
        with mock.patch.object(atexit, "unregister") as taken_back:  # the next one may fail
            stay_in_group()
        assert taken_back.call_args in registered.call_args_list
        for (at_exit, *_), _ in registered.call_args_list:
            at_exit()
        return torch.distributed.is_initialized()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_the_process_group_is_left_before_python_ends(crew):
    """Else gloo's threads may abort a process that has done all."""
    assert crew.together(ended, workers=2) == [False, False]


def stopped_and_resumed(rank, folder, workers_then):
    """An epoch left in its middle with two workers; what is seen, and the checkpoint."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_parts import Module, trainer

    module, callback = Module(), bw.ForLightning(shares=(3, 1))
    save = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    try:
        made = trainer(2, callback, save, max_steps=6, enable_checkpointing=True)
        made.fit(module, loader())
    finally:
        torch.distributed.destroy_process_group()
    return module.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "batch"), [(1, 2 * BATCH), (2, BATCH), (1, BATCH), (2, 2 * BATCH), (1, 3 * BATCH)]
)
def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_exactly(
    crew, tmp_path, alone, workers, batch
):
    before = crew.together(stopped_and_resumed, str(tmp_path), workers, workers=2)
    (kept,) = Path(tmp_path).glob("*step=6.ckpt")
    after = crew.together(resumed, str(kept), workers, batch, workers=workers)
    seen = [i for one in before for batch in one[4:] for i in batch]
    seen += [i for one, *_ in after for batch in one for i in batch]
    assert sorted(seen) == list(range(SAMPLES))
    for _, weights, validated in after:
        assert set(validated) == {1}  # at the end of the epoch that was left
        if workers * batch == 2 * BATCH:
            alike(weights, alone[2])


def resumed(rank, kept, workers, batch):
    from lightning_parts import Module, trainer

    module, validated = Module(), []
    module.validation_step = lambda batch, batch_idx: validated.append(module.current_epoch)
    try:
        made = trainer(workers, bw.ForLightning())
        made.fit(module, loader(batch), loader(), ckpt_path=kept, weights_only=False)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return module.seen, [p.detach() for p in module.parameters()], validated


def test_a_schedule_that_asks_for_the_number_of_steps_changes_nothing_of_a_resumed_epoch(tmp_path):
    """Lightning then makes the loader before it reads the checkpoint's place in the epoch."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_parts import Module, trainer

    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            steps = self.trainer.estimated_stepping_batches
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)]

    before, after = Scheduled(), Scheduled()
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer(1, bw.ForLightning(), save, max_steps=5, enable_checkpointing=True).fit(
        before, loader()
    )
    (kept,) = tmp_path.glob("*step=5.ckpt")
    trainer(1, bw.ForLightning(), max_epochs=1).fit(after, loader(), ckpt_path=kept)
    seen = [i for batch in before.seen + after.seen for i in batch]
    assert sorted(seen) == list(range(SAMPLES))


def divided(rank, kept, shares):
    """Local batches of a training that goes on from a checkpoint."""
    from lightning_parts import Module, trainer

    callback = bw.ForLightning(shares=shares)
    try:
        trainer(2, callback, max_steps=7).fit(
            Module(), loader(), ckpt_path=kept, weights_only=False
        )
    finally:
        torch.distributed.destroy_process_group()
    return callback.sampler.local_batch_sizes


@pytest.mark.slow
def test_shares_that_are_asked_for_hold_against_those_of_a_checkpoint(crew, tmp_path):
    crew.together(stopped_and_resumed, str(tmp_path), 2, workers=2)
    (kept,) = Path(tmp_path).glob("*step=6.ckpt")
    for shares, sizes in ((None, (12, 4)), ("equal", (8, 8)), ((1, 3), (4, 12))):
        assert crew.together(divided, str(kept), shares, workers=2) == [sizes] * 2


def broken_off(rank, folder, passes, how):
    """An epoch broken off in its third batch, by a stop signal to all workers or by an error."""
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    from lightning_parts import Module, trainer

    calls = []

    def take(samples):
        calls.append(samples)
        if len(calls) == 3:
            if how == "error":
                raise ValueError("broken off")
            os.kill(os.getpid(), signal.SIGTERM)

    module = Module(take=take)
    more = (bw.ForLightning(shares=(3, 1)), OnExceptionCheckpoint(folder))
    made = trainer(2, *more, accumulate_grad_batches=passes, enable_checkpointing=True)
    with pytest.raises((SystemExit, ValueError)):
        made.fit(module, loader(BATCH // passes))
    return module.seen


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("how", ["stop", "error"])
def test_an_epoch_that_was_broken_off_goes_on_exactly(crew, tmp_path, alone, passes, how):
    before = crew.together(broken_off, str(tmp_path), passes, how, workers=2)
    trained = (3 if how == "stop" else 2) // passes * passes  # of a step in part nothing is kept
    after = crew.together(gone_on, str(tmp_path / "on_exception.ckpt"), passes, workers=2)
    seen = [i for one in before for batch in one[:trained] for i in batch]
    seen += [i for one in after for batch in one[0] for i in batch]
    assert sorted(seen) == sorted(2 * list(range(SAMPLES)))
    for one in after:
        alike(one[1], alone[2])


def gone_on(rank, kept, passes):
    from lightning_parts import Module, trainer

    module, callback = Module(), bw.ForLightning()
    made = trainer(2, callback, accumulate_grad_batches=passes)
    made.fit(module, loader(BATCH // passes), ckpt_path=kept, weights_only=False)
    return module.seen, [p.detach() for p in module.parameters()]


def planned(rank, workers):
    from lightning_parts import Module, trainer

    module = Module()
    callback = bw.ForLightning("auto", probe={"budget": 0.3}, micro_batch=16)
    try:
        made = trainer(workers, callback, max_epochs=1)
        made.fit(module, loader())
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    rates = [group["lr"] for one in made.optimizers for group in one.param_groups]
    return callback.plan, callback.arrangement, rates, len(module.gradients)


@pytest.mark.slow
def test_an_automatic_batch_is_planned_by_all_workers_together(crew):
    (plan, made, rates, steps), other = crew.together(planned, 2, workers=2)
    assert other[0] == plan
    assert (plan.workers, made.global_batch) == (2, plan.stages[0].global_batch_size)
    assert plan.job.base_batch == 2 * BATCH
    assert rates == pytest.approx([0.2 * plan.learning_rate.peak / plan.learning_rate.base])
    assert steps == -(-SAMPLES // made.global_batch)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, 4),
        pytest.param(2, 4, marks=pytest.mark.slow),
        pytest.param(4, 4, marks=pytest.mark.slow),
        (4, None),
    ],
)
def test_a_resumed_training_has_the_rate_of_its_plan_whatever_it_had_before(
    tmp_path, before, after
):
    from lightning_parts import Module, trainer

    def planned(factor):
        return bw.ForLightning(make_tiny_plan((BATCH * factor,), samples=SAMPLES, factor=factor))

    callbacks = [] if before is None else [planned(before)]
    made = trainer(1, *callbacks, max_epochs=1)
    made.fit(Module(), loader())
    made.save_checkpoint(tmp_path / "kept.ckpt")
    again = trainer(1, bw.ForLightning() if after is None else planned(after))
    again.fit(Module(), loader(), ckpt_path=tmp_path / "kept.ckpt", weights_only=False)
    assert again.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.2 * (after or 1))
    again.fit_loop.epoch_progress.reset()
    again.fit(Module(), loader())  # with optimizers of its own
    assert again.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.2 * (after or 1))


def stopped_in_probe(rank):
    from lightning_parts import Module, trainer

    steps, before, said = [], signal.getsignal(signal.SIGTERM), io.StringIO()

    def take(samples):
        steps.append(samples)
        if rank == 1 and len(steps) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    callback = bw.ForLightning("auto", probe={"budget": 20}, micro_batch=16)
    with redirect_stderr(said), pytest.raises(SystemExit) as end:
        trainer(2, callback).fit(Module(take=take), loader())
    told = [line for line in said.getvalue().splitlines() if line.startswith("batchwright:")]
    return end.value.code, told, signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_a_worker_that_is_asked_to_stop_ends_the_probe_of_all(crew):
    """Lightning's own handler would wait for others that are at something else."""
    line = "batchwright: error: probe stopped by SIGTERM"
    assert crew.together(stopped_in_probe, workers=2) == [(143, [line], True), (143, [], True)]


@pytest.mark.slow
def test_a_module_is_probed_without_a_trainer_and_left_as_it_was():
    from lightning_parts import Module, trainer

    module = Module()
    weights = [p.detach().clone() for p in module.parameters()]
    profile = bw.ForLightning.probe(module, loader(), probe={"budget": 0.3})
    alike([p.detach() for p in module.parameters()], weights)
    assert (profile.job.base_batch, profile.job.learning_rate) == (BATCH, 0.2)
    assert bw.plan(profile, epochs=2, global_batch=32).stages[0].global_batch_size == 32
    assert "log" not in vars(module)
    accumulating = bw.plan(profile, global_batch=32, micro_batch=16)
    made = trainer(1, bw.ForLightning(accumulating))
    with pytest.raises(PlanError, match="accumulates over 2 passes, and a training_step that"):
        made.fit(Module(manual=True), loader())


class Halved(DataLoader):
    def __iter__(self):
        for inputs, *more in super().__iter__():
            yield inputs / 2, *more


class Begun(DataLoader):
    def _get_iterator(self):
        return super()._get_iterator()


class Batches(BatchSampler):
    pass


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


@pytest.mark.parametrize(
    ("given", "how", "error", "words"),
    [
        (DataLoader(Stream(), 4), {}, DataError, "can only be iterated"),
        ([loader(), loader()], {}, PlanError, "list"),
        (
            loader(shuffle=False, sampler=WeightedRandomSampler(torch.ones(SAMPLES), SAMPLES)),
            {},
            PlanError,
            "WeightedRandomSampler",
        ),
        (Halved(data(), BATCH), {}, PlanError, "class Halved has __iter__ of its own"),
        (Begun(data(), BATCH), {}, PlanError, "class Begun has _get_iterator of its own"),
        (
            DataLoader(data(), batch_sampler=Batches(SequentialSampler(data()), BATCH, False)),
            {},
            PlanError,
            "the loader's Batches decides",
        ),
        (
            DataLoader(data(), BATCH, sampler=SequentialSampler(range(9))),
            {},
            PlanError,
            "SequentialSampler decides",
        ),
        (
            loader(40),
            {"accumulate_grad_batches": 2},
            PlanError,
            "steps of 80 samples, and the training set has 61: try batch_size=30 or less",
        ),
        (loader(), {"limit_train_batches": 0.5}, PlanError, "limit_train_batches=0.5"),
        (loader(), {"limit_train_batches": 1}, PlanError, "limit_train_batches=1"),
        (loader(), {"overfit_batches": 2}, PlanError, "overfit_batches"),
        (loader(), {"reload_dataloaders_every_n_epochs": 1}, PlanError, "reload_dataloaders"),
    ],
    ids=[
        *("iterable", "several", "sampler", "own batches", "own iterator", "batch sampler"),
        *("some", "few", "limit", "one batch", "overfit", "reload"),
    ],
)
def test_what_would_break_exactly_once_is_refused_in_a_line(given, how, error, words):
    from lightning_parts import Module, trainer

    with pytest.raises(error, match=words) as told:
        trainer(1, bw.ForLightning(), **how).fit(Module(), given)
    assert "\n" not in str(told.value)


def test_keys_that_no_automatic_plan_takes_are_refused_in_a_line():
    """Such as a misspelled `shares`, which would be left out in silence."""
    with pytest.raises(ArgumentError, match=r'share= of bw\.ForLightning: job keys go with "auto"'):
        bw.ForLightning(share=(2, 1))


@pytest.mark.parametrize(
    ("other", "plan", "words"),
    [
        ("BatchSizeFinder", None, r'try bw\.ForLightning\("auto"\)'),
        ("LearningRateFinder", "auto", "the plan makes the rate follow the batch"),
    ],
)
def test_what_settles_batch_or_rate_besides_is_refused_in_a_line(other, plan, words):
    from lightning.pytorch import callbacks

    from lightning_parts import Module, trainer

    finder = type("Mine", (getattr(callbacks, other),), {})()
    module = Module()
    module.batch_size, module.lr, module.train_dataloader = BATCH, 0.1, loader
    with pytest.raises(PlanError, match=words) as told:
        trainer(1, bw.ForLightning(plan), finder).fit(module)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("how", [{"max_epochs": -1}, {"max_epochs": None, "max_steps": 3}])
def test_an_automatic_plan_without_a_number_of_epochs_is_refused_before_the_probe(how):
    from lightning_parts import Module, trainer

    module = Module()
    with pytest.raises(PlanError, match=r"set max_epochs=, or give .*epochs=\.\.\.") as told:
        trainer(1, bw.ForLightning("auto"), **how).fit(module, loader())
    assert "\n" not in str(told.value)
    assert not module.seen


def test_a_module_has_a_training_step_of_its_own_again():
    from lightning_parts import Module, trainer

    module, calls = Module(), []
    of_class = module.training_step

    def own(batch, batch_idx):
        calls.append(batch_idx)
        return of_class(batch, batch_idx)

    module.training_step = own
    for fits in (1, 2):
        trainer(1, bw.ForLightning(), max_epochs=1).fit(module, loader())
        assert module.training_step is own
        assert len(calls) == fits * -(-SAMPLES // BATCH)


def test_a_callback_can_be_sent_to_processes_that_are_spawned():
    """So does Lightning's strategy `ddp_spawn`."""
    sent = pickle.loads(pickle.dumps(bw.ForLightning(shares=(3, 1), seed=7)))
    assert (sent._shares, sent._seed, sent.trained) == ((3, 1), 7, 0)


def test_an_automatic_plan_takes_the_place_of_the_trainers_accumulation(monkeypatch):
    from batchwright.workflows.trainers import lightning as ours
    from lightning_parts import Module, trainer

    bases, plan = [], make_tiny_plan((2 * BATCH,), samples=SAMPLES)
    monkeypatch.setattr(ours, "probed", lambda *_, base_batch, **__: bases.append(base_batch))
    monkeypatch.setattr(ours, "automatic", lambda *_: plan)
    module, callback = Module(), bw.ForLightning("auto")
    trainer(1, callback, max_epochs=1, accumulate_grad_batches=3).fit(module, loader())
    assert bases == [3 * BATCH]  # for which the rate is assumed to hold
    assert (callback.arrangement.global_batch, callback.arrangement.passes) == (2 * BATCH, 1)
    assert len(module.gradients) == -(-SAMPLES // (2 * BATCH))


def test_the_automatic_plan_of_a_fit_before_follows_speed_as_it_did_there():
    from lightning_parts import Module

    callback = bw.ForLightning("auto")
    callback.plan = make_tiny_plan((BATCH, BATCH), samples=SAMPLES)
    of_two = SimpleNamespace(
        world_size=2, global_rank=0, accumulate_grad_batches=1, lightning_module=Module()
    )
    callback._loader(of_two, SimpleNamespace(dataloader=loader))
    assert callback.arrangement.follow


def test_a_fit_after_a_probe_that_has_failed_has_our_loader_again():
    from lightning_parts import Module, trainer

    callback = bw.ForLightning("auto")
    module = Module()
    module.automatic_optimization = False
    for _ in range(2):
        with pytest.raises(PlanError, match="optimizes by itself cannot be probed"):
            trainer(1, callback).fit(module, loader())


def test_a_loader_that_drops_its_last_batch_is_taken_over_and_the_trainer_left_as_it_was(capsys):
    from lightning_parts import Module, trainer

    module, callback = Module(), bw.ForLightning()
    made = trainer(1, callback, max_epochs=1)
    made.fit(module, loader(drop_last=True, shuffle=False))
    assert "drop_last=True is left out" in capsys.readouterr().err
    assert [i for batch in module.seen for i in batch] == list(range(SAMPLES))
    assert "training_step" not in vars(module)
    assert type(made.fit_loop._data_source).__name__ == "_DataLoaderSource"


def by_batch_sampler(order, drop_last=False):
    return DataLoader(data(), batch_sampler=BatchSampler(order(data()), BATCH, drop_last))


def test_a_batch_sampler_of_pytorch_is_taken_over(capsys):
    from lightning_parts import Module, trainer

    module, callback = Module(), bw.ForLightning()
    trainer(1, callback, max_epochs=1).fit(module, by_batch_sampler(SequentialSampler, True))
    assert "drop_last=True is left out" in capsys.readouterr().err
    assert [i for batch in module.seen for i in batch] == list(range(SAMPLES))
    assert callback.sampler.global_batch == BATCH


@pytest.mark.slow
def test_a_probe_takes_the_batch_of_a_batch_sampler_and_refuses_other_loaders():
    from lightning_parts import Module

    made = bw.ForLightning.probe(Module(), by_batch_sampler(RandomSampler), probe={"budget": 0.3})
    assert made.job.base_batch == BATCH
    with pytest.raises(PlanError, match="class Halved has __iter__"):
        bw.ForLightning.probe(Module(), Halved(data(), BATCH))
    own = DataLoader(data(), batch_sampler=Batches(SequentialSampler(data()), BATCH, False))
    with pytest.raises(PlanError, match="Batches does not say how many samples"):
        bw.ForLightning.probe(Module(), own)


class Drawn(torch.utils.data.Dataset):
    """Random numbers drawn in the loader process."""

    def __len__(self):
        return 4 * BATCH

    def __getitem__(self, index):
        return torch.rand(6), 0, index


def drawn(rank, begin):
    import lightning

    from lightning_parts import Module, trainer

    found = []

    class Noting(Module):
        def training_step(self, batch, batch_idx):
            found.append(batch[0])
            return super().training_step(batch, batch_idx)

    lightning.seed_everything(1, workers=True)
    try:
        given = DataLoader(Drawn(), BATCH, num_workers=1, worker_init_fn=begin)
        trainer(2, bw.ForLightning(shares="equal"), max_epochs=1).fit(Noting(), given)
    finally:
        os.environ.pop("PL_SEED_WORKERS", None)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return found[0]


def seeded(worker):
    torch.manual_seed(7)


@pytest.mark.slow
def test_loader_processes_are_seeded_by_rank_as_without_us_or_as_the_user_says(crew):
    one, other = crew.together(drawn, None, workers=2)
    assert not torch.equal(one, other)
    one, other = crew.together(drawn, seeded, workers=2)
    assert torch.equal(one, other)


@pytest.mark.parametrize("past", [False, True])
def test_a_step_whose_losses_went_past_manual_backward_is_told(monkeypatch, past):
    """Its gradients would not be weighed; with one worker there is nothing to weigh or to tell."""
    from batchwright.workflows.trainers import lightning as ours
    from lightning_parts import Module, trainer

    told = []
    monkeypatch.setattr(ours, "tell", lambda line, *, first: told.append((line[:42], first)))
    trainer(1, bw.ForLightning()).fit(Module(manual=True, past=past), loader())
    assert told == [("the optimizer steps without self.manual_ba", False)] * past


def test_a_module_may_ask_for_what_its_loader_has():
    from lightning_parts import Module, trainer

    asked = []

    class Asking(Module):
        def on_train_epoch_start(self):
            given = self.trainer.train_dataloader
            asked.append((given.num_workers, given.pin_memory, given.batch_size))

    trainer(1, bw.ForLightning(), max_epochs=1).fit(Asking(), loader())
    assert asked == [(0, False, BATCH)]


def test_loader_processes_that_stay_between_epochs_end_with_the_fit():
    from lightning_parts import Module, trainer

    before = set(active_children())
    made = trainer(1, bw.ForLightning())
    made.fit(Module(), loader(num_workers=1, persistent_workers=True))
    assert set(active_children()) <= before


def test_a_development_run_says_that_it_does_not_train_on_all_samples(capsys):
    from lightning_parts import Module, trainer

    module = Module()
    trainer(1, bw.ForLightning(), fast_dev_run=2).fit(module, loader())
    assert len(module.seen) == 2
    assert "fast_dev_run=2: an epoch is its first 2 batches" in capsys.readouterr().err


def test_a_step_that_fetches_its_batches_is_refused_in_a_line():
    from lightning_parts import Module, trainer

    class Fetching(Module):
        def training_step(self, dataloader_iter):
            batch, index, _ = next(dataloader_iter)
            return super().training_step(batch, index)

    with pytest.raises(PlanError, match="training_step takes dataloader_iter") as told:
        trainer(1, bw.ForLightning()).fit(Fetching(), loader())
    assert "\n" not in str(told.value)


def test_arguments_of_a_step_may_have_any_name():
    import lightning

    class Named(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, images, number):
            assert number >= 0
            return self.layer(images[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[bw.ForLightning()], **quiet
    )
    images = torch.utils.data.TensorDataset(torch.randn(10, 4))
    trainer.fit(Named(), torch.utils.data.DataLoader(images, 4))
    assert trainer.global_step == 3


def test_gradients_of_parts_are_scaled_as_lightning_scales_the_loss(monkeypatch):
    from lightning.pytorch.plugins import MixedPrecision

    from batchwright.workflows.trainers import lightning

    given, scaler = [], torch.amp.GradScaler("cpu")
    real = lightning.recovering
    monkeypatch.setattr(lightning, "recovering", lambda *a: given.append(a[-1]) or real(*a))
    fitted(0, 1, "equal", max_steps=1)
    fitted(0, 1, "equal", max_steps=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert given == [None, scaler]
