"""The command line: what it refuses and how, and that the verbs pipe."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
import torch
from PIL import Image

import batchwright as bw
from batchwright.cli import output
from batchwright.client.agent import Agent
from batchwright.errors import (
    BatchwrightError,
    DeadlineReached,
    Interrupted,
    JobError,
    PlanError,
    WorkerError,
    stopped_by,
)
from batchwright.planning.planner import plan_without_profile
from batchwright.probing.probe import Measured
from batchwright.records import Check, Job, KindCount, MemoryPoint, PairTime, Plan, Profile
from batchwright.records.documents import change_job, job_yaml, write_record
from batchwright.records.run_folder import (
    resuming_command,
    telling_how_to_resume,
    write_inputs,
)
from batchwright.records.text.plan_text import is_chosen
from batchwright.reporting.data.reading import overall
from batchwright.storage.locks import LOCK_FILE
from batchwright.workflows import doctor
from batchwright.workflows.job_changes import refuse_unconfirmed_code, with_job
from batchwright.workload.data.sources import open_data
from clusters import make_step
from samples import (
    make_data,
    make_epoch,
    make_hybrid_plan,
    make_job,
    make_network,
    make_plan,
    make_profile,
    make_server_summary,
    make_summary,
)

MINE = """
import pathlib
import torch

pathlib.Path("imported").touch()

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((3, 8, 8), index % 4 / 4.0), index % 4

def data():
    return Points(), Points(), ("a", "b", "c", "d")

def network(num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, num_classes))
"""


@pytest.fixture
def place(tmp_path, monkeypatch, cache):
    """An empty working folder."""
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(cache))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def refused(command, place):
    """Runs a command that must fail as the rules say; returns its message."""

    def call(*words, stdin="", progress=""):
        before = contents(place)
        code, out, err = command(*words, stdin=stdin)
        if progress:  # lines before the mistake was found
            shown, _, err = err.partition("error: ")
            assert all(line.startswith(progress) for line in shown.splitlines())
            err = f"error: {err}"
        assert err.startswith("error: "), err
        assert err.count("\n") == 1, err
        assert code == 2
        assert not out
        assert contents(place) == before
        return err.removeprefix("error: ").rstrip("\n")

    return call


def contents(folder):
    """Every file below a folder with its bytes, and every folder; a lock's file is no content."""
    found = (p for p in folder.rglob("*") if p.name != LOCK_FILE)
    return {p: p.read_bytes() if p.is_file() else None for p in found}


@pytest.fixture
def mine(place, monkeypatch):
    """A module of the user's in the working folder; importing it leaves a trace."""
    (place / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(place))
    yield place / "imported"
    sys.modules.pop("mine", None)


def image(path, color=(10, 20, 30), side=16):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), color).save(path)


@pytest.fixture
def folder_of_images(place):
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            for number in range(3):
                image(place / "images" / part / name / f"{number}.png", (number, 0, len(name)))
    return place / "images"


# ------------------------------------------------------------------------------- jobs that are bad


@pytest.mark.parametrize("verb", ["run", "probe"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data=digit"], "data=digit is unknown; did you mean digits?"),
        (["data=mnist"], "data=mnist is unknown; choose one of digits, cifar10:PATH"),
        (["data=cifar100"], "data=cifar100 needs the folder: data=cifar100:PATH"),
        (["data=/"], "data=/ is a folder: did you mean data=imagefolder:/?"),
        (["data=cifar100:/nowhere"], "/nowhere"),
        (["data=imagefolder:/nowhere"], "/nowhere does not exist: give one that holds a folder of"),
        (["data=no_such_module:data"], "module 'no_such_module' cannot be imported"),
        (["network=resnet9"], "network=resnet9: unknown; did you mean resnet"),
        (["network=resnet50"], "written timm:resnet50 or torchvision:resnet50"),
        (["network=no_such_module:net"], "cannot be imported: there is no no_such_module in /"),
        (["network=a_network.models:resnet50"], "there is no a_network in /"),
        (["network=os:no_such_name"], "module 'os' has no 'no_such_name'"),
        (["loss=mse"], "loss=mse: unknown; try cross_entropy"),
        (["loss=os.path:exists"], "loss=os.path:exists: cannot be called as loss(outputs, labels)"),
        (["weights=/nowhere.pt"], "weights=/nowhere.pt: cannot be read (No such file"),
        (["frozen=stage.*"], "frozen=stage.*: matches no parameter"),
        (["frozen=*"], "leaves no parameter to train"),
        (["precision=bf16"], "or 'float16'; write precision=bfloat16"),
        (["epochs=0"], "epochs = '0'"),
        (["epochs=-5"], "epochs = '-5'"),
        (
            ["epochs=many"],
            "epochs = 'many': input should be a valid integer; write, for instance, ",
        ),
        (["goal.accuracy=90"], "should be less than 1; write, for instance, goal.accuracy=0.9"),
        (
            ["goal.deadline=10 parsecs"],
            "a number of seconds, or a time such as 90s, 10min or 2h",
        ),
        (["epocs=3"], "unknown job key 'epocs': did you mean 'epochs'?"),
        (["learning_rate=nan"], "learning_rate = 'nan'"),
        (["global_batch=100000"], "global_batch=100000 is larger than the 1437 training images"),
        (["epochs=3", "warmup_epochs=4"], "warmup_epochs=4 is longer than epochs=3"),
        (["workers=2", "launch=in-process"], "workers=2 with launch=in-process"),
        (["resolutions=2"], "network=resnet8: takes images of at least 4 pixels, not 2"),
        (["nothing.yaml"], "there is no file nothing.yaml"),
        (["epochs=3", "nothing.yaml"], "'nothing.yaml' is no job key: write key=value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_job_is_refused(refused, verb, words, said):
    assert said in refused(verb, *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(refused):
    assert "device=cuda" in refused("run", "device=cuda")


def test_a_folder_named_like_a_source_is_taken_for_a_folder(refused, place):
    """`data=photos` was answered with `did you mean https://PLACE?`."""
    (place / "photos").mkdir()
    said = refused("run", "data=photos")
    assert said.startswith("data=photos is a folder: did you mean data=imagefolder:photos?")


def test_a_bad_job_file_is_refused_by_name(refused, place):
    (place / "job.yaml").write_text("epochs: 3: 4\n")
    assert refused("run", "job.yaml").startswith("job.yaml line 1 is not YAML")
    (place / "job.yaml").write_text("epochs: many\n")
    assert "epochs = 'many' in job.yaml" in refused("probe", "job.yaml")


def test_a_port_in_use_is_refused(refused):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = f"port={port} cannot be used (Address already in use): choose another, or port=0"
        assert said in refused("run", f"port={port}")
        plan = make_plan().model_dump_json()
        assert said in refused("train", "-", f"port={port}", stdin=plan)


@pytest.mark.parametrize("verb", ["run", "probe", "train", "check"])
@pytest.mark.parametrize("threads", ["abc", "0", "-1", "1.5", "\u00b2", "9" * 5000])
def test_threads_that_are_no_number_are_refused(refused, monkeypatch, verb, threads):
    monkeypatch.setenv("BATCHWRIGHT_THREADS", threads)
    words, given = ((), "") if verb in ("run", "probe") else (("-",), make_plan().model_dump_json())
    message = refused(verb, *words, stdin=given)
    assert message.startswith(f"BATCHWRIGHT_THREADS={threads[:60]}: give the compute threads of a ")


@pytest.mark.parametrize("threads", ["x", "-1", "1.5", "2,x"])
def test_openmp_threads_that_are_no_number_are_refused(refused, monkeypatch, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    message = refused("run")
    assert message.startswith(f"OMP_NUM_THREADS={threads}: give compute threads, a whole number")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("BATCHWRIGHT_REPORT_TO", "abc", "'abc' is no address of a service: write it as"),
        ("BATCHWRIGHT_TRACKERS", "abc, ", "there is no tracker 'abc': known are"),
    ],
)
def test_what_an_environment_variable_says_wrong_is_told_with_its_name(
    refused, monkeypatch, variable, value, said
):
    monkeypatch.setenv(variable, value)
    assert refused("run").startswith(f"{variable}: {said}")


def test_an_unreadable_image_is_named_and_may_be_skipped(refused, command, folder_of_images):
    broken = folder_of_images / "train" / "cat" / "broken.png"
    broken.write_bytes(b"this is no image")
    words = ["run", f"data=imagefolder:{folder_of_images}", "resolutions=16"]
    message = refused(*words, progress="decoding images")
    assert str(broken) in message
    assert "unreadable=skip" in message
    message = refused(*words, "unreadable=skip", "global_batch=100", progress="decoding images")
    assert "larger than the 6 training images" in message


def test_class_folders_that_differ_are_named(refused, folder_of_images):
    image(folder_of_images / "val" / "mouse" / "0.png")
    assert "mouse" in refused("run", f"data=imagefolder:{folder_of_images}")


def test_a_folder_without_held_out_images_says_how_to_hold_some_out(refused, place):
    for name in ("cat", "dog"):
        image(place / "images" / "train" / name / "0.png")
    assert "val=0.1" in refused("run", f"data=imagefolder:{place / 'images'}")


def test_a_truncated_cifar_file_is_named(refused, place):
    content = {
        b"data": np.zeros((20, 3072), np.uint8),
        b"fine_labels": list(range(20)),
        b"coarse_labels": [0] * 20,
        b"filenames": [b"x"] * 20,
    }
    folder = place / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"n"] * 100}))
    (folder / "train").write_bytes((folder / "train").read_bytes()[:-100])
    message = refused("run", f"data=cifar100:{folder}", progress="reading CIFAR-100")
    assert f"{folder / 'train'} is truncated" in message


