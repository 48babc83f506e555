"""The service's pages: every page in every state, what may be done on them, and hostile names."""

from __future__ import annotations

import re

import pytest

from artifacts import restarted
from batchwright.records.service import RunEnd
from batchwright.records.text.formatting import duration
from batchwright.service.pages.assets import assets
from batchwright.service.pages.run_page import MAX_EPOCHS, lines_of
from pages import (
    LONG,
    NASTY,
    Page,
    a_named_run,
    browse,
    empty_service,  # noqa: F401 - a fixture
    post,
    shared_service,  # noqa: F401 - a fixture
)
from samples import make_dual_plan, make_job, make_plan, make_summary
from services import ADDRESS, epoch, step

UNKNOWN = "5f0a3c1e-0000-4000-8000-000000000000"  # of no run or job

# ------------------------------------------------------------------------------------ who may see

PAGES = ("/", "/runs", "/runs/rows", "/compare", "/compare/live", "/planner", "/jobs", "/jobs/rows")


@pytest.mark.parametrize("path", PAGES)
def test_a_page_wants_a_browser_that_is_signed_in(service, path):
    answer = service.client.get(path)
    assert answer.status_code == 401
    assert f"batchwright sign-in --server {ADDRESS}<" in answer.text  # maybe not the default port
    assert answer.headers["content-type"].startswith("text/html")


def test_a_link_shows_a_button_and_only_the_button_uses_it_up(service):
    link = service.store.sign_in.link(["read"])
    for _ in range(2):  # a program that looks at links first does no harm
        page = Page(service.client.get(f"/sign-in?link={link}"))
        assert link in page.source
    answer = service.client.post("/sign-in", data={"link": link}, headers={"origin": ADDRESS})
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    again = service.client.post("/sign-in", data={"link": link}, headers={"origin": ADDRESS})
    assert again.status_code == 403
    assert "has been used" in again.text


def test_signing_out_ends_the_session(service):
    browser = service.sign_in("read")
    token = browse(browser, "/runs").csrf
    assert post(browser, "/sign-out", token).headers["location"] == "/sign-in"
    assert browser.get("/runs").status_code == 401
    newest = service.store.audit.list()[0]
    assert (newest.who, newest.action) == ("browser", "sign-out")


def test_who_may_only_read_is_offered_nothing_else(service):
    run = service.a_run()
    browser = service.sign_in("read")
    for path in ("/runs", f"/runs/{run}", "/jobs", "/planner"):
        forms = {one.get("action") for one in browse(browser, path).all("form")}
        assert not forms & {f"/runs/{run}/delete", "/planner/profiles"}
        posts = [one for one in browse(browser, path).all("form") if one.get("method") == "post"]
        assert {one["action"] for one in posts} <= {"/sign-out", "/demo"}


@pytest.mark.parametrize(
    "path", ["/demo", "/jobs", "/sign-out", "/planner/profiles", f"/runs/{UNKNOWN}/delete"]
)
def test_a_form_from_elsewhere_changes_nothing(empty, path):
    service = empty
    browser = service.sign_in("admin")
    files = {"file": ("a.json", b"{}")} if path.endswith("profiles") else None
    fields = {"csrf": "wrong", "job": "epochs: 3"}
    answer = browser.post(path, data=fields, files=files, headers={"origin": ADDRESS})
    assert answer.status_code == 403
    assert service.store.jobs.list() == []
    assert browser.get("/runs").status_code == 200


# ---------------------------------------------------------------------------------- style, script


def test_style_script_and_icon_may_be_kept_for_ever(service):
    for one in assets().values():
        answer = service.client.get(f"/static/{one.name}")
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["content-type"].startswith(one.kind)
        etag = answer.headers["etag"]
        same = service.client.get(f"/static/{one.name}", headers={"if-none-match": etag})
        assert same.status_code == 304
    assert service.client.get("/static/../app.py").status_code == 404
    assert service.client.get("/static/style-0.css").status_code == 404


def test_pages_load_nothing_from_elsewhere_and_hold_no_inline_code(service):
    run = service.a_run()
    service.report(run, step(1), epoch(0))
    browser = service.sign_in()
    for path in ("/runs", f"/runs/{run}", "/planner", "/compare", "/jobs"):
        page = browse(browser, path)
        for tag, attributes in page.seen:
            assert not any(name.startswith("on") for name in attributes), (tag, attributes)
            assert "style" not in attributes
            for name in ("src", "href", "action"):
                value = attributes.get(name)
                assert value is None or value.startswith(("/", "#")), (tag, attributes)
        assert "style" not in {tag for tag, _ in page.seen}
        assert page.text("script") == ""


# ------------------------------------------------------------------------------------------- runs


