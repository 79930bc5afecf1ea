"""Pages of reports for tests: what they are made of, and a reader of their text."""

import csv
import io
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote

from gateway.reports.fairness import render_fairness
from tests.support.gateway.fairness_document import make_report, make_series

EVIL = "<script>alert(1)</script>"


TEAMS = ["support", "dev", "reports"]


VOID = {"meta", "link", "br", "img", "input", "hr"}


class Reader(HTMLParser):
    """Tags with their attributes, visible text, and whether every tag is closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == [], f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text.append(data)

    def links(self) -> dict[str, list[list[str]]]:
        """The CSV files that the page carries."""
        found = {}
        for tag, attributes in self.tags:
            if tag == "a" and "download" in attributes:
                head, _, body = attributes["href"].partition(",")
                assert head == "data:text/csv;charset=utf-8"
                found[attributes["download"]] = list(csv.reader(io.StringIO(unquote(body), newline="")))
        return found


def fairness(teams: list[str], **changes: Any) -> str:
    return render_fairness(make_report(teams) | changes, make_series(teams))


def make_run(policy: str, team: str) -> dict[str, Any]:
    row = {"team": team, "tier": "gold", "requests": 2, "failed": 0, "preemptions": 3, "share": 0.5, "entitled": 0.25}
    row |= {"ttft_mean": 0.5, "ttft_p95": 0.7, "ttft_p99": 0.8, "jct_mean": 2.0, "jct_p95": 4.0, "slowdown_mean": 1.5}
    row |= {"swaps": 7, "recomputes": 0, "promotions": 1}
    return {
        "policy": policy,
        "failed": 0,
        "errors": [],
        "output_tokens_per_second": 10.0,
        "wall_seconds": 61.5,
        "teams": [row],
        "fairness": make_report([team, "b"]),
        "series": make_series([team, "b"]),
        "samples": {"jct": {team: [1.0, 3.0]}},
    }


def make_demo(team: str = "support", answer: str = "A scale.") -> dict[str, Any]:
    return {
        "lead": "Twice the same.",
        "facts": {"model": "m"},
        "warnings": ["The machine's speed differed by 25 %"],
        "question": "?",
        "answer": answer,
        "runs": [make_run("fcfs", team), make_run("eg-mlfq", team)],
    }
