"""Runs beside each other on a page."""

from __future__ import annotations

import re
import uuid

from batchwright.records.service import RunEnd, RunIntroduction
from pages import browse, shared_service  # noqa: F401 - a fixture
from samples import make_data, make_job, make_plan, make_summary
from services import epoch


def runs_of(service, count, **changes):
    found = []
    for number in range(count):
        run = str(uuid.uuid4())
        told = {"name": f"run {number}", "plan": make_plan()} | changes
        service.store.runs.introduce(run, RunIntroduction(**told), "report")
        found.append(run)
    return found


def address(*runs):
    return "/compare?" + "&".join(f"run={run}" for run in runs)


def test_one_run_or_none_is_no_comparison(service):
    (run,) = runs_of(service, 1)
    browser = service.sign_in()
    assert "No run is chosen" in browse(browser, "/compare").source
    page = browse(browser, address(run, run))
    assert "One run is chosen" in page.source
    assert page.source.count('name="run"') == 1


def test_runs_of_one_name_are_told_apart_where_they_are_chosen(service):
    """As those of jobs are, which are called by network and data."""
    runs = runs_of(service, 2, name="resnet8 on digits")
    service.report(runs[0], epoch(0))
    for path in ("/compare", address(*runs)):
        page = browse(service.sign_in(), path)
        assert re.findall(r"batch (\d+, \d) of 30 epochs, <time", page.source)


def test_accuracy_is_drawn_against_epochs_time_and_cost(service):
    runs = runs_of(service, 2)
    service.report(runs[0], epoch(0), epoch(1))
    service.report(runs[1], epoch(0, **{"time/epoch_s": 2.0}))
    page = browse(service.sign_in(), address(*runs))
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page.source)
    assert titles == [
        "Accuracy against epochs",
        "Accuracy against real time",
        "Accuracy against cost",
    ]
    assert "worker-seconds of training" in page.source
    assert "data-over" not in page.source


def test_prices_make_the_cost_money(service):
    plan = make_plan(job=make_job(goal={"price": 2.0}))
    runs = runs_of(service, 2, plan=plan)
    for run in runs:
        service.report(run, epoch(0))
        service.store.runs.end(run, RunEnd(outcome="finished", summary=make_summary(plan=plan)))
    page = browse(service.sign_in(), address(*runs))
    assert "in the price&#x27;s currency" in page.source
    assert "data-over" in page.source


def test_runs_of_other_data_say_so(service):
    first = runs_of(service, 1)
    other = runs_of(service, 1, plan=make_plan(data=make_data(digest="ab" * 32)))
    page = browse(service.sign_in(), address(*first, *other))
    assert "These cannot be compared" in page.source
    assert "compare runs of the same data" in page.source


def test_runs_without_a_finished_epoch_say_so(service):
    page = browse(service.sign_in(), address(*runs_of(service, 2)))
    assert "none of these runs" in page.source.lower()


def test_a_run_that_is_gone_is_left_out(service):
    runs = runs_of(service, 2)
    page = browse(service.sign_in(), address(*runs, uuid.uuid4()))
    assert page.source.count("checked") == 2


def test_one_run_too_many_is_offered_again(service):
    *most, last = runs_of(service, 13)
    page = browse(service.sign_in(), address(*most, last))
    assert all(f'value="{run}" checked>' in page.source for run in most)
    assert f'value="{last}">' in page.source


def test_the_comparison_follows_its_runs(service):
    runs = runs_of(service, 2)
    for run in runs:
        service.report(run, epoch(0))
    browser = service.sign_in()
    live = address(*runs).replace("/compare", "/compare/live")
    etag = browser.get(live).headers["etag"]
    service.clock.go(5)
    service.store.runs.alive(runs[0])
    assert browser.get(live, headers={"if-none-match": etag}).status_code == 304
    service.report(runs[0], epoch(1))
    assert browser.get(live, headers={"if-none-match": etag}).status_code == 200
