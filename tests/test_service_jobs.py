"""Jobs and agents through the service: stored, handed out, heard of, audited."""

from __future__ import annotations

import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text, update

import batchwright as bw
from artifacts import over_postgresql
from batchwright.records.agent_rules import Offer
from batchwright.records.documents import change_job, record_text
from batchwright.records.service import AgentIntroduction, JobProgress
from batchwright.service import plan_answers
from batchwright.service.database import tables
from batchwright.service.problems import Conflict, NotFound, ServiceProblem, TooMany
from batchwright.service.settings import DAY, Settings
from batchwright.service.store import Store
from batchwright.service.store.agents import FORGOTTEN_SECONDS
from clients import SECONDS as WAIT
from clients import wait_until
from samples import make_data, make_job, make_plan, make_profile, make_step
from services import leave_unsynced, new_database

SECONDS = 30.0  # of a lease, by default


class Desk:
    """Submits, introduces, leases and reports; answers as plain values."""

    def __init__(self, store):
        self.store = store

    def submit(self, auto=False, name="digits", **keys):
        job = change_job(make_job(), keys)
        told = self.store.jobs.submit(name, job, auto=auto, owner="submit")
        return told.model_dump(mode="json")

    def agent(self, name="one", allow=()):
        introduction = AgentIntroduction(name=name, allow=tuple(allow))
        return self.store.agents.introduce(introduction, "report").model_dump(mode="json")

    def lease(self, name="one"):
        lease = self.store.jobs.lease(name)
        return None if lease is None else lease.model_dump(mode="json")

    def say(self, lease, state=None, status=200, **more):
        told = JobProgress(key=lease["key"], state=state, **more)
        return self._done(lambda: self.store.jobs.progress(lease["job"]["id"], told), status)

    def get(self, job):
        return self.store.jobs.get(job["id"]).model_dump(mode="json")

    def post(self, job, verb, status=200):
        return self._done(lambda: getattr(self.store.jobs, verb)(job["id"]), status)

    def _done(self, step, status):
        if status == 200:
            return step().model_dump(mode="json")
        with pytest.raises(ServiceProblem) as refusal:
            step()
        assert refusal.value.status == status
        return {"detail": refusal.value.detail}

    def planned(self, auto=False, agent="one"):
        """A job up to its plan, and the lease of that."""
        self.agent(agent)
        self.submit(auto)
        lease = self.lease(agent)
        self.say(lease, "planned", profile=PROFILE, plan=PLAN)
        return self.get(lease["job"]), lease


class Client(Desk):
    """The same through the service."""

    def __init__(self, service):
        super().__init__(service.store)
        self.service = service

    def submit(self, auto=False, name="digits", scope="submit", **keys):
        told = {"name": name, "auto": auto, "job": make_job().model_dump(mode="json") | keys}
        return self._told(self.service.post(scope, "/v1/jobs", json=told), 201)

    def agent(self, name="one", allow=()):
        told = {"name": name, "allow": list(allow)}
        return self._told(self.service.put("report", f"/v1/agents/{name}", json=told))

    def lease(self, name="one"):
        answer = self.service.post("report", f"/v1/agents/{name}/lease")
        return None if answer.status_code == 204 else self._told(answer)

    def say(self, lease, state=None, status=200, **more):
        told = {"key": lease["key"], "state": state} | more
        path = f"/v1/jobs/{lease['job']['id']}/progress"
        return self._told(self.service.post("report", path, json=told), status)

    def get(self, job):
        return self._told(self.service.get("read", f"/v1/jobs/{job['id']}"))

    def post(self, job, verb, status=200, scope="submit"):
        return self._told(self.service.post(scope, f"/v1/jobs/{job['id']}/{verb}"), status)

    def _told(self, answer, status=200):
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture
def store(tmp_path, clock):
    """A store without an app, for what needs none."""
    store = leave_unsynced(Store.open(Settings(database=new_database(tmp_path)), clock))
    yield store
    store.close()


@pytest.fixture
def jobs(store):
    return Desk(store)


@pytest.fixture
def web(service):
    return Client(service)


