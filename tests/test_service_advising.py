"""Advice to runs that go on: when it is offered, what it says, and that it can be followed."""

from __future__ import annotations

import threading
import uuid

import pytest

from batchwright.algorithms.splicing import spliced
from batchwright.planning.planner import make_plan
from batchwright.records import EpochRecord, GradientNoise, Job, WorkerTime
from batchwright.records.lines.run_lines import EpochLine
from batchwright.records.service import Advice, AgentIntroduction, JobProgress
from batchwright.service.adviser import Adviser
from batchwright.service.advising import advice_for
from batchwright.workflows.drift import EpochTime, drift_of
from batchwright.workflows.replan import MAX_CHANGE, MIN_CHANGE, at_level_of, epoch_seconds
from clusters import LOCAL_BATCHES, make_step, step_seconds
from run_lines import values_of
from samples import make_cyclic_plan, make_data, make_dual_plan, make_job, make_profile
from test_learning import trials_of, truth

TRAIN = 50_000


def profile_of(**keys):
    """Two workers on 50,000 images, measured quietly: the exchange is short, and noise large."""
    steps = tuple(make_step(n, b) for n in (1, 2) for b in LOCAL_BATCHES)
    own = {"learning_rate": 0.1}  # of which other tasks tell nothing: batches go by time and noise
    job = make_job(**({"workers": "auto", "warmup_epochs": "auto"} | own | keys))
    noise = GradientNoise(noise_scale=5000, trace=5000, sqr_norm=1, parts=2, repeats=40)
    return make_profile(steps=steps, job=job, data=make_data(train_samples=TRAIN), noise=noise)


def lines(plan, count, *, computing=1.0, exchange=0.0, first=0, slow_first=True):
    """Epochs with so many times the planned computing, and more exchange in each step."""
    found = []
    for epoch in range(first, first + count):
        row = plan.stages[plan.stage_of(epoch)]
        steps = TRAIN / row.global_batch_size
        local = row.local_batch_sizes[0]
        whole = step_seconds(row.workers, local) * steps
        busy = 0.9 * whole if row.workers > 1 else whole
        extra = 1.4 if epoch == first and slow_first else 1.0
        seconds = extra * (busy * computing + (whole - busy) + exchange * steps)
        workers = tuple(
            WorkerTime(
                local_batch_size=local,
                samples=TRAIN // row.workers,
                input_seconds=0.1 * extra * busy * computing,
                compute_seconds=0.9 * extra * busy * computing * (1 - 0.05 * rank),
                communication_seconds=extra * (whole - busy + exchange * steps),
            )
            for rank in range(row.workers)
        )
        record = EpochRecord(
            epoch=epoch,
            resolution=row.resolution,
            global_batch_size=row.global_batch_size,
            steps=round(steps),
            skipped_steps=0,
            samples=TRAIN,
            learning_rate=0.1,
            train_loss=1.0,
            training_seconds=seconds,
            evaluation_seconds=1.0,
            checkpoint_seconds=0.1,
            workers=workers,
        )
        found.append(record)
    return found


def timed(record, seconds):
    """An epoch that took so long."""
    return record.model_copy(update={"training_seconds": seconds})


def line_of(record):
    return EpochLine(kind="epoch", record=record, epochs=PLAN.epochs)


PROFILE = profile_of()
PLAN = make_plan(PROFILE)
SLOW_LINK = {"exchange": 0.5}  # seconds a step: larger batches pay


def advised(plan=PLAN, count=4, profile=PROFILE, offered=(), **how):
    return advice_for(plan, profile, lines(plan, count, **how), offered)


# ------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize("factor", [0.94, 1.0, 1.06])
def test_a_prediction_that_holds_calls_for_nothing(factor):
    found = drift_of(PLAN, lines(PLAN, 4, computing=factor))
    assert not found.beyond
    assert abs(found.error) < PLAN.job.goal.tolerance
    assert advised(computing=factor) is None


