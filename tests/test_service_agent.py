"""Jobs carried out by agents: once each, whoever is killed, and nothing that is not allowed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
import uuid
from types import SimpleNamespace

import pytest
from sqlalchemy import update

import batchwright as bw
from batchwright.cli import client_commands
from batchwright.client import job_work, lease_heartbeat, offering, old_folders
from batchwright.client.agent import Agent, allowed, folder_id, usual_name
from batchwright.client.http import Service, ServiceError
from batchwright.client.job_work import CheckpointProgress, code_words
from batchwright.client.offering import Limits, offer
from batchwright.client.outbox import read_report
from batchwright.client.submitting import follow, state_words, submit
from batchwright.distributed import fork_server
from batchwright.distributed.processes import VERB_PARENT
from batchwright.errors import BatchwrightError, FileError, Interrupted, WorkerError
from batchwright.records import Job
from batchwright.records.agent_rules import GIB, Offer
from batchwright.records.documents import change_job, job_yaml, write_record
from batchwright.records.service import AgentIntroduction, JobOrders, KeptAdvice, RunIntroduction
from batchwright.service.database.tables import jobs
from batchwright.storage import locks
from clients import SECONDS, Wire, a_server, epoch, lines_of, remote, step, wait_until
from forked import LightServer, with_tests
from run_lines import values_of
from samples import make_job, make_plan, make_profile, make_summary

JOB = make_job()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What verbs make, so that `fake_verbs` need not load all records."""
    folder = tmp_path_factory.mktemp("made")
    write_record(make_profile(), folder / "profile.json")
    write_record(bw.plan([make_profile()]), folder / "plan.json")
    write_record(make_summary(), folder / "summary.json")
    (folder / "step.json").write_text(json.dumps(step(0)))
    (folder / "epoch.json").write_text(json.dumps(epoch(0)))
    return folder


@pytest.fixture(scope="module")
def verbs():
    """From which `fake_verbs` and agents are forked: their starts take most of the time."""
    server = LightServer(["batchwright.client.reporter_process", "agents"])
    yield server
    server.close()


