"""Calendar time as the store keeps it: whole microseconds since 1970, UTC."""

import time
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def wall_clock_us() -> int:
    """Now, by the machine's wall clock."""
    return time.time_ns() // 1000


def epoch_us(moment: datetime) -> int:
    """An aware moment as microseconds since 1970. Raises ValueError for a naive one."""
    if moment.tzinfo is None:
        raise ValueError("a moment needs a time zone")
    return (moment - _EPOCH) // timedelta(microseconds=1)


def from_epoch_us(value: int) -> datetime:
    """The moment, in UTC."""
    return _EPOCH + timedelta(microseconds=value)


def iso(value: int | None) -> str | None:
    """RFC 3339 in UTC, with microseconds only where there are any."""
    return None if value is None else from_epoch_us(value).isoformat().replace("+00:00", "Z")
