"""The process that prepares large bodies: it dies, hangs, cannot start, or is idle, and others are served."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.wire.messages import Hello, ModelInfo
from gateway.prepare.process import PrepareProcess, WorkerLost
from tenants.quotas import Limits
from tests.gateway.prepare.test_preparation import LARGE, PROCESS_ABOVE, pid_of, settings
from tests.support.gateway.fake_engine import hello
from tests.support.gateway.harness import CHAT, WAIT, eventually, gateway

pytestmark = pytest.mark.anyio


@pytest.mark.case("T03")
async def test_when_the_process_dies_then_one_request_gets_a_503(greeting: Hello) -> None:
    async with gateway(settings=settings(), greeting=greeting, limits=Limits(requests_per_minute=2)) as g:
        g.engine.script = g.engine.saying("ok")
        assert (await g.chat(LARGE)).status_code == 200
        os.kill(pid_of(g), signal.SIGSTOP)
        large = asyncio.create_task(g.chat(LARGE))
        await eventually(lambda: g.state.preparation.large.held > PROCESS_ABOVE)
        os.kill(pid_of(g), signal.SIGKILL)
        lost = await large
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "preparation_failed")
        assert int(lost.headers["retry-after"]) >= 1 and g.outstanding() == 0
        again = await g.chat(LARGE)
        assert again.status_code == 200, "another one has started, and our failure was no request of the minute"
        assert g.state.preparation.process.num_starts == 2


async def test_when_an_order_takes_too_long_then_the_process_ends(greeting: Hello) -> None:
    process = PrepareProcess(memory_bytes=1 << 30, run_seconds=0, idle_seconds=WAIT)
    with pytest.raises(WorkerLost, match="longer than 0 s"):
        await process.call(CHAT, b"{}", is_json=True, hello=greeting, default_max_tokens=1)
    await process.stop()
    assert process.pid is None


async def test_when_a_model_cannot_be_loaded_then_the_log_says_why(
    greeting: Hello, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = hello(model=ModelInfo(**{**_fields(greeting.model), "path": str(tmp_path)}))
    async with gateway(settings=settings(), greeting=gone) as g:
        assert (await g.chat(LARGE)).json()["error"]["code"] == "preparation_failed"
        await eventually(lambda: "FileNotFoundError" in caplog.text)


def _fields(info: ModelInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in ModelInfo.__struct_fields__}


@pytest.mark.case("T03", "T12")
async def test_when_the_process_is_idle_then_it_ends(greeting: Hello) -> None:
    async with gateway(settings=settings(prepare_idle_seconds=0.0), greeting=greeting) as g:
        g.engine.script = g.engine.saying("ok")
        assert (await g.chat(LARGE)).status_code == 200
        process = g.state.preparation.process
        await eventually(lambda: process.pid is None and not process._tasks)
        assert (await g.chat(LARGE)).status_code == 200 and process.num_starts == 2
