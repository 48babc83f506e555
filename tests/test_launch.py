"""Worker processes: how they end, what is said about it, and that none is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

import kept_network
from batchwright.distributed import launch, launch_with_server, worker_processes
from batchwright.distributed.exit_reports import leave_report, raise_failure, stopped_where
from batchwright.distributed.launch import AllTogether, run_workers
from batchwright.errors import (
    BatchwrightError,
    Interrupted,
    JobError,
    LostWorkerError,
    WorkerError,
)
from batchwright.planning.planner import plan_without_profile
from batchwright.records import Plan
from batchwright.records.documents import read_record, write_record
from batchwright.workflows import verbs
from batchwright.workload.data.sources import open_data
from forked import Forked
from held_network import hold, release
from samples import make_job, make_network
from test_session import summary_in

pytestmark = pytest.mark.slow

WORK = """
import os, signal, sys, time
from pathlib import Path
from batchwright.errors import DataError, LostWorkerError
from batchwright.distributed.processes import worker_main

rank = int(os.environ["RANK"])

def work():
    what, folder = sys.argv[1:]
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    with Path(folder, f"starts{rank}").open("a") as starts:
        starts.write("x")
    with Path(folder, f"times{rank}").open("a") as times:
        times.write("{BATCHWRIGHT_STARTED} {BATCHWRIGHT_STARTED_AGAIN}\\n".format_map(os.environ))
    if what == "well":
        return
    if what == "killed once" and Path(folder, f"starts{rank}").read_text() != "x":
        return
    if what == "killed with a loader" and rank == 0 and Path(folder, "starts0").read_text() == "x":
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        while not Path(folder, "told").exists():
            time.sleep(0.01)
        time.sleep(1)
        os._exit(0)
    if what == "killed with a loader":
        return
    if what == "lost" and rank == 0:
        while not Path(os.environ["BATCHWRIGHT_ERRORS"], "rank1.json").exists():
            time.sleep(0.01)
        raise LostWorkerError("lost contact with another worker")
    if what == "loss first":
        ready = Path(folder, "ready")
        if rank == 0:
            while not ready.exists():
                time.sleep(0.01)
            raise LostWorkerError("lost contact with another worker")
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        ready.touch()
        time.sleep(100)
    if rank == 0:
        time.sleep(100)
    while int(os.environ["WORLD_SIZE"]) > 1 and not Path(folder, "pid0").exists():
        time.sleep(0.01)
    if what.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "ends":
        print("last words", file=sys.stderr)
        sys.exit(3)
    if what == "refuses":
        raise DataError("image 7.png is unreadable")
    raise ValueError("no such\\nthing")

