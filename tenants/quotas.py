"""Limits: what a team may use. Pure values and their rules.

None means no limit, and 0 means that nothing is allowed. Negative numbers, NaN, infinities and numbers in text are
refused with a reason. (A gateway in the field read 0 as unlimited; another let a negative number give quota back.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches

from tenants.errors import Invalid
from tenants.key_format import redact

LIMIT_MAX = 2**53 - 1  # the largest whole number that every JSON reader keeps exact


@dataclass(frozen=True, slots=True)
class Limits:
    """One team's limits. None means no limit, 0 means that nothing is allowed."""

    requests_per_minute: int | None = None  # admitted in any rolling 60 s
    tokens_per_minute: int | None = None  # in any rolling 60 s: prompt + clamped max tokens, later those used
    concurrent: int | None = None  # requests between admission and their end


UNLIMITED = Limits()
LIMIT_NAMES: tuple[str, ...] = tuple(f.name for f in fields(Limits))


def check_limit(name: str, value: object) -> int | None:
    """`value` as a limit, if it is None or a whole number from 0 to LIMIT_MAX.

    Raises Invalid, with the reason, if not.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Invalid(
            f"{name} must be a whole number or null for unlimited, not {redact(repr(value)[:80])}.", param=name
        )
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Invalid(f"{name} must be finite; use null for unlimited.", param=name)
        if not value.is_integer():
            raise Invalid(f"{name} must be a whole number, not {value!r}.", param=name)
        value = int(value)
    if value < 0:
        raise Invalid(f"{name} must be 0 or more (0 is none, null is unlimited), not {value}.", param=name)
    if value > LIMIT_MAX:
        raise Invalid(f"{name} must be at most {LIMIT_MAX}; use null for unlimited.", param=name)
    return value


def limits_from(values: Mapping[str, object], base: Limits = UNLIMITED) -> Limits:
    """`base` with the given limits replaced. Raises Invalid for a wrong value or an unknown name."""
    merged: dict[str, int | None] = {name: getattr(base, name) for name in LIMIT_NAMES}
    for name, value in values.items():
        if name not in merged:
            near = get_close_matches(name, LIMIT_NAMES, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Known limits: {', '.join(LIMIT_NAMES)}."
            shown = redact(name[:80])
            raise Invalid(f"Unknown limit {shown!r}.{hint}", param=shown)
        merged[name] = check_limit(name, value)
    return Limits(**merged)
