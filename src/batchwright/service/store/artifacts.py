"""The table of artifacts, files of jobs: logs and reports to read, checkpoints to resume from.

The newest artifact of each name is kept. An upload gets an identifier of its own, and replaces the
artifact before it in the transaction that finishes it, so at any moment one of the two is there:

    begin --> coming --finish--> kept --another one is finished, or the job is gone--> gone
                 +-------------give up-----------------------------------------------> gone

`remove_gone` removes the objects of artifacts that are gone, in the background.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    delete,
    func,
    insert,
    not_,
    or_,
    select,
    update,
)

from batchwright.records.service import ArtifactInfo, ArtifactName, JobArtifacts
from batchwright.records.text.formatting import size as in_words
from batchwright.service.database.tables import artifacts, jobs
from batchwright.service.job_states import LEASE_LOST
from batchwright.service.problems import Conflict, NoRoom, NotFound, Overtaken, ServiceProblem
from batchwright.service.store.artifact_place import ArtifactPlace
from batchwright.service.store.job_rows import job_row
from batchwright.service.store.part import Common, Part, lock_for_insert

log = logging.getLogger("batchwright.service")

COMING, KEPT, GONE = "coming", "kept", "gone"

ARRIVAL_SECONDS = 6 * 3600.0
"""In which an upload must have ended; an older one was left by a service that was killed."""


class Upload(NamedTuple):
    """An upload in progress."""

    id: str
    job: str
    name: ArtifactName
    key: str
    """Key of the lease under which the file is sent."""


class Artifacts(Part):
    """The table of artifacts, and the place of their objects."""

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self._place: ArtifactPlace | None = None
        self._opening = threading.Lock()

    @property
    def kept(self) -> bool:
        """Whether this service keeps artifacts."""
        return self._settings.artifacts is not None

    @property
    def place(self) -> ArtifactPlace:
        """The place of the objects; opened and tried out at the first access.

        Raises:
            NotFound: This service keeps no artifacts.
            BatchwrightError: The place cannot be used.
        """
        if self._settings.artifacts is None:
            raise NotFound("this service keeps no artifacts: start it with --artifacts")
        with self._opening:
            if self._place is None:
                self._place = ArtifactPlace(self._settings.artifacts)
            return self._place

    def of(self, job: str) -> JobArtifacts:
        """The artifacts of a job, and the room for more."""
        with self._database.reading() as connection:
            job_row(connection, job)
            wanted = select(artifacts).where(artifacts.c.job_id == job, artifacts.c.state == KEPT)
            rows = connection.execute(wanted.order_by(artifacts.c.name)).mappings()
            infos = tuple(_info(row) for row in rows)
            # As the next upload finds it: `begin` gives up those in progress.
            room, _ = self._room(connection, job, not_(_coming(job)))
            return JobArtifacts(kept=self.kept, room=room, artifacts=infos)

    def find(self, job: str, name: ArtifactName) -> tuple[str, ArtifactInfo]:
        """Identifier of an artifact's object, and its description.

        Raises:
            NotFound: The job has no artifact of this name.
        """
        wanted = select(artifacts).where(self._newest(job, name))
        with self._database.reading() as connection:
            job_row(connection, job)
            row = connection.execute(wanted).mappings().one_or_none()
        if row is None:
            raise NotFound(f"this job has no {name} yet")
        return row["id"], _info(row)

    def tail(self, job: str, name: ArtifactName, most: int) -> str:
        """The last ``most`` bytes of a log, from the begin of a line on, if one begins there."""
        identifier, info = self.find(job, name)
        with self.place.reading(identifier) as file:
            file.seek(max(0, info.size - most))
            text: bytes = file.read(most)
        whole = text if info.size <= most else text.partition(b"\n")[2] or text
        return whole.decode("utf-8", "replace")

    # ------------------------------------------------------------------------------------ uploads

    def refuse_old_lease(self, job: str, key: str) -> None:
        """Refuse a key that is not that of the job's newest lease.

        Raises:
            Conflict: The key is another one.
        """
        with self._database.reading() as connection:
            _refuse_old_lease(connection, job, key)

    def begin(
        self,
        job: str,
        name: ArtifactName,
        key: str,
        *,
        size: int,
        sha256: str,
        replaces: str | None = None,
    ) -> Upload:
        """Begin an upload; another upload of this job in progress is given up.

        An agent sends one file at a time, so of the other upload it has lost the connection, or a
        killed service left it.

        Args:
            job: Identifier of the job.
            name: Name of the artifact.
            key: Key of the lease.
            size: Bytes of the file.
            sha256: Digest of the file, in hex.
            replaces: Digest of the artifact that its sender knows to be here; empty: none; `None`:
                any is replaced.

        Raises:
            Conflict: The lease is not the job's newest.
            Overtaken: Another artifact is here: this upload may have been sent before that one, and
                kept by a proxy.
            NoRoom: The file is larger than what is free for this job, or in all.
        """
        upload = Upload(str(uuid.uuid4()), job, name, key)
        with self._database.writing() as connection:
            _refuse_old_lease(connection, job, key, lock=True)
            newest = select(artifacts.c.sha256).where(self._newest(job, name))
            # It stays until this upload ends, as any other one gives this one up.
            if replaces not in (None, connection.execute(newest).scalar() or ""):
                raise Overtaken(
                    f"the {name} here is not the one that this upload was to replace: list the "
                    "job's files, and send what is newer"
                )
            connection.execute(update(artifacts).where(_coming(job)).values(state=GONE))
            lock_for_insert(connection, artifacts)
            room, why = self._room(connection, job, not_(self._newest(job, name)))
            if size > room:
                raise NoRoom(
                    f"{name} has {in_words(size)}, and {in_words(room)} are free {why}: delete "
                    "artifacts that nobody needs, or have the limit raised"
                )
            connection.execute(
                insert(artifacts).values(
                    id=upload.id,
                    job_id=job,
                    name=name,
                    state=COMING,
                    size=size,
                    sha256=sha256,
                    created=self._clock(),
                )
            )
        return upload

    def finish(self, upload: Upload) -> ArtifactInfo:
        """Make an upload whose file is whole the job's newest artifact of its name.

        Raises:
            Conflict: The lease is not the job's newest any more.
            Overtaken: The upload was given up: another one has begun meanwhile, or it took longer
                than `ARRIVAL_SECONDS`.
        """
        this = and_(artifacts.c.id == upload.id, _IS_COMING)
        with self._database.writing() as connection:
            _refuse_old_lease(connection, upload.job, upload.key, lock=True)
            former = update(artifacts).where(self._newest(upload.job, upload.name))
            connection.execute(former.values(state=GONE))
            kept = update(artifacts).where(this).values(state=KEPT, created=self._clock())
            row = connection.execute(kept.returning(artifacts)).mappings().one_or_none()
            if row is None:
                raise Overtaken(
                    "this upload was given up, as another one of this job has begun or it took "
                    f"too long: send {upload.name} again"
                )
            return _info(row)

    def give_up(self, upload: Upload) -> None:
        """Remove what there is of an upload that failed; one that was kept stays: only the answer
        of the database to `finish` was lost.
        """
        this = artifacts.c.id == upload.id
        gone = update(artifacts).where(this, _IS_COMING).values(state=GONE)
        if not self._write(gone) and not self._read(select(artifacts.c.id).where(this)):
            # A newer upload has ended meanwhile and this one's row was removed, maybe before there
            # was an object: some places have it only once it is whole.
            with suppress(ServiceProblem):  # the first error counts
                self.place.remove(upload.id)

    # ---------------------------------------------------------------------------------- removing

    def delete(self, job: str, name: ArtifactName) -> None:
        """Mark an artifact as gone, so that it is not found.

        Raises:
            NotFound: The job has no artifact of this name.
        """
        if not self._write(update(artifacts).where(self._newest(job, name)).values(state=GONE)):
            raise NotFound(f"this job has no {name}")

    def forget_lost(self) -> None:
        """Mark as gone the artifacts of removed jobs, and uploads that a killed service left."""
        orphans = artifacts.c.job_id.not_in(select(jobs.c.id))
        stale = and_(_IS_COMING, artifacts.c.created < self._clock() - ARRIVAL_SECONDS)
        self._write(update(artifacts).where(or_(orphans, stale)).values(state=GONE))

    def remove_gone(self, closed: Callable[[], bool] = lambda: False) -> None:
        """Remove the objects of artifacts that are gone; one that cannot be removed is left to the
        next call.

        Args:
            closed: Whether to stop, as the service ends.
        """
        if not self.kept:
            return
        for (identifier,) in self._read(select(artifacts.c.id).where(artifacts.c.state == GONE)):
            if closed():
                return
            try:
                self.place.remove(identifier)
            except ServiceProblem as problem:
                log.error("an artifact is not removed: %s", problem.detail)
            else:
                self._write(delete(artifacts).where(artifacts.c.id == identifier))

    # ----------------------------------------------------------------------------------- in here

    @staticmethod
    def _newest(job: str, name: str) -> ColumnElement[bool]:
        """Condition: the job's kept artifact of a name."""
        return and_(artifacts.c.job_id == job, artifacts.c.name == name, artifacts.c.state == KEPT)

    def _room(
        self, connection: Connection, job: str, *which: ColumnElement[bool]
    ) -> tuple[int, str]:
        """Bytes that are free for a job, and the limit that says so; artifacts where ``which`` do
        not hold are not counted.
        """
        used = select(func.coalesce(func.sum(artifacts.c.size), 0))
        used = used.where(artifacts.c.state != GONE, *which)
        limits = self._settings.limits
        own = limits.artifact_bytes_per_job - int(
            connection.execute(used.where(artifacts.c.job_id == job)).scalar_one()
        )
        free = limits.artifact_bytes - int(connection.execute(used).scalar_one())
        room, why = min((own, "for this job"), (free, "at this service"))
        return (max(0, room) if self.kept else 0), why


_IS_COMING = artifacts.c.state == COMING


def _coming(job: str) -> ColumnElement[bool]:
    """Condition: an upload of a job in progress."""
    return and_(artifacts.c.job_id == job, _IS_COMING)


def _refuse_old_lease(connection: Connection, job: str, key: str, *, lock: bool = False) -> None:
    """Refuse a key that is not that of the job's newest lease. The lease may have ended: logs of a
    job that is done still arrive.
    """
    if job_row(connection, job, lock=lock)["lease_key"] != key:
        raise Conflict(LEASE_LOST)


def _info(row: Any) -> ArtifactInfo:
    return ArtifactInfo(**{name: row[name] for name in ArtifactInfo.model_fields})
