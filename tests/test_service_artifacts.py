"""Files of jobs at the service: whole or not at all, from who has the job, within their room."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import re
import resource
import signal
import socket
from pathlib import Path

import anyio
import anyio.to_thread
import fsspec
import httpx
import pytest
from sqlalchemy.exc import OperationalError

from artifacts import (
    bring,
    headers_of,
    lease_of,
    leased,
    names_in,
    over_postgresql,
    restarted,
)
from batchwright.client.artifacts import JobFiles
from batchwright.client.http import Service as Remote
from batchwright.client.submitting import submit
from batchwright.errors import BatchwrightError
from batchwright.records.service import AgentIntroduction, JobArtifacts, JobProgress, Lease
from batchwright.service.api import artifacts as api
from batchwright.service.pages.assets import assets
from batchwright.service.problems import Conflict, Overtaken, Refused, Unavailable
from batchwright.service.store.artifact_place import ArtifactPlace
from clients import a_server, wait_until
from samples import make_job
from services import ADDRESS

MIB = 2**20
OTHER_KEY = "00000000-0000-4000-8000-000000000001"


PLACES = ["folder", "memory", pytest.param("postgresql", marks=pytest.mark.slow)]


@pytest.fixture(params=PLACES)
def keeping(service, tmp_path, request):
    """The service, which keeps artifacts; the last one over another database."""
    folder = tmp_path / "artifacts"
    url = f"memory://{tmp_path.name}" if request.param == "memory" else str(folder)
    if request.param == "postgresql":
        service = over_postgresql(service, request)
    return restarted(service, artifacts=url)


@pytest.fixture
def kept(service, tmp_path):
    """The service, which keeps artifacts in a folder."""
    return restarted(service, artifacts=str(tmp_path / "artifacts"))


def objects_in(service):
    """Names of all objects that there are, once what is gone is removed."""
    assert service.app.state.remover.wait(300)
    files, root = fsspec.core.url_to_fs(service.settings.artifacts)
    return [Path(path).name for path in files.find(root)]


def fetched(service, lease, name, scope="read", **headers):
    path = f"/v1/jobs/{lease.job.id}/artifacts/{name}"
    return service.get(scope, path, headers=headers)


# ------------------------------------------------------------------------------- brought and kept


def test_the_newest_of_each_name_is_kept_and_handed_out(keeping):
    lease = leased(keeping)
    first, second = os.urandom(MIB + 7), b"second"
    assert bring(keeping, lease, "last.pt", first).status_code == 200
    assert bring(keeping, lease, "train.log", b"a line\n").json()["size"] == 7
    assert fetched(keeping, lease, "last.pt").content == first
    assert bring(keeping, lease, "last.pt", second).status_code == 200
    answer = fetched(keeping, lease, "last.pt")
    assert answer.content == second
    assert answer.headers["repr-digest"] == headers_of(None, second)["repr-digest"]
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment")
    listed = JobArtifacts.model_validate(
        keeping.get("read", f"/v1/jobs/{lease.job.id}/artifacts").json()
    )
    assert [(one.name, one.size) for one in listed.artifacts] == [("last.pt", 6), ("train.log", 7)]
    assert listed.kept
    assert len(objects_in(keeping)) == 2


def test_a_file_that_is_empty_is_one_too(keeping):
    lease = leased(keeping)
    assert bring(keeping, lease, "metrics.jsonl", b"").status_code == 200
    assert fetched(keeping, lease, "metrics.jsonl").content == b""


@pytest.mark.parametrize("sent", [b"", b"shor", b"longer than announced", b"othe7"])
def test_what_is_not_as_announced_is_not_kept_and_harms_nothing(keeping, sent):
    lease = leased(keeping)
    assert bring(keeping, lease, "last.pt", b"first").status_code == 200
    answer = bring(keeping, lease, "last.pt", b"other", sent=sent)
    assert answer.status_code == 422
    assert fetched(keeping, lease, "last.pt").content == b"first"
    assert len(objects_in(keeping)) == 1


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("repr-digest", "sha-256=:short=:"),
        ("repr-digest", "md5=:" + "A" * 43 + "=:"),
        ("content-length", "-1"),
        ("batchwright-lease", "../../etc"),
    ],
)
def test_an_upload_says_what_it_is(kept, header, value):
    assert bring(kept, leased(kept), "last.pt", b"x", **{header: value}).status_code == 422
    assert objects_in(kept) == []


@pytest.mark.parametrize(
    "name", ["../service.sqlite", "%2e%2e%2fservice.sqlite", "last.pt%00", "x.log", "LAST.PT"]
)
def test_only_names_that_are_known_are_taken(kept, name):
    lease = leased(kept)
    for answer in (bring(kept, lease, name, b"x"), fetched(kept, lease, name)):
        assert answer.status_code in (404, 405, 422)
    assert objects_in(kept) == []


def test_a_service_without_a_place_keeps_none_and_says_so(service):
    lease = leased(service)
    listed = service.get("read", f"/v1/jobs/{lease.job.id}/artifacts").json()
    assert listed == {"kept": False, "room": 0, "artifacts": []}
    assert bring(service, lease, "train.log", b"x").status_code == 507
    assert fetched(service, lease, "train.log").status_code == 404


# ------------------------------------------------------------------------------------ who may what


def test_only_the_newest_lease_brings_files(kept):
    old = leased(kept)
    assert bring(kept, old, "last.pt", b"of one").status_code == 200
    kept.clock.go(1000)
    new = lease_of(kept, "two")
    answer = bring(kept, old, "last.pt", b"of one again")
    assert answer.status_code == 409
    assert "retry-after" not in answer.headers
    assert "lease of this job was lost" in answer.json()["detail"]
    made_up = bring(kept, old, "last.pt", b"x", **{"batchwright-lease": OTHER_KEY})
    assert made_up.status_code == 409
    assert bring(kept, new, "last.pt", b"of two").status_code == 200
    assert fetched(kept, new, "last.pt").content == b"of two"


def test_a_lease_that_is_lost_while_a_file_comes_brings_nothing(kept):
    lease = leased(kept)
    assert bring(kept, lease, "last.pt", b"whole").status_code == 200

    def slowly():
        yield b"half"
        kept.clock.go(1000)
        lease_of(kept, "two")
        yield b"half"

    assert bring(kept, lease, "last.pt", b"halfhalf", sent=slowly()).status_code == 409
    assert fetched(kept, lease, "last.pt").content == b"whole"
    assert len(objects_in(kept)) == 1


def test_logs_of_a_lease_that_ended_well_still_come(kept):
    lease = leased(kept)
    kept.store.jobs.progress(lease.job.id, JobProgress(key=lease.key, state="failed", error="no"))
    assert bring(kept, lease, "probe.log", b"why").status_code == 200


def test_who_may_not_read_sees_files_of_its_own_jobs_only(kept):
    lease = leased(kept)
    bring(kept, lease, "last.pt", b"weights")
    place, key = f"/v1/jobs/{lease.job.id}/artifacts", {"batchwright-lease": lease.key}
    kept.tokens["other"] = kept.store.tokens.create("other", ["report"])
    for path in (place, f"{place}/last.pt"):
        assert kept.get("read", path).status_code == 200
        assert kept.get("report", path, headers=key).status_code == 200
        assert kept.get("report", path).status_code == 409
        assert kept.get("report", path, headers={"batchwright-lease": OTHER_KEY}).status_code == 409
        assert kept.get("other", path, headers=key).status_code == 409
        assert kept.get("submit", path).status_code == 403
        assert kept.get(None, path).status_code == 401
    assert bring(kept, lease, "last.pt", b"x", scope="other").status_code == 409
    assert bring(kept, lease, "last.pt", b"x", scope="read").status_code == 403
    stranger = kept.client.put(f"{place}/last.pt", content=b"x", headers=headers_of(lease, b"x"))
    assert stranger.status_code == 401


def test_a_file_is_deleted_by_who_submitted_the_job(kept):
    lease = leased(kept)
    bring(kept, lease, "best.pt", b"weights")
    path = f"/v1/jobs/{lease.job.id}/artifacts/best.pt"
    kept.tokens["other"] = kept.store.tokens.create("other", ["submit"])
    assert kept.delete("other", path).status_code == 403
    assert kept.delete("submit", path).status_code == 204
    assert kept.delete("submit", path).status_code == 404
    assert objects_in(kept) == []


def test_a_browser_saves_files_and_never_shows_them(kept):
    lease = leased(kept)
    bring(kept, lease, "summary.json", b"<script>alert(1)</script>")
    page = f"/jobs/{lease.job.id}/artifacts/summary.json"
    answer = kept.sign_in("read").get(page)
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert kept.client.get(page).status_code == 401


def test_the_end_of_a_log_keeps_its_lines_in_one_column(kept):
    lease = leased(kept)
    bring(kept, lease, "train.log", b"part        time\n  compute  1.85 s\n")
    page = kept.sign_in("read").get(f"/jobs/{lease.job.id}").text
    shown = re.search(r"<pre class=\"(\w+)\"[^>]*train\.log\">part        time\n  compute", page)
    assert shown is not None
    style = assets()["style.css"].content.decode()
    rules = dict(re.findall(r"^([\w.-]+) \{([^}]*)\}", style, re.M))
    assert "white-space: pre;" in rules[f".{shown[1]}"]
    assert "columns" not in rules["pre"] + rules[f".{shown[1]}"]


def test_a_log_whose_last_line_is_very_long_is_shown_from_within_it(kept):
    lease = leased(kept)
    bring(kept, lease, "probe.log", b"prologue\n" + b"\r".join(b"%d kB" % at for at in range(2000)))
    page = kept.sign_in("read").get(f"/jobs/{lease.job.id}").text
    assert "1999 kB" in page
    assert "prologue" not in page


# ------------------------------------------------------------------------------------------- room


def test_a_job_and_all_of_them_have_so_much_room(service, tmp_path):
    limits = {"artifact_bytes": 100, "artifact_bytes_per_job": 60}
    kept = restarted(service, artifacts=str(tmp_path / "artifacts"), limits=limits)
    one, two = leased(kept), leased(kept, "two")
    assert bring(kept, one, "last.pt", b"x" * 61).status_code == 507
    assert bring(kept, one, "last.pt", b"x" * 60).status_code == 200
    assert bring(kept, one, "last.pt", b"y" * 60).status_code == 200  # in its own place
    refused = bring(kept, one, "best.pt", b"x")
    assert refused.status_code == 507
    assert "for this job" in refused.json()["detail"]
    assert "\n" not in refused.json()["detail"]
    refused = bring(kept, two, "last.pt", b"x" * 41)
    assert refused.status_code == 507
    assert "at this service" in refused.json()["detail"]
    assert bring(kept, two, "last.pt", b"x" * 40).status_code == 200
    assert fetched(kept, one, "last.pt").content == b"y" * 60
    assert kept.get("read", f"/v1/jobs/{two.job.id}/artifacts").json()["room"] == 0


@pytest.mark.parametrize("name", ["last.pt", "best.pt"])
def test_an_upload_that_a_killed_service_left_takes_no_room(service, tmp_path, name):
    limits = {"artifact_bytes_per_job": 60}
    kept = restarted(service, artifacts=str(tmp_path / "artifacts"), limits=limits)
    lease, sha256 = leased(kept), "0" * 64
    kept.store.artifacts.begin(lease.job.id, "last.pt", lease.key, size=50, sha256=sha256)
    assert kept.get("read", f"/v1/jobs/{lease.job.id}/artifacts").json()["room"] == 60
    assert bring(kept, lease, name, b"x" * 60).status_code == 200


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EIO, 503)])
def test_a_disk_that_takes_no_more_is_told_in_a_line_and_loses_nothing(
    kept, monkeypatch, number, status
):
    lease = leased(kept)
    bring(kept, lease, "last.pt", b"whole")
    opened = kept.store.artifacts.place._files.open

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, content):
            self.file.write(content[:1])
            raise OSError(number, os.strerror(number))

        def __getattr__(self, name):
            return getattr(self.file, name)

    def full(path, mode="rb", **more):
        file = opened(path, mode, **more)
        return Full(file) if mode == "wb" else file

    monkeypatch.setattr(kept.store.artifacts.place._files, "open", full)
    answer = bring(kept, lease, "last.pt", b"newer")
    assert answer.status_code == status
    assert os.strerror(number) in answer.json()["detail"]
    assert str(kept.settings.artifacts) not in answer.text
    assert fetched(kept, lease, "last.pt").content == b"whole"
    monkeypatch.undo()
    assert bring(kept, lease, "last.pt", b"newer").status_code == 200
    assert len(objects_in(kept)) == 1


def test_a_disk_that_fails_to_sync_a_file_keeps_the_one_before(kept, monkeypatch):
    """As a network file system over its quota, which says so only then."""
    lease = leased(kept)
    bring(kept, lease, "last.pt", b"whole")

    def refuse(_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("batchwright.service.store.artifact_place.os.fsync", refuse)
    answer = bring(kept, lease, "last.pt", b"newer")
    monkeypatch.undo()
    assert answer.status_code == 507
    assert os.strerror(errno.EDQUOT) in answer.json()["detail"]
    assert fetched(kept, lease, "last.pt").content == b"whole"
    assert len(objects_in(kept)) == 1


def test_a_file_that_has_gone_from_the_disk_is_told_in_a_line(keeping):
    lease = leased(keeping)
    bring(keeping, lease, "last.pt", b"weights")
    files, root = fsspec.core.url_to_fs(keeping.settings.artifacts)
    files.rm_file(files.find(root)[0])
    answer = fetched(keeping, lease, "last.pt")
    assert answer.status_code == 404
    assert "has gone" in answer.json()["detail"]
    assert keeping.get("read", "/v1/jobs").status_code == 200
    assert bring(keeping, lease, "last.pt", b"again").status_code == 200


def test_so_many_come_and_go_at_once(service, tmp_path):
    kept = restarted(service, artifacts=str(tmp_path / "a"), limits={"transfers": 1})
    lease = leased(kept)
    with kept.app.state.transfers.one():
        answer = bring(kept, lease, "last.pt", b"x")
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
    assert bring(kept, lease, "last.pt", b"x").status_code == 200
    with kept.app.state.transfers.one():
        assert fetched(kept, lease, "last.pt").status_code == 429
    assert [fetched(kept, lease, "last.pt").status_code for _ in range(3)] == [200] * 3


def test_an_upload_beyond_those_that_come_is_told_so_and_does_not_wait(service, tmp_path):
    kept = restarted(service, artifacts=str(tmp_path / "a"), limits={"transfers": 1})
    lease = leased(kept)
    told = kept.headers("report") | headers_of(lease, b"xy")

    async def at_once():
        begun, go_on = anyio.Event(), anyio.Event()
        answers = {}

        async def slowly():
            yield b"x"
            begun.set()
            await go_on.wait()
            yield b"y"

        async def put(name, content):
            place = f"/v1/jobs/{lease.job.id}/artifacts/{name}"
            answers[name] = (await client.put(place, content=content, headers=told)).status_code

        transport = httpx.ASGITransport(kept.app)
        async with (
            httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client,
            anyio.create_task_group() as group,
        ):
            group.start_soon(put, "last.pt", slowly())
            await begun.wait()
            with anyio.move_on_after(10):
                await put("best.pt", b"xy")
            go_on.set()
        return answers

    assert anyio.run(at_once) == {"best.pt": 429, "last.pt": 200}


def test_a_client_that_goes_away_leaves_its_place_to_others_at_once(service, tmp_path):
    kept = restarted(service, artifacts=str(tmp_path / "a"), limits={"transfers": 1})
    lease = leased(kept)
    bring(kept, lease, "last.pt", bytes(4 * MIB))
    headers = {"host": "127.0.0.1:8400", **kept.headers("read")}

    async def going():
        begun, asked = anyio.Event(), []

        async def receive():
            asked.append(1)
            if len(asked) == 1:
                return {"type": "http.request", "body": b"", "more_body": False}
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.body" and message["body"]:
                begun.set()
                await anyio.sleep_forever()  # as where nobody takes it

        path = f"/v1/jobs/{lease.job.id}/artifacts/last.pt"
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b""}
        scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
        await kept.app(scope, receive, send)
        with kept.app.state.transfers.one():  # there is one
            pass

    gc.disable()
    try:
        anyio.run(going)
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------- removed


def test_files_go_with_their_job(service, tmp_path):
    kept = restarted(service, artifacts=str(tmp_path / "a"), retention_days=10.0)
    lease = leased(kept)
    bring(kept, lease, "last.pt", b"weights")
    kept.store.jobs.progress(lease.job.id, JobProgress(key=lease.key, state="failed"))
    kept.clock.go(11 * 24 * 3600)
    for _ in range(2):  # it must have been so at the last look, too
        kept.store.tidy()
    kept.app.state.remover.soon()
    assert objects_in(kept) == []
    assert fetched(kept, lease, "last.pt").status_code == 404


def test_what_cannot_be_removed_keeps_nothing_else(kept, monkeypatch):
    lease, place, stuck = leased(kept), kept.store.artifacts.place, []
    usual = place.remove

    def remove(name):
        if name in (stuck or [name]):
            stuck.append(name)
            raise Unavailable("the place of artifacts cannot be cleared: Device or resource busy")
        usual(name)

    monkeypatch.setattr(place, "remove", remove)
    for content in (b"first", b"second", b"third"):
        bring(kept, lease, "last.pt", content)
    kept.app.state.remover.soon()
    assert len(objects_in(kept)) == 2  # the newest, and the first
    monkeypatch.undo()
    kept.app.state.remover.soon()
    assert len(objects_in(kept)) == 1


def test_what_a_killed_service_left_on_its_way_is_removed(kept):
    lease = leased(kept)
    artifacts = kept.store.artifacts
    coming = artifacts.begin(lease.job.id, "last.pt", lease.key, size=9, sha256="0" * 64)
    with artifacts.place.writing(coming.id) as file:
        file.write(b"half")
    assert names_in(kept, lease.job.id) == []
    kept.store.tidy()
    kept.app.state.remover.soon()
    assert len(objects_in(kept)) == 1  # it may be coming still
    kept.clock.go(24 * 3600)
    kept.store.tidy()
    kept.app.state.remover.soon()
    assert objects_in(kept) == []
    with pytest.raises(Overtaken, match=r"or it took too long: send last\.pt again$"):
        artifacts.finish(coming)


@pytest.mark.parametrize("name", ["last.pt", "best.pt"])
def test_of_two_that_come_at_once_the_later_one_counts(kept, name):
    lease, other = leased(kept), leased(kept, "two")
    bring(kept, lease, name, b"old")

    def slowly():
        yield b"fir"
        assert bring(kept, lease, name, b"second").status_code == 200
        yield b"st"

    def beside():
        yield b"fir"
        answer = bring(kept, lease, "last.pt", b"first", sent=slowly())
        assert (answer.status_code, answer.headers["retry-after"]) == (409, "1")
        assert "send last.pt again" in answer.json()["detail"]
        yield b"st"

    # Another job's upload goes on.
    assert bring(kept, other, "last.pt", b"first", sent=beside()).status_code == 200
    assert fetched(kept, lease, name).content == b"second"
    assert names_in(kept, lease.job.id) == [name]
    assert len(objects_in(kept)) == 2


def test_one_that_comes_after_a_newer_one_replaces_nothing(keeping):
    """As from a proxy that has kept it while its sender sent another."""
    lease, header = leased(keeping), "batchwright-replaces"
    assert bring(keeping, lease, "last.pt", b"newer", **{header: ""}).status_code == 200
    late = bring(keeping, lease, "last.pt", b"older", **{header: ""})
    assert (late.status_code, late.headers["retry-after"]) == (409, "1")
    assert "send what is newer" in late.json()["detail"]
    assert fetched(keeping, lease, "last.pt").content == b"newer"
    known = hashlib.sha256(b"newer").hexdigest()
    assert bring(keeping, lease, "last.pt", b"newest", **{header: known}).status_code == 200
    assert fetched(keeping, lease, "last.pt").content == b"newest"
    assert bring(keeping, lease, "last.pt", b"x", **{header: "no digest"}).status_code == 422
    assert len(objects_in(keeping)) == 1


def test_one_that_comes_after_its_row_was_removed_leaves_no_object(keeping):
    lease, artifacts = leased(keeping), keeping.store.artifacts
    told = (lease.job.id, "last.pt", lease.key)
    late = artifacts.begin(*told, size=4, sha256="0" * 64)
    bring(keeping, lease, "last.pt", b"second")
    assert len(objects_in(keeping)) == 1  # the row of the first has gone
    with artifacts.place.writing(late.id) as file:
        file.write(b"late")
    with pytest.raises(Conflict):
        artifacts.finish(late)
    artifacts.give_up(late)
    assert len(objects_in(keeping)) == 1


def test_an_upload_that_is_kept_though_the_answer_of_the_database_was_lost_stays(kept, monkeypatch):
    lease, usual = leased(kept), kept.store.artifacts.finish
    assert bring(kept, lease, "last.pt", b"first").status_code == 200

    def finish(upload):
        usual(upload)
        raise OperationalError("COMMIT", {}, Exception("server closed the connection"))

    monkeypatch.setattr(kept.store.artifacts, "finish", finish)
    assert bring(kept, lease, "last.pt", b"second").status_code == 503
    assert fetched(kept, lease, "last.pt").content == b"second"
    assert len(objects_in(kept)) == 1


# ------------------------------------------------------------------------------------------ places


def test_a_place_that_cannot_be_used_is_refused_in_a_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for url in (str(file / "folder"), "nosuch://bucket/folder"):
        with pytest.raises(BatchwrightError) as caught:
            ArtifactPlace(url)
        assert "\n" not in str(caught.value)
    place = tmp_path / "deep" / "folder"
    ArtifactPlace(str(place))
    assert list(place.iterdir()) == []
    assert place.stat().st_mode & 0o077 == 0


def test_a_folder_that_was_there_keeps_its_permissions_and_files_in_it_are_private(tmp_path):
    """As `/tmp`, or what a group of people shares."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with ArtifactPlace(str(shared)).writing(OTHER_KEY) as file:
        file.write(b"weights")
    assert shared.stat().st_mode & 0o777 == 0o755
    assert (shared / OTHER_KEY).stat().st_mode & 0o777 == 0o600


