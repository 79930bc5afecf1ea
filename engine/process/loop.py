"""The engine process: `python -m engine --socket PATH --config JSON [--parent-stdin]`.

One thread runs one loop: read what came in, run one step, send what came of it. The loop sleeps in `select` when there
is nothing to do.

One gateway is connected at a time. A newer connection replaces the older connection. When a connection is lost, all
requests that came over it are aborted. Without a gateway the engine waits for the next gateway. With `--parent-stdin`
the engine ends when its stdin closes.

SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are ignored, since a gateway that drains still needs its engine. SIGQUIT
prints where each thread stands.

While the outbox is full, no step runs and no message is read. So a gateway that has stopped costs a bounded amount of
memory. The loop still sees new connections, the loss of the old connection and the parent's end.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from engine.clock import Clock
from engine.config import StartError
from engine.models.store import ModelStoreError
from engine.process.assembly import assemble, build_parts, read_config
from engine.process.connection import Connection, ConnectionLost
from engine.process.listener import Address, ListenError
from engine.process.samples import ServiceSampler
from engine.step.core import EngineCore
from engine.wire.framing import FrameError
from engine.wire.messages import Abort, FromGateway, Hello, Submit

# What an operator can mend, and one line can say: a wrong setting, a missing file, a full disk, too little memory.
# Any other error means a damaged model or a bug of ours, and gets its traceback above that line.
EXPECTED_ERRORS = (StartError, ListenError, ModelStoreError, OSError, MemoryError)


IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class EngineService:
    """Owns the sockets and the loop. Requests and steps belong to the core."""

    def __init__(
        self,
        listener: socket.socket,
        core: EngineCore,
        sampler: ServiceSampler,
        clock: Clock,
        hello: Hello,
        *,
        max_outbox_bytes: int,
        parent_fd: int | None = None,
        log: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._core = core
        self._sampler = sampler
        self._clock = clock
        self._hello = hello
        self._max_outbox_bytes = max_outbox_bytes
        self._parent_fd = parent_fd
        self._log = log
        self._connection: Connection | None = None
        self._has_unsampled = False  # a step has run since the last sample, or work was left at that sample
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        if parent_fd is not None:
            self._selector.register(parent_fd, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the parent closes our stdin; for ever if no `parent_fd` was given."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """One round of the loop: wait for something to do, do it, and send what came of it. False: the parent ended."""
        is_parent_gone = self._handle_sockets(self._wait_seconds())
        if is_parent_gone:
            self._drop("the parent has ended")
            self._selector.close()
            return False
        self._step()
        self._sample()
        self._watch()
        return True

    def _wait_seconds(self) -> float | None:
        if self._can_send() and self._core.has_work:
            return 0.0
        if self._can_send() and self._has_unsampled:
            return self._sampler.due_in_us(self._clock.now_us()) / 1e6
        return None

    def _can_send(self) -> bool:
        return self._connection is not None and not self._connection.is_full

    def _handle_sockets(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds (None: no limit), then do what the sockets ask for.

        True when the parent has closed our stdin.
        """
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj == self._parent_fd:
                if not os.read(self._parent_fd, 4096):
                    return True
            elif key.fileobj is self._connection:
                self._serve(events)
        return False

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            self._log(f"a connection could not be accepted: {error}")
            return
        self._drop("replaced by a newer connection")
        self._connection = Connection(accepted, self._max_outbox_bytes)
        self._selector.register(self._connection, selectors.EVENT_READ)
        self._send(self._hello)

    def _serve(self, events: int) -> None:
        connection = self._connection
        assert connection is not None
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ:
                for message in connection.receive():
                    self._take(message)
                    if self._connection is not connection:  # lost while answering: ignore the rest of what it sent
                        return
        except ConnectionLost as lost:
            self._drop(str(lost))
        except FrameError as error:
            self._drop(f"not this protocol: {error}")

    def _take(self, message: FromGateway) -> None:
        if isinstance(message, Submit):
            refused = self._core.add(message)
            if refused is not None:
                self._send(refused)
        elif isinstance(message, Abort):
            self._core.abort(message.request_id)
        else:
            self._take_sample()
            self._core.configure(message)

    def _step(self) -> None:
        if not (self._can_send() and self._core.has_work):
            return
        if not self._has_unsampled:
            self._has_unsampled = True
            self._sampler.restart(self._clock.now_us())
        done = self._core.step()
        if done is not None:
            self._send(done)

    def _sample(self) -> None:
        if not (self._has_unsampled and self._can_send()):
            return
        now_us = self._clock.now_us()
        self._sampler.look(now_us)
        if self._sampler.due_in_us(now_us) == 0:
            self._take_sample()

    def _take_sample(self) -> None:
        if not self._has_unsampled:
            return
        self._has_unsampled = self._core.has_work
        samples = self._sampler.take(self._clock.now_us())
        if samples is not None:
            self._send(samples)

    def _send(self, message: msgspec.Struct) -> None:
        if self._connection is None:
            return
        try:
            self._connection.send(message)
        except ConnectionLost as lost:
            self._drop(str(lost))

    def _watch(self) -> None:
        """Tell the selector what to watch for: room to send while the outbox has bytes, messages unless it is full."""
        if self._connection is None:
            return
        events = 0 if self._connection.is_full else selectors.EVENT_READ
        if self._connection.has_unsent:
            events |= selectors.EVENT_WRITE
        if self._selector.get_key(self._connection).events != events:
            self._selector.modify(self._connection, events)

    def _drop(self, why: str) -> None:
        """Close the connection and end every request that came over it. Without a connection, do nothing."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._selector.unregister(connection)
        connection.close()
        requests = self._core.request_ids
        for request_id in requests:
            self._core.abort(request_id)
        while self._core.has_work:  # carry out the aborts; no request is left, so no forward pass runs
            self._core.step()
        self._log(f"connection closed: {why} ({len(requests)} requests aborted)")


def _quiet_openmp(num_threads: int) -> None:
    """Make OpenMP's idle threads sleep. Spinning threads take the gateway's core and slow small products ten-fold."""
    for name, value in (
        ("OMP_WAIT_POLICY", "PASSIVE"),
        ("GOMP_SPINCOUNT", "0"),
        ("KMP_BLOCKTIME", "0"),
        ("OMP_NUM_THREADS", str(num_threads)),
        ("MKL_NUM_THREADS", str(num_threads)),
    ):
        os.environ.setdefault(name, value)


def _log(line: str) -> None:
    # The reader of our standard error may have left, as `2>&1 | head` does: a lost line is no reason to end.
    with contextlib.suppress(OSError, ValueError):
        print(f"engine: {line}", file=sys.stderr, flush=True)


def _start(arguments: argparse.Namespace) -> tuple[Address, EngineService]:
    """Start the engine, up to the line on stdout that says where it listens. Raises what keeps it from starting."""
    config = read_config(arguments.config)
    _quiet_openmp(config.num_threads)
    parent_fd = sys.stdin.fileno() if arguments.parent_stdin else None
    address = Address(Path(arguments.socket))
    parts = build_parts(config)
    identity = address.raise_epoch()
    core, sampler, hello = assemble(config, parts, identity, _log)
    service = EngineService(
        address.listen(),
        core,
        sampler,
        parts.clock,
        hello,
        max_outbox_bytes=config.max_outbox_bytes,
        parent_fd=parent_fd,
        log=_log,
    )
    ready = {"event": "listening", "socket": arguments.socket, "pid": hello.pid}
    with contextlib.suppress(BrokenPipeError):  # the reader of this line has left; the engine goes on without it
        print(json.dumps({**ready, "engine_id": identity.engine_id, "epoch": identity.epoch}), flush=True)
    return address, service


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine until its parent ends, and return 0. If it cannot start, return 1, with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m engine", description="The Terazi engine process.")
    parser.add_argument("--socket", required=True, help="path of the Unix socket to listen on")
    parser.add_argument("--config", default="{}", help="engine configuration as one JSON document")
    parser.add_argument("--parent-stdin", action="store_true", help="end when stdin closes")
    arguments = parser.parse_args(argv)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # standard error is closed
        faulthandler.register(signal.SIGQUIT, all_threads=True)
    try:
        address, service = _start(arguments)
    except Exception as error:  # noqa: BLE001 - the process ends, and the gateway passes on its last line
        if not isinstance(error, EXPECTED_ERRORS):
            traceback.print_exc()
        print(f"terazi-engine: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr, flush=True)
        return 1
    try:
        service.run()
    finally:
        address.close()
    return 0
