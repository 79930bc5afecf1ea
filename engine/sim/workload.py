"""Request traces: JSON lines of {"t": seconds, "team": name, "prompt_tokens": n, "output_tokens": n}.

Other keys are ignored, so richer traces can be read too. Lines may come in any order; requests are replayed by time,
ties in file order.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

TOKENS_MAX = 10_000_000


class TraceError(ValueError):
    """A trace cannot be used: the file, the line and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. `at_us` counts from the trace's start."""

    at_us: int
    team: str
    prompt_tokens: int
    output_tokens: int


class _Line(msgspec.Struct):
    t: Annotated[float, msgspec.Meta(ge=0)]
    team: Annotated[str, msgspec.Meta(min_length=1)]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)]


def parse_trace(lines: Iterable[str | bytes], name: str = "trace") -> list[TraceRequest]:
    """Read and check a trace; blank lines are skipped. Raises TraceError naming the line, also for an empty trace."""
    decoder = msgspec.json.Decoder(_Line)
    requests: list[TraceRequest] = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise TraceError(f"{name}, line {number}: {error}") from error
        if not math.isfinite(line.t) or line.t > 1e9:
            raise TraceError(f"{name}, line {number}: t is too large: {line.t}")
        requests.append(TraceRequest(round(line.t * 1_000_000), line.team, line.prompt_tokens, line.output_tokens))
    if not requests:
        raise TraceError(f"{name} holds no request")
    requests.sort(key=lambda request: request.at_us)
    return requests


def read_trace(path: Path) -> list[TraceRequest]:
    """`parse_trace` of a file. Raises TraceError when it cannot be read, too."""
    try:
        with path.open("rb") as file:
            return parse_trace(file, str(path))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
