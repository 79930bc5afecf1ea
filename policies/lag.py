"""Shares between teams: the lag meter D, the rule of joining, and the floor for teams that cannot run.

For each step, every active team has a demand d (what it was served, and a step of each sequence left out) and an
entitlement e: the max-min fair part of the step's cost C under the teams' weights, e = min(d, weight * v), sum e = C.
Then D += (served - e) / weight. So unused share makes no debt, a satisfied team banks no credit, time spent idle
changes nothing, and this bill does not change the sum of weight * D (what else does: docs/scheduling.md). The gate in
`policies.eg_mlfq` lets a team run while its D is within Theta of the least, which keeps any two teams that could run
within Theta + 2u, u being the most that one sequence costs in one step over the least weight (`policies.bounds` has all
widths, `docs/scheduling.md` the reasons; the meter is EEVDF's -lag with weights that know the demand, after the
counters of VTC, Sheng et al., OSDI'24).

All of it is exact. D is kept times `scale`, a common multiple of the weights, so that one microsecond of cost over any
weight is an integer. Entitlements are whole microseconds; what rounding leaves over goes to the lowest team ids.
"""

import math
from bisect import insort
from collections.abc import Collection, Iterable

from policies.accounts import RankedSequence, TeamShare
from policies.bounds import make_widths
from policies.config import PolicyConfig
from policies.sequences import StepTime, TeamTerms

_FORGET_SHIFT = 3  # a step's weight in the moving averages is 1/8


