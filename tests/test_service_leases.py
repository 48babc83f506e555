"""Leases in the database: many at once, in any order, on SQLite and on PostgreSQL."""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchwright.records import Job
from batchwright.records.agent_rules import GIB, Needs, Offer
from batchwright.records.service import AgentIntroduction, JobProgress
from batchwright.service import job_states
from batchwright.service.job_states import ENDED, Standing
from batchwright.service.problems import Conflict
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from samples import make_plan
from services import HandClock, leave_unsynced, new_database

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
    url = new_database(tmp_path) if request.param == "sqlite" else request.getfixturevalue("server")
    store = leave_unsynced(Store.open(Settings(database=url), HandClock()))
    for agent in AGENTS:
        store.agents.introduce(AgentIntroduction(name=agent, allow=()), "me")
    yield store
    for job in store.jobs.list(500):
        if job.state not in ENDED:
            store.jobs.cancel(job.id)
    store.clock.go(1000.0)
    store.jobs.tick()
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
        st.tuples(st.just("wait"), st.sampled_from((5.0, 31.0, 640.0))),
        st.tuples(st.just("jump"), st.sampled_from((-5000.0, 5000.0))),
        st.tuples(st.just("lease"), st.sampled_from(AGENTS)),
        st.tuples(st.just("say"), st.sampled_from(WORDS), st.booleans()),
    ),
    min_size=4,
    max_size=14,
)


class Clocks:
    """The wall clock, which may be set, and the steady one."""

    def __init__(self):
        self.wall, self.steady = HandClock(), HandClock(0.0)

    def go(self, seconds):
        self.wall.go(seconds)
        self.steady.go(seconds)


def a_store(tmp_path, clocks, **settings):
    database = f"sqlite:///{tmp_path}/service.sqlite"
    settings = Settings(database=database, **settings)
    return leave_unsynced(Store.open(settings, clocks.wall, clocks.steady))


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def sqlite(tmp_path, clocks):
    new_database(tmp_path)
    store = a_store(tmp_path, clocks)
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
def test_the_database_stands_where_the_states_say(sqlite, clocks, auto, events):
    """The same events go to the store and to the pure functions; the wall clock jumps meanwhile,
    which changes nothing."""
    store, times = sqlite, {"seconds": 30.0, "keep": 600.0}
    job, model, keys, word = submit(store, auto), Standing(auto=auto), [], clocks.steady()
    for event in events:
        silent, heard = clocks.steady() - word, False
        before = model
        try:
            match event:
                case ("wait", pause):
                    clocks.go(pause)
                case ("jump", seconds):
                    clocks.wall.go(seconds)
                case ("approve",):
                    both(lambda: store.jobs.approve(job), lambda m=model: job_states.approve(m))
                    model = job_states.approve(model)
                case ("cancel",):

                    def cancelled(m=model, silent=silent):
                        return job_states.cancel(m, silent=m.held and silent >= 30)

                    both(lambda: store.jobs.cancel(job), cancelled)
                    model = cancelled()
                case ("lease", agent):
                    lease = store.jobs.lease(agent)
                    if model.held and (
                        model.agent == agent or (model.free_for(agent, silent, **times))
                    ):
                        model = job_states.lose(model)
                    if lease is None:
                        model = model if model.state in ENDED or before.agent == agent else before
                        continue
                    assert before.agent == agent or before.free_for(agent, silent, **times)
                    keys.append(lease.key)
                    model = job_states.lease(model, agent=agent, key=lease.key, expires=0.0)
                    assert lease.number == model.attempts
                case ("say", state, late) if keys:
                    key = keys[0 if late else -1]
                    plan = PLAN if state == "planned" else None
                    told = JobProgress(key=key, state=state, plan=plan)

                    def step(m=model, key=key, state=state, plan=plan):
                        return job_states.report(
                            m, key=key, expires=0.0, state=state, plan=plan is not None
                        )

                    both(lambda told=told: store.jobs.progress(job, told), step)
                    model, heard = step(), True  # a word that is refused is none
        except Conflict:
            pass
        if model != before or heard:
            word = clocks.steady()
        stands(store, job, model)
    if store.jobs.get(job).state not in ENDED:
        store.jobs.cancel(job)
        clocks.go(100.0)
        assert store.jobs.cancel(job).state == "cancelled"


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
    assert (found.has_plan, found.trained) == (model.has_plan, model.trained)


