"""Disks that are full, over quota, read-only or failing, under the journal and the database."""

import asyncio
import errno
import logging
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import event

from tenants import disk, journal
from tenants.disk import disk_trouble
from tenants.errors import StoreUnavailable
from tenants.journal import Journal
from tenants.ledger import Ledger, LedgerSettings
from tests.support.tenants.stores import NOW_US, Store, closed_row, open_entry
from tests.tenants.test_journal import journal as begun
from tests.tenants.test_journal import replayed
from tests.tenants.test_ledger import QUICK, FullDisk, book, running, until

pytestmark = pytest.mark.anyio
REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk fails with input/output errors",
}
every_reason = pytest.mark.parametrize("number", REASONS, ids=errno.errorcode.get)


class FakeDisk:
    """The file layer under the journal: may refuse writes, cuts and syncs with an error of choice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: dict[str, int] = {}
        self.half = False  # takes a half of a line before it refuses
        for name in ("write", "ftruncate", "fsync"):
            monkeypatch.setattr(f"tenants.journal.os.{name}", self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, really):  # type: ignore[no-untyped-def]
        def call(fd: int, *arguments):  # type: ignore[no-untyped-def]
            number = self.refused.get(name)
            if number is None:
                return really(fd, *arguments)
            if name == "write" and self.half and len(arguments[0]) > 1:
                return really(fd, arguments[0][: len(arguments[0]) // 2])
            raise OSError(number, os.strerror(number))

        return call


@pytest.fixture
def fake_disk(monkeypatch: pytest.MonkeyPatch) -> FakeDisk:
    return FakeDisk(monkeypatch)


class Beat:
    """A sleep that ends when the test says so, and tells how long it was asked to be."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._next = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        self._next.clear()
        await self._next.wait()

    async def tick(self) -> None:
        """One round of the ledger's syncer."""
        before = len(self.asked)
        self._next.set()
        await until(lambda: len(self.asked) > before)


@asynccontextmanager
async def ticking(store: Store) -> AsyncIterator[tuple[Ledger, Beat]]:
    beat = Beat()
    async with running(store, LedgerSettings(), sleep=beat) as ledger:
        await until(lambda: bool(beat.asked))
        yield ledger, beat


# --- the journal ------------------------------------------------------------------------------------------------------


