"""`probing` with real worker processes: several counts, deaths, stop signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import forked
from batchwright.distributed import exit_reports
from batchwright.distributed.group import Group
from batchwright.errors import Interrupted, JobError, WorkerError
from batchwright.probing import commands, own_step
from batchwright.probing import executor as executors
from batchwright.probing.course.controller import Controller
from batchwright.probing.executor import Executor
from batchwright.probing.measure import memory
from batchwright.probing.own_step import OwnStep
from batchwright.probing.probe import measure_points, measuring, probe, unfinished
from batchwright.probing.visiting import Visitor
from batchwright.probing.workers import Killed, Workers
from batchwright.records import Job, ProbeSettings, Profile
from batchwright.records.documents import read_record
from batchwright.records.profile import JOINED
from forked import Forked
from samples import make_profile
from test_launch import processes_naming, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def images(cache):
    """Decoded once, for all processes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("BATCHWRIGHT_CACHE", str(cache))
        yield


@pytest.fixture
def apart(tmp_path):
    """Where a process of the test's own probes; afterwards no process that names it is left."""
    place = tmp_path / "probe"
    place.mkdir()
    yield place
    assert wait_until(lambda: not processes_naming(tmp_path))


@pytest.fixture
def folder(forks, apart):
    """Where this process probes."""
    return apart


def job_of(**changes):
    plain = {
        "device": "cpu",
        "precision": "float32",
        "resolutions": (8,),
        "probe": ProbeSettings(budget=4, steps=4),
    }
    return Job(**{**plain, **changes})


def test_one_and_two_workers_are_measured_where_the_job_leaves_it_open(folder):
    # It ends as soon as three batches of each are roughly known; a busy machine may take longer.
    settings = ProbeSettings(budget=12, steps=4, error=0.9)
    profile = probe(job_of(network="probed_networks:Small", probe=settings), folder)
    assert {point.workers for point in profile.steps} == {1, 2}
    for workers in (1, 2):
        assert len([p for p in profile.steps if p.workers == workers]) >= 2
    # Where there is ample memory, one number of workers is weighed for the other too.
    assert len({point.local_batch_size for point in profile.memory}) >= 3
    assert all(point.sync_seconds > 0 for point in profile.steps if point.workers == 2)
    assert profile.cluster.workers == 2
    allocator = profile.cluster.allocator
    assert allocator.endswith(JOINED) or torch.cuda.is_available() or "raised" not in allocator
    assert profile.job.workers == "auto"
    assert {one.operation for one in profile.collectives} == {"all-reduce", "push-pull"}
    sizes = {one.bytes for one in profile.collectives}
    assert sizes == {40_000, 4_000_000, profile.network.trained_bytes}
    # A busy machine may train on too few samples to tell.
    assert profile.noise is None or profile.noise.parts >= 8
    assert profile.out_of_memory == ()


def test_a_number_that_is_asked_for_is_the_only_one_measured(folder):
    settings = ProbeSettings(budget=3, steps=2, error=0.9)
    profile = probe(job_of(network="probed_networks:Small", workers=2, probe=settings), folder)
    assert {point.workers for point in profile.steps} == {2}
    assert {point.workers for point in profile.memory} == {2}


def test_a_point_that_kills_a_worker_is_noted_and_the_probe_goes_on(folder, monkeypatch):
    monkeypatch.setenv("DEADLY_BATCH", "32")
    settings = ProbeSettings(budget=12, steps=4, error=0.9)  # as above
    job = job_of(
        network="probed_networks:Deadly", workers=2, goal={"least_steps": 4}, probe=settings
    )
    profile = probe(job, folder)
    assert profile.out_of_memory
    assert len({point.local_batch_size for point in profile.steps}) >= 2
    assert max(point.local_batch_size for point in profile.steps) < 32
    lost = [point.local_batch_size for point in profile.out_of_memory]
    assert min(lost) >= 32
    assert lost == sorted(set(lost))
    assert profile.noise is not None


