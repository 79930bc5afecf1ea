"""One gateway to a store: the second is refused and told whom to stop."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tenants import store_lock
from tenants.database import sqlite_url
from tenants.errors import StoreInUse, StoreUnavailable
from tenants.store_lock import GATEWAY, StoreLock, hold_store, lock_path
from tests.support.tenants.postgres import PostgresServer
from tests.tenants.test_ledger import until

pytestmark = pytest.mark.anyio
FIRST = f"{GATEWAY}http://127.0.0.1:8080 (process 7 on gpu1)"
SECOND = f"{GATEWAY}http://127.0.0.1:9090 (process 8 on gpu2)"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "terazi.db")
    postgres: PostgresServer = request.getfixturevalue("server")
    return postgres.new_database()


@pytest.mark.case("T08")
async def test_when_a_gateway_holds_the_store_the_next_is_refused(url: str) -> None:
    async with hold_store(url, FIRST) as lock:
        assert lock.lost_seconds == 0
        for holder in (SECOND, "a command (process 9 on gpu1)"):
            with pytest.raises(StoreInUse, match=re.escape("by the gateway at http://127.0.0.1:8080")) as refused:
                async with hold_store(url, holder):
                    pass
            assert (refused.value.code, refused.value.holder) == ("store_in_use", FIRST)
    async with hold_store(url, SECOND):  # it has gone, and left nothing behind
        pass


@pytest.mark.case("T08")
async def test_when_a_command_holds_the_store_a_gateway_waits(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_lock, "_POLL_SECONDS", 0.001)
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        await first.enter_async_context(hold_store(url, "a command (process 9)"))
        waiting = asyncio.create_task(stack.enter_async_context(hold_store(url, FIRST)))
        await asyncio.sleep(0)
        assert not waiting.done()
        await first.aclose()
        assert (await waiting).lost_seconds == 0
    async with hold_store(url, "a command (process 9)"):
        with pytest.raises(StoreInUse, match="a command"):
            async with hold_store(url, FIRST, wait_seconds=0):
                pass


@pytest.mark.case("T08")
async def test_when_a_path_is_spelt_otherwise_it_is_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "terazi.db").touch()
    (tmp_path / "other.db").symlink_to(tmp_path / "real" / "terazi.db")
    monkeypatch.chdir(tmp_path)
    async with hold_store(sqlite_url(tmp_path / "real" / "terazi.db"), FIRST):
        for same in (tmp_path / "link" / "terazi.db", Path("real/../real/terazi.db"), tmp_path / "other.db"):
            with pytest.raises(StoreInUse):
                async with hold_store(sqlite_url(same), SECOND):
                    pass
        async with hold_store(sqlite_url(tmp_path / "third.db"), SECOND):
            pass
    assert lock_path(tmp_path / "real" / "terazi.db").stat().st_mode & 0o777 == 0o600


async def test_when_the_directory_is_missing_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"Cannot open .*nowhere.*Does the directory exist"):
        async with hold_store(sqlite_url(tmp_path / "nowhere" / "t.db"), FIRST):
            pass


async def test_when_the_holder_dies_its_file_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "terazi.db"
    lock_path(path).write_text(FIRST)
    async with hold_store(sqlite_url(path), SECOND):
        assert lock_path(path).read_text() == SECOND


# --- PostgreSQL's connection may be lost ------------------------------------------------------------------------------


@asynccontextmanager
async def watched(lock: StoreLock, beat: asyncio.Event) -> AsyncIterator["asyncio.Task[None]"]:
    async def sleep(_: float) -> None:
        await beat.wait()
        beat.clear()

    task = asyncio.create_task(lock.watch(sleep))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def end_connection(server: PostgresServer, url: str) -> None:
    server.run(url, "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")


@pytest.mark.postgres
@pytest.mark.case("T08")
async def test_when_the_connection_is_lost_the_lock_is_taken_again(
    server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.new_database()
    caplog.set_level("INFO")
    async with hold_store(url, FIRST) as lock, watched(lock, asyncio.Event()):
        await asyncio.sleep(0)
        end_connection(server, url)
        await until(lambda: "held again" in caplog.text)  # at once: no look was due
        assert "is lost" in caplog.text and lock.lost_seconds == 0
        with pytest.raises(StoreInUse, match="8080"):
            async with hold_store(url, SECOND):
                pass


@pytest.mark.postgres
@pytest.mark.case("T08")
async def test_when_another_has_taken_the_store_the_first_ends(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.new_database()
    beat = asyncio.Event()
    async with hold_store(url, FIRST) as lock, AsyncExitStack() as stack:
        really = lock._connect

        async def away() -> None:
            raise StoreUnavailable("no route")

        lock._connect = away  # type: ignore[assignment]
        async with watched(lock, beat) as task:
            await asyncio.sleep(0)
            end_connection(server, url)
            await until(lambda: lock.lost_seconds > 0)
            beat.set()
            await until(lambda: not beat.is_set())
            assert not task.done(), "the database is away, and nobody else can have the store"
            await stack.enter_async_context(hold_store(url, SECOND))
            lock._connect = really
            beat.set()
            with pytest.raises(StoreInUse, match="9090"):
                await task


@pytest.mark.postgres
async def test_when_the_holders_name_is_long_its_address_stays(server: PostgresServer) -> None:
    url = server.new_database()
    async with hold_store(url, f"{FIRST} {'ü' * 100}"):
        with pytest.raises(StoreInUse, match="8080"):
            async with hold_store(url, SECOND):
                pass
    assert len(os.fsencode(FIRST)) > 40
