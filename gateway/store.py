"""Opens the store for the server and for the offline CLI. Both hold the data directory's lock when they write."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

from gateway.admin.app import AdminState
from gateway.settings.values import Settings
from tenants.clock import wall_clock_us
from tenants.database import Database, sqlite_path
from tenants.errors import NotFound, StoreUnavailable
from tenants.leases import Leases
from tenants.ledger import Ledger, LedgerSettings, recent_use
from tenants.pepper import Pepper, load_pepper
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
    """Open the store for the gateway at `url`, inside the block.

    At the start: hold the store, upgrade the schema, read the tenants, replay the journal, start the ledger. At the end
    the ledger writes all its rows. Raises TenantError; of these, StoreInUse when another gateway holds the store.
    """
    async with hold_store(settings.database_url, f"{GATEWAY}{url} ({_process()})") as lock:
        from tenants import migrate  # alembic is not needed while serving

        await migrate.upgrade(settings.database_url)
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
    """The admin app's state when no server runs. Its status is not ready, and it has no metrics.

    Raises TenantError; of these, StoreInUse when a gateway with another data directory holds the store.
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
    from tenants import migrate

    await migrate.upgrade(settings.database_url)
    async with _tenants(settings) as found:
        yield found


@contextlib.asynccontextmanager
async def reading_admin_state(settings: Settings, token: str) -> AsyncIterator[AdminState]:
    """The admin app's state for calls that only read, when no server runs. Makes, upgrades and locks nothing.

    Raises NotFound when no server has run there, and StoreUnavailable when the database has another schema version or
    does not answer.
    """
    from tenants import migrate

    revision = await migrate.current(settings.database_url)
    if revision is None:
        path = sqlite_path(settings.database_url)
        where = f"no database in {path.absolute().parent}" if path else "no table of Terazi's at the store URL"
        raise NotFound(f"there is {where}: no server has run there, and no team was made")
    if revision != migrate.head():
        raise StoreUnavailable(
            f"The database has schema {revision} and this version needs {migrate.head()}: start the server, or run "
            "terazi db upgrade."
        )
    database = Database.read_only(settings.database_url)
    try:
        # Nobody reads the snapshot here: no API key is checked, and without an engine there are no maximum pauses.
        holder = SnapshotHolder(database, Pepper.of(os.urandom(32)))
        yield AdminState(token=token, database=database, snapshot_holder=holder)
    finally:
        await database.dispose()


def upgrade_database(settings: Settings) -> str:
    """Bring the schema to the newest revision and return that revision.

    Raises TenantError; of these, StoreInUse while a gateway runs on the store.
    """
    from tenants import migrate

    async def upgrade() -> str:
        async with hold_store(settings.database_url, f"a command ({_process()})"):
            return await migrate.upgrade(settings.database_url)

    return asyncio.run(upgrade())
