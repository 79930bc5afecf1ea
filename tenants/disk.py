"""Errors of a disk, as one line that names the reason and the path.

A full disk reaches us in four ways:

- an OSError of the file layer,
- SQLite's "database or disk is full",
- SQLite's "disk I/O error", when it cannot grow its shared memory file,
- an error class of PostgreSQL.
"""

import errno
import os
import sqlite3
from pathlib import Path

# A file system with less free space than this counts as full.
ROOM_BYTES_MIN = 64 * 1024
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk fails with input/output errors",
}
_POSTGRES_DISK_FULL = "53100"


def disk_trouble(error: BaseException, path: Path | str | None = None) -> str | None:
    """One line such as `the disk is full: PATH`, when the disk caused `error`; None for any other error.

    `path` is the file that was being written. The file name that an OSError itself carries is preferred.
    """
    original = getattr(error, "orig", None) or error
    if isinstance(original, OSError) and original.errno in _REASONS:
        where = original.filename or path
        return _REASONS[original.errno] + ("" if where is None else f": {os.fsdecode(where)}")
    if isinstance(original, sqlite3.Error) and path is not None:
        return _sqlite_trouble(original, Path(path))
    if getattr(original, "sqlstate", None) == _POSTGRES_DISK_FULL:
        return "the disk of the database server is full"
    return None


def _sqlite_trouble(error: sqlite3.Error, path: Path) -> str | None:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    may_be_full = code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
    if code == sqlite3.SQLITE_FULL or (may_be_full and is_full(path.parent)):
        return f"the disk is full: {path}"
    if code == sqlite3.SQLITE_IOERR:
        return f"the disk fails with input/output errors: {path}"
    return None


def is_full(directory: Path) -> bool:
    """Whether the file system of `directory` has less than ROOM_BYTES_MIN left for this user.

    False when the file system does not say. The call may wait for a slow file system.
    """
    try:
        room = os.statvfs(directory)
    except OSError:
        return False
    num_free = room.f_bavail if os.geteuid() else room.f_bfree  # root may use the reserved blocks too
    return room.f_blocks > 0 and num_free * room.f_frsize < ROOM_BYTES_MIN
