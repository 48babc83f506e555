"""Passes replayed from CUDA graphs: the same numbers, and what is not replayed.

Played on the CPU: what is recorded is computed anew, into the memory that it was recorded in. What
only a GPU shows is in `test_gpu`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import warnings
import weakref
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchwright.distributed.group import Group
from batchwright.errors import FileError, JobError
from batchwright.planning.planner import make_plan
from batchwright.probing.commands import Compile, Replay
from batchwright.probing.measure import comparison, precision
from batchwright.probing.measure import compilation as measure_compilation
from batchwright.probing.measure.compilation import compare_compilation
from batchwright.probing.measure.graphs import compare_graphs
from batchwright.probing.measure.precision import choose_precision
from batchwright.probing.measure.step_time import visit
from batchwright.records import Estimate, GraphTimes, Job
from batchwright.records.registries.networks import by_tensors
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.running import replayed
from batchwright.training.step import clock
from batchwright.training.step.clock import StepClock
from batchwright.training.step.epoch_totals import EpochMeter
from batchwright.training.step.peak_memory import PeakMemory
from batchwright.workflows import prepare_job
from batchwright.workload.passes import compilation, cuda_graphs, recorded_passes
from batchwright.workload.passes.cuda_graphs import graph_training
from batchwright.workload.passes.recorded_passes import CannotRecordError, NoRoomError
from samples import make_data, make_job, make_profile
from test_probe import tiny_image_data, tiny_job
from test_session import make_model, make_session, make_tiny_plan, train
from test_trials import SIDE, bench_of

RECORDER = recorded_passes.Recorder
TURNS = {"workers": 1, "resolution": SIDE, "wanted_batch_size": 8, "seconds": 0.01}


class Played(RECORDER):
    """Stands for a GPU's recorder; notes what was recorded, and replayed, by name."""

    device_type = "cpu"
    recorded: list[str]
    replayed: list[str]

    def warm_up(self, work):
        for _ in range(3):
            work()

    def record(self, work):
        found = work()
        kept = [found] if isinstance(found, torch.Tensor) else list(found)
        kept = [None if one is None else one.detach().clone() for one in kept]
        Played.recorded.append(work.__name__)

        def replay():
            Played.replayed.append(work.__name__)
            passes = work.__self__
            if work.__name__ == "_run_forward":
                with recorded_passes._aliased(passes._network):
                    leaves = passes._network.parameters()
                    passes._leaves = [one for one in leaves if one.requires_grad]
                    again = work()
            else:
                again = work()
            again = [again] if isinstance(again, torch.Tensor) else again
            for one, new in zip(kept, again, strict=True):
                if one is not None:
                    one.copy_(new.detach())

        return (kept[0] if isinstance(found, torch.Tensor) else kept), replay


@pytest.fixture(autouse=True)
def played(monkeypatch):
    """All networks are replayed as on a GPU."""
    Played.recorded, Played.replayed = [], []
    monkeypatch.setattr(recorded_passes, "copy_stream", lambda device: None)  # no CUDA to ask
    monkeypatch.setattr(recorded_passes, "_SHARED_STREAMS", {})
    monkeypatch.setattr(cuda_graphs, "Recorder", Played)
    return Played


def network_of(*layers):
    torch.manual_seed(0)
    first = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*first, *layers, nn.Flatten(), nn.LazyLinear(5))


def built(*layers):
    network = network_of(*layers)
    network(torch.zeros(2, 3, 8, 8))
    torch.manual_seed(0)
    for module in network.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return network


