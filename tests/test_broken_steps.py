"""Memory that runs out behind the backward pass: in the exchange, in the update."""

from __future__ import annotations

import resource
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchwright.distributed import exit_reports, processes
from batchwright.errors import (
    BrokenStepError,
    Interrupted,
    NewPlan,
    PlanError,
    TrainingError,
    WorkerError,
)
from batchwright.training import loop, session
from batchwright.training.checkpoints.checkpoint import load_checkpoint
from batchwright.training.parameter_server.server_run import RoundWorker, ServerRun
from batchwright.training.running import Setup
from batchwright.training.step.normalization import Statistics
from batchwright.workflows.run_training import Begun, train_here
from batchwright.workload.passes.compilation import Compilation
from test_session import FEATURES, Points, make_session, make_tiny_plan


class ShortOfMemory(torch.optim.AdamW):
    """Some of its first steps find no memory for the state."""

    fails = 0

    def _init_group(self, *words):
        found = super()._init_group(*words)
        if self.fails:
            self.fails -= 1
            self.state[self.param_groups[0]["params"][0]].pop("exp_avg")  # half of it is there
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found


def trained(network, optimizer, happens=lambda _: None):
    """Steps that were taken again in one epoch."""
    with make_session(network, optimizer, plan=make_tiny_plan(epochs=1)) as one:
        happens(one)
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(network(features), labels))
    return one._run.state.meter.repeated


def weights_after(fails, happens=lambda _: None):
    torch.manual_seed(0)
    network = nn.Linear(FEATURES, 3)
    optimizer = ShortOfMemory([{"params": [one]} for one in network.parameters()], lr=0.1)
    optimizer.fails = fails
    return trained(network, optimizer, happens), network.weight.detach().clone()


def test_an_optimizer_that_found_no_memory_for_its_state_steps_once_more():
    assert torch.equal(weights_after(1)[1], weights_after(0)[1])
    with pytest.raises(TrainingError, match="no memory for the optimizer's state"):
        weights_after(2)


class RunsOutLater(torch.optim.SGD):
    """Memory runs out when it has stepped its first group."""

    fails = True

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_that_is_half_done_is_not_repeated(fused):
    network = nn.Linear(FEATURES, 3)
    optimizer = RunsOutLater(network.parameters(), lr=0.1, momentum=0.9, fused=fused)
    with pytest.raises(BrokenStepError, match=r"would update them twice.*last checkpoint is whole"):
        trained(network, optimizer)


def test_weights_that_are_half_updated_are_kept_nowhere(tmp_path):
    network, checkpoints = nn.Linear(FEATURES, 3), tmp_path / "run" / "checkpoints"
    optimizer = RunsOutLater(network.parameters(), lr=0.1, momentum=0.9)
    with make_session(network, optimizer, run_folder=tmp_path / "run") as one:
        next(one.epochs())
        for step, (features, labels) in enumerate(one.batches()):
            optimizer.fails = step == 2
            try:
                one.step(functional.cross_entropy(network(features), labels))
            except BrokenStepError:
                break
    assert step == 2
    assert not list(checkpoints.iterdir())


class Spoilt(torch.autograd.Function):
    """Its backward pass fails once, when the layers behind it have their gradients."""

    fails = False

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Spoilt.fails:
            Spoilt.fails = False
            raise ValueError("of my own")
        return gradient


class Refusing(torch.optim.SGD):
    """A step of it fails once."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            self.fails = False
            raise ValueError("of my own")
        super().step(closure)


class Careless:
    """A loop that catches an error of its second step in its backward pass, or in the update."""

    def __init__(self, where, **options):
        self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, 3)
        network = nn.Sequential(self.first, self.last)
        self.optimizer = Refusing(network.parameters(), lr=0.1)
        self.where, self.one = where, make_session(network, self.optimizer, **options)

    def step(self, features, labels):
        outputs = self.last(Spoilt.apply(self.first(features)))
        self.one.step(functional.cross_entropy(outputs, labels))

    def train(self, goes_on):
        steps = 0
        for _ in self.one.epochs():
            for features, labels in self.one.batches():
                steps += 1
                Spoilt.fails = steps == 2 and self.where == "backward pass"
                self.optimizer.fails = steps == 2 and self.where == "update"
                try:
                    self.step(features, labels)
                except ValueError:
                    if goes_on(self, features, labels):
                        break
            if goes_on is leaves:
                break


def again(loop, features, labels):
    loop.step(features, labels)


def with_the_next_batch(loop, features, labels):
    """Simply go on."""


def with_another_loop(loop, features, labels):
    next(loop.one.batches())


def with_the_next_epoch(loop, features, labels):
    return True


def evaluates(loop, features, labels):
    loop.one.evaluate(Points(4), lambda outputs, labels: labels == 0)


def leaves(loop, features, labels):
    return True


@pytest.mark.parametrize("where", ["backward pass", "update"])
@pytest.mark.parametrize(
    "goes_on", [again, with_the_next_batch, with_another_loop, with_the_next_epoch, evaluates]
)
def test_a_loop_that_goes_on_after_an_error_within_a_step_is_refused(where, goes_on):
    """The gradients of its batch would count twice, or its samples not at all."""
    loop = Careless(where)
    said = r"^session\.step\(\) has ended with an error \(ValueError: of my own\) and may be half"
    with pytest.raises(RuntimeError, match=said) as told, loop.one:
        loop.train(goes_on)
    assert isinstance(told.value.__cause__, ValueError)
    assert "resume" not in str(told.value)  # there is no checkpoint


def test_it_is_told_to_resume_where_there_are_checkpoints(tmp_path):
    loop = Careless("update", run_folder=tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"and resume from the last checkpoint$"), loop.one:
        loop.train(again)


@pytest.mark.parametrize("stop", [Interrupted(0, "by the user"), NewPlan("all leave")])
def test_a_stop_within_an_evaluation_leaves_nothing_half_done(stop):
    """All workers have made it together, after a checkpoint."""
    with make_session() as one:
        with pytest.raises(type(stop)), one._run.stepper.failing("session.evaluate()"):
            raise stop
        assert not one._run.stepper.failed


def test_a_worker_of_a_server_ends_with_the_error_of_a_step_that_its_loop_has_caught():
    def refuse():
        raise RuntimeError("half done")

    run, said = ServerRun.__new__(ServerRun), []
    run.stepper, run._unsettled, run._child = SimpleNamespace(refuse_failed=refuse), None, None
    run._client = SimpleNamespace(bye=lambda: said.append("bye"), close=lambda: None)
    with pytest.raises(RuntimeError, match="half done"):
        run.finish()
    assert not said


def test_a_loop_that_is_left_after_a_failed_backward_pass_keeps_its_whole_steps(tmp_path):
    loop = Careless("backward pass", run_folder=tmp_path / "run")
    with loop.one:
        loop.train(leaves)
    content = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")
    assert (content["state"]["step"], content["state"]["samples_seen"]) == (1, 5)


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (3.0, "got the float 3.0 for a loss: give it as the tensor"),
        (lambda: None, "got None for a loss"),
        (lambda: torch.ones(5, requires_grad=True), r"a loss of shape \(5,\): give one number"),
        (lambda: torch.ones(()), r"session.step\(\) found no gradient"),
    ],
)
def test_a_loss_that_is_no_number_of_the_network_is_refused_in_a_line(loss, said, compiling):
    """And is no failure of a compiler."""

    def step():
        with make_session() as one:
            one._run.stepper._compilation = Compilation(on=compiling, asked=compiling)
            next(one.epochs())
            next(one.batches())
            one.step(loss)

    with pytest.raises((ValueError, RuntimeError), match=said):
        step()


def out_of_memory_once(reducer, monkeypatch):
    finish, fails = reducer.finish, [True]

    def fail(*words):
        if fails and fails.pop():
            raise RuntimeError("CUDA error: out of memory")
        return finish(*words)

    monkeypatch.setattr(reducer, "finish", fail)


def test_a_step_whose_figures_found_no_memory_is_taken_again(monkeypatch):
    def happens(one):
        out_of_memory_once(one._run._reducer, monkeypatch)

    _, undisturbed = weights_after(0)
    repeated, weights = weights_after(0, happens)
    assert repeated == 1
    torch.testing.assert_close(weights, undisturbed, rtol=1e-5, atol=1e-6)


def several():
    cpu = torch.device("cpu")
    return SimpleNamespace(size=2, rank=0, places=("here/cuda:0",), device=cpu)


def test_with_several_workers_others_may_hold_its_sums_already(monkeypatch):
    def happens(one):
        out_of_memory_once(one._run._reducer, monkeypatch)
        monkeypatch.setattr(one._run.stepper, "_group", several())

    with pytest.raises(BrokenStepError, match="here/cuda:0 ran out of memory while gradients"):
        weights_after(0, happens)


def test_a_worker_cannot_repeat_what_others_exchange_statistics_in(monkeypatch):
    """Smaller micro-batches would meet the others' exchanges of something else."""
    monkeypatch.setattr(session, "refuse_synchronized_on_cpu", lambda *_: None)
    network = nn.ModuleDict({"used": nn.Linear(FEATURES, 3), "other": nn.SyncBatchNorm(3)})

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with make_session(network, plan=make_tiny_plan(epochs=1)) as one:
        monkeypatch.setattr(one._run.stepper, "_group", several())
        for _ in one.epochs():
            for _ in one.batches():
                with pytest.raises(BrokenStepError, match="between exchanges of SyncBatchNorm"):
                    one.step(full)
                return


