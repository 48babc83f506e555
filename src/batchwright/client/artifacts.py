"""Files of a job on their way between an agent and its service.

    watcher   logs and checkpoints --> service, while the agent works on the job
    restore   the newest checkpoint <-- service, for an agent that takes the job over

A checkpoint is kept whole or not at all; the records that belong to it are sent before it. Nothing
here ends a job: where the service takes no files, or has no room for them, a line says so.
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
from batchwright.client.lease_heartbeat import LeaseHeartbeat
from batchwright.client.outbox import epochs_trained
from batchwright.client.submitting import understood
from batchwright.errors import BatchwrightError, FileError
from batchwright.records import Plan
from batchwright.records.agent_rules import other_choice
from batchwright.records.documents import read_record, write_record, write_text
from batchwright.records.service import ArtifactInfo, ArtifactName, JobArtifacts, Lease, LogName
from batchwright.records.text.formatting import size as in_words
from batchwright.records.text.problems import printable
from batchwright.storage.files import make_folder, refusal
from batchwright.storage.locks import take

LOOK_SECONDS = 0.5  # between two looks at the files
LOG_SECONDS = 5.0  # between two uploads of logs
CHECKPOINT_SECONDS = 30.0  # between two uploads of checkpoints; as long as one took, if longer
RETRY_SECONDS = 30.0  # after an upload that failed
LAST_SECONDS = 60.0  # for what is left when the agent is to stop
TAIL_BYTES = 2**16  # sent of a log that is still being written
LOG_BYTES = 2**22  # sent of a log at the end
_PIECE = 2**18  # bytes that are read at a time
_LAST_TRIES = 3
_NO_ROOM, _DAMAGED = 507, 422
_REMEMBERED = 50  # digests of checkpoints that this folder had

_BEFORE_CHECKPOINT: tuple[ArtifactName, ...] = ("plan.json", "metrics.jsonl")
_WITH_CHECKPOINT: tuple[ArtifactName, ...] = (*_BEFORE_CHECKPOINT, "best.pt", "last.pt")
"""What a run resumes from, in the order of upload."""
_AT_THE_END: tuple[ArtifactName, ...] = ("summary.json",)
_LOGS: tuple[LogName, ...] = ("probe.log", "plan.log", "check.log", "train.log")


_Version = tuple[int, int, int]
"""Inode, size and time of the last change of a file: another one after each change."""


class _OutOfTime(BatchwrightError):  # noqa: N818 - the rest is not sent, which is no error
    """The agent is to stop, so an upload is broken off."""


class JobFiles:
    """The artifacts of a job at a service.

    Args:
        service: The service.
        job: Identifier of the job.
        key: Key of the lease; empty for a client whose token may read.
    """

    def __init__(self, service: Service, job: str, key: str = "") -> None:
        self._service, self._place = service, f"/v1/jobs/{job}/artifacts"
        self._headers = {"Batchwright-Lease": key} if key else {}

    def listed(self) -> JobArtifacts:
        """The artifacts that the service has of the job."""
        values = self._service.get(self._place, self._headers)
        return understood(JobArtifacts, values, self._service.url)

    def put(
        self, name: ArtifactName, pieces: Iterable[bytes], size: int, sha256: str, replaces: str
    ) -> None:
        """Upload a file.

        Args:
            name: Name of the artifact.
            pieces: Content of the file.
            size: Bytes of the content.
            sha256: Digest of the content, in hex.
            replaces: Digest of the artifact that the service has; empty: none. If it has another
                one, it refuses this upload, which may come late.
        """
        digest = base64.b64encode(bytes.fromhex(sha256)).decode()
        headers = {"Content-Length": str(size), "Repr-Digest": f"sha-256=:{digest}:"}
        headers |= {"Batchwright-Replaces": replaces} | self._headers
        self._service.put_file(f"{self._place}/{name}", pieces, headers)

    def print_log(self, info: ArtifactInfo, out: TextIO) -> None:
        """Print a log, its control characters made visible: they could change the terminal."""
        pieces = self._service.get_file(f"{self._place}/{info.name}", self._headers)
        for line in b"".join(pieces).decode("utf-8", "replace").splitlines():
            out.write(f"{printable(line)}\n")

    def save(self, info: ArtifactInfo, path: Path) -> None:
        """Fetch an artifact to a new file.

        Raises:
            FileError: The file exists already.
        """
        if path.exists():
            raise FileError(f"{path} exists: name another folder with --out")
        make_folder(path.parent)
        self.fetch(info, path)

    def fetch(
        self, info: ArtifactInfo, path: Path, check: Callable[[], None] = lambda: None
    ) -> None:
        """Fetch an artifact, whole or not at all.

        Args:
            info: The artifact.
            path: The file.
            check: Called for each piece; what it raises breaks the download off.

        Raises:
            FileError: The file cannot be written here.
            ServiceError: The artifact does not arrive, or is damaged.
        """
        aside, digest, size = path.with_name(f".{path.name}.coming"), hashlib.sha256(), 0
        try:
            with aside.open("wb") as file:
                for piece in self._service.get_file(f"{self._place}/{info.name}", self._headers):
                    check()
                    digest.update(piece)
                    size += len(piece)
                    if size > info.size:
                        break
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            if size != info.size or digest.hexdigest() != info.sha256:
                raise ServiceError(f"{self._service.url} has it damaged", status=_DAMAGED)
            aside.replace(path)
        except OSError as error:
            raise refusal(path, error) from error
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)


class RunFiles:
    """Uploads logs and checkpoints of a job while an agent works on it; a context manager.

    Args:
        folder: Folder of the job.
        lease: Lease of the job.
        service: The service that keeps the files.
        heartbeat: Heartbeat of the lease, by which the work is ended.
        tell: Called with each line for the person who watches.
    """

    def __init__(
        self,
        folder: Path,
        lease: Lease,
        service: Service,
        heartbeat: LeaseHeartbeat,
        tell: Callable[[str], None],
    ) -> None:
        self._folder, self._run, self._lease = folder, folder / "run", lease
        self._files, self._url = JobFiles(service, lease.job.id, lease.key), service.url
        self._heartbeat, self._tell = heartbeat, tell
        self._told: set[str] = set()  # errors that were told, by message or file
        self._restored = False
        self._kept: bool | None = None  # whether the service keeps artifacts; None: not known yet
        self._there: dict[str, str] = {}  # digests of the service's artifacts, by name
        # Their sizes, and the room for more, in bytes; others may have taken of the room since.
        self._sizes: dict[str, int] = {}
        self._room = 0
        self._sent: dict[str, tuple[object, ...]] = {}  # version that was sent, by name
        self._over = threading.Event()
        # When logs, checkpoints and what failed are sent next, by `time.monotonic`.
        self._logs_at = self._checkpoints_at = self._again_at = 0.0
        self._end = float("inf")  # when uploads are broken off
        self._thread = threading.Thread(target=self._watch, name="artifacts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()

    @property
    def sent(self) -> bool:
        """Whether the service has the run's newest checkpoint, or there is none."""
        version = _version(_path(self._run, "last.pt"))
        return version is None or (self._restored and version == self._sent.get("last.pt"))

    # ----------------------------------------------------------------------------------- downloads

    def restore(self, plan: Plan) -> None:
        """Bring the run's newest checkpoint into the run folder, should another agent have sent it.

        The run's own files are uploaded only after that, as they would replace newer ones. A folder
        that is further stays: its agent may have trained on while it was cut off.

        Args:
            plan: The plan by which the job is trained.

        Raises:
            LeaseEnded: The work is to end.
            FileError: The files cannot be written here.
        """
        if not (self._run / "summary.json").exists():
            self._fetch_newest(plan)
        self._restored = True

    def _fetch_newest(self, plan: Plan) -> None:
        listed = self._listed()
        last, own = listed.get("last.pt"), _path(self._run, "last.pt")
        if last is None or last.sha256 in self._own_checkpoints() or last.sha256 == _digest_of(own):
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
            own_epochs, fetched = epochs_trained(self._run), epochs_trained(fresh)
            if own.exists() and (own_epochs or 0.0) > (fetched or 0.0):
                self._tell(f"{self._lease.job.name}: goes on from this folder, which is further")
                return
            if self._run.exists():
                take(self._run, "another --folder").close()  # its verbs may still be ending
                shutil.rmtree(self._run)
            fresh.rename(self._run)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        self._note_own_checkpoint(last.sha256)
        self._tell(f"{self._lease.job.name}: goes on from the checkpoint that the service has")

    def _listed(self) -> dict[str, ArtifactInfo]:
        """The service's artifacts of the job by name, once it answers; empty where it refuses."""
        backoff = Backoff(0.2, 10.0)
        while True:
            try:
                return {str(info.name): info for info in self._look_up().artifacts}
            except ServiceError as error:
                if not error.passing:
                    self._kept = False
                    return {}
                self._heartbeat.wait(backoff.seconds(error))

    def _look_up(self) -> JobArtifacts:
        """The service's artifacts of the job; notes what need not be sent, and the room."""
        listed = self._files.listed()
        self._kept = listed.kept
        self._there = {info.name: info.sha256 for info in listed.artifacts}
        self._sizes = {info.name: info.size for info in listed.artifacts}
        self._room = listed.room
        return listed

    def _fetched(self, info: ArtifactInfo, path: Path) -> bool:
        """Fetch an artifact, however long the service is away; false where it refuses.

        Raises:
            LeaseEnded: The work is to end, maybe in the middle of a download.
        """
        backoff = Backoff(0.2, 10.0)
        while True:
            try:
                self._files.fetch(info, path, self._heartbeat.check)
                return True
            except ServiceError as error:
                if not error.passing:
                    self._tell(f"{info.name} is not fetched: {error}")
                    return False
                self._tell_once(error)
                self._heartbeat.wait(backoff.seconds(error))

    @staticmethod
    def _unfit(plan: Plan, fresh: Path) -> str:
        """Why fetched files are not of a plan, in a line; empty: they are.

        The plan replaces the fetched one, which only another agent vouches for. The run of a plan
        that was changed by advice is refused too: nothing here can check that plan.
        """
        path = fresh / "plan.json"
        try:
            fetched = read_record(path, Plan) if path.exists() else plan
        except FileError as error:
            return str(error)
        write_record(plan, path)
        problem = other_choice(plan, fetched)
        return f"its run follows another plan, with {problem}" if problem else ""

    # ------------------------------------------------------------------------------------- uploads

    def settle(self) -> None:
        """Upload what has changed, and logs whole: the work has ended, and nothing is watched any
        more. If the agent is to stop, now or meanwhile, that takes a minute at most.
        """
        if self._heartbeat.ended:
            self._end = min(self._end, time.monotonic() + LAST_SECONDS)
        self._over.set()
        if self._thread.is_alive():  # it never began where the system starts no more threads
            self._thread.join()
        backoff = Backoff(0.5, 2.0)
        for left in range(_LAST_TRIES, 0, -1):
            if self._heartbeat.lost:
                return
            self._again_at = 0.0
            self._send_safely(self._send_logs, LOG_BYTES)
            if self._restored and not self._heartbeat.cancelled:
                self._send_safely(self._send_files, (*_WITH_CHECKPOINT, *_AT_THE_END))
            if not self._again_at:
                return
            if left > 1:
                time.sleep(backoff.seconds())

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            if self._heartbeat.ended or time.monotonic() < self._again_at:
                continue
            if time.monotonic() >= self._logs_at:
                self._send_safely(self._send_logs, TAIL_BYTES)
                self._logs_at = time.monotonic() + LOG_SECONDS
            began = time.monotonic()
            if self._restored and not self.sent and began >= self._checkpoints_at:
                self._send_safely(self._send_files, _WITH_CHECKPOINT)
                now = time.monotonic()
                self._checkpoints_at = now + max(CHECKPOINT_SECONDS, now - began)

    def _send_safely(self, send: Callable[..., None], *what: object) -> None:
        """Call ``send(*what)`` if the service keeps artifacts. An error is told once, and training
        goes on.
        """
        try:
            if self._kept is None:
                self._look_up()
            if self._kept:
                send(*what)
        except ServiceError as error:
            if error.status == 404:  # an older service
                self._kept = False
            elif error.status == _NO_ROOM:
                self._tell_once(error, "logs")
            elif error.status != 409 or error.retry_seconds is not None:
                self._later(error)  # else another agent has the job, as the heartbeat learns too
        except _OutOfTime:
            self._tell(f"{self._lease.job.name}: its newest files are not at the service")
        except FileError as error:
            self._later(error)
        except OSError as error:
            self._later(_unread(error.filename or self._folder, error))

    def _later(self, error: Exception) -> None:
        self._again_at = time.monotonic() + RETRY_SECONDS
        self._kept = None  # look again what is there: an upload whose answer was lost may be
        self._tell_once(error)

    def _tell_once(self, error: Exception, about: str = "") -> None:
        """Tell an error, unless its message was told before, or one about the same file."""
        if (about or str(error)) not in self._told:
            self._told.add(about or str(error))
            self._tell(f"{self._lease.job.name}: {error}")

    def _send_logs(self, most: int) -> None:
        """Upload the last ``most`` bytes of each log that has changed; those of the workers as one
        artifact.
        """
        for name in _LOGS:
            path = self._folder / "logs" / name
            version = (_version(path), most)
            if version[0] is not None and self._sent.get(name) != version:
                self._send_bytes(name, _end_of(path, most))
                self._sent[name] = version
        paths = sorted((self._run / "logs" / "train").glob("**/*.log"))
        versions = (tuple(_version(path) for path in paths), most)
        if paths and self._sent.get("workers.log") != versions:
            each = max(1024, most // len(paths))
            parts = [(path.relative_to(self._run), _end_of(path, each)) for path in paths]
            text = b"".join(b"==> %s\n%s\n" % (str(at).encode(), end) for at, end in parts if end)
            self._send_bytes("workers.log", text)
            self._sent["workers.log"] = versions

    def _send_bytes(self, name: ArtifactName, content: bytes) -> None:
        if content:
            self._send(name, BytesIO(content), len(content))

    def _send_files(self, names: Sequence[ArtifactName]) -> None:
        """Upload the run's files in this order. They are opened in the reverse order, so that each
        is as new as those after it, or newer, whatever replaces them meanwhile. Without the records
        before it a checkpoint is brought only where it is the best of a run that has ended.
        """
        with ExitStack() as stack:
            files: list[tuple[ArtifactName, BinaryIO]] = []
            for name in reversed(names):
                with suppress(FileNotFoundError):
                    files.append((name, stack.enter_context(_path(self._run, name).open("rb"))))
            resumable, ended = True, any(name in _AT_THE_END for name, _ in files)
            for name, file in reversed(files):
                status = os.fstat(file.fileno())
                if self._sent.get(name) == _version_in(status):
                    continue
                wanted = resumable or (ended and name == "best.pt")
                if name.endswith(".pt") and not wanted:
                    continue  # whoever went on from it would lack records
                try:
                    self._check_room(name, status.st_size)
                    self._send(name, file, status.st_size)
                except ServiceError as error:
                    if error.status != _NO_ROOM:
                        raise
                    self._room, self._sizes = 0, {}  # ask before the next file
                    self._tell_once(error, name)  # there may be room for the others
                    resumable = resumable and name not in _BEFORE_CHECKPOINT
                else:
                    self._sent[name] = _version_in(status)

    def _check_room(self, name: ArtifactName, size: int) -> None:
        """Refuse a file for which the service has no room. The service would, too, but most of the
        file is sent before its answer is read, and that for each checkpoint. The service is asked
        only where the room that it had before is too small.
        """
        if size > self._room_for(name):
            self._look_up()
        room = self._room_for(name)
        if self._kept and size > room:
            raise ServiceError(
                f"{self._url}: {name} has {in_words(size)}, and {in_words(room)} are free for it "
                "at the service: delete artifacts that nobody needs, or have the limit raised",
                status=_NO_ROOM,
            )

    def _room_for(self, name: ArtifactName) -> int:
        """Bytes that a file may have, as far as is known here: it replaces the one of its name."""
        return self._room + self._sizes.get(name, 0)

    def _send(self, name: ArtifactName, file: BinaryIO, size: int) -> None:
        """Upload the first ``size`` bytes of a file, unless the service has them."""
        digest = hashlib.sha256()
        for piece in self._pieces(name, file, size):
            digest.update(piece)
        sha256 = digest.hexdigest()
        if name == "last.pt":  # before the upload: its answer may be lost
            with suppress(FileError):  # a full disk needs the upload most
                self._note_own_checkpoint(sha256)
        if self._there.get(name) == sha256:
            return
        file.seek(0)
        former = self._there.get(name, "")
        self._files.put(name, self._pieces(name, file, size), size, sha256, former)
        self._room = self._room_for(name) - size
        self._sizes[name] = size
        self._there[name] = sha256

    def _pieces(self, name: ArtifactName, file: BinaryIO, size: int) -> Iterator[bytes]:
        """The first ``size`` bytes of a file, until uploads are broken off."""
        while size > 0:
            if self._heartbeat.ended:  # the agent may be told to stop during a long upload
                self._end = min(self._end, time.monotonic() + LAST_SECONDS)
            if self._heartbeat.lost or time.monotonic() > self._end:
                raise _OutOfTime("the agent is to stop")
            try:
                piece = file.read(min(_PIECE, size))
            except OSError as error:  # raised as it is, it would count as one of the connection
                raise _unread(name, error) from None
            if not piece:
                return
            size -= len(piece)
            yield piece

    # ----------------------------------------------------------------------------- own checkpoints

    def _own_checkpoints(self) -> list[str]:
        """Digests of the checkpoints that this folder has had. Where the service's newest one is
        among them, this folder has gone at least as far.
        """
        try:
            digests = json.loads((self._folder / "checkpoints.json").read_bytes())
        except (OSError, ValueError):
            return []
        return [str(digest) for digest in digests] if isinstance(digests, list) else []

    def _note_own_checkpoint(self, digest: str) -> None:
        own, there = self._own_checkpoints(), self._there.get("last.pt")
        # The service's is kept however many others it had no room for since.
        newest = [one for one in dict.fromkeys((there, digest)) if one == digest or one in own]
        others = [one for one in own if one not in newest]
        text = json.dumps([*others, *newest][-_REMEMBERED:])
        write_text(f"{text}\n", self._folder / "checkpoints.json")


def _digest_of(path: Path) -> str:
    """SHA-256 of a file, in hex; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _unread(path: str | Path, error: OSError) -> FileError:
    return FileError(f"cannot read {path}: {error.strerror}")


def _path(run: Path, name: ArtifactName) -> Path:
    return run / "checkpoints" / name if name.endswith(".pt") else run / name


def _version(path: Path) -> _Version | None:
    """Version of a file; `None` where there is no such file."""
    try:
        return _version_in(path.stat())
    except OSError:
        return None


def _version_in(status: os.stat_result) -> _Version:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _end_of(path: Path, most: int) -> bytes:
    """A log, or its last ``most`` bytes from the begin of a line on, if one begins there."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        text = file.read(most)
    if size <= most:
        return text
    end = text.partition(b"\n")[2] or text
    return b"[the first %d bytes are left out]\n%s" % (size - len(end), end)
