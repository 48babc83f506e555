"""Files of jobs: logs and reports to read, checkpoints to go on from.

The newest of each name is kept. It arrives under an identifier of its own and takes the place of
the one before in the transaction that says it is whole, so at any moment one of the two is there:

    begin --> coming --finish--> kept --another one is finished, or the job is gone--> gone
                 +-------------give up-----------------------------------------------> gone

What is gone is removed by `remove_gone`, beside those who ask.
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
from batchwright.service.problems import Conflict, NoRoom, NotFound, ServiceProblem
from batchwright.service.store.artifact_place import ArtifactPlace
from batchwright.service.store.job_rows import job_row
from batchwright.service.store.part import Part, alone_adding

log = logging.getLogger("batchwright.service")

COMING, KEPT, GONE = "coming", "kept", "gone"

ARRIVAL_SECONDS = 6 * 3600.0
"""In which an artifact must have arrived; what is on its way for longer, a killed service left."""


class Coming(NamedTuple):
    """An artifact on its way."""

    id: str
    job: str
    name: ArtifactName
    key: str
    """Key of the lease under which it comes."""


class Artifacts(Part):
    """The table of artifacts, and the place where they lie."""

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        self._place: ArtifactPlace | None = None
        self._opening = threading.Lock()

    @property
    def kept(self) -> bool:
        """Whether this service keeps any."""
        return self._settings.artifacts is not None

    @property
    def place(self) -> ArtifactPlace:
        """Where they lie; opened, and tried out, when it is asked for first.

        Raises:
            NotFound: This service keeps none.
            BatchwrightError: It cannot be used.
        """
        if self._settings.artifacts is None:
            raise NotFound("this service keeps no artifacts: start it with --artifacts")
        with self._opening:
            if self._place is None:
                self._place = ArtifactPlace(self._settings.artifacts)
            return self._place

    def of(self, job: str) -> JobArtifacts:
        """What there is of a job."""
        with self._database.reading() as connection:
            job_row(connection, job)
            wanted = select(artifacts).where(artifacts.c.job_id == job, artifacts.c.state == KEPT)
            rows = connection.execute(wanted.order_by(artifacts.c.name)).mappings()
            found = tuple(_info(row) for row in rows)
            return JobArtifacts(
                kept=self.kept, room=self._room(connection, job)[0], artifacts=found
            )

    def find(self, job: str, name: ArtifactName) -> tuple[str, ArtifactInfo]:
        """Identifier of the object, and what is known of it.

        Raises:
            NotFound: There is none of this name.
        """
        found = self._newest(job, name)
        with self._database.reading() as connection:
            job_row(connection, job)
            row = connection.execute(select(artifacts).where(found)).mappings().one_or_none()
        if row is None:
            raise NotFound(f"this job has no {name} yet")
        return row["id"], _info(row)

    def tail(self, job: str, name: ArtifactName, most: int) -> str:
        """The end of a log, from a whole line on; ``most`` bytes of it."""
        identifier, info = self.find(job, name)
        with self.place.reading(identifier) as file:
            file.seek(max(0, info.size - most))
            text: bytes = file.read(most)
        whole = text if info.size <= most else text.partition(b"\n")[2]
        return whole.decode("utf-8", "replace")

    # -------------------------------------------------------------------------- what agents bring

    def refuse_old_lease(self, job: str, key: str) -> None:
        """Nothing, if the key is that of the job's newest lease.

        Raises:
            Conflict: It is not.
        """
        with self._database.reading() as connection:
            _refuse_old_lease(connection, job, key)

    def begin(self, job: str, name: ArtifactName, key: str, *, size: int, sha256: str) -> Coming:
        """Make room for an artifact; another one of its name that is on its way is given up.

        Raises:
            Conflict: The lease is not the job's newest.
            NoRoom: It is too large for what is free, of the job's share or of all.
        """
        coming = Coming(str(uuid.uuid4()), job, name, key)
        same = and_(artifacts.c.job_id == job, artifacts.c.name == name)
        with self._database.writing() as connection:
            _refuse_old_lease(connection, job, key, lock=True)
            connection.execute(update(artifacts).where(same, _IS_COMING).values(state=GONE))
            alone_adding(connection, artifacts)
            room, why = self._room(connection, job, not_(same))
            if size > room:
                raise NoRoom(
                    f"{name} has {in_words(size)}, and {in_words(room)} are free {why}: delete "
                    "artifacts that nobody needs, or have the limit raised"
                )
            connection.execute(
                insert(artifacts).values(
                    id=coming.id,
                    job_id=job,
                    name=name,
                    state=COMING,
                    size=size,
                    sha256=sha256,
                    created=self._clock(),
                )
            )
        return coming

    def finish(self, coming: Coming) -> ArtifactInfo:
        """It has arrived whole: from now on it is the newest of its name.

        Raises:
            Conflict: The lease is not the job's newest any more, or a newer one is on its way.
        """
        mine = and_(artifacts.c.id == coming.id, _IS_COMING)
        with self._database.writing() as connection:
            _refuse_old_lease(connection, coming.job, coming.key, lock=True)
            former = update(artifacts).where(self._newest(coming.job, coming.name))
            connection.execute(former.values(state=GONE))
            kept = update(artifacts).where(mine).values(state=KEPT, created=self._clock())
            row = connection.execute(kept.returning(artifacts)).mappings().one_or_none()
            if row is None:
                raise Conflict(f"a newer {coming.name} is on its way, or the job was removed")
            return _info(row)

    def give_up(self, coming: Coming) -> None:
        """Remove what there is of an artifact that did not arrive."""
        mine = artifacts.c.id == coming.id
        if not self._write(update(artifacts).where(mine).values(state=GONE)):
            # A newer one has come meanwhile and this one's row was removed, maybe before there was
            # an object: some places have it only once it is whole.
            with suppress(ServiceProblem):  # what went wrong before is told
                self.place.remove(coming.id)

    # ---------------------------------------------------------------------------------- removing

    def delete(self, job: str, name: ArtifactName) -> None:
        """Have nobody find an artifact any more.

        Raises:
            NotFound: There is none of this name.
        """
        if not self._write(update(artifacts).where(self._newest(job, name)).values(state=GONE)):
            raise NotFound(f"this job has no {name}")

    def forget_lost(self) -> None:
        """Give up what belongs to no job any more, and what a killed service left on its way."""
        orphans = artifacts.c.job_id.not_in(select(jobs.c.id))
        stale = and_(_IS_COMING, artifacts.c.created < self._clock() - ARRIVAL_SECONDS)
        self._write(update(artifacts).where(or_(orphans, stale)).values(state=GONE))

    def remove_gone(self, closed: Callable[[], bool] = lambda: False) -> None:
        """Remove the objects that nobody finds any more; those that cannot be removed now stay for
        the next time.
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
                return
            self._write(delete(artifacts).where(artifacts.c.id == identifier))

    # ----------------------------------------------------------------------------------- in here

    @staticmethod
    def _newest(job: str, name: str) -> ColumnElement[bool]:
        return and_(artifacts.c.job_id == job, artifacts.c.name == name, artifacts.c.state == KEPT)

    def _room(
        self, connection: Connection, job: str, *which: ColumnElement[bool]
    ) -> tuple[int, str]:
        """Bytes that are free for a job, and within which limit; counting those ``which``."""
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


def _refuse_old_lease(connection: Connection, job: str, key: str, *, lock: bool = False) -> None:
    """Only who had the job last brings its files, also just after the lease has ended well."""
    if job_row(connection, job, lock=lock)["lease_key"] != key:
        raise Conflict("the lease of this job was lost: stop working on it, and lease again")


def _info(row: Any) -> ArtifactInfo:
    return ArtifactInfo(**{name: row[name] for name in ArtifactInfo.model_fields})
