"""Training under Ray Train, on a cluster of two nodes on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import batchwright as bw
from batchwright.errors import DeadlineReached, JobError, WorkerError
from batchwright.planning.planner import make_plan, plan_without_profile
from batchwright.records import Job, Plan, RunSummary
from batchwright.records.agent_rules import not_allowed
from batchwright.records.documents import read_record, write_record
from batchwright.records.registries.launchers import STARTED_BY
from batchwright.workflows.engines import ray_train, ray_worker
from batchwright.workflows.prepare_job import data_facts
from held_network import hold, release
from samples import (
    LOCAL_BATCHES,
    make_job,
    make_memory,
    make_network,
    make_profile,
    make_step,
    make_summary,
)
from slurm import until
from test_session import make_tiny_plan

INSTALL = 'pip install "batchwright[ray]"'
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
LAST_SECONDS = 500  # on a busy machine
NETWORK, CHECKPOINT_STEPS, SMALL_EPOCHS = "held_network:network", 5, 8
# A small plan lasts three minutes with it, and a stop comes through within two steps.
HELD_SECONDS = 2

# As in `test_hosts`: weight i counts how often sample i was trained. One worker is killed.
SAMPLES, EPOCHS = 60, 12
OWN_LOOP = f"""
import os, signal, sys, time
from pathlib import Path
import torch
from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import Dataset
import batchwright as bw
from batchwright.workload.optimizers import without_compiler

class OneHot(Dataset):
    def __len__(self):
        return {SAMPLES}

    def __getitem__(self, index):
        return torch.eye({SAMPLES}, dtype=torch.float64)[index], 0

def train_loop(config):
    folder = Path(config["folder"])
    model = torch.nn.Linear({SAMPLES}, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    optimizer = without_compiler(torch.optim.SGD)(model.parameters(), lr=0.1)
    with bw.Session(model, optimizer, OneHot(), plan=folder / "plan.json",
                    run_folder=folder / "run", resume=True, loaders=0) as session:
        for epoch in session.epochs():
            for features, _ in session.batches():
                session.step(model(features).mean())
                time.sleep(0.01)
            train.report({{"epoch": epoch}})
            if epoch == 4 and session.rank == 1 and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if session.rank == 0:
            torch.save(model.weight.detach().flatten(), folder / "weights.pt")

if __name__ == "__main__":
    folder = sys.argv[1]
    TorchTrainer(
        train_loop,
        train_loop_config={{"folder": folder}},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="own", storage_path=folder + "/storage",
                             failure_config=FailureConfig(max_failures=3)),
    ).fit()
