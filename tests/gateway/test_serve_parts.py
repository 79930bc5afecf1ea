"""Pieces of serve that need no subprocess: listeners, the engine's process and its supervisor, logs, metrics."""

import asyncio
import io
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from gateway import logs
from gateway.link import process as engine_process
from gateway.link.lives import EngineLives
from gateway.link.process import EngineProcess, EngineStartError, engine_config, named_by_source, socket_path_for
from gateway.link.supervisor import EngineFollower, EngineSupervisor
from gateway.listen.listeners import ListenError, bind, make_server, url_of
from gateway.settings.values import load
from tests.support.gateway.harness import WAIT, FakeClock, clocked, eventually


def test_what_the_engine_says_of_a_flag_names_its_source(tmp_path: Path) -> None:
    said = "--kv-memory of 10 bytes holds no block; raise it, not --host-kv-memory"
    assert named_by_source(said, load({}, {})) == said
    assert named_by_source(said, load({"kv_memory": "10"}, {"TERAZI_KV_MEMORY": "20"})) == said
    by_environment = named_by_source(said, load({}, {"TERAZI_KV_MEMORY": "10"}))
    assert by_environment == "TERAZI_KV_MEMORY of 10 bytes holds no block; raise it, not --host-kv-memory"
    path = tmp_path / "terazi.yaml"
    path.write_text("version: 1\nengine: {kv_memory: 10}\n")
    assert named_by_source(said, load({}, {}, path)).startswith(f"engine.kv_memory ({path}:2) of 10 bytes")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.case("D14")
def test_localhost_is_both_loopback_addresses_on_one_port() -> None:
    listeners = bind("localhost", 0)
    try:
        addresses = [listener.getsockname()[:2] for listener in listeners]
        assert addresses[0][0] == "127.0.0.1"
        assert [host for host, _ in addresses[1:]] in (["::1"], [])
        assert len({port for _, port in addresses}) == 1
        assert url_of(listeners, "localhost") == f"http://localhost:{addresses[0][1]}"
    finally:
        for listener in listeners:
            listener.close()


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "http://127.0.0.1:"), ("127.0.0.1", "http://127.0.0.1:")])
def test_urls_are_such_that_a_client_here_can_use_them(host: str, shown: str) -> None:
    (listener,) = bind(host, 0)
    with listener:
        assert url_of([listener], host).startswith(shown)
        assert url_of([listener], "::1").startswith("http://[::1]:")


def test_a_taken_port_and_a_foreign_address_are_named(free_port: int) -> None:
    (listener,) = bind("127.0.0.1", free_port)
    with listener:
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{free_port}: the port is taken"):
                bind(host, free_port)
    with pytest.raises(ListenError, match=r"cannot listen on 192\.0\.2\.1:"):
        bind("192.0.2.1", 0)
    with pytest.raises(ListenError, match="cannot listen on no such host:"):
        bind("no such host", 0)


def test_localhost_on_a_port_that_only_ipv6_has_taken_is_refused(free_port: int) -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    (listener,) = bind("::1", free_port)
    with listener, pytest.raises(ListenError, match=r"\[::1\]:"):
        bind("localhost", free_port)


@pytest.mark.case("D09")
def test_the_server_keeps_an_idle_connection_as_long_as_set() -> None:
    """The real server with the default settings, its connection's timers on a clock that is moved."""
    settings = load({}, {})
    assert settings.keep_alive_timeout > 60, "clients' pools keep connections for up to 60 s"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def use_twice_and_idle() -> None:
        clock = FakeClock()
        server = make_server(app, keep_alive_timeout=settings.keep_alive_timeout, drain_timeout=settings.drain_timeout)
        assert (server.config.timeout_graceful_shutdown or 0) > settings.drain_timeout
        server.config.http = clocked(server.config.http, clock)
        listeners = bind("127.0.0.1", 0)
        serving = asyncio.create_task(server.serve(listeners))
        await eventually(lambda: server.started)
        reader, writer = await asyncio.open_connection(*listeners[0].getsockname()[:2])
        for seconds in (0, settings.keep_alive_timeout - 1):
            clock.advance(seconds)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(WAIT):
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK")
        clock.advance(settings.keep_alive_timeout)
        await eventually(reader.at_eof)
        writer.close()
        server.should_exit = True
        await serving
        for listener in listeners:
            listener.close()

    asyncio.run(use_twice_and_idle())