def test_points_are_measured_on_after_one_that_kills(folder, monkeypatch):
    monkeypatch.setenv("DEADLY_BATCH", "32")
    job = job_of(network="probed_networks:Deadly")
    points = [(2, 8, 64), (1, 8, 4), (2, 8, 4), (2, 8, 128)]
    measured = measure_points(job, points, folder, visits=2)
    assert [(one.workers, one.local_batch_size) for one in measured.steps] == [(1, 4), (2, 4)]
    assert all(len(one.visits) == 2 for one in measured.steps)
    assert [one.local_batch_size for one in measured.out_of_memory] == [64]


def test_workers_that_always_die_end_the_probe_with_one_line(folder, monkeypatch):
    monkeypatch.setenv("DEADLY_BATCH", "3")
    job = job_of(network="probed_networks:Deadly")
    # From large to small: what is no smaller than a lost one is not tried.
    points = [(1, side, 4) for side in (12, 10, 8)]
    monkeypatch.setattr("batchwright.probing.visiting.MAX_RESTARTS", 1)
    with pytest.raises(WorkerError, match=r"killed 2 times, last while 10 px, local batch 4"):
        measure_points(job, points, folder)


def test_workers_that_die_before_any_measurement_are_told(folder, monkeypatch):
    monkeypatch.setenv("DEADLY_BATCH", "2")
    with pytest.raises(WorkerError, match="a worker was killed while it built the network"):
        probe(job_of(network="probed_networks:Deadly"), folder)


def test_loader_processes_without_shared_memory_end_the_probe_with_a_line_that_names_it(folder):
    job = job_of(data="probed_networks:unshared_images", network="probed_networks:Small", loaders=1)
    with pytest.raises(JobError, match=r"local batch 2.*: .* shared memory .*loaders=0"):
        probe(job, folder)


def test_a_worker_that_is_killed_as_it_starts_is_told(apart, monkeypatch):
    def start(*_, **__):
        return subprocess.Popen(["/bin/sh", "-c", "kill -KILL $$"])

    monkeypatch.setattr("batchwright.distributed.fork_server.start", start)
    said = rf"one of 2 workers .*out of memory\?\): .*fewer workers; logs are in {apart}$"
    with pytest.raises(WorkerError, match=said), Workers(job_of(), apart, [1, 2], list):
        pass


@pytest.mark.usefixtures("many_files")
def test_a_worker_that_is_killed_before_it_has_read_a_command_is_told(apart, monkeypatch):
    """Also where more files are open than `select` takes."""
    unread = """if True:
        import os, socket, sys
        line = socket.socket(fileno=int(sys.argv[-1]))
        line.sendall(b"{}\\n")
        line.recv(1, socket.MSG_PEEK)
        os.kill(os.getpid(), 9)
    """

    def start(_, arguments, *, files, **__):
        return subprocess.Popen([sys.executable, "-c", unread, *arguments], pass_fds=files)

    monkeypatch.setattr("batchwright.distributed.fork_server.start", start)
    with Workers(job_of(), apart, [1], list) as workers:
        assert workers._lines[0].fileno() > 1023
        with pytest.raises(Killed):
            workers.ask(commands.Compare(workers=1, seconds=1.0), commands.Compared)


def test_a_workers_own_error_is_told_on_one_line(folder, monkeypatch):
    with pytest.raises(WorkerError, match=r"^worker \d: ValueError: no such thing$"):
        probe(job_of(network="probed_networks:Broken"), folder)


PROBING = """
import sys
from pathlib import Path
from batchwright.probing.probe import probe
from batchwright.records import Job

job = Job(device="cpu", precision="float32", resolutions=(8,), probe={"budget": 100, "error": 1e-6})
probe(job, Path(sys.argv[1]), progress=lambda done, total, what: print(what, flush=True))
"""


