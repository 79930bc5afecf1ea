"""What a page says of requests."""

from gateway.reports import svg


def test_cumulative_ends_at_one() -> None:
    assert svg.cumulative([3.0, 1.0], 4.0) == [(0.0, 0.0), (0.25, 0.5), (0.75, 1.0), (1.0, 1.0)]
    assert svg.cumulative([], 4.0) == []
