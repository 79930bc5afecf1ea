"""The supervisor: when an engine that died is started again, and who may end the server."""

import asyncio
from pathlib import Path

import pytest

from engine.config import EngineConfig
from gateway.link.lives import EngineLives
from gateway.link.process import EngineStartError
from gateway.link.supervisor import EngineFollower, EngineSupervisor
from tests.gateway.link.test_process import LISTEN, fake_engine


def test_the_supervisor_pauses_longer_after_each_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(tmp_path, monkeypatch, LISTEN + "sys.exit(3)")
    pauses: list[float] = []
    calls: list[str] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 9:
            raise asyncio.CancelledError

    async def connect() -> None:
        calls.append("connect")

    async def disconnect() -> None:
        calls.append("disconnect")

    lives = EngineLives(short_lives_max=100, pause_seconds_max=30)
    supervisor = EngineSupervisor(EngineConfig(), tmp_path / "e.sock", lives, connect, disconnect, pause=pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(supervisor.run())
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert calls == ["connect", "disconnect"] * 9
    assert lives.num_restarts == 8


def test_two_gateways_take_an_engine_from_each_other_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    lives = [1.0, 2.0, 61.0, 3.0]  # seconds of each connection
    pauses: list[float] = []
    clock = [0.0]

    async def connect() -> None: ...

    async def wait_closed() -> None:
        clock[0] += lives[len(pauses)]

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == len(lives):
            raise asyncio.CancelledError

    engine_lives = EngineLives(now=lambda: clock[0])
    follower = EngineFollower(engine_lives, connect, wait_closed, pause=pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follower.run())
    assert pauses == [0.5, 1.0, 0.5, 1.0]
    assert engine_lives.num_restarts == 4
    hints = ["one gateway at a time" in record.getMessage() for record in caplog.records]
    assert hints == [True, True, False, True]


def test_only_the_first_start_is_allowed_to_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(tmp_path, monkeypatch, "sys.exit('terazi-engine: no model')")

    async def nothing() -> None: ...

    with pytest.raises(EngineStartError, match="no model"):
        asyncio.run(EngineSupervisor(EngineConfig(), tmp_path / "e.sock", EngineLives(), nothing, nothing).run())

    marker = tmp_path / "ran"
    fails_later = f"p = pathlib.Path({str(marker)!r})\nif p.exists(): sys.exit('terazi-engine: gone')\np.touch()\n"
    fake_engine(tmp_path, monkeypatch, fails_later + LISTEN + "sys.exit(1)")
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    supervisor = EngineSupervisor(EngineConfig(), tmp_path / "e.sock", EngineLives(), nothing, nothing, pause=pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(supervisor.run())
