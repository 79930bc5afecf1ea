"""The engine's process as its gateway starts it, watches it and stops it."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from engine.config import EngineConfig
from gateway.link import process as engine_process
from gateway.link.process import EngineProcess, EngineStartError, engine_config, named_by_source, socket_path_for
from gateway.settings.values import load


def test_what_the_engine_says_of_a_flag_names_its_source(tmp_path: Path) -> None:
    said = "--kv-memory of 10 bytes holds no block; raise it, not --host-kv-memory"
    assert named_by_source(said, load({}, {})) == said
    assert named_by_source(said, load({"kv_memory": "10"}, {"TERAZI_KV_MEMORY": "20"})) == said
    by_environment = named_by_source(said, load({}, {"TERAZI_KV_MEMORY": "10"}))
    assert by_environment == "TERAZI_KV_MEMORY of 10 bytes holds no block; raise it, not --host-kv-memory"
    path = tmp_path / "terazi.yaml"
    path.write_text("version: 1\nengine: {kv_memory: 10}\n")
    assert named_by_source(said, load({}, {}, path)).startswith(f"engine.kv_memory ({path}:2) of 10 bytes")


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
    swapping |= {"isolation": "strict", "step_time_max": "200ms", "prefill_chunk_time": "0.05s"}
    swapping |= {"step_log": "/tmp/s", "step_log_max_bytes": "8KiB"}
    config = engine_config(load({}, {f"TERAZI_{name.upper()}": value for name, value in swapping.items()}))
    assert (config.memory_preemption, config.swap_benefit, config.swap_min_run_steps) == ("reactive", 3, 5)
    assert (config.swap_link_percent, config.promotion_percent) == (70, 0)
    assert (config.isolation, config.step_time_max_us, config.prefill_chunk_us) == ("strict", 200_000, 50_000)
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