def test_a_job_that_nobody_takes_says_why(store):
    """Agents of the fixture allow the defaults only."""
    store.clock.go(1000.0)  # nobody has been heard of since
    first = submit(store)
    assert "no agent is there" in store.jobs.get(first).waiting
    store.agents.introduce(AgentIntroduction(name="one", allow=()), "me")
    assert store.jobs.get(first).waiting is None  # it will have it in a moment
    birds = Job(data="imagefolder:/sets/birds")
    refused = store.jobs.submit("a", birds, auto=True, owner="me")
    says = "agent one does not carry it out: data=imagefolder:/sets/birds is not"
    assert says in refused.waiting
    store.agents.introduce(AgentIntroduction(name="two", allow=()), "me")
    assert "agents one, two do not carry it out" in store.jobs.get(refused.id).waiting
    assert store.jobs.lease("one").job.id == first
    assert store.jobs.get(first).waiting is None
    second = submit(store)
    store.clock.go(1.0)  # of two of one moment either may be the first
    third = submit(store)
    assert store.jobs.lease("two").job.id == second
    assert store.jobs.get(third).waiting == "the agents that carry it out have another job"
    listed = store.jobs.list()
    assert {first, refused.id, second, third} <= {one.id for one in listed}
    assert all(one.waiting == store.jobs.get(one.id).waiting for one in listed)


# ------------------------------------------------------------------------ who loses a job, and when


def trains(store, agent="one"):
    """A job that an agent trains, and its lease."""
    job = submit(store)
    lease = store.jobs.lease(agent)
    assert lease.job.id == job
    store.jobs.progress(job, JobProgress(key=lease.key, state="planned", plan=PLAN))
    store.jobs.progress(job, JobProgress(key=lease.key, state="training"))
    return job, lease


def test_a_clock_that_jumps_takes_no_job_from_a_healthy_agent(sqlite, clocks):
    job, lease = trains(sqlite)
    for seconds in (86_400.0, -2 * 86_400.0, 5000.0):
        clocks.wall.go(seconds)
        sqlite.agents.introduce(AgentIntroduction(name="two", allow=()), "me")
        assert sqlite.jobs.lease("two") is None
        assert not sqlite.jobs.get(job).silent
        assert sqlite.jobs.progress(job, JobProgress(key=lease.key)).state == "training"


def test_a_database_that_was_locked_takes_no_job_from_a_healthy_agent(sqlite, clocks):
    """Nobody could be heard meanwhile; whoever asks first when it is over gets nobody's job."""
    job = submit(sqlite)
    lease = sqlite.jobs.lease("one")
    for _ in range(20):  # as the service does all the time
        clocks.go(1.0)
        sqlite.jobs.tick()
        sqlite.jobs.progress(job, JobProgress(key=lease.key))
    clocks.go(34.0)
    assert sqlite.jobs.lease("two") is None
    sqlite.jobs.progress(job, JobProgress(key=lease.key))
    for _ in range(29):  # and it is silent from now on
        clocks.go(1.0)
        sqlite.jobs.tick()
        assert sqlite.jobs.lease("two") is None
    clocks.go(1.0)
    assert sqlite.jobs.lease("two").job.id == job
    with pytest.raises(Conflict, match="was lost"):
        sqlite.jobs.progress(job, JobProgress(key=lease.key))


def test_a_service_that_starts_again_leaves_each_agent_a_whole_lease(sqlite, clocks, tmp_path):
    job = submit(sqlite)
    lease = sqlite.jobs.lease("one")
    clocks.go(3600.0)
    again = a_store(tmp_path, clocks)
    assert again.jobs.lease("two") is None
    clocks.go(29.0)
    assert again.jobs.lease("two") is None
    again.jobs.progress(job, JobProgress(key=lease.key))
    again.close()


@pytest.mark.slow
def test_services_that_share_a_database_hear_of_each_others_agents(sqlite, clocks, tmp_path):
    job = submit(sqlite)
    lease = sqlite.jobs.lease("one")
    other = a_store(tmp_path, clocks)
    for _ in range(100):
        clocks.go(2.0)
        sqlite.jobs.progress(job, JobProgress(key=lease.key))
        other.jobs.tick()
        assert other.jobs.lease("two") is None
    for _ in range(14):
        clocks.go(2.0)
        other.jobs.tick()
        assert other.jobs.lease("two") is None
    clocks.go(2.0)
    assert other.jobs.lease("two").job.id == job
    other.close()


def test_blips_of_a_network_lose_nothing_however_many_there_are(sqlite, clocks):
    """Another agent waits for work all the time; the training is kept, and goes on."""
    job, lease = trains(sqlite)
    for _ in range(20):
        clocks.go(300.0)
        assert sqlite.jobs.lease("two") is None
        assert sqlite.jobs.get(job).silent
        orders = sqlite.jobs.progress(job, JobProgress(key=lease.key))
        assert (orders.state, orders.stop) == ("training", False)
        assert not sqlite.jobs.get(job).silent
    assert sqlite.jobs.get(job).attempts == 1
    assert sqlite.jobs.progress(job, JobProgress(key=lease.key, state="done")).state == "done"


