"""The probe's short trainings: against a plain loop, and what they leave behind."""

from __future__ import annotations

import multiprocessing
import os
from math import cos, inf, nan, pi

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from batchwright.distributed.group import Group
from batchwright.errors import JobError
from batchwright.probing import bench as bench_module
from batchwright.probing import commands
from batchwright.probing.bench import Bench
from batchwright.probing.executor import Executor
from batchwright.probing.measure import trials
from batchwright.probing.measure.trials import GivenUp, NoAccuracy, run_trial
from batchwright.records import Job
from batchwright.training.batches.sampler import epoch_order
from batchwright.training.loop import accuracy_and_loss
from batchwright.workload.data.image_files import ImageFiles
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.sources import ImageData, open_data
from batchwright.workload.task import build_network
from samples import make_data

CPU = torch.device("cpu")
SIDE, CLASSES, IMAGES, HELD_OUT = 8, 4, 500, 100


class Signs(torch.utils.data.Dataset):
    """Random images that hold a sign of their label; notes which of them were asked for."""

    def __init__(self, samples=IMAGES):
        random = torch.Generator().manual_seed(0)
        self.labels = torch.randint(CLASSES, (samples,), generator=random)
        self.images = torch.randn(samples, 3, SIDE, SIDE, generator=random)
        self.images[torch.arange(samples), 0, self.labels] += 1.0
        self.asked = []

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.images[index], int(self.labels[index])


def data():
    """What a job's import string may name."""
    return Signs(), Signs(), tuple("abcd")


def linear(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, num_classes))


def dropping(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * SIDE * SIDE, num_classes))


def normalizing(num_classes):
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8 * (SIDE - 2) ** 2, num_classes))


def one_number(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 1), nn.Flatten(0))


def maps(num_classes):
    return nn.Conv2d(3, num_classes, 1)


def spread(outputs, labels):
    return outputs.var()


def job_of(**changes):
    plain = {
        "data": "test_trials:data",
        "network": "test_trials:linear",
        "device": "cpu",
        "precision": "float32",
        "resolutions": (SIDE,),
        "learning_rate": 0.05,
        "base_batch": 20,
        "loaders": 0,
    }
    return Job(**{**plain, **changes})


