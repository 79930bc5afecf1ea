"""The pages of the reports: self-contained, text stays text, each figure has a name and its numbers, teams a colour."""

import csv
import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote

import pytest

from gateway.reports import svg
from gateway.reports.comparison import render_demo, table_rows
from gateway.reports.fairness import render_fairness
from tests.support.gateway.fairness_document import EMPTY_SERIES, make_report, make_series

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


@pytest.mark.case("D15")
def test_names_and_answers_are_text_in_the_pages() -> None:
    answer = '"><img src=x onerror=alert(1)>'
    for page in (render_demo(make_demo(team=EVIL, answer=answer)), fairness([EVIL, 'a"onload="x', "c&d"])):
        tags = {tag for tag, _ in Reader(page).tags}
        assert tags.isdisjoint({"script", "img"})
        assert not any(name.startswith("on") for _, attributes in Reader(page).tags for name in attributes)
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


@pytest.mark.parametrize("page", [render_demo(make_demo()), fairness(TEAMS), fairness([f"t{i}" for i in range(40)])])
def test_a_page_needs_nothing_from_outside_and_names_its_figures(page: str) -> None:
    reader = Reader(page)
    addresses = [value for _, at in reader.tags for name, value in at.items() if name in ("src", "href", "action")]
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert "url(" not in page and "@import" not in page
    images = [attributes for _, attributes in reader.tags if attributes.get("role") == "img"]
    figures = [tag for tag, _ in reader.tags if tag == "figure"]
    assert len(images) == len(figures) == len(reader.links()) > 6
    assert all(len(attributes["aria-label"]) > 20 for attributes in images)
    anchors = {attributes["id"] for _, attributes in reader.tags if "id" in attributes}
    assert {address[1:] for address in addresses if address.startswith("#")} <= anchors


def test_the_figures_data_are_the_reports_numbers() -> None:
    report = make_report(TEAMS)
    files = Reader(fairness(TEAMS)).links()
    assert files["pauses.csv"] == [
        ["tier", "longest_pause_seconds", "pause_bound_seconds"],
        *([row["tier"], repr(row["longest_pause_seconds"]), str(row["pause_bound_seconds"] or "")]
          for row in report["tiers"]),
    ]  # fmt: skip
    assert [row[0] for row in files["shares.csv"][1:]] == TEAMS
    causes = files["interference.csv"]
    assert len(causes) == 1 + len(report["interference"])
    assert sum(int(row[2]) for row in causes[1:]) == sum(row["preemptions"] for row in report["interference"])
    assert len(files["lag.csv"]) == 91


def test_a_broken_promise_is_marked_and_a_kept_one_too() -> None:
    page = fairness(TEAMS)
    marks = re.findall(r"longest pause, (\w+)</th>.*?<td class=\"text (\w+)\">([^<]+)<", page)
    assert marks == [
        ("gold", "bad", "✗ violated 3 times"),
        ("silver", "good", "✓ ok"),
        ("bronze", "quiet", "– never starved"),
    ]
    bare = [row | {"pause_bound_seconds": None} for row in make_report(TEAMS)["data"]]
    assert "– no bound" in fairness(TEAMS, data=bare), "an order that promises nothing"
    tile = re.search(r"<dt>Longest pause</dt>.*?</div>", page)
    assert tile and "7.20 s" in tile[0] and "bronze, never starved" in tile[0], (
        "the longest, not the nearest to its bound"
    )
    assert "3 of gold" in page, "as many requests paused longer than their own bounds"
    kept = [row | {"pauses_over_bound": 0} for row in make_report(TEAMS)["tiers"]]
    assert "violated" not in fairness(TEAMS, tiers=kept), "no request beyond its own bound"
    assert "✗ violated" in fairness(TEAMS, tiers=kept, lag_max_seconds=2.0)


def test_memory_may_have_held_a_team_back_only_where_it_was_short() -> None:
    def page(swaps: int, bounds: list[float]) -> str:
        report = make_report(TEAMS)
        report["totals"]["swaps_out"] = swaps
        return render_fairness(report, make_series(TEAMS) | {"lag_bound": bounds * 45})

    memory, wide = "KV memory was short in this period", "The bound is twice as wide while KV blocks are short"
    narrow = page(0, [1.31, 1.31])
    assert memory not in narrow and wide not in narrow
    assert memory in page(3, [1.31, 1.31]) and memory in page(0, [1.31, 2.62])
    assert wide in page(0, [1.31, 2.62])
    assert "Below its entitlement: support 90.0 %, dev 93.0 %, reports 96.0 % of it. Min share is 0.812." in narrow


def test_a_period_without_work_is_a_whole_page_that_says_so() -> None:
    reader = Reader(render_fairness(make_report([], is_empty=True), EMPTY_SERIES))
    text = " ".join(reader.text)
    assert "No team was backlogged" in text
    assert "Nobody lost a slot" in text
    assert "NaN" not in text and "None" not in text


