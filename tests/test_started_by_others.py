"""Verbs in processes that torchrun, srun or mpirun has started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import asdict, replace
from importlib import metadata
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.main import get_command

import batchwright
import forked
from batchwright.cli.commands import app
from batchwright.distributed import rendezvous
from batchwright.distributed.group import Group
from batchwright.distributed.heartbeat import presence
from batchwright.distributed.joining import environments, gathering
from batchwright.distributed.joining.environments import (
    found,
    launch_name,
    note_opened,
    process_name,
    read_opened,
)
from batchwright.distributed.joining.gathering import MEETING_SECONDS, Gathering
from batchwright.distributed.processes import ENGINE_PARENT, LAUNCH, PARENT_PID
from batchwright.errors import (
    BatchwrightError,
    DeadlineReached,
    FileError,
    Interrupted,
    JobError,
    LostWorkerError,
    PlanError,
    WorkerError,
    stopped_by,
)
from batchwright.probing import together
from batchwright.probing.measure import memory
from batchwright.records import Job, KindCount, Plan, Profile, RunSummary, Sweep, run_folder
from batchwright.records.documents import read_record, write_record
from batchwright.storage import locks
from batchwright.workflows import together as verbs_together
from batchwright.workflows import verbs
from batchwright.workflows.sweep import verb as sweeps
from batchwright.workflows.sweep.sharing import own_machine, part_of
from batchwright.workflows.sweep.slots import Machine
from batchwright.workflows.together import (
    BY_ONE,
    ONCE_A_HOST,
    TOGETHER,
    arranged,
    begun_before,
    note_begun,
    places_in,
    take_part,
)
from batchwright.workflows.verbs import plan
from batchwright.workload import host
from forked import Forked
from gloo import free_port
from held_network import hold, release
from samples import with_keys
from test_hosts import BATCH, EPOCHS, SAMPLES, SCRIPT, lost_or_repeated
from test_session import make_tiny_plan

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "123456",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}


# ------------------------------------------------------------------------------- what is found


def test_what_torchrun_says():
    started = found(TORCHRUN)
    assert started is not None
    assert (started.by, started.rank, started.size) == ("torchrun", 3, 4)
    assert (started.local_rank, started.local_size) == (1, 2)
    assert (started.address, started.port) == ("node1", 29500)


def test_who_says_nothing_of_hosts_leaves_it_to_the_processes(monkeypatch):
    """As a loop of ones own, started by hand on each host, or by a launcher for several hosts."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # `adopt` adds to it
    monkeypatch.setattr(environments, "_adopted", None)
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    said = {name: word for name, word in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    started = found(said)
    assert started is not None
    assert started.local_size == 0
    environments.adopt(started)
    assert "LOCAL_WORLD_SIZE" not in os.environ  # or each would take all others for its neighbours
    assert not rendezvous.on_one_host()
    alone = replace(started, rank=0, size=1, local_rank=0)
    with Gathering(alone, versions={}, words="run"):
        assert environments.joined().local_size == 1
        assert os.environ["LOCAL_WORLD_SIZE"] == "1"


def test_what_srun_says():
    started = found(SLURM)
    assert started is not None
    assert (started.by, started.rank, started.size) == ("srun", 3, 5)
    assert (started.local_rank, started.local_size) == (0, 2)
    assert started.address == "gpu03"
    assert started.port == found({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).port
    assert started.port != found({**SLURM, "SLURM_STEP_ID": "3"}).port
    assert started.launch == "slurm:4711.2"  # the same after a requeue
    # Jobs that share a node seldom meet at one port, whatever step each is in.
    steps = [(job, step) for job in range(4711, 4811) for step in range(20)]
    ports = {
        found({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job, step in steps
    }
    assert len(ports) == len(steps)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("gpu[7]", "gpu7"),
        ("rack1-gpu[1-2]-ib,x", "rack1-gpu1-ib"),
    ],
)
def test_the_first_host_of_slurms_list(nodes, first):
    assert found({**SLURM, "SLURM_STEP_NODELIST": nodes}).address == first


@pytest.mark.parametrize(("tasks", "here"), [("3(x2)", 3), ("1,4(x7)", 4), ("5", 5), ("", 5)])
def test_tasks_of_a_host_in_slurms_words(tasks, here):
    # Where a list ends before this host the step has it all on one.
    assert found({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks}).local_size == here


def test_what_mpirun_says():
    started = found({**SLURM, **OPEN_MPI})  # mpirun may run inside of a batch job
    assert started is not None
    assert (started.by, started.rank, started.size, started.local_rank) == ("mpirun", 1, 2, 1)
    assert started.address == "localhost"
    named = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(BatchwrightError, match="mpirun -x MASTER_ADDR=HOST"):
        found(named)
    assert found({**named, "MASTER_ADDR": "node1"}).address == "node1"


def test_what_mpirun_of_mpich_and_intel_says():
    started = found({**SLURM, **MPICH})
    assert started is not None
    assert (started.by, started.rank, started.size) == ("mpirun", 1, 2)
    assert (started.local_rank, started.local_size, started.address) == (1, 2, "localhost")
    # Jobs of a batch system that share a host have a port each.
    assert started.port != found({**SLURM, **MPICH, "SLURM_JOB_ID": "4712"}).port
    assert found({**MPICH, "PBS_JOBID": "12.head"}).port != found(MPICH).port
    named = {**MPICH, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    with pytest.raises(BatchwrightError, match="mpirun -genv MASTER_ADDR HOST"):
        found(named)
    assert found({**named, "MASTER_ADDR": "node1"}).address == "node1"
    # The first two alone are those that srun sets for libraries of MPI.
    of_srun = {key: MPICH[key] for key in ("PMI_RANK", "PMI_SIZE")}
    assert found({**SLURM, **of_srun}).by == "srun"
    assert found(of_srun) is None
    alone = dict(zip(MPICH, "0101", strict=True))
    assert found(alone) is None


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {**TORCHRUN, PARENT_PID: "1"},  # workers of our own
        {**TORCHRUN, LAUNCH: "one"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        # A batch script's own shell, which has not gone through srun.
        {key: value for key, value in SLURM.items() if key != "SLURM_STEP_NUM_TASKS"},
    ],
    ids=["nothing", "own worker", "own launch", "one task", "batch script"],
)
def test_others_are_by_themselves(variables):
    assert found(variables) is None


ALONE = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def test_one_process_of_torchruns_is_a_group_that_others_may_join():
    assert found(ALONE).size == 1


def test_leftovers_of_a_single_process_hide_no_group():
    assert found({**SLURM, **ALONE}).by == "srun"
    assert found({**SLURM, **ALONE, "TORCHELASTIC_RUN_ID": "one"}).by == "torchrun"
    # Ray's daemons may be tasks of srun, whose variables its workers then have.
    assert found({**SLURM, **ALONE, ENGINE_PARENT: "1"}).by == "Ray"


@pytest.mark.parametrize(
    ("said", "threads"),
    [
        ({"SLURM_CPUS_PER_TASK": "8"}, 8),
        ({"SLURM_CPUS_PER_TASK": "8", "OMP_NUM_THREADS": "3"}, 3),
        ({}, 4),
    ],
)
def test_a_task_of_srun_computes_with_all_cores_that_it_has_to_itself(monkeypatch, said, threads):
    """Of a node with 16: eight for each of two tasks, of which Slurm lets each see its own only."""
    monkeypatch.setattr(environments, "_adopted", None)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # `adopt` adds to it
    for name in ("OMP_NUM_THREADS", "BATCHWRIGHT_THREADS"):
        os.environ.pop(name, None)
    os.environ.update(said)
    monkeypatch.setattr(host, "usable_cores", lambda: 8)
    environments.adopt(found({**srun(1, 2), **said}))
    assert host.worker_threads(int(os.environ["LOCAL_WORLD_SIZE"])) == threads


def test_the_same_words_twice_in_a_step_of_srun_are_two_runs(tmp_path, monkeypatch):
    """The job as a whole is started again; then the run goes on."""
    monkeypatch.setattr(environments, "_adopted", None)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # `adopt` adds to it
    task = replace(found({**SLURM, "SLURM_PROCID": "0"}), size=1)
    folder = tmp_path / "a"

    def begun():
        environments._name_process()
        environments.adopt(task)
        with Gathering(task, versions={}, words="run a.yaml"):
            return begun_before(folder, "a job")

    assert begun() is None
    with Gathering(task, versions={}, words="run a.yaml"):
        note_begun(folder, "a job")
    (folder / "job.yaml").touch()
    assert begun() is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert begun() == folder


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"RANK": "first"}, "RANK=first: a whole number"),
        ({"RANK": "²"}, "RANK=²: a whole number"),
        ({"RANK": "4"}, "process 4 of 4"),
        ({"LOCAL_RANK": "2"}, "2 of 2 on"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: a port is from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: a port"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR is empty"),
        (  # as SLURM_JOB_NODELIST of unlike names
            {"MASTER_ADDR": ",".join(f"node{letter}" for letter in "abcdefghijklmnop")},
            "MASTER_ADDR=nodea,nodeb,.*: no host has such a name",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(wrong, line):
    with pytest.raises(BatchwrightError, match=line):
        found({**TORCHRUN, **wrong})


def test_who_has_opened_a_folder_is_read_back(tmp_path):
    assert not read_opened(tmp_path / "run").launches
    note_opened(tmp_path / "run", {"one"}, {"a", "b"})
    opened = read_opened(tmp_path / "run")
    assert opened.by_an_earlier_start({"one", "two"}, {"c"})
    assert not opened.by_an_earlier_start({"two"}, {"c"})
    assert not opened.by_an_earlier_start({"one"}, {"b", "c"})


def test_only_what_was_asked_for_alike_is_gone_on_with(tmp_path, monkeypatch):
    """A script that a launcher has started may do several runs in a row."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(LAUNCH, raising=False)
    folder = Path("runs") / "a"
    one = replace(found(TORCHRUN), rank=0, size=1)

    def gone_on_with(words, job):
        environments._name_process()  # as another process does
        with Gathering(one, versions={}, words=words):
            return begun_before(None, job), begun_before(folder, job)

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "run_1/attempt_0/0/error.json")
    for words, job, others in (
        ("run a.yaml", "a job", (("run b.yaml", "a job"), ("run", "a job"))),
        ("run", "a job", (("run", "another"), ("run a.yaml", "a job"))),
    ):
        with Gathering(one, versions={}, words=words):
            note_begun(folder, job)
        (folder / "job.yaml").touch()
        note_opened(folder, {launch_name()}, {process_name()})  # as training does
        assert gone_on_with(words, job) == (folder, folder)
        for other in others:
            assert gone_on_with(*other) == (None, None)


def test_of_every_command_it_is_known_who_does_it():
    assert {*TOGETHER, *BY_ONE, *ONCE_A_HOST} == {*get_command(app).commands}


@pytest.mark.parametrize("verb", [*BY_ONE, *ONCE_A_HOST])
def test_what_is_wanted_once_is_done_once(monkeypatch, verb):
    done = []
    for local in "01":
        for name, value in {**TORCHRUN, "LOCAL_RANK": local}.items():
            monkeypatch.setenv(name, value)
        take_part([verb], lambda: done.append(verb))
    assert len(done) == (verb in ONCE_A_HOST)  # each host has an answer of its own


@pytest.mark.parametrize("verb", ["run", "train", "sweep"])
def test_who_is_started_again_waits_for_a_disk_to_learn_that_a_host_went_down(
    tmp_path, monkeypatch, verb
):
    """That host's worker 0 has held the folder."""
    waited = []

    def writing(folder, *, seconds):
        waited.append((folder, seconds))
        raise FileError("it is held")

    monkeypatch.setattr(run_folder, "writing", writing)
    for module in (verbs, sweeps):
        monkeypatch.setattr(module, "begun_before", lambda *_: tmp_path)
    for name in ("plan.json", "sweep.json"):
        (tmp_path / name).touch()
    begin = {
        "run": lambda: verbs.run(Job()),
        "train": lambda: verbs.train(make_tiny_plan()),
        "sweep": lambda: sweeps.sweep(Job(), grid={"warmup_epochs": [0, 5]}),
    }
    with pytest.raises(FileError, match="it is held"):
        begin[verb]()
    assert waited == [(tmp_path, locks.RESTART_SECONDS)]


def test_mpirun_starts_nothing_again():
    assert found(OPEN_MPI).launch == ""


def test_a_wait_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv(MEETING_SECONDS, "soon")
    with pytest.raises(BatchwrightError, match=f"{MEETING_SECONDS}=soon: give a number of seconds"):
        Gathering(found(TORCHRUN), versions={}, words="run")


class Store:
    """Words in a store that may go with its host; a word that does not come is an error, too."""

    def __init__(self):
        self.words, self.gone = {}, False

    def set(self, key, word):
        self._answer()
        self.words[key] = word.encode()

    def get(self, key):
        self._answer()
        if key not in self.words:
            raise RuntimeError("wait timeout after 120000ms")
        return self.words[key]

    def check(self, keys):
        self._answer()
        return all(key in self.words for key in keys)

    def _answer(self):
        if self.gone:
            raise RuntimeError("Connection reset by peer")


@pytest.fixture
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr(gathering, "_met", lambda *_: made)
    monkeypatch.setattr(gathering, "PrefixStore", lambda _, store: store)
    present = SimpleNamespace(
        close=lambda: None, misses_one=lambda **_: False, say_failed=lambda: None
    )
    monkeypatch.setattr(gathering, "RollCall", lambda *_, **__: present)
    return made


def joining(rank):
    return Gathering(replace(found(TORCHRUN), rank=rank, size=2), versions={}, words="run")


def test_a_worker_that_is_lost_between_the_meeting_and_its_first_word_is_named(store):
    with pytest.raises(LostWorkerError, match=r"^worker 1 has come to the start, and is gone or"):
        joining(0)
    store.words.clear()
    with pytest.raises(LostWorkerError, match=r"^lost contact with worker 0, which led the comm"):
        joining(1)


@pytest.mark.parametrize(
    ("looks", "counted"),
    [((1,), [15]), ((10,), [15]), ((10, 11), [15, 2])],
    ids=["the same", "the same, seen late", "a second one"],
)
def test_a_signal_that_comes_after_anothers_may_be_a_second_one(store, monkeypatch, looks, counted):
    """A launcher that signals all takes some time for it, and a busy process looks late."""
    now = [0.0]
    told = [asdict(member(rank)) for rank in range(2)]
    store.set("members", json.dumps([told, "", time.time()]))
    with joining(1) as joined:
        monkeypatch.setattr(gathering, "time", SimpleNamespace(monotonic=lambda: now[0]))
        store.set("stop/1", "15")
        for seconds in (0, *looks[:-1]):
            now[0] = seconds
            assert joined.stops() == [15]
        now[0], joined.noted = looks[-1], [2]
        assert joined.stops() == counted
        joined.noted = [2, 2]
        assert joined.stops() == [15, 2]


def test_a_second_signal_counts_without_the_store(store):
    told = [asdict(member(rank)) for rank in range(2)]
    store.set("members", json.dumps([told, "", time.time()]))
    with joining(1) as joined:
        store.set("stop/1", "15")
        assert joined.stops() == [15]
        store.gone, joined.noted = True, [15, 2]
        assert joined.stops() == joined.stops() == [15, 2]


def test_a_store_that_goes_while_a_worker_is_busy_is_told_in_a_line(store):
    told = [asdict(member(rank)) for rank in range(2)]
    store.set("members", json.dumps([told, "", time.time()]))
    store.set("order/1", json.dumps({"do": "look"}))
    with (
        joining(1) as joined,
        pytest.raises(LostWorkerError, match=r"^lost contact with worker 0 \(node0\), which led"),
    ):
        joined.follow(lambda _: setattr(store, "gone", True))
    store.gone = False
    store.set("member/1", json.dumps(told[1]))
    with joining(0) as joined:
        store.gone = True
        with pytest.raises(LostWorkerError, match=r"^the store at node1:29500 does not answer"):
            joined.order("look")


@pytest.mark.parametrize("role", ["lead", "follow"])
def test_what_torch_is_to_know_is_set_before_it_is_loaded(role):
    """Else it prints pages of its own about a store that it cannot reach, before our line."""
    code = (
        "import sys\n"
        "from batchwright.workflows import together\n"
        "together.adopt = lambda started: sys.exit(3 if 'torch' in sys.modules else 0)\n"
        f"together.{role}(None, *{['', ''] if role == 'lead' else ['']})\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


HOLDING = """
import socket, sys
with socket.create_server(("", 0)) as held:
    print(held.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def test_a_port_that_another_program_holds_is_told(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # `adopt` adds to it
    held = [sys.executable, "-c", HOLDING]
    with subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        port = int(other.stdout.readline())
        here = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        first = found({**TORCHRUN, **here, "RANK": "0", "LOCAL_RANK": "0"})
        environments.adopt(first)
        said = rf"^worker 0 \(.*\) cannot meet the others at localhost:{port} \(.*\): name another"
        with pytest.raises(BatchwrightError, match=said):
            Gathering(first, versions={}, words="run")


def test_a_process_may_hold_two_stores_at_its_port(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    one, other = (rendezvous._connect(60, serve=True) for _ in range(2))
    one.set("said", "here")
    assert other.get("said") == b"here"


def test_who_waits_says_so(monkeypatch):
    monkeypatch.setattr(gathering, "_TELL_SECONDS", 0.0)
    with (
        redirect_stderr(StringIO()) as told,  # pytest's own may lose what comes as it is read
        gathering._telling_who_waits(replace(found(TORCHRUN), rank=0), 120),
    ):
        while not told.getvalue().endswith("\n"):
            time.sleep(0.01)
    assert told.getvalue().startswith(
        "waiting for all 4 processes that torchrun has announced, 120 s at most"
    )


@pytest.mark.parametrize(
    ("visible", "devices"),
    [(1, ["cuda:0", "cuda:0"]), (2, ["cuda:0", "cuda:1"]), (8, ["cuda:0", "cuda:1"])],
    ids=["one a task", "as many as tasks", "more"],
)
def test_a_worker_takes_its_own_of_the_gpus_that_it_sees(monkeypatch, visible, devices):
    """Slurm shows each task its own alone, torchrun all of them to each."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    for asked in ("cuda", "auto"):
        assert [str(host.assigned_device(asked, rank)) for rank in (0, 1)] == devices


@pytest.mark.parametrize(
    ("places", "refused"),
    [
        ([("node1", "a"), ("node1", "b"), ("node2", "a")], None),
        (
            [("node1", "a"), ("node2", "a"), ("node2", "a")],
            r"workers 1 and 2 \(node2\) have one GPU",
        ),
        ([("node1", ""), ("node1", ""), ("node1", "")], None),  # processors may be shared
    ],
)
def test_two_workers_with_one_gpu_are_refused_with_their_host(monkeypatch, places, refused):
    told = [
        {"host": name, "gpu": gpu, "kind": "k", "device_name": "k", "memory_bytes": 6}
        for name, gpu in places
    ]
    monkeypatch.setattr(together, "own_device", lambda job: torch.device("cpu"))
    monkeypatch.setattr(together, "_own_place", lambda *_: together.Place(**told[0]))
    others = SimpleNamespace(ask=lambda *_, **__: told[1:])
    with pytest.raises(JobError, match=refused) if refused else nullcontext():
        assert len(together.ask_for_places(others, Job(), "digest")) == 3
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # the user says that they may
    found = together.ask_for_places(others, Job(), "digest")
    assert [one.memory_bytes for one in found] == ([6, 3, 3] if refused else [6, 6, 6])


@pytest.mark.parametrize(
    ("others", "each"),
    [
        ([(("here", "a"), 4), (("here", "b"), 9), (("there", "a"), 9)], 8),
        ([(("here", "b"), 9)], 12),
    ],
)
def test_workers_on_one_gpu_have_equal_parts_of_its_memory(monkeypatch, others, each):
    """Of 16 bytes each holds 4, so that 12 seem free to each."""
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(memory, "identity", lambda device: "a")
    monkeypatch.setattr(memory, "free_memory", lambda device, neighbours: 12)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4)

    def gather(value):
        return [value, *(others if isinstance(value, tuple) else [20])]

    group = SimpleNamespace(device=torch.device("cuda", 0), gather=gather)
    assert memory.memory_of_each(group, 2) == each


# -------------------------------------------------------------------------------- real processes

# Comparing number formats takes all workers a second and more: a test leaves it open, and asks.
JOB = ("data=digits", "epochs=2", "probe.budget=0.3", "probe.learning=0", "precision=float32")
JOB += ("global_batch=128",)
SERVED = with_keys(JOB[:5], "probe.budget=1")  # two batch sizes are solved for along measured times
SMALL = "network=held_network:network"


def srun(rank, size):
    """What srun says to a task, as far as is looked at."""
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
    }