# ------------------------------------------------------------------------------------------ places


def test_a_folder_that_holds_anything_is_left_alone(refused, place):
    (place / "run").mkdir()
    (place / "run" / "notes.txt").write_text("mine")
    said = "run exists and is not empty: choose another --out"
    assert refused("run", "--out", "run") == said
    (place / "run" / "job.yaml").write_text("epochs: 3\n")
    assert refused("run", "--out", "run") == f"{said}, or continue its run with --resume"


@pytest.mark.parametrize("out", ["file/run", "/proc/run"])
def test_a_run_folder_that_cannot_be_made_is_refused(refused, place, out):
    (place / "file").write_text("")
    message = refused("run", "--out", out)
    assert f"cannot write {out}" in message
    assert message.endswith("name another --out")


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("nowhere/profile.json", "no such folder, or not writable"),
        ("file/profile.json", "no such folder, or not writable"),
        ("folder", "it is a folder; name a file in it"),
        ("loop", "it is a link that leads back to itself; remove it"),
        ("x" * 256, "its name is too long"),
    ],
)
def test_a_profile_that_cannot_be_written_is_refused_before_measuring(refused, place, out, said):
    (place / "folder").mkdir()
    (place / "file").touch()
    (place / "loop").symlink_to("loop")
    assert f"cannot write {out}: {said}" in refused("probe", "--out", out)


def test_a_figure_that_cannot_be_written_is_refused_before_anything_is_done(refused, place):
    write_record(make_profile(), place / "profile.json")
    write_record(make_plan(), place / "plan.json")
    for verb, file in (("plan", "profile"), ("schedule", "plan"), ("simulate", "plan")):
        words = (verb, f"{file}.json", "--figure")
        assert "cannot write no/a.png: no such folder" in refused(*words, "no/a.png")
        assert "a figure ends in one of .png, .pdf, .svg" in refused(*words, "a.gif")


def test_a_device_is_written_to_by_whoever_may(command, place, monkeypatch):
    write_record(make_profile(), place / "profile.json")
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/dev" and real(path, mode))
    assert command("plan", "profile.json", "--out", "/dev/null")[:2] == (0, "")


def test_a_plan_that_cannot_be_written_is_refused(refused, command, place):
    write_record(make_profile(), place / "profile.json")
    code, out, err = command("plan", "profile.json", "--out", "nowhere/plan.json")
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last == ("error: cannot write nowhere/plan.json: no such folder, or not writable")


@pytest.mark.parametrize(
    ("verb", "holds"), [("plan", "a profile"), ("simulate", "a plan"), ("probe", "something else")]
)
def test_a_record_is_written_over_nothing_but_one_of_its_kind(refused, place, verb, holds):
    write_record(make_profile(), place / "profile.json")
    write_record(make_plan(), place / "plan.json")
    (place / "job.yaml").write_text("epochs: 3")
    file = {"plan": "profile.json", "simulate": "plan.json", "probe": "job.yaml"}[verb]
    assert f"{file} holds {holds}" in refused(verb, file, "--out", file)
    with pytest.raises(BatchwrightError, match=r"plan\.json holds a plan"):
        bw.probe(epochs=3, out=place / "plan.json")


def test_the_records_of_a_run_that_has_trained_stay_as_they_are(refused, command, place):
    run = place / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "job.yaml").touch()
    (run / LOCK_FILE).touch()
    write_record(make_profile(), run / "profile.json")
    write_record(make_plan(), run / "plan.json")
    before = (run / "plan.json").read_bytes()
    said = "{0} is a record of the run in run, which has trained, and stays as it is: name another"
    to = "run/plan.json"
    assert said.format(to) in refused("plan", "run", "epochs=7", "--out", to)
    to = "run/profile.json"
    assert said.format(to) in refused("check", "run", "--profile", "run", "--out", to)
    assert (run / "plan.json").read_bytes() == before
    assert command("plan", "run", "epochs=7", "--out", "run/longer.json")[0] == 0


def test_a_record_is_written_over_an_earlier_one_of_its_kind(command, place):
    write_record(make_profile(), place / "profile.json")
    write_record(make_plan(), place / "plan.json")
    (place / "empty.json").touch()
    for name in ("plan.json", "empty.json"):
        assert command("plan", "profile.json", "epochs=7", "--out", name)[0] == 0
        assert bw.load(place / name).epochs == 7


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--out"),
        ("report",),
        ("plan",),
        ("train",),
        ("schedule",),
        ("export", "--as", "sbatch"),
    ],
    ids=" ".join,
)
def test_a_name_that_is_too_long_is_refused(refused, words):
    assert "File name too long" in refused(*words, "x" * 300)


def test_a_key_may_be_longer_than_the_name_of_a_file(refused, command, place):
    assert "unknown" in refused("run", f"network={'x' * 300}")
    write_record(make_profile(), place / "profile.json")
    kinds = ", ".join(f"{{kind: k{name}, count: 1, like: other}}" for name in range(20))
    assert "'other'" in refused("plan", "profile.json", f"goal.kinds=[{kinds}]")


def test_a_word_that_is_no_text_is_refused(refused):
    assert r"'runs/\udcff' is not text in UTF-8" in refused("run", "--out", "runs/\udcff")


