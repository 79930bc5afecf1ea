"""Report periods: half-open, [from, to), in UTC."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tenants.clock import epoch_us, from_epoch_us, iso
from tenants.errors import Invalid
from tenants.key_format import redact

DEFAULT_PERIOD = timedelta(hours=24)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d($|[T ]\d\d:\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Period:
    """UTC epoch microseconds, `from_us` included, `to_us` not. Adjacent periods share nothing and miss nothing."""

    from_us: int
    to_us: int

    def describe(self) -> dict[str, str | None]:
        """As every report prints it."""
        return {"from": iso(self.from_us), "to": iso(self.to_us), "time_zone": "UTC"}


def parse_moment(text: str, param: str) -> int:
    """A date (its midnight) or a date with a time, in UTC unless it names an offset. Raises Invalid."""
    try:
        if _MOMENT.match(text) is None or len(text) > 40:  # the parser would take far stranger forms
            raise ValueError
        moment = datetime.fromisoformat(text)
        value = epoch_us(moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC))
        if value < 0:
            raise ValueError
        from_epoch_us(value)  # so that it can be shown again
        return value
    except (ValueError, OverflowError) as error:
        raise Invalid(
            f"{param} must be a date such as 2026-03-31 or a time such as 2026-03-31T12:00:00Z, "
            f"not {redact(text[:80])!r}.",
            param=param,
        ) from error


def parse_period(from_text: str | None, to_text: str | None, now_us: int) -> Period:
    """The asked period; without `to` it ends now, without `from` it is 24 hours long. Raises Invalid."""
    # One microsecond more, so that what was booked in this very instant is in the report.
    to_us = now_us + 1 if to_text is None else parse_moment(to_text, "to")
    if from_text is not None:
        from_us = parse_moment(from_text, "from")
    else:
        from_us = epoch_us(max(from_epoch_us(to_us) - DEFAULT_PERIOD, from_epoch_us(0)))
    if from_us >= to_us:
        raise Invalid(f"The period is empty: from {iso(from_us)} is not before to {iso(to_us)}.", param="from")
    return Period(from_us, to_us)