def mpirun(rank, size):
    """What mpirun says."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
    }


def mpich(rank, size):
    """What mpirun of MPICH or Intel MPI says."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return dict(zip(names, map(str, (rank, size, rank, size)), strict=True))


class Started:
    """Processes that a launcher has started with ``batchwright`` and some words."""

    def __init__(self, folder, cache, prints):
        self._folder, self._cache, self._prints = folder, cache, prints
        self.processes = []

    def __call__(
        self,
        *words,
        size=2,
        says=srun,
        before=None,
        place=None,
        program="batchwright",
        **more,
    ):
        self.port, self.processes = free_port(), []
        for rank in range(size):
            own = {"MASTER_PORT": str(self.port), "MASTER_ADDR": "127.0.0.1", **says(rank, size)}
            where = self._folder if place is None else place(rank)
            front = [] if before is None else before(rank)
            mine = words[0](rank) if callable(words[0]) else words
            mine, env = [*map(str, mine)], {**environment(self._cache), **own, **more}
            if not front:
                how = {"cwd": where, "env": env, "prints": self._prints, "program": program}
                self.processes.append(Forked(mine, **how))
                continue
            self.processes.append(
                subprocess.Popen(
                    [*front, sys.executable, "-m", "batchwright", *mine],
                    cwd=where,
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return self

    def end(self):
        """Exit codes, and what each has printed on standard output and error."""
        told = [one.communicate(timeout=500) for one in self.processes]
        return [one.returncode for one in self.processes], told


def environment(cache):
    own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI"))}
    return {**own, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def start(tmp_path, tmp_path_factory, cache, forks):
    started = Started(tmp_path, cache, tmp_path_factory.mktemp("prints"))
    yield started
    for one in started.processes:
        one.kill()
        one.communicate()


def children_of(process):
    listing = Path(f"/proc/{process}/task").glob("*/children")
    return [int(one) for path in listing for one in path.read_text().split()]


def errors(told):
    return [line for _, err in told for line in err.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_torchrun_starts_all_verbs_in_a_row(tmp_path, cache, forks):
    done = forked.command(
        *("--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.2"),
        *("-m", "batchwright", "run", *with_keys(JOB, "precision=auto"), SMALL),
        *("--out", "a", "--json"),
        program=forked.TORCHRUN,
        cwd=tmp_path,
        env=environment(cache),
        prints=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workers"] == 2  # by one process alone
    assert done.stderr.count("epoch 2/2") == 1
    assert (tmp_path / "a" / "report.html").exists()
    summary = read_record(tmp_path / "a" / "summary.json", RunSummary)
    assert [one.samples for one in summary.epochs] == [1437, 1437]
    assert not list((tmp_path / "a" / "logs" / "train").iterdir())  # no process of our own


@pytest.mark.slow
def test_tasks_of_srun_probe_plan_check_and_train(start, tmp_path):
    codes, told = start("probe", *JOB, SMALL, "--out", "profile.json").end()
    assert codes == [0, 0], told
    (link,) = read_record(tmp_path / "profile.json", Profile).links
    assert link.between == "workers of a host"
    codes, told = start("plan", "profile.json", "--out", "plan.json").end()
    assert codes == [0, 0], told
    assert read_record(tmp_path / "plan.json", Plan).workers == 2
    codes, told = start("check", "plan.json", SMALL, "--points", 1, "--json").end()
    assert codes == [0, 0], told
    assert told[0][0].startswith("{")
    assert told[1] == ("", "")
    codes, told = start("train", "plan.json", SMALL, "--out", "a", says=mpich).end()
    assert codes == [0, 0], told
    assert told[1] == ("", "")
    assert read_record(tmp_path / "a" / "summary.json", RunSummary).plan.workers == 2
    codes, told = start("report", "a").end()
    assert (codes, told[1]) == ([0, 0], ("", ""))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "words"),
    [
        (
            "openmpi-bin",
            ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"),
        ),
        ("mpich", ("mpiexec.hydra", "-n", "2")),
    ],
    ids=["Open MPI", "MPICH"],
)
def test_mpirun_itself_says_to_its_processes_what_is_found(tmp_path, cache, package, words):
    """Runs by processes to which it is said are above and below."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"no {words[0]}: apt-get install {package}")
    code = (
        "from batchwright.distributed.joining.environments import found\n"
        "one = found()\n"
        "print(one.by, one.rank, one.size, one.local_rank, one.local_size, one.address)\n"
    )
    done = subprocess.run(
        [*words, sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(cache),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"mpirun {rank} 2 {rank} 2 localhost" for rank in range(2)
    ]


@pytest.mark.slow
def test_every_process_runs_some_cells_of_a_sweep(start, tmp_path):
    """What fails in the second, which has a tracker that nobody knows, ends alone."""

    def says(rank, size):
        return {**srun(rank, size), **({"BATCHWRIGHT_TRACKERS": "nobody"} if rank else {})}

    job = (*with_keys(JOB, "epochs=1"), SMALL)
    words = ("sweep", *job, "--grid", "learning_rate=0.05,0.1", "--seeds", 1)
    codes, told = start(*words, "--out", "s", says=says).end()
    assert codes == [1, 1], told
    assert "error: 1 of 2 runs done, 1 failed: " in told[0][1]
    assert told[1] == ("", "")
    swept = read_record(tmp_path / "s" / "sweep.json", Sweep)
    assert [one.state for one in swept.cells] == ["done", "failed"]
    assert "nobody" in swept.cells[1].error
    words = ("sweep", "--resume", SMALL, "--out", "s", "--seeds", 2, "--json")
    codes, told = start(*words, says=mpirun).end()
    assert codes == [0, 0], told
    again = Sweep.model_validate_json(told[0][0])
    assert [one.workers for one in again.done] == [1, 1, 1, 1]


def held_sweep(start, tmp_path, *, waits=()):
    """A sweep of two runs in two processes that takes minutes, once both runs train.

    Those that wait have a run that ends at once, by a tracker that nobody knows.
    """
    hold(tmp_path, "s", 0.1)  # all steps

    def says(rank, size):
        more = {"BATCHWRIGHT_TRACKERS": "nobody"} if rank in waits else {}
        return {**srun(rank, size), **more}

    words = ("sweep", *with_keys(JOB, "epochs=300"), SMALL, "checkpoint_seconds=1000")
    grid = ("--grid", "learning_rate=0.05,0.1", "--seeds", 1)
    started = start(*words, *grid, "--out", "s", says=says)
    end = time.monotonic() + 300
    cells = tmp_path / "s" / "cells"
    while len([*cells.glob("*/metrics.jsonl")]) < 2 - len(waits) or (
        waits and len([*(tmp_path / "s" / "logs").glob("*.log")]) < 2
    ):
        assert time.monotonic() < end, started.end()
        assert all(one.poll() is None for one in started.processes), started.end()
        time.sleep(0.05)
    return started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signalled", "number"),
    [((0, 1), signal.SIGINT), ((0,), signal.SIGUSR1), ((1,), signal.SIGTERM)],
    ids=["all", "worker 0", "another"],
)
def test_a_stop_signal_to_any_ends_a_shared_sweep_with_one_line(start, tmp_path, signalled, number):
    """Schedulers signal all tasks, the first alone or, by hand, any of them."""
    started = held_sweep(start, tmp_path)
    for rank in signalled:
        started.processes[rank].send_signal(number)
    codes, told = started.end()
    assert codes == [128 + number] * 2, told
    (line,) = errors(told)
    assert f"{stopped_by(number)} with 2 runs to go; continue with `batch" in line
    assert "--resume --out s" in line
    cells = tmp_path / "s" / "cells"
    assert len([*cells.glob("*/checkpoints/last.pt")]) == 2  # as a process by itself leaves them
    swept = read_record(tmp_path / "s" / "sweep.json", Sweep)
    assert [one.state for one in swept.cells] == ["stopped", "stopped"]


@pytest.mark.slow
def test_a_second_signal_to_another_process_ends_a_shared_sweep_at_once(start, tmp_path):
    """One that comes shortly after the first may be the same, from a launcher that signals all."""
    started = held_sweep(start, tmp_path)
    hold(tmp_path, "s")  # a checkpoint is written after a step
    end = time.monotonic() + 300
    while [one.read_text() for one in tmp_path.glob("held-*")] != ["600", "600"]:
        assert time.monotonic() < end, started.end()
        time.sleep(0.05)
    started.processes[0].send_signal(signal.SIGTERM)
    time.sleep(gathering._STOP_SECONDS + 6)  # the other may hear of it some seconds later
    started.processes[1].send_signal(signal.SIGINT)
    codes, told = started.end()
    assert codes == [128 + signal.SIGTERM] * 2, told
    (line,) = errors(told)
    assert "stopped by SIGTERM with 2 runs to go; continue with `batchwright sweep" in line
    assert not [*(tmp_path / "s" / "cells").glob("*/checkpoints/last.pt")]


@pytest.mark.slow
def test_a_signal_to_all_counts_once_where_a_process_looks_late(start, tmp_path):
    """Worker 1 has told of it before it comes to worker 0, whose disk, say, then stands still."""
    (tmp_path / "stalls.py").write_text(
        "import os, signal, time\n"
        "from batchwright.distributed.joining import environments, gathering\n"
        "from batchwright.distributed.supervisor import noting_signals\n"
        "gathering._STOP_SECONDS = 0.2\n"
        "started = environments.found()\n"
        "environments.adopt(started)\n"
        "come = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
        "with noting_signals() as noted, gathering.Gathering(\n"
        "    started, versions={}, words='run'\n"
        ") as joined:\n"
        "    joined.noted = noted\n"
        "    if started.rank:\n"
        "        come()\n"
        "        joined.stops()\n"
        "        joined.noted = ()\n"  # it waits for worker 0, however long that takes
        "        joined.follow(lambda order: None)\n"
        "    else:\n"
        "        while not joined.stops():\n"
        "            time.sleep(0.01)\n"
        "        come()\n"
        "        time.sleep(1)\n"
        "        print(*joined.stops())\n"
        "        come()\n"
        "        print(*joined.stops())\n"
        "        joined.end(gathering.Ended(0))\n"
    )
    codes, told = start("run", program=str(tmp_path / "stalls.py")).end()
    assert codes == [0, 0], told
    assert told[0][0].splitlines() == ["15", "15 15"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["find_everywhere", "write_sweep_report"])
def test_a_stop_while_no_run_of_a_sweep_trains_says_what_goes_on(start, tmp_path, place):
    """As worker 0 plans, and as it draws figures."""
    (tmp_path / "signalled.py").write_text(
        "import os, signal\n"
        "from batchwright.__main__ import entry\n"
        "from batchwright.workflows.sweep import verb\n"
        "verb._run = lambda *_: 0\n"
        f"verb.{place} = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "entry()\n"
    )
    words = ("sweep", *JOB, "--grid", "learning_rate=0.05,0.1", "--out", "s")
    codes, told = start(*words, program=str(tmp_path / "signalled.py")).end()
    assert codes == [128 + signal.SIGTERM] * 2, told
    said = "error: stopped by SIGTERM; continue with `batchwright sweep --resume --out s`"
    assert errors(told) == [said]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "more"),
    [("sweep", ("--grid", "learning_rate=0.05,0.1")), ("run", ())],
    ids=["sweep", "run"],
)
def test_a_stop_signal_to_another_ends_what_worker_0_measures(start, tmp_path, verb, more):
    words = (verb, *JOB[:2], "probe.budget=600", "probe.error=0.001", "probe.learning=0", *more)
    started = start(*words, SMALL, "--out", "a")
    end = time.monotonic() + 300
    while not [*tmp_path.glob("with-*")]:  # where the network is built, to be measured at once
        assert time.monotonic() < end, started.end()
        assert started.processes[0].poll() is None, started.end()
        time.sleep(0.05)
    time.sleep(0.5)  # most likely its workers measure by now; if not, all must be as it is then
    started.processes[1].send_signal(signal.SIGTERM)
    codes, told = started.end()
    assert codes == [128 + signal.SIGTERM] * 2, told
    (line,) = errors(told)
    again = f"`batchwright {verb} --resume --out a {SMALL}`"
    assert f"stopped by SIGTERM; continue with {again}" in line


@pytest.mark.slow
@pytest.mark.parametrize(("waits", "signalled"), [(0, 0), (1, 1)], ids=["worker 0", "another"])
def test_a_stop_while_a_process_has_run_its_share_ends_all(start, tmp_path, waits, signalled):
    started = held_sweep(start, tmp_path, waits=(waits,))
    time.sleep(1.0)  # its run has most likely ended by now; if not, all must be as it is then
    started.processes[signalled].send_signal(signal.SIGTERM)
    codes, told = started.end()
    assert codes == [128 + signal.SIGTERM] * 2, told
    (line,) = errors(told)
    assert "stopped by SIGTERM with 2 runs to go; continue with `batchwright sweep" in line
    assert len([*(tmp_path / "s" / "cells").glob("*/checkpoints/last.pt")]) == 1


@pytest.mark.slow
def test_a_sweep_that_torchrun_starts_again_goes_on(tmp_path, cache, forks):
    """As a run does, with the same words: no finished run is trained twice."""
    (tmp_path / "dying.py").write_text(
        "import os, signal, sys\n"
        "from batchwright.__main__ import entry\n"
        "from batchwright.workflows.sweep import sharing\n"
        "take_down = sharing.take_down\n"
        "def dying(*how):\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return take_down(*how)\n"
        "from batchwright.workflows.sweep import verb\n"
        "verb.take_down = dying\n"
        "entry()\n"
    )
    words = (
        *("sweep", *with_keys(JOB, "epochs=1"), SMALL),
        *("--grid", "learning_rate=0.05,0.1", "--seeds", "1"),
    )
    done = forked.command(
        *("--standalone", "--nproc-per-node", "2", "--max-restarts", "2"),
        *("--monitor-interval", "0.2", "dying.py", *words, "--out", "s"),
        program=forked.TORCHRUN,
        cwd=tmp_path,
        env=environment(cache),
        prints=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    swept = read_record(tmp_path / "s" / "sweep.json", Sweep)
    assert [one.state for one in swept.cells] == ["done", "done"]
    assert (tmp_path / "s" / "sweep.html").exists()


def test_a_process_takes_its_part_of_a_host_unless_it_is_bound_to_one():
    started = found(TORCHRUN)  # the second of two
    assert part_of(Machine(4), replace(started, by="srun"), 8) == Machine(4)
    assert part_of(Machine(4), started, 8) == Machine(2)  # the allocation's, of both
    assert part_of(Machine(1), started, 1) == Machine(1)


@pytest.mark.parametrize(
    ("seen", "parts"),
    [
        ([["a", "b", "c"]] * 2 + [["d", "e", "f"]] * 2, ["02", "1", "02", "1"]),
        ([["a"], ["b"], ["c"], ["d"]], ["0", "0", "0", "0"]),
        ([["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]], ["01"] * 4),
        ([["a"], ["a"], ["b"], ["b"]], ["0", "0", "0", "0"]),
        ([["a", "b"], ["b", "a"]], ["0", "0"]),
    ],
    ids=["all to all", "one a task", "two a task", "fewer than tasks", "in another order"],
)
def test_processes_share_gpus_that_several_see_and_keep_their_own(seen, parts):
    """Each calls those that it sees by numbers from 0 on, whichever they are."""
    found_parts = []
    for rank, gpus in enumerate(seen):
        started = replace(found(TORCHRUN), rank=rank, size=len(seen), local_rank=rank % 2)
        machine = Machine(8, tuple(map(str, range(len(gpus)))))
        found_parts.append("".join(part_of(machine, started, 8, seen).gpus))
    assert found_parts == parts


def test_the_gpus_that_all_see_are_asked_for_and_handed_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(host, "identity", lambda device: f"GPU-{device.index}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    plan = make_tiny_plan((4,))
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"device": "cuda"})})
    asked = []

    def ask(do):
        asked.append(do)
        return [["GPU-0", "GPU-1"]]

    first = replace(found(TORCHRUN), rank=0, size=2, local_rank=0)
    others = SimpleNamespace(ask=ask)
    monkeypatch.setattr(environments, "_joined", first)
    monkeypatch.setattr(Gathering, "current", others)
    assert (own_machine([plan]).gpus, asked) == (("4",), ["gpus"])
    others.ask = lambda do: [["GPU-2", "GPU-3"]]
    assert own_machine([plan]).gpus == ("4", "5")


def test_each_slice_of_a_gpu_that_is_named_has_cells_of_its_own(monkeypatch):
    """CUDA shows a process the first of them alone."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a, MIG-b")
    plan = make_tiny_plan((4,))
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"device": "cuda"})})
    assert own_machine([plan]).gpus == ("MIG-a", "MIG-b")
    first = replace(found(TORCHRUN), rank=0, size=2, local_rank=0)
    monkeypatch.setattr(environments, "_joined", first)
    monkeypatch.setattr(Gathering, "current", SimpleNamespace(ask=lambda _: [["MIG-a", "MIG-b"]]))
    assert own_machine([plan]).gpus == ("MIG-a",)  # the other process has the other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("run", "epochs=no"), "job key epochs = 'no'"),
        (("run", *JOB, "workers=3"), "workers=3, and srun has started 2: start 3 (--ntasks), or"),
        (("train", "three.json"), "the plan is for 3 workers, and srun has started 2: start 3"),
        (("sweep", *JOB, "--grid", "epochs=1,no"), "epochs = 'no'"),
        (("run", "data=imagefolder:nowhere"), "nowhere"),
        (("run", *JOB, "device=cuda"), "sees no GPU"),
    ],
    ids=["bad key", "too many", "other plan", "sweep", "no data", "no GPU"],
)
def test_what_cannot_be_is_one_line_and_code_2_everywhere(start, tmp_path, words, line):
    write_record(make_tiny_plan((4, 4, 4)), tmp_path / "three.json")
    codes, told = start(*words).end()
    assert codes == [2, 2], told
    assert told[1] == ("", "")
    assert line in errors(told)[0]
    assert len(errors(told)) == 1


