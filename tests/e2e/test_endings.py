"""A dozen streams, some that leave, an engine that is killed, a server that is stopped: every request is booked once.

Real processes on the simulated engine with a KV cache so small that sequences are swapped out. What became of each
request is told three times, by its client, the ledger and the engine's step log; the three must agree.
"""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.e2e.clients import ledger_rows
from tests.support.e2e.server import DEADLINE_SECONDS, Server

BLOCK_BYTES = 16 * 384  # of 16 tokens of the tiny model in bfloat16
DEVICE_BLOCKS = 24
HOST_BLOCKS = 64
PROMPT = 40  # tokens
TEAMS = {"search": "gold", "chat": "silver", "batch": "bronze"}


@dataclass
class Client:
    """One streamed request and what its client saw of it."""

    team: str
    max_tokens: int
    leave_after: int = 0  # events; 0 stays to the end
    request_id: str = ""
    status: int = 0
    events: list[str] = field(default_factory=list)
    has_left: bool = False
    task: "asyncio.Task[None] | None" = None

    async def run(self, http: httpx.AsyncClient, key: str) -> None:
        body = {"model": "tiny-random", "prompt": list(range(300, 300 + PROMPT)), "stream": True, "ignore_eos": True}
        body |= {"max_tokens": self.max_tokens, "min_tokens": self.max_tokens}
        async with http.stream(
            "POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
        ) as answer:
            self.status, self.request_id = answer.status_code, answer.headers["x-request-id"]
            async for line in answer.aiter_lines():
                if line.startswith("data: ") or (line and self.status != 200):
                    self.events.append(line.removeprefix("data: "))
                    if len(self.events) == self.leave_after:
                        self.has_left = True
                        return

    def leave(self) -> None:
        """Hang up now."""
        assert self.task is not None
        self.has_left = True
        self.task.cancel()

    @property
    def outcome(self) -> str:
        """The ledger's outcome that fits what was seen."""
        if self.has_left:
            return "client_closed"
        if self.events[-1] == "[DONE]":
            return "ok"
        code = json.loads(self.events[-1])["error"]["code"]
        assert self.events.count("[DONE]") == 0, "an error is the last word"
        return {"engine_unavailable": "error", "draining": "shutdown"}[code]


