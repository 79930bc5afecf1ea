"""Request bodies: sizes, encodings, content types; the limit holds for what was sent and for what it becomes."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from gateway.errors import BadRequest, BodyTimeout, ClientGone, RequestTooLarge, UnsupportedMediaType
from gateway.listen.body import check_media_type, read_body
from gateway.openai.app import HttpSettings
from tests.support.gateway.harness import CHAT, chat_body, gateway

pytestmark = pytest.mark.anyio

LIMIT = 1000
BODY = json.dumps(chat_body()).encode()


class Sender:
    """An ASGI receive that hands out parts and counts how many were taken."""

    def __init__(self, *parts: bytes, leaves: bool = False) -> None:
        self.messages: list[Message] = [
            {"type": "http.request", "body": part, "more_body": leaves or i < len(parts) - 1}
            for i, part in enumerate(parts)
        ]
        if leaves:
            self.messages.append({"type": "http.disconnect"})
        self.num_taken = 0

    async def __call__(self) -> Message:
        self.num_taken += 1
        return self.messages.pop(0)


async def read(sender: Sender, **headers: str) -> bytes:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return await read_body(sender, names, max_bytes=LIMIT, timeout_seconds=60)


async def test_parts_are_joined_up_to_the_limit() -> None:
    assert await read(Sender(b"ab", b"", b"cd")) == b"abcd"
    assert len(await read(Sender(b"x" * 400, b"x" * 600))) == LIMIT


@pytest.mark.case("S13")
async def test_one_byte_too_many_ends_the_reading() -> None:
    sender = Sender(*[b"x" * 501] * 5)
    with pytest.raises(RequestTooLarge):
        await read(sender)
    assert sender.num_taken == 2
    announced = Sender(b"x")
    with pytest.raises(RequestTooLarge):
        await read(announced, content_length="1001")
    assert announced.num_taken == 0


@pytest.mark.case("A21")
async def test_gzip_is_unpacked_also_in_parts_and_members() -> None:
    packed = gzip.compress(b"hello ") + gzip.compress(b"world")
    parts = [packed[i : i + 3] for i in range(0, len(packed), 3)]
    assert await read(Sender(*parts), content_encoding="GZIP") == b"hello world"
    assert await read(Sender(b""), content_encoding="gzip") == b""


@pytest.mark.case("A21", "S13")
async def test_a_bomb_is_stopped_at_the_first_byte_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[int] = []
    real = zlib.decompressobj

    class Counting:
        def __init__(self, window: int) -> None:
            self._inner = real(window)

        def decompress(self, data: bytes, limit: int) -> bytes:
            part = self._inner.decompress(data, limit)
            unpacked.append(len(part))
            return part

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    monkeypatch.setattr("gateway.listen.body.zlib.decompressobj", Counting)
    with pytest.raises(RequestTooLarge):
        await read(Sender(gzip.compress(bytes(10_000_000))), content_encoding="gzip")
    assert sum(unpacked) == LIMIT + 1


async def test_packed_bytes_count_too() -> None:
    empties = gzip.compress(b"") * 100
    with pytest.raises(RequestTooLarge):
        await read(Sender(empties), content_encoding="gzip")


@pytest.mark.parametrize(
    "data",
    [b"no gzip", gzip.compress(b"cut", mtime=0)[:-4], gzip.compress(b"x", mtime=0) + b"tail"],
    ids=["none", "cut", "tail"],
)
async def test_damaged_gzip_is_a_400(data: bytes) -> None:
    with pytest.raises(BadRequest, match="not valid gzip"):
        await read(Sender(data), content_encoding="gzip")


async def test_a_client_that_leaves_in_its_body_is_gone() -> None:
    with pytest.raises(ClientGone):
        await read(Sender(b"half", leaves=True))


@pytest.mark.case("S13")
async def test_a_body_that_never_comes_times_out() -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(BodyTimeout):
        await read_body(never, {}, max_bytes=LIMIT, timeout_seconds=0)


@pytest.mark.case("A20")
@pytest.mark.parametrize(
    ("content_type", "is_json"),
    [
        ("application/json", True),
        ("application/json; charset=UTF-8", True),
        ('Application/JSON;charset="utf-8"', True),
        ("application/vnd.api+json", True),
        ("application/x-www-form-urlencoded", False),
        ("", False),
    ],
)
def test_content_types_that_are_read(content_type: str, is_json: bool) -> None:
    assert check_media_type({"content-type": content_type}) is is_json


@pytest.mark.case("A20", "A21")
@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "text/plain"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-encoding": "zstd"},
        {"content-encoding": "gzip, gzip"},
        {"content-encoding": "br"},
    ],
)
def test_what_is_not_read_is_a_415_that_says_what_is(headers: dict[str, str]) -> None:
    with pytest.raises(UnsupportedMediaType) as caught:
        check_media_type(headers)
    assert "application/json" in caught.value.message or "gzip" in caught.value.message


@pytest.mark.case("A20")
async def test_without_a_content_type_curl_works_or_is_helped() -> None:
    async with gateway() as g:
        g.engine.script = g.engine.saying("ok")
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert (await g.post(CHAT, content=BODY, headers=form)).status_code == 200
        refused = await g.post(CHAT, content=b"model=x", headers=form)
        assert refused.status_code == 415
        assert "'Content-Type: application/json'" in refused.json()["error"]["message"]


@pytest.mark.case("A21")
async def test_gzip_and_chunks_over_tcp() -> None:
    async with gateway(tcp=True, settings=HttpSettings(max_body_bytes=LIMIT)) as g:
        g.engine.script = g.engine.saying("ok")
        packed = await g.post(CHAT, content=gzip.compress(BODY), headers={"content-encoding": "gzip"})
        assert packed.status_code == 200

        async def parts(size: int) -> AsyncIterator[bytes]:
            for at in range(0, size, 100):
                yield BODY.ljust(size)[at : at + 100]

        assert (await g.post(CHAT, content=parts(900))).status_code == 200
        too_large = await g.post(CHAT, content=parts(1100))
        assert too_large.status_code == 413
        bomb = await g.post(CHAT, content=gzip.compress(bytes(10**6))[:1000], headers={"content-encoding": "gzip"})
        assert bomb.status_code == 413
        assert g.outstanding() == 0


@pytest.mark.case("T03")
async def test_when_gzip_is_unpacked_then_the_loop_goes_on() -> None:
    """8 MB in one part of some kilobytes: others get a turn between slices, and not one byte is lost."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    plain = b"abcdefg" * 1_200_000
    packed = gzip.compress(plain, mtime=0)
    body = await read_body(Sender(packed), {"content-encoding": "gzip"}, max_bytes=len(plain), timeout_seconds=60)
    task.cancel()
    assert body == plain and turns >= len(plain) // (128 * 1024)


@pytest.mark.parametrize("size", [128 * 1024 - 1, 128 * 1024, 128 * 1024 + 1, 256 * 1024, 131_072 + 258])
async def test_gzip_slices_lose_nothing_at_their_edges(size: int) -> None:
    plain = bytes(size)
    packed = gzip.compress(plain, mtime=0) + gzip.compress(b"end", mtime=0)
    parts = [packed[:100], packed[100:-30], packed[-30:]]
    assert (
        await read_body(Sender(*parts), {"content-encoding": "gzip"}, max_bytes=size + 3, timeout_seconds=60)
        == plain + b"end"
    )
