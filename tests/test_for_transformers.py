"""`bw.ForTransformers`: unequal, exactly-once batches under the Trainer's own DDP."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

import batchwright as bw
from batchwright.errors import ArgumentError, DataError, PlanError
from batchwright.records import LearningRateRule
from gloo import crew_with
from other_trainers import BATCH, SAMPLES, alike, closed
from paced import paced_passes
from test_session import make_tiny_plan
from tight import Tight

pytestmark = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")),
    reason="pip install 'batchwright[transformers]'",
)


class Images(Dataset):
    """Random images, each with its number in its first pixel."""

    def __init__(self, samples=SAMPLES):
        random = torch.Generator().manual_seed(5)
        self.images = torch.randn(samples, 3, 8, 8, generator=random)
        self.images[:, 0, 0, 0] = torch.arange(samples) / 100
        self.labels = torch.randint(3, (samples,), generator=random)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "labels": int(self.labels[index])}


class Texts(Dataset):
    """Tokens of which a different number count in each text."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index >= SAMPLES:
            raise IndexError(index)  # or going through them would not end
        random = torch.Generator().manual_seed(index)
        tokens = torch.randint(20, (7,), generator=random)
        labels = tokens.clone()
        labels[: index % 5] = -100
        return {"input_ids": tokens, "labels": labels}


class Small(nn.Module):
    """A network whose loss is a mean over samples, as one's own usually is."""

    def __init__(self, back=None):
        super().__init__()
        self.back = back
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, pixel_values, labels):
        logits = self.body[:3](pixel_values)
        if self.back is not None:
            logits = Tight.apply(logits, self.back)
        logits = self.body[3](logits)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Rare(Small):
    """Parameters that only a few of the samples use."""

    def __init__(self):
        super().__init__()
        self.rare = nn.Linear(192, 1)

    def forward(self, pixel_values, labels):
        output = super().forward(pixel_values, labels)
        if (few := pixel_values[:, 0, 0, 0] < SAMPLES // 6 / 100).any():
            added = self.rare(pixel_values[few].flatten(1)).square().sum() / len(labels)
            output["loss"] = output["loss"] + added
        return output


def rare_images():
    return Rare(), Images()


class Open(Small):
    """Takes any arguments, as the models of Transformers do, and so the number of labels."""

    def forward(self, pixel_values, labels, **_):
        return super().forward(pixel_values, labels)


def images():
    return Small(), Images()


def open_images():
    return Open(), Images()


def tight_images():
    return Small(back=4), Images()


def texts():
    import transformers  # here and below, as it takes long

    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(config), Texts()


def trainer_of(folder, make=images, batch=BATCH, passes=1, data=None, kind="Noting", **how):
    import accelerate
    import transformers

    import transformers_parts

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    model, found = make()
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=passes,
        **{
            "num_train_epochs": 2,
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "optim": "sgd",
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "seed": 0,
            **how,
        },
    )
    made = getattr(transformers_parts, kind)(model, args, train_dataset=data or found)
    made.seen = []
    return made


def trained(rank, folder, shares, *, make=images, take=None, room=None, resume=None, **how):
    """Samples seen, gradients of each step, weights and shares in the end."""
    from transformers_parts import Gradients

    try:
        trainer = trainer_of(folder, make, **how)
        trainer.take, trainer.room = take, room
        follow = bw.ForTransformers(trainer, shares=shares)
        gradients = Gradients()
        trainer.add_callback(gradients)
        trainer.train(resume_from_checkpoint=resume)
        weights = [p.detach() for p in trainer.model.parameters()]
        return trainer.seen, gradients.found, weights, follow.sampler.local_batch_sizes
    finally:
        closed()


def trained_with(rank, folder, shares, how):
    return trained(rank, folder, shares, **how)


@pytest.mark.parametrize("planned_before", [False, True])
def test_a_checkpoint_whose_rate_is_not_the_plans_is_told(tmp_path, capfd, planned_before):
    rule = LearningRateRule(
        base=0.1, base_batch=2, scaling="linear", peak=0.4, warmup_epochs=0, decay="none"
    )
    plan = make_tiny_plan((BATCH,), samples=len(Images()), rule=rule)
    try:
        before = trainer_of(tmp_path, num_train_epochs=1, save_strategy="epoch")
        bw.ForTransformers(before, plan if planned_before else None)
        before.train()
        after = trainer_of(tmp_path)
        bw.ForTransformers(after, plan)
        after.train(resume_from_checkpoint=True)
    finally:
        closed()
    told = "learning rate stays, 0.1 in place of the plan's 0.4" in capfd.readouterr().err
    assert told is not planned_before
    assert after.optimizer.param_groups[0]["lr"] == (0.4 if planned_before else 0.1)


