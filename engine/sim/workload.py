"""Request traces: JSON lines of {"t": seconds, "team": name, "prompt_tokens": n, "output_tokens": n}.

Other keys are ignored, so richer traces can be read too. Lines may come in any order. Requests are replayed by time;
requests of the same time in file order. A byte order mark is skipped. A whole number may be written `374.0`, as pandas
writes a column that once had a gap. A trace in another format is refused, with a message that says what to do.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

TOKENS_MAX = 10_000_000
SECONDS_MAX = 1e9  # 31 years: times given in seconds since 1970 are larger, and are refused
LINE_BYTES_MAX = 1 << 20
EXAMPLE = '{"t": 0.5, "team": "chat", "prompt_tokens": 20, "output_tokens": 5}'

_UTF8_MARK = b"\xef\xbb\xbf"
# By the first bytes of a file that is not UTF-8 text: its format, and what to do about it.
_PACKED = {
    b"\x1f\x8b": ("gzip", "unpack it first, with gunzip"),
    b"BZh": ("bzip2", "unpack it first, with bunzip2"),
    b"\xfd7zXZ\x00": ("xz", "unpack it first, with unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unpack it first, with unzstd"),
    b"PK\x03\x04": ("zip", "unpack it first, with unzip"),
    b"PAR1": ("Parquet", "write it as JSON lines first"),
    b"\xff\xfe": ("UTF-16", "write it as UTF-8 first, with iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16", "write it as UTF-8 first, with iconv -f UTF-16 -t UTF-8"),
}


class TraceError(ValueError):
    """A trace cannot be used. The message names the file and the line, and says what is wrong."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. `at_us` is its time in microseconds from the trace's start."""

    at_us: int
    team: str
    prompt_tokens: int
    output_tokens: int


class _Line(msgspec.Struct):
    t: Annotated[float, msgspec.Meta(ge=0)]
    team: Annotated[str, msgspec.Meta(min_length=1)]
    prompt_tokens: Annotated[float, msgspec.Meta(ge=1, le=TOKENS_MAX)]
    output_tokens: Annotated[float, msgspec.Meta(ge=1, le=TOKENS_MAX)]


def parse_trace(lines: Iterable[str | bytes], name: str = "trace") -> list[TraceRequest]:
    """Read and check a trace. Blank lines are skipped. The requests are returned in order of time.

    Raises TraceError, with `name` and the line's number, for a line that is no request. A trace without requests raises
    it too.
    """
    decoder = msgspec.json.Decoder(_Line)
    requests: list[TraceRequest] = []
    for number, given in enumerate(lines, start=1):
        try:
            text = given.encode() if isinstance(given, str) else given
            if number == 1:
                text = _begun(text)
            if not text.strip():
                continue
            if len(text) > LINE_BYTES_MAX:
                raise TraceError(f"the line is longer than {LINE_BYTES_MAX} bytes; write one JSON object a line")
            requests.append(_request(decoder, text))
        except (TraceError, UnicodeError) as error:
            raise TraceError(f"{name}, line {number}: {error}") from error
    if not requests:
        raise TraceError(f"{name} holds no request")
    requests.sort(key=lambda request: request.at_us)
    return requests


def _begun(text: bytes) -> bytes:
    """The first line without its byte order mark. Raises TraceError if it is the beginning of a known binary format."""
    for magic, (kind, cure) in _PACKED.items():
        if text.startswith(magic):
            raise TraceError(f"the file is {kind}, not text: {cure}")
    return text.removeprefix(_UTF8_MARK)


def _request(decoder: "msgspec.json.Decoder[_Line]", text: bytes) -> TraceRequest:
    """The request in one line. Raises TraceError, to which the caller adds the file and the line's number."""
    try:
        line = decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        cure = _cure(text)
        raise TraceError(f"{error}; {cure}" if cure else str(error)) from error
    for field in ("prompt_tokens", "output_tokens"):
        if not getattr(line, field).is_integer():
            raise TraceError(f"{field} must be a whole number, not {getattr(line, field)}")
    if not math.isfinite(line.t) or line.t > SECONDS_MAX:
        raise TraceError(
            f"t is too large: {line.t:.15g}; t counts seconds from the trace's start: if these are seconds or "
            "milliseconds since 1970, subtract the first time from all of them (and divide milliseconds by 1000)"
        )
    return TraceRequest(round(line.t * 1_000_000), line.team, int(line.prompt_tokens), int(line.output_tokens))


def _cure(text: bytes) -> str:
    """What to do about a line that is no request, guessed from how it looks; "" without a guess."""
    begin = text.lstrip()[:1]
    if b"\x00" in text:
        return "the line has zero bytes: is the file UTF-16? Write it as UTF-8 first, with iconv -f UTF-16 -t UTF-8"
    if begin == b"[":
        return f"write one JSON object a line (jq -c '.[]'), such as {EXAMPLE}"
    if begin != b"{":
        is_csv = any(mark in text for mark in (b",", b";", b"\t"))
        what = "this looks like CSV; " if is_csv else ""
        return f"{what}each line must be a JSON object with the four names t, team, prompt_tokens and output_tokens"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    missing = [field for field in _Line.__struct_fields__ if field not in found]
    if missing:
        return f"the four names are t, team, prompt_tokens and output_tokens; {', '.join(missing)} missing"
    if not isinstance(found["t"], int | float):
        return "t is a number: seconds from the trace's start"
    return ""


def read_trace(path: Path) -> list[TraceRequest]:
    """`parse_trace` of a file. Raises TraceError also when the file cannot be read."""
    try:
        with path.open("rb") as file:
            # Read one byte more than is allowed, so that a file without line ends is refused before it is read whole.
            return parse_trace(iter(lambda: file.readline(LINE_BYTES_MAX + 1), b""), str(path))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
