"""The ledger: one row for each request that was admitted, whatever becomes of the request.

`open` and `close` append to the journal and return. One task writes the rows to SQL in batches, one transaction for
each batch. So the token path never waits for SQL. While SQL fails, rows stay in the journal, and the task tries again
with growing pauses.

A crash is treated like a long failure. The next start replays the journal: rows that SQL has already are skipped by
their request id, and opens without a close are booked as "lost", with their last known progress.

The gateway draws request ids and never takes them from a caller. A second row with the same id is ignored.

Samples go to SQL in the same way, but not through the journal: they are only for reports. Their number in memory is
bounded, and the oldest are dropped first. Between batches the task sums samples by the hour and deletes old samples
(`tenants.retention`).
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sqlalchemy import Table, select
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import tables
from tenants.clock import iso, wall_clock_us
from tenants.database import STORE_ERRORS, Database, insert_or_ignore
from tenants.disk import is_full
from tenants.errors import StoreUnavailable
from tenants.journal import Journal, Replay
from tenants.reports.queries import IS_REQUEST
from tenants.retention import Retention
from tenants.rows import InterferenceRow, SampleRow, StepSampleRow
from tenants.rows import LedgerRow as LedgerRow
from tenants.rows import OpenEntry as OpenEntry
from tenants.rows import Progress as Progress
from tenants.rows import ServiceSampleRow as ServiceSampleRow

_log = logging.getLogger("terazi.ledger")
_STEP_BACK_US = 60_000_000  # a row this far in the future is taken for a small correction of the clock
_ROW_FIELDS = tuple(field.name for field in fields(LedgerRow))
_SAMPLE_TABLES: dict[type[SampleRow], Table] = {
    ServiceSampleRow: tables.service_samples,
    InterferenceRow: tables.interference_samples,
    StepSampleRow: tables.step_samples,
}


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Bounds and rhythms of one ledger."""

    journal_fsync_interval_seconds: float = 0.05  # a power failure may cost the lines of this time
    journal_probe_interval_seconds: float = 1.0  # while the disk refuses writes
    journal_bytes_max: int = 256 * 1024**2  # no new request is admitted above this size
    journal_segment_bytes: int = 8 * 1024**2
    batch_rows_max: int = 200  # one transaction
    samples_max: int = 20_000  # that wait for SQL; the oldest are dropped first
    sample_seconds_kept_hours: int = 48  # after that only the sums by the hour are left
    sample_hours_kept_days: int = 400
    retry_seconds_first: float = 0.1
    retry_seconds_max: float = 5.0
    on_error: str = "serve"  # or "deny": refuse new requests as soon as SQL fails