class LagMeter:
    """Owns the teams' accounts, which of them are active, and virtual time."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self.teams: dict[int, TeamShare] = {}
        self.active: list[TeamShare] = []  # by team_id
        self.scale = 1
        self.widths = make_widths(config, (), self.scale)  # None: there is no gate
        self.num_refused = 0  # of all live sequences
        self.forgiven_us = 0  # cumulative: debt cut from teams, as cost
        self.lifted_us = 0  # cumulative: credit taken from teams that could not run, as cost
        self._satisfied: list[TeamShare] = []  # in the latest step
        self._was_short = False  # sequences have been refused, and not all teams are back in the band since
        self._virtual_time = 0  # times scale
        self._measured = self._modelled = 1  # decayed sums of what rows cost; their ratio is how far the profile is off
        self._band: tuple[int, int] | None = None  # least and most lag of the able teams, while known

    # -- the table of teams ------------------------------------------------------------------------------------------

    def configure(self, table: Iterable[TeamTerms]) -> bool:
        """Replace the table. An unchanged table changes nothing, and the answer is False. Otherwise scale, Theta and u
        follow the new weights, and no team keeps more lag than the new band allows: D <- min(D, min D + Theta + u).

        Teams that vanish keep their terms while they have sequences; their accounts go at a later change.
        Raises ValueError for a weight that is not a positive integer, or a team named twice.
        """
        terms_by_id: dict[int, TeamTerms] = {}
        for terms in table:
            if terms.weight < 1:
                raise ValueError(f"team {terms.team_id} has weight {terms.weight}; weights are positive integers")
            if terms.team_id in terms_by_id:
                raise ValueError(f"team {terms.team_id} is in the table twice")
            terms_by_id[terms.team_id] = terms
        if terms_by_id == {t.team_id: t.terms for t in self.teams.values() if t.is_configured}:
            return False
        for team in list(self.teams.values()):
            if team.team_id not in terms_by_id:
                if not team.is_configured and team.num_live == 0:
                    del self.teams[team.team_id]
                team.is_configured = False
        for terms in terms_by_id.values():
            team = self.teams.setdefault(terms.team_id, TeamShare(terms, self._config))
            team.terms, team.weight, team.is_configured = terms, terms.weight, True
        self._rescale([terms.weight for terms in terms_by_id.values()])
        self._clip()
        return True

    def _rescale(self, configured_weights: Collection[int]) -> None:
        """Choose the least scale that keeps every D exact under the present weights, and what follows from it."""
        teams = self.teams.values()
        if not teams:
            return
        weights = math.lcm(*(team.weight for team in teams))
        scale = math.lcm(self.scale, weights)
        factor = scale // self.scale
        spare = math.gcd(scale // weights, *(team.lag * factor for team in teams))
        scale //= spare
        for team in teams:
            team.lag = team.lag * factor // spare
            team.left_at = team.left_at * factor // spare
            team.unit = scale // team.weight
        self._virtual_time = self._virtual_time * factor // spare
        self.scale = scale
        self.widths = make_widths(self._config, configured_weights, scale)

    def account(self, team_id: int) -> TeamShare:
        """A team's account. One whose account has gone with its last sequence gets a new one, until the next change."""
        team = self.teams.get(team_id)
        if team is None:
            team = self.teams[team_id] = TeamShare(TeamTerms(team_id), self._config)
            team.is_configured = False
            team.unit = self.scale
            team.left_at = self._virtual_time
        return team

    def _clip(self) -> None:
        self._band = None
        if self.widths is None or not self.active:
            return
        most = self.band()[0] + self.widths.band
        for team in self.active:
            team.lag = min(team.lag, most)
        self._band = None

    # -- coming and going --------------------------------------------------------------------------------------------

    def band(self) -> tuple[int, int]:
        """Least and most lag over the able teams, or over the active ones when none is able. Some team is active."""
        if self._band is None:
            lags = [team.lag - team.provisional for team in self.active if team.num_live > team.num_refused]
            lags = lags or [team.lag - team.provisional for team in self.active]
            self._band = min(lags), max(lags)
        return self._band

    def enter(self, team: TeamShare) -> None:
        """A sequence of `team` has arrived. If that makes the team active: JOIN.

        Debt is worked off by virtual time spent away, never forgiven by leaving; credit is never gained by it. What
        credit the team had when it left fades within Theta of virtual time: a team that sends its next request as
        soon as it has the answer to the last one has never left.
        """
        team.num_live += 1
        if team.num_live > 1:
            if team.num_live == team.num_refused + 1:
                self.turn_able(team)
            return
        team.was_active = True
        if not self.active:
            for other in self.teams.values():
                other.lag = 0
            self._band = 0, 0
        else:
            least, most = self.band()
            away, credit = self._virtual_time - team.left_at, least - team.lag
            team.lag = max(team.lag - away, least)
            if self.widths is not None:
                team.lag -= max(0, min(credit, self.widths.theta - away))
                team.lag = min(team.lag, max(most, least + self.widths.band))
            # Where teams cannot run, the newcomer may change which ones the band is taken over.
            self._band = None if self.num_refused else (min(least, team.lag), max(most, team.lag))
        insort(self.active, team, key=_team_id)

    def exit(self, team: TeamShare) -> None:
        """A sequence of `team` has ended. If it was the last, the team is no longer active."""
        team.num_live -= 1
        if team.num_live == 0:
            team.left_at = self._virtual_time
            self.active.remove(team)
        self._band = None

    def forget_refusal(self) -> None:
        """One sequence less counts as refused; its team may have turned able by that."""
        self.num_refused -= 1
        self._band = None

    def turn_able(self, team: TeamShare) -> None:
        """Between steps, a sequence of a team that could not run may run: the team is not further behind than those
        are who could, once a step is over.
        """
        self._band = None
        if self.widths is None:
            return
        others = [other.lag for other in self.active if other.is_able and other is not team]
        if others:
            self._lift(team, max(others) - self.widths.wide)

    # -- a step's bill -----------------------------------------------------------------------------------------------

    @property
    def is_short(self) -> bool:
        """Sequences are refused, or not all teams are back in the narrow band since: lags may lie in the wide one."""
        return self.num_refused > 0 or self._was_short

    def settle(self, planned: list[TeamShare], step: int, cost_us: int, largest_us: int, time: StepTime) -> None:
        """Book a step that cost `cost_us`, of which each planned team's part is its `step_cost`; no one sequence cost
        more than `largest_us`. `planned` are the teams active when the step was planned, by team_id; sequences with
        this `step` were in it.
        """
        if cost_us > 0:
            weight = sum([team.weight for team in planned])
            self._virtual_time += cost_us * self.scale // weight
            self._entitle(planned, weight, step, cost_us, largest_us, time)
        self._band = None
        if self._satisfied:
            self._cut_the_satisfied(planned)
        if self.num_refused or self._was_short:
            self._cut_everybody()
        if self.num_refused:
            self._lift_the_unable()

    def _entitle(
        self, planned: list[TeamShare], weight: int, step: int, cost_us: int, largest_us: int, time: StepTime
    ) -> None:
        """Water-filling: teams whose demand is below their part get all of it, the others share the rest by weight.

        A team with sequences left out demands at least `largest_us` for each. That lower bound nearly always decides;
        the exact demand is summed only for a team that the bound would leave satisfied.
        """
        rest = cost_us
        satisfied = self._satisfied
        alone_us = time.own_us.get
        for team in planned:
            if team.num_live > team.num_taken:
                team.backlogged_us += cost_us
        thirsty = planned
        while True:
            unsatisfied = []
            for team in thirsty:
                left_out = team.num_live - team.num_taken
                served = team.step_cost
                if team.step_decode:
                    base_us = alone_us(team.team_id, time.decode_us)
                    served += team.step_decode * (time.predicted_us - base_us) // base_us
                demand = served + left_out * largest_us
                if demand * weight <= team.weight * rest:
                    if left_out:
                        demand = self._demand(team, served, step, cost_us, largest_us)
                    if demand * weight <= team.weight * rest:
                        rest -= demand
                        weight -= team.weight
                        team.totals["entitled_us"] += demand
                        team.lag += (team.step_cost - demand) * team.unit
                        satisfied.append(team)
                        continue
                unsatisfied.append(team)
            if len(unsatisfied) == len(thirsty):
                break
            thirsty = unsatisfied
        if not thirsty:
            return
        parts = [team.weight * rest // weight for team in thirsty]
        over = rest - sum(parts)
        for team, part in zip(thirsty, parts, strict=True):
            if over:
                part += 1
                over -= 1
            team.totals["entitled_us"] += part
            team.lag += (team.step_cost - part) * team.unit

    def _demand(self, team: TeamShare, served: int, step: int, enough: int, largest_us: int) -> int:
        """served + sum over the sequences left out of max(largest cost in this step, its own expected cost). Summing
        stops at `enough`, the whole step's cost: more demand than that changes nothing.

        The own expected cost keeps a team of long steps from being judged by the short steps that ran instead.
        """
        demand = served
        sequence: RankedSequence
        for sequence in team.levels.walk():
            if sequence.step != step:
                demand += max(largest_us, self.expected_cost(sequence.last_cost or sequence.next_work))
                if demand >= enough:
                    break
        return demand

    def expected_cost(self, modelled_us: int) -> int:
        """What a row that should cost `modelled_us` will probably be charged, as all recent rows were."""
        return modelled_us * self._measured // self._modelled

    def learn_cost(self, measured_us: int, modelled_us: int) -> None:
        """Fold a step's rows into the averages, in integers so that replays agree. Rows without work do not count."""
        if modelled_us:
            self._measured += measured_us - (self._measured >> _FORGET_SHIFT)
            self._modelled += modelled_us - (self._modelled >> _FORGET_SHIFT)

    def _cut_the_satisfied(self, planned: list[TeamShare]) -> None:
        """No satisfied team stays above the band.

        With many slots a team that asks for little is satisfied by less than what the others are entitled to. Then D of
        the others may fall, when one of them runs ahead of another and leaves, while that of the satisfied one stays;
        and it would be locked out for what a third team got.
        """
        satisfied, self._satisfied = self._satisfied, []
        if self.widths is None:
            return
        width = self.widths.narrow
        greatest = max([team.lag for team in satisfied])
        if greatest <= min([team.lag for team in planned]) + width or greatest <= self.band()[0] + width:
            return
        most = self.band()[0] + width
        for team in satisfied:
            self._forgive(team, most)
        self._band = None

    def _forgive(self, team: TeamShare, most: int) -> None:
        if team.lag > most:
            self.forgiven_us += (team.lag - most) // team.unit
            team.lag = most

    def _cut_everybody(self) -> None:
        """Where sequences are refused, nobody's debt goes beyond the band.

        A team that can run only some of its sequences is still entitled to its part, and falls behind without end while
        the others use what it cannot. Had they to wait until it has caught up, they would be locked out for having kept
        the device busy. Twice the band, for the less is forgiven, the nearer to its share comes who lacks blocks.
        """
        self._was_short = self.num_refused > 0
        widths = self.widths
        if widths is None or not self.active:
            return
        least = self.band()[0]
        for team in self.active:
            if team.lag > least + widths.narrow:
                self._was_short = True  # until all are back in the band that holds without refusals
                self._forgive(team, least + widths.wide)
                self._band = None

    def _lift_the_unable(self) -> None:
        """A team that cannot run falls behind without end, and would open the gate for everybody else."""
        if self.widths is None or not any(team.is_able for team in self.active):
            return
        floor = self.band()[0] - self.widths.band
        for team in self.active:
            if not team.is_able:
                self._lift(team, floor)

    def _lift(self, team: TeamShare, least: int) -> None:
        if team.lag < least:
            self.lifted_us += (least - team.lag) // team.unit
            team.lag = least


def _team_id(team: TeamShare) -> int:
    return team.team_id
