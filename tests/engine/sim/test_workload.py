"""Traces as the world publishes them: what is only another spelling plays, what is another format says what to do."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest

from engine.sim import workload
from engine.sim.workload import TraceError, TraceRequest, parse_trace, read_trace

ROWS = [("0.5", "chat", "374", "44"), ("1", "dev", "12", "3")]
EXPECTED = [TraceRequest(500_000, "chat", 374, 44), TraceRequest(1_000_000, "dev", 12, 3)]


def line(t: str, team: str, prompt: str, output: str) -> str:
    return f'{{"t": {t}, "team": "{team}", "prompt_tokens": {prompt}, "output_tokens": {output}}}'


PLAIN = "".join(line(*row) + "\n" for row in ROWS)
FLOATS = "".join(line(t, team, f"{prompt}.0", f"{output}e0") + "\n" for t, team, prompt, output in ROWS)


@pytest.mark.case("H09")
@pytest.mark.parametrize(
    "content",
    [
        PLAIN.encode(),
        b"\xef\xbb\xbf" + PLAIN.encode(),
        FLOATS.encode(),
        b"\xef\xbb\xbf" + FLOATS.encode(),
        PLAIN.replace("\n", "\r\n").encode(),
        ("\n \r\n" + PLAIN + "\n\n").encode(),
        b"\xef\xbb\xbf\r\n" + PLAIN.encode(),
        PLAIN.rstrip().encode(),
    ],
    ids=["plain", "mark", "floats", "mark_floats", "crlf", "blank_lines", "mark_alone", "no_last_newline"],
)
def test_when_a_trace_is_only_spelt_otherwise_then_it_plays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    assert read_trace(path) == EXPECTED
    assert parse_trace(content.decode().splitlines()) == EXPECTED


@pytest.mark.case("H09")
@pytest.mark.parametrize(
    ("content", "number", "words"),
    [
        (gzip.compress(PLAIN.encode(), mtime=0), 1, "gzip, not text: unpack it first"),
        (bz2.compress(PLAIN.encode()), 1, "bzip2, not text: unpack"),
        (lzma.compress(PLAIN.encode()), 1, "xz, not text: unpack"),
        (b"\x28\xb5\x2f\xfd\x00", 1, "zstd, not text: unpack"),
        (b"PK\x03\x04\x00", 1, "zip, not text: unpack"),
        (b"PAR1\x00", 1, "Parquet, not text: write it as JSON lines"),
        (PLAIN.encode("utf-16"), 1, "UTF-16, not text: write it as UTF-8"),
        (PLAIN.encode("utf-16-le"), 1, "is the file UTF-16"),
        (b"t,team,prompt_tokens,output_tokens\r\n0.5,chat,374,44\r\n", 1, "CSV; .*the four names t, team, prompt_tok"),
        (b"t;team;prompt_tokens;output_tokens\n", 1, "CSV; .*four names"),
        (b"hello\n", 1, "JSON object with the four names"),
        (
            json.dumps([json.loads(line(*row)) for row in ROWS]).encode(),
            1,
            r"one JSON object a line \(jq -c '\.\[\]'\)",
        ),
        ((PLAIN + line("1700000000.25", "dev", "1", "1")).encode(), 3, "1700000000.25; .*subtract the first time"),
        ((PLAIN + line("1700000000250", "dev", "1", "1")).encode(), 3, "divide milliseconds by 1000"),
        ((PLAIN + line('"2023-11-16 18:17:03"', "dev", "1", "1")).encode(), 3, "seconds from the trace's start"),
        (b'{"TIMESTAMP": 1, "ContextTokens": 4}\n', 1, "four names are .*; t, team, prompt_tokens, output_tokens miss"),
        ((PLAIN + line("1", "dev", "1.5", "1")).encode(), 3, "prompt_tokens must be a whole number, not 1.5"),
        ((PLAIN + line("1", "dev", "NaN", "1")).encode(), 3, "malformed"),
        ((PLAIN + line("1", "dev", "null", "1")).encode(), 3, "prompt_tokens"),
        ((PLAIN + line("1", "dev", '"374"', "1")).encode(), 3, "prompt_tokens"),
        ((PLAIN + line("1", "dev", "-1", "1")).encode(), 3, "prompt_tokens"),
        ((PLAIN + line("1", "dev", "1", "1e99")).encode(), 3, "output_tokens"),
        ((PLAIN + line("1", "dev", "1", "1e999")).encode(), 3, "out of range"),
        ((PLAIN + line("-0.1", "dev", "1", "1")).encode(), 3, r"\$\.t"),
        ((PLAIN + line("1", "caf\xe9", "1", "1")).encode("latin-1"), 3, "UTF-8|utf-8"),
        (b'{"t": ' + b"[" * 5000 + b"\n", 1, "."),
    ],
)
def test_when_a_trace_is_another_format_then_the_cure_is_named(
    tmp_path: Path, content: bytes, number: int, words: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=rf"t\.jsonl, line {number}: .*({words})") as caught:
        read_trace(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_when_a_line_is_too_long_then_it_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl"
    first = PLAIN.splitlines(keepends=True)[0]
    monkeypatch.setattr(workload, "LINE_BYTES_MAX", len(first))
    path.write_text(PLAIN)
    assert read_trace(path) == EXPECTED
    path.write_text(PLAIN + first.replace("{", "{ ", 1))
    with pytest.raises(TraceError, match=f"line 3: the line is longer than {len(first)} bytes"):
        read_trace(path)