@pytest.mark.case("T05")
@every_reason
async def test_when_the_disk_refuses_one_line_says_so(
    store: Store, fake_disk: FakeDisk, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    caplog.set_level(logging.INFO)
    async with ticking(store) as (ledger, beat):
        running_one = open_entry("running")
        ledger.open(running_one)
        fake_disk.refused["write"] = number
        for i in range(20):
            with pytest.raises(StoreUnavailable):
                ledger.open(open_entry(f"r{i}"))
            assert ledger.is_unwritable, "after the first request"
        ledger.close(closed_row(running_one))
        for _ in range(5):
            await beat.tick()
        assert ledger.is_unwritable
        assert beat.asked[-1] == LedgerSettings().journal_probe_interval_seconds
        said = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == 1
        assert f"{REASONS[number]}: {store.directory / 'journal'}" in said[0].getMessage()
        del fake_disk.refused["write"]
        await beat.tick()  # and without any request
        assert not ledger.is_unwritable
        assert beat.asked[-1] == LedgerSettings().journal_fsync_interval_seconds
        ledger.open(open_entry("after"))
        assert [r.getMessage() for r in caplog.records].count("the journal can be written again") == 1
        ledger.close(closed_row(open_entry("after")))
    assert [row["request_id"] for row in await store.ledger_rows()] == ["running", "after"]


@pytest.mark.case("T05")
@every_reason
async def test_when_a_sync_fails_the_ledger_is_unwritable(store: Store, fake_disk: FakeDisk, number: int) -> None:
    async with ticking(store) as (ledger, beat):
        ledger.open(open_entry("a"))
        fake_disk.refused["fsync"] = number
        await beat.tick()
        assert ledger.is_unwritable
        with pytest.raises(StoreUnavailable):
            ledger.open(open_entry("b"))
        await beat.tick()
        assert ledger.is_unwritable, "the disk takes writes, but they are not safe"
        del fake_disk.refused["fsync"]
        await beat.tick()
        assert not ledger.is_unwritable
        ledger.close(closed_row(open_entry("a")))


@pytest.mark.case("T05")
async def test_when_the_file_system_fills_no_request_is_needed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of the present segment would still take a request or two."""
    is_full = False
    monkeypatch.setattr("tenants.ledger.is_full", lambda directory: is_full)
    rounds = round(LedgerSettings().journal_probe_interval_seconds / LedgerSettings().journal_fsync_interval_seconds)
    async with ticking(store) as (ledger, beat):
        for _ in range(2 * rounds):
            await beat.tick()
        assert not ledger.is_unwritable
        is_full = True
        for _ in range(2 * rounds):
            await beat.tick()
        assert ledger.is_unwritable
        is_full = False
        await beat.tick()
        assert not ledger.is_unwritable


@pytest.mark.case("T05")
def test_when_one_block_is_left_the_disk_is_still_full(
    tmp_path: Path, fake_disk: FakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server would be ready for one request, not ready, ready for one more, ..."""
    one = begun(tmp_path)
    fake_disk.refused["write"] = errno.ENOSPC
    with pytest.raises(StoreUnavailable):
        one.append_open(open_entry("a"))
    del fake_disk.refused["write"]
    really = os.write

    def one_block(fd: int, data: bytes) -> int:
        if os.fstat(fd).st_size + len(data) > 4096:
            raise OSError(errno.ENOSPC, "full")
        return really(fd, data)

    monkeypatch.setattr("tenants.journal.os.write", one_block)
    assert not one.probe()
    assert [path.stat().st_size for path in one.segments()] == [0], "what a probe wrote is taken back"
    monkeypatch.setattr("tenants.journal.os.write", really)
    assert one.probe() and one.num_bytes == 0
    one.close()


@pytest.mark.case("T05")
def test_when_the_disk_is_back_a_refused_close_is_written(tmp_path: Path, fake_disk: FakeDisk) -> None:
    """The database may be on the same disk: a crash must not make an ended request a lost one."""
    one = begun(tmp_path)
    for name in ("a", "b"):
        one.append_open(open_entry(name))
    fake_disk.refused["write"] = errno.ENOSPC
    for name in ("a", "b"):
        with pytest.raises(StoreUnavailable):
            one.append_close(closed_row(open_entry(name)))
        assert one.holds_close(name)
    one.committed(["b"])  # the database has taken this one
    assert replayed(tmp_path) == ([], ["a", "b"], 0), "the opens stay"
    fake_disk.refused.clear()
    assert one.probe()
    assert replayed(tmp_path)[0] == ["a"]
    one.committed(["a"])
    assert one.num_bytes == 0
    one.close()


@pytest.mark.case("T11")
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_when_a_half_line_cannot_be_cut_off_it_is_a_503(tmp_path: Path, fake_disk: FakeDisk, number: int) -> None:
    one = begun(tmp_path)
    one.append_open(open_entry("a"))
    fake_disk.refused |= {"write": errno.ENOSPC, "ftruncate": number}
    fake_disk.half = True
    with pytest.raises(StoreUnavailable) as refused:
        one.append_open(open_entry("b"))
    assert refused.value.code == "store_unavailable"
    assert not one.probe()
    with pytest.raises(StoreUnavailable):  # nothing is glued to the half line
        one.append_close(closed_row(open_entry("a")))
    del fake_disk.refused["write"]
    assert not one.probe() and one.trouble is not None
    fake_disk.refused.clear()
    assert one.probe()
    one.append_open(open_entry("c"))
    assert replayed(tmp_path) == (["a"], ["c"], 0)
    assert b"  " not in one.segments()[0].read_bytes(), "what probes wrote is gone"
    one.close()


@pytest.mark.case("T11")
async def test_when_the_journal_cannot_be_emptied_nobody_fails(store: Store, fake_disk: FakeDisk) -> None:
    """SQL has taken the rows: that the file could not be cut is no failure of the database."""
    async with ticking(store) as (ledger, beat):
        fake_disk.refused["ftruncate"] = errno.EIO
        book(ledger, "r")
        await ledger.flush()
        await until(lambda: ledger.is_unwritable)
        assert not ledger.is_failing
        fake_disk.refused.clear()
        await beat.tick()
        assert not ledger.is_unwritable
        book(ledger, "s")
    assert [row["request_id"] for row in await store.ledger_rows()] == ["r", "s"]


@pytest.mark.case("T05")
@every_reason
def test_when_a_start_finds_no_room_it_names_the_path(tmp_path: Path, fake_disk: FakeDisk, number: int) -> None:
    one = Journal(tmp_path, bytes_max=10**6, segment_bytes=10**6)
    list(one.replay().rows())
    fake_disk.refused["write"] = number
    with pytest.raises(StoreUnavailable) as refused:
        one.begin()
    assert refused.value.message == f"{REASONS[number]}: {tmp_path}"


def test_a_probe_has_room_for_many_requests() -> None:
    assert journal.PROBE_BYTES >= 10 * journal.CLOSE_LINE_BYTES


# --- the database -----------------------------------------------------------------------------------------------------


@pytest.mark.case("T05")
async def test_when_only_the_database_is_full_requests_are_served(store: Store) -> None:
    full = FullDisk(store)
    async with running(store, QUICK) as ledger:
        full.is_full = True
        for i in range(200):
            book(ledger, f"r{i}", level_path="0" * 1_000)
        await until(lambda: ledger.is_failing)
        assert not ledger.is_unwritable and ledger.has_room
        full.is_full = False
        await ledger.flush()
    assert len(await store.ledger_rows()) == 200


async def test_the_errors_of_a_full_database_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("PRAGMA max_page_count = 2")
        with pytest.raises(sqlite3.OperationalError) as full:
            connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
    connection.close()
    assert disk_trouble(full.value, path) == f"the disk is full: {path}"
    failing = sqlite3.OperationalError("disk I/O error")
    failing.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    assert disk_trouble(failing, path) == f"the disk fails with input/output errors: {path}"
    monkeypatch.setattr(disk, "ROOM_BYTES_MIN", 10**30)  # no file system has so much: all count as full
    assert disk_trouble(failing, path) == f"the disk is full: {path}"
    assert disk_trouble(sqlite3.OperationalError("no such table"), path) is None
    assert disk_trouble(OSError(errno.EACCES, "no"), path) is None
    assert disk_trouble(OSError(errno.ENOSPC, "no", "/other/file"), path) == "the disk is full: /other/file"


@pytest.mark.case("T05")
async def test_when_an_upgrade_finds_no_room_it_names_the_path(store: Store) -> None:
    from sqlalchemy import Engine

    from tenants import migrate

    def cap(connection: sqlite3.Connection, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA max_page_count = 1")
        cursor.close()

    path = store.directory / "new.db"
    event.listen(Engine, "connect", cap)
    try:
        with pytest.raises(StoreUnavailable, match=f"the disk is full: {path}"):
            await migrate.upgrade(f"sqlite+aiosqlite:///{path}", now_us=lambda: NOW_US)
    finally:
        event.remove(Engine, "connect", cap)
