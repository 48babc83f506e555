"""A job's files on their way: sent while an agent works, fetched by the one that goes on."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import held_network
from artifacts import bring, lease_of, names_in, restarted
from batchwright.cli import client_commands
from batchwright.client import artifacts
from batchwright.client.artifacts import JobFiles, RunFiles
from batchwright.client.http import Service, ServiceError
from batchwright.client.lease_heartbeat import LeaseHeartbeat
from batchwright.client.submitting import submit
from batchwright.errors import ArgumentError, BatchwrightError, FileError
from batchwright.records.documents import change_job
from batchwright.records.service import ArtifactInfo
from clients import SECONDS, lines_of, remote, start_service, step, wait_until, write_lines
from forked import Forked, command, forking
from samples import make_job, make_plan
from services import ADDRESS
from test_service_agent import JOB, Here, hold, made, reached, reached_in_process, state, verbs

__all__ = ["hold", "made", "reached_in_process", "verbs"]  # fixtures

ENDED = ("done", "failed", "cancelled")


@pytest.fixture
def kept(service, tmp_path, monkeypatch):
    """A service that keeps files, and agents that send them at once."""
    monkeypatch.setattr(artifacts, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(artifacts, "LOG_SECONDS", 0.05)
    monkeypatch.setattr(artifacts, "CHECKPOINT_SECONDS", 0.05)
    monkeypatch.setattr(artifacts, "RETRY_SECONDS", 0.05)
    return restarted(service, artifacts=str(tmp_path / "kept"))


@pytest.fixture
def waiting(kept):
    """A job that trains without being asked again."""
    return submit(remote(kept, "submit"), JOB, name="a job", auto=True)


def checkpoint_at(service, job):
    if "last.pt" not in names_in(service, job.id):
        return ""
    return service.get("read", f"/v1/jobs/{job.id}/artifacts/last.pt").text


def taken_over(service, clock, here):
    """The lease that another agent gets once the first one is silent for long enough."""
    found = []

    def asked():
        clock.go(10 * 24 * 3600)  # a heartbeat may come in between
        lease = here.agent._lease()
        found.extend([lease] if lease is not None else [])
        return bool(found)

    wait_until(asked)
    return found[0]


def held_in_training(service, job, hold, folder):
    """An agent half-way through a training, whose checkpoint the service has."""
    hold.write_text("train")
    one = Here(service, folder)
    thread = one.begin()
    reached(hold, "train")
    wait_until(lambda: checkpoint_at(service, job) == "after step 10", "no checkpoint came")
    return one, thread


# ------------------------------------------------------------------------------------------- sent


def test_a_jobs_files_are_at_the_service_when_it_is_done(kept, waiting, hold, tmp_path):
    assert Here(kept, tmp_path / "one").work()
    assert state(kept, waiting).state == "done"
    names = names_in(kept, waiting.id)
    assert names == [
        *("last.pt", "metrics.jsonl", "plan.json", "plan.log", "probe.log"),
        *("summary.json", "train.log"),
    ]
    run = tmp_path / "one" / "jobs" / waiting.id / "run"
    for name in ("metrics.jsonl", "plan.json", "summary.json"):
        found = kept.get("read", f"/v1/jobs/{waiting.id}/artifacts/{name}").content
        assert found == (run / name).read_bytes()
    assert checkpoint_at(kept, waiting) == "after step 20"


@pytest.mark.slow
def test_a_log_is_there_while_it_is_written_and_after_a_failure(kept, waiting, hold, tmp_path):
    hold.write_text("probe")
    thread = Here(kept, tmp_path / "one").begin()
    reached(hold, "probe")
    wait_until(lambda: "probe.log" in names_in(kept, waiting.id), "no log came")
    page = kept.sign_in("read").get(f"/jobs/{waiting.id}").text
    assert "probe begins" in page
    hold.write_text("fail plan")
    hold.unlink()
    thread.join(SECONDS)
    job = submit(remote(kept, "submit"), JOB, name="another", auto=True)
    hold.write_text("fail plan")
    assert Here(kept, tmp_path / "two", name="two").work()
    assert state(kept, job).state == "failed"
    log = kept.get("read", f"/v1/jobs/{job.id}/artifacts/plan.log").text
    assert log == "plan begins\nerror: plan cannot be done here\n"


@pytest.mark.slow
def test_the_log_of_a_failure_comes_once_the_service_is_back(
    kept, waiting, hold, tmp_path, monkeypatch
):
    monkeypatch.setattr(artifacts, "_LAST_TRIES", 1)
    put = JobFiles.put

    def away(files, *what):
        if state(kept, waiting).state not in ENDED:
            raise ServiceError("the service is away")
        time.sleep(0.3)  # time for some heartbeats, which nobody is to send any more
        put(files, *what)

    monkeypatch.setattr(JobFiles, "put", away)
    hold.write_text("fail plan")
    assert Here(kept, tmp_path / "one").work()
    log = kept.get("read", f"/v1/jobs/{waiting.id}/artifacts/plan.log").text
    assert log == "plan begins\nerror: plan cannot be done here\n"


def test_of_a_long_log_the_end_is_sent_from_a_whole_line_on(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(100)))
    assert artifacts._end_of(log, 10_000) == log.read_bytes()
    told = artifacts._end_of(log, 20).decode().splitlines()
    assert told[1:] == ["line 98", "line 99"]
    assert told[0] == f"[the first {log.stat().st_size - 16} bytes are left out]"
    log.write_bytes(b"a bar\n" + b"|" * 100)  # as a download shows its progress
    assert artifacts._end_of(log, 20) == b"[the first 86 bytes are left out]\n" + b"|" * 20


@pytest.mark.slow
def test_a_service_with_too_little_room_is_told_of_once_and_holds_nothing_up(
    service, kept, hold, tmp_path
):
    restarted(kept, limits={"artifact_bytes_per_job": 5})
    job = submit(remote(kept, "submit"), JOB, name="a job", auto=True)
    one, thread = Here(kept, tmp_path / "one"), None
    hold.write_text("train")
    thread = one.begin()
    reached(hold, "train")
    hold.unlink()
    thread.join(SECONDS)
    assert state(kept, job).state == "done"
    told = [line.split()[3] for line in one.told if "are free for it at the service" in line]
    assert {"plan.json", "metrics.jsonl", "summary.json"} <= {*told}
    assert "last.pt" not in told  # of no use without its records
    assert len(told) == len(set(told))


@pytest.mark.slow
def test_a_service_that_is_away_gets_the_newest_later(kept, waiting, hold, tmp_path):
    hold.write_text("train")
    one = Here(kept, tmp_path / "one")
    thread = one.begin()
    reached(hold, "train")
    one.agent._service._client.faults = iter(["refused", "lost", "answered", "503"] * 5)
    wait_until(lambda: checkpoint_at(kept, waiting) == "after step 10")
    hold.unlink()
    thread.join(SECONDS)
    assert state(kept, waiting).state == "done"
    wait_until(lambda: checkpoint_at(kept, waiting) == "after step 20")


@pytest.fixture
def brings(kept, waiting, tmp_path, monkeypatch):
    """Uploads a job's files when it is told to; with its heartbeat and what it has told."""
    monkeypatch.setattr(artifacts, "LOOK_SECONDS", SECONDS)
    lease, told = lease_of(kept, "one"), []
    heartbeat = SimpleNamespace(lost=False, ended=False, cancelled=False)
    with RunFiles(tmp_path, lease, remote(kept), heartbeat, told.append) as files:
        files.restore(make_plan())
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / "last.pt").write_bytes(b"weights")
        yield files, heartbeat, told
        heartbeat.lost = True  # the rest need not be sent


