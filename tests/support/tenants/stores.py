"""A store in a temporary directory, and rows to book in it."""

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alembic import command
from sqlalchemy import Connection, select

from policies.tiers import DEFAULT_TIERS
from tenants import keys, migrate, tables, teams
from tenants.database import Database, make_engine, sqlite_url
from tenants.pepper import Pepper, load_pepper
from tenants.quotas import Limits
from tenants.rows import LedgerRow, OpenEntry
from tenants.snapshot import Identity, SnapshotHolder

NOW_US = 1_780_000_000_000_000  # a moment in 2026


@dataclass
class Store:
    """A store with its parts, at a fixed moment that tests may move."""

    directory: Path
    url: str
    database: Database
    pepper: Pepper
    holder: SnapshotHolder
    now_us: int = NOW_US

    @property
    def path(self) -> Path:
        return self.directory / "terazi.db"

    async def team(self, name: str, tier: str = "gold", **limits: int | None) -> int:
        """A team, and its id."""
        async with self.database.begin_immediate() as connection:
            team = await teams.create_team(connection, name, tier, at_us=self.now_us, actor="test")
            if limits:
                await teams.set_quota(connection, name, limits, at_us=self.now_us, actor="test")
        return team.team_id

    async def key(self, team: str, **how: Any) -> tuple[str, str]:
        """A key of `team`: its public id and its text."""
        async with self.database.begin_immediate() as connection:
            key, text = await keys.create_key(connection, team, self.pepper, at_us=self.now_us, actor="test", **how)
        return key.public_id, text

    async def ledger_rows(self) -> list[dict[str, Any]]:
        """Every row of the ledger, in order."""
        async with self.database.session() as connection:
            found = await connection.execute(select(tables.ledger).order_by(tables.ledger.c.id))
            return [dict(row) for row in found.mappings()]


@asynccontextmanager
async def opened(template: Path, directory: Path) -> AsyncIterator[Store]:
    """A fresh store made by copying an upgraded, empty database."""
    os.makedirs(directory, exist_ok=True)
    shutil.copy(template, directory / "terazi.db")
    url = sqlite_url(directory / "terazi.db")
    database = Database.open(url)
    pepper = load_pepper(directory, {})
    try:
        yield Store(directory, url, database, pepper, SnapshotHolder(database, pepper))
    finally:
        await database.dispose()


async def upgrade_to(url: str, revision: str) -> None:
    """An empty database with the schema of an older version, and no rows."""
    engine = make_engine(url, is_pooled=False)
    config = migrate.alembic_config(url)

    def run(connection: Connection) -> None:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)

    async with engine.begin() as connection:
        await connection.run_sync(run)
    await engine.dispose()


class Clock:
    """Monotonic seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def identity(team_id: int = 1, **limits: int | None) -> Identity:
    """Somebody of team `team_id` with these limits."""
    return Identity(
        key_id=team_id,
        key_public_id=f"{team_id:012d}",
        project_id=team_id,
        project="default",
        team_id=team_id,
        team=f"team{team_id}",
        tier=DEFAULT_TIERS[0],
        limits=Limits(**limits),
    )


def open_entry(request_id: str, **changes: Any) -> OpenEntry:
    """A request at its admission."""
    values: dict[str, Any] = {
        "request_id": request_id,
        "key_id": 1,
        "key_public_id": "A" * 12,
        "project_id": 1,
        "project": "default",
        "team_id": 1,
        "team": "search",
        "tier": "gold",
        "model": "tiny",
        "engine_id": "e1",
        "engine_epoch": 1,
        "endpoint": "chat.completions",
        "stream": True,
        "received_at_us": NOW_US,
        "admitted_at_us": NOW_US + 1_000,
        "prompt_tokens": 10,
        "max_tokens": 100,
    }
    return OpenEntry(**(values | changes))


def closed_row(entry: OpenEntry, **changes: Any) -> LedgerRow:
    """The same request at its end."""
    values = {name: getattr(entry, name) for name in OpenEntry.__dataclass_fields__}
    values |= {
        "started_at_us": entry.admitted_at_us + 2_000,
        "first_token_at_us": entry.admitted_at_us + 5_000,
        "finished_at_us": entry.admitted_at_us + 50_000,
        "output_tokens": 7,
        "device_us": 12_345,
        "level_path": "0>1",
        "outcome": "ok",
        "finish_reason": "stop",
    }
    return LedgerRow(**(values | changes))


def request_ids(count: int, prefix: str = "r") -> Iterator[str]:
    """`count` different ids."""
    return (f"{prefix}{i}" for i in range(count))