def test_a_number_beyond_those_that_floats_hold_is_refused(refused, place):
    write_record(make_profile(), place / "profile.json")
    assert "job key epochs = " in refused("plan", "profile.json", f"epochs={'9' * 400}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("epochs=9007199254740992",), "epochs = '9007199254740992': input should be less than"),
        (("workers=9007199254740992",), "workers = '9007199254740992': input should be "),
        (("dual.large_batches=9007199254740992",), "less than or equal to 10000000"),
        (("link.latency=1e300", "link.bandwidth=1"), "link.latency = '1e300': input"),
        (("link.latency=0", "link.bandwidth=1e-300"), "link.bandwidth = '1e-300': input should"),
        (("virtual.speeds=1,5e-324",), "virtual.speeds.1 = '5e-324': input should be greater"),
        (("virtual.links=1,1e-308",), "virtual.links.1 = '1e-308': input should be greater"),
        (("virtual.sample_seconds=1e308",), "virtual.sample_seconds = '1e308': input should be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_amounts_beyond_what_anybody_has_are_refused(refused, place, words, said):
    write_record(make_profile(), place / "profile.json")
    assert said in refused("plan", "profile.json", *words)
    assert said in refused("schedule", "data=digits", "global_batch=512", *words)


def test_what_no_record_can_be_is_told_with_what_writes_one(refused, place):
    (place / "bytes.json").write_bytes(b"\xff\xfe")
    (place / "folder").mkdir()
    (place / "job.yaml").write_bytes(b"epochs: 3\0")
    writes = "; `batchwright probe` writes a profile"
    said = f"cannot read bytes.json: it is not text in UTF-8{writes}"
    assert refused("plan", "bytes.json") == said
    assert refused("plan", "folder") == f"cannot read folder: Is a directory{writes}"
    assert refused("run", "folder") == "cannot read folder: Is a directory; name a file"
    assert "not YAML: special characters are not allowed" in refused("run", "job.yaml")
    assert refused("run", "-").startswith("standard input is empty, where a job was expected")
    assert "'x' is not one of" in (said := refused("serve", "--log-level", "x"))
    assert "Value error" not in said


def test_a_message_acts_on_no_terminal(refused, place):
    (place / "job.yaml").write_text('network: "\\e[31mred"')
    assert r"network=\x1b[31mred" in refused("run", "job.yaml")


def test_output_to_a_full_disk_is_an_error_of_one_line(command, place, monkeypatch):
    write_record(make_profile(), place / "profile.json")
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = command("plan", "profile.json")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot write: No space left on device" in err


@pytest.mark.slow
@pytest.mark.parametrize("words", ["run nonsense=2", "run --nonsense"])
@pytest.mark.parametrize("shell", ['"$@" 2>/dev/full', '"$@" 2>&1 >/dev/full | true'])
def test_the_exit_code_is_that_of_the_error_also_where_nothing_can_be_printed(place, shell, words):
    line = ["bash", "-o", "pipefail", "-c", shell, "-"]
    done = subprocess.run([*line, sys.executable, "-m", "batchwright", *words.split()])
    assert done.returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize(("shell", "code"), [('"$@" | true', 1), ('"$@" >/dev/full', 2)])
def test_output_that_nobody_takes_is_told_by_the_exit_code(place, shell, code):
    write_record(make_profile(), place / "profile.json")
    line = ["bash", "-o", "pipefail", "-c", shell, "-"]
    words = [sys.executable, "-m", "batchwright", "plan", "profile.json"]
    assert subprocess.run([*line, *words]).returncode == code


def test_streams_that_the_caller_has_closed_take_no_file_of_ours(place):
    script = """
import os, sys, batchwright.__main__
assert all(map(os.get_inheritable, range(3)))  # a worker's would be closed
with open("file", "w") as file:
    assert file.fileno() > 2
    print("lost", file=sys.stdout)
    print("lost", file=sys.stderr)
    file.write(sys.stdin.read() + "kept")
"""
    shell = 'exec "$0" -c "$1" <&- >&- 2>&-'
    subprocess.run(["/bin/sh", "-c", shell, sys.executable, script], check=True)
    assert (place / "file").read_text() == "kept"


def test_a_file_may_begin_with_the_mark_that_other_systems_put_there(command, place):
    (place / "profile.json").write_text("\ufeff" + make_profile().model_dump_json(), "utf-8")
    assert command("plan", "profile.json")[0] == 0
    assert command("plan", "-", stdin=(place / "profile.json").read_text("utf-8"))[0] == 0


def test_a_folder_that_is_not_there_any_more_is_nowhere_to_start(command, place):
    place.rmdir()
    code, out, err = command("doctor")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "the folder that this was started in is not there any more" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unwritable to root")
def test_an_unwritable_folder_is_refused(refused, place):
    (place / "locked").mkdir(mode=0o500)
    assert "cannot write locked/run: Permission denied" in refused("run", "--out", "locked/run")


# ---------------------------------------------------------------------------------- plan and train


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["network=vgg8"], "measured with network=resnet8, the job says network=vgg8: probe again"),
        (["workers=3"], "measured with workers=1,2, the job says workers=3: probe again"),
        (["data=cifar10:/x"], "measured with data=digits, the job says data=cifar10:/x"),
        (["global_batch=5000"], "5000"),
        (["goal.memory=1000"], "raise goal.memory"),
        (["epochs=2", "warmup_epochs=3"], "warmup_epochs=3 is longer than epochs=2"),
        (["epochs=0"], "epochs = '0'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_plan_that_the_profile_cannot_give_is_refused(refused, place, words, said):
    write_record(make_profile(), place / "profile.json")
    assert said in refused("plan", "profile.json", *words)
    assert said in refused("plan", "-", *words, stdin=make_profile().model_dump_json())


@pytest.mark.parametrize("verb", ["plan", "train"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "standard input is empty"),
        ("{}", "is missing"),
        ("[NaN]", "should be an object"),
        ('{"format": ', "invalid JSON"),
    ],
)
def test_broken_input_is_refused(refused, verb, text, said):
    assert said in refused(verb, "-", stdin=text)


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_numbers_that_are_not_finite_are_refused(refused, number):
    text = make_profile().model_dump_json()
    text = text.replace('"probe_seconds":17.4', f'"probe_seconds":{number}')
    assert "probe_seconds = " in refused("plan", "-", stdin=text)
    text = make_plan().model_dump_json().replace('"peak":0.0866', f'"peak":{number}')
    assert "learning_rate.peak = " in refused("train", "-", stdin=text)


def test_a_plan_for_other_data_is_refused(refused):
    plan = make_plan().model_dump_json()
    assert "the plan was made for other data than data=digits" in refused("train", "-", stdin=plan)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["workers=3"], "workers=3 differs from the plan's workers=2: plan again"),
        (["epochs=3"], "epochs=3 differs from the plan's epochs=30: plan again"),
        (["goal.accuracy=0.9"], "goal.accuracy=0.9 differs from the plan's goal.accuracy=None: "),
        (["network=vgg8"], "network=vgg8 differs from the plan's network=resnet8"),
        (["launch=in-process"], "workers=2 with launch=in-process: that is one worker"),
        (["epocs=3"], "did you mean 'epochs'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_training_takes_only_what_does_not_change_the_plan(refused, words, said):
    assert said in refused("train", "-", *words, stdin=make_plan().model_dump_json())


def test_a_plan_whose_table_and_job_differ_in_workers_is_refused(refused):
    job = make_plan().job.model_copy(update={"workers": 3})
    plan = make_plan(job=job).model_dump_json()
    assert "table has 2 workers and its job 3" in refused("train", "-", stdin=plan)


def test_training_without_a_plan_or_a_run_is_refused(refused, place):
    assert "train needs a plan" in refused("train")
    assert "there is no file plan.json" in refused("train", "plan.json")
    assert "name its folder with --out" in refused("train", "--resume")
    assert "name its folder with --out" in refused("run", "--resume")
    (place / "empty").mkdir()
    for verb, file in (("train", "plan.json"), ("run", "job.yaml")):
        message = refused(verb, "--resume", "--out", "empty")
        assert f"empty holds no {file}, so no run to resume" in message
        message = refused(verb, "--resume", "--out", "nowhere")
        assert message.startswith("there is no folder nowhere")


@pytest.mark.parametrize("verb", ["run", "train"])
def test_the_run_of_a_session_is_not_the_commands_to_go_on_with(refused, place, verb):
    (place / "mine" / "checkpoints").mkdir(parents=True)
    message = refused(verb, "--resume", "--out", "mine")
    assert message.endswith(
        ", as of a loop of your own: continue the run as it was begun (Session(resume=True))"
    )


@pytest.mark.parametrize("verb", ["run", "train"])
def test_a_trained_run_whose_plan_is_lost_is_told_so_and_how_to_have_it_back(
    refused, command, place, verb
):
    folder = place / "a run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "job.yaml").write_text(job_yaml(make_plan().job))
    write_record(make_profile(), folder / "profile.json")
    lost = "a run holds no plan.json, by which its run was trained: "
    words = (verb, "--resume", "--out", "a run")
    assert refused(*words).startswith(f"{lost}put it back from a copy; or begin another run")
    write_record(make_summary(), folder / "summary.json")
    message = refused(*words)
    assert message.startswith(f"{lost}summary.json holds it, and `python -c ")
    python, option, code = shlex.split(message.split("`")[1])
    assert (python, option) == ("python", "-c")
    exec(code)  # noqa: S102 - what the message says to run
    assert bw.load(folder / "plan.json") == make_plan()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--tracker", "tensorbord:tb"), "there is no tracker 'tensorbord'"),
        (("send", "nothing", "--tracker", "mlflow"), "nothing holds no run that has begun"),
        (("deliver", "nothing", "--out", "model"), "nothing"),
        (
            ("deliver", "nothing", "--out", "model", "width=3"),
            "takes network=NAME alone, not width",
        ),
        (
            ("deliver", "nothing", "--out", "model", "--checkpoint", "new"),
            'give "best", "last", or',
        ),
    ],
)
def test_trackers_and_deliveries_that_cannot_be_are_refused(refused, words, said):
    assert said in refused(*words)


