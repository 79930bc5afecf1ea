"""Numbers as people read them."""

from zoneinfo import ZoneInfo

import pytest

from gateway.reports.format import mark, part_of, seconds, size, span
from gateway.reports.series import bin_series, time_ticks
from tests.support.gateway.fairness_document import make_series


def test_when_a_zone_is_off_by_a_half_clock_times_are_its_own() -> None:
    binned = bin_series(make_series(["a"], 7200), ["a"], {"a": 1})
    assert [label for _, label in time_ticks(binned)] == ["20:00", "20:30", "21:00", "21:30", "22:00"]
    shifted = [label for _, label in time_ticks(binned, ZoneInfo("Asia/Kolkata"))]
    assert shifted == ["01:30", "02:00", "02:30", "03:00", "03:30"]
    assert [label for _, label in time_ticks(binned, elapsed=True)][:2] == ["0 s", "1800 s"]
    assert all(0 <= place <= 1 for place, _ in time_ticks(binned))


@pytest.mark.parametrize(
    ("measured", "bound", "text"),
    [
        (1.0, 1.0, "✓ ok"),
        (1.001, 1.0, "✗ violated"),
        (1.0, None, "– no bound"),
        (1.0, 0.0, "– no bound"),
        (None, 1.0, "– nothing measured"),
    ],
)
def test_a_promise_is_kept_up_to_its_bound(measured: float | None, bound: float | None, text: str) -> None:
    assert mark(measured, bound).text == text


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (seconds(0.0123), "12.3 ms"),
        (seconds(1.5), "1.50 s"),
        (seconds(75.04), "75.0 s"),
        (seconds(600), "10.0 min"),
        (seconds(9000), "2.5 h"),
        (seconds(216_000), "2.5 days"),
        (seconds(None), "–"),
        (size(0), "0 B"),
        (size(1023), "1023 B"),
        (size(1536), "1.5 KiB"),
        (size(5 * 1024**4), "5.0 TiB"),
        (size(5 * 1024**5), "5,120.0 TiB"),
        (span(1), "1 s"),
        (span(900), "15 min"),
        (span(21600), "6 h"),
        (span(172800), "2 day"),
        (part_of(1, 4), "25.0 %"),
        (part_of(1, None), "–"),
    ],
)
def test_amounts_have_their_unit(shown: str, text: str) -> None:
    assert shown == text
