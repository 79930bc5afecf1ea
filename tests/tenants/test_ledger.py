"""One row for each admitted request: through crashes, failures and full disks."""

import asyncio
import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select

from tenants import tables
from tenants.clock import from_epoch_us
from tenants.errors import LimitExceeded, StoreUnavailable
from tenants.leases import Leases
from tenants.ledger import Ledger, LedgerSettings, Progress, ServiceSampleRow, recent_use
from tests.support.tenants.stores import NOW_US, Clock, Store, closed_row, open_entry, request_ids

pytestmark = pytest.mark.anyio
QUICK = LedgerSettings(retry_seconds_first=0.001, retry_seconds_max=0.002, journal_fsync_interval_seconds=0.001)


@asynccontextmanager
async def running(store: Store, settings: LedgerSettings = QUICK, **how: Any) -> AsyncIterator[Ledger]:
    ledger = Ledger(store.database, store.directory / "journal", settings, now_us=lambda: store.now_us, **how)
    await ledger.start()
    try:
        yield ledger
    finally:
        await ledger.stop()


def book(ledger: Ledger, name: str, **changes: Any) -> None:
    entry = open_entry(name)
    ledger.open(entry)
    ledger.close(closed_row(entry, **changes))


async def until(holds: Callable[[], bool]) -> None:
    """Let other tasks move on until `holds`; how fast they do decides nothing."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Outage:
    """Makes every write of the store fail: another process holds the write lock, and ours does not wait for it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._holder: sqlite3.Connection | None = None
        event.listen(store.database._engine.sync_engine, "checkout", self._checkout)

    def _checkout(self, connection: Any, *_: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA busy_timeout = 0")
        cursor.close()

    def begin(self) -> None:
        self._holder = sqlite3.connect(self._store.path, isolation_level=None)
        self._holder.execute("BEGIN IMMEDIATE")

    def end(self) -> None:
        assert self._holder is not None
        self._holder.close()


class FullDisk:
    """Makes SQLite say "database or disk is full", by capping its file at its present size."""

    def __init__(self, store: Store) -> None:
        self.is_full = False
        event.listen(store.database._engine.sync_engine, "checkout", self._checkout)

    def _checkout(self, connection: Any, *_: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA max_page_count = {1 if self.is_full else 1_000_000}")
        cursor.close()


async def test_a_row_has_every_column_it_was_given(store: Store) -> None:
    async with running(store) as ledger:
        entry = open_entry("r")
        row = closed_row(
            entry,
            cached_tokens=4,
            num_preemptions=1,
            num_swaps=2,
            num_recomputes=3,
            num_promotions=4,
            attempts=2,
            error_code="x",
        )
        ledger.open(entry)
        ledger.close(row)
        await ledger.flush()
    (found,) = await store.ledger_rows()
    found.pop("id")
    assert found == {name: getattr(row, name) for name in row.__dataclass_fields__}


async def test_two_inner_attempts_are_one_row(store: Store) -> None:
    async with running(store) as ledger:
        book(ledger, "r", attempts=2, output_tokens=7)
    (row,) = await store.ledger_rows()
    assert (row["attempts"], row["output_tokens"]) == (2, 7)


async def test_a_second_close_is_ignored_before_and_after_the_commit(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(store) as ledger:
        book(ledger, "r", output_tokens=7)
        ledger.close(closed_row(open_entry("r"), output_tokens=99))
        await ledger.flush()
        ledger.close(closed_row(open_entry("r"), output_tokens=100))
        await ledger.flush()
    assert [row["output_tokens"] for row in await store.ledger_rows()] == [7]
    assert "closed twice" in caplog.text


@pytest.mark.case("G09")
@pytest.mark.parametrize("seed", range(3))
async def test_each_request_has_one_row_whatever_its_end_and_the_sums_agree(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    sums = {"output_tokens": 0, "device_us": 0, "prompt_tokens": 0}
    outcomes = ["ok", "client_closed", "timeout", "error", "shutdown"]
    names = list(request_ids(300))
    async with running(store, LedgerSettings(batch_rows_max=7, journal_segment_bytes=20_000)) as ledger:

        async def one(name: str) -> None:
            entry = open_entry(name, prompt_tokens=rng.randrange(1, 50))
            ledger.open(entry)
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            row = closed_row(
                entry,
                outcome=rng.choice(outcomes),
                output_tokens=rng.randrange(90),
                device_us=rng.randrange(10_000),
            )
            for field in sums:
                sums[field] += getattr(row, field)
            ledger.close(row)

        await asyncio.gather(*(one(name) for name in names))
    rows = await store.ledger_rows()
    assert sorted(row["request_id"] for row in rows) == sorted(names)
    assert {field: sum(row[field] for row in rows) for field in sums} == sums
    assert list((store.directory / "journal").iterdir()) == []


@pytest.mark.case("G18")
async def test_a_stop_writes_what_was_settled_a_moment_ago(store: Store) -> None:
    async with running(store) as ledger:
        for name in request_ids(500):
            book(ledger, name)
        assert ledger.backlog == 500
    assert len(await store.ledger_rows()) == 500


_CHILD = """
import asyncio, sys
from pathlib import Path
from tenants.database import Database
from tenants.ledger import Ledger, LedgerSettings, Progress
from tests.support.tenants.stores import closed_row, open_entry

async def main(url, directory):
    ledger = Ledger(Database.open(url), Path(directory), LedgerSettings())
    await ledger.start()
    for i in range(500):
        entry = open_entry(f"r{i}")
        ledger.open(entry)
        ledger.close(closed_row(entry, output_tokens=i))
    for i in range(20):
        ledger.open(open_entry(f"open{i}"))
    ledger.progress(Progress(request_id="open0", output_tokens=5, device_us=77, level_path="0>1"))
    if sys.argv[3] == "flushed":
        await ledger.flush()
    print("ready", flush=True)
    await asyncio.get_running_loop().create_future()

asyncio.run(main(*sys.argv[1:3]))
"""


@pytest.mark.case("G18")
@pytest.mark.parametrize("state", ["flushed", "unflushed"])
async def test_after_kill_9_journalled_rows_are_there_and_open_ones_lost(store: Store, state: str) -> None:
    directory = store.directory / "journal"
    blocker = sqlite3.connect(store.path, isolation_level=None)
    if state == "unflushed":
        blocker.execute("BEGIN IMMEDIATE")  # the child's SQL must wait: all it has is the journal
    root = Path(__file__).parents[2]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHILD, store.url, str(directory), state, stdout=subprocess.PIPE, cwd=root
    )
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"ready\n"
    finally:
        child.kill()
        await child.wait()
        blocker.close()
    assert len(await store.ledger_rows()) == (500 if state == "flushed" else 0)
    async with running(store) as ledger:
        assert ledger.num_lost == 20
    rows = {row["request_id"]: row for row in await store.ledger_rows()}
    assert len(rows) == 520
    assert all(rows[f"r{i}"]["output_tokens"] == i and rows[f"r{i}"]["outcome"] == "ok" for i in range(500))
    lost = [rows[f"open{i}"] for i in range(20)]
    assert {(row["outcome"], row["error_code"], row["finished_at_us"]) for row in lost} == {
        ("lost", "gateway_died", NOW_US + 1_000)
    }
    assert (lost[0]["output_tokens"], lost[0]["device_us"], lost[0]["level_path"]) == (5, 77, "0>1")
    assert (lost[1]["output_tokens"], lost[1]["prompt_tokens"]) == (0, 10)
    async with running(store) as ledger:  # and a further start books nothing again
        assert ledger.num_lost == 0
    assert len(await store.ledger_rows()) == 520


@pytest.mark.case("D02", "G45")
async def test_a_full_database_stops_nobody_until_the_journal_is_full(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(store)
    settings = LedgerSettings(
        retry_seconds_first=0.001, retry_seconds_max=0.002, journal_bytes_max=60_000, journal_segment_bytes=9_000
    )
    async with running(store, settings) as ledger:
        disk.is_full = True
        running_one = open_entry("running")
        ledger.open(running_one)
        served: list[str] = []
        with pytest.raises(StoreUnavailable) as refused:
            for i in range(10_000):
                book(ledger, f"r{i}", level_path="0" * 1_000)  # so that a few rows fill the room in the last page
                served.append(f"r{i}")
                await asyncio.sleep(0)
        assert refused.value.code == "store_unavailable"
        assert len(served) > 20
        await until(lambda: ledger.num_failures >= 3)
        assert ledger.is_failing and not ledger.has_room
        assert len(await store.ledger_rows()) < len(served)
        ledger.close(closed_row(running_one))  # a running stream finishes and is booked
        assert caplog.text.count("does not take ledger rows") == 1  # one line for the outage, not for each try
        disk.is_full = False
        await ledger.flush()
        assert not ledger.is_failing and ledger.has_room
        book(ledger, "after")
    names = {row["request_id"] for row in await store.ledger_rows()}
    assert names == {*served, "running", "after"}
    with sqlite3.connect(store.path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


@pytest.mark.case("G26")
async def test_admission_and_booking_do_not_wait_for_a_store_that_does(store: Store) -> None:
    await store.team("search", requests_per_minute=60)
    _, text = await store.key("search")
    snapshot = await store.holder.reload()
    blocker = sqlite3.connect(store.path, isolation_level=None)
    async with running(store) as ledger:
        blocker.execute("BEGIN IMMEDIATE")
        book(ledger, "first")
        await asyncio.sleep(0)
        leases = Leases(Clock())
        admitted = 0
        for name in request_ids(100):  # plain calls: there is no await in which they could wait for SQL
            who = snapshot.identify(text, from_epoch_us(NOW_US))
            try:
                reservation = leases.reserve_request(who)
            except LimitExceeded:
                continue
            leases.reserve_tokens(reservation, 10)
            book(ledger, name)
            leases.settle(reservation, 7)
            admitted += 1
        assert (admitted, ledger.backlog) == (60, 61)
        blocker.close()
        await ledger.flush()
    assert len(await store.ledger_rows()) == 61


async def test_back_off_doubles_to_its_limit_and_starts_anew(store: Store) -> None:
    outage = Outage(store)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds == 99:  # the syncer's rhythm
            await asyncio.get_running_loop().create_future()
        waits.append(seconds)
        if len(waits) in (6, 8):
            outage.end()

    settings = LedgerSettings(retry_seconds_first=1, retry_seconds_max=10, journal_fsync_interval_seconds=99)
    async with running(store, settings, sleep=sleep) as ledger:
        outage.begin()
        book(ledger, "a")
        await ledger.flush()
        assert waits == [1, 2, 4, 8, 10, 10]
        outage.begin()
        book(ledger, "b")
        await ledger.flush()
    assert waits == [1, 2, 4, 8, 10, 10, 1, 2]


@pytest.mark.case("D02")
async def test_deny_refuses_new_requests_as_soon_as_the_database_fails(store: Store) -> None:
    outage = Outage(store)
    settings = LedgerSettings(retry_seconds_first=0.001, retry_seconds_max=0.002, on_error="deny")
    async with running(store, settings) as ledger:
        outage.begin()
        book(ledger, "a")
        await until(lambda: ledger.is_failing)
        with pytest.raises(StoreUnavailable):
            ledger.open(open_entry("b"))
        assert not ledger.has_room
        outage.end()
        await ledger.flush()
        book(ledger, "c")
    assert [row["request_id"] for row in await store.ledger_rows()] == ["a", "c"]


async def test_when_the_database_fails_a_stop_leaves_rows_for_the_next(store: Store) -> None:
    outage = Outage(store)
    async with running(store) as ledger:
        outage.begin()
        for name in request_ids(30):
            book(ledger, name)
    outage.end()
    assert await store.ledger_rows() == []
    async with running(store):
        assert len(await store.ledger_rows()) == 30


async def test_a_stop_does_not_sit_out_the_back_off(store: Store) -> None:
    outage = Outage(store)

    async def never(_: float) -> None:
        await asyncio.get_running_loop().create_future()

    async with running(store, sleep=never) as ledger:
        outage.begin()
        book(ledger, "a")
        await until(lambda: ledger.is_failing)
        outage.end()
    assert [row["request_id"] for row in await store.ledger_rows()] == ["a"]


async def test_a_row_the_database_cannot_take_holds_up_no_other(store: Store) -> None:
    async with running(store) as ledger:
        book(ledger, "before")
        book(ledger, "poison", cached_tokens=11, prompt_tokens=10)  # against a constraint
        book(ledger, "after")
        await ledger.flush()
        assert ledger.num_rejected == 1
        assert not ledger.is_failing
    assert [row["request_id"] for row in await store.ledger_rows()] == ["before", "after"]
    kept = (store.directory / "journal" / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["request_id"] for line in kept] == ["poison"]


async def test_a_close_the_disk_refuses_still_reaches_sql(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(store) as ledger:
        entry = open_entry("r")
        ledger.open(entry)

        def no_space(fd: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("tenants.journal.os.write", no_space)
        with pytest.raises(StoreUnavailable):
            ledger.open(open_entry("refused"))
        ledger.close(closed_row(entry))
        monkeypatch.undo()
        await ledger.flush()
    assert [row["request_id"] for row in await store.ledger_rows()] == ["r"]


async def test_nothing_is_opened_when_the_writer_is_not_running(store: Store) -> None:
    ledger = Ledger(store.database, store.directory / "journal")
    with pytest.raises(StoreUnavailable, match="not running"):
        ledger.open(open_entry("r"))


def a_sample(second: int, team: int = 1) -> ServiceSampleRow:
    return ServiceSampleRow(
        at_us=NOW_US + second * 1_000_000,
        team_id=team,
        interval_ms=1000,
        served_us=second,
        entitled_us=2,
        backlogged_ms=3,
        waiting=4,
        running=5,
        lag_min_us=-0.5,
        lag_max_us=1.5,
    )


async def booked_samples(store: Store) -> list[int]:
    async with store.database.session() as connection:
        query = select(tables.service_samples.c.served_us).order_by(tables.service_samples.c.at_us)
        return list((await connection.execute(query)).scalars())


async def test_samples_are_booked_once_and_bounded(store: Store) -> None:
    sample = a_sample
    outage = Outage(store)
    settings = LedgerSettings(samples_max=10, retry_seconds_first=0.001, retry_seconds_max=0.002)
    async with running(store, settings) as ledger:
        ledger.add_samples([sample(0), sample(0, team=2)])
        ledger.add_samples([sample(0)])  # the same again
        await ledger.flush()
        outage.begin()
        for second in range(1, 31):
            ledger.add_samples([sample(second)])
            await asyncio.sleep(0)
        await until(lambda: ledger.is_failing)
        assert ledger.num_samples_dropped == 20
        outage.end()
        await ledger.flush()
    booked = await booked_samples(store)
    assert booked == [0, 0, *range(21, 31)]  # the newest stay


async def test_when_a_batch_fails_the_oldest_samples_go_first(store: Store) -> None:
    """What the failed batch had taken stands before what came later, in its order."""

    async def never(_: float) -> None:
        await asyncio.get_running_loop().create_future()

    outage = Outage(store)
    async with running(store, LedgerSettings(samples_max=10), sleep=never) as ledger:
        outage.begin()
        ledger.add_samples([a_sample(second) for second in range(10)])
        await until(lambda: ledger.is_failing)  # once: it does not try again before the end
        ledger.add_samples([a_sample(10), a_sample(11)])
        assert ledger.num_samples_dropped == 2
        outage.end()
    assert await booked_samples(store) == list(range(2, 12))


async def test_the_last_minute_is_read_back_for_the_leases(store: Store) -> None:
    async with running(store) as ledger:
        for age, name in ((70, "old"), (59, "a"), (5, "b")):
            entry = open_entry(name, admitted_at_us=NOW_US - age * 1_000_000, prompt_tokens=10)
            ledger.open(entry)
            ledger.close(closed_row(entry, finished_at_us=NOW_US - 1, output_tokens=age))
    async with store.database.session() as connection:
        assert await recent_use(connection, NOW_US) == [(1, 59.0, 69), (1, 5.0, 15)]


async def test_when_a_restart_comes_late_a_lost_row_is_of_today(store: Store) -> None:
    """Else a period that is over, and was reported, would change."""
    async with running(store) as ledger:
        ledger.open(open_entry("r"))
    store.now_us = NOW_US + 3 * 86_400_000_000
    async with running(store) as ledger:
        assert ledger.num_lost == 1
    (row,) = await store.ledger_rows()
    assert (row["outcome"], row["finished_at_us"], row["admitted_at_us"]) == ("lost", store.now_us, NOW_US + 1_000)


async def test_progress_of_an_ended_request_is_forgotten(store: Store) -> None:
    async with running(store) as ledger:
        entry = open_entry("r")
        ledger.open(entry)
        ledger.progress(Progress(request_id="r", output_tokens=3, device_us=4))
        assert ledger.num_open == 1
        ledger.close(closed_row(entry, output_tokens=9))
        assert ledger.num_open == 0
    assert [row["output_tokens"] for row in await store.ledger_rows()] == [9]
