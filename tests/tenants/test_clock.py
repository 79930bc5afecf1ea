"""Moments as whole microseconds."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from tenants.clock import epoch_us, from_epoch_us, iso


@pytest.mark.parametrize(
    ("moment", "value", "text"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0, "1970-01-01T00:00:00Z"),
        (datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), 0, "1970-01-01T00:00:00Z"),
        (datetime(1970, 1, 2, 0, 0, 1, 5, tzinfo=UTC), 86_401_000_005, "1970-01-02T00:00:01.000005Z"),
        (datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC), -1_000_000, "1969-12-31T23:59:59Z"),
    ],
)
def test_a_moment_is_its_microseconds_and_back(moment: datetime, value: int, text: str) -> None:
    assert epoch_us(moment) == value
    assert from_epoch_us(value) == moment
    assert iso(value) == text


def test_a_moment_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a time zone"):
        epoch_us(datetime(2026, 1, 1))
    assert iso(None) is None
