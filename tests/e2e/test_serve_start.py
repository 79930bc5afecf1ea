"""How `terazi serve` starts, and what it says when it cannot."""

import fcntl
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.models.tiny import write_tiny_model
from tests.support.e2e.clients import client_of
from tests.support.e2e.server import Server, wait_until

MakeServer = Callable[..., Server]


def one_line(done: Any) -> str:
    """The one line a failed command may print."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return str(lines[0])


def test_a_second_server_on_the_same_data_directory_is_refused(running: Server) -> None:
    done = running.terazi("serve", "--engine", "sim", "--model", "tiny-random", "--port", "0", "--admin-port", "0")
    assert done.returncode == 6
    assert f"in use by process {running.info['pid']}" in one_line(done)
    assert running.readyz() == 200
    assert running.terazi("db", "upgrade").returncode == 6


@pytest.mark.case("T08")
def test_when_the_store_is_shared_the_second_server_is_refused(running: Server, make_server: MakeServer) -> None:
    """With a data directory of its own; commands that would write are refused too, and reports are not."""
    url = f"sqlite+aiosqlite:///{running.data_dir / 'terazi.db'}"
    other = make_server("other")
    other.environment["TERAZI_STORE_URL"] = url
    for command in ("serve --engine sim --model tiny-random --port 0 --admin-port 0", "team create x", "db upgrade"):
        done = other.terazi(*command.split())
        assert done.returncode == 6
        assert f"in use by the gateway at {running.url} " in one_line(done)
    assert other.terazi("usage", "report").returncode == 0
    assert running.readyz() == 200


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_taken_port_is_one_clear_line(make_server: MakeServer, flag: str) -> None:
    server = make_server()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"--port": "0", "--admin-port": "0", flag: str(taken.getsockname()[1])}
        options = [part for pair in ports.items() for part in pair]
        done = server.terazi("serve", "--engine", "sim", "--model", "tiny-random", *options)
    assert done.returncode == 1
    assert f"127.0.0.1:{ports[flag]}: the port is taken" in one_line(done)


def test_a_data_directory_that_cannot_be_written_is_one_clear_line(make_server: MakeServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = make_server().terazi("serve", "--engine", "sim", "--data-dir", str(tmp_path / "file" / "data"))
    assert done.returncode == 1
    assert "cannot write to the data directory" in one_line(done)


def test_a_model_that_is_not_there_is_one_clear_line(make_server: MakeServer) -> None:
    ports = ["--port", "0", "--admin-port", "0"]
    done = make_server().terazi("serve", "--engine", "sim", "--model", "/nowhere/model", *ports)
    assert done.returncode == 1
    assert "/nowhere/model" in one_line(done)


@pytest.mark.case("H20")
def test_when_the_chat_template_does_not_parse_then_one_line(make_server: MakeServer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_model(model)
    (model / "chat_template.jinja").write_text("{{ bos_token }}\n{% for message in messages %}\n{% oops %}")
    options = ["--engine", "sim", "--model", str(model), "--port", "0", "--admin-port", "0"]
    done = make_server().terazi("serve", *options)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("terazi: ")]
    assert len(said) == 1 and "Traceback" not in done.stderr
    assert f"{model / 'chat_template.jinja'}, line 3: Encountered unknown tag 'oops'" in said[0]


@pytest.mark.case("D11")
def test_a_typo_in_the_config_stops_the_start(make_server: MakeServer, tmp_path: Path) -> None:
    config = tmp_path / "terazi.yaml"
    config.write_text("engine:\n  max_batch_sise: 4\n")
    done = make_server().terazi("serve", "--config", str(config))
    assert done.returncode == 2
    assert f"{config}:2: unknown key engine.max_batch_sise; did you mean engine.max_batch_size?" in one_line(done)


@pytest.mark.case("D12")
def test_alive_at_once_and_ready_only_with_the_engine(make_server: MakeServer) -> None:
    server = make_server()
    run = server.data_dir / "run"
    run.mkdir(parents=True)
    # The engine's address is held, as by the engine of a server that was just killed: ours waits for it.
    with (run / "engine.sock.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        server.start(until="listening")
        key = server.make_key()
        assert httpx.get(f"{server.url}/livez").status_code == 200
        assert httpx.head(f"{server.url}/livez").status_code == 200
        assert httpx.get(f"{server.url}/readyz").status_code == 503
        assert httpx.get(f"{server.info['admin_url']}/readyz").json()["reasons"] == ["starting"]
        body = {"model": "tiny-random", "prompt": "x", "max_tokens": 1}
        refused = httpx.post(f"{server.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "starting"
        assert int(refused.headers["retry-after"]) >= 1
    wait_until(lambda: server.readyz() == 200, "ready after the engine's start")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_engine_is_there_ends_the_server_with_0(make_server: MakeServer, number: int) -> None:
    server = make_server()
    run = server.data_dir / "run"
    run.mkdir(parents=True)
    with (run / "engine.sock.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        server.start(until="listening")
        os.kill(server.info["pid"], number)
        assert server.wait() == 0
    assert "Traceback" not in server.log


@pytest.mark.parametrize("name", ["terazi.db", "pepper"])
def test_a_damaged_file_is_one_clear_line(make_server: MakeServer, name: str) -> None:
    server = make_server()
    server.json("db", "upgrade")
    (server.data_dir / name).write_bytes(b"this is not what was here before\n" * 200)
    (server.data_dir / f"{name}-wal").unlink(missing_ok=True)
    done = server.terazi("serve", "--engine", "sim", "--model", "tiny-random", "--port", "0", "--admin-port", "0")
    assert done.returncode == 1
    assert name in one_line(done)


def test_a_long_data_directory_and_folders_named_like_ours_do_no_harm(make_server: MakeServer, tmp_path: Path) -> None:
    for name in ("engine", "gateway", "tenants"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong folder')")
    server = make_server("d" * 120).start()
    key = server.make_key()
    assert [model.id for model in client_of(server, key).models.list()] == ["tiny-random"]
    assert server.stop() == 0