def test_a_cause_is_waited_for_only_until_it_is_known(tmp_path, monkeypatch):
    """A worker reports its error before others can miss it; that it was killed is seen later."""
    workers, codes = Workers(Job(), tmp_path, [2], list), {1: 1}
    workers._children = SimpleNamespace(exit_codes=lambda: codes)
    monkeypatch.setenv(exit_reports.ERRORS_FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    exit_reports.leave_report("lost contact with another worker", 1, secondary=True)
    assert not workers._cause_is_known()
    codes[0] = -signal.SIGKILL
    assert workers._cause_is_known()
    codes[0] = 1
    monkeypatch.setenv("RANK", "0")
    exit_reports.leave_report("ValueError: no such thing", 1, secondary=False)
    assert workers._cause_is_known()


def test_the_end_of_the_probe_is_the_end_of_its_workers(folder):
    script = folder / "probing.py"
    script.write_text(PROBING)
    how = {"cwd": folder, "env": os.environ, "prints": folder}
    process = Forked([str(folder)], program=str(script), **how)
    try:
        assert wait_until(lambda: "local batch" in process.said()[0])
        assert len(processes_naming(folder)) >= 4  # the probe, its fork server and two workers
        process.kill()  # a signal that it can see: the next test
        process.wait(500)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert wait_until(lambda: not processes_naming(folder))


@pytest.mark.parametrize("when", ["local batch", "nothing: waiting for other programs"])
def test_a_stop_signal_is_told_to_the_caller_at_once(folder, monkeypatch, when):
    told = []

    def stop(done, total, what):
        if when in what:
            told.append(what)
            os.kill(os.getpid(), signal.SIGINT)

    if when.startswith("nothing"):
        monkeypatch.setattr(Visitor, "is_disturbed", lambda *_, **__: True)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        probe(job_of(probe=ProbeSettings(budget=60, steps=4)), folder, progress=stop)
    assert caught.value.exit_code == 130
    assert len(told) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_worker_that_is_killed_while_idle_ends_nothing(folder):
    """The second worker has nothing to do while one is measured; its death is found later."""

    def kill_once(done, total, what):
        if done == 1 and not killed:
            killed.append(rank_of(folder, 1))
            os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.2)

    killed = []
    points = [(1, 8, 4), (1, 8, 8), (2, 8, 4)]
    measured = measure_points(job_of(), points, folder, visits=2, progress=kill_once)
    assert killed
    assert {one.workers for one in measured.steps} == {1, 2}


def test_a_trial_ends_with_a_worker_that_is_killed_and_another_may_follow(folder, monkeypatch):
    monkeypatch.setenv("DEADLY_BATCH", "32")
    prepare = commands.Prepare(workers=2, precision="float32")
    plain = {"workers": 2, "resolution": 8, "optimizer": "sgd", "samples": 200, "held_out": 100}
    with Workers(job_of(network="probed_networks:Deadly"), folder, [1, 2], list) as workers:
        workers.ask(prepare, commands.Prepared)
        with pytest.raises(Killed):
            workers.ask(
                commands.RunTrial(global_batch_size=80, micro_batch=64, **plain), commands.TrialRun
            )
        workers.restart()
        workers.ask(prepare, commands.Prepared)
        run = workers.ask(
            commands.RunTrial(global_batch_size=80, micro_batch=30, **plain), commands.TrialRun
        )
    assert run.trial is not None
    assert run.trial.steps == 3


def test_a_long_trial_tells_how_far_it_is_and_is_waited_for(folder, monkeypatch):
    monkeypatch.setattr("batchwright.probing.workers.ANSWER_SECONDS", 60)
    heard = []
    plain = {"workers": 2, "resolution": 8, "optimizer": "sgd", "samples": 2000, "held_out": 100}
    trial = commands.RunTrial(global_batch_size=40, micro_batch=64, **plain)
    with Workers(job_of(network="probed_networks:Slow"), folder, [2], list) as workers:
        workers.ask(commands.Prepare(workers=2, precision="float32"), commands.Prepared)
        run = workers.ask(trial, commands.TrialRun, heard.append)
        assert run.trial is not None
        assert len(heard) >= 2
        assert heard == sorted(heard)
        late = trial.model_copy(update={"most_seconds": 0.2})
        assert workers.ask(late, commands.TrialRun, heard.append).given_up
        again = workers.ask(trial, commands.TrialRun).trial
    untold = {"seconds"}
    assert again.model_dump(exclude=untold) == run.trial.model_dump(exclude=untold)


def taught_job(global_batch=32):
    """Its trials end with what there is to try, after a few, long before their time is up.

    An epoch with one batch can be tried in one length, with either optimizer and at some rates; the
    first trial does not settle the choice.
    """
    settings = ProbeSettings(budget=0.5, steps=2, learning=50)
    how = {"workers": 2, "epochs": 1, "global_batch": global_batch, "probe": settings}
    return job_of(network="probed_networks:Small", goal={"accuracy_tolerance": 0.0}, **how)


