"""Drawings: well formed, broken where there is nothing, on scales that people can read."""

import xml.etree.ElementTree as ElementTree

import pytest

from gateway.reports import svg
from tests.support.gateway.report_pages import EVIL


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