def test_reporting_needs_a_finished_run(refused, place):
    (place / "empty").mkdir()
    assert "there is no file nowhere" in refused("report", "nowhere")
    assert "empty holds no summary.json: no run has finished there" in refused("report", "empty")
    (place / "summary.json").write_text("{}")
    assert "summary.json is not a valid summary" in refused("report", "summary.json")


@pytest.mark.parametrize("words", [("predict",), ("deliver", "--out", "model")])
def test_a_run_folder_that_is_not_there_is_named(refused, words):
    said = refused(words[0], "nowhere", *words[1:])
    assert said == "there is no run folder nowhere: look at its spelling"


@pytest.mark.parametrize(("number", "word"), [(2, "Ctrl-C"), (15, "SIGTERM")])
def test_an_agent_that_is_stopped_says_so_and_of_no_error(command, monkeypatch, number, word):
    def work(_):
        raise Interrupted(number, stopped_by(number))

    monkeypatch.setattr(Agent, "work", work)
    monkeypatch.setenv("BATCHWRIGHT_TOKEN", "bw_x")
    words = ("--folder", "jobs", "--server", "http://127.0.0.1:9")
    assert command("agent", *words) == (128 + number, "", f"stopped by {word}\n")


def test_code_named_by_a_file_runs_only_if_the_command_line_repeats_it(refused, mine, place):
    """Whichever key it stands under; and not even the file's other mistakes come first."""
    for key in ("network", "loss", "data"):
        job = make_plan().job.model_copy(update={key: f"mine:{key}"})
        plan = make_plan(job=job).model_dump_json()
        message = refused("train", "-", stdin=plan)
        assert f"repeat {key}=mine:{key} on the command line to allow it" in message
        (place / "run").mkdir(exist_ok=True)
        (place / "run" / "plan.json").write_text(plan)
        for verb in ("train", "run"):
            assert f"repeat {key}=mine:" in refused(verb, "--resume", "--out", "run")
        (place / "run" / "plan.json").unlink()
        (place / "run" / "job.yaml").write_text(f"{key}: mine:{key}\n")
        assert f"repeat {key}=mine:" in refused("run", "--resume", "--out", "run")
    assert not mine.exists()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("network", "resnet8", ""),
        ("network", "mine:network", " network=mine:network"),
        ("data", "mine:data", " data=mine:data"),
        ("data", "cifar10:some where", ""),
        ("loss", "mine:loss", " loss=mine:loss"),
    ],
)
def test_a_stop_says_the_whole_command_that_goes_on(key, value, words):
    job = make_job(**{key: value})
    with (
        pytest.raises(bw.Interrupted) as stopped,
        telling_how_to_resume(resuming_command(Path("runs/a b"), job)),
    ):
        raise bw.Interrupted(15, "stopped")
    command = f"batchwright run --resume --out 'runs/a b'{words}"
    assert str(stopped.value) == f"stopped; continue with `{command}`"
    refuse_unconfirmed_code(job, (), shlex.split(command)[5:])  # is not refused


@pytest.mark.parametrize(("deadline", "later"), [(4.0, "60"), (3e6, "6000000"), (90.5, "181")])
def test_a_deadline_that_is_reached_says_a_command_with_a_later_one(deadline, later):
    job = make_job(goal={"deadline": deadline})
    with (
        pytest.raises(bw.Interrupted) as stopped,
        telling_how_to_resume(resuming_command("dd", job), deadline=deadline),
    ):
        raise DeadlineReached("reached")
    command = f"batchwright run --resume --out dd goal.deadline={later}"
    assert str(stopped.value) == f"reached; continue with `{command}`"
    with_job(make_plan(job=job), change_job(job, {}, [command.split()[-1]]))  # is not refused


def test_another_key_for_a_run_that_goes_on_says_the_command_of_another_run(refused, place):
    folder = place / "my runs"
    (folder / "checkpoints").mkdir(parents=True)
    write_inputs(folder, make_plan(), None)
    words = ("run", "--resume", "--out", "my runs", "epochs=3", "goal.accuracy=0.9")
    said = "epochs=3 differs from the plan's epochs=30: resume without them, or train another run: "
    again = "`batchwright run 'my runs/job.yaml' {}epochs=3 goal.accuracy=0.9` (training itself"
    assert said + again.format("") in refused(*words)
    (folder / "checkpoints" / "last.pt").touch()
    weights = "'weights=my runs/checkpoints/last.pt' "
    for verb in ("run", "train"):
        assert said + again.format(weights) in refused(verb, *words[1:])
    message = refused(*words[:4], "network=vgg8")
    assert "`batchwright run 'my runs/job.yaml' network=vgg8`" in message
    clipped, free = Job(clip_norm=1, momentum=0.8), Job(momentum=0.9)
    with pytest.raises(PlanError, match=r"job.yaml momentum=0.9 clip_norm=null`"):
        with_job(make_plan(job=clipped), free, place / "new")


def test_a_run_that_has_not_finished_says_how_to_go_on(refused, place):
    (place / "run").mkdir()
    assert "(Session(resume=True))" in refused("report", "run")
    (place / "run" / "job.yaml").write_text("network: mine:network\n")
    command = "`batchwright run --resume --out run network=mine:network`"
    assert f"continue it with {command}" in refused("report", "run")


@pytest.mark.slow
def test_planning_and_reporting_run_no_code(command, mine, place, undrawn):
    job = make_profile().job.model_copy(update={"network": "mine:network", "data": "mine:data"})
    code, out, err = command("plan", "-", stdin=make_profile(job=job).model_dump_json())
    assert code == 0, err
    assert Plan.model_validate_json(out).job.network == "mine:network"
    summary = make_summary(plan=make_plan(job=job), run_folder=str(place))
    write_record(summary, place / "summary.json")
    assert command("report", place)[0] == 0
    assert not mine.exists()


# ------------------------------------------------------------------------------------- what works


def test_a_plan_goes_to_stdout_and_its_words_to_stderr(command):
    code, out, err = command("plan", "-", stdin=make_profile().model_dump_json())
    assert (code, err) == (0, "")
    plan = Plan.model_validate_json(out)
    code, out, err = command("plan", "-", "--explain", stdin=make_profile().model_dump_json())
    assert Plan.model_validate_json(out) == plan
    assert plan.explain() in err


def test_reasons_go_to_stdout_where_the_plan_does_not(command, place):
    write_record(make_profile(), place / "profile.json")
    words = ("plan", "profile.json", "--explain", "--out", "p.json")
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    told = bw.load("p.json").explain() + "\n"
    assert out == told
    for json_too in ((*words, "--json"), (*words[:-1], "-")):
        code, out, err = command(*json_too)
        assert (code, err) == (0, told)
        Plan.model_validate_json(out)


def test_a_plan_is_explained_by_its_file_alone(command, refused, place):
    plan = bw.plan(make_profile(), epochs=7)
    bare = plan.model_copy(update={"reasons": (), "knees": (), "considered": ()})
    for name, one in (("run", plan), ("bare", bare)):
        (place / name).mkdir()
        write_record(one, place / name / "plan.json")
        for words in ((name,), (f"{name}/plan.json",)):
            assert command("explain", *words) == (0, one.explain() + "\n", "")
    assert command("explain", "-", stdin=plan.model_dump_json())[1] == plan.explain() + "\n"
    write_record(make_profile(), place / "profile.json")
    said = "profile.json is a profile, not a plan; `batchwright plan` writes a plan"
    assert refused("explain", "profile.json") == said
    assert "`batchwright explain` shows why" in refused("plan", "run/plan.json", "--explain")
    for file in ("none.json", "."):
        assert file in refused("explain", file)


def test_the_same_profile_gives_the_same_plan(command, place):
    write_record(make_profile(), place / "profile.json")
    first = command("plan", "profile.json", "--out", "plan.json")
    assert first[:2] == (0, "")
    assert command("plan", "profile.json")[1] == (place / "plan.json").read_text()