def test_a_training_waits_for_its_agent_as_long_as_it_is_told_to(sqlite, clocks):
    for told, keep in ((None, 600.0), (60.0, 60.0), (0.0, 0.0)):
        sqlite.agents.introduce(AgentIntroduction(name="one", allow=()), "me")
        job = sqlite.jobs.submit("a", Job(), auto=True, owner="me", keep_seconds=told).id
        lease = sqlite.jobs.lease("one")
        sqlite.jobs.progress(job, JobProgress(key=lease.key, state="planned", plan=PLAN))
        sqlite.jobs.progress(job, JobProgress(key=lease.key, state="training"))
        clocks.go(29.0 + keep)
        assert sqlite.jobs.lease("two") is None
        waiting = sqlite.jobs.get(job).waiting
        assert keep < 1 or "is silent for" in waiting
        clocks.go(1.0)
        theirs = sqlite.jobs.lease("two")
        assert (theirs.job.id, theirs.number) == (job, 2)
        with pytest.raises(Conflict, match="was lost"):
            sqlite.jobs.progress(job, JobProgress(key=lease.key))
        sqlite.jobs.progress(job, JobProgress(key=theirs.key, state="done"))


def test_a_training_that_was_given_back_waits_for_the_agent_whose_folder_has_it(sqlite, clocks):
    job, lease = trains(sqlite)
    sqlite.jobs.progress(job, JobProgress(key=lease.key, state="queued"))
    clocks.go(500.0)
    assert sqlite.jobs.lease("two") is None
    assert "agent one has the training so far and is not there" in sqlite.jobs.get(job).waiting
    assert sqlite.jobs.lease("one").job.id == job
    lease = sqlite.jobs.lease("one")  # that answer did not arrive
    assert (lease.number, sqlite.jobs.get(job).state) == (3, "training")
    sqlite.jobs.progress(job, JobProgress(key=lease.key, state="queued"))
    clocks.go(600.0)
    assert sqlite.jobs.lease("two").job.id == job


def test_answers_to_leases_that_never_arrive_fail_no_job(sqlite):
    job = submit(sqlite)
    numbers = [sqlite.jobs.lease("one").number for _ in range(10)]
    assert numbers == list(range(1, 11))
    assert sqlite.jobs.get(job).state == "probing"


def test_an_agent_that_cannot_carry_a_job_out_does_not_get_it_again(sqlite, clocks):
    job = submit(sqlite)
    for agent in AGENTS[:2]:
        lease = sqlite.jobs.lease(agent)
        reason = "optimizer = 'lion': input should be 'sgd'\nor 'adamw'"
        told = JobProgress(key=lease.key, state="queued", reason=reason)
        assert sqlite.jobs.progress(job, told).state == "queued"
        assert sqlite.jobs.progress(job, told).state == "queued"  # the answer was lost
        assert sqlite.jobs.lease(agent) is None
    assert sqlite.jobs.get(job).waiting is None  # the third agent may
    clocks.go(31.0)
    for agent in AGENTS[:2]:
        assert sqlite.jobs.lease(agent) is None
    says = "agents one, two do not carry it out: optimizer = 'lion': input should be 'sgd' or"
    assert says in sqlite.jobs.get(job).waiting
    assert sqlite.jobs.get(job).state == "queued"
    sqlite.agents.introduce(AgentIntroduction(name="one", allow=()), "me")  # with that package now
    assert sqlite.jobs.lease("one").job.id == job


def test_an_agent_that_begins_anew_again_and_again_without_a_word_keeps_no_job_from_others(sqlite):
    """As one of another version, which cannot read the job and is started again at once."""
    job, begun = submit(sqlite), 0
    while sqlite.jobs.lease("one") is not None and begun < 10:
        sqlite.agents.introduce(AgentIntroduction(name="one", allow=()), "me")
        begun += 1
    assert begun == 3
    theirs = sqlite.jobs.lease("two")
    assert theirs.job.id == job
    sqlite.jobs.progress(job, JobProgress(key=theirs.key))


