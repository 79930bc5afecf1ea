"""Floods against a running server, from a process of their own.

It is started as `python -m tests.support.e2e.flood bodies|idle PORT ...`. A client that shared the test's
interpreter would slow down the very stream that the test measures.
"""

import asyncio
import contextlib
import json
import resource
import sys
import time
from typing import Any

NUM_PARTS = 230_000


def parts_body(model: str, num_parts: int = NUM_PARTS, num_bytes: int = 8 << 20) -> bytes:
    """A chat of one message whose content is `num_parts` text parts, filled up to nearly `num_bytes`."""
    part = '{"type":"text","text":"%s"}'
    head = f'{{"model":"{model}","max_tokens":1,"messages":[{{"role":"user","content":['
    tail = "]}]}"
    room = (num_bytes - len(head) - len(tail)) // num_parts - len(part % "") - 1
    assert room >= 1, "fewer parts, or a larger body"
    return (head + ",".join([part % ("a " * room)[:room]] * num_parts) + tail).encode()


async def _send(port: int, key: str, body: bytes) -> dict[str, Any]:
    """One body and what became of it."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode())
    writer.write(body)
    answer = await reader.read()
    writer.close()
    first, _, rest = answer.partition(b"\r\n")
    code = json.loads(rest.partition(b"\r\n\r\n")[2]).get("error", {}).get("code")
    return {"status": int(first.split()[1]), "code": code, "seconds": round(time.monotonic() - began, 3)}


async def _bodies(port: int, key: str, model: str, count: int) -> None:
    body = parts_body(model)
    print(json.dumps(await asyncio.gather(*(_send(port, key, body) for _ in range(count)))))


async def _idle(port: int, count: int) -> None:
    """Hold `count` connections that never say anything, until stdin ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    writers = []
    for _ in range(count):
        writers.append((await asyncio.open_connection("127.0.0.1", port))[1])
    print(len(writers), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for writer in writers:
        writer.close()
    for writer in writers:
        with contextlib.suppress(OSError):
            await writer.wait_closed()


if __name__ == "__main__":
    what, port = sys.argv[1], int(sys.argv[2])
    if what == "bodies":
        asyncio.run(_bodies(port, sys.argv[3], sys.argv[4], int(sys.argv[5])))
    else:
        asyncio.run(_idle(port, int(sys.argv[3])))