def test_a_run_folder_stands_for_the_plan_or_the_profile_in_it(command, refused, place):
    (place / "run").mkdir()
    write_record(make_profile(), place / "run" / "profile.json")
    plan = bw.plan(make_profile(), epochs=7)
    code, out, err = command("plan", "run", "epochs=7", "--out", "run/plan.json")
    assert (code, out) == (0, ""), err
    assert bw.load("run") == bw.plan("run", epochs=7) == plan
    briefly = ("repeats=2", "steps=50")
    of_files = ("run/plan.json", "--profile", "run/profile.json")
    _, told, _ = command("simulate", *of_files, *briefly)
    assert command("simulate", "run", "--profile", "run", *briefly)[:2] == (0, told)
    for verb in ("check", "train"):
        assert "the plan was made for other data than data=digits" in refused(verb, "run")
    (place / "run" / "profile.json").unlink()
    assert "cannot read run: Is a directory; there is plan.json in it" in refused("plan", "run")


def test_the_plan_of_a_loops_own_run_is_in_its_summary(refused, command, place):
    (place / "run" / "checkpoints").mkdir(parents=True)
    message = refused("explain", "run")
    assert message.startswith("run holds no plan.json, as of a loop of your own: explain the plan")
    write_record(make_summary(), place / "run" / "summary.json")
    told = make_plan().explain() + "\n"
    for words in ("run", "run/summary.json"):
        assert command("explain", words) == (0, told, "")


def test_a_file_that_is_not_there_is_told_with_what_writes_it(refused, place):
    said = "there is no file none.json; `batchwright {}` writes a {}"
    assert refused("plan", "none.json") == said.format("probe", "profile")
    assert refused("train", "none.json") == said.format("plan", "plan")
    assert "simulate takes one plan, not a.json and b.json" in refused(
        "simulate", "a.json", "b.json"
    )


def test_the_folder_of_a_sweep_is_no_run(refused, place):
    (place / "sweep").mkdir()
    (place / "sweep" / "sweep.json").write_text("{}")
    for words in (("report", "sweep"), ("deliver", "sweep", "--out", "model")):
        assert "its runs are in cells/" in refused(*words)


def test_a_plan_of_several_rows_counts_its_stages(capsys):
    output.print_plan(make_hybrid_plan(), explain=False)
    assert ", 16, 24, 32 px in 6 stages, sgd at rate " in capsys.readouterr().err


def test_a_plan_and_results_that_nobody_can_read_any_more_end_no_run(monkeypatch):
    """As `run` prints them on standard error, before it trains and after it."""

    class Closed(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    for explain in (False, True):
        output.print_plan(make_hybrid_plan(), explain=explain)
    output.finish(make_summary(), as_json=False)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "profile.json"),
    ],
    ids=["thread", "process", "file"],
)
def test_a_machine_that_is_short_of_processes_or_files_is_told_in_a_line(
    command, monkeypatch, error
):
    def examine(_):
        raise error

    if isinstance(error, BlockingIOError):  # else it may be that of a lock
        starts = {"__name__": "subprocess"}
        examine = FunctionType(examine.__code__, starts, closure=examine.__closure__)
    monkeypatch.setattr(doctor, "examine", examine)
    said = error.strerror if isinstance(error, OSError) else str(error)
    assert command("doctor") == (
        2,
        "",
        f"error: this machine is short of processes, files or memory: {said}; end what else runs, "
        "or raise the limits (`ulimit -a` lists them; a container or batch job has its own)\n",
    )
    error = RuntimeError("a mistake of ours")
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        command("doctor")


def test_at_a_terminal_a_plan_is_shown_and_printed_only_if_asked(command, place, monkeypatch):
    write_record(make_profile(), place / "profile.json")
    _, plan, _ = command("plan", "profile.json")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, out, err = command("plan", "profile.json")
    assert (out, err.splitlines()[-1]) == (
        "",
        "the plan is not kept: --out FILE writes it, --json prints it",
    )
    assert err.startswith("plan: ")
    for words in (("--json",), ("--out", "-"), ("--json", "--out", "plan.json")):
        assert command("plan", "profile.json", *words)[1] == plan
    assert (place / "plan.json").read_text() == plan
    _, out, err = command("simulate", "plan.json", "repeats=2", "steps=50")
    assert not out
    assert err.endswith("the simulation is not kept: --out FILE writes it, --json prints it\n")


def test_one_result_goes_to_standard_output(command, refused, place):
    write_record(make_plan(), place / "plan.json")
    write_record(make_profile(), place / "profile.json")
    words = ("check", "plan.json", "--profile", "profile.json", "--out", "-", "--json")
    assert "--json and --out - both go to standard output" in refused(*words)
    (place / "run").mkdir()
    (place / "run" / "metrics.jsonl").write_text("")
    for more in (("--json",), ("--out", "pages")):
        said = "--metrics writes lines and nothing else: leave --out and --json out"
        assert said in refused("report", "run", "--metrics", "lines.csv", *more)
    assert command("report", "run", "--metrics", "-") == (0, "", "")
    assert not (place / "-").exists()


@pytest.mark.parametrize(
    ("words", "unit", "value"),
    [
        *(("24", "hours", 24), ("90min", "hours", 1.5), ("1 d 12 h", "hours", 36)),
        *(("8", "GiB", 8), ("8GiB", "GiB", 8), ("500 MB", "GiB", 500e6 / 2**30)),
        *(("30", "days", 30), ("12h", "days", 0.5), ("5min", "seconds", 300), ("7.5", "", 7.5)),
    ],
)
def test_amounts_of_options_have_the_unit_of_their_name_or_their_own(words, unit, value):
    assert output.amount("--option", words, unit) == pytest.approx(value)
    assert output.amount("--option", None, unit) is None
    assert output.amount("--option", "0", unit, least=0) == 0
    for wrong in ("0", "-1", "nan", "1e300", "8 parsecs", "8 000", ""):
        with pytest.raises(BatchwrightError, match=f"^--option {wrong}: give a number .*above 0"):
            output.amount("--option", wrong, unit)


def test_help_is_a_letter_too(command):
    assert command("plan", "-h") == command("plan", "--help")
    assert command("-h") == command("--help")


def test_an_export_and_a_runs_lines_overwrite_no_file_unless_they_are_told_to(command, place):
    write_record(make_plan(), place / "plan.json")
    (place / "run").mkdir()
    (place / "run" / "metrics.jsonl").write_text("")
    for words in (
        ("export", "plan.json", "--as", "lightning", "--out", "mine.txt"),
        ("report", "run", "--metrics", "mine.txt"),
    ):
        (place / "mine.txt").write_text("changed by hand")
        code, out, err = command(*words)
        assert (code, out) == (2, "")
        assert "mine.txt exists: name another file, or overwrite it with --force" in err
        assert (place / "mine.txt").read_text() == "changed by hand"
        assert command(*words, "--force")[0] == 0
        assert (place / "mine.txt").read_text() != "changed by hand"


def test_a_report_is_written_where_the_run_is_found(command, place, undrawn):
    """Also after the folder has moved."""
    write_record(make_summary(run_folder="runs/gone"), place / "summary.json")
    code, out, err = command("report", place, "--json")
    assert code == 0
    assert (place / "report.html").exists()
    assert f"report: {place / 'report.html'}" in err.replace("\n", "")
    assert not (place / "runs").exists()
    assert json.loads(out)["run_folder"] == str(place)


def test_a_command_to_copy_has_its_path_in_quotes(command, place, undrawn):
    folder = place / "my runs"
    folder.mkdir()
    write_record(make_summary(), folder / "summary.json")
    write_record(make_plan(), folder / "plan.json")
    _, _, err = command("report", "my runs")
    (line,) = (one for one in err.splitlines() if one.startswith("why this plan: "))
    words = shlex.split(line.removeprefix("why this plan: "))
    assert words == ["batchwright", "explain", "my runs"]
    assert command(*words[1:])[0] == 0


def test_code_to_confirm_is_named_in_quotes():
    job = make_job(data="mine:data;rm")
    with pytest.raises(PlanError, match="repeat 'data=mine:data;rm' on the command line"):
        refuse_unconfirmed_code(job, (), ())


def test_a_run_without_its_checkpoints_cannot_be_delivered(refused, place):
    (place / "run").mkdir()
    write_record(make_summary(), place / "run" / "summary.json")
    said = "there is no checkpoint run/checkpoints/last.pt, which has what was trained: name the "
    assert refused("deliver", "run", "--out", "model").startswith(said)


def test_a_run_in_no_time_at_all_is_reported(command, place, undrawn):
    profile, seconds = make_profile(), (1e-300, 1e300)
    for value in seconds:
        epochs = tuple(make_epoch(e, training_seconds=value) for e in range(5))
        write_record(make_summary(profile=profile, epochs=epochs), place / "summary.json")
        code, _, err = command("report", place)
        assert code == 0, err
        assert "not planned again: " in err


