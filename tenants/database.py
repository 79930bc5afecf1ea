"""The store's connections: SQLite by default, PostgreSQL by URL, through SQLAlchemy's async Core.

Reads run in `session()`, writes in `begin_immediate()`. On SQLite the driver's own idea of transactions is switched off
and our hook emits BEGIN, or BEGIN IMMEDIATE for writers: a transaction that reads first and writes later would fail
with "database is locked" without waiting when another writer got in between. Writers of this process queue on one lock.
WAL lets readers go on meanwhile; synchronous=FULL because a journal segment is deleted once its rows are committed, so
a commit must survive a power failure.
"""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Insert, Table, event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from tenants import postgres_driver, sqlite_driver
from tenants.errors import Invalid, StoreUnavailable

# What a database that is away, full or broken raises: drivers let some errors through unwrapped.
STORE_ERRORS: tuple[type[Exception], ...] = (SQLAlchemyError, sqlite3.Error, OSError, StoreUnavailable)

# At DEBUG it writes every statement's parameters into the log: hashes of keys, and whatever a caller pasted.
logging.getLogger("aiosqlite").setLevel(logging.WARNING)

BUSY_TIMEOUT_MS = 10_000
WAL_SIZE_LIMIT_BYTES = 64 * 1024**2
BEGIN_OPTION = "terazi_begin"  # execution option: how a transaction begins on SQLite


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL; None for another database. Raises Invalid for a URL that cannot be read."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise Invalid(f"The store URL cannot be read: {error}", param="store.url") from error
    if parsed.get_backend_name() != "sqlite":
        return None
    if not parsed.database or parsed.database == ":memory:":
        raise Invalid("The store needs a file: a database in memory would be lost.", param="store.url")
    return Path(parsed.database)


def sqlite_url(path: Path) -> str:
    """The store URL of a SQLite file."""
    return f"sqlite+aiosqlite:///{path}"


def make_engine(url: str, *, is_read_only: bool = False, is_pooled: bool = True) -> AsyncEngine:
    """An engine with our hooks. Raises Invalid when the URL is wrong or its driver is not installed."""
    is_sqlite = sqlite_path(url) is not None
    options: dict[str, Any] = {"hide_parameters": True}  # in errors and logs
    if is_sqlite:
        options["connect_args"] = {"async_creator_fn": sqlite_driver.connect}
    elif make_url(url).drivername == "postgresql+asyncpg":
        options["connect_args"] = {"async_creator_fn": postgres_driver.connect}
    if not is_pooled:
        options["poolclass"] = NullPool
    if is_pooled and not is_sqlite:
        options["pool_pre_ping"] = True
    try:
        engine = create_async_engine(url, **options)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise Invalid(f"The store URL needs a driver that is not installed: {error}", param="store.url") from error
    if is_sqlite:
        _hook_sqlite(engine, is_read_only)
    elif is_read_only:
        engine = engine.execution_options(postgresql_readonly=True)
    return engine


def _hook_sqlite(engine: AsyncEngine, is_read_only: bool) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def _connect(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # the driver must not begin by itself
        cursor = connection.cursor()
        try:
            cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            # SQLite answers with the old mode instead of failing, so read it back.
            cursor.execute("PRAGMA journal_mode = WAL")
            (mode,) = cursor.fetchone() or (None,)
            if mode != "wal":
                raise StoreUnavailable(f"SQLite cannot use WAL here (mode stays {mode!r}): is it a network disk?")
            cursor.execute("PRAGMA synchronous = FULL")
            cursor.execute("PRAGMA foreign_keys = ON")
            cursor.execute(f"PRAGMA journal_size_limit = {WAL_SIZE_LIMIT_BYTES}")
            if is_read_only:
                cursor.execute("PRAGMA query_only = ON")
        finally:
            cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Connection) -> None:
        mode = connection.get_execution_options().get(BEGIN_OPTION, "DEFERRED")
        connection.exec_driver_sql(f"BEGIN {mode}")


class Database:
    """One store. Owns the pool and the lock its writers queue on; close it at the end."""

    def __init__(self, url: str, engine: AsyncEngine) -> None:
        self.url = url
        self._engine = engine
        self._write_lock = asyncio.Lock()

    @classmethod
    def open(cls, url: str) -> "Database":
        """Connect lazily to `url`. Raises Invalid for a wrong URL or a missing driver."""
        return cls(url, make_engine(url))

    @classmethod
    def read_only(cls, url: str) -> "Database":
        """The same, but every write fails: for reports."""
        return cls(url, make_engine(url, is_read_only=True))

    @staticmethod
    async def upgrade(url: str) -> str:
        """Bring the schema to the newest revision and return it; see `tenants.migrate.upgrade`."""
        from tenants import migrate  # alembic is not needed while serving

        return await migrate.upgrade(url)

    @property
    def is_sqlite(self) -> bool:
        """Whether this is SQLite."""
        return self._engine.dialect.name == "sqlite"

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncConnection]:
        """A connection in one read transaction: all its queries see the same state."""
        async with self._engine.connect() as connection:
            if not self.is_sqlite:  # where each statement would see what was committed before it
                connection = await connection.execution_options(isolation_level="REPEATABLE READ")
            async with connection.begin():
                yield connection

    @asynccontextmanager
    async def begin_immediate(self) -> AsyncIterator[AsyncConnection]:
        """A connection in one write transaction, holding the write lock from its first moment. Commits at the end."""
        async with self._write_lock, self._engine.connect() as connection:
            connection = await connection.execution_options(**{BEGIN_OPTION: "IMMEDIATE"})
            async with connection.begin():
                yield connection

    async def dispose(self) -> None:
        """Close all connections."""
        await self._engine.dispose()


def insert_or_ignore(connection: AsyncConnection, table: Table, *unique: str) -> Insert:
    """INSERT that skips rows whose `unique` columns are already there."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing(index_elements=unique)
    return sqlite.insert(table).on_conflict_do_nothing(index_elements=unique)
