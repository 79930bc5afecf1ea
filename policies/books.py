"""The books every policy keeps: teams, live sequences, levels and lag. A policy adds only the order of picking.

FCFS keeps them too, so that reports and the fairness test read the same figures whatever the order was.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from operator import attrgetter

from policies.accounts import RankedSequence, TeamShare
from policies.config import PolicyConfig
from policies.lag import LagMeter
from policies.levels import Levels
from policies.next_turn import TurnEstimator
from policies.promotion import Promotions
from policies.sequences import (
    AS_SERVED,
    Overhead,
    SequenceTerms,
    Served,
    Starving,
    StepTime,
    TeamService,
    TeamTerms,
    Turn,
)


class MeteredPolicy:
    """All of `policies.policy.Policy` but the picking. Pure: state changes only in calls, the same calls give the
    same answers. A call out of turn is a bug and fails an assertion.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._levels = Levels(config)
        self._is_coast_on = config.coast
        self._meter = LagMeter(config)
        self._promotions = Promotions(config)
        self._turns = TurnEstimator(self._levels, self._meter, self._promotions)
        self._now_us = 0  # of the latest call that tells the time
        self._sequences: dict[int, RankedSequence] = {}
        self._step = 0  # the latest step; 0 is none yet
        self._planned: list[TeamShare] = []  # teams active when the step was planned
        self._taken: list[TeamShare] = []  # teams with sequences in the latest step
        self._rows: list[tuple[RankedSequence, Served]] = []  # the latest settled step
        self._is_settled = True
        self._modelled_us = 0  # what the rows of this step should cost
        self._fresh: dict[RankedSequence, None] = {}  # never taken, and not known to be refused

    def configure(self, teams: Iterable[TeamTerms], now_us: int) -> None:
        """Replace the table of teams. Raises ValueError for weights that are not positive integers."""
        assert self._is_settled, "configure within a step"
        if self._meter.configure(teams):
            self._promotions.configure(self._meter.teams.values(), now_us)

    def arrive(self, sequence: SequenceTerms, now_us: int) -> int:
        """Take in a new sequence and return its level; it is a candidate from the next step on. Not while picking.

        Raises KeyError for an unknown team, ValueError for a known sequence.
        """
        team = self._meter.teams.get(sequence.team_id)
        if team is None or not team.is_configured:
            raise KeyError(f"unknown team {sequence.team_id}")
        if sequence.seq_id in self._sequences:
            raise ValueError(f"sequence {sequence.seq_id} is here already")
        start_level = max(sequence.start_level, team.terms.start_level)
        ranked = self._levels.admit(sequence.seq_id, team, sequence.prefill_work_us, start_level)
        self._sequences[sequence.seq_id] = ranked
        self._fresh[ranked] = None
        self._meter.enter(team)
        self._promotions.watch(ranked, now_us)
        return ranked.level

    def fits_again(self, seq_id: int) -> None:
        """Were it still counted as refused, the gate would be open for the others, and one in a low level never tried.

        Raises KeyError for one that is not here.
        """
        assert self._is_settled, "fits_again within a step"
        sequence = self._sequences[seq_id]
        if sequence.is_refused:
            was_able = sequence.team.is_able
            sequence.is_refused = False
            sequence.team.num_refused -= 1
            self._meter.forget_refusal()
            if not was_able:
                self._meter.turn_able(sequence.team)
            if sequence.step == 0:
                self._fresh[sequence] = None

    def begin(self, now_us: int) -> list[Starving]:
        """Start picking for one step. Grants of promotion are given out here."""
        assert self._is_settled, "begin before the last step was settled"
        self._is_settled = False
        self._modelled_us = 0
        self._now_us = now_us
        starving = self._promotions.begin(now_us, self._step)
        self._step += 1
        self._planned = self._meter.active.copy()
        for team in self._taken:
            team.num_taken = 0
        self._taken = []
        return starving

    def _book_taken(self, sequence: RankedSequence, work_us: int, cost_us: int | None) -> None:
        """The sequence is in the step: its team's lag grows at once by what the step will probably cost it."""
        team = sequence.team
        if sequence.step == 0:
            team.num_started += 1
            self._fresh.pop(sequence, None)
        sequence.step = self._step
        if team.num_taken == 0:
            self._taken.append(team)
        team.num_taken += 1
        if cost_us is None:
            cost_us = work_us
        if sequence.has_generated and work_us:
            sequence.last_cost = cost_us
        if work_us:
            self._modelled_us += cost_us
        expected = self._meter.expected_cost(cost_us) * team.unit
        team.provisional += expected
        team.lag += expected
        if sequence.is_refused:
            sequence.is_refused = False
            team.num_refused -= 1
            self._meter.num_refused -= 1

    def refuse_new(self) -> None:
        """Book every sequence that was never taken as refused. Costs only what has arrived since the last such call."""
        for sequence in list(self._fresh):
            self._book_refused(sequence)

    def prompt_time_us(self, team_id: int, others: Mapping[int, int], step_us: int) -> int | None:
        """Orders without shares have no limit."""
        return None

    def set_away(self, seq_id: int, is_away: bool) -> None:
        """Only noted, for `refuse_away`. Raises KeyError for one that is not here."""
        sequence = self._sequences[seq_id]
        sequence.team.num_away += is_away - sequence.is_away
        sequence.is_away = is_away

    def claimant(self, team_ids: Iterable[int], holder: int | None) -> int | None:
        """Orders without shares do not tell teams apart."""
        return None

    def _book_refused(self, sequence: RankedSequence) -> None:
        if not sequence.is_refused:
            self._fresh.pop(sequence, None)
            sequence.is_refused = True
            sequence.team.num_refused += 1
            self._meter.num_refused += 1

    def settle(
        self, served: Sequence[Served], now_us: int, overheads: Sequence[Overhead] = (), time: StepTime = AS_SERVED
    ) -> None:
        """The step has run: the meter first, then the levels, then the mode of teams with completions. Sequences that
        ended leave after this.
        """
        assert not self._is_settled, "settle without begin"
        self._is_settled = True
        self._now_us = now_us
        sequences = self._sequences
        rows = [(sequences[row.seq_id], row) for row in served]
        costs = [row.cost_us for row in served]
        for sequence, row in rows:
            team = sequence.team
            team.step_cost += row.cost_us
            if row.is_decode:
                team.step_decode += row.cost_us
        for team in self._taken:
            team.lag -= team.provisional
            team.provisional = 0
        billed = self._taken
        total = sum(costs)
        self._meter.learn_cost(total, self._modelled_us)
        if overheads:
            billed = billed.copy()
            total += self._bill(overheads, billed)
        self._meter.settle(self._planned, self._step, total, max(costs, default=0), time)
        for team in billed:
            team.totals["served_us"] += team.step_cost
            team.step_cost = team.step_overhead = team.step_decode = 0
        self._rows = rows
        self._promotions.step_us = time.predicted_us
        self._levels.charge(rows, now_us, self._promotions)
        if self._is_coast_on:
            self._note_works(rows)

    def _note_works(self, rows: list[tuple[RankedSequence, Served]]) -> None:
        """Tell the teams' modes what finished and who has done how much, and follow them."""
        for sequence, row in rows:
            team, coast = sequence.team, sequence.team.coast
            if row.has_finished and coast.complete(sequence.attained):
                coast.longest_us = max([live.attained for live in team.levels.arrivals])
            if coast.is_alike and sequence.attained > coast.longest_us:
                coast.longest_us = sequence.attained
        for team in self._taken:
            if team.levels.is_coasting != team.coast.is_coasting:
                team.levels.set_coasting(team.coast.is_coasting)

    def _bill(self, overheads: Sequence[Overhead], billed: list[TeamShare]) -> int:
        """Put overheads on their teams' part of the step; returns what that adds to the step's cost, and adds to
        `billed` the teams that ran nothing.

        A team that has left since it caused a copy is not entitled to a part of the step, so its bill is debt that it
        brings along when it returns, and no part of what the others share.
        """
        total = 0
        planned = set(self._planned)
        for overhead in overheads:
            team = self._meter.account(overhead.team_id)
            team.totals["overhead_us"] += overhead.cost_us
            if team in planned:
                total += overhead.cost_us
                team.step_cost += overhead.cost_us
                team.step_overhead += overhead.cost_us
                if team not in billed:
                    billed.append(team)
            else:
                team.lag += overhead.cost_us * team.unit
                team.totals["served_us"] += overhead.cost_us
                team.was_active = True
        return total

    def leave(self, seq_id: int, now_us: int) -> None:
        """A sequence ended. Between steps only; raises KeyError for one that is not here."""
        assert self._is_settled, "leave within a step"
        sequence = self._sequences.pop(seq_id)
        team = sequence.team
        team.levels.remove(sequence)
        self._promotions.forget(sequence)
        self._fresh.pop(sequence, None)
        coast = team.coast
        if coast.is_alike and sequence.attained >= coast.longest_us:
            coast.longest_us = max([live.attained for live in team.levels.arrivals], default=0)
            if team.levels.is_coasting != coast.is_coasting:
                team.levels.set_coasting(coast.is_coasting)
        team.num_away -= sequence.is_away
        if sequence.step:  # before the first step that number is 0, as is that of one never taken
            team.num_started -= 1
            team.num_taken -= sequence.step == self._step
        if sequence.is_refused:
            team.num_refused -= 1
            self._meter.num_refused -= 1
        self._meter.exit(team)

    def protect(self, seq_id: int, num_steps: int) -> None:
        """Its minimum run begins, goes on or ends. Raises KeyError for a sequence that is not here."""
        assert self._is_settled, "protect within a step"
        sequence = self._sequences[seq_id]
        was_kept = sequence.min_run_left > 0
        sequence.min_run_left = num_steps
        if num_steps and not was_kept:
            sequence.team.levels.keep(sequence)
        elif was_kept and not num_steps:
            sequence.team.levels.end_keep(sequence)

    def turns(self, seq_ids: Collection[int], slots: int, now_us: int) -> list[Turn]:
        """By `policies.next_turn`. Raises KeyError for a sequence that is not here."""
        return self._turns.turns([self._sequences[seq_id] for seq_id in seq_ids], slots, now_us)

    def over_served(self, team_ids: Iterable[int]) -> list[int]:
        """By lag, the greatest first."""
        teams = self._meter.teams
        lags = {team_id: (team := teams[team_id]).lag - team.provisional for team_id in team_ids}
        return sorted(lags, key=lambda team_id: (-lags[team_id], team_id))

    def ahead_of(self, team_ids: Iterable[int], team_id: int) -> set[int]:
        """Those whose lag is more than Theta above that of `team_id`."""
        meter = self._meter
        if meter.widths is None:
            return set()
        teams = meter.teams
        limit = (team := teams[team_id]).lag - team.provisional + meter.widths.theta
        return {other for other in team_ids if (team := teams[other]).lag - team.provisional > limit}

    def is_band_wide(self) -> bool:
        """Two able teams' lags may differ by 2 Theta + 4u, not only by Theta + 2u."""
        return self._meter.is_short

    @property
    def forgiven_us(self) -> tuple[int, int]:
        """Cumulative, as cost: debt that teams were let off so that the band holds, and credit taken from those that
        could not run. What the bound on lags costs in service that nobody is owed any more.
        """
        return self._meter.forgiven_us, self._meter.lifted_us

    def num_promotions(self, seq_id: int) -> int:
        """Grants that a live sequence has had. Raises KeyError for one that is not here."""
        return self._sequences[seq_id].num_promotions

    def level(self, seq_id: int) -> int:
        """The present level of a live sequence. Raises KeyError for one that is not here."""
        return self._sequences[seq_id].level

    def team_service(self) -> list[TeamService]:
        """Running totals of every team that was ever active, by team_id. The lag of an inactive team reads 0."""
        meter = self._meter
        least = meter.band()[0] if meter.active else 0
        teams = [team for team in meter.teams.values() if team.was_active]
        teams.sort(key=attrgetter("team_id"))
        waiting = {team: list(map(len, team.levels.queues)) for team in teams if team.num_live}
        for sequence, _ in self._rows:
            if sequence.seq_id in self._sequences:
                waiting[sequence.team][sequence.level] -= 1
        return [self._service(team, least, waiting.get(team, ())) for team in teams]

    def _service(self, team: TeamShare, least: int, waiting_levels: Iterable[int]) -> TeamService:
        budget = self._promotions.budget(team)
        return TeamService(
            team_id=team.team_id,
            backlogged_us=team.backlogged_us,
            lag=(team.lag - least) / self._meter.scale if team.num_live else 0.0,
            is_coasting=team.levels.is_coasting,
            waiting_levels=tuple(waiting_levels),
            waiting=team.num_live - team.num_taken,
            running=team.num_taken,
            budget_us=budget.held_us(self._now_us) if budget else 0,
            starving=len(budget.queue) if budget else 0,
            **team.totals,
        )

    def lags(self) -> dict[int, Fraction]:
        """D of every active team, exact, in cost-microseconds per unit of weight. Between steps only."""
        return {team.team_id: Fraction(team.lag, self._meter.scale) for team in self._meter.active}