def test_a_report_of_a_summary_goes_where_it_is_asked(command, place, undrawn):
    code, _, err = command("report", "-", "--out", "pages", stdin=make_summary().model_dump_json())
    assert code == 0, err
    assert (place / "pages" / "report.html").exists()


def test_several_runs_are_compared_where_it_is_asked(command, place):
    for folder, seed in (("first", 0), ("second", 1)):
        (place / folder).mkdir()
        plan = make_plan(job=make_job(seed=seed))
        write_record(make_summary(plan=plan), place / folder / "summary.json")
    code, out, err = command("report", "first", "second", "--out", "both", "--json")
    assert code == 0, err
    assert sorted(path.name for path in (place / "both").iterdir()) == [
        *("comparison.html", "comparison.png")
    ]
    assert not (place / "first" / "report.html").exists()
    assert "comparison: both/comparison.html (figure: both/comparison.png)" in err
    told = json.loads(out)
    assert [one["run_folder"] for one in told["runs"]] == ["first", "second"]
    assert told["common_accuracy"] == told["runs"][0]["best_accuracy"]
    assert told["runs"][0]["simulated"] is False
    assert 0 < told["runs"][0]["seconds_to_common_accuracy"] <= told["runs"][0]["training_seconds"]


def test_runs_of_different_data_are_not_compared(refused, place):
    for folder, data in (("first", make_data()), ("second", make_data(digest="ab" * 32))):
        (place / folder).mkdir()
        write_record(make_summary(plan=make_plan(data=data)), place / folder / "summary.json")
    assert "first is named twice" in refused("report", "first", "first")
    message = refused("report", "first", "second")
    assert "second holds a run on other data (digits, abababab, 360 held out) than first" in message


def test_the_seconds_of_several_stages_are_their_mean():
    summary = make_server_summary(make_hybrid_plan())
    told = output.result(summary)
    assert told["method"] == "hybrid"
    assert told["predicted_epoch_seconds"] == overall(summary).predicted.value
    assert told["measured_epoch_seconds"] == overall(summary).measured


@pytest.mark.slow
def test_doctor_says_what_there_is(command, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("BATCHWRIGHT_THREADS", raising=False)
    code, out, _ = command("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert {"python", "torch", "device", "cores", "memory", "allocator"} <= set(findings)
    assert {"collectives", "shared memory"} <= set(findings)
    assert findings["threads"]["value"] == "3 for each worker"
    assert code == bool(json.loads(out)["problems"])
    monkeypatch.setenv("BATCHWRIGHT_THREADS", "many")
    code, out, _ = command("doctor")
    assert code == 1
    assert "BATCHWRIGHT_THREADS=many: give the compute threads of a worker" in out


def test_the_doctor_names_a_package_that_is_missing():
    found = doctor._package("no-such-package")
    assert found == (
        "no-such-package",
        "missing",
        "no-such-package is missing: pip install no-such-package",
    )
    assert not doctor._package("numpy").problem


def test_the_doctor_takes_several_interfaces_as_gloo_does(monkeypatch):
    for given, known in (("lo", True), ("lo,lo", True), ("lo,no-such0", False)):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
        assert ("there is no such interface" in doctor._collectives().problem) is not known


def test_a_report_says_once_why_nothing_was_planned_again(command, place, monkeypatch, undrawn):
    def refused(_):
        raise PlanError("no batch is left")

    monkeypatch.setattr("batchwright.workflows.run_training.refit", refused)
    (place / "run").mkdir()
    write_record(make_summary(run_folder="run"), place / "run" / "summary.json")
    code, _, err = command("report", "run")
    assert (code, err.count("not planned again: no batch is left")) == (0, 1)


def test_version_and_help_are_there(command):
    assert command("--version")[:2] == (0, f"{bw.__version__}\n")
    code, out, _ = command("--help")
    assert code == 0
    verbs = ("run", "probe", "plan", "explain", "check", "schedule", "train", "report", "doctor")
    assert all(verb in out for verb in verbs)
    assert re.search(r"gradient noise, and\s+how the network learns\.\n", out)  # none is cut off
    for verb in (*verbs, "serve", "agent", "submit", "token"):
        _, out, _ = command(verb, "--help")
        assert not re.search(r"<(str|path|int|float|list)", out), verb  # Python's types


def test_on_windows_the_command_ends_in_one_line():
    code = (
        "import signal, sys\n"
        "sys.platform = 'win32'\n"
        "del signal.SIGUSR1, signal.SIGUSR2  # which there are not there\n"
        "import batchwright.__main__\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    line = "error: batchwright does not run on Windows; use Linux or WSL 2\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def promised_keys():
    return {
        *("test_accuracy", "global_batch_size", "predicted_epoch_seconds"),
        *("measured_epoch_seconds", "run_folder"),
    }


@pytest.mark.slow
def test_ones_own_data_and_network_run_from_probe_to_report(command, mine, place, undrawn):
    words = ["data=mine:data", "network=mine:network", "launch=in-process", "epochs=2"]
    code, out, err = command("run", *words, "probe.budget=0.3", "--out", "run", "--json")
    assert code == 0, err
    assert all(f"\n{said}" in err for said in ("plan: ", "learning rate: ", "warm-up: "))
    result = json.loads(out)
    assert promised_keys() <= set(result)
    assert result["epochs"] == 2
    assert result["test_accuracy"] is not None
    assert result["run_folder"] == "run"
    names = {path.relative_to(place / "run").as_posix() for path in (place / "run").rglob("*")}
    assert {
        *("job.yaml", "profile.json", "plan.json", "metrics.jsonl", "summary.json", "report.html"),
        *("checkpoints/last.pt", "checkpoints/best.pt"),
    } <= names
    again = command("run", "--resume", "--out", "run", *words[:2], "--json")
    assert again[0] == 0, again[2]
    assert json.loads(again[1])["epochs"] == 2


@pytest.mark.slow
def test_a_stop_in_this_process_is_an_exception_that_tells_how_to_go_on(mine, place):
    plan = plan_without_profile(
        Job(data="mine:data", network="mine:network", launch="in-process", epochs=5000, workers=1),
        open_data(Job(data="mine:data")).facts,
        make_network(name="mine:network"),
    )

    def stop():
        while not (place / "run" / "metrics.jsonl").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    said = r"^stopped by SIGTERM at epoch \d+, step \d+; continue with `batchwright run --resume"
    with pytest.raises(bw.Interrupted, match=said):
        bw.train(plan, run_folder="run")
    thread.join()
    assert (place / "run" / "checkpoints" / "last.pt").exists()


BRIEFLY = ("workers=1", "launch=in-process", "global_batch=128", "precision=float32")
BRIEFLY += ("probe.budget=0.3", "probe.learning=0")


@pytest.mark.slow
def test_a_stop_after_the_last_epoch_says_how_to_go_on(place, monkeypatch, undrawn):
    def stop(*_):
        raise KeyboardInterrupt(signal.SIGTERM)  # as the command's handler does

    job = (*BRIEFLY, "epochs=1")
    words, page = {"overrides": job}, place / "run" / "report.html"
    said = "^stopped by SIGTERM; continue with `batchwright run --resume --out run`$"
    for where in ("run_training._summarized", "verbs.write_report"):
        with monkeypatch.context() as patch:
            patch.setattr(f"batchwright.workflows.{where}", stop)
            with pytest.raises(bw.Interrupted, match=said):
                bw.run(run_folder="run", **words)
        words = {"resume": True}
    assert not page.exists()
    assert bw.run(run_folder="run", resume=True).plan.epochs == 1
    assert page.exists()


@pytest.mark.slow
def test_the_verbs_pipe(place, command, undrawn):
    job = (*BRIEFLY, "epochs=2")
    _, profile, _ = command("probe", *job)
    _, plan, _ = command("plan", "-", stdin=profile)
    code, out, err = command("train", "-", "--out", "run", "--json", stdin=plan)
    assert code == 0, err
    result, planned = json.loads(out), Plan.model_validate_json(plan)
    assert result["global_batch_size"] == planned.stages[0].global_batch_size
    assert result["predicted_epoch_seconds"] == planned.stages[0].predicted_epoch_seconds.value
    assert result["epochs"] == 2
    assert Path(result["run_folder"]) == Path("run")


@pytest.mark.slow
def test_a_mistake_at_the_head_of_a_pipe_is_said_by_every_verb(place):
    batchwright = f"{sys.executable} -m batchwright.cli.commands"
    line = f"{batchwright} probe data=digit | {batchwright} plan - | {batchwright} train -"
    done = subprocess.run(
        ["/bin/sh", "-c", line], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 2
    assert sorted(done.stderr.splitlines()) == [
        "error: data=digit is unknown; did you mean digits?",
        "error: standard input is empty, where a plan was expected; `batchwright plan` writes a "
        "plan",
        "error: standard input is empty, where a profile was expected; `batchwright probe` writes "
        "a profile",
    ]
    assert not list(place.iterdir())


# ------------------------------------------------------------------------------------------- check


@pytest.fixture
def plan_of_digits(place):
    """A plan for the digits that are really there, with held-out points, and its profile."""
    by_time = {"objective": "knee"}
    job = make_job(workers="auto", resolutions=(8,), precision="float32", goal=by_time)
    data = open_data(Job()).facts
    steps = tuple(make_step(n, b, resolution=8) for n in (1, 2) for b in (4, 16, 64))
    memory = tuple(
        MemoryPoint(resolution=8, local_batch_size=b, workers=n, peak_bytes=2_000_000 + 9_000 * b)
        for n in (1, 2)
        for b in (4, 16, 64)
    )
    profile = make_profile(job=job, data=data, steps=steps, memory=memory)
    write_record(profile, place / "profile.json")
    plan = bw.plan(profile)
    write_record(plan, place / "plan.json")
    return plan, profile


@pytest.fixture
def measuring(monkeypatch):
    """In place of measuring: every step takes ``factor`` times as long as it truly would."""
    asked = []

    def measure(job, points, folder, *, visits=3, accept=None, progress=None):
        assert folder.is_dir()
        if accept is not None:
            accept(measure.cluster)
        asked.append((job, points))
        return Measured(
            steps=tuple(make_step(n, b, measure.factor, resolution=r) for n, r, b in points),
            memory=tuple(
                MemoryPoint(
                    resolution=r, local_batch_size=b, workers=n, peak_bytes=2_000_000 + 9_000 * b
                )
                for n, r, b in points
            ),
            cluster=measure.cluster,
            out_of_memory=(),
        )

    measure.factor = 1.0
    measure.cluster = make_profile().cluster
    measure.asked = asked
    monkeypatch.setattr("batchwright.probing.probe.measure_points", measure)
    return measure


def test_a_check_measures_held_out_points_and_compares(command, place, plan_of_digits, measuring):
    plan, _ = plan_of_digits
    code, out, err = command("check", "plan.json", "--json")
    assert code == 0, err
    found = Check.model_validate_json(out)
    steps = [one for one in found.points if one.quantity == "step_seconds"]
    assert len(steps) == 5
    assert len(plan.held_out) == 4
    own = plan.stages[0]
    ((_, points),) = measuring.asked  # all at once, the plan's own first
    assert points[0] == (own.workers, own.resolution, max(own.local_batch_sizes))
    assert [one.planned for one in steps] == [True, *4 * [False]]
    assert f"({own.workers} x {max(own.local_batch_sizes)}, 8 px) was predicted" in err
    assert {one.workers for one in steps} == {1, 2}
    assert all(one.inside and abs(one.error) < 0.02 for one in steps)
    assert {one.quantity for one in found.points} == {"step_seconds", "peak_bytes"}
    assert found.profile is None
    assert "within the 10.0 % of goal.tolerance" in err.replace("\n", " ")
    assert "planned again" not in err


@pytest.mark.parametrize(("error", "kept"), [(None, 0), (WorkerError, 1), (JobError, 0)])
@pytest.mark.parametrize("verb", ["probe", "check"])
def test_logs_stay_where_a_workers_end_is_told(
    place, plan_of_digits, measuring, monkeypatch, verb, error, kept
):
    monkeypatch.setattr(tempfile, "tempdir", str(place))

    def measure(job, *rest, progress, **_):
        (Path(rest[-1]) / "worker0.log").touch()
        if error:
            raise error("told")
        return plan_of_digits[1] if verb == "probe" else measuring(job, *rest)

    name = {"probe": "probe", "check": "measure_points"}[verb]
    monkeypatch.setattr(f"batchwright.probing.probe.{name}", measure)
    source = {"probe": None, "check": place / "plan.json"}[verb]
    with pytest.raises(error) if error else nullcontext():
        getattr(bw, verb)(source)
    assert len(list(place.glob("batchwright-*/worker0.log"))) == kept


def test_a_check_adds_its_points_to_the_profile_and_says_what_a_new_plan_would_choose(
    command, place, plan_of_digits, measuring
):
    _, profile = plan_of_digits
    measuring.factor = 1.3
    words = ["check", "plan.json", "--profile", "profile.json", "--points", 2]
    code, out, err = command(*words, "--out", "better.json")
    assert (code, out) == (0, "")
    assert "more than the 10.0 % of goal.tolerance" in err
    assert "planned again with these points: " in err
    better = Profile.model_validate_json((place / "better.json").read_text())
    assert len(better.steps) == len(profile.steps) + 2
    assert command("plan", "better.json")[0] == 0
    ((_, points),) = measuring.asked
    assert len(points) == 2
    (place / "run").mkdir()
    for name in ("plan.json", "profile.json"):
        shutil.copy(place / name, place / "run")
    assert command("check", "run", "--points", 2, "--out", "again.json")[:2] == (0, "")
    assert len(bw.load(place / "again.json").steps) == len(better.steps)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"device_name": "Other CPU"}, "and this is Other CPU"), ({"torch": "2.6.0"}, "torch is")],
)
def test_a_check_on_another_machine_than_the_profiles_is_refused_before_it_measures(
    command, place, plan_of_digits, measuring, change, named
):
    measuring.cluster = measuring.cluster.model_copy(update=change)
    code, _, err = command("check", "plan.json", "--profile", "profile.json")
    assert code == 2
    assert named in err.replace("\n", " ")
    assert not measuring.asked
    assert command("check", "plan.json")[0] == 0


