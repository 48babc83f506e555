"""Trackers: what they are shown of a run, each value once, whatever is killed."""

from __future__ import annotations

import errno
import json
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from html import unescape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchwright.client.reporter import Order
from batchwright.client.trackers import following
from batchwright.client.trackers.companion import wanted_trackers
from batchwright.client.trackers.following import (
    State,
    TrackedRun,
    TrackerChoice,
    TrackerFeed,
    chosen_trackers,
    send_to_trackers,
)
from batchwright.client.trackers.points import Points, markdown_table
from batchwright.errors import ArgumentError, BatchwrightError, FileError
from batchwright.planning.planner import plan_without_profile
from batchwright.records import Job
from batchwright.records.documents import write_record
from batchwright.records.lines.line_files import METRICS, line_text
from batchwright.records.registries.trackers import TRACKERS, TrackerSpec
from forked import Forked
from held_network import hold, release
from run_lines import typed
from samples import make_network, make_plan

OTHER_PACKAGE = Path(__file__).parent / "other_package"
TRACKIO = "batchwright.client.trackers.in_trackio"
LINES = (
    {"kind": "step", "epoch": 0, "step": 2, "steps": 8, "train/loss": 2.0, "batch/local/0": 8},
    {"kind": "epoch", "epoch": 0, "train/loss": 1.5, "time/epoch_s": 3.0,
     "plan/predicted_epoch_s": 2.5, "batch/local/0": 8, "batch/global": 8,
     "throughput/samples_per_sec": 64 / 3},
    {"kind": "note", "text": "on it goes"},
    {"kind": "step", "epoch": 1, "step": 3, "steps": 8, "train/loss": 1.0, "batch/local/0": 8},
)  # fmt: skip
AGAIN = (
    {"kind": "step", "epoch": 1, "step": 1, "steps": 8, "train/loss": 1.3, "batch/local/0": 8},
    {"kind": "step", "epoch": 1, "step": 4, "steps": 8, "train/loss": 0.9, "batch/local/0": 8},
)
"""Beyond what LINES tell: a killed run that is resumed goes through some steps again."""

LOSSES = [(2, 2.0), (8, 1.5), (11, 1.0)]
ALL_LOSSES = [*LOSSES, (12, 0.9)]
"""At the updates since the run began; an epoch has eight."""


def written(folder, lines, mode="a"):
    with (folder / METRICS).open(mode) as file:
        file.writelines(line_text(typed(one)) + "\n" for one in lines)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_record(make_plan(), folder / "plan.json")
    written(folder, LINES)
    return folder


class Kept:
    """A tracker in this process; `fails` has it fail as its values are to stay."""

    fails = False
    values, runs, ends, names = [], [], [], []

    def __init__(self, place, tracked):
        Kept.names.append(tracked.name)
        Kept.runs.append((place, tracked.after, tracked.id))

    def log(self, step, values):
        Kept.values.append((step, values))

    def flush(self):
        if Kept.fails:
            raise Kept.fails if Kept.fails is not True else RuntimeError("no room\nat all")

    def close(self, outcome):
        Kept.ends.append(outcome)


@pytest.fixture
def kept():
    Kept.fails, Kept.values, Kept.runs, Kept.ends, Kept.names = False, [], [], [], []
    return TrackerChoice(TrackerSpec("kept", f"{__name__}:Kept", "sys", "anything"), "there")


def places():
    return [(step, values["train/loss"]) for step, values in Kept.values]


def test_values_stand_at_the_updates_since_the_run_began_and_once():
    points = Points()
    found = [points.of(typed(one)) for one in (*LINES, *AGAIN)]
    assert [one and (one.step, one.values["train/loss"]) for one in found] == [
        *(*LOSSES[:2], None, LOSSES[2], None, ALL_LOSSES[3]),
    ]
    assert [points.of(typed(one)) for one in LINES] == [None] * 4  # an epoch is done again
    epoch = found[1].values
    assert (epoch["time/epoch_s"], epoch["plan/predicted_epoch_s"]) == (3.0, 2.5)
    late = points.of(typed({"kind": "evaluation", "epoch": 0, "val/top1": 0.25}))
    assert late == (8, {"val/top1": 0.25})
    assert points.last == 12


