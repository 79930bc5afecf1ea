"""Alembic's environment. `tenants.migrate` hands over an open connection, inside the transaction it will commit.

There is no alembic.ini: settings come from `tenants.migrate.alembic_config`, which also serves `alembic` itself when a
developer writes a new revision (then a connection is made here from the URL).
"""

import asyncio

from alembic import context
from sqlalchemy import Connection

from tenants.tables import metadata


def _run(connection: Connection) -> None:
    # SQLite's DDL takes part in transactions once the driver leaves BEGIN to us, so an upgrade is all or nothing.
    context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


async def _run_by_url(url: str) -> None:
    from tenants.database import make_engine

    engine = make_engine(url, is_pooled=False)
    async with engine.begin() as connection:
        await connection.run_sync(_run)


_given = context.config.attributes.get("connection")
if _given is not None:
    _run(_given)
else:
    asyncio.run(_run_by_url(context.config.get_main_option("sqlalchemy.url") or ""))