def images(folder, colours):
    from PIL import Image

    for kind in ("cat", "dog"):
        for part in ("train", "val"):
            (folder / part / kind).mkdir(parents=True)
            for number in range(8):
                shade = number * 9 + (part == "val")
                picture = Image.new("RGB", (8, 8), (colours, shade, 40 * (kind == "cat")))
                picture.save(folder / part / kind / f"{number}.png")


@pytest.mark.slow
def test_other_data_on_another_host_are_told_with_its_name(start, tmp_path):
    for rank in range(2):
        images(tmp_path / str(rank) / "images", 100 * rank)
    words = ("run", "data=imagefolder:images", *JOB[1:5])
    codes, told = start(*words, place=lambda rank: tmp_path / str(rank)).end()
    assert codes == [2, 2], told
    assert f"worker 1 ({socket.gethostname()}): data=imagefolder:images is not what" in told[0][1]
    assert told[1] == ("", "")


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_is_told_with_the_host(start, tmp_path):
    if sys.platform != "linux" or os.geteuid() or not shutil.which("unshare"):
        pytest.skip("a disk of one's own needs Linux, root and unshare")
    (tmp_path / "runs").mkdir()
    alone = f'mount -t tmpfs none {tmp_path / "runs"} && exec "$@"'
    own_disk = ["unshare", "-m", "sh", "-c", alone, "sh"]
    codes, told = start(
        "run", *JOB, "--out", "runs/a", before=lambda rank: own_disk if rank else []
    ).end()
    assert codes == [2, 2], told
    assert "worker 1 (" in errors(told)[0]
    assert "is not the run folder that worker 0" in errors(told)[0]
    assert "on a disk that all hosts share" in errors(told)[0]


