"""The worker's memory is bounded, and a body that needs more is refused."""

from pathlib import Path
from typing import Any

import pytest

from engine.wire.messages import Hello
from gateway.errors import RequestTooLarge
from gateway.prepare import worker as prepare_worker
from gateway.prepare.process import PrepareProcess
from tests.support.gateway.fake_engine import hello
from tests.support.gateway.harness import CHAT, TOKENIZER, WAIT

pytestmark = pytest.mark.anyio


async def test_when_a_body_takes_too_much_memory_then_it_is_a_413(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(*_: Any, **__: Any) -> None:
        raise MemoryError

    worker = prepare_worker.Worker()
    monkeypatch.setattr(prepare_worker, "prepare", hungry)
    monkeypatch.setattr(prepare_worker.ModelTokenizer, "load", lambda _: TOKENIZER)
    order = prepare_worker.Order(
        endpoint=CHAT, is_json=True, hello=hello(), default_max_tokens=1, num_bytes=2, seconds=1
    )
    refusal = worker.answer(order, b"{}").refusal
    assert refusal is not None and isinstance(refusal.error(), RequestTooLarge)


def of_process(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


async def test_when_memory_is_short_then_the_process_has_a_limit(greeting: Hello) -> None:
    process = PrepareProcess(memory_bytes=1 << 30, run_seconds=WAIT, idle_seconds=WAIT)
    await process.call(CHAT, b"{}", is_json=True, hello=greeting, default_max_tokens=1)
    assert process.pid is not None
    limits = of_process(process.pid, "limits")
    assert f"{1 << 30}" in next(line for line in limits.splitlines() if line.startswith("Max data size"))
    await process.stop()