def test_without_runs_the_list_says_how_to_get_one(empty):
    service = empty
    page = browse(service.sign_in(), "/runs")
    assert f"--report-to {ADDRESS}" in page.source
    assert "Load the demo run" in page.source


def test_commands_name_the_address_that_the_service_goes_by(empty):
    """A proxy need not say that browsers come by HTTPS."""
    browser = restarted(empty, public_url="https://plans.example.org").sign_in()
    for path, option in (("/runs", "--report-to"), ("/jobs", "--server")):
        assert f"{option} https://plans.example.org" in browse(browser, path).source


def test_runs_are_listed_with_what_matters_of_them(empty):
    service = empty
    run = service.a_run()
    service.report(run, epoch(0), epoch(1))
    page = browse(service.sign_in(), "/runs")
    assert f"/runs/{run}" in [one["href"] for one in page.all("a")]
    assert "resnet8 on digits, plain, 2 workers" in page.source
    assert "2 of 30" in page.source
    assert "running" in page.source


def test_runs_are_found_by_words_and_state(empty):
    service = empty
    a_named_run(service, "first")
    second = a_named_run(service, "second")
    service.store.runs.end(second, RunEnd(outcome="failed", error="worker 1 died"))
    browser = service.sign_in()
    assert "first" not in browse(browser, "/runs?query=seco").text("a")
    assert browse(browser, "/runs?state=failed&query=").text("a").count("second") == 1
    assert "first" not in browse(browser, "/runs?state=failed").text("a")
    nothing = browse(browser, "/runs?query=zebra")
    assert "No run is like that" in nothing.source
    assert "zebra" in nothing.source


def test_many_runs_come_a_page_at_a_time(empty):
    service = empty
    plan = make_plan()
    for number in range(53):
        a_named_run(service, f"run {number:02}", plan=plan)
        service.clock.go(1)
    browser = service.sign_in()
    first = browse(browser, "/runs")
    assert "run 52" in first.source
    assert "run 02" not in first.source
    (older,) = [one["href"] for one in first.all("a") if one.get("rel") == "next"]
    second = browse(browser, older)
    assert [name in second.source for name in ("run 02", "run 00", "run 03")] == [True, True, False]
    assert "Newest runs" in second.source


def test_the_list_is_asked_again_for_nothing_while_nothing_happens(empty):
    service = empty
    run = service.a_run()
    browser = service.sign_in()
    answer = browser.get("/runs/rows")
    etag = answer.headers["etag"]
    assert browser.get("/runs/rows", headers={"if-none-match": etag}).status_code == 304
    service.report(run, epoch(0))
    news = browser.get("/runs/rows", headers={"if-none-match": etag})
    assert news.status_code == 200
    assert "1 of 30" in news.text


# -------------------------------------------------------------------------------------------- run


def test_a_run_that_goes_on_is_shown_with_all_its_parts(service):
    run = service.a_run()
    service.report(run, *(epoch(number) for number in range(3)), step(5, 3))
    page = browse(service.sign_in(), f"/runs/{run}")
    assert list(page.parts) == [
        "now",
        "contents",
        "predicted",
        "accuracy",
        "schedule",
        "workers",
        "cost",
        "time",
        "plan",
        "job",
        "environment",
    ]
    assert "data-over" not in page.source
    assert "in epoch 4: step 5 of 45" in page.source
    marks = re.findall(
        r'<(?:circle|rect|polygon) class="(?:mark|ring|bar)[^>]*>(.*?)</', page.source
    )
    assert marks
    assert all(mark.startswith("<title>") for mark in marks if "swatch" not in mark and mark)
    assert page.source.count("<figure>") == page.source.count("The numbers</summary>")


def tile(page, name):
    """Value and words of a tile of a page, by its name."""
    return re.search(
        f"<span>{name}</span><strong>(.*?)</strong><small>(.*?)</small>", page.source
    ).groups()


def test_a_run_that_has_ended_has_nothing_so_far_or_to_come(service):
    plan = make_plan(job=make_job(goal={"price": 2.0}))
    run = service.a_run(plan=plan)
    service.report(run, epoch(0))
    browser = service.sign_in()
    page = browse(browser, f"/runs/{run}")
    assert tile(page, "Time")[0].endswith(" so far")
    name = "Cost, in the price&#39;s currency"
    assert tile(page, name)[0].endswith(" so far")
    assert "expected at the end" in page.source
    service.store.runs.end(run, RunEnd(outcome="stopped"))
    page = browse(browser, f"/runs/{run}")
    assert tile(page, "Epochs done") == ("1 of 30", "the rest was not trained")
    summary = make_summary(plan=plan)
    service.store.runs.end(run, RunEnd(outcome="finished", summary=summary))
    page = browse(browser, f"/runs/{run}")
    assert tile(page, "Epochs done") == ("30 of 30", "no more to come")
    assert tile(page, "Time")[1] == f"{duration(summary.wall_seconds)} with set-up"
    assert "so far" not in tile(page, "Time")[0] + tile(page, name)[0]
    assert "expected at the end" not in page.source
    assert "last report <time" in page.source


