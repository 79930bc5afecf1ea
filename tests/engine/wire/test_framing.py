"""Bytes in, messages out: whole, in pieces, too long, or not ours at all."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.framing import FrameDecoder, FrameError, encode
from engine.wire.messages import Abort, ConfigureTeams, FromGateway, Submit
from tests.support.engine.simple_engine import submit, team

MESSAGES = [
    submit("a", prompt=300, output=7, seed=2**63 - 1, stop_token_ids=(1, 2)),
    Abort(request_id="ä\0"),
    ConfigureTeams(teams=(team(1), team(2, weight=4, start_level=1))),
]


def decoder(max_frame_bytes: int = 1 << 20) -> "FrameDecoder[FromGateway]":
    return FrameDecoder(FromGateway, max_frame_bytes)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_messages_survive_any_cutting(cuts: list[int]) -> None:
    stream = b"".join(encode(message) for message in MESSAGES)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    frames = decoder()
    got = [message for a, b in itertools.pairwise(edges) for message in frames.feed(stream[a:b])]
    assert got == MESSAGES


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x01\xc0",
        (20).to_bytes(4, "big") + msgspec.msgpack.encode({"type": "nobody", "x": 1}).ljust(20, b"\0"),
        encode(Abort(request_id="x"))[:-1] + b"\xff",
    ],
)
def test_garbage_is_a_frame_error(garbage: bytes) -> None:
    with pytest.raises(FrameError):
        list(decoder().feed(garbage))


def test_a_frame_too_long_is_refused_at_its_header() -> None:
    with pytest.raises(FrameError, match="says it has 101 bytes"):
        list(decoder(max_frame_bytes=100).feed((101).to_bytes(4, "big")))


def test_messages_before_the_garbage_are_delivered() -> None:
    got: list[object] = []
    with pytest.raises(FrameError):
        for message in decoder().feed(encode(MESSAGES[1]) + b"\xff" * 8):
            got.append(message)
    assert got == [MESSAGES[1]]


def test_an_unfinished_frame_waits() -> None:
    frames = decoder()
    frame = encode(MESSAGES[0])
    assert list(frames.feed(frame[:-1])) == []
    (message,) = frames.feed(frame[-1:])
    assert isinstance(message, Submit) and message == MESSAGES[0]
