"""Jobs and records in files: what goes round, and what each mistake says."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from batchwright import records
from batchwright.errors import BatchwrightError, FileError, JobError, one_line
from batchwright.records import (
    Ags,
    Cycle,
    Disturbance,
    DualBatch,
    Goal,
    Job,
    Link,
    Plan,
    ProbeSettings,
    Profile,
    Ray,
    RunSummary,
    Server,
    Slurm,
    Virtual,
    WorkerKind,
)
from batchwright.records.base import Keys, record_text
from batchwright.records.documents import (
    asked_yaml,
    change_job,
    job_yaml,
    load_job,
    read_record,
    write_record,
    write_text,
)
from batchwright.records.job import other_keys_come
from batchwright.records.text.formatting import data_name
from batchwright.records.text.job_keys import job_keys
from batchwright.records.text.job_values import flattened, text_of
from batchwright.storage.files import write_whole
from samples import make_job, make_plan, make_profile, make_summary

OTHER_VALUES = Job(
    data="imagefolder:/somewhere",
    data_args={"label": "kind", "size": [3, 4], "deep": {"a": True}},
    val=0.1,
    unreadable="skip",
    network="torchvision.models:resnet50",
    network_args={"pretrained": True, "rate": 0.5},
    weights="weights.pt",
    frozen=("stem.*", "stages.0.*"),
    body_rate=0.1,
    normalize=(0.5, 0.5, 0.5, 0.2, 0.2, 0.25),
    loss="mine:loss",
    label_smoothing=0.1,
    dropout=0.2,
    augment="resized-crop",
    crop_scale=0.35,
    rotation=0.1,
    zoom=0.2,
    optimizer="adamw",
    momentum=0.8,
    nesterov=False,
    checkpoint_epochs=10,
    betas=(0.8, 0.95),
    eps=1e-6,
    weight_decay=0.01,
    learning_rate=0.003,
    base_batch=64,
    scaling="linear",
    warmup_epochs=1.5,
    warmup_start=0.25,
    warmup_law="linear",
    decay="steps",
    clip_norm=1.0,
    average_weights="on",
    sampling="balanced",
    seed=2**63 - 1,
    epochs=7,
    precision="float32",
    compile="auto",
    cuda_graphs="off",
    activation_checkpointing="off",
    method="dynamic-batch",
    rebalance="published",
    rebalance_steps=7,
    least_local_batch=4,
    most_local_batch=300,
    device="cpu",
    workers=2,
    loaders=4,
    launch="slurm",
    nodes=2,
    global_batch=96,
    micro_batch=16,
    resolutions=(24, 32),
    evaluate_epochs=2,
    track=("hessian", "gradient-norm"),
    checkpoint_seconds=5.5,
    checkpoint_steps=40,
    timeout=30,
    restarts=1,
    port=29_500,
    dual=DualBatch(
        small_workers=2,
        extra_time=1.1,
        large_batches=(64, 48),
        rounding="truncate",
        shares="planned",
    ),
    server=Server(
        consistency="ssp",
        staleness=1,
        merge="compsac",
        update_factor="sqrt",
        exchange_steps=50,
        momentum="reset",
    ),
    ags=Ags(mode="norm", least=0.5, most=4.0, lookback=20, parts=8),
    cycle=Cycle(
        preset="cifar100",
        keep=("epochs", "zoom"),
        order="one-pass",
        stage_epochs=(4, 2, 1),
        stage_rates=(1.0, 0.2),
        shares=(1.0, 2.0),
        batches=(128, 96),
        dropouts=(0.1, 0.2),
        strengths=(0.5, 1.0),
        recalibrate=20,
    ),
    slurm=Slurm(
        partition="gpu",
        account="vision",
        time="60",
        gpus_per_node=1,
        lines=("--mem=8G", "--exclusive"),
    ),
    ray=Ray(address="10.0.0.2:6379", cpus_per_worker=8, gpus_per_worker=1, min_workers=1),
    virtual=Virtual(
        sample_seconds=5e-4,
        step_seconds=0.015,
        speeds=(1.0, 0.5),
        overheads=(1.0, 0.1),
        links=(1.0, 0.25),
        disturbances=(Disturbance(worker=1, start=3, end=9, slowdown=2.5),),
    ),
    probe=ProbeSettings(budget=3, error=0.1, steps=4, kind="t4", learning=0.2),
    goal=Goal(
        patience=7,
        objective="time",
        doubling_gain=0.1,
        least_steps=5,
        memory=2**30,
        deadline=600,
        max_cost=2.5,
        max_workers=8,
        price=0.4,
        accuracy=0.9,
        accuracy_tolerance=0.02,
        confidence=0.9,
        least="cost",
        kinds=(
            WorkerKind(kind="t4", count=4, price=0.35),
            WorkerKind(kind="a100", count=2, price=3.1, memory=2**34, like="t4", speed=5),
        ),
        preemptions_per_hour=0.1,
        restart_seconds=40,
        checkpoint_cost=2.0,
        tolerance=0.2,
    ),
    link=Link(latency=1e-5, bandwidth=1e9),
)


INSTEAD_OF_KINDS = "goal.prices"  # see test_prices
INSTEAD_OF_RECALIBRATION = "batch_norm"  # see test_job_rules
INSTEAD_OF_FACTORS = "batch_growth"  # see test_batch_growth


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def value_at(job: Job, key: str):
    value = job
    for part in key.split("."):
        value = getattr(value, part)
    return value


def as_override(value) -> str:
    if isinstance(value, tuple) and isinstance(value[0], WorkerKind | Disturbance):
        return json.dumps([item.model_dump() for item in value])
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# ------------------------------------------------------------------------------------------- jobs


def test_the_sample_changes_every_key():
    same = {key for key in job_keys(Job) if value_at(OTHER_VALUES, key) == value_at(Job(), key)}
    assert same == {INSTEAD_OF_KINDS, INSTEAD_OF_RECALIBRATION, INSTEAD_OF_FACTORS}


def test_what_was_asked_is_written_with_its_arguments():
    asked = yaml.safe_load(asked_yaml(Job(data_args={"size": 3}, network_args={"a": {"b": 1}})))
    assert asked == {"data_args": {"size": 3}, "network_args": {"a": {"b": 1}}}


def test_every_key_goes_through_yaml_and_back(tmp_path):
    text = job_yaml(OTHER_VALUES)
    assert load_job(yaml_file(tmp_path, text)) == OTHER_VALUES
    assert list(yaml.safe_load(text)) == list(Job.model_fields)
    assert load_job(yaml_file(tmp_path, job_yaml(Job()))) == Job()


@pytest.mark.parametrize("key", [key for key in job_keys(Job) if key != INSTEAD_OF_KINDS])
def test_every_key_can_be_set_on_the_command_line(key):
    value = value_at(OTHER_VALUES, key)
    with other_keys_come():  # such as a price
        job = load_job(None, [f"{key}={as_override(value)}"])
    assert value_at(job, key) == value


def test_what_is_given_as_text_wins_over_the_file(tmp_path):
    path = yaml_file(tmp_path, "epochs: 3\nseed: 5\nprobe:\n  budget: 4\n")
    job = load_job(path, ["epochs=5", "probe.steps=2"])
    assert (job.epochs, job.seed) == (5, 5)
    assert job.probe == ProbeSettings(budget=4, steps=2)


@pytest.mark.parametrize(
    "text", ["", "# nothing yet\n", "probe: {}\n", "goal:\n  # deadline: 1h\n", "data_args:\n"]
)
def test_a_file_without_keys_is_the_default_job(tmp_path, text):
    assert load_job(yaml_file(tmp_path, text)) == Job()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("resolutions: 24,32", (24, 32)),
        ("resolutions: [24, 32]", (24, 32)),
        ("resolutions: 32", (32,)),
        ("resolutions: auto", "auto"),
        ("frozen: stem.*", ("stem.*",)),
        ("frozen: [stem.*, head.*]", ("stem.*", "head.*")),
        ("frozen: []", ()),
        ("probe.budget: 4", 4),
        ("ags.mode: off", "off"),
        ("probe.kind: no", "no"),
        ("goal: {memory: null}", None),
        ("slurm.time: 90", "90"),
        ("slurm.time: 12:30:00", "12:30:00"),
        ("slurm.account: 0123", "0123"),
        ("slurm.lines: --nodelist=n1,n2,--exclusive", ("--nodelist=n1,n2", "--exclusive")),
        ("learning_rate: 1e-3", 0.001),
        ("epochs: 1e2", 100),
        ("seed: 010", 10),
    ],
)
def test_yaml_may_say_it_in_any_natural_way(tmp_path, text, value):
    key = "goal.memory" if text.startswith("goal") else text.partition(":")[0]
    assert value_at(load_job(yaml_file(tmp_path, text)), key) == value


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("8 GB", 8 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("500MB", 500 * 10**6),
        ("8e9", 8 * 10**9),
        ("4294967296", 2**32),
    ],
)
def test_memory_is_written_with_its_unit_or_in_bytes(tmp_path, words, size):
    assert load_job(None, [f"goal.memory={words}"]).goal.memory == size
    assert load_job(yaml_file(tmp_path, f"goal: {{memory: {words}}}")).goal.memory == size
    (kind,) = load_job(None, [f"goal.kinds={{kind: t4, count: 1, memory: {words}}}"]).goal.kinds
    assert kind.memory == size


@pytest.mark.parametrize("words", ["8 bits", "8 000", "8,000", "8,192 MB"])
def test_a_size_that_is_none_is_answered_with_one(words):
    with pytest.raises(JobError, match=r"goal.memory = '8.*write, for instance, goal.memory=8GiB"):
        load_job(None, [f"goal.memory={words}"])


@pytest.mark.parametrize(
    ("words", "seconds"),
    [("90s", 90), ("10 min", 600), ("1.5h", 5400), ("2 h 30 min", 9000), ("2d", 172_800)],
)
@pytest.mark.parametrize(
    "key",
    [
        *("checkpoint_seconds", "timeout", "probe.budget", "probe.learning", "goal.deadline"),
        *("goal.restart_seconds", "goal.checkpoint_cost", "link.latency"),
        *("virtual.sample_seconds", "virtual.step_seconds"),
    ],
)
def test_times_are_written_with_their_unit_or_in_seconds(tmp_path, key, words, seconds):
    for told in (words, str(seconds)):
        assert value_at(load_job(None, [f"{key}={told}"]), key) == seconds
        assert value_at(load_job(yaml_file(tmp_path, f"{key}: {told}")), key) == seconds


def test_times_stand_in_lists_and_items_too():
    job = load_job(None, ["virtual.step_seconds=15ms,0.02", "resolutions=24,32"])
    assert job.virtual.step_seconds == (0.015, 0.02)
    (one,) = Job(
        virtual={"disturbances": [{"worker": 0, "start": "1min", "end": "2min", "slowdown": 2}]}
    ).virtual.disturbances
    assert (one.start, one.end) == (60, 120)


def test_no_time_may_have_a_unit_too():
    assert load_job(None, ["goal.checkpoint_cost=0s"]).goal.checkpoint_cost == 0
    with pytest.raises(JobError, match=r"goal\.deadline = 0\.0: input should be greater than 0"):
        load_job(None, ["goal.deadline=0s"])


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        *(("1.25e9", 1.25e9), ("1.25GB/s", 1.25e9), ("10 Gbits/sec", 1.25e9), ("10Gbps", 1.25e9)),
        *(("100MiB/s", 100 * 2**20), ("125 MB per second", 125e6)),
    ],
)
def test_bandwidths_are_written_with_their_unit_or_in_bytes_per_second(words, rate):
    assert load_job(None, [f"link.bandwidth={words}"]).link.bandwidth == rate


@pytest.mark.parametrize("words", ["10 Gb/s", "10Gb", "fast", "1,250 MB/s", "10 Gbit/h"])
def test_a_bandwidth_that_is_none_or_two_is_answered_with_one(words):
    said = "a number of bytes per second, or a rate such as 1.25GB/s or 10Gbit/s"
    with pytest.raises(JobError, match=f"^job key link.bandwidth = .*: input should be {said}$"):
        load_job(None, [f"link.bandwidth={words}"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("goal.deadline=2 parsecs", "a number of seconds, or a time such as 90s, 10min or 2h"),
        ("goal.deadline=2 h 30", "a number of seconds, or a time such as"),
        ("goal.deadline=1,000 s", "a number of seconds, or a time such as"),
        ("probe.budget=long", "'auto' or a number of seconds, or a time such as"),
        ("goal.deadline=-5", "greater than 0; write, for instance, goal.deadline=2h"),
        ("timeout=20d", "less than or equal to 1000000"),
        ("probe.learning=500ms", "a share, or a time from 1 s on"),
    ],
)
def test_a_time_that_is_none_is_answered_with_one(text, said):
    key = text.partition("=")[0]
    with pytest.raises(JobError, match=rf"^job key {key} = .*: input should be {said}[^\n]*$"):
        load_job(None, [text])


KINDS = (WorkerKind(kind="t4", count=4, price=0.35), WorkerKind(kind="cpu", count=2))


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("goal.kinds=[{kind: t4, count: 4, price: 0.35}, {kind: cpu, count: 2}]", KINDS),
        ('goal.kinds=[{"kind": "t4", "count": 4, "price": 0.35}]', KINDS[:1]),
        ("goal.kinds={kind: t4, count: 4, price: 0.35}", KINDS[:1]),
        ("goal.kinds=[]", ()),
        ("goal.kinds=null", ()),
        ("goal.kinds=", ()),
    ],
)
def test_kinds_of_workers_are_written_as_a_table(text, kinds):
    assert change_job(OTHER_VALUES, overrides=[text]).goal.kinds == kinds


@pytest.mark.parametrize(
    "text",
    [
        "goal:\n  kinds:\n  - {kind: t4, count: 4, price: 0.35}\n",
        "goal: {kinds: {kind: t4, count: 4, price: 0.35}}",
        "goal.kinds:\n- kind: t4\n  count: 4\n  price: 0.35\n",
    ],
)
def test_kinds_of_workers_stand_in_yaml_as_they_come(tmp_path, text):
    assert load_job(yaml_file(tmp_path, text)).goal.kinds == KINDS[:1]


@pytest.mark.parametrize("word", ["true", "True", "false", "FALSE"])
def test_true_and_false_alone_are_a_yes_or_no(tmp_path, word):
    assert load_job(yaml_file(tmp_path, "ags: {mode: off}")).ags.mode == "off"
    with pytest.raises(JobError, match=r"epochs = (True|False) in .*: this key is no yes or no"):
        load_job(yaml_file(tmp_path, f"epochs: {word}"))
    with pytest.raises(JobError, match=r"job key epochs = 'yes' in .*: input should be"):
        load_job(yaml_file(tmp_path, "epochs: yes"))


def test_kinds_of_workers_may_be_given_as_records():
    assert change_job(Job(), {"goal": {"kinds": KINDS}}).goal.kinds == KINDS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("goal.kinds=t4", r"goal\.kinds = 't4'.*write goal\.kinds='\[\{kind: t4"),
        ("goal.kinds=[t4, cpu]", r"goal\.kinds\.0 = 't4'.*an item has keys"),
        ("goal.kinds=[{kind: t4", "not a list of items"),
        ("goal.kinds=4", "not a list of items"),
        ("goal.kinds=[{kind: t4, count: 2024-13-45}]", "not a list of items"),
        ("goal.kinds=[{kind: t4}]", r"goal\.kinds\.0\.count is missing"),
        ("goal.kinds=[{kind: t4, count: 0}]", r"goal\.kinds\.0\.count = 0: .*greater"),
        ("goal.kinds=[{kind: t4, count: true}]", r"goal\.kinds\.0\.count = True: this key is no"),
        ("goal.kinds=[{kind: t4, count: 2, price: 0}]", r"goal\.kinds\.0\.price = 0: .*greater"),
        ("goal.kinds=[{kind: t4, count: 2, price: .nan}]", r"goal\.kinds\.0\.price = nan"),
        ("goal.kinds=[{kind: t4, count: 2, cost: 1}]", r"goal\.kinds\.0\.cost is unknown"),
        ("goal.price=0", r"goal\.price = '0': .*greater than or equal to 0.000000001"),
        ("link.latency=-1", r"link\.latency = '-1'"),
    ],
)
def test_a_wrong_kind_of_worker_is_named_by_its_place(tmp_path, text, said):
    with pytest.raises(JobError, match=said) as caught:
        load_job(None, [text])
    assert str(caught.value) == one_line(caught.value)
    key, _, value = text.partition("=")
    path = yaml_file(tmp_path, f"{key}: {value}")
    with pytest.raises((JobError, FileError), match=rf"{path}|is missing|is unknown"):
        load_job(path)


def test_a_key_that_is_given_twice_is_refused(tmp_path):
    path = yaml_file(tmp_path, "probe: {budget: 3}\nprobe.budget: 4")
    with pytest.raises(JobError, match=rf"probe\.budget is given twice in {path}"):
        load_job(path)
    with pytest.raises(JobError, match=r"goal\.kinds = .* \('count' is given twice"):
        load_job(None, ["goal.kinds=[{kind: t4, count: 1, count: 2}]"])
    with pytest.raises(JobError, match=r"^epochs=5: epochs=3 is given as well; leave one of the"):
        load_job(None, ["epochs=3", "seed=1", "epochs = 5"])
    # A script may add to words of its own what those already say.
    assert load_job(None, ["epochs=3", "seed=1", "epochs = 3"]).epochs == 3


def test_yaml_may_take_keys_from_another_part(tmp_path):
    text = "goal:\n  kinds:\n  - &a {kind: t4, count: 4, price: 1}\n  - {<<: *a, kind: v100}\n"
    first, second = load_job(yaml_file(tmp_path, text)).goal.kinds
    assert (second.kind, second.count, second.price) == ("v100", first.count, first.price)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *(("1e-3", 1e-3), ("1E5", 1e5), ("-2.5e+3", -2500.0), (".5", 0.5), ("1_000", 1000)),
        *(("3", 3), ("0", 0), ("0x1F", 31), (".inf", ".inf"), ("1.", 1.0), ("+7", 7)),
        *(("12:30", "12:30"), ("1e", "1e"), ("0o17", "0o17"), ("007", "007"), ("e3", "e3")),
    ],
)
def test_arguments_are_numbers_where_json_has_numbers(tmp_path, word, value):
    if value == ".inf":
        with pytest.raises(JobError, match="finite number"):
            load_job(None, [f"network_args.rate={word}"])
        return
    for job in (
        load_job(None, [f"network_args.rate={word}"]),
        load_job(yaml_file(tmp_path, f"network_args: {{rate: {word}}}")),
    ):
        found = job.network_args["rate"]
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["1e-3", "12:30:00", "010", "off", "null", "3", "1.5e9", "0x1F"])
def test_texts_that_look_like_something_else_stay_texts(tmp_path, text):
    job = Job(network_args={"a": text}, probe={"kind": text})
    assert load_job(yaml_file(tmp_path, job_yaml(job))) == job
    assert load_job(yaml_file(tmp_path, asked_yaml(job))) == job


def test_keys_given_in_python_are_the_same_as_texts():
    keys = flattened({name: getattr(OTHER_VALUES, name) for name in Job.model_fields})
    assert load_job(None, [f"{key}={text_of(key, value)}" for key, value in keys]) == OTHER_VALUES
    keys = flattened({"checkpoint_steps": None, "data_args": {"a": {"b": None}, "c": "1e-3"}})
    changed = change_job(OTHER_VALUES, overrides=[f"{k}={text_of(k, v)}" for k, v in keys])
    assert changed.checkpoint_steps is None
    assert changed.data_args == OTHER_VALUES.data_args | {"a": {"b": None}, "c": "1e-3"}


def test_keys_may_be_numpys():
    job = change_job(Job(), {"resolutions": np.array([24, 32]), "epochs": np.int64(3)})
    assert (job.resolutions, job.epochs) == ((24, 32), 3)


@pytest.mark.parametrize("key", job_keys(Job))
def test_null_gives_a_key_its_default(tmp_path, key):
    usual = value_at(Job(), key)
    with other_keys_come():  # others may need a value here
        from_text = change_job(OTHER_VALUES, overrides=[f"{key}=null"])
        from_python = change_job(OTHER_VALUES, {key: None})
    assert [value_at(one, key) for one in (from_text, from_python)] == [usual, usual]
    assert load_job(yaml_file(tmp_path, f"{key}:\n")) == Job()


def test_null_is_no_name_of_a_kind():
    assert Job(frozen=None, epochs=None, goal=None) == Job()
    with pytest.raises(JobError, match=r"goal\.kinds"):
        Job(goal={"kinds": [{"kind": None}]})


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("epocs=3", "epochs"),
        ("probe.budgt=3", "probe.budget"),
        ("lerning_rate=0.1", "learning_rate"),
        ("worker=2", "workers"),
        ("goal.memry=5", "goal.memory"),
    ],
)
def test_an_unknown_key_gets_the_nearest_one_suggested(text, near):
    with pytest.raises(JobError, match=f"did you mean '{near}'"):
        load_job(None, [text])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("mixup", "no key does that: mix batches in a loop of your own"),
        ("rand-augment", "no key does that: change single images in a data set of yours"),
        ("num_classes", "the classes are those of the data"),
        ("patience", "write, for instance, goal.patience=5"),
        ("adam_beta2", "write, for instance, betas=0.9,0.95"),
    ],
)
def test_what_no_key_does_is_said_in_place_of_a_key_that_looks_alike(word, said):
    with pytest.raises(JobError, match=f"unknown job key '{word}': {said}"):
        load_job(None, [f"{word}=0.2"])


def test_an_unknown_key_without_neighbours_gets_the_list():
    with pytest.raises(
        JobError, match=r"unknown job key 'zzz': known are data, data_args, .*goal\."
    ):
        load_job(None, ["zzz=1"])


@pytest.mark.parametrize(
    "text",
    [
        "epochs=0",
        "epochs=-3",
        "epochs=many",
        "epochs=2.5",
        "epochs=",
        "epochs=true",
        "learning_rate=nan",
        "learning_rate=inf",
        "timeout=1e30",
        "learning_rate=-0.1",
        "weight_decay=Infinity",
        "val=1.5",
        "workers=0",
        "global_batch=-1",
        "augment=mixup",
        "optimizer=adam",
        "port=70000",
        "seed=-1",
        "seed=99999999999999999999",
        "data=",
        "resolutions=32,24",
        "resolutions=a,b",
        "resolutions=0",
        "resolutions=",
        "probe.budget=0",
        "goal.memory=2 bits",
        "goal.memory=-8 GiB",
        "goal.memory=0GB",
    ],
)
def test_a_wrong_value_names_key_and_value(text):
    key, _, value = text.partition("=")
    with pytest.raises(JobError) as caught:
        load_job(None, [text])
    message = str(caught.value)
    assert message == one_line(caught.value)
    assert key in message
    assert all(part in message for part in value.split(","))
    assert "tuple" not in message


@pytest.mark.parametrize("text", ["epochs", "=3", " =3", "--epochs"])
def test_a_word_that_is_no_key_says_how_one_looks(text):
    with pytest.raises(JobError, match="write key=value, such as epochs=3"):
        load_job(None, [text])


@pytest.mark.parametrize(
    "text",
    ["epochs: many", "epochs: true", "epochs: .nan", "epochs: [3]", "epocs: 3"],
)
def test_a_wrong_value_in_a_file_names_the_file(tmp_path, text):
    path = yaml_file(tmp_path, text)
    with pytest.raises(JobError, match=f"in {path}: "):
        load_job(path)


def test_a_single_number_is_a_list_of_one(tmp_path):
    job = load_job(yaml_file(tmp_path, "cycle: {stage_rates: 1e-1}\nresolutions: 24"))
    assert (job.cycle.stage_rates, job.resolutions) == ((0.1,), (24,))


def test_an_override_is_not_blamed_on_the_file(tmp_path):
    path = yaml_file(tmp_path, "epochs: 3")
    with pytest.raises(JobError) as caught:
        load_job(path, ["epochs=no"])
    assert str(path) not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epochs: [3", "line 1 is not YAML"),
        ("epochs: 3\n\tseed: 1", "line 2 is not YAML"),
        ("epochs: 3\nseed: 1: 2", "line 2 is not YAML"),
        ("\x00", "is not YAML"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
        ("seed: 1\nepochs: 2024-13-45", "line 2 is not YAML: '2024-13-45' cannot be read"),
        ("epochs: " + "9" * 5000, "line 1 is not YAML: '999"),
        ("epochs: !!int abc", "'abc' cannot be read as a value"),
        ("epochs: !!bool abc", "'abc' cannot be read as a value"),
        ("data: !!timestamp abc", "'abc' cannot be read as a value"),
        ('probe: {kind: "\\ud800"}', "line 1 is not YAML: '\\ud800' cannot be read as a value"),
        ("epochs: 0x" + "f" * 5000, "line 1 is not YAML: '0xfff"),
        ('seed: 1\nweights: "a\\0b"', "line 2 is not YAML: 'a\\x00b' cannot be read as a value"),
        ("epochs: " + "[" * 1000, "nested too deeply"),
        (
            "epochs: 3\nseed: 1\nepochs: 4",
            "line 3 is not YAML: 'epochs' is given twice, first in line 1",
        ),
        ("seed: 1\nprobe:\n  budget: 3\n  'budget': 4", "line 4 is not YAML: 'budget' is given"),
        ("{seed: 1, seed: 1}", "line 1 is not YAML: 'seed' is given twice"),
        ("- epochs", "holds no job keys"),
        ("just words", "holds no job keys"),
        ("3: 4", "holds no job keys"),
        ("0", "holds no job keys"),
        ("[]", "holds no job keys"),
        ("goal: {1: 2}", "unknown job key 'goal.1'"),
        ("seed: 1\nresolutions: &a [*a]", "line 2 is not YAML: a value contains itself"),
        ("goal: &a {memory: {b: *a}}", "line 1 is not YAML: a value contains itself"),
        ("goal: {true: {null: 2}}", "unknown job key 'goal.True.None'"),
    ],
)
def test_what_is_no_job_file_is_refused_by_place(tmp_path, text, said):
    path = yaml_file(tmp_path, text)
    with pytest.raises(JobError if said.startswith("unknown") else FileError) as caught:
        load_job(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "there is no file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not text in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, make, said):
    path = tmp_path / "job.yaml"
    make(path)
    for read in (load_job, lambda path: read_record(path, Plan)):
        with pytest.raises(FileError) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert said in str(caught.value)


# ---------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("record", [make_profile(), make_plan(), make_summary(), make_job()])
def test_every_record_goes_through_its_file_and_back(tmp_path, record):
    path = tmp_path / "record.json"
    write_record(record, path)
    assert read_record(path, type(record)) == record


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused_in_json(tmp_path, number):
    path = tmp_path / "profile.json"
    text = make_profile().model_dump_json().replace('"probe_seconds":17.4', '"probe_seconds":%s')
    path.write_text(text % number)
    with pytest.raises(FileError, match=r"probe_seconds = .*finite number"):
        read_record(path, Profile)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("", None), "is empty"),
        (('"probe_seconds":17.4', '"probe_seconds":17.4,"more":1'), "key more is unknown"),
        (('"epochs":30', '"epocs":30'), "key job.epocs is unknown"),
        (('"epochs":30', '"epochs":0'), "key job.epochs = 0: "),
        (('"probe_seconds":17.4', '"probe_seconds":"long"'), "probe_seconds = 'long': "),
        ((',"probe_seconds":17.4', ""), "key probe_seconds is missing"),
        (('"step_seconds":0.00844', '"step_seconds":0'), "key steps.0.step_seconds = 0: "),
        (('"step_seconds":0.00844', '"step_seconds":-1'), "key steps.0.step_seconds = -1: "),
        (('"step_seconds":0.00844', '"step_seconds":NaN'), "key steps.0.step_seconds = "),
        (("profile/1", "profile/9"), "format = 'batchwright-profile/9'"),
        (("}", ""), "invalid JSON"),
        (("{", "["), "invalid JSON"),
    ],
)
def test_a_damaged_profile_says_where_and_who_writes_one(tmp_path, change, said):
    path = tmp_path / "profile.json"
    old, new = change
    path.write_text("" if new is None else make_profile().model_dump_json().replace(old, new))
    with pytest.raises(FileError) as caught:
        read_record(path, Profile)
    message = str(caught.value)
    assert message == one_line(caught.value)
    assert str(path) in message
    assert said in message
    assert "`batchwright probe` writes a profile" in message


def test_another_kind_of_record_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    write_record(make_plan(), path)
    with pytest.raises(FileError, match=r"is a plan, not a profile; `batchwright probe` writes"):
        read_record(path, Profile)
    with pytest.raises(FileError, match=r"is a plan, not a summary; `batchwright train` writes"):
        read_record(path, RunSummary)


def test_nothing_on_standard_input_says_so(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115, PTH123 - a stand-in
    with pytest.raises(FileError, match="standard input is empty, where a plan was expected"):
        read_record("-", Plan)


# ---------------------------------------------------------------------------------------- writing


@pytest.fixture
def full_disk(monkeypatch):
    """Nothing can be written through to the disk any more."""

    def refuse(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, full_disk):
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(FileError, match=rf"cannot write {path}: No space left on device"):
        write_record(make_plan(), path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_text("new", path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_stays_and_its_file_is_written(tmp_path):
    far, link = tmp_path / "far" / "plan.json", tmp_path / "plan.json"
    far.parent.mkdir()
    link.symlink_to(far)
    for text in ("new", "newer"):  # there is no file at first
        write_text(text, link)
        assert (link.is_symlink(), far.read_text()) == (True, text)
    with (tmp_path / "out").open("w") as out:  # as /dev/stdout is, where a shell has redirected it
        link = tmp_path / "stdout"
        link.symlink_to(f"/proc/self/fd/{out.fileno()}")
        write_text("whole", link)
    assert (link.is_symlink(), (tmp_path / "out").read_text()) == (True, "whole")
    assert sorted(one.name for one in tmp_path.rglob("*") if one.is_file()) == [
        "out",
        "plan.json",
        "plan.json",
    ]


def test_a_written_file_has_the_usual_permissions(tmp_path):
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    plain.write_text("x")
    write_text("x", ours)
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize(
    ("make", "name", "said"),
    [
        (lambda folder: None, "none/plan.json", "No such file or directory"),
        (lambda folder: (folder / "plan.json").mkdir(), "plan.json", "Is a directory"),
        (lambda folder: (folder / "file").write_text(""), "file/plan.json", "Not a directory"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(tmp_path, make, name, said):
    make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileError, match=said) as caught:
        write_text("x", tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text("through", path)
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_any_error_fits_on_one_line():
    assert one_line(ValueError("two\n  lines")) == "ValueError: two lines"
    assert one_line(BatchwrightError("as it\nis")) == "as it is"
    assert one_line(KeyError()) == "KeyError"


def test_a_value_of_a_million_characters_is_not_repeated_whole():
    with pytest.raises(JobError) as refused:
        change_job(Job(), overrides=["a" * 10**6])
    said = one_line(refused.value)
    assert said.startswith("'aaa")
    assert said.endswith("aaa' is no job key: write key=value, such as epochs=3")
    assert len(said) < 1100
    assert str(BatchwrightError("a" * 5000)) == "a" * 5000


def test_a_file_gets_the_usual_permissions_and_none_of_many_threads_loses_them(tmp_path):
    mask = os.umask(0o027)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda n: write_whole(tmp_path / str(n), b"x"), range(200)))
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(mask)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}
    assert len(list(tmp_path.iterdir())) == 200  # and nothing is left aside


def test_a_name_that_a_disk_just_takes_is_good_for_a_file(tmp_path):
    path = tmp_path / ("ä" * 127)
    write_whole(path, b"x")
    assert list(tmp_path.iterdir()) == [path]


def test_data_that_lead_back_to_themselves_have_a_name(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(link)
    assert data_name(f"imagefolder:{link}") == "link"


def test_a_file_without_an_end_is_not_read_to_it(monkeypatch):
    monkeypatch.setattr("batchwright.records.documents._MOST_READ", 1000)
    with pytest.raises(FileError, match=r"^/dev/zero does not end within 1,000 characters"):
        load_job("/dev/zero")
    monkeypatch.setattr("sys.stdin", StringIO("y\n" * 1000))
    with pytest.raises(FileError, match=r"^standard input does not end within 1,000 characters"):
        read_record("-", Plan)


def test_no_read_asks_for_much_memory_at_once(monkeypatch):
    """To read so many characters, Python first takes as many bytes."""

    class Asked(StringIO):
        def read(self, size=-1):
            assert 0 < size <= 2**20
            return super().read(size)

    for before in ("", " " * (2**20 - 1), " " * 2**20, " " * (3 * 2**20)):
        monkeypatch.setattr("sys.stdin", Asked(before + record_text(make_plan())))
        assert read_record("-", Plan) == make_plan()


def test_what_cannot_be_written_leaves_nothing_aside(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileError, match=r"cannot write .*taken: Is a directory"):
        write_whole(tmp_path / "taken", b"x")
    with pytest.raises(FileError, match=r"cannot write .*no/file: No such file"):
        write_whole(tmp_path / "no" / "file", b"x")
    with pytest.raises(FileError, match=r"cannot write .*a: File name too long"):
        write_whole(tmp_path / ("a" * 300), b"x")
    assert [one.name for one in tmp_path.iterdir()] == ["taken"]
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(FileError, match=r"^cannot write .*link: it is a link that leads back"):
        write_whole(link, b"x")
    assert link.is_symlink()


@pytest.mark.parametrize("record", Keys.__subclasses__())
def test_no_number_of_a_job_takes_a_yes_or_no(record):
    numbers = [
        name
        for name, field in record.model_fields.items()
        if re.search(r"\b(int|float)\b", str(field.annotation))
    ]
    for name in numbers:
        with pytest.raises(ValidationError) as refusal:
            record.model_validate({name: True})
        assert any(name in problem["loc"] for problem in refusal.value.errors(include_url=False))


# ------------------------------------------------------------------------------------- the glossary

WORDS = {
    word: re.findall(r"\*([^*]+)\*", replaced)
    for word, replaced in re.findall(
        r"\*([^*()]+)\*(?: \(not ([^)]*)\))?:", " ".join((records.__doc__ or "").split())
    )
}


def all_records(kind=records.Record):
    """The package's own, those of the service among them."""
    for one in kind.__subclasses__():
        if one.__module__.startswith(f"{records.__name__}."):
            yield one
        yield from all_records(one)


@pytest.fixture(scope="module")
def field_words():
    import_module(f"{records.__name__}.service")
    found = {}
    for kind in all_records():
        for name, field in kind.model_fields.items():
            text = f"{name} {field.description or ''}"
            found[f"{kind.__name__}.{name}"] = plain_word(text)
    return found


def plain_word(text):
    return re.sub(r"[\s_-]+", " ", text).lower()


@pytest.mark.parametrize("word", WORDS)
def test_every_word_of_the_glossary_is_used_by_a_field_and_what_it_replaces_by_none(
    word, field_words
):
    assert any(plain_word(word) in text for text in field_words.values())
    for other in WORDS[word]:
        users = [name for name, text in field_words.items() if plain_word(other) in text]
        assert not users, f"{other} is {word} here"


def test_the_glossary_is_read_whole():
    assert {"worker", "Loader process", "stage", "Rate stage", "Setting"} <= WORDS.keys()
    assert sum(map(len, WORDS.values())) >= 10
