"""The probe's gradient noise: which samples it is measured on, and that it is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchwright.distributed.group import Group
from batchwright.probing.bench import Bench
from batchwright.probing.measure import gradient_noise
from batchwright.probing.measure.gradient_noise import measure_noise, noise_of
from batchwright.records import Job
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.sources import ImageData
from batchwright.workload.loss_scaling import LossScale
from samples import make_data

CPU = torch.device("cpu")
SIDE, CLASSES = 4, 2
PIXELS = 3 * SIDE * SIDE


class Noted(torch.utils.data.Dataset):
    """Random images that hold a weak sign of their label; notes which of them were asked for."""

    def __init__(self, samples):
        random = torch.Generator().manual_seed(0)
        self.labels = torch.randint(CLASSES, (samples,), generator=random)
        self.images = torch.randn(samples, 3, SIDE, SIDE, generator=random)
        self.images += 0.3 * self.labels[:, None, None, None]
        self.asked = []

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.images[index], int(self.labels[index])


def linear(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, num_classes))


def bench_of(samples, *, group=None, dataset=Noted, **changes):
    data = dataset(samples)
    facts = make_data(train_samples=samples, val_samples=samples, classes=tuple("ab"), side=SIDE)
    plain = {
        "data": "test_gradient_noise:data",
        "network": "test_gradient_noise:linear",
        "device": "cpu",
        "precision": "float32",
        "resolutions": (SIDE,),
        "learning_rate": 0.01,
        "loaders": 0,
    }
    images = ImageData(data, data, facts, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    bench = Bench(Job(**{**plain, **changes}), images, group or Group(CPU))
    data.asked.clear()
    return bench, data


def exact_noise_scale(bench, data):
    """From the gradient of each sample, at the weights that the bench has."""
    gradients = []
    for image, label in zip(data.images, data.labels, strict=True):
        loss = bench.loss((image[None], label[None]))
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, bench.trained)]))
    rows = torch.stack(gradients)
    return float(rows.var(0).sum() / rows.mean(0).square().sum())


@pytest.fixture(autouse=True)
def _all_data(monkeypatch):
    """As much is measured as the data allow, however slow the machine and however certain."""
    monkeypatch.setattr(gradient_noise, "_KNOWN", 0.0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_the_noise_of_a_users_own_data_is_that_of_all_its_samples(seed):
    bench, data = bench_of(2000, seed=seed)
    noise = measure_noise(bench, SIDE, 16, seconds=1000)
    assert noise.noise_scale == pytest.approx(exact_noise_scale(bench, data), rel=0.4)
    assert 0 < noise.relative_error < 0.4


def test_no_sample_is_in_two_parts_and_none_was_trained_on():
    bench, data = bench_of(500)
    noise = measure_noise(bench, SIDE, 16, seconds=1000)
    assert noise.parts == 250 // 16
    assert len(data.asked) == len(set(data.asked)) == 15 * 16 + 15 * 16
    assert max(data.asked) > 400
    assert data.asked != sorted(data.asked)


def test_the_seed_alone_chooses_the_samples():
    asked = []
    for seed in (0, 0, 1):
        bench, data = bench_of(300, seed=seed)
        measure_noise(bench, SIDE, 16, seconds=1000)
        asked.append(data.asked)
    assert asked[0] == asked[1] != asked[2]


def test_what_losses_are_multiplied_by_is_divided_out():
    bench, data = bench_of(16)
    signs = torch.ones(sum(one.numel() for one in bench.trained), dtype=torch.int8)
    sketches = []
    for bench.scale in (LossScale(), LossScale(2.0**10)):
        batch = data.images, data.labels
        sketches.append(gradient_noise._sketch(bench, batch, signs))
    assert torch.equal(*sketches)
    assert sketches[0].any()


def test_few_data_make_smaller_parts_and_too_few_no_estimate():
    bench, _ = bench_of(40)
    assert measure_noise(bench, SIDE, 16, seconds=1000).parts == 10  # of two samples each
    assert measure_noise(bench_of(6)[0], SIDE, 16, seconds=1000) is None


@pytest.mark.parametrize(
    ("signal", "shares"),
    [(3.0, 0.25), (0.2, 1.0), (0.05, 2.5)],  # of the time: known early, known, vague (all parts)
)
def test_the_time_taken_follows_what_is_known_by_then(monkeypatch, signal, shares):
    bench, _ = bench_of(20_000)
    seconds = 0.0
    random = torch.Generator().manual_seed(0)

    def sketch(*args):
        nonlocal seconds
        seconds += 1 / 16
        return signal + torch.randn(20, generator=random)

    monkeypatch.setattr(gradient_noise, "_KNOWN", 0.15)
    monkeypatch.setattr(gradient_noise, "_warm_up", lambda *args, **named: 2048)
    monkeypatch.setattr(gradient_noise, "now", lambda device: seconds)
    monkeypatch.setattr(gradient_noise, "_sketch", sketch)
    noise = measure_noise(bench, SIDE, 16, seconds=16)  # 8 of them for 8 times 16 parts
    assert noise.parts / 16 == pytest.approx(8 * shares, abs=1)


def test_a_noise_of_the_starting_weights_is_not_told(monkeypatch):
    bench, data = bench_of(2000)
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(gradient_noise, "now", lambda device: next(clock))
    assert measure_noise(bench, SIDE, 2, seconds=1) is None
    assert len(data.asked) == 2  # of one step


@pytest.mark.parametrize("seconds", [1.0, 2.0, 20.0])
def test_slow_data_take_no_more_time_than_there_is_where_too_little_is_known(monkeypatch, seconds):
    """A sample takes 0.05 s to load, so 16 steps and 16 parts of 16 each would take 25 s."""
    bench, data = bench_of(20_000)
    monkeypatch.setattr(gradient_noise, "now", lambda device: 0.05 * len(data.asked))
    noise = measure_noise(bench, SIDE, 16, seconds=seconds)
    assert 0.05 * len(data.asked) <= gradient_noise._MAX_TIME * seconds + 4 * 16 * 0.05
    assert (noise is None) == (seconds < 3)  # 128 samples take 6.4 s


class Drawn(Noted):
    """As a training set with augmentation: each image is changed at random."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + torch.randn(image.shape), label