class Fleet:
    """The clients of one server, its admin listener and its step log."""

    def __init__(self, server: Server, log: Path) -> None:
        self.server = server
        self.log = log
        self.keys = {team: server.make_key(team, tier) for team, tier in TEAMS.items()}
        self.clients: list[Client] = []
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_SECONDS, limits=limits)

    def start(self, *clients: Client) -> list[Client]:
        for client in clients:
            client.task = asyncio.create_task(client.run(self.http, self.keys[client.team]))
        self.clients += clients
        return list(clients)

    def is_idle(self) -> bool:
        """Whether the gateway has no request in the engine."""
        return int(self.server.status()["requests_open"]) == 0

    def lines(self) -> list[dict[str, Any]]:
        """The step log so far; its last line may be on its way."""
        text = self.log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def are_all_inside(self) -> bool:
        """Whether the engine has taken in every request so far, by the log."""
        inboxes = [line.get("inbox", ()) for line in self.lines()]
        submitted = [item["request"] for inbox in inboxes for item in inbox if item["what"] == "submit"]
        return len(submitted) == len(self.clients)

    def swapped(self) -> set[str]:
        """Requests whose KV lies on the host, by the log."""
        out: set[str] = set()
        for line in self.lines():
            if line["event"] == "step":
                out |= {copy["request"] for copy in line["copies_out"]}
                out -= {copy["request"] for copy in line["copies_in"]} | {end["request"] for end in line["ended"]}
        return out

    async def until(self, claim: Callable[[], Any]) -> None:
        """Poll until true; a client that fails meanwhile fails the test."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not await asyncio.to_thread(claim):
                await asyncio.sleep(0.02)
                for client in self.clients:
                    if client.task is not None and client.task.done() and not client.has_left:
                        client.task.result()

    async def join(self, clients: Iterable[Client]) -> None:
        """Wait for the end of all; only who has left may have been cancelled."""
        for client in clients:
            assert client.task is not None
            (failure,) = await asyncio.wait_for(asyncio.gather(client.task, return_exceptions=True), DEADLINE_SECONDS)
            assert failure is None or client.has_left, failure


async def departures(fleet: Fleet) -> None:
    """Twelve streams: two leave before their first token, two while decoding, two while swapped out; six stay."""
    teams = list(TEAMS) * 4
    clients = fleet.start(*(Client(team, 90, leave_after=7 if n in (3, 7) else 0) for n, team in enumerate(teams)))
    await fleet.until(fleet.are_all_inside)
    for client in [client for client in clients if not client.events and not client.leave_after][-2:]:
        client.leave()

    def candidates() -> list[Client]:
        """Those far from their end whose KV is on the host."""
        there = fleet.swapped()
        return [c for c in clients if c.request_id in there and not c.has_left and len(c.events) < 60]

    for _ in range(2):
        await fleet.until(candidates)
        if found := candidates():
            found[0].leave()
    await fleet.join(clients)
    await fleet.until(fleet.is_idle)
    last = fleet.lines()[-1]
    assert (last["free_blocks"], last["free_host_blocks"]) == (DEVICE_BLOCKS, HOST_BLOCKS)
    assert all(client.events[-1] == "[DONE]" for client in clients if not client.has_left)


async def killed_engine(fleet: Fleet) -> None:
    """Six streams, three of them without a slot, when the engine is killed; then it is back."""
    clients = fleet.start(*(Client(team, 300) for team in list(TEAMS) * 2))
    await fleet.until(lambda: fleet.are_all_inside() and any(client.events for client in clients))
    pid = fleet.server.status()["engine"]["pid"]
    os.kill(pid, signal.SIGKILL)
    await fleet.join(clients)
    assert {client.outcome for client in clients} == {"error"}
    assert {client.status for client in clients} <= {200, 503}

    def is_back() -> bool:
        status = fleet.server.status()
        return bool(status["ready"] and status["engine"]["pid"] != pid)

    await fleet.until(is_back)


async def shutdown(fleet: Fleet) -> None:
    """Two streams that may end in the drain time and four that cannot."""
    short = fleet.start(Client("search", 3), Client("search", 3))
    long = fleet.start(*(Client(team, 300) for team in ("search", "chat", "batch", "batch")))
    await fleet.until(fleet.are_all_inside)
    fleet.server.terminate()
    await fleet.join(short + long)
    assert {client.outcome for client in short} <= {"ok", "shutdown"}
    assert {client.outcome for client in long} == {"shutdown"}


@pytest.mark.case("G09")
def test_every_request_is_booked_once_whatever_ends_it(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server, log = make_server(), tmp_path / "steps.jsonl"
    server.environment["TERAZI_STEP_LOG"] = str(log)
    memory = ["--kv-memory", str(DEVICE_BLOCKS * BLOCK_BYTES), "--host-kv-memory", str(HOST_BLOCKS * BLOCK_BYTES)]
    server.start("--max-batch-size", "3", "--drain-timeout", "1s", *memory)

    async def play() -> Fleet:
        fleet = Fleet(server, log)
        async with fleet.http:
            await departures(fleet)
            await killed_engine(fleet)
            await shutdown(fleet)
        return fleet

    fleet = asyncio.run(play())
    assert server.wait() == 0
    rows = ledger_rows(server)
    by_id = {row["request_id"]: row for row in rows}
    assert len(rows) == len(by_id) == len(fleet.clients) == 24, "one row for each request"
    for client in fleet.clients:
        if client.request_id:
            row = by_id[client.request_id]
            outcome = row["outcome"]
            assert outcome != "ok" or row["output_tokens"] == client.max_tokens
            if outcome == "refused":  # it never ran, so it was given back
                assert client.outcome in ("error", "shutdown") and not row["device_us"] and not row["prompt_tokens"]
                continue
            assert outcome == client.outcome or (client.has_left and outcome == "ok"), "it had all of it on the way"
    codes = {"engine_unavailable": "error", "draining": "shutdown", "client_closed": "client_closed", None: "ok"}
    counts = Counter(codes[row["error_code"]] for row in rows)
    assert counts["error"] == 6 and counts["shutdown"] >= 4 and counts["client_closed"] >= 4, counts
    assert set(counts) == {"ok", "client_closed", "error", "shutdown"}
    assert Counter(row["team"] for row in rows) == Counter(client.team for client in fleet.clients)
    assert any(row["num_swaps"] > 0 and row["outcome"] == "client_closed" for row in rows)
    check_log(fleet.lines(), by_id)
    journal = b"".join(path.read_bytes() for path in (server.data_dir / "journal").glob("*.jsonl"))
    assert journal == b""


def check_log(lines: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
    """Both engines' lines against the ledger's rows."""
    starts = [index for index, line in enumerate(lines) if line["event"] == "start"]
    assert [lines[index]["epoch"] for index in starts] == [1, 2]
    submitted: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for first, end in zip(starts, [starts[1], len(lines)], strict=True):
        steps = lines[first + 1 : end]
        submitted.update(item["request"] for line in steps for item in line["inbox"] if item["what"] == "submit")
        ended = Counter(item["request"] for line in steps for item in line["ended"])
        assert set(ended.values()) <= {1}, "each ends once"
        aborted: set[str] = set()
        for line in steps:
            aborted |= {item["request"] for item in line["inbox"] if item["what"] == "abort"}
            planned = {part["request"] for key in ("rows", "copies_out", "copies_in") for part in line[key]}
            assert not planned & aborted, "planned after its abort"
        for row in (row for line in steps for row in line["rows"]):
            samples = row["kind"] == "decode" or (row["kind"] == "prefill" and row["start"] + row["tokens"] == PROMPT)
            tokens[row["request"]] += samples
    for request_id, row in by_id.items():
        if row["outcome"] == "error":  # what the gateway had received when the engine was killed
            assert row["output_tokens"] <= tokens[request_id]
        else:
            assert row["output_tokens"] == tokens[request_id], "booked for what was made"
    assert submitted == Counter(by_id.keys()), "the engine and the ledger have seen the same requests, once each"
    last = lines[-1]
    assert (last["free_blocks"], last["free_host_blocks"]) == (DEVICE_BLOCKS, HOST_BLOCKS), "no block is owned"
