"""The store's connections: SQLite by default, PostgreSQL by URL, through SQLAlchemy's async Core.

Reads run in `session()`, writes in `begin_immediate()`.

On SQLite we switch off the driver's own handling of transactions. Our hook emits BEGIN for readers and BEGIN IMMEDIATE
for writers. A transaction that reads first and writes later would fail with "database is locked", without waiting, when
another writer got in between. Writers of this process queue on one lock. WAL lets readers go on meanwhile.
`synchronous` is FULL because a journal segment is deleted once its rows are committed, so a commit must survive a power
failure.
"""

import asyncio
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Insert, Table, event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, InvalidRequestError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from tenants import sqlite_driver, store_url
from tenants.errors import Invalid, StoreUnavailable, StoreUnreachable

# What a database raises when it is away, full or broken. SQLAlchemy lets some errors of the drivers through unwrapped.
STORE_ERRORS: tuple[type[Exception], ...] = (SQLAlchemyError, sqlite3.Error, OSError, StoreUnavailable)

# At DEBUG, aiosqlite logs every statement's parameters: hashes of keys, and whatever a caller pasted.
logging.getLogger("aiosqlite").setLevel(logging.WARNING)

BUSY_TIMEOUT_MS = 10_000
CONNECT_TIMEOUT_SECONDS = 10.0  # to a PostgreSQL server, unless the URL has a `timeout`
WAL_SIZE_LIMIT_BYTES = 64 * 1024**2
BEGIN_OPTION = "terazi_begin"  # execution option: how a transaction begins on SQLite


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL; None for another database.

    Raises Invalid for a URL that cannot be read, and for a database in memory.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    if not parsed.database or parsed.database == ":memory:":
        raise Invalid("The store needs a file: a database in memory would be lost.", param="store.url")
    return Path(parsed.database)


def sqlite_url(path: Path) -> str:
    """The store URL of a SQLite file. Special characters of the path are quoted."""
    return f"{store_url.SQLITE}:///{quote(str(path))}"


def _parsed(url: str) -> URL:
    """The URL as SQLAlchemy's value. Raises Invalid, whose text holds no part of the URL that could be a password."""
    url = store_url.normalised(url)
    try:
        return make_url(url)
    except (ArgumentError, ValueError):  # their texts repeat the URL
        raise Invalid("The store URL cannot be read.", param="store.url") from None


def make_engine(url: str, *, is_read_only: bool = False, is_pooled: bool = True) -> AsyncEngine:
    """A SQLAlchemy engine with our hooks. Connects to nothing yet.

    Raises Invalid when the URL is wrong or its driver is not installed, and, with `is_read_only`, StoreUnreadable when
    this user may not read the SQLite file.
    """
    parsed = _parsed(url)
    path = sqlite_path(url)
    options: dict[str, Any] = {"hide_parameters": True}  # in errors and logs
    if path is None:
        parsed, options["connect_args"] = _postgresql_arguments(parsed)
    elif is_read_only and not parsed.query:
        open_file = sqlite_driver.opener(sqlite_driver.reading_uri(path))
        options["connect_args"] = {"async_creator_fn": open_file}
    else:
        options["connect_args"] = {"async_creator_fn": sqlite_driver.connect}
    if not is_pooled:
        options["poolclass"] = NullPool
    if is_pooled and path is None:
        options["pool_pre_ping"] = True
    try:
        engine = create_async_engine(parsed, **options)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise Invalid(f"The store URL needs a driver that is not installed: {error}", param="store.url") from error
    except (ArgumentError, InvalidRequestError):
        raise Invalid("The store URL cannot be read.", param="store.url") from None
    if path is not None:
        _hook_sqlite(engine, is_read_only)
    elif is_read_only:
        engine = engine.execution_options(postgresql_readonly=True)
    return engine


def _postgresql_arguments(url: URL) -> tuple[URL, dict[str, Any]]:
    """The URL without some parameters, and the driver's arguments made of them: numbers, and the application's name."""
    arguments: dict[str, Any] = {"timeout": CONNECT_TIMEOUT_SECONDS}
    query = dict(url.query)
    for name, number in store_url.NUMBERS.items():
        if name in query:
            arguments[name] = number(str(query.pop(name)))
    if "application_name" in query:
        arguments["server_settings"] = {"application_name": str(query.pop("application_name"))}
    arguments["async_creator_fn"] = _postgresql_opener(url)
    return url.set(query=query), arguments


