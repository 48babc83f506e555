"""`probing`: what is measured, in this process; with others in `test_probe_workers`."""

import gc
import io
import multiprocessing
import sys
import weakref
from contextlib import closing
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

from batchwright.distributed.group import Group
from batchwright.errors import JobError, TrainingError
from batchwright.planning.planner import make_plan
from batchwright.probing import commands, executor
from batchwright.probing.batches import Batches
from batchwright.probing.bench import Bench
from batchwright.probing.measure import gradient_noise, memory
from batchwright.probing.measure.evaluation import answers, evaluate
from batchwright.probing.measure.memory import estimate_peak, held_bytes, weigh
from batchwright.probing.measure.timing import spread
from batchwright.probing.probe import Reporter, measure_points, probe
from batchwright.probing.replays import Replays
from batchwright.probing.workers import InProcess
from batchwright.records import Job, ProbeSettings, Profile
from batchwright.reporting.render.progress import steps
from batchwright.workload.data.sources import ImageData
from batchwright.workload.data.store import mapped_bytes
from samples import make_data

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
        "loaders": 0,
        "resolutions": (SIDE,),
        "probe": ProbeSettings(budget=0.5, steps=3),
    }
    return Job(**{**plain, **changes})


def tiny_bench(**changes):
    return Bench(tiny_job(**changes), tiny_image_data(), Group(CPU))


