"""Promises on a page: kept or broken."""

import re

from tests.support.gateway.fairness_document import make_report
from tests.support.gateway.report_pages import TEAMS, fairness


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
