"""The pages of jobs and agents."""

from __future__ import annotations

import pytest

from batchwright.records import Job
from batchwright.records.service import AgentIntroduction, JobProgress
from batchwright.service.pages.jobs import JobTextError, job_of_text
from pages import (
    LONG,
    NASTY,
    browse,
    empty_service,  # noqa: F401 - a fixture
    post,
    shared_service,  # noqa: F401 - a fixture
)
from samples import make_plan, make_profile
from services import ADDRESS


def a_job(service, name="digits", *, auto=False, owner="browser", **keys):
    return service.store.jobs.submit(name, Job(**keys), auto=auto, owner=owner).id


def an_agent(service, name="rig"):
    allow = ("data=digits", "network=resnet8")
    service.store.agents.introduce(AgentIntroduction(name=name, allow=allow), "report")
    return name


def planned(service, **options):
    """A job whose plan waits."""
    job = a_job(service, **options)
    lease = service.store.jobs.lease(an_agent(service))
    told = {"state": "planned", "profile": make_profile(), "plan": make_plan()}
    service.store.jobs.progress(job, JobProgress(key=lease.key, **told))
    return job


# ------------------------------------------------------------------------------------- what to type


def test_without_jobs_and_agents_the_page_says_how_to_get_them(empty):
    service = empty
    page = browse(service.sign_in(), "/jobs")
    assert f"batchwright submit job.yaml --server {ADDRESS}" in page.source
    assert f"batchwright agent --server {ADDRESS}" in page.source


def test_a_job_is_read_as_a_job_file_is():
    job = job_of_text("epochs: 3\ngoal:\n  price: 0.5\nprobe.budget: 9\n")
    assert (job.epochs, job.goal.price, job.probe.budget) == (3, 0.5, 9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Write a key"),
        ("- 1", "Write a key"),
        ("1: 2", "Write a key"),
        ("epochs: [", "not YAML in line"),
        ("epoch: 3", "did you mean 'epochs'"),
        ("epochs: many", "epochs"),
        (f"a: [{'?,' * 9000}]", "more keys and values than any job"),
        ("a: " + "1:" * 5000 + "1", "A value has more than 8,192 characters"),
        ("a: &x [1]\nb: *x", "Anchors"),
        ("a: *x", "Anchors"),
        ("[" * 100, "deeply nested"),
        ("x" * 70_000, "KiB"),
        ("epochs: 2001-99-99", "'2001-99-99' cannot be read"),
        ("data: !!timestamp abc", "'abc' cannot be read"),
        ("a: !!python/object:os.system {}", ""),
        ("epochs: \x00", "not YAML"),
        ("launch: slurm", "an agent trains on its own machine; leave launch out."),
    ],
)
def test_a_text_that_is_no_job_is_refused_in_a_sentence(text, words):
    with pytest.raises(JobTextError) as refusal:
        job_of_text(text)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


# ----------------------------------------------------------------------------------------- submit


def test_a_job_is_submitted_by_form(empty):
    service = empty
    browser = service.sign_in("read", "submit")
    token = browse(browser, "/jobs").csrf
    answer = post(browser, "/jobs", token, job="epochs: 3\nnetwork: vgg8", name="", auto="yes")
    assert answer.status_code == 303
    (job,) = service.store.jobs.list()
    assert answer.headers["location"] == f"/jobs/{job.id}"
    assert (job.name, job.auto, job.job["epochs"], job.state) == (
        "vgg8 on digits",
        True,
        3,
        "queued",
    )
    page = browse(browser, f"/jobs/{job.id}")
    assert "waits for an agent" in page.source
    assert "network: vgg8" in page.source


def test_a_job_that_is_refused_comes_back_with_the_reason(empty):
    service = empty
    browser = service.sign_in("read", "submit")
    token = browse(browser, "/jobs").csrf
    answer = post(browser, "/jobs", token, job="epoch: 3", name=NASTY)
    assert answer.status_code == 422
    assert "did you mean &#x27;epochs&#x27;" in answer.text
    assert "epoch: 3" in answer.text
    assert answer.text.count(" autofocus") == 1  # or the reason may be below what the window shows
    assert "<script>alert" not in answer.text
    answer = post(browser, "/jobs", token, job="epochs: 3", name=LONG + "x")
    assert "at most 120" in answer.text
    assert answer.text.count(" autofocus") == 1
    assert service.store.jobs.list() == []


# ------------------------------------------------------------------------------------------ follow


def test_jobs_say_whose_they_are(empty):
    job = a_job(empty, owner="ann's laptop")
    browser = empty.sign_in()
    for path in ("/jobs", f"/jobs/{job}"):
        assert "ann&#39;s laptop" in browse(browser, path).source


