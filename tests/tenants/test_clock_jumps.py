"""A wall clock that is wrong deletes nothing that was not about to go, and what is gone is said."""

import logging
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.report_text import write_fairness
from gateway.reports.fairness import render_fairness
from gateway.reports.format import missing_samples
from tenants import reports, tables
from tenants.clock import from_epoch_us
from tenants.ledger import Ledger, LedgerSettings, recent_use
from tenants.reports.periods import Period
from tenants.reports.samples import HOUR_US
from tenants.retention import AFTER_NEWEST_US, FIRST_RUN_US, Retention, moment_of_age
from tests.support.tenants import histories
from tests.support.tenants.histories import DAY_US
from tests.support.tenants.stores import NOW_US, Store, closed_row, open_entry
from tests.tenants.test_retention import HOURS, SECONDS, START_US, moments, one_sample

pytestmark = pytest.mark.anyio
FAR_US = 500 * DAY_US


class Life:
    """Processes on one store, one after the other: real time passes, and the wall clock may be off by anything."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.real_us = START_US
        self.off_us = 0
        self.retention = self._new()

    def _new(self) -> Retention:
        how: dict[str, Any] = {"seconds_kept_hours": 8, "hours_kept_days": 400}
        return Retention(self.store.database, monotonic=lambda: self.real_us / 1e6, **how)

    @property
    def wall_us(self) -> int:
        return self.real_us + self.off_us

    async def restart(self) -> None:
        self.retention = self._new()
        await self.retention.load(self.wall_us)

    async def run(self) -> None:
        """One run of what is due."""
        while self.retention.is_due(self.wall_us):
            await self.retention.work(self.wall_us)

    async def serve(self, hours: int) -> None:
        """Four samples an hour, and a run each hour."""
        for _ in range(4 * hours):
            await histories.book_samples(self.store, one_sample(self.wall_us + 1, 1, 100))
            await self.run()
            self.real_us += HOUR_US // 4

    async def kept(self) -> tuple[int, int]:
        """Moments by the second, and hours, that are there."""
        return len(await moments(self.store, SECONDS[0])), len(await moments(self.store, HOURS[0]))


@pytest.mark.case("T06")
async def test_when_a_start_is_500_days_ahead_nothing_is_deleted(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(store)
    await life.restart()
    await life.serve(hours=3)
    before = await life.kept()
    assert before[0] == 12
    life.off_us = FAR_US
    await life.restart()
    await life.run()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "is 500 days ahead of the newest booked row" in warnings[0]
    assert (await life.kept())[0] == before[0]
    # Requests come while the clock is wrong, and the server starts again with such rows there.
    await life.serve(hours=1)
    await life.restart()
    await life.serve(hours=1)
    assert (await life.kept())[0] == before[0] + 8
    assert (await life.kept())[1] >= 3
    life.off_us = 0
    await life.restart()
    await life.run()
    assert (await life.kept())[0] == before[0] + 8
    period = Period(START_US, START_US + 3 * HOUR_US)
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, period)
    assert report["samples_deleted_before"] is report["samples_by_the_hour_before"] is None
    assert report["device_seconds"] == 12 * 100 / 1e6


@pytest.mark.case("T06")
async def test_when_the_clock_jumps_a_run_deletes_little_more(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(store)
    await life.restart()
    await life.serve(hours=12)
    oldest = (await moments(store, SECONDS[0]))[0]
    life.off_us = FAR_US
    for _ in range(5):
        await life.serve(hours=1)
        now_oldest = (await moments(store, SECONDS[0]))[0]
        assert now_oldest - oldest <= 2 * HOUR_US, "in the hour since the last run"
        oldest = now_oldest
    assert caplog.text.count("has been set ahead by 500 days while the server ran") == 1


async def test_when_the_clock_is_right_samples_go_in_time(store: Store) -> None:
    """The control: ages are not held back by the guard."""
    life = Life(store)
    await life.restart()
    await life.serve(hours=12)
    await life.restart()
    await life.serve(hours=4)
    assert 8 * 4 <= (await life.kept())[0] <= 10 * 4


@pytest.mark.case("T06")
async def test_when_the_clock_goes_back_nothing_is_deleted(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(store)
    await life.restart()
    await life.serve(hours=10)
    before = await life.kept()
    life.off_us = -30 * DAY_US
    await life.restart()
    await life.run()
    assert "is 30 days behind the newest booked row" in caplog.text
    assert await life.kept() == before
    life.off_us = 0
    await life.restart()
    await life.serve(hours=1)
    assert (await life.kept())[0] >= before[0] - 8


moment = st.integers(0, 10**6)


@given(now=moment, newest=moment, mark=moment, ran=moment)
def test_an_age_is_never_later_than_any_of_its_bounds(now: int, newest: int, mark: int, ran: int) -> None:
    age, kept = moment_of_age(now, newest_us=newest, aged_to_us=mark, ran_us=ran)
    assert age <= min(now, newest + AFTER_NEWEST_US) and kept <= now
    if mark:
        assert kept == min(now, mark + ran + ran // 4) >= age
    assert FIRST_RUN_US <= HOUR_US


# --- what is gone is said ---------------------------------------------------------------------------------------------


@pytest.mark.case("T06")
async def test_when_samples_are_gone_the_report_says_so(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    await store.team("search")
    for day in (0, 1, 500):
        await histories.book_samples(store, one_sample(START_US + day * DAY_US + 5, 1, 100))
    retention = Retention(store.database, seconds_kept_hours=48, hours_kept_days=400)
    await histories.settle_retention(retention, START_US + 400 * DAY_US + 2 * HOUR_US)
    gone_before = START_US + 2 * HOUR_US
    for from_us, to_us, expected in (
        (START_US, START_US + 3 * HOUR_US, gone_before),
        (START_US - DAY_US, START_US + HOUR_US, START_US + HOUR_US),  # all of it
        (gone_before, gone_before + DAY_US, None),
        (START_US + DAY_US, START_US + 2 * DAY_US, None),
    ):
        period = Period(from_us, to_us)
        async with store.database.session() as connection:
            report = await reports.fairness_report(connection, period)
            series = await reports.service_series(connection, period)
        assert report["samples_deleted_before"] == (None if expected is None else period.shown(expected))
        write_fairness(report)
        printed, page = capsys.readouterr().out, render_fairness(report, series)
        for shown in (printed, page):
            assert ("have been deleted" in shown) == (expected is not None)
    zoned = Period(START_US, START_US + 3 * HOUR_US, "Europe/Istanbul")
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, zoned)
    assert report["samples_deleted_before"].endswith("+03:00")


@pytest.mark.case("T06")
@pytest.mark.parametrize(("minutes", "is_said"), [(30, True), (60, False)])
async def test_when_only_hours_are_kept_a_cut_hour_is_said(store: Store, minutes: int, is_said: bool) -> None:
    await histories.book_samples(store, one_sample(START_US + 5, 1, 100))
    retention = Retention(store.database, seconds_kept_hours=1, hours_kept_days=400)
    await histories.settle_retention(retention, START_US + 3 * HOUR_US)
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, Period(START_US, START_US + minutes * 60_000_000))
    assert report["samples_by_the_hour_before"] is not None and report["samples_deleted_before"] is None
    assert any("by the hour" in note for note in missing_samples(report)) == is_said


# --- limits and keys --------------------------------------------------------------------------------------------------


@pytest.mark.case("T06")
async def test_when_rows_lie_in_the_future_no_minute_is_filled(store: Store) -> None:
    """The clock was ahead, or is behind now: an hour of requests must not count as the last minute's."""
    rows = [
        closed_row(open_entry(f"r{minutes}", admitted_at_us=NOW_US + minutes * 60_000_000))
        for minutes in (-2, 0, *range(2, 60))
    ]
    rows.append(closed_row(open_entry("corrected", admitted_at_us=NOW_US + 2_000_000)))  # a step of two seconds
    await histories.book(store, rows)
    async with store.database.session() as connection:
        assert [age for _, age, _ in await recent_use(connection, NOW_US)] == [0.0, 0.0]


async def test_when_the_clock_comes_back_a_key_opens_again(store: Store) -> None:
    """Nothing is written when a key is found expired."""
    await store.team("search")
    expires = from_epoch_us(NOW_US + DAY_US)
    _, text = await store.key("search", expires_at_us=NOW_US + DAY_US)
    snapshot = await store.holder.reload()
    from tenants.errors import KeyExpired

    with pytest.raises(KeyExpired):
        snapshot.identify(text, expires + timedelta(days=500))
    snapshot.identify(text, expires - timedelta(seconds=1))


@pytest.mark.case("T06")
async def test_when_samples_are_dropped_for_the_clock_it_is_said(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with store.database.begin_immediate() as connection:
        await connection.execute(tables.sample_marks.update().values(seconds_from_us=START_US))
    ledger = Ledger(store.database, store.directory / "journal", LedgerSettings(), now_us=lambda: START_US)
    await ledger.start()
    for _ in range(3):
        ledger.add_samples(one_sample(START_US - 1, 1, 100))
    await ledger.stop()
    assert ledger.num_samples_dropped == 9
    assert caplog.text.count("samples are dropped") == 1
