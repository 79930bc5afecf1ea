"""Files that commands write for their callers: `--out` of the reports, and the pages of the demo.

How an output is written depends on what stands under its name:

    nothing, or a regular file   a file beside it, renamed over it: the whole output or the old file, never a half
    a link                       what it points to, by these rules; the link stays
    a pipe, a device             opened and written; never replaced
    an open file of ours         (/dev/stdout, /dev/fd/N) written where it stands
    -                            standard output

A new file is for its owner alone (0600), for reports name teams and what they used. An existing file keeps its owner,
its group, its mode and its access list.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from gateway.command import CommandError

STANDARD_OUTPUT = "-"
_LINKS_MAX = 40  # Linux's own bound: more links than this are a loop
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_output(out: str | Path, text: str) -> None:
    """Write `text` as UTF-8 to what `out` names (not `-`).

    Raises BrokenPipeError when the reader of a pipe has left, and CommandError for any other reason not to write.
    """
    name, data = os.fspath(out), text.encode()
    try:
        descriptor = _own_descriptor(name)
        if descriptor is not None:
            _write_and_close(os.dup(descriptor), data)
            return
        try:
            found = os.stat(name)
        except FileNotFoundError:
            found = None
        if name.endswith("/") or (found is not None and stat.S_ISDIR(found.st_mode)):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if found is None or stat.S_ISREG(found.st_mode):
            _replace(Path(os.path.realpath(name)), found, data)
        else:
            # Opening a FIFO waits for its reader, as a shell would.
            _write_and_close(os.open(name, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC), data)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        raise unwritable(name, error) from None


def make_directory(out: Path) -> None:
    """Make the directory `out` if it is not there, and check that files can be made in it. Raises CommandError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except (OSError, ValueError) as error:
        raise unwritable(os.fspath(out), error) from None


def unwritable(name: str, error: OSError | ValueError) -> CommandError:
    """The one line that says why `name` was not written."""
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return CommandError(f"the disk is full: {name}", code="disk_full")
    why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    return CommandError(f"{name} cannot be written: {why}", code="out_unwritable")


def _replace(path: Path, found: os.stat_result | None, data: bytes) -> None:
    """Write beside `path` and rename. `found` is the regular file that stands there, None for nothing."""
    if found is not None and not os.access(path, os.W_OK, effective_ids=True):
        # A rename needs no permission on the file it replaces, so it would overwrite a read-only file.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    # The temporary name does not contain `path`'s own: a long name and a suffix could be too long together.
    handle, name = tempfile.mkstemp(prefix=".terazi-", dir=path.parent)
    try:
        if found is not None:
            _become(handle, name, path, found)
        _write_all(handle, data)
        os.fsync(handle)  # some file systems say only here that the disk is full
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    finally:
        os.close(handle)


def _become(handle: int, name: str, path: Path, found: os.stat_result) -> None:
    """Give the new file the old file's owner, group, mode and access list."""
    made = os.fstat(handle)
    if (made.st_uid, made.st_gid) != (found.st_uid, found.st_gid):
        try:
            os.fchown(handle, found.st_uid, found.st_gid)
        except PermissionError as error:
            raise PermissionError(
                error.errno, "it belongs to a user or group that this user cannot give it again; remove it first"
            ) from None
    shutil.copystat(path, name)


def _write_and_close(handle: int, data: bytes) -> None:
    try:
        _write_all(handle, data)
    finally:
        os.close(handle)


def _write_all(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _own_descriptor(name: str) -> int | None:
    """The number of the open file of this process that `name` leads to, by /dev/stdout or /dev/fd/N.

    A shell may have opened that file for us to append to, so it must not be replaced, even if it is a regular file.
    """
    path = os.path.abspath(name)
    for _ in range(_LINKS_MAX):
        directory, last = os.path.split(path)
        directory = os.path.realpath(directory)
        if re.fullmatch(rf"/proc/{os.getpid()}(/task/[0-9]+)?/fd", directory) and last.isdecimal():
            return int(last)
        path = os.path.join(directory, last)
        if not os.path.islink(path):
            return None
        path = os.path.normpath(os.path.join(directory, os.readlink(path)))
    return None