def test_an_agent_without_rules_of_its_own_has_the_default_ones(empty):
    empty.store.agents.introduce(AgentIntroduction(name="rig", allow=()), "report")
    page = browse(empty.sign_in(), "/jobs")
    assert "default rules: the embedded digits, the built-in networks" in page.source
    assert "allows nothing" not in page.source


def test_a_job_shows_what_it_asks_for_before_every_key(empty):
    job = a_job(empty, epochs=7, goal={"price": 0.5})
    asked, every = browse(empty.sign_in(), f"/jobs/{job}").source.split("Every key</summary>")
    assert "epochs: 7" in asked
    assert "price: 0.5" in asked
    assert "momentum" not in asked
    assert "momentum: 0.9" in every


def test_a_job_that_failed_says_why_where_and_how_far_it_came(empty):
    job = a_job(empty)
    lease = empty.store.jobs.lease(an_agent(empty))
    error = "this machine has 2 cores: give workers=2"
    empty.store.jobs.progress(job, JobProgress(key=lease.key, state="failed", error=error))
    browser = empty.sign_in()
    page = browse(browser, f"/jobs/{job}")
    assert "failure" in page.parts
    assert error in page.source
    assert "on the agent rig, before it had a plan" in page.source
    assert error in browse(browser, "/jobs").source


def test_what_stands_in_backticks_is_code(empty):
    job, browser = a_job(empty), empty.sign_in()
    for path in ("/jobs", f"/jobs/{job}"):
        page = browse(browser, path)
        assert "start <code>batchwright agent</code> on the machine" in page.source
        assert "`" not in page.source
    assert "start batchwright agent on the machine" in page.source  # for screen readers
    an_agent(empty)
    lease = empty.store.jobs.lease("rig")
    error = f"run `a --b <c>` {'first ' * 10}and `then --do this --and that`"
    empty.store.jobs.progress(job, JobProgress(key=lease.key, state="failed", error=error))
    for path, end in (("/jobs", "then..."), (f"/jobs/{job}", "then --do this --and that")):
        page = browse(browser, path)
        assert "run <code>a --b &lt;c&gt;</code> first" in page.source
        assert f"and <code>{end}</code>" in page.source
        assert "`" not in page.source


def test_a_backtick_without_another_is_shown(empty):
    job = a_job(empty)
    lease = empty.store.jobs.lease(an_agent(empty))
    error = "syntax error near unexpected token `newline'; see the log" + " of a worker" * 9
    empty.store.jobs.progress(job, JobProgress(key=lease.key, state="failed", error=error))
    for path in ("/jobs", f"/jobs/{job}"):
        assert "token `newline&#x27;; see the log" in browse(empty.sign_in(), path).source


def test_a_plan_is_looked_at_and_approved(empty):
    service = empty
    job = planned(service)
    browser = service.sign_in("read", "submit")
    listed = browse(browser, "/jobs")
    assert "See the plan" in listed.source
    assert "1 plan" in next(one["data-says"] for _, one in listed.seen if "data-says" in one)
    page = browse(browser, f"/jobs/{job}")
    assert "Approve the plan" in page.source
    assert list(page.parts) == ["now", "plan", "job", "environment"]
    etag = browser.get(f"/jobs/{job}/live").headers["etag"]
    answer = post(browser, f"/jobs/{job}/approve", page.csrf)
    assert answer.headers["location"] == f"/jobs/{job}"
    assert service.store.jobs.get(job).approved
    news = browser.get(f"/jobs/{job}/live", headers={"if-none-match": etag})
    assert "Approve the plan" not in news.text


def test_a_plan_that_needs_no_approval_does_not_wait_for_it(empty):
    service = empty
    job = a_job(service, auto=True)
    lease = service.store.jobs.lease(an_agent(service))
    told = {"profile": make_profile(), "plan": make_plan()}
    service.store.jobs.progress(job, JobProgress(key=lease.key, state="planned", **told))
    service.store.jobs.progress(job, JobProgress(key=lease.key, state="queued"))
    assert service.store.jobs.get(job).state == "planned"
    assert "waiting for approval" not in browse(service.sign_in(), "/jobs").source


def test_the_list_says_why_jobs_wait_and_counts_those_further_down(empty):
    for _ in range(2):
        empty.store.jobs.submit("early", Job(), auto=True, owner="me")
    empty.store.agents.introduce(AgentIntroduction(name="one", allow=()), "me")
    assert empty.store.jobs.lease("one") is not None
    empty.clock.go(1.0)
    for _ in range(60):  # more than a page of them, and newer
        empty.store.jobs.cancel(empty.store.jobs.submit("late", Job(), auto=True, owner="me").id)
    empty.clock.go(1000.0)  # nobody has been heard of since
    browser = empty.sign_in("read")
    assert "1 job going on" in browser.get("/jobs").text
    assert "no agent is there" in browser.get("/jobs?state=queued").text