def trained(network, sizes, *, parts=1):
    """Weights and statistics after a step of each size, in so many parts."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    for size in sizes:
        images, labels = torch.randn(size, 3, 8, 8), torch.arange(size) % 5
        for some, classes in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            (functional.cross_entropy(network(some), classes) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return network.state_dict()


def both(make=built, after=2, sizes=(6,) * 6, **options):
    """The same training with and without, and what replays."""
    network = make()
    graphs = graph_training(network, after=after)
    found = trained(network, sizes, **options)
    return graphs, found, trained(make(), sizes, **options)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_replayed_training_is_the_same_to_the_bit(played, parts):
    """In parts, whose gradients are added up, too."""
    graphs, found, wanted = both(parts=parts)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not graphs.failure
    assert played.recorded == ["_run_forward", "_run_backward"]
    replayed = 1 + 6 * parts - 2  # the check's, and all but those before
    assert played.replayed == ["_run_forward", "_run_backward"] * replayed


def test_passes_are_recorded_on_the_gpu_of_their_images(played, monkeypatch):
    """A script may have made another one the current one since."""
    current, seen = [None], []
    warm_up, record = played.warm_up, played.record

    @contextlib.contextmanager
    def device_of(tensor):
        current.append(tuple(tensor.shape))
        yield
        current.pop()

    def noted(method):
        return lambda *args: (seen.append(current[-1]), method(*args))[1]

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(played, "warm_up", noted(warm_up))
    monkeypatch.setattr(played, "record", noted(record))
    graphs, _, _ = both(sizes=(6,) * 3)
    assert graphs.holds == 1
    assert (current, seen) == ([None], [(6, 3, 8, 8)] * 3)


def test_random_numbers_are_those_of_a_training_without():
    graphs, found, wanted = both(lambda: built(nn.Dropout(0.5)))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not graphs.failure


def test_names_stay_and_a_copy_computes_by_itself(played):
    network = built()
    graph_training(network, after=0)
    images = torch.randn(2, 3, 8, 8)
    network(images).sum().backward()
    twin = copy.deepcopy(network)
    assert list(network.state_dict()) == list(built().state_dict())
    for parameter in network.parameters():
        parameter.data.fill_(float("nan"))
    assert torch.isfinite(twin(images)).all()
    assert not torch.isfinite(network(images)).all()


def test_only_passes_that_are_trained_on_are_recorded(played):
    network = built()
    graphs = graph_training(network, after=0)
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        network(images)
    network(images.requires_grad_())
    network.eval()
    network(images.detach())
    network.train()
    graphs.on = False
    network(images.detach())
    assert not played.recorded


@pytest.mark.parametrize(
    "change",
    [
        lambda network: network.requires_grad_(requires_grad=False)[-1].requires_grad_(),
        lambda network: network[1].eval(),
        lambda network: setattr(network[1], "momentum", 0.5),
        lambda network: setattr(network[3], "p", 0.0),
        lambda network: setattr(network[1], "running_mean", torch.ones(4)),
        lambda network: network.__setitem__(2, nn.Tanh()),
        lambda network: setattr(network[0], "weight", nn.Parameter(torch.ones(4, 3, 3, 3))),
        lambda network: setattr(network[0], "weight", nn.Parameter(network[0].weight.data)),
    ],
)
def test_what_a_pass_depends_on_is_never_an_old_one(change):
    """Frozen layers, such as only evaluate, schedules, other buffers, layers and weights."""
    plain, other = built(nn.Dropout(0.5)), built(nn.Dropout(0.5))
    graphs = graph_training(other, after=0)
    for network in (plain, other):
        trained(network, (6,) * 3)
        change(network)
    torch.testing.assert_close(trained(other, (6,) * 3), trained(plain, (6,) * 3), rtol=0, atol=0)
    assert not graphs.failure


def test_a_second_forward_pass_before_the_first_is_over_goes_as_it_is(played):
    """As of two views of an image: it would overwrite what the first one's backward pass needs."""
    images = torch.randn(2, 6, 3, 8, 8)

    def gradients(network):
        first, second = network(images[0]), network(images[1])
        (first.square().mean() + second.abs().mean()).backward()
        return [p.grad for p in network.parameters()]

    network = built()
    graph_training(network, after=0)
    wanted = gradients(built())
    torch.testing.assert_close(gradients(network), wanted, rtol=0, atol=0)
    assert played.replayed == ["_run_forward", "_run_backward"] * 2


def test_a_pass_may_be_open_while_the_next_one_is_recorded(played):
    """As where three images are compared."""

    def gradients(network):
        torch.manual_seed(1)
        outputs = [network(torch.randn(6, 3, 8, 8)) for _ in range(3)]
        sum(one.square().mean() for one in outputs).backward()
        return [p.grad for p in network.parameters()]

    network = built()
    graphs = graph_training(network, after=1)
    torch.testing.assert_close(gradients(network), gradients(built()), rtol=0, atol=0)
    assert graphs.holds == 1
    assert played.replayed == ["_run_forward", "_run_backward"] * 2  # the check's, and the second