def test_what_cannot_be_read_here_is_not_told_as_a_lost_service(kept, waiting, brings, tmp_path):
    files, _, told = brings

    class Broken(io.BytesIO):
        reads = 0

        def read(self, size=-1):
            self.reads += 1
            if self.reads > 1:  # the digest is computed, and the upload begins
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(size)

    files._send_safely(files._send, "best.pt", Broken(b"weights"), 7)
    (tmp_path / "logs" / "plan.log").mkdir(parents=True)
    files._send_safely(files._send_logs, 100)
    assert told == [
        "a job: cannot read best.pt: Input/output error",
        f"a job: cannot read {tmp_path / 'logs' / 'plan.log'}: Is a directory",
    ]
    assert names_in(kept, waiting.id) == []


def test_an_upload_in_progress_is_broken_off_once_the_agent_is_to_stop(
    kept, waiting, brings, monkeypatch
):
    files, heartbeat, told = brings
    monkeypatch.setattr(artifacts, "LAST_SECONDS", -1.0)
    monkeypatch.setattr(artifacts, "_PIECE", 1)
    put = files._files.put

    def stopped_meanwhile(name, pieces, *what):
        def some():
            yield next(pieces)
            heartbeat.ended = True
            yield from pieces

        put(name, some(), *what)

    files._files.put = stopped_meanwhile
    files.settle()
    assert told == ["a job: its newest files are not at the service"]
    assert names_in(kept, waiting.id) == []


