"""A period is read by the hour where hours are summed, and by the second around them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.reports.periods import Period
from tenants.reports.samples import HOUR_US, Reach, Span, split

pytestmark = pytest.mark.anyio


@given(st.data())
def test_a_period_is_split_into_parts_that_are_all_of_it(data: st.DataObject) -> None:
    """In minutes: every minute is read once, from hours or seconds; only where no seconds are, by whole hours."""
    minute, hour = HOUR_US // 60, 60
    hours_to = data.draw(st.integers(0, 6)) * hour
    seconds_from = data.draw(st.integers(0, hours_to // hour)) * hour
    start = data.draw(st.integers(0, 8 * hour))
    end = data.draw(st.integers(start + 1, 8 * hour + 1))
    found = split(Period(start * minute, end * minute), hours_to * minute, seconds_from * minute)
    read = [at for span in found.seconds for at in range(span.from_us // minute, span.to_us // minute)]
    assert all(at >= seconds_from for at in read)
    if found.hours is not None:
        assert found.hours.from_us % HOUR_US == found.hours.to_us % HOUR_US == 0
        assert found.hours.from_us < found.hours.to_us <= hours_to * minute
        read += range(found.hours.from_us // minute, found.hours.to_us // minute)
    whole_hours = [
        at for at in range(hours_to) if at < seconds_from and start <= at // hour * hour < end
    ]  # the minutes of hours that start in the period
    assert sorted(read) == sorted([*whole_hours, *(at for at in range(start, end) if at >= seconds_from)])


def test_a_split_of_a_known_case() -> None:
    h = HOUR_US
    assert split(Period(h // 2, 5 * h + 9), 4 * h, 0) == Reach(
        Span(h, 4 * h), (Span(h // 2, h), Span(4 * h, 5 * h + 9)), 0
    )
    assert split(Period(h // 2, h // 2 + 9), 4 * h, 0) == Reach(None, (Span(h // 2, h // 2 + 9),), 0)
    assert split(Period(h // 2, 3 * h // 2), 4 * h, 4 * h) == Reach(Span(h, 2 * h), (), 4 * h)
