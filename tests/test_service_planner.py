"""The planner's page: words become job keys, a profile and a goal become a plan."""

from __future__ import annotations

import json
import re
from urllib.parse import urlencode

import pytest

from batchwright.records import Estimate
from batchwright.records.service import RunIntroduction
from batchwright.reporting.charts.chart import ratio_axis
from batchwright.reporting.charts.plan import pareto_chart
from batchwright.reporting.data.plan_curves import plan_curves
from batchwright.service import processes
from batchwright.service.pages import planner_form
from batchwright.service.pages.planner import Answer, Answers
from batchwright.service.pages.planner_form import ALL_FIELDS, answer_form, read_form
from batchwright.service.plan_answers import PLANNERS
from batchwright.service.problems import Unavailable
from batchwright.workflows import verbs
from clusters import make_measured, make_step
from pages import NASTY, browse, empty_service, shared_service  # noqa: F401 - fixtures
from samples import make_data, make_plan, make_profile
from services import ADDRESS
from test_learning import taught
from test_service_job_pages import planned


@pytest.fixture
def stored(service):
    """The identifier of a stored profile."""
    return service.store.profiles.add("two workers", make_measured())


def asked(**fields):
    return read_form({name.replace("__", "."): words for name, words in fields.items()})


@pytest.mark.parametrize(
    ("field", "words", "value"),
    [
        ("goal.deadline", "2 h 30 min", 9000.0),
        ("goal.deadline", "90min", 5400.0),
        ("goal.deadline", "5400", 5400.0),
        ("goal.deadline", "1,5 hours", 5400.0),
        ("goal.memory", "8 GiB", 8 * 2**30),
        ("goal.memory", "500MB", 500_000_000),
        ("goal.memory", "1024", 1024),
        ("goal.price", "0.35", 0.35),
        ("goal.price", "0,35", 0.35),
        ("goal.max_workers", "4", 4),
        ("goal.accuracy", "95 %", 0.95),
        ("goal.accuracy", "0.95", 0.95),
        ("link.latency", "0.2 ms", 0.0002),
        ("link.bandwidth", "1.2 GB/s", 1_200_000_000),
        ("link.bandwidth", "1.2 GB a second", 1_200_000_000),
        ("link.bandwidth", "10 Gbit/s", 1_250_000_000),
    ],
)
def test_people_write_units_and_jobs_have_numbers(field, words, value):
    told = read_form({field: words})
    assert told.errors == {}
    assert told.keys == {field: pytest.approx(value)}


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("goal.deadline", "soon"),
        ("goal.deadline", "2 parsecs"),
        ("goal.deadline", "0"),
        ("goal.deadline", "1" * 400),
        ("goal.deadline", "2 h 30"),
        ("goal.deadline", "1,500 s"),
        ("goal.memory", "1 024"),
        ("goal.memory", "much"),
        ("goal.memory", "-8 GiB"),
        ("goal.price", "cheap"),
        ("goal.price", "nan"),
        ("goal.price", "1,500"),
        ("goal.max_cost", "1,500"),
        ("goal.accuracy", "99,500 %"),
        ("goal.max_workers", "0"),
        ("goal.max_workers", "2.5"),
        ("goal.max_workers", "9" * 30),
        ("goal.accuracy", "150 %"),
        ("link.bandwidth", "10 Gb/s"),
        ("keys", "epochs"),
    ],
)
def test_what_cannot_be_read_is_told_beside_its_field(field, words):
    told = read_form({field: words})
    assert list(told.errors) == [field]
    assert told.errors[field].endswith(".")


def test_empty_fields_change_nothing():
    assert asked().keys == {}
    told = read_form({one.name: "  " for one in ALL_FIELDS})
    assert (told.keys, told.texts, told.errors) == ({}, [], {})


def test_another_key_has_one_value():
    told = asked(keys="epochs=3\nseed=1\nepochs = 4")
    assert told.errors == {"keys": "epochs is given twice: leave one of the two lines out."}
    told = asked(keys="epochs=4\nseed=1\nepochs = 4")
    assert (dict(told.texts), told.errors) == ({"epochs": "4", "seed": "1"}, {})