def refuse(files, *names):
    """Have the service refuse files, having no room for them."""
    put = files._files.put

    def refuse_some(name, *what):
        if name in names:
            raise ServiceError(f"there is no room for {name}", status=507)
        put(name, *what)

    files._files.put = refuse_some


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl"])
def test_no_checkpoint_is_brought_without_what_it_resumes_with(
    kept, waiting, brings, tmp_path, name
):
    files, _, told = brings
    for one in ("plan.json", "metrics.jsonl", "checkpoints/best.pt"):
        (tmp_path / "run" / one).write_text("{}")
    refuse(files, name)
    files._send_files(artifacts._WITH_CHECKPOINT)
    assert "last.pt" not in names_in(kept, waiting.id)
    assert not files.sent
    assert told == [f"a job: there is no room for {name}"]


def test_a_file_for_which_there_is_no_room_is_not_sent_at_all(kept, waiting, brings, tmp_path):
    """The service would refuse it, too, and most of it would be sent before."""
    files, _, told = brings

    def limit(most):  # of all jobs
        limits = kept.settings.limits.model_copy(update={"artifact_bytes": most})
        kept.store.artifacts._settings = kept.settings.model_copy(update={"limits": limits})

    put, sent = files._files.put, []
    files._files.put = lambda *what: (sent.append(what[0]), put(*what))
    limit(6)
    files._look_up()
    for _ in range(2):
        files._send_files(("last.pt",))
    assert sent == []
    assert told == [
        f"a job: {ADDRESS}: last.pt has 7 bytes, and 6 bytes are free for it at the "
        "service: delete artifacts that nobody needs, or have the limit raised"
    ]
    limit(7)
    files._send_files(("last.pt",))
    (tmp_path / "run" / "checkpoints" / "last.pt").write_bytes(b"changed")  # in its own place
    files._send_files(("last.pt",))
    assert sent == ["last.pt", "last.pt"]
    assert checkpoint_at(kept, waiting) == "changed"


def test_the_service_is_asked_for_room_only_where_it_may_have_too_little(
    kept, waiting, brings, tmp_path
):
    files, _, told = brings
    wire = files._files._service._client
    place = f"/v1/jobs/{waiting.id}/artifacts"

    def asked():
        """What was asked for since the last call."""
        new = [(method, path.removeprefix(place)) for method, path in wire.asked]
        wire.asked.clear()
        return new

    def send(*names):
        for name in names:
            file = artifacts._path(tmp_path / "run", name)
            file.write_text(f"{len(wire.asked)} more")
        files._send_files(names)

    asked()
    send("plan.json", "last.pt")
    send("last.pt")
    assert asked() == [("PUT", "/plan.json"), ("PUT", "/last.pt"), ("PUT", "/last.pt")]
    limits = kept.settings.limits.model_copy(update={"artifact_bytes": 15})  # others have the rest
    kept.store.artifacts._settings = kept.settings.model_copy(update={"limits": limits})
    for _ in range(2):
        send("best.pt")
    assert asked() == [("PUT", "/best.pt"), ("GET", "")]
    assert len(told) == 1


