"""Worker processes live no longer than their parent."""

import errno
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from batchwright.distributed.exit_reports import ERRORS_FOLDER, reports_in
from batchwright.distributed.processes import report_failure, spinning_shortly
from batchwright.errors import shortage


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux only")
@pytest.mark.slow
def test_a_worker_dies_with_its_parent(tmp_path):
    worker = (
        "import os, time; from batchwright.distributed.processes import die_with_parent\n"
        "die_with_parent('PARENT'); print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys; os.environ['PARENT'] = str(os.getpid())\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent, worker], stdout=subprocess.PIPE, text=True
    )
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 500
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def test_waiting_threads_soon_sleep_unless_the_user_says_otherwise():
    assert spinning_shortly({"HOME": "/"}) == {"HOME": "/", "GOMP_SPINCOUNT": "3000"}
    for variable in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        assert spinning_shortly({variable: "active"}) == {variable: "active"}


LEAVING = """
import gzip, io
from batchwright.distributed.processes import leave
held = [open("text", "w"), open("bytes", "wb"), gzip.open("packed", "wt")]
held[0].write("the last line")
held[1].write(b"the last byte")
held[2].write("the last word")
odd = io.TextIOWrapper.__new__(io.TextIOWrapper), io.BytesIO(), io.BufferedWriter(io.BytesIO())
leave(3)
"""


def test_files_that_nobody_closed_are_whole_at_the_end(tmp_path):
    done = subprocess.run([sys.executable, "-c", LEAVING], cwd=tmp_path, timeout=500, check=False)
    assert done.returncode == 3
    assert (tmp_path / "text").read_text() == "the last line"
    assert (tmp_path / "bytes").read_bytes() == b"the last byte"
    unpacked = zlib.decompressobj(wbits=31).decompress((tmp_path / "packed").read_bytes())
    assert unpacked == b"the last word"


ENDING = """
import os, sys
from batchwright.distributed.processes import end_with

class Kept:
    def __del__(self):
        os.write(1, b"taken apart\\n")

kept = Kept()
for code in (None, 3, "what is missing"):
    child = os.fork()
    if not child:
        print("printed before", code)
        end_with(lambda: sys.exit(code))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
end_with(lambda: print("the last line"))
print("never")
"""


def test_a_command_ends_with_its_exit_code_and_python_does_not_take_it_apart():
    words = [sys.executable, "-c", ENDING]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0
    assert done.stderr == "what is missing\n"  # as `sys.exit` prints it
    assert done.stdout.splitlines() == [
        *("printed before None", "0", "printed before 3", "3"),
        *("printed before what is missing", "1", "the last line"),
    ]


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def start_of(module):
    """A function of a module that starts a process where the system has none left."""
    scope = {"__name__": module, "error": BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))}
    exec("def start():\n    raise error", scope)  # noqa: S102 - it is ours
    return scope["start"]


@pytest.mark.parametrize("module", ["subprocess", "multiprocessing.popen_fork", "mine"])
def test_only_a_process_that_does_not_start_is_a_shortage_in_code_of_users(
    tmp_path, monkeypatch, module
):
    """A lock that another process has, or a socket without data, is told in the same words."""
    monkeypatch.setenv(ERRORS_FOLDER, str(tmp_path))
    with pytest.raises(BlockingIOError) as refused:
        start_of(module)()
    assert report_failure(refused.value) == 1
    (report,) = reports_in(tmp_path)
    own = f"BlockingIOError: [Errno {errno.EAGAIN}] {os.strerror(errno.EAGAIN)}"
    short = f"its machine is short of processes: {os.strerror(errno.EAGAIN)}"
    assert report["message"] == (own if module == "mine" else short)
    assert bool(shortage(refused.value, users=True)) == (module != "mine")
    assert shortage(refused.value)