def test_drift_is_the_median_of_the_newest_epochs_and_the_first_one_does_not_count():
    seconds = (99, 98, 97, 20, 90, 30)
    told = [timed(*one) for one in zip(lines(PLAN, 6), seconds, strict=True)]
    found = drift_of(PLAN, told)
    assert (found.measured, found.done, len(found.times)) == (30, 6, 3)
    assert "where" in str(found)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_epochs_tell_nothing(count):
    assert drift_of(PLAN, lines(PLAN, count, computing=3)) is None


def test_lines_without_times_or_epochs_tell_nothing():
    told = lines(PLAN, 5)
    assert drift_of(PLAN, [told[0], *(timed(one, 0.0) for one in told[1:])]) is None
    late = told[0].model_copy(update={"epoch": 99})
    assert drift_of(PLAN, [*lines(PLAN, 3), late]) is None


def test_after_a_change_only_epochs_of_the_new_row_count():
    new = PLAN.stages[0].model_copy(update={"local_batch_sizes": (512, 512)})
    plan = spliced(PLAN, PLAN.model_copy(update={"stages": (new,)}), 4)
    told = lines(PLAN, 4, computing=3) + lines(plan, 2, first=4)
    assert drift_of(plan, told) is None
    told = lines(PLAN, 4, computing=3) + lines(plan, 3, first=4)
    assert drift_of(plan, told).stage == plan.stages[1]


# ---------------------------------------------------------------------------------------- the level


@pytest.mark.parametrize(
    ("computing", "exchange"), [(1.5, 0.0), (1.0, 0.2), (0.7, 0.05), (2.0, 0.3)]
)
def test_what_was_measured_is_brought_to_what_the_epochs_show(computing, exchange):
    stage = PLAN.stages[0]
    times = drift_of(PLAN, lines(PLAN, 4, computing=computing, exchange=exchange)).times
    level = at_level_of(times, PROFILE, PLAN, stage)
    assert level.computing == pytest.approx(computing, rel=0.03)
    assert level.exchange_seconds == pytest.approx(exchange, abs=0.03 * (computing + exchange))
    now = epoch_seconds(level.profile, PLAN, stage).value
    assert now == pytest.approx(times[0].seconds, rel=0.03)


def test_a_machine_that_is_as_it_was_leaves_the_profile_as_it_is():
    times = drift_of(PLAN, lines(PLAN, 4)).times
    level = at_level_of(times, PROFILE, PLAN, PLAN.stages[0])
    assert level.computing == pytest.approx(1.0, abs=0.02)
    for one, other in zip(level.profile.steps, PROFILE.steps, strict=True):
        assert one.step_seconds == pytest.approx(other.step_seconds, rel=0.03)


def test_what_was_slow_beside_others_is_brought_to_the_level_too():
    slow = [
        one.model_copy(update={"beside_seconds": 3 * one.step_seconds}) for one in PROFILE.steps
    ]
    profile = PROFILE.model_copy(update={"steps": tuple(slow)})
    times = drift_of(PLAN, lines(PLAN, 4, computing=2.0)).times
    for one in at_level_of(times, profile, PLAN, PLAN.stages[0]).profile.steps:
        assert one.beside_seconds == pytest.approx(3 * one.step_seconds)


def test_one_worker_has_no_exchange_to_wait_for():
    profile = profile_of()
    plan = make_plan(profile, profile.job.model_copy(update={"workers": 1}))
    level = at_level_of([EpochTime(200.0, 120.0)], profile, plan, plan.stages[0])
    assert level.exchange_seconds == 0
    assert epoch_seconds(level.profile, plan, plan.stages[0]).value == pytest.approx(200, rel=0.02)


# -------------------------------------------------------------------------------------- the advice


def test_a_slower_exchange_calls_for_a_larger_batch():
    offer = advised(**SLOW_LINK)
    assert offer.epoch == 5
    before, after = offer.plan.stages
    assert before == PLAN.stages[0].model_copy(update={"epochs": 5})
    assert after.global_batch_size >= MIN_CHANGE * before.global_batch_size
    assert after.workers == before.workers
    assert after.learning_rate > before.learning_rate
    assert offer.plan.epochs == PLAN.epochs
    assert offer.plan.job == PLAN.job
    assert offer.plan.learning_rate == PLAN.learning_rate
    assert offer.plan.reasons[0].source == "measured"


