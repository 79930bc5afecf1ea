"""EG-MLFQ: MLFQ order among *eligible* teams, so that neither many short requests nor long ones buy a larger share.

Each team offers its best candidate by (rank, place). Among teams whose lag D is within the limit, the least
(rank, D, place) is tried next; rank is the level, but for lane P and minimum runs (`policies.levels`):

    limit = max(least D of the able teams as the step began + Theta, least D of the teams with candidates left)

The first term looks at D as the step began: were it to rise with what the picks will probably cost, the least served
team's own picks would open the gate for one far ahead of it, whose D then stays while the other's falls back. The
second term keeps the device busy: when only teams above the gate have candidates, the least served of them runs.
Theta = 0 is strict fair share, Theta = infinity is level order without a gate.

A coasting team (`policies.coast`) offers its sequences by arrival instead; its level in these keys is that of the
sequence it offers.

State of one step. Two heaps hold each team that has a candidate left, by its next candidate: `_eligible` keyed
(rank, D, place) holds those within the limit, `_gated` keyed (D, place) the others. `_able` is a heap, over the
able teams, of D as the step began. The limit is looked at again only when a team turned able or unable, or when no
eligible candidate is left. Only a team that turns able again, or the end of the second term's rule, can lower it. A
pick costs about one exchange at the top of a heap.

Sequences of one team come in order from a walk over its queues that lives as long as the picking does. A candidate that
is refused is passed over in this step only, and the next of the same team is tried.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from policies.accounts import RankedSequence, TeamShare, has_token, may_fit, was_taken
from policies.books import MeteredPolicy
from policies.config import PolicyConfig
from policies.prompt_time import even_prompt_us
from policies.sequences import Starving


class EgMlfq(MeteredPolicy):
    """The gate over skip-join MLFQ. Implements `policies.policy.Policy`."""

    name = "eg-mlfq"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._eligible: list[tuple[int, int, int, RankedSequence]] = []
        self._gated: list[tuple[int, int, RankedSequence]] = []
        self._able: list[tuple[int, int, TeamShare]] = []
        self._walks: dict[TeamShare, Iterator[RankedSequence]] = {}
        self._limit = 0  # no candidate of `_gated` is within it, every one of `_eligible` is, unless `_is_stale`
        self._is_stale = False

    def begin(self, now_us: int) -> list[Starving]:
        starving = super().begin(now_us)
        self._begin_picking()
        return starving

    def _begin_picking(self) -> None:
        """Put each team's best candidate on its side of the gate."""
        planned = self._planned
        self._walks = {}
        self._gated = []
        self._is_stale = False
        heads = [head for team in planned if (head := team.levels.head) is not None]
        widths = self._meter.widths
        if widths is None:
            self._eligible = [(head.rank, head.team.lag, head.place, head) for head in heads]
            heapify(self._eligible)
            return
        self._able = [(team.lag, team.team_id, team) for team in planned if team.num_live > team.num_refused]
        heapify(self._able)
        self._limit = limit = self._find_least() + widths.theta
        self._eligible = [(head.rank, lag, head.place, head) for head in heads if (lag := head.team.lag) <= limit]
        heapify(self._eligible)
        if len(self._eligible) < len(heads):
            self._gated = [(lag, head.place, head) for head in heads if (lag := head.team.lag) > limit]
            heapify(self._gated)

    def best(self) -> int | None:
        """The candidate to try next. Repeating the question gives the same answer."""
        if self._is_stale:
            self._regate()
        eligible = self._eligible
        return eligible[0][3].seq_id if eligible else None

    def take(self, seq_id: int, work_us: int, cost_us: int | None = None) -> None:
        sequence = self._eligible[0][3]
        assert sequence.seq_id == seq_id, f"took {seq_id}, best was {sequence.seq_id}"
        team = sequence.team
        was_able = team.num_live > team.num_refused
        self._book_taken(sequence, work_us, cost_us)
        if not was_able:
            heappush(self._able, (team.lag - team.provisional, team.team_id, team))
            self._is_stale = True
        self._advance(team)

    def refuse(self, seq_id: int) -> None:
        eligible = self._eligible
        sequence = eligible[0][3]
        assert sequence.seq_id == seq_id, f"refused {seq_id}, best was {sequence.seq_id}"
        team = sequence.team
        if not sequence.is_refused:
            self._book_refused(sequence)
            if team.num_live == team.num_refused:
                self._is_stale = True
        following = self._following(team)
        if following is None:
            heappop(eligible)
            if not eligible:
                self._is_stale = True
            return
        # When blocks are short, whole queues are refused one after the other. The team's lag has not grown, so its next
        # candidate nearly always stays on top, and comparing it with the two below is all that is needed.
        entry = (following.rank, team.lag, following.place, following)
        size = len(eligible)
        if (size < 2 or entry < eligible[1]) and (size < 3 or entry < eligible[2]):
            eligible[0] = entry
        else:
            heapreplace(eligible, entry)

    def refuse_new(self) -> None:
        super().refuse_new()
        heads: list[RankedSequence] = []
        for head in [*(entry[3] for entry in self._eligible), *(entry[2] for entry in self._gated)]:
            team = head.team
            if team.num_started == 0:
                continue
            walk = self._walks.get(team)
            following: RankedSequence | None
            if walk is None:  # `head` is still the first of its walk
                walk = filter(was_taken, team.levels.walk())
                following = next(walk, None)
            else:
                walk = filter(was_taken, walk)
                following = head if head.step else next(walk, None)
            self._walks[team] = walk
            if following is not None:
                heads.append(following)
        limit = self._limit
        is_gated = self._meter.widths is not None
        self._eligible = [(h.rank, h.team.lag, h.place, h) for h in heads if not is_gated or h.team.lag <= limit]
        self._gated = [(h.team.lag, h.place, h) for h in heads if is_gated and h.team.lag > limit]
        heapify(self._eligible)
        heapify(self._gated)
        self._is_stale = True

    def prompt_time_us(self, team_id: int, others: Mapping[int, int], step_us: int) -> int | None:
        """By `policies.prompt_time`; lags are those at the step's beginning."""
        widths = self._meter.widths
        teams = self._meter.teams
        team = teams[team_id]
        rivals = [(teams[other], part_us) for other, part_us in others.items() if other != team_id and part_us > 0]
        if widths is None or not rivals:
            return None
        least = min([rival.lag - rival.provisional for rival, _ in rivals])
        behind = least + widths.theta - team.lag + team.provisional
        even_us = even_prompt_us(step_us, team.weight, [(r.weight, part_us) for r, part_us in rivals])
        limit_us = max(0, behind // team.unit + even_us)
        head = self._eligible[0][3]
        # What a grant gives is bounded by the budget, and the gate lets the team run. If other rows of the team could
        # hold its lag at the limit for good, a granted prompt would wait for them.
        return max(limit_us, head.grant_left) if head.team is team else limit_us

    def leave_prompts(self, team_id: int) -> None:
        self._pass_over(team_id, has_token)

    def leave_new(self, team_id: int) -> None:
        granted = self._meter.teams[team_id].levels.granted
        if granted is not None and not granted.step:
            self._promotions.hold_back(granted)
        self._pass_over(team_id, was_taken)

    def leave_team(self, team_id: int) -> None:
        self._pass_over(team_id, _nobody)

    def _pass_over(self, team_id: int, may_stay: Callable[[RankedSequence], Any]) -> None:
        """Of the team's candidates only those that `may_stay` are offered in what is left of this step. Its next one is
        the best of all teams.
        """
        eligible = self._eligible
        head = eligible[0][3]
        team = head.team
        assert team.team_id == team_id, f"left out team {team_id}, the best was of team {team.team_id}"
        walk = self._walks.get(team)
        if walk is None:
            walk = team.levels.walk()
            next(walk)
        self._walks[team] = walk = filter(may_stay, walk)
        following = head if may_stay(head) else next(walk, None)
        if following is not None:
            heapreplace(eligible, (following.rank, team.lag, following.place, following))
        else:
            heappop(eligible)
            self._is_stale = self._is_stale or not eligible

    def refuse_away(self) -> None:
        """Pass over them. They are counted as refused already, so neither the books nor the gate change."""
        eligible, gated = self._eligible, self._gated
        self._eligible = [
            (h.rank, e[1], h.place, h) for e in eligible if (h := self._first_that_may_fit(e[3])) is not None
        ]
        self._gated = [(g[0], h.place, h) for g in gated if (h := self._first_that_may_fit(g[2])) is not None]
        heapify(self._eligible)
        heapify(self._gated)
        if not self._eligible:
            self._is_stale = True

    def _first_that_may_fit(self, head: RankedSequence) -> RankedSequence | None:
        """Of a team's candidates, of which `head` is the next."""
        team = head.team
        if not team.num_away:
            return head
        if team.num_refused == team.num_live and team.num_away == team.num_live:
            return None
        walk = self._walks.get(team)
        if walk is None:
            walk = team.levels.walk()
            next(walk)
        self._walks[team] = walk = filter(may_fit, walk)
        return head if may_fit(head) else next(walk, None)

    def claimant(self, team_ids: Iterable[int], holder: int | None) -> int | None:
        """The team with the least D; the holder stays while nobody is more than Theta behind it.

        So blocks are never kept for a team that is ahead of its share, against one that is behind: large or exaggerated
        demands would buy the others' share.
        """
        widths = self._meter.widths
        if widths is None:
            return None
        lags = {team_id: (team := self._meter.teams[team_id]).lag - team.provisional for team_id in team_ids}
        if not lags:
            return None
        first = min(lags, key=lambda team_id: (lags[team_id], team_id))
        return holder if holder in lags and lags[holder] <= lags[first] + widths.theta else first

    def _advance(self, team: TeamShare) -> None:
        """Replace the top of `_eligible`, which is `team`'s, by the team's next candidate, on its side of the gate."""
        following = self._following(team)
        eligible = self._eligible
        if following is None:
            heappop(eligible)
        elif team.lag <= self._limit or self._meter.widths is None:
            heapreplace(eligible, (following.rank, team.lag, following.place, following))
            return
        else:
            heappop(eligible)
            heappush(self._gated, (team.lag, following.place, following))
        if not eligible:
            self._is_stale = True

    def _following(self, team: TeamShare) -> RankedSequence | None:
        """The candidate of `team` after its last one in this step."""
        walk = self._walks.get(team)
        if walk is None:
            walk = self._walks[team] = team.levels.walk()
            next(walk)
        return next(walk, None)

    def _regate(self) -> None:
        """Work out the limit and move candidates to the side of the gate where they belong."""
        self._is_stale = False
        widths = self._meter.widths
        if widths is None:
            return
        eligible, gated = self._eligible, self._gated
        limit = self._find_least() + widths.theta
        if limit < self._limit:
            for _, lag, place, sequence in eligible:
                if lag > limit:
                    heappush(gated, (lag, place, sequence))
            eligible[:] = [entry for entry in eligible if entry[1] <= limit]
            heapify(eligible)
        self._limit = limit
        while gated and gated[0][0] <= limit:
            self._open_gate()
        if not eligible and gated:
            self._limit = limit = gated[0][0]
            while gated and gated[0][0] == limit:
                self._open_gate()

    def _open_gate(self) -> None:
        lag, place, sequence = heappop(self._gated)
        heappush(self._eligible, (sequence.rank, lag, place, sequence))

    def _find_least(self) -> int:
        """Least D of the able teams as the step began. If none is able, all active teams count as able."""
        able = self._able
        while able:
            lag, _, team = able[0]
            if team.num_live > team.num_refused:
                return lag
            heappop(able)
        return min((team.lag - team.provisional for team in self._planned), default=0)


def _nobody(sequence: RankedSequence) -> bool:
    return False