def test_a_probe_that_is_stopped_in_its_trials_goes_on_with_them(folder, tmp_path):
    """By SIGINT; by SIGTERM: a run, below."""
    kept, whats = tmp_path / "profile.json", []

    def stop(done, total, what):
        if what.startswith("trial 2"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as caught:
        probe(taught_job(), folder, kept=kept, progress=stop)
    assert caught.value.exit_code == 130
    first = read_record(kept, Profile)
    assert first.trials_open
    assert len(first.trials) == 1
    assert unfinished(kept, taught_job()) == first
    assert unfinished(kept, taught_job().model_copy(update={"epochs": 9})) is None
    whole = probe(taught_job(), folder, kept=kept, progress=lambda *told: whats.append(told[2]))
    assert whole == read_record(kept, Profile)
    assert whole.trials[:1] == first.trials
    assert len(whole.trials) > 1
    trial = r"trial 2: (sgd|muon), .* images(, .* rate)?"
    shown = re.compile(trial + r", up to 0:00:\d\d left for trials, percent done")
    assert any(map(shown.fullmatch, whats))
    assert not whole.trials_open
    assert whole.steps == first.steps
    assert not any("local batch" in what for what in whats)
    assert unfinished(kept, taught_job()) is None


def test_a_worker_that_is_killed_in_a_trial_loses_nothing_else(folder, tmp_path):
    killed, whats = [], []

    def kill_once(done, total, what):
        whats.append(what)
        if what.startswith("trial 2") and not killed:
            killed.append(rank_of(folder, 1))
            os.kill(killed[0], signal.SIGKILL)

    job = taught_job("auto")  # smaller batches are tried on
    profile = probe(job, folder, kept=tmp_path / "profile.json", progress=kill_once)
    assert killed
    assert any("a worker was killed (out of memory?)" in what for what in whats)
    assert profile.trials
    assert not profile.trials_open
    assert not Path(f"/proc/{killed[0]}").exists()


def rank_of(folder, rank):
    """The process of a worker."""
    for process in processes_naming(folder):
        if Path(f"/proc/{process}/comm").read_text() == f"worker {rank}\n":
            return process
    raise AssertionError(f"there is no worker {rank}")


def test_a_run_that_is_stopped_in_its_trials_goes_on(folder, tmp_path):
    """By the very commands."""
    run, code = tmp_path / "run", "network=probed_networks:Held"
    held = tmp_path / "held"
    held.write_text("run/profile.json")
    words = [code, "workers=2", "device=cpu", "precision=float32", "epochs=1"]
    words += ["probe.budget=0.5", "probe.steps=2", "probe.learning=50", "global_batch=32"]
    words += ["goal.accuracy_tolerance=0"]
    how = {"cwd": tmp_path, "env": os.environ, "prints": folder}
    process = Forked(["run", *words, "--out", str(run)], **how)
    try:
        assert wait_until(lambda: "\ntrial 2" in process.said()[1])
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate()
    finally:
        process.kill()
    held.unlink()
    assert process.returncode == 128 + signal.SIGTERM
    assert f"continue with `batchwright run --resume --out {run} {code}`" in told
    first = read_record(run / "profile.json", Profile)
    assert first.trials_open
    done = forked.command("run", "--resume", "--out", run, code, **how)
    assert done.returncode == 0, done.stderr
    assert "has all but trials, and 1 trial: going on with them" in done.stderr
    assert "local batch" not in done.stderr.partition("plan: ")[0]
    whole = read_record(run / "profile.json", Profile)
    assert whole.trials[:1] == first.trials
    assert whole.steps == first.steps
    assert not whole.trials_open


# ---------------------------------------------------------------------- two workers by themselves


def _after_commands(rank: int, folder: Path) -> dict[str, object]:
    os.environ["BATCHWRIGHT_CACHE"] = str(folder)
    job = Job(device="cpu", precision="float32", resolutions=(8,))
    group = Group(torch.device("cpu"), 300)
    executor = Executor(job, group, (1, 2), "as it is")
    alone = commands.Visit(workers=1, resolution=8, local_batch_size=8, seconds=0.05, most_steps=2)
    both = alone.model_copy(update={"workers": 2})
    executor.carry_out(commands.Prepare(workers=2, precision="float32"))
    threads = []
    for command in (both, alone, both):
        if rank < command.workers:
            executor.carry_out(command)
            threads.append(torch.get_num_threads())
    exchanged = [
        executor.carry_out(
            commands.Exchange(operation=operation, workers=2, bytes=4000, seconds=0.01)
        )
        for operation in ("all-reduce", "push-pull")
    ]
    weights = [p.detach().clone() for p in executor._bench.network.parameters()]
    group.close()
    return {"weights": weights, "threads": threads, "operations": exchanged}


def test_workers_that_sat_out_take_up_the_weights_of_those_that_did_not(tmp_path, crew):
    first, second = crew.together(_after_commands, tmp_path, workers=2)
    pairs = zip(first["weights"], second["weights"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "the workers' weights went apart"
    few, all_ = first["threads"][0], first["threads"][1]
    assert few <= all_
    assert first["threads"] == [few, all_, few]
    assert [time.operation for time in first["operations"]] == ["all-reduce", "push-pull"]
    assert [time.workers for time in first["operations"]] == [2, 2]


FREE, MODELS = (8 * 2**30, 5 * 2**30), ("invented 2", "invented 1")
BOTH = {"memory_bytes": FREE[1], "device_name": MODELS[0], "other_devices": (MODELS[1],)}


def _prepared(rank: int, folder: Path) -> list[dict[str, object]]:
    """What each worker tells, of a job's step and of one of the user's own."""
    os.environ["BATCHWRIGHT_CACHE"] = str(folder)
    command = commands.Prepare(workers=2, precision="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_memory", lambda device, workers: FREE[rank])
        patch.setattr(executors, "device_name", lambda device: MODELS[rank])
        job = Job(device="cpu", precision="float32", resolutions=(8,))
        group = Group(torch.device("cpu"), 300)
        told = [Executor(job, group, (2,), "as it is").carry_out(command)]
        group.close()
        layer = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(inputs: torch.Tensor) -> None:
            layer(inputs).sum().backward()
            optimizer.step()

        own = OwnStep(step, lambda size: torch.ones(size, 4), None, 100, 300)
        told.append(own.carry_out(command))
        own.group.close()
    return [one.model_dump(include=BOTH.keys()) for one in told]


def test_the_worker_with_the_least_memory_sets_the_limit_and_other_devices_are_told(tmp_path, crew):
    """That of worker 0 was the limit: on a smaller card, or one that others use, it ran out."""
    assert crew.together(_prepared, tmp_path, workers=2) == [[BOTH, BOTH]] * 2


def test_a_probe_says_that_devices_are_unlike(tmp_path, monkeypatch):
    def measure(controller: Controller) -> Profile:
        controller._visitor.prepare(seconds=0)
        return make_profile()

    monkeypatch.setattr(Controller, "measure", measure)
    for part in (executors, own_step):
        monkeypatch.setattr(part, "devices", lambda group, neighbours: BOTH)
    said = []
    job = job_of(launch="in-process", workers=1)
    probe(job, tmp_path, tell=said.append)
    layer = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(inputs: torch.Tensor) -> None:
        layer(inputs).sum().backward()
        optimizer.step()

    own_step.probe_step(step, lambda size: torch.ones(size, 4), None, 100, {}, tell=said.append)
    assert len(said) == 2
    for line in said:
        assert line.startswith("workers have unlike devices (invented 2, invented 1)")
        assert line.endswith("the memory of the one that has least, 5.00 GiB")


def test_a_stop_signal_during_the_last_command_ends_the_probe(tmp_path, monkeypatch):
    monkeypatch.setattr("batchwright.probing.probe.Workers", lambda *_: nullcontext())
    with (
        pytest.raises(Interrupted, match="SIGTERM"),
        measuring(Job(device="cpu", workers=2), tmp_path, [2]),
    ):
        signal.raise_signal(signal.SIGTERM)