@pytest.fixture(scope="module")
def crew():
    """Workers that have imported Transformers, which takes seconds."""
    with crew_with("pytest", "transformers_parts") as crew:
        yield crew


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process comes to, by what it trains."""

    @cache
    def made(make):
        return trained(0, tmp_path_factory.mktemp("alone"), "equal", batch=2 * BATCH, make=make)

    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"passes": 2, "batch": BATCH // 2},
        {"room": 4},
        {"make": tight_images},
        {"make": rare_images, "ddp_find_unused_parameters": True},
        {"make": rare_images, "ddp_find_unused_parameters": True, "room": 4},
        {"make": texts},
        {"make": texts, "passes": 2, "batch": BATCH // 2, "room": 3},
        {"make": open_images},
        {"make": open_images, "passes": 2, "batch": BATCH // 2, "room": 2},
        {"make": open_images, "kind": "Said", "passes": 2, "batch": BATCH // 2},
        {"make": open_images, "kind": "Mean"},
        {"make": open_images, "kind": "Mean", "passes": 2, "batch": BATCH // 2, "room": 2},
    ],
    ids=[
        "images",
        "accumulating",
        "out of memory",
        "in backward",
        "unused",
        "unused in parts",
        "tokens",
        "tokens in parts",
        "unused number of labels",
        "unused number in parts",
        "model's means",
        "means",
        "means in parts",
    ],
)
def test_gradients_are_those_of_one_process(crew, alone, tmp_path, how):
    make = how.get("make", images)
    whole = alone(images if make is tight_images else make)
    both = crew.together(trained_with, tmp_path, (3, 1), how, workers=2)
    if "make" not in how:
        seen = [i for one in both for batch in one[0] for i in batch]
        assert sorted(seen) == sorted(2 * list(range(SAMPLES)))
    for one in both:
        assert len(one[1]) == len(whole[1])
        for mine, theirs in zip(one[1], whole[1], strict=True):
            alike(mine, theirs, rtol=1e-3)
        alike(one[2], whole[2], rtol=1e-3)


@pytest.mark.slow
def test_shares_follow_a_slow_worker(crew, tmp_path):
    one, other = crew.together(slowed, tmp_path, workers=2)
    assert one == other
    assert one[0] < one[1] / 2


def slowed(rank, folder):
    with paced_passes() as take:
        slow = 0.012 if rank == 0 else 0.003
        how = {"take": lambda samples: take(slow * samples), "num_train_epochs": 4}
        return trained(rank, folder, None, **how)[3]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_exactly(crew, alone, tmp_path, workers):
    how = {"save_strategy": "steps", "save_steps": 6, "max_steps": 6}
    before = crew.together(trained_with, tmp_path, (3, 1), how, workers=2)
    how = {"resume": str(tmp_path / "checkpoint-6"), "batch": 2 * BATCH // workers}
    after = crew.together(trained_with, tmp_path, None, how, workers=workers)
    seen = [i for one in before for batch in one[0][4:] for i in batch]
    seen += [i for one in after for batch in one[0] for i in batch]
    assert sorted(seen) == list(range(SAMPLES))
    for one in after:
        alike(one[2], alone(images)[2], rtol=1e-3)


def stopped_early(rank, folder):
    """Samples of an epoch that a callback ends after its third step, and of the next."""
    import transformers

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_epoch_stop = state.global_step == 3

    try:
        trainer = trainer_of(folder)
        trainer.add_callback(Stop())
        follow = bw.ForTransformers(trainer)
        trainer.train()
        return trainer.seen[:3], trainer.seen[3:], trainer.state.global_step, follow.sampler.epoch
    finally:
        closed()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_after_an_epoch_that_a_callback_ends_the_next_is_whole(crew, tmp_path, workers):
    each = crew.together(stopped_early, tmp_path, workers=workers)
    assert sorted(i for one in each for batch in one[1] for i in batch) == list(range(SAMPLES))
    steps = -(-SAMPLES // (workers * BATCH))
    for first, second, taken, epoch in each:
        assert (taken, epoch) == (3 + steps, 1)
        assert first != second[:3]


@pytest.mark.slow
def test_a_checkpoint_of_another_global_batch_is_refused_in_a_line(crew, tmp_path):
    how = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    crew.together(trained_with, tmp_path, None, how, workers=1)
    how = {"resume": str(tmp_path / "checkpoint-3"), "batch": 2 * BATCH}
    (said,) = crew.together(refused_with, tmp_path, how, workers=1)
    assert "a training with 8 steps an epoch, and here are 4" in said


def refused_with(rank, folder, how):
    with pytest.raises(PlanError) as told:
        trained_with(rank, folder, None, how)
    return str(told.value)


def planned(rank, folder):
    try:
        trainer = trainer_of(folder, num_train_epochs=1)
        follow = bw.ForTransformers(trainer, "auto", probe={"budget": 0.3}, micro_batch=16)
        trainer.train()
        rate = trainer.optimizer.param_groups[0]["lr"]
        taken = trainer.state.global_step, len(follow.sampler) // follow.sampler.passes
        return follow.plan, follow.arrangement, rate, taken
    finally:
        closed()


@pytest.mark.slow
def test_an_automatic_batch_is_planned_by_all_workers_together(crew, tmp_path):
    (plan, made, rate, steps), other = crew.together(planned, tmp_path, workers=2)
    assert other[0] == plan
    assert (plan.workers, made.global_batch) == (2, plan.stages[0].global_batch_size)
    assert (plan.job.base_batch, plan.job.learning_rate) == (2 * BATCH, 0.1)
    assert rate == pytest.approx(0.1 * plan.learning_rate.peak / plan.learning_rate.base)
    assert steps[0] == steps[1] <= -(-SAMPLES // made.global_batch)


@pytest.mark.parametrize(
    ("how", "keys", "epochs", "words"),
    [
        ({"max_steps": 20}, {}, 3, "max_steps=20 is 3 epochs of your batch"),
        ({"max_steps": 20, "gradient_accumulation_steps": 2}, {}, 6, "is 6 epochs"),
        ({"num_train_epochs": 1.5}, {}, 2, ""),
        ({"max_steps": 20}, {"epochs": 4}, None, ""),
    ],
)
def test_an_automatic_plan_is_for_the_epochs_that_the_trainer_begins(
    monkeypatch, capsys, tmp_path, how, keys, epochs, words
):
    from batchwright.workflows.trainers import transformers as ours

    def planning(profile, planned):
        raise PlanError(f"for {planned}")

    monkeypatch.setattr(ours, "automatic", planning)
    monkeypatch.setattr(ours, "probed", lambda *_, **__: None)
    passes = how.pop("gradient_accumulation_steps", 1)
    try:
        trainer = trainer_of(tmp_path, passes=passes, **how)
        bw.ForTransformers(trainer, "auto", **keys)
        with pytest.raises(PlanError, match=f"for {epochs}$"):
            trainer.train()
    finally:
        closed()
    assert words in capsys.readouterr().err


def test_an_automatic_plan_takes_the_place_of_the_trainers_accumulation(monkeypatch, tmp_path):
    from batchwright.workflows.trainers import transformers as ours

    bases, plan = [], make_tiny_plan((2 * BATCH,), samples=SAMPLES)
    monkeypatch.setattr(ours, "probed", lambda *_, base_batch, **__: bases.append(base_batch))
    monkeypatch.setattr(ours, "automatic", lambda *_: plan)
    try:
        trainer = trainer_of(tmp_path, passes=3, num_train_epochs=1)
        follow = bw.ForTransformers(trainer, "auto")
        trainer.train()
    finally:
        closed()
    assert bases == [3 * BATCH]  # for which the rate is assumed to hold
    assert (follow.arrangement.global_batch, follow.arrangement.passes) == (2 * BATCH, 1)
    assert trainer.state.global_step == -(-SAMPLES // (2 * BATCH))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Images())


class Halved(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield {**batch, "pixel_values": batch["pixel_values"] / 2}


def test_a_loader_of_the_trainers_own_says_the_batch(tmp_path, capsys):
    try:
        made = trainer_of(tmp_path, num_train_epochs=1)
        made.get_train_dataloader = lambda: DataLoader(Images(), 2 * BATCH, drop_last=True)
        follow = bw.ForTransformers(made)
        made.train()
        assert follow.arrangement.global_batch == 2 * BATCH
        assert [i for batch in made.seen for i in batch] == list(range(SAMPLES))
        assert "drop_last=True is left out" in capsys.readouterr().err
        made = trainer_of(tmp_path)
        made.get_train_dataloader = lambda: Halved(Images(), BATCH)
        with pytest.raises(PlanError, match="class Halved has __iter__ of its own"):
            bw.ForTransformers(made).probe()
        with pytest.raises(PlanError, match="class Halved has __iter__ of its own"):
            made.train()
    finally:
        closed()


def test_loader_processes_are_seeded_as_the_trainer_does(tmp_path):
    try:
        made = trainer_of(tmp_path, dataloader_num_workers=1)
        bw.ForTransformers(made)
        begin = made.get_train_dataloader().worker_init_fn
        assert begin.keywords == {"num_workers": 1, "rank": 0}
    finally:
        closed()


def test_what_would_break_exactly_once_is_refused_in_a_line(tmp_path):
    try:
        made = trainer_of(tmp_path, data=Stream(), max_steps=2)
        bw.ForTransformers(made)
        with pytest.raises(DataError, match="can only be iterated"):
            made.train()
        made = trainer_of(tmp_path, texts, train_sampling_strategy="group_by_length")
        bw.ForTransformers(made)
        with pytest.raises(PlanError, match="LengthGroupedSampler"):
            made.train()
        with pytest.raises(PlanError, match="auto_find_batch_size"):
            bw.ForTransformers(trainer_of(tmp_path, auto_find_batch_size=True))
        made = trainer_of(tmp_path, batch=100)
        bw.ForTransformers(made)
        with pytest.raises(PlanError, match="try per_device_train_batch_size=61 or less"):
            made.train()
        with pytest.raises(PlanError, match=r"has a bw\.ForTransformers already"):
            bw.ForTransformers(made, "auto")
        with pytest.raises(ArgumentError, match=r"share= of bw\.ForTransformers: job keys go with"):
            bw.ForTransformers(made, share=(2, 1))
    finally:
        closed()


def test_a_loss_that_may_be_a_mean_or_a_sum_is_refused_where_a_step_has_parts(tmp_path):
    try:
        made = trainer_of(tmp_path, open_images, kind="Own", passes=2)
        bw.ForTransformers(made)
        with pytest.raises(PlanError, match="Own computes its loss by itself") as told:
            made.train()
        assert "\n" not in str(told.value)
        made = trainer_of(tmp_path, open_images, kind="Own", max_steps=1)
        bw.ForTransformers(made)
        made.train()
        assert made.state.global_step == 1
    finally:
        closed()


@pytest.mark.parametrize("divides", [False, True])
def test_a_function_of_the_loss_that_ignores_the_number_of_labels_is_refused(tmp_path, divides):
    def loss_of(outputs, labels, num_items_in_batch=None):
        each = functional.cross_entropy(outputs["logits"], labels, reduction="sum")
        return each / (num_items_in_batch if divides else len(labels))

    try:
        made = trainer_of(tmp_path, open_images, passes=2, max_steps=1)
        made.compute_loss_func = loss_of
        made.model.forward = lambda pixel_values, **_: {"logits": made.model.body(pixel_values)}
        bw.ForTransformers(made)
        with nullcontext() if divides else pytest.raises(PlanError, match="ignores num_items_in_b"):
            made.train()
        assert made.state.global_step == divides
    finally:
        closed()


class Drawing(Open):
    """Draws in evaluation mode, too, as networks do that hide a part of each image."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, pixel_values, labels, **_):
        number = torch.rand(())
        if self.training:
            self.drawn.append(float(number))
        return super().forward(pixel_values + number, labels)