MADE = bw.plan([make_profile()])
PLAN = MADE.model_dump(mode="json")
PROFILE = make_profile().model_dump(mode="json")


@pytest.mark.parametrize("through", ["jobs", "web"])
def test_the_whole_way_with_approval(through, request):
    jobs = request.getfixturevalue(through)
    job, first = jobs.planned()
    assert first["job"]["state"] == "probing"
    assert first["seconds"] == SECONDS
    assert (job["state"], job["approved"], job["has_profile"], job["has_plan"]) == (
        *("planned", False),
        *(True, True),
    )
    assert jobs.lease() is None
    assert jobs.post(job, "approve")["approved"]
    again = jobs.lease()
    assert again["job"]["state"] == "training"
    assert again["plan"] == PLAN
    assert again["profile"] == PROFILE
    run = str(uuid.uuid4())
    assert jobs.say(again, run=run) == {"state": "training", "stop": False}
    assert jobs.get(job)["run"] == run
    assert jobs.say(again, "done") == {"state": "done", "stop": False}
    done = jobs.get(job)
    assert (done["state"], done["agent"], done["attempts"]) == ("done", "one", 2)
    assert jobs.lease() is None


def test_a_job_whose_plan_cannot_be_read_holds_up_no_other_and_is_logged_once(
    jobs, store, clock, caplog
):
    job, _ = jobs.planned()
    jobs.post(job, "approve")
    with store.database.writing() as connection:
        gone = json.dumps(PLAN | {"update": "lion"})
        connection.execute(update(tables.jobs).values(plan=gone))
    clock.go(1.0)
    other = jobs.submit()
    assert jobs.lease()["job"]["id"] == other["id"]
    assert jobs.lease()["job"]["id"] == other["id"]
    assert [record.args[0] for record in caplog.records] == [job["id"]]


def test_with_auto_one_lease_goes_from_the_probe_to_the_end(jobs):
    job, lease = jobs.planned(auto=True)
    assert job["state"] == "planned"
    assert jobs.say(lease, "training")["state"] == "training"
    assert jobs.say(lease, "done")["state"] == "done"
    assert jobs.get(job)["attempts"] == 1


def test_documents_come_back_as_the_files_that_the_verbs_write(web, service):
    job, _ = web.planned()
    for what, record in (("plan", MADE), ("profile", make_profile())):
        answer = service.get("read", f"/v1/jobs/{job['id']}/{what}")
        assert answer.text == record_text(record)
    other = web.submit()
    for what in ("plan", "profile"):
        assert service.get("read", f"/v1/jobs/{other['id']}/{what}").status_code == 404


def test_a_job_is_stored_with_all_its_keys(jobs):
    job = jobs.submit(epochs=3, goal={"deadline": 60}, probe={"budget": 5})["job"]
    assert (job["epochs"], job["goal"]["deadline"], job["probe"]["budget"]) == (3, 60.0, 5.0)
    assert job["network"] == "resnet8"


WRONG_KEYS = (
    ({"epoch": 3}, "unknown job key 'epoch': did you mean 'epochs'?"),
    ({"epochs": 0}, "job key epochs = 0"),
    ({"goal": {"kinds": "[&a {kind: x, count: 1}, *a]"}}, "not a list of items"),
    ({"goal.kinds": "[" * 3000}, "not a list of items"),
    ({"epochs": [[1]]}, "job key epochs"),
    ({"launch": "slurm"}, "launch=slurm: an agent trains on its own machine"),
    ({"goal.prices": "prices.csv"}, "an agent reads no file of prices"),
)


def test_wrong_keys_are_refused_in_a_line(service):
    for keys, says in WRONG_KEYS:
        answer = service.post("submit", "/v1/jobs", json={"name": "a", "job": keys})
        assert answer.status_code == 422
        assert says in answer.json()["detail"]
        assert "\n" not in answer.json()["detail"]
    assert service.get("read", "/v1/jobs").json() == []


def test_a_job_that_every_list_would_hold_is_not_endless(service):
    told = {"name": "x", "job": {"data": "imagefolder:/sets/" + 200_000 * "a"}}
    answer = service.post("submit", "/v1/jobs", json=told)
    assert answer.status_code == 422
    assert "characters, where 131,072 are taken" in answer.json()["detail"]


