"""Killed workers, started again by torchrun itself or by hand: nothing is lost, nothing repeated.

Real processes and real kill -9, at moments drawn anew in every run of these tests.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from batchwright.algorithms.learning_rate import rate_factor
from batchwright.records import LearningRateRule
from batchwright.records.documents import write_record
from forked import TORCHRUN, Forked
from test_session import make_tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forks")]
SCRIPT = Path(__file__).with_name("recovering.py")
SAMPLES, BATCH, EPOCHS = 105, 12, 14  # eight whole steps and a tail of 9, which 4 workers can share
STEPS = EPOCHS * 9
SECONDS = 300  # until a launch that hangs is ended
RULE = LearningRateRule(
    base=0.1, base_batch=8, scaling="linear", peak=0.15, warmup_epochs=2, decay="cosine"
)


def make_folder(folder, workers):
    plan = make_tiny_plan(
        (BATCH // workers,) * workers,
        samples=SAMPLES,
        epochs=EPOCHS,
        rule=RULE,
        checkpoint_steps=7,
    )
    folder.mkdir()
    write_record(plan, folder / "plan.json")
    return folder


@contextmanager
def launched(folder, workers, launch=0, *, restarts=0, resume=False, fork=True, stays=False):
    """A running torchrun; ended with its workers if it still runs after, or runs too long.

    One that stays has not come to its end before the folder's file "stay" is gone.
    """
    if stays:
        (folder / "stay").touch()
    words = ["--standalone", f"--nproc-per-node={workers}", f"--max-restarts={restarts}"]
    words += [str(SCRIPT), str(folder), str(launch), *["--resume"] * resume]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    prints = folder / f"log-{launch}"
    prints.mkdir()
    if fork:
        how = {"cwd": folder, "env": environment, "prints": prints}
        process = Forked(words, **how, program=TORCHRUN)
    else:
        with (prints / "err").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", TORCHRUN, *words], stderr=log, env=environment
            )
    try:
        yield process
        process.wait(SECONDS)
    finally:
        if process.poll() is None:
            # torchrun ends its workers, which are in sessions of their own
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)


def read_life(folder, name):
    """A worker's process number and the steps it noted; a line in the making is left out."""
    path = folder / f"life-{name}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return (int(lines[0]), [json.loads(line) for line in lines[1:]]) if lines else (None, [])


def wait_for_steps(folder, process, name, steps):
    """Wait until a worker's life has begun and so many steps are noted."""
    end = time.monotonic() + SECONDS
    while read_life(folder, name)[0] is None or len(read_life(folder, name)[1]) < steps:
        assert process.poll() is None, last_words(folder)
        assert time.monotonic() < end, last_words(folder)
        time.sleep(0.002)


def wait_for_a_checkpoint(folder, process):
    end = time.monotonic() + SECONDS
    while not (folder / "run" / "checkpoints" / "last.pt").exists():
        assert process.poll() is None, last_words(folder)
        assert time.monotonic() < end, last_words(folder)
        time.sleep(0.002)


def kill_one(folder, process, workers, life, chance):
    """kill -9 one worker of a life, some steps and a moment into it."""
    victim = f"{life}-{chance.randrange(workers)}"
    wait_for_steps(folder, process, victim, chance.randrange(30))
    time.sleep(chance.random() * 0.02)
    os.kill(read_life(folder, victim)[0], signal.SIGKILL)
    (folder / "stay").unlink()


def last_words(folder):
    """Ends of the launches' logs, for a test that fails."""
    return "".join(log.read_text()[-2000:] for log in sorted(folder.glob("log-*/*")))


def run_undisturbed(folder, workers):
    with launched(make_folder(folder, workers), workers) as process:
        pass
    assert process.returncode == 0, last_words(folder)
    return folder


@pytest.fixture(scope="module")
def chance():
    seed = time.time_ns()
    print(f"kills drawn with seed {seed}")  # noqa: T201 - shown where a test fails
    return random.Random(seed)


@pytest.fixture(scope="module")
def four(tmp_path_factory, chance):
    """Four workers, killed once: the finished run, and its folder as the killed ones left it."""
    place = tmp_path_factory.mktemp("four")
    folder = make_folder(place / "killed", 4)
    with launched(folder, 4, restarts=1, stays=True) as process:
        wait_for_a_checkpoint(folder, process)  # without one a run begins, with workers as planned
        (folder / "hold").touch()
        kill_one(folder, process, 4, "0-0", chance)
        wait_for_steps(folder, process, "0-1-0", 0)  # the first life is over
        later = shutil.ignore_patterns("life-0-1-*", "hold")
        shutil.copytree(folder, place / "left", ignore=later)
        (folder / "hold").unlink()
    assert process.returncode == 0, last_words(folder)
    return folder, place / "left"


def committed_steps(folder):
    """By step, what all workers together were trained on, as the finished run went in the end.

    A step that a life took counts if the next life did not go back before it.
    """
    lives = defaultdict(list)
    for path in folder.glob("life-*.jsonl"):
        launch, restart, rank = path.stem.split("-")[1:]
        lives[int(launch), int(restart)] += read_life(folder, f"{launch}-{restart}-{rank}")[1]
    trained = [lives[key] for key in sorted(lives) if lives[key]]
    starts = [min(note["step"] for note in notes) for notes in trained]
    steps = defaultdict(list)
    for notes, end in zip(trained, [*starts[1:], STEPS], strict=True):
        for note in notes:
            if note["step"] < end:
                steps[note["step"]].append(note)
    return steps


def check_whole(folder):
    """Every sample once per epoch, every step the global batch, every rate as the schedule says."""
    steps = committed_steps(folder)
    assert sorted(steps) == list(range(STEPS))
    seen = defaultdict(list)
    for step, notes in steps.items():
        (epoch,) = {note["epoch"] for note in notes}
        indices = [index for note in notes for index in note["indices"]]
        assert len(indices) == (BATCH if step % 9 < 8 else SAMPLES % BATCH)
        done = epoch * SAMPLES + step % 9 * BATCH
        factor = rate_factor(done, rule=RULE, samples_per_epoch=SAMPLES, epochs=EPOCHS)
        for note in notes:
            assert note["rate"] == pytest.approx(factor * 0.15, rel=1e-12)
        seen[epoch] += indices
    assert all(sorted(seen[epoch]) == list(range(SAMPLES)) for epoch in range(EPOCHS))


def same_bits(one, two, workers):
    """Weights, and each worker's own statistics."""
    for rank in range(workers):
        assert torch.equal(torch.load(one / f"{rank}.pt"), torch.load(two / f"{rank}.pt"))


def test_four_killed_workers_end_with_the_bits_of_an_undisturbed_run(tmp_path, four):
    folder, _ = four
    check_whole(folder)
    same_bits(run_undisturbed(tmp_path / "whole", 4), folder, 4)


def test_a_run_of_four_goes_on_with_two_then_three_then_two(four, chance):
    _, folder = four
    for launch, workers in ((1, 2), (2, 3)):
        with launched(folder, workers, launch, resume=True, stays=True) as process:
            kill_one(folder, process, workers, f"{launch}-0", chance)
        assert process.returncode != 0
    with launched(folder, 2, 3, resume=True) as process:
        pass
    assert process.returncode == 0, last_words(folder)
    check_whole(folder)
