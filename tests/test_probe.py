"""`probing`: what is measured, alone and by two workers together."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from batchwright.group import Group
from batchwright.planning.planner import make_plan
from batchwright.probing import precision as precision_module
from batchwright.probing.bench import Bench
from batchwright.probing.gradient_noise import measure_noise
from batchwright.probing.memory import peak_of_step
from batchwright.probing.precision import choose_precision
from batchwright.probing.probe import measure
from batchwright.probing.step_time import local_batch_sizes, measure_points
from batchwright.probing.timing import spread
from batchwright.records import DataFacts, Job, ProbeSettings, Profile
from batchwright.workload.sources import ImageData

CPU = torch.device("cpu")
SIDE, CLASSES = 8, 4


class TinyImages(torch.utils.data.Dataset):
    """Eight random images, each with its label as signal in one pixel."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        image = torch.randn(3, SIDE, SIDE, generator=torch.Generator().manual_seed(index))
        image[0, 0, 0] = index % CLASSES
        return image, index % CLASSES


def tiny_data():
    """What a job's import string may name: (train, validation, class names)."""
    return TinyImages(), TinyImages(), tuple("abcd")


def tiny_network(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, num_classes))


def tiny_job(**changes):
    plain = {
        "data": "test_probe:tiny_data",
        "network": "test_probe:tiny_network",
        "workers": 1,
        "device": "cpu",
        "precision": "float32",
        "resolutions": (SIDE,),
        "probe": ProbeSettings(budget=2, steps=3),
    }
    return Job(**{**plain, **changes})


def tiny_bench(**changes):
    return Bench(tiny_job(**changes), tiny_image_data(), Group(CPU))