def test_epochs_that_take_many_times_as_long_are_told_so(service):
    run = service.a_run()
    service.report(run, *(epoch(n, **{"time/epoch_s": 1.2}) for n in range(4)))
    value, words = tile(browse(service.sign_in(), f"/runs/{run}"), "Epochs against the prediction")
    assert re.fullmatch(r"[0-9.]+ times as long", value)
    assert "(median), outside the 95 % interval" in words


def test_stages_are_counted_from_one_as_epochs_are(service):
    (stage,) = make_plan().stages
    halves = tuple(stage.model_copy(update={"epochs": 15, "resolution": side}) for side in (16, 32))
    run = service.a_run(plan=make_plan(stages=halves))
    service.report(run, epoch(0), epoch(20))
    source = browse(service.sign_in(), f"/runs/{run}").source
    assert "stage 1: 16 px" in source
    assert "stage 2: 32 px" in source
    assert "stage 0" not in source


def test_what_stays_the_same_is_said_in_words_and_not_drawn(service):
    run = service.a_run()
    service.report(run, *(epoch(number, **{"batch/global": 96}) for number in range(3)))
    source = browse(service.sign_in(), f"/runs/{run}").source
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", source)
    assert not {"Global batch", "Resolution", "Local batch"} & set(titles)
    assert "Throughout: global batch 96 samples per step, resolution 32 px." in source
    assert "Throughout: local batches 2 x 16, compute 0.100 s an epoch" in source
    assert "Learning rate" in titles


def test_the_plan_of_a_run_is_there_and_folded(service):
    run = service.a_run()
    page = browse(service.sign_in(), f"/runs/{run}")
    assert page.source.count('<details class="folded">') == 3
    assert "What was decided" in page.source


@pytest.mark.slow
def test_a_run_whose_plan_has_thousands_of_stages_is_drawn_in_part(service):
    (stage,) = make_plan().stages
    rows = tuple(
        stage.model_copy(update={"epochs": 1, "resolution": 16 + at % 17}) for at in range(3000)
    )
    run = service.a_run(plan=make_plan(stages=rows))
    service.report(run, *(epoch(number, 3000) for number in range(300)))
    page = browse(service.sign_in(), f"/runs/{run}")
    assert "Of 3,000 stages 200 are shown" in page.source
    assert len(page.source) < 1_500_000


@pytest.mark.parametrize("state", ["silent", "failed", "stopped", "finished"])
def test_the_page_tells_how_a_run_stands(service, state):
    run = service.a_run()
    service.report(run, epoch(0))
    words = {
        "silent": "Nothing was heard of this run",
        "failed": "This run failed: worker 1 died",
        "stopped": "can go on",
        "finished": "report.html",
    }
    if state == "silent":
        service.clock.go(100)
    elif state == "finished":
        service.store.runs.end(run, RunEnd(outcome="finished", summary=make_summary()))
    else:
        error = "worker 1 died" if state == "failed" else None
        service.store.runs.end(run, RunEnd(outcome=state, error=error))
    page = browse(service.sign_in(), f"/runs/{run}")
    assert words[state] in page.source
    assert ("data-over" in page.source) == (state == "finished")  # the others may go on