def test_other_keys_are_those_of_a_job():
    told = asked(keys="epochs=3\n\n goal.doubling_gain = 0.1 ")
    assert told.texts == [("epochs", "3"), ("goal.doubling_gain", "0.1")]
    plan = answer_form(make_measured(), told)
    assert plan.job.epochs == 3
    assert plan.job.goal.doubling_gain == 0.1


def test_an_unknown_key_is_told_at_once_with_all_else_that_is_wrong():
    told = asked(goal__price="cheap", keys="epochs=3\nepoch=3")
    assert set(told.errors) == {"goal.price", "keys"}
    assert told.errors["keys"] == "There is no job key 'epoch': did you mean 'epochs'?"
    assert "docs/job.md" in asked(keys="q" * 99 + "=3").errors["keys"]


def test_what_is_wrong_names_its_field(service, stored):
    query = {"profile": stored, "goal.price": "cheap", "goal.deadline": "soon", "keys": "epoch=3"}
    page = browse(service.sign_in("read"), f"/planner?{urlencode(query)}")
    for name, label in (
        ("goal.price", "Price"),
        ("goal.deadline", "Deadline"),
        ("keys", "Other job keys"),
    ):
        assert f'<li><a href="#f-{name}">{label}</a>: ' in page.source
    assert (
        'data-says="Price: Write a number'
        in browse(service.sign_in("read"), f"/planner/answer?{urlencode(query)}").source
    )


def test_candidates_far_apart_are_drawn_on_logarithmic_axes(service, stored):
    curves = plan_curves(verbs.plan(make_measured(), ["goal.price=0.35"]))
    chart = pareto_chart(curves)
    assert chart.x.logarithmic
    candidates = sum(len(cluster.points) for cluster in curves.clusters)
    marks = [p for one in chart.series if one.name not in ("chosen", "knee") for p in one.points]
    assert len(marks) >= candidates
    for axis, places in ((chart.x, [p.x for p in marks]), (chart.y, [p.y for p in marks])):
        assert all(0 <= axis.share(place) <= 1 for place in places)
        assert len(axis.ticks) > 1
    assert not ratio_axis("", [4.0, 5.0]).logarithmic
    assert not ratio_axis("", [0.0, 5.0]).logarithmic


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"goal__deadline": "1 ms"}, "goal.deadline"),
        ({"goal__objective": "cost"}, "goal.objective"),
        ({"keys": "epoch=3"}, "keys"),
        ({"keys": "data=cifar10:/x"}, "keys"),
    ],
)
def test_a_refusal_stands_beside_the_field_that_it_is_about(fields, field):
    told = asked(**fields)
    assert answer_form(make_measured(), told) is None
    assert list(told.errors) == [field]


def test_the_plan_is_that_of_the_command_line(service, stored):
    query = {"profile": stored, "goal.price": "0.35", "goal.deadline": "20 min", "keys": "epochs=9"}
    answer = service.sign_in("read").get("/planner/plan.json", params=query)
    keys = ["goal.price=0.35", "goal.deadline=1200", "epochs=9"]
    plan = verbs.plan(make_measured(), keys)
    assert answer.text == plan.model_dump_json(indent=2) + "\n"


def test_without_a_profile_the_page_says_how_to_make_one(empty):
    service = empty
    page = browse(service.sign_in(), "/planner")
    assert "batchwright probe" in page.source
    assert "Upload a profile" in page.source


def test_the_newest_profile_is_planned_from_at_once(empty):
    service = empty
    stored = service.store.profiles.add("two workers", make_measured())
    page = browse(service.sign_in(), "/planner")
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page.source)
    assert "Cost over time: every candidate" in titles
    assert "Training time against global batch" in titles
    chosen = [one["value"] for one in page.all("option") if "selected" in one]
    assert stored in chosen
    links = [one["href"] for one in page.all("a") if "plan.json" in one["href"]]
    assert links == [f"/planner/plan.json?profile={stored}"]


