"""Alembic's environment. `tenants.migrate` hands over an open connection, in a transaction that `tenants.migrate` ends.

There is no alembic.ini: the settings come from `tenants.migrate.alembic_config`. A developer who writes a new revision
uses the same settings; then no connection is handed over, and this module makes it from the URL.
"""

import asyncio

from alembic import context
from sqlalchemy import Connection

from tenants.tables import metadata


def _run(connection: Connection) -> None:
    # SQLite's DDL takes part in transactions, because our driver leaves BEGIN to us. So an upgrade is all or nothing.
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