@pytest.mark.slow
def test_an_upload_that_another_one_overtook_is_told_of_and_sent_again(
    kept, waiting, brings, tmp_path, monkeypatch
):
    """As where a proxy has kept the former attempt, and sends it late."""
    files, _, told = brings
    monkeypatch.setattr(artifacts, "_LAST_TRIES", 2)
    store, late = kept.store.artifacts, []
    finish = store.finish

    def overtaken(upload):
        if not late:
            more = {"size": 6, "sha256": "0" * 64}
            late.append(store.begin(upload.job, upload.name, upload.key, **more))
        return finish(upload)

    monkeypatch.setattr(store, "finish", overtaken)
    files.settle()
    assert checkpoint_at(kept, waiting) == "weights"
    assert len(told) == 1
    assert "this upload was given up, as another one of this job has begun or it took" in told[0]


def test_after_a_lost_answer_the_service_is_asked_what_has_arrived(kept, waiting, brings, tmp_path):
    files, _, told = brings
    wire = files._files._service._client
    wire.asked.clear()
    wire.faults = iter(["answered"])
    for content in (b"weights", b"weights", b"changed since"):
        (tmp_path / "run" / "checkpoints" / "last.pt").write_bytes(content)
        files._send_safely(files._send_files, ("last.pt",))
    assert [method for method, _ in wire.asked] == ["PUT", "GET", "PUT"]
    assert checkpoint_at(kept, waiting) == "changed since"
    assert len(told) == 1


def test_a_disk_without_a_byte_left_still_brings_its_checkpoint_and_knows_it_again(
    kept, waiting, brings, tmp_path, monkeypatch
):
    def full(text, path):
        raise FileError(f"cannot write {path}: No space left on device")

    files, heartbeat, told = brings
    monkeypatch.setattr(artifacts, "write_text", full)
    files.settle()
    assert checkpoint_at(kept, waiting) == "weights"
    assert files.sent
    again = RunFiles(tmp_path, files._lease, remote(kept), heartbeat, told.append)
    (tmp_path / "run" / "own").touch()
    again.restore(make_plan())
    assert (tmp_path / "run" / "own").exists()  # nothing was fetched in its place
    assert told == []


def test_a_folder_without_a_checkpoint_lacks_none_at_the_service(kept, waiting, tmp_path):
    """So an agent that is stopped before it has one need not have the job kept for it."""
    assert RunFiles(tmp_path, lease_of(kept, "one"), remote(kept), None, print).sent


def test_a_checkpoint_is_brought_without_the_best_one(kept, waiting, brings, tmp_path):
    files, _, _ = brings
    (tmp_path / "run" / "checkpoints" / "best.pt").write_text("best")
    refuse(files, "best.pt")
    files._send_files(artifacts._WITH_CHECKPOINT)
    assert names_in(kept, waiting.id) == ["last.pt"]
    assert files.sent


def test_no_checkpoint_is_brought_without_the_records_before_it(kept, waiting, brings, tmp_path):
    """A run goes on from the best one, too."""
    files, _, _ = brings
    (tmp_path / "run" / "checkpoints" / "best.pt").write_text("best")
    (tmp_path / "run" / "metrics.jsonl").write_text("records")
    refuse(files, "metrics.jsonl")
    files._send_files(artifacts._WITH_CHECKPOINT)
    assert names_in(kept, waiting.id) == []


