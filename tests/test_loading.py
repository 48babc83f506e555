"""Loader processes where Python does not fork them, as from 3.14 on."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import batchwright as bw
import forked
from batchwright.distributed.processes import refuse_unguarded_script
from batchwright.errors import DataError, SharedMemoryError
from batchwright.records.documents import write_record
from batchwright.workload.data import loading
from batchwright.workload.data.loading import batches_of, ignore_stop_signals
from forked import Forked
from process_numbers import Processes
from test_launch import wait_until
from test_session import make_tiny_plan

SECONDS = 600  # each takes a few seconds of computing; a busy machine gives little of it

HEAD = """
import torch
from torch.nn import functional
from torch.utils.data import Dataset
import batchwright as bw

class Points(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), index % 3

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """
with bw.Session(model, optimizer, Points(), plan="plan.json", loaders=1) as session:
    for epoch in session.epochs():
        for features, labels in session.batches():
            session.step(functional.cross_entropy(model(features), labels))
        session.evaluate(Points(), lambda outputs, labels: outputs.argmax(1) == labels)
print("trained")
"""
PICTURES = """
import torch
from torch import nn
from torch.utils.data import Dataset

class Pictures(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index % 2)), index % 2

def pictures():
    return Pictures(64), Pictures(32), ("dark", "light")

def network(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))
"""
RUN = (
    'bw.run(data="my_own:pictures", network="my_own:network", launch="in-process", workers=1, '
    'global_batch=16, epochs=1, precision="float32", probe={"budget": 0.3}, run_folder="run")\n'
    'print("trained")\n'
)
FILES = """
from pathlib import Path

import numpy as np
from PIL import Image
from batchwright.records import Job
from batchwright.workload.data import image_files
from batchwright.workload.data.sources import open_data

def batches(files, loaders):
    pipeline = image_files.FilePipeline(
        files, device=torch.device("cpu"), augmentation="crop-flip", seed=0, loaders=loaders
    )
    return list(pipeline.batches(torch.arange(8).split(4), epoch=1, resolution=16))

if __name__ == "__main__":
    for index in range(16):
        place = Path("images", ("train", "val")[index % 2], ("dark", "light")[index % 4 // 2])
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.full((20, 24, 3), 16 * index, np.uint8)
        Image.fromarray(pixels).save(place / f"{index}.png")
    image_files.free_bytes = lambda: 0  # as on a disk that is full
    files = open_data(Job(data="imagefolder:images", resolutions=(16,))).train
    assert isinstance(files, image_files.ImageFiles)
    for (here, label), (there, other) in zip(batches(files, 0), batches(files, 1), strict=True):
        assert here.equal(there)
        assert label.equal(other)
    print("trained")
"""


STARTS = """
import multiprocessing, runpy, sys
multiprocessing.set_start_method("forkserver", force=True)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def guarded(code: str) -> str:
    return 'if __name__ == "__main__":\n' + "".join(f"    {line}\n" for line in code.splitlines())


@pytest.fixture(autouse=True)
def forkserver(tmp_path):
    """What makes this start method the default of all processes that `run` starts."""
    place = tmp_path / "started"
    place.mkdir()
    code = "import multiprocessing\nmultiprocessing.set_start_method('forkserver')\n"
    (place / "sitecustomize.py").write_text(code)


def environment(folder: Path) -> dict[str, str]:
    """Variables of a process in ``folder`` whose own processes start that way."""
    paths = (folder / "started", *sys.path)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "BATCHWRIGHT_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }


def run_script(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a script that is forked itself; what it starts imports all anew."""
    write_record(make_tiny_plan(), folder / "plan.json")
    (folder / "my_own.py").write_text(PICTURES)
    (folder / "script.py").write_text(HEAD + code)
    (folder / "starts.py").write_text(STARTS)
    how = {"cwd": folder, "env": environment(folder), "prints": folder}
    return forked.command(folder / "script.py", program="starts.py", **how)


