"""What keys of a job may not say of each other: refused alike wherever a job comes from."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from batchwright.errors import JobError
from batchwright.planning.planner import make_plan
from batchwright.records import Job, Sweep
from batchwright.records.documents import change_job, load_job
from batchwright.records.job import other_keys_come
from batchwright.records.text.problems import shorten
from batchwright.service.pages.planner_form import answer_form, read_form
from batchwright.workflows.prepare_job import job_of
from batchwright.workflows.sweep.grid import cells_of, read_grid
from samples import make_profile

CONFLICTS = [
    (
        {"workers": 2, "launch": "in-process"},
        "workers=2 with launch=in-process: that is one worker",
    ),
    (
        {"launch": "virtual"},
        "launch=virtual needs to know how many workers to simulate: give workers=4, say, or "
        "goal.max_workers for the plan to choose",
    ),
    (
        {"method": "dual-batch", "batch_norm": "synchronized"},
        "batch_norm=synchronized with method=dual-batch: statistics are exchanged at each step, "
        "and its workers step for themselves; leave one of them out",
    ),
    (
        {"batch_norm": "synchronized", "cycle": {"recalibrate": 20}},
        "cycle.recalibrate=20 with batch_norm=synchronized: each worker measures statistics on "
        "batches of its own number and sizes, and such layers would wait for the others in each; "
        "leave one of them out",
    ),
    (
        {"launch": "virtual", "workers": 3, "virtual": {"speeds": [1, 2]}},
        "virtual.speeds=1,2: 2 values for workers=3: give one for each",
    ),
    (
        {
            "launch": "virtual",
            "workers": 2,
            "virtual": {"disturbances": [{"worker": 2, "slowdown": 3}]},
        },
        "virtual.disturbances: worker 2 of workers=2: give 0 to 1",
    ),
    (
        {"method": "dual-batch", "workers": 2, "dual": {"small_workers": 3}},
        "dual.small_workers=3 of workers=2: give at most 2",
    ),
    (
        {"method": "dual-batch", "workers": 4, "dual": {"small_workers": 1, "extra_time": 1.4}},
        "dual.extra_time=1.4 leaves no samples for the 1 of 4 workers that have the small batch: "
        "give less than 1.333, the workers over those with large batches",
    ),
    (
        {"data": "my_data:photos", "rotation": 0.05},
        "rotation=0.05: data=my_data:photos augments its images itself: leave rotation out",
    ),
    (
        {"augment": "crop-flip", "crop_scale": 0.5},
        "crop_scale=0.5 with augment=crop-flip: only resized crops have it: give "
        "augment=resized-crop, or leave crop_scale out",
    ),
    (
        {"data": "my_data:photos", "augment": "resized-crop", "crop_scale": 0.5},
        "crop_scale=0.5: data=my_data:photos augments its images itself: leave crop_scale out",
    ),
    (
        {"method": "dual-batch", "dual": {"shares": "published"}},
        "dual.shares=published with server.consistency=asp: it averages the models of all workers: "
        "give server.consistency=bsp, or leave dual.shares out",
    ),
    (
        {"method": "dual-batch", "resolutions": [8], "dual": {"large_batches": [8, 4]}},
        "dual.large_batches=8,4: 2 values for 1 resolution, 8 px: give one for each, or one for "
        "all",
    ),
    (
        {"method": "cyclic", "cycle": {"preset": "cifar100", "batches": [8, 4, 2]}},
        "cycle.batches=8,4,2: 3 values for 2 resolutions, 24,32 px: give one for each, or one "
        "for all",
    ),
    (
        {
            "method": "cyclic",
            "resolutions": [6, 8],
            "cycle": {"batches": [8, 4]},
            "global_batch": 8,
        },
        "cycle.batches=8,4 says 4 at 8 px, global_batch=8 another: give one of them",
    ),
    (
        {"method": "cyclic", "resolutions": [8]},
        "method=cyclic has one resolution, 8 px, so nothing to go through: probe with two or more, "
        "such as resolutions=24,32, or give cycle.order=fixed",
    ),
    (
        {"method": "cyclic", "cycle": {"stage_epochs": [10, 10]}},
        "cycle.stage_epochs=10,10 add up to 20, not to epochs=30: give epochs=20, or other stages",
    ),
    (
        {"method": "hybrid", "cycle": {"stage_epochs": [20, 10], "stage_rates": [1, 0.1, 0.01]}},
        "cycle.stage_rates=1.0,0.1,0.01: 3 rates for 2 stages: give one for each of "
        "cycle.stage_epochs",
    ),
    (
        {"method": "cyclic", "cycle": {"preset": "cifar100", "stage_rates": [1, 0.1]}},
        "cycle.stage_rates=1.0,0.1: 2 rates for 3 stages: give one for each of cycle.stage_epochs",
    ),
    (
        {"method": "cyclic", "data": "a.b:c", "cycle": {"strengths": [0.5, 1]}},
        "cycle.strengths=0.5,1: data=a.b:c augments its images itself: leave cycle.strengths at "
        "auto",
    ),
    (
        {"epochs": 30, "warmup_epochs": 31},
        "warmup_epochs=31 is longer than epochs=30: give at most 30",
    ),
    (
        {"ags": {"mode": "norm", "least": 3, "most": 2}},
        "ags.least=3 is more than ags.most=2: give a smaller one",
    ),
    (
        {"method": "dynamic-batch", "least_local_batch": 50, "most_local_batch": 10},
        "least_local_batch=50 is more than most_local_batch=10: give a smaller one",
    ),
    (
        {"goal": {"objective": "cost"}},
        "goal.objective=cost needs the price of a worker for an hour: give goal.price, or a price "
        "for each of goal.kinds",
    ),
    (
        {"goal": {"max_cost": 1}},
        "goal.max_cost=1.0 needs the price of a worker for an hour: give goal.price, or a price "
        "for each of goal.kinds",
    ),
    (
        {"goal": {"objective": "target-accuracy"}},
        "goal.objective=target-accuracy needs the accuracy to reach: give goal.accuracy, such as "
        "goal.accuracy=0.9",
    ),
    (
        {"goal": {"kinds": [{"kind": "a", "count": 1}, {"kind": "a", "count": 2}]}},
        "goal.kinds names 'a' twice: give one count for it",
    ),
    (
        {"method": "auto", "cycle": {"order": "one-pass"}},
        "cycle.order=one-pass is for method=cyclic or hybrid and method=auto leaves the method to "
        "the plan: give method=cyclic, or leave cycle.order out",
    ),
    (
        {"resolutions": [32, 24]},
        "resolutions=32,24: give one or more rising sides in pixels, such as resolutions=24,32",
    ),
]


@pytest.mark.parametrize(("keys", "line"), CONFLICTS)
def test_keys_that_contradict_each_other_are_refused_wherever_a_job_comes_from(
    keys, line, tmp_path
):
    exactly = f"^{re.escape(line)}$"
    with pytest.raises(JobError, match=exactly):
        Job(**keys)
    with pytest.raises(JobError, match=exactly):
        change_job(Job(), keys)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(keys))
    for read in (load_job, lambda path: job_of(path, {})):
        with pytest.raises(JobError, match=exactly):
            read(file)


def test_the_service_refuses_them_with_the_same_line(service):
    for keys, line in CONFLICTS:
        answer = service.post("submit", "/v1/jobs", json={"name": "a", "job": keys})
        assert (answer.status_code, answer.json()["detail"]) == (422, line)


def test_the_planner_page_refuses_them_with_the_same_line():
    profile = make_profile()
    for keys, line in CONFLICTS:
        if keys.keys() & {"data", "cycle"}:  # the profile has data and resolutions of its own
            continue
        words = {"keys": "\n".join(f"{key}={value}" for key, value in _flat(keys))}
        asked = read_form(words)
        assert answer_form(profile, asked) is None
        assert list(asked.errors.values()) == [line]


def _flat(keys, prefix=""):
    for key, value in keys.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and not isinstance(value[0], dict):
            yield prefix + key, ",".join(map(str, value))
        else:
            yield prefix + key, json.dumps(value) if isinstance(value, list) else value


@pytest.mark.parametrize(
    "keys",
    [
        {"launch": "virtual", "goal": {"max_workers": 8}},
        {"launch": "in-process", "workers": 1},
        {"method": "cyclic", "resolutions": [8], "cycle": {"order": "fixed"}},
        {"method": "cyclic", "cycle": {"preset": "cifar100"}, "warmup_epochs": 31},
        {"method": "cyclic", "cycle": {"preset": "cifar100", "stage_epochs": [10, 10, 5]}},
        {"method": "plain", "cycle": {"stage_epochs": [10, 10]}},  # does nothing: a warning
        {"ags": {"least": 3, "most": 2}},
        {"goal": {"max_cost": 1, "kinds": [{"kind": "a", "count": 2, "price": 1}]}},
    ],
)
def test_what_goes_together_is_a_job(keys):
    assert Job(**keys) == change_job(Job(), keys)


def test_a_file_may_lack_what_the_command_line_gives(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("{launch: virtual, goal: {objective: cost}}")
    job = job_of(file, {}, ["workers=4", "goal.price=2"])
    assert (job.workers, job.goal.price) == (4, 2)
    with pytest.raises(JobError, match="launch=virtual needs to know"):
        job_of(file, {}, ["goal.price=2"])


def test_a_sweep_may_vary_what_its_job_lacks_and_each_cell_is_checked(tmp_path):
    with other_keys_come():
        shared = change_job(Job(), {"launch": "virtual", "epochs": 3})
        swept = read_grid(shared, {"workers": [2, 4], "warmup_epochs": [1, 3]})
    assert len(cells_of(shared, swept, [0])) == 4
    sweep = {"folder": str(tmp_path), "job": shared, "keys": swept, "seeds": (0,)}
    kept = Sweep(**sweep, data=None, cells=(), settings=())
    assert Sweep.model_validate_json(kept.model_dump_json()).job == shared
    with other_keys_come():
        swept = read_grid(shared, {"warmup_epochs": [1, 4], "workers": [2]})
    with pytest.raises(JobError, match="warmup_epochs=4 is longer than epochs=3"):
        cells_of(shared, swept, [0])


def test_what_planning_settles_is_checked_by_the_same_rules():
    profile = make_profile()
    job = profile.job.model_copy(update={"method": "dual-batch", "resolutions": (8,)})
    wrong = job.model_copy(update={"dual": job.dual.model_copy(update={"large_batches": (8, 4)})})
    with pytest.raises(JobError, match=r"dual\.large_batches=8,4: 2 values for 1 resolution"):
        make_plan(profile, wrong)


class Counted:
    """A value that counts how often it is put into words."""

    times = 0

    def __repr__(self):
        Counted.times += 1
        return "x"


@pytest.mark.parametrize("value", [[Counted()] * 5000, [{"a": [Counted()]}] * 5000])
def test_of_a_large_value_only_what_is_shown_is_put_into_words(value):
    """The rest would hold up a service's other requests."""
    Counted.times = 0
    with pytest.raises(JobError, match=r"job key data = .{57}\.\.\.: input should be a"):
        change_job(Job(), {"data": value})
    assert Counted.times < 100


@pytest.mark.parametrize("value", ["a", "a" * 58, [], (), {}, ["a", {"b": (1, None)}], 10**70])
def test_a_short_value_is_shown_whole_and_a_long_ones_beginning(value):
    text = repr(value)
    assert shorten(value) == (text if len(text) <= 60 else text[:57] + "...")
    text = repr([value] * 40)
    assert shorten([value] * 40) == (text if len(text) <= 60 else text[:57] + "...")
