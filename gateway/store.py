"""Opening the store as the server and the offline CLI do it, always while holding the data directory's lock."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

from gateway.admin import AdminState
from gateway.settings import Settings
from tenants.clock import wall_clock_us
from tenants.database import Database
from tenants.leases import Leases
from tenants.ledger import Ledger, LedgerSettings, recent_use
from tenants.pepper import load_pepper
from tenants.snapshot import SnapshotHolder
from tenants.store_lock import GATEWAY, StoreLock, hold_store


@dataclass(frozen=True, slots=True)
class Store:
    """The tenants of a running server."""

    database: Database
    holder: SnapshotHolder
    leases: Leases
    ledger: Ledger
    lock: StoreLock


@contextlib.asynccontextmanager
async def open_store(settings: Settings, url: str) -> AsyncIterator[Store]:
    """Hold the store as the gateway at `url`, upgrade the schema, read the tenants, replay the journal and start the
    ledger; at the end everything is written.

    Raises TenantError; StoreInUse when another gateway holds the store.
    """
    async with hold_store(settings.database_url, f"{GATEWAY}{url} ({_process()})") as lock:
        await Database.upgrade(settings.database_url)
        async with _opened(settings, lock) as store:
            yield store


def _process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


@contextlib.asynccontextmanager
async def _opened(settings: Settings, lock: StoreLock) -> AsyncIterator[Store]:
    async with _tenants(settings) as (database, holder):
        ledger = Ledger(
            database,
            settings.data_dir / "journal",
            LedgerSettings(journal_fsync_interval_seconds=settings.journal_fsync_interval, on_error=settings.on_error),
        )
        await ledger.start()
        try:
            leases = Leases()
            async with database.session() as connection:
                leases.seed(await recent_use(connection, wall_clock_us()))
            yield Store(database, holder, leases, ledger, lock)
        finally:
            await ledger.stop()


@contextlib.asynccontextmanager
async def _tenants(settings: Settings) -> AsyncIterator[tuple[Database, SnapshotHolder]]:
    database = Database.open(settings.database_url)
    try:
        holder = SnapshotHolder(database, load_pepper(settings.data_dir))
        await holder.reload()
        yield database, holder
    finally:
        await database.dispose()


@contextlib.asynccontextmanager
async def offline_admin_state(settings: Settings, token: str) -> AsyncIterator[AdminState]:
    """The admin app's state when no server runs: nothing is ready, and there are no metrics.

    Raises TenantError; StoreInUse when a gateway with another data directory holds the store.
    """
    async with (
        hold_store(settings.database_url, f"a command ({_process()})"),
        _upgraded_tenants(settings) as (database, holder),
    ):
        yield AdminState(
            token=token,
            database=database,
            snapshot_holder=holder,
            status=lambda: {"ready": False, "reasons": ["no server runs"]},
            metrics=lambda: b"",
        )


@contextlib.asynccontextmanager
async def _upgraded_tenants(settings: Settings) -> AsyncIterator[tuple[Database, SnapshotHolder]]:
    await Database.upgrade(settings.database_url)
    async with _tenants(settings) as found:
        yield found


def upgrade_database(settings: Settings) -> str:
    """Bring the schema to the newest revision and return it. Raises TenantError, also while a gateway runs on it."""

    async def upgrade() -> str:
        async with hold_store(settings.database_url, f"a command ({_process()})"):
            return await Database.upgrade(settings.database_url)

    return asyncio.run(upgrade())