@pytest.fixture
def dual_plan_of_digits(place, plan_of_digits):
    """A plan with two batch sizes from the same profile."""
    _, profile = plan_of_digits
    keys = {"method": "dual-batch", "workers": 2, "dual": {"large_batches": (64,)}}
    plan = bw.plan(profile, **keys)
    write_record(plan, place / "dual.json")
    return plan


@pytest.fixture
def measuring_pairs(monkeypatch):
    """In place of measuring pairs: the fixed part of a step is ``fixed`` samples' worth."""
    asked = []

    @contextmanager
    def measurer(job, counts, folder, **_):
        assert folder.is_dir()
        assert 2 in counts

        def measure(pairs):
            asked.extend(pairs)
            return tuple(
                PairTime(
                    resolution=pair.resolution,
                    large_workers=pair.large_workers,
                    small_workers=pair.small_workers,
                    large_batch=pair.large_batch,
                    small_batch=pair.small_batch,
                    large_seconds=0.001 * (measurer.fixed + pair.large_batch),
                    small_seconds=0.001 * (measurer.fixed + pair.small_batch),
                    repeats=5,
                    ratios=(
                        (measurer.fixed + pair.small_batch) / (measurer.fixed + pair.large_batch),
                    )
                    * 5,
                )
                for pair in pairs
            )

        yield measure

    measurer.fixed = 30.0
    measurer.asked = asked
    monkeypatch.setattr("batchwright.probing.pairs.pair_measurer", measurer)
    return measurer


def test_a_check_of_two_batch_sizes_measures_them_side_by_side(
    command, dual_plan_of_digits, measuring, measuring_pairs
):
    row = dual_plan_of_digits.stages[0]
    code, out, err = command("check", "dual.json", "--points", 1, "--json")
    assert code == 0, err
    found = Check.model_validate_json(out)
    ((_, _, _, large, small, micro),) = measuring_pairs.asked
    assert (large, small, micro) == (*row.local_batch_sizes, row.micro_batch_size)
    (check,) = found.rounds
    assert (check.large_samples, check.small_samples) == row.samples_per_round
    assert f"planned to end together, differ by {100 * abs(check.difference):.1f} %" in err