ODD = "a|b `c` *d* <b>e</b> & [f](g)\\"
"""A name of a data folder in which Markdown would find columns, code and links."""


def test_names_of_any_letters_stay_in_their_cell_of_the_table():
    table = markdown_table({"data": ODD, "two\nlines": 1.5})
    head, line, first, second = table.splitlines()
    assert head == "| | |"
    assert [row.count("|") for row in (line, first, second)] == [3, 3, 3]
    assert not set("`*[]<\\") & set(first)
    assert second == r"| two&#92;nlines | 1.5 |"


def test_what_goes_on_later_doubles_nothing(run, kept):
    first = TrackerFeed(run, kept, State(run))
    while first.turn():
        pass
    written(run, AGAIN)
    second = TrackerFeed(run, kept, State(run))
    while second.turn():
        pass
    second.close("finished")
    assert places() == ALL_LOSSES
    (place, after, name), (_, later, same) = Kept.runs
    assert (place, after, later, name) == ("there", -1, 11, same)
    assert Kept.ends == ["finished"]
    assert State(run).lines == {"kept:there": 6}


def test_what_a_tracker_may_lose_with_its_process_is_handed_on_again(run, kept, monkeypatch):
    monkeypatch.setattr(Kept, "lasts_after", 1000.0, raising=False)
    killed = TrackerFeed(run, kept, State(run))
    killed.turn()
    killed.turn()  # it is handed on once by a process that lives
    assert (places(), killed.left) == (LOSSES, 0)
    assert State(run).lines == {"kept:there": 0}
    Kept.values = []
    again = TrackerFeed(run, kept, State(run))
    again.turn()
    assert places() == LOSSES
    again._pending = deque([(-1000.0, 2), (float("inf"), 4)])
    again.turn()
    assert State(run).lines == {"kept:there": 2}
    again.close("finished")
    assert State(run).lines == {"kept:there": 4}


class Queued:
    """A run of trackio whose thread does not write what was logged, as where a server is away."""

    def __init__(self, next_step=0):
        self._queued_logs, self._client_lock, self.finished = [], threading.Lock(), 0
        self._next_step = next_step

    def log(self, values, step):
        self._queued_logs.append((step, values))

    def finish(self):
        self.finished += 1


def test_what_trackio_has_not_written_yet_is_handed_on_again_after_a_kill(run, monkeypatch):
    queued = Queued()
    fake = SimpleNamespace(init=lambda *_, **__: queued)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.delitem(sys.modules, TRACKIO, raising=False)
    try:
        in_trackio = import_module(TRACKIO)
        monkeypatch.setattr(in_trackio, "_FLUSH_SECONDS", 0.0)
        feed = TrackerFeed(run, TrackerChoice(TRACKERS["trackio"], "mine"), State(run))
        feed.turn()
        assert ([step for step, _ in queued._queued_logs], feed.left) == ([2, 8, 11], 0)
        assert State(run).lines == {"trackio:mine": 0}
        queued._queued_logs = []
        with queued._client_lock:  # it is being written
            feed.turn()
            assert State(run).lines == {"trackio:mine": 0}
        feed.turn()
        assert State(run).lines == {"trackio:mine": 4}
        feed.close("finished")
        assert queued.finished == 1

        State(run).note("trackio:mine", 0)  # as if it was killed before it noted anything
        queued = Queued(next_step=9)
        TrackerFeed(run, TrackerChoice(TRACKERS["trackio"], "mine"), State(run)).turn()
        assert [step for step, _ in queued._queued_logs] == [11]
    finally:
        sys.modules.pop(TRACKIO, None)  # it has the fake in it


def test_the_run_of_a_loop_of_ones_own_may_have_no_plan(run, kept):
    (run / "plan.json").unlink()
    assert not TrackerFeed(run, kept, State(run)).turn()
    assert places() == LOSSES


