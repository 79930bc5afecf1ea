"""An engine that keeps ending: how the pauses grow, when the reason is shown, and what clients are told meanwhile."""

import asyncio
import logging
import sys
from pathlib import Path

import pytest

from engine.config import EngineConfig
from gateway.link import process as engine_process
from gateway.link.lives import REASON_CHARS_MAX, EngineLives
from gateway.link.supervisor import EngineFollower, EngineSupervisor
from gateway.metrics.families import GatewayMetrics
from gateway.settings.values import SettingsError, load
from tests.support.gateway.harness import Gateway, gateway

REASON = "exit code 1: RuntimeError: no kernel image"


class Clock:
    """Monotonic seconds, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def live(lives: EngineLives, clock: Clock, seconds: float, reason: str = REASON) -> float:
    """One life of the engine; the pause after it has passed when this returns, and the next start has begun."""
    lives.ready()
    clock.seconds += seconds
    pause = lives.ended(reason)
    clock.seconds += pause
    lives.starting()
    return pause


@pytest.mark.case("T10")
def test_after_the_bound_of_short_lives_each_pause_is_long() -> None:
    clock = Clock()
    lives = EngineLives(short_life_seconds=60, short_lives_max=4, pause_seconds_max=90, now=clock)
    assert [live(lives, clock, 60.0) for _ in range(3)] == [0.5, 1, 2]
    assert lives.failure is None, "not yet: one life fewer than the bound"
    assert [live(lives, clock, 0.0) for _ in range(20)] == [90] * 20
    assert lives.failure is not None
    assert (lives.failure.reason, lives.failure.short_lives) == (REASON, 23)


@pytest.mark.case("T10")
def test_a_life_longer_than_the_bound_forgets_the_short_ones() -> None:
    clock = Clock()
    lives = EngineLives(short_life_seconds=60, short_lives_max=2, pause_seconds_max=90, now=clock)
    live(lives, clock, 1.0)
    live(lives, clock, 1.0)
    lives.ready()
    clock.seconds += 60.0
    assert lives.failure is not None, "it has not lived longer than the bound"
    clock.seconds += 0.001
    assert lives.failure is None, "it runs, and has for long enough"
    assert lives.ended("signal 9") == 0.5
    assert lives.failure is None


@pytest.mark.case("T10")
def test_a_start_that_fails_is_a_short_life_however_long_it_took() -> None:
    clock = Clock()
    lives = EngineLives(short_lives_max=2, now=clock)
    for _ in range(2):
        lives.starting()
        clock.seconds += 600.0  # loading, and then no memory is left
        lives.ended("CUDA out of memory")
    assert lives.failure is not None
    assert lives.failure.next_start_seconds == 60.0


def test_the_pause_stays_a_number_after_many_failures() -> None:
    lives = EngineLives(short_lives_max=10**9, pause_seconds_max=86400)
    assert [lives.ended("x") for _ in range(5000)][-1] == 86400


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("two\nlines\r\x1b[31m", "two\\nlines\\r\\x1b[31m"),
        (f"a key trz-abcdefGHIJKL-{'x' * 49}", "a key trz-abcdefGHIJKL-***"),
        ("x" * 1000, "x" * (REASON_CHARS_MAX - 1) + "…"),
        ("", ""),
    ],
)
def test_a_reason_is_one_printable_line_without_secrets(said: str, shown: str) -> None:
    lives = EngineLives(short_lives_max=1)
    lives.ended(said)
    assert lives.failure is not None and lives.failure.reason == shown


@pytest.mark.case("T10")
def test_when_every_start_fails_the_supervisor_waits_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran = tmp_path / "ran"
    script = tmp_path / "fake.py"
    script.write_text(
        f"import json, pathlib, sys\nran = pathlib.Path({str(ran)!r})\n"
        "if ran.exists(): sys.exit('terazi-engine: the model file is gone')\nran.touch()\n"
        "print(json.dumps({'event': 'listening'}), flush=True)\nsys.exit('RuntimeError: the disk fails')\n"
    )
    monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, str(script)))
    pauses: list[float] = []

    async def nothing() -> None: ...

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 5:
            raise asyncio.CancelledError

    lives = EngineLives(short_lives_max=3, pause_seconds_max=45)
    supervisor = EngineSupervisor(EngineConfig(), tmp_path / "e.sock", lives, nothing, nothing, pause=pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(supervisor.run())
    assert pauses == [0.5, 1, 45, 45, 45]
    assert lives.failure is not None and lives.failure.reason == "the model file is gone"
    told = [record.getMessage() for record in caplog.records if "is failing" in record.getMessage()]
    assert len(told) == 3
    assert "3 lives in a row" in told[0] and "next start in 45.0 s" in told[0] and "the model file is gone" in told[0]
    assert "RuntimeError: the disk fails" in caplog.text, "the first life's own reason"


@pytest.mark.case("T10")
def test_a_connection_that_is_lost_again_and_again_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    pauses: list[float] = []

    async def nothing() -> None: ...

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    lives = EngineLives(short_lives_max=2, pause_seconds_max=30)
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        asyncio.run(EngineFollower(lives, nothing, nothing, pause=pause).run())
    assert pauses == [0.5, 30, 30]
    assert lives.failure is not None and "does another gateway use it?" in lives.failure.reason


def failing(g: Gateway, times: int) -> None:
    """The engine of this gateway has ended so many times at once."""
    g.state.engine_lives = EngineLives(short_lives_max=3, pause_seconds_max=60, now=g.clock.monotonic)
    for _ in range(times):
        g.state.engine_lives.ended(REASON)


@pytest.mark.anyio
@pytest.mark.case("T10")
@pytest.mark.parametrize(("times", "passed", "seconds"), [(1, 0.0, 2), (3, 0.0, 60), (3, 12.5, 48), (3, 90.0, 2)])
async def test_a_503_names_the_time_to_the_next_start(times: int, passed: float, seconds: int) -> None:
    async with gateway() as g:
        failing(g, times)
        g.engine.die()
        await g.state.engine.wait_closed()
        g.clock.advance(passed)
        refused = await g.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert refused.headers["retry-after"] == str(seconds)
        assert REASON not in refused.text, "the reason is the operator's"


@pytest.mark.anyio
@pytest.mark.case("T10")
async def test_the_reason_is_in_readyz_and_the_metrics() -> None:
    async with gateway() as g:
        metrics = GatewayMetrics(g.state, g.state.leases, g.ledger, clock=g.clock.monotonic)
        assert 'terazi_engine_failing{reason=""} 0.0' in metrics.render().decode()
        failing(g, 2)
        assert "engine_failure" not in (await g.http.get("/readyz")).json()
        failing(g, 3)
        g.engine.die()
        await g.state.engine.wait_closed()
        answer = await g.http.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["reasons"] == ["engine_unavailable"]
        assert answer.json()["engine_failure"] == {"reason": REASON, "short_lives": 3, "next_start_seconds": 60.0}
        assert f'terazi_engine_failing{{reason="{REASON}"}} 3.0' in metrics.render().decode()


def test_the_bounds_are_settings() -> None:
    names = ("engine_short_life", "engine_short_lives_max", "engine_restart_pause_max")
    assert [getattr(load({}, {}), name) for name in names] == [60.0, 5, 60.0]
    least = {"engine_short_life": "1s", "engine_short_lives_max": "1", "engine_restart_pause_max": "500ms"}
    load({}, {f"TERAZI_{name.upper()}": value for name, value in least.items()})
    for name, value in {"engine_short_life": "999ms", "engine_short_lives_max": "0"}.items():
        with pytest.raises(SettingsError, match="at least"):
            load({}, {f"TERAZI_{name.upper()}": value})
    with pytest.raises(SettingsError, match="at least"):
        load({}, {"TERAZI_ENGINE_RESTART_PAUSE_MAX": "499ms"})
