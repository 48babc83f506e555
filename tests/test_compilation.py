"""Compiling a network: the same training, what it may cost, and when it is chosen."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from batchwright.distributed.group import Group
from batchwright.errors import JobError, PlanError, TrainingError
from batchwright.planning.planner import make_plan
from batchwright.probing.commands import Compile, VisitPair
from batchwright.probing.measure import comparison
from batchwright.probing.measure import compilation as module
from batchwright.probing.measure.compilation import SHORT, compare_compilation
from batchwright.probing.measure.pair_time import visit_pair
from batchwright.probing.replays import Replays
from batchwright.records import CompilationTimes, Estimate, Job, Reason
from batchwright.training.checkpoints.checkpoint import load_checkpoint
from batchwright.workflows import prepare_job
from batchwright.workload.passes import compilation
from batchwright.workload.passes.compilation import Compilation, compile_training, what_is_missing
from samples import make_data, make_job, make_profile
from test_session import make_model, make_session, make_tiny_plan, train
from test_trials import SIDE, bench_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def afresh():
    """What other tests have compiled is forgotten."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled(monkeypatch):
    """The graphs that are compiled, which then run as they are: no C++ compiler is asked."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compilation, "BACKEND", backend)
    return graphs


def broken(graph, inputs):
    raise RuntimeError("no such kernel\nand much more")


def network_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(2))


def trained(network, sizes, side=8):
    """Weights and statistics after a step of each size."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    torch.manual_seed(1)
    for size in sizes:
        network(torch.randn(size, 3, side, side)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return network.state_dict()


@pytest.mark.slow
def test_a_compiled_training_is_the_same_and_keeps_the_names(compiled):
    plain, other = network_of(), network_of()
    compile_training(other)
    torch.testing.assert_close(trained(other, (6, 6)), trained(plain, (6, 6)))
    assert len(compiled) == 1
    assert list(other.state_dict()) == list(plain.state_dict())


@pytest.mark.slow
def test_other_batches_are_no_new_compilation(compiled):
    network = network_of()
    compile_training(network)
    trained(network, (6, 4, 3, 7, 2, 12))
    trained(network, (5,), side=12)
    assert len(compiled) <= 2  # as many as a symbol for the batch may take


@pytest.mark.slow
def test_a_network_that_is_compiled_already_is_left_so(compiled):
    network = torch.compile(network_of(), backend=compilation.BACKEND)
    assert not compile_training(network).on
    network(torch.randn(2, 3, 8, 8)).sum().backward()
    assert len(compiled) == 1


def test_a_forward_pass_that_was_put_in_place_is_the_one_that_is_compiled(compiled):
    network = network_of()
    network.forward = MethodType(lambda network, images: 2 * network[0](images), network)
    images = torch.randn(2, 3, 8, 8)
    wanted = network(images)
    assert compile_training(network).on
    torch.testing.assert_close(network(images), wanted)
    assert compile_training(network).on  # as in a second session
    torch.testing.assert_close(network(images), wanted)
    assert len(compiled) == 1  # what it was compiled to before


def test_only_what_is_trained_on_is_compiled(compiled):
    network = network_of()
    told = compile_training(network)
    with torch.no_grad():
        network(torch.randn(2, 3, 8, 8))
    network.eval()
    network(torch.randn(2, 3, 8, 8))
    network.train()
    told.on = False
    network(torch.randn(2, 3, 8, 8))
    assert not compiled


@pytest.mark.slow
def test_a_copy_computes_by_itself(compiled):
    network = network_of()
    compile_training(network)
    twin = copy.deepcopy(network)
    for parameter in network.parameters():
        parameter.data.fill_(float("nan"))
    assert torch.isfinite(twin(torch.randn(2, 3, 8, 8))).all()


def test_a_gpu_that_has_failed_is_no_failure_to_compile():
    one = Compilation()
    assert not one.gives_up(RuntimeError("CUDA error: device-side assert triggered"))
    assert one.gives_up(RuntimeError("such as of the compiler"))


def test_what_cannot_be_compiled_goes_on_as_it_is(monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", broken)
    plain, other = network_of(), network_of()
    told = compile_training(other)
    found = trained(other, (6, 5))
    assert told.failure == "RuntimeError: no such kernel"
    torch.testing.assert_close(found, trained(plain, (6, 5)), rtol=0, atol=0)


@pytest.mark.slow
def test_an_error_of_the_networks_own_is_its_own(compiled):
    network = network_of()
    told = compile_training(network)
    with pytest.raises(RuntimeError, match="channels"):
        network(torch.randn(2, 5, 8, 8))
    assert not told.failure


@pytest.mark.slow
def test_a_run_compiles_and_its_checkpoints_have_the_models_names(compiled, tmp_path):
    weights = {}
    for key in ("off", "on"):
        model, plan = make_model(extras=True), make_tiny_plan(compile=key)
        with make_session(model, plan=plan, run_folder=tmp_path / key) as session:
            train(session)
        weights[key] = load_checkpoint(tmp_path / key / "checkpoints" / "last.pt")["model"]
    assert compiled
    torch.testing.assert_close(weights["on"], weights["off"])


def backward_breaks(*ranks):
    """A backend whose backward passes cannot be compiled on these workers."""

    def compiler(rank):
        def fail(graph, inputs):
            assert rank not in ranks, "no such kernel"
            return graph.forward

        return aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=fail)

    return compiler


MEASURED = Reason(choice="compiling", value="on", why="It saves more.", source="measured")


def trained_together(rank, ranks, reasons, compile_key):
    """Weights, lines said, and the error, of a worker whose compiler may fail backward passes."""
    compilation.BACKEND, kept = backward_breaks(*ranks)(rank), compilation.BACKEND
    torch._dynamo.reset()
    plan = make_tiny_plan((3, 2), compile=compile_key, micro=2).model_copy(
        update={"reasons": reasons}
    )
    model, error = make_model(), ""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with make_session(model, plan=plan) as session:
                train(session)
    except TrainingError as problem:
        error = str(problem)
    finally:
        compilation.BACKEND = kept
    lines = [str(one.message) for one in said if "be compiled" in str(one.message)]
    return [p.detach().clone() for p in model.parameters()], lines, error


@pytest.mark.slow
def test_where_one_workers_backward_pass_cannot_be_compiled_all_go_on_as_it_does(crew):
    plain = crew.together(trained_together, (), (), "off", workers=2)
    found = crew.together(trained_together, (1,), (MEASURED,), "on", workers=2)
    torch.testing.assert_close(found[0][0], plain[0][0], rtol=0, atol=0)
    torch.testing.assert_close(found[1][0], plain[1][0], rtol=0, atol=0)
    (line,), nothing = found[0][1], found[1][1]
    assert nothing == []
    assert "no such kernel" in line
    assert "all workers go on uncompiled" in line


@pytest.mark.slow
def test_who_asks_for_compiling_gets_one_error_on_all_workers(crew):
    for _, lines, error in crew.together(trained_together, (0,), (), "on", workers=2):
        assert lines == []
        assert "compile=on: the network cannot be compiled on" in error
        assert "no such kernel" in error
        assert "plan again with compile=auto" in error


def compiling(side, batch, *, asked, seconds):
    """The command to compare with compiled steps."""
    size = {"resolution": side, "wanted_batch_size": batch}
    return Compile(workers=1, **size, asked=asked, seconds=seconds)


def compared_together(rank, ranks):
    """What two workers' bench finds of compiling where backward passes break on some."""
    compilation.BACKEND, kept = backward_breaks(*ranks)(rank), compilation.BACKEND
    torch._dynamo.reset()
    group = Group(CPU)
    bench, _ = bench_of(group=group, workers=2)
    try:
        told = compare_compilation(bench, compiling(SIDE, 8, asked=True, seconds=0.01))
        bench.step(bench.supply(8, SIDE))
    finally:
        compilation.BACKEND = kept
        bench.close()
        group.close()
    return told.failure, told.chosen, bench.compilation.on


@pytest.mark.slow
def test_a_probe_of_several_workers_measures_what_all_of_them_can(crew):
    found = crew.together(compared_together, (1,), workers=2)
    assert found == [("AssertionError: no such kernel", False, False)] * 2
    assert crew.together(compared_together, (), workers=2) == [("", True, True)] * 2


def failed_unseen(rank):
    """What two workers' bench knows of a failure that came with another, and of one alone."""
    group = Group(CPU)
    bench, _ = bench_of(group=group, workers=2)
    usual = bench.supply(2, SIDE)

    def supply():
        if rank:
            bench.compilation.failure = "no such kernel"
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return usual()

    try:
        assert not bench.try_step(supply)
        first, bench.compilation.failure = bench.compilation.failure, "nor here" * rank
        bench.join(group)
        return first, bench.compilation.failure
    finally:
        bench.close()
        group.close()


@pytest.mark.slow
def test_a_probes_workers_know_of_each_others_failures_however_they_come(crew):
    """Together with want of memory, and in steps that others have sat out."""
    assert crew.together(failed_unseen, workers=2) == [("no such kernel", "nor here")] * 2


def paired(rank, ranks):
    """Whether a worker computes compiled after a visit in which both step by themselves."""
    compilation.BACKEND, kept = backward_breaks(*ranks)(rank), compilation.BACKEND
    torch._dynamo.reset()
    group = Group(CPU)
    bench, _ = bench_of(group=group, workers=2)
    try:
        bench.join(group.alone())
        bench.compile(on=True)
        sizes = {"large_workers": 1, "large_batch": 8, "small_batch": 4, "micro_batch": 8}
        command = VisitPair(workers=2, resolution=SIDE, seconds=0.01, **sizes)
        stretches = visit_pair(bench, group, command)
    finally:
        compilation.BACKEND = kept
        bench.close()
        group.close()
    return bench.compilation.failure, len(stretches)


@pytest.mark.slow
def test_workers_that_step_by_themselves_all_compute_as_one_whose_compiler_failed(crew):
    found = crew.together(paired, (1,), workers=2)
    assert found == [("AssertionError: no such kernel", 2)] * 2
    assert crew.together(paired, (), workers=2) == [("", 2)] * 2


def test_without_a_compiler_it_is_refused_in_a_line(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX=no-such-compiler" in what_is_missing(CPU)
    with pytest.raises(JobError, match=r"compile=on needs a C\+\+ compiler: CXX=no-such-compiler"):
        prepare_job.resolve(Job(compile="on", device="cpu"), make_data())
    prepare_job.resolve(Job(compile="auto", device="cpu"), make_data())


def test_blocks_that_are_recomputed_are_not_compiled():
    with pytest.raises(JobError, match="compile=on with activation_checkpointing=on"):
        Job(compile="on", activation_checkpointing="on")


@pytest.mark.slow
@pytest.mark.skipif(bool(what_is_missing(CPU)), reason="needs a C++ compiler")
def test_the_compiler_of_this_machine_trains_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain, other = network_of(), network_of()
    told = compile_training(other)
    found = trained(other, (6, 5, 4))
    assert not told.failure
    torch.testing.assert_close(found, trained(plain, (6, 5, 4)), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- the choice


@dataclass
class Machine:
    """Stands for a bench that compiles.

    Attributes:
        ratio: Compiled over plain step.
        taken: Seconds of compiling, for each image side.
        failure: Why it cannot.
        sides: Of the job, in pixels.
        compiled: Those that were.
        room: Samples that fit.
    """

    ratio: float = 0.8
    taken: float = 20.0
    failure: str = ""
    epochs: int = 10
    train_samples: int = 10_000
    seconds: float = 0.0
    sides: tuple[int, ...] = (32,)
    compiled: set[int] = field(default_factory=set)
    on: bool = False
    graphs: Any = field(default_factory=lambda: Replays(nn.Identity(), None))
    sizes: list[int] = field(default_factory=list)
    room: int = 10**6
    group: Group = field(default_factory=lambda: Group(CPU))
    device: torch.device = CPU

    @property
    def job(self):
        return make_job(epochs=self.epochs, resolutions=self.sides)

    @property
    def compilation(self):
        return Compilation(self.on, self.failure if self.compiled else "")

    def compile(self, *, on):
        self.on = on

    def supply(self, size, resolution):
        return size, resolution

    def try_step(self, supply):
        fits = supply[0] <= self.room
        if fits:
            self.step(supply)
        return fits

    def step(self, supply):
        size, side = supply
        took = 0.01 * size * (side / 32) ** 2 * (self.ratio if self.on else 1)
        self.seconds += took
        if self.on and side not in self.compiled:
            self.compiled.add(side)
            self.seconds += self.taken
        self.sizes.append(size)
        return took, 0.0


def compared(monkeypatch, machine, *, asked=False, wanted=64):
    for part in (module, comparison):
        monkeypatch.setattr(part, "now", lambda device: machine.seconds)
    told = compare_compilation(machine, compiling(32, wanted, asked=asked, seconds=20.0))
    assert machine.on == told.chosen
    return told


def test_it_is_compiled_where_that_saves_more_than_it_takes(monkeypatch):
    told = compared(monkeypatch, Machine())
    assert told.training_seconds == pytest.approx(10 * 157 * 0.64)
    assert told.compile_seconds == pytest.approx(20, abs=0.5)
    assert told.ratio.value == pytest.approx(0.8)
    assert told.chosen  # 201 s are saved


def test_steps_that_do_not_fit_are_not_compared(monkeypatch):
    machine = Machine(room=20)
    told = compared(monkeypatch, machine)
    assert (told.local_batch_size, max(machine.sizes)) == (16, 16)


def test_each_image_side_is_compiled_before_anything_is_timed_and_paid_for(monkeypatch):
    machine = Machine(sides=(16, 24, 32))
    told = compared(monkeypatch, machine)
    assert machine.compiled == {16, 24, 32}
    assert told.compile_seconds == pytest.approx(60, abs=0.5)
    machine = Machine(sides=(16, 24, 32), failure="no kernel")
    compared(monkeypatch, machine)
    assert machine.compiled == {32}


@pytest.mark.parametrize(
    "machine",
    [Machine(ratio=0.985), Machine(taken=300), Machine(ratio=1.2), Machine(failure="no kernel")],
)
def test_it_is_not_where_it_saves_less_or_cannot_be(monkeypatch, machine):
    told = compared(monkeypatch, machine)
    assert machine.compiled
    assert not told.chosen
    assert told.failure == machine.failure


def test_a_ratio_that_is_not_sure_compiles_nothing(monkeypatch):
    ratio = Estimate(value=0.8, low=0.6, high=1.1)
    monkeypatch.setattr(comparison, "compare", lambda turns, more: (([0.1], [0.08]), ratio))
    assert not compared(monkeypatch, Machine()).chosen


def test_a_short_training_is_not_made_longer_by_asking(monkeypatch):
    machine = Machine(epochs=1)
    told = compared(monkeypatch, machine)
    assert told.training_seconds < SHORT
    assert not machine.compiled
    assert (told.compile_seconds, told.chosen) == (None, False)
    assert compared(monkeypatch, machine, asked=True).chosen


TIMES = CompilationTimes(
    resolution=32,
    local_batch_size=64,
    training_seconds=1000.0,
    plain_seconds=0.1,
    compile_seconds=20.0,
    compiled_seconds=0.09,
    ratio={"value": 0.9, "low": 0.88, "high": 0.92},
    asked=False,
    chosen=True,
)


def planned(times=TIMES, *, epochs=20, **changes):
    measured = make_job(epochs=20, compile="on" if times.chosen else "off")
    taken = make_profile(job=measured, compilation=times)
    return make_plan(taken, measured.model_copy(update={"epochs": epochs, **changes}))


def test_the_plan_says_both_numbers_and_counts_what_compiling_takes():
    plan = planned()
    (reason,) = [one for one in plan.reasons if one.choice == "compiling"]
    assert reason.value == "on"
    assert "Compiling took 20 s." in reason.why
    assert "Over 20 epochs that saves 100 s." in reason.why
    free = planned(TIMES.model_copy(update={"compile_seconds": 0.0}))
    more = plan.chosen.train_seconds.value - free.chosen.train_seconds.value
    assert more == pytest.approx(20)


def test_a_training_too_short_for_it_is_refused_and_not_made_longer():
    assert planned(epochs=5)
    with pytest.raises(PlanError, match=r"takes 20 s and saves 20 s of epochs=4: probe again"):
        planned(epochs=4)
    assert planned(TIMES.model_copy(update={"asked": True}), epochs=4)


def test_a_profile_that_was_compiled_plans_no_other_training():
    taken = make_profile(job=make_job(compile="on"))
    assert make_plan(taken, make_job(compile="auto")).job.compile == "on"
    with pytest.raises(PlanError, match="measured with compile=on"):
        make_plan(taken, make_job(compile="off"))
