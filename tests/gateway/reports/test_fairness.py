"""The fairness report's page: its figures are the report's numbers, and each team has one colour."""

import re

import pytest

from gateway.reports import svg
from gateway.reports.fairness import render_fairness
from tests.support.gateway.fairness_document import EMPTY_SERIES, make_report, make_series
from tests.support.gateway.report_pages import TEAMS, Reader, fairness


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