def bench_of(*, group=None, **changes):
    signs = Signs()
    facts = make_data(train_samples=IMAGES, val_samples=IMAGES, classes=tuple("abcd"), side=SIDE)
    images = ImageData(signs, signs, facts, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    bench = Bench(job_of(**changes), images, group or Group(CPU))
    signs.asked.clear()
    return bench, signs


def command_of(**changes):
    plain = {
        "workers": 1,
        "resolution": SIDE,
        "optimizer": "sgd",
        "global_batch_size": 20,
        "samples": 300,
        "held_out": HELD_OUT,
        "micro_batch": 64,
    }
    return commands.RunTrial(**{**plain, **changes})


def parted(samples, held_out, seed=0):
    """Indices to train on in their order, and those that are held out."""
    images = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    rest = images[:-held_out]
    return rest[epoch_order(len(rest), 0, seed)], images[-held_out:]


def told(trial):
    """All of a trial but its time."""
    return trial.model_dump(exclude={"seconds"})


# ------------------------------------------------------------------------------ what is learnt


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_trial_is_the_plain_loop_that_it_stands_for(optimizer, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path))
    rate, batch, samples, held_out = {"sgd": 0.05, "adamw": 0.002}[optimizer], 16, 490, 150
    job = job_of(
        data="digits",
        network="test_trials:normalizing",
        learning_rate=rate,
        base_batch=batch,
        clip_norm=1.0,
    )
    images = open_data(job)
    bench = Bench(job, images, Group(CPU))
    command = command_of(
        optimizer=optimizer,
        global_batch_size=batch,
        samples=samples,
        held_out=held_out,
        rate_scale=1.5,
        micro_batch=100,
    )
    trial = run_trial(bench, command)

    network = build_network("test_trials:normalizing", classes=10, side=SIDE, seed=job.seed)
    several = [p for p in network.parameters() if p.ndim > 1]
    single = [p for p in network.parameters() if p.ndim <= 1]
    groups = [
        {"params": several, "weight_decay": job.weight_decay},
        {"params": single, "weight_decay": 0.0},
    ]
    if optimizer == "sgd":
        steps = torch.optim.SGD(groups, lr=rate, momentum=job.momentum, nesterov=True)
    else:
        steps = torch.optim.AdamW(groups, lr=rate)
    order, held = parted(len(images.train), held_out, job.seed)
    sizes = [batch] * (samples // batch) + [samples % batch]
    done = 0
    for size in sizes:
        for one in steps.param_groups:
            one["lr"] = 1.5 * rate * (1 + cos(pi * done / samples)) / 2
        pixels, labels = bench.batches._train.training_batch(
            order[done : done + size], epoch=0, resolution=SIDE
        )
        steps.zero_grad()
        functional.cross_entropy(network(pixels), labels).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        steps.step()
        done += size
    network.eval()
    pixels, labels = bench.batches._train.evaluation_batch(held, resolution=SIDE)
    with torch.no_grad():
        outputs = network(pixels)
    assert trial.loss == pytest.approx(float(functional.cross_entropy(outputs, labels)), rel=1e-3)
    right = float((outputs.argmax(1) == labels).double().mean())
    assert trial.accuracy == pytest.approx(right, abs=1.5 / held_out)
    assert trial.accuracy > 0.3
    assert (trial.steps, trial.samples, trial.held_out) == (31, samples, held_out)
    assert trial.rate == pytest.approx(1.5 * rate)
    assert trial.usual_rate == pytest.approx(rate)


def test_the_weights_before_judging_are_those_of_the_plain_loop(monkeypatch):
    """Micro-batches of unequal sizes make the very gradient of the whole batch."""
    bench, signs = bench_of(weight_decay=0.0)
    judged = []
    judge = trials._judge

    def noted(bench, *args, **named):
        judged.extend(p.detach().clone() for p in bench.network.parameters())
        return judge(bench, *args, **named)

    monkeypatch.setattr(trials, "_judge", noted)
    run_trial(bench, command_of(samples=100, micro_batch=7))
    network = build_network("test_trials:linear", classes=CLASSES, side=SIDE, seed=0)
    steps = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    order, _ = parted(IMAGES, HELD_OUT)
    for done in range(0, 100, 20):
        chosen = order[done : done + 20]
        steps.param_groups[0]["lr"] = 0.05 * (1 + cos(pi * done / 100)) / 2
        steps.zero_grad()
        functional.cross_entropy(network(signs.images[chosen]), signs.labels[chosen]).backward()
        steps.step()
    for own, plain in zip(judged, network.parameters(), strict=True):
        torch.testing.assert_close(own, plain)


@pytest.mark.parametrize(("asked", "share"), [(3.0, 0.1), ("auto", 0.0)])
def test_a_warm_up_keeps_its_share_of_the_training(asked, share, monkeypatch):
    bench, _ = bench_of(warmup_epochs=asked, epochs=30, scaling="linear")
    rates = []
    train = bench.train

    def noted(*args):
        rates.append(bench.optimizer.param_groups[0]["lr"])
        return train(*args)

    monkeypatch.setattr(bench, "train", noted)
    trial = run_trial(bench, command_of(global_batch_size=40, samples=400))
    assert len(rates) == 10
    assert max(rates) <= trial.rate
    assert trial.rate == trial.usual_rate == pytest.approx(0.1)
    assert rates[0] == pytest.approx(0.05)  # from the small batch's rate up
    if share:
        assert rates[1] == pytest.approx(0.1)


def test_the_same_trial_gives_the_same_bits_whatever_was_measured_between():
    bench, _ = bench_of(network="test_trials:dropping")
    first = run_trial(bench, command_of())
    for _ in range(3):
        bench.step(bench.supply(16, SIDE))
    run_trial(bench, command_of(optimizer="muon", samples=100))
    torch.rand(3)
    assert told(run_trial(bench, command_of())) == told(first)


# ------------------------------------------------------------------------------------- samples


def test_what_is_judged_was_never_trained_on():
    bench, signs = bench_of()
    run_trial(bench, command_of(samples=400))
    order, held = parted(IMAGES, HELD_OUT)
    trained, judged = signs.asked[:400], signs.asked[400:500]
    assert trained == order.tolist()
    assert sorted(judged) == sorted(held.tolist())
    assert not set(trained) & set(judged)


def test_further_epochs_have_orders_of_their_own(monkeypatch):
    bench, signs = bench_of()
    feed, epochs = bench.batches.training_feed(1), []
    training = feed.training

    def noted(batches, epoch, resolution):
        epochs.append(epoch)
        return training(batches, epoch, resolution)

    monkeypatch.setattr(feed, "training", noted)
    trial = run_trial(bench, command_of(samples=1000, global_batch_size=30))
    first, second, third = (signs.asked[start : start + 400] for start in (0, 400, 800))
    assert sorted(first) == sorted(second)
    assert first != second
    assert len(third[:200]) == len(set(third[:200]))
    assert epochs == [0, 1, 2]
    assert (trial.samples, trial.steps) == (1000, 34)


def test_more_samples_in_a_step_than_there_are_images():
    bench, signs = bench_of()
    trial = run_trial(bench, command_of(samples=1000, global_batch_size=1000, micro_batch=100))
    assert trial.steps == 1
    trained = signs.asked[:1000]
    assert all(trained.count(index) in (2, 3) for index in set(trained))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"held_out": IMAGES}, "cannot hold out 500 of 500"), ({"samples": 1}, "takes 2 samples")],
)
def test_too_few_samples_are_refused(changes, said):
    bench, _ = bench_of(network="test_trials:normalizing")
    with pytest.raises(JobError, match=said):
        run_trial(bench, command_of(**changes))


