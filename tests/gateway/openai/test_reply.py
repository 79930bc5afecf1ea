"""An answer on its way to a reader."""

import asyncio

import pytest
from starlette.types import Message

from gateway.errors import ClientGone
from gateway.openai.reply import Reply

pytestmark = pytest.mark.anyio


async def test_a_reader_that_takes_nothing_in_counts_as_gone() -> None:
    async def stuck(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    reply = Reply(stuck, send_timeout=0)
    await reply.start(200, {})
    with pytest.raises(ClientGone):
        await reply.send(b"x")