@pytest.fixture
def hold(tmp_path, monkeypatch, made, verbs):
    """The file by which verbs are held up, or made to fail."""
    file, usual = tmp_path / "hold", fork_server.start

    def start(module, words, *, environment, log):
        if module != "fake_verbs":
            return usual(module, words, environment=environment, log=log)
        assert environment[VERB_PARENT] == str(os.getpid())
        own = {**environment, VERB_PARENT: str(verbs.pid)}
        return verbs.start(module, words, own, [log.fileno()])

    monkeypatch.setenv("PYTHONPATH", with_tests(os.environ))
    monkeypatch.setenv("FAKE_MADE", str(made))
    monkeypatch.setenv("FAKE_HOLD", str(file))
    monkeypatch.setattr(fork_server, "start", start)
    monkeypatch.setattr(job_work, "VERBS", "fake_verbs")
    monkeypatch.setattr(job_work, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(job_work, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(lease_heartbeat, "BEAT_SECONDS", 0.05)
    yield file
    file.unlink(missing_ok=True)


class Here:
    """An agent of the test's own service, which works on one job when it is told to."""

    def __init__(
        self,
        service,
        folder,
        *,
        name="one",
        chosen=True,
        allow=(),
        faults=(),
        owner="report",
        **options,
    ):
        self.service, self.folder, self.told = service, folder, []
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
        introduction = AgentIntroduction(name=name, chosen=chosen, allow=allow)
        self.agent = Agent(
            remote(service, owner, faults),
            service.tokens[owner],
            folder,
            introduction,
            tell=self.told.append,
            **options,
        )
        self.agent._introduce()

    def work(self):
        """Lease and carry out one job; returns whether there was one."""
        lease = self.agent._lease()
        if lease is not None:
            self.agent._carry_out(lease)
        return lease is not None

    def begin(self):
        thread = threading.Thread(target=self.work, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def queued(service):
    """A job that trains without being asked again."""
    return submit(remote(service, "submit"), JOB, name="a job", auto=True)


def state(service, job):
    return service.store.jobs.get(job.id)


def reached(hold, verb):
    wait_until(lambda: hold.with_name("reached").exists(), f"{verb} did not begin")
    assert hold.with_name("reached").read_text() == verb


# ------------------------------------------------------------------------------------- one job


def test_a_job_is_probed_planned_trained_and_reported(service, queued, hold, tmp_path):
    here = Here(service, tmp_path / "agent")
    assert here.work()
    found = state(service, queued)
    assert (found.state, found.attempts, found.error) == ("done", 1, None)
    assert found.has_profile
    assert found.has_plan
    run = service.store.runs.get(found.run)
    assert (run.name, run.state, run.job, run.records) == ("a job", "finished", queued.id, 21)
    folder = tmp_path / "agent" / "jobs" / queued.id
    records = service.store.records.after(found.run, None, -1, 100).records
    assert [values_of(record) for record in records] == lines_of(folder / "run")
    assert not here.work()


def test_a_plan_is_for_the_workers_that_are_here_however_many_a_job_allows(
    service, hold, made, tmp_path, monkeypatch
):
    job = make_job(goal={"max_workers": 8})
    profile, own = make_profile(job=job), tmp_path / "made"
    shutil.copytree(made, own)
    write_record(profile, own / "profile.json")
    write_record(bw.plan([profile], goal={"max_workers": 2}), own / "plan.json")
    monkeypatch.setenv("FAKE_MADE", str(own))
    asked, usual = [], fork_server.start

    def start(module, words, **how):
        asked.append(words)
        return usual(module, words, **how)

    monkeypatch.setattr(fork_server, "start", start)
    queued = submit(remote(service, "submit"), job, name="bounded", auto=True)
    Here(service, tmp_path / "agent").work()
    found = state(service, queued)
    assert (found.state, found.error) == ("done", None)
    assert "goal.max_workers=2" in next(words for words in asked if words[0] == "plan")
    assert service.store.jobs.plan(queued.id).job.goal.max_workers == 2


@pytest.mark.slow
def test_a_damaged_file_of_the_job_ends_no_agent(service, queued, hold, tmp_path):
    folder = tmp_path / "agent" / "jobs" / queued.id
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_bytes(b"data: \xff")
    assert Here(service, tmp_path / "agent").work()
    assert state(service, queued).state == "done"


@pytest.mark.parametrize(
    "change",
    [
        {"network": "os:system"},
        pytest.param({"data": "cifar10:/"}, marks=pytest.mark.slow),
        pytest.param({"weights": "/etc/passwd"}, marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_another_agent_made_is_held_against_the_rules(service, hold, tmp_path, change):
    job = submit(remote(service, "submit"), JOB, name="a job", auto=False)
    assert Here(service, tmp_path / "one").work()
    service.store.jobs.approve(job.id)
    plan = make_plan(job=make_job(**change)).model_dump_json()  # past all checks of the service
    with service.store.database.writing() as connection:
        connection.execute(update(jobs).where(jobs.c.id == job.id).values(plan=plan))
    assert Here(service, tmp_path / "one").work()
    assert state(service, job).state == "failed"
    assert "is not allowed" in state(service, job).error
    assert (
        not hold.with_name("reached").exists() or hold.with_name("reached").read_text() != "train"
    )


def test_a_plan_waits_for_approval_and_another_agent_may_follow_it(service, hold, tmp_path):
    job = submit(remote(service, "submit"), JOB, name="a job", auto=False)
    assert Here(service, tmp_path / "one").work()
    other = Here(service, tmp_path / "two", name="two")
    assert state(service, job).state == "planned"
    assert not other.work()
    service.store.jobs.approve(job.id)
    Here(service, tmp_path / "one", allow=("data=none",))
    assert other.work()
    assert (state(service, job).state, state(service, job).attempts) == ("done", 2)


def test_what_the_rules_do_not_name_is_not_run(service, hold, tmp_path, monkeypatch):
    monkeypatch.setattr(job_work.shutil, "disk_usage", lambda _: disk_with(0))  # no reason either
    wide = ["data=*", "network=*", "weights=*"]
    job = JOB.model_copy(update={"network": "os:system"})
    job = submit(remote(service, "submit"), job, name="evil", auto=True)
    here = Here(service, tmp_path / "agent", allow=wide)
    lease = here.agent._lease()
    here.agent._introduction = AgentIntroduction(name="one", allow=())  # a service that lies
    here.agent._carry_out(lease)
    found = state(service, job)
    assert found.state == "failed"
    assert found.error.startswith("network=os:system is not allowed")
    assert not list((tmp_path / "agent" / "jobs").glob("*/logs/*"))


@pytest.mark.parametrize("trials_open", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_probe_that_was_stopped_in_its_trials_is_gone_on_with(
    service, queued, hold, tmp_path, trials_open
):
    here, folder = Here(service, tmp_path / "agent"), tmp_path / "agent" / "jobs" / queued.id
    folder.mkdir()
    text = job_yaml(change_job(Job(), state(service, queued).job))
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    write_record(make_profile(trials_open=trials_open), folder / "profile.json")
    assert here.work()
    assert state(service, queued).state == "done"
    assert (folder / "logs" / "probe.log").exists() == trials_open


@pytest.mark.parametrize("verb", ["probe", pytest.param("plan", marks=pytest.mark.slow), "train"])
def test_a_verb_that_fails_fails_the_job_with_its_line(service, queued, hold, tmp_path, verb):
    hold.write_text(f"fail {verb}")
    assert Here(service, tmp_path / "agent").work()
    found = state(service, queued)
    assert (found.state, found.error) == ("failed", f"{verb} cannot be done here")


def test_an_agent_without_room_for_a_job_gives_it_back(
    service, queued, hold, tmp_path, monkeypatch
):
    """Its full disk would fail one job of the queue after the other."""
    here = Here(service, tmp_path / "agent")
    with monkeypatch.context() as patch:
        patch.setattr(job_work, "write_text", full)
        assert here.work()
    found = state(service, queued)
    assert (found.state, found.error) == ("queued", None)
    assert "agent one does not carry it out: cannot write" in found.waiting
    assert not here.work()
    assert Here(service, tmp_path / "agent").work()  # it was restarted
    assert state(service, queued).state == "done"


def test_a_machine_that_can_start_no_process_fails_no_job(
    service, queued, hold, tmp_path, monkeypatch
):
    def start(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    here = Here(service, tmp_path / "agent")
    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "start", start)
        assert here.work()
    found = state(service, queued)
    assert (found.state, found.error) == ("queued", None)
    assert "it is short of processes, files or memory: Resource temp" in found.waiting


@pytest.mark.parametrize("name", ["lease", pytest.param("artifacts", marks=pytest.mark.slow)])
def test_a_machine_that_can_start_no_thread_gives_the_job_back(
    service, queued, hold, tmp_path, monkeypatch, name
):
    """The limit on processes counts threads, too: heartbeats and uploads have one each."""
    start = threading.Thread.start

    def starting(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    here = Here(service, tmp_path / "agent")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", starting)
        assert here.work()
    reason = "it is short of processes, files or memory: can't start new thread"
    assert here.told[-1] == f"a job: given back: {reason}"
    found = state(service, queued)
    assert (found.state, found.error) == ("queued", None)
    assert reason in found.waiting
    assert Here(service, tmp_path / "agent").work()  # it was restarted
    assert state(service, queued).state == "done"


@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: can't start new thread",
        pytest.param("fork: Resource temporarily unavailable", marks=pytest.mark.slow),
    ],
)
def test_a_verb_that_can_start_no_process_fails_no_job(service, queued, hold, tmp_path, words):
    hold.write_text(f"fail train: {words}")
    assert Here(service, tmp_path / "agent").work()
    found = state(service, queued)
    assert (found.state, found.error) == ("planned", None)
    assert words in found.waiting


def test_what_a_jobs_own_code_hears_of_a_lock_that_is_taken_is_its_own_failure(
    service, queued, hold, tmp_path
):
    """It is what Python says of a process that does not start, too."""
    said = f"BlockingIOError: [Errno {errno.EAGAIN}] {os.strerror(errno.EAGAIN)}"
    hold.write_text(f"fail train: {said}")
    assert Here(service, tmp_path / "agent").work()
    assert (state(service, queued).state, state(service, queued).error) == ("failed", said)


@pytest.mark.slow
def test_a_plan_for_gpus_is_left_to_an_agent_that_has_them(
    service, hold, made, tmp_path, monkeypatch
):
    """The agent that planned is busy or silent as the job is handed out: it is not to fail."""
    profile, own = make_profile(job=make_job(device="cuda")), tmp_path / "made"
    shutil.copytree(made, own)
    write_record(profile, own / "profile.json")
    write_record(bw.plan([profile]), own / "plan.json")
    monkeypatch.setenv("FAKE_MADE", str(own))
    job = make_job(device="auto")
    job = submit(remote(service, "submit"), job, name="a job", auto=False)
    one = Here(service, tmp_path / "one")
    assert one.work()
    service.store.jobs.approve(job.id)
    service.clock.go(1000.0)
    assert Here(service, tmp_path / "two", name="two").work()
    found = state(service, job)
    assert (found.state, found.error) == ("planned", None)
    assert "agent two does not carry it out: the plan is for 2 GPUs, and this machine has none" in (
        found.waiting
    )
    one.agent._introduction = one.agent._introduction.model_copy(update={"offer": Offer(gpus=2)})
    assert one.work()
    assert (state(service, job).state, state(service, job).agent) == ("done", "one")


def test_a_job_for_more_gpus_than_are_here_is_left_to_another_agent(service, hold, tmp_path):
    job = make_job(device="auto", workers=4)
    queued = submit(remote(service, "submit"), job, name="a job", auto=True)
    here = Here(service, tmp_path / "agent")
    with_gpus = {"offer": Offer(gpus=2)}
    here.agent._introduction = here.agent._introduction.model_copy(update=with_gpus)
    assert here.work()
    found = state(service, queued)
    assert (found.state, found.error) == ("queued", None)
    words = "agent one does not carry it out: workers=4, and this machine has 2 GPUs"
    assert found.waiting == words


@pytest.mark.slow
def test_a_plan_for_cpus_is_trained_by_an_agent_with_fewer_gpus_than_workers(
    service, hold, tmp_path
):
    job = submit(remote(service, "submit"), make_job(device="auto"), name="a job", auto=False)
    assert Here(service, tmp_path / "one").work()
    service.store.jobs.approve(job.id)
    service.clock.go(1000.0)
    two = Here(service, tmp_path / "two", name="two")
    two.agent._introduction = two.agent._introduction.model_copy(update={"offer": Offer(gpus=1)})
    assert two.work()
    found = state(service, job)
    assert (found.state, found.agent, found.error) == ("done", "two", None)


def full(_text, path):
    raise FileError(f"cannot write {path}: No space left on device; choose another place")


CANNOT = f"cannot write a file: {os.strerror(errno.ENOSPC)}"


@pytest.mark.parametrize(
    ("verb", "then"),
    [("probe", "queued"), pytest.param("train", "planned", marks=pytest.mark.slow)],
)
def test_a_disk_that_fills_up_in_a_verb_fails_no_job(service, queued, hold, tmp_path, verb, then):
    hold.write_text(f"fail {verb}: {CANNOT}")
    here = Here(service, tmp_path / "one")
    assert here.work()
    found = state(service, queued)
    assert (found.state, found.error) == (then, None)
    assert found.waiting == f"agent one does not carry it out: {CANNOT}"
    assert not here.work()
    hold.unlink()
    assert Here(service, tmp_path / "two", name="two").work()
    assert (state(service, queued).state, state(service, queued).agent) == ("done", "two")


@pytest.mark.parametrize("told", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_disk_that_fills_up_after_the_training_repeats_none(
    service, queued, hold, tmp_path, monkeypatch, told
):
    """The run may have told its service by then that it failed."""
    usual = job_work.read_report

    def reported(run):
        report = usual(run)
        return report.to(state="failed", error=CANNOT, told=True) if told and report else report

    monkeypatch.setattr(job_work, "read_report", reported)
    hold.write_text(f"fail report: {CANNOT}")
    here = Here(service, tmp_path / "agent")
    assert here.work()
    found = state(service, queued)
    assert (found.state, service.store.runs.get(found.run).state) == ("done", "finished")
    assert f"train failed after the end of the training: {CANNOT}" in here.told


@pytest.mark.parametrize(
    ("free", "then"),
    [
        (0, "queued"),
        pytest.param(2**30, "failed", marks=pytest.mark.slow),
        pytest.param(None, "failed", marks=pytest.mark.slow),
    ],
)
def test_a_verb_that_could_not_say_that_the_disk_is_full_fails_no_job(
    service, queued, hold, tmp_path, monkeypatch, free, then
):
    """Its log is on the same disk."""
    monkeypatch.setattr(job_work.shutil, "disk_usage", lambda _: disk_with(free))
    hold.write_text("fail probe: half a li")
    assert Here(service, tmp_path / "agent").work()
    found = state(service, queued)
    assert found.state == then
    said = "agent one does not carry it out: its disk is full: half a li"
    assert (found.waiting, found.error) == ((said, None) if free == 0 else (None, "half a li"))


def disk_with(free):
    if free is None:
        raise FileNotFoundError
    return SimpleNamespace(free=free, total=2**40)


@pytest.mark.parametrize(("middle", "then"), [("", "failed"), (CANNOT, "queued")])
def test_of_a_long_error_the_end_is_told_which_says_what_to_try(
    service, queued, hold, tmp_path, middle, then
):
    hold.write_text(f"fail probe: {'x' * 2100}{middle}{'y' * 2100}: give epochs=3")
    assert Here(service, tmp_path / "agent").work()
    found = state(service, queued)
    assert found.state == then
    assert re.search("x ... y+: give epochs=3$", found.error or found.waiting)


@pytest.mark.slow
def test_an_end_is_reported_though_the_disk_is_full_by_then(
    service, queued, hold, tmp_path, monkeypatch
):
    here = Here(service, tmp_path / "agent")
    monkeypatch.setattr(job_work, "write_report", lambda folder, _: full("", folder))
    assert here.work()
    found = state(service, queued)
    assert (found.state, service.store.runs.get(found.run).state) == ("done", "finished")


@pytest.mark.parametrize("damaged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_whose_report_is_missing_or_damaged_is_reported_at_the_end(
    service, queued, hold, tmp_path, monkeypatch, damaged
):
    """As after a full disk or a loss of power: nothing of a finished training is to fail."""

    def no_report(run):
        if damaged:
            raise FileError(f"cannot read {run}/report.json: it is not JSON")

    monkeypatch.setattr(job_work, "read_report", no_report)
    assert Here(service, tmp_path / "agent").work()
    found = state(service, queued)
    assert (found.state, found.error) == ("done", None)
    run = service.store.runs.get(found.run)
    assert (run.state, run.job, run.records) == ("finished", queued.id, 21)


def test_an_error_with_what_no_text_may_hold_is_told_too(service, queued, hold, tmp_path):
    """The service would refuse it, and the agent get the same job again."""
    hold.write_text("fail probe: half\0a line")
    assert Here(service, tmp_path / "agent").work()
    assert (state(service, queued).state, state(service, queued).error) == (
        "failed",
        r"half\x00a line",
    )


@pytest.mark.parametrize("verb", [pytest.param("probe", marks=pytest.mark.slow), "train"])
def test_a_cancelled_job_stops_at_once(service, queued, hold, tmp_path, verb):
    hold.write_text(verb)
    thread = Here(service, tmp_path / "agent").begin()
    reached(hold, verb)
    service.store.jobs.cancel(queued.id)
    thread.join(SECONDS)
    assert state(service, queued).state == "cancelled"


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["report", "two"])
def test_an_agent_that_lost_its_job_stops_and_says_no_more(
    service, queued, hold, tmp_path, clock, owner
):
    service.tokens["two"] = service.store.tokens.create("two", ["report"])
    hold.write_text("train")
    one = Here(service, tmp_path / "one")
    thread = one.begin()
    reached(hold, "train")
    two = Here(service, tmp_path / "two", name="two", owner=owner)
    wait_until(lambda: clock.go(1000) or two.agent._lease())  # a heartbeat may come in between
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert one.told[-1] == "a job: the lease was lost: another agent has it, or it has ended"
    assert state(service, queued).agent == "two"
    assert state(service, queued).state == "training"


def test_an_agent_whose_token_was_revoked_stops(service, queued, hold, tmp_path):
    service.tokens["own"] = service.store.tokens.create("own", ["report"])
    hold.write_text("train")
    here = Here(service, tmp_path / "agent", owner="own")
    thread = here.begin()
    reached(hold, "train")
    service.store.tokens.revoke("own")
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert here.told[-1].startswith("a job: the lease was lost")
    with pytest.raises(ServiceError, match="does not know the token"):
        here.work()


@pytest.mark.parametrize(
    ("status", "lost"),
    [
        *((401, True), (403, True), (404, True), (409, True)),
        *((0, False), (413, False), (422, False), (429, False), (503, False)),
    ],
)
def test_only_what_no_repeating_helps_against_is_a_lost_lease(status, lost):
    def report(progress):
        raise ServiceError("refused", status=status)

    key = "00000000-0000-4000-8000-000000000001"
    one = lease_heartbeat.LeaseHeartbeat(report, key, 30.0, threading.Event())
    one.give_back(sent=False)
    assert (one.lost, one.ended) == (lost, lost)


def test_heartbeats_go_on_while_the_service_takes_long_over_a_report(monkeypatch):
    """As over a plan, which it makes again: another agent would get the job meanwhile."""
    monkeypatch.setattr(lease_heartbeat, "BEAT_SECONDS", 0.01)
    beats = []

    def report(progress):
        if progress.state is None:
            beats.append(progress)
        else:
            before = len(beats)
            wait_until(lambda: len(beats) > before + 2, "no heartbeat came")
        return JobOrders(state="planned", stop=False)

    key = "00000000-0000-4000-8000-000000000001"
    with lease_heartbeat.LeaseHeartbeat(report, key, 30.0, threading.Event()) as one:
        assert one.say("planned").state == "planned"


def test_a_stopped_agent_gives_its_job_back_and_goes_on_later(service, queued, hold, tmp_path):
    hold.write_text("train")
    here = Here(service, tmp_path / "agent")
    thread = here.begin()
    reached(hold, "train")
    here.agent._stopping.set()
    thread.join(SECONDS)
    assert state(service, queued).state == "planned"
    hold.unlink()
    assert Here(service, tmp_path / "agent").work()
    found = state(service, queued)
    assert (found.state, found.attempts) == ("done", 2)
    lines = lines_of(tmp_path / "agent" / "jobs" / queued.id / "run")
    assert [line.get("step") for line in lines] == [*range(1, 21), None]
    assert service.store.runs.get(found.run).records == 21


def test_an_agent_says_that_it_ends(service, tmp_path):
    one = Here(service, tmp_path)

    def stop(line):
        one.told.append(line)
        for _ in range(2):  # as the kernel and the shell do where the terminal is closed
            os.kill(os.getpid(), signal.SIGHUP)

    one.agent._tell = stop
    with pytest.raises(Interrupted, match="stopped by SIGHUP"):
        one.agent.work()
    assert service.store.agents.left() == {"one"}


@pytest.mark.slow
def test_a_service_that_is_away_at_the_end_hears_of_it_later(service, queued, hold, tmp_path):
    here = Here(service, tmp_path / "agent")
    hold.write_text("report")
    thread = here.begin()
    reached(hold, "report")
    wire = here.agent._service._client
    assert isinstance(wire, Wire)
    wire.faults = iter(["refused", "lost", "answered"] * 4)
    hold.unlink()
    thread.join(SECONDS)
    found = state(service, queued)
    assert found.state == "done"
    assert service.store.runs.get(found.run).records == 21


@pytest.mark.slow
def test_a_page_of_a_proxy_whose_service_is_away_fails_no_job(service, queued, hold, tmp_path):
    here = Here(service, tmp_path / "agent")
    hold.write_text("report")
    thread = here.begin()
    reached(hold, "report")
    here.agent._service._client.faults = iter(["page", "302", "204", "nowhere"] * 4)
    hold.unlink()
    thread.join(SECONDS)
    assert (state(service, queued).state, state(service, queued).error) == ("done", None)


@pytest.mark.parametrize("fault", ["page", "302", "404", "nowhere"])
def test_another_programs_answer_ends_only_an_agent_that_was_never_introduced(
    service, tmp_path, fault
):
    told = []

    def agent(*faults):
        def tell(line):
            told.append(line)
            if line.endswith("; trying again"):
                one._stopping.set()

        introduction = AgentIntroduction(name="one", allow=())
        token, wire = service.tokens["report"], remote(service, "report", faults)
        one = Agent(wire, token, tmp_path, introduction, tell=tell)
        return one

    with pytest.raises(ServiceError) as refused:
        agent(fault).work()
    assert refused.value.by_another
    with pytest.raises(Interrupted):
        agent("", fault, fault).work()
    assert told[-1] == f"{refused.value}; trying again"


@pytest.mark.slow
def test_advice_that_was_taken_while_the_service_was_away_is_told_at_the_end(
    service, queued, hold, tmp_path
):
    hold.write_text("report")
    thread = Here(service, tmp_path / "agent").begin()
    reached(hold, "report")
    folder = tmp_path / "agent" / "jobs" / queued.id / "run"
    run = read_report(folder).run
    told = RunIntroduction(name="a job", plan=make_plan())
    service.store.runs.introduce(run, told, "report")
    advice = service.store.advice.offer(run, 1, "epochs take longer", make_plan())
    kept = KeptAdvice(**dict(advice) | {"run": run, "taken": 4})
    write_record(kept, folder / "advice-1.json")
    hold.unlink()
    thread.join(SECONDS)
    assert state(service, queued).state == "done"
    assert [one.taken for one in service.store.advice.list(run)] == [4]


@pytest.mark.slow
def test_two_batch_sizes_are_measured_side_by_side_before_training(
    service, hold, tmp_path, made, monkeypatch
):
    own, job = tmp_path / "made", make_job(method="dual-batch")
    profile = make_profile(job=job)
    shutil.copytree(made, own)
    write_record(profile, own / "profile.json")
    write_record(bw.plan([profile]), own / "plan.json")
    monkeypatch.setenv("FAKE_MADE", str(own))
    queued = submit(remote(service, "submit"), job, name="a job", auto=True)
    here = Here(service, tmp_path / "agent")
    assert here.work()
    assert [line.partition(":")[0] for line in here.told[1:6]] == [
        *("probe", "plan", "check", "plan", "train")
    ]
    assert state(service, queued).state == "done"


# ------------------------------------------------------------------------- cut off, and taken over


def test_an_agent_that_was_cut_off_goes_on_with_its_training(
    service, queued, hold, tmp_path, clock
):
    """Ten leases long, while another agent asks for work: nothing is trained twice."""
    hold.write_text("train")
    one = Here(service, tmp_path / "one")
    thread = one.begin()
    reached(hold, "train")
    wait_until(lambda: state(service, queued).trained > 0)
    two = Here(service, tmp_path / "two", name="two")
    wire = one.agent._service._client
    wire.faults = iter(lambda: "lost", None)  # from now on
    # What was under way before may still arrive, and be the newest word for a while.
    said = "agent one is silent for"
    wait_until(lambda: clock.go(300.0) or said in (state(service, queued).waiting or ""))
    assert two.agent._lease() is None
    wire.faults = iter(())
    wait_until(lambda: not state(service, queued).silent)
    hold.unlink()
    thread.join(SECONDS)
    found = state(service, queued)
    assert (found.state, found.agent, found.attempts) == ("done", "one", 1)


@pytest.mark.slow
def test_the_service_hears_how_far_the_newest_checkpoint_is(service, queued, hold, tmp_path):
    hold.write_text("train")
    thread = Here(service, tmp_path / "agent").begin()
    reached(hold, "train")
    wait_until(lambda: state(service, queued).trained > 0)
    assert state(service, queued).trained == pytest.approx(11 / 45)  # steps of those of an epoch
    hold.unlink()
    thread.join(SECONDS)


# ------------------------------------------------------------------------- what an agent cannot do


def test_a_checkpoint_after_an_epoch_holds_all_of_it(tmp_path):
    """Where not each step has a line, the epoch's own tells."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()
    lines = [step(10, 3), epoch(3)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert CheckpointProgress(tmp_path).trained() == 4.0


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "epoch", "record": {"epoch": 10**400}},
        {"kind": "epoch", "record": {"epoch": -9}},
        {"kind": "step", "epoch": float("inf"), "step": 0, "steps": 1},
        {"kind": "step", "epoch": 0, "step": 10**400, "steps": 3},
        "[" * 20_000,
    ],
    ids=range(5),
)
def test_lines_that_came_with_a_checkpoint_end_no_agent(tmp_path, line):
    """Another agent sent them, and may mean harm."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()
    texts = [json.dumps(step(10, 3)), line if isinstance(line, str) else json.dumps(line)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts))
    assert CheckpointProgress(tmp_path).trained() == pytest.approx(3 + 10 / 45)


def answering(here, change):
    """The agent gets leases with something in them changed."""
    post = here.agent._service.post

    def changed(path, body=None):
        found = post(path, body)
        if path.endswith("/lease") and found is not None:
            change(found)
        return found

    here.agent._service.post = changed


def approved(service, folder):
    """A job that an agent has planned, and its owner approved."""
    job = submit(remote(service, "submit"), JOB, name="a job", auto=False)
    assert Here(service, folder).work()
    service.store.jobs.approve(job.id)
    return job


@pytest.mark.slow
def test_a_job_that_names_what_this_agent_has_not_is_given_back_and_does_not_come_again(
    service, hold, tmp_path
):
    """As where the package that adds an optimizer is on the service's machine and not on this."""
    job = approved(service, tmp_path / "one")
    one = Here(service, tmp_path / "one")
    answering(one, lambda lease: lease["plan"].update(update="lion"))
    assert not one.work()
    assert "a job: given back: this agent cannot read it (plan.update = 'lion'" in one.told[-1]
    one.agent._service.post = remote(service).post
    assert not one.work()
    says = "agent one does not carry it out: this agent cannot read it (plan.update = 'lion'"
    assert state(service, job).waiting.startswith(says)
    assert state(service, job).state == "planned"
    assert Here(service, tmp_path / "two", name="two").work()
    assert state(service, job).state == "done"


def test_a_lease_that_cannot_be_read_and_is_lost_meanwhile_ends_no_agent(service, hold, tmp_path):
    """As where the answer was on its way for longer than the lease lasts."""
    approved(service, tmp_path / "one")
    one = Here(service, tmp_path / "one")
    other = {"key": "00000000-0000-4000-8000-000000000001"}
    answering(one, lambda lease: lease.update(other) or lease["plan"].update(update="lion"))
    assert not one.work()
    assert "the lease of this job was lost" in one.told[-1]


def test_a_job_whose_own_keys_cannot_be_read_is_given_back(service, queued, hold, tmp_path):
    one = Here(service, tmp_path / "one")
    answering(one, lambda lease: lease["job"]["job"].update(optimizer="lion"))
    assert one.work()
    assert one.told[-1].startswith("a job: given back: this agent cannot read it (job key opt")
    assert not one.work()
    assert Here(service, tmp_path / "two", name="two").work()
    assert state(service, queued).state == "done"


def test_a_job_whose_package_is_not_here_is_given_back(service, hold, tmp_path):
    asked = JOB.model_copy(update={"network": "not_installed_here.networks:small"})
    job = submit(remote(service, "submit"), asked, name="a job", auto=True)
    one = Here(service, tmp_path / "one", allow=("network=not_installed_here.*",))
    assert one.work()
    says = "network=not_installed_here.networks:small: its package is not installed here"
    assert one.told[-1] == f"a job: given back: {says}"
    found = state(service, job)
    assert (found.state, found.error) == ("queued", None)
    assert says in found.waiting


def test_what_is_no_lease_at_all_ends_the_agent_in_a_line(service, queued, tmp_path):
    one = Here(service, tmp_path / "one")
    answering(one, lambda lease: lease.clear())
    with pytest.raises(ServiceError, match="use the same one on both sides"):
        one.work()


def test_an_agent_follows_no_plan_that_its_profile_does_not_lead_to(service, hold, tmp_path):
    """Past all checks of the service."""
    job = approved(service, tmp_path / "one")
    plan = bw.plan([make_profile()])
    stages = tuple(one.model_copy(update={"epochs": 1_000_000}) for one in plan.stages)
    text = plan.model_copy(update={"stages": stages}).model_dump_json()
    with service.store.database.writing() as connection:
        connection.execute(update(jobs).where(jobs.c.id == job.id).values(plan=text))
    Here(service, tmp_path / "one").work()
    found = state(service, job)
    assert found.state == "failed"
    assert re.fullmatch(
        r"the plan is not the one that its profile leads to: stages\[0\]\.epochs = 1000000 "
        r"instead of \d+; if another version made it, submit the job again",
        found.error,
    )
    assert not (tmp_path / "one" / "jobs" / job.id / "run").exists()


@pytest.mark.slow
def test_a_plan_that_another_version_made_is_followed_if_the_choice_is_the_same(
    service, hold, tmp_path
):
    """It lacked fields of this version, had other predictions, and bounded no workers."""
    job = approved(service, tmp_path / "one")
    plan = bw.plan([make_profile()])
    rows = tuple(
        one.model_copy(update={"fixed_samples": 0.0, "predicted_bytes": None})
        for one in plan.stages
    )
    earlier = {"considered": (), "end_loss": None, "threads": None, "stages": rows}
    earlier["job"] = change_job(plan.job, {"goal.max_workers": 64})
    text = plan.model_copy(update=earlier).model_dump_json()
    with service.store.database.writing() as connection:
        connection.execute(update(jobs).where(jobs.c.id == job.id).values(plan=text))
    Here(service, tmp_path / "one").work()
    assert state(service, job).state == "done", state(service, job).error


@pytest.mark.slow
def test_an_agent_measures_nothing_for_a_profile_of_another_job(service, hold, tmp_path):
    job = approved(service, tmp_path / "one")
    text = make_profile(job=make_job(epochs=1_000_000)).model_dump_json()
    with service.store.database.writing() as connection:
        connection.execute(update(jobs).where(jobs.c.id == job.id).values(profile=text))
    Here(service, tmp_path / "one").work()
    assert "the profile that came with the job has epochs=1000000" in state(service, job).error


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (
            Limits(workers=1),
            "the plan is for 2 workers, and this agent takes a maximum of 1 (--max",
        ),
        pytest.param(
            Limits(hours=1e-9),
            "it took longer than 1e-09 h, this agent's maximum (--max-hours)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Limits(disk=1e-9),
            "its folder grew beyond 1e-09 GiB, this agent's maximum (--max-disk)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_job_that_takes_more_than_its_agent_allows_is_given_back(
    service, queued, hold, tmp_path, limits, says, monkeypatch
):
    monkeypatch.setattr(job_work, "LOOK_SECONDS", 0.05)
    hold.write_text("train")
    one = Here(service, tmp_path / "one", limits=limits)
    assert one.work()
    assert one.told[-1].startswith(f"a job: given back: {says}")
    found = state(service, queued)
    assert found.state in ("queued", "planned")
    assert says in found.waiting
    assert not one.work()
    hold.unlink()
    service.clock.go(1000.0)
    assert Here(service, tmp_path / "two", name="two").work()
    assert state(service, queued).state == "done"


def test_a_job_that_leaves_its_workers_open_sees_as_many_gpus_as_it_may_use():
    seen = "CUDA_VISIBLE_DEVICES"
    assert Limits().environment({seen: "3"}) == {}
    assert Limits(workers=2).environment({}) == {seen: "0,1"}
    assert Limits(workers=2).environment({seen: "3,5,7"}) == {seen: "3,5"}
    assert Limits(workers=2).environment({seen: "3"}) == {seen: "3"}
    assert Limits(workers=2).environment({seen: ""}) == {}  # none: it stays so


def test_a_machine_offers_as_many_gpus_as_a_job_will_see(monkeypatch):
    monkeypatch.setattr(offering, "_gpus", lambda: [("H100", 80 * GIB), ("T4", 16 * GIB)])
    assert offer().gpus == 2
    found = offer((), Limits(workers=1))
    assert (found.gpus, found.gpu_memory) == (1, 80 * GIB)


def test_a_machine_tells_what_it_offers():
    found = offer(["room-2"], Limits(workers=3))
    assert (found.labels, found.max_workers) == (("room-2",), 3)
    assert found.cores >= 1
    assert found.memory > GIB / 4
    with pytest.raises(BatchwrightError, match=r"--label .a b.: write letters, digits and"):
        offer(["a b"])


# --------------------------------------------------------------------------------- one of its kind


@pytest.mark.slow
def test_folders_of_former_jobs_are_removed_once_they_were_too_old_twice(
    service, queued, hold, tmp_path, monkeypatch
):
    monkeypatch.setattr(old_folders, "LOOK_SECONDS", 0.0)
    here = Here(service, tmp_path / "one", retention_days=2)
    place = tmp_path / "one" / "jobs"
    assert here.work()
    done = place / queued.id
    assert (done / "run" / "summary.json").exists()
    former, by_hand, elsewhere = place / str(uuid.uuid4()), place / "notes", tmp_path / "elsewhere"
    link = place / str(uuid.uuid4())
    for folder in (former / "run", by_hand, elsewhere):
        folder.mkdir(parents=True)
    link.symlink_to(elsewhere)
    then = time.time() - 3 * 86400

    def age():
        for folder in (former / "run", former, by_hand, link):
            os.utime(folder, (then, then), follow_symlinks=False)

    age()
    here.agent._old_folders.remove()
    former.touch()  # the clock was ahead, or the agent has worked on it meanwhile
    here.agent._old_folders.remove()
    age()
    here.agent._old_folders.remove()
    assert former.exists()
    here.agent._old_folders.remove()
    assert not former.exists()
    assert f"removed {former}: no work on it for 2 days" in here.told
    assert all(path.exists() for path in (done, by_hand, elsewhere, link))
    Here(service, tmp_path / "one").agent._old_folders.remove()  # without the option: never
    assert done.exists()


def test_a_folder_that_an_agent_was_killed_in_at_work_is_not_old(tmp_path, monkeypatch):
    """Nothing noted that work, but the files of its run are new. A link is left alone."""
    monkeypatch.setattr(old_folders, "LOOK_SECONDS", 0.0)
    told, link = [], tmp_path / str(uuid.uuid4())
    folder = tmp_path / str(uuid.uuid4())
    checkpoint = folder / "run" / "checkpoints" / "last.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    link.symlink_to(tmp_path)
    then = time.time() - 3 * 86400
    for place in (checkpoint.parent, folder / "run", folder, link):
        os.utime(place, (then, then), follow_symlinks=False)
    old = old_folders.OldFolders(tmp_path, 2, told.append)
    for _ in range(3):
        old.remove()
    assert checkpoint.exists()
    os.utime(checkpoint, (then, then))
    for _ in range(3):
        old.remove()
    assert told == [f"removed {folder}: no work on it for 2 days"]


def test_a_folder_is_known_again_and_its_copy_is_another(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    known = folder_id(one)
    assert folder_id(one) == known
    shutil.copytree(one, two)
    assert folder_id(two) != known
    (one / "agent.json").write_text("[]")
    assert folder_id(one) not in (known, folder_id(two))
    assert usual_name(tmp_path / "a b/../c:d").endswith("-c-d")


@pytest.mark.slow
def test_two_agents_without_names_on_one_machine_carry_out_a_job_each(service, hold, tmp_path):
    """They were both called as the machine is, and took each other's job until it had failed."""
    first, second = (
        submit(remote(service, "submit"), JOB, name=name, auto=True) for name in ("a", "b")
    )
    hold.write_text("train")
    folders = (tmp_path / "x" / "agent", tmp_path / "y" / "agent")
    agents = [Here(service, one, name=usual_name(one), chosen=False) for one in folders]
    threads = [one.begin() for one in agents]
    wait_until(lambda: {state(service, one).state for one in (first, second)} == {"training"})
    names = {state(service, one).agent for one in (first, second)}
    assert names == {usual_name(folders[0]), f"{usual_name(folders[0])}-2"}
    hold.unlink()
    for thread in threads:
        thread.join(SECONDS)
    for one in (first, second):
        assert (state(service, one).state, state(service, one).attempts) == ("done", 1)


def test_a_second_agent_with_a_name_that_is_taken_ends_in_a_line(service, tmp_path):
    Here(service, tmp_path / "one")
    with pytest.raises(ServiceError, match="named one is there already, from another folder"):
        Here(service, tmp_path / "two")


@pytest.mark.slow
def test_an_agent_whose_folder_another_process_has_taken_ends(service, queued, hold, tmp_path):
    """As on a disk that cannot lock: else they would take the job from each other."""
    first = Here(service, tmp_path / "agent")
    second = Here(service, tmp_path / "agent")
    with pytest.raises(ServiceError, match="another agent has introduced itself as one since"):
        first.work()
    assert second.work()
    assert state(service, queued).attempts == 1


# ------------------------------------------------------------------------------ rules and folders


def test_rules_are_checked_and_code_is_named_again():
    assert allowed(["data=a:/b/*", "network=c:d"]) == ("data=a:/b/*", "network=c:d")
    with pytest.raises(BatchwrightError, match="--allow 'seed=1': write KEY=PATTERN"):
        allowed(["seed=1"])
    job = JOB.model_copy(update={"network": "torchvision.models:resnet50", "loss": "a:b"})
    assert code_words(job) == ["network=torchvision.models:resnet50", "loss=a:b"]
    assert code_words(JOB) == []


def test_a_folder_has_one_agent(tmp_path):
    introduction = AgentIntroduction(name="second", allow=())
    agent = Agent(None, "", tmp_path, introduction, tell=print)
    with (
        locks.take(tmp_path, "another --folder"),
        pytest.raises(
            FileError, match=r"is being written by this process .* name another --folder"
        ),
    ):
        agent.work()


# -------------------------------------------------------------------------------------- submitting


@pytest.fixture
def reached_in_process(service, monkeypatch):
    """Commands speak to the test's own service."""
    monkeypatch.setenv("BATCHWRIGHT_TOKEN", service.tokens["admin"])
    monkeypatch.setattr("batchwright.client.http.Service", lambda *_, **__: Held(service))


class Held:
    """A client that leaves the test's service open."""

    def __init__(self, service):
        self.one = remote(service, "admin")

    def __enter__(self):
        return self.one

    def __exit__(self, *_):
        pass


def test_a_job_is_submitted_by_a_command(service, reached_in_process, tmp_path, capsys):
    file = tmp_path / "small.yaml"
    file.write_text("epochs: 3\n")
    client_commands.submit(words=[str(file), "seed=4"], as_json=True)
    (job,) = service.store.jobs.list()
    assert (job.name, job.job["epochs"], job.job["seed"], job.auto) == ("small", 3, 4, False)
    out, err = capsys.readouterr()
    assert json.loads(out)["id"] == job.id
    submitted, page, waits = err.splitlines()
    assert submitted == f"submitted as {job.id}"
    assert page == f"page: http://127.0.0.1:8400/jobs/{job.id}"
    assert waits.startswith("job small: queued, no agent is there")


def test_a_job_that_nobody_named_gets_a_name_that_the_service_takes(
    service, reached_in_process, tmp_path
):
    client_commands.submit(words=[f"data=imagefolder:/{'x' * 200}"])
    file = tmp_path / f"a\n\N{RIGHT-TO-LEFT OVERRIDE}{'x' * 150}.yaml"
    file.write_text("epochs: 3\n")
    client_commands.submit(words=[str(file)])
    by_file, by_data = sorted(job.name for job in service.store.jobs.list())
    assert by_file == ("a\\n\\u202e" + "x" * 150)[:120]
    assert " on imagefolder:/xxx" in by_data
    assert len(by_data) == 120


def test_what_a_job_needs_is_told_with_units(service, reached_in_process, capsys):
    client_commands.submit(words=["epochs=3"], memory="8GiB", keep_seconds="1h")
    (job,) = service.store.jobs.list()
    assert (job.needs.memory, job.keep_seconds) == (8 * 2**30, 3600)


def test_what_a_command_cannot_do_is_said_before_anything_happens(tmp_path, monkeypatch):
    monkeypatch.delenv("BATCHWRIGHT_TOKEN", raising=False)
    url = "https://train.example"
    for mistake, why in (
        (lambda: client_commands.submit(url, ["epochs=0"]), "epochs"),
        (lambda: client_commands.submit(url, []), "there is no token for https://train.example"),
        (lambda: client_commands.submit("train.example", []), "is no address of a service"),
        (lambda: client_commands.send(tmp_path), "holds no run"),
        (
            lambda: client_commands.agent(tmp_path, url, name="a\nb"),
            "--name 'a\\nb': give 1 to 120",
        ),
        (lambda: client_commands.agent(tmp_path, url, name=".."), "--name '..': give 1 to 120"),
        (
            lambda: client_commands.agent(tmp_path, url, allow=["x"]),
            "--allow 'x': write KEY=PATTERN",
        ),
    ):
        with pytest.raises(BatchwrightError, match=re.escape(why)):
            mistake()
    assert not list(tmp_path.iterdir())


def test_a_job_that_may_have_arrived_is_not_submitted_again(service, monkeypatch):
    monkeypatch.setattr("batchwright.client.submitting.Backoff.seconds", lambda *_: 0.0)
    with pytest.raises(ServiceError):
        submit(remote(service, "submit", ["answered"]), JOB, name="a", auto=False)
    assert len(service.store.jobs.list()) == 1
    submit(remote(service, "submit", ["refused"] * 3), JOB, name="b", auto=False)
    assert {job.name for job in service.store.jobs.list()} == {"a", "b"}
    with pytest.raises(BatchwrightError, match="give 1 to 120 characters"):
        submit(remote(service, "submit"), JOB, name="a\nb", auto=False)


def test_a_job_is_followed_to_its_end(service, monkeypatch):
    monkeypatch.setattr("batchwright.client.submitting.ASK_SECONDS", 0.0)
    job = submit(remote(service, "submit"), JOB, name="a job", auto=True)
    told = []

    def tell(line):
        told.append(line)
        if len(told) == 1:
            service.store.jobs.cancel(job.id)

    with pytest.raises(WorkerError, match="job a job: cancelled"):
        follow(remote(service, "read"), job, tell)
    assert told == [
        "job a job: queued, no agent is there; start `batchwright agent` on the machine that is to "
        "train",
        "job a job: cancelled",
    ]
    waits = job.model_copy(update={"state": "planned", "auto": False})
    assert state_words(waits, "http://x") == (
        f"job a job: planned, waits to be approved at http://x/jobs/{job.id}"
    )


# ------------------------------------------------------------------------------------------ killed


@pytest.fixture
def server(tmp_path, monkeypatch):
    with a_server(tmp_path) as one:
        monkeypatch.setenv("BATCHWRIGHT_TOKEN", one.token)
        yield one


def started(server, folder, verbs):
    with (folder.parent / "agent.log").open("ab") as log:
        words = [server.url, str(folder), "one"]
        return verbs.start("agents", words, dict(os.environ), [log.fileno()])


@pytest.mark.slow
def test_an_agent_killed_in_probing_training_or_reporting_ends_each_job_once(
    server, hold, verbs, tmp_path
):
    done = {}
    with Service(server.url, server.token) as service:
        for verb in ("probe", "train", "report"):
            hold.write_text(verb)
            job = submit(service, JOB, name=verb, auto=True)
            agent = started(server, tmp_path / "agent", verbs)
            try:
                reached(hold, verb)
                agent.send_signal(signal.SIGKILL)
                agent.wait(SECONDS)
                hold.unlink()
                hold.with_name("reached").unlink()
                agent = started(server, tmp_path / "agent", verbs)
                path = f"/v1/jobs/{job.id}"
                wait_until(lambda path=path: service.get(path)["state"] not in OPEN)
                done[verb] = service.get(path)
                agent.send_signal(signal.SIGTERM)
                assert agent.wait(SECONDS) == 143
            finally:
                agent.kill()
                agent.wait()
        for verb, job in done.items():
            assert (job["state"], job["attempts"], job["error"]) == ("done", 2, None), verb
            run = service.get(f"/v1/runs/{job['run']}")
            assert (run["state"], run["records"]) == ("finished", 21)
            lines = lines_of(tmp_path / "agent" / "jobs" / job["id"] / "run")
            assert service.get(f"/v1/runs/{job['run']}/records")["records"] == lines


OPEN = ("queued", "probing", "planned", "training")