def test_a_name_without_letters_or_too_long_is_refused(service):
    for name in ("", "a\x00b", "x" * 121):
        answer = service.post("submit", "/v1/jobs", json={"name": name, "job": {}})
        assert answer.status_code == 422


def test_jobs_are_listed_newest_first_page_by_page_and_by_state(web, service, clock):
    names = ["a", "b", "c", "d"]
    for name in names:
        clock.go(1)
        web.submit(name=name)

    def listed(**query):
        return service.get("read", "/v1/jobs", params=query).json()

    assert [job["name"] for job in listed()] == names[::-1]
    first = listed(limit=3)
    assert [job["name"] for job in listed(before=first[-1]["id"])] == ["a"]
    web.post(first[0], "cancel")
    assert [job["name"] for job in listed(state="cancelled")] == ["d"]
    assert [job["name"] for job in listed(state="queued")] == ["c", "b", "a"]
    unknown = service.get("read", "/v1/jobs", params={"before": str(uuid.uuid4())})
    assert unknown.status_code == 404


def test_an_agent_gets_the_oldest_job_that_its_rules_name(jobs, clock):
    for data in ("cifar10:/sets/c", "digits"):
        clock.go(1)
        jobs.submit(data=data)
    jobs.agent("small")
    assert jobs.lease("small")["job"]["job"]["data"] == "digits"
    jobs.agent("large", ["data=cifar10:/sets/*"])
    assert jobs.lease("large")["job"]["job"]["data"] == "cifar10:/sets/c"
    assert jobs.lease("large")["job"]["attempts"] == 2  # it had forgotten


def test_what_no_agent_allows_waits(jobs):
    jobs.submit(network="torchvision.models:resnet50")
    jobs.submit(weights="/etc/passwd")
    jobs.agent()
    assert jobs.lease() is None


def test_who_asks_in_vain_keeps_nobody_from_writing(jobs, store, clock, monkeypatch):
    """Every idle agent asks every two seconds; that it is there is noted now and then."""
    jobs.submit(network="torchvision.models:resnet50")
    jobs.agent()
    writing, writes = store.database.writing, []

    def noted():
        writes.append(clock())
        return writing()

    monkeypatch.setattr(store.database, "writing", noted)
    for _ in range(30):
        clock.go(2)
        assert jobs.lease() is None
        assert clock() - store.agents.list()[0].seen < SECONDS / 3
    assert 6 <= len(writes) <= 12
    job = jobs.submit()
    assert jobs.lease()["job"]["id"] == job["id"]
    assert jobs.get(job)["agent"] == "one"


KEPT = 600.0  # a training, by default


def test_a_silent_agent_loses_its_job_to_another_which_goes_on_with_what_there_is(jobs, clock):
    job, lease = jobs.planned(auto=True)
    jobs.say(lease, "training")
    jobs.agent("two")
    clock.go(SECONDS + KEPT - 1)
    assert jobs.get(job)["silent"]
    assert jobs.lease("two") is None
    jobs.say(lease)
    assert not jobs.get(job)["silent"]
    clock.go(SECONDS + KEPT)
    assert jobs.get(job)["state"] == "training"
    again = jobs.lease("two")
    assert (again["job"]["id"], again["job"]["state"]) == (job["id"], "training")
    assert (again["number"], again["plan"]) == (2, PLAN)
    assert "lost" in jobs.say(lease, "done", status=409)["detail"]
    assert "lost" in jobs.say(lease, status=409)["detail"]
    assert jobs.say(again, "done")["state"] == "done"


def test_a_job_that_three_agents_did_not_survive_has_failed(jobs, clock, store):
    job = jobs.submit()
    jobs.agent()
    for _ in range(3):
        jobs.say(jobs.lease())
        clock.go(SECONDS)
    assert jobs.lease() is None
    failed = jobs.get(job)
    assert failed["state"] == "failed"
    assert "lost its agent 3 times without getting any further" in failed["error"]
    assert [one.id for one in store.jobs.list(state="failed")] == [job["id"]]