"""


# ------------------------------------------------------------------------------------ without Ray


def test_without_ray_the_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv(STARTED_BY, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobError, match=r'launch=ray needs Ray Train: pip install "batchwright\[ra'):
        bw.run(launch="ray", workers=2, run_folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"launch": "ray", "nodes": 2}, "nodes=2 with launch=ray: only launch=slurm asks for mach"),
        ({"ray": {"address": "a b"}}, "job key ray.address = 'a b': give HOST:PORT"),
        ({"ray": {"address": "ray://head:10001"}}, "job key ray.address = 'ray://head:10001'"),
        ({"ray": {"cpus_per_worker": 0}}, "job key ray.cpus_per_worker = 0"),
        ({"workers": 2, "ray": {"min_workers": 3}}, "ray.min_workers=3 of workers=2: give at most"),
    ],
)
def test_keys_that_ask_for_the_impossible_are_refused(keys, said):
    with pytest.raises(JobError, match=re.escape(said)):
        Job(**keys)


def node(cores: float, gpus: float = 0, *, alive: bool = True) -> dict[str, object]:
    return {"Alive": alive, "Resources": {"CPU": cores, "GPU": gpus}}


@pytest.mark.parametrize(
    ("keys", "workers"),
    [
        ({}, 13),
        ({"workers": 13}, 13),
        ({"ray": {"cpus_per_worker": 4}}, 2),  # no machine has two halves of another's
        ({"ray": {"cpus_per_worker": 0.1}}, 130),
        ({"ray": {"cpus_per_worker": 2, "gpus_per_worker": 1}}, 3),
    ],
)
def test_workers_are_as_many_as_the_machines_have_room_for(keys, workers):
    machines = [node(7, 8), node(6), node(8, 8, alive=False)]
    assert ray_train._workers(machines, Job(launch="ray", **keys)) == workers
    with pytest.raises(JobError, match=f"the Ray cluster has room for {workers}; give fewer"):
        ray_train._workers(machines, Job(launch="ray", **{**keys, "workers": workers + 1}))


def test_a_run_that_may_go_on_with_fewer_workers_begins_with_fewer():
    fewer = {"workers": 4, "ray": {"min_workers": 2}}
    assert ray_train._workers([node(3)], Job(launch="ray", **fewer)) == 4
    with pytest.raises(JobError, match="room for 1; give fewer"):
        ray_train._workers([node(1)], Job(launch="ray", **fewer))
    with pytest.raises(JobError, match="room for 0; give less to each"):
        ray_train._workers([node(1)], Job(launch="ray", ray={"cpus_per_worker": 2}))


def test_a_machine_without_the_run_folder_says_what_to_share(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_worker, "_SHARED_SECONDS", 0)
    token = tmp_path / "run" / "logs" / "ray" / "token"
    said = ray_worker.look(str(token), str(tmp_path))
    assert said.startswith(f"{tmp_path}/run on ")
    assert "give --out a folder on a disk that all machines of the cluster share" in said
    token.parent.mkdir(parents=True)
    token.touch()
    assert not ray_worker.look(str(token), str(tmp_path))
    assert " has no /nowhere: Python's env" in ray_worker.look(str(token), "/", "/nowhere")


@pytest.mark.parametrize(
    ("error", "why"),
    [(RuntimeError(), "RuntimeError"), (RuntimeError("lost\nModuleNotFoundError: no"), "no")],
)
def test_a_machine_that_gives_no_answer_is_named_with_the_reason(monkeypatch, tmp_path, error, why):
    pretend_ray(monkeypatch)
    place = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", place)
    asked = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: None))

    def get(*_, **__):
        raise error

    machine = {"Alive": True, "NodeID": "a", "NodeManagerHostname": "node1"}
    ray = SimpleNamespace(nodes=lambda: [machine], remote=lambda _: asked, get=get)
    with pytest.raises(JobError, match=rf"^node1 cannot take part in the run: .*{why}; install"):
        ray_train._check_machines(ray, beside_ray(tmp_path, ""))


def test_a_gpu_is_asked_for_by_the_key_that_reserves_it(monkeypatch, tmp_path):
    monkeypatch.delenv(STARTED_BY, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobError, match=r"ray.gpus_per_worker=0: give ray.gpus_per_worker=1"):
        bw.run(launch="ray", workers=2, device="cuda", run_folder=tmp_path / "run")


def test_gpus_that_no_worker_reserves_are_told():
    machines = [node(7, 8), node(6), node(8, 8, alive=False)]
    for keys in ({"device": "cpu"}, {"ray": {"gpus_per_worker": 1}}):
        assert not ray_train._unused_gpus(machines, Job(launch="ray", **keys))
    assert not ray_train._unused_gpus(machines[1:], Job(launch="ray"))
    assert ray_train._unused_gpus(machines, Job(launch="ray")) == (
        "ray: the workers compute on the CPU, and the cluster has 8 GPUs: "
        "ray.gpus_per_worker=1 gives each worker one"
    )


def pretend_ray(monkeypatch, *, rank=0, size=1, said=lambda own: own):
    """Stand in for Ray around one worker; ``said`` is what it hears from the first."""
    ranks = SimpleNamespace(
        get_world_rank=lambda: rank,
        get_world_size=lambda: size,
        get_local_rank=lambda: rank,
        get_local_world_size=lambda: size,
    )
    train = ModuleType("ray.train")
    train.get_context = lambda: ranks
    train.get_preemption_info = lambda: None
    modules = {
        "ray": SimpleNamespace(train=train),
        "ray.train": train,
        "ray.train.collective": SimpleNamespace(broadcast_from_rank_zero=said),
        "ray.util": SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def words_of_the_first(*words):
    """What a worker hears: where to meet, the words, and the last of them again and again."""
    coming = iter([("127.0.0.1", 29500), *words, *[words[-1]] * 1000])
    return lambda _own: next(coming)


def beside_ray(folder, code):
    """A worker's program, and its folder."""
    told = ray_worker.Work((sys.executable, "-c", code), str(folder), str(folder), 0)
    told.logs.mkdir(parents=True)
    return told


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def test_a_killed_worker_is_told_to_ray_while_the_first_one_waits_for_it(monkeypatch, tmp_path):
    """Before they have met, the first would wait for it for two minutes."""
    pretend_ray(monkeypatch, rank=1, size=2, said=words_of_the_first((None, False, False)))
    monkeypatch.setattr(ray_worker, "_STEP_SECONDS", 0.02)
    with pytest.raises(WorkerError, match=r"worker 1 on .* was killed"):
        ray_worker._carry_out(beside_ray(tmp_path, KILLED), frozenset())