def test_trying_whether_losses_are_means_leaves_the_random_generators(tmp_path):
    drawn = []
    try:
        for kind in ("Noting", "Said"):  # the second says it, so that nothing is tried
            made = trainer_of(tmp_path, lambda: (Drawing(), Images()), kind=kind, max_steps=2)
            bw.ForTransformers(made)
            torch.manual_seed(1)
            made.train()
            drawn.append(made.model.drawn)
    finally:
        closed()
    assert len(drawn[0]) == 2
    assert drawn[0] == drawn[1]


class Joined(Open):
    """Takes the pieces of all images in one tensor, as networks for text and images do."""

    def forward(self, pixel_values, labels, pieces, **_):
        if len(pieces) != 3 * len(labels):
            raise ValueError("image tokens and pieces do not match")
        return super().forward(pixel_values, labels)


def test_means_are_found_of_batches_that_cannot_be_cut(tmp_path):
    def join(items):
        return torch.utils.data.default_collate(items) | {"pieces": torch.zeros(3 * len(items), 2)}

    try:
        made = trainer_of(tmp_path, lambda: (Joined(), Images()), passes=2, max_steps=1)
        made.data_collator = join
        follow = bw.ForTransformers(made)
        made.train()
    finally:
        closed()
    assert made.state.global_step == 1
    assert not follow._counts_items


