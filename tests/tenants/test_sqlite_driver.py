"""SQLite's driver and its threads."""

import asyncio
import threading
from pathlib import Path

import pytest
from sqlalchemy import text

from tenants import sqlite_driver
from tenants.database import Database
from tests.support.tenants.stores import Store

pytestmark = pytest.mark.anyio


async def _pragma(database: Database, name: str) -> object:
    async with database.session() as connection:
        return await connection.scalar(text(f"PRAGMA {name}"))


@pytest.mark.case("D01")
async def test_sqlite_has_what_we_asked_for(store: Store) -> None:
    assert await _pragma(store.database, "journal_mode") == "wal"
    assert await _pragma(store.database, "synchronous") == 2
    assert await _pragma(store.database, "foreign_keys") == 1
    assert await _pragma(store.database, "busy_timeout") == 10_000
    assert await _pragma(store.database, "journal_size_limit") == 64 * 1024**2


def test_a_thread_whose_loop_is_gone_ends_quietly(tmp_path: Path) -> None:
    """The thread's answer comes after the loop has closed; pytest turns what a thread raises into an error."""
    gate = threading.Event()

    async def leave_at_once() -> sqlite_driver.QuietConnection:
        connection = await sqlite_driver.connect(tmp_path / "x.db")
        connection._tx.put_nowait((asyncio.get_running_loop().create_future(), gate.wait))
        connection.stop()
        return connection

    connection = asyncio.run(leave_at_once())
    gate.set()
    connection._thread.join(30)
    assert not connection._thread.is_alive()
    assert connection._connection is None