WAITS = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("code", "said", "line"),
    [
        (WAITS, (1, False, False), "worker 1 on .* fell silent"),
        ("raise SystemExit(1)", (None, False, False), "worker 0 fell silent"),
    ],
    ids=["another", "the first"],
)
def test_a_worker_that_stands_still_is_told_to_ray(monkeypatch, tmp_path, code, said, line):
    """Otherwise the run failed as if by an error of its own, or waited for ever."""
    pretend_ray(monkeypatch, rank=1, size=2, said=words_of_the_first(said))
    for seconds in ("_STEP_SECONDS", "_LAST_SECONDS", "_STUCK_SECONDS"):
        monkeypatch.setattr(ray_worker, seconds, 0.02)
    with pytest.raises(WorkerError, match=line):
        ray_worker._carry_out(beside_ray(tmp_path, code), frozenset())


@pytest.mark.parametrize("code", [0, 2])
def test_a_worker_that_ends_late_repeats_no_run_that_has_ended(monkeypatch, tmp_path, code):
    said = words_of_the_first((code, False, False))
    pretend_ray(monkeypatch, rank=1, size=2, said=said)
    for seconds in ("_STEP_SECONDS", "_LAST_SECONDS"):
        monkeypatch.setattr(ray_worker, seconds, 0.02)
    ended, _ = ray_worker._carry_out(beside_ray(tmp_path, WAITS), frozenset())
    assert ended == code


def test_ray_starts_nothing_again_for_a_worker_that_is_killed_while_the_run_stops(
    monkeypatch, tmp_path
):
    told = beside_ray(tmp_path, WAITS)

    def killed(process, _number):
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)

    monkeypatch.setattr(subprocess.Popen, "send_signal", killed)
    said = words_of_the_first((None, False, True), (143, False, True))
    pretend_ray(monkeypatch, rank=1, size=2, said=said)
    monkeypatch.setattr(ray_worker, "_STEP_SECONDS", 0.02)
    assert ray_worker._carry_out(told, frozenset()) == (143, frozenset())


def test_a_stop_is_heard_by_workers_that_ray_has_started_again(tmp_path):
    told = beside_ray(tmp_path, "")
    assert not ray_worker._stop(told)
    (told.logs / ray_worker.STOP).touch()
    assert ray_worker._stop(told)
    assert not (told.logs / ray_worker.STOP).exists()  # so the command knows
    assert ray_worker._stop(told)