def test_accuracy_over_time_is_the_first_picture_where_it_is_known(empty):
    service = empty
    stored = service.store.profiles.add("with trials", taught())
    page = browse(service.sign_in(), f"/planner?profile={stored}")
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page.source)
    assert titles[0] == "Accuracy over time: every candidate"
    assert titles.count(titles[0]) == 1
    assert "<span>Accuracy</span>" in page.source


def test_an_accuracy_that_is_hardly_known_is_not_promised():
    plan, known = make_plan(), {"value": 0.91, "low": 0.46, "high": 0.99}
    considered = [
        one.model_copy(update={"accuracy": Estimate(**known)}) if one == plan.chosen else one
        for one in plan.considered
    ]
    plan = plan.model_copy(update={"considered": tuple(considered)})
    tiles = {name: more for name, _, more in Answer(read_form({}), plan, None).tiles}
    assert tiles["Accuracy"] == "hardly known: 46 to 99 %, held out at its end"


def test_an_answer_comes_alone_with_what_is_wrong_by_field(service, stored):
    browser = service.sign_in("read")
    good = browse(browser, f"/planner/answer?profile={stored}&goal.price=0.35")
    assert "in the price" in good.source
    assert next(one for _, one in good.seen if "data-answered" in one)["data-says"]
    bad = browse(browser, f"/planner/answer?profile={stored}&goal.deadline=1+ms&goal.price=x")
    assert [one["data-wrong"] for _, one in bad.seen if "data-wrong" in one] == ["goal.price"]
    assert "No plan comes of this" in bad.source


def test_fields_keep_what_was_written_and_show_what_is_wrong_with_it(service, stored):
    page = browse(service.sign_in(), f"/planner?profile={stored}&goal.deadline=soon&epochs=7")
    (deadline,) = [one for one in page.all("input") if one.get("name") == "goal.deadline"]
    assert (deadline["value"], deadline["aria-invalid"]) == ("soon", "true")
    assert "e-goal.deadline" in deadline["aria-describedby"]
    assert "Write a time" in page.source
    (epochs,) = [one for one in page.all("input") if one.get("name") == "epochs"]
    assert epochs["value"] == "7"


def test_a_profile_is_uploaded_and_planned_from(empty):
    service = empty
    browser = service.sign_in("read", "submit")
    token = browse(browser, "/planner").csrf
    text = make_measured().model_dump_json()

    def send(content, name=""):
        return browser.post(
            "/planner/profiles",
            data={"csrf": token, "name": name},
            files={"file": ("profile.json", content, "application/json")},
            headers={"origin": ADDRESS},
        )

    good = send(text.encode(), NASTY[:60])
    assert good.status_code == 303
    page = browse(browser, good.headers["location"])
    assert "<script>alert" not in page.source
    for content, words in (
        (b"", "Choose a file"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"{}", "not a valid profile"),
        (b"[" * 5000, "not a valid profile"),
        (make_plan().model_dump_json().encode(), "is a plan, not a profile"),
        (json.dumps({"format": NASTY}).encode(), "not a valid profile"),
    ):
        answer = send(content)
        assert answer.status_code == 422
        assert words in answer.text
        assert "<script>alert" not in answer.text
    assert len(service.store.profiles.list()) == 1


def test_a_profile_is_deleted_by_who_uploaded_it(empty):
    service = empty
    add = service.store.profiles.add
    mine, others = add("mine", make_measured(), "browser"), add("others", make_measured(), "a")
    browser = service.sign_in("read", "submit")
    page = browse(browser, "/planner")
    offered = page.source.partition("Delete a profile")[2]
    assert mine in offered
    assert others not in offered
    assert mine in browse(service.sign_in("admin"), "/planner").source
    assert browser.get(f"/planner/answer?profile={mine}").status_code == 200
    for one, status in ((others, 403), (mine, 303), (mine, 404)):
        answer = browser.post(
            "/planner/profiles/delete",
            data={"csrf": page.csrf, "profile": one},
            headers={"origin": ADDRESS},
        )
        assert answer.status_code == status, answer.text
    assert [one.id for one in service.store.profiles.list()] == [others]
    assert "no profile" in browse(browser, f"/planner/answer?profile={mine}").source.lower()


