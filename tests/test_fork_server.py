"""Workers out of a process that has imported everything once: as if each were started by itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import forked
from batchwright.distributed import fork_server
from batchwright.distributed.fork_server import imported_once, start
from forked import start_light

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only"),
]

TELLING = """
import json, os, random, signal, sys
import numpy

known = sorted(name for name in ("torch", "batchwright.training.loop") if name in sys.modules)
told = {
    "name": __name__, "argv": sys.argv, "environment": dict(os.environ), "modules": known,
    "session": os.getsid(0) == os.getpid(), "parent": os.getppid(), "numpy": numpy.random.rand(),
    "python": random.random(), "open": sorted(map(int, os.listdir("/proc/self/fd"))),
    "child": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
}
os.write(int(sys.argv[1]), json.dumps(told).encode())
print("a word", flush=True)
if sys.argv[2] == "stays":
    import time
    time.sleep(600)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "telling.py").write_text(TELLING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "telling"


@pytest.fixture
def light(monkeypatch):
    """Servers that import nothing, which takes seconds; how they fork is the same."""
    monkeypatch.setattr(fork_server, "_start_server", start_light)


def begin(program, what, folder):
    """A started process, and what it told."""
    readable, writable = os.pipe()
    environment = {**os.environ, "MARK": what}
    with (folder / "log").open("ab") as log:
        process = start(
            program, [str(writable), what], environment=environment, log=log, files=[writable]
        )
    os.close(writable)
    told = b""
    while part := os.read(readable, 1 << 16):
        told += part
        if what == "stays" and told.endswith(b"}"):
            break
    os.close(readable)
    return process, json.loads(told)


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for(condition):
    end = time.monotonic() + 500
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_forked_process_is_what_one_of_its_own_would_be(program, tmp_path):
    own, alone = begin(program, "0", tmp_path)
    with imported_once():
        process, told = begin(program, "0", tmp_path)
        assert (own.wait(), process.wait(), process.poll()) == (0, 0, 0)
        _, again = begin(program, "0", tmp_path)
    assert alone["modules"] == []
    assert told["modules"] == ["batchwright.training.loop", "torch"]
    for key in ("name", "session", "child"):
        assert told[key] == alone[key]
    assert told["argv"][1:] == [told["argv"][1], "0"]
    assert Path(told["argv"][0]) == Path(alone["argv"][0])
    mark = "BATCHWRIGHT_PARENT"
    assert told["environment"].pop(mark) == str(told["parent"])
    assert told["environment"] == {k: v for k, v in alone["environment"].items() if k != mark}
    assert told["numpy"] != again["numpy"]
    assert told["python"] != again["python"]
    # Standard ones, what it was given, and that of the listing itself: nothing of the server's.
    assert len(told["open"]) == len(alone["open"])
    assert (tmp_path / "log").read_text() == "a word\n" * 3


@pytest.mark.usefixtures("light")
def test_exit_codes_and_signals_are_told(program, tmp_path):
    with imported_once():
        assert begin(program, "3", tmp_path)[0].wait() == 3
        assert begin(program, "killed", tmp_path)[0].wait() == -signal.SIGKILL
        process, _ = begin(program, "stays", tmp_path)
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
        process.kill()  # harmless
        assert not is_there(process.pid)


@pytest.mark.usefixtures("light")
def test_a_stop_that_every_process_of_a_job_gets_leaves_the_server_to_its_workers(
    program, tmp_path
):
    with imported_once():
        process, told = begin(program, "stays", tmp_path)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(told["parent"], number)
        assert begin(program, "3", tmp_path)[0].wait() == 3
        assert process.poll() is None
        process.send_signal(signal.SIGUSR2)
        assert process.wait() == -signal.SIGUSR2


@pytest.mark.usefixtures("light")
def test_what_still_runs_at_the_end_ends_with_it(program, tmp_path):
    with imported_once(), imported_once():
        process, _ = begin(program, "stays", tmp_path)
    wait_for(lambda: not is_there(process.pid))
    assert process.poll() == -signal.SIGKILL


@pytest.mark.usefixtures("light")
def test_a_server_that_was_killed_takes_its_workers_along_and_is_done_without(program, tmp_path):
    with imported_once():
        process, told = begin(program, "stays", tmp_path)
        os.kill(told["parent"], signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        wait_for(lambda: not is_there(process.pid))
        another, told = begin(program, "3", tmp_path)
        assert another.wait() == 3
        assert told["modules"] == []
        assert told["parent"] == os.getpid()


@pytest.mark.usefixtures("light", "many_files")
def test_with_more_files_open_than_select_takes_processes_start_and_their_ends_are_told(
    program, tmp_path
):
    with imported_once():
        process, told = begin(program, "3", tmp_path)
        assert told["parent"] != os.getpid()  # it was forked
        assert process.wait() == 3


def test_a_default_timeout_of_sockets_does_not_reach_the_server(monkeypatch):
    ends = []

    def start_none(line, more):
        ends.append(socket.socket(fileno=os.dup(line)))
        return SimpleNamespace(kill=lambda: None, wait=lambda: None)

    monkeypatch.setattr(fork_server, "_start_server", start_none)
    socket.setdefaulttimeout(0.01)
    try:
        server = fork_server._ForkServer(())
    finally:
        socket.setdefaulttimeout(None)
    assert server.started(3) is None
    server.close()
    ends[0].close()


@pytest.mark.usefixtures("light")
def test_an_environment_too_large_for_a_message_is_no_hindrance(program, tmp_path, monkeypatch):
    with imported_once():
        for number in range(10):
            monkeypatch.setenv(f"LARGE{number}", "x" * 100_000)
        process, told = begin(program, "0", tmp_path)
        assert process.wait() == 0
    assert len(told["environment"]["LARGE9"]) == 100_000


@pytest.mark.usefixtures("light")
def test_each_thread_has_a_server_of_its_own(program, tmp_path):
    """The kernel would end the workers of a thread with the thread that began the server."""
    told = []

    def other():
        with imported_once():
            told.append(begin(program, "0", tmp_path)[1]["parent"])

    with imported_once():
        process, own = begin(program, "stays", tmp_path)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert process.poll() is None
        assert told != [own["parent"]]
        process.kill()
        assert process.wait() == -signal.SIGKILL


@pytest.mark.usefixtures("light")
def test_a_worker_that_is_killed_while_the_server_imports_never_begins(program, tmp_path):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    readable, writable = os.pipe()
    with imported_once("endless"), (tmp_path / "log").open("ab") as log:
        process = start(program, [str(writable), "0"], environment={}, log=log, files=[writable])
        process.kill()
        assert process.wait() == -signal.SIGKILL
        os.close(writable)
        assert os.read(readable, 1) == b""
        again, told = begin(program, "3", tmp_path)
        assert again.wait() == 3
        assert told["parent"] == os.getpid()
    os.close(readable)


STARTING = """
import sys, time
from batchwright.distributed.fork_server import imported_once, start

with imported_once(), open(sys.argv[1], "ab") as log:
    sleep = ["-n1", "-r1", "import time; time.sleep(600)"]
    process = start("timeit", sleep, environment={}, log=log)
    print(process.pid, flush=True)
    time.sleep(600)
"""


def test_all_end_with_the_process_that_started_them(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", STARTING, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as launcher:
        pid = int(launcher.stdout.readline())
        server = parent_of(pid)
        assert is_there(pid)
        assert is_there(server)
        launcher.kill()
    wait_for(lambda: not is_there(pid) and not is_there(server))


def test_servers_of_all_who_run_tests_are_forked_from_one_and_end_with_their_lines(
    program, tmp_path, monkeypatch
):
    monkeypatch.setattr(forked, "_ALL", ())
    monkeypatch.setenv("FORKED_ROOT", f"forked-root-of-{os.getpid()}")
    root = forked.start_root()
    try:
        for _ in range(2):
            server = forked._Rooted(os.environ["FORKED_ROOT"])
            with forked._forked_from(server):
                process, told = begin(program, "3", tmp_path)
                assert process.wait() == 3
                stays, _ = begin(program, "stays", tmp_path)
            assert parent_of(told["parent"]) == root.pid
            server.close()
            wait_for(lambda pid=stays.pid: not is_there(pid))
            wait_for(lambda pid=told["parent"]: not is_there(pid))
        server = forked._Rooted(os.environ["FORKED_ROOT"])
        with forked._forked_from(server):
            stays, _ = begin(program, "stays", tmp_path)
            os.kill(parent_of(stays.pid), signal.SIGKILL)
            wait_for(lambda: stays.poll() == -signal.SIGKILL)
        server.close()
    finally:
        root.kill()
        root.wait()


COMPUTING = """
import sys, threadpoolctl, torch
found = [one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"]
sys.exit(10 * min(found, default=0))
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a BLAS takes no more threads than cores")
def test_numpy_computes_with_a_workers_threads(tmp_path, monkeypatch):
    (tmp_path / "computing.py").write_text(COMPUTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with imported_once(), (tmp_path / "log").open("ab") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "2"}
        told = start("computing", [], environment=environment, log=log).wait()
    if told == 0:
        pytest.skip("this NumPy has no BLAS whose threads can be told")
    assert told == 20


def test_elsewhere_workers_are_started_as_usual(program, tmp_path, monkeypatch):
    monkeypatch.setattr(fork_server.sys, "platform", "darwin")
    with imported_once():
        process, told = begin(program, "0", tmp_path)
        assert process.wait() == 0
    assert told["parent"] == os.getpid()


ASKS = """
import importlib, torch
from unittest import mock
def asked(*_, **__):
    raise SystemExit("a GPU was asked for")
for name in ("is_available", "device_count", "current_device", "_lazy_init"):
    mock.patch.object(torch.cuda, name, asked).start()
from batchwright.distributed.fork_server import _MODULES
for module in _MODULES:
    importlib.import_module(module)
"""


def test_no_gpu_is_asked_for_before_the_fork():
    """Once CUDA's driver was called in a process, it does nothing in those forked from it."""
    told = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, check=False)
    assert not told.returncode, told.stderr
