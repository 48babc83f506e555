"""What only a GPU shows: ``pytest -m gpu -n 0``; without one all of this is skipped.

Each branch of the source on the kind of device has its test here, which names it; see
`test_device_branches`. Where there is a GPU, a test fails that does not come by what it names. One
GPU is enough for nearly all; NCCL refuses two processes on one, so there they exchange by gloo.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import TensorDataset

import batchwright
from batchwright import Session
from batchwright.distributed import transports
from batchwright.distributed.group import Group
from batchwright.errors import DataError, JobError, LostWorkerError
from batchwright.probing.bench import Bench
from batchwright.probing.measure.memory import held_bytes, weigh
from batchwright.records import RunSummary
from batchwright.records.documents import read_record
from batchwright.training.batches import randomness
from batchwright.training.batches.feeding import DatasetFeed
from batchwright.training.batches.following import Follower
from batchwright.training.batches.recovering import Recovering
from batchwright.training.batches.unequal import Sampler
from batchwright.training.evaluate.weight_average import WeightAverage
from batchwright.training.parameter_server.merging import pack, unpack
from batchwright.training.simulated.simulated_workers import Randomness
from batchwright.workflows import doctor, prepare_job
from batchwright.workflows.delivery.predict import predict
from batchwright.workflows.sweep import sharing, slots, verb
from batchwright.workload import host
from batchwright.workload.data import copying, image_files
from batchwright.workload.data import pipeline as pipelines
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.data.sources import ImageData, open_data
from batchwright.workload.muon import matrices_of, matrix_of, muon
from batchwright.workload.networks import resnet8
from batchwright.workload.passes import cuda_graphs, recorded_passes
from batchwright.workload.passes.compilation import what_is_missing
from batchwright.workload.passes.cuda_graphs import graph_training
from gloo import SECONDS
from samples import make_data, make_job, make_plan
from test_host_waits import KINDS, by_sgd, photographs
from test_session import Points, make_tiny_plan

GPU = torch.device("cuda", 0)
ROOT = Path(batchwright.__file__).parent
REACHED: dict[str, tuple[str, ...]] = {}
"""By test, the branches that it comes by, as ``module:function``."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def reaches(*sites: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Notes what a test comes by."""

    def noted(test):
        REACHED[test.__name__] = sites
        return test

    return noted


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Products and convolutions in float32, and the same ones each time."""
    for name, value in (("allow_tf32", False), ("deterministic", True)):
        monkeypatch.setattr(torch.backends.cudnn, name, value)


@pytest.fixture(autouse=True)
def coming_by(request):
    """Where there is a GPU: a test that names branches comes by the functions they are in."""
    named = REACHED.get(request.function.__name__, ())
    missing = {one for one in named if _is_function(one)}

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            path = Path(frame.f_code.co_filename).relative_to(ROOT).with_suffix("")
            name = frame.f_code.co_qualname.replace(".<locals>", "")
            missing.discard(f"{'.'.join(path.parts)}:{name}")
        if not missing:  # each call of this costs some time: compilers make many millions
            sys.setprofile(None)

    if missing:
        threading.setprofile(profile)
        sys.setprofile(profile)
    yield
    sys.setprofile(None)
    threading.setprofile(None)
    assert not missing


def _is_function(site: str) -> bool:
    """Not a class, whose branch is in what it holds, and not one that other processes come by."""
    return "(" not in site and not site.rpartition(":")[2].rpartition(".")[2][0].isupper()


def store(samples=48, side=8):
    random = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (samples, side, side, 3), generator=random, dtype=torch.uint8)
    return ImageStore.from_images(images, torch.arange(samples) % 3)


MIDDLE = (0.5, 0.5, 0.5)


def pipeline(device=GPU, images=None, side=8, dtype=torch.float32, augmentation="crop-flip"):
    return ImagePipeline(
        images or store(), device=device, side=side, mean=MIDDLE, std=MIDDLE,
        augmentation=augmentation, seed=1, dtype=dtype,
    )  # fmt: skip


def plan_for(batches=(12,), *, samples=48, side=8, **job):
    return make_tiny_plan(batches, samples=samples, sides=(side,), device="cuda", **job)


def train(
    device=GPU, *, plan=None, build=by_sgd, images=None, held_out=None, each_step=lambda: None,
    dtype=torch.float32, make=resnet8, augmentation="crop-flip", **options,
):  # fmt: skip
    """Weights after a training, by our own loop."""
    torch.manual_seed(0)
    network = make(3).to(device, memory_format=torch.channels_last)
    plan = plan or plan_for()
    side = plan.stages[0].resolution
    fed = pipeline(device, images, side=side, dtype=dtype, augmentation=augmentation)
    with Session(network, build(network), fed, plan=plan, **options) as session:
        for _ in session.epochs():
            for batch, labels in session.batches():
                session.step(lambda b=batch, a=labels: functional.cross_entropy(network(b), a))
                each_step()
            session.evaluate(pipeline(device, held_out or images, side=side), right)
    return network


def right(outputs, labels):
    return outputs.argmax(dim=1) == labels


# ------------------------------------------------------------------------------------ one worker


@reaches(
    "workload.host:enter",
    "training.step.clock:clock_for",
    "training.step.clock:_Event.__init__",
    "training.step.clock:_Event.record",
    "training.step.peak_memory:PeakMemory.of_epoch",
    "training.step.peak_memory:PeakMemory.__init__",
    "training.batches.randomness:random_states",
    "workload.data.pipeline:ImagePipeline._level_of",
    "workload.data.pipeline:ImagePipeline.training",
    "workload.data.pipeline:_Level.on_gpu",
    "workload.data.pipeline:flip",
    "workload.data.copying:copy_to_device",
    "distributed.transports:fetched",
    "distributed.transports:on_its_way",
    "training.step.updater:Updater.__init__",
)
def test_a_training_learns_what_the_cpu_learns_and_tells_time_and_memory(tmp_path):
    here = train(GPU, run_folder=tmp_path / "gpu")
    there = train(torch.device("cpu"), plan=plan_for())
    for ours, theirs in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=2e-2, rtol=2e-2)
    lines = (tmp_path / "gpu" / "summary.json").read_text()
    assert '"peak_bytes"' in lines


def test_float16_learns_what_float32_learns():
    """In the same direction; the first steps may be left out, until the scale is low enough."""
    torch.manual_seed(0)
    first = flat_weights(resnet8(3))
    half = flat_weights(train(plan=plan_for(precision="float16"))) - first
    assert functional.cosine_similarity(half, flat_weights(train()) - first, dim=0) > 0.8


def test_blocks_that_are_computed_again_train_the_same_with_less_memory():
    peaks, weights = [], []
    for key in ("off", "on"):
        torch.cuda.reset_peak_memory_stats(GPU)
        plan = plan_for(activation_checkpointing=key, side=64)
        weights.append(flat_weights(train(plan=plan)))
        peaks.append(torch.cuda.max_memory_allocated(GPU))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-4)
    assert peaks[1] < peaks[0]


def two_convolutions(classes):
    """A network of few kernels: each takes a compiler a second or more."""
    return torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()),
        *(torch.nn.Conv2d(8, 8, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()),
        torch.nn.Linear(8, classes),
    )


@pytest.mark.skipif(bool(what_is_missing(GPU)), reason="needs triton")
@reaches("workload.passes.compilation:what_is_missing")
def test_a_compiled_training_learns_what_it_learns_without():
    assert not what_is_missing(GPU)
    plain, compiled = (
        flat_weights(train(plan=plan_for(compile=key), make=two_convolutions))
        for key in ("off", "on")
    )
    torch.testing.assert_close(compiled, plain, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("micro", [12, 6])
@reaches(
    "workload.passes.recorded_passes:_as_before",
    "workload.passes.recorded_passes:Passes.__init__",
    "workload.passes.recorded_passes:Recorder.record",
    "workload.passes.recorded_passes:Recorder.warm_up",
    "workload.passes.recorded_passes:Recorder._stream",
    "workload.passes.recorded_passes:Recorder.__init__",
)
def test_a_replayed_training_is_the_same_to_the_bit(micro, monkeypatch):
    """With gradients that are added up over parts of a step, too."""
    networks, replayed = [], []
    usual = recorded_passes.Passes.replay_backward

    def replay_backward(passes, slope):
        replayed.append(slope)
        return usual(passes, slope)

    monkeypatch.setattr(recorded_passes.Passes, "replay_backward", replay_backward)
    for key in ("off", "on"):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*CUDA graphs")
            networks.append(train(plan=plan_for(epochs=5, micro=micro, cuda_graphs=key)))
    assert len(replayed) == 1 + 20 * (12 // micro) - cuda_graphs.AFTER  # one is the check
    plain, other = (network.state_dict() for network in networks)
    torch.testing.assert_close(other, plain, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_replayed_passes_are_those_of_the_network_with_random_numbers_and_16_bits(precision):
    found = []
    images = torch.randn(6, 8, 3, 8, 8, device=GPU)
    for after in (2, 1000):
        torch.manual_seed(0)
        network = torch.nn.Sequential(resnet8(3, dropout=0.5)).to(GPU)
        graphs = graph_training(network, after=after)
        optimizer = by_sgd(network)
        for some in images:
            with host.autocast(precision, GPU):
                outputs = network(some).float()
            functional.cross_entropy(outputs, torch.arange(8, device=GPU) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not graphs.failure
        found.append(network.state_dict())
        assert graphs.holds == (after == 2)
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Rows(torch.nn.Module):
    """Reads an image row by row."""

    def __init__(self):
        super().__init__()
        self.reads, self.ends = torch.nn.LSTM(24, 8, batch_first=True), torch.nn.Linear(8, 3)

    def forward(self, images):
        return self.ends(self.reads(images.permute(0, 2, 1, 3).flatten(2))[0].mean(1))


def test_weights_that_cudnn_has_moved_are_trained_all_the_same():
    """Layers of cuDNN move those that they do not know; what is recorded would read these."""
    found = []
    for replays in (True, False):
        torch.manual_seed(0)
        network = Rows().to(GPU)
        if replays:
            graphs = graph_training(network, after=0)
        optimizer = by_sgd(network)
        for images in torch.randn(3, 8, 3, 8, 8, device=GPU):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*CUDA graphs")
                outputs = network(images)
            functional.cross_entropy(outputs, torch.arange(8, device=GPU) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(network.state_dict())
    assert "moves its weights" in graphs.failure
    torch.testing.assert_close(*found)


@reaches("workload.passes.recorded_passes:Recorder._recover")
def test_what_cannot_be_recorded_goes_on_and_leaves_nothing_behind():
    class Reads(torch.nn.Module):
        def forward(self, images):
            return images * float(images.mean())

    network = torch.nn.Sequential(Reads(), resnet8(3)).to(GPU)
    graphs = graph_training(network, after=0)
    images = torch.randn(8, 3, 8, 8, device=GPU)
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="goes on as it is"):
        outputs = network(images)
    outputs.sum().backward()
    assert graphs.failure
    held = torch.empty(2**26, dtype=torch.uint8, device=GPU)
    held.record_stream(torch.cuda.Stream())
    before = torch.cuda.memory_reserved()
    del held
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before - 2**26
    assert torch.rand(3, device=GPU).isfinite().all()
    assert torch.cuda.current_stream() == stream
    assert torch.isfinite(flat_weights(network)).all()


def flat_weights(network):
    return torch.cat([p.detach().cpu().flatten() for p in network.parameters()])


@reaches("training.batches.randomness:restore_random_states")
def test_a_run_goes_on_with_the_random_numbers_of_the_gpu():
    states = randomness.random_states(GPU)
    drawn = torch.rand(3, device=GPU)
    randomness.restore_random_states(states, GPU)
    assert torch.equal(torch.rand(3, device=GPU), drawn)


@reaches("workload.data.random_numbers:put_aside")
def test_a_step_of_ones_own_is_weighed_alone_and_leaves_the_random_numbers_of_the_gpu():
    layer = torch.nn.Linear(4096, 4096).to(GPU)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def step(images):
        optimizer.zero_grad()
        functional.dropout(layer(images)).square().mean().backward()
        optimizer.step()

    def batch(size):
        return torch.randn(size, 4096, device=GPU)

    step(batch(2))
    states, before = randomness.random_states(GPU), allocated()
    profile = batchwright.probe(step=step, batch=batch, samples=64, probe={"budget": 1})
    drawn = torch.rand(3, device=GPU)
    randomness.restore_random_states(states, GPU)
    assert torch.equal(torch.rand(3, device=GPU), drawn)
    smallest = min(profile.memory, key=lambda point: point.local_batch_size)
    # Weights, gradients and state are there already; what was before is kept elsewhere.
    assert smallest.peak_bytes - before < 4096**2 * 4


@reaches(
    "training.batches.following:Follower._now", "training.batches.following:Follower.end_epoch"
)
def test_passes_in_another_trainer_are_timed_on_the_device():
    model = torch.nn.Linear(2048, 2048).to(GPU)
    sampler = Sampler(range(32), 8, workers=1, rank=0)
    follower = Follower(sampler, model.parameters())
    for _ in sampler:
        follower.begin()
        model(torch.randn(8, 2048, device=GPU)).sum().backward()
    torch.cuda.synchronize(GPU)
    assert all(start.elapsed_time(end) > 0 for start, end in follower._times)
    assert follower.end_epoch() == (8,)
    follower.close()


@reaches("training.simulated.simulated_workers:_take", "training.simulated.simulated_workers:_put")
def test_simulated_workers_have_random_numbers_of_their_own():
    numbers = Randomness(0, 2, GPU)
    drawn = []
    for rank in (0, 1, 0, 1):
        with numbers.of(rank):
            drawn.append(torch.rand(2, device=GPU).tolist())
    assert len({tuple(one) for one in drawn}) == 4


@pytest.mark.parametrize(
    "kind", [*KINDS, "photographs", "images come ahead", "resized crops", "average"]
)
def test_a_step_makes_the_host_wait_at_most_once(kind, monkeypatch):
    """PyTorch's own count: it warns where an operation waits. Ours waits by asking an event."""
    plan, build, options = KINDS.get(kind, KINDS["plain"])
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"device": "cuda"})})
    if kind == "images come ahead":
        monkeypatch.setattr(pipelines, "RESIDENT_BYTES", 0)
    images = photographs() if kind == "photographs" else None
    if kind == "resized crops":
        options = {"augmentation": "resized-crop"}
    if kind == "average":
        plan = plan.model_copy(update={"average_epochs": 0.5})
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            each = [0]
            train(
                plan=plan,
                build=build,
                images=images,
                each_step=lambda: each.append(len(seen)),
                **options,
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    parts = max(1, 12 // plan.stages[0].micro_batch_size)  # of a step
    waits = [after - before for before, after in pairwise(each[::parts])]
    assert max(waits[1:4]) <= 1, [str(one.message)[:90] for one in seen]


@reaches(
    "workload.data.copying:copy_stream",
    "workload.data.copying:prefetched",
    "workload.data.copying:prefetched.work",
    "workload.data.copying:prefetched.taken",
    "workload.data.pipeline:_stream",
)
def test_images_that_do_not_stay_on_the_gpu_come_ahead(monkeypatch):
    copying.copy_stream.cache_clear()  # others may have come by it
    stays = train()
    monkeypatch.setattr(pipelines, "RESIDENT_BYTES", 0)
    current = torch.device("cuda")  # the same GPU without its number
    for ours, theirs in zip(train(current).parameters(), stays.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@reaches("workload.data.pipeline:resize")
def test_photographs_are_cropped_where_they_are():
    sizes = torch.tensor([(18, 24), (30, 18)] * 24)
    pixels = torch.randint(0, 256, (int(sizes.prod(1).sum()) * 3,), dtype=torch.uint8)
    photographs = ImageStore(pixels, torch.arange(48) % 3, sizes)
    ours = pipeline(GPU, photographs, side=16)
    theirs = pipeline(torch.device("cpu"), photographs, side=16)
    for resolution in (16, 14):
        batch, labels = ours.training_batch(torch.arange(20), epoch=1, resolution=resolution)
        wanted, _ = theirs.training_batch(torch.arange(20), epoch=1, resolution=resolution)
        assert batch.device == labels.device == GPU
        torch.testing.assert_close(batch.cpu(), wanted, atol=1.5 / 255 / 0.5, rtol=0)


@reaches("training.batches.feeding:DatasetFeed._make_loader", "training.batches.feeding:to_device")
@pytest.mark.parametrize("loaders", [0, 1])
def test_batches_of_ones_own_data_come_from_pinned_memory(loaders):
    feed = DatasetFeed(Points(), device=GPU, seed=0, loaders=loaders)
    try:
        batches = list(feed.training([torch.arange(4)], 0, 8))
        assert batches[0][0].device == GPU
    finally:
        feed.close()


def test_samples_may_lie_on_the_gpu_without_loader_processes():
    samples = TensorDataset(torch.randn(8, 3, device=GPU), torch.arange(8, device=GPU))
    feed = DatasetFeed(samples, device=GPU, seed=0, loaders=0)
    batches = list(feed.training([torch.arange(4)], 0, 8))
    assert batches[0][0].device == batches[0][1].device == GPU
    feed = DatasetFeed(samples, device=GPU, seed=0, loaders=1)
    try:
        with pytest.raises(DataError, match="loaders=0"):
            list(feed.training([torch.arange(4)], 0, 8))
    finally:
        feed.close()


@reaches("workload.data.pipeline:ImagePipeline._resized_parts")
def test_resized_crops_are_those_of_the_cpu():
    images, made = store(samples=70, side=40), []
    for device in (torch.device("cpu"), GPU):
        fed = ImagePipeline(
            images, device=device, side=40, mean=MIDDLE, std=MIDDLE, seed=1,
            augmentation="resized-crop",
        )  # fmt: skip
        made.append([
            fed.training_batch(torch.arange(70), epoch=0, resolution=one)[0].cpu()
            for one in (24, 40)
        ])  # fmt: skip
    torch.testing.assert_close(made[1][0], made[0][0])  # both by products of whole numbers
    torch.testing.assert_close(made[1][1], made[0][1], atol=2.1 / 127.5, rtol=0)


@reaches("workload.data.image_files:_resized", "workload.data.image_files:FilePipeline.__init__")
def test_images_in_files_are_resized_on_the_gpu(tmp_path, monkeypatch):
    from test_image_files import photograph

    for number in range(8):
        folder = tmp_path / "train" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        photograph(40 + number, 48, number).save(folder / f"{number}.jpg")
    monkeypatch.setattr(image_files, "free_bytes", lambda: 10_000)  # too little to decode once
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "cache"))
    data = open_data(make_job(data=f"imagefolder:{tmp_path}", val=0.5, resolutions=(32,)))
    fed = image_files.FilePipeline(
        data.train, device=GPU, augmentation="crop-flip", seed=0, loaders=0
    )
    images, labels = fed.single(torch.arange(4), epoch=0, resolution=32)
    assert images.device == labels.device == GPU


@reaches("training.evaluate.weight_average:_in_parts")
def test_an_average_of_weights_has_the_numbers_of_the_cpu():
    first = resnet8(3)  # what is not a number keeps the first weights' average
    networks = [
        copy.deepcopy(first).to(device, memory_format=torch.channels_last)
        for device in ("cpu", GPU)
    ]
    averages = [WeightAverage(network, epochs=1) for network in networks]
    for step in range(3):
        for network, average in zip(networks, averages, strict=True):
            random = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for one in network.parameters():
                    one.copy_(torch.randn(one.shape, generator=random))
                next(network.parameters())[0] = torch.nan
            average.step(5)
    with averages[0].in_place(), averages[1].in_place():
        for here, there in zip(*(one.parameters() for one in networks), strict=True):
            torch.testing.assert_close(here, there.cpu(), equal_nan=True)


@reaches("workload.muon:_format_for", "workload.muon:Muon._stacks")
def test_kernels_are_made_orthogonal_together():
    network = resnet8(3).to(GPU, memory_format=torch.channels_last)
    kernels = matrices_of(network)
    before = [matrix_of(kernel.detach()).clone() for kernel in kernels]
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = muon(network, 0.1)
    assert max(len(stack) for stack in optimizer._stacks(kernels)) > 1
    optimizer.step()
    for kernel, start in zip(kernels, before, strict=True):
        length = 0.1 * max(1, start.size(0) / start.size(1)) ** 0.5
        values = torch.linalg.svdvals((start - matrix_of(kernel.detach())) / length)
        assert values.min() > 0.5
        assert values.max() < 1.5


def test_a_parameter_server_takes_weights_and_gives_them_back():
    network = resnet8(3).to(GPU)
    weights = pack(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    unpack(weights, network)
    again = pack(network)
    assert torch.equal(again.floats, weights.floats)


# ---------------------------------------------------------------------------------------- memory


FAILING = """
import torch
from batchwright.workload import host

names = "NOT_INITIALIZED when calling `cublasCreate(handle)`", "EXECUTION_FAILED"
errors = [RuntimeError(f"CUDA error: CUBLAS_STATUS_{name}") for name in names]

def told():
    for error in errors:
        print(host.is_out_of_memory(error), host.gpu_failure(error))

table = torch.zeros(3, device=host.enter(torch.device("cuda", 0)))
told()
try:
    table[torch.tensor([7], device="cuda")]
    torch.cuda.synchronize()
except RuntimeError as error:
    print(host.gpu_failure(error))
told()
"""


@reaches("workload.host:_free_on_gpu")
def test_a_gpu_that_has_failed_is_not_out_of_memory():
    """In a process of its own, which cannot use it any more."""
    torch.zeros(1, device=GPU)
    assert not host.is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"))
    done = subprocess.run(
        [sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=500, check=False
    )
    failure = "device-side assert triggered"
    assert done.stdout.splitlines() == [
        *("True ", "False ", failure, f"False {failure}", f"False {failure}")
    ], done.stderr


@reaches("workload.host:release_memory", "workload.host:free_memory")
def test_a_step_that_does_not_fit_is_done_in_smaller_ones(tmp_path):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(GPU)
    most = torch.cuda.mem_get_info(GPU)[1]
    samples, side = 64, 96
    plan = plan_for((64,), samples=samples, side=side)
    images = store(samples, side)
    train(plan=plan, images=images)
    needed = torch.cuda.max_memory_allocated(GPU)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(GPU)
    torch.cuda.set_per_process_memory_fraction(0.6 * needed / most)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network = train(plan=plan, images=images, run_folder=tmp_path / "run")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    summary = read_record(tmp_path / "run" / "summary.json", RunSummary)
    assert any(epoch.repeated_steps for epoch in summary.epochs)  # memory did run out
    assert all(bool(p.isfinite().all()) for p in network.parameters())
    _free_memory_is_all_but_what_others_hold()


def allocated():
    """Bytes that tensors take, once nothing waits to be collected; and no more are reserved."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(GPU)


@pytest.mark.parametrize("key", ["off", "on"])
def test_a_training_takes_the_memory_that_its_step_was_weighed_with(key, tmp_path):
    """In bfloat16; with graphs, epochs that only replay say what was recorded, too."""
    samples, batch, side = 3072, 512, 64
    # What libraries take is there before anything counts, in the stream that records, too.
    small = plan_for(precision="bfloat16", epochs=3, cuda_graphs=key)
    train(plan=small, dtype=torch.bfloat16)
    images = store(samples, side)
    facts = make_data(train_samples=samples, val_samples=48, classes=tuple("abc"), side=side)
    plan = plan_for(
        (batch,), samples=samples, side=side, micro=batch, epochs=3, precision="bfloat16",
        cuda_graphs=key,
    )  # fmt: skip
    job = plan.job.model_copy(update={"precision": "bfloat16", "resolutions": (side,)})
    before = allocated()
    bench = Bench(job, ImageData(images, store(48, side), facts, MIDDLE, MIDDLE), Group(GPU))
    bench.batches.hold_images()
    peak, _ = weigh(bench, bench.supply(batch, side))
    assert bench.graphs.holds == (key == "on")
    weighed = peak - before
    bench.close()
    del bench
    before = allocated()
    held_out, folder = store(48, side), tmp_path / "run"  # as held out as the bench's
    train(plan=plan, images=images, held_out=held_out, dtype=torch.bfloat16, run_folder=folder)
    summary = read_record(tmp_path / "run" / "summary.json", RunSummary)
    peaks = [epoch.workers[0].peak_bytes - before for epoch in summary.epochs]
    assert weighed > 2**28  # else what libraries take would count
    assert max(peaks) == pytest.approx(weighed, rel=0.03)
    assert peaks[2] >= 0.97 * peaks[1]


@reaches("probing.measure.memory:held_bytes")
def test_images_that_stay_on_the_gpu_are_what_it_holds_beside_a_step():
    train()  # cuBLAS keeps 32 MiB of a Hopper for each thread that asks it, autograd's, too
    samples, side = 3072, 64
    images = store(samples, side)
    facts = make_data(train_samples=samples, val_samples=48, classes=tuple("abc"), side=side)
    job = plan_for((8,), samples=samples, side=side).job
    job = job.model_copy(update={"precision": "float32", "resolutions": (side,)})
    before = allocated()
    bench = Bench(job, ImageData(images, store(48, side), facts, MIDDLE, MIDDLE), Group(GPU))
    bench.batches.hold_images()
    bench.release()
    held = held_bytes(bench) - before
    bench.close()
    assert len(images.pixels) <= held <= len(images.pixels) + 2**26


class Reads(torch.nn.Module):
    """Reads a number back, once it is told to, which no graph can repeat."""

    reads = False

    def forward(self, images):
        return images * float(images.mean()) if self.reads else images


def wide():
    """A network of much more activations than weights, and none of what libraries keep memory for:
    12 of 2 MiB an image at 256 px."""
    layers = [torch.nn.Tanh() for _ in range(12)]
    ends = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), *layers, Reads(), *ends).to(GPU)


def taken(network, images):
    """Most bytes that tensors take in a pass as it is, beyond those from before."""
    before = allocated()
    torch.cuda.reset_peak_memory_stats(GPU)
    network(images).sum().backward()
    network.zero_grad()
    return torch.cuda.max_memory_allocated(GPU) - before


def test_a_recording_that_fails_leaves_no_memory_reserved():
    """Neither its own, nor that of what was recorded before, in the same pool."""
    network, images = wide(), torch.randn(16, 3, 256, 256, device=GPU)
    assert taken(network, images) > 2**28
    allocated()
    before = torch.cuda.memory_reserved(GPU)
    graphs = graph_training(network, after=0)
    network(images[:8]).sum().backward()
    assert graphs.holds == 1
    network[13].reads = True
    with pytest.warns(UserWarning, match="goes on as it is"):
        network(images).sum().backward()
    assert graphs.failure
    network.zero_grad()
    allocated()
    assert torch.cuda.memory_reserved(GPU) <= before + 2**26
    network(images).sum().backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())


def test_a_shape_that_memory_runs_out_for_while_it_is_recorded_goes_on_as_it_is():
    """There is room for its activations once, and graphs keep them: twice they are needed."""
    network, images = wide(), torch.randn(16, 3, 256, 256, device=GPU)
    wanted = network(images).detach()
    activations = taken(network, images)
    assert activations > 2**28
    graphs = graph_training(network, after=0)
    allocated()
    before = torch.cuda.memory_reserved(GPU)
    most = torch.cuda.mem_get_info(GPU)[1]
    torch.cuda.set_per_process_memory_fraction((before + 1.5 * activations) / most)
    try:
        for _ in range(2):
            found = network(images)
            found.sum().backward()
            torch.testing.assert_close(found.detach(), wanted)
            assert graphs.holds == 0
            assert not graphs.failure  # other shapes may be recorded
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(p.grad.isfinite().all() for p in network.parameters())
    del found
    network.zero_grad()
    allocated()
    assert torch.cuda.memory_reserved(GPU) <= before + 2**26


def test_a_batch_is_computed_in_halves_though_its_trainer_holds_the_failed_loss():
    """Beside the activations of all 16 there is room for those of a single one."""
    network, images = wide(), torch.randn(16, 3, 256, 256, device=GPU)
    weights = list(network.parameters())
    wanted = torch.autograd.grad(network(images).mean(), weights)
    peak = taken(network, images)
    allocated()
    before = torch.cuda.memory_reserved(GPU)
    most = torch.cuda.mem_get_info(GPU)[1]
    parts = Recovering(weights, lambda _: None)
    torch.cuda.set_per_process_memory_fraction((before + peak - 2**24) / most)
    try:
        loss = parts.loss(lambda some: network(some).mean(), images)
        parts.backward(loss.backward)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        parts.close()
    assert parts.most == 8
    torch.testing.assert_close([one.grad for one in weights], list(wanted), rtol=1e-3, atol=1e-6)


def _free_memory_is_all_but_what_others_hold():
    torch.cuda.empty_cache()
    before = host.free_memory(GPU, 1)
    held = torch.zeros(2**26, dtype=torch.uint8, device=GPU)
    assert abs(host.free_memory(GPU, 1) - before) < 2**24
    del held


@reaches(
    "probing.measure.memory:memory_of_each",
    "probing.measure.memory:weigh",
    "probing.batches:Batches.hold_images",
    "probing.measure.timing:now",
    "probing.executor:device_name",
    "probing.visiting:Visitor.cluster",
    "probing.visiting:Visitor._step_time",
    "probing.replays:may_replay",
    "workload.host:resolve_device",
    "workload.task:build_network",
    "workload.host:computes_in_bfloat16",
    "workload.host:half_of",
    "workload.host:arithmetic",
    "workflows.prepare_job:resolve",
)
def test_a_probe_measures_plans_and_trains(tmp_path):
    here = {"device": "cuda", "launch": "in-process", "workers": 1}
    train(plan=plan_for(epochs=3, cuda_graphs="on"))  # libraries have their workspaces
    before = allocated()
    profile = batchwright.probe(data="digits", **here, probe={"budget": 5})
    # The rest is for others; libraries keep workspaces, each thread's own.
    assert torch.cuda.memory_reserved(GPU) <= before + 2**27
    assert profile.cluster.device == "cuda"
    assert "TF32" in profile.cluster.arithmetic
    assert profile.graphs is not None
    assert not profile.graphs.failure
    assert any(point.resident_bytes for point in profile.memory)
    plan = batchwright.plan(profile, epochs=1)
    summary = batchwright.train(plan, run_folder=tmp_path / "run")
    assert summary.epochs


def test_a_network_that_was_judged_on_the_gpu_predicts_there_what_it_predicts_on_the_cpu(tmp_path):
    """Judged by an average of its weights, with statistics of its own, and by its curvature."""
    judged = {
        "average_weights": "on",
        "cycle": {"recalibrate": 2},
        "track": ("gradient-norm", "hessian"),
    }
    here = {"device": "cuda", "launch": "in-process", "workers": 1}
    summary = batchwright.run(
        data="digits", network="resnet8", epochs=2, global_batch=64, **here, **judged,
        probe={"budget": 1, "learning": 0}, run_folder=tmp_path / "run",
    )  # fmt: skip
    last = summary.epochs[-1]
    assert last.gradient_norm > 0
    assert last.hessian_eigenvalue is not None
    counts = [
        predict(tmp_path / "run", (), [f"device={one}"], out=tmp_path / one, tell=print)
        for one in ("cuda", "cpu")
    ]
    assert counts[0].images == counts[1].images == last.val_count
    assert abs(counts[0].correct - counts[1].correct) <= 3  # a logit may be rounded otherwise


@reaches("workflows.doctor:_device", "workflows.doctor:examine", "workload.host:default_workers")
def test_the_doctor_names_the_gpu():
    assert "GPU" in "".join(str(one) for one in doctor.examine(batchwright.__version__))


@reaches("workload.host:assigned_device", "workload.host:identity")
def test_workers_of_another_launcher_take_the_gpus_that_each_sees():
    count = torch.cuda.device_count()
    found = [host.assigned_device("cuda", rank) for rank in range(count + 1)]
    assert found == [torch.device("cuda", rank % count) for rank in range(count + 1)]
    assert len({host.identity(device) for device in found}) == count  # one has a GPU twice
    assert not host.identity(torch.device("cpu"))


@reaches("workflows.sweep.slots:machine_for", "workflows.sweep.sharing:seen_gpus")
def test_a_sweep_counts_the_gpus_and_tells_them_apart():
    count = torch.cuda.device_count()
    assert len(slots.machine_for([plan_for()]).gpus) == count
    assert len({*sharing.seen_gpus()} - {""}) == count


@reaches("workflows.sweep.verb:_warn_of_crowding")
def test_a_shared_sweep_on_gpus_has_no_word_on_cores(monkeypatch, capsys):
    started = SimpleNamespace(size=2, by="torchrun")
    monkeypatch.setattr(verb, "joined", lambda: started)
    monkeypatch.setattr(verb, "own_machine", lambda _: SimpleNamespace(cores=0))
    verb._warn_of_crowding([plan_for()])
    assert not capsys.readouterr().err
    verb._warn_of_crowding([make_tiny_plan((12,), device="cpu")])
    assert "workers=1: a run starts" in capsys.readouterr().err


@reaches("workflows.prepare_job:_refuse_other_machines")
def test_a_plan_for_more_gpus_than_there_are_is_refused():
    plan = make_plan(job=make_job(device="cuda", workers=1))
    prepare_job._refuse_other_machines(plan)


@reaches("workflows.prepare_job:_refuse_fewer_gpus")
def test_a_run_goes_on_with_as_many_gpus_as_it_had():
    prepare_job._refuse_fewer_gpus(make_tiny_plan((12,), device="cuda"), Path("a"))


@reaches("training.session_checks:doubts")
def test_a_model_on_the_gpu_is_what_the_plan_is_for():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train()


# --------------------------------------------------------------------------------------- workers


@reaches(
    "distributed.transports:Nccl",
    "distributed.transports:Nccl.mark",
    "distributed.transports:Nccl.read",
    "distributed.transports:Nccl.abort",
    "distributed.transports:Nccl.prepare",
)
def test_nccl_reads_aborts_and_leaves(tmp_path, monkeypatch):
    transport = transports.transport_for(GPU, 60)
    transport.prepare()
    host.enter(GPU)
    where = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group(transport.backend, init_method=where, rank=0, world_size=1)
    values = torch.arange(3.0, device=GPU)
    dist.all_reduce(values)
    assert transport.read(values, lambda: dist.all_reduce(values)).tolist() == [0.0, 1.0, 2.0]
    transport.settle()
    told = [None]
    dist.all_gather_object(told, "by gloo")
    assert told == ["by gloo"]
    marks, mark = threading.Semaphore(0), transport.mark
    monkeypatch.setattr(transport, "mark", lambda: marks.release() or mark())
    transport.watch()
    for _ in range(3):
        assert marks.acquire(timeout=SECONDS)  # the device goes on
    transport.unwatch()
    transport.settle()  # nothing was given up
    transport.give_up()
    transport.leave()


def sums_on_one_gpu(rank):
    transports.TRANSPORTS["cuda"] = transports.Gloo
    device = host.enter(GPU)
    group = Group(device, timeout=SECONDS)
    network = resnet8(3).to(device)
    group.broadcast(network.parameters())
    total = group.sum(torch.full((3,), float(rank + 1), device=device))
    group.close()
    return total.tolist()


def trains_on_one_gpu(rank):
    transports.TRANSPORTS["cuda"] = transports.Gloo
    torch.cuda.set_per_process_memory_fraction(0.4)
    network = train(plan=plan_for((6, 6)))
    return float(sum(p.detach().double().sum() for p in network.parameters()))


@reaches("distributed.reducer:Reducer._lay_out(in processes)")
def test_two_processes_share_a_gpu_by_gloo(crew):
    assert crew.together(sums_on_one_gpu, workers=2) == [[3.0] * 3] * 2
    first, second = crew.together(trains_on_one_gpu, workers=2)
    assert first == second


def sums_until_one_is_killed(rank):
    group = Group(host.enter(torch.device("cuda", rank)), timeout=SECONDS)
    try:
        for step in range(5):
            assert float(group.sum(torch.ones(1, device=group.device))) == 2
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
    except LostWorkerError as error:
        group.give_up(error)
        raise
    finally:
        group.close()


@two_gpus
def test_a_worker_killed_under_nccl_is_named_and_the_other_leaves():
    from test_transports import together

    (told,) = together(sums_until_one_is_killed, 2, killed=[1])
    assert told.startswith("LostWorkerError"), told
    assert "worker 1 " in told


def synchronized(classes):
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(resnet8(classes))


def trains_synchronized_until_one_is_killed(rank):
    steps = itertools.count(1)

    def each_step():
        if rank == 1 and next(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    train(torch.device("cuda", rank), plan=plan_for((6, 6)), make=synchronized, each_step=each_step)


@two_gpus
def test_a_worker_is_named_that_is_killed_while_layers_wait_for_it():
    from test_transports import together

    (told,) = together(trains_synchronized_until_one_is_killed, 2, killed=[1])
    assert told.startswith("LostWorkerError"), told
    assert "worker 1 " in told


def trains_until_a_gpu_fails(rank):
    device, steps = torch.device("cuda", rank), itertools.count(1)

    def each_step():
        if rank == 1 and next(steps) == 2:
            torch.zeros(3, device=device)[torch.tensor([7], device=device)]

    train(device, plan=plan_for((6, 6)), each_step=each_step)


@two_gpus
def test_a_gpu_that_fails_under_nccl_is_told_by_its_worker_which_lives():
    from test_transports import together

    told = together(trains_until_a_gpu_fails, 2)
    assert told[1].startswith("TrainingError: the GPU of"), told[1]
    assert "device-side assert" in told[1]
    assert told[0].startswith("LostWorkerError"), told[0]
    assert "worker 1 " in told[0]


def trains_on_its_own(rank):
    transports.TRANSPORTS["cuda"] = transports.Nccl  # whatever this process has done before
    network = train(torch.device("cuda", rank), plan=plan_for((6, 6)))
    return float(sum(p.detach().double().sum() for p in network.parameters()))


def on_the_first(rank):
    transports.TRANSPORTS["cuda"] = transports.Nccl  # whatever this process has done before
    with pytest.raises(JobError, match="have one GPU between them"):
        Group(host.enter(GPU), timeout=SECONDS)


def test_two_workers_on_one_gpu_are_refused_before_nccl_does(crew):
    crew.together(on_the_first, workers=2)


@two_gpus
def test_two_gpus_train_to_the_same_weights(crew):
    first, second = crew.together(trains_on_its_own, workers=2)
    assert first == second
    assert copying.copy_to_device(torch.ones(1), GPU).device == GPU
