"""Samples that grow old: the same sums from hours as from seconds, and nothing kept for ever."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Table, event, func, select, text

from tenants import reports, retention, tables
from tenants.ledger import Ledger, LedgerSettings
from tenants.reports.periods import Period
from tenants.reports.samples import HOUR_US
from tenants.retention import Retention
from tenants.rows import InterferenceRow, SampleRow, ServiceSampleRow, StepSampleRow
from tests.support.tenants import histories
from tests.support.tenants.histories import SECOND_US, TEAMS, settle_retention
from tests.support.tenants.stores import NOW_US, Store

pytestmark = pytest.mark.anyio
START_US = NOW_US // HOUR_US * HOUR_US
SECONDS = (tables.service_samples, tables.interference_samples, tables.step_samples)
HOURS = (tables.service_hours, tables.interference_hours, tables.step_hours)


def keeping(store: Store, hours: int = 48, days: int = 400) -> Retention:
    return Retention(store.database, seconds_kept_hours=hours, hours_kept_days=days)


async def sampled(store: Store, seed: int, hours: int, every: int = 300) -> list[SampleRow]:
    """Samples over whole hours from START_US."""
    ids = [await store.team(team, tier) for team, tier in TEAMS.items()]
    rows = histories.samples(seed, team_ids=ids, start_us=START_US, seconds=hours * 3600 // every, every=every)
    await histories.book_samples(store, rows)
    return rows


async def fairness(store: Store, start_us: int, end_us: int) -> dict[str, Any]:
    """But for where the hours begin: the figures are compared here."""
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, Period(start_us, end_us))
    del report["samples_by_the_hour_before"]
    return report


async def moments(store: Store, table: Table) -> list[int]:
    async with store.database.session() as connection:
        query = select(table.c.at_us).distinct().order_by(table.c.at_us)
        return list((await connection.execute(query)).scalars())


def approx(value: Any) -> Any:
    """Floats but for their last digits: sums of floats depend on their order."""
    if isinstance(value, dict):
        return {name: approx(one) for name, one in value.items()}
    if isinstance(value, list):
        return [approx(one) for one in value]
    return pytest.approx(value) if isinstance(value, float) else value


# --- reports before and after -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_whole_hours_read_the_same_from_seconds_and_from_sums(store: Store, seed: int) -> None:
    await sampled(store, seed, hours=6)
    periods = [(START_US + a * HOUR_US, START_US + b * HOUR_US) for a, b in ((0, 6), (1, 2), (2, 5), (0, 1), (5, 6))]
    from_seconds = [await fairness(store, *period) for period in periods]
    assert all(len(report["data"]) == 3 and report["interference"] for report in from_seconds)
    now_us = START_US + 9 * HOUR_US
    await settle_retention(keeping(store), now_us)
    assert [await fairness(store, *period) for period in periods] == approx(from_seconds)
    for table in SECONDS:
        assert 65 < len(await moments(store, table)) <= 72  # still there
    await settle_retention(keeping(store, hours=1), now_us)
    for table in SECONDS:
        assert await moments(store, table) == []
    assert [await fairness(store, *period) for period in periods] == approx(from_seconds)


async def test_when_seconds_are_kept_a_period_may_cut_hours(store: Store) -> None:
    await sampled(store, 7, hours=5)
    rng = random.Random(7)
    periods = []
    for _ in range(12):
        start, end = sorted(rng.sample(range(0, 5 * 3600 * SECOND_US, 7), 2))
        periods.append((START_US + start, START_US + end))
    before = [await fairness(store, *period) for period in periods]
    await settle_retention(keeping(store), START_US + 4 * HOUR_US)  # the last hour is not over
    assert await moments(store, tables.service_hours) == [START_US + i * HOUR_US for i in range(4)]
    assert [await fairness(store, *period) for period in periods] == approx(before)


async def test_without_its_seconds_an_hour_counts_where_it_starts(store: Store) -> None:
    await sampled(store, 8, hours=4)
    now_us = START_US + 5 * HOUR_US
    whole = await fairness(store, START_US, START_US + 4 * HOUR_US)
    await settle_retention(keeping(store, hours=1), now_us)
    middle = START_US + 2 * HOUR_US + HOUR_US // 2
    early, late = await fairness(store, START_US, middle), await fairness(store, middle, START_US + 4 * HOUR_US)
    exact = await fairness(store, START_US, START_US + 3 * HOUR_US)
    assert early["data"] == approx(exact["data"])
    for name in ("device_seconds", "backlogged_seconds", "promotions", "promoted_seconds", "active_seconds"):
        sums = [sum(line[name] for line in report["data"]) for report in (early, late, whole)]
        assert sums[0] + sums[1] == pytest.approx(sums[2])
    assert early["totals"]["bytes_out"] + late["totals"]["bytes_out"] == whole["totals"]["bytes_out"]


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.case("D02")
async def test_seconds_go_when_their_hour_is_as_old_as_they_are_kept(store: Store) -> None:
    await sampled(store, 1, hours=3)
    edge_us = START_US + HOUR_US + 48 * HOUR_US  # the first hour is over for 48 hours
    kept = keeping(store)
    await settle_retention(kept, edge_us - 1)
    for table in SECONDS:
        assert (await moments(store, table))[0] == START_US
    await settle_retention(kept, edge_us)
    for table in SECONDS:
        assert (await moments(store, table))[0] == START_US + HOUR_US
        assert 18 < len(await moments(store, table)) <= 2 * 12


@pytest.mark.case("D02")
async def test_hours_go_after_400_days_and_the_ledger_stays(store: Store) -> None:
    await sampled(store, 2, hours=3)
    await histories.book(store, histories.ledger_rows(1, 20))
    kept = keeping(store)
    edge_us = START_US + HOUR_US + 400 * 24 * HOUR_US
    await settle_retention(kept, edge_us - 1)
    for table in HOURS:
        assert (await moments(store, table))[0] == START_US
    await settle_retention(kept, edge_us)
    for table in HOURS:
        assert await moments(store, table) == [START_US + HOUR_US, START_US + 2 * HOUR_US]
    assert len(await store.ledger_rows()) == 20


@pytest.mark.parametrize(("hours", "days"), [(0, 1), (-1, 1), (25, 1), (1, 0)])
async def test_keeping_nothing_or_hours_shorter_than_seconds_is_refused(store: Store, hours: int, days: int) -> None:
    with pytest.raises(ValueError, match="kept"):
        keeping(store, hours, days)
    keeping(store, 24, 1)


@pytest.mark.case("D02")
async def test_under_steady_writes_the_file_stops_growing(store: Store) -> None:
    """Deleted rows leave pages that the next ones take: nothing has to be vacuumed."""
    ids = [await store.team(team, tier) for team, tier in TEAMS.items()]
    kept = keeping(store, hours=2, days=1)
    pages = []
    for hour in range(40):
        start_us = START_US + hour * HOUR_US
        rows = histories.samples(hour, team_ids=ids, start_us=start_us, seconds=120, every=30)
        await histories.book_samples(store, rows)
        await settle_retention(kept, start_us + HOUR_US)
        async with store.database.session() as connection:
            pages.append(await connection.scalar(text("PRAGMA page_count")))
    per_hour = pages[1] - pages[0]
    assert per_hour > 10
    assert max(pages[24:]) - max(pages[:24]) < per_hour  # in sixteen hours
    assert len(await moments(store, tables.service_hours)) == 24


async def test_each_piece_of_work_is_small_and_spares_the_present_hour(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "DELETED_ROWS_MAX", 10)
    rows = await sampled(store, 3, hours=4)
    deleted: list[int] = []

    def note(*called_with: Any) -> None:
        cursor, statement = called_with[1], called_with[2]
        if statement.startswith("DELETE") and "_hours" not in statement:
            deleted.append(cursor.rowcount)

    engine = store.database._engine.sync_engine
    event.listen(engine, "after_cursor_execute", note)
    kept = keeping(store, hours=1)
    await settle_retention(kept, START_US + 3 * HOUR_US + 59)
    event.remove(engine, "after_cursor_execute", note)
    assert await moments(store, tables.service_hours) == [START_US + i * HOUR_US for i in range(3)]
    gone = [row for row in rows if row.at_us < START_US + 2 * HOUR_US]
    assert sum(deleted) == len(gone)
    assert max(deleted) <= 10 + 9  # and the rest of one moment: nine pairs at most
    assert not kept.is_due(START_US + 3 * HOUR_US + 60)
    assert kept.is_due(START_US + 4 * HOUR_US)


# --- clocks, crashes and the writer -----------------------------------------------------------------------------------


def one_sample(at_us: int, team_id: int, served_us: int) -> list[SampleRow]:
    return [
        ServiceSampleRow(
            at_us=at_us,
            team_id=team_id,
            interval_ms=1000,
            served_us=served_us,
            entitled_us=served_us,
            backlogged_ms=1000,
            waiting=1,
            running=1,
            lag_min_us=0.0,
            lag_max_us=0.0,
        ),
        InterferenceRow(at_us=at_us, causer_id=team_id, victim_id=team_id, preemptions=1),
        StepSampleRow(at_us=at_us, interval_ms=1000, replayed_tokens=1),
    ]


async def writing(store: Store, now: Callable[[], int], **settings: Any) -> Ledger:
    ledger = Ledger(
        store.database,
        store.directory / "journal",
        LedgerSettings(**settings),
        now_us=now,
        monotonic=lambda: now() / 1e6,
    )
    await ledger.start()
    return ledger


async def test_the_ledgers_writer_sums_and_deletes_between_its_batches(store: Store) -> None:
    team_id = await store.team("search")
    now_us = START_US
    ledger = await writing(store, lambda: now_us, sample_seconds_kept_hours=2)
    for _ in range(6 * 4):  # four samples an hour
        ledger.add_samples(one_sample(now_us, team_id, 100))
        await ledger.flush()
        now_us += HOUR_US // 4
    ledger.add_samples(one_sample(now_us, team_id, 100))
    await ledger.stop()
    again = await writing(store, lambda: now_us, sample_seconds_kept_hours=2)  # goes on where the last life stopped
    for _ in range(40):
        again.add_samples(one_sample(now_us + 1, team_id, 0))
        await again.flush()
    await again.stop()
    for seconds, hours in zip(SECONDS, HOURS, strict=True):
        assert await moments(store, hours) == [START_US + i * HOUR_US for i in range(6)]
        assert (await moments(store, seconds))[0] == START_US + 4 * HOUR_US
    report = await fairness(store, START_US, START_US + 9 * HOUR_US)
    assert report["device_seconds"] == 25 * 100 / 1e6
    assert (report["totals"]["preemptions"], report["totals"]["replayed_tokens"]) == (26, 26)


@pytest.mark.case("B12")
async def test_a_clock_that_steps_back_loses_nothing(store: Store) -> None:
    """Samples of an hour that is summed already count at once, over a restart too, and it is summed again."""
    team_id = await store.team("search")
    await histories.book_samples(store, one_sample(START_US + 5, team_id, 100))
    await histories.book_samples(store, one_sample(START_US + HOUR_US + 5, team_id, 100))
    await settle_retention(keeping(store), START_US + 2 * HOUR_US)
    assert len(await moments(store, tables.service_hours)) == 2
    now_us = START_US + HOUR_US + 8
    ledger = await writing(store, lambda: now_us)
    ledger.add_samples(one_sample(START_US + HOUR_US + 7, team_id, 11))
    await ledger.stop()
    found = [await fairness(store, START_US, START_US + 2 * HOUR_US)]
    await settle_retention(keeping(store), START_US + 2 * HOUR_US - 1)  # the hour is not over
    found.append(await fairness(store, START_US, START_US + 2 * HOUR_US))
    await settle_retention(keeping(store), START_US + 2 * HOUR_US)
    found.append(await fairness(store, START_US, START_US + 2 * HOUR_US))
    assert [report["device_seconds"] for report in found] == [211 / 1e6] * 3
    assert [report["totals"]["preemptions"] for report in found] == [3] * 3
    async with store.database.session() as connection:
        query = select(tables.service_hours.c.served_us).order_by(tables.service_hours.c.at_us)
        assert (await connection.execute(query)).scalars().all() == [100, 111]


@pytest.mark.case("B12")
async def test_when_an_hours_seconds_are_gone_its_samples_are_dropped(store: Store) -> None:
    team_id = await store.team("search")
    for at_us in (START_US + 5, START_US + 50 * HOUR_US):
        await histories.book_samples(store, one_sample(at_us, team_id, 100))
    now_us = START_US + 51 * HOUR_US
    await settle_retention(keeping(store), now_us)  # the seconds before START_US + 3 hours are gone
    ledger = await writing(store, lambda: now_us)
    ledger.add_samples(one_sample(START_US + 3 * HOUR_US - 1, team_id, 1000))
    assert ledger.num_samples_dropped == 3
    ledger.add_samples(one_sample(START_US + 3 * HOUR_US, team_id, 7))
    await ledger.stop()
    assert ledger.num_samples_dropped == 3
    await settle_retention(keeping(store), now_us + HOUR_US)
    assert (await fairness(store, START_US, now_us))["device_seconds"] == 207 / 1e6


async def test_a_failed_piece_is_done_again_and_counts_nothing_twice(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sampled(store, 4, hours=2)
    before = await fairness(store, START_US, START_US + 2 * HOUR_US)
    kept = keeping(store, hours=1)
    real = retention.update
    monkeypatch.setattr(retention, "update", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        await settle_retention(kept, START_US + 4 * HOUR_US)
    assert await moments(store, tables.service_hours) == []  # the inserts before it went with it
    monkeypatch.setattr(retention, "update", real)
    await settle_retention(kept, START_US + 4 * HOUR_US)
    assert await fairness(store, START_US, START_US + 2 * HOUR_US) == approx(before)


async def test_a_report_of_long_ago_reads_hours_and_not_the_seconds(store: Store) -> None:
    await sampled(store, 5, hours=3)
    await settle_retention(keeping(store), START_US + 3 * HOUR_US)
    async with store.database.begin_immediate() as connection:
        await connection.execute(tables.service_samples.update().values(served_us=10**9))  # would be seen
    report = await fairness(store, START_US, START_US + 3 * HOUR_US)
    async with store.database.session() as connection:
        total = await connection.scalar(select(func.sum(tables.service_hours.c.served_us)))
    assert report["device_seconds"] == pytest.approx(int(total or 0) / 1e6)
