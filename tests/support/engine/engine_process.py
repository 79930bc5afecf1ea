"""The engine process with the simulated runner, and the smallest gateway that can talk to it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.wire.framing import FrameDecoder, encode
from engine.wire.messages import Abort, ConfigureTeams, FromEngine, Hello, StepDone, Submit
from tests.support.engine.simple_engine import team

TEAMS = ConfigureTeams(teams=(team(1), team(2)))
END_SECONDS = 20  # how long the end of a process is waited for before the test fails


class Gateway:
    """A gateway's end of the socket, as small as can be."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(END_SECONDS)
        self.socket.connect(os.fspath(path))
        self._frames: FrameDecoder[Any] = FrameDecoder(FromEngine)
        self._ready: list[Any] = []

    def send(self, *messages: ConfigureTeams | Submit | Abort) -> None:
        self.socket.sendall(b"".join(encode(message) for message in messages))

    def receive(self) -> Any:
        while not self._ready:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._ready += self._frames.feed(data)
        return self._ready.pop(0)

    def until(self, wanted: Callable[[Any], bool]) -> list[Any]:
        got = []
        while not got or not wanted(got[-1]):
            got.append(self.receive())
        return got

    def hello(self) -> Hello:
        message = self.receive()
        assert isinstance(message, Hello)
        self.send(TEAMS)
        return message

    def run(self, message: Submit) -> list[Any]:
        self.send(message)
        return self.until(lambda m: message.request_id in ended([m]))

    def close(self) -> None:
        self.socket.close()


def ended(messages: list[Any]) -> dict[str, str]:
    steps = [m for m in messages if isinstance(m, StepDone)]
    return {finished.request_id: finished.reason for step in steps for finished in step.finished}


class Process:
    """One engine process of kind sim on the tiny model; ended with the test."""

    def __init__(self, path: Path, cache: Path, *, parent_stdin: bool = True, **config: object) -> None:
        self.path = path
        self._gateways: list[Gateway] = []
        document = json.dumps({"kind": "sim", "model": "tiny-random", "kv_memory_bytes": 1 << 24, **config})
        command = [sys.executable, "-m", "engine", "--socket", str(path), "--config", document]
        self.process = subprocess.Popen(
            [*command, *(["--parent-stdin"] if parent_stdin else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERAZI_CACHE_DIR": str(cache)},
        )

    def connect(self) -> Gateway:
        self._gateways.append(Gateway(self.path))
        return self._gateways[-1]

    def listening(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"did not start: {self.stderr()}")
        event: dict[str, Any] = json.loads(line)
        assert event["event"] == "listening"
        return event

    def stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def end(self) -> int:
        """Close its stdin, as the end of its parent does, and wait."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(END_SECONDS)

    def cleanup(self) -> None:
        for gateway in self._gateways:
            gateway.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