@pytest.mark.slow
def test_other_words_are_refused(start):
    codes, told = start(lambda rank: ("run", *JOB, f"seed={rank}")).end()
    assert codes == [2, 2], told
    assert "seed=1`, and worker 0" in errors(told)[0]
    assert "start the same command everywhere" in errors(told)[0]


def member(rank, **changes):
    told = {"versions": {"torch": "2.13.0"}, "words": "run", "launch": "", "process": ""}
    return gathering.Member(
        rank=rank, host=f"node{rank}", presence=presence("here"), **{**told, **changes}
    )


def test_a_host_with_another_version_is_named():
    assert not gathering.unlike([member(0), member(1)])
    others = [member(0), member(1), member(2, versions={"torch": "2.12.0"})]
    assert gathering.unlike(others) == (
        "worker 2 (node2) has torch 2.12.0, and worker 0 (node0) has 2.13.0: install the same on "
        "all hosts"
    )


@pytest.mark.slow
def test_a_host_with_other_source_code_is_named(start, tmp_path):
    """Two checkouts whose version is the same; numbers would not tell."""
    other = tmp_path / "checkout"
    shutil.copytree(Path(batchwright.__file__).parent, other / "batchwright")
    with (other / "batchwright" / "errors.py").open("a") as file:
        file.write("# a later commit\n")
    codes, told = start(
        "run", *JOB, before=lambda rank: ["env", f"PYTHONPATH={other}"] if rank else []
    ).end()
    assert codes == [2, 2], told
    name = f"batchwright {metadata.version('batchwright')} (source "
    assert f"worker 1 ({socket.gethostname()}) has {name}" in errors(told)[0]
    assert "install the same on all hosts" in errors(told)[0]
    assert len(errors(told)) == 1