def test_the_best_checkpoint_of_a_run_that_has_ended_is_brought_without_its_records(
    kept, waiting, brings, tmp_path
):
    """Nobody goes on from it, and it is what the job was for."""
    files, _, _ = brings
    for name in ("metrics.jsonl", "summary.json", "checkpoints/best.pt"):
        (tmp_path / "run" / name).write_text("{}")
    refuse(files, "metrics.jsonl")
    files._send_files((*artifacts._WITH_CHECKPOINT, *artifacts._AT_THE_END))
    assert sorted(names_in(kept, waiting.id)) == ["best.pt", "summary.json"]


def test_a_folder_that_is_further_than_the_service_is_never_replaced(
    kept, waiting, brings, tmp_path, monkeypatch
):
    """As where the service has had no room for many checkpoints."""
    monkeypatch.setattr(artifacts, "_REMEMBERED", 3)
    files, heartbeat, told = brings
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    files._send_files(("last.pt",))
    refuse(files, "last.pt")
    for number in range(9):
        last.write_text(f"later on {number}")
        files._send_files(("last.pt",))
    assert checkpoint_at(kept, waiting) == "weights"
    again = RunFiles(tmp_path, files._lease, remote(kept), heartbeat, told.append)
    again.restore(make_plan())
    assert last.read_text() == "later on 8"


def test_logs_of_a_probe_are_there_though_the_lease_ends_with_the_plan(
    kept, hold, tmp_path, monkeypatch
):
    """A heartbeat after that is answered as if another agent had the job."""
    usual = LeaseHeartbeat.say

    def say(self, state=None, **more):
        orders = usual(self, state, **more)
        if state == "planned":
            with suppress(ServiceError):
                self._send()
            assert self.lost
        return orders

    monkeypatch.setattr(LeaseHeartbeat, "say", say)
    monkeypatch.setattr(artifacts, "LOOK_SECONDS", SECONDS)
    job = submit(remote(kept, "submit"), JOB, name="a job", auto=False)
    assert Here(kept, tmp_path / "one").work()
    assert names_in(kept, job.id) == ["plan.log", "probe.log"]


# ---------------------------------------------------------------------------------------- gone on


@pytest.mark.parametrize("version", [pytest.param("this", marks=pytest.mark.slow), "another"])
def test_another_agent_goes_on_from_the_checkpoint(kept, waiting, hold, tmp_path, clock, version):
    _, thread = held_in_training(kept, waiting, hold, tmp_path / "one")
    two = Here(kept, tmp_path / "two", name="two")
    lease = taken_over(kept, clock, two)
    thread.join(SECONDS)
    if version == "another":  # whose plan is the same choice and tells something else
        plan = kept.store.jobs.plan(waiting.id).model_copy(update={"considered": ()})
        assert bring(kept, lease, "plan.json", plan.model_dump_json().encode()).status_code == 200
    hold.unlink()
    two.agent._carry_out(lease)
    assert "a job: goes on from the checkpoint that the service has" in two.told
    found = state(kept, waiting)
    assert (found.state, found.agent) == ("done", "two")
    run = tmp_path / "two" / "jobs" / waiting.id / "run"
    lines = lines_of(run)
    assert [line.get("step") for line in lines] == [*range(1, 21), None]
    assert (run / "checkpoints" / "last.pt").read_text() == "after step 20"
    assert kept.store.runs.get(found.run).records == 21  # the whole run, from its start
    assert not list((tmp_path / "two" / "jobs" / waiting.id).glob("fetched"))


@pytest.mark.slow
def test_a_job_whose_agent_stopped_with_all_at_the_service_is_kept_for_nobody(
    kept, waiting, hold, tmp_path, clock
):
    one, thread = held_in_training(kept, waiting, hold, tmp_path / "one")
    one.agent._stopping.set()
    thread.join(SECONDS)
    assert state(kept, waiting).state == "planned"
    two = Here(kept, tmp_path / "two", name="two")
    clock.go(31.0)
    hold.unlink()
    assert two.work()
    assert (state(kept, waiting).state, state(kept, waiting).agent) == ("done", "two")
    assert "a job: goes on from the checkpoint that the service has" in two.told


