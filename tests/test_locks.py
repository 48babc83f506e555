"""One writer at a time in a folder: held by whoever writes, freed by their end, however it came."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchwright.distributed.server_child import ServerChild
from batchwright.errors import FileError
from batchwright.records import Plan
from batchwright.records.documents import read_record, write_record
from batchwright.storage.locks import LOCK_FILE, take, writing
from samples import make_dual_plan
from test_recovery import (
    check_whole,
    last_words,
    launched,
    make_folder,
    read_life,
    wait_for_a_checkpoint,
    wait_for_steps,
)
from test_session import make_session

SECONDS = 300  # until a process that hangs is ended
HOLD = (
    "from pathlib import Path; from batchwright.storage.locks import take; "
    "lock = take(Path('.'), 'x')\n"
)
SLEEP = "import time; print('held', flush=True); time.sleep(600)\n"


@contextmanager
def process(folder, code):
    """A process that runs some lines in a folder, once it has printed a line; killed after."""
    one = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    try:
        one.line = one.stdout.readline().strip()
        yield one
    finally:
        one.kill()
        one.communicate()


def kill(one):
    one.kill()
    one.wait()


def is_held(folder):
    try:
        take(folder, "another", seconds=0, tell=print).close()
    except FileError:
        return True
    return False


# ------------------------------------------------------------------------------------- the message


def test_who_is_refused_learns_who_writes_where_and_what_to_try(tmp_path):
    lines = []
    host = os.uname().nodename
    with process(tmp_path, HOLD + SLEEP) as holder:
        known = rf"{tmp_path} is being written by process {holder.pid} on {host}, since 2\d\d\d-"
        with pytest.raises(FileError, match=known + r".*: wait .* name another --out$") as refused:
            take(tmp_path, "another --out", seconds=0.2, tell=lines.append)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    (waiting,) = lines
    assert waiting.startswith(f"{tmp_path} is being written by process {holder.pid}")
    assert waiting.endswith("waiting 0.2 s for it to end")
    take(tmp_path, "another --out").close()


def test_another_machine_may_be_down_and_nonsense_names_nobody(tmp_path):
    with process(tmp_path, HOLD + SLEEP):
        for words, told in (
            ("process 7 on elsewhere, since then", "if that machine is down, the shared disk"),
            ("\x1b[2J", "being written by another process:"),
            ("", "being written by another process:"),
        ):
            (tmp_path / LOCK_FILE).write_text(words)
            with pytest.raises(FileError, match=told):
                take(tmp_path, "another", seconds=0, tell=print)


def test_what_stands_in_the_file_decides_nothing(tmp_path):
    (tmp_path / LOCK_FILE).write_text(f"process {os.getppid()} on {os.uname().nodename}, since now")
    take(tmp_path, "another", seconds=0).close()


# ------------------------------------------------------------------------------- who holds the lock


def test_a_holder_that_is_just_ending_is_waited_for(tmp_path):
    with process(tmp_path, HOLD + SLEEP) as holder:
        told = threading.Event()
        threading.Thread(target=lambda: told.wait(SECONDS) and holder.kill(), daemon=True).start()
        take(tmp_path, "another", seconds=SECONDS, tell=lambda _: told.set()).close()


def test_nobody_is_waited_for_once_a_stop_is_asked_for(tmp_path):
    with process(tmp_path, HOLD + SLEEP), pytest.raises(FileError):
        take(tmp_path, "another", seconds=1e9, unless=lambda: True, tell=print)


def test_a_folder_is_held_until_those_that_were_handed_the_lock_have_gone(tmp_path):
    child = (
        "import subprocess, sys\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(command, pass_fds=[lock.descriptor])\n"
        "print(child.pid, flush=True); child.wait()\n"
    )
    with process(tmp_path, HOLD + child) as holder:
        kill(holder)
        assert is_held(tmp_path)
        os.kill(int(holder.line), signal.SIGKILL)
        take(tmp_path, "another", seconds=SECONDS).close()


def test_a_forked_child_holds_nothing_and_can_still_take_the_lock(tmp_path):
    fork = (
        "import os, sys, time\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    take(Path('.'), 'x', seconds=600, tell=lambda _: print(os.getpid(), flush=True))\n"
        "    Path('taken').touch()\n"
        "time.sleep(600)\n"
    )
    with process(tmp_path, HOLD + fork) as holder:
        try:
            kill(holder)
            end = time.monotonic() + SECONDS
            while not (tmp_path / "taken").exists():
                assert time.monotonic() < end
                time.sleep(0.05)
        finally:
            os.kill(int(holder.line), signal.SIGKILL)


def test_what_is_called_inside_writes_too_and_nobody_else_in_the_process_does(tmp_path):
    with writing(tmp_path):
        with writing(tmp_path) as inner:
            assert is_held_elsewhere(tmp_path)
            assert fcntl.fcntl(inner.descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert is_held_elsewhere(tmp_path)
    assert not is_held(tmp_path)


def is_held_elsewhere(folder):
    """As another thread, which was lent nothing, finds it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(is_held(folder)))
    thread.start()
    thread.join()
    return found[0]