def test_socket_paths_stay_short_and_the_same_at_each_start(tmp_path: Path) -> None:
    short = Path("/tmp") / f"t{os.getpid()}"
    assert socket_path_for(short) == short / "run" / "engine.sock"
    (short / "run").rmdir()
    short.rmdir()
    long = tmp_path / ("d" * 100)
    path = socket_path_for(long)
    assert len(os.fsencode(path)) <= engine_process.MAX_SOCKET_PATH_BYTES
    assert path == socket_path_for(long)
    assert path != socket_path_for(tmp_path / ("e" * 100))
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_engine_gets_its_own_part_of_the_settings() -> None:
    flags = {"kv_memory": "64MiB", "max_batch_size": "3", "engine": "sim", "policy": "fcfs", "model": "m"}
    config = engine_config(load(flags, {}))
    assert (config.kind, config.policy, config.model) == ("sim", "fcfs", "m")
    assert (config.kv_memory_bytes, config.max_batch_size) == (64 << 20, 3)
    swapping = {"memory_preemption": "reactive", "swap_benefit": "3", "swap_min_run_steps": "5"}
    swapping |= {"swap_link_percent": "70", "promotion_percent": "0", "kv_canary": "true"}
    swapping |= {"step_log": "/tmp/s", "step_log_max_bytes": "8KiB"}
    config = engine_config(load({}, {f"TERAZI_{name.upper()}": value for name, value in swapping.items()}))
    assert (config.memory_preemption, config.swap_benefit, config.swap_min_run_steps) == ("reactive", 3, 5)
    assert (config.swap_link_percent, config.promotion_percent) == (70, 0)
    assert (config.step_log, config.step_log_max_bytes, config.kv_canary) == ("/tmp/s", 8192, True)
    default = engine_config(load({}, {}))
    assert default == EngineConfig(), "the settings' defaults are the engine's own"


def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Make `python -m engine` run this script instead."""
    script = tmp_path / "fake.py"
    script.write_text(f"import sys, os, time, json, pathlib\n{body}\n")
    monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, str(script)))


LISTEN = "print(json.dumps({'event': 'listening'}), flush=True)\n"


def test_an_engine_that_does_not_start_gives_its_own_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(tmp_path, monkeypatch, "sys.exit('noise\\nterazi-engine: no such model: x')")
    with pytest.raises(EngineStartError, match=r"^no such model: x$"):
        asyncio.run(EngineProcess(EngineConfig(), tmp_path / "e.sock").start())
    fake_engine(tmp_path, monkeypatch, "os.kill(os.getpid(), 9)")
    with pytest.raises(EngineStartError, match="ended with signal 9"):
        asyncio.run(EngineProcess(EngineConfig(), tmp_path / "e.sock").start())


def test_when_no_process_can_be_made_the_start_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "COMMAND", (str(tmp_path / "no such program"),))
    with pytest.raises(EngineStartError, match="cannot be started: No such file"):
        asyncio.run(EngineProcess(EngineConfig(), tmp_path / "e.sock").start())


@pytest.mark.case("T10")
@pytest.mark.parametrize(
    ("stderr", "end"),
    [
        ("engine: connection closed: x", "exit code 3"),
        ("Traceback (most recent call last):\n  File x\nValueError: bad", "exit code 3: ValueError: bad"),
        ("RuntimeError: no kernel\nengine: connection closed: x", "exit code 3: RuntimeError: no kernel"),
        ("terazi-engine: the disk is full\nnoise", "exit code 3: the disk is full"),
    ],
)
def test_an_end_is_told_with_the_engines_last_error_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, end: str
) -> None:
    fake_engine(tmp_path, monkeypatch, LISTEN + f"print({stderr!r}, file=sys.stderr)\nsys.exit(3)")

    async def run() -> str:
        process = EngineProcess(EngineConfig(), tmp_path / "e.sock")
        await process.start()
        return process.describe_end(await process.wait())

    assert asyncio.run(run()) == end


def test_stop_closes_stdin_first_and_kills_one_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(grace: float) -> int:
        process = EngineProcess(EngineConfig(), tmp_path / "e.sock")
        await process.start()
        await process.stop(grace)
        return await process.wait()

    fake_engine(tmp_path, monkeypatch, LISTEN + "sys.stdin.read()\nsys.exit(7)")
    assert asyncio.run(run(30.0)) == 7
    fake_engine(tmp_path, monkeypatch, LISTEN + "time.sleep(600)")
    assert asyncio.run(run(0.01)) == -9


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


@pytest.mark.case("S12")
@pytest.mark.parametrize("formatter", [logs.JsonFormatter(), logs.TextFormatter()])
def test_log_lines_lose_keys_and_tokens_wherever_they_stand(formatter: logging.Formatter) -> None:
    secret = "A1b2" * 12
    key, token = f"trz-abcdefGHIJKL-{secret}", f"trza-{secret}"
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("terazi.test")
    logger.addHandler(handler)
    logger.info("message %s", key, extra={"field": f"Bearer {token}"})
    try:
        raise ValueError(f"inside {key}")
    except ValueError:
        logger.exception("failed")
    text = stream.getvalue()
    assert secret not in text
    assert "A1b2A1b2" not in text
    assert text.count("trz-abcdefGHIJKL-***") == 2


def test_json_lines_are_one_object_each_with_their_fields() -> None:
    record = logging.makeLogRecord({"name": "terazi.x", "levelname": "INFO", "msg": "a\nb", "team": "search"})
    entry = json.loads(logs.JsonFormatter().format(record))
    assert (entry["logger"], entry["level"], entry["message"], entry["team"]) == ("terazi.x", "info", "a\nb", "search")
    assert "\n" not in logs.JsonFormatter().format(record)