def test_a_slower_exchange_calls_for_no_batch_that_is_not_worth_its_time():
    noise = PROFILE.noise.model_copy(update={"noise_scale": 200.0})
    assert advised(profile=PROFILE.model_copy(update={"noise": noise}), **SLOW_LINK) is None


def test_one_change_goes_four_times_as_far_at_most_and_says_so():
    offer = advised(**SLOW_LINK)
    before, after = offer.plan.stages
    assert after.global_batch_size == MAX_CHANGE * before.global_batch_size
    assert "the plan would be 5,000" in offer.reason
    offer = advised(exchange=0.05)
    assert offer.plan.stages[1].global_batch_size < 5000
    assert "the plan would be" not in offer.reason


def test_the_reason_says_measured_predicted_and_what_changes():
    offer = advised(**SLOW_LINK)
    before, after = offer.plan.stages
    for part in (
        f"epochs take {lines(PLAN, 2, **SLOW_LINK)[1].training_seconds // 60:.0f} min",
        "were predicted",
        "more (median of the last 3)",
        "computing takes 1.0",
        "exchange 0.50",
        f"global batch {before.global_batch_size:,} -> {after.global_batch_size:,}",
        "From epoch 6 on",
        "s an epoch instead of",
    ):
        assert part in offer.reason, offer.reason
    assert "\n" not in offer.reason


def test_a_machine_that_is_slower_throughout_keeps_its_batch():
    assert advised(computing=2.0, exchange=0.00195) is None


def test_the_same_advice_is_not_given_twice():
    offer = advised(**SLOW_LINK)
    given = Advice(number=1, epoch=offer.epoch, reason=offer.reason, plan=offer.plan)
    assert advised(count=5, offered=[given], **SLOW_LINK) is None


def test_a_run_that_took_advice_and_then_goes_as_predicted_gets_no_more():
    offer = advised(**SLOW_LINK)
    given = Advice(number=1, epoch=offer.epoch, reason=offer.reason, plan=offer.plan, taken=5)
    told = lines(PLAN, 5, **SLOW_LINK) + lines(offer.plan, 4, first=5, **SLOW_LINK)
    assert not drift_of(offer.plan, told).beyond
    assert advice_for(offer.plan, PROFILE, told, [given]) is None


def test_a_run_that_took_advice_is_led_back_where_the_machine_recovers():
    offer = advised(**SLOW_LINK)
    given = Advice(number=1, epoch=offer.epoch, reason=offer.reason, plan=offer.plan, taken=5)
    told = lines(PLAN, 5, **SLOW_LINK) + lines(offer.plan, 4, first=5)
    back = advice_for(offer.plan, PROFILE, told, [given])
    sizes = [stage.global_batch_size for stage in back.plan.stages]
    assert sizes == [sizes[0], sizes[1], sizes[0]]
    assert [stage.epochs for stage in back.plan.stages[:2]] == [5, 5]
    assert "less" in back.reason


@pytest.mark.parametrize("left", [0, 1])
def test_at_the_end_there_is_nothing_left_to_change(left):
    assert advised(count=PLAN.epochs - left, **SLOW_LINK) is None
    assert advised(count=PLAN.epochs - 2, **SLOW_LINK) is not None


def test_a_batch_that_was_asked_for_is_kept():
    profile = profile_of()
    plan = make_plan(profile, profile.job.model_copy(update={"global_batch": 512}))
    assert drift_of(plan, lines(plan, 4, **SLOW_LINK)).beyond
    assert advised(plan, profile=profile, **SLOW_LINK) is None


@pytest.mark.parametrize("plan", [make_cyclic_plan(), make_dual_plan()], ids=["cyclic", "dual"])
def test_plans_that_are_laid_out_as_a_whole_are_left_alone(plan):
    assert advice_for(plan, PROFILE, lines(plan, 4, computing=9)) is None