def _postgresql_opener(url: URL) -> Callable[..., Awaitable[Any]]:
    async def connect(*arguments: Any, **options: Any) -> Any:
        """asyncpg.connect. Its errors become one StoreUnreachable, which names host and port and holds no password."""
        import asyncpg

        try:
            return await asyncpg.connect(*arguments, **options)
        except (OSError, TimeoutError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            text = url.render_as_string(hide_password=False)
            reason = " ".join(store_url.without_secrets(_reason(error), text).split())
            raise StoreUnreachable(
                f"The database server at {_address(options)} cannot be used: {reason.rstrip('.')}."
            ) from error

    return connect


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # asyncio's own text repeats the address as a tuple
    return str(getattr(error, "strerror", None) or error) or "it did not answer in time"


def _address(options: Mapping[str, Any]) -> str:
    """`host:port` of the server that a connection was asked for. Several servers are joined by commas."""
    hosts, ports = options.get("host"), options.get("port")
    names = hosts if isinstance(hosts, (list, tuple)) else [hosts or os.environ.get("PGHOST") or "localhost"]
    numbers = ports if isinstance(ports, (list, tuple)) else [ports or os.environ.get("PGPORT") or 5432] * len(names)
    return ", ".join(
        f"[{name}]:{number}" if ":" in str(name) else f"{name}:{number}"
        for name, number in zip(names, numbers, strict=False)
    )


def _hook_sqlite(engine: AsyncEngine, is_read_only: bool) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def _connect(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # the driver must not begin transactions by itself
        cursor = connection.cursor()
        try:
            cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            if is_read_only:
                # Setting WAL or a size limit would write. A reader takes the database as it is.
                cursor.execute("PRAGMA query_only = ON")
                return
            # When WAL is impossible SQLite does not fail but answers with the old mode, so check the answer.
            cursor.execute("PRAGMA journal_mode = WAL")
            (mode,) = cursor.fetchone() or (None,)
            if mode != "wal":
                raise StoreUnavailable(f"SQLite cannot use WAL here (mode stays {mode!r}): is it a network disk?")
            cursor.execute("PRAGMA synchronous = FULL")
            cursor.execute("PRAGMA foreign_keys = ON")
            cursor.execute(f"PRAGMA journal_size_limit = {WAL_SIZE_LIMIT_BYTES}")
        finally:
            cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Connection) -> None:
        mode = connection.get_execution_options().get(BEGIN_OPTION, "DEFERRED")
        connection.exec_driver_sql(f"BEGIN {mode}")


class Database:
    """One store. Owns the connection pool and the lock that its writers queue on. Call `dispose` at the end."""

    def __init__(self, url: str, engine: AsyncEngine, frozen: sqlite_driver.FrozenFile | None = None) -> None:
        self.url = url
        self._engine = engine
        self._frozen = frozen
        self._write_lock = asyncio.Lock()

    @classmethod
    def open(cls, url: str) -> "Database":
        """The store at `url`; the first use connects. Raises Invalid for a wrong URL or a missing driver."""
        return cls(url, make_engine(url))

    @classmethod
    def read_only(cls, url: str) -> "Database":
        """The store at `url` for reading: every write fails, and no file is made. A user who may only read can open it.

        Raises Invalid as `open` does, and StoreUnreadable when this user may not read the files that hold the rows.
        """
        path = sqlite_path(url)
        frozen = None if path is None else sqlite_driver.frozen(path)
        return cls(url, make_engine(url, is_read_only=True), frozen)

    @property
    def is_sqlite(self) -> bool:
        """Whether this is SQLite."""
        return self._engine.dialect.name == "sqlite"

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncConnection]:
        """A connection in one read transaction: all its queries see the same state.

        Raises StoreUnavailable at the end when the file was opened as frozen and somebody has written to it meanwhile.
        """
        async with self._engine.connect() as connection:
            if not self.is_sqlite:  # by default each statement would see a newer state
                connection = await connection.execution_options(isolation_level="REPEATABLE READ")
            async with connection.begin():
                yield connection
        if self._frozen is not None and self._frozen.has_changed():
            raise StoreUnavailable("A server began to write while the database was read without it; try again.")

    @asynccontextmanager
    async def begin_immediate(self) -> AsyncIterator[AsyncConnection]:
        """A connection in one write transaction, which holds the write lock from its start.

        Commits at the block's end.
        """
        async with self._write_lock, self._engine.connect() as connection:
            connection = await connection.execution_options(**{BEGIN_OPTION: "IMMEDIATE"})
            async with connection.begin():
                yield connection

    async def dispose(self) -> None:
        """Close all connections."""
        await self._engine.dispose()


def insert_or_ignore(connection: AsyncConnection, table: Table, *unique: str) -> Insert:
    """An INSERT that skips a row when the table has a row with the same `unique` columns."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing(index_elements=unique)
    return sqlite.insert(table).on_conflict_do_nothing(index_elements=unique)