def a_lease(remote: Remote) -> Lease:
    """A job of a server that is a process, which an agent has."""
    submit(remote, make_job(), name="a job", auto=True)
    introduction = AgentIntroduction(name="one", allow=())
    remote.put("/v1/agents/one", introduction.model_dump_json().encode())
    return Lease.model_validate(remote.post("/v1/agents/one/lease"))


def peak(process):
    """Most bytes that a process has had in memory."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@pytest.mark.slow
def test_a_large_file_is_never_whole_in_memory_at_either_end(tmp_path):
    size, piece = 128 * MIB, os.urandom(MIB)
    found = hashlib.sha256()
    for _ in range(size // MIB):
        found.update(piece)
    with a_server(tmp_path) as server, Remote(server.url, server.token) as remote:
        lease = a_lease(remote)
        files = JobFiles(remote, lease.job.id, lease.key)
        files.put("best.pt", [piece], MIB, hashlib.sha256(piece).hexdigest(), "")
        before, ours = peak(server.process), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        files.put("last.pt", (piece for _ in range(size // MIB)), size, found.hexdigest(), "")
        info = next(one for one in files.listed().artifacts if one.name == "last.pt")
        files.fetch(info, tmp_path / "last.pt")
        assert peak(server.process) - before < 64 * MIB
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - ours
        assert more * 1024 < 64 * MIB
    assert (tmp_path / "last.pt").stat().st_size == size


@pytest.mark.slow
def test_an_upload_that_comes_byte_by_byte_is_given_up(monkeypatch):
    """Each piece is in time; all together they would take months."""
    monkeypatch.setattr(api, "STALL_SECONDS", 0.2)

    async def slowly():
        for _ in range(3000):
            await anyio.sleep(0.01)
            yield b"x"

    def take():
        return sum(map(len, api._arriving(slowly())))

    with pytest.raises(Refused, match="did not arrive completely"):
        anyio.run(anyio.to_thread.run_sync, take)


# A server that waits less long for what comes in as it ends.
ENDING_SOON = """
from batchwright.service.operating import serving
serving.GRACE_SECONDS = 2
from batchwright.cli.commands import main
main()
"""


@pytest.mark.slow
def test_an_upload_that_breaks_off_or_stalls_leaves_nothing_and_does_not_hold_up_the_end(tmp_path):
    started = a_server(tmp_path, "-c", ENDING_SOON)
    with started as server, Remote(server.url, server.token) as remote:
        lease = a_lease(remote)
        told = headers_of(lease, b"x" * 1000) | {"authorization": f"Bearer {server.token}"}
        head = [f"PUT /v1/jobs/{lease.job.id}/artifacts/last.pt HTTP/1.1", "host: 127.0.0.1"]
        head += [f"{name}: {value}" for name, value in told.items()]
        folder = tmp_path / "artifacts"
        for left in ("broken off", "stalled"):
            with socket.create_connection(("127.0.0.1", server.port)) as wire:
                wire.sendall("\r\n".join([*head, "", ""]).encode() + b"x" * 500)
                wait_until(lambda: list(folder.iterdir()), "it did not begin to come")
                if left == "stalled":
                    server.process.send_signal(signal.SIGTERM)
                    server.process.wait(300)
            if left == "broken off":
                wait_until(lambda: not list(folder.iterdir()), "something is left")
        assert server.process.returncode == 0
