"""Time series as pictures show them: whole samples in round bins, the report's own rule for shares, honest axes."""

from typing import Any

import pytest

from gateway.reports.series import BINS_MAX, OTHERS, bin_series, step_of, time_ticks
from tests.support.gateway.fairness_document import EMPTY_SERIES, make_series

TEAMS = ["a", "b", "c"]
WEIGHTS = {"a": 4, "b": 2, "c": 1}


def brute_share(series: dict[str, Any], team: str, places: list[int]) -> float | None:
    """Served over everybody's served, in the samples in which the team was backlogged."""
    counted = [i for i in places if series["backlogged"][team][i]]
    whole = sum(series["served"][one][i] for one in series["served"] for i in counted)
    return sum(series["served"][team][i] for i in counted) / whole if counted else None


@pytest.mark.parametrize("length", [1, 90, 96, 97, 500, 3600])
def test_a_bin_has_the_reports_share_of_its_samples(length: int) -> None:
    series = make_series(TEAMS, length)
    binned = bin_series(series, TEAMS, WEIGHTS)
    assert binned.count <= BINS_MAX + 1
    assert binned.width == step_of(length / BINS_MAX)
    first = series["at"][0] - 1
    for team in TEAMS:
        for place, share in enumerate(binned.share[team]):
            left = binned.start + place * binned.width
            inside = [i for i, at in enumerate(series["at"]) if left < at <= left + binned.width]
            assert share == pytest.approx(brute_share(series, team, inside)), (team, place)
    assert binned.start <= first < binned.start + binned.width


def test_a_team_that_was_not_backlogged_has_no_share_and_no_lag() -> None:
    series = make_series(TEAMS, 60)
    binned = bin_series(series, TEAMS, WEIGHTS)
    for i, backlogged in enumerate(series["backlogged"]["a"]):
        assert (binned.share["a"][i] is None) == (binned.lag["a"][i] is None) == (not backlogged)


def test_a_bin_is_never_shorter_than_a_sample() -> None:
    series = make_series(["a"], 50)
    series["at"] = [series["at"][0] + 3600 * i for i in range(50)]
    series["interval_seconds"] = [3600.0] * 50
    binned = bin_series(series, ["a"], {"a": 1})
    assert (binned.width, binned.count) == (3600, 50)


def test_small_teams_are_drawn_together_and_nothing_is_lost() -> None:
    series = make_series(TEAMS, 40)
    binned = bin_series(series, ["a"], WEIGHTS)
    assert list(binned.share) == ["a", OTHERS]
    served, backlogged = series["served"], series["backlogged"]
    together = {
        "served": {"a": served["a"], "bc": [b + c for b, c in zip(served["b"], served["c"], strict=True)]},
        "backlogged": {"bc": [max(pair) for pair in zip(backlogged["b"], backlogged["c"], strict=True)]},
    }
    assert binned.share[OTHERS] == [pytest.approx(brute_share(together, "bc", [i])) for i in range(40)]


def test_evenness_is_one_when_all_are_equally_satisfied() -> None:
    series = make_series(TEAMS, 30)
    series["served"] = {team: [value * 0.7 for value in series["entitled"][team]] for team in TEAMS}
    binned = bin_series(series, TEAMS, WEIGHTS)
    known = [value for value in binned.jain if value is not None]
    assert known and known == [pytest.approx(1.0)] * len(known)
    series["served"]["a"] = [0.0] * 30
    worse = bin_series(series, TEAMS, WEIGHTS)
    assert 0.0 in worse.satisfaction_least
    assert min(value for value in worse.jain if value is not None) < 0.9


def test_nothing_is_an_empty_picture() -> None:
    binned = bin_series(EMPTY_SERIES, [], {})
    assert (binned.count, time_ticks(binned)) == (0, [])
