"""What ran when: an opt-in, bounded file with one JSON line for each step boundary of the engine.

    {"event":"start", "at_us":...,             first line of every file and of every start: one moment on the engine's
     "wall_time":"2026-03-01T09:30:00.000000Z",  monotonic clock and in UTC; the engine and the sizes of its pools
     ...}
    {"event":"step","step_id":7,"at_us":...,   at_us: the engine's monotonic clock when the boundary began
     "inbox":[{"what":"submit","request":"a","team":2}, {"what":"abort","request":"b"}, {"what":"teams","teams":[1,2]}],
     "rows":[{"request":"a","team":2,"level":0,"kind":"prefill","start":0,"tokens":256}],
     "copies_out":[{"copy_id":4,"request":"c","blocks":5}], "copies_in":[],
     "copies_done":[4], "copies_failed":[],
     "ended":[{"request":"b","reason":"abort"}],
     "duration_us":5210, "free_blocks":20, "free_host_blocks":64}

`inbox` is what the engine took before it planned the step, in that order; the rest is what came of it. Free blocks are
counted after the step. Where something was taken or ended and no step ran, "step_id" is null; where nothing happened
there is no line. A row's kind is prefill, decode or replay (tokens whose KV was dropped, computed again), its level
that after the step, and "promotions", where there are any, how often its request has been promoted by then. Prompts,
tokens and text are never written.

The log never stops the engine: when the file cannot be written any more it says so once and is silent from then on.
"""

import contextlib
import os
import stat
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from engine.plan import Row, StepPlan, StepResult
from engine.request import Request, Sequence
from engine.step.scheduler import Scheduler
from engine.wire.messages import Abort, ConfigureTeams


class StepLogError(OSError):
    """The file cannot be used; the text says why and what to do."""


class StepLogStart(msgspec.Struct, frozen=True, kw_only=True, tag="start", tag_field="event"):
    """The engine that wrote the lines below, and its pools in blocks. The log sets the moment when it writes it."""

    at_us: int = 0  # monotonic, as the steps' at_us
    wall_time: str = ""  # the same moment, ISO 8601 in UTC

    engine_id: str
    epoch: int
    num_device_blocks: int
    num_host_blocks: int
    block_size: int


class _Taken(msgspec.Struct, frozen=True, omit_defaults=True):
    what: str  # submit, abort or teams
    request: str | None = None
    team: int | None = None
    teams: list[int] | None = None


class _Row(msgspec.Struct, frozen=True, omit_defaults=True):
    request: str
    team: int
    level: int
    kind: str
    start: int
    tokens: int
    promotions: int = 0  # of its request so far


class _Copy(msgspec.Struct, frozen=True):
    copy_id: int
    request: str
    blocks: int


class _Ended(msgspec.Struct, frozen=True):
    request: str
    reason: str | None


class _Step(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="event"):
    step_id: int | None
    at_us: int
    inbox: list[_Taken]
    rows: list[_Row]
    copies_out: list[_Copy]
    copies_in: list[_Copy]
    copies_done: list[int]
    copies_failed: list[int]
    ended: list[_Ended]
    duration_us: int
    free_blocks: int
    free_host_blocks: int


def _moment() -> tuple[int, int]:
    return time.monotonic_ns() // 1000, time.time_ns() // 1000


_NOTHING = StepPlan(step_id=-1, rows=())


