"""A `terazi serve` child process for the demo and the benchmarks: starts it, waits until it is ready, stops it."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.command import CommandError
from gateway.lock import read_server_info

READY_SECONDS = 300.0
POLL_SECONDS = 0.1
ENDING_SIGNALS = (signal.SIGHUP, signal.SIGTERM)


class ServerProcess:
    """One server on free ports. Use it as a context manager: leaving the block drains and ends the server.

    Entering it raises CommandError when the server does not become ready within READY_SECONDS.
    """

    def __init__(self, data_dir: Path, options: Sequence[str]) -> None:
        self.data_dir = data_dir
        self._options = list(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_path = data_dir.with_name(data_dir.name + ".log")
        self._handlers: dict[signal.Signals, Any] = {}
        self.info: dict[str, Any] = {}

    def __enter__(self) -> "ServerProcess":
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "gateway.cli", "serve", "--data-dir", str(self.data_dir)]
        # Drain for a short time. The drain matters only when the caller is interrupted in the middle of a run.
        command += ["--port", "0", "--admin-port", "0", "--drain-timeout", "5s", *self._options]
        self._end_with_us()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=_environment()
            )
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.stop()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()

    def _end_with_us(self) -> None:
        """Make the signals that would end this process leave the `with` block first, which ends the server.

        The server itself goes on after SIGHUP, so it would outlive a command whose terminal was closed. A signal that
        is ignored (nohup) stays ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, _leave)

    @property
    def host(self) -> str:
        """The address of the OpenAI routes.

        It is not a name where possible, so that a load generator looks nothing up.
        """
        host = urlsplit(self.info["url"]).hostname or "localhost"
        return "127.0.0.1" if host == "localhost" else host

    @property
    def port(self) -> int:
        """Port of the OpenAI routes."""
        return urlsplit(self.info["url"]).port or 80

    def stop(self) -> int:
        """Send SIGTERM and wait for the drain; kill the server after 90 s. Returns the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                return self._process.wait(90)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                tail = self._log_path.read_text(errors="replace").strip().splitlines()[-3:]
                raise CommandError("the server did not start: " + " | ".join(tail))
            info = read_server_info(self.data_dir)
            if info is not None:
                self.info = info
                if self._is_ready():
                    return
            time.sleep(POLL_SECONDS)
        raise CommandError(f"the server was not ready within {READY_SECONDS:.0f} s, see {self._log_path}")

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        connection.close()
        return False


def _leave(number: int, _: object) -> None:
    for other in ENDING_SIGNALS:  # a second signal must not interrupt the clean-up
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _environment() -> dict[str, str]:
    """This process's environment without the operator's settings for a server, above all the database's URL."""
    kept = ("TERAZI_CACHE_DIR", "TERAZI_NUM_THREADS", "TERAZI_DTYPE", "TERAZI_DEVICE")
    return {name: value for name, value in os.environ.items() if not name.startswith("TERAZI_") or name in kept}