def test_a_cluster_that_was_started_inside_of_torchrun_has_no_agent_to_meet_at(
    monkeypatch, tmp_path
):
    """Worker 0 left the store to an agent that is not there, and all waited for it."""
    pretend_ray(monkeypatch)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    code = "import os; print([name for name in os.environ if 'ELASTIC' in name])"
    told = beside_ray(tmp_path, code)
    assert ray_worker._start(told, 0).wait() == 0
    assert (told.logs / "worker-0.log").read_text() == "[]\n"


def test_why_ray_has_given_up_is_said_in_a_line_with_how_to_go_on(tmp_path):
    """Ray's own message is a traceback, of which the first 300 characters say nothing."""
    pretended = f"""Training failed due to worker errors:
[Rank 1 Error Snippet]:
Traceback (most recent call last):
  File "{ray_worker.__file__}", line 103, in work
    code, noticed = _carry_out(told, leaving)
                    ^^^^^^^^^^^^^^^^^^^^^^^^^
{WorkerError.__module__}.{WorkerError.__qualname__}: worker 1 on node2 was killed
"""

    def fit():
        raise RuntimeError(pretended)

    told = beside_ray(tmp_path, "")
    with pytest.raises(WorkerError) as ended:
        ray_train._fit(SimpleNamespace(fit=fit), told.logs, "batchwright run --resume --out a")
    assert ended.value.exit_code == 1
    assert str(ended.value) == (
        "the run under Ray has failed (worker 1 on node2 was killed, and `restarts` allows no "
        f"other start), its logs are in {told.logs}; continue with `batchwright run --resume "
        "--out a`"
    )


def test_the_exit_code_that_a_network_disk_shows_late_is_found(monkeypatch, tmp_path):
    """Such a disk says for up to a minute that a file is missing, unless the folder is listed."""
    told, listing = beside_ray(tmp_path, ""), os.scandir
    late = told.logs / "late"

    def list_anew(folder="."):
        if late.exists():
            late.rename(told.logs / ray_worker.EXIT_CODE)
        return listing(folder)

    monkeypatch.setattr(os, "scandir", list_anew)
    ray_train._fit(SimpleNamespace(fit=lambda: late.write_text("0")), told.logs, "again")


def test_the_end_at_the_goals_deadline_is_no_failure(tmp_path):
    told = beside_ray(tmp_path, "")
    ended = SimpleNamespace(fit=lambda: (told.logs / ray_worker.EXIT_CODE).write_text("124"))
    with pytest.raises(DeadlineReached, match=r"continue with `again` and a later one$"):
        ray_train._fit(ended, told.logs, "again")


