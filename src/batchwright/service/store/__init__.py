"""The store: all that the service keeps, in a database and a place of artifacts.

Each `Part` reads and writes one table or two, and returns records. Nothing here knows of HTTP or of
pages; what cannot be done raises a `problems.ServiceProblem`.
"""

from __future__ import annotations

import time

from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from batchwright.errors import BatchwrightError
from batchwright.service.database.engine import Database, open_engine, shown
from batchwright.service.database.migrate import HEAD, migrate, revision
from batchwright.service.lease_ages import LeaseAges
from batchwright.service.listening import Listening
from batchwright.service.settings import DAY, Settings
from batchwright.service.store.advice import AdviceStore
from batchwright.service.store.agents import Agents
from batchwright.service.store.artifacts import Artifacts
from batchwright.service.store.audit import Audit
from batchwright.service.store.jobs import Jobs
from batchwright.service.store.notices import Notices
from batchwright.service.store.part import Clock, Common
from batchwright.service.store.profiles import Profiles
from batchwright.service.store.records import Records
from batchwright.service.store.runs import Runs
from batchwright.service.store.tokens import SignIn, Tokens

__all__ = ["Store"]


class Store:
    """All parts of the store. Safe to use from several threads; several processes may share a
    database.

    Args:
        engine: Engine from `open_engine`, whose database has the newest schema.
        settings: Limits and delays.
        clock: Unix time in seconds; tests set it.
        steady: Seconds by a clock that never jumps; unset: the system's, or a test's ``clock``.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        clock: Clock = time.time,
        steady: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.database = Database(engine)
        self._tidied: float | None = None  # when `tidy` was called last
        steady = steady or (time.monotonic if clock is time.time else clock)
        ages = LeaseAges(steady, min(settings.lease_seconds, settings.silent_seconds))
        self.listening = Listening(clock, steady, ages.away)
        common = Common(self.database, settings, clock, self.listening)
        self.tokens = Tokens(common)
        self.sign_in = SignIn(common)
        self.jobs = Jobs(common, ages)
        self.runs = Runs(common)
        self.records = Records(common)
        self.advice = AdviceStore(common)
        self.agents = Agents(common, self.jobs.kept_for, self.jobs.note_restart)
        self.artifacts = Artifacts(common)
        self.notices = Notices(common)
        self.profiles = Profiles(common)
        self.audit = Audit(common)

    @classmethod
    def open(
        cls, settings: Settings, clock: Clock = time.time, steady: Clock | None = None
    ) -> Store:
        """The store of ``settings.database``, whose schema is brought up to date.

        Raises:
            BatchwrightError: The database cannot be opened, or is of a newer version.
        """
        engine = open_engine(settings.database)
        try:
            migrate(Database(engine))
        except SQLAlchemyError as error:
            engine.dispose()
            lines = str(getattr(error, "orig", error) or error).strip().splitlines()
            raise BatchwrightError(
                f"cannot open the database {shown(settings.database)}: {lines[0]}; "
                "is it running, and may you write to it?"
            ) from None
        except BaseException:
            engine.dispose()
            raise
        return cls(engine, settings, clock, steady)

    def check(self) -> None:
        """Return if the database answers and is of this version.

        Raises:
            BatchwrightError: The database is of another version.
            SQLAlchemyError: The database does not answer.
        """
        with self.database.reading() as connection:
            connection.execute(text("SELECT 1"))
            found = revision(connection)
        if found != HEAD:
            raise BatchwrightError(f"the database is of revision {found}, not {HEAD}")

    def tick(self) -> None:
        """Note that this process hears reports, and end cancelled jobs whose agent is silent. The
        service calls this every `TICK_SECONDS`.
        """
        self.listening.seconds()
        self.jobs.tick()

    def tidy(self) -> list[str]:
        """Delete what is older than `Settings.retention_days`; returns identifiers of the runs.

        Only what was too old at the last call already is deleted, so the first call deletes
        nothing, and a tenth of each table at most, the oldest: a machine's clock may be ahead, most
        likely just after its start, and what is deleted by it does not come back.
        """
        self.sign_in.forget_expired()
        self.runs.forget_deleted()
        gone: list[str] = []
        if self.settings.retention_days is not None:
            now, last = self.clock(), self._tidied
            self._tidied = now
            before = min(now, 0.0 if last is None else last) - self.settings.retention_days * DAY
            for part in (self.jobs, self.profiles, self.audit):
                part.delete_old(before)
            gone = self.runs.delete_old(before)
        self.artifacts.forget_lost()
        self.notices.forget_old()
        return gone

    def close(self) -> None:
        """Close all connections."""
        self.records.close()
        self.database.close()