def test_workers_that_exchange_statistics_take_equally_many_passes_and_are_watched(monkeypatch):
    """Watched, as the host itself waits for the others in each pass."""
    watched = []
    monkeypatch.setattr(session, "refuse_synchronized_on_cpu", lambda *_: None)
    monkeypatch.setattr(session.Group, "watch", lambda group: watched.append(group))
    for layer, together in (nn.SyncBatchNorm(3), True), (nn.BatchNorm1d(3), False):
        network = nn.ModuleDict({"used": nn.Linear(FEATURES, 3), "other": layer})
        with make_session(network, plan=make_tiny_plan(epochs=1)) as one:
            next(one.epochs())
            assert one._run._sharing.steps._together == together
            assert watched == ([one._group] if together else [])
        watched.clear()


def test_workers_of_a_server_exchange_no_statistics():
    network = nn.Sequential(nn.SyncBatchNorm(2))
    parameters = list(network.parameters())
    assert Setup.synchronized.fget(SimpleNamespace(model=network))
    setup = SimpleNamespace(model=network, parameters=parameters, synchronized=True)
    with pytest.raises(PlanError, match="SyncBatchNorm exchanges statistics between all workers"):
        RoundWorker(setup, None)


def test_a_server_refuses_complex_weights_which_it_would_merge_as_whole_numbers():
    network = nn.Linear(2, 2, dtype=torch.complex64)
    setup = SimpleNamespace(model=network, parameters=list(network.parameters()))
    with pytest.raises(PlanError, match="has complex numbers among its weights"):
        RoundWorker(setup, None)


def test_a_worker_is_told_by_its_own_error_though_a_library_has_ended_it(tmp_path, monkeypatch):
    """As NCCL's watchdog may, where a GPU has failed."""
    monkeypatch.setenv(exit_reports.ERRORS_FOLDER, str(tmp_path))
    for rank, secondary in ((0, True), (1, False)):
        monkeypatch.setenv("RANK", str(rank))
        exit_reports.leave_report(f"of worker {rank}", 1, secondary=secondary)
    for codes, told in (
        ({1: -signal.SIGABRT}, "worker 1: of worker 1"),
        ({0: -signal.SIGABRT, 1: 1}, "worker 0 was killed by SIGABRT"),
        ({0: 1, 1: -signal.SIGABRT, 2: -signal.SIGKILL}, "worker 2 was killed by SIGKILL"),
    ):
        with pytest.raises(WorkerError, match=f"^{told}"):
            exit_reports.raise_failure(tmp_path, codes)


def test_whoever_started_a_worker_goes_on_after_a_broken_step(tmp_path, monkeypatch):
    def work():
        raise BrokenStepError("half done")

    monkeypatch.setenv(exit_reports.ERRORS_FOLDER, str(tmp_path))
    assert processes._exit_code(work) == 1
    assert [one["secondary"] for one in exit_reports.reports_in(tmp_path)] == [True]


def test_a_report_that_does_not_fit_the_disk_is_no_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(exit_reports.ERRORS_FOLDER, str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
    try:
        exit_reports.leave_report("no space", 2, secondary=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot leave a report" in capsys.readouterr().err
    assert exit_reports.reports_in(tmp_path) == []


@pytest.mark.parametrize("restarts", [0, 1])
def test_so_does_a_training_in_this_process(restarts, tmp_path, monkeypatch):
    begun, told = [], []

    def train(plan, *, run_folder, resume, follow_advice):
        begun.append(resume)
        if len(begun) == 1:
            raise BrokenStepError("half done")

    monkeypatch.setattr(loop, "train", train)
    shown = SimpleNamespace(update=lambda line: told.append(line.text))
    plan = make_tiny_plan(restarts=restarts)
    run = Begun(tmp_path, plan, None, lambda: None, shown, resume=False, follow_advice=False)
    with nullcontext() if restarts else pytest.raises(BrokenStepError):
        train_here(run)
    assert begun == [False, True][: restarts + 1]
    assert told == ["half done; the training was started again"] * restarts


def test_frozen_layers_of_synchronized_normalization_exchange_nothing():
    network = nn.Sequential(nn.SyncBatchNorm(2))
    statistics = Statistics(network)
    assert statistics.synchronized
    network.eval()
    assert not statistics.synchronized