@pytest.mark.parametrize(("gpus", "seen"), [(0, ""), (1, "3")])
def test_a_process_beside_a_worker_sees_the_gpus_that_it_reserves(
    monkeypatch, tmp_path, gpus, seen
):
    pretend_ray(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    code = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    told = ray_worker.Work((sys.executable, "-c", code), str(tmp_path), str(tmp_path), gpus)
    told.logs.mkdir(parents=True)
    assert ray_worker._start(told, 0).wait() == 0
    assert (told.logs / "worker-0.log").read_text() == f"{seen!r}\n"


def test_a_run_that_was_lost_after_its_training_gets_its_report_by_a_resume(
    monkeypatch, tmp_path, undrawn
):
    monkeypatch.delenv(STARTED_BY, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)  # nothing is left for it to do
    summary = make_summary(run_folder=str(tmp_path))
    plan = summary.plan.model_copy(
        update={"job": summary.plan.job.model_copy(update={"launch": "ray"})}
    )
    write_record(plan, tmp_path / "plan.json")
    write_record(summary.model_copy(update={"plan": plan}), tmp_path / "summary.json")
    bw.run(run_folder=tmp_path, resume=True)
    assert (tmp_path / "report.html").exists()


def test_an_agent_starts_nothing_under_ray():
    assert not_allowed((), Job(launch="ray")).startswith("launch=ray: an agent trains on its own")


# --------------------------------------------------------------------------------------- real Ray


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two nodes with a core each, at the address of RAY_ADDRESS."""
    pytest.importorskip("ray.train.torch", reason=INSTALL)
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray")  # its sockets' names must be short
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)  # the cluster's address goes there
    found = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(STARTED_BY, raising=False)
        for name, value in {
            "PYTHONPATH": f"{Path(__file__).parent}:{found}",
            "OMP_NUM_THREADS": "1",
            "RAY_TRAIN_CALLBACKS": "ray_parts.Kept",
            "TEST_RAY_REPORTS": f"{folder}/reports",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
            "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # others' tests may fill the memory
        }.items():
            environment.setenv(name, value)
        head = {**NODE, "include_dashboard": False, "temp_dir": folder}
        running = Cluster(initialize_head=True, head_node_args=head)
        try:
            running.add_node(**NODE)
            environment.setenv("RAY_ADDRESS", running.address)
            yield running
        finally:
            running.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def two_nodes(cluster):
    """The cluster, which a test before may have left with another number of nodes."""
    while not cluster.worker_nodes:
        cluster.add_node(**NODE)
    return cluster


class Command:
    """A program beside the cluster; it is killed where it does not end."""

    def __init__(self, *words: object, folder: Path) -> None:
        self._log = folder / "command.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, words)], cwd=folder, stdout=log, stderr=log
            )

    def said(self) -> str:
        """What it has printed until now."""
        return self._log.read_text()

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it has printed."""
        try:
            code = self.process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            self.process.kill()
            self.process.wait()
        return code, self.said()


@pytest.fixture
def start(two_nodes, tmp_path):
    started: list[Command] = []

    def command(*words: object) -> Command:
        started.append(Command(*words, folder=tmp_path))
        return started[-1]

    yield command
    for one in started:
        one.process.kill()
        one.process.wait()


def small_plan(folder: Path) -> None:
    named = {"launch": "ray", "network": NETWORK, "checkpoint_steps": CHECKPOINT_STEPS}
    job = Job(**named, device="cpu", workers=2, epochs=SMALL_EPOCHS)
    plan = plan_without_profile(job, data_facts(job), make_network(name=job.network))
    write_record(plan, folder / "plan.json")


def measured_plan(folder: Path, **keys: object) -> None:
    """A plan for two workers, and the profile that it was made from, of a step's made-up times."""
    named = {"launch": "ray", "network": NETWORK, "checkpoint_steps": CHECKPOINT_STEPS}
    job = make_job(**named, precision="float32", resolutions=(8,), **keys)
    profile = make_profile(
        job=job,
        data=data_facts(job),
        network=make_network(name=job.network),
        steps=tuple(make_step(2, batch, 8) for batch in LOCAL_BATCHES),
        memory=tuple(make_memory(2, batch, 8) for batch in LOCAL_BATCHES),
    )
    write_record(profile, folder / "profile.json")
    write_record(make_plan(profile), folder / "plan.json")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["model"]


TRAIN = ("-m", "batchwright", "train")
INTO_RUN = ("--out", "run", f"network={NETWORK}")


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """The folder of a run on both nodes, and of its plan."""
    folder = tmp_path_factory.mktemp("undisturbed")
    small_plan(folder)
    code, said = Command(*TRAIN, "plan.json", *INTO_RUN, folder=folder).end()
    assert code == 0, said
    return folder


@pytest.mark.slow
def test_epochs_are_reported_by_the_first_worker(undisturbed):
    lines = Path(os.environ["TEST_RAY_REPORTS"]).read_text().splitlines()
    first, other = zip(*map(json.loads, lines), strict=True)
    summary = read_record(undisturbed / "run" / "summary.json", RunSummary)
    losses = [summary.epochs[one["epoch"]].train_loss for one in first]
    assert [one["train/loss"] for one in first] == pytest.approx(losses)
    assert first[-1]["epoch"] == SMALL_EPOCHS - 1
    assert not any(other)


@pytest.mark.slow
def test_a_run_probes_plans_and_trains_on_the_clusters_workers(start, tmp_path):
    words = ("run", "launch=ray", "epochs=2", "probe.budget=1", "probe.learning=0")
    code, said = start("-m", "batchwright", *words, "--out", "run", "--json").end()
    assert code == 0, said
    assert said.count("epoch 2/2: ") == 1
    assert "ray: 2 workers, logs in " in said
    summary = read_record(tmp_path / "run" / "summary.json", RunSummary)
    assert summary.plan.workers == 2
    assert [one.samples for one in summary.epochs] == [1437, 1437]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lost", "announced"])
def test_a_run_whose_node_goes_and_comes_ends_with_the_same_weights(
    two_nodes, undisturbed, start, tmp_path, how
):
    hold(tmp_path, "run", HELD_SECONDS, after=CHECKPOINT_STEPS)
    command = start(*TRAIN, undisturbed / "plan.json", *INTO_RUN)
    until((tmp_path / "run" / "checkpoints" / "last.pt").exists, "a checkpoint")
    gone = next(iter(two_nodes.worker_nodes))
    if how == "announced":
        drain(two_nodes, gone)
        two_nodes.worker_nodes.remove(gone)
        log = tmp_path / "run" / "logs" / "ray" / "worker-0.log"
        until(lambda: "stopped by SIGTERM" in log.read_text(), "a stop")
    else:
        two_nodes.remove_node(gone, allow_graceful=False)
    two_nodes.add_node(**NODE)
    release(tmp_path)
    code, said = command.end()
    gone.kill_all_processes(check_alive=False)
    assert code == 0, said
    assert read_record(tmp_path / "run" / "summary.json", RunSummary).resumed
    for name, value in weights(undisturbed / "run").items():
        assert torch.equal(value, weights(tmp_path / "run")[name]), name


def drain(cluster, node) -> None:
    """Say that a node goes in some seconds, as a cloud's notice before a preemption does."""
    subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *("--address", cluster.address, "--node-id", node.node_id),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"),
            *("--deadline-remaining-seconds", "20"),
        ],
        check=True,
        timeout=LAST_SECONDS,
    )