def test_without_a_profile_nothing_is_planned_again():
    assert advised(profile=None, **SLOW_LINK) is None


def test_with_limits_on_workers_the_run_keeps_those_that_it_has():
    profile = profile_of(goal={"max_workers": 2})
    plan = make_plan(profile)
    offer = advised(plan, profile=profile, **SLOW_LINK)
    assert offer.plan.stages[1].workers == plan.workers


def test_a_deadline_is_held_against_the_time_that_is_left():
    """With three times the computing the deadline is missed: the fastest batch is left."""
    seconds = PLAN.epochs * PLAN.stages[0].predicted_epoch_seconds.value
    profile = profile_of(goal={"deadline": 1.3 * seconds + 200})
    plan = make_plan(profile)
    offer = advised(plan, profile=profile, computing=3.0)
    assert "no batch keeps goal.deadline any more" in offer.reason
    assert offer.plan.stages[1].global_batch_size > plan.stages[0].global_batch_size


def test_a_plan_with_a_target_keeps_its_epochs_and_its_target():
    """What is left of them is no training of its own, whose epochs could be chosen."""
    profile = profile_of(goal={"accuracy": 0.7}, optimizer="auto", learning_rate="auto")
    profile = profile.model_copy(update={"trials": trials_of(truth())})
    plan = make_plan(profile)
    assert 6 < plan.epochs < profile.job.epochs
    offer = advised(plan, profile=profile, **SLOW_LINK)
    assert offer.plan.epochs == plan.epochs
    assert offer.plan.job == plan.job
    assert offer.plan.stages[1].global_batch_size > plan.stages[0].global_batch_size


@pytest.mark.parametrize("target", [0.7, pytest.param(0.75, marks=pytest.mark.slow)])
@pytest.mark.parametrize("factor", [0.5, pytest.param(3.0, marks=pytest.mark.slow)])
def test_a_target_calls_for_no_other_batch_where_all_batches_are_slower_alike(target, factor):
    profile = profile_of(goal={"accuracy": target}, optimizer="auto", learning_rate="auto")
    profile = profile.model_copy(update={"trials": trials_of(truth())})
    plan = make_plan(profile)
    assert drift_of(plan, lines(plan, 4, computing=factor)).beyond
    assert advised(plan, profile=profile, computing=factor) is None


# ---------------------------------------------------------------------------------- the service


def introduced(service, **changes):
    return service.a_run(plan=PLAN, profile=PROFILE, **changes)


def posted(service, run, told):
    first = service.store.runs.get(run).records
    answer = service.post(
        "report",
        f"/v1/runs/{run}/records",
        json={"first": first, "records": [values_of(line_of(one)) for one in told]},
    )
    assert answer.status_code == 200, answer.text
    assert service.app.state.adviser.wait(300)
    return answer.json()


def test_epochs_that_come_in_lead_to_advice_that_the_next_answer_tells_of(service):
    run = introduced(service, follows_advice=True)
    told = lines(PLAN, 5, **SLOW_LINK)
    assert posted(service, run, told[:3]) == {"next": 3, "advice": 0, "digest": None}
    assert posted(service, run, told[3:])["advice"] == 1
    (advice,) = service.get("read", f"/v1/runs/{run}/advice").json()
    assert (advice["number"], advice["epoch"], advice["taken"]) == (1, 4, None)
    assert [row["epochs"] for row in advice["plan"]["stages"]] == [4, PLAN.epochs - 4]
    entry = service.store.audit.list()[0]
    assert (entry.who, entry.action, entry.subject) == ("service", "advice.offer", run)


def test_a_run_is_thought_about_again_only_if_something_is_new(service, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "batchwright.service.adviser.advised", lambda *told: seen.append(told) or None
    )
    run, adviser = introduced(service), Adviser(service.store)
    told = lines(PLAN, 6, **SLOW_LINK)
    told[4:] = [timed(one, 3 * one.training_seconds) for one in told[4:]]
    for record in told:
        service.report(run, line_of(record))
        adviser.consider(run)
    assert len(seen) == 2