def test_a_second_training_of_a_model_of_means_has_as_many_steps(tmp_path):
    steps = []
    try:
        made = trainer_of(tmp_path, open_images, batch=10, passes=2, num_train_epochs=1)
        bw.ForTransformers(made)
        for _ in range(2):  # in the last step one sample is left for two passes
            made.train()
            steps.append(made.state.global_step)
    finally:
        closed()
    assert steps == [3, 3]


@pytest.mark.parametrize("past", [False, True])
def test_a_step_whose_loss_is_not_from_compute_loss_is_told_once(tmp_path, capfd, past):
    """Its gradient would not be weighed by the batch's samples."""
    try:
        made = trainer_of(tmp_path, kind="Stepping", passes=2, num_train_epochs=1)
        made.past = past
        bw.ForTransformers(made)
        made.train()
    finally:
        closed()
    said = capfd.readouterr().err.count("training_step of Stepping takes its loss from elsewhere")
    assert said == past


def rates_of_two_trainings(made):
    """First rates of two trainings by a plan that doubles them."""
    bw.ForTransformers(made, make_tiny_plan((2 * BATCH,), samples=SAMPLES, factor=2))
    rates = []
    for _ in range(2):
        made.train()
        group = made.optimizer.param_groups[0]
        rates.append(group.get("initial_lr", group["lr"]))
    return rates


