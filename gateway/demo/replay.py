"""Open-loop replay of a multi-team trace over HTTP. Arrivals never wait for answers, so a slow server cannot hide.

`engine.sim.workload` has the trace's format. Every request streams from /v1/completions, with a prompt of token ids and
a forced output length, so that two servers (or two policies) do the same work. The generator uses plain asyncio
streams, because it may share two cores with the engine that it measures.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.sim.workload import TraceRequest

LINE_LIMIT = 4 << 20


@dataclass(slots=True)
class Outcome:
    """What became of one request of the trace. Times are seconds. `error` is None for a complete answer."""

    row: TraceRequest
    late: float = 0.0  # how long after its time it was sent, because the generator was busy
    ttft: float | None = None
    jct: float | None = None
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The server to send requests to. The token ids of prompts are drawn from the middle of the vocabulary."""

    host: str
    port: int
    model: str
    keys: Mapping[str, str]  # team -> API key
    vocab_size: int = 49152
    timeout_seconds: float = 900.0


async def replay(
    rows: Sequence[TraceRequest], target: Target, *, seed: int = 1, on_done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Send every row at its time, and wait for all answers. A failed request is an Outcome with an error.

    `seed` decides the token ids of the prompts. `on_done` is called for each request that ends.
    """
    start = time.monotonic() + 0.2

    async def play_row(index: int, row: TraceRequest) -> Outcome:
        body = _body(row, target, random.Random(f"{seed}:{index}"))
        await asyncio.sleep(max(0.0, start + row.at_us / 1e6 - time.monotonic()))
        outcome = Outcome(row, late=max(0.0, time.monotonic() - start - row.at_us / 1e6))
        try:
            async with asyncio.timeout(target.timeout_seconds):
                await _stream(target, target.keys[row.team], body, outcome)
        except TimeoutError:
            outcome.error = f"no end within {target.timeout_seconds:.0f} s"
        except (OSError, ValueError, EOFError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        on_done(outcome)
        return outcome

    return list(await asyncio.gather(*(play_row(index, row) for index, row in enumerate(rows))))


def _reason(body: bytes) -> str:
    """The message in an error's body, or the body itself if it has no message."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        message = body.decode(errors="replace")
    return str(message)[:300]


def _body(row: TraceRequest, target: Target, rng: random.Random) -> bytes:
    low, high = (1000, 40000) if target.vocab_size > 40000 else (target.vocab_size // 4, target.vocab_size // 2)
    return json.dumps(
        {
            "model": target.model,
            "prompt": [rng.randrange(low, max(low + 1, high)) for _ in range(row.prompt_tokens)],
            "max_tokens": row.output_tokens,
            "min_tokens": row.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


async def _stream(target: Target, key: str, body: bytes, outcome: Outcome) -> None:
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=LINE_LIMIT)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status_line = await reader.readline()
        if not status_line.startswith(b"HTTP/1."):
            raise ValueError(f"no HTTP answer: {status_line[:80]!r}")
        status = int(status_line[9:12])
        while (await reader.readline()).strip():
            pass
        if status != 200:
            outcome.error = f"HTTP {status}: {_reason(await reader.read(4000))}"
            return
        # The chunked body's sizes and blank lines do not begin with `data:`, so they are skipped.
        async for line in reader:
            if not line.startswith(b"data:"):
                continue
            if line.startswith(b"data: [DONE]"):
                outcome.jct = time.monotonic() - began
                break
            if outcome.ttft is None and b'"choices":[{' in line.replace(b" ", b"")[:400]:
                outcome.ttft = time.monotonic() - began
            if b'"error"' in line or b'"usage"' in line:
                _read_event(json.loads(line[5:]), outcome)
    finally:
        writer.close()
    if outcome.error is None and outcome.jct is None:
        outcome.error = "the stream ended without [DONE]"
    if outcome.error is None and outcome.output_tokens != outcome.row.output_tokens:
        outcome.error = f"{outcome.output_tokens} output tokens instead of {outcome.row.output_tokens}"


def _read_event(event: dict[str, Any], outcome: Outcome) -> None:
    if "error" in event:
        outcome.error = str(event["error"].get("message", event["error"]))[:300]
    if event.get("usage"):
        outcome.output_tokens = int(event["usage"]["completion_tokens"])


def quantile(values: Sequence[float], q: float) -> float:
    """The nearest-rank quantile `q` (0 to 1) of a non-empty sequence."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


def describe(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p95, p99 and maximum of the values; None if there are no values."""
    if not values:
        return None
    named = {f"p{int(q * 100)}": quantile(values, q) for q in (0.5, 0.95, 0.99)}
    return {"mean": sum(values) / len(values), **named, "max": max(values)}


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Latencies of complete answers, of all teams and of each; tokens per second of the whole run; the first errors."""
    ends = [o.row.at_us / 1e6 + o.late + o.jct for o in outcomes if o.jct is not None]
    wall = max(ends, default=0.0)
    tokens = sum(o.output_tokens for o in outcomes)
    teams = sorted({o.row.team for o in outcomes})
    return {
        "wall_seconds": wall,
        "output_tokens_per_second": tokens / wall if wall else 0.0,
        "late_max_seconds": max((o.late for o in outcomes), default=0.0),
        "all": _one_summary(outcomes),
        "teams": {team: _one_summary([o for o in outcomes if o.row.team == team]) for team in teams},
        "errors": sorted({o.error for o in outcomes if o.error})[:5],
    }


def _one_summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    done = [o for o in outcomes if o.error is None]
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(done),
        "output_tokens": sum(o.output_tokens for o in outcomes),
        "ttft_seconds": describe([o.ttft for o in done if o.ttft is not None]),
        "jct_seconds": describe([o.jct for o in done if o.jct is not None]),
    }
