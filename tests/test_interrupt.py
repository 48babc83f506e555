"""Ctrl-C ends the command with one line, whatever it is doing."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import termios

import pytest

from batchwright.planning.planner import plan_without_profile
from batchwright.records.documents import write_record
from batchwright.workflows.prepare_job import data_facts
from clients import wait_until
from forked import Forked, with_tests
from held_network import hold
from samples import make_job, make_network

pytestmark = pytest.mark.slow
SECONDS = 300  # until a command that hangs is ended
STOPPED = "error: stopped by Ctrl-C\n"
PAUSE = """
import os, time
os.write(1, b"now\\n")
time.sleep(600)
"""


@pytest.fixture
def interrupted(tmp_path, tmp_path_factory, forks):
    """Runs a command that finds a module of ours, and sends SIGINT once it has written a line."""
    how = {"cwd": tmp_path, "env": os.environ, "prints": tmp_path_factory.mktemp("prints")}

    def call(module, code):
        (tmp_path / f"{module}.py").write_text(code)
        process = Forked(("run", f"network={module}:network"), **how)
        try:
            wait_until(lambda: "now\n" in process.said()[0] or process.poll() is not None)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(SECONDS)
        finally:
            process.kill()
        return process.returncode, err

    return call


def test_ctrl_c_ends_the_command_while_it_is_imported(tmp_path):
    """As a process of its own, which imports all itself."""
    (tmp_path / "typer.py").write_text(PAUSE)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "batchwright", "--help"],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (130, STOPPED)


def test_ctrl_c_ends_an_import_that_would_lose_it(interrupted):
    """Where it is in vain to raise KeyboardInterrupt: an extension module may lose it."""
    lost = "try:\n    from pauses import nothing\nexcept BaseException:\n    pass\n"
    (code, err) = interrupted("pauses", PAUSE)
    assert (code, err) == (130, STOPPED)
    (code, err) = interrupted("loses", lost)
    assert (code, err) == (130, STOPPED)


def test_ctrl_c_closes_what_a_command_has_open(interrupted, tmp_path):
    works = "def network(**_):\n    import os\n    os.dup2(os.open(os.devnull, 1), 2)\n    try:"
    works += PAUSE.replace("\n", "\n        ")
    works += "\n    finally:\n        open('closed', 'w').close()\n"
    # What libraries say on standard error is thrown away meanwhile, as by the probe.
    code, err = interrupted("works", works)
    assert (code, err) == (130, STOPPED)
    assert (tmp_path / "closed").exists()


def test_a_second_ctrl_c_leaves_what_the_first_had_to_say(interrupted, tmp_path):
    (tmp_path / "pauses.py").write_text(PAUSE)
    for meanwhile in (PAUSE, "\nimport pauses\n"):  # where it unwinds, and where it cannot
        again = "def network(**_):\n    from batchwright.errors import Interrupted\n    try:\n"
        again += "        raise Interrupted(2, 'stopped; continue with `that`')\n    finally:"
        again += meanwhile.replace("\n", "\n        ")
        code, err = interrupted("again", again)
        assert (code, err) == (130, "error: stopped; continue with `that`\n")


def test_ctrl_c_in_a_finalizer_is_not_lost(interrupted):
    """Python prints what is raised in `__del__`, and goes on."""
    late = "class Late:\n    def __del__(self):" + PAUSE.replace("\n", "\n        ")
    late += "\ndef network(**_):\n    Late()" + PAUSE.replace("now", "on").replace("\n", "\n    ")
    code, err = interrupted("late", late)
    assert (code, err) == (130, STOPPED)


def test_ctrl_c_ends_a_command_that_is_ending(interrupted):
    late = "import atexit\n\n@atexit.register\ndef end():" + PAUSE.replace("\n", "\n    ")
    code, err = interrupted("late", late)
    assert code == 130
    assert err.splitlines()[-1] == "error: stopped by Ctrl-C"
    assert "Traceback" not in err


@pytest.mark.parametrize("launch", ["local", "in-process"])
def test_a_run_whose_terminal_is_closed_writes_a_checkpoint(tmp_path, launch):
    """The kernel sends SIGHUP, and whatever is printed from then on fails."""
    job = make_job(launch=launch, network="held_network:network", workers=1, epochs=500)
    write_record(
        plan_without_profile(job, data_facts(job), make_network(name=job.network)),
        tmp_path / "plan.json",
    )
    hold(tmp_path, "run/metrics.jsonl", 0.1)
    screen, terminal = os.openpty()
    words = ("train", "plan.json", f"network={job.network}", "--out", "run")
    process = subprocess.Popen(
        [sys.executable, "-m", "batchwright", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": with_tests(os.environ)},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)

    def trains():
        if select.select([screen], [], [], 0)[0]:
            os.read(screen, 1 << 16)
        return (tmp_path / "run" / "metrics.jsonl").exists()

    try:
        wait_until(trains, "a step")
        os.close(screen)
        assert process.wait(SECONDS) == 129
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()