def test_a_forward_pass_that_is_dropped_keeps_nobody_from_replaying(played):
    network = built()
    graph_training(network, after=0)
    for _ in range(3):
        network(torch.randn(6, 3, 8, 8))
    assert played.replayed.count("_run_forward") == 4


def test_outputs_and_gradients_are_the_callers_own():
    network = built()
    graph_training(network, after=0)
    images = torch.randn(6, 3, 8, 8)
    first = network(images)
    first.sum().backward()
    kept = [first.detach().clone(), *(p.grad.clone() for p in network.parameters())]
    gradients = [p.grad for p in network.parameters()]
    network.zero_grad()
    network(2 * images).sum().backward()
    torch.testing.assert_close([first.detach(), *gradients], kept, rtol=0, atol=0)


def test_a_loss_that_is_held_holds_no_memory_of_a_graph():
    network = built()
    graphs = graph_training(network, after=0)
    loss = network(torch.randn(6, 3, 8, 8)).sum()
    loss.backward()
    (passes,) = map(weakref.ref, graphs._known.values())
    graphs.forget()
    gc.collect()  # what stands in for a graph refers to itself
    assert passes() is None
    assert loss.isfinite()


def test_a_network_is_as_before_once_a_session_is_over(played):
    model = make_model()
    with make_session(model, plan=make_tiny_plan((4,), epochs=4, cuda_graphs="on")) as session:
        train(session)
    assert played.replayed
    assert "forward" not in vars(model)


def test_a_session_that_cannot_begin_leaves_the_network_as_it_was(tmp_path):
    plan = make_tiny_plan((4,), cuda_graphs="on")
    with make_session(plan=plan, run_folder=tmp_path / "run") as session:
        train(session)
    model = make_model()
    with pytest.raises(FileError, match="run"):
        make_session(model, plan=plan, run_folder=tmp_path / "run")
    assert "forward" not in vars(model)


def test_gradients_that_are_rounding_alone_are_no_reason():
    noise = torch.tensor([1e-9, -1e-9])
    large, none = torch.tensor([1.0, torch.inf]), None
    assert not recorded_passes._apart([noise, large, none], [-noise, large, none])
    assert recorded_passes._apart([noise, large], [noise, 0.9 * large.clamp(max=1)])
    assert recorded_passes._apart([noise, none], [noise, noise])


def test_a_second_backward_pass_is_refused_in_a_line():
    network = built()
    graph_training(network, after=0)
    loss = network(torch.randn(6, 3, 8, 8)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="plan with cuda_graphs=off"):
        loss.backward()


class Fickle(nn.Module):
    """Goes by a number of Python's own."""

    def forward(self, images):
        return images * random.random()


class Hooked(nn.Identity):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda layer, inputs, output: 2 * output)


@pytest.mark.parametrize(
    ("layer", "why"), [(Fickle, "was not what the network computes"), (Hooked, "3 has hooks")]
)
def test_what_no_graph_repeats_goes_on_as_it_is(layer, why):
    random.seed(0)
    network = built(layer())
    graphs = graph_training(network, after=2)
    with pytest.warns(UserWarning, match="goes on as it is"):
        found = trained(network, (6,) * 4)
    assert why in graphs.failure
    random.seed(0)
    before = built(layer())
    if layer is Hooked:
        torch.testing.assert_close(found, trained(before, (6,) * 4), rtol=0, atol=0)


def test_hooks_of_weights_are_called_once_in_each_backward_pass():
    def with_hook():
        network = built()
        network[0].weight.register_hook(lambda gradient: 2 * gradient)
        return network

    graphs, found, wanted = both(with_hook)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not graphs.failure


