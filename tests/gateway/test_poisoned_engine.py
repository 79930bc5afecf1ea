"""Over HTTP, with a real engine process on a real model: a request that raises in the engine is answered alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from gateway.link.client import EngineClient
from gateway.listen.protocol import HttpProtocol
from gateway.openai.app import GatewayState, HttpSettings, public_app
from gateway.text.tokenizer import ModelTokenizer
from tenants import migrate, tables
from tenants.database import Database, sqlite_url
from tenants.leases import Leases
from tenants.ledger import Ledger
from tenants.snapshot import SnapshotHolder
from tests.gateway.test_real_engine import MODEL, start_engine, tenant
from tests.support.engine.poison import POISON_SEED
from tests.support.engine.poisoned_engine import POISON_PROMPT
from tests.support.gateway.harness import PEPPER, TEXT, served

pytestmark = pytest.mark.anyio

CONFIG: dict[str, Any] = {
    "kind": "torch",
    "dtype": "float32",
    "num_threads": 1,
    "host_kv_memory_bytes": 0,
    "max_batch_size": 8,
    "max_batch_tokens": 128,
}


@dataclass
class Rig:
    http: httpx.AsyncClient
    process: asyncio.subprocess.Process
    client: EngineClient
    database: Database
    ledger: Ledger
    durations_us: list[int] = field(default_factory=list)

    async def post(self, **fields: Any) -> httpx.Response:
        return await self.http.post(TEXT, json={"model": MODEL, "prompt": [9, 8, 7], "max_tokens": 12, **fields})


@asynccontextmanager
async def rig(directory: Path) -> AsyncIterator[Rig]:
    await migrate.upgrade(sqlite_url(directory / "t.db"))
    database = Database.open(sqlite_url(directory / "t.db"))
    holder = SnapshotHolder(database, PEPPER)
    key = await tenant(database, PEPPER)
    snapshot = await holder.reload()
    ledger = Ledger(database, directory / "journal")
    await ledger.start()
    process = await start_engine(directory, module="tests.support.engine.poisoned_engine", **CONFIG)
    client = EngineClient(directory / "s")
    client.configure_teams(snapshot.team_terms())
    hello = await client.connect()
    tokenizer = ModelTokenizer.load(hello.model)
    state = GatewayState(snapshot_holder=holder, leases=Leases(), ledger=ledger, engine=client, tokenizer=tokenizer)
    try:
        async with (
            served(public_app(state), HttpSettings(), HttpProtocol) as port,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {key}"}, timeout=60
            ) as http,
        ):
            made = Rig(http, process, client, database, ledger)
            note = client._note_step
            client._note_step = lambda step: (made.durations_us.append(step.duration_us), note(step))  # type: ignore
            yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await client.close()
        await ledger.stop()
        await database.dispose()


@pytest.mark.case("T01")
async def test_a_request_that_raises_is_a_500_and_no_other_notices(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with rig(tmp_path_factory.mktemp("p")) as r:
        good: list[dict[str, Any]] = [
            {"prompt": [20 + i] * (5 + 9 * i), "temperature": i % 2, "seed": i, "ignore_eos": True} for i in range(5)
        ]
        tiny: list[dict[str, Any]] = [{"temperature": t, "ignore_eos": True} for t in (0, 1e-46, 5e-324)]
        bad: list[dict[str, Any]] = [
            {"prompt": [40, *POISON_PROMPT, 41]},
            {"prompt": [44] * 30, "seed": POISON_SEED, "temperature": 0.5},
        ]
        alone = [(await r.post(**fields)).json()["choices"][0]["text"] for fields in (*good, *tiny)]
        assert alone[5] == alone[6] == alone[7], "a tiny temperature is answered as 0"
        for fields in bad:
            assert (await r.post(**fields)).status_code == 500, "also when nobody else is there"

        answers = await asyncio.gather(*(r.post(**fields) for fields in (*good, bad[0], *tiny, bad[1])))
        failed = [answers[5], answers[9]]
        assert [answer.status_code for answer in failed] == [500, 500]
        for answer, kind in zip(failed, ("IndexError", "ZeroDivisionError"), strict=True):
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("engine_error", "server_error") and kind in error["message"]
            assert "retry-after" not in answer.headers
        others = [*answers[:5], *answers[6:9]]
        assert [answer.status_code for answer in others] == [200] * 8
        assert [answer.json()["choices"][0]["text"] for answer in others] == alone

        assert r.process.returncode is None and r.client.is_ready, "the engine has noticed nothing worse"
        await r.ledger.flush()
        async with r.database.session() as connection:
            rows = (await connection.execute(select(tables.ledger))).mappings().all()
        assert len(rows) == 20 and sum(row["outcome"] == "error" for row in rows) == 4
        assert all(
            row["error_code"] == "engine_error" and row["device_us"] > 0 for row in rows if row["outcome"] != "ok"
        )
        assert sum(row["device_us"] for row in rows) == sum(r.durations_us), "all time is charged, to somebody"