def test_random_changes_are_those_that_the_jobs_seed_draws_in_a_training():
    scales, own = [], torch.get_rng_state()
    for seed, rest in ((0, 1), (0, 2), (1, 1)):
        bench, _ = bench_of(500, seed=seed, dataset=Drawn)
        torch.manual_seed(rest)
        scales.append(measure_noise(bench, SIDE, 16, seconds=1000).noise_scale)
    torch.set_rng_state(own)
    assert scales[0] == scales[1] != scales[2]


def test_loader_processes_load_what_the_noise_is_measured_on():
    bench, data = bench_of(300, loaders=1)
    alone, _ = bench_of(300)
    try:
        told = measure_noise(bench, SIDE, 16, seconds=1000)
    finally:
        bench.close()
    assert not data.asked  # in this process
    assert told == measure_noise(alone, SIDE, 16, seconds=1000)


def test_images_of_a_store_are_drawn_in_the_same_way():
    plain = bench_of(500)[0]
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (500, SIDE, SIDE, 3), generator=random, dtype=torch.uint8)
    labels = torch.randint(CLASSES, (500,), generator=random)
    store = ImageStore.from_images(pixels, labels)
    images = ImageData(store, store, plain.batches._data.facts, (0.5,) * 3, (0.3,) * 3)
    bench = Bench(plain.job, images, Group(CPU))
    asked = []
    drawn = bench.batches._train.training_batch

    def noted(indices, **named):
        asked.extend(indices.tolist())
        return drawn(indices, **named)

    bench.batches._train.training_batch = noted
    assert measure_noise(bench, SIDE, 16, seconds=1000).parts == 15
    assert len(asked) == len(set(asked)) == 30 * 16


