"""EG-MLFQ: MLFQ order among *eligible* teams, so that neither many short requests nor long ones buy a larger share.

Each team offers its best candidate by (level, place). Among teams whose lag D is within the limit, the least
(level, D, place) is tried next:

    limit = max(least D of the able teams + Theta, least D of the teams with candidates left)

The second term keeps the device busy: when only teams above the gate have candidates, the least served of them runs.
Theta = 0 is strict fair share, Theta = infinity is level order without a gate.

State of one step. Two heaps hold each team that has a candidate left, by its next candidate: `_eligible` keyed
(level, D, place), and `_gated` keyed (D, place). `_able` is a heap of D over the able teams. Within a step D only
grows, by what each pick will probably cost, so entries are corrected when they come to the top, and a pick costs about
one push and one pop. A team that turns able again can lower the limit; then the top of `_eligible` moves back.

Sequences of one team come in order from a walk over its queues that lives as long as the picking does. A candidate that
is refused is passed over in this step only, and the next of the same team is tried.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from policies.config import PolicyConfig
from policies.metered import MeteredPolicy
from policies.mlfq import RankedSequence
from policies.shares import TeamShare


class EgMlfq(MeteredPolicy):
    """The gate over skip-join MLFQ. Implements `policies.policy.Policy`."""

    name = "eg-mlfq"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._eligible: list[tuple[int, int, int, RankedSequence]] = []
        self._gated: list[tuple[int, int, RankedSequence]] = []
        self._able: list[tuple[int, int, TeamShare]] = []
        self._walks: dict[TeamShare, Iterator[RankedSequence]] = {}
        self._limit = 0

    def begin(self, now_us: int) -> None:
        super().begin(now_us)
        self._walks = {}
        planned = self._planned
        heads = [team.levels.head for team in planned]
        self._gated = []
        if self._meter.theta is None:
            self._eligible = [(h.level, h.team.lag, h.place, h) for h in heads if h is not None]
            heapify(self._eligible)
            return
        able = self._able = [(team.lag, team.team_id, team) for team in planned if team.num_live > team.num_refused]
        heapify(able)
        limit = self._find_limit()
        self._eligible = [(h.level, h.team.lag, h.place, h) for h in heads if h is not None and h.team.lag <= limit]
        heapify(self._eligible)
        if len(self._eligible) < len(planned):
            self._gated = [(h.team.lag, h.place, h) for h in heads if h is not None and h.team.lag > limit]
            heapify(self._gated)

    def best(self) -> int | None:
        """The candidate to try next. Repeating the question gives the same answer."""
        eligible = self._eligible
        if self._meter.theta is not None:
            limit = self._find_limit()
            gated = self._gated
            while gated and gated[0][0] <= limit:
                self._open_gate()
            while eligible and eligible[0][1] > limit:
                _, lag, place, sequence = heappop(eligible)
                heappush(gated, (lag, place, sequence))
            if not eligible and gated:
                limit = gated[0][0]
                while gated and gated[0][0] == limit:
                    self._open_gate()
        return eligible[0][3].seq_id if eligible else None

    def take(self, seq_id: int, work_us: int) -> None:
        sequence = self._eligible[0][3]
        assert sequence.seq_id == seq_id, f"took {seq_id}, best was {sequence.seq_id}"
        team = sequence.team
        was_unable = team.num_live == team.num_refused
        self._book_taken(sequence, work_us)
        if was_unable and self._meter.theta is not None:
            heappush(self._able, (team.lag, team.team_id, team))
        self._advance(team)

    def refuse(self, seq_id: int) -> None:
        sequence = self._eligible[0][3]
        assert sequence.seq_id == seq_id, f"refused {seq_id}, best was {sequence.seq_id}"
        self._book_refused(sequence)
        self._advance(sequence.team)

    def _advance(self, team: TeamShare) -> None:
        """Replace the top of `_eligible`, which is `team`'s, by the team's next candidate."""
        walk = self._walks.get(team)
        if walk is None:
            walk = self._walks[team] = team.levels.walk()
            next(walk)
        following = next(walk, None)
        if following is None:
            heappop(self._eligible)
        else:
            heapreplace(self._eligible, (following.level, team.lag, following.place, following))

    def _open_gate(self) -> None:
        lag, place, sequence = heappop(self._gated)
        heappush(self._eligible, (sequence.level, lag, place, sequence))

    def _find_limit(self) -> int:
        """Least D of the able teams + Theta. If none is able, all active teams count as able."""
        able = self._able
        theta = self._meter.theta
        assert theta is not None
        while able:
            lag, team_id, team = able[0]
            if team.num_live == team.num_refused:
                heappop(able)
            elif team.lag != lag:
                heapreplace(able, (team.lag, team_id, team))
            else:
                return lag + theta
        return min((team.lag for team in self._planned), default=0) + theta
