"""One gateway to a store, since limits are counted, and keys are checked, in the memory of one process.

A gateway holds the lock from before it reads the store until its end. A command that writes without a server holds the
lock while it runs. A text (`holder`) says who holds the lock, so that a refused process can name whom to stop.

* SQLite: the lock is `DATABASE.gateway.lock` beside the database, locked with flock, and it holds the text. The kernel
  drops it when its process dies, and it cannot be lost before. The path is resolved first, so that all spellings of it
  lead to one lock.
* PostgreSQL: the lock is an advisory lock on a connection of its own, whose application_name is the text, cut to 63
  bytes. It ends with that connection, so `watch` checks it every few seconds and takes it again when it is lost.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants.database import STORE_ERRORS, make_engine, sqlite_path
from tenants.disk import disk_trouble
from tenants.errors import StoreInUse, StoreUnavailable

_log = logging.getLogger("terazi.store_lock")
GATEWAY = "the gateway at "  # how a gateway's `holder` text begins: it stays, while a command ends soon
_ADVISORY_LOCK = 0x7465_7261_7A6A  # "terazj"; the migrations' lock is "terazi"
_NAME_BYTES_MAX = 63  # of PostgreSQL's application_name
_POLL_SECONDS = 0.05
WAIT_SECONDS = 10.0  # for a command to end
CHECK_SECONDS = 2.0  # between two looks at the connection
ANSWER_SECONDS = 5.0  # how long a look waits for the database's answer


class StoreLock:
    """A lock that is held.

    `watch` takes it again when it is lost; `lost_seconds` says for how long it has been lost.
    """

    def __init__(self, connection: AsyncConnection | None, connect: Callable[[], Awaitable[AsyncConnection]] | None):
        self._connection = connection  # of PostgreSQL
        self._connect = connect
        self._lost_at: float | None = None
        self._look = asyncio.Event()

    @property
    def lost_seconds(self) -> float:
        """For how long the lock has been lost, in seconds; 0 while it is held."""
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at

    async def watch(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Watch the lock until cancelled. Raises StoreInUse when the lock was lost and another process holds it now."""
        if self._connect is None:
            await asyncio.get_running_loop().create_future()
            return
        self._listen()
        while True:
            await self._pause(sleep)
            if self._connection is not None and await _still_holds(self._connection):
                continue
            await self._take_again()

    async def _take_again(self) -> None:
        assert self._connect is not None
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            _log.error("the connection that holds the store's lock is lost")
        await self.release()
        try:
            self._connection = await self._connect()
        except StoreInUse:
            raise
        except STORE_ERRORS:
            return  # the database is away; tried again at the next look
        self._lost_at = None
        self._listen()
        _log.info("the store's lock is held again")

    def _listen(self) -> None:
        """Have the driver tell us at once when the connection ends, if the driver can."""
        raw = self._connection and self._connection.sync_connection
        driver = raw.connection.driver_connection if raw is not None else None
        if driver is not None and hasattr(driver, "add_termination_listener"):
            driver.add_termination_listener(lambda _: self._look.set())

    async def _pause(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._look.clear()
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(sleep(CHECK_SECONDS))]
        if self._lost_at is None:  # while the lock is lost, only time starts the next try
            waits.append(asyncio.ensure_future(self._look.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def release(self) -> None:
        """Release the lock and close its connection. A second call does nothing."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._lost_at is None:  # unlock at once: the server may notice a closed connection only later
            with contextlib.suppress(*STORE_ERRORS):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await connection.execute(text("SELECT pg_advisory_unlock(:id)"), {"id": _ADVISORY_LOCK})
        await _close(connection)


@asynccontextmanager
async def hold_store(url: str, holder: str, *, wait_seconds: float = WAIT_SECONDS) -> AsyncIterator[StoreLock]:
    """Hold the store of `url` as `holder`, inside the block.

    Waits up to `wait_seconds` for a command to end, but never for a gateway. Raises StoreInUse when another process
    holds the store, and StoreUnavailable when the lock cannot be reached.
    """
    path = sqlite_path(url)
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            taken: int | AsyncConnection = await _connect(url, holder) if path is None else _lock_file(path, holder)
            break
        except StoreInUse as error:
            if error.holder.startswith(GATEWAY) or time.monotonic() > deadline:
                raise
        await asyncio.sleep(_POLL_SECONDS)
    if isinstance(taken, int):
        try:
            yield StoreLock(None, None)
        finally:
            os.close(taken)
        return
    lock = StoreLock(taken, lambda: _connect(url, holder))
    try:
        yield lock
    finally:
        await lock.release()


# --- SQLite -----------------------------------------------------------------------------------------------------------


def lock_path(database: Path) -> Path:
    """The lock file of a SQLite database."""
    database = database.resolve()
    return database.with_name(database.name + ".gateway.lock")


def _lock_file(database: Path, holder: str) -> int:
    path = lock_path(database)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = disk_trouble(error, path)
        hint = "Does the directory exist, and may this user write to it?"
        raise StoreUnavailable(why or f"Cannot open {database}: {error.strerror}: {path}. {hint}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder.encode(), 0)
    except BlockingIOError:
        found = os.pread(fd, 512, 0).decode(errors="replace").strip()
        os.close(fd)
        raise StoreInUse(found or "another process") from None
    except OSError as error:
        os.close(fd)
        why = disk_trouble(error, path)
        raise StoreUnavailable(why or f"Cannot lock the store: {error.strerror}: {path}") from error
    return fd


# --- PostgreSQL -------------------------------------------------------------------------------------------------------

_HOLDER = text(
    "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid WHERE l.locktype = 'advisory' "
    "AND l.granted AND l.objsubid = 1 AND l.classid = :high AND l.objid = :low "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_MINE = text(
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND pid = pg_backend_pid() "
    "AND classid = :high AND objid = :low"
)
_HALVES = {"high": _ADVISORY_LOCK >> 32, "low": _ADVISORY_LOCK & 0xFFFF_FFFF}


async def _connect(url: str, holder: str) -> AsyncConnection:
    """A connection that holds the lock. It is in no transaction, so it blocks nothing else.

    Raises StoreInUse, or StoreUnavailable when the database does not answer.
    """
    engine = make_engine(url, is_pooled=False).execution_options(isolation_level="AUTOCOMMIT")
    connection = None
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            connection = await engine.connect()
            name = holder.encode()[:_NAME_BYTES_MAX].decode(errors="ignore")
            await connection.execute(text("SELECT set_config('application_name', :name, false)"), {"name": name})
            if await connection.scalar(text("SELECT pg_try_advisory_lock(:id)"), {"id": _ADVISORY_LOCK}):
                return connection
            found = await connection.scalar(_HOLDER, _HALVES)
            raise StoreInUse(found or "another process")
    except BaseException as error:
        if connection is not None:
            await _close(connection)
        if isinstance(error, TimeoutError):
            raise StoreUnavailable(f"The database did not answer within {ANSWER_SECONDS:g} s. Is it busy?") from error
        raise


async def _still_holds(connection: AsyncConnection) -> bool:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return bool(await connection.scalar(_MINE, _HALVES))
    except STORE_ERRORS:  # an OSError is among them, and so a TimeoutError
        return False


async def _close(connection: AsyncConnection) -> None:
    with contextlib.suppress(*STORE_ERRORS):
        async with asyncio.timeout(ANSWER_SECONDS):
            await connection.invalidate()  # a broken connection is not asked to say goodbye
            await connection.close()
