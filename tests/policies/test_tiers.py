"""Tiers as the scheduler gets them."""

from policies.sequences import TeamTerms
from policies.tiers import DEFAULT_TIERS, Tier


def test_a_tiers_milliseconds_become_microseconds() -> None:
    tier = Tier("x", weight=3, start_level=2, starving_after_ms=7, promotion_burst_grants=5, max_queue_seconds=9)
    assert tier.terms(4) == TeamTerms(4, 3, 2, 7_000, 5)


def test_a_better_default_tier_has_more_of_everything() -> None:
    gold, silver, bronze = DEFAULT_TIERS
    assert [tier.name for tier in DEFAULT_TIERS] == ["gold", "silver", "bronze"]
    for better, worse in ((gold, silver), (silver, bronze)):
        assert better.weight > worse.weight and better.start_level < worse.start_level
        assert better.starving_after_ms < worse.starving_after_ms