@pytest.mark.slow
def test_a_host_whose_clock_is_wrong_is_named_once(start, tmp_path):
    """By one of its workers; all goes on, here to an error, which ends it soon."""
    (tmp_path / "wrong.py").write_text(
        "import os, time\n"
        "from batchwright.__main__ import entry\n"
        "now = time.time\n"
        "if os.environ['SLURM_NODEID'] == '1':\n"
        "    time.time = lambda: now() - 100\n"
        "entry()\n"
    )

    def says(rank, size):
        places = {"SLURM_NODEID": str(min(rank, 1)), "SLURM_LOCALID": str(max(0, rank - 1))}
        return {**srun(rank, size), **places, "SLURM_STEP_TASKS_PER_NODE": "1,2"}

    program = str(tmp_path / "wrong.py")
    codes, told = start("run", "epochs=no", size=3, says=says, program=program).end()
    assert codes == [2, 2, 2], told
    host = socket.gethostname()
    assert f"warning: the clock of worker 1 ({host}) is 100 s behind that of worker 0" in told[1][1]
    assert told[2] == ("", "")
    assert "job key epochs = 'no'" in told[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_before_there_is_anything_to_stop_is_told(start, number):
    """As mpirun, which says nothing of it, sends it to processes that have just begun."""
    started = start("run", *JOB, size=1, says=lambda *_: srun(0, 2))  # which waits for the other
    end = time.monotonic() + 300
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", started.port)):
            break
        assert time.monotonic() < end, started.end()
        time.sleep(0.05)
    started.processes[0].send_signal(number)
    codes, told = started.end()
    assert codes == [128 + number], told
    assert errors(told) == [f"error: {stopped_by(number)}"]


@pytest.mark.slow
def test_a_port_that_cannot_be_reached_is_told_on_both_sides(start):
    """As a firewall that lets nothing through."""

    def says(rank, size):
        return {**srun(rank, size), "MASTER_PORT": str(ports[rank])}

    ports = free_port(), free_port()
    codes, told = start("run", *JOB, says=says, **{MEETING_SECONDS: "4"}).end()
    assert codes == [2, 2], told
    assert "worker 1 did not come to the start within 4 s" in told[0][1]
    assert f"is port {ports[0]} of 127.0.0.1 open to their hosts?" in told[0][1]
    assert "worker 1 (" in told[1][1]
    assert f"cannot reach 127.0.0.1:{ports[1]}, where worker 0 waits" in told[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_end_when_one_is_killed(start, tmp_path, killed):
    """Between verbs or inside of one: nobody waits for ever."""
    started = start("run", *JOB[:2], "probe.budget=60", "probe.learning=0", "--out", "a")
    end = time.monotonic() + 300
    while not (tmp_path / "a" / "job.yaml").exists():
        assert time.monotonic() < end, started.end()
        time.sleep(0.05)
    started.processes[killed].send_signal(signal.SIGKILL)
    codes, told = started.end()
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] in (1, 2), told
    assert "lost contact with" in errors(told)[0]
    assert "Traceback" not in told[1 - killed][1]


FAILING = """
import os
from batchwright.workload.networks import resnet8

def network(**keys):
    made = resnet8(**keys)
    if os.environ.get("RANK") == "1":
        made.register_forward_pre_hook(lambda *_: {}["a key of the user's"])
    return made
"""


@pytest.mark.slow
def test_what_fails_on_another_host_is_told_with_its_name(start, tmp_path):
    """An error that nobody has foreseen, while all measure."""
    (tmp_path / "failing.py").write_text(FAILING)
    codes, told = start("probe", *JOB, "network=failing:network", "--out", "p.json").end()
    assert all(codes), told
    (line,) = errors(told)
    assert f"worker 1 ({socket.gethostname()}): " in line
    assert "a key of the user's" in line
    assert "Traceback" not in told[0][1]


@pytest.mark.slow
def test_what_keeps_another_host_from_its_exchanges_is_told_with_its_name(start, tmp_path):
    """As a GPU without room for the network: nobody waits until the time of a meeting is up."""
    (tmp_path / "failing.py").write_text(
        "import os\n"
        "from batchwright.workload.networks import resnet8\n"
        "def network(**keys):\n"
        "    if os.environ.get('RANK') == '1' and os.path.exists('a/plan.json'):\n"
        "        raise RuntimeError('no room')\n"
        "    return resnet8(**keys)\n"
    )
    words = ("run", *JOB, "network=failing:network", "timeout=3600", "--out", "a")
    codes, told = start(*words).end()
    assert all(codes), told
    (line,) = errors(told)
    assert f"worker 1 ({socket.gethostname()}): " in line
    assert "no room" in line


@pytest.mark.slow
def test_ctrl_c_ends_all_with_one_line(start, tmp_path):
    """A terminal sends it to every process."""
    started = start("run", *JOB[:2], "probe.budget=60", "probe.learning=0", "--out", "a")
    end = time.monotonic() + 300
    while not (tmp_path / "a" / "job.yaml").exists():
        assert time.monotonic() < end, started.end()
        time.sleep(0.05)
    for one in started.processes:
        one.send_signal(signal.SIGINT)
    codes, told = started.end()
    assert codes == [130, 130], told
    (line,) = errors(told)
    assert "stopped by Ctrl-C" in line
    assert "Traceback" not in told[0][1] + told[1][1]


RUN_SCRIPT = """
import sys
import batchwright as bw

if __name__ == "__main__":
    summary = bw.run(data="digits", network="held_network:network", epochs=1, global_batch=128,
                     probe={"budget": 0.3, "learning": 0}, run_folder="a")
    assert summary.plan.workers == 2
    print(len(summary.epochs))
"""


@pytest.mark.parametrize(
    "error",
    [
        *(DeadlineReached("late"), Interrupted(15, "stopped")),
        *(BatchwrightError("wrong"), WorkerError("lost")),
    ],
)
def test_a_script_gets_the_same_kind_of_error_in_every_process(error):
    other = verbs_together._error_of(gathering.Ended(error.exit_code, str(error)))
    assert (type(other), other.exit_code, str(other)) == (type(error), error.exit_code, str(error))


@pytest.mark.slow
def test_a_script_gets_the_summary_in_every_process(tmp_path, cache, forks):
    (tmp_path / "script.py").write_text(RUN_SCRIPT)
    done = forked.command(
        *("--standalone", "--nproc-per-node", "2", "script.py"),
        program=forked.TORCHRUN,
        cwd=tmp_path,
        env=environment(cache),
        prints=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["local", "in-process", "virtual"])
def test_processes_of_our_own_when_told_so(start, tmp_path, launch):
    """The first process, or processes of its own, under another launcher; nobody waits."""
    words = (f"launch={launch}", "workers=1", "timeout=20", "--out", "a")
    codes, told = start("run", *JOB, SMALL, *words).end()
    assert codes == [0, 0], told
    assert (tmp_path / "a" / "logs" / "train" / "0").is_dir() == (launch == "local")


# -------------------------------------------------------------------------- several kinds of them


def mixed_plan():
    kinds = (KindCount(kind="fast", count=1), KindCount(kind="slow", count=2))
    return make_tiny_plan((6, 4, 2)).model_copy(update={"kinds": kinds})


@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        (("fast", "slow", "slow"), (6, 4, 2)),
        (("slow", "fast", "slow"), (4, 6, 2)),
        (("slow", "slow", "fast"), (4, 2, 6)),
    ],
)
def test_a_mixed_plan_follows_the_order_of_the_hosts(kinds, sizes):
    plan = mixed_plan()
    assert arranged(plan, places_in(plan, kinds)).stages[0].local_batch_sizes == sizes


