"""The journal: append-only files that remember requests until the database has their rows.

    DATA_DIR/journal/0000000001.jsonl       {"open": …}  {"progress": …}  {"close": …}, one JSON document a line

Each line is handed to the kernel at once, so it survives kill -9. The caller of `take_dirty` syncs it soon after; a
power failure may cost the lines written since the last sync.

When a segment is full, the next segment begins with the opens of all requests that still run. So a segment can be
deleted as soon as the closes in it are committed, however long one request runs.

The journal's size is bounded. An open is refused unless its own close fits too: a request that was admitted can always
be booked.

A disk that refuses a write or a sync puts the journal in *trouble*. Opens are then refused at once. Closes are still
tried, and kept in memory when the disk refuses them. A caller that calls `probe` from time to time finds out when the
disk takes writes again. The log has one line when the trouble begins and one when it is over.

One owner, one thread. A call waits for nothing but the page cache.
"""

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tenants.disk import ROOM_BYTES_MIN, disk_trouble
from tenants.errors import StoreUnavailable
from tenants.rows import LedgerRow, OpenEntry, Progress

_log = logging.getLogger("terazi.journal")

CLOSE_LINE_BYTES = 2048  # kept free for each open request
# What a probe writes and takes back. It is more than one request needs, so that a disk with one last free block still
# counts as full.
PROBE_BYTES = ROOM_BYTES_MIN
_SEGMENT_NAME = re.compile(r"(\d{10})\.jsonl")
_REJECTED = "rejected.jsonl"
_UNWRITABLE = "The ledger's journal cannot be written now."
_encoder = msgspec.json.Encoder()


