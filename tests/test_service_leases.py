"""Leases in the database: many at once, in any order, on SQLite and on PostgreSQL."""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchwright.records import Job
from batchwright.records.service import AgentIntroduction, JobProgress
from batchwright.service import job_states
from batchwright.service.job_states import ENDED, Standing
from batchwright.service.problems import Conflict
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from samples import make_plan
from services import HandClock

AGENTS = ("one", "two", "three")
WORDS = (None, "queued", "planned", "training", "done", "failed", "cancelled")
PLAN = make_plan()


@pytest.fixture(scope="module")
def server(postgres):
    """A database of PostgreSQL for this module."""
    return postgres()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def store(request, tmp_path):
    """A store over either database, with three agents and a clock that a test sets."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/service.sqlite"
    else:
        url = request.getfixturevalue("server")
    store = Store.open(Settings(database=url), HandClock())
    for agent in AGENTS:
        store.agents.introduce(AgentIntroduction(name=agent, allow=()), "me")
    yield store
    for job in store.jobs.list(500):
        if job.state not in ENDED:
            store.jobs.cancel(job.id)
    store.clock.go(1000.0)
    store.jobs.settle()
    store.close()


def submit(store, auto=True):
    return store.jobs.submit("a", Job(), auto=auto, owner="me").id


def test_of_many_that_ask_at_once_each_job_goes_to_one(store):
    for _ in range(6):
        submit(store)
    names = [f"agent {n}" for n in range(8)]
    for name in names:
        store.agents.introduce(AgentIntroduction(name=name, allow=()), "me")
    gate = threading.Barrier(len(names), timeout=500)

    def ask(name):
        gate.wait()
        return store.jobs.lease(name)

    with ThreadPoolExecutor(len(names)) as pool:
        leases = [lease for lease in pool.map(ask, names) if lease is not None]
    # One that looks while others get theirs may miss one, and asks again in a second or two.
    leases += [lease for name in names if (lease := left(store, name, leases)) is not None]
    assert len({lease.job.id for lease in leases}) == len(leases) == 6
    for lease in leases:
        other = JobProgress(key=str(uuid.uuid4()))
        with pytest.raises(Conflict):
            store.jobs.progress(lease.job.id, other)
        told = JobProgress(key=lease.key, state="failed", error="x")
        assert store.jobs.progress(lease.job.id, told).state == "failed"


def left(store, name, leases):
    """What an agent gets that got nothing before."""
    return None if name in {lease.job.agent for lease in leases} else store.jobs.lease(name)


def test_in_a_crowd_every_job_ends_once_and_is_never_had_by_two(store):
    """Agents that forget, repeat, come late and give up, while a user cancels here and there."""
    jobs = [submit(store) for _ in range(10)]
    ends, conflicts, lock = Counter(), Counter(), threading.Lock()

    def work(number):
        draw, agent, known = random.Random(number), AGENTS[number % 3], []
        for _ in range(25):
            try:
                if not known or draw.random() < 0.12:
                    lease = store.jobs.lease(agent)
                    if lease is not None:
                        known.append(lease)
                    continue
                lease = draw.choice(known)
                state = draw.choice((*WORDS, "failed"))
                plan = PLAN if state == "planned" else None
                before = store.jobs.get(lease.job.id).state
                told = JobProgress(key=lease.key, state=state, plan=plan)
                orders = store.jobs.progress(lease.job.id, told)
                if orders.state in ENDED and before not in ENDED:
                    with lock:
                        ends[lease.job.id, lease.key] += 1
                if draw.random() < 0.02:
                    store.jobs.cancel(draw.choice(jobs))
            except Conflict as conflict:
                with lock:
                    conflicts[conflict.detail.split(":")[0]] += 1

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    by_job = Counter(job for job, _ in ends)
    assert by_job, "nothing came to its end"
    assert all(count == 1 for count in by_job.values()), "two leases ended one job"
    held = [agent.job for agent in store.agents.list() if agent.job is not None]
    assert len(held) == len(set(held))


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("approve")),
        st.tuples(st.just("cancel")),
        st.tuples(st.just("wait"), st.sampled_from((5.0, 31.0))),
        st.tuples(st.just("lease"), st.sampled_from(AGENTS)),
        st.tuples(st.just("say"), st.sampled_from(WORDS), st.booleans()),
    ),
    min_size=4,
    max_size=14,
)


@pytest.fixture
def sqlite(tmp_path):
    store = Store.open(Settings(database=f"sqlite:///{tmp_path}/service.sqlite"), HandClock())
    for agent in AGENTS:
        store.agents.introduce(AgentIntroduction(name=agent, allow=()), "me")
    yield store
    store.close()


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(auto=st.booleans(), events=EVENTS)
def test_the_database_stands_where_the_states_say(sqlite, auto, events):
    """The same events go to the store and to the pure functions."""
    store, seconds = sqlite, sqlite.settings.lease_seconds
    job, model, keys = submit(store, auto), Standing(auto=auto), []
    for event in events:
        now = store.clock()
        model = job_states.settled(model, now)
        try:
            match event:
                case ("wait", pause):
                    store.clock.go(pause)
                case ("approve",):
                    both(lambda: store.jobs.approve(job), lambda m=model: job_states.approve(m))
                    model = job_states.approve(model)
                case ("cancel",):
                    both(lambda: store.jobs.cancel(job), lambda m=model: job_states.cancel(m))
                    model = job_states.cancel(model)
                case ("lease", agent):
                    if model.held and model.agent == agent:
                        model = job_states.lose(model)
                    lease = store.jobs.lease(agent)
                    if lease is None:
                        continue
                    keys.append(lease.key)
                    model = job_states.lease(
                        model, agent=agent, key=lease.key, expires=now + seconds
                    )
                case ("say", state, late) if keys:
                    key = keys[0 if late else -1]
                    plan = PLAN if state == "planned" else None
                    told = JobProgress(key=key, state=state, plan=plan)

                    def step(m=model, key=key, state=state, plan=plan, now=now):
                        return job_states.report(
                            m, key=key, expires=now + seconds, state=state, plan=plan is not None
                        )

                    both(lambda told=told: store.jobs.progress(job, told), step)
                    model = step()
        except Conflict:
            pass
        stands(store, job, job_states.settled(model, store.clock()))
    if store.jobs.get(job).state not in ENDED:
        store.jobs.cancel(job)
        store.clock.go(100.0)
        assert store.jobs.get(job).state == "cancelled"


def both(one, other):
    """Both are refused, or neither."""
    refused = []
    for step in (one, other):
        try:
            step()
            refused.append(None)
        except Conflict as conflict:
            refused.append(conflict.detail)
    assert refused[0] == refused[1]


def stands(store, job, model):
    found = store.jobs.get(job)
    assert (found.state, found.approved, found.cancelling) == (
        *(model.state, model.approved),
        model.cancelling,
    )
    assert (found.agent, found.attempts, found.error) == (model.agent, model.attempts, model.error)
    assert found.has_plan == model.has_plan


def test_a_job_that_nobody_takes_says_why(store):
    """Agents of the fixture allow the defaults only."""
    store.clock.go(1000.0)  # nobody has been heard of since
    first = submit(store)
    assert "no agent is there" in store.jobs.get(first).waiting
    store.agents.introduce(AgentIntroduction(name="one", allow=()), "me")
    assert store.jobs.get(first).waiting is None  # it will have it in a moment
    birds = Job(data="imagefolder:/sets/birds")
    refused = store.jobs.submit("a", birds, auto=True, owner="me")
    says = "the agent that is there does not carry it out: data=imagefolder:/sets/birds is not"
    assert says in refused.waiting
    store.agents.introduce(AgentIntroduction(name="two", allow=()), "me")
    assert "the 2 agents that are there do not" in store.jobs.get(refused.id).waiting
    assert store.jobs.lease("one").job.id == first
    assert store.jobs.get(first).waiting is None
    second = submit(store)
    store.clock.go(1.0)  # of two of one moment either may be the first
    third = submit(store)
    assert store.jobs.lease("two").job.id == second
    assert store.jobs.get(third).waiting == "the agents that carry it out have another job"
    assert all(one.waiting is None for one in store.jobs.list())