@pytest.mark.slow
@pytest.mark.parametrize("code", [guarded(LOOP), FILES], ids=["loop", "files"])
def test_what_loaders_need_reaches_them_where_they_are_not_forked(code, tmp_path, forks):
    done = run_script(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"


@pytest.mark.slow
@pytest.mark.parametrize("code", [LOOP, RUN], ids=["loop", "verb"])
def test_a_script_without_guard_ends_with_a_line_that_says_so(code, tmp_path, forks):
    done = run_script(tmp_path, code)
    assert done.returncode == 1
    assert not done.stdout
    lines = done.stderr.splitlines()
    assert any(
        line.startswith("error: a loader process imports the script") and "__main__" in line
        for line in lines
    )
    # Last in the script's own; another loader process may say its line after that.
    assert any("PlanError: the loader processes ended as they started" in line for line in lines)
    assert done.stderr.count("Traceback") == 1  # the script's own


@pytest.mark.slow
def test_a_fork_server_that_ends_while_it_imports_is_told_in_the_same_words(tmp_path, forks):
    (tmp_path / "ends.py").write_text("raise SystemExit(1)\n")
    preload = 'import multiprocessing\nmultiprocessing.set_forkserver_preload(["ends"])\n'
    done = run_script(tmp_path, guarded(preload + LOOP))
    assert done.returncode == 1
    # Behind it nanobind may say what PyTorch has left.
    assert "\nbatchwright.errors.PlanError: the loader processes ended as they" in done.stderr


@pytest.mark.slow
def test_a_job_with_data_of_the_users_trains_where_loaders_are_not_forked(tmp_path):
    """As a whole process of its own, and by a command that is no file."""
    (tmp_path / "my_own.py").write_text(PICTURES)
    command = "from batchwright.cli.commands import main; main()"
    job = "data=my_own:pictures network=my_own:network workers=1 global_batch=16 epochs=1 "
    job += "precision=float32"
    words = ("run", *job.split(), "probe.budget=0.3", "probe.learning=0")
    words = ("-c", command, *words, "loaders=1", "--out", "run")
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").exists()


class Unsendable(Dataset):
    def __init__(self):
        self.change = lambda value: value

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.change(index)


def test_a_data_set_that_cannot_be_pickled_is_refused_in_one_line():
    context = multiprocessing.get_context("spawn")
    loader = DataLoader(Unsendable(), num_workers=1, multiprocessing_context=context)
    with pytest.raises(DataError, match=r"cannot be sent to loader processes .*lambda.* loaders=0"):
        list(batches_of(loader))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(Unsendable())


class Failing(Unsendable):
    def __getitem__(self, index):
        raise RuntimeError("of the user's own")


def test_an_error_of_the_data_set_stays_as_it_is():
    with pytest.raises(RuntimeError, match="of the user's own"):
        list(batches_of(DataLoader(Failing())))


def test_no_batches_are_none():
    assert not list(batches_of(DataLoader(Unsendable(), batch_sampler=[])))


def test_without_loader_processes_a_script_still_settles_how_processes_start(monkeypatch):
    """Who asks Python for the start method settles it."""
    monkeypatch.setattr(multiprocessing, "get_start_method", None)
    assert len(list(batches_of(DataLoader(range(3), batch_size=1)))) == 3


@pytest.fixture
def importing(monkeypatch):
    """As in a process that multiprocessing has started and that imports the script."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)


@pytest.mark.usefixtures("importing")
@pytest.mark.parametrize(
    "start",
    [
        refuse_unguarded_script,
        bw.probe,
        bw.run,
        lambda: bw.train("plan.json"),
        lambda: bw.check("plan.json"),
        lambda: bw.Session(torch.nn.Linear(1, 1), None, None, plan="plan.json"),
    ],
    ids=["itself", "probe", "run", "train", "check", "session"],
)
def test_nothing_starts_in_a_process_that_only_imports_the_script(start, capsys):
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert 'under `if __name__ == "__main__":`, or give loaders=0' in line


def test_a_loader_outlives_a_stop_that_every_process_of_a_job_gets():
    """Slurm's TERM to all, or Ctrl-C: workers need batches until the step after which they stop."""
    loader = DataLoader(Processes(), num_workers=1, worker_init_fn=ignore_stop_signals)
    batches = batches_of(loader)
    process = next(batches).item()
    for name in ("INT", "USR1", "USR2", "TERM"):
        subprocess.run(["/bin/kill", f"-{name}", str(process)], check=True)
    assert sum(1 for _ in batches) == 39
    again = DataLoader(
        Processes(), num_workers=1, worker_init_fn=ignore_stop_signals, persistent_workers=True
    )
    process = next(iter(again)).item()
    os.kill(process, signal.SIGTERM)  # from its own worker
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_thread_of_a_loader_takes_a_stop_but_the_one_that_waits_for_it():
    """PyTorch's own neither, of which some begin before anything of ours."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        batches = batches_of(
            DataLoader(Processes(), num_workers=1, worker_init_fn=ignore_stop_signals)
        )
        process = next(batches).item()
        told = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/status")]
    finally:
        torch.set_num_threads(threads)
    blocked = [int(re.search(r"^SigBlk:\s*(\w+)", one, re.MULTILINE)[1], 16) for one in told]
    assert len(blocked) > 2
    assert sum(not mask >> (signal.SIGTERM - 1) & 1 for mask in blocked) <= 1
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())  # this one takes it


STOPPED = """
import multiprocessing, signal, sys, time
from torch.utils.data import DataLoader, Dataset
from batchwright.workload.data.loading import batches_of, ignore_stop_signals

class Held(Dataset):
    def __init__(self):
        self.held = False

    def __setstate__(self, state):
        self.held = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.held

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1], force=True)
    if sys.argv[1] == "forkserver":
        multiprocessing.Lock()  # what tracks it runs before the server does
    loader = DataLoader(Held(), num_workers=1, worker_init_fn=ignore_stop_signals)
    held = next(batches_of(loader)).item()
    other = multiprocessing.Process(target=time.sleep, args=(600,))
    other.start()
    other.terminate()
    other.join(500)
    print(held, other.exitcode, flush=True)
    other.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "held"), [("forkserver", False), ("spawn", True)])