def test_classes_are_balanced_where_the_training_balances_them():
    labels = (torch.arange(IMAGES) % 10 == 0).long()
    pixels = torch.zeros(IMAGES, SIDE, SIDE, 3, dtype=torch.uint8)
    store = ImageStore.from_images(pixels, labels)
    plain, _ = bench_of()
    images = ImageData(store, store, plain.batches._data.facts, (0.5,) * 3, (0.3,) * 3)
    bench = Bench(job_of(sampling="balanced"), images, Group(CPU))
    seen = []
    made = bench.batches._train.training_batch

    def noted(indices, **named):
        seen.extend(labels[indices].tolist())
        return made(indices, **named)

    bench.batches._train.training_batch = noted
    run_trial(bench, command_of(samples=400))
    assert 0.4 < sum(seen[:400]) / 400 < 0.6


def test_images_that_stay_in_their_files_are_trained_on_and_judged(tmp_path):
    labels = torch.arange(120) % CLASSES
    names = [f"{number}.png" for number in range(len(labels))]
    for name, label in zip(names, labels.tolist(), strict=True):
        Image.new("RGB", (12, 10), [(200, 0, 0), (0, 200, 0), (0, 0, 200), (0, 0, 0)][label]).save(
            tmp_path / name
        )
    normal = {"mean": (0.2,) * 3, "std": (0.3,) * 3}
    files = ImageFiles(tmp_path, names, labels, side=SIDE, **normal)
    facts = bench_of()[0].batches._data.facts.model_copy(update={"train_samples": len(files)})
    bench = Bench(job_of(), ImageData(files, files, facts, **normal), Group(CPU))
    trial = run_trial(bench, command_of(held_out=40, samples=200))
    assert trial.accuracy == 1
    bench.close()


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [1, 2])
def test_data_of_ones_own_come_from_loader_processes(loaders):
    others = set(multiprocessing.active_children())
    bench, signs = bench_of(loaders=loaders)
    alone, _ = bench_of()
    command = command_of(samples=600)
    assert told(run_trial(bench, command)) == told(run_trial(alone, command))
    assert not signs.asked  # in this process
    assert told(run_trial(bench, command)) == told(run_trial(alone, command))
    bench.close()
    assert set(multiprocessing.active_children()) <= others


# --------------------------------------------------------------------------------- its ends


def state_of(bench):
    """All that a measurement after a trial could see of it."""
    return {
        "weights": [t.clone() for t in bench.network.state_dict().values()],
        "optimizer": bench.optimizer,
        "state": [
            {name: torch.as_tensor(value).clone() for name, value in state.items()}
            for state in bench.optimizer.state.values()
        ],
        "modes": [module.training for module in bench.network.modules()],
        "gradients": [p.grad for p in bench.trained],
        "random": torch.get_rng_state(),
        "live": bench.live_bytes(),
    }


def assert_same(one, other):
    for name in ("optimizer", "modes", "gradients", "live"):
        assert one[name] == other[name], name
    assert torch.equal(one["random"], other["random"])
    assert all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))
    for mine, others in zip(one["state"], other["state"], strict=True):
        assert all(torch.equal(mine[name], others[name]) for name in others)


