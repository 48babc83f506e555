"""What Python says to somebody new: wrong arguments, other programs' words, short looks, files."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw
from batchwright.errors import ArgumentError, FileError, JobError, PlanError, one_line
from batchwright.planning.planner import plan_without_profile
from batchwright.planning.schedule import rate_schedule
from batchwright.records import Check, Goal, Job, Sweep, SweepCell, SweptKey
from batchwright.records.documents import change_job, load_job, write_record
from batchwright.records.text.formatting import number
from batchwright.records.text.job_keys import ABSENT_WORDS, OTHER_WORDS, job_keys
from batchwright.records.text.problems import described
from samples import (
    make_data,
    make_hybrid_plan,
    make_network,
    make_plan,
    make_profile,
    make_summary,
)

MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
LONG = 300 * "x"  # longer than the name of a file may be
DATASET = TensorDataset(torch.zeros(4, 2), torch.zeros(4))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A working folder with a profile, a plan and a finished run."""
    monkeypatch.chdir(tmp_path)
    make_profile().save("profile.json")
    make_plan().save("plan.json")
    Path("run").mkdir()
    make_plan().save("run/plan.json")
    make_summary(run_folder="elsewhere").save("run/summary.json")
    Path("empty").mkdir()
    return tmp_path


# ------------------------------------------------------------------------------ wrong arguments


def session(model=MODEL, optimizer=OPTIMIZER, dataset=DATASET, plan="plan.json", **options):
    return bw.Session(model, optimizer, dataset, plan=plan, **options)