@pytest.mark.slow
def test_a_run_goes_on_with_the_workers_that_are_there_by_a_plan_for_these(
    two_nodes, start, tmp_path
):
    """One of two nodes goes, and another comes, which Ray looks for once a minute."""
    measured_plan(tmp_path, ray={"min_workers": 1}, epochs=120)
    planned = read_record(tmp_path / "plan.json", Plan).stages[0]
    hold(tmp_path, "run", 0.2, after=CHECKPOINT_STEPS)  # another plan begins with an epoch
    command = start(*TRAIN, "plan.json", "--profile", "profile.json", *INTO_RUN)
    until((tmp_path / "run" / "checkpoints" / "last.pt").exists, "a checkpoint")
    two_nodes.remove_node(next(iter(two_nodes.worker_nodes)))
    again = r"planned again from epoch \d+ on: (\d)"
    until(lambda: re.findall(again, command.said()) == ["1"], "a plan for one worker")
    two_nodes.add_node(**NODE)
    until(lambda: re.findall(again, command.said()) == ["1", "2"], "a plan for two workers")
    release(tmp_path)
    code, said = command.end()
    assert code == 0, said
    summary = read_record(tmp_path / "run" / "summary.json", RunSummary)
    assert summary.resumed >= 2
    assert {one.samples for one in summary.epochs} == {1437}
    first, fewer, rest = summary.plan.stages
    assert first.local_batch_sizes == rest.local_batch_sizes == planned.local_batch_sizes
    assert fewer.workers == 1
    assert fewer.global_batch_size < planned.global_batch_size
    alone = summary.epochs[first.epochs + fewer.epochs - 2].workers
    assert [one.local_batch_size for one in alone] == [fewer.global_batch_size]
    assert len(summary.epochs[-1].workers) == 2
    assert f"planned again from epoch {first.epochs + 1} on: 1 worker, global batch" in said
    kept = tmp_path / "run" / f"plan-before-epoch-{first.epochs + 1}.json"
    assert read_record(kept, Plan).stages[0].local_batch_sizes == planned.local_batch_sizes


