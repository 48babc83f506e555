"""The whole story in a real browser: submit, approve, watch, compare."""

from __future__ import annotations

import uuid
from urllib.parse import urlencode

import pytest

from batchwright.records import Job
from batchwright.records.service import (
    AgentIntroduction,
    JobProgress,
    RecordBatch,
    RunEnd,
    RunIntroduction,
)
from batchwright.service import processes
from batchwright.service.pages.demo import DEMO, load_demo
from batchwright.service.plan_answers import PLANNERS
from browsers import browsing, serving, violations
from clusters import make_measured
from samples import make_dual_plan, make_plan, make_profile, make_summary
from services import epoch, step

pytestmark = pytest.mark.slow


class Story:
    """What reporters and agents would do, done to the store."""

    def __init__(self, store):
        self.store = store
        allow = ("data=digits", "network=*")
        store.agents.introduce(AgentIntroduction(name="rig", allow=allow), "report")

    def work(self, state, job, **told):
        lease = self.store.jobs.lease("rig")
        assert lease is not None
        assert lease.job.id == job
        self.store.jobs.progress(job, JobProgress(key=lease.key, state=state, **told))
        return lease.key

    def run(self, name, **changes):
        run = str(uuid.uuid4())
        told = {"name": name, "plan": make_plan(), "profile": make_profile()} | changes
        self.store.runs.introduce(run, RunIntroduction(**told), "report")
        return run

    def report(self, run, *lines):
        first = self.store.runs.get(run).records
        self.store.records.append(run, RecordBatch(first=first, records=lines))


def sign_in(page, server):
    page.goto(f"{server.address}/sign-in?link={server.store.sign_in.link(['admin'])}")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Runs").wait_for()


def test_submit_approve_watch_compare(tmp_path):
    with serving(f"sqlite:///{tmp_path}/service.sqlite") as server, browsing() as page:
        story = Story(server.store)
        page.goto(server.address)
        assert "batchwright sign-in" in page.content()
        page.complaints.clear()  # the browser tells of the 401
        sign_in(page, server)
        assert violations(page) == []

        # submit
        page.get_by_role("link", name="Jobs").click()
        page.get_by_label("Name").fill("from the form")
        page.get_by_role("button", name="Submit").click()
        page.get_by_text("It waits for an agent").wait_for()
        job = page.url.rpartition("/")[2]
        assert violations(page) == []

        # an agent measures and plans; the page shows it by itself, and the plan is approved
        story.work("planned", job, profile=make_profile(), plan=make_plan())
        page.get_by_role("button", name="Approve the plan").click()
        page.get_by_text("Its plan is approved").wait_for()
        assert violations(page) == []

        # the agent trains; the run is watched
        run = story.run("watched", job=job)
        key = story.work("training", job, run=run)
        page.get_by_role("link", name="Its run").click()
        story.report(run, epoch(0), step(3, 1))
        page.get_by_text("in epoch 2: step 3 of 45").wait_for()
        numbers = page.locator("#accuracy details").first
        numbers.locator("summary").click()
        numbers.locator("summary").focus()
        story.report(run, *(epoch(number) for number in range(1, 8)))
        page.get_by_text("8 of 30").first.wait_for()
        assert numbers.get_attribute("open") is not None
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        page.get_by_text("Epoch 8 of 30 finished").wait_for(state="attached")
        assert violations(page) == []

        # the server goes away and comes back
        assert page.complaints == []
        server.stop()
        page.get_by_text("The server is not reached").wait_for()
        story.report(run, epoch(8))
        server.start()
        page.get_by_text("9 of 30").first.wait_for()
        page.locator("[data-lost]").wait_for(state="hidden")
        page.complaints.clear()  # the browser tells of each question that nobody answered

        # it ends; nobody asks any more
        server.store.runs.end(run, RunEnd(outcome="finished", summary=make_summary()))
        server.store.jobs.progress(job, JobProgress(key=key, state="done"))
        page.get_by_role("link", name="report.html").wait_for()
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(2000)
        assert asked == []

        # compare
        other = story.run("another")
        story.report(other, epoch(0), epoch(1))
        page.get_by_role("link", name="Runs", exact=True).first.click()
        for name in ("watched", "another"):
            page.get_by_label(f"Compare {name}").check()
        page.get_by_role("button", name="Compare the runs ticked").click()
        page.locator("figcaption", has_text="Accuracy against cost").wait_for()
        assert violations(page) == []
        assert page.complaints == []

        # the server goes away, and nobody is signed in any more when it is back
        page.get_by_role("link", name="Jobs").click()
        server.stop()
        page.get_by_text("The server is not reached").wait_for()
        server.store.sign_in.leave_all()
        server.start()
        page.get_by_text("This browser is no longer signed in").wait_for()


