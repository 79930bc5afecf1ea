"""Report periods: half-open, [from, to), cut at moments of one named time zone, UTC unless another is asked for.

Calendar days are those of that zone: a day on which its clocks change has 23 or 25 hours, and every request is in
exactly one day. Nothing here knows the machine's own zone.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from tenants.clock import epoch_us, from_epoch_us, iso
from tenants.errors import Invalid
from tenants.key_format import redact

DEFAULT_PERIOD = timedelta(hours=24)
DEFAULT_TIME_ZONE = "UTC"
DAY_US = 86_400_000_000
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d($|[T ]\d\d:\d\d)", re.ASCII)
_ZONE_NAME = re.compile(r"[A-Za-z0-9_+-]{1,30}(/[A-Za-z0-9_+-]{1,30}){0,2}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Period:
    """UTC epoch microseconds, `from_us` included, `to_us` not. Adjacent periods share nothing and miss nothing.

    `time_zone` is the IANA name of the zone whose days a report counts; it must be one that `zone_of` takes.
    """

    from_us: int
    to_us: int
    time_zone: str = DEFAULT_TIME_ZONE

    def describe(self) -> dict[str, str | None]:
        """As every report prints it."""
        return {"from": self.shown(self.from_us), "to": self.shown(self.to_us), "time_zone": self.time_zone}

    def shown(self, at_us: int) -> str | None:
        """A moment as the report prints it: RFC 3339 in the period's zone."""
        if self.time_zone == DEFAULT_TIME_ZONE:
            return iso(at_us)
        return from_epoch_us(at_us).astimezone(zone_of(self.time_zone)).isoformat()


def zone_of(name: str) -> ZoneInfo:
    """The time zone of an IANA name such as Europe/Berlin. Raises Invalid."""
    try:
        if _ZONE_NAME.fullmatch(name) is None:
            raise ValueError
        return ZoneInfo(name)
    except (ValueError, KeyError, OSError) as error:  # OSError: "Europe" is a directory
        raise Invalid(
            f"tz must be the name of a time zone such as UTC or Europe/Berlin, not {redact(name[:80])!r}.", param="tz"
        ) from error


def offsets(time_zone: str, from_us: int, to_us: int) -> list[tuple[int, int]]:
    """The zone's offsets from UTC over [from_us, to_us], as (valid from, offset), oldest first, both in microseconds.

    Clocks that change twice within a day, which no zone's do, would be missed.
    """
    zone = zone_of(time_zone)

    def offset(at_us: int) -> int:
        shift = from_epoch_us(at_us).astimezone(zone).utcoffset()
        assert shift is not None
        return shift // timedelta(microseconds=1)

    found = [(from_us, offset(from_us))]
    at_us = from_us
    while at_us < to_us:
        next_us = min(at_us + DAY_US, to_us)
        if offset(next_us) != found[-1][1]:
            low, high = at_us, next_us  # the offset is still the old one at `low`, the new one at `high`
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if offset(middle) == found[-1][1] else (low, middle)
            found.append((high, offset(high)))
        at_us = next_us
    return found


def days_of(period: Period) -> list[int]:
    """The calendar days of the period's zone that it touches, as days since 1970, oldest first.

    A day that a zone never had (Samoa left out 2011-12-30) is none.
    """
    pieces = [(period.from_us, 0)]
    if period.time_zone != DEFAULT_TIME_ZONE:
        pieces = offsets(period.time_zone, period.from_us, period.to_us - 1)
    ends = [*(begin for begin, _ in pieces[1:]), period.to_us]
    found: set[int] = set()
    for (begin, offset), end in zip(pieces, ends, strict=True):
        found.update(range((begin + offset) // DAY_US, (end - 1 + offset) // DAY_US + 1))
    return sorted(found)


def parse_moment(text: str, param: str, time_zone: str = DEFAULT_TIME_ZONE) -> int:
    """A date (its midnight) or a date with a time, in `time_zone` unless it names an offset. Raises Invalid.

    A time that the clocks show twice is the first of the two; one that they skip is read as if they had not changed.
    """
    zone = UTC if time_zone == DEFAULT_TIME_ZONE else zone_of(time_zone)
    try:
        if _MOMENT.match(text) is None or len(text) > 40:  # the parser would take far stranger forms
            raise ValueError
        moment = datetime.fromisoformat(text)
        value = epoch_us(moment if moment.tzinfo is not None else moment.replace(tzinfo=zone))
        if value < 0:
            raise ValueError
        from_epoch_us(value).astimezone(zone)  # so that it can be shown again
        return value
    except (ValueError, OverflowError) as error:
        raise Invalid(
            f"{param} must be a date such as 2026-03-31 or a time such as 2026-03-31T12:00:00Z, "
            f"not {redact(text[:80])!r}.",
            param=param,
        ) from error


def parse_period(from_text: str | None, to_text: str | None, now_us: int, time_zone: str = DEFAULT_TIME_ZONE) -> Period:
    """The asked period; without `to` it ends now, without `from` it is 24 hours long. Raises Invalid."""
    zone_of(time_zone)
    # One microsecond more, so that what was booked in this very instant is in the report.
    to_us = now_us + 1 if to_text is None else parse_moment(to_text, "to", time_zone)
    if from_text is not None:
        from_us = parse_moment(from_text, "from", time_zone)
    else:
        from_us = epoch_us(max(from_epoch_us(to_us) - DEFAULT_PERIOD, from_epoch_us(0)))
    if from_us >= to_us:
        raise Invalid(f"The period is empty: from {iso(from_us)} is not before to {iso(to_us)}.", param="from")
    return Period(from_us, to_us, time_zone)