def test_a_mixed_plan_for_other_kinds_is_refused():
    line = "1 of fast, 2 of slow, and started are 3 of slow: .*BATCHWRIGHT_KIND"
    with pytest.raises(PlanError, match=line):
        places_in(mixed_plan(), ("slow", "slow", "slow"))


@pytest.mark.slow
def test_a_mixed_cluster_that_was_planned_is_trained(start, tmp_path):
    """Each kind probed alone, planned together over a stated network, and trained in any order."""
    for kind in ("fast", "slow"):
        words = ("probe", *JOB[:5], SMALL, "workers=1", f"probe.kind={kind}")
        codes, told = start(*words, "--out", f"{kind}.json", size=1).end()
        assert codes == [0], told
    mixed = plan(
        [tmp_path / "fast.json", tmp_path / "slow.json"],
        [
            "goal.kinds=[{kind: fast, count: 1}, {kind: slow, count: 1}]",
            *("workers=2", "link.latency=1e-5", "link.bandwidth=1e9", "global_batch=90"),
        ],
    )
    assert [one.kind for one in mixed.kinds]
    write_record(mixed, tmp_path / "plan.json")

    def says(rank, size):
        return {**srun(rank, size), "BATCHWRIGHT_KIND": ("slow", "fast")[rank]}

    codes, told = start("train", "plan.json", SMALL, "--out", "a", says=says).end()
    assert codes == [0, 0], told
    trained = read_record(tmp_path / "a" / "summary.json", RunSummary).plan
    names = [one.kind for one in mixed.kinds]
    by_kind = dict(zip(names, mixed.stages[0].local_batch_sizes, strict=True))
    assert trained.stages[0].local_batch_sizes == (by_kind["slow"], by_kind["fast"])