def test_a_run_that_has_finished_is_not_advised(service):
    run, adviser = introduced(service), Adviser(service.store)
    service.report(run, *map(line_of, lines(PLAN, 4, **SLOW_LINK)))
    service.put("report", f"/v1/runs/{run}/end", json={"outcome": "finished"})
    assert adviser.consider(run) is None


def test_background_work_for_which_no_thread_can_be_started_is_done_with_the_next(
    service, monkeypatch
):
    """No request fails for it: the records that it is about are stored."""
    considered, adviser = [], Adviser(service.store)
    monkeypatch.setattr(adviser, "consider", considered.append)
    start = threading.Thread.start

    def broken(thread):
        if thread.name == "adviser":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", broken)
        adviser.add("one")
    adviser.add("two")
    assert adviser.wait(60)
    assert considered == ["one", "two"]


def test_a_run_without_a_profile_has_that_of_the_job_it_carries_out(service):
    job = service.store.jobs.submit("a", Job(), auto=True, owner="me").id
    runs = [
        service.a_run(plan=PLAN, profile=None, job=one) for one in (job, None, str(uuid.uuid4()))
    ]
    service.store.agents.introduce(AgentIntroduction(name="one", allow=()), "me")
    key = service.store.jobs.lease("one").key
    service.store.jobs.progress(job, JobProgress(key=key, profile=PROFILE))
    for run in runs:
        service.report(run, *map(line_of, lines(PLAN, 4, **SLOW_LINK)))
    adviser = Adviser(service.store)
    assert [adviser.consider(run) is not None for run in runs] == [True, False, False]


def test_what_cannot_be_planned_again_is_left_alone(service):
    run = introduced(service)
    other = service.a_run(plan=PLAN, profile=profile_of().model_copy(update={"steps": ()}))
    adviser = Adviser(service.store)
    for one in (run, other):
        service.report(one, *map(line_of, lines(PLAN, 4, **SLOW_LINK)))
    assert adviser.consider(other) is None
    assert adviser.consider(run) is not None


def test_taken_advice_is_the_plan_of_the_run_from_the_epoch_that_it_was_taken_at(service):
    run = introduced(service)
    service.report(run, *map(line_of, lines(PLAN, 4, **SLOW_LINK)))
    advice = Adviser(service.store).consider(run)
    path = f"/v1/runs/{run}/advice/1/taken"
    for _ in range(2):
        told = service.put("report", path, json={"epoch": 7})
        assert told.status_code == 200, told.text
        assert told.json()["taken"] == 7
        assert service.store.runs.plan(run) == spliced(PLAN, advice.plan, 7)
    assert service.store.audit.list()[0].action == "advice.take"
    assert service.put("report", path, json={"epoch": 30}).status_code == 422
    assert (
        service.put("report", f"/v1/runs/{run}/advice/2/taken", json={"epoch": 7}).status_code
        == 404
    )


def test_advice_is_taken_by_whom_the_run_belongs_to(service):
    run = introduced(service)
    service.report(run, *map(line_of, lines(PLAN, 4, **SLOW_LINK)))
    Adviser(service.store).consider(run)
    other = service.store.tokens.create("another", ["report"])
    answer = service.client.put(
        f"/v1/runs/{run}/advice/1/taken",
        json={"epoch": 7},
        headers={"authorization": f"Bearer {other}"},
    )
    assert answer.status_code == 403


def test_an_adviser_survives_runs_that_are_gone_and_takes_nothing_on_once_closed(service):
    run, adviser = introduced(service), Adviser(service.store)
    service.report(run, *map(line_of, lines(PLAN, 4, **SLOW_LINK)))
    adviser.add("00000000-0000-0000-0000-000000000000")
    adviser.add(run)
    assert adviser.wait(300)
    assert len(service.store.advice.list(run)) == 1
    adviser.close()
    adviser.add(run)
    assert adviser.wait(0)