def tiny_image_data():
    facts = DataFacts(
        name="tiny",
        digest="0",
        train_samples=8,
        val_samples=8,
        split="none",
        classes=tuple("abcd"),
        side=SIDE,
    )
    train, val, _ = tiny_data()
    return ImageData(train, val, facts, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.fixture
def importable(monkeypatch):
    """Import strings find this module, as a user's own are found beside the script."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setitem(sys.modules, "test_probe", sys.modules[__name__])


@pytest.mark.parametrize(
    ("most", "least", "expected"),
    [
        (71, 2, [16, 32, 64, 71]),
        (128, 1, [16, 32, 64, 128]),
        (30, 2, [4, 8, 16, 30]),
        (1, 2, [2, 4, 8]),
        (0, 1, [1, 2, 4]),
        (5, 1, [1, 2, 4, 5]),
    ],
)
def test_measured_batches_reach_what_a_plan_can_choose(most, least, expected):
    assert local_batch_sizes(most, least) == expected


def test_quartiles_are_of_the_values():
    assert spread([5.0]) == (5.0, 5.0, 5.0)
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)


def test_a_users_own_data_and_network_are_measured_and_planned(importable):
    seen = []
    job = tiny_job(precision="auto", resolutions="auto")
    profile = measure(
        job, rank=0, world_size=1, local_rank=0, progress=lambda *point: seen.append(point)
    )
    assert profile is not None
    assert [point.local_batch_size for point in profile.steps] == [1, 2, 4]
    assert all(point.workers == 1 and point.sync_seconds == 0 for point in profile.steps)
    assert [point.local_batch_size for point in profile.memory] == [1, 2, 4]
    assert profile.collectives == ()
    assert profile.job.resolutions == (SIDE,)
    assert profile.job.precision in ("float32", "bfloat16")
    assert profile.network.parameters == (3 * SIDE * SIDE + 1) * CLASSES
    assert [done for done, _, _ in seen] == [*range(len(seen) - 1), seen[-1][1]]
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
    plan = make_plan(profile, profile.job.model_copy(update={"global_batch": 4}))
    assert plan.stages[0].local_batch_sizes == (4,)


def test_digits_are_measured_through_the_real_pipeline(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path))
    job = Job(device="cpu", resolutions=(8, 16), probe=ProbeSettings(budget=3, steps=3))
    profile = measure(job, rank=0, world_size=1, local_rank=0)
    assert profile is not None
    assert {point.resolution for point in profile.steps} == {8, 16}
    assert len([point for point in profile.steps if point.resolution == 16]) >= 3
    assert profile.noise is not None
    assert profile.noise.parts == 4
    assert 0 < profile.evaluation_seconds_per_image < 0.01
    plan = make_plan(profile)
    assert plan.stages[0].resolution == 16
    assert plan.stages[0].predicted_epoch_seconds is not None


def test_peak_memory_counts_what_is_live_before_and_is_linear_in_the_batch():
    bench = tiny_bench(network="resnet8", optimizer="sgd")
    peaks = {}
    for size in (4, 8, 16, 32):
        supply = bench.supply(size, SIDE)
        bench.step(supply)
        peak = peak_of_step(bench, supply)
        assert peak is not None
        peaks[size] = peak
    # Weights and momentum at least, and the gradients that a backward pass leaves.
    weights = 4 * sum(p.numel() for p in bench.network.parameters())
    assert min(peaks.values()) > 3 * weights
    slope = (peaks[16] - peaks[8]) / 8
    assert peaks[32] == pytest.approx(peaks[16] + 16 * slope, rel=0.01)


def test_an_allocation_is_seen_at_its_size():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(CLASSES))

        def forward(self, images):
            torch.empty(25 * 2**20, dtype=torch.uint8)
            return self.weight.expand(len(images), CLASSES)

    bench = tiny_bench()
    bench.network = Large()
    bench.trained = list(bench.network.parameters())
    bench.optimizer = torch.optim.SGD(bench.trained, lr=0.1)
    peak = peak_of_step(bench, bench.supply(2, SIDE))
    assert peak is not None
    assert 25 * 2**20 < peak < 25 * 2**20 + 10_000


def test_a_step_that_does_not_fit_changes_nothing_and_ends_the_points(monkeypatch):
    bench = tiny_bench()
    loss = bench.loss

    def greedy(batch):
        if len(batch[1]) > 16:
            raise torch.OutOfMemoryError("out of memory")
        return loss(batch)

    monkeypatch.setattr(bench, "loss", greedy)
    before = [p.clone() for p in bench.trained]
    assert peak_of_step(bench, bench.supply(32, SIDE)) is None
    assert all(torch.equal(a, b) for a, b in zip(before, bench.trained, strict=True))
    times, peaks = measure_points(
        bench, SIDE, [8, 16, 32], seconds=60, memory_limit=2**40, report=lambda what: None
    )
    assert [point.local_batch_size for point in times] == [8, 16]
    assert [point.local_batch_size for point in peaks] == [8, 16]


def test_batches_that_would_not_fit_the_memory_are_not_tried():
    bench = tiny_bench(network="resnet8")
    sizes = [8, 16, 32, 64]
    _, peaks = measure_points(
        bench, SIDE, sizes, seconds=60, memory_limit=2**40, report=lambda what: None
    )
    limit = (peaks[2].peak_bytes + peaks[3].peak_bytes) // 2
    times, _ = measure_points(
        bench, SIDE, sizes, seconds=60, memory_limit=limit, report=lambda what: None
    )
    assert [point.local_batch_size for point in times] == sizes[:3]


def test_a_short_budget_still_measures_three_points_and_no_more():
    bench = tiny_bench(network="resnet8")
    times, _ = measure_points(
        bench, SIDE, [16, 32, 64, 128], seconds=1e-6, memory_limit=2**40, report=lambda what: None
    )
    assert [point.local_batch_size for point in times] == [2, 4, 8]


@dataclass
class KnownNoise:
    """Stands in for a bench: gradients of one weight, 1 plus noise of variance 8 / sample."""

    group: Group
    device: torch.device

    def __post_init__(self):
        self.trained = [nn.Parameter(torch.zeros(1))]
        self.random = torch.Generator().manual_seed(0)

    def supply(self, size, resolution):
        return lambda: 1 + (8 / size) ** 0.5 * torch.randn(1, generator=self.random)

    def loss(self, batch):
        return (self.trained[0] * batch).sum()


def test_a_known_noise_scale_is_found():
    noise = measure_noise(KnownNoise(Group(CPU), CPU), SIDE, 16, seconds=5)
    assert noise.repeats == 40
    assert noise.trace == pytest.approx(8, rel=0.4)
    assert noise.sqr_norm == pytest.approx(1, rel=0.2)
    assert noise.noise_scale == noise.trace / noise.sqr_norm


def test_the_noise_measurement_leaves_the_weights_alone():
    bench = tiny_bench(network="resnet8")
    before = [p.clone() for p in bench.trained]
    assert measure_noise(bench, SIDE, 4, seconds=0.1) is not None
    assert all(torch.equal(a, b) for a, b in zip(before, bench.trained, strict=True))


TWO_WORKERS = """
import sys
import torch
import torch.distributed as dist
from batchwright.documents import write_record
from batchwright.group import Group
from batchwright.probing import bench as benches
from batchwright.probing.precision import choose_precision
from batchwright.probing.probe import measure
from batchwright.records import Job, ProbeSettings

torch.set_num_threads(1)
kept = []
whole = benches.Bench.__init__
benches.Bench.__init__ = lambda self, *given: (whole(self, *given), kept.append(self))[0]
group = Group(torch.device("cpu"), 60)
job = Job(device="cpu", workers=2, probe=ProbeSettings(budget=20, steps=4))
profile = measure(job, rank=group.rank, world_size=group.size, local_rank=group.rank)
assert (profile is None) == (group.rank != 0)
weights = torch.cat([p.detach().flatten() for p in kept[0].network.parameters()])
other = group.sum(weights.clone()) - weights
assert torch.equal(weights, other), "the workers' weights went apart"
if profile:
    write_record(profile, sys.argv[1])
group.close()
"""


@pytest.mark.slow
def test_two_workers_measure_together_and_keep_the_same_weights(tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "profile.json"
    script.write_text(TWO_WORKERS)
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(script), str(out)),
        ],
        env={**os.environ, "BATCHWRIGHT_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=90,
    )
    profile = Profile.model_validate_json(out.read_text())
    assert profile.cluster.workers == 2
    assert all(point.workers == 2 and point.sync_seconds > 0 for point in profile.steps)
    assert [point.local_batch_size for point in profile.steps] == [16, 32, 64, 71]
    for point in profile.steps:
        parts = point.compute_seconds + point.sync_seconds
        assert point.step_seconds == pytest.approx(parts, rel=0.5)
    sizes = [one.bytes for one in profile.collectives]
    assert sizes == sorted({40_000, 4_000_000, profile.network.trained_bytes})
    assert profile.noise is not None
    assert profile.noise.parts == 8
    assert make_plan(profile).stages[0].workers == 2


@pytest.mark.parametrize(
    ("seconds_in_bfloat16", "chosen"), [(0.5, "bfloat16"), (0.96, "float32"), (1.4, "float32")]
)
def test_automatic_precision_is_the_faster_one(monkeypatch, seconds_in_bfloat16, chosen):
    def timed(bench, supply, steps):
        supply()
        compute = 1.0 if bench.job.precision == "float32" else seconds_in_bfloat16
        return [(compute, 0.0)] * steps

    monkeypatch.setattr(precision_module, "computes_in_bfloat16", lambda device: True)
    monkeypatch.setattr(precision_module, "time_steps", timed)
    job = tiny_job(precision="auto")
    precision, times = choose_precision(job, tiny_image_data(), Group(CPU), seconds=1)
    assert precision == chosen
    assert [one.step_seconds for one in times] == [1.0, seconds_in_bfloat16]


def test_automatic_precision_is_float32_without_hardware_for_the_other(monkeypatch):
    monkeypatch.setattr(precision_module, "computes_in_bfloat16", lambda device: False)
    job = tiny_job(precision="auto")
    assert choose_precision(job, tiny_image_data(), Group(CPU), seconds=1) == ("float32", ())


def test_a_precision_that_is_asked_for_is_not_compared():
    job = tiny_job(precision="bfloat16")
    assert choose_precision(job, tiny_image_data(), Group(CPU), seconds=1) == ("bfloat16", ())
