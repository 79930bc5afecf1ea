"""Tiers: named classes of service. A tier maps a team onto a weight, a start level and a promotion budget."""

from dataclasses import dataclass

from policies.sequences import TeamTerms


@dataclass(frozen=True, slots=True)
class Tier:
    """One class of service (`docs/scheduling.md`). Weight is the share; the start level only reorders inside it."""

    name: str
    weight: int  # 1..1000
    start_level: int  # 0..7
    starving_after_ms: int  # wait after which a sequence joins the promotion queue
    promotion_burst_grants: int  # most unused grants a team keeps
    max_queue_seconds: int  # a request that has not started by then is refused with queue_timeout

    def terms(self, team_id: int) -> TeamTerms:
        """This tier as the scheduler needs it for one team."""
        return TeamTerms(
            team_id=team_id,
            weight=self.weight,
            start_level=self.start_level,
            starving_after_us=self.starving_after_ms * 1000,
            promotion_burst_grants=self.promotion_burst_grants,
        )


DEFAULT_TIERS: tuple[Tier, ...] = (
    Tier("gold", weight=4, start_level=0, starving_after_ms=300, promotion_burst_grants=4, max_queue_seconds=55),
    Tier("silver", weight=2, start_level=1, starving_after_ms=1000, promotion_burst_grants=4, max_queue_seconds=55),
    Tier("bronze", weight=1, start_level=2, starving_after_ms=3000, promotion_burst_grants=2, max_queue_seconds=600),
)