def test_the_profile_of_a_run_can_be_planned_from(service):
    run = service.a_run(profile=make_measured(), name="the run")
    page = browse(service.sign_in(), f"/planner?profile=run:{run}")
    assert "of run the run" in page.source
    assert "Cost over time" in page.source


def test_the_profiles_of_runs_and_jobs_are_offered(empty):
    service = empty
    without = service.a_run(profile=None)
    run = service.a_run(profile=make_measured(), name="the run")
    job = planned(service)
    page = browse(service.sign_in(), "/planner")
    assert "No profile yet" not in page.source
    assert "Cost over time" in page.source  # planned from the run, as nothing was uploaded
    offered = [one["value"] for one in page.all("option")]
    assert {f"run:{run}", f"job:{job}"} <= {*offered}
    assert f"run:{without}" not in offered


@pytest.mark.parametrize(
    "profile", ["x", "run:x", "tree:1", "00000000-0000-4000-8000-000000000000"]
)
def test_a_profile_that_is_not_there_is_said_so(service, stored, profile):
    page = browse(service.sign_in(), f"/planner?profile={profile}")
    assert "no such profile" in page.source.lower() or "no profile" in page.source.lower()


def test_that_others_plan_is_not_kept_as_the_answer(service, stored, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE_SECONDS", 0.01)
    browser = service.sign_in("read")
    asked = f"?profile={stored}&goal.price=0.36"
    with PLANNERS._turns:
        for path in ("/planner", "/planner/answer", "/planner/plan.json"):
            answer = browser.get(path + asked)
            assert answer.status_code == 429, path
            assert int(answer.headers["retry-after"]) >= 1
    for path in ("/planner", "/planner/answer"):
        page = browse(browser, path + asked)
        assert "in the price" in page.source
        assert "busy" not in page.source


def test_a_failure_that_passes_is_not_kept_as_the_answer(service, stored, monkeypatch):
    """As where the machine was short of memory for a moment and ended the process that plans."""

    def fail(_):
        raise Unavailable("the machine ended what was to answer this: come again")

    browser, asked = service.sign_in("read"), f"?profile={stored}&goal.price=0.37"
    with monkeypatch.context() as patch:
        patch.setattr(planner_form, "planned", fail)
        for path in ("/planner", "/planner/answer", "/planner/plan.json"):
            assert browser.get(path + asked).status_code == 503, path
    for path in ("/planner", "/planner/answer"):
        page = browse(browser, path + asked)
        assert "in the price" in page.source
        assert "come again" not in page.source


def test_a_plan_is_made_anew_when_the_profile_of_a_run_is_another(service):
    run, browser = service.a_run(profile=make_measured()), service.sign_in("read")
    plan = f"/planner/plan.json?profile=run:{run}"
    first = browser.get(plan).json()
    steps = tuple(make_step(count, batch, 2.0) for count in (1, 2) for batch in (8, 32, 96, 256))
    told = RunIntroduction(name="a", plan=make_plan(), profile=make_measured(steps=steps))
    service.store.runs.introduce(run, told, "report")
    assert browser.get(plan).json()["stages"] != first["stages"]


def test_a_large_profile_is_not_kept_with_the_answers(service):
    answers, store = Answers(), service.store
    for name, kept in ((40_000 * "x", 1), (300_000 * "x", 1), ("digits", 2)):
        profile = make_profile(data=make_data(name=name))
        told = {"profile": store.profiles.add("a", profile), "epochs": "none"}
        assert answers.answer(store, told).profile == profile
        assert answers._planned.cache_info().currsize == kept


def test_a_run_without_a_profile_says_so(service):
    run = service.a_run(profile=None)
    page = browse(service.sign_in(), f"/planner?profile=run:{run}")
    assert "has no profile" in page.source
