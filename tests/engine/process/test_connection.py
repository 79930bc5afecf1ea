"""A gateway's connection: nothing waits, nothing is cut, and a full outbox is told by its owner's limit."""

import socket
from collections.abc import Iterator

import pytest

from engine.process.connection import Connection, ConnectionLost
from engine.wire.framing import FrameDecoder, encode
from engine.wire.messages import Abort, FromGateway

MESSAGE = Abort("r1")
FRAME = encode(MESSAGE)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def stuff(ours: socket.socket) -> int:
    """Bytes until the socket takes no more."""
    ours.setblocking(False)
    num_bytes = 0
    try:
        while True:
            num_bytes += ours.send(b"x" * 4096)
    except BlockingIOError:
        return num_bytes


def drained(theirs: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= len(theirs.recv(num_bytes))


def test_what_is_sent_arrives_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    connection = Connection(ours, 1)
    connection.send(MESSAGE)
    assert not connection.has_unsent and not connection.is_full
    assert list(FrameDecoder(FromGateway).feed(theirs.recv(4096))) == [MESSAGE]


def test_the_outbox_is_full_at_its_limit_and_keeps_all(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    num_bytes = stuff(ours)
    connection = Connection(ours, len(FRAME) + 1)
    connection.send(MESSAGE)
    assert connection.has_unsent and not connection.is_full
    connection.send(MESSAGE)
    assert connection.is_full
    drained(theirs, num_bytes)
    connection.flush()
    assert not connection.has_unsent and not connection.is_full
    assert list(FrameDecoder(FromGateway).feed(theirs.recv(4096))) == [MESSAGE, MESSAGE]


def test_a_limit_of_one_frame_is_reached_by_one_frame(ends: tuple[socket.socket, socket.socket]) -> None:
    stuff(ends[0])
    connection = Connection(ends[0], len(FRAME))
    connection.send(MESSAGE)
    assert connection.is_full


def test_half_a_frame_waits_for_its_rest(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    connection = Connection(ours, 1)
    assert list(connection.receive()) == [], "nothing has come"
    theirs.sendall(FRAME[:3])
    assert list(connection.receive()) == []
    theirs.sendall(FRAME[3:] + FRAME)
    assert list(connection.receive()) == [MESSAGE, MESSAGE]


def test_when_the_peer_has_left_both_ways_say_so(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    connection = Connection(ours, 1)
    theirs.close()
    with pytest.raises(ConnectionLost, match="closed by the gateway"):
        list(connection.receive())
    with pytest.raises(ConnectionLost):
        connection.send(MESSAGE)
