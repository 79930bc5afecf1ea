"""Tables fit the terminal and lose nothing."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gateway.command import cell, print_table

ROWS = [
    {"team": "[red]support[/]", "prompt_tokens": 1200, "ttft_p95_seconds": 0.0821, "limit": None},
    {"team": "reports", "prompt_tokens": 7, "ttft_p95_seconds": 12.5, "limit": 3},
]


def printed(
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: Sequence[Mapping[str, Any]] = ROWS,
) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(rows, title="a title that is longer than the table is wide, and stays in one line")
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    return [line for line in text.splitlines() if line.strip()]


def test_a_table_that_fits_has_a_line_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    title, header, rule, *rows = printed(100, monkeypatch, capsys)
    assert title.endswith("one line")
    assert header.split() == ["team", "prompt", "tokens", "ttft", "p95", "seconds", "limit"]
    assert set(rule.strip()) == {"\u2500"}
    assert [row.split() for row in rows] == [["[red]support[/]", "1200", "0.082", "-"], ["reports", "7", "12.500", "3"]]


def test_one_that_does_not_has_its_headers_in_several_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(56, monkeypatch, capsys)
    assert [line.split() for line in lines[1:4]] == [
        ["ttft"],
        ["prompt", "p95"],
        ["team", "tokens", "seconds", "limit"],
    ]
    assert lines[-1].split() == ["reports", "7", "12.500", "3"]


def test_then_it_is_turned_on_its_side(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"team": team} | {f"figure_{i}": i * factor for i in range(8)} for team, factor in (("a", 1), ("b", 10))]
    _, header, _, *lines = printed(40, monkeypatch, capsys, rows)
    assert header.split() == ["team", "a", "b"]
    assert [line.split() for line in lines] == [["figure", str(i), str(i), str(i * 10)] for i in range(8)]


@pytest.mark.parametrize("width", [20, 30, 44])
def test_and_at_last_it_is_one_record_after_the_other(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, *lines = printed(width, monkeypatch, capsys)
    names = ["team", "prompt tokens", "ttft p95 seconds", "limit"]
    assert [line[:16].strip() for line in lines] == names * 2
    assert [line[16:].strip() for line in lines[:4]] == ["[red]support[/]", "1200", "0.082", "-"]


def test_a_pipe_gets_every_line_whole_and_without_blanks_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([{f"a_long_name_{i}": "x" * 20 for i in range(12)}])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert max(map(len, lines)) > 240
    assert all(line == line.rstrip() for line in lines)


def test_moments_are_shown_to_the_second() -> None:
    assert cell("2026-11-29T19:16:03.901347Z") == "2026-11-29T19:16:03Z"
    assert cell("2026-11-29T19:16:03Z") == "2026-11-29T19:16:03Z"
    assert cell("v1.2Z") == "v1.2Z"