def test_the_planner_answers_while_one_types(tmp_path, monkeypatch):
    with serving(f"sqlite:///{tmp_path}/service.sqlite") as server, browsing() as page:
        server.store.profiles.add("two workers", make_measured())
        sign_in(page, server)
        page.get_by_role("link", name="Planner").click()
        page.locator("figcaption", has_text="Cost over time").wait_for()
        page.get_by_label("Price", exact=True).fill("0.35")
        page.locator(".tiles").get_by_text("in the price's currency").wait_for()
        assert "goal.price=0.35" in page.url
        page.get_by_label("Deadline").fill("soon")
        page.get_by_text("Write a time, such as 2 h 30 min").first.wait_for()
        assert page.get_by_label("Deadline").get_attribute("aria-invalid") == "true"
        assert violations(page) == []
        page.get_by_label("Deadline").fill("2 h")
        page.get_by_role("link", name="Download plan.json").wait_for()
        assert page.get_by_label("Deadline").get_attribute("aria-invalid") is None
        assert page.locator("#f-goal\\.deadline").evaluate("e => e === document.activeElement")
        page.get_by_text("More options").click()
        page.locator("#f-keys").fill("zzz=1")
        page.locator("#e-keys code", has_text="docs/job.md").wait_for()
        page.locator("#f-keys").fill("")
        page.locator("#e-keys").wait_for(state="hidden")
        assert page.locator("#e-keys").inner_html() == ""
        assert violations(page) == []
        assert page.complaints == []

        # others plan: the old answer is told to be one, and the question asked again
        monkeypatch.setattr(processes, "PATIENCE_SECONDS", 0.01)
        with PLANNERS._turns:
            page.get_by_label("Deadline").fill("3 h")
            page.get_by_text("The server has too much to do").first.wait_for()
            page.get_by_text("the answer to an earlier question").wait_for()
            assert violations(page) == []
        page.locator("[data-lost]").wait_for(state="hidden")
        assert "goal.deadline=3+h" in page.url


def filled(server):
    """A run, a job and an agent in each state, a profile; addresses of all pages with them.

    One run's name is of 120 letters, without a place to break it.
    """
    store, story = server.store, Story(server.store)
    load_demo(store)
    names = ("W" * 120, "failed", "stopped", "fresh")
    going, failed, stopped, fresh = (story.run(name) for name in names)
    story.report(going, *(epoch(number) for number in range(5)), step(3, 5))
    story.report(going, {"kind": "note", "text": "a checkpoint was written"})
    for run, outcome in ((failed, "failed"), (stopped, "stopped")):
        story.report(run, epoch(0))
        store.runs.end(run, RunEnd(outcome=outcome, error="worker 1 was killed: give workers=1"))
    served = story.run("rounds", plan=make_dual_plan(), profile=None)
    profile = store.profiles.add("two workers", make_measured())
    jobs = [store.jobs.submit("digits", Job(), auto=False, owner="ann").id for _ in range(5)]
    planned = {"profile": make_profile(), "plan": make_plan()}
    story.work("planned", jobs[0], **planned)
    story.work("failed", jobs[1], error="this machine has 2 cores: give workers=2")
    story.work("planned", jobs[2], **planned)
    store.jobs.approve(jobs[2])
    story.work("training", jobs[2], run=going)
    store.jobs.cancel(jobs[3])
    store.agents.introduce(AgentIntroduction(name="by default", allow=()), "report")
    refused = urlencode({"profile": profile, "goal.price": "cheap", "keys": "epoch=3"})
    return [
        *("/runs", "/jobs", f"/planner?profile={profile}&goal.price=0.35", f"/planner?{refused}"),
        *(f"/runs/{run}" for run in (DEMO, going, failed, stopped, fresh, served)),
        f"/compare?run={DEMO}&run={going}",
        f"/compare?run={going}&run={failed}&run={stopped}",
        *(f"/jobs/{job}" for job in jobs),
    ]