def test_loaders_that_are_spawned_hold_a_stop_back_and_no_other_process_does(
    tmp_path, method, held, forks
):
    """A server passes on what it was started with, also to processes of the user's own."""
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    how = {"cwd": tmp_path, "env": os.environ, "prints": tmp_path}
    done = forked.command(method, program=str(script), **how)
    assert done.stdout == f"{held} {-signal.SIGTERM}\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_loader_ends_with_the_worker_that_made_it(tmp_path, method, forks):
    """The server that Python starts processes from lives as long as they do, and is no sign."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\n"
        "from torch.utils.data import DataLoader\n"
        "from batchwright.workload.data.loading import ignore_stop_signals\n"
        "from process_numbers import Processes\n"
        "if __name__ == '__main__':\n"
        "    loader = DataLoader(Processes(), num_workers=1, worker_init_fn=ignore_stop_signals,\n"
        "                        multiprocessing_context=sys.argv[1])\n"
        "    batches = iter(loader)\n"
        "    print(next(batches).item(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    how = {"cwd": tmp_path, "env": os.environ, "prints": tmp_path}
    maker = Forked([method], program=str(script), **how)
    try:
        assert wait_until(lambda: maker.said()[0].endswith("\n")), maker.said()
        process = int(maker.said()[0])
    finally:
        maker.kill()
        maker.wait()
    end = time.monotonic() + 300
    while runs(process):
        assert time.monotonic() < end, "the loader outlives its worker"
        time.sleep(0.1)


def runs(process):
    """Whether a process runs."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Ending(Dataset):
    """Ends the process that loads it by a signal, or by an error of PyTorch's."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.number:
            os.kill(os.getpid(), self.number)
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space")


@pytest.fixture
def looked_after_soon(monkeypatch):
    """Without its handler of signals PyTorch looks every 5 s whether loader processes run."""
    look = _MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(look, "__defaults__", (0.1,))


@pytest.mark.usefixtures("looked_after_soon")
@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (signal.SIGBUS, SharedMemoryError, r"^a loader process .*shared memory .*, or loaders=0$"),
        (0, SharedMemoryError, r"^a loader process .*shared memory .*, or loaders=0$"),
        (signal.SIGKILL, RuntimeError, r"^DataLoader worker .* is killed by signal: Killed"),
    ],
)
def test_what_ended_a_loader_process_is_told(number, kind, said):
    with pytest.raises(kind, match=said):
        list(
            batches_of(
                DataLoader(Ending(number), num_workers=1, worker_init_fn=ignore_stop_signals)
            )
        )


@pytest.mark.usefixtures("looked_after_soon")
@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (signal.SIGBUS, SharedMemoryError, r"^a loader process .*shared memory .*, or loaders=0$"),
        (signal.SIGKILL, RuntimeError, r"^DataLoader worker .* is killed by signal: Killed"),
    ],
)
def test_what_ended_a_loader_process_is_told_after_lightning(number, kind, said):
    list(DataLoader([1], num_workers=1))  # PyTorch sets its handler once
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as Lightning does after a fit
    try:
        test_what_ended_a_loader_process_is_told(number, kind, said)
    finally:
        signal.signal(signal.SIGCHLD, before)


class Unpicklable:
    """What cannot be pickled."""

    def __init__(self, why):
        self.why = why

    def __reduce__(self):
        raise self.why


class UnsendableBatches(Dataset):
    """Whose batches cannot be pickled, but for the first."""

    def __init__(self, why):
        self.why = why

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Unpicklable(self.why) if index else index


class UnsendableErrors(Dataset):
    """Whose errors are of a class that is made when they are raised, as botocore's are."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise type("NoSuchKey", (Exception,), {})("no photo at the place")