def short_of_memory(bench, monkeypatch, *, after):
    """Memory runs out in each forward pass after so many."""
    passes, network_pass = [], bench.outputs_and_loss

    def greedy(batch):
        passes.append(batch)
        if len(passes) > after and len(batch[1]) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return network_pass(batch)

    monkeypatch.setattr(bench, "outputs_and_loss", greedy)


@pytest.mark.parametrize("end", ["trained", "diverged", "forward", "update", "judging"])
def test_the_bench_is_as_it_was(end, monkeypatch):
    bench, _ = bench_of(network="test_trials:normalizing")
    bench.start_over()
    before = state_of(bench)
    if end in ("forward", "judging"):
        short_of_memory(bench, monkeypatch, after={"forward": 3, "judging": 15}[end])
    if end == "update":
        build = bench_module.build_optimizer

        def without_room(*args, **named):
            optimizer = build(*args, **named)
            optimizer.step = lambda: _raise(torch.OutOfMemoryError("out of memory"))
            return optimizer

        monkeypatch.setattr(bench_module, "build_optimizer", without_room)
    trial = run_trial(bench, command_of(rate_scale=1e30 if end == "diverged" else 1.0))
    assert (trial is None) == (end in ("forward", "update", "judging"))
    assert_same(state_of(bench), before)


def _raise(error):
    raise error


@pytest.mark.parametrize("steps", [1, 15])
def test_a_rate_that_diverges_ends_as_guessing(steps):
    bench, _ = bench_of(network="test_trials:normalizing")
    trial = run_trial(bench, command_of(rate_scale=1e38, samples=20 * steps))
    assert trial.accuracy == 1 / CLASSES
    assert trial.loss is None
    assert (trial.steps, trial.samples) == (steps, 20 * steps)
    assert trial.rate == pytest.approx(0.05 * 1e38)


def test_a_trial_that_takes_too_long_is_given_up():
    bench, signs = bench_of(network="test_trials:normalizing")
    bench.start_over()
    before = state_of(bench)
    with pytest.raises(GivenUp, match="given up after"):
        run_trial(bench, command_of(most_seconds=1e-9))
    assert_same(state_of(bench), before)
    assert len(signs.asked) == 20  # a step of the fifteen
    assert run_trial(bench, command_of(most_seconds=1e9)) is not None


@pytest.mark.parametrize("rate_scale", [1.0, 1e38])
@pytest.mark.parametrize("network", ["test_trials:one_number", "test_trials:maps"])
def test_outputs_that_are_no_classes_have_no_accuracy(network, rate_scale):
    bench, _ = bench_of(network=network, loss="test_trials:spread")
    bench.start_over()
    before = state_of(bench)
    with pytest.raises(NoAccuracy):
        run_trial(bench, command_of(rate_scale=rate_scale))
    assert_same(state_of(bench), before)


@pytest.mark.parametrize("shape", [(5, 1), (5, 4, 2, 2), (5,)])
def test_a_training_of_outputs_that_are_no_classes_is_refused(shape):
    with pytest.raises(JobError, match=r"outputs of shape .* no held-out accuracy: give a tensor"):
        accuracy_and_loss(torch.zeros(shape), torch.zeros(5, dtype=torch.long))


def test_what_is_not_a_number_is_no_right_answer():
    outputs = torch.tensor([[nan, nan], [2.0, nan], [2.0, 1.0], [2.0, -inf]])
    found = accuracy_and_loss(outputs, torch.tensor([0, 1, 0, 0]))
    assert found["top1"].tolist() == [False, False, True, True]
    assert found["loss"].isnan().tolist() == [True, True, False, False]


def test_a_trial_tells_how_far_it_is(monkeypatch):
    monkeypatch.setattr(trials, "_PAUSE", 0.0)
    bench, _ = bench_of()
    told = []
    run_trial(bench, command_of(samples=100), told.append)
    assert told == [0.0, 0.2, 0.4, 0.6, 0.8]


def test_an_error_other_than_of_memory_is_not_hidden(monkeypatch):
    bench, _ = bench_of()
    monkeypatch.setattr(bench, "loss", lambda batch: _raise(RuntimeError("shapes")))
    with pytest.raises(RuntimeError, match="shapes"):
        run_trial(bench, command_of())


def test_the_probes_own_rate_for_small_batches_is_not_a_trials():
    bench, _ = bench_of(base_batch=2000, scaling="none")
    rates = []
    bench.train = lambda *args: (
        rates.append(bench.optimizer.param_groups[0]["lr"]) or Bench.train(bench, *args)
    )
    run_trial(bench, command_of(samples=60))
    assert rates[0] == pytest.approx(0.05)


