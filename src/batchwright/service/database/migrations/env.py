"""Run by Alembic; `migrate` hands over a connection on which a transaction has begun."""

from __future__ import annotations

from alembic import context

from batchwright.service.database.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=False,  # begun, and ended, by whoever made the connection
    render_as_batch=True,
)
context.run_migrations()