@pytest.mark.slow
def test_kinds_that_alternate_train_with_a_parameter_server(start, tmp_path):
    """The plan has both workers of one kind beside each other; the processes keep their order.

    What each costs stands in a file, which prices others, too.
    """
    (tmp_path / "prices.csv").write_text("kind,price\nb,1.0\na,2.0\nc,0.1\n")

    def says(rank, size):
        return {**srun(rank, size), "BATCHWRIGHT_KIND": "aba"[rank]}

    words = ("run", *SERVED, SMALL, "method=hybrid", "goal.kinds=prices.csv", "--out", "a")
    codes, told = start(*words, size=3, says=says).end()
    assert codes == [0, 0, 0], told
    summary = read_record(tmp_path / "a" / "summary.json", RunSummary)
    assert [(one.kind, one.count) for one in summary.plan.kinds] == [("a", 2), ("b", 1)]
    assert [(one.kind, one.price) for one in summary.plan.job.goal.kinds] == [("a", 2), ("b", 1)]
    assert not lost_or_repeated(summary, epochs=2)
    places = [one.place.rpartition(":")[2] for one in summary.epochs[-1].workers]
    assert places == ["0", "2", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["plain", "dual-batch"])
def test_a_run_whose_worker_was_killed_goes_on_with_the_same_words(tmp_path, cache, forks, method):
    """torchrun starts all again; no sample is lost, none is repeated."""
    job = with_keys(SERVED, "epochs=6")
    words = (*job, SMALL, f"method={method}", "checkpoint_seconds=0.3")
    hold(tmp_path, "a/checkpoints", 3)  # from the first step on, however few they are
    agent = Forked(
        [
            *("--standalone", "--nproc-per-node", "2", "--max-restarts", "3"),
            *("--monitor-interval", "0.2", "-m", "batchwright", "run", *words, "--out", "a"),
        ],
        program=forked.TORCHRUN,
        cwd=tmp_path,
        env=environment(cache),
        prints=tmp_path,
    )
    try:
        end = time.monotonic() + 300
        while not (tmp_path / "a" / "checkpoints" / "last.pt").exists():
            assert time.monotonic() < end, agent.said()
            assert agent.poll() is None, agent.said()
            time.sleep(0.05)
        (server,) = children_of(agent.pid)
        os.kill(children_of(server)[-1], signal.SIGKILL)
        release(tmp_path)
        _, told = agent.communicate()
        assert agent.returncode == 0, told
    finally:
        agent.kill()
        agent.wait()
    assert "exitcode: -9" in told  # torchrun saw it
    summary = read_record(tmp_path / "a" / "summary.json", RunSummary)
    assert not lost_or_repeated(summary, epochs=6)
    assert summary.resumed


def test_a_group_without_ranks_is_refused_in_a_line(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(JobError, match="WORLD_SIZE=2 is set and RANK is not: start the script by"):
        Group(torch.device("cpu"))


@pytest.mark.slow
def test_a_loop_of_ones_own_finds_its_group_under_srun(tmp_path, start):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "go").touch()
    tiny = make_tiny_plan((6, 6), epochs=EPOCHS, samples=SAMPLES)
    write_record(tiny, tmp_path / "plan.json")
    said = {"WORLD_SIZE": "2"}  # by the batch script, which leaves the rank to srun
    codes, told = start(tmp_path, program=str(tmp_path / "script.py"), **said).end()
    assert codes == [0, 0], told
    assert (tmp_path / "with-2").exists()
    times = torch.load(tmp_path / "weights.pt") / (-0.1 / BATCH)
    assert torch.allclose(times, torch.full_like(times, EPOCHS), atol=1e-9)