@pytest.mark.slow
def test_a_network_that_was_trained_on_few_samples_begins_anew():
    fresh, worn = bench_of(2000)[0], bench_of(2000)[0]
    supply = worn.supply(64, SIDE)
    for _ in range(200):
        worn.step(supply)
    scales = [measure_noise(one, SIDE, 16, seconds=1000).noise_scale for one in (fresh, worn)]
    assert scales[0] == scales[1]


def _measured(rank):
    group = Group(CPU, 60)
    bench, data = bench_of(1000, group=group)
    gradient_noise._KNOWN = 0.0  # pytest's fixture is in another process
    noise = measure_noise(bench, SIDE, 16, seconds=1000)
    group.close()
    return noise, data.asked


@pytest.mark.slow
def test_workers_share_the_samples_and_come_to_one_estimate(crew):
    (noise, first), (other, second) = crew.together(_measured, workers=2)
    assert noise == other
    assert noise.parts == 2 * (500 // 16 // 2)
    assert not set(first) & set(second)
    assert len(first) == len(second) == len(set(first))
    alone, data = bench_of(1000)
    assert noise.noise_scale == pytest.approx(exact_noise_scale(alone, data), rel=0.6)


# ------------------------------------------------------------------------------- the arithmetic


def drawn_gradients(parts, *, seed=0, trace=8.0, columns=100, part_size=16):
    """Gradients of parts where |G|^2 is 1 and tr(Sigma) of a sample ``trace``."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(parts, columns, generator=random, dtype=torch.float64)
    return columns**-0.5 * (1 + (trace / part_size) ** 0.5 * noise)


def test_a_known_noise_scale_is_found():
    noise = noise_of(drawn_gradients(400), part_size=16)
    assert noise.trace == pytest.approx(8, rel=0.05)
    assert noise.sqr_norm == pytest.approx(1, rel=0.05)
    assert noise.noise_scale == pytest.approx(noise.trace / noise.sqr_norm)
    assert (noise.parts, noise.repeats) == (400, 1)


def test_the_error_of_a_noise_scale_is_that_of_many_repetitions():
    told = [noise_of(drawn_gradients(30, seed=s, trace=100), part_size=16) for s in range(300)]
    scales = torch.tensor([noise.noise_scale for noise in told])
    errors = torch.tensor([noise.relative_error for noise in told])
    assert float(errors.median()) == pytest.approx(float(scales.std() / scales.mean()), rel=0.25)


def test_noise_without_signal_has_neither_scale_nor_error():
    random = torch.Generator().manual_seed(1)
    noise = noise_of(torch.randn(4, 1000, generator=random), part_size=16)
    assert noise.sqr_norm < 0 < noise.trace
    assert noise.noise_scale is None
    assert noise.relative_error is None


def test_a_signal_that_one_part_could_undo_is_none():
    rows = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1))
    rows[3] = rows[2] + 0.1 * rows[3]  # two parts that happen to agree
    noise = noise_of(rows, part_size=16)
    assert noise.sqr_norm > 0
    assert noise.noise_scale is None


def test_two_parts_tell_a_scale_without_its_error():
    noise = noise_of(drawn_gradients(2), part_size=16)
    assert noise.noise_scale is not None
    assert noise.relative_error is None


def test_gradients_that_are_not_finite_are_left_out():
    rows = drawn_gradients(20)
    rows[3, 5], rows[7, 0] = float("nan"), float("inf")
    assert noise_of(rows, part_size=16).parts == 18
    rows[:19] = float("nan")
    assert noise_of(rows, part_size=16) is None


def test_folding_keeps_the_noise_scale(monkeypatch):
    bench, _ = bench_of(2000)
    whole = measure_noise(bench, SIDE, 16, seconds=1000).noise_scale
    monkeypatch.setattr(gradient_noise, "_COLUMNS", 64)  # fewer than there are weights
    folded = measure_noise(bench, SIDE, 16, seconds=1000).noise_scale
    assert folded == pytest.approx(whole, rel=0.5)
    assert folded != whole
