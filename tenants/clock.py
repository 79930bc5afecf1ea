"""Calendar time as the store keeps it: whole microseconds since 1970, UTC."""

import time
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def wall_clock_us() -> int:
    """Now, by the machine's wall clock."""
    return time.time_ns() // 1000


def epoch_us(moment: datetime) -> int:
    """A moment as microseconds since 1970. Raises ValueError when `moment` has no time zone."""
    if moment.tzinfo is None:
        raise ValueError("a moment needs a time zone")
    return (moment - _EPOCH) // timedelta(microseconds=1)


def from_epoch_us(value: int) -> datetime:
    """The moment `value` microseconds after 1970, in UTC."""
    return _EPOCH + timedelta(microseconds=value)


def iso(value: int | None) -> str | None:
    """`value` (microseconds since 1970) as RFC 3339 in UTC. A whole second has no fraction. None stays None."""
    return None if value is None else from_epoch_us(value).isoformat().replace("+00:00", "Z")
