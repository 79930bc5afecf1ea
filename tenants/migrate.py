"""Schema upgrades. They run at the start, in one process at a time, and change everything or nothing.

Processes take turns. On SQLite they hold a file lock beside the database, because SQLite's own lock would make a late
process fail instead of wait. On PostgreSQL they hold an advisory lock, which ends with its connection. A late process
finds the newest revision and goes on. A database from a newer version is refused and never touched.
"""

import asyncio
import fcntl
import os
import re
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import Script, ScriptDirectory
from sqlalchemy import Connection, insert, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import tables, tiers
from tenants.clock import wall_clock_us
from tenants.database import BEGIN_OPTION, make_engine, sqlite_path
from tenants.disk import disk_trouble
from tenants.errors import MigrationFailed, SchemaTooNew, StoreUnavailable

LOCK_TIMEOUT_SECONDS = 300.0
_LOCK_POLL_SECONDS = 0.05
_ADVISORY_LOCK = 0x7465_7261_7A69  # "terazi"


def alembic_config(url: str = "") -> Config:
    """Alembic's settings for our packaged revisions."""
    spec = find_spec("migrations")
    assert spec is not None and spec.submodule_search_locations
    config = Config()
    config.set_main_option("script_location", next(iter(spec.submodule_search_locations)).replace("%", "%%"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def head() -> str:
    """The newest revision that this version of Terazi knows."""
    revision = ScriptDirectory.from_config(alembic_config()).get_current_head()
    assert revision is not None
    return revision


async def current(url: str) -> str | None:
    """The database's revision; None when the database is empty or not there.

    Raises Invalid for a wrong URL, StoreUnavailable when the database cannot be read.
    """
    path = sqlite_path(url)
    if path is not None and not path.exists():
        return None
    engine = make_engine(url, is_pooled=False, is_read_only=True)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(_revision)
    except (SQLAlchemyError, sqlite3.Error) as error:  # the connection's hook meets the driver's own errors
        raise _unavailable(url, error) from error
    finally:
        await engine.dispose()


async def upgrade(url: str, *, now_us: Callable[[], int] = wall_clock_us) -> str:
    """Bring the schema to the newest revision and return that revision. A new database gets the default tiers.

    Raises SchemaTooNew when a newer version made the database, MigrationFailed when a step fails (then nothing is
    changed), and StoreUnavailable when the database cannot be reached or locked.
    """
    engine = make_engine(url, is_pooled=False)
    try:
        async with _file_lock(url), engine.connect() as connection:
            connection = await connection.execution_options(**{BEGIN_OPTION: "IMMEDIATE"})
            async with connection.begin():
                if connection.dialect.name == "postgresql":
                    await connection.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": _ADVISORY_LOCK})
                return await _upgrade(connection, url, now_us())
    except (SQLAlchemyError, sqlite3.Error) as error:  # the connection's hook meets the driver's own errors
        raise _unavailable(url, error) from error
    finally:
        await engine.dispose()


async def _upgrade(connection: AsyncConnection, url: str, now_us: int) -> str:
    newest = head()
    before = await connection.run_sync(_revision)
    if before == newest:
        return newest
    known = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    if before is not None and before not in known:
        raise SchemaTooNew(
            f"The database was made by a newer Terazi (schema {before}; this one knows up to {newest}). "
            "Start the newer version, or restore a backup made before its upgrade."
        )
    config = alembic_config(url)
    scripts = ScriptDirectory.from_config(config)

    def run(sync_connection: Connection) -> None:
        config.attributes["connection"] = sync_connection
        # Run the migrations one by one, so that an error can name its migration. All run in the caller's transaction.
        for script in reversed(list(scripts.iterate_revisions(newest, before or "base"))):
            try:
                command.upgrade(config, script.revision)
            except Exception as error:  # whatever a migration meets: SQL, a driver's own errors, its own checks
                raise MigrationFailed(
                    f"The migration {script.revision} ({_title(script)}) failed, and nothing has been changed: "
                    f"{_cause(url, error)}"
                ) from error

    await connection.run_sync(run)
    if before is None:
        await tiers.create_defaults(connection, now_us)
        await connection.execute(insert(tables.generation).values(id=1, value=1))
    return newest


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _unavailable(url: str, error: SQLAlchemyError | sqlite3.Error) -> StoreUnavailable:
    path = sqlite_path(url)
    why = disk_trouble(error, path)
    if why is not None:
        return StoreUnavailable(why)
    where = "the database" if path is None else str(path)
    hint = "" if path is None else " Does the directory exist, and may this user write to it?"
    return StoreUnavailable(f"Cannot open {where}: {_cause(url, error)}.{hint}")


def _title(script: Script) -> str:
    return script.doc.rstrip(".")


def _cause(url: str, error: Exception) -> str:
    """The reason, in one line.

    It never holds a statement's parameters; our engines hide them in SQLAlchemy's texts too.
    """
    why = disk_trouble(error, sqlite_path(url))
    original = getattr(error, "orig", None) or error
    lines = str(original).strip().splitlines()
    # SQLAlchemy passes the driver's errors on as "<class 'asyncpg.exceptions.UndefinedTableError'>: relation ...".
    text = re.sub(r"^<class '[\w.]+'>: ", "", lines[0]) if lines else type(original).__name__
    return why or text.rstrip(".")


@asynccontextmanager
async def _file_lock(url: str) -> AsyncIterator[None]:
    """Hold DATABASE.migrate.lock inside the block; other processes wait. The kernel drops the lock when a process dies.

    Raises StoreUnavailable. For PostgreSQL it does nothing.
    """
    path = sqlite_path(url)
    if path is None:
        yield
        return
    lock_path = path.with_name(path.name + ".migrate.lock")
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = disk_trouble(error, lock_path)
        raise StoreUnavailable(why or f"Cannot write beside the database: {error.strerror}: {lock_path}") from error
    try:
        await _take(fd, lock_path)
        yield
    finally:
        os.close(fd)


async def _take(fd: int, lock_path: Path) -> None:
    # Poll, because a thread that waits inside flock could not be given up at the time-out.
    tries = round(LOCK_TIMEOUT_SECONDS / _LOCK_POLL_SECONDS)
    for _ in range(tries):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(_LOCK_POLL_SECONDS)
        else:
            return
    raise StoreUnavailable(
        f"Another process has held {lock_path} for {LOCK_TIMEOUT_SECONDS:.0f} s, as for an upgrade of the database: "
        "wait until that process is done, or end it, and start again."
    )