def test_only_parts_that_changed_are_sent_again(service):
    run = service.a_run()
    service.report(run, epoch(0), step(1, 1))
    browser = service.sign_in()
    page = browse(browser, f"/runs/{run}")
    have = "~".join(f"{name}.{version}" for name, version in page.parts.items())
    service.report(run, step(9, 1, **{"time/rank0/compute_s": 0.02}))
    news = browser.get(f"/runs/{run}/live", params={"have": have})
    fresh = Page(news)
    changed = {name for name in page.parts if fresh.parts[name] != page.parts[name]}
    assert changed == {"now", "predicted", "schedule", "workers", "cost"}
    assert list(fresh.parts) == list(page.parts)
    assert len(news.text) < 0.6 * len(page.source)
    same = browser.get(f"/runs/{run}/live", headers={"if-none-match": news.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")


def test_advice_is_shown_with_its_reason_and_whether_it_was_taken(service):
    run = service.a_run(follows_advice=True)
    service.store.advice.offer(run, 3, "Epochs take 30 % longer than predicted.", make_plan())
    browser = service.sign_in()
    page = browse(browser, f"/runs/{run}")
    assert "Epochs take 30 % longer than predicted." in page.source
    assert "takes it at the end of an epoch" in page.source
    etag = browser.get(f"/runs/{run}/live").headers["etag"]
    service.store.advice.taken(run, 1, 3)
    news = browser.get(f"/runs/{run}/live", headers={"if-none-match": etag})
    assert "<strong>Taken</strong> from epoch 4 on" in news.text


def test_a_run_with_a_parameter_server_has_its_rounds(service):
    run = service.a_run(plan=make_dual_plan(), profile=None)
    assert "No round has ended yet" in browse(service.sign_in(), f"/runs/{run}").source


@pytest.mark.slow
def test_of_very_many_records_few_are_drawn(service):
    run = service.a_run(plan=make_plan())
    for start in range(0, 3000, 1000):
        service.report(run, *(step(n % 45, n // 45) for n in range(start, start + 1000)))
    service.report(run, *(epoch(number % 30) for number in range(600)))
    lines = lines_of(service.store, service.store.runs.get(run))
    assert len(lines.epochs) <= MAX_EPOCHS + 1
    assert len(lines.steps) <= 301
    assert lines.stride == 4
    assert browse(service.sign_in(), f"/runs/{run}").parts


def test_of_many_notes_the_newest_are_shown(service):
    run = service.a_run()
    service.report(run, *({"kind": "note", "text": f"note {number}"} for number in range(30)))
    notes = lines_of(service.store, service.store.runs.get(run)).notes
    assert [line.text for line in notes] == [f"note {number}" for number in range(10, 30)]


def test_files_of_a_run_may_be_kept(service):
    run = service.a_run()
    browser = service.sign_in("read")
    plan = browser.get(f"/runs/{run}/files/plan.json")
    assert plan.text == make_plan().model_dump_json(indent=2) + "\n"
    assert "attachment" in plan.headers["content-disposition"]
    assert browser.get(f"/runs/{run}/files/summary.json").status_code == 404
    assert browser.get(f"/runs/{run}/files/..%2f..%2fetc").status_code == 404
    service.store.runs.end(run, RunEnd(outcome="finished", summary=make_summary()))
    assert "Batchwright report" in browser.get(f"/runs/{run}/files/report.html").text


def test_a_run_is_deleted_by_an_operator(service):
    run = service.a_run()
    browser = service.sign_in("admin")
    token = browse(browser, f"/runs/{run}").csrf
    assert post(browser, f"/runs/{run}/delete", token).headers["location"] == "/runs"
    gone = browser.get(f"/runs/{run}")
    assert gone.status_code == 404
    assert "There is nothing here" in gone.text
    reader = service.sign_in("submit", "read")
    run = service.a_run()
    token = browse(reader, "/runs").csrf
    assert post(reader, f"/runs/{run}/delete", token).status_code == 403


# ---------------------------------------------------------------------------------------- the demo


def test_the_demo_run_is_loaded_with_one_click_and_once(empty):
    service = empty
    browser = service.sign_in("read", "submit")
    token = browse(browser, "/runs").csrf
    first = post(browser, "/demo", token)
    assert first.status_code == 303
    page = browse(browser, first.headers["location"])
    assert "demo" in page.source
    assert "data-over" in page.source
    assert post(browser, "/demo", token).headers["location"] == first.headers["location"]
    assert len(service.store.runs.list()) == 1


# ------------------------------------------------------------------------------------ hostile words


@pytest.mark.parametrize(
    "name", [NASTY[:120], LONG, "{% raw %}", "a\u0000b".replace("\u0000", "\u2028")]
)
def test_names_are_only_names(service, name):
    run = a_named_run(service, name)
    other = a_named_run(service, name)
    for one in (run, other):
        service.report(one, epoch(0), {"kind": "note", "text": name})
    service.store.runs.end(other, RunEnd(outcome="failed", error=name))
    browser = service.sign_in()
    paths = ["/runs", f"/runs/{run}", f"/runs/{other}", f"/compare?run={run}&run={other}"]
    for path in [*paths, f"/runs?query={name}"]:
        page = browse(browser, path)
        assert "<script>alert" not in page.source
        assert "49" not in page.text("h1")
        assert not set(page.source) & set("\u202e\u2028")
        assert len([tag for tag, _ in page.seen if tag == "script"]) == 1


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nothing", 404),
        ("/runs/not-a-run", 404),
        (f"/runs/{UNKNOWN}", 404),
        (f"/jobs/{UNKNOWN}", 404),
        (f"/jobs/{UNKNOWN[:8]}", 404),
        ("/runs?before=x", 422),
        ("/compare?run=x", 422),
    ],
)
def test_mistakes_have_a_page_of_their_own(service, path, status):
    answer = service.sign_in().get(path)
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/html")
    assert '<a href="/runs">To the runs</a>' in answer.text
    assert "Traceback" not in answer.text


def test_a_method_that_a_page_has_not_is_told_as_a_page(service):
    answer = service.sign_in().delete("/runs")
    assert answer.status_code == 405
    assert "text/html" in answer.headers["content-type"]