class StepLog:
    """Owns the file at `path` and the one before it, `path`.1.

    Each holds at most `bytes_max` bytes, but for a single line longer than that, which is not cut. `tell` gets the one
    line that says why the log has stopped. One thread; a write waits for nothing but the page cache.
    """

    def __init__(
        self,
        path: Path,
        bytes_max: int,
        start: StepLogStart,
        tell: Callable[[str], None],
        moment: Callable[[], tuple[int, int]] = _moment,
    ) -> None:
        """Open the file and go on behind what it holds. `moment` tells the monotonic clock and the time since 1970,
        both in microseconds. Raises StepLogError."""
        if bytes_max < 1:
            raise StepLogError(f"step_log_max_bytes must be at least 1, got {bytes_max}")
        self._path = Path(os.path.realpath(path))  # a link stays: its target is moved aside, beside itself
        self._bytes_max = bytes_max
        self._tell = tell
        self._encoder = msgspec.json.Encoder()
        self._start = start
        self._moment = moment
        self._start_line = self._make_start()
        self._inbox: list[_Taken] = []  # taken since the last line
        self._fd: int | None = None
        self._size = 0
        try:
            self._open()
            if self._size + len(self._start_line) > bytes_max:
                self._rotate()
            else:
                self._append(self._start_line)
        except OSError as error:
            self.close()
            why = error.strerror or str(error)
            raise StepLogError(f"cannot write the step log {path}: {why}; use a file that can be written") from error

    @property
    def is_writing(self) -> bool:
        """False once a write has failed, and after `close`."""
        return self._fd is not None

    def took(self, message: Request | Abort | ConfigureTeams) -> None:
        """The engine takes this from its inbox."""
        if not self.is_writing:
            return
        if isinstance(message, Request):
            self._inbox.append(_Taken("submit", message.request_id, message.team_id))
        elif isinstance(message, Abort):
            self._inbox.append(_Taken("abort", message.request_id))
        else:
            self._inbox.append(_Taken("teams", teams=[team.team_id for team in message.teams]))

    def write(
        self,
        at_us: int,
        plan: StepPlan | None,
        result: StepResult | None,
        ended: Collection[Sequence],
        scheduler: Scheduler,
    ) -> None:
        """One boundary: what was taken since the last, the step that was run (if any), and all that `ended` in both."""
        if not self.is_writing:
            return
        inbox, self._inbox = self._inbox, []
        endings = [_Ended(sequence.request.request_id, sequence.finish_reason) for sequence in ended]
        if plan is None and not inbox and not endings:
            return
        live, memory = scheduler.sequences, scheduler.memory
        gone = {sequence.seq_id: sequence for sequence in ended}

        def request_of(seq_id: int) -> str:
            return (live.get(seq_id) or gone[seq_id]).request.request_id

        def shown(row: Row) -> _Row:
            sequence = live.get(row.seq_id)
            if sequence is None:
                sequence = gone[row.seq_id]
                promotions = sequence.num_promotions
            else:
                promotions = scheduler.policy.num_promotions(row.seq_id)
            asked = sequence.request
            return _Row(
                asked.request_id,
                asked.team_id,
                sequence.level,
                _kind(row),
                row.start,
                len(row.token_ids),
                promotions,
            )

        did = plan or _NOTHING
        step = _Step(
            step_id=plan.step_id if plan is not None else None,
            at_us=at_us,
            inbox=inbox,
            rows=[shown(row) for row in did.rows],
            copies_out=[_Copy(copy.copy_id, request_of(copy.seq_id), len(copy.pairs)) for copy in did.copies_out],
            copies_in=[_Copy(copy.copy_id, request_of(copy.seq_id), len(copy.pairs)) for copy in did.copies_in],
            copies_done=list(result.copies_done) if result is not None else [],
            copies_failed=list(result.copies_failed) if result is not None else [],
            ended=endings,
            duration_us=result.duration_us if result is not None else 0,
            free_blocks=memory.device.num_free,
            free_host_blocks=memory.host.num_free,
        )
        line = self._encoder.encode(step) + b"\n"
        try:
            if self._size > len(self._start_line) and self._size + len(line) > self._bytes_max:
                self._rotate()
            self._append(line)
        except OSError as error:
            self.close()
            self._tell(f"the step log has stopped: cannot write {self._path}: {error.strerror or error}")

    def close(self) -> None:
        """Give the file up; whatever comes later is not written. May be called twice."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        self._inbox.clear()

    def _open(self) -> None:
        # Not blocking: a pipe that nobody reads would hold the engine up for ever.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._fd = os.open(self._path, flags, 0o600)
        about = os.fstat(self._fd)
        if not stat.S_ISREG(about.st_mode):
            raise OSError("it is not a regular file")
        self._size = about.st_size
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            self._append(b"\n")  # the end of a line that a power failure cut

    def _rotate(self) -> None:
        assert self._fd is not None
        os.close(self._fd)
        self._fd = None
        with contextlib.suppress(FileNotFoundError):  # somebody has moved it away
            self._path.replace(f"{self._path}.1")
        self._open()
        self._start_line = self._make_start()
        self._append(self._start_line)

    def _make_start(self) -> bytes:
        at_us, wall_us = self._moment()
        wall_time = datetime.fromtimestamp(wall_us / 1e6, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        start = msgspec.structs.replace(self._start, at_us=at_us, wall_time=wall_time)
        return self._encoder.encode(start) + b"\n"

    def _append(self, data: bytes) -> None:
        assert self._fd is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # leave no half line
            raise
        self._size += len(data)


def _kind(row: Row) -> str:
    if row.is_decode:
        return "decode"
    return "replay" if row.num_generated else "prefill"