def test_a_name_is_free_for_another_folder_once_its_job_is_kept_no_longer(sqlite, clocks):
    """A container that is made again has the same name and a new folder."""
    first, second = (
        AgentIntroduction(name="named", allow=(), folder=str(uuid.uuid4())) for _ in range(2)
    )
    sqlite.agents.introduce(first, "me")
    job, lease = trains(sqlite, "named")
    clocks.go(31.0)
    with pytest.raises(Conflict, match="kept for agent named, which has another folder, for 9 min"):
        sqlite.agents.introduce(second, "me")
    clocks.go(600.0)
    sqlite.agents.introduce(second, "me")
    theirs = sqlite.jobs.lease("named")
    assert (theirs.job.id, theirs.number) == (job, 2)
    with pytest.raises(Conflict, match="was lost"):
        sqlite.jobs.progress(job, JobProgress(key=lease.key))


def test_a_training_that_lies_at_the_service_is_kept_for_nobody(sqlite, clocks):
    job, lease = trains(sqlite)
    sqlite.jobs.progress(job, JobProgress(key=lease.key, state="queued", sent=True))
    clocks.go(31.0)  # so long it is left to who had it
    assert sqlite.jobs.lease("two").job.id == job


def test_the_run_of_a_job_that_goes_on_elsewhere_is_told_to_have_stopped(service, clock):
    store = service.store
    for agent in ("one", "two"):
        store.agents.introduce(AgentIntroduction(name=agent, allow=()), "report")
    job, lease = trains(store)
    runs = [service.a_run(job=job), service.a_run(job=job)]
    store.jobs.progress(job, JobProgress(key=lease.key, run=runs[0]))
    clock.go(1000.0)
    assert store.runs.get(runs[0]).state == "silent"
    theirs = store.jobs.lease("two")
    store.jobs.progress(job, JobProgress(key=theirs.key, run=runs[1]))
    found = store.runs.get(runs[0])
    assert (found.state, found.error) == (
        "stopped",
        "agent two goes on with its job, in a run of its own",
    )
    assert "agent two goes on with its job" in service.sign_in("read").get(f"/runs/{runs[0]}").text


def test_an_agent_ends_no_run_that_is_not_of_its_job_by_naming_it(service):
    store = service.store
    store.agents.introduce(AgentIntroduction(name="one", allow=()), "report")
    job, lease = trains(store)
    others, own = service.a_run(owner="admin"), service.a_run(job=job)
    for run in (others, own):
        store.jobs.progress(job, JobProgress(key=lease.key, run=run))
    assert store.runs.get(others).state == "running"


def test_an_agent_that_asks_in_a_former_process_is_told_to_end(sqlite):
    first, second = (str(uuid.uuid4()) for _ in range(2))
    for session in (first, second):
        told = AgentIntroduction(name="one", allow=(), session=session)
        sqlite.agents.introduce(told, "me")
    job = submit(sqlite)
    with pytest.raises(Conflict, match="this one ends"):
        sqlite.jobs.lease("one", first)
    assert sqlite.jobs.lease("one", second).job.id == job
    with pytest.raises(Conflict, match="this one ends"):
        sqlite.jobs.lease("one", first)
    assert sqlite.jobs.get(job).attempts == 1


# ---------------------------------------------------------------------------------- the right agent


def offers(store, name, **offer):
    introduction = AgentIntroduction(name=name, allow=(), offer=Offer(**offer))
    store.agents.introduce(introduction, "me")


@pytest.mark.parametrize(
    ("keys", "needs", "offer", "says"),
    [
        (
            {"device": "cuda", "workers": 2},
            {},
            {"gpus": 2},
            "2 GPUs; agents one, three, two offer none",
        ),
        ({"device": "cuda"}, {}, {"gpus": 1}, "1 GPU; "),
        ({}, {"gpus": 4}, {"gpus": 8}, "4 GPUs; "),
        ({}, {"labels": ("room-2",)}, {"labels": ("room-2", "big")}, "the label room-2; "),
        ({}, {"memory": 16 * GIB}, {"memory": 17 * GIB}, "16 GiB of memory; "),
        (
            {"device": "cuda"},
            {"memory": 16 * GIB},
            {"gpus": 1, "gpu_memory": 16 * GIB},
            "1 GPU; ",
        ),
    ],
)
def test_a_job_goes_to_an_agent_that_offers_what_it_needs(sqlite, keys, needs, offer, says):
    told = sqlite.jobs.submit("a", Job(**keys), auto=True, owner="me", needs=Needs(**needs))
    assert told.waiting.startswith(f"no agent offers {says}")
    assert sqlite.jobs.lease("one") is None
    offers(sqlite, "four", **offer)
    assert sqlite.jobs.get(told.id).waiting is None
    assert sqlite.jobs.lease("one") is None
    assert sqlite.jobs.lease("four").job.id == told.id