def test_a_tracker_that_fails_is_told_in_a_line_and_gets_all_of_it_later(run, kept):
    one = TrackerFeed(run, kept, State(run))
    Kept.fails = True
    assert not one.turn()
    assert one.problem == "kept:there: RuntimeError: no room at all"
    assert one.left == 4
    Kept.fails, Kept.values, one._due = False, [], 0.0
    one.turn()
    assert one.problem == ""
    assert places() == LOSSES
    assert one.left == 0


def test_a_tracker_that_failed_is_closed_before_another_is_opened(run, kept, monkeypatch):
    one, opened, closed = TrackerFeed(run, kept, State(run)), [], []

    class Noted(Kept):
        def __init__(self, place, tracked):
            assert len(closed) == len(opened)
            opened.append(self)

        def close(self, outcome):
            closed.append((self, outcome))
            raise SystemExit("it is broken")

    monkeypatch.setattr(sys.modules[__name__], "Kept", Noted)
    for fails in (True, True, False):
        monkeypatch.setattr(Noted, "fails", fails)
        one.hurry()
        one.turn()
    assert one.problem == ""
    assert closed == [(opened[0], ""), (opened[1], "")]
    one.close("finished")
    assert closed[2] == (opened[2], "finished")


def test_a_damaged_line_and_half_a_line_keep_nothing_up(run, kept):
    with (run / METRICS).open("a") as file:
        file.write('{"kind": "step", "epoch"\n{"kind": ')
    TrackerFeed(run, kept, State(run)).turn()
    assert places() == LOSSES
    assert State(run).lines == {"kept:there": 5}


def test_what_waits_for_a_later_attempt_is_tried_at_once_at_the_end(run, kept):
    one = TrackerFeed(run, kept, State(run))
    Kept.fails = SystemExit("http://me:secret@host gave up")
    assert not one.turn()
    assert one.problem == "kept:there: SystemExit: http://***@host gave up"
    Kept.fails, Kept.values = False, []
    one._due = time.monotonic() + 1000.0
    one.hurry()
    assert not one.turn()
    assert (one.problem, places()) == ("", LOSSES)


def test_a_full_disk_doubles_nothing_and_leaves_nothing(run, kept, monkeypatch):
    state = State(run)
    one = TrackerFeed(run, kept, state)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        one.turn()
    assert "cannot write" in one.problem
    assert not list(run.glob(".trackers*"))
    one.hurry()
    one.turn()
    assert (one.problem, places()) == ("", LOSSES)
    assert State(run).lines == {"kept:there": 4}


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_tracker_that_had_all_lines_as_the_disk_was_full_learns_how_the_run_ended(
    run, kept, monkeypatch
):
    one = TrackerFeed(run, kept, State(run))
    with monkeypatch.context() as patch:
        patch.setattr(Kept, "flush", lambda _: patch.setattr(Path, "replace", full))
        one.turn()
    assert ("cannot write" in one.problem, one.left) == (True, 0)
    one.hurry()
    one.turn()
    one.close("finished")
    assert (one.problem, places(), len(Kept.runs)) == ("", LOSSES, 1)
    assert Kept.ends == ["finished"]


def test_a_folder_that_was_renamed_is_the_same_run(run, kept):
    TrackerFeed(run, kept, State(run)).turn()
    moved = run.rename(run.with_name("later"))
    written(moved, AGAIN)
    TrackerFeed(moved, kept, State(moved)).turn()
    assert Kept.names == ["run", "run"]
    assert len({identity for _, _, identity in Kept.runs}) == 1
    note = json.loads((moved / "trackers.json").read_text())
    for name, plain in (("../../x", "..-..-x"), ("..", "run"), ("a\nb", "a\\nb")):
        (moved / "trackers.json").write_text(json.dumps(note | {"name": name}))
        assert State(moved).name == plain


