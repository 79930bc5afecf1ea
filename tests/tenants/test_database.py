"""Connections: who may write when."""

import asyncio
import sqlite3

import pytest
from sqlalchemy import func, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from tenants import tables
from tenants.database import Database, make_engine
from tests.support.tenants.stores import NOW_US, Store

pytestmark = pytest.mark.anyio


async def test_a_file_system_without_wal_is_said_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from tenants.errors import StoreUnavailable

    engine = make_engine("sqlite+aiosqlite:///file:none?mode=memory&uri=true", is_pooled=False)
    with pytest.raises(StoreUnavailable, match="cannot use WAL here"):  # memory databases have no WAL
        async with engine.connect():
            raise AssertionError("connected")
    await engine.dispose()


@pytest.mark.case("G44", "D01")
async def test_fifty_writers_readers_and_a_report_meet_no_locked_database(store: Store) -> None:
    other = Database.open(store.url)  # as another process would: its own pool and lock
    num_writes, num_reads = 3, 0

    async def write(database: Database, writer: int) -> None:
        for i in range(num_writes):
            async with database.begin_immediate() as connection:
                # reads first, writes later: what fails without BEGIN IMMEDIATE
                await connection.scalar(select(func.count()).select_from(tables.audit))
                await connection.execute(
                    insert(tables.audit).values(at_us=i, actor=f"w{writer}", action="a", target="t", detail="{}")
                )

    async def read() -> None:
        nonlocal num_reads
        for _ in range(20):
            async with store.database.session() as connection:
                first = await connection.scalar(select(func.count()).select_from(tables.audit))
                again = await connection.scalar(select(func.count()).select_from(tables.audit))
                assert first == again  # one state for the whole session
                num_reads += 1

    writers = [write(store.database if i % 2 else other, i) for i in range(50)]
    await asyncio.gather(*writers, *(read() for _ in range(3)))
    async with store.database.session() as connection:
        assert await connection.scalar(select(func.count()).select_from(tables.audit)) == 50 * num_writes
        assert await connection.scalar(text("PRAGMA integrity_check")) == "ok"
    assert num_reads == 60
    await other.dispose()


async def test_without_immediate_the_same_would_fail(store: Store) -> None:
    """The control: a deferred transaction that reads first cannot write once another has written in between."""
    async with store.database.session() as late:
        await late.scalar(select(func.count()).select_from(tables.audit))
        async with store.database.begin_immediate() as connection:
            await connection.execute(
                insert(tables.audit).values(at_us=1, actor="a", action="a", target="t", detail="{}")
            )
        with pytest.raises(DBAPIError, match="locked"):
            await late.execute(insert(tables.audit).values(at_us=1, actor="b", action="a", target="t", detail="{}"))


async def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    with pytest.raises(RuntimeError):
        async with store.database.begin_immediate() as connection:
            await connection.execute(
                insert(tables.audit).values(at_us=1, actor="a", action="a", target="t", detail="{}")
            )
            raise RuntimeError
    async with store.database.session() as connection:
        assert await connection.scalar(select(func.count()).select_from(tables.audit)) == 0


async def test_a_read_only_store_refuses_every_write(store: Store) -> None:
    reader = Database.read_only(store.url)
    with pytest.raises(DBAPIError, match="readonly"):
        async with reader.begin_immediate() as connection:
            await connection.execute(
                insert(tables.audit).values(at_us=1, actor="a", action="a", target="t", detail="{}")
            )
    async with reader.session() as connection:
        assert await connection.scalar(select(func.count()).select_from(tables.tiers)) == 3
    await reader.dispose()


async def test_a_reference_to_nothing_is_refused(store: Store) -> None:
    with pytest.raises(IntegrityError):
        async with store.database.begin_immediate() as connection:
            await connection.execute(insert(tables.teams).values(name="x", tier="platinum", created_at_us=NOW_US))


async def test_an_id_is_never_given_twice(store: Store) -> None:
    first = await store.team("one")
    await store.database.dispose()
    with sqlite3.connect(store.path) as connection:
        connection.execute("DELETE FROM audit")
        connection.execute("DELETE FROM projects")
        connection.execute("DELETE FROM teams")
    connection.close()
    assert await store.team("two") > first


async def test_postgresql_is_reached_by_url_when_its_driver_is_there() -> None:
    from tenants.errors import Invalid

    try:
        database = Database.open("postgresql+asyncpg://user@localhost/terazi")
    except Invalid as error:
        assert "driver that is not installed" in error.message
    else:
        assert not database.is_sqlite
        await database.dispose()