class Journal:
    """Owns one directory. `append_open`, `append_close`, `replay` and `begin` may raise StoreUnavailable."""

    def __init__(self, directory: Path, *, bytes_max: int, segment_bytes: int) -> None:
        self._directory = directory
        self._bytes_max = bytes_max
        self._segment_bytes = segment_bytes
        self._fd: int | None = None
        self._number = 0
        self._size = 0  # of the current segment
        self._old_sizes: dict[int, int] = {}
        self._uncommitted: dict[int, int] = {}  # closes not yet in SQL, by segment
        self._segment_of: dict[str, int] = {}  # where an uncommitted close stands
        self._open: dict[str, OpenEntry] = {}
        self._unwritten: dict[str, LedgerRow] = {}  # closes that the disk refused
        self._write_trouble: str | None = None
        self._sync_trouble: str | None = None
        self._is_torn = False  # half a line follows the last whole line
        self._may_warn_of_segments = True
        self._is_dirty = False
        self._rotated_fds: list[int] = []  # full segments that still have to be synced
        self._durable_number = 0  # the opens in segments before this number are synced again in it

    @property
    def num_bytes(self) -> int:
        """Bytes in all segments."""
        return self._size + sum(self._old_sizes.values())

    @property
    def num_open(self) -> int:
        """Requests that are open."""
        return len(self._open)

    @property
    def has_room(self) -> bool:
        """Whether the size limit leaves room for one more request of ordinary size."""
        return self.num_bytes + (len(self._open) + 2) * CLOSE_LINE_BYTES <= self._bytes_max

    @property
    def trouble(self) -> str | None:
        """Why the disk refuses writes now, as one line with the path; None when it takes them."""
        return self._write_trouble or self._sync_trouble

    def segments(self) -> list[Path]:
        """The segments on disk, oldest first."""
        return sorted(path for path in self._directory.iterdir() if _SEGMENT_NAME.fullmatch(path.name))

    # --- starting -----------------------------------------------------------------------------------------------

    def replay(self) -> "Replay":
        """What an earlier process left in the journal. Read it once. Raises StoreUnavailable."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return Replay(self.segments())
        except OSError as error:
            why = disk_trouble(error, self._directory)
            raise StoreUnavailable(why or f"Cannot read the journal in {self._directory}: {error.strerror}.") from error

    def begin(self) -> None:
        """Start a new segment and delete the old segments, whose rows SQL has now. Raises StoreUnavailable."""
        try:
            old = self.segments()
            self._number = max((int(path.stem) for path in old), default=0) + 1
            self._fd = _create(self._path(self._number))
            self._durable_number = self._number
            self._try_room(self._fd)
            for path in old:
                path.unlink()
        except OSError as error:
            why = disk_trouble(error, self._directory)
            raise StoreUnavailable(
                why or f"Cannot write the journal in {self._directory}: {error.strerror}."
            ) from error

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:010d}.jsonl"

    # --- writing ------------------------------------------------------------------------------------------------

    def append_open(self, entry: OpenEntry) -> None:
        """Note that a request is about to be submitted.

        Raises StoreUnavailable when the journal is in trouble or has no room for this open and its close.
        """
        assert entry.request_id not in self._open, f"request {entry.request_id} is already open"
        if self.trouble is not None:
            raise StoreUnavailable(_UNWRITABLE)
        line = _line("open", entry)
        if self.num_bytes + len(line) + (len(self._open) + 1) * CLOSE_LINE_BYTES > self._bytes_max:
            raise StoreUnavailable("The ledger's journal is full: the database has not taken its rows for too long.")
        self._write(line)
        self._open[entry.request_id] = entry

    def append_progress(self, progress: Progress) -> None:
        """Note how far an open request has come.

        The line is left out when there is no room. Raises StoreUnavailable.
        """
        line = _line("progress", progress)
        if self.num_bytes + len(line) + len(self._open) * CLOSE_LINE_BYTES <= self._bytes_max:
            self._write(line)

    def append_close(self, row: LedgerRow) -> None:
        """Note that a request has ended. Raises StoreUnavailable only when the disk itself refuses the line.

        The row is then kept in memory, and written when the disk takes it, unless SQL has the row before.
        """
        self._open.pop(row.request_id, None)
        self._unwritten[row.request_id] = row
        self._write(_line("close", row))
        del self._unwritten[row.request_id]
        self._uncommitted[self._number] = self._uncommitted.get(self._number, 0) + 1
        self._segment_of[row.request_id] = self._number

    def holds_close(self, request_id: str) -> bool:
        """Whether a close of this request waits for SQL."""
        return request_id in self._segment_of or request_id in self._unwritten

    def _write(self, line: bytes) -> None:
        assert self._fd is not None, "the journal has not begun"
        if self._size and self._size + len(line) > self._segment_bytes:
            self._rotate()
        try:
            self._cut()
            self._is_torn = True
            _write_all(self._fd, line)
            self._is_torn = False
        except OSError as error:
            self._fail(error)
            raise StoreUnavailable(_UNWRITABLE) from error
        self._size += len(line)
        self._is_dirty = True

    def _cut(self) -> None:
        """Cut off half a line, to which the next line would be glued. Raises OSError."""
        if self._is_torn:
            assert self._fd is not None
            os.ftruncate(self._fd, self._size)
            self._is_torn = False

    def _fail(self, error: OSError) -> None:
        """Note that the disk has refused a write: the trouble begins, or goes on."""
        with contextlib.suppress(OSError):  # tried again before the next line
            self._cut()
        why = self._why(error)
        if self.trouble is None:
            _log.error("the journal cannot be written, so no request is admitted until it can: %s", why)
        self._write_trouble = why

    def note_full(self) -> None:
        """Begin a trouble because the file system is full, even if the last block of the present segment has room
        left."""
        if self.trouble is None:
            self._fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _why(self, error: OSError) -> str:
        return disk_trouble(error, self._directory) or f"{self._directory}: {error.strerror or error}"

    def probe(self) -> bool:
        """Whether the disk takes writes again. Call it while the journal is in trouble.

        If the disk does, the trouble of writing is over, and the closes that the disk had refused are written.
        """
        assert self._fd is not None, "the journal has not begun"
        try:
            self._cut()
            self._try_room(self._fd)
            self._write_trouble = None
            for row in list(self._unwritten.values()):
                self.append_close(row)
        except OSError as error:
            self._write_trouble = self._why(error)
        except StoreUnavailable:
            pass  # the trouble is back
        self._note_end()
        return self.trouble is None

    def _try_room(self, fd: int) -> None:
        """Raises OSError unless PROBE_BYTES more can be written.

        The bytes hold no line end, so a rest of them that a crash leaves counts as a torn line.
        """
        try:
            self._is_torn = True
            _write_all(fd, b" " * PROBE_BYTES)
        finally:
            self._cut()

    def _note_end(self) -> None:
        if self.trouble is None:
            self._may_warn_of_segments = True
            _log.info("the journal can be written again")

    def _rotate(self) -> None:
        """Begin the next segment with the requests that are still open. On failure go on with the present segment."""
        assert self._fd is not None
        carried = b"".join(_line("open", entry) for entry in self._open.values())
        path = self._path(self._number + 1)
        try:
            fd = _create(path)
        except OSError as error:
            self._warn_of_segment(error)
            return
        try:
            _write_all(fd, carried)
        except OSError as error:
            os.close(fd)
            with contextlib.suppress(OSError):
                path.unlink()
            self._warn_of_segment(error)
            return
        self._rotated_fds.append(self._fd)
        self._old_sizes[self._number] = self._size
        self._fd, self._number, self._size = fd, self._number + 1, len(carried)
        self._is_dirty = True
        self._is_torn = False

    def _warn_of_segment(self, error: OSError) -> None:
        if self._may_warn_of_segments:
            _log.warning("cannot begin a new journal segment: %s", self._why(error))
        self._may_warn_of_segments = False  # until a trouble is over

    def set_aside(self, row: LedgerRow) -> None:
        """Keep a row that the database can never take in rejected.jsonl, for a person to look at."""
        with (self._directory / _REJECTED).open("ab") as file:
            file.write(_encoder.encode(row) + b"\n")

    # --- after the lines are on disk, and the rows in the database ------------------------------------------------

    def take_dirty(self) -> tuple[list[int], int] | None:
        """Descriptors to sync and close, and the mark to give to `synced`; None when the disk has everything.

        Raises OSError when no descriptor is left. Answer each call with `synced` or `unsynced`.
        """
        if not self._is_dirty or self._fd is None:
            return None
        fds, self._rotated_fds = [*self._rotated_fds, os.dup(self._fd)], []
        self._is_dirty = False
        return fds, self._number

    def unsynced(self, fds: list[int], error: OSError | None = None) -> None:
        """The files `fds` of a `take_dirty` are not on disk.

        They are dirty again; `error`, if any, begins a trouble.
        """
        self._rotated_fds[:0] = fds[:-1]
        os.close(fds[-1])  # a second descriptor of the present segment
        self._is_dirty = True
        if error is not None:
            if self.trouble is None:
                _log.error("the journal cannot be synced, so no request is admitted until it can: %s", self._why(error))
            self._sync_trouble = self._why(error)

    def synced(self, mark: int) -> None:
        """The files of the `take_dirty` that gave `mark` are on disk."""
        if self._sync_trouble is not None:
            self._sync_trouble = None
            self._note_end()
        self._durable_number = max(self._durable_number, mark)
        self._drop_committed()

    def committed(self, request_ids: Iterable[str]) -> None:
        """The closes of these requests are in SQL. Segments that nothing else needs are deleted."""
        for request_id in request_ids:
            self._unwritten.pop(request_id, None)
            segment = self._segment_of.pop(request_id, None)
            if segment is not None:
                self._uncommitted[segment] -= 1
        if self._is_empty and self._fd is not None and self._size:
            try:
                os.ftruncate(self._fd, 0)  # O_APPEND: the next line stands at the start
                self._size = 0
            except OSError as error:
                self._fail(error)  # the lines stay, which does no harm: SQL has their rows
        self._drop_committed()

    @property
    def _is_empty(self) -> bool:
        return not self._segment_of and not self._open and not self._unwritten

    def _drop_committed(self) -> None:
        for number in sorted(self._old_sizes):
            if self._uncommitted.get(number, 0) == 0 and (number < self._durable_number or self._is_empty):
                try:
                    self._path(number).unlink(missing_ok=True)
                except OSError as error:  # tried again with the next batch
                    self._warn_of_segment(error)
                    return
                del self._old_sizes[number]
                self._uncommitted.pop(number, None)

    def close(self) -> None:
        """Sync and close the files. A segment that nothing needs any more is deleted."""
        if self._fd is None:
            return
        for fd in (*self._rotated_fds, self._fd):
            try:
                sync_and_close(fd)
            except OSError as error:
                _log.error("the journal cannot be synced at its end: %s", self._why(error))
        self._fd, self._rotated_fds = None, []
        self._durable_number = self._number
        self._drop_committed()
        if self._is_empty:
            with contextlib.suppress(OSError):  # if it stays, the next start reads it and books nothing twice
                self._path(self._number).unlink(missing_ok=True)


class Replay:
    """Reads the segments of an earlier process: first the closed rows in order, then the requests that never closed."""

    def __init__(self, segments: list[Path]) -> None:
        self._segments = segments
        self.unfinished: dict[str, OpenEntry] = {}  # complete once `rows` is exhausted
        self.progress: dict[str, Progress] = {}
        self.num_damaged = 0  # lines that could not be read; a torn last line is not counted

    def rows(self) -> Iterator[LedgerRow]:
        """Every closed row, in order. Raises OSError when a segment cannot be read."""
        for path in self._segments:
            lines = path.read_bytes().split(b"\n")
            if lines.pop():  # a crash cut the write off, so nobody was told that it succeeded
                _log.warning("journal segment %s ends in a torn line, which is left out", path.name)
            for line in lines:
                try:
                    row = self._take(line)
                except (msgspec.MsgspecError, AttributeError, StopIteration, RecursionError):
                    self.num_damaged += 1
                    _log.error("journal segment %s has a damaged line, which is left out", path.name)
                else:
                    if row is not None:
                        yield row

    def _take(self, line: bytes) -> LedgerRow | None:
        kind, values = next(iter(msgspec.json.decode(line).items()))
        if kind == "open":
            entry = msgspec.convert(values, OpenEntry)
            self.unfinished[entry.request_id] = entry
        elif kind == "progress":
            progress = msgspec.convert(values, Progress)
            self.progress[progress.request_id] = progress
        else:
            row = msgspec.convert(values, LedgerRow)
            self.unfinished.pop(row.request_id, None)
            self.progress.pop(row.request_id, None)
            return row
        return None


def sync_and_close(fd: int) -> None:
    """Sync a file to disk, and close it in any case. Raises OSError."""
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    """Write all of `data`. Raises OSError, also when the kernel takes a part and then nothing more."""
    while data:
        written = os.write(fd, data)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[written:]


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _line(kind: str, entry: OpenEntry | Progress | LedgerRow) -> bytes:
    return _encoder.encode({kind: entry}) + b"\n"
