"""The data directory of one server: who holds it, and the two files by which the CLI finds that server.

    DATA_DIR/lock         locked (flock) while a server or a writing command runs; holds its process id
    DATA_DIR/admin.token  the admin listener's bearer token, mode 0600, made once
    DATA_DIR/server.json  addresses and process id of the running server

The kernel drops the lock when its holder dies, so a stale file never blocks a start.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

from tenants.disk import disk_trouble

_log = logging.getLogger("terazi.lock")

# Printable ASCII, which a header carries unchanged, and long enough that nobody can guess it.
_TOKEN = re.compile(r"[!-~]{16,512}", re.ASCII)


class DataDirUnusable(Exception):
    """The data directory cannot be made or written, or a file in it is damaged.

    The text names the path and the reason.
    """


class DataDirLocked(Exception):
    """Another process holds the data directory. `pid` is its process id, or None when it could not be read."""

    def __init__(self, data_dir: Path, pid: int | None) -> None:
        holder = f"process {pid}" if pid else "another process"
        super().__init__(f"{data_dir} is in use by {holder}; stop it, or give this one another --data-dir")
        self.pid = pid


class DataDirLock:
    """Exclusive hold on a data directory: a context manager, or `acquire` and `release`.

    The process's end releases it too.
    """

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._file: int | None = None

    def acquire(self) -> None:
        """Make the directory if needed and hold it. Raises DataDirUnusable or DataDirLocked; never waits."""
        try:
            self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_file = os.open(self._data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(self._data_dir, error) from None
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_file)
            raise DataDirLocked(self._data_dir, lock_holder(self._data_dir)) from None
        try:
            os.ftruncate(lock_file, 0)
            os.pwrite(lock_file, str(os.getpid()).encode(), 0)
        except OSError as error:
            os.close(lock_file)
            raise _unusable(self._data_dir, error) from None
        self._file = lock_file

    def release(self) -> None:
        """Let the directory go. A second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> "DataDirLock":
        self.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def _unusable(path: Path, error: OSError) -> DataDirUnusable:
    why = disk_trouble(error, path)
    return DataDirUnusable(why or f"cannot write to the data directory {path}: {error.strerror}")


def lock_holder(data_dir: Path) -> int | None:
    """The process id written by the last holder, whether or not it still runs."""
    with contextlib.suppress(OSError, ValueError):
        return int((data_dir / "lock").read_text())
    return None


def is_held(path: Path) -> bool:
    """Whether a process holds an exclusive lock on this file now. False also when the file cannot be opened."""
    try:
        lock_file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock_file)
    return False


def admin_token(data_dir: Path) -> str:
    """The directory's admin token. Makes the file, with mode 0600, when it is not there. Call it only while holding the
    lock.

    Raises DataDirUnusable when the token file is damaged: a new token would lock out everyone who has the old token.
    """
    path = data_dir / "admin.token"
    if path.exists() and (token := read_admin_token(data_dir, may_be_empty=True)):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            path.chmod(0o600)
            _log.warning("others could read %s (mode %04o); remove it and start again for a new token", path, mode)
        return token
    token = "trza-" + secrets.token_urlsafe(32)
    _write_private(path, token + "\n")
    return token


def write_server_info(data_dir: Path, info: dict[str, Any]) -> None:
    """Publish where this server listens."""
    _write_private(data_dir / "server.json", json.dumps(info) + "\n")


def remove_server_info(data_dir: Path) -> None:
    """Withdraw what `write_server_info` published: the server no longer listens."""
    (data_dir / "server.json").unlink(missing_ok=True)


def read_server_info(data_dir: Path) -> dict[str, Any] | None:
    """What the present holder of the lock has published. None when it has published nothing so far."""
    try:
        info = json.loads((data_dir / "server.json").read_text())
    except (OSError, ValueError):
        return None
    return info if isinstance(info, dict) and info.get("pid") == lock_holder(data_dir) else None


def read_admin_token(data_dir: Path, *, may_be_empty: bool = False) -> str:
    """The admin token in this directory. With `may_be_empty`, an empty file gives "".

    Raises DataDirUnusable when this user may not read the file, or the file is damaged.
    """
    path = data_dir / "admin.token"
    try:
        token = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise DataDirUnusable(f"cannot read {path}: {error.strerror}") from None
    if _TOKEN.fullmatch(token) or (may_be_empty and not token):
        return token
    raise DataDirUnusable(f"{path} is damaged; with no server running, remove it and the next start makes a new one")


def _write_private(path: Path, text: str) -> None:
    """Write the whole file or nothing. Only its owner can ever read it. Raises DataDirUnusable."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _unusable(path, error) from None