def test_an_agent_that_was_killed_and_comes_back_gets_its_job_again_with_another_key(jobs):
    job, lease = jobs.planned(auto=True)
    again = jobs.lease()
    assert again["job"]["id"] == job["id"]
    assert again["key"] != lease["key"]
    jobs.say(lease, status=409)
    jobs.say(again)


def test_a_job_is_left_to_the_agent_that_had_it_while_that_is_there_and_free(jobs, clock):
    job, _ = jobs.planned()
    jobs.agent("two")
    jobs.post(job, "approve")
    assert jobs.lease("two") is None
    assert jobs.lease("one")["job"]["id"] == job["id"]


def test_a_job_goes_to_another_agent_where_its_own_is_gone_or_busy_or_may_not(jobs, clock):
    job, _ = jobs.planned()
    jobs.agent("two")
    jobs.post(job, "approve")
    clock.go(SECONDS + 1)  # the first one does not ask any more
    lease = jobs.lease("two")
    assert lease["job"]["id"] == job["id"]
    jobs.say(lease, "queued")
    clock.go(KEPT)
    jobs.agent("two", ["data=cifar10:*"])
    jobs.agent("three")
    lease = jobs.lease("three")
    assert lease["job"]["id"] == job["id"]
    jobs.say(lease, "queued")
    other = jobs.submit()
    clock.go(1)
    own = jobs.lease("three")
    assert own["job"]["id"] == job["id"], "its own first"
    jobs.agent("four")
    assert jobs.lease("four")["job"]["id"] == other["id"]


def test_cancel_reaches_the_agent_with_its_next_word(jobs):
    job, lease = jobs.planned(auto=True)
    told = jobs.post(job, "cancel")
    assert (told["state"], told["cancelling"]) == ("planned", True)
    assert jobs.say(lease)["stop"]
    assert jobs.say(lease, "cancelled") == {"state": "cancelled", "stop": False}
    assert not jobs.get(job)["cancelling"]


def test_cancel_ends_a_job_whose_agent_is_gone(jobs, store, clock):
    job, _ = jobs.planned(auto=True)
    jobs.post(job, "cancel")
    clock.go(SECONDS)
    store.jobs.tick()
    assert jobs.get(job)["state"] == "cancelled"
    job, _ = jobs.planned(auto=True)
    clock.go(SECONDS)
    assert jobs.post(job, "cancel")["state"] == "cancelled"


def test_cancelling_twice_is_once_and_what_is_done_is_not_cancelled(jobs):
    job = jobs.submit()
    assert jobs.post(job, "cancel") == jobs.post(job, "cancel")
    job, lease = jobs.planned(auto=True)
    jobs.say(lease, "training")
    jobs.say(lease, "done")
    assert "done already" in jobs.post(job, "cancel", status=409)["detail"]
    assert jobs.get(job)["state"] == "done"


def test_a_plan_cannot_be_changed_by_repeating_the_message_that_it_came_with(jobs, store):
    job, lease = jobs.planned()
    jobs.post(job, "approve")
    other = make_plan(update="adamw").model_dump(mode="json")
    assert jobs.say(lease, "planned", plan=other)["state"] == "planned"
    assert store.jobs.plan(job["id"]) == MADE


def test_a_plan_that_was_approved_is_not_replaced_by_who_trains_it(jobs, store):
    job, _ = jobs.planned()
    jobs.post(job, "approve")
    lease = jobs.lease()
    other = make_profile(steps=()).model_dump(mode="json")
    assert jobs.say(lease, profile=other, plan=make_plan(update="adamw"))["state"] == "training"
    assert store.jobs.plan(job["id"]) == MADE
    assert store.jobs.profile(job["id"]) == make_profile()


def grown(document, **changes):
    """A document whose job has other keys."""
    return document | {"job": document["job"] | changes}


@pytest.mark.parametrize(
    "change",
    [
        {"network": "os:system"},
        {"weights": "/etc/passwd"},
        {"workers": 64},
        pytest.param({"data": "cifar10:/"}, marks=pytest.mark.slow),
        pytest.param({"epochs": 1_000_000}, marks=pytest.mark.slow),
        pytest.param({"seed": 1}, marks=pytest.mark.slow),
        pytest.param({"checkpoint_seconds": 1e9}, marks=pytest.mark.slow),
        pytest.param({"restarts": 9}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_profile_of_another_job_is_refused_whichever_key_differs(web, change):
    web.agent()
    job = web.submit()
    told = web.say(web.lease(), status=422, profile=grown(PROFILE, **change))
    key, value = next(iter(change.items()))
    assert told["detail"].startswith(f"a profile that is not of this job: it has {key}={value!r}")
    assert not web.get(job)["has_profile"]


def stages(**changes):
    return [one | changes for one in PLAN["stages"]]


@pytest.mark.parametrize(
    "change",
    [
        {"stages": stages(epochs=1_000_000)},
        pytest.param({"stages": stages(local_batch_sizes=[1] * 64)}, marks=pytest.mark.slow),
        pytest.param({"stages": stages(learning_rate=1e3)}, marks=pytest.mark.slow),
        {"update": "adamw"},
        pytest.param({"server": None, "precision": "float32"}, marks=pytest.mark.slow),
        pytest.param({"job": PLAN["job"] | {"epochs": 1_000_000}}, marks=pytest.mark.slow),
        {"job": PLAN["job"] | {"network": "os:system"}},
        {"network": PLAN["network"] | {"parameters": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_plan_that_planning_does_not_make_of_its_profile_is_refused(web, change):
    """An agent's token alone must not have another agent train whatever it likes."""
    web.agent()
    job = web.submit(auto=True)
    lease = web.lease()
    told = web.say(lease, "planned", status=422, profile=PROFILE, plan=PLAN | change)
    assert "not the one that its profile leads to" in told["detail"]
    assert next(iter(change)) in told["detail"] or "precision" in told["detail"]
    assert not web.get(job)["has_plan"]
    assert "without the profile" in web.say(lease, status=422, plan=PLAN)["detail"]
    web.say(lease, profile=PROFILE)
    assert web.say(lease, "planned", plan=PLAN)["state"] == "planned"


def test_a_plan_whose_answer_was_lost_is_not_made_again(web, monkeypatch):
    """Where that takes longer than an agent waits for an answer, it would never end."""
    _, lease = web.planned(auto=True)
    monkeypatch.setattr(plan_answers, "planned", None)
    assert web.say(lease, "planned", profile=PROFILE, plan=PLAN)["state"] == "planned"
    assert web.say(lease, "training")["state"] == "training"


def test_what_people_read_before_they_approve_was_made_here(web, store):
    web.agent()
    job = web.submit()
    told = {
        "reasons": [one | {"why": "Trust me."} for one in PLAN["reasons"]],
        "considered": [],
        "epoch_accuracy": [],
        "stages": stages(predicted_epoch_seconds=None),
    }
    web.say(web.lease(), "planned", profile=PROFILE, plan=PLAN | told)
    assert web.service.store.jobs.plan(job["id"]) == MADE


def test_a_profile_may_fill_in_what_the_job_leaves_open(web):
    """Resolved on the measuring machine, or by a published cycle."""
    web.agent()
    open_ = {"augment": "auto", "device": "auto", "precision": "auto", "resolutions": "auto"}
    web.submit(**open_, workers="auto")
    web.say(web.lease(), "planned", profile=PROFILE, plan=PLAN)
    web.submit(resolutions="auto")
    other = PROFILE | {"data": make_data(side=64).model_dump(mode="json")}
    told = web.say(web.lease(), status=422, profile=other)
    assert "it has resolutions=(32,), where the job has resolutions=(64,)" in told["detail"]


def test_a_profile_that_no_probe_measures_makes_no_plan(web):
    web.agent()
    web.submit(workers="auto")
    many = [make_step(5000, 4).model_dump(mode="json")]
    told = web.say(web.lease(), status=422, profile=PROFILE | {"steps": many}, plan=PLAN)
    assert "5,000 workers: the service plans for 4,096" in told["detail"]


def test_an_error_is_one_printable_line(jobs):
    jobs.agent()
    job = jobs.submit()
    jobs.say(jobs.lease(), "failed", error="no disk\n \x1b[2J left")
    assert jobs.get(job)["error"] == "no disk \\x1b[2J left"


def test_a_heartbeat_is_no_change(jobs, clock):
    job, lease = jobs.planned(auto=True)
    clock.go(5)
    jobs.say(lease)
    assert jobs.get(job)["changed"] == job["changed"]
    clock.go(5)
    jobs.say(lease, "training")
    assert jobs.get(job)["changed"] == clock()


def test_too_many_open_jobs_are_refused(jobs, store):
    limits = store.settings.limits.model_copy(update={"open_jobs": 2})
    store.jobs._settings = store.settings.model_copy(update={"limits": limits})
    first = jobs.submit()
    jobs.submit()
    with pytest.raises(TooMany, match="2 jobs have not ended"):
        jobs.submit()
    jobs.post(first, "cancel")
    jobs.submit()


def test_old_ended_jobs_are_deleted_where_the_settings_say_so(jobs, store, clock):
    store.tidy()
    ended, waiting = jobs.submit(), jobs.submit()
    jobs.post(ended, "cancel")
    store.settings = store.settings.model_copy(update={"retention_days": 2.0})
    clock.go(2 * DAY + 1)
    store.tidy()
    store.tidy()
    with pytest.raises(NotFound):
        jobs.get(ended)
    assert jobs.get(waiting)["state"] == "queued"


# ---------------------------------------------------------------------------------------- agents


def test_agents_are_listed_with_what_they_work_on(web, service, clock):
    web.agent("two", ["data=digits"])
    clock.go(3)
    job, _ = web.planned(auto=True)
    one, two = service.get("read", "/v1/agents").json()
    offer = Offer().model_dump(mode="json")
    names = {"job": job["id"], "job_name": "digits"}
    assert one == {"name": "one", "allow": [], "seen": clock(), "offer": offer} | names
    nothing = {"job": None, "job_name": None, "offer": offer}
    assert two == {"name": "two", "allow": ["data=digits"], "seen": clock() - 3} | nothing


def test_no_job_waits_for_an_agent_that_has_said_that_it_ends(web, service):
    for name in ("one", "two"):
        web.agent(name)
    web.submit()
    web.say(web.lease("one"), "queued")
    assert web.lease("two") is None  # left to the agent that had it
    assert service.post("report", "/v1/agents/one/leave").status_code == 204
    assert web.lease("two") is not None


def test_a_name_belongs_to_the_token_that_took_it(web, service):
    web.agent()
    mine = web.planned(auto=True)[1]
    other = service.store.tokens.create("another", ["report"])
    headers = {"authorization": f"Bearer {other}"}
    told = {"name": "one", "allow": []}
    taken = service.client.put("/v1/agents/one", json=told, headers=headers)
    assert taken.status_code == 409
    assert "another --name" in taken.json()["detail"]
    lease = service.client.post("/v1/agents/one/lease", headers=headers)
    assert lease.status_code == 403
    path = f"/v1/jobs/{mine['job']['id']}/progress"
    assert service.client.post(path, json={"key": mine["key"]}, headers=headers).status_code == 409
    assert web.agent()["name"] == "one"


def test_an_agent_that_lost_its_job_to_one_with_another_token_is_told_so(web, service, clock):
    """It must stop: 409 says that, where 403 would say that it may not ask."""
    other = service.store.tokens.create("another", ["report"])
    headers = {"authorization": f"Bearer {other}"}
    web.agent("one")
    service.client.put("/v1/agents/two", json={"name": "two", "allow": []}, headers=headers)
    web.submit(auto=True)
    mine = web.lease("one")
    clock.go(SECONDS + 1)
    theirs = service.client.post("/v1/agents/two/lease", headers=headers).json()
    assert theirs["job"]["id"] == mine["job"]["id"]
    for state in (None, "failed"):
        assert "lease of this job was lost" in web.say(mine, state, status=409)["detail"]
    path = f"/v1/jobs/{mine['job']['id']}/progress"
    told = service.client.post(path, json={"key": theirs["key"]}, headers=headers)
    assert told.status_code == 200


FOLDERS = [str(uuid.uuid4()) for _ in range(4)]


def introduced(store, folder, name="rig-agent", *, chosen=False, owner="me"):
    told = AgentIntroduction(name=name, allow=(), folder=folder, chosen=chosen)
    return store.agents.introduce(told, owner).name


def test_names_that_nobody_chose_differ_and_stay(store):
    """By machine and folder, and where these are the same, by what the service adds."""
    names = [introduced(store, folder) for folder in FOLDERS]
    assert names == ["rig-agent", "rig-agent-2", "rig-agent-3", "rig-agent-4"]
    assert [introduced(store, folder) for folder in FOLDERS[::-1]] == names[::-1]
    assert introduced(store, FOLDERS[0], owner="another") == "rig-agent-5"
    assert len(store.agents.list()) == 5


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2])
def test_agents_introduced_at_once_keep_to_the_limit_and_get_names_of_their_own(
    service, request, monkeypatch, most
):
    monkeypatch.setattr("batchwright.service.store.agents.MAX_AGENTS", most)
    store = over_postgresql(service, request).store
    begun, go_on = threading.Event(), threading.Event()

    def hold_the_first(*_):
        if not begun.is_set():
            begun.set()
            assert go_on.wait(WAIT)

    monkeypatch.setattr(store.agents, "_note_restart", hold_the_first)

    def introduce(number):
        folder = str(uuid.UUID(int=number))
        told = AgentIntroduction(name="rig", allow=(), chosen=False, folder=folder)
        return store.agents.introduce(told, "report").name

    def waits():
        with store.database.reading() as connection:
            asked = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            return connection.execute(asked).scalar()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(introduce, 1)
        assert begun.wait(WAIT)
        second = pool.submit(introduce, 2)
        wait_until(lambda: second.done() or waits())
        go_on.set()
    assert first.result() == "rig"
    if most == 1:
        with pytest.raises(TooMany):
            second.result()
    else:
        assert second.result() == "rig-2"


def test_a_second_holder_of_a_chosen_name_is_refused(store, clock):
    introduced(store, FOLDERS[0], "rig", chosen=True)
    says = "an agent named rig is there already, from another folder: choose another --name, or"
    for folder in (FOLDERS[1], None):
        with pytest.raises(Conflict, match=says):
            introduced(store, folder, "rig", chosen=True)
    introduced(store, FOLDERS[0], "rig", chosen=True)
    clock.go(SECONDS)  # the first one is not there any more
    introduced(store, FOLDERS[1], "rig", chosen=True)
    with pytest.raises(Conflict, match=says):
        introduced(store, FOLDERS[0], "rig", chosen=True)


def test_a_name_is_not_given_away_while_its_agent_has_a_job(store, jobs, clock):
    """From then on its owner may give it to another folder, which gets the job, too."""
    introduced(store, FOLDERS[0], "rig", chosen=True)
    job = jobs.submit(auto=True)
    jobs.lease("rig")
    clock.go(SECONDS - 1)
    with pytest.raises(Conflict, match="there already"):
        introduced(store, FOLDERS[1], "rig", chosen=True)
    clock.go(1)
    with pytest.raises(Conflict, match="belongs to another token"):
        introduced(store, FOLDERS[1], "rig", chosen=True, owner="another")
    introduced(store, FOLDERS[1], "rig", chosen=True)
    assert jobs.lease("rig")["job"]["id"] == job["id"]


def test_an_agent_that_is_called_otherwise_from_now_on_keeps_its_job(store, jobs):
    introduced(store, FOLDERS[0])
    job = jobs.submit(auto=True)
    jobs.lease("rig-agent")
    introduced(store, FOLDERS[0], "rig", chosen=True)
    assert [one.name for one in store.agents.list()] == ["rig"]
    assert jobs.lease("rig")["job"]["id"] == job["id"]


def test_two_agents_of_one_machine_leave_each_others_jobs_alone(store, jobs):
    """With the machine's name for both, each took the other's until every job had failed."""
    names = [introduced(store, folder) for folder in FOLDERS[:2]]
    mine = [jobs.submit(auto=True) for _ in names]
    leases = [jobs.lease(name) for name in names]
    for _ in range(5):
        for lease in leases:
            jobs.say(lease)
    assert {lease["job"]["id"] for lease in leases} == {job["id"] for job in mine}
    assert [jobs.get(job)["attempts"] for job in mine] == [1, 1]


def test_an_agent_says_who_it_is_before_it_asks(service):
    assert service.post("report", "/v1/agents/nobody/lease").status_code == 404
    with pytest.raises(NotFound):
        service.store.jobs.lease("nobody")


def test_a_rule_that_is_none_is_refused(service):
    for rule in ("digits", "data=", "=x", "epochs=3", "DATA=x"):
        answer = service.put("report", "/v1/agents/one", json={"name": "one", "allow": [rule]})
        assert answer.status_code == 422
        assert "KEY=PATTERN" in answer.json()["detail"]


def test_a_name_is_one_part_of_an_address_and_the_same_in_the_body(service):
    for name in ("a/b", "a\n", ""):
        answer = service.put("report", "/v1/agents/a", json={"name": name, "allow": []})
        assert answer.status_code == 422
    answer = service.put("report", "/v1/agents/one", json={"name": "two", "allow": []})
    assert answer.status_code == 422


def test_an_agent_that_was_not_heard_of_for_a_month_is_forgotten(store, clock):
    agents = store.agents
    agents.introduce(AgentIntroduction(name="old", allow=()), "a")
    clock.go(FORGOTTEN_SECONDS + 1)
    agents.introduce(AgentIntroduction(name="new", allow=()), "a")
    assert [one.name for one in agents.list()] == ["new"]
    agents.introduce(AgentIntroduction(name="old", allow=()), "b")


def test_there_are_only_so_many_agents(store, monkeypatch):
    monkeypatch.setattr("batchwright.service.store.agents.MAX_AGENTS", 1)
    store.agents.introduce(AgentIntroduction(name="one", allow=()), "a")
    store.agents.introduce(AgentIntroduction(name="one", allow=()), "a")
    with pytest.raises(TooMany):
        store.agents.introduce(AgentIntroduction(name="two", allow=()), "a")


# -------------------------------------------------------------------------------- who and how often


def test_only_the_owner_or_an_admin_approves_and_cancels(web, service):
    job, _ = web.planned()
    other = service.store.tokens.create("another", ["submit"])
    for verb in ("approve", "cancel"):
        answer = service.client.post(
            f"/v1/jobs/{job['id']}/{verb}", headers={"authorization": f"Bearer {other}"}
        )
        assert answer.status_code == 403
    web.post(job, "approve", scope="admin")
    web.post(job, "cancel", scope="admin")


def test_each_write_is_audited_and_no_heartbeat(web, service):
    job, _ = web.planned()
    web.post(job, "approve")
    lease = web.lease()
    web.say(lease)
    web.say(lease, "done")
    told = [(one.who, one.action, one.subject) for one in service.store.audit.list()]
    assert told[::-1] == [
        ("report", "agent.introduce", "one"),
        ("submit", "job.submit", job["id"]),
        ("report", "job.lease", job["id"]),
        ("report", "job.planned", job["id"]),
        ("submit", "job.approve", job["id"]),
        ("report", "job.lease", job["id"]),
        ("report", "job.done", job["id"]),
    ]


def test_unknown_jobs_are_not_found(service):
    path = f"/v1/jobs/{uuid.uuid4()}"
    assert service.get("read", path).status_code == 404
    assert service.get("read", f"{path}/plan").status_code == 404
    for verb in ("approve", "cancel"):
        assert service.post("submit", f"{path}/{verb}").status_code == 404
    told = {"key": str(uuid.uuid4())}
    assert service.post("report", f"{path}/progress", json=told).status_code == 404
    assert service.get("read", "/v1/jobs/not-a-uuid").status_code == 422