def tiny_image_data():
    facts = make_data(train_samples=8, val_samples=8, classes=tuple("abcd"), side=SIDE)
    train, val, _ = tiny_data()
    return ImageData(train, val, facts, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.fixture
def importable(monkeypatch):
    """Import strings find this module, as a user's own are found beside the script."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setitem(sys.modules, "test_probe", sys.modules[__name__])


def test_quartiles_are_of_the_values():
    assert spread([5.0]) == (5.0, 5.0, 5.0)
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)


def measured_here(tmp_path, **changes):
    """A profile of a tiny job, measured in this process."""
    job = tiny_job(launch="in-process", **changes)
    return probe(job, tmp_path)


@pytest.mark.slow
def test_a_users_own_data_and_network_are_measured_and_planned(importable, tmp_path):
    seen = []
    job = tiny_job(launch="in-process", precision="auto")
    profile = probe(job, tmp_path, progress=lambda *point: seen.append(point))
    sizes = [point.local_batch_size for point in profile.steps]
    assert sizes in ([1, 2, 4], [1, 4])  # on a busy machine there is no time for the middle one
    assert all(point.workers == 1 for point in profile.steps)
    assert [point.local_batch_size for point in profile.memory] == sorted({*sizes, 2})
    assert profile.collectives == ()
    assert profile.out_of_memory == ()
    assert profile.job.precision in ("float32", "bfloat16")
    assert profile.network.parameters == (3 * SIDE * SIDE + 1) * CLASSES
    assert profile.memory_parts is not None
    assert profile.memory_parts.parameters == 4 * profile.network.parameters
    assert profile.memory_parts.gradients == profile.memory_parts.optimizer
    done = [one for one, _, _ in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1]
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
    plan = make_plan(profile, profile.job.model_copy(update={"global_batch": 4}))
    assert plan.stages[0].local_batch_sizes == (4,)


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [0, 1])
def test_loading_is_in_the_times_of_a_users_own_data(loaders, importable, tmp_path):
    others = set(multiprocessing.active_children())
    profile = measured_here(tmp_path, loaders=loaders)
    for point in profile.steps:
        assert point.loading is not None
        assert point.loading.loaders == loaders
        assert point.loading.alone_seconds > 0
        assert point.loading.batch_seconds > 0
    plan = make_plan(profile, profile.job.model_copy(update={"global_batch": 4}))
    (reason,) = (one for one in plan.reasons if one.choice == "loading")
    assert reason.source == "measured"
    assert reason.value == ("1 loader process" if loaders else "no loader processes")
    assert set(multiprocessing.active_children()) <= others  # they end with the probe


def test_every_visit_and_what_is_made_of_them_is_in_the_profile(importable, tmp_path):
    # It ends once all are visited twice; a busy machine may take longer.
    profile = measured_here(tmp_path, probe=ProbeSettings(budget=12, steps=3, error=0.9))
    for point in profile.steps:
        assert point.step_seconds == pytest.approx(median(point.visits))
        assert len(point.visits) <= point.repeats <= 3 * len(point.visits)
    assert max(len(point.visits) for point in profile.steps) >= 2


def test_a_kind_of_worker_is_named_in_the_profile(importable, tmp_path):
    settings = ProbeSettings(budget=0.3, steps=3, kind="old laptop")
    assert measured_here(tmp_path, probe=settings).cluster.kind == "old laptop"


def test_several_workers_in_process_are_refused(tmp_path):
    with pytest.raises(JobError, match="workers=2 with launch=in-process"):
        measure_points(tiny_job(launch="in-process"), [(2, SIDE, 4)], tmp_path)


def test_points_are_visited_in_turn(importable, tmp_path):
    seen, clusters = [], []
    job = tiny_job(launch="in-process")
    points = [(1, SIDE, 2), (1, SIDE, 8), (1, SIDE, 4)]

    def accept(cluster):
        assert not seen
        clusters.append(cluster)

    measured = measure_points(
        job, points, tmp_path, visits=2, accept=accept, progress=lambda *one: seen.append(one)
    )
    assert clusters == [measured.cluster]
    order = [int(what.rpartition(" ")[2]) for *_, what in seen[:-1]]
    assert order == [2, 8, 4] * 2
    assert [done for done, _, _ in seen] == list(range(7))
    assert [point.local_batch_size for point in measured.steps] == [2, 4, 8]
    assert all(len(point.visits) == 2 for point in measured.steps)
    assert [point.local_batch_size for point in measured.memory] == [2, 4, 8]
    assert measured.cluster.workers == 1


def test_no_points_are_refused(tmp_path):
    with pytest.raises(JobError, match="no points to measure"):
        measure_points(tiny_job(), [], tmp_path)


@pytest.mark.slow
def test_digits_are_measured_through_the_real_pipeline(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(gradient_noise, "_MAX_TIME", 1e6)  # a busy machine takes what it takes
    monkeypatch.setattr(gradient_noise, "WARM_UP_SAMPLES", 256)
    job = Job(
        device="cpu",
        launch="in-process",
        precision="float32",
        resolutions=(8, 16),
        probe=ProbeSettings(budget=2, steps=3, learning=0),
    )
    profile = probe(job, tmp_path)
    assert {point.resolution for point in profile.steps} == {8, 16}
    assert len([point for point in profile.steps if point.resolution == 16]) >= 2
    assert profile.noise is not None
    assert profile.noise.parts >= 8
    assert profile.evaluation_seconds_per_image > 0
    assert profile.first_answers.images >= 5


def test_peak_memory_counts_what_is_live_before_and_is_linear_in_the_batch():
    bench = tiny_bench(network="resnet8", optimizer="sgd")
    peaks = {size: weigh(bench, bench.supply(size, SIDE))[0] for size in (4, 8, 16, 32)}
    # Weights and momentum at least, and the gradients that a backward pass leaves.
    weights = 4 * sum(p.numel() for p in bench.network.parameters())
    assert min(peaks.values()) > 3 * weights
    slope = (peaks[16] - peaks[8]) / 8
    assert peaks[32] == pytest.approx(peaks[16] + 16 * slope, rel=0.01)


class Large(nn.Module):
    """Allocates 25 MiB for nothing in each forward pass."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, images):
        torch.zeros(25 * 2**20, dtype=torch.uint8)
        return self.weight.expand(len(images), CLASSES)


def test_a_gpu_holds_what_lives_beside_the_step(monkeypatch):
    """Images are there before the batch is: each peak that its allocator tells has them in it."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 70)
    held = [
        held_bytes(SimpleNamespace(device=torch.device(device), live_bytes=lambda: 30))
        for device in ("cuda", "cpu")
    ]
    assert held == [40, 0]


def test_what_a_gpu_holds_is_told_once_all_images_are_there(monkeypatch):
    there = []
    monkeypatch.setattr(Batches, "hold_images", lambda batches: there.append("images"))
    monkeypatch.setattr(Replays, "forget", lambda replays: there.append("nothing recorded"))
    monkeypatch.setattr(executor, "held_bytes", lambda bench: there.append("counted") or 123)
    with closing(InProcess(Job(data="digits", device="cpu", resolutions=(8,)))) as here:
        prepare = commands.Prepare(workers=1, precision="float32")
        assert here.ask(prepare, commands.Prepared).held_bytes == 123
    assert there[-3:] == ["images", "nothing recorded", "counted"]


def test_a_probe_in_this_process_leaves_the_gpu_to_others(importable, monkeypatch):
    """The cells of a sweep train in processes of their own."""
    left = []

    def release(device):
        gc.collect()
        left.append((device, bench()))

    monkeypatch.setattr(executor, "release_memory", release)
    with closing(InProcess(tiny_job())) as here:
        here.ask(commands.Prepare(workers=1, precision="float32"), commands.Prepared)
        bench = weakref.ref(here._executor._bench)
    assert left == [(CPU, None)]


def test_an_allocation_is_seen_at_its_size():
    bench = tiny_bench()
    bench.network = Large()
    bench.trained = list(bench.network.parameters())
    bench.optimizer = torch.optim.SGD(bench.trained, lr=0.1)
    bench.join(bench.group)
    peak, _ = weigh(bench, bench.supply(2, SIDE))
    assert 25 * 2**20 < peak < 25 * 2**20 + 10_000


def test_the_peak_of_a_users_own_data_contains_the_images_as_in_a_training():
    """They were made before the step, so they counted for nothing."""
    bench, size = tiny_bench(), 512
    weighed, _ = weigh(bench, bench.supply(size, SIDE))
    with closing(bench.batches.feed(1)) as feed:
        batches = bench.stream(feed, [size], SIDE)
        trained, _ = weigh(bench, lambda: next(batches))
    images = 4 * 3 * SIDE * SIDE * size
    assert weighed > images
    assert weighed == pytest.approx(trained, abs=images / 10)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the largest resident size")
def test_the_resident_size_is_that_of_the_step_not_of_a_larger_one_before():
    bench = tiny_bench(network="resnet8")
    sizes = (512, 4)
    residents = [weigh(bench, bench.supply(size, SIDE))[1] for size in sizes]
    peaks = [weigh(bench, bench.supply(size, SIDE))[0] for size in sizes]
    assert residents[0] - residents[1] > 0.5 * (peaks[0] - peaks[1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the largest resident size")
def test_mapped_images_count_whole_in_the_resident_size_read_or_not(tmp_path):
    bench, size = tiny_bench(), 64 * 2**20
    without = weigh(bench, bench.supply(2, SIDE))[1]
    path = tmp_path / "train.pixels"
    path.write_bytes(bytes(size))
    pixels = mapped_bytes(path)
    unread = weigh(bench, bench.supply(2, SIDE))[1]
    pixels.sum()
    read = weigh(bench, bench.supply(2, SIDE))[1]
    assert 0.8 * size < unread - without < 1.2 * size
    assert 0.8 * size < read - without < 1.2 * size


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the largest resident size")
def test_of_mapped_images_held_out_a_workers_part_counts(tmp_path):
    path, size = tmp_path / "val.pixels", 64 * 2**20
    path.write_bytes(bytes(size))

    def resident(workers):
        memory._forget_highest_resident()
        return memory._highest_resident(workers)

    without = resident(1)
    pixels = mapped_bytes(path)
    assert 0.9 * size < resident(1) - without < 1.1 * size
    assert 0.2 * size < resident(4) - without < 0.3 * size
    pixels.max()
    assert 0.9 * size < resident(4) - without < 1.1 * size  # all were read


@pytest.mark.parametrize(("method", "together"), [("plain", 4), ("dual-batch", 1)])
def test_with_a_parameter_server_a_worker_evaluates_all_images_held_out(
    monkeypatch, method, together
):
    asked = []
    monkeypatch.setattr(memory, "_forget_highest_resident", lambda: True)
    monkeypatch.setattr(memory, "_highest_resident", asked.append)
    bench = SimpleNamespace(
        device=torch.device("cpu"),
        group=SimpleNamespace(size=4),
        supply=lambda *_: None,
        try_step=lambda _: True,
        live_bytes=lambda: 1000,
    )
    worker = SimpleNamespace(_job=Job(method=method), _joined=lambda _: bench)
    command = commands.Weigh(workers=4, resolution=SIDE, local_batch_size=2)
    executor.Executor.carry_out(worker, command)
    assert asked == [together]


def test_where_not_even_the_first_step_fits_the_resolution_is_named(monkeypatch):
    def full(bench, supply):
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(Bench, "step", full)
    line = rf"^2 images at {SIDE} px: a step takes more memory than .*cuDNN error: CUDNN_STATUS_NOT"
    with pytest.raises(JobError, match=line):  # which may have another cause
        tiny_bench()


def test_a_step_that_does_not_fit_changes_nothing(monkeypatch):
    bench = tiny_bench()
    before = [p.clone() for p in bench.trained]

    def greedy(batch):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(bench, "loss", greedy)
    assert weigh(bench, bench.supply(32, SIDE)) == (None, None)
    assert all(torch.equal(a, b) for a, b in zip(before, bench.trained, strict=True))


def test_an_error_other_than_of_memory_is_not_hidden(monkeypatch):
    bench = tiny_bench()

    def broken(batch):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(bench, "loss", broken)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        weigh(bench, bench.supply(2, SIDE))


@pytest.mark.slow
@pytest.mark.parametrize("network", ["resnet8", "vgg8", "mobilenet_small"])
def test_a_step_never_tried_is_guessed_from_fake_tensors(network):
    job = tiny_job(network=network, data="digits", resolutions=(32,))
    data = tiny_image_data()
    bench = Bench(job, data, Group(CPU))
    peak, _ = weigh(bench, bench.supply(16, 32))
    assert estimate_peak(job, data.facts, 32, 16) == pytest.approx(peak, rel=0.15)


def test_a_network_that_takes_no_fake_tensors_is_not_guessed(importable):
    job = tiny_job(network="test_probe:PickyNetwork")
    assert estimate_peak(job, tiny_image_data().facts, SIDE, 4) is None


class PickyNetwork(nn.Module):
    """Looks into its tensors, which a fake one does not allow."""

    def __init__(self, num_classes):
        super().__init__()
        self.layers = tiny_network(num_classes)

    def forward(self, images):
        assert float(images.sum()) != 1
        return self.layers(images)


def test_a_step_is_as_training_takes_it_clipped():
    bench = tiny_bench(
        clip_norm=1e-3, momentum=0.0, weight_decay=0.0, learning_rate=1.0, base_batch=8
    )
    weights = torch.cat([p.detach().flatten() for p in bench.trained])
    bench.step(bench.supply(8, SIDE))
    moved = torch.cat([p.detach().flatten() for p in bench.trained]) - weights
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_tiny_batches_take_a_rate_in_proportion():
    bench = tiny_bench(learning_rate=0.5, base_batch=16)
    rates = []
    for size in (4, 8, 16, 32):
        bench.step(bench.supply(size, SIDE))
        rates.append(bench.optimizer.param_groups[0]["lr"])
    assert rates == [0.125, 0.25, 0.5, 0.5]


def test_a_network_that_diverges_starts_over_and_keeps_the_memory_of_training(monkeypatch):
    """Else every later step computes with NaN, updates nothing and holds no momentum."""
    bench = tiny_bench(weight_decay=0.0)
    start = [p.clone() for p in bench.trained]
    monkeypatch.setattr(bench, "_start", [t.clone() for t in bench.network.state_dict().values()])
    bench.step(bench.supply(8, SIDE))
    live = bench.live_bytes()
    loss = bench.loss
    monkeypatch.setattr(bench, "loss", lambda batch: loss(batch) * float("inf"))
    bench.optimizer.state.clear()
    bench.step(bench.supply(8, SIDE))
    assert bench.live_bytes() == live
    assert all(torch.equal(a, b) for a, b in zip(start, bench.trained, strict=True))


def test_each_trial_has_its_lines_where_no_display_can_move():
    file = io.StringIO()
    reporter = Reporter(steps(Console(file=file, width=200)), 5)
    for number in (1, 2, 3):
        reporter.trial(f"trial {number}: sgd", 0.0, 4000)
        reporter.trial(f"trial {number}: sgd", 0.5, 61.5)
        reporter.trial(f"trial {number}: sgd, 9.0 % right", 1.0, 60)
    lines = file.getvalue().splitlines()[1:]
    for number in (1, 2, 3):
        began = f"trial {number}: sgd, up to 1:06:40 left for trials, percent done: 0 of 100"
        assert lines[2 * number - 2] == began
        assert (
            lines[2 * number - 1] == f"trial {number}: sgd, 9.0 % right, percent done: 100 of 100"
        )
    assert len(lines) == 6


def test_any_time_for_trials_can_be_shown():
    told = []
    Reporter(lambda *line: told.append(line), 5).trial("trial 1: sgd", 0.0, 1e30)
    assert "trial 1: sgd, up to 999999999 days" in told[-1][-1]


def test_seconds_beyond_the_budget_are_shown_as_they_are(monkeypatch):
    told, now = [], [100.0]
    reporter = Reporter(lambda *line: told.append(line), 20)
    monkeypatch.setattr(reporter, "_clock", lambda: now[0])
    reporter.begin()
    for spent in (19.9, 20.0, 54.3):
        now[0] = 100.0 + spent
        reporter("2 workers")
    reporter.trial("trial 1: sgd", 0.0, 30.0)
    now[0] += 30.0
    reporter("2 workers")
    assert told[-1] == told[-3]  # the trial's seconds are not of the budget
    reporter.finish()
    del told[-3:-1]
    assert told[1:] == [
        (19, 20, "measuring 2 workers, seconds"),
        (20, 40, "measuring 2 workers, past probe.budget, seconds"),
        (54, 60, "measuring 2 workers, past probe.budget, seconds"),
        (85, 85, "measured, seconds"),
    ]


def test_an_evaluation_that_does_not_fit_is_timed_with_half_as_many_images():
    bench, tried, fitting = tiny_bench(), [], 2
    pass_of = bench.outputs_and_loss

    def one_pass(batch):
        tried.append(len(batch[1]))
        if len(batch[1]) > fitting:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
        return pass_of(batch)

    bench.outputs_and_loss = one_pass
    assert evaluate(bench, 8, 2).seconds_per_image > 0
    assert tried == [8, 4, 2, 2, 2]
    fitting = 0
    with pytest.raises(TrainingError, match="not even one image"):
        evaluate(bench, 8, 2)


@pytest.mark.parametrize(("outputs", "judged"), [(1, False), (2, True)])
def test_one_number_for_an_image_tells_no_accuracy_not_even_of_one_class(outputs, judged):
    """The training's own evaluation refuses it, too."""
    told = answers(torch.zeros(5, outputs), torch.zeros(5, dtype=torch.long), 1)
    assert (told is not None) == judged


def knowing_network(num_classes):
    """A user's own, with weights that tell the label from the pixel that holds it."""
    network = tiny_network(num_classes)
    with torch.no_grad():
        network[1].weight.zero_()
        for label in range(num_classes):  # the nearest label has the largest output
            network[1].weight[label, 0] = label
            network[1].bias[label] = -(label**2) / 2
    return network


def mapping_network(num_classes):
    """It gives a map for each class in place of a number."""
    return nn.Conv2d(3, num_classes, 1)


def mean_loss(outputs, labels):
    return outputs.square().mean()


@pytest.mark.parametrize(
    ("network", "judged", "knowing"),
    [
        ("test_probe:tiny_network", True, False),
        ("test_probe:knowing_network", True, True),
        ("test_probe:mapping_network", False, False),
    ],
)
def test_an_evaluation_tells_what_the_network_answers_before_any_training(
    importable, network, judged, knowing
):
    bench = tiny_bench(network=network, loss="test_probe:mean_loss", seed=1)
    for _ in range(20):  # the measured steps before it do not count
        bench.step(bench.supply(8, SIDE))
    first = evaluate(bench, 16, 4).first_answers
    assert first.images == (80 if judged else 0)
    assert first.knowing == knowing
    if knowing:
        assert first.right == first.images > 2 * first.by_chance
    for now, start in zip(bench.network.state_dict().values(), bench._start, strict=True):
        assert torch.equal(now, start)