@pytest.mark.slow
def test_a_stop_is_a_checkpoint_and_the_run_goes_on_later(start, tmp_path):
    small_plan(tmp_path)
    hold(tmp_path, "run/metrics.jsonl", HELD_SECONDS)
    command = start(*TRAIN, "plan.json", *INTO_RUN)
    until((tmp_path / "run" / "metrics.jsonl").exists, "an epoch")
    command.process.send_signal(signal.SIGINT)
    code, said = command.end()
    assert code == 130, said
    again = f"batchwright run --resume --out run network={NETWORK}"
    assert f"continue with `{again}`" in said
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()
    release(tmp_path)
    code, said = start("-m", *again.split()).end()
    assert code == 0, said
    assert len(read_record(tmp_path / "run" / "summary.json", RunSummary).epochs) == SMALL_EPOCHS


@pytest.mark.slow
def test_what_cannot_be_is_refused_in_a_line(two_nodes, tmp_path, capfd):
    cases = [
        ({"workers": 3}, "the Ray cluster has room for 2; give fewer workers, or less to each"),
        ({"ray": {"gpus_per_worker": 1}}, "the Ray cluster has room for 0; give less to each, or"),
        ({"ray": {"address": "127.0.0.1:9"}}, "no Ray cluster at 127.0.0.1:9: ConnectionRefused"),
        ({"data": "imagefolder:nowhere"}, "the run under Ray has failed (exit code 2), its logs"),
    ]
    for number, (keys, said) in enumerate(cases):
        with pytest.raises(bw.errors.BatchwrightError, match=re.escape(said)) as refused:
            bw.run(launch="ray", run_folder=tmp_path / str(number), **keys)
        assert refused.value.exit_code == 2
    assert re.search(r"^error: .*nowhere", capfd.readouterr().err, re.MULTILINE)


@pytest.mark.slow
def test_a_session_in_a_train_loop_of_ones_own_survives_a_killed_worker(start, tmp_path):
    plan = make_tiny_plan((6, 6), epochs=EPOCHS, samples=SAMPLES, checkpoint_steps=1)
    write_record(plan, tmp_path / "plan.json")
    (tmp_path / "own.py").write_text(OWN_LOOP, encoding="utf-8")
    code, said = start("own.py", tmp_path).end()
    assert code == 0, said
    assert (tmp_path / "killed").exists()
    counts = torch.load(tmp_path / "weights.pt") / -0.1
    even = torch.full((SAMPLES,), counts[0].item(), dtype=torch.float64)
    torch.testing.assert_close(counts, even)
    summary = read_record(tmp_path / "run" / "summary.json", RunSummary)
    assert summary.resumed == 1
    assert [one.samples for one in summary.epochs] == [SAMPLES] * EPOCHS


@pytest.mark.slow
def test_the_pages_example_of_tune_finds_the_best_job_keys(start, tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "ray.md").read_text("utf-8")
    (script,) = re.findall(r"```python\n(import [^`]*tune\.Tuner.*?)```", page, re.DOTALL)
    short = script.replace("/shared", str(tmp_path)).replace('"budget": 5', '"budget": 1')
    (tmp_path / "tuned.py").write_text(short, encoding="utf-8")
    code, said = start("tuned.py").end()
    assert code == 0, said
    runs = [read_record(path, RunSummary) for path in tmp_path.glob("trials/*/summary.json")]
    assert sorted(one.plan.stages[0].global_batch_size for one in runs) == [32, 128]
    accuracy = {one.plan.stages[0].global_batch_size: one.accuracy for one in runs}
    (best,) = re.findall(r"^\{'global_batch': (\d+), 'seed': 1\}$", said, re.MULTILINE)
    assert accuracy[int(best)] == max(accuracy.values())
