"""Plans on demand: the same bytes as from the command line, whatever is asked."""

from __future__ import annotations

import json
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest

from batchwright.cli.commands import main
from batchwright.records.documents import record_text, write_record
from batchwright.records.service import PlanRequest
from batchwright.service import plan_answers, processes
from batchwright.service.plan_answers import PLANNERS
from batchwright.service.problems import TooMany
from samples import make_epoch, make_job, make_kind_profile, make_plan, make_profile, make_summary

ANY = make_profile(job=make_job(workers="auto"))


def posted(service, *profiles, runs=(), keys=None):
    told = {
        "profiles": [profile.model_dump(mode="json") for profile in profiles],
        "runs": [run.model_dump(mode="json") for run in runs],
        "keys": keys or {},
    }
    return service.post("read", "/v1/plans", json=told)


def by_command(folder, *profiles, runs=(), words=(), monkeypatch):
    """The bytes that ``batchwright plan`` writes into a file."""
    arguments = ["batchwright", "plan"]
    for number, profile in enumerate(profiles):
        write_record(profile, folder / f"profile{number}.json")
        arguments.append(str(folder / f"profile{number}.json"))
    for number, run in enumerate(runs):
        run = run.model_copy(update={"run_folder": str(folder)})
        write_record(run, folder / f"summary{number}.json")
        arguments += ["--run", str(folder / f"summary{number}.json")]
    monkeypatch.setattr("sys.argv", [*arguments, *words, "--out", str(folder / "plan.json")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return (folder / "plan.json").read_bytes()


def learnt(target):
    epochs = tuple(make_epoch(epoch) for epoch in range(30))
    return make_summary(plan=make_plan(job=make_job(goal={"accuracy": target})), epochs=epochs)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, ()),
        ({"goal": {"objective": "time", "price": 0.4}}, ("goal.objective=time", "goal.price=0.4")),
        ({"goal.deadline": 90, "epochs": 5}, ("goal.deadline=90", "epochs=5")),
        ({"method": "dual-batch", "workers": 2}, ("method=dual-batch", "workers=2")),
        ({"global_batch": 100, "scaling": "linear"}, ("global_batch=100", "scaling=linear")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_answer_is_byte_for_byte_what_the_command_writes(
    service, tmp_path, monkeypatch, keys, words
):
    answer = posted(service, ANY, keys=keys)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    written = by_command(tmp_path, ANY, words=words, monkeypatch=monkeypatch)
    assert answer.content == written


def test_several_profiles_and_runs_are_planned_from_as_by_the_command(
    service, tmp_path, monkeypatch
):
    run = learnt(0.9)
    keys, words = {"goal.accuracy": 0.9}, ("goal.accuracy=0.9",)
    answer = posted(service, ANY, ANY, runs=[run], keys=keys)
    assert answer.status_code == 200, answer.text
    written = by_command(tmp_path, ANY, ANY, runs=[run], words=words, monkeypatch=monkeypatch)
    assert answer.content == written


def test_kinds_of_workers_are_chosen_from(service):
    keys = {
        "goal.kinds": [{"kind": "a", "count": 4, "price": 1}, {"kind": "b", "count": 4, "price": 2}]
    }
    answer = posted(service, make_kind_profile("a"), make_kind_profile("b", 2.0), keys=keys)
    assert answer.status_code == 200, answer.text
    assert answer.json()["kinds"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"epochz": 3}, "unknown job key 'epochz'"),
        ({"network": "vgg8"}, "the profile was measured with network=resnet8"),
        ({"goal.deadline": 0.001}, "goal.deadline"),
        ({"workers": 5000}, "5,000 workers: the service plans for 4,096 at most"),
        ({"resolutions": list(range(8, 80))}, "72 resolutions"),
        ({"goal.kinds": [{"kind": "a", "count": 10**7}]}, "10,000,000 workers"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(service, keys, says):
    answer = posted(service, ANY, keys=keys)
    assert answer.status_code == 422
    assert says in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"]


def with_step(**changes):
    first, *others = ANY.steps
    return ANY.model_copy(update={"steps": (first.model_copy(update=changes), *others)})


@pytest.mark.parametrize(
    "profile",
    [
        with_step(step_seconds=1e-308, compute_seconds=1e-308, visits=(1e-308, 1e308)),
        with_step(local_batch_size=10**300),
        with_step(step_seconds=1e308, compute_seconds=1e308, visits=(1e308, 1e308, 1e308)),
        with_step(resolution=10**9),
        ANY.model_copy(update={"steps": ()}),
        ANY.model_copy(update={"evaluation_seconds_per_image": 1e308}),
        ANY.model_copy(update={"data": ANY.data.model_copy(update={"train_samples": 10**30})}),
        ANY.model_copy(update={"data": ANY.data.model_copy(update={"train_samples": 1})}),
        with_step(visits=(1.0,) * 1000),
    ],
    ids=range(9),
)
def test_figures_that_no_probe_measures_break_nothing(service, profile):
    answer = posted(service, profile)
    assert answer.status_code in (200, 422), answer.text
    if answer.status_code == 422:
        assert "\n" not in answer.json()["detail"]
    else:
        json.loads(answer.text, parse_constant=lambda name: pytest.fail(name))


def test_nothing_to_plan_from_is_refused(service):
    assert posted(service).status_code == 422
    assert service.post("read", "/v1/plans", content=b"[" * 40).status_code in (400, 422)


def test_who_comes_while_others_plan_waits_for_a_turn_or_is_sent_away(service, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE_SECONDS", 0.01)
    with PLANNERS._turns:
        answer = posted(service, ANY)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
    assert posted(service, ANY).status_code == 200


def test_only_a_few_wait_for_their_turn_and_further_ones_are_sent_away_at_once(monkeypatch):
    """Else those that wait would take all threads, and nobody's records would be taken."""
    monkeypatch.setattr(processes, "PATIENCE_SECONDS", 500.0)
    request, many = PlanRequest(profiles=(ANY,)), PLANNERS._places._value
    with ThreadPoolExecutor(many + 1) as pool:
        with PLANNERS._turns:
            asked = [pool.submit(plan_answers.planned, request) for _ in range(many + 1)]
            (first,) = wait(asked, timeout=300, return_when=FIRST_COMPLETED).done
            assert isinstance(first.exception(), TooMany)
        others = [one for one in asked if one is not first]
        assert all(one.result(timeout=500).workers for one in others)
    assert plan_answers.planned(request).workers  # nobody keeps a place


def test_advice_waits_for_its_turn_however_long(monkeypatch):
    answers = iter([TooMany("busy", 0.0), TooMany("busy", 0.0), None])

    def call(*_):
        answer = next(answers)
        if answer is not None:
            raise answer

    monkeypatch.setattr(PLANNERS, "call", call)
    assert plan_answers.advised(make_plan(), ANY, [], []) is None
    assert next(answers, "all were asked for") == "all were asked for"


def test_plans_that_are_made_at_the_same_time_are_the_same(service):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: posted(service, ANY).content, range(4)))
    assert set(answers) == {record_text(make_plan_of(ANY)).encode()}


def make_plan_of(profile):
    from batchwright.workflows import verbs

    return verbs.plan(profile)