class Hanging:
    """A tracker that does not come back until the test is over."""

    over = threading.Event()

    def __init__(self, place, tracked):
        Hanging.over.wait()


def test_a_tracker_that_hangs_keeps_neither_others_nor_the_end_waiting(run, kept, monkeypatch):
    """The time is up once the other has ended, however long that takes."""
    clock = lambda: time.monotonic() + 1000 * len(Kept.ends)  # noqa: E731
    monkeypatch.setattr(following, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    hangs = TrackerChoice(TrackerSpec("hangs", f"{__name__}:Hanging", "sys", "anything"), "")
    orders, found = queue.Queue(), []
    thread = threading.Thread(
        target=lambda: found.append(following.follow(run, [kept, hangs], orders, print))
    )
    thread.start()
    try:
        end = time.monotonic() + 300
        while len(Kept.values) < len(LOSSES) and time.monotonic() < end:
            time.sleep(0.01)
        assert places() == LOSSES
        written(run, AGAIN)
        orders.put(Order("finished", None, 900.0))
        thread.join(300)
        assert found == [False]  # not all have all
        assert (places(), Kept.ends) == (ALL_LOSSES, ["finished"])
    finally:
        Hanging.over.set()


def test_all_trackers_are_sent_what_they_lack_though_one_fails(run, kept, monkeypatch):
    bad = TrackerChoice(TrackerSpec("bad", f"{__name__}:no_such", "sys", "anything"), "")
    monkeypatch.setattr(following, "chosen_trackers", lambda _: [bad, kept])
    with pytest.raises(BatchwrightError, match="bad: AttributeError"):
        send_to_trackers(run, ["bad", "kept"], "finished")
    assert (places(), Kept.ends) == (LOSSES, ["finished"])


def test_a_tracker_that_fails_as_a_run_is_sent_is_closed_as_one_that_goes_on(
    run, kept, monkeypatch
):
    monkeypatch.setattr(following, "chosen_trackers", lambda _: [kept])
    monkeypatch.setattr(Kept, "fails", True)
    with pytest.raises(BatchwrightError, match="no room at all"):
        send_to_trackers(run, ["kept"], "finished")
    assert Kept.ends == [""]


@pytest.mark.parametrize("place", ["http://me:secret@host:5000", "postgresql://secret@host/runs"])
def test_a_password_is_not_shown_to_all_and_kept_in_files(place, monkeypatch):
    monkeypatch.setitem(TRACKERS._found, "mlflow", TrackerSpec("mlflow", "x:y", "json", "it"))
    monkeypatch.setenv("BATCHWRIGHT_TRACKERS", f"mlflow:{place}")
    for words in (None, [f"mlflow:{place}"]):
        with pytest.raises(ArgumentError, match="as in MLFLOW_TRACKING_URI") as error:
            wanted_trackers(words)
        assert "secret" not in str(error.value)
    assert wanted_trackers(["mlflow:sqlite:////a/b@c.db"]) == ("mlflow:sqlite:////a/b@c.db",)


LESS = {"run": "00000000-0000-4000-8000-000000000000", "lines": {"kept": -1}}


@pytest.mark.parametrize(
    "text",
    ["{", "[]", *(json.dumps({"format": following.FORMAT} | one) for one in ({"run": "x"}, LESS))],
)
def test_a_note_that_is_none_of_ours_is_refused_in_a_line(run, text):
    (run / "trackers.json").write_text(text)
    with pytest.raises(FileError, match="remove it to have trackers get all of the run anew"):
        State(run)


def test_two_processes_do_not_feed_one_run(run, kept):
    says = "are fed by process"
    with following.lock_trackers(run, 0.0), pytest.raises(BatchwrightError, match=says):
        following.lock_trackers(run, 0.0)


def test_a_tracker_that_is_not_known_or_not_installed_is_refused_in_a_line(monkeypatch, tmp_path):
    with pytest.raises(ArgumentError, match="no tracker 'tensorbord': known are `tensorboard`"):
        chosen_trackers(["tensorbord:here"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing_there").mkdir()  # a folder of that name is no package
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(
        TRACKERS._found,
        "wandb",
        TrackerSpec("wandb", "x:y", "nothing_there", "a project", extra="tracking"),
    )
    told = r'nothing_there is missing: pip install "batchwright\[tracking\]", or nothing_there al'
    with pytest.raises(ArgumentError, match=told):
        wanted_trackers(["wandb"])
    monkeypatch.setitem(TRACKERS._found, "wandb", TrackerSpec("wandb", "x:y", "no_such.one", "it"))
    with pytest.raises(ArgumentError, match=r"no_such\.one is missing: pip install no_such\.one$"):
        wanted_trackers(["wandb"])


def test_trackers_may_stand_in_the_environment_and_folders_become_whole(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("tensorboard", "wandb"):
        spec = TRACKERS[name]
        one = TrackerSpec(name, spec.open, "json", spec.place, spec.folder)
        monkeypatch.setitem(TRACKERS._found, name, one)
    monkeypatch.setenv("BATCHWRIGHT_TRACKERS", "tensorboard:tb, wandb:mine,")
    assert wanted_trackers(None) == (f"tensorboard:{tmp_path}/tb", "wandb:mine")
    assert wanted_trackers([]) == ()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # shells leave ~ behind a colon as it is
    assert wanted_trackers(["tensorboard:~/tb"]) == (f"tensorboard:{tmp_path}/home/tb",)


def test_a_process_that_has_one_place_of_a_tracker_is_not_given_two(monkeypatch):
    for name in ("mlflow", "wandb"):
        one = TrackerSpec(name, "x:y", "json", "it", single=TRACKERS[name].single)
        monkeypatch.setitem(TRACKERS._found, name, one)
    assert wanted_trackers(["mlflow:a", "mlflow:b", "wandb:a", "wandb:a"]) == (
        *("mlflow:a", "mlflow:b", "wandb:a"),
    )
    with pytest.raises(ArgumentError, match="send RUN --tracker wandb:b` hands it on to another"):
        wanted_trackers(["wandb:a", "wandb:b"])


# ------------------------------------------------------------------------------- the real trackers


def needs(package):
    there = find_spec(package) is not None
    line = "pip install trackio" if package == "trackio" else "pip install 'batchwright[tracking]'"
    return pytest.mark.skipif(not there, reason=line)


def sent_twice(run, *words):
    """Sends a run, goes on with it, and sends what is new."""
    send_to_trackers(run, words, "")
    written(run, AGAIN)
    send_to_trackers(run, words, "finished")
    send_to_trackers(run, words, "finished")  # there is nothing to send


@needs("tensorboard")
def test_tensorboard_shows_each_value_once_and_predictions_beside_them(run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    def shown(folder):
        found = EventAccumulator(str(folder)).Reload()
        tags = found.Tags()["scalars"]
        return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in tags}

    sent_twice(run, f"tensorboard:{tmp_path / 'tb'}")
    measured = shown(tmp_path / "tb" / "run")
    assert [step for step, _ in measured["train/loss"]] == [2, 8, 11, 12]
    assert measured["time/epoch_s"] == [(8, 3.0)]
    assert shown(tmp_path / "tb" / "run" / "predicted") == {"time/epoch_s": [(8, 2.5)]}

    other = tmp_path / "elsewhere" / "run"  # of the same name
    other.mkdir(parents=True)
    plan = make_plan()
    named = plan.model_copy(update={"data": plan.data.model_copy(update={"name": ODD})})
    write_record(named, other / "plan.json")
    written(other, LINES)
    send_to_trackers(other, [f"tensorboard:{tmp_path / 'tb'}"], "finished")
    folders = sorted((tmp_path / "tb").iterdir())
    assert [one.name.partition("-")[0] for one in folders] == ["run", "run"]
    texts = EventAccumulator(str(folders[1])).Reload().Tensors("plan")
    page = markdown_to_safe_html(texts[0].tensor_proto.string_val[0])
    assert "<b>" not in page
    assert f"<td>data</td>\n<td>{ODD}</td>" in unescape(page)
    foreign = tmp_path / "others" / "run"  # events of somebody else
    foreign.mkdir(parents=True)
    (foreign / "events.out.tfevents.1.host.1.0").touch()
    send_to_trackers(run, [f"tensorboard:{tmp_path / 'others'}"], "finished")
    assert len(list(foreign.iterdir())) == 1

    # A process that was killed wrote a value that its note does not know of.
    state = State(run)
    state.note(f"tensorboard:{tmp_path / 'tb'}", 4)
    send_to_trackers(run, [f"tensorboard:{tmp_path / 'tb'}"], "finished")
    assert [step for step, _ in shown(tmp_path / "tb" / "run")["train/loss"]] == [2, 8, 11, 12]

    # Nor of anything, as where the disk was full at once.
    state.note(f"tensorboard:{tmp_path / 'tb'}", 0)
    send_to_trackers(run, [f"tensorboard:{tmp_path / 'tb'}"], "finished")
    assert [step for step, _ in shown(tmp_path / "tb" / "run")["train/loss"]] == [2, 8, 11, 12]
    assert shown(tmp_path / "tb" / "run" / "predicted")["time/epoch_s"] == [(8, 2.5)]


@needs("tensorboard")
def test_after_a_full_disk_tensorboard_still_has_the_runs_own_folder(run, tmp_path):
    tracked = TrackedRun(run, "run", "an identifier", {}, after=-1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    opened = import_module("batchwright.client.trackers.in_tensorboard").open_tracker
    for _ in range(2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            with pytest.raises((OSError, FileError), match="File too large"):
                opened(str(tmp_path / "tb"), tracked)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        opened(str(tmp_path / "tb"), tracked).close("finished")
        assert [one.name for one in (tmp_path / "tb").iterdir()] == ["run"]


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_has_each_value_once_and_what_was_planned(run, tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    address = f"sqlite:///{tmp_path}/runs.db"
    with monkeypatch.context() as patch:  # the server goes as soon as it has the run
        patch.setattr(MlflowClient, "log_batch", full)
        with pytest.raises(BatchwrightError, match="No space left"):
            send_to_trackers(run, [f"mlflow:{address}"], "")
    sent_twice(run, f"mlflow:{address}")
    State(run).note(f"mlflow:{address}", 3)  # as if it was killed before it noted more
    send_to_trackers(run, [f"mlflow:{address}"], "finished")
    client = MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("batchwright")
    (one,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(one.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in history) == ALL_LOSSES
    assert one.data.metrics["plan/predicted_epoch_s"] == 2.5
    assert one.data.params["global_batch"] == str(make_plan().stages[0].global_batch_size)
    assert (one.info.run_name, one.info.status) == ("run", "FINISHED")


@needs("wandb")
@pytest.mark.slow
def test_wandb_keeps_each_value_once_without_a_network(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    sent_twice(run, "wandb:mine")
    codes = [one.exit.exit_code for one in records_of(run) if one.HasField("exit")]
    assert codes == [255, 0]  # the first time nobody knew how it ended
    assert steps_of(run) == [2, 8, 11, 12]
    late = {"kind": "evaluation", "epoch": 0, "val/top1": 0.25}  # at a step that is written
    written(run, [late])
    send_to_trackers(run, ["wandb:mine"], "finished")
    assert names_of(run).count("val/top1") == 1


def records_of(run):
    return [one for path in sorted(run.rglob("*.wandb")) for one in records_in(path)]


def names_of(run):
    items = [item for one in records_of(run) for item in one.history.item]
    return [".".join(item.nested_key) or item.key for item in items]


def steps_of(run):
    items = [item for one in records_of(run) for item in one.history.item]
    return [int(one.value_json) for one in items if "_step" in (one.key, *one.nested_key)]


def records_in(path):
    """Those of an offline run's file, in blocks as LevelDB's logs have them."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:  # no head fits into the rest of a block
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record, part = Record.FromString(part), b""
            yield record


@needs("trackio")
@pytest.mark.slow
def test_trackio_has_each_value_once_also_after_a_kill_right_behind_a_note(run, tmp_path):
    begin = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from batchwright.client.trackers.following import State, TrackerFeed, chosen_trackers\n"
        "from test_trackers import sent_twice\n"
        "run = Path(sys.argv[2])\n"
    )
    killed = (
        "one = TrackerFeed(run, chosen_trackers(['trackio:mine'])[0], State(run))\n"
        "assert not one.turn() and State(run).lines == {'trackio:mine': 4}, one.problem\n"
        "os.kill(os.getpid(), 9)\n"
    )
    again = (
        "sent_twice(run, 'trackio:mine')\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "import json\n"
        "(name,) = SQLiteStorage.get_runs('mine')\n"
        "logs = SQLiteStorage.get_logs('mine', name)\n"
        "print(json.dumps([[one['step'], one['train/loss']] for one in logs]))\n"
    )
    done = [
        subprocess.run(
            [sys.executable, "-c", begin + script, str(Path(__file__).parent), str(run)],
            env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")},  # read at its import
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        for script in (killed, again)
    ]
    codes = [one.returncode for one in done]
    assert codes == [-signal.SIGKILL, 0], [one.stderr for one in done]
    found = json.loads(done[1].stdout.splitlines()[0])
    assert [tuple(one) for one in found] == ALL_LOSSES


# ---------------------------------------------------------------------------------- a real training


NETWORK = "network=held_network:network"


def command(*words, folder, prints):
    path = os.pathsep.join([str(OTHER_PACKAGE), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return Forked([*map(str, words), NETWORK], cwd=folder, env=env, prints=prints)


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_is_tracked_once(tmp_path, tmp_path_factory, forks):
    """It is held in its third epoch; the second one ends again, as its checkpoint is older."""
    from batchwright.workload.data.sources import open_data

    keys = {"network": NETWORK.partition("=")[2], "epochs": 8, "global_batch": 512}
    job = Job(launch="in-process", workers=1, resolutions=(8,), checkpoint_steps=4, **keys)
    plan = plan_without_profile(job, open_data(job).facts, make_network(name=job.network))
    write_record(plan, tmp_path / "plan.json")
    shutil.copytree(OTHER_PACKAGE, tmp_path, dirs_exist_ok=True)  # what is forked finds it here
    hold(tmp_path, "run/checkpoints", after=7)
    shown, folder = tmp_path / "shown.jsonl", tmp_path / "run"
    options = ("--out", folder, "--tracker", f"written:{shown}")
    where = {"folder": tmp_path, "prints": tmp_path_factory.mktemp("prints")}
    first = command("train", tmp_path / "plan.json", *options, **where)
    try:
        while first.poll() is None and not (
            shown.exists() and shown.read_text().count('"val/top1"') == 2
        ):  # both epochs have been handed on
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
    finally:
        first.kill()
        err = first.communicate()[1]
    assert first.returncode == -signal.SIGKILL, err
    release(tmp_path)
    second = command("train", "--resume", *options, **where)
    err = second.communicate(timeout=300)[1]
    assert second.returncode == 0, err
    found = [json.loads(line) for line in shown.read_text().splitlines()]
    facts = [one["facts"] for one in found if "facts" in one]
    assert [(one["network"], one["epochs"]) for one in facts] == [(job.network, 8)]
    values = [one for one in found if "step" in one]
    times = Counter((one["step"], name) for one in values for name in one.keys() - {"step"})
    assert set(times.values()) == {1}
    ends = [one["step"] for one in found if "val/top1" in one]
    assert ends == [ends[0] * number for number in range(1, 9)]  # all epochs, in order
    assert [one["outcome"] for one in found if "outcome" in one][-1] == "finished"
    whole = (folder / METRICS).read_bytes().count(b"\n")
    assert State(folder).lines == {f"written:{shown}": whole}