def test_weights_that_layers_share_are_one():
    def tied():
        network = built(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
        network[4].weight = network[3].weight
        return network

    graphs, found, wanted = both(tied)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not graphs.failure


class Keeping(nn.Conv2d):
    """Uses its weights by a list, too."""

    def __init__(self):
        super().__init__(4, 4, 3, padding=1)
        self.kept = [self.weight]

    def forward(self, images):
        return super().forward(images) + functional.conv2d(images, self.kept[0], padding=1)


class Moving(nn.Conv2d):
    """Moves weights that it has not seen to memory of its own, as LSTMs do for cuDNN."""

    def __init__(self):
        super().__init__(4, 4, 3, padding=1)
        self.seen = weakref.ref(self.weight)

    def forward(self, images):
        if self.seen() is not self.weight:
            self.weight.data = self.weight.data.clone()
            self.seen = weakref.ref(self.weight)
        return super().forward(images)


@pytest.mark.parametrize(
    ("layer", "why"), [(Keeping, "keeps weights in a list"), (Moving, "moves its weights")]
)
def test_weights_that_are_used_elsewhere_or_moved_are_trained_all_the_same(layer, why):
    with pytest.warns(UserWarning, match="goes on as it is"):
        graphs, found, wanted = both(lambda: built(layer()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert why in graphs.failure


class Putting(nn.Module):
    """Puts a new tensor in the place of its buffer each time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, images):
        self.mean = 0.9 * self.mean + 0.1 * images.detach().mean()
        return images - self.mean


def test_a_buffer_that_a_pass_puts_another_in_the_place_of_is_put_back():
    layer = Putting()
    before = layer.mean
    with recorded_passes._as_before(layer, torch.device("cpu")):
        layer(torch.ones(2))
        assert layer.mean is not before
    assert layer.mean is before
    assert not before


def disturbed(played, monkeypatch, error, times):
    """Recording fails so many times."""
    left = [error] * times
    record = played.record

    def failing(self, work):
        if left:
            raise left.pop()
        return record(self, work)

    monkeypatch.setattr(played, "record", failing)


def test_a_recording_that_fails_is_the_last_one(played, monkeypatch):
    error = RuntimeError("operation failed due to a previous error during capture")
    disturbed(played, monkeypatch, error, 1)
    with pytest.warns(UserWarning, match="previous error during capture"):
        graphs, found, wanted = both()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert graphs.failure


@pytest.mark.parametrize(("limit", "fits"), [(None, True), (40, True), (39, False), (5, False)])
def test_what_is_recorded_leaves_room_in_the_memory_that_was_planned_for(monkeypatch, limit, fits):
    """Of a card with much more: 10 GiB are taken, 25 with the activations, which come twice."""
    reserved = iter([10 << 30, 25 << 30, 10 << 30])
    for name, value in {
        "empty_cache": lambda: None,
        "memory_reserved": lambda: next(reserved),
        "mem_get_info": lambda: (70 << 30, 80 << 30),
        "current_device": lambda: 0,
        "current_stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
        "Stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
        "stream": contextlib.nullcontext,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    recorder = RECORDER(None if limit is None else limit << 30)
    with contextlib.nullcontext() if fits else pytest.raises(NoRoomError, match="15360 MiB"):
        recorder.warm_up(lambda: None)


class Stream:
    """Notes by name what waits for what."""

    def __init__(self, name, waits):
        self.name, self.waits = name, waits

    def wait_stream(self, other):
        self.waits.append((self.name, other.name))


def test_passes_are_waited_for_though_one_of_them_fails(monkeypatch):
    """Those before it may still write statistics on a GPU, which are put back next."""
    waits = []
    current = Stream("the current one", waits)
    for name, value in {
        "empty_cache": lambda: None,
        "memory_reserved": lambda: 0,
        "current_device": lambda: 0,
        "current_stream": lambda: current,
        "Stream": lambda: Stream("aside", waits),
        "stream": contextlib.nullcontext,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    work = Calls("full").named("full")
    with pytest.raises(RuntimeError, match="full"):
        RECORDER().warm_up(work)
    assert waits == [("aside", "the current one"), ("the current one", "aside")]


@pytest.mark.parametrize("key", ["off", "on"])
def test_the_memory_that_was_planned_for_is_known_to_what_records(key):
    plan = make_tiny_plan((4,), cuda_graphs=key)
    goal = plan.job.goal.model_copy(update={"memory": 2**30})
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"goal": goal})})
    graphs = replayed(built(), plan)
    assert (graphs and graphs._recorder._limit) == (2**30 if key == "on" else None)


class Calls(list):
    """Notes what is called by name; what ``raises`` says raises."""

    def __init__(self, *raises):
        super().__init__()
        self.raises = raises

    def named(self, name):
        def call(*_, **__):
            self.append(name)
            if name in self.raises:
                raise RuntimeError(name)

        return call


def recorded_in_vain(monkeypatch, calls, version, *, hip=None):
    """What is called of PyTorch's own when a recording fails on a GPU, on this version of it."""
    private = "_cuda_endAllocateToPool", "_cuda_releasePool"
    for name in private:
        monkeypatch.setattr(torch._C, name, calls.named(name), raising=False)
    generator = SimpleNamespace(
        clone_state=lambda: None, graphsafe_set_state=calls.named("graphsafe_set_state")
    )
    graph = SimpleNamespace(pool=calls.named("pool"), replay=None)

    class Recording(contextlib.nullcontext):
        def __enter__(self):
            calls.named("begin")()

        def __exit__(self, *_):
            calls.named("end")()

    for name, value in {
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": lambda: graph,
        "current_stream": lambda: None,
        "stream": contextlib.nullcontext,
        "graph": lambda *_: Recording(),
        "current_device": lambda: 0,
        "default_generators": (generator,),
        "Stream": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", hip)
    with pytest.raises(RuntimeError):
        RECORDER().record(calls.named("work"))
    return [one for one in calls if one in (*private, "graphsafe_set_state")]


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("2.6.0", ["_cuda_endAllocateToPool", "_cuda_releasePool", "graphsafe_set_state"]),
        ("2.11.0+cu130", ["_cuda_endAllocateToPool", "_cuda_releasePool", "graphsafe_set_state"]),
        ("2.12.1", ["_cuda_endAllocateToPool", "_cuda_releasePool"]),
        ("2.13.0", ["_cuda_endAllocateToPool", "_cuda_releasePool"]),
        ("2.14.0", []),
        ("2.15.0", []),
    ],
)
@pytest.mark.parametrize("ends", [True, False])
def test_a_failed_recording_lets_its_memory_go_once(monkeypatch, version, wanted, ends):
    """On each PyTorch what it does not do itself; from 2.13 on it ends allocating by itself."""
    calls = Calls("work", "end", "pool", *(() if ends else ("_cuda_endAllocateToPool",)))
    assert recorded_in_vain(monkeypatch, calls, version) == wanted


@pytest.mark.parametrize(
    ("raises", "hip"),
    [
        (("work",), None),  # it has ended in spite of the error, and its graph releases
        (("begin", "pool", "_cuda_endAllocateToPool"), None),  # it has not begun
        (("work", "end", "pool"), "7.1"),  # PyTorch may have
    ],
)
def test_what_a_failed_recording_does_not_hold_is_not_let_go(monkeypatch, raises, hip):
    assert "_cuda_releasePool" not in recorded_in_vain(
        monkeypatch, Calls(*raises), "2.13.0", hip=hip
    )


def test_nothing_stays_recorded_when_a_recording_is_interrupted(played, monkeypatch):
    """As by the user, who may go on in a notebook."""
    network = built()
    graphs = graph_training(network, after=0)
    trained(network, (4,))
    disturbed(played, monkeypatch, KeyboardInterrupt(), 1)
    with pytest.raises(KeyboardInterrupt):
        trained(network, (6,))
    assert graphs.holds == 0


@pytest.mark.parametrize(("version", "shared"), [((2, 11), True), ((2, 12), False)])
def test_networks_are_recorded_in_streams_which_they_keep(played, monkeypatch, version, shared):
    """In their own, or one that ends would take memory that what is recorded of others uses. Where
    PyTorch frees it never, in one: else the memory of each network of a probe would stay."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(recorded_passes, "_torch_version", lambda: version)
    one, other = (graph_training(built(), after=0) for _ in range(2))
    first = one._recorder._stream()
    assert (other._recorder._stream() is first) == shared
    one.forget()
    assert one._recorder._stream() is first


def hiding(first, second):
    second.__context__ = first
    return second


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        hiding(torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("capture invalidated")),
        NoRoomError("it takes 9 MiB"),
    ],
)
def test_a_shape_without_memory_for_both_goes_on_as_it_is(played, monkeypatch, error):
    """Others are replayed."""
    disturbed(played, monkeypatch, error, 1)
    graphs, found, wanted = both(sizes=(6,) * 5 + (4,) * 4)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not graphs.failure
    assert played.replayed.count("_run_forward") == 1 + 2


def test_shapes_in_turns_are_not_recorded_again_and_again(played, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_MOST", 2)
    network = built()
    graphs = graph_training(network, after=0)
    trained(network, (4, 5, 6) * 3)
    assert len(played.recorded) == 2 * 2
    monkeypatch.setattr(cuda_graphs, "_IDLE", 3)
    trained(network, (6,) * 5)
    assert len(played.recorded) == 2 * 3
    assert graphs.holds == 1  # of those of one stream none may go while others stay
    assert not graphs.failure


def test_a_session_replays_and_its_weights_are_the_same(played, tmp_path):
    weights = {}
    for key in ("off", "on"):
        model = make_model()
        plan = make_tiny_plan((4,), epochs=4, micro=2, cuda_graphs=key)
        with make_session(model, plan=plan) as session:
            train(session)
        weights[key] = [p.detach() for p in model.parameters()]
    assert played.replayed
    torch.testing.assert_close(weights["on"], weights["off"], rtol=0, atol=0)


def test_an_epoch_that_only_replays_took_the_memory_that_was_recorded(monkeypatch):
    allocated = iter([900, 300, 1000, 300, 200])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(allocated))
    graphs, state = SimpleNamespace(holds=1), RunState()
    memory = PeakMemory(torch.device("cuda"), state, StepClock(), None, graphs)

    def of_epoch():
        state.meter = EpochMeter()
        with memory.of_epoch():
            pass
        return state.meter.peak

    assert [of_epoch() for _ in range(4)] == [900, 900, 1000, 1000]
    graphs.holds = 0
    assert of_epoch() == 200


def test_an_epoch_at_a_lower_resolution_did_not_take_the_memory_of_a_higher_one(monkeypatch):
    allocated = iter([400, 900, 120, 300])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(allocated))
    (row,), state = make_tiny_plan().stages, RunState()
    rows = [row.model_copy(update={"resolution": side}) for side in (4, 8)]
    memory = PeakMemory(torch.device("cuda"), state, StepClock(), None, SimpleNamespace(holds=2))
    peaks = []
    for row in (*rows, *rows):
        state.meter = EpochMeter()
        with memory.of_epoch(), memory.of_step(row):
            pass
        peaks.append(state.meter.peak)
    assert peaks == [400, 900, 400, 900]


def test_a_probe_measures_and_chooses(played):
    bench, _ = bench_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = compare_graphs(bench, Replay(**TURNS))
    assert told.ratio is not None
    assert told.failure == ""
    assert bench.graphs.on == told.chosen
    bench.graphs.switch(on=True)
    for size in (4, 6):  # are weighed
        assert bench.try_step(bench.supply(size, SIDE))
    assert bench.graphs.holds == 1  # of the others the memory is free again
    count = len(played.replayed)
    bench.outputs_and_loss(bench.supply(6, SIDE)())  # of what is measured otherwise
    assert len(played.replayed) == count


@pytest.fixture
def slowly_recording(played, monkeypatch):
    """A bench on an invented clock: a step takes 5 ms, and each pass that is recorded 60 ms."""
    seconds, record = [0.0], played.record

    def slow(self, work):
        seconds[0] += 0.06
        return record(self, work)

    def supply(*sizes):
        made = usual(*sizes)

        def make():
            seconds[0] += 0.005
            return made()

        return make

    monkeypatch.setattr(played, "record", slow)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    bench, _ = bench_of()
    usual, bench.supply = bench.supply, supply
    bench.graphs.switch(on=True)
    return bench


def test_a_visit_times_as_many_steps_as_fit_without_recording(slowly_recording):
    bench = slowly_recording
    for _ in range(2):  # each has the passes recorded anew
        steps, _ = visit(bench, bench.supply(4, SIDE), seconds=0.1001, most_steps=100)
        assert [sum(step) for step in steps] == pytest.approx([0.005] * 20)
    assert bench.graphs.holds == 1


def test_a_turn_of_two_formats_has_as_many_steps_as_fit_without_recording(slowly_recording):
    taken, supply = [], slowly_recording.supply(4, SIDE)
    turn = precision._turn(slowly_recording, lambda: taken.append(1) or supply())
    turn()
    taken.clear()
    assert turn() == pytest.approx(0.005)
    assert len(taken) == pytest.approx(precision._TURN_SECONDS / 0.005, abs=1)


@pytest.mark.parametrize("ratio", [pytest.param(0.5, marks=pytest.mark.slow), 2.0])
def test_compiled_steps_are_timed_beside_replayed_ones(played, monkeypatch, ratio):
    ran = []

    def backend(graph, inputs):
        return lambda *given: ran.append(1) or graph(*given)

    def does(work):
        """Whether it computes compiled, and whether it replays."""
        before = len(ran), len(played.replayed)
        work()
        return len(ran) > before[0], len(played.replayed) > before[1]

    def compare(turns, more):
        plain, compiled = turns
        compiled()
        plain()  # in which passes are recorded
        assert [does(turn) for turn in (plain, compiled, compiled, plain)] == [
            (False, True),
            (True, False),
            (True, False),
            (False, True),
        ]
        return ([1.0], [ratio]), Estimate(value=ratio, low=ratio, high=ratio)

    monkeypatch.setattr(compilation, "BACKEND", backend)
    monkeypatch.setattr(comparison, "compare", compare)
    monkeypatch.setattr(measure_compilation, "SHORT", 0.0)
    torch._dynamo.reset()
    bench, _ = bench_of(epochs=10**6)  # so that it pays
    bench.graphs.switch(on=True)
    told = compare_compilation(bench, Compile(**TURNS, asked=False))
    assert (told.failure, told.chosen) == ("", ratio < 1)
    supply = bench.supply(8, SIDE)
    bench.step(supply)
    assert does(lambda: bench.step(supply)) == (told.chosen, not told.chosen)
    assert (bench.graphs.on, bench.first_steps) == (not told.chosen, int(not told.chosen))


def test_formats_are_timed_with_replayed_passes(played, monkeypatch):
    monkeypatch.setattr(precision, "half_of", lambda device: "bfloat16")
    monkeypatch.setattr(precision, "may_replay", lambda job: True)
    counted, compare = [], precision.compare

    def counting(turns, more):
        before = len(played.recorded), len(played.replayed)
        found = compare(turns, more)
        counted.append((len(played.recorded) - before[0], len(played.replayed) - before[1]))
        return found

    monkeypatch.setattr(precision, "compare", counting)
    job = tiny_job(precision="auto", global_batch=8)
    choose_precision(job, tiny_image_data(), Group(torch.device("cpu")), seconds=0.1)
    ((recorded, replayed),) = counted
    assert recorded == 0
    assert replayed >= 2 * 14  # both passes of each turn


def test_a_probe_says_why_it_cannot(played, monkeypatch):
    disturbed(played, monkeypatch, CannotRecordError("layer a has hooks"), 1)
    bench, _ = bench_of()
    with pytest.warns(UserWarning, match="layer a has hooks"):
        told = compare_graphs(bench, Replay(**TURNS))
    assert (told.failure, told.chosen) == ("layer a has hooks", False)


def test_networks_of_the_users_own_are_replayed_only_where_asked():
    assert by_tensors("resnet18")
    assert by_tensors("timm:resnet50")
    assert not by_tensors("transformers:vit")
    assert not by_tensors("my.module:network")


def test_what_cannot_be_together_is_refused():
    for other in ("compile", "activation_checkpointing"):
        with pytest.raises(JobError, match=f"cuda_graphs=on with {other}=on"):
            Job(cuda_graphs="on", **{other: "on"})
    with pytest.raises(JobError, match="cuda_graphs=on is for GPUs"):
        prepare_job.resolve(Job(cuda_graphs="on", device="cpu"), make_data())


TIMES = GraphTimes(
    resolution=32,
    local_batch_size=64,
    plain_seconds=0.012,
    replayed_seconds=0.006,
    ratio={"value": 0.5, "low": 0.48, "high": 0.52},
    chosen=True,
)


def test_the_plan_says_what_it_saves():
    plan = make_plan(make_profile(job=make_job(cuda_graphs="on"), graphs=TIMES))
    (reason,) = [one for one in plan.reasons if one.choice == "CUDA graphs"]
    assert (reason.value, plan.job.cuda_graphs) == ("on", "on")
    assert "0.50 times as long (0.48 to 0.52)" in reason.why
    broken = GraphTimes(
        resolution=32, local_batch_size=64, plain_seconds=0.1, failure="hooks", chosen=False
    )
    plan = make_plan(make_profile(job=make_job(cuda_graphs="off"), graphs=broken))
    (reason,) = [one for one in plan.reasons if one.choice == "CUDA graphs"]
    assert "cannot be replayed here: hooks" in reason.why


def test_a_model_that_is_compiled_already_is_left_as_it_is(played):
    """As `bw.Session(torch.compile(model), ...)` gives it."""
    found, network = built(), built()
    compiled = torch.compile(network, backend="eager")
    with pytest.warns(UserWarning, match=r"as after torch\.compile"):
        graphs = graph_training(compiled, after=0)
    wanted = trained(found, (6,) * 3)
    trained(compiled, (6,) * 3)
    torch.testing.assert_close(network.state_dict(), wanted, rtol=0, atol=0)
    assert not played.recorded
    graphs.end()
    assert compiled(torch.randn(2, 3, 8, 8)).isfinite().all()


def test_a_layer_that_is_compiled_is_a_part_of_what_is_replayed(played):
    network, other = built(nn.Tanh()), built(nn.Tanh())
    other[3] = torch.compile(other[3], backend="eager")
    graphs = graph_training(other, after=1)
    wanted = trained(network, (6,) * 3)
    found = trained(other, (6,) * 3)
    torch.testing.assert_close([*found.values()], [*wanted.values()], rtol=0, atol=0)
    assert not graphs.failure
    assert played.replayed


def test_a_model_that_is_compiled_outside_of_the_session_goes_on_compiled(played):
    network, other = built(), built()
    compiled = torch.compile(other, backend="eager")
    graph_training(other, after=0)
    wanted = trained(network, (6,) * 3)
    trained(compiled, (6,) * 3)
    torch.testing.assert_close(other.state_dict(), wanted, rtol=0, atol=0)


def test_a_forward_pass_that_was_put_on_the_network_stays():
    def twice(network, images):
        return 2 * type(network).forward(network, images)

    def changed():
        network = built()
        network.forward = MethodType(twice, network)
        return network

    graphs, found, wanted = both(changed)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not graphs.failure
    graphs.end()
    assert graphs._network.forward.__func__ is twice


def test_scripts_go_on_as_they_are():
    network = built()
    network[2] = torch.jit.script(nn.Tanh())
    graphs = graph_training(network, after=0)
    with pytest.warns(UserWarning, match="layer 2 is a script"):
        network(torch.randn(2, 3, 8, 8))
    assert graphs.failure


class Listed(nn.Identity):
    """Has a list under a name that others have a number under."""

    def __init__(self):
        super().__init__()
        self.dropout = [0.1, 0.2]


def test_what_is_no_number_is_not_looked_at():
    graphs, found, wanted = both(lambda: built(Listed()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not graphs.failure


def test_states_that_do_not_come_again_are_forgotten(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_MOST_SEEN", 4)
    network = built(nn.Dropout(0.5))
    graphs = graph_training(network, after=1)
    trained(network, (6,) * 3)
    for step in range(20):
        network[3].p = step / 100
        trained(network, (6,))
    assert len(graphs._seen) <= 6
    assert graphs.holds == 1


def test_the_plan_of_a_virtual_cluster_says_what_was_measured_not_that_it_was_asked_for():
    measured = make_profile(job=make_job(cuda_graphs="on"), graphs=TIMES)
    plan = make_plan(measured, make_job(cuda_graphs="on", launch="virtual"))
    (reason,) = [one for one in plan.reasons if one.choice == "CUDA graphs"]
    assert reason.source == "measured"
