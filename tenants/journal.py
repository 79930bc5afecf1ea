"""The journal: append-only files that remember requests until the database has their rows.

    DATA_DIR/journal/0000000001.jsonl       {"open": …}  {"progress": …}  {"close": …}, one JSON document a line

Each line is handed to the kernel at once (it survives kill -9) and synced soon after by whoever calls `take_dirty`
(the time between is what a power failure may cost). When a segment is full, the next begins with the opens that are
still running, so a segment can go as soon as the closes in it are committed, however long one request runs.

Room is bounded. An open is refused unless its own close fits too: what was admitted can always be booked.

A disk that refuses a write or a sync puts the journal in *trouble*: opens are refused at once, closes are still tried
and else kept in memory, and whoever calls `probe` from time to time finds out when the disk takes writes again. It is
said once when the trouble begins and once when it is over.

One owner, one thread; a call waits for nothing but the page cache.
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
# What a probe writes and takes back. More than one request needs, so that a disk with a last free block is still full.
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
        self._is_torn = False  # a half line stands behind the last whole one
        self._may_warn_of_segments = True
        self._is_dirty = False
        self._rotated_fds: list[int] = []  # full segments that still have to be synced
        self._durable_number = 0  # segments before this one are not needed for the opens they carry

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
        """Whether one more request of ordinary size would be taken."""
        return self.num_bytes + (len(self._open) + 2) * CLOSE_LINE_BYTES <= self._bytes_max

    @property
    def trouble(self) -> str | None:
        """Why the disk does not take what is written now, in a line with the path; None when it does."""
        return self._write_trouble or self._sync_trouble

    def segments(self) -> list[Path]:
        """The segments on disk, oldest first."""
        return sorted(path for path in self._directory.iterdir() if _SEGMENT_NAME.fullmatch(path.name))

    # --- starting -----------------------------------------------------------------------------------------------

    def replay(self) -> "Replay":
        """What an earlier life left, to be read once."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return Replay(self.segments())
        except OSError as error:
            why = disk_trouble(error, self._directory)
            raise StoreUnavailable(why or f"Cannot read the journal in {self._directory}: {error.strerror}.") from error

    def begin(self) -> None:
        """Start a new segment and delete the old ones: SQL has their rows now."""
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
        """A request is about to be submitted. Raises StoreUnavailable when it and its close might not find room."""
        assert entry.request_id not in self._open, f"request {entry.request_id} is already open"
        if self.trouble is not None:
            raise StoreUnavailable(_UNWRITABLE)
        line = _line("open", entry)
        if self.num_bytes + len(line) + (len(self._open) + 1) * CLOSE_LINE_BYTES > self._bytes_max:
            raise StoreUnavailable("The ledger's journal is full: the database has not taken its rows for too long.")
        self._write(line)
        self._open[entry.request_id] = entry

    def append_progress(self, progress: Progress) -> None:
        """Where an open request stands; left out when there is no room for it."""
        line = _line("progress", progress)
        if self.num_bytes + len(line) + len(self._open) * CLOSE_LINE_BYTES <= self._bytes_max:
            self._write(line)

    def append_close(self, row: LedgerRow) -> None:
        """A request has ended. Raises StoreUnavailable only when the disk itself refuses the line.

        The row is then kept and written when the disk takes it, unless it is committed before.
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
        """Leave no half line: the next one would be glued to it. Raises OSError."""
        if self._is_torn:
            assert self._fd is not None
            os.ftruncate(self._fd, self._size)
            self._is_torn = False

    def _fail(self, error: OSError) -> None:
        """The disk has refused a write."""
        with contextlib.suppress(OSError):  # tried again before the next line
            self._cut()
        why = self._why(error)
        if self.trouble is None:
            _log.error("the journal cannot be written, so no request is admitted until it can: %s", why)
        self._write_trouble = why

    def note_full(self) -> None:
        """The file system says that it is full, whatever the last block of the present segment may still take."""
        if self.trouble is None:
            self._fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _why(self, error: OSError) -> str:
        return disk_trouble(error, self._directory) or f"{self._directory}: {error.strerror or error}"

    def probe(self) -> bool:
        """In trouble: whether the disk takes writes again. It is then over, and refused closes are written."""
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
        """Raises OSError unless PROBE_BYTES more can be written. They hold no line end: what is left counts as torn."""
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
        """Begin the next segment with the requests still open. On failure go on with the present one."""
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
        self._may_warn_of_segments = False  # until the disk has taken one, or a trouble is over

    def set_aside(self, row: LedgerRow) -> None:
        """Keep a row that the database can never take in rejected.jsonl, for a person to look at."""
        with (self._directory / _REJECTED).open("ab") as file:
            file.write(_encoder.encode(row) + b"\n")

    # --- after the disk, and the database, have them --------------------------------------------------------------

    def take_dirty(self) -> tuple[list[int], int] | None:
        """Files to sync and close, with the mark to give to `synced`; None when the disk has everything."""
        if not self._is_dirty or self._fd is None:
            return None
        fds, self._rotated_fds = [*self._rotated_fds, os.dup(self._fd)], []
        self._is_dirty = False
        return fds, self._number

    def unsynced(self, fds: list[int], error: OSError | None = None) -> None:
        """The files of that `take_dirty` are not on disk, and `error` (if any) says why: they are dirty again."""
        self._rotated_fds[:0] = fds[:-1]
        os.close(fds[-1])  # a second descriptor of the present segment
        self._is_dirty = True
        if error is not None:
            if self.trouble is None:
                _log.error("the journal cannot be synced, so no request is admitted until it can: %s", self._why(error))
            self._sync_trouble = self._why(error)

    def synced(self, mark: int) -> None:
        """The files of that `take_dirty` are on disk."""
        if self._sync_trouble is not None:
            self._sync_trouble = None
            self._note_end()
        self._durable_number = max(self._durable_number, mark)
        self._drop_committed()

    def committed(self, request_ids: Iterable[str]) -> None:
        """These closes are in SQL. What nothing else needs is deleted."""
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
                self._fail(error)  # its lines stay, which does no harm: SQL has their rows
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
        """Sync and close. A segment with nothing to remember is deleted."""
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
            with contextlib.suppress(OSError):  # an empty or booked segment that stays is read, and skipped
                self._path(self._number).unlink(missing_ok=True)


class Replay:
    """Reads segments of an earlier life: the closed rows in order, and then what never closed."""

    def __init__(self, segments: list[Path]) -> None:
        self._segments = segments
        self.unfinished: dict[str, OpenEntry] = {}  # complete once `rows` is exhausted
        self.progress: dict[str, Progress] = {}
        self.num_damaged = 0  # lines that could not be read; a torn last line is not counted

    def rows(self) -> Iterator[LedgerRow]:
        """Every closed row; raises OSError when a segment cannot be read."""
        for path in self._segments:
            lines = path.read_bytes().split(b"\n")
            if lines.pop():  # cut off by a crash in mid-write, so never acknowledged
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
    """Put a file on disk, and close it whatever happens."""
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    """Raises OSError, also when the kernel takes a part and then nothing."""
    while data:
        written = os.write(fd, data)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[written:]


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _line(kind: str, entry: OpenEntry | Progress | LedgerRow) -> bytes:
    return _encoder.encode({kind: entry}) + b"\n"
