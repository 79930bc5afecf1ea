"""What becomes of samples: each hour is summed when it is over; seconds are deleted after days, hours after a year.

So no table of samples grows without a limit, and no report needs to read more than a few hours by the second. The
ledger is not part of this: its rows are kept for ever.

*Sums.* When an hour of UTC is over, its seconds are summed into the hour tables (`tenants.reports.samples` says how
reports read them). A wall clock that steps back sends samples into an hour that is summed already. Then the sums from
that hour on no longer count: reports read its seconds, and the hour is summed again when it is over once more. Samples
of an hour whose seconds are deleted are dropped (`seconds_from_us`).

*What becomes coarser.* While an hour's seconds are kept, its row is exactly their sum, least or greatest. After the
seconds are deleted, three things change:

- A period that cuts an hour gets the whole hour if the hour starts in the period.
- A plot has one moment for the hour.
- It is no longer known how many sequences waited or ran in each second.

*Age, and clocks that lie.* Deleted rows are gone for good, so the wall clock alone does not decide what is old. Age is
measured against the least of three moments (`moment_of_age`):

- the wall clock,
- one hour after the newest row that was ever booked,
- the moment of the last run, plus the time that this process has really run since, plus a quarter of that time.

For example, a clock is 500 days ahead at one start. Before a row is booked, the second moment keeps all samples. After
rows with the wrong time are booked, the third moment lets each run move on by little more than the time since the last
run. So nothing is deleted that was not about to be deleted anyway. A store that was idle or switched off keeps its
samples for longer, and then catches up a quarter faster than time passes.

*Transactions.* The ledger's writer calls `work` between its batches. Each call either writes the sums of at most one
hour (it reads before it takes the write lock) or deletes about `DELETED_ROWS_MAX` rows, so nobody waits long.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import ColumnElement, Table, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import tables
from tenants.clock import iso
from tenants.database import Database
from tenants.reports.samples import HOUR_US, SERVICE_COLUMNS, Reach, Span, floor_hour, seconds_by_team, summed

_log = logging.getLogger("terazi.retention")

DELETED_ROWS_MAX = 5_000  # in one transaction; rows of the same moment are deleted together
AFTER_NEWEST_US = HOUR_US  # ages are measured against at most this long after the newest row
FIRST_RUN_US = HOUR_US  # added at a process's first run, for earlier processes that ran only minutes each
CLOCK_AHEAD_US = 7 * 24 * HOUR_US  # of the newest row at the start: then the log warns
CLOCK_JUMP_US = HOUR_US  # ahead while the server runs, or behind the newest row: then the log warns
_DAY_HOURS = 24
_PLAIN_SUMS = (
    (tables.interference_samples, tables.interference_hours),
    (tables.step_samples, tables.step_hours),
)
_SECONDS = (tables.service_samples, *(seconds for seconds, _ in _PLAIN_SUMS))
_HOURS = (tables.service_hours, *(hours for _, hours in _PLAIN_SUMS))
_marks = tables.sample_marks


class Retention:
    """Sums and deletes the samples of one store. Owns the marks. One task uses it, after `load`.

    `seconds_kept_hours` is how long seconds are kept, `hours_kept_days` how long sums by the hour are kept, both
    counted from the end of the hour. `monotonic` is a clock in seconds that nobody sets. Raises ValueError unless
    seconds are kept for at least one hour, and hours at least as long as seconds.
    """

    def __init__(
        self,
        database: Database,
        *,
        seconds_kept_hours: int,
        hours_kept_days: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 1 <= seconds_kept_hours <= hours_kept_days * _DAY_HOURS:
            raise ValueError("samples are kept for one hour at least, and hours no shorter than seconds")
        self._database = database
        self._seconds_kept_us = seconds_kept_hours * HOUR_US
        self._hours_kept_us = hours_kept_days * _DAY_HOURS * HOUR_US
        self._monotonic = monotonic
        self._done_us = -1  # the hour in which all due work is done
        self._hours_to_us = 0
        self._hours_from_us = 0
        self._aged_to_us = 0
        self._clocks: tuple[int, float] | None = None  # wall clock and monotonic clock at this process's last run
        self._age_us: int | None = None  # the moment against which the present run measures ages
        self.seconds_from_us = 0  # samples before this are dropped

    async def load(self, now_us: int | None = None) -> None:
        """Read the marks.

        With `now_us`, log a warning about a clock that cannot be right. Raises what the database raises.
        """
        async with self._database.session() as connection:
            row = (await connection.execute(select(_marks))).mappings().one()
            newest_us = await newest_row(connection) if now_us is not None else None
        self._hours_to_us, self.seconds_from_us = row["hours_to_us"], row["seconds_from_us"]
        self._hours_from_us, self._aged_to_us = row["hours_from_us"], row["aged_to_us"]
        self._clocks, self._age_us, self._done_us = None, None, -1
        self._loaded_at = self._monotonic()
        if now_us is not None and newest_us is not None:
            _warn_of_clock(now_us, newest_us)

    async def reopen(self, connection: AsyncConnection, moments: Iterable[int]) -> None:
        """Samples of these moments are being written in this transaction.

        The sums from the earliest hour on no longer count.
        """
        hour_us = min(map(floor_hour, moments), default=self._hours_to_us)
        if hour_us < self._hours_to_us:
            await connection.execute(update(_marks).values(hours_to_us=hour_us))
            # If the transaction fails, an hour is summed once more than needed, which does no harm.
            self._hours_to_us, self._done_us = hour_us, -1

    def is_due(self, now_us: int) -> bool:
        """Whether `work` may have something to do at `now_us`."""
        return floor_hour(now_us) != self._done_us

    async def work(self, now_us: int) -> None:
        """Do one piece of the due work. Raises what the database raises; then nothing of that piece is done."""
        this_hour_us = floor_hour(now_us)
        hour_us = await self._first_unsummed()
        if hour_us is not None and hour_us < this_hour_us:
            await self._sum_hour(hour_us)
            return
        if self._age_us is None:
            self._age_us = await self._measure_age(now_us)
        age_us = floor_hour(self._age_us)
        edge_us = min(age_us - self._seconds_kept_us, self._hours_to_us)
        if edge_us > self.seconds_from_us:
            await self._set_marks(seconds_from_us=edge_us)  # before deleting: no report may read half an hour
        if await self._delete(_SECONDS, self.seconds_from_us):
            return
        edge_us = age_us - self._hours_kept_us
        if edge_us > self._hours_from_us and await self._has_rows(_HOURS, edge_us):
            await self._set_marks(hours_from_us=edge_us)
        if await self._delete(_HOURS, edge_us):
            return
        self._done_us, self._age_us = this_hour_us, None

    async def _measure_age(self, now_us: int) -> int:
        """The moment against which this run measures ages, and the mark for the next run."""
        async with self._database.session() as connection:
            newest_us = await newest_row(connection)
        if newest_us is None:
            return 0
        ran_us = round((self._monotonic() - (self._clocks[1] if self._clocks else self._loaded_at)) * 1e6)
        if self._clocks is not None and now_us - self._clocks[0] - ran_us > CLOCK_JUMP_US:
            _log.warning(
                "the clock has been set ahead by %s while the server ran; samples are not deleted faster for it",
                _duration(now_us - self._clocks[0] - ran_us),
            )
        if not self._clocks:
            ran_us += FIRST_RUN_US
        self._clocks = now_us, self._monotonic()
        age_us, aged_to_us = moment_of_age(now_us, newest_us=newest_us, aged_to_us=self._aged_to_us, ran_us=ran_us)
        if aged_to_us != self._aged_to_us:
            await self._set_marks(aged_to_us=aged_to_us)
        return age_us

    async def _first_unsummed(self) -> int | None:
        """The first hour that has samples and no sums."""
        async with self._database.session() as connection:
            firsts = [
                await connection.scalar(select(func.min(table.c.at_us)).where(table.c.at_us >= self._hours_to_us))
                for table in _SECONDS
            ]
        return min((floor_hour(first) for first in firsts if first is not None), default=None)

    async def _sum_hour(self, hour_us: int) -> None:
        span = Span(hour_us, hour_us + HOUR_US)
        sums: list[tuple[Table, list[dict[str, Any]]]] = []
        async with self._database.session() as connection:
            found = (await connection.execute(seconds_by_team(span))).mappings()
            names = ("team_id", *SERVICE_COLUMNS)
            sums.append(
                (tables.service_hours, [{"at_us": hour_us} | {name: row[name] for name in names} for row in found])
            )
            for seconds, hours in _PLAIN_SUMS:
                keys = [column.name for column in hours.primary_key if column.name != "at_us"]
                rows = await summed(connection, Reach(None, (span,), 0), seconds, hours, keys)
                sums.append(
                    (
                        hours,
                        [{"at_us": hour_us, **dict(zip(keys, key, strict=True)), **row} for key, row in rows.items()],
                    )
                )
        async with self._database.begin_immediate() as connection:
            for table, values in sums:
                await connection.execute(delete(table).where(table.c.at_us == hour_us))
                if values:
                    await connection.execute(insert(table), values)
            await connection.execute(update(_marks).values(hours_to_us=span.to_us))
        self._hours_to_us = span.to_us

    async def _set_marks(self, **marks: int) -> None:
        async with self._database.begin_immediate() as connection:
            await connection.execute(update(_marks).values(**marks))
        self.seconds_from_us = marks.get("seconds_from_us", self.seconds_from_us)
        self._hours_from_us = marks.get("hours_from_us", self._hours_from_us)
        self._aged_to_us = marks.get("aged_to_us", self._aged_to_us)

    async def _has_rows(self, some_tables: Iterable[Table], edge_us: int) -> bool:
        async with self._database.session() as connection:
            firsts = [await connection.scalar(select(func.min(table.c.at_us))) for table in some_tables]
        return any(first is not None and first < edge_us for first in firsts)

    async def _delete(self, some_tables: Iterable[Table], edge_us: int) -> bool:
        """Delete the oldest rows of the first table that has rows before `edge_us`. True if a table had such rows."""
        for table in some_tables:
            async with self._database.session() as connection:
                last_us = await _nth_oldest(connection, table.c.at_us, edge_us)
            if last_us is not None:
                async with self._database.begin_immediate() as connection:
                    await connection.execute(delete(table).where(table.c.at_us <= last_us))
                return True
        return False


def moment_of_age(now_us: int, *, newest_us: int, aged_to_us: int, ran_us: int) -> tuple[int, int]:
    """The moment against which ages are measured, and the mark to keep for the next run. All times are microseconds.

    `newest_us` is the moment of the newest booked row. `aged_to_us` is the mark of the last run, 0 if there was none.
    `ran_us` is the time since the last run, by a clock that nobody sets. For example: the wall clock jumps ahead by 500
    days, a row is booked, and the next run comes after an hour. Then ages are measured against the last mark plus 75
    minutes.
    """
    by_rows_us = newest_us + AFTER_NEWEST_US
    if not aged_to_us:
        return min(now_us, by_rows_us), min(now_us, by_rows_us)
    allowed_us = min(now_us, aged_to_us + ran_us + ran_us // 4)
    return min(allowed_us, by_rows_us), allowed_us


async def newest_row(connection: AsyncConnection) -> int | None:
    """The moment of the newest row in the ledger and the samples, in microseconds; None when there is no row."""
    columns = [tables.ledger.c.finished_at_us, *(table.c.at_us for table in _SECONDS)]
    found = [await connection.scalar(select(func.max(column))) for column in columns]
    return max((moment for moment in found if moment is not None), default=None)


def _warn_of_clock(now_us: int, newest_us: int) -> None:
    if now_us - newest_us > CLOCK_AHEAD_US:
        _log.warning(
            "the clock (%s) is %s ahead of the newest booked row (%s): if the clock is wrong, set it right before "
            "requests come. Samples are not deleted faster for it",
            iso(now_us),
            _duration(now_us - newest_us),
            iso(newest_us),
        )
    elif newest_us - now_us > CLOCK_JUMP_US:
        _log.warning(
            "the clock (%s) is %s behind the newest booked row (%s): it was ahead then, or is wrong now. What is "
            "booked now stands before those rows in reports, and samples of hours whose seconds are gone are dropped",
            iso(now_us),
            _duration(newest_us - now_us),
            iso(newest_us),
        )


def _duration(us: int) -> str:
    hours = us / HOUR_US
    return f"{hours / _DAY_HOURS:.0f} days" if hours >= 2 * _DAY_HOURS else f"{hours:.0f} hours"


async def _nth_oldest(connection: AsyncConnection, at: ColumnElement[int], edge_us: int) -> int | None:
    """The moment of the DELETED_ROWS_MAX-th oldest row before `edge_us`, or of the last row before it, or None."""
    oldest = select(at.label("at_us")).where(at < edge_us).order_by(at).limit(DELETED_ROWS_MAX).subquery()
    found: int | None = await connection.scalar(select(func.max(oldest.c.at_us)))
    return found
