"""What becomes of samples: each hour is summed when it is over, seconds go after days, hours after a year.

Nothing grows without a limit, and no report needs to read more than a few hours by the second. The ledger is no part
of this: its rows are kept for ever.

*Sums.* When an hour of UTC is over, its seconds are summed into the hour tables (`tenants.samples` says how they are
read). A wall clock that steps back sends samples into an hour that is summed already: then the sums from that hour on
do not count any more, reports read its seconds, and it is summed again when it is over once more. Samples of an hour
whose seconds are gone are not taken (`seconds_from_us`).

*What becomes coarser.* While its seconds are kept, an hour's row is exactly their sum, least or greatest. When they are
gone, periods that cut an hour get it whole if it starts in them, plots have one moment for it, and how many sequences
waited or ran in each second is no longer known.

*Transactions.* The ledger's writer calls `work` between its batches. Each call writes at most one hour's sums (read
before the write lock is taken), or deletes about `DELETED_ROWS_MAX` rows, so nobody waits long.
"""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, Table, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import tables
from tenants.database import Database
from tenants.samples import HOUR_US, SERVICE_COLUMNS, Reach, Span, floor_hour, seconds_by_team, summed

DELETED_ROWS_MAX = 5_000  # in one transaction; the rows of one moment go together
_DAY_HOURS = 24
_PLAIN_SUMS = (
    (tables.interference_samples, tables.interference_hours),
    (tables.step_samples, tables.step_hours),
)
_SECONDS = (tables.service_samples, *(seconds for seconds, _ in _PLAIN_SUMS))
_HOURS = (tables.service_hours, *(hours for _, hours in _PLAIN_SUMS))
_marks = tables.sample_marks


class Retention:
    """Sums and deletes the samples of one store. Owns the marks; used by one task, after `load`.

    `seconds_kept_hours` and `hours_kept_days` are how long each is kept, counted from the end of its hour. Raises
    ValueError unless there is an hour of seconds at least, and hours are kept no shorter than seconds.
    """

    def __init__(self, database: Database, *, seconds_kept_hours: int, hours_kept_days: int) -> None:
        if not 1 <= seconds_kept_hours <= hours_kept_days * _DAY_HOURS:
            raise ValueError("samples are kept for one hour at least, and hours no shorter than seconds")
        self._database = database
        self._seconds_kept_us = seconds_kept_hours * HOUR_US
        self._hours_kept_us = hours_kept_days * _DAY_HOURS * HOUR_US
        self._done_us = -1  # the hour in which everything that was due is done
        self._hours_to_us = 0
        self.seconds_from_us = 0  # samples before this are not taken any more

    async def load(self) -> None:
        """Read the marks. Raises what the database raises."""
        async with self._database.session() as connection:
            row = (await connection.execute(select(_marks.c.hours_to_us, _marks.c.seconds_from_us))).one()
        self._hours_to_us, self.seconds_from_us = row

    async def reopen(self, connection: AsyncConnection, moments: Iterable[int]) -> None:
        """Samples of these moments are written in this transaction: sums that they belong into count no more."""
        hour_us = min(map(floor_hour, moments), default=self._hours_to_us)
        if hour_us < self._hours_to_us:
            await connection.execute(update(_marks).values(hours_to_us=hour_us))
            # Should the transaction fail, an hour is summed once more than it need be.
            self._hours_to_us, self._done_us = hour_us, -1

    def is_due(self, now_us: int) -> bool:
        """Whether `work` has something to look at."""
        return floor_hour(now_us) != self._done_us

    async def work(self, now_us: int) -> None:
        """Do one piece of what is due. Raises what the database raises; then nothing of that piece is done."""
        this_hour_us = floor_hour(now_us)
        hour_us = await self._first_unsummed()
        if hour_us is not None and hour_us < this_hour_us:
            await self._sum_hour(hour_us)
            return
        edge_us = min(this_hour_us - self._seconds_kept_us, self._hours_to_us)
        if edge_us > self.seconds_from_us:
            await self._set_marks(seconds_from_us=edge_us)  # before the first row goes: no report reads half an hour
        if await self._delete(_SECONDS, self.seconds_from_us):
            return
        if await self._delete(_HOURS, this_hour_us - self._hours_kept_us):
            return
        self._done_us = this_hour_us

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

    async def _set_marks(self, *, seconds_from_us: int) -> None:
        async with self._database.begin_immediate() as connection:
            await connection.execute(update(_marks).values(seconds_from_us=seconds_from_us))
        self.seconds_from_us = seconds_from_us

    async def _delete(self, some_tables: Iterable[Table], edge_us: int) -> bool:
        """Delete the oldest rows of the first table that has any before `edge_us`; whether there were any."""
        for table in some_tables:
            async with self._database.session() as connection:
                last_us = await _nth_oldest(connection, table.c.at_us, edge_us)
            if last_us is not None:
                async with self._database.begin_immediate() as connection:
                    await connection.execute(delete(table).where(table.c.at_us <= last_us))
                return True
        return False


async def _nth_oldest(connection: AsyncConnection, at: ColumnElement[int], edge_us: int) -> int | None:
    """The moment of the DELETED_ROWS_MAX-th row before `edge_us`, or of the last one; None when there is none."""
    oldest = select(at.label("at_us")).where(at < edge_us).order_by(at).limit(DELETED_ROWS_MAX).subquery()
    found: int | None = await connection.scalar(select(func.max(oldest.c.at_us)))
    return found