def test_a_job_is_cancelled(service):
    job = a_job(service)
    browser = service.sign_in("read", "submit")
    page = browse(browser, f"/jobs/{job}")
    post(browser, f"/jobs/{job}/cancel", page.csrf)
    assert service.store.jobs.get(job).state == "cancelled"
    over = browse(browser, f"/jobs/{job}")
    assert "data-over" in over.source
    assert "Cancel the job" not in over.source


def test_another_ones_job_is_not_mine_to_approve_or_cancel(empty):
    service = empty
    job = planned(service, owner="submit")
    browser = service.sign_in("read", "submit")
    page = browse(browser, f"/jobs/{job}")
    for verb, words in (("approve", "Approve the plan"), ("cancel", "Cancel the job")):
        assert words not in page.source
        assert words in browse(service.sign_in(), f"/jobs/{job}").source
        assert post(browser, f"/jobs/{job}/{verb}", page.csrf).status_code == 403
    found = service.store.jobs.get(job)
    assert (found.state, found.approved) == ("planned", False)


def test_who_may_only_read_sees_no_buttons(empty):
    service = empty
    job = planned(service)
    page = browse(service.sign_in("read"), f"/jobs/{job}")
    assert "Approve the plan" not in page.source
    assert "Cancel the job" not in page.source


def test_a_job_leads_to_its_run_and_back(empty):
    service = empty
    job = planned(service, auto=True)
    run = service.a_run(job=job)
    lease = service.store.jobs
    assert lease.get(job).state in ("planned", "training")
    page = browse(service.sign_in(), f"/runs/{run}")
    assert f"/jobs/{job}" in [one["href"] for one in page.all("a")]


def test_a_failed_job_says_why(empty):
    service = empty
    job = a_job(service)
    lease = service.store.jobs.lease(an_agent(service))
    service.store.jobs.progress(job, JobProgress(key=lease.key, state="failed", error=NASTY))
    page = browse(service.sign_in(), f"/jobs/{job}")
    assert "&lt;script&gt;" in page.source
    assert "data-over" in page.source


def test_a_job_that_has_ended_is_submitted_again(empty):
    service = empty
    job = a_job(service, "mine", auto=True, epochs=7)
    browser = service.sign_in()
    page = browse(browser, f"/jobs/{job}")
    assert "Submit it again" not in page.source
    assert post(browser, f"/jobs/{job}/again", page.csrf).status_code == 409
    post(browser, f"/jobs/{job}/cancel", page.csrf)
    assert "Submit it again" in browse(browser, f"/jobs/{job}").source
    assert "Submit it again" not in browse(service.sign_in("read"), f"/jobs/{job}").source
    answer = post(browser, f"/jobs/{job}/again", page.csrf)
    assert answer.status_code == 303
    new = service.store.jobs.get(answer.headers["location"].rpartition("/")[2])
    former = service.store.jobs.get(job)
    assert (former.state, new.state) == ("cancelled", "queued")
    asked = [(one.name, one.auto, one.job, one.needs) for one in (former, new)]
    assert asked[0] == asked[1]


def test_an_agent_that_has_said_that_it_ends_is_not_ready(empty):
    name, browser = an_agent(empty), empty.sign_in()
    empty.post("report", f"/v1/agents/{name}/leave")
    page = browse(browser, "/jobs")
    assert '<span class="state stopped">' in page.source
    assert '<span class="state ready">' not in page.source
    an_agent(empty)  # it comes back
    assert '<span class="state ready">' in browse(browser, "/jobs").source


def test_agents_are_shown_and_when_they_fall_silent(empty):
    service = empty
    an_agent(service, NASTY[:100].replace("/", "-"))
    browser = service.sign_in()
    page = browse(browser, "/jobs")
    assert "data=digits" in page.source
    assert "ready" in page.source
    assert "<script>alert" not in page.source
    for seconds in (100, -200):  # or the clock is set back
        service.clock.go(seconds)
        assert '<span class="state silent">' in browse(browser, "/jobs").source


def test_jobs_are_found_by_state(empty):
    service = empty
    a_job(service, "one")
    cancelled = a_job(service, "two")
    service.store.jobs.cancel(cancelled)
    browser = service.sign_in()
    page = browse(browser, "/jobs?state=cancelled")
    assert ("two" in page.source, ">one<" in page.source) == (True, False)
    assert "No job is like that" in browse(browser, "/jobs?state=training").source


def test_nobody_asks_again_for_nothing(service):
    a_job(service)
    browser = service.sign_in()
    etag = browser.get("/jobs/rows").headers["etag"]
    assert browser.get("/jobs/rows", headers={"if-none-match": etag}).status_code == 304
    a_job(service)
    assert browser.get("/jobs/rows", headers={"if-none-match": etag}).status_code == 200
