"""A real `terazi serve` subprocess for tests: free ports, output in files, bounded waits for what must become true."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

DEADLINE_SECONDS = 60.0


def wait_until(is_so: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Poll until true; fails the test when the bound is reached."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Does this process exist (and is no zombie)?"""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


class Server:
    """One data directory and the server processes that run on it, one after the other."""

    def __init__(self, data_dir: Path, cache_dir: Path) -> None:
        self.data_dir = data_dir
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TERAZI_")},
            "TERAZI_DATA_DIR": str(data_dir),
            "TERAZI_CACHE_DIR": str(cache_dir),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self._out = data_dir.with_name(data_dir.name + ".out")
        self._log = data_dir.with_name(data_dir.name + ".log")

    def start(
        self,
        *options: str,
        until: str = "ready",
        max_files: int = 0,
        prefix: Sequence[str] = (),
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> "Server":
        """Start and wait until it is ready (or only until it listens), with at most `max_files` open files.

        `prefix` is a command that runs the server in its own process; `stdout` and `stderr` replace our files.
        """
        command = ["prlimit", f"--nofile={max_files}:{max_files}"] if max_files else [*prefix]
        command += [sys.executable, "-P", "-m", "gateway.cli", "serve", "--engine", "sim", "--model", "tiny-random"]
        command += ["--port", "0", "--admin-port", "0", *options]
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        with self._out.open("ab") as out, self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.data_dir.parent,
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=log if stderr is None else stderr,
            )
        wait_until(lambda: self._info() is not None or self.process_has_ended, "the server listens")
        if until == "ready":
            wait_until(lambda: self.process_has_ended or self.readyz() == 200, "the server is ready")
        assert not self.process_has_ended, self.log
        return self

    @property
    def process_has_ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def _info(self) -> dict[str, Any] | None:
        try:
            info: dict[str, Any] = json.loads((self.data_dir / "server.json").read_text())
        except (OSError, ValueError):
            return None
        return info if self.process is not None and info["pid"] == self.process.pid else None

    @property
    def info(self) -> dict[str, Any]:
        found = self._info()
        assert found is not None
        return found

    @property
    def url(self) -> str:
        return str(self.info["url"])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        """Everything it has written to stderr."""
        return self._log.read_text(errors="replace")

    @property
    def out(self) -> str:
        """Everything it has written to stdout."""
        return self._out.read_text(errors="replace")

    def readyz(self) -> int:
        """Status of the readiness probe; 0 when nobody answers."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code
        except (httpx.HTTPError, AssertionError):
            return 0

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """A call on the running server's admin listener that must succeed."""
        token = (self.data_dir / "admin.token").read_text().strip()
        url = f"{self.info['admin_url']}/admin/v1/{path}"
        answer = httpx.request(method, url, json=body, headers={"authorization": f"Bearer {token}"}, timeout=30)
        return answer.raise_for_status().json()

    def status(self) -> dict[str, Any]:
        """GET /admin/v1/status."""
        result: dict[str, Any] = self.admin("GET", "status")
        return result

    def terazi(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command on this data directory."""
        command = [sys.executable, "-P", "-m", "gateway.cli", *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)

    def json(self, *arguments: str) -> Any:
        """Run a command that must succeed, with --json."""
        done = self.terazi(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def make_key(self, team: str = "search", tier: str = "gold") -> str:
        """A team and a key for it, from the running server."""
        self.admin("POST", "teams", {"name": team, "tier": tier})
        return str(self.admin("POST", f"teams/{team}/keys", {})["key"])

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        assert self.process is not None
        return self.process.wait(DEADLINE_SECONDS)

    def stop(self) -> int:
        """SIGTERM and wait; nothing happens when it has ended."""
        assert self.process is not None
        if self.process.poll() is None:
            self.terminate()
        return self.wait()

    def kill(self) -> None:
        """SIGKILL, for clean-up and for tests of it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE_SECONDS)


def sse_events(body: str) -> list[str]:
    """The payloads of a stream's data lines."""
    return [line.removeprefix("data:").strip() for line in body.splitlines() if line.startswith("data:")]
