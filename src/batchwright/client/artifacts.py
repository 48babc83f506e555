"""Files of a job on their way between an agent and its service.

    watcher   logs and checkpoints --> service, while the agent works on the job
    restore   the newest checkpoint <-- service, for an agent that takes the job over

A checkpoint is kept whole or not at all; the records that belong to it go before it. Nothing here
ends a job: a service that takes no files, or has no room for them, is told of in a line.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Self, TextIO

from batchwright.client.http import Backoff, Service, ServiceError
from batchwright.client.lease_heartbeat import LeaseEnded, LeaseHeartbeat
from batchwright.client.submitting import understood
from batchwright.errors import BatchwrightError, FileError
from batchwright.records import Plan
from batchwright.records.agent_rules import difference
from batchwright.records.documents import read_record, write_record, write_text
from batchwright.records.service import ArtifactInfo, ArtifactName, JobArtifacts, Lease, LogName
from batchwright.records.text.problems import printable
from batchwright.storage.files import make_folder, refusal
from batchwright.storage.locks import take

LOOK_SECONDS = 0.5  # between two looks at the files
LOG_SECONDS = 5.0  # between two sendings of logs
CHECKPOINT_SECONDS = 30.0  # between two sendings of checkpoints; as long as one took, if longer
RETRY_SECONDS = 30.0  # after the service took something not
LAST_SECONDS = 60.0  # for what is left when the agent is to stop
TAIL_BYTES = 2**16  # of a log that is being written
LOG_BYTES = 2**22  # of one that is whole
_PIECE = 2**18
_LAST_TRIES = 3
_NO_ROOM, _DAMAGED = 507, 422
_REMEMBERED = 50  # digests of checkpoints that this agent had

_WITH_CHECKPOINT: tuple[ArtifactName, ...] = ("plan.json", "metrics.jsonl", "best.pt", "last.pt")
"""What a run goes on from, in the order in which it is sent."""
_AT_THE_END: tuple[ArtifactName, ...] = ("summary.json",)
_LOGS: tuple[LogName, ...] = ("probe.log", "plan.log", "check.log", "train.log")


_Mark = tuple[int, int, int]


class _OutOfTime(BatchwrightError):  # noqa: N818 - what is left is not sent, which is no error
    """The agent is to stop."""


class JobFiles:
    """What a service keeps of a job, as who has the job reads and writes it.

    Args:
        service: The service.
        job: The job.
        key: Of the lease; empty for somebody who may read.
    """

    def __init__(self, service: Service, job: str, key: str = "") -> None:
        self._service, self._place = service, f"/v1/jobs/{job}/artifacts"
        self._headers = {"Batchwright-Lease": key} if key else {}

    def listed(self) -> JobArtifacts:
        """The artifacts that the job has."""
        found = self._service.get(self._place, self._headers)
        return understood(JobArtifacts, found, self._service.url)

    def put(self, name: ArtifactName, pieces: Iterable[bytes], size: int, sha256: str) -> None:
        """Bring a file of so many bytes."""
        digest = base64.b64encode(bytes.fromhex(sha256)).decode()
        told = {"Content-Length": str(size), "Repr-Digest": f"sha-256=:{digest}:"}
        self._service.put_file(f"{self._place}/{name}", pieces, self._headers | told)

    def print_log(self, info: ArtifactInfo, out: TextIO) -> None:
        """Print a log; what could change how the terminal looks is made visible."""
        pieces = self._service.get_file(f"{self._place}/{info.name}", self._headers)
        for line in b"".join(pieces).decode("utf-8", "replace").splitlines():
            out.write(f"{printable(line)}\n")

    def save(self, info: ArtifactInfo, path: Path) -> None:
        """Fetch an artifact to a new file.

        Raises:
            FileError: There is one already.
        """
        if path.exists():
            raise FileError(f"{path} exists: name another folder with --out")
        make_folder(path.parent)
        self.fetch(info, path)

    def fetch(self, info: ArtifactInfo, path: Path) -> None:
        """Fetch a file, whole or not at all.

        Raises:
            FileError: It cannot be written here.
            ServiceError: It does not come, or is damaged.
        """
        aside, found, size = path.with_name(f".{path.name}.coming"), hashlib.sha256(), 0
        try:
            with aside.open("wb") as file:
                for piece in self._service.get_file(f"{self._place}/{info.name}", self._headers):
                    found.update(piece)
                    size += len(piece)
                    if size > info.size:
                        break
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            if size != info.size or found.hexdigest() != info.sha256:
                raise ServiceError(f"{self._service.url} has it damaged", status=_DAMAGED)
            aside.replace(path)
        except OSError as error:
            raise refusal(path, error) from error
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)


class RunFiles:
    """Sends what an agent makes of a job while it works on it; a context manager.

    Args:
        folder: Of the job.
        lease: Of the job.
        service: Where its files go.
        pulse: Says when to stop.
        tell: Takes a line for whoever watches.
    """

    def __init__(
        self,
        folder: Path,
        lease: Lease,
        service: Service,
        pulse: LeaseHeartbeat,
        tell: Callable[[str], None],
    ) -> None:
        self._folder, self._run, self._lease = folder, folder / "run", lease
        self._files = JobFiles(service, lease.job.id, lease.key)
        self._pulse, self._tell = pulse, tell
        self._told: set[str] = set()  # what went wrong, or about which file
        self._restored = False
        self._kept: bool | None = None  # whether the service keeps any; not known yet
        self._there: dict[str, str] = {}  # digests of what the service has
        self._seen: dict[str, tuple[object, ...]] = {}  # which file of each name was sent
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._logs_at = self._checkpoints_at = self._again_at = 0.0  # when they are due
        self._end = float("inf")
        self._thread = threading.Thread(target=self._watch, name="artifacts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()
        self._over.set()
        self._thread.join()

    @property
    def sent(self) -> bool:
        """Whether the service has the run's newest checkpoint, or there is none."""
        mark = _mark(_path(self._run, "last.pt"))
        return self._restored and mark in (None, self._seen.get("last.pt"))

    # --------------------------------------------------------------------------------- from there

    def restore(self, plan: Plan) -> None:
        """Have the run folder hold the run's newest checkpoint, should another agent have sent it.

        Only then the run's own files are sent: they would take the place of newer ones.

        Args:
            plan: That the job is trained by.

        Raises:
            LeaseEnded: The work is to end.
            FileError: It cannot be written here.
        """
        if not (self._run / "summary.json").exists():
            self._fetch_newest(plan)
        self._restored = True

    def _fetch_newest(self, plan: Plan) -> None:
        listed = self._listed()
        last = listed.get("last.pt")
        if last is None or last.sha256 in self._ours():
            return
        fresh = self._folder / "fetched"
        shutil.rmtree(fresh, ignore_errors=True)
        make_folder(fresh / "checkpoints")
        try:
            for name in _WITH_CHECKPOINT:
                there = name in listed and self._fetched(listed[name], _path(fresh, name))
            if not there:  # the last of them is the checkpoint
                return
            problem = self._unfit(plan, fresh)
            if problem:
                self._tell(f"the checkpoint at the service is not gone on from: {problem}")
                return
            if self._run.exists():
                take(self._run, "another --folder").close()  # its commands may still be ending
                shutil.rmtree(self._run)
            fresh.rename(self._run)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        self._note_ours(last.sha256)
        self._tell(f"{self._lease.job.name}: goes on from the checkpoint that the service has")

    def _listed(self) -> dict[str, ArtifactInfo]:
        """What the service has, once it answers; nothing of one that keeps no files."""
        backoff = Backoff(0.2, 10.0)
        while True:
            try:
                found = self._files.listed()
            except ServiceError as error:
                if not error.passing:
                    self._kept = False
                    return {}
                self._wait(backoff.seconds(error))
                continue
            self._kept = found.kept
            self._there = {one.name: one.sha256 for one in found.artifacts}
            return {str(one.name): one for one in found.artifacts}

    def _fetched(self, info: ArtifactInfo, path: Path) -> bool:
        """Fetch a file, however long the service is away; false if it has gone from there."""
        backoff = Backoff(0.2, 10.0)
        while True:
            try:
                self._files.fetch(info, path)
                return True
            except ServiceError as error:
                if not error.passing:
                    self._tell(f"{info.name} is not fetched: {error}")
                    return False
                self._tell_once(error)
                self._wait(backoff.seconds(error))

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._pulse.ended:
                raise LeaseEnded("the work on the job is to end")
            time.sleep(0.05)

    @staticmethod
    def _unfit(plan: Plan, fresh: Path) -> str:
        """Why what was fetched is not of this plan, which takes the place of the one fetched: that
        is another agent's word. A run that took advice has another one, which nobody here vouches
        for.
        """
        place = fresh / "plan.json"
        try:
            found = read_record(place, Plan) if place.exists() else plan
        except FileError as error:
            return str(error)
        write_record(plan, place)
        problem = difference(plan, found, without=("reasons",))
        return f"its run follows another plan, with {problem}" if problem else ""

    # ------------------------------------------------------------------------------------ to there

    def settle(self) -> None:
        """Send what has changed since, and logs whole; a minute at most if the agent is to stop."""
        if self._pulse.lost:
            return
        if self._pulse.ended:
            self._end = time.monotonic() + LAST_SECONDS
        backoff = Backoff(0.5, 2.0)
        for left in range(_LAST_TRIES, 0, -1):
            with self._lock:
                self._again_at = 0.0
                self._send_safely(self._send_logs, LOG_BYTES)
                if self._restored and not self._pulse.cancelled:
                    self._send_safely(self._send_files, (*_WITH_CHECKPOINT, *_AT_THE_END))
                if not self._again_at:
                    return
            if left > 1:
                time.sleep(backoff.seconds())

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            with self._lock:
                if self._pulse.ended or time.monotonic() < self._again_at:
                    continue
                if time.monotonic() >= self._logs_at:
                    self._send_safely(self._send_logs, TAIL_BYTES)
                    self._logs_at = time.monotonic() + LOG_SECONDS
                path = _path(self._run, "last.pt")
                new = _mark(path) not in (None, self._seen.get("last.pt"))
                if new and self._restored and time.monotonic() >= self._checkpoints_at:
                    began = time.monotonic()
                    self._send_safely(self._send_files, _WITH_CHECKPOINT)
                    now = time.monotonic()
                    self._checkpoints_at = now + max(CHECKPOINT_SECONDS, now - began)

    def _send_safely(self, send: Callable[..., None], *what: object) -> None:
        """Whatever goes wrong is told once; training goes on."""
        try:
            if self._kept is None:
                found = self._files.listed()
                self._kept = found.kept
                self._there = {one.name: one.sha256 for one in found.artifacts}
            if self._kept:
                send(*what)
        except ServiceError as error:
            if error.status == 404:  # an older service
                self._kept = False
            elif error.status == _NO_ROOM:
                self._tell_once(error, "logs")
            elif error.status != 409:  # the lease's own heartbeat tells of a job that is another's
                self._later(error)
        except _OutOfTime:
            self._tell(f"{self._lease.job.name}: its newest files are not at the service")
        except FileError as error:
            self._later(error)
        except OSError as error:
            self._later(refusal(self._folder, error))

    def _later(self, error: Exception) -> None:
        self._again_at = time.monotonic() + RETRY_SECONDS
        self._tell_once(error)

    def _tell_once(self, error: Exception, about: str = "") -> None:
        """Tell an error, unless it, or another one about the same, was told before."""
        if (about or str(error)) not in self._told:
            self._told.add(about or str(error))
            self._tell(f"{self._lease.job.name}: {error}")

    def _send_logs(self, most: int) -> None:
        for name in _LOGS:
            path = self._folder / "logs" / name
            mark = (_mark(path), most)
            if mark[0] is not None and self._seen.get(name) != mark:
                self._send_bytes(name, _end_of(path, most))
                self._seen[name] = mark
        paths = sorted((self._run / "logs" / "train").glob("**/*.log"))
        marks = (tuple(_mark(path) for path in paths), most)
        if paths and self._seen.get("workers.log") != marks:
            each = max(1024, most // len(paths))
            parts = [(path.relative_to(self._run), _end_of(path, each)) for path in paths]
            text = b"".join(b"==> %s\n%s\n" % (str(at).encode(), end) for at, end in parts if end)
            self._send_bytes("workers.log", text)
            self._seen["workers.log"] = marks

    def _send_bytes(self, name: ArtifactName, content: bytes) -> None:
        if content:
            self._send(name, BytesIO(content), len(content))

    def _send_files(self, names: Sequence[ArtifactName]) -> None:
        """Send the run's files in this order; each is as old as those after it, or newer."""
        with ExitStack() as held:
            files: list[tuple[ArtifactName, BinaryIO]] = []
            for name in reversed(names):  # what takes its place meanwhile is another file
                with suppress(FileNotFoundError):
                    files.append((name, held.enter_context(_path(self._run, name).open("rb"))))
            for name, file in reversed(files):
                found = os.fstat(file.fileno())
                if self._seen.get(name) == _mark_of(found):
                    continue
                try:
                    self._send(name, file, found.st_size)
                except ServiceError as error:
                    if error.status != _NO_ROOM:
                        raise
                    self._tell_once(error, name)  # there may be room for the others
                else:
                    self._seen[name] = _mark_of(found)

    def _send(self, name: ArtifactName, file: BinaryIO, size: int) -> None:
        """Send so many bytes of a file, unless the service has them."""
        found = hashlib.sha256()
        for piece in self._pieces(file, size):
            found.update(piece)
        digest = found.hexdigest()
        if name == "last.pt":
            self._note_ours(digest)  # before: the answer may not arrive
        if self._there.get(name) == digest:
            return
        file.seek(0)
        self._files.put(name, self._pieces(file, size), size, digest)
        self._there[name] = digest

    def _pieces(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        while size > 0 and (piece := file.read(min(_PIECE, size))):
            if self._pulse.lost or time.monotonic() > self._end:
                raise _OutOfTime("the agent is to stop")
            size -= len(piece)
            yield piece

    # -------------------------------------------------------------------------------- whose it is

    def _ours(self) -> list[str]:
        """Digests of checkpoints that this folder has had: what came after them is here too."""
        try:
            found = json.loads((self._folder / "checkpoints.json").read_bytes())
        except (OSError, ValueError):
            return []
        return [str(one) for one in found] if isinstance(found, list) else []

    def _note_ours(self, digest: str) -> None:
        others = [one for one in self._ours() if one != digest]
        text = json.dumps([*others, digest][-_REMEMBERED:])
        write_text(f"{text}\n", self._folder / "checkpoints.json")


def _path(run: Path, name: ArtifactName) -> Path:
    return run / "checkpoints" / name if name.endswith(".pt") else run / name


def _mark(path: Path) -> _Mark | None:
    """Changes whenever a file is replaced or grows; nothing of one that is not there."""
    try:
        return _mark_of(path.stat())
    except OSError:
        return None


def _mark_of(found: os.stat_result) -> _Mark:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _end_of(path: Path, most: int) -> bytes:
    """A log, or its end from a whole line on."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        text = file.read(most)
    if size <= most:
        return text
    end = text.partition(b"\n")[2]
    return b"[the first %d bytes are left out]\n%s" % (size - len(end), end)
