"""aiosqlite with threads that end quietly, and a way to open a database for a user who may only read it.

aiosqlite runs each connection in a thread that hands results back to the event loop. The loop may be closed by then,
for example when a connection cannot be opened or a task is cancelled while its query runs. The thread then dies with a
traceback on stderr, after the command has printed its one clear line. Nobody waits for that result any more, so we drop
it.
"""

import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

from aiosqlite.core import Connection, _connection_worker_thread

from tenants.errors import StoreUnreadable

_ROWS_PER_FETCH = 64  # aiosqlite's default


class QuietConnection(Connection):
    """An aiosqlite connection whose thread goes on when the event loop it answers to is closed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(lambda: sqlite3.connect(*args, **options), _ROWS_PER_FETCH)
        self._thread = Thread(target=self._work, daemon=True, name="sqlite")

    def _work(self) -> None:
        while True:
            try:
                _connection_worker_thread(self._tx)
                return
            except RuntimeError:  # the loop is closed
                if self._connection is None and not self._running:
                    return


def connect(*args: Any, **options: Any) -> QuietConnection:
    """Stands in for aiosqlite.connect in SQLAlchemy. The arguments are those of sqlite3.connect."""
    return QuietConnection(*args, **options)


def opener(uri: str) -> Callable[..., QuietConnection]:
    """Like `connect`, but the result opens `uri` (`file:...`), whatever name SQLAlchemy passes."""

    def connect_to_uri(_: str, **options: Any) -> QuietConnection:
        return QuietConnection(uri, **(options | {"uri": True}))

    return connect_to_uri


# --- reading only -----------------------------------------------------------------------------------------------------
# A database in WAL mode has its newest rows in FILE-wal. Readers and writers coordinate through FILE-shm. A reader that
# finds no FILE-shm makes it, so it needs a directory that it may write to. For a reader that may not write there:
#
#     no FILE-wal, or an empty one  nobody has the database open: SQLite may take FILE as it is ("immutable")
#     rows in FILE-wal, a FILE-shm  a server runs; SQLite reads along, if this user may read all three
#     rows in FILE-wal alone        a killed server left them; they cannot be read, and reports without them are wrong


@dataclass(frozen=True, slots=True)
class FrozenFile:
    """A database file that is read as if nobody could write to it. `begun` is its state at the start of reading."""

    path: Path
    begun: tuple[int, int, int]

    def has_changed(self) -> bool:
        """Whether somebody has written since the start. Then what was read may be a mixture of old and new."""
        return _state(self.path) != self.begun or _size(_beside(self.path, "-wal")) > 0


def frozen(path: Path) -> FrozenFile | None:
    """The database as a FrozenFile, when SQLite must take the file as it is; else None.

    That is so when this user may not write to the file or its directory, and no rows stand in FILE-wal alone.
    """
    wal = _beside(path, "-wal")
    is_alone = not wal.exists() or not (_size(wal) or _beside(path, "-shm").exists())
    return FrozenFile(path, _state(path)) if is_alone and path.exists() and not _may_write(path) else None


def reading_uri(path: Path) -> str:
    """The URI by which SQLite reads `path` without making a database.

    Raises StoreUnreadable when this user may not read all the files that hold rows.
    """
    for file in (path, _beside(path, "-wal"), _beside(path, "-shm")):
        if file.exists() and not os.access(file, os.R_OK, effective_ids=True):
            raise StoreUnreadable(f"This user may not read {file}: it lacks read permission.")
    if _may_write(path):
        how = "mode=rw"
    elif frozen(path) is not None:
        how = "mode=ro&immutable=1"
    elif _beside(path, "-shm").exists() or not _size(_beside(path, "-wal")):
        how = "mode=ro"
    else:
        raise StoreUnreadable(
            f"{_beside(path, '-wal')} has rows that a stopped server left, and reading them needs write permission on "
            f"{path.parent}: read a copy in a directory of this user's, or start the server once."
        )
    return f"file://{quote(str(path.absolute()))}?{how}"


def _may_write(path: Path) -> bool:
    return all(os.access(place, os.W_OK, effective_ids=True) for place in (path, path.parent))


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _state(path: Path) -> tuple[int, int, int]:
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns
