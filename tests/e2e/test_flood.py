"""Floods of large bodies and of idle connections against a real server: who notices, and what stays."""

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from engine.models.store import SMOLLM2, cache_root
from tests.support.e2e.flood import parts_body
from tests.support.e2e.server import Server, is_running, wait_until

MakeServer = Callable[..., Server]

NUM_BODIES = 20
NUM_IDLE = 10_000
NOISE_SECONDS = 0.1  # by which the longest gap may grow
PEAK_MB = 400
STAYS_MB = 50


def children(pid: int, named: str) -> list[int]:
    """Child processes whose command line has `named`."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            is_it = named.encode() in Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        found += [int(child)] if is_it else []
    return found


def resident_mb(pid: int) -> float:
    """MB in memory of one process; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


def gateway_mb(server: Server) -> float:
    """The gateway with its worker, without the engine."""
    assert server.process is not None
    pid = server.process.pid
    return sum(resident_mb(each) for each in (pid, *children(pid, "gateway.prepare.worker")))


def send_large(server: Server, key: str) -> httpx.Response:
    body = parts_body("tiny-random", 10_000, 1 << 19)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers, timeout=60)


@pytest.mark.case("T03", "T12")
def test_when_the_gateway_ends_then_its_worker_ends(make_server: MakeServer) -> None:
    server = make_server()
    server.environment["TERAZI_MAX_CONNECTIONS"] = "4"
    server.start()
    assert server.process is not None
    key = server.make_key()
    server.admin("PUT", "teams/search/quota", {"requests_per_minute": 9})
    refused = send_large(server, key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert refused.headers["x-ratelimit-remaining-requests"] == "8"
    (worker,) = children(server.process.pid, "gateway.prepare.worker")
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(6)]
    for client in clients:
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    answers = [client.recv(12) for client in clients]
    assert answers.count(b"HTTP/1.1 200") <= 4 and b"HTTP/1.1 503" in answers
    for client in clients:
        client.close()
    server.kill()
    wait_until(lambda: not is_running(worker), "the worker ends with the gateway, even after SIGKILL")
    server.start()
    send_large(server, key)
    assert server.process is not None
    (worker,) = children(server.process.pid, "gateway.prepare.worker")
    assert server.stop() == 0
    assert not is_running(worker)


class Gaps:
    """Reads one stream after the other and notes when tokens came."""

    def __init__(self, server: Server, key: str) -> None:
        self.times: list[float] = []
        self._stop = threading.Event()
        self._server, self._key = server, key
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_until(lambda: len(self.times) > 10, "tokens come")

    def _read(self) -> None:
        body = {"model": SMOLLM2, "prompt": [300, 301], "stream": True, "max_tokens": 8000}
        body |= {"ignore_eos": True, "min_tokens": 8000}
        headers = {"authorization": f"Bearer {self._key}"}
        url = f"{self._server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    self.times.append(time.monotonic())
                if self._stop.is_set():
                    return

    def longest(self, begin: float, end: float) -> float:
        """Seconds of the longest gap that ended between two times."""
        return max(b - a for a, b in itertools.pairwise(list(self.times)) if begin <= b <= end)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)


class Peak:
    """Watches the memory of the gateway with its worker."""

    def __init__(self, server: Server) -> None:
        self.mb = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(server,), daemon=True)
        self._thread.start()

    def _watch(self, server: Server) -> None:
        while not self._stop.wait(0.02):
            self.mb = max(self.mb, gateway_mb(server))

    def stop(self) -> float:
        self._stop.set()
        self._thread.join()
        return self.mb


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """The default model's own tokenizer on the simulated engine."""
    server = Server(tmp_path / "data", cache_root())
    try:
        yield server.start("--model", SMOLLM2)
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.case("T03", "T12")
def test_when_bodies_and_connections_flood_then_it_passes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    victim, flooder = server.make_key("victim"), server.make_key("flooder")
    server.admin("PUT", "teams/flooder/quota", {"requests_per_minute": NUM_BODIES})
    gaps = Gaps(server, victim)
    time.sleep(4)
    before_mb, begin = gateway_mb(server), time.monotonic()
    quiet = gaps.longest(begin - 3, begin)
    peak = Peak(server)
    command = [sys.executable, "-m", "tests.support.e2e.flood"]
    arguments = ["bodies", str(server.port), flooder, SMOLLM2, str(NUM_BODIES)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=110)
    flooded = gaps.longest(begin, time.monotonic())
    peak_mb = peak.stop()
    gaps.stop()
    answers = json.loads(done.stdout)
    assert [(a["status"], a["code"]) for a in answers] == [(400, "context_length_exceeded")] * NUM_BODIES
    spent = httpx.post(
        f"{server.url}/v1/completions", json={}, headers={"authorization": f"Bearer {flooder}"}, timeout=30
    )
    assert spent.status_code == 429, "the refused calls were the team's minute"

    idle = subprocess.Popen(
        [*command, "idle", str(server.port), str(NUM_IDLE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert idle.stdin is not None and idle.stdout is not None
    num_idle = int(idle.stdout.readline())
    with_idle_mb = gateway_mb(server)
    idle.stdin.close()
    idle.wait(60)
    idle.stdout.close()
    wait_until(lambda: gateway_mb(server) <= before_mb + STAYS_MB, "memory goes back", 90)
    with capsys.disabled():
        print(
            f"\nlongest gap {quiet * 1000:.0f} ms before, {flooded * 1000:.0f} ms in the flood of "
            f"{max(a['seconds'] for a in answers):.1f} s; memory {before_mb:.0f} MB before, {peak_mb:.0f} at the peak, "
            f"{with_idle_mb:.0f} with {num_idle} idle connections, {gateway_mb(server):.0f} after"
        )
    assert flooded - quiet <= NOISE_SECONDS
    assert peak_mb < PEAK_MB