@pytest.mark.slow
def test_an_agent_that_comes_back_goes_on_from_its_own_folder(kept, waiting, hold, tmp_path):
    one, thread = held_in_training(kept, waiting, hold, tmp_path / "one")
    one.agent._stopping.set()
    thread.join(SECONDS)
    hold.unlink()
    run = tmp_path / "one" / "jobs" / waiting.id / "run"
    (run / "checkpoints" / "last.pt").write_text("later than what was sent")
    again = Here(kept, tmp_path / "one")
    assert again.work()
    assert not any("goes on from" in line for line in again.told)
    assert [line.get("step") for line in lines_of(run)] == [*range(1, 21), None]


@pytest.mark.slow
def test_an_agent_whose_folder_was_overtaken_takes_what_is_newer(
    kept, waiting, hold, tmp_path, clock
):
    _, thread = held_in_training(kept, waiting, hold, tmp_path / "one")
    two = Here(kept, tmp_path / "two", name="two")
    lease = taken_over(kept, clock, two)
    thread.join(SECONDS)
    assert bring(kept, lease, "last.pt", b"of two").status_code == 200
    hold.unlink()
    one = Here(kept, tmp_path / "one")
    lease = taken_over(kept, clock, one)
    one.agent._carry_out(lease)
    assert "a job: goes on from the checkpoint that the service has" in one.told
    assert state(kept, waiting).state == "done"


@pytest.mark.slow
def test_an_agent_that_trained_on_while_it_was_cut_off_keeps_what_it_has(
    kept, waiting, hold, tmp_path, clock
):
    _, thread = held_in_training(kept, waiting, hold, tmp_path / "one")
    two = Here(kept, tmp_path / "two", name="two")
    lease = taken_over(kept, clock, two)
    thread.join(SECONDS)
    assert bring(kept, lease, "last.pt", b"of two").status_code == 200
    run = tmp_path / "one" / "jobs" / waiting.id / "run"
    write_lines(run, step(12))
    (run / "checkpoints" / "last.pt").write_text("further than two")
    hold.unlink()
    one = Here(kept, tmp_path / "one")
    lease = taken_over(kept, clock, one)
    (run / "own").touch()
    one.agent._carry_out(lease)
    assert "a job: goes on from this folder, which is further" in one.told
    assert (run / "own").exists()
    assert state(kept, waiting).state == "done"


LONGER = tuple(one.model_copy(update={"epochs": 10**6}) for one in make_plan().stages)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"job": make_job(seed=9)}, {"stages": LONGER}, {"method": "cyclic"}]
)
def test_a_checkpoint_of_another_plan_is_not_gone_on_from(
    kept, waiting, hold, tmp_path, clock, change
):
    _, thread = held_in_training(kept, waiting, hold, tmp_path / "one")
    two = Here(kept, tmp_path / "two", name="two")
    lease = taken_over(kept, clock, two)
    thread.join(SECONDS)
    plan = make_plan().model_copy(update=change).model_dump_json().encode()
    bring(kept, lease, "plan.json", plan)
    hold.unlink()
    two.agent._carry_out(lease)
    told = "the checkpoint at the service is not gone on from: "
    assert any(line.startswith(told) for line in two.told)
    assert state(kept, waiting).state == "done"
    run = tmp_path / "two" / "jobs" / waiting.id / "run"
    assert [line.get("step") for line in lines_of(run)] == [*range(1, 21), None]


@pytest.mark.slow
def test_a_checkpoint_that_has_gone_is_told_of_and_training_begins_anew(
    kept, waiting, hold, tmp_path, clock
):
    _, thread = held_in_training(kept, waiting, hold, tmp_path / "one")
    two = Here(kept, tmp_path / "two", name="two")
    lease = taken_over(kept, clock, two)
    thread.join(SECONDS)
    for path in (tmp_path / "kept").iterdir():
        path.unlink()
    hold.unlink()
    two.agent._carry_out(lease)
    assert any("last.pt is not fetched" in line and "has gone" in line for line in two.told)
    assert state(kept, waiting).state == "done"