def test_each_training_has_the_plans_rates_also_with_a_model_of_its_own(tmp_path, capfd):
    try:
        made = trainer_of(tmp_path, num_train_epochs=1)
        made.model_init = lambda: images()[0]
        assert rates_of_two_trainings(made) == pytest.approx([0.2, 0.2])
    finally:
        closed()
    assert "learning rate stays" not in capfd.readouterr().err


class Around(torch.optim.Optimizer):
    """An optimizer around another one, as Lookahead is."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        self.param_groups = optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)


def test_an_optimizer_around_another_has_the_plans_rates_once(tmp_path):
    try:
        made = trainer_of(tmp_path, num_train_epochs=1)
        made.optimizer = Around(torch.optim.SGD(made.model.parameters(), lr=0.1))
        assert rates_of_two_trainings(made) == pytest.approx([0.2, 0.2])
    finally:
        closed()


class ManyLabels(Dataset):
    def __len__(self):
        return BATCH

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        labels = (torch.rand(3, generator=made) > 0.5).float()
        return {"pixel_values": torch.randn(3, 8, 8, generator=made), "labels": labels}


def many_labels():
    import transformers

    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        image_size=8, patch_size=4, num_labels=3, problem_type="multi_label_classification",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(3)
    return transformers.ViTForImageClassification(config), ManyLabels()


def test_a_loss_of_transformers_that_is_a_mean_is_one_in_parts_of_a_batch_too(tmp_path):
    found = []
    try:
        for room in (None, 2):
            made = trainer_of(tmp_path, many_labels, num_train_epochs=1)
            made.room = room
            bw.ForTransformers(made)
            found.append(made.train().training_loss)
    finally:
        closed()
    assert found[1] == pytest.approx(found[0])


def test_a_training_whose_accumulation_was_changed_since_the_last_one_has_it(tmp_path):
    try:
        made = trainer_of(tmp_path, num_train_epochs=1)
        follow = bw.ForTransformers(made)
        for passes in (1, 1, 2):
            made.args.gradient_accumulation_steps = passes
            made.train()
            assert follow.arrangement.passes == passes
            assert made.state.global_step == -(-SAMPLES // (passes * BATCH))
    finally:
        closed()


def test_a_training_that_an_error_has_ended_leaves_nothing_to_the_next(tmp_path):
    def broken(samples):
        raise ValueError("broken")

    try:
        made = trainer_of(tmp_path, max_steps=1)
        bw.ForTransformers(made)
        made.take = broken
        with pytest.raises(ValueError, match="broken"):
            made.train()
        made.take = None
        made.train()
        assert not any(p._post_accumulate_grad_hooks for p in made.model.parameters())
        assert "backward" not in vars(made.accelerator)
    finally:
        closed()


def test_gradients_of_parts_are_scaled_as_the_trainer_scales_the_loss(tmp_path, monkeypatch):
    from batchwright.workflows.trainers import transformers

    given, scaler = [], torch.amp.GradScaler("cpu")
    real = transformers.recovering
    monkeypatch.setattr(transformers, "recovering", lambda *a: given.append(a[-1]) or real(*a))
    try:
        trainer = trainer_of(tmp_path, max_steps=1)
        trainer.accelerator.scaler = scaler
        bw.ForTransformers(trainer, shares="equal")
        trainer.train()
    finally:
        closed()
    assert given == [scaler]
