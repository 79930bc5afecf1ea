"""What a limit may be."""

import math
from typing import Any

import pytest

from tenants.errors import Invalid
from tenants.quotas import LIMIT_MAX, Limits, check_limit, limits_from


@pytest.mark.case("G20", "B16")
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (-1, "0 or more"),
        (-1.0, "0 or more"),
        (math.nan, "finite"),
        (math.inf, "finite"),
        (-math.inf, "finite"),
        (1e400, "finite"),
        (1.5, "whole number"),
        ("10,000", "whole number"),
        ("5", "whole number"),
        ("", "whole number"),
        (True, "whole number"),
        ([1], "whole number"),
        (LIMIT_MAX + 1, "at most"),
        (1e300, "at most"),
    ],
)
def test_impossible_amounts_are_refused_with_a_reason(value: Any, reason: str) -> None:
    with pytest.raises(Invalid, match=reason) as caught:
        check_limit("concurrent", value)
    assert caught.value.param == "concurrent"


@pytest.mark.case("G20")
def test_zero_is_none_and_null_is_unlimited() -> None:
    assert check_limit("concurrent", 0) == 0
    assert check_limit("concurrent", None) is None
    assert check_limit("concurrent", 7.0) == 7
    assert limits_from({}) == Limits(None, None, None)


def test_a_limit_that_is_not_named_stays() -> None:
    base = Limits(requests_per_minute=5, tokens_per_minute=6, concurrent=7)
    assert limits_from({"tokens_per_minute": None, "concurrent": 0}, base) == Limits(5, None, 0)


@pytest.mark.case("D11")
def test_a_misspelt_limit_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(Invalid, match="Did you mean requests_per_minute"):
        limits_from({"requests_per_minuet": 60})
    with pytest.raises(Invalid, match="Known limits: requests_per_minute"):
        limits_from({"zzz": 60})