def grid(**values):
    return bw.sweep(None, {"epochs": [1, 2]}, **values)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: bw.plan(None),
            r"plan takes a profile or .* not None: bw\.probe\(\.\.\.\) returns",
        ),
        (lambda: bw.plan(make_plan()), "takes a profile or the path of its file, not a Plan"),
        (lambda: bw.plan([make_profile(), 3]), "takes a profile .*, not the int 3"),
        (lambda: bw.plan("none.json"), "there is no file none.json"),
        (lambda: bw.plan("plan.json"), "plan.json is a plan, not a profile; `batchwright probe`"),
        (lambda: bw.plan("run"), "Is a directory; there is plan.json and summary.json in it"),
        (lambda: bw.plan(make_profile(), "epochs=3"), r"overrides=\['epochs=3'\], or .* epochs=3"),
        (lambda: bw.plan(make_profile(), None), "overrides= takes a list of .* not None"),
        (lambda: bw.plan(make_profile(), [3]), r"overrides= takes a list of .* the list \[3\]"),
        (lambda: bw.plan(make_profile(), runs="run"), r"runs= of plan takes a list .* 'run'"),
        (lambda: bw.plan(make_profile(), runs=[3]), "runs= of plan takes a summary .* int 3"),
        (lambda: bw.plan(make_profile(), epoch=3), "unknown job key 'epoch': did you mean 'epoc"),
        (lambda: bw.plan(make_profile(), goal=3), "unknown job key 'goal': it has keys of its own"),
        (lambda: bw.check(None), "check takes a plan .* not None"),
        (lambda: bw.check(make_profile()), "check takes a plan .* not a Profile"),
        (lambda: bw.check(make_plan(), profile=3), "profile= of check takes a profile"),
        (lambda: bw.check(make_plan(), overrides="a=3"), r"write overrides=\['a=3'\]"),
        (lambda: bw.train(make_profile()), r"train takes a plan .* Profile: bw\.plan\(\.\.\.\)"),
        (lambda: bw.train(), "train needs a plan"),
        (lambda: bw.train(make_plan(), profile=make_plan()), "profile= of train .* not a Plan"),
        (lambda: bw.train(make_plan(), run_folder=3), "run_folder= takes the path of a folder"),
        (lambda: bw.train(make_plan(), out="runs/a"), "unknown job key 'out': .*run_folder=FOLDER"),
        (lambda: bw.train("profile.json"), "profile.json is a profile, not a plan"),
        (lambda: bw.probe(make_plan()), "a job is expected, or the path of .* not a Plan"),
        (lambda: bw.probe({"epochs": 3}), r"not the dict \{'epochs': 3\}: keys go by name"),
        (lambda: bw.probe("data=digits"), "no file data=digits: .* keys by name, such as epochs=3"),
        (lambda: bw.probe("profile.json"), "profile.json is a profile, not a job: .*plan. takes"),
        (lambda: bw.run(3), "a job is expected, .* not the int 3"),
        (lambda: bw.run(run_folder=3, resume=True), "run_folder= takes the path of a folder"),
        (lambda: bw.run(lr=0.1), "unknown job key 'lr': write, for instance, learning_rate=0.1"),
        (lambda: bw.report(None), r"report takes a summary .* None: bw\.train\(\.\.\.\) returns"),
        (lambda: bw.report(make_plan()), "report takes a summary .* not a Plan"),
        (lambda: bw.report("empty"), "empty holds no summary.json"),
        (lambda: bw.report(make_summary(), 3), "report takes a summary .* the int 3"),
        (lambda: bw.report(make_summary(), out=3), "out= takes the path of a folder"),
        (lambda: bw.schedule(3), "schedule takes a plan, a profile, a summary, a job, .* int 3"),
        (lambda: bw.schedule("plan.json", overrides="a=3"), r"write overrides=\['a=3'\]"),
        (lambda: bw.sweep(make_plan(), {"epochs": [1]}), "a job is expected, .* not a Plan"),
        (lambda: bw.sweep(None, "epochs=1,2"), r"takes values by key, .* the text 'epochs=1,2'"),
        (
            lambda: bw.sweep(None, {"lr": [1]}),
            "unknown job key 'lr': write, for instance, learning_rate=0.1",
        ),
        (lambda: grid(seeds="3"), "seeds= takes how many, such as 3, or which, .* the text '3'"),
        (lambda: grid(out=3), "out= takes the path of a folder, not the int 3"),
        (lambda: grid(overrides="a=3"), r"write overrides=\['a=3'\]"),
        (lambda: bw.max_local_batch_size(None), "takes a profile, .* not None"),
        (
            lambda: bw.max_local_batch_size("profile.json"),
            r"takes a profile, .* the text 'profile.json': read it with bw\.load\('profile.json'\)",
        ),
        (
            lambda: bw.max_local_batch_size(make_profile(), limit="4GB"),
            "limit= takes a whole number, not the text '4GB'",
        ),
        (lambda: bw.max_local_batch_size(make_profile(), limit=0), "limit=0: give 1 or more"),
        (lambda: bw.load(None), "load takes the path of a file or run folder, not None"),
        (lambda: bw.load(make_plan()), "load takes the path .* not a Plan"),
        (lambda: bw.load(LONG), f"cannot read {LONG}: File name too long"),
        (lambda: bw.plan(LONG), f"cannot read {LONG}: File name too long"),
        (lambda: bw.report(LONG), f"cannot read {LONG}: File name too long"),
        (lambda: bw.schedule(LONG), f"cannot read {LONG}: File name too long"),
        (lambda: bw.metrics(LONG), f"{LONG} holds no metrics.jsonl"),
        (lambda: bw.deliver("run", LONG), "there is no checkpoint run/checkpoints/last.pt"),
        *(
            (lambda resumed=resumed: resumed(LONG), f"there is no folder {LONG}, so no run to re")
            for resumed in (
                lambda out: bw.run(run_folder=out, resume=True),
                lambda out: bw.train("plan.json", run_folder=out, resume=True),
                lambda out: bw.sweep(out=out, resume=True),
            )
        ),
        (lambda: make_plan().save(None), "save takes the path of a file, not None"),
        (lambda: bw.muon(MODEL.parameters(), lr=0.1), "takes the model itself, .* generator"),
        (lambda: session(model=None), r"model of Session is None: write bw\.Session\(model"),
        (lambda: session(model=OPTIMIZER, optimizer=MODEL), "model of Session is a SGD"),
        (lambda: session(optimizer=MODEL), "optimizer of Session is a Linear"),
        (lambda: session(dataset=DataLoader(DATASET)), "dataset of Session is a DataLoader"),
        (lambda: session(dataset=None), "dataset of Session is None: give the data set itself"),
        (lambda: session(plan=None), "plan= of Session takes a plan .* not None"),
        (lambda: session(plan=make_profile()), "plan= of Session takes a plan .* not a Profile"),
        (lambda: session(run_folder=3), "run_folder= takes the path of a folder"),
        (lambda: bw.Job("job.yaml"), "a Job takes its keys by name, such as"),
        (lambda: bw.Job(epochz=1), "unknown job key 'epochz': did you mean 'epochs'"),
        (lambda: bw.Job(epochs="many"), "job key epochs = 'many': input should be a valid int"),
        (lambda: bw.Job(epochs=True), "job key epochs = True: this key is no yes or no"),
        (lambda: bw.Job(resolutions=[True]), "this key is no yes or no"),
        (
            lambda: bw.Job(probe={"budgt": 3}),
            "unknown job key 'probe.budgt': did you mean 'probe.b",
        ),
        (lambda: bw.Job(probe=5), "job key probe = 5: it has keys of its own: probe.budget"),
        (lambda: bw.Job(**{"probe.budget": 5}), r"write probe=\{'budget': \.\.\.\}"),
        (lambda: bw.Job(goal={"kinds": [{"kind": "a", "count": 1, "cost": 2}]}), "cost is unknown"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(call, said, place):
    before = sorted(place.rglob("*"))
    with pytest.raises(bw.BatchwrightError, match=said) as refused:
        call()
    assert str(refused.value) == one_line(refused.value)
    assert refused.value.exit_code == 2
    assert sorted(place.rglob("*")) == before


def test_an_argument_of_another_kind_is_a_type_error_too():
    assert issubclass(ArgumentError, TypeError)
    assert described(bw.Plan) == "the class Plan"


def test_a_part_of_the_job_may_be_a_record():
    assert change_job(bw.Job(), {"goal": Goal(accuracy=0.9)}).goal.accuracy == 0.9


def test_a_job_goes_through_python_and_json_as_before():
    job = bw.Job(epochs=3, probe={"budget": 4})
    assert bw.Job.model_validate(job.model_dump(mode="json")) == job
    assert next(iter(inspect.signature(bw.Job).parameters.values())).kind.name == "VAR_POSITIONAL"


# --------------------------------------------------------------------------- other programs' words


def test_words_that_people_try_are_no_job_keys_and_lead_to_one():
    assert not set(OTHER_WORDS) & set(job_keys(Job))
    for form in set(OTHER_WORDS.values()):
        if not form.startswith("--"):
            load_job(None, [re.split(",? ", form)[0]])  # is accepted


@pytest.mark.parametrize(
    ("word", "key"),
    [
        *[("lr", "learning_rate=0.1"), ("LR", "learning_rate=0.1"), ("wd", "weight_decay=")],
        *[(word, "global_batch=128") for word in ("bs", "batch_size", "batch-size")],
        *[(word, "workers=2") for word in ("gpus", "world_size")],
        ("num_workers", "loaders=2"),
        *[("pretrained", "network_args.pretrained=true"), ("lr_base_size", "base_batch=256")],
        *[(word, "resolutions=224") for word in ("img_size", "image_size", "imgsz")],
        *[("amp", "precision=bfloat16"), ("model", "network=resnet18"), ("arch", "network=")],
        *[("dataset", "data=imagefolder:PATH"), ("optim", "optimizer=sgd"), ("val_split", "val=0")],
        *[("lr_scheduler", "decay=cosine"), ("num_epochs", "epochs=30"), ("random_seed", "seed=1")],
    ],
)
def test_a_word_of_another_program_is_answered_with_our_key(word, key, tmp_path, command):
    said = rf"^unknown job key '{word}'.*: write, for instance, {key}"
    with pytest.raises(JobError, match=said):
        bw.Job(**{word: 1})
    with pytest.raises(JobError, match=said):
        bw.plan(make_profile(), **{word: 1})
    (tmp_path / "job.yaml").write_text(f"{word}: 1\n")
    with pytest.raises(JobError, match=rf"'{word}' in .*job.yaml: write, for instance, {key}"):
        load_job(tmp_path / "job.yaml")
    code, _, err = command("plan", "profile.json", f"{word}=1")
    assert (code, err.count("\n")) == (2, 1)
    assert f"'{word}': write, for instance, {key}" in err


def test_every_option_of_timm_on_the_page_leads_to_what_stands_beside_it():
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--.*?) \| (.*) \|$", page, re.MULTILINE)
    asked = [(word, ours) for options, ours in rows for word in re.findall(r"--([a-z-]+)", options)]
    assert len(asked) > 30
    for word, ours in ((word.replace("-", "_"), ours) for word, ours in asked):
        if word not in {*job_keys(Job), *ABSENT_WORDS}:
            assert OTHER_WORDS[word].partition("=")[0].partition(" ")[0] in ours, word


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["run", "--lr", "0.1"],
            "no option --lr: write, for instance, learning_rate=0.1, the rate at base_batch",
        ),
        (
            ["train", "plan.json", "--batch-size=3"],
            "no option --batch-size: write, for instance, global_batch=",
        ),
        (["plan", "profile.json", "--epochs", "3"], "no option --epochs: .* write epochs=..."),
        (["probe", "--weight-decay", "3"], "no option --weight-decay: .* write weight_decay=..."),
        (
            ["train", "plan.json", "--output-dir", "a"],
            "no option --output-dir: write, for instance, --out FOLDER",
        ),
        (["doctor", "--out", "a"], "error: there is no option --out: .*doctor --help lists them"),
        (["run", "--zzz"], "error: there is no option --zzz: .*batchwright run --help lists them"),
        (["resume"], "no command 'resume': write `batchwright run --resume --out RUN`"),
        (["compare", "a", "b"], "no command 'compare': write `batchwright report RUN RUN"),
        (["export", "plan.json"], "error: missing option '--as': see .*batchwright export --help"),
        (["run", "--out"], "error: option '--out' requires an argument: see .*--help"),
        (["serve", "--port", "x"], "error: invalid value for '--port': .* see .*serve --help"),
        (
            ["doctor", "x"],
            "error: got unexpected extra argument.* see .*batchwright doctor --help",
        ),
        (["run", "--rsume"], "error: there is no option --rsume: did you mean --resume"),
        (["--zzz"], "error: there is no option --zzz: .*batchwright --help lists them"),
        (["runn"], "error: there is no command 'runn': did you mean 'run'"),
        (["zzz"], "error: there is no command 'zzz': known are run, probe, "),
        (["keys", "epochz"], "no job key has 'epochz' in .*: did you mean 'epochs'?"),
        (["keys", "lr"], "no job key has 'lr' in .*: write, for instance, learning_rate=0.1"),
        (["keys", "zzz"], "no job key has 'zzz' in .*: `batchwright keys` lists all"),
        (["run", "digits"], "no file digits: give a job's YAML file, or keys by name"),
    ],
)
def test_unknown_words_of_the_command_line_are_answered_in_one_line(command, words, said):
    code, out, err = command(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(err)


def test_the_keys_of_a_job_are_listed_with_default_and_meaning(command):
    code, out, _ = command("keys")
    listed = re.findall(r"^(\S+)  \(default: .+\)\n    \S", out, re.MULTILINE)
    assert (code, listed) == (0, job_keys(bw.Job))
    found = json.loads(command("keys", "DEADLINE", "--json")[1])["keys"]
    assert (found[0]["key"], found[0]["default"]) == ("goal.deadline", None)
    assert all("deadline" in one["key"] + one["meaning"] for one in found)
    assert 1 < len(found) < len(listed)
    assert "](" not in out  # a link of the page becomes its name
    assert "docs/data.md" in out
    assert command("keys", "learning-rate")[1].startswith("learning_rate  (default: auto)")
    assert command("keys", "amp")[2].startswith("amp: write, for instance, precision=")


# ------------------------------------------------------------------------------------ short looks


def make_sweep():
    cell = SweepCell(name="a", values=(1,), seed=0, state="waiting")
    key = SweptKey(key="epochs", values=(1, 2))
    return Sweep(
        folder="runs/sweep",
        job=bw.Job(),
        data=None,
        keys=(key,),
        seeds=(0, 1),
        cells=(cell,),
        settings=(),
    )


def make_check():
    return Check(points=(), tolerance=0.1, cluster=make_profile().cluster)


RECORDS = {
    "plan": make_plan,
    "hybrid plan": make_hybrid_plan,
    "profile": make_profile,
    "summary": make_summary,
    "check": make_check,
    "schedule": lambda: rate_schedule(make_plan()),
    "sweep": make_sweep,
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_is_shown_in_a_line_or_two_and_in_a_small_table(kind):
    record = RECORDS[kind]()
    shown = repr(record)
    assert shown == str(record)
    assert shown.startswith(f"<{type(record).__name__}: ")
    assert "\n" not in shown
    assert len(shown) < 300
    table = record._repr_html_()
    assert table.count("<tr>") >= len(record._facts())
    assert not {"<script", "color", "http"} & {*re.findall(r"<script|color|http", table)}
    assert len(table) < 12_000


def test_a_notebook_shows_the_choice_among_candidates_and_predicted_beside_measured():
    plan, summary = make_plan(), make_summary()
    assert "the choice in bold" in plan._repr_html_()
    assert "step times" in make_profile()._repr_html_()
    assert "predicted and measured" in summary._repr_html_()
    assert number(summary.measured_epoch_seconds) in summary._repr_html_()


def test_what_matters_is_in_the_line():
    assert "workers 2, global batch 96 (2 x 48), side 32 px" in repr(make_plan())
    assert "held-out accuracy 98.1 % (best 98.6 %, epoch 28)" in repr(make_summary())
    assert "local batches 4 to 64" in repr(make_profile())
    assert repr(bw.Job()) == str(bw.Job()) == "Job()"
    assert repr(bw.Job(epochs=3, probe={"budget": 4})) == "Job(epochs=3, probe={'budget': 4.0})"


def test_names_in_a_table_are_escaped_and_control_characters_made_visible():
    summary = make_summary(run_folder="<script>alert(1)</script>\x1b[2J")
    table = summary._repr_html_()
    assert "<script>" not in table
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J" in table
    assert "\x1b" not in table + repr(summary)
    assert "&lt;b&gt;" in bw.Job(data="<b>:x")._repr_html_()


def test_a_session_is_shown_in_a_line(monkeypatch):
    threads = torch.get_num_threads()
    job = bw.Job(workers=1, epochs=2, global_batch=2)
    data = make_data(train_samples=4, val_samples=4, classes=("a", "b"), side=8)
    plan = plan_without_profile(job, data, make_network(batch_norm=False, least_side=1))
    assert repr(bw.Session.__new__(bw.Session)) == "<Session: not open>"
    with session(plan=plan, exit_on_stop=False) as opened:
        shown = repr(opened)
    torch.set_num_threads(threads)
    assert shown.startswith("<Session: worker 0 of 1, device cpu, network resnet8, data digits, ")
    assert shown.endswith("epochs 2, folder none>")


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("kind", RECORDS)
def test_what_a_verb_returned_is_saved_and_loaded(kind, place):
    record = RECORDS[kind]()
    record.save(place / "record.json")
    loaded = bw.load("record.json")
    if kind == "summary":  # it knows where it was found
        record = record.model_copy(update={"run_folder": "."})
    assert loaded == record
    write_record(record, "same.json")
    if kind != "summary":
        assert (place / "same.json").read_bytes() == (place / "record.json").read_bytes()


def test_a_saved_plan_is_what_training_reads(command):
    make_plan().save("my plan.json")
    code, _, err = command("train", "my plan.json", "epochs=3")
    assert (code, "epochs=3 differs from the plan's epochs=30" in err) == (2, True)


def test_a_run_folder_is_loaded_as_far_as_it_has_come(place):
    assert bw.load("run") == make_summary(run_folder="run")
    assert bw.load(place / "run" / "summary.json").run_folder == str(place / "run")
    (place / "run" / "summary.json").unlink()
    assert bw.load("run") == make_plan()
    (place / "job.yaml").write_text("epochs: 3\n")
    assert bw.load("job.yaml") == bw.Job(epochs=3)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty", None, "empty holds none of sweep.json, summary.json, plan.json"),
        ("none", None, "there is no file none"),
        ("metrics.jsonl", b'{"a": 1}\n{"b": 2}\n', "metrics.jsonl is not JSON, as records are"),
        ("other.json", b'{"a": 1}', "is neither a plan, .* nor a simulation: it has no format"),
        ("odd.json", b'{"format": "tar/1"}', "nor a simulation: its format is 'tar/1'"),
        ("old.json", b'{"format": "batchwright-plan/0"}', "a plan as another version has it"),
        ("image.png", b"\x89PNG", "cannot read image.png: it is not text in UTF-8"),
        ("last.pt", b"PK", "is a checkpoint by its name: .* weights=last.pt"),
        ("short.json", b'{"format": "batchwright-plan/1"}', "is not a valid plan: its key job is"),
    ],
)
def test_loading_something_else_says_what_it_is(place, name, content, said):
    if content is not None:
        (place / name).write_bytes(content)
    with pytest.raises(FileError, match=said) as refused:
        bw.load(name)
    assert str(refused.value) == one_line(refused.value)


def test_what_cannot_be_saved_says_so(place):
    with pytest.raises(FileError, match=r"cannot write none/plan\.json: No such file"):
        make_plan().save("none/plan.json")
    assert not list(place.glob(".*"))


def test_a_summary_has_its_last_and_its_best_accuracy():
    summary = make_summary()
    assert summary.accuracy == summary.epochs[-1].top1
    assert summary.best_accuracy == max(one.top1 for one in summary.epochs if one.top1 is not None)
    none = summary.model_copy(update={"epochs": ()})
    assert (none.accuracy, none.best_accuracy) == (None, None)
    assert "not evaluated" in repr(none)


def test_a_limit_below_one_is_a_plan_error_as_before():
    with pytest.raises(PlanError, match="limit=-1: give 1 or more"):
        bw.max_local_batch_size(make_profile(), limit=-1)
