"""The gateway with nothing faked behind it: an engine process on the simulated device, and the ledger in SQLite."""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from sqlalchemy import select

from engine.config import EngineConfig
from gateway.link.client import EngineClient
from gateway.listen.protocol import HttpProtocol
from gateway.openai.app import GatewayState, HttpSettings, public_app
from gateway.text.tokenizer import ModelTokenizer
from tenants import keys, migrate, tables, teams
from tenants.clock import wall_clock_us
from tenants.database import Database, sqlite_url
from tenants.leases import Leases
from tenants.ledger import Ledger
from tenants.pepper import Pepper
from tenants.snapshot import SnapshotHolder
from tests.support.gateway.harness import CHAT, PEPPER, WAIT, eventually, served

pytestmark = pytest.mark.anyio

MODEL = "tiny-random"
MESSAGES: Any = [{"role": "user", "content": "hello"}]


async def start_engine(
    directory: Path, module: str = "engine", kind: str = "sim", **settings: Any
) -> asyncio.subprocess.Process:
    """`python -m engine`, with the simulated runner unless told otherwise; returns once it listens."""
    config = EngineConfig(kind=kind, model=MODEL, cache_dir=str(directory), kv_memory_bytes=8 * 1024**2, **settings)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--socket", str(directory / "s"), "--parent-stdin"),
        *("--config", msgspec.json.encode(config).decode()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],  # where `tests` can be imported from
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 60)
    assert json.loads(line)["event"] == "listening"
    return process


async def tenant(database: Database, pepper: Pepper) -> str:
    """One silver team; returns its key."""
    async with database.begin_immediate() as connection:
        now = wall_clock_us()
        await teams.create_team(connection, "team-a", "silver", at_us=now, actor="test")
        _, key = await keys.create_key(connection, "team-a", pepper, at_us=now, actor="test")
    return key


async def hang_up(port: int, key: str, number: int) -> None:
    """One client that sends a request and leaves after a while of its own."""
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": number % 2 == 0, "max_tokens": 500}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    for _ in range(number * number):
        await asyncio.sleep(0)
    writer.transport.abort()


@pytest.mark.case("K40", "G29")
async def test_requests_departures_and_a_dead_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("e")
    url = sqlite_url(directory / "t.db")
    await migrate.upgrade(url)
    database = Database.open(url)
    holder = SnapshotHolder(database, PEPPER)
    key = await tenant(database, PEPPER)
    snapshot = await holder.reload()
    ledger = Ledger(database, directory / "journal")
    await ledger.start()
    process = await start_engine(directory)
    client = EngineClient(directory / "s")
    client.configure_teams(snapshot.team_terms())
    hello = await client.connect()
    state = GatewayState(
        snapshot_holder=holder,
        leases=Leases(),
        ledger=ledger,
        engine=client,
        tokenizer=ModelTokenizer.load(hello.model),
    )
    try:
        async with (
            served(public_app(state), HttpSettings(), HttpProtocol) as port,
            openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0) as sdk,
        ):
            plain = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3, seed=5)
            assert plain.usage is not None and plain.usage.completion_tokens == 3
            assert plain.choices[0].finish_reason == "length"
            stream = await sdk.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=3, seed=5, stream=True
            )
            text = "".join([c.choices[0].delta.content or "" async for c in stream])
            assert text == plain.choices[0].message.content

            await asyncio.gather(*(hang_up(port, key, number) for number in range(30)))
            await eventually(
                lambda: not state.leases.outstanding() and not client.num_streams and not ledger.num_open, pause=0.02
            )
            final = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
            assert final.usage is not None
            step = client.latest_step
            assert step is not None and step.num_waiting == 0
            assert step.num_free_blocks == hello.num_device_blocks, "every block is back"

            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                assert (await http.get("/readyz")).status_code == 200
                process.kill()
                await asyncio.wait_for(client.wait_closed(), WAIT)
                assert (await http.get("/readyz")).status_code == 503
            with pytest.raises(openai.InternalServerError, match="restarted"):
                await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await client.close()
        await ledger.stop()
    async with database.session() as connection:
        rows = (await connection.execute(select(tables.ledger))).mappings().all()
    await database.dispose()
    outcomes = Counter(row["outcome"] for row in rows)
    assert outcomes["ok"] == 3 and set(outcomes) <= {"ok", "client_closed"}
    assert all(row["team"] == "team-a" and row["tier"] == "silver" for row in rows)
    assert len({row["request_id"] for row in rows}) == len(rows)