# ------------------------------------------------------------------------------ several workers


def _trial(rank, changes, asked):
    group = Group(CPU, 60)
    bench, signs = bench_of(group=group, **changes)
    trial = run_trial(bench, command_of(workers=group.size, **asked))
    weights = [t.clone() for t in bench.network.state_dict().values()]
    group.close()
    return told(trial) if trial else None, signs.asked, weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"global_batch_size": 21, "micro_batch": 4},  # 11 and 10 samples: of 4, 4, 3 and 4, 3, 3
        {"global_batch_size": 33, "optimizer": "muon", "held_out": 101},
    ],
)
@pytest.mark.parametrize("workers", [2, 3])
def test_several_workers_learn_what_one_does(asked, workers, crew):
    bench, signs = bench_of()
    alone = told(run_trial(bench, command_of(**asked)))
    found = crew.together(_trial, {}, asked, workers=workers)
    for trial, _, _ in found:
        assert trial == found[0][0]
        assert trial["loss"] == pytest.approx(alone["loss"], rel=1e-3)
        assert trial["accuracy"] == pytest.approx(alone["accuracy"], abs=0.011)
    assert sorted(index for _, own, _ in found for index in own) == sorted(signs.asked)


@pytest.mark.slow
def test_statistics_of_several_workers_are_judged_as_one(crew):
    changes = {"network": "test_trials:normalizing"}
    alone = told(run_trial(bench_of(**changes)[0], command_of(samples=400)))
    (trial, _, _), (other, _, _) = crew.together(_trial, changes, {"samples": 400}, workers=2)
    assert trial == other
    assert trial["accuracy"] == pytest.approx(alone["accuracy"], abs=0.15)


def _short_trial(rank, after):
    group = Group(CPU, 60)
    bench, _ = bench_of(group=group)
    monkeypatch = pytest.MonkeyPatch()
    if rank == 1:
        short_of_memory(bench, monkeypatch, after=after)
    lost = run_trial(bench, command_of(workers=2))
    monkeypatch.undo()
    trial = run_trial(bench, command_of(workers=2))
    group.close()
    return lost, told(trial)


def _late_trial(rank, most_seconds):
    group = Group(CPU, 60)
    bench, _ = bench_of(group=group)
    with pytest.raises(GivenUp):
        run_trial(bench, command_of(workers=2, most_seconds=most_seconds[rank]))
    trial = run_trial(bench, command_of(workers=2))
    group.close()
    return told(trial)


@pytest.mark.slow
def test_a_trial_that_one_worker_gives_up_ends_on_all(crew):
    trial, same = crew.together(_late_trial, [None, 1e-9], workers=2)
    assert trial == same


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 4, 15])  # at once, while training, while judging
def test_memory_that_runs_out_on_one_worker_ends_the_trial_of_all(after, crew):
    (lost, trial), (others, same) = crew.together(_short_trial, after, workers=2)
    assert lost is others is None
    assert trial == same
    assert trial["accuracy"] > 0.5


@pytest.mark.slow
def test_workers_of_a_diverging_trial_end_together(crew):
    (trial, _, _), (other, _, _) = crew.together(_trial, {}, {"rate_scale": 1e38}, workers=2)
    assert trial == other
    assert trial["accuracy"] == 1 / CLASSES


def _after_commands(rank, folder):
    os.environ["BATCHWRIGHT_CACHE"] = str(folder)
    group = Group(CPU, 60)
    executor = Executor(Job(device="cpu", resolutions=(8,)), group, (1, 2), "as it is")
    executor.carry_out(commands.Prepare(workers=2, precision="float32"))
    alone = command_of(samples=128, global_batch_size=32)
    found = []
    for command in (alone, alone.model_copy(update={"workers": 2}), alone):
        line = command.model_dump_json()
        if rank < command.workers:
            found.append(executor.carry_out(commands.read_command(line)).trial)
    group.close()
    return [told(trial) for trial in found]


@pytest.mark.slow
def test_commands_for_one_worker_and_for_two_take_turns(tmp_path, crew):
    first, second = crew.together(_after_commands, tmp_path, workers=2)
    assert first[0] == first[2]
    assert [first[1]] == second
    assert first[1]["steps"] == 4