def test_axe_finds_nothing_and_nothing_is_too_wide_on_any_page(tmp_path):
    """Pages empty and full, all unfolded, on a phone in the dark and on a screen by day."""
    looks = ((360, "dark"), (1280, "light"))
    with serving(f"sqlite:///{tmp_path}/service.sqlite") as server, browsing() as page:
        sign_in(page, server)
        empty = ["/runs", "/jobs", "/planner", "/compare", "/nothing"]
        for paths in (empty, filled):
            for path in paths(server) if callable(paths) else paths:
                page.goto(server.address + path)
                page.evaluate("document.querySelectorAll('details').forEach(d => (d.open = true))")
                for width, scheme in looks:
                    page.set_viewport_size({"width": width, "height": 800})
                    wide = page.evaluate("document.documentElement.scrollWidth")
                    assert wide <= width, (path, width)
                    page.emulate_media(color_scheme=scheme)
                    assert violations(page) == [], (path, width, scheme)
        page.get_by_role("button", name="Sign out").click()
        page.goto(f"{server.address}/sign-in?link=abc")
        for _, scheme in looks:
            page.emulate_media(color_scheme=scheme)
            assert violations(page) == [], scheme


def test_words_without_end_push_no_column_out_of_the_list_of_jobs(tmp_path):
    with serving(f"sqlite:///{tmp_path}/service.sqlite") as server, browsing() as page:
        story = Story(server.store)
        job = server.store.jobs.submit("W" * 120, Job(), auto=False, owner="o" * 120).id
        story.work("planned", job, profile=make_profile(), plan=make_plan())
        server.store.jobs.approve(job)
        assert server.store.jobs.lease("rig") is not None
        sign_in(page, server)
        for path in ("/jobs", f"/jobs/{job}"):
            page.goto(server.address + path)
            for width in (360, 1000, 1280):
                page.set_viewport_size({"width": width, "height": 800})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
                cut = "e => e.clientWidth && e.scrollWidth > e.clientWidth"
                lists = page.locator("#rows .scroll, #agents .scroll").element_handles()
                assert width == 360 or not any(one.evaluate(cut) for one in lists), (path, width)


def test_a_folded_section_opens_for_its_link_and_stays_open(tmp_path):
    with serving(f"sqlite:///{tmp_path}/service.sqlite") as server, browsing() as page:
        story = Story(server.store)
        run = story.run("watched")
        story.report(run, epoch(0))
        sign_in(page, server)
        page.goto(f"{server.address}/runs/{run}")
        decided = page.get_by_text("What was decided")
        assert not decided.is_visible()
        page.locator(".on-page a", has_text="The plan").click()
        decided.wait_for()
        story.report(run, epoch(1))
        page.get_by_text("2 of 30").first.wait_for()
        assert decided.is_visible()
        page.goto(f"{server.address}/runs/{run}#job")
        page.locator("#job pre").first.wait_for()
        assert page.complaints == []


def test_the_focus_stays_when_what_is_before_it_goes(tmp_path):
    with serving(f"sqlite:///{tmp_path}/service.sqlite") as server, browsing() as page:
        story = Story(server.store)
        below, above = story.run("below"), story.run("above")
        sign_in(page, server)
        page.goto(f"{server.address}/runs?state=running")
        page.get_by_label("Compare below").focus()
        server.store.runs.end(above, RunEnd(outcome="stopped"))
        page.get_by_role("link", name="above").wait_for(state="detached")
        assert page.evaluate("document.activeElement.value") == below

        page.goto(f"{server.address}/runs/{above}")
        page.get_by_role("link", name="plan.json").focus()
        again = RunIntroduction(name="above", plan=make_plan())
        server.store.runs.introduce(above, again, "report")
        page.get_by_text("can go on").wait_for(state="detached")
        assert page.evaluate("document.activeElement.textContent") == "plan.json"
        assert page.complaints == []


def test_a_sentence_that_is_out_of_date_by_its_turn_is_not_read_out(tmp_path):
    with serving(f"sqlite:///{tmp_path}/service.sqlite") as server, browsing() as page:
        story = Story(server.store)
        sign_in(page, server)
        story.run("first")
        spoken = page.locator("[data-speaker]", has_text="1 run going on, 1 shown.")
        spoken.wait_for(state="attached")
        second = story.run("second")
        page.get_by_role("link", name="second").wait_for()
        server.store.runs.delete(second)
        page.get_by_role("link", name="second").wait_for(state="detached")
        page.wait_for_timeout(6000)  # longer than between two sentences
        assert spoken.count() == 1
        page.evaluate("Date.now = () => 0")  # the clock is set back
        story.run("third")
        page.locator("[data-speaker]", has_text="2 runs going on, 2 shown.").wait_for(
            state="attached"
        )