def as_they_are(items):
    return items


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (
            TypeError("a lock"),
            r"\(TypeError: a lock\): have .* return tensors, .*, or give loaders",
        ),
        (OSError(24, "Too many open files"), r"\(OSError: .*\): raise the limit \(ulimit -n"),
    ],
)
def test_a_batch_that_cannot_be_sent_is_an_error_and_not_waited_for(why, said):
    how = {"worker_init_fn": ignore_stop_signals, "collate_fn": as_they_are, "timeout": SECONDS}
    before = set(multiprocessing.active_children())
    batches = batches_of(DataLoader(UnsendableBatches(why), num_workers=1, **how))
    assert next(batches) == [0]
    with pytest.raises(DataError, match=f"^a loader process cannot send a batch {said}"):
        next(batches)
    assert not set(multiprocessing.active_children()) - before  # while the error holds the loader


def test_an_error_that_cannot_be_sent_is_told_all_the_same():
    how = {"worker_init_fn": ignore_stop_signals, "timeout": SECONDS}
    with pytest.raises(RuntimeError, match="NoSuchKey: no photo at the place"):
        next(batches_of(DataLoader(UnsendableErrors(), num_workers=1, **how)))


@pytest.mark.parametrize("unsendable", [Unpicklable(TypeError("a lock")), ("a", lambda: 0)])
def test_a_queue_of_the_users_own_goes_on_as_python_has_it(unsendable, monkeypatch, capsys):
    monkeypatch.setattr(Queue, "_on_queue_feeder_error", loading._send_why)
    own = multiprocessing.Queue()
    own.put(unsendable)
    own.put("sent")
    assert own.get(timeout=SECONDS) == "sent"
    assert "Traceback" in capsys.readouterr().err
    own.close()
    own.join_thread()


class Kept:
    """Garbage that stays until it is collected, and tells then."""

    ended = 0

    def __init__(self):
        self.own = self

    def __del__(self):
        Kept.ended += 1


class Collecting(Dataset):
    """How much of that ends in the process that loads it."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        gc.collect()
        return Kept.ended


@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="nothing is forked")
def test_a_forked_loader_process_ends_nothing_that_its_maker_has_left():
    """A process group would wait there for its threads, which only its maker has."""
    gc.disable()
    try:
        Kept()
        before = Kept.ended
        loader = DataLoader(Collecting(), num_workers=1, worker_init_fn=ignore_stop_signals)
        assert [batch.item() for batch in batches_of(loader)] == [before]
    finally:
        gc.enable()
    gc.collect()
    assert Kept.ended == before + 1
