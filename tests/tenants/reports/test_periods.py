"""Moments, periods, and the days of a time zone."""

import random
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import insert

from tenants import reports, tables
from tenants.clock import epoch_us, from_epoch_us
from tenants.errors import Invalid
from tenants.reports.periods import Period, days_of, offsets, parse_moment, parse_period, zone_of
from tests.support.tenants.histories import DAY_US, values
from tests.support.tenants.stores import NOW_US, Store, closed_row, open_entry

pytestmark = pytest.mark.anyio
BERLIN, KOLKATA, APIA, LORD_HOWE = "Europe/Berlin", "Asia/Kolkata", "Pacific/Apia", "Australia/Lord_Howe"
HOUR_US = 3_600_000_000


def test_a_moment_is_utc_unless_it_says_otherwise() -> None:
    midnight = parse_moment("2026-03-31", "from")
    assert midnight == parse_moment("2026-03-31T00:00:00Z", "from") == parse_moment("2026-03-31T09:00:00+09:00", "from")
    assert parse_moment("2026-03-31T00:00:00", "from") == midnight
    assert parse_moment("2024-02-29", "from") + DAY_US == parse_moment("2024-03-01", "from")


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "yesterday",
        "2026-02-30",
        "2026-13-01",
        "1" * 400,
        "0001-01-01T00:00:00+23:59",
        "1969-12-31",
        "9999-12-31T23:59:59-23:00",
        "2026-W01-1",
        "20260101",
        "2026-01-01T00:00:00Z " + "0" * 40,
    ],
)
def test_a_wrong_moment_names_the_parameter(wrong: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_moment(wrong, "to")
    assert caught.value.param == "to"


def test_a_period_is_the_last_day_unless_said_and_never_empty() -> None:
    assert parse_period(None, None, NOW_US) == Period(NOW_US + 1 - DAY_US, NOW_US + 1)
    assert parse_period("1970-01-01", "1970-01-01T00:00:01Z", NOW_US) == Period(0, 1_000_000)
    assert parse_period(None, "1970-01-01T00:00:01Z", NOW_US) == Period(0, 1_000_000)
    for pair in (("2026-01-02", "2026-01-01"), ("2026-01-01", "2026-01-01")):
        with pytest.raises(Invalid, match="empty"):
            parse_period(*pair, NOW_US)


@pytest.mark.case("B10")
def test_a_date_is_midnight_in_the_named_zone() -> None:
    period = parse_period("2026-03-01", "2026-04-01", NOW_US, BERLIN)
    assert period.to_us - period.from_us == 31 * DAY_US - HOUR_US  # the clocks went forward
    assert period.describe() == {
        "from": "2026-03-01T00:00:00+01:00",
        "to": "2026-04-01T00:00:00+02:00",
        "time_zone": BERLIN,
    }
    again = parse_period(str(period.describe()["from"]), str(period.describe()["to"]), NOW_US)
    assert (again.from_us, again.to_us) == (period.from_us, period.to_us)
    assert parse_period("2024-02-29", "2024-03-01", NOW_US, KOLKATA).describe()["from"] == "2024-02-29T00:00:00+05:30"
    assert parse_period("2024-02-29", None, NOW_US).describe()["time_zone"] == "UTC"


@pytest.mark.case("B10")
def test_an_offset_in_the_text_wins_over_the_zone() -> None:
    assert parse_moment("2026-03-31T00:00:00Z", "from", BERLIN) == parse_moment("2026-03-31", "from")
    twice = parse_moment("2026-10-25T02:30", "from", BERLIN)
    assert from_epoch_us(twice) == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)  # the first of the two
    skipped = parse_moment("2026-03-29T02:30", "from", BERLIN)
    assert from_epoch_us(skipped) == datetime(2026, 3, 29, 1, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    "wrong", ["", "Berlin", "Europe", "europe/nowhere", "../etc/passwd", "/etc/localtime", "UTC\n", "+01:00", "x" * 999]
)
def test_an_unknown_zone_names_the_parameter(wrong: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_period(None, None, NOW_US, wrong)
    assert caught.value.param == "tz"


@pytest.mark.parametrize("zone", [BERLIN, KOLKATA, APIA, LORD_HOWE, "America/New_York", "UTC"])
def test_offsets_are_the_zones_at_every_moment(zone: str) -> None:
    rng = random.Random(zone)
    start, end = (epoch_us(datetime(year, 1, 1, tzinfo=UTC)) for year in (2011, 2013))
    pieces = offsets(zone, start, end)
    assert len(pieces) == (1 if zone in (KOLKATA, "UTC") else len(pieces)) and pieces[0][0] == start
    edges = [at + step for at, _ in pieces[1:] for step in (-1, 0, 1)]
    for at_us in [*edges, *(rng.randrange(start, end) for _ in range(300))]:
        found = next(offset for valid_from, offset in reversed(pieces) if valid_from <= at_us)
        assert found == from_epoch_us(at_us).astimezone(ZoneInfo(zone)).utcoffset() // timedelta(microseconds=1)
    assert all(one[1] != other[1] and one[0] < other[0] for one, other in pairwise(pieces))


def _starts_of_days(zone: str, first: date, days: int) -> list[int]:
    return [
        epoch_us(datetime.combine(first + timedelta(days=i), datetime.min.time(), ZoneInfo(zone)))
        for i in range(days + 1)
    ]


@pytest.mark.case("B10", "G17")
@pytest.mark.parametrize(
    ("zone", "first", "hours"),
    [
        (BERLIN, date(2026, 3, 28), [24, 23, 24]),
        (BERLIN, date(2026, 10, 24), [24, 25, 24]),
        (KOLKATA, date(2026, 3, 28), [24, 24, 24]),
        (LORD_HOWE, date(2026, 4, 4), [24, 24.5, 24]),
        ("Asia/Beirut", date(2025, 3, 29), [24, 23, 24]),  # its clocks change at midnight
        ("Asia/Beirut", date(2024, 10, 25), [24, 25, 24]),  # and back to the day before
        ("UTC", date(2026, 3, 28), [24, 24, 24]),
    ],
)
async def test_every_quarter_of_an_hour_is_in_exactly_one_local_day(
    store: Store, zone: str, first: date, hours: list[float]
) -> None:
    """A row just before, at and after each midnight, and one in every quarter of an hour between."""
    starts = _starts_of_days(zone, first, len(hours))
    assert [(end - start) / HOUR_US for start, end in pairwise(starts)] == hours
    moments = {start + step for start in starts for step in (-1, 0, 1)}
    moments |= set(range(starts[0], starts[-1], HOUR_US // 4))
    rows = [
        closed_row(open_entry(f"r{at}", received_at_us=at - 9, admitted_at_us=at - 8), finished_at_us=at)
        for at in sorted(moments)
    ]
    async with store.database.begin_immediate() as connection:
        await connection.execute(insert(tables.ledger), values(rows))
    async with store.database.session() as connection:
        whole = await reports.usage_report(connection, Period(starts[0], starts[-1], zone), ("day",))
        single = [await reports.usage_report(connection, Period(start, end, zone)) for start, end in pairwise(starts)]
    expected = Counter(
        from_epoch_us(at).astimezone(ZoneInfo(zone)).date().isoformat()
        for at in moments
        if starts[0] <= at < starts[-1]
    )
    assert {line["day"]: line["requests"] for line in whole["data"]} == expected
    assert [report["total"]["requests"] for report in single] == [expected[day] for day in sorted(expected)]
    assert whole["total"]["requests"] == sum(expected.values())


def test_the_machines_own_zone_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = parse_period("2026-03-31", None, NOW_US)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert parse_period("2026-03-31", None, NOW_US) == expected
    assert zone_of("UTC").key == "UTC"


@pytest.mark.parametrize(
    ("zone", "begin", "end", "first", "last", "count"),
    [
        ("UTC", "2026-05-08", "2026-05-14", "2026-05-08", "2026-05-13", 6),
        ("UTC", "2026-05-08T23:59:59.999999Z", "2026-05-09T00:00:00.000001Z", "2026-05-08", "2026-05-09", 2),
        ("UTC", "2026-05-08", "2026-05-08T00:00:00.000001Z", "2026-05-08", "2026-05-08", 1),
        (BERLIN, "2026-03-28", "2026-03-31", "2026-03-28", "2026-03-30", 3),  # 23 hours on the second
        (BERLIN, "2026-10-24", "2026-10-27", "2026-10-24", "2026-10-26", 3),  # 25 hours on the second
        (LORD_HOWE, "2026-04-04", "2026-04-07", "2026-04-04", "2026-04-06", 3),
        (APIA, "2011-12-29", "2012-01-01", "2011-12-29", "2011-12-31", 2),  # there was no 30th
        (KOLKATA, "2026-01-01T00:00:00Z", "2026-01-01T18:30:00Z", "2026-01-01", "2026-01-01", 1),
        (KOLKATA, "2026-01-01T00:00:00Z", "2026-01-01T18:30:00.000001Z", "2026-01-01", "2026-01-02", 2),
    ],
)
@pytest.mark.case("H03")
def test_when_a_period_is_cut_into_days_then_each_is_there(
    zone: str, begin: str, end: str, first: str, last: str, count: int
) -> None:
    days = days_of(parse_period(begin, end, NOW_US, zone))
    shown = [from_epoch_us(day * DAY_US).date().isoformat() for day in days]
    assert (shown[0], shown[-1], len(shown)) == (first, last, count)
    assert shown == sorted(set(shown))