@pytest.mark.slow
def test_a_download_is_broken_off_once_the_agent_is_to_stop(
    kept, waiting, hold, tmp_path, clock, monkeypatch
):
    _, thread = held_in_training(kept, waiting, hold, tmp_path / "one")
    two = Here(kept, tmp_path / "two", name="two")
    lease = taken_over(kept, clock, two)
    thread.join(SECONDS)
    hold.unlink()
    pieces = []

    def get_file(self, path, headers=None):
        for number in range(100):
            pieces.append(number)
            yield b""
            two.agent._stopping.set()

    monkeypatch.setattr(Service, "get_file", get_file)
    two.agent._carry_out(lease)
    assert two.told[-1] == "a job: given back"
    assert len(pieces) == 2
    assert not list((tmp_path / "two" / "jobs" / waiting.id).glob("fetched"))


def test_what_comes_damaged_is_not_taken(kept, tmp_path):
    kept.store.jobs.submit("a job", make_job(), auto=True, owner="submit")
    lease = lease_of(kept, "one")
    bring(kept, lease, "last.pt", b"weights")
    files = JobFiles(remote(kept, "read"), lease.job.id)
    (info,) = files.listed().artifacts
    for change in ({"sha256": "0" * 64}, {"size": 3}, {"size": 9}):
        wrong = ArtifactInfo.model_validate(info.model_dump() | change)
        with pytest.raises(ServiceError, match="has it damaged"):
            files.fetch(wrong, tmp_path / "last.pt")
    assert not [path for path in tmp_path.iterdir() if "last.pt" in path.name]
    with pytest.raises(FileError, match="cannot write"):
        files.fetch(info, tmp_path / "no folder" / "last.pt")
    files.save(info, tmp_path / "new" / "last.pt")
    assert (tmp_path / "new" / "last.pt").read_bytes() == b"weights"
    with pytest.raises(FileError, match="exists"):
        files.save(info, tmp_path / "new" / "last.pt")


def test_files_are_listed_and_fetched_by_a_command(kept, reached_in_process, tmp_path, capsys):
    kept.store.jobs.submit("a job", make_job(), auto=True, owner="submit")
    lease = lease_of(kept, "one")
    client_commands.fetch(lease.job.id)
    page = f"http://127.0.0.1:8400/jobs/{lease.job.id}"
    assert f"keeps nothing of this job: {page} shows" in capsys.readouterr().err
    bring(kept, lease, "last.pt", b"w" * 2048)
    bring(kept, lease, "train.log", b"one\n\x1b[31mtwo\n")
    client_commands.fetch(lease.job.id)
    assert capsys.readouterr().out == "last.pt\t2.00 KiB\ntrain.log\t13 bytes\n"
    client_commands.fetch(lease.job.id, as_json=True)
    told = json.loads(capsys.readouterr().out)["artifacts"]
    assert [(one["name"], one["size"]) for one in told] == [("last.pt", 2048), ("train.log", 13)]
    with pytest.raises(ArgumentError, match="--json lists the files"):
        client_commands.fetch(lease.job.id, names=["last.pt"], as_json=True)
    client_commands.fetch(lease.job.id, "http://127.0.0.1:8400", ["train.log"])
    shown = capsys.readouterr().out
    assert shown.startswith("one\n")
    assert "\x1b" not in shown
    client_commands.fetch(lease.job.id, "http://127.0.0.1:8400", ["last.pt"], out=tmp_path)
    assert (tmp_path / "last.pt").read_bytes() == b"w" * 2048
    with pytest.raises(BatchwrightError, match=r"keeps no best\.pt of this job: there is last\.pt"):
        client_commands.fetch(lease.job.id, "http://127.0.0.1:8400", ["best.pt"])
    with pytest.raises(
        ArgumentError, match=r"'first' is no identifier of a job: .*submit. printed"
    ):
        client_commands.fetch("first", "http://127.0.0.1:8400")


