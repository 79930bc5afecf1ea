"""The engine's address: a Unix socket held by one process at a time, and the epoch that each start raises.

`PATH.lock` is locked for the life of the process. So whoever gets the lock knows that a socket file it finds is stale.
`PATH.epoch` keeps the engine's id and counts its starts. So an answer from an earlier start can be recognised.
"""

import fcntl
import json
import os
import socket
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107  # sun_path on Linux, less its NUL


class ListenError(Exception):
    """The address cannot be used. The message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Who this engine is: an id that lasts as long as its epoch file, and the number of this start, from 1."""

    engine_id: str
    epoch: int


class Address:
    """Holds the lock on PATH. The open file descriptor is the lock, so a process that is killed gives it up."""

    def __init__(self, path: Path) -> None:
        """Lock PATH. Raises ListenError when another engine holds the lock, or PATH cannot be used."""
        self.path = path
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ListenError(
                f"the socket path is longer than {MAX_SOCKET_PATH_BYTES} bytes: {path}; use a shorter one"
            )
        try:
            self._lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ListenError(
                f"cannot write beside {path}: {error.strerror}; use a directory you can write to"
            ) from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock_fd)
            raise ListenError(f"another engine listens on {path}; stop it or use another path") from error

    def raise_epoch(self) -> EngineIdentity:
        """Count this start, and write the count to disk before returning. Raises OSError.

        A missing or damaged epoch file is replaced by one with a new engine id, so no pair (id, epoch) comes twice.
        """
        path = Path(f"{self.path}.epoch")
        identity = EngineIdentity(f"eng-{uuid.uuid4().hex[:12]}", 1)
        try:
            kept = json.loads(path.read_bytes())
            identity = EngineIdentity(str(kept["engine_id"]), int(kept["epoch"]) + 1)
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            pass
        beside = Path(f"{path}.new")
        with beside.open("w") as file:
            json.dump({"engine_id": identity.engine_id, "epoch": identity.epoch}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        return identity

    def listen(self) -> socket.socket:
        """A non-blocking listening socket that only this user can connect to. Raises ListenError."""
        try:
            if self.path.exists() or self.path.is_symlink():
                if not stat.S_ISSOCK(self.path.lstat().st_mode):
                    raise ListenError(f"{self.path} exists and is not a socket; use another path")
                self.path.unlink()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)
            try:
                listener.bind(os.fspath(self.path))
            finally:
                os.umask(before)
            listener.listen(8)
        except OSError as error:
            raise ListenError(f"cannot listen on {self.path}: {error.strerror}") from error
        listener.setblocking(False)
        return listener

    def close(self) -> None:
        """Remove the socket file and give up the lock."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock_fd)