def test_beyond_the_palette_the_small_teams_share_a_colour() -> None:
    teams = [f"team-{i:02}" for i in range(20)]
    reader = Reader(fairness(teams))
    panels = [name for name in reader.links() if name.startswith("share-")]
    assert len(panels) == svg.NUM_COLOURS
    assert "share-others.csv" in panels
    assert {f"share-{team}.csv" for team in teams[:11]} <= set(panels), "the largest keep theirs"
    assert [row[0] for row in reader.links()["promotions.csv"][1:]] == teams
    assert "others" in reader.links()["lag.csv"][0]


def test_a_team_has_the_same_colour_in_every_figure() -> None:
    page = fairness(TEAMS)
    bars = dict(re.findall(r'<span class="name">(\w+)</span><svg[^>]*><rect class="(c\d+) fill"', page))
    legend = dict(reversed(pair) for pair in re.findall(r'<span class="key (c\d+) [^"]*"></span>(\w+)<', page))
    assert bars.items() >= {"support": "c0", "dev": "c1", "reports": "c2"}.items()
    assert legend.items() >= {"support": "c0", "dev": "c1", "reports": "c2"}.items()


@pytest.mark.parametrize("teams", [TEAMS, [f"team-{i:02}" for i in range(20)]])
def test_the_matrix_adds_up(teams: list[str]) -> None:
    page = fairness(teams)
    table = page[page.index("<caption>Preemptions") :]
    body = re.findall(r"<tr><th[^>]*>([^<]+)</th>(.*?)</tr>", table[: table.index("</table>")])
    numbers = {name: [int(n.replace(",", "").replace("·", "0")) for n in re.findall(r">([\d,·]+)</td>", cells)]
               for name, cells in body if name != "causer ↓, victim →"}  # fmt: skip
    total = sum(row["preemptions"] for row in make_report(teams)["interference"])
    suffered = numbers.pop("suffered")
    assert suffered == [sum(column) for column in zip(*numbers.values(), strict=True)]
    assert suffered[-1] == sum(suffered[:-1]) == total


def test_the_demo_page_is_a_report_with_the_comparison_first() -> None:
    report = make_demo()
    report["runs"][1]["fairness"]["jain_weighted"] = 0.7654
    page = render_demo(report)
    assert "0.765" in page
    assert "The machine&#39;s speed differed by 25 %" in page
    assert "Times the first order&#39;s: support 1.00." in page
    assert page.index("Both orders side by side") < page.index("Longest pause of a request")
    assert "CC-BY-4.0" in page
    rows = table_rows(report)
    assert [(row["team"], row["policy"], row["jct_mean"], row["swaps"]) for row in rows] == [
        ("support", "fcfs", 2.0, 7),
        ("support", "eg-mlfq", 2.0, 7),
    ]


def test_a_failed_request_is_said_on_the_page() -> None:
    report = make_demo()
    report["runs"][1] |= {"failed": 2, "errors": ["HTTP 503: no"]}
    assert "2 requests failed; the first reason: HTTP 503: no" in render_demo(report)


@pytest.mark.parametrize(
    "drawing",
    [
        svg.bars(EVIL, [svg.Bar("a<b", [(1.0, "c0"), (2.0, "c1")], "x&y", 2.0), svg.Bar("c", [], "")], 3.0),
        svg.bars("empty", [], 0.0),
        svg.chart("c", [svg.Curve("a", "c0", [(0.0, None), (0.5, 1.0), (1.0, None)])], [(0.0, "<")], [(1.0, ">")]),
        svg.chart("empty", [], [], []),
        svg.ranges("r", [svg.Range("a", 0.0, 0.1, 30.0, "&")], "s", 0.001),
        svg.ranges("empty", [], "s", 1.0),
        str(svg.Legend([(EVIL, "c0", "dashed")])),
    ],
)
def test_every_drawing_is_well_formed(drawing: str) -> None:
    root = ElementTree.fromstring(drawing)
    assert root.attrib.get("aria-label") or root.tag == "ul"


def test_a_step_line_is_broken_where_there_is_nothing() -> None:
    drawn = svg.chart(
        "c",
        [svg.Curve("a", "c0", [(0.0, 0.5), (0.25, None), (0.5, 1.0), (0.75, 0.5), (1.0, 0.5)], is_step=True)],
        [],
        [],
    )
    assert 'd="M0.0 500.0H250.0V500.0M500.0 0.0H750.0V500.0H1000.0V500.0"' in drawn


@pytest.mark.parametrize(
    ("value", "top"),
    [(0, 1), (0.3, 0.3), (0.27, 0.3), (1.31, 2), (2.2, 2.5), (38, 40), (5.99, 6), (7e6, 8e6), (0.00012, 0.0002)],
)
def test_scales_end_at_round_numbers(value: float, top: float) -> None:
    assert svg.nice(value) == pytest.approx(top)
    labels = [label for _, label in svg.value_ticks(svg.nice(value))]
    assert float(labels[-1].replace(",", "")) == pytest.approx(top)
    assert len(set(labels)) == 5


def test_cumulative_ends_at_one() -> None:
    assert svg.cumulative([3.0, 1.0], 4.0) == [(0.0, 0.0), (0.25, 0.5), (0.75, 1.0), (1.0, 1.0)]
    assert svg.cumulative([], 4.0) == []
