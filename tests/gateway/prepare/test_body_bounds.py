"""Bounds on bodies fit together."""

import pytest

from gateway.prepare.body_bounds import body_bounds

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"small_bytes": 26}, "less than 4 bodies of 26"),
        ({"max_body_bytes": 76}, "never fits"),
        ({"total_bytes": 199}, "less than those of two teams"),
    ],
)
def test_bounds_that_do_not_fit_together_are_refused(numbers: dict[str, int], said: str) -> None:
    fitting = {"max_body_bytes": 75, "small_bytes": 25, "team_bytes": 100, "total_bytes": 200}
    assert body_bounds(**fitting) == (100, 200)
    with pytest.raises(ValueError, match=said):
        body_bounds(**{**fitting, **numbers})


@pytest.mark.parametrize("max_body_bytes", [1024, 8 << 20, 1 << 30])
@pytest.mark.parametrize("small_bytes", [4096, 64 << 10, 1 << 30])
def test_default_bounds_fit_whatever_the_largest_body(max_body_bytes: int, small_bytes: int) -> None:
    team, total = body_bounds(max_body_bytes=max_body_bytes, small_bytes=small_bytes, team_bytes=0, total_bytes=0)
    assert body_bounds(max_body_bytes=max_body_bytes, small_bytes=small_bytes, team_bytes=team, total_bytes=total) == (
        team,
        total,
    )
