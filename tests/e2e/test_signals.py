"""Signals that end a process which does not ask for them must not end a server, nor its engine."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gateway.demo.server_process import ServerProcess
from tests.support.e2e.clients import Stream, ledger_rows, long_body
from tests.support.e2e.server import Server, wait_until

MakeServer = Callable[..., Server]


@pytest.mark.case("H27")
def test_when_hung_up_on_streams_and_the_queue_go_on(make_server: MakeServer) -> None:
    server = make_server().start("--max-batch-size", "1", "--policy", "fcfs")
    key = server.make_key()
    stream = Stream(server, key, long_body(250))
    answers: list[int] = []

    def ask() -> None:
        body = {"model": "tiny-random", "prompt": "x", "max_tokens": 2}
        headers = {"authorization": f"Bearer {key}"}
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).status_code)

    queued = [threading.Thread(target=ask) for _ in range(5)]
    for thread in queued:
        thread.start()
    wait_until(lambda: server.status()["requests_open"] == 6, "five requests beside the stream")
    engine_pid = server.status()["engine"]["pid"]
    assert server.process is not None
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        os.kill(engine_pid, number)
        os.kill(server.process.pid, number)
    wait_until(lambda: all(name in server.log for name in ("SIGHUP", "SIGUSR1", "SIGUSR2")), "a line for each signal")
    assert stream.events()[-1] == "[DONE]"
    for thread in queued:
        thread.join(60)
    assert answers == [200] * 5
    assert server.status()["engine"]["pid"] == engine_pid
    assert server.status()["engine_restarts"] == 0
    assert server.stop() == 0
    assert [row["outcome"] for row in ledger_rows(server)] == ["ok"] * 6


@pytest.mark.case("H27")
def test_sigquit_prints_where_each_thread_stands(running: Server) -> None:
    assert running.process is not None
    os.kill(running.process.pid, signal.SIGQUIT)
    wait_until(lambda: "most recent call first" in running.log, "the stacks")
    os.kill(running.status()["engine"]["pid"], signal.SIGQUIT)
    wait_until(lambda: "engine/process/loop.py" in running.log, "the engine's stacks, in the gateway's log")
    assert running.readyz() == 200


@pytest.mark.case("H27")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_demo_that_is_ended_takes_its_server_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(ServerProcess, "_wait_ready", lambda self: None)
    before = signal.getsignal(number)
    server = ServerProcess(tmp_path / "data", ["--engine", "sim", "--model", "tiny-random"])
    with pytest.raises(SystemExit) as end, server:
        signal.raise_signal(number)
    assert end.value.code == 128 + number
    assert server.stop() is not None, "the server has ended"
    assert signal.getsignal(number) is before