def test_the_queue_says_what_agents_offer_instead(sqlite, clocks):
    clocks.go(1000.0)
    for name in ("a", "b"):
        offers(sqlite, name, gpus=1, gpu_memory=8 * GIB, max_workers=1)
    job = Job(device="cuda", workers=2)
    told = sqlite.jobs.submit("a", job, auto=True, owner="me")
    assert told.waiting == "no agent offers 2 GPUs; agents a, b offer 1"
    assert [one.waiting for one in sqlite.jobs.list()] == [told.waiting]
    offers(sqlite, "c")
    told = sqlite.jobs.get(told.id)
    assert told.waiting == "no agent offers 2 GPUs; agents a, b offer 1, agent c offers none"
    large = Job(device="cuda", workers=1)
    told = sqlite.jobs.submit("b", large, auto=True, owner="me", needs=Needs(memory=16 * GIB))
    assert told.waiting == (
        "no agent offers 16 GiB of memory on each GPU; agents a, b offer 8 GiB; "
        "no agent offers 1 GPU; agent c offers none"
    )
    four = sqlite.jobs.submit("c", Job(workers=4), auto=True, owner="me")
    assert four.waiting is None  # c takes any number
    offers(sqlite, "c", max_workers=2)
    assert sqlite.jobs.get(four.id).waiting == (
        "no agent offers 4 workers; agents a, b offer 1, agent c offers 2"
    )


def test_a_simulated_cluster_needs_no_gpus(sqlite):
    job = Job(device="cuda", workers=8, launch="virtual")
    sqlite.jobs.submit("a", job, auto=True, owner="me")
    assert sqlite.jobs.lease("one") is not None


# ----------------------------------------------------------------------------------- a full history


class Statements:
    """All that is asked of a database, and how SQLite goes about it."""

    def __init__(self, store):
        self.engine, self.asked = store.database.engine, []

    def __enter__(self):
        sqlalchemy.event.listen(self.engine, "before_cursor_execute", self._note)
        return self

    def __exit__(self, *_):
        sqlalchemy.event.remove(self.engine, "before_cursor_execute", self._note)

    def _note(self, connection, cursor, statement, parameters, context, many):
        self.asked.append((statement, parameters))

    def ways(self):
        """How each of them is carried out, a line for each step."""
        found = []
        with self.engine.connect() as connection:
            for statement, parameters in self.asked:
                if statement.lstrip().upper().startswith(("SELECT", "UPDATE", "DELETE")):
                    rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
                    found += [(row[-1], statement) for row in rows]
        return found


def test_a_full_history_is_never_read_as_a_whole(sqlite):
    """Neither by an agent that asks nor for a list; only jobs that have not ended are sorted."""
    ended = submit(sqlite)
    sqlite.jobs.cancel(ended)
    job, lease = trains(sqlite)
    submit(sqlite)
    with Statements(sqlite) as said:
        sqlite.jobs.lease("two")
        sqlite.jobs.lease("three")
        sqlite.jobs.progress(job, JobProgress(key=lease.key))
        sqlite.jobs.tick()
        sqlite.jobs.list(50)
        sqlite.jobs.list(50, ended)
        sqlite.jobs.list(50, None, "cancelled")
        sqlite.jobs.list(50, ended, "cancelled")
        sqlite.jobs.going_and_waiting()
        sqlite.jobs.get(job)
        sqlite.agents.list()
        submit(sqlite)
    ways = said.ways()
    assert len(ways) > 20
    for way, statement in ways:
        if "SCAN jobs" in way:
            assert "USING INDEX ix_jobs_" in way, statement
            assert "LIMIT" in statement, statement
        if "TEMP B-TREE" in way and "ORDER BY" in way:
            assert "ended IS NULL" in statement or "agents" in statement, (way, statement)


def test_one_statement_tells_all_agents_with_their_jobs(sqlite):
    jobs = {agent: trains(sqlite, agent)[0] for agent in AGENTS}
    with Statements(sqlite) as said:
        found = sqlite.agents.list()
    assert {one.name: one.job for one in found} == jobs
    assert len(said.asked) <= 2  # the first one begins a transaction


def test_jobs_that_go_on_and_plans_that_wait_are_counted_without_reading_jobs(sqlite):
    trains(sqlite)
    job = submit(sqlite, auto=False)
    lease = sqlite.jobs.lease("two")
    assert lease.job.id == job
    assert sqlite.jobs.going_and_waiting() == (2, 0)
    sqlite.jobs.progress(job, JobProgress(key=lease.key, state="planned", plan=PLAN))
    assert sqlite.jobs.going_and_waiting() == (1, 1)
    sqlite.jobs.approve(job)
    assert sqlite.jobs.going_and_waiting() == (1, 0)