def test_a_process_that_was_handed_the_lock_joins_it_and_hands_it_on_to_none(tmp_path):
    join = (
        HOLD + "import fcntl, os, subprocess\n"
        "number = int(os.environ['BATCHWRIGHT_LOCK'])\n"
        "print(fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC, flush=True)\n"
        "lock.close(); take(Path('.'), 'x', seconds=0).close()\n"
    )
    lock = take(tmp_path, "another")
    done = subprocess.run(
        [sys.executable, "-c", join],
        cwd=tmp_path,
        env={**os.environ, **lock.environment},
        pass_fds=[lock.descriptor],
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert done.stdout == "1\n"
    assert is_held(tmp_path)
    lock.close()


def test_a_number_that_is_of_something_else_is_not_joined(tmp_path, monkeypatch):
    with (tmp_path / "other").open("w") as other:
        monkeypatch.setenv("BATCHWRIGHT_LOCK", str(other.fileno()))
        with process(tmp_path, HOLD + SLEEP):
            assert is_held(tmp_path)
        take(tmp_path, "another", seconds=0).close()
        other.write("still open")


def test_a_folder_that_was_made_anew_is_not_taken_for_the_old_one(tmp_path):
    folder = tmp_path / "run"
    first = take(folder, "another")
    shutil.rmtree(folder)
    second = take(folder, "another", seconds=0)
    first.close()
    assert is_held(folder)
    second.close()


def test_on_a_disk_that_cannot_lock_it_warns_and_goes_on(tmp_path, monkeypatch):
    def cannot(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", cannot)
    lines = []
    with take(tmp_path, "another", tell=lines.append):
        take(tmp_path, "another", tell=lines.append).close()
    assert all(line.startswith(f"warning: the disk of {tmp_path} cannot lock") for line in lines)
    assert len(lines) == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(FileError, match=f"cannot write {tmp_path}/{LOCK_FILE}: Is a directory"):
        take(tmp_path, "another")


# ---------------------------------------------------------------------------------------- own loops


def test_a_second_session_in_one_process_is_refused_at_once(tmp_path, capsys):
    with make_session(run_folder=tmp_path) as first:
        with pytest.raises(FileError, match=r"by this process already: .* name another run_folder"):
            make_session(run_folder=tmp_path, resume=True)
        assert "waiting" not in capsys.readouterr().err
        for _ in first.epochs():
            for features, labels in first.batches():
                first.step(first.model(features).mean() + 0 * labels.sum())
    assert not is_held(tmp_path)


def test_a_session_that_could_not_begin_holds_nothing(tmp_path):
    make_session(run_folder=tmp_path)._close(None)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(FileError, match="holds a run already"):
        make_session(run_folder=tmp_path)
    assert not is_held(tmp_path)


@pytest.mark.slow
def test_an_own_loop_that_is_started_twice_goes_on_once(tmp_path, forks):
    folder = make_folder(tmp_path / "twice", 2)
    plan = read_record(folder / "plan.json", Plan)
    patient = plan.job.model_copy(update={"timeout": 600.0})
    write_record(plan.model_copy(update={"job": patient}), folder / "plan.json")
    with launched(folder, 2, stays=True) as first:
        wait_for_a_checkpoint(folder, first)
        stopped = [read_life(folder, f"0-0-{rank}")[0] for rank in range(2)]
        for number in stopped:
            os.kill(number, signal.SIGSTOP)
        try:
            with launched(folder, 2, 1, resume=True) as second:
                pass
        finally:
            for number in stopped:
                os.kill(number, signal.SIGCONT)
            (folder / "stay").unlink()
    assert second.returncode != 0
    told = "".join(path.read_text() for path in (folder / "log-1").iterdir())
    assert f"run is being written by process {stopped[0]} on " in told
    assert first.returncode == 0, last_words(folder)
    check_whole(folder)


@pytest.mark.slow
def test_workers_end_with_torchruns_agent_and_the_next_launch_goes_on(tmp_path, forks):
    folder = make_folder(tmp_path / "orphans", 2)
    with launched(folder, 2, fork=False, stays=True) as first:  # its agent alone is their parent
        wait_for_steps(folder, first, "0-0-0", 1)
        wait_for_steps(folder, first, "0-0-1", 1)
        workers = [read_life(folder, f"0-0-{rank}")[0] for rank in range(2)]
        for number in workers:
            os.kill(number, signal.SIGSTOP)  # by themselves they will not come to an end
        first.kill()
        (folder / "stay").unlink()
    try:
        end = time.monotonic() + SECONDS
        while any(is_alive(number) for number in workers):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        for number in filter(is_alive, workers):
            os.kill(number, signal.SIGKILL)
    with launched(folder, 2, 1, resume=True) as second:
        pass
    assert second.returncode == 0, last_words(folder)
    check_whole(folder)


def is_alive(number):
    try:
        return "State:\tZ" not in Path(f"/proc/{number}/status").read_text()
    except OSError:
        return False


# ----------------------------------------------------------------------------- the parameter server


@pytest.mark.slow
def test_a_parameter_server_holds_the_folder_too(tmp_path, forks):
    lock = take(tmp_path, "another")
    server = ServerChild(make_dual_plan().model_dump(mode="json"), tmp_path, lock=lock)
    try:
        server.start(resume=False)
        lock.close()
        assert not server.wait_until_ready()
        assert is_held(tmp_path)
    finally:
        server.close()
    take(tmp_path, "another", seconds=SECONDS).close()
