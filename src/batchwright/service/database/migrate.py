"""Brings the schema up to date when the service starts.

An empty database gets the tables as they are now, an older one the migrations since. They run in
one transaction and under a lock, so that several processes may start at the same time, and a
migration that fails leaves everything as it was.
"""

from __future__ import annotations

from sqlalchemy import Connection, inspect, text

from batchwright.errors import BatchwrightError
from batchwright.service.database.engine import Database
from batchwright.service.database.tables import metadata

HEAD = "0006"
"""The newest revision in `migrations.versions`; named here so that a start without migrations does
without Alembic, which takes a quarter of a second to load."""

_LOCK = 0x62617463  # name of one of PostgreSQL's advisory locks: a number that no other uses


def revision(connection: Connection) -> str | None:
    """The schema's revision; `None` in an empty database."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def migrate(database: Database) -> None:
    """Bring the schema to `HEAD`.

    Raises:
        BatchwrightError: The schema is of a newer Batchwright.
    """
    with database.reading() as connection:
        if revision(connection) == HEAD:
            return
    with database.writing() as connection:
        if not database.is_sqlite:
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
        found = revision(connection)
        if found == HEAD:
            return  # another process was quicker
        from alembic import command
        from alembic.config import Config
        from alembic.script import ScriptDirectory

        config = Config()
        config.set_main_option("script_location", "batchwright.service.database:migrations")
        config.attributes["connection"] = connection
        if found is None:
            metadata.create_all(connection)
            command.stamp(config, HEAD)
            return
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if found not in known:
            raise BatchwrightError(
                f"the database is of a newer Batchwright (revision {found}); install that, or name "
                "another with --database"
            )
        command.upgrade(config, HEAD)
