"""Reports in a terminal: no table wider than it."""

import re
import sys

import pytest

from gateway.cli import report_text
from tests.support.gateway.fairness_document import make_report


def test_no_table_of_the_fairness_report_is_wider_than_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "96")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    report_text.write_fairness(make_report(["support", "dev", "data-science"]))
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "VIOLATED" in text and text.count("VIOLATED") == 1
    tables_of_it = text.partition("weighted Jain")[0]
    assert max(map(len, tables_of_it.splitlines())) <= 96
    assert len([line for line in text.splitlines() if line.lstrip().startswith("data-science")]) >= 3