class Ledger:
    """Owns the journal and the only task that writes ledger rows and samples.

    `directory` is DATA_DIR/journal. `sleep`, `now_us` and `monotonic` (seconds) are injected for tests.
    """

    def __init__(
        self,
        database: Database,
        directory: Path,
        settings: LedgerSettings | None = None,
        *,
        now_us: Callable[[], int] = wall_clock_us,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._directory = directory
        self._settings = settings or LedgerSettings()
        self._journal = Journal(
            directory,
            bytes_max=self._settings.journal_bytes_max,
            segment_bytes=self._settings.journal_segment_bytes,
        )
        self._retention = Retention(
            database,
            seconds_kept_hours=self._settings.sample_seconds_kept_hours,
            hours_kept_days=self._settings.sample_hours_kept_days,
            monotonic=monotonic,
        )
        self._now_us = now_us
        self._sleep = sleep
        self._rows: deque[LedgerRow] = deque()
        self._samples: deque[SampleRow] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._writer: asyncio.Task[None] | None = None
        self._syncer: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._has_failed = False
        self._has_warned_of_clock = False
        self.num_failures = 0  # SQL transactions that failed
        self.num_rejected = 0  # rows that the database can never take, kept in rejected.jsonl
        self.num_samples_dropped = 0
        self.num_lost = 0  # requests booked as lost at this start

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Book what an earlier process left in the journal, then start the tasks. Raises StoreUnavailable."""
        replay = self._journal.replay()
        num_rows = 0
        try:
            await self._retention.load(self._now_us())
            for batch in _batches(self._replayed_rows(replay), self._settings.batch_rows_max):
                await self._write(batch, [])
                num_rows += len(batch)
        except STORE_ERRORS as error:
            raise StoreUnavailable(f"The journal of the last run cannot be booked: {error}") from error
        if num_rows:
            _log.info("replayed the journal: %d rows, of which %d lost", num_rows, self.num_lost)
        self._journal.begin()
        self._writer = asyncio.create_task(self._run_writer(), name="ledger-writer")
        self._syncer = asyncio.create_task(self._run_syncer(), name="ledger-syncer")

    def _replayed_rows(self, replay: Replay) -> Iterator[LedgerRow]:
        yield from replay.rows()
        self.num_lost = len(replay.unfinished)
        for entry in replay.unfinished.values():
            yield lost_row(entry, replay.progress.get(entry.request_id), self._now_us())

    async def stop(self) -> None:
        """Write the remaining rows to SQL and end the tasks.

        Rows that SQL refuses stay in the journal for the next start.
        """
        assert self._writer is not None and self._syncer is not None, "the ledger was not started"
        self._stopping.set()
        self._wake.set()
        try:
            await self._writer
        finally:
            self._syncer.cancel()
            await asyncio.gather(self._syncer, return_exceptions=True)
            self._journal.close()

    async def flush(self) -> None:
        """Wait until no row and no sample waits for SQL."""
        await self._idle.wait()

    # --- booking ------------------------------------------------------------------------------------------------

    def open(self, entry: OpenEntry) -> None:
        """Note that a request is admitted and about to be submitted. Raises StoreUnavailable: then do not submit it."""
        if self._has_failed and self._settings.on_error == "deny":
            raise StoreUnavailable("The database does not take the ledger's rows now.")
        if self._writer is None or self._writer.done():
            raise StoreUnavailable("The ledger is not running.")
        self._journal.append_open(entry)

    def progress(self, progress: Progress) -> None:
        """Note how far an open request has come.

        Its row uses this if the gateway dies before the request ends. Optional.
        """
        with contextlib.suppress(StoreUnavailable):  # the journal has said so once
            self._journal.append_progress(progress)

    def close(self, row: LedgerRow) -> None:
        """Book a request that has ended. Call it once for each `open`, before the last byte goes to the client."""
        if self._journal.holds_close(row.request_id):
            _log.error("request %s was closed twice; the second row is ignored", row.request_id)
            return
        with contextlib.suppress(StoreUnavailable):  # the row is kept in memory, and SQL may still take it
            self._journal.append_close(row)
        self._rows.append(row)
        self._idle.clear()
        self._wake.set()

    def add_samples(self, samples: Sequence[SampleRow]) -> None:
        """Take in the samples of one interval, of all kinds. They wait in memory for SQL."""
        kept = [sample for sample in samples if sample.at_us >= self._retention.seconds_from_us]
        if len(kept) < len(samples):  # the clock was set back by days
            if not self._has_warned_of_clock:
                _log.warning(
                    "samples are dropped: their hour (%s) is older than the seconds that are kept (from %s). Is the "
                    "clock right?",
                    iso(samples[0].at_us),
                    iso(self._retention.seconds_from_us),
                )
            self._has_warned_of_clock = True
            self.num_samples_dropped += len(samples) - len(kept)
        self._samples.extend(kept)
        while len(self._samples) > self._settings.samples_max:
            self._samples.popleft()
            self.num_samples_dropped += 1
        if self._samples:
            self._idle.clear()
            self._wake.set()

    @property
    def backlog(self) -> int:
        """Ended requests whose rows are not in SQL yet."""
        return len(self._rows)

    def lag_us(self, now_us: int) -> int:
        """How long ago the oldest request ended whose row is not in SQL yet, in microseconds; 0 when SQL has all
        rows."""
        return max(0, now_us - self._rows[0].finished_at_us) if self._rows else 0

    @property
    def num_open(self) -> int:
        """Requests that have been opened and not closed."""
        return self._journal.num_open

    @property
    def is_failing(self) -> bool:
        """True while the latest SQL transaction failed."""
        return self._has_failed

    @property
    def is_unwritable(self) -> bool:
        """True while the disk does not take the journal's lines. A new request is then refused."""
        return self._journal.trouble is not None

    @property
    def has_room(self) -> bool:
        """False while a new request is refused because the journal is full, or because SQL fails and `on_error` is
        "deny"."""
        return self._journal.has_room and not (self._has_failed and self._settings.on_error == "deny")

    # --- the writer ---------------------------------------------------------------------------------------------

    async def _run_writer(self) -> None:
        wait = self._settings.retry_seconds_first
        while True:
            if not self._rows and not self._samples:
                self._idle.set()
                if self._stopping.is_set():
                    return
                if not self._retention.is_due(self._now_us()):
                    self._wake.clear()
                    await self._wake.wait()
                    continue
            try:
                if self._rows or self._samples:
                    await self._write_batch()
                if self._retention.is_due(self._now_us()) and not self._stopping.is_set():
                    await self._retention.work(self._now_us())
            except STORE_ERRORS as error:
                self.num_failures += 1
                if not self._has_failed:  # once for each outage, not for each try
                    _log.error("the database does not take ledger rows, they stay in the journal: %s", error)
                self._has_failed = True
                if self._stopping.is_set():
                    return
                await self._back_off(wait)
                wait = min(wait * 2, self._settings.retry_seconds_max)
            else:
                if self._has_failed:
                    _log.info("the database takes ledger rows again")
                self._has_failed = False
                wait = self._settings.retry_seconds_first

    async def _back_off(self, seconds: float) -> None:
        """Wait `seconds`, or until the ledger is told to stop."""
        waits = [asyncio.ensure_future(self._sleep(seconds)), asyncio.ensure_future(self._stopping.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _write_batch(self) -> None:
        size = self._settings.batch_rows_max
        rows = [self._rows[i] for i in range(min(size, len(self._rows)))]
        samples = [self._samples.popleft() for _ in range(min(size, len(self._samples)))]
        try:
            await self._write(rows, samples)
        except STORE_ERRORS:
            room = max(0, self._settings.samples_max - len(self._samples))
            kept = samples[max(0, len(samples) - room) :]
            self.num_samples_dropped += len(samples) - len(kept)
            self._samples.extendleft(reversed(kept))
            raise
        for _ in rows:
            self._rows.popleft()
        self._journal.committed(row.request_id for row in rows)

    async def _write(self, rows: Sequence[LedgerRow], samples: Sequence[SampleRow]) -> None:
        try:
            async with self._database.begin_immediate() as connection:
                await _insert_rows(connection, rows)
                await self._insert_samples(connection, samples)
        except (IntegrityError, DataError):
            # A row that the database can never take must not hold up the other rows for ever.
            await self._write_singly(rows, samples)

    async def _write_singly(self, rows: Sequence[LedgerRow], samples: Sequence[SampleRow]) -> None:
        for row in rows:
            try:
                async with self._database.begin_immediate() as connection:
                    await _insert_rows(connection, [row])
            except (IntegrityError, DataError) as error:
                self.num_rejected += 1
                _log.error("the database can never take the row of %s: %s", row.request_id, error.orig)
                self._journal.set_aside(row)
        for sample in samples:
            try:
                async with self._database.begin_immediate() as connection:
                    await self._insert_samples(connection, [sample])
            except (IntegrityError, DataError) as error:
                self.num_samples_dropped += 1
                _log.error("the database can never take a service sample: %s", error.orig)

    async def _insert_samples(self, connection: AsyncConnection, samples: Sequence[SampleRow]) -> None:
        for kind, table in _SAMPLE_TABLES.items():
            rows = [sample for sample in samples if isinstance(sample, kind)]
            names = tuple(field.name for field in fields(kind))
            await _insert(connection, table, names, rows, *(column.name for column in table.primary_key))
        await self._retention.reopen(connection, (sample.at_us for sample in samples))

    async def _run_syncer(self) -> None:
        settings = self._settings
        waited = 0.0
        while True:
            is_slow = self._journal.trouble is not None
            seconds = settings.journal_probe_interval_seconds if is_slow else settings.journal_fsync_interval_seconds
            await self._sleep(seconds)
            waited += seconds
            if self._journal.trouble is not None:
                self._journal.probe()
            elif waited >= settings.journal_probe_interval_seconds:
                waited = 0.0
                if await asyncio.to_thread(is_full, self._directory):
                    self._journal.note_full()
            await self._sync()

    async def _sync(self) -> None:
        try:
            dirty = self._journal.take_dirty()
        except OSError as error:  # no file descriptor is left; tried again soon
            _log.warning("the journal is not synced now: %s", error)
            return
        if dirty is None:
            return
        fds, mark = dirty
        is_synced, failure = False, None
        try:
            for fd in fds:
                await asyncio.to_thread(os.fsync, fd)
            is_synced = True
        except OSError as error:
            failure = error
        finally:  # also when `stop` cancels this task: the journal then syncs the files as it closes
            if is_synced:
                for fd in fds:
                    os.close(fd)
                self._journal.synced(mark)
            else:
                self._journal.unsynced(fds, failure)


def lost_row(entry: OpenEntry, progress: Progress | None, now_us: int) -> LedgerRow:
    """The row of a request whose end nobody saw."""
    opened = {field.name: getattr(entry, field.name) for field in fields(OpenEntry)}
    reached: dict[str, Any] = {}
    if progress is not None:
        reached = {field.name: getattr(progress, field.name) for field in fields(Progress)}
    return LedgerRow(
        **(reached | opened),
        finished_at_us=max(now_us, entry.admitted_at_us),
        outcome="lost",
        error_code="gateway_died",
    )


def _batches(rows: Iterator[LedgerRow], size: int) -> Iterator[list[LedgerRow]]:
    batch: list[LedgerRow] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


async def _insert_rows(connection: AsyncConnection, rows: Sequence[LedgerRow]) -> None:
    await _insert(connection, tables.ledger, _ROW_FIELDS, rows, "request_id")


async def _insert(
    connection: AsyncConnection, table: Table, names: tuple[str, ...], rows: Sequence[object], *unique: str
) -> None:
    if rows:
        values = [{name: getattr(row, name) for name in names} for row in rows]
        await connection.execute(insert_or_ignore(connection, table, *unique), values)


async def recent_use(connection: AsyncConnection, now_us: int) -> list[tuple[int, float, int]]:
    """What was admitted within the last minute, for `Leases.seed`: (team_id, age in seconds, tokens), oldest first.

    Requests of the last run that never closed are in the ledger by then, as "lost", so they count too. Two kinds of
    rows do not count: requests that were given back, which did not count before the restart either; and rows that lie
    more than a minute in the future. The clock was ahead when such a row was booked, so nobody knows how old it is.
    """
    t = tables.ledger.c
    since = now_us - 60_000_000
    query = (
        select(t.team_id, t.admitted_at_us, t.prompt_tokens + t.output_tokens)
        # A request that was admitted in the window also finished in it, and `finished_at_us` has the index.
        .where(
            t.finished_at_us > since,
            t.admitted_at_us > since,
            t.admitted_at_us <= now_us + _STEP_BACK_US,
            IS_REQUEST,
        )
        .order_by(t.admitted_at_us)
    )
    return [
        (team_id, max(0.0, (now_us - admitted_at_us) / 1e6), tokens)
        for team_id, admitted_at_us, tokens in await connection.execute(query)
    ]