# ------------------------------------------------------------------------------ processes, killed

AGENT = """
import sys
from batchwright.client import artifacts
artifacts.LOOK_SECONDS = artifacts.CHECKPOINT_SECONDS = 0.1
from batchwright.cli.commands import main
main()
"""


@pytest.mark.slow
def test_a_training_goes_on_elsewhere_and_ends_with_the_same_weights(tmp_path, monkeypatch):
    """As one that nobody interrupted; the first agent and all that it started are killed.

    It is held until its first checkpoint is with the service, and again until the third is.
    """
    code = "network=held_network:network"
    keys = {"data": "digits", "network": code.partition("=")[2], "workers": 1, "seed": 5}
    how = {"global_batch": 32, "method": "plain", "checkpoint_steps": 10, "precision": "float32"}
    how |= {"epochs": 4, "probe.budget": 0.3, "probe.learning": 0}
    job = change_job(JOB, keys | how)
    processes, log = [], tmp_path / "server.log"
    (tmp_path / "agent.py").write_text(AGENT)
    leases = ("--lease-seconds", "5", "--keep-seconds", "0", "--rate", "10000")
    serve = ("--port", "0", *leases, "--database", f"sqlite:///{tmp_path}/service.sqlite")
    apart = {"cwd": tmp_path, "env": os.environ, "prints": tmp_path}

    def agent(name):
        words = ("agent", "--server", url, "--folder", str(tmp_path / name), "--name", name)
        processes.append(Forked((*words, "--allow", code), program="agent.py", **apart))
        return processes[-1]

    with forking(), log.open("wb") as said:
        processes.append(start_service(*serve, log=said.fileno()))
        try:
            wait_until(lambda: "serves at http://" in log.read_text(), "no server")
            url = re.findall(r"serves at (http://[\d.:]+)", log.read_text())[0]
            token = (tmp_path / "local-token").read_text().strip()
            monkeypatch.setenv("BATCHWRIGHT_TOKEN", token)
            with Service(url, token) as service:
                info = submit(service, job, name="a job", auto=True)
                place = f"/v1/jobs/{info.id}"

                def files():
                    time.sleep(0.1)  # to answer takes from what is waited for
                    found = service.get(f"{place}/artifacts")["artifacts"]
                    return {one["name"]: one["sha256"] for one in found}

                trains = f"one/jobs/{info.id}/run/checkpoints"
                held_network.hold(tmp_path, trains, after=12)
                one = agent("one")
                wait_longer(lambda: "last.pt" in files(), one.said)
                first = files()["last.pt"]
                held_network.hold(tmp_path, trains, after=32)
                wait_longer(lambda: files()["last.pt"] != first, one.said)
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()
                held_network.release(tmp_path)
                two = agent("two")

                def ended():
                    time.sleep(0.5)
                    return service.get(place)["state"] in ENDED

                wait_longer(ended, two.said)
                assert service.get(place)["state"] == "done", two.said()
                assert "goes on from the checkpoint" in "".join(two.said())
                (tmp_path / "plan.json").write_text(json.dumps(service.get(f"{place}/plan")))
                found = service.get(place)
                epochs = service.get(f"/v1/runs/{found['run']}")["epochs_done"]
            assert epochs == 4
            words = ("train", "plan.json", code, "--out", "whole", "--report-to", "")
            done = command(*words, **apart)
            assert done.returncode == 0, done.stderr
            whole = weights(tmp_path / "whole")
            again = weights(tmp_path / "two" / "jobs" / info.id / "run")
            assert whole.keys() == again.keys()
            assert all(torch.equal(whole[name], again[name]) for name in whole)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def wait_longer(true, told):
    try:
        wait_until(true)
    except AssertionError as error:
        raise AssertionError(told()) from error


def weights(run: Path):
    content = io.BytesIO((run / "checkpoints" / "last.pt").read_bytes())
    return torch.load(content, weights_only=True)["model"]
