"""The audit trail: who changed what. Each admin write adds one row, in its own transaction. No row holds a secret."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import tables
from tenants.clock import iso


async def record(
    connection: AsyncConnection, *, at_us: int, actor: str, action: str, target: str, detail: Mapping[str, Any]
) -> None:
    """Add the row of one admin write, and raise the generation, which numbers the snapshots.

    `at_us` is the moment of the write, `detail` anything that JSON can hold. Call it inside the write's transaction.
    """
    await connection.execute(
        insert(tables.audit).values(
            at_us=at_us, actor=actor, action=action, target=target, detail=json.dumps(detail, sort_keys=True)
        )
    )
    await connection.execute(update(tables.generation).values(value=tables.generation.c.value + 1))


async def latest(connection: AsyncConnection, limit: int = 100) -> list[dict[str, Any]]:
    """The newest `limit` rows, newest first, as JSON-able mappings."""
    query = select(tables.audit).order_by(tables.audit.c.id.desc()).limit(limit)
    rows = (await connection.execute(query)).mappings().all()
    return [
        {
            "at": iso(row["at_us"]),
            "actor": row["actor"],
            "action": row["action"],
            "target": row["target"],
            "detail": json.loads(row["detail"]),
        }
        for row in rows
    ]
