"""What makes workers uneven in the benchmark and in tests does so for real, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import chain, islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks run from the project's root and are not installed

from benchmarks.harness import loads  # noqa: E402
from benchmarks.harness.loads import Burner, Slowdown, children, pin  # noqa: E402

SECONDS = 300  # until something that should happen is missed
CORE = min(os.sched_getaffinity(0))


def eventually(true):
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, f"not within {SECONDS} s"
        time.sleep(0.01)


def processor_seconds(pid):
    """User time of a process, its 14th field; the second may hold spaces."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_burner_burns_on_its_core_only_and_is_gone_after_stopping() -> None:
    with Burner(CORE) as burner:
        pid = burner.pid
        assert os.sched_getaffinity(pid) == {CORE}
        before = processor_seconds(pid)
        eventually(lambda: processor_seconds(pid) > before)
        with pytest.raises(RuntimeError, match="burning already"):
            burner.start()
    assert not runs(pid)
    assert burner.pid is None
    burner.stop()


@pytest.mark.slow
def test_a_burner_can_be_started_again_and_rest_between() -> None:
    burner = Burner(CORE, share=0.25)
    pids = []
    for _ in range(2):
        with burner:
            pids.append(burner.pid)
    assert pids[0] != pids[1]
    assert not any(map(runs, pids))


@pytest.mark.slow
def test_a_burner_dies_with_a_starter_that_is_killed() -> None:
    code = f"""
import time
from benchmarks.harness.loads import Burner
burner = Burner({CORE})
burner.start()
print(burner.pid, flush=True)
time.sleep({SECONDS})
"""
    starter = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        burner = int(starter.stdout.readline())
        assert burner in children(starter.pid)
        starter.send_signal(signal.SIGKILL)
        eventually(lambda: not runs(burner))
    finally:
        starter.kill()
        starter.communicate()


@pytest.mark.slow
def test_a_core_that_is_not_there_is_an_error_and_leaves_no_process() -> None:
    burner = Burner(10_000)
    before = children(os.getpid())
    with pytest.raises(OSError, match="Invalid argument"):
        burner.start()
    assert burner.pid is None
    assert children(os.getpid()) == before


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_burner_wants_some_of_a_core_and_no_more_than_all(share: float) -> None:
    with pytest.raises(ValueError, match="more than 0 and at most 1"):
        Burner(CORE, share)


def pinned_threads() -> str:
    """Number of threads, and whether all of them may run on the one core only."""
    torch.set_num_threads(3)
    torch.rand(1_000_000).sum()  # brings the pool to life
    pin(CORE)
    threads = [int(thread.name) for thread in Path("/proc/self/task").iterdir()]
    return f"{len(threads)} {all(os.sched_getaffinity(one) == {CORE} for one in threads)}"


@pytest.mark.slow
def test_pinning_takes_the_threads_that_are_there_already() -> None:
    code = "import test_loads; print(test_loads.pinned_threads())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    threads, pinned = done.stdout.split()
    assert int(threads) > 1
    assert pinned == "True"


def test_a_slowdown_sleeps_in_proportion_to_what_forward_and_backward_took() -> None:
    seconds, slept = iter([10.0, 10.5, 20.0, 20.25]), []
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    Slowdown(network, 3.0, clock=lambda: next(seconds), sleep=slept.append)
    for step in range(2):
        network(torch.ones(5, 3)).sum().backward()
        assert len(slept) == step + 1
    assert slept == [2 * 0.5, 2 * 0.25]


def test_a_slowdown_comes_after_the_last_gradient() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    missing: list[bool] = []
    Slowdown(
        network,
        2.0,
        clock=lambda: 0.0,
        sleep=lambda _: missing.extend(p.grad is None for p in network.parameters()),
    )
    network(torch.ones(5, 3)).sum().backward()
    assert missing == [False] * 4


def test_a_slowdown_does_not_speed_up() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Slowdown(nn.Linear(1, 1), 0.5)


def test_a_burner_with_a_seed_comes_and_goes_the_same_way_every_time(monkeypatch) -> None:
    def burned(seed: int) -> list[float]:
        """Seconds of the first ten stretches, of burning and of resting in turns."""
        now, marks = [0.0], [0.0]

        def monotonic() -> float:
            now[0] += 0.01
            return now[0]

        def rest(seconds: float) -> None:
            marks.append(now[0])
            now[0] += seconds
            marks.append(now[0])
            if len(marks) > 10:
                raise KeyboardInterrupt

        clock = SimpleNamespace(monotonic=monotonic, sleep=rest)
        monkeypatch.setattr(loads, "time", clock)
        with pytest.raises(KeyboardInterrupt):
            loads._burn(CORE, 1.0, seed)
        return [after - before for before, after in pairwise(marks)]

    for name in ("die_with_parent", "pin"):
        monkeypatch.setattr(loads, name, lambda _: None)
    found = burned(0)
    assert found == burned(0) != burned(1)
    drawn = chain.from_iterable(islice(loads.stretches(0), 5))
    assert found == pytest.approx(list(drawn), abs=0.1)
    assert all(2 <= one <= 20.1 for one in found)
