"""The demo's page and its plots: self-contained, and text stays text."""

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from gateway import svg
from gateway.report_html import render, table_rows

EVIL = "<script>alert(1)</script>"


def make_run(policy: str, team: str) -> dict[str, Any]:
    row = {"team": team, "tier": "gold", "requests": 2, "failed": 0, "preemptions": 3, "share": 0.5, "entitled": 0.25}
    row |= {"ttft_mean": 0.5, "ttft_p95": 0.7, "jct_mean": 2.0, "jct_p95": 4.0, "slowdown_mean": 1.5}
    return {
        "policy": policy,
        "failed": 0,
        "errors": [],
        "output_tokens_per_second": 10.0,
        "teams": [row],
        "series": {"t": [1.0, 2.0], "served": {team: [0.5, 1.0], "b": [0.5, 0.0]}},
        "samples": {"jct": {team: [1.0, 3.0]}},
    }


def make_report(team: str = "support", answer: str = "A scale.") -> dict[str, Any]:
    return {
        "lead": "Twice the same.",
        "facts": {"model": "m"},
        "question": "?",
        "answer": answer,
        "runs": [make_run("fcfs", team), make_run("eg-mlfq", team)],
    }


@pytest.mark.case("D15")
def test_names_and_answers_are_text_in_the_page() -> None:
    page = render(make_report(team=EVIL, answer='"><img src=x onerror=alert(1)>'))
    assert EVIL not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_the_page_needs_nothing_from_outside_and_no_script() -> None:
    page = render(make_report())
    assert "<script" not in page
    assert re.findall(r"(?:src|href)=", page) == []
    assert [url for url in re.findall(r"https?://[^\s\"'<]+", page) if "www.w3.org" not in url] == []
    assert page.count("<svg") == 6
    assert page.count('role="img" aria-label="') == 6


def test_each_team_has_a_row_for_each_policy() -> None:
    rows = table_rows(make_report())
    assert [(row["team"], row["policy"], row["jct_mean"]) for row in rows] == [
        ("support", "fcfs", 2.0),
        ("support", "eg-mlfq", 2.0),
    ]


def test_a_failed_request_is_said_on_the_page() -> None:
    report = make_report()
    report["runs"][1] |= {"failed": 2, "errors": ["HTTP 503: no"]}
    assert "2 requests failed; the first reason: HTTP 503: no" in render(report)


def test_a_team_has_the_same_colour_under_every_policy() -> None:
    report = make_report()
    report["runs"][1]["series"]["served"] = {"b": [0.5, 0.0]}  # of the other team nothing ran, and the order differs
    keys = re.findall(r'height="10" fill="(#\w+)"/><text [^>]*>([^<]+)<', render(report))
    assert len(keys[-4:]) == 4
    assert keys[-4:-2] == keys[-2:]


@pytest.mark.parametrize(
    "drawing",
    [
        svg.bars(EVIL, "s", {"a<b": {"x&y": 1.0, "z": None}, "c": {"x&y": 0.0}}),
        svg.bars("empty", "s", {}),
        svg.lines("l", "s", "share", {"a": [(0.0, 0.0), (1.0, 0.5)], "none": []}),
        svg.stacked("s", "s", [0.0, 1.0], {"a": [0.0, 1.0], "b": [0.0, 3.0]}),
        svg.stacked("empty", "s", [], {}),
    ],
)
def test_every_plot_is_well_formed(drawing: str) -> None:
    root = ElementTree.fromstring(drawing)
    assert root.attrib["aria-label"]


def test_stacked_parts_fill_the_height_and_an_idle_second_stays_empty() -> None:
    root = ElementTree.fromstring(svg.stacked("s", "s", [0.0, 5.0], {"a": [0.0, 1.0], "b": [0.0, 3.0]}))
    heights = [
        float(r.attrib["height"]) for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.attrib["height"] != "10"
    ]
    assert len(heights) == 2
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.2)


@pytest.mark.parametrize(
    ("right", "ticks"), [(38.7, ["0", "5", "10", "15", "20", "25", "30", "35"]), (0.5, ["0", "0.08", "0.16", "0.24"])]
)
def test_ticks_of_time_are_round_and_inside_the_picture(right: float, ticks: list[str]) -> None:
    root = ElementTree.fromstring(svg.lines("l", "s", "share", {"a": [(0.0, 0.0), (right, 1.0)]}))
    foot = str(svg.HEIGHT - 44 + 16)
    drawn = [text for text in root.iter("{http://www.w3.org/2000/svg}text") if text.attrib.get("y") == foot]
    assert [text.text for text in drawn][: len(ticks)] == ticks
    assert all(float(text.attrib["x"]) <= svg.WIDTH for text in drawn)


def test_cumulative_ends_at_one() -> None:
    assert svg.cumulative([3.0, 1.0]) == [(0.0, 0.0), (1.0, 0.0), (1.0, 0.5), (3.0, 0.5), (3.0, 1.0)]
    assert svg.cumulative([]) == []


def test_a_long_legend_is_broken_into_rows_inside_the_picture() -> None:
    curves = {f"a team with a long name {i}": [(0.0, 0.0), (1.0, 1.0)] for i in range(7)}
    root = ElementTree.fromstring(svg.lines("l", "s", "share", curves))
    _, top, width, _ = (float(part) for part in root.attrib["viewBox"].split())
    boxes = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.attrib["height"] == "10"]
    assert len({box.attrib["y"] for box in boxes}) > 1
    for box, name in zip(boxes, curves, strict=True):
        assert float(box.attrib["x"]) + 26 + 7 * len(name) <= width
        assert float(box.attrib["y"]) >= top