def test_a_plan_from_what_such_a_check_found_has_rounds_that_end_together(
    command, place, dual_plan_of_digits, measuring, measuring_pairs
):
    words = ["check", "dual.json", "--profile", "profile.json", "--points", 1, "--json"]
    code, out, err = command(*words, "--out", "better.json")
    assert code == 0, err
    assert len(measuring_pairs.asked) >= 2
    (check,) = Check.model_validate_json(out).rounds
    better = Profile.model_validate_json((place / "better.json").read_text())
    assert {one.small_batch for one in better.pairs} == {
        pair.small_batch for pair in measuring_pairs.asked
    }
    keys = ["method=dual-batch", "workers=2", "dual.large_batches=64"]
    code, out, err = command("plan", "better.json", *keys)
    assert code == 0, err
    row = Plan.model_validate_json(out).stages[0]
    assert row.local_batch_sizes[1] == check.pair.small_batch
    large, small = (
        (30 + batch) / batch * samples
        for batch, samples in zip(row.local_batch_sizes, row.samples_per_round, strict=True)
    )
    assert small == pytest.approx(large, rel=0.02)


@pytest.mark.slow
def test_a_run_settles_its_two_batch_sizes_before_it_trains(
    place, dual_plan_of_digits, plan_of_digits, measuring_pairs, monkeypatch, undrawn
):
    _, profile = plan_of_digits
    job = dual_plan_of_digits.job
    profile = profile.model_copy(update={"job": job})
    monkeypatch.setattr("batchwright.workflows.verbs._probe_in", lambda folder, job, kept: profile)
    trained = []

    def train(folder, plan, watch, **options):
        trained.append(plan)
        return make_summary(plan=plan, run_folder=str(folder))

    monkeypatch.setattr("batchwright.workflows.verbs.conduct", train)
    bw.run(job, run_folder=place / "run")
    (plan,) = trained
    assert (
        measuring_pairs.asked[0].small_batch == dual_plan_of_digits.stages[0].local_batch_sizes[1]
    )
    assert plan.stages[0].local_batch_sizes[1] != measuring_pairs.asked[0].small_batch
    (told,) = (one for one in plan.reasons if one.choice == "round times")
    assert told.source == "measured"
    kept = Profile.model_validate_json((place / "run" / "profile.json").read_text())
    assert len(kept.pairs) == len(measuring_pairs.asked)
    assert Plan.model_validate_json((place / "run" / "plan.json").read_text()) == plan


def test_a_check_that_cannot_be_is_refused(refused, place, plan_of_digits, measuring, mine):
    plan, _ = plan_of_digits
    assert "name the profile to add to" in refused("check", "plan.json", "--out", "better.json")
    assert "points=0: give 1 or more" in refused("check", "plan.json", "--points", 0)
    assert "there is no file nowhere.json" in refused("check", "nowhere.json")
    assert "epochs=3 differs from the plan's epochs=30" in refused("check", "plan.json", "epochs=3")
    bare = plan.model_copy(update={"held_out": (), "considered": ()}).model_dump_json()
    assert "probe at more batches" in refused("check", "-", stdin=bare)
    other = plan.model_copy(update={"data": make_data()}).model_dump_json()
    assert "made for other data than data=digits" in refused("check", "-", stdin=other)
    job = plan.job.model_copy(update={"network": "mine:network"})
    code = plan.model_copy(update={"job": job}).model_dump_json()
    assert "repeat network=mine:network" in refused("check", "-", stdin=code)
    assert not mine.exists()
    assert not measuring.asked


# --------------------------------------------------------------- several profiles, runs, a figure


def test_several_profiles_and_keys_make_one_plan(command, place, plan_of_digits):
    _, profile = plan_of_digits
    more = profile.model_copy(
        update={"steps": tuple(make_step(n, 32, resolution=8) for n in (1, 2))}
    )
    write_record(more, place / "more=1.json")
    code, out, err = command("plan", "profile.json", "more=1.json", "epochs=7")
    assert code == 0, err
    plan = Plan.model_validate_json(out)
    assert plan.epochs == 7
    assert plan == bw.plan([profile, more], epochs=7)


def test_a_plan_learns_from_runs_given_by_folder_or_file(command, place, plan_of_digits):
    _, profile = plan_of_digits
    stages = tuple(one.model_copy(update={"resolution": 8}) for one in make_plan().stages)
    run = make_summary(plan=make_plan(data=profile.data, stages=stages))
    (place / "run").mkdir()
    write_record(run, place / "run" / "summary.json")
    words = ["plan", "profile.json", "goal.accuracy=0.9"]
    for named in ("run", "run/summary.json"):
        code, out, err = command(*words, "--run", named)
        assert code == 0, err
        assert any(one.epochs for one in Plan.model_validate_json(out).considered)
    assert not any(one.epochs for one in Plan.model_validate_json(command(*words)[1]).considered)


@pytest.mark.parametrize(
    "name",
    ["plan.svg", *(pytest.param(n, marks=pytest.mark.slow) for n in ("plan.png", "plan.pdf"))],
)
def test_a_figure_is_drawn_beside_the_plan_and_overwrites_nothing(
    command, place, plan_of_digits, name
):
    before = (place / "plan.json").read_bytes()
    code, out, err = command("plan", "profile.json", "--figure", name)
    assert code == 0, err
    assert f"figure: {name} (its numbers: plan.figure.json)" in err
    assert (place / name).stat().st_size > 5_000
    assert len(json.loads((place / "plan.figure.json").read_text())["clusters"]) == 2
    assert (place / "plan.json").read_bytes() == before
    assert out.encode() == before


def test_a_plan_without_a_profile_or_with_a_figure_of_another_kind_is_refused(
    refused, plan_of_digits
):
    assert "plan needs a profile" in refused("plan", "epochs=3")
    said = "cannot write plan.gif: a figure ends in one of .png, .pdf, .svg"
    assert said in refused("plan", "profile.json", "--figure", "plan.gif")


# ------------------------------------------------------------------------ a prediction that missed


def test_a_run_that_missed_its_prediction_says_what_a_new_fit_would_choose(
    command, place, plan_of_digits, undrawn
):
    plan, profile = plan_of_digits
    seconds = 1.5 * plan.stages[0].predicted_epoch_seconds.value
    epochs = tuple(make_epoch(e, training_seconds=seconds) for e in range(5))
    run = make_summary(plan=plan, profile=profile, epochs=epochs)
    write_record(run, place / "summary.json")
    code, out, err = command("report", place, "--json")
    assert code == 0, err
    refit = json.loads(out)["refit"]
    assert refit["error"] == pytest.approx(1 / 1.5 - 1)
    assert "they took 50.0 % more time, beyond" in err
    assert "Fitted again with what was measured" in (place / "report.html").read_text()


def test_a_refit_that_comes_to_nothing_does_not_harm_the_report(
    command, place, plan_of_digits, undrawn
):
    plan, profile = plan_of_digits
    far = 1e-4 * plan.stages[0].predicted_epoch_seconds.value
    epochs = tuple(make_epoch(e, training_seconds=far) for e in range(5))
    other = profile.model_copy(update={"job": profile.job.model_copy(update={"network": "vgg8"})})
    write_record(make_summary(plan=plan, profile=other, epochs=epochs), place / "summary.json")
    code, out, err = command("report", place, "--json")
    assert code == 0, err
    assert "not planned again: " in err
    assert json.loads(out)["refit"] is None
    assert (place / "report.html").exists()


def test_a_plan_for_machines_that_are_not_here_is_not_trained(refused, plan_of_digits):
    plan, _ = plan_of_digits
    chosen = next(one for one in plan.considered if is_chosen(plan, one))
    stage = plan.stages[0].model_copy(update={"local_batch_sizes": (8,) * 500})
    far = chosen.model_copy(
        update={"workers": 500, "global_batch_size": 4000, "assumed": True, "resolution": 8}
    )
    job = plan.job.model_copy(update={"workers": 500})
    distant = plan.model_copy(update={"job": job, "stages": (stage,), "considered": (far,)})
    said = "the plan is for 500 workers, and training starts its workers on this machine"
    assert said in refused("train", "-", stdin=distant.model_dump_json())
    kinds = (KindCount(kind="a100", count=1), KindCount(kind="v100", count=1))
    mixed = plan.model_copy(update={"kinds": kinds})
    if plan.workers == 2:
        message = refused("train", "-", stdin=mixed.model_dump_json())
        assert "2 workers (1 of a100, 1 of v100)" in message