worker_main(work)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Runs a kind of work in two workers; the list gets a mark at each poll."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "work_module.py").write_text(WORK)
    (tmp_path / "logs").mkdir()
    paths = [str(tmp_path / "modules"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    polled = []

    def call(what, module="work_module", **options):
        run_workers(
            module,
            [what, str(tmp_path)],
            workers=2,
            threads=1,
            folder=tmp_path / "logs",
            poll=lambda: polled.append(1),
            **options,
        )
        return polled

    yield call
    assert wait_until(lambda: not processes_naming(tmp_path))


def processes_naming(folder):
    """Numbers of the processes whose command line names a folder, or that print into it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            prints = (path / "fd/1").readlink().is_relative_to(folder)
            if prints or str(folder).encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            pass  # it ended meanwhile
    return [number for number in found if number != os.getpid()]


def wait_until(true, seconds=300):
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


# ----------------------------------------------------------------------------- how workers can end


def test_ends_one_after_another_are_each_told_as_they_are(work, tmp_path):
    """In one folder: an own error on one line, nothing where all is well, a kill by its name."""
    with pytest.raises(WorkerError, match=r"^worker 1: ValueError: no such thing$") as caught:
        work("raises")
    assert caught.value.exit_code == 1
    assert list((tmp_path / "logs").glob("rank*.json"))
    assert work("well")
    said = r"^worker 1 was killed by SIGKILL \(out of memory\?\); logs are in "
    with pytest.raises(WorkerError, match=said) as caught:  # not the earlier report
        work("killed")
    assert caught.value.exit_code == 1
    assert not any(Path(f"/proc/{(tmp_path / f'pid{r}').read_text()}").exists() for r in range(2))


def test_a_refusal_is_told_as_it_is(work):
    with pytest.raises(BatchwrightError, match=r"^image 7\.png is unreadable$") as caught:
        work("refuses")
    assert caught.value.exit_code == 2


def test_a_worker_that_just_ends_is_told_with_its_last_words(work):
    with pytest.raises(WorkerError, match="last words; logs are in "):
        work("ends")


def test_a_module_that_is_not_there_is_told(work):
    with pytest.raises(WorkerError, match="No module named no_such_module"):
        work("well", module="no_such_module")


def test_all_are_started_again_after_one_was_killed_and_it_is_said(work, tmp_path):
    told = []
    work("killed once", restarts=3, tell=told.append)
    assert told == ["worker 1 was killed by SIGKILL; all were started again (1 of 3)"]
    times = [line.split() for line in (tmp_path / "times1").read_text().splitlines()]
    (begun, first), (same, second) = (map(float, line) for line in times)
    assert begun == same <= first < second


def test_they_meet_again_at_a_port_that_a_loader_of_a_killed_worker_still_holds(work, tmp_path):
    """Forked off it, it has the socket, too, and ends once it sees that its worker has."""

    def tell(line):
        told.append(line)
        (tmp_path / "told").touch()

    told = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    work("killed with a loader", restarts=1, port=port, tell=tell)
    assert told == ["worker 0 was killed by SIGKILL; all were started again (1 of 1)"]


def test_they_are_not_started_again_for_ever(work, capfd):
    with pytest.raises(WorkerError, match="worker 1 was killed by SIGKILL"):
        work("killed", restarts=1)
    assert (
        "worker 1 was killed by SIGKILL; all were started again (1 of 1)" in capfd.readouterr().err
    )


def test_an_error_of_its_own_ends_them_at_once_and_not_the_one_that_lost_it_is_named(
    work, tmp_path
):
    with pytest.raises(WorkerError, match=r"^worker 1: ValueError: no such thing$"):
        work("lost", restarts=3)
    assert (tmp_path / "starts1").read_text() == "x"


def test_a_kill_that_is_seen_after_the_loss_that_it_causes_is_told(work):
    with pytest.raises(WorkerError, match=r"^worker 1 was killed by SIGKILL"):
        work("loss first")


def test_a_port_in_use_is_refused_before_anything_starts(work):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=rf"port={port} cannot be used .*in use.*or port=0"):
            work("well", port=port)
        assert not processes_naming("work_module")
    work("well", port=port)


def test_a_stop_signal_ends_the_wait_for_a_port_of_workers_to_start_again(tmp_path):
    """A loader process of a killed worker holds the port, and Ctrl-C comes after the kill."""
    children = MagicMock()
    children.running.return_value = False
    children.failures.return_value = {0: -signal.SIGKILL}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        workers = AllTogether(
            children,
            tmp_path,
            workers=1,
            port=port,
            restarts=1,
            tell=lambda _: workers.noted.append(signal.SIGINT),
        )
        assert workers._look() is False
    children.start.assert_not_called()


def test_a_signal_is_passed_on_and_ends_the_wait(work, tmp_path):
    def signal_once():
        if (tmp_path / "pid0").exists() and not sent:
            sent.append(1)
            os.kill(os.getpid(), signal.SIGUSR1)

    sent = []
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Interrupted) as caught:
        run_workers(
            "work_module",
            ["waits", str(tmp_path)],
            workers=1,
            threads=1,
            folder=tmp_path / "logs",
            poll=signal_once,
        )
    assert caught.value.exit_code == 138
    assert signal.getsignal(signal.SIGUSR1) is before


class Lingering:
    """In place of a worker's process, in simulated time: asked to end, it takes ``seconds``."""

    def __init__(self, seconds, noted, second_at):
        self.seconds, self.noted, self.second_at = seconds, noted, second_at
        self.now, self.end = 0.0, None

    def poll(self):
        return None if self.end is None or self.now < self.end else 1

    def send_signal(self, number):
        self.end = self.now + (0 if number == signal.SIGKILL else self.seconds)

    def wait(self):
        assert self.poll() is not None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.second_at is not None and self.now > self.second_at:
            self.noted.append(signal.SIGINT)
            self.second_at = None


@pytest.mark.parametrize(
    ("seconds", "second_at", "ended", "said"),
    [
        (40, None, 40, ""),
        (1000, None, 60, ", and killed when 60 s had passed: what was done since the last"),
        (40, 5, 5, ", and killed when a second one came: what was done since the last"),
    ],
)
def test_a_stop_leaves_a_minute_for_step_and_checkpoint_unless_a_second_comes(
    tmp_path, monkeypatch, seconds, second_at, ended, said
):
    noted = [signal.SIGINT]
    process = Lingering(seconds, noted, second_at)
    monkeypatch.setattr(worker_processes, "time", process)
    workers = worker_processes.Children(["unused"], threads=1, folder=tmp_path, environment={})
    workers._processes[0] = process
    run = launch.AllTogether(workers, tmp_path, workers=1)
    run.noted = noted
    run._stop()
    told = run.killed
    assert told.startswith(said)
    assert bool(told) == bool(said)
    assert process.now == pytest.approx(ended, abs=1)


@pytest.mark.parametrize(
    ("worker_seconds", "server_seconds", "said"),
    [
        (40, 40, ""),
        (40, 1000, ", and killed when 60 s had passed: what was done since the last checkpoint is"),
        (1000, 40, ", and killed when 60 s had passed"),
    ],
)
def test_a_stop_says_who_had_to_be_killed_under_a_server(
    tmp_path, monkeypatch, worker_seconds, server_seconds, said
):
    process = Lingering(worker_seconds, [signal.SIGINT], None)
    for module in (worker_processes, launch_with_server):
        monkeypatch.setattr(module, "time", process)
    workers = worker_processes.Children(["unused"], threads=1, folder=tmp_path, environment={})
    workers._processes[0] = process
    server = EndingServer(process, server_seconds)
    run = launch_with_server.WithServer(workers, tmp_path, server, workers=1)
    run.noted = process.noted
    run._stop()
    told = run.killed
    assert told.startswith(said)
    assert bool(told) == bool(said)
    assert ("lost" in told) == (server_seconds > 60)


class EndingServer:
    """A server that ends so many seconds after it was told to."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.end = clock, seconds, None

    @property
    def returncode(self):
        return None if self.end is None or self.clock.now < self.end else 0

    def terminate(self):
        self.end = self.clock.now + self.seconds

    def stop_listening(self):
        pass


# ------------------------------------------------------------------------------------ real training


NETWORK = "network=held_network:network"


@pytest.fixture
def start(tmp_path_factory, tmp_path, monkeypatch, forks):
    """Starts ``batchwright train`` on digits, two workers, two epochs of ninety steps.

    All but the first are held, so that it goes on until the test has done something.
    """
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "launch-cache"))
    started, prints = [], tmp_path / "prints"
    prints.mkdir()
    more = {"precision": "float32", "resolutions": (8,), "evaluate_epochs": 2}
    job = make_job(network=NETWORK.partition("=")[2], epochs=2, global_batch=16, **more)
    facts = open_data(job).facts
    network = make_network(name=job.network)
    plan = plan_without_profile(job, facts, network)
    stage = plan.stages[0].model_copy(update={"local_batch_sizes": (10, 6), "micro_batch_size": 10})
    plan = plan.model_copy(update={"stages": (stage,)})
    write_record(plan, tmp_path / "plan.json")
    hold(tmp_path, "run/checkpoints", 1, after=1)

    def call(*words):
        train = ["train", *map(str, words), NETWORK, "--out", str(tmp_path / "run")]
        process = Forked(train, cwd=tmp_path, env=os.environ, prints=prints)
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.communicate()
    assert wait_until(lambda: not processes_naming(tmp_path))


def lines_in(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def wait_for_a_step(process, folder, before):
    """Until the run has written a line about a step that was not there before."""

    def there():
        assert process.poll() is None, process.communicate()[1]
        new = [json.loads(line) for line in lines_in(folder)[before:]]
        return any(line["kind"] != "note" for line in new)

    assert wait_until(there)


def test_how_far_a_stopped_run_is_comes_from_its_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_ERRORS", str(tmp_path))
    assert stopped_where(tmp_path) == ""
    leave_report("lost contact with another worker", 1, secondary=True)
    monkeypatch.setenv("RANK", "1")
    leave_report("KeyboardInterrupt: 15", 143, secondary=True)
    assert stopped_where(tmp_path) == ""
    monkeypatch.setenv("RANK", "2")
    leave_report("stopped by SIGTERM after 3 epochs, 90 samples", 143, secondary=True)
    assert stopped_where(tmp_path) == " after 3 epochs, 90 samples"


def test_a_stop_signal_keeps_a_checkpoint_and_a_resume_goes_on(start, tmp_path):
    """Ctrl-C's; SIGTERM: `test_cli`, SIGUSR1: above, all noted by the same handler."""
    run = tmp_path / "run"
    process = start(tmp_path / "plan.json")
    wait_for_a_step(process, run, 0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 130, err
    release(tmp_path)
    last = err.splitlines()[-1]
    assert re.match(r"error: stopped by Ctrl-C at epoch \d, step \d+;", last), err
    assert f"continue with `batchwright run --resume --out {run} {NETWORK}`" in last
    assert "Traceback" not in err
    torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    assert not (run / "summary.json").exists()
    assert wait_until(lambda: not processes_naming(tmp_path))
    process = start("--resume", "--json")
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    assert json.loads(out)["epochs"] == 2
    summary = summary_in(run)
    assert summary.resumed == 1
    assert [epoch.epoch for epoch in summary.epochs] == list(range(2))
    assert all(epoch.samples == summary.plan.data.train_samples for epoch in summary.epochs)
    assert [epoch.val_count is not None for epoch in summary.epochs] == [False, True]


def test_a_killed_launcher_takes_its_workers_along(start, tmp_path):
    process = start(tmp_path / "plan.json")
    wait_for_a_step(process, tmp_path / "run", 0)
    assert len(processes_naming(tmp_path)) >= 3  # launcher and two workers
    process.kill()
    process.wait(timeout=500)
    assert wait_until(lambda: not processes_naming(tmp_path))


def test_what_was_killed_is_gone_on_with_at_once(start, tmp_path):
    run = tmp_path / "run"
    process = start(tmp_path / "plan.json")
    wait_for_a_step(process, run, 0)
    process.kill()
    release(tmp_path)
    process = start("--resume")  # the workers may still be ending
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    summary = summary_in(run)
    assert [epoch.epoch for epoch in summary.epochs] == list(range(2))
    assert all(epoch.samples == summary.plan.data.train_samples for epoch in summary.epochs)


def test_a_second_shell_is_refused_in_one_line_and_disturbs_nothing(start, command, tmp_path):
    run = tmp_path / "run"
    process = start(tmp_path / "plan.json")
    wait_for_a_step(process, run, 0)
    plan = (run / "plan.json").read_bytes()
    second = start("--resume", "seed=0")
    _, err = second.communicate(timeout=500)
    assert (run / "plan.json").read_bytes() == plan
    assert "holds no summary.json" in command("report", run)[2]  # readers are not kept out
    release(tmp_path)
    assert second.returncode == 2, err
    waiting, refused = err.splitlines()
    known = f"{run} is being written by process {process.pid} on {os.uname().nodename}, since 2"
    assert waiting.startswith(known)
    assert refused.startswith(f"error: {known}")
    assert refused.endswith("wait until that has ended, stop it, or name another --out")
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    epochs = [line for line in map(json.loads, lines_in(run)) if line["kind"] == "epoch"]
    assert [line["record"]["epoch"] for line in epochs] == [0, 1]


def test_a_worker_killed_while_training_is_started_again(start, tmp_path):
    process = start(tmp_path / "plan.json")
    wait_for_a_step(process, tmp_path / "run", 0)
    (victim,) = (
        number
        for number in processes_naming(tmp_path)
        if Path(f"/proc/{number}/comm").read_text() == "worker 1\n"
    )
    os.kill(victim, signal.SIGKILL)
    release(tmp_path)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    assert "worker 1 was killed by SIGKILL; all were started again (1 of 3)" in err
    assert "begun anew: there was no checkpoint yet" in err
    assert "Traceback" not in err
    summary = summary_in(tmp_path / "run")
    assert [epoch.epoch for epoch in summary.epochs] == list(range(2))
    assert all(epoch.samples == summary.plan.data.train_samples for epoch in summary.epochs)


def test_workers_that_are_started_again_do_without_the_file_of_their_first_weights(start, tmp_path):
    """It is gone by then; their words are those with which the run was begun."""
    plan, weights = read_record(tmp_path / "plan.json", Plan), tmp_path / "weights.pt"
    torch.save(kept_network.network(10).state_dict(), weights)
    keys = {"weights": str(weights), "checkpoint_steps": 1}
    write_record(
        plan.model_copy(update={"job": plan.job.model_copy(update=keys)}), tmp_path / "plan.json"
    )
    process = start(tmp_path / "plan.json")
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    assert wait_until(lambda: last.exists() or process.poll() is not None)
    weights.unlink()
    victims = (n for n in processes_naming(tmp_path) if name_of(n) == "worker 1")
    os.kill(next(victims), signal.SIGKILL)
    release(tmp_path)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    assert "worker 1 was killed by SIGKILL; all were started again (1 of 3)" in err
    assert summary_in(tmp_path / "run").resumed == 1


def name_of(number):
    return Path(f"/proc/{number}/comm").read_text().strip()


def test_a_run_whose_workers_were_killed_too_often_says_how_to_resume(tmp_path, monkeypatch):
    """As after a stop: what is lost is no error of the run's own, such as a gradient of NaN."""

    def killed(*_, **__):
        raise_failure(tmp_path, {1: -signal.SIGKILL})

    monkeypatch.setattr(verbs, "conduct", killed)
    job = make_job(launch="local", workers=2)
    plan = plan_without_profile(job, open_data(job).facts, make_network())
    with pytest.raises(LostWorkerError) as lost:
        verbs.train(plan, run_folder=tmp_path / "run")
    said = str(lost.value)
    assert said.startswith("worker 1 was killed by SIGKILL (out of memory?); logs are in ")
    assert said.endswith(f"continue with `batchwright run --resume --out {tmp_path}/run`")
