"""What may become of a job, whatever comes in whatever order."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.service.job_states import (
    ENDED,
    MAX_LOST,
    Standing,
    approve,
    cancel,
    lease,
    lose,
    report,
    settled,
)
from batchwright.service.problems import Conflict
from example_counts import examples

QUEUED = Standing()


def leased(job=QUEUED, key="a", agent="one", expires=30.0):
    return lease(job, agent=agent, key=key, expires=expires)


def said(job, state=None, key="a", expires=60.0, **told):
    return report(job, key=key, expires=expires, state=state, **told)


PROBING = leased()
PLANNED = said(PROBING, "planned", plan=True)
TRAINING = leased(approve(PLANNED), key="b")
AUTO = leased(Standing(auto=True))
AUTO_PLANNED = said(AUTO, "planned", plan=True)


def test_a_job_is_probed_planned_approved_trained_and_done():
    assert PROBING.state == "probing"
    assert PROBING.held
    assert (PLANNED.state, PLANNED.held) == ("planned", False)
    assert not PLANNED.leasable
    assert approve(PLANNED).leasable
    assert (TRAINING.state, TRAINING.attempts, TRAINING.lost) == ("training", 2, 0)
    done = said(TRAINING, "done", key="b")
    assert (done.state, done.held, done.error) == ("done", False, None)


def test_with_auto_the_agent_goes_on_without_approval():
    assert (AUTO_PLANNED.state, AUTO_PLANNED.held) == ("planned", True)
    training = said(AUTO_PLANNED, "training")
    assert said(training, "done").state == "done"
    assert training.attempts == 1


def test_the_plan_may_come_before_the_word_that_there_is_one_or_with_the_training():
    told = said(PROBING, plan=True)
    assert (told.state, told.has_plan) == ("probing", True)
    assert said(told, "planned").state == "planned"
    assert said(AUTO, "training", plan=True).state == "training"


def test_each_word_of_the_agent_makes_the_lease_last_longer():
    assert said(PROBING, expires=77.0).expires == 77.0
    assert said(PROBING, "probing", expires=78.0).expires == 78.0


@pytest.mark.parametrize("job", [PROBING, AUTO_PLANNED, TRAINING], ids=lambda job: job.state)
def test_an_agent_that_has_a_job_may_fail_with_a_reason(job):
    failed = said(job, "failed", key=job.key, error="no data")
    assert (failed.state, failed.held, failed.error) == ("failed", False, "no data")
    assert said(job, "failed", key=job.key).error == "agent one gave no reason"


@pytest.mark.parametrize("job", [PROBING, AUTO_PLANNED, TRAINING], ids=lambda job: job.state)
def test_an_agent_that_is_told_to_stop_ends_the_job(job):
    stopping = cancel(job)
    assert (stopping.state, stopping.cancelling, stopping.held) == (job.state, True, True)
    assert cancel(stopping) == stopping
    ended = said(stopping, "cancelled", key=job.key)
    assert (ended.state, ended.cancelling, ended.held) == ("cancelled", False, False)


def test_a_job_that_nobody_has_is_cancelled_at_once():
    for job in (QUEUED, PLANNED, approve(PLANNED)):
        assert cancel(job).state == "cancelled"
        assert cancel(cancel(job)) == cancel(job)


def test_what_was_done_before_the_agent_saw_the_order_to_stop_counts():
    assert said(cancel(TRAINING), "done", key="b").state == "done"


def test_a_plan_that_comes_while_the_job_is_being_cancelled_ends_it():
    assert said(cancel(PROBING), "planned", plan=True).state == "cancelled"


TIMES = {"seconds": 30.0, "keep": 600.0}


@pytest.mark.parametrize(
    ("job", "then"),
    [
        (PROBING, "queued"),
        (said(PROBING, plan=True), "planned"),
        (AUTO_PLANNED, "planned"),
        (TRAINING, "planned"),
        (cancel(TRAINING), "cancelled"),
    ],
)
def test_a_job_that_is_taken_from_its_agent_stays_where_another_can_go_on(job, then):
    lost = lose(job)
    assert (lost.state, lost.held, lost.key) == (then, False, None)
    assert lost.has_plan == job.has_plan
    assert lost.approved == job.approved
    with pytest.raises(Conflict, match="was lost"):
        said(lost, "done", key=job.key)


def test_a_silent_agent_keeps_its_job_until_another_is_given_it():
    """Whatever the clock says meanwhile: who comes back goes on as if nothing had been."""
    assert not TRAINING.free_for("two", 29.9, **TIMES)
    assert said(TRAINING, key="b", expires=9e9).state == "training"
    taken = leased(lose(TRAINING), key="c", agent="two")
    with pytest.raises(Conflict, match="was lost"):
        said(taken, key="b")
    assert said(taken, "done", key="c").state == "done"


def test_a_training_is_kept_longer_than_a_probe_since_its_agent_has_the_checkpoints():
    assert PROBING.free_for("two", 30.0, **TIMES)
    assert not TRAINING.free_for("two", 629.9, **TIMES)
    assert TRAINING.free_for("two", 630.0, **TIMES)
    back = said(TRAINING, "queued", key="b")
    assert back.kept
    assert back.free_for("one", 0.0, **TIMES)
    assert not back.free_for("two", 599.9, **TIMES)
    assert back.free_for("two", 600.0, **TIMES)
    assert not leased(back, key="c").kept
    unable = said(TRAINING, "queued", key="b", able=False)
    assert unable.free_for("two", 0.0, **TIMES), "its agent cannot go on with it"
    assert said(PROBING, "queued").free_for("two", 0.0, **TIMES)


def test_nobody_gets_a_job_that_is_being_cancelled_or_waits_for_approval():
    assert not cancel(TRAINING).free_for("two", 1e9, **TIMES)
    assert not PLANNED.free_for("one", 1e9, **TIMES)


def test_a_cancelled_job_does_not_wait_for_a_silent_agent():
    assert cancel(TRAINING, silent=True).state == "cancelled"
    assert settled(cancel(TRAINING), silent=True).state == "cancelled"
    assert settled(cancel(TRAINING), silent=False) == cancel(TRAINING)
    assert settled(TRAINING, silent=True) == TRAINING


def heard(job):
    return said(job, key=job.key)


def test_after_three_agents_that_got_no_further_the_job_has_failed():
    job = Standing(auto=True)
    for number in range(MAX_LOST):
        assert job.state == "queued"
        job = lose(heard(leased(job, key=str(number), agent=f"agent {number}")))
    assert job.state == "failed"
    assert "lost its agent 3 times without getting any further" in job.error
    assert "agent 2 while probing" in job.error


def test_a_lease_whose_answer_never_arrived_is_no_loss():
    job = QUEUED
    for number in range(20):
        job = lose(leased(job, key=str(number)))
        assert (job.state, job.lost) == ("queued", 0)
    assert lose(heard(leased(job, key="x"))).lost == 1


def test_losses_are_forgotten_once_the_job_got_further():
    job, number = TRAINING, 0
    for epoch in range(1, 20):
        job = said(job, key=job.key, trained=float(epoch))
        assert job.lost == 0
        for _ in range(MAX_LOST - 1):
            number += 1
            job = leased(lose(heard(job)), key=str(number))
        assert (job.state, job.lost) == ("training", MAX_LOST - 1)
        assert said(job, key=job.key, trained=float(epoch)).lost == MAX_LOST - 1, "no further"


def test_another_agent_that_begins_anew_is_no_further_than_the_one_before():
    job = said(TRAINING, key="b", trained=5.0)
    for agent in ("two", "three"):
        job = leased(lose(heard(job)), key=agent, agent=agent)
        assert job.trained == 0
        job = said(job, key=agent, trained=5.0)
    assert lose(job).state == "failed"
    job = said(leased(lose(said(TRAINING, key="b", trained=5.0)), key="x", agent="two"), key="x")
    assert said(job, key="x", trained=5.1).lost == 0


def test_a_plan_is_further_too():
    job = leased(lose(heard(PROBING)), key="x")
    assert job.lost == 1
    assert said(job, "planned", key="x", plan=True).lost == 0


def test_a_job_that_is_given_back_is_not_lost():
    back = said(TRAINING, "queued", key="b")
    assert (back.state, back.held, back.lost) == ("planned", False, 0)
    assert back.leasable
    assert said(PROBING, "queued").state == "queued"
    assert said(cancel(PROBING), "queued").state == "cancelled"


@pytest.mark.parametrize(
    ("before", "state"),
    [
        (PROBING, "planned"),
        (PROBING, "queued"),
        (PROBING, "failed"),
        (TRAINING, "done"),
        (TRAINING, "queued"),
        (cancel(TRAINING), "cancelled"),
    ],
)
def test_a_message_whose_answer_was_lost_may_be_sent_again(before, state):
    once = said(before, state, key=before.key, plan=state == "planned")
    assert said(once, state, key=before.key, plan=state == "planned", expires=99.0) == once


def test_nothing_more_is_heard_from_who_has_let_the_job_go():
    for state in ("probing", "training", "done", "failed", None):
        with pytest.raises(Conflict, match="ended"):
            said(PLANNED, state)


@pytest.mark.parametrize(
    ("job", "state", "says"),
    [
        (PROBING, "done", "cannot become done"),
        (PROBING, "planned", "send the plan first"),
        (PROBING, "training", "send the plan first"),
        (said(PROBING, plan=True), "training", "waits for approval"),
        (PROBING, "cancelled", "cannot become cancelled"),
        (TRAINING, "planned", "cannot become planned"),
        (TRAINING, "probing", "cannot become probing"),
        (AUTO_PLANNED, "done", "cannot become done"),
    ],
)
def test_a_job_does_not_go_ways_that_there_are_not(job, state, says):
    with pytest.raises(Conflict, match=says):
        said(job, state, key=job.key)


@pytest.mark.parametrize("job", [QUEUED, PROBING, cancel(TRAINING)], ids=str)
def test_only_a_plan_that_is_there_can_be_approved(job):
    with pytest.raises(Conflict):
        approve(job)


def test_approving_again_changes_nothing():
    assert approve(approve(PLANNED)) == approve(PLANNED)
    assert approve(TRAINING) == TRAINING


@pytest.mark.parametrize("state", ENDED)
def test_what_has_ended_stays_as_it_is(state):
    ended = Standing(state=state, key="a", has_plan=True, auto=True)
    assert not ended.leasable
    assert settled(ended, silent=True) == ended
    steps = (approve, leased, *(lambda job, s=s: said(job, s) for s in ("training", "queued")))
    for step in steps:
        with pytest.raises(Conflict):
            step(ended)
    if state != "cancelled":
        with pytest.raises(Conflict):
            cancel(ended)


def test_a_job_that_somebody_has_or_that_waits_for_approval_is_not_leased():
    for job in (PROBING, AUTO_PLANNED, TRAINING, PLANNED):
        assert not job.leasable
        with pytest.raises(Conflict):
            leased(job, key="z")


# ------------------------------------------------------------------------------ any order of events

AGENTS = ("one", "two", "three")
WORDS = (None, "queued", "probing", "planned", "training", "done", "failed", "cancelled")
EVENTS = st.one_of(
    st.tuples(st.just("approve")),
    st.tuples(st.just("cancel")),
    st.tuples(st.just("wait"), st.sampled_from((1.0, 10.0, 31.0, 700.0))),
    st.tuples(st.just("lease"), st.sampled_from(AGENTS), st.booleans()),
    st.tuples(
        st.just("say"),
        st.sampled_from(AGENTS),
        st.sampled_from(WORDS),
        st.booleans(),
        st.booleans(),
        st.sampled_from((None, 1.0, 2.5)),
    ),
)


@examples(400)
@given(auto=st.booleans(), events=st.lists(EVENTS, max_size=40))
def test_in_any_order_of_events_no_two_agents_count_and_no_training_is_taken_too_early(
    auto, events
):
    """Each agent goes by its own last key, and often by an older one: messages may be late, and
    answers to leases may never arrive. The wall clock plays no part in who has the job."""
    job, now, word, number = Standing(auto=auto), 0.0, 0.0, 0
    keys = {agent: [] for agent in AGENTS}
    ended = None
    for event in events:
        before, silent = job, now - word
        try:
            match event:
                case ("wait", seconds):
                    now += seconds
                case ("approve",):
                    job = approve(job)
                case ("cancel",):
                    job = cancel(job, silent=job.held and silent >= 30)
                case ("lease", agent, arrives):
                    if job.held and job.agent == agent:
                        job = lose(job)  # it does not know of it any more
                    elif not job.free_for(agent, silent, **TIMES):
                        continue
                    elif job.held:
                        trains = job.state == "training"
                        assert silent >= (630 if trains else 30), "taken from a healthy agent"
                        job = lose(job)
                    assert job.lost <= before.lost + before.heard
                    if not job.leasable:
                        assert job.state in ("failed", "cancelled") or not job.goes_on
                        continue
                    number += 1
                    job = leased(job, key=str(number), agent=agent, expires=now + 30)
                    word = now
                    if before.kept and agent != before.agent:
                        assert silent >= 600, "a training was thrown away"
                    assert job.attempts == before.attempts + 1
                    if arrives:
                        keys[agent].append(str(number))
                case ("say", agent, state, plan, late, trained):
                    if not keys[agent]:
                        continue
                    key = keys[agent][0 if late else -1]
                    job = said(job, state, key=key, plan=plan, trained=trained, expires=now + 30)
                    if job != before:
                        assert key == str(before.attempts), "an older lease was listened to"
                        assert before.agent == agent
                        word = now
        except Conflict:
            assert job == before
        if ended is not None:
            assert job == ended, "it went on after its end"
        elif job.state in ENDED:
            ended = job
        check(job)


def check(job):
    if job.state in ("probing", "training"):
        assert job.held
    if job.state in (*ENDED, "queued"):
        assert not job.held
    if job.held:
        assert job.key is not None
        assert job.agent is not None
    if job.cancelling:
        assert job.held
    if job.state in ("planned", "training", "done"):
        assert job.has_plan
    if job.state in ("training", "done") or (job.state == "planned" and job.held):
        assert job.goes_on
    if job.state == "queued":
        assert not job.has_plan
    assert (job.error is not None) == (job.state == "failed")
    assert job.lost <= MAX_LOST
    assert job.trained <= job.furthest
    if job.kept:
        assert job.state == "planned"
        assert not job.held


# Where each word leads, in the order of `WORDS`; + while the agent has the job, - refused.
ANSWERS = """
probing+  queued    probing+ -        -         -    failed -
probing+  planned   probing+ planned  -         -    failed -
-         planned   -        planned  -         -    -      -
-         planned   -        planned  -         -    -      -
training+ planned   -        -        training+ done failed -
training+ planned   -        -        training+ done failed -
probing+  queued    probing+ -        -         -    failed -
probing+  planned   probing+ planned+ training+ -    failed -
planned+  planned   -        planned+ training+ -    failed -
planned+  planned   -        planned+ training+ -    failed -
probing+  cancelled probing+ -        -         -    failed cancelled
probing+  cancelled probing+ cancelled -        -    failed cancelled
training+ cancelled -        -        training+ done failed cancelled
training+ cancelled -        -        training+ done failed cancelled
"""


def test_every_word_leads_where_the_table_says_or_is_refused():
    jobs = [PROBING, PLANNED, TRAINING, AUTO, AUTO_PLANNED, cancel(PROBING), cancel(TRAINING)]
    rows = zip(product(jobs, (False, True)), ANSWERS.strip().splitlines(), strict=True)
    for (job, plan), row in rows:
        for state, wanted in zip(WORDS, row.split(), strict=True):
            if wanted == "-":
                with pytest.raises(Conflict):
                    said(job, state, key=job.key, plan=plan)
                continue
            then = said(job, state, key=job.key, plan=plan)
            check(then)
            assert then.state + "+" * then.held == wanted, (job, plan, state)


@pytest.mark.parametrize("state", WORDS)
def test_a_job_that_nobody_was_given_takes_no_word(state):
    with pytest.raises(Conflict, match="the lease of this job was lost"):
        said(QUEUED, state)
