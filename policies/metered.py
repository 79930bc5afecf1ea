"""The books every policy keeps: teams, live sequences, levels and lag. A policy adds only the order of picking.

FCFS keeps them too, so that reports and the fairness test read the same figures whatever the order was.
"""

from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction

from policies.config import PolicyConfig
from policies.mlfq import Levels, RankedSequence
from policies.sequences import Overhead, SequenceTerms, Served, TeamService, TeamTerms, Turn
from policies.shares import LagMeter, TeamShare, learn_cost


class MeteredPolicy:
    """All of `policies.policy.Policy` but the picking. Pure: state changes only in calls, the same calls give the
    same answers. A call out of turn is a bug and fails an assertion.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._levels = Levels(config)
        self._is_coast_on = config.coast
        self._meter = LagMeter(config)
        self._sequences: dict[int, RankedSequence] = {}
        self._step = 0  # the latest step; 0 is none yet
        self._planned: list[TeamShare] = []  # teams active when the step was planned
        self._taken: list[TeamShare] = []  # teams with sequences in the latest step
        self._is_settled = True
        self._fresh: dict[RankedSequence, None] = {}  # never taken, and not known to be refused

    def configure(self, teams: Iterable[TeamTerms], now_us: int) -> None:
        """Replace the table of teams. Raises ValueError for weights that are not positive integers."""
        assert self._is_settled, "configure within a step"
        self._meter.configure(teams)

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
        return ranked.level

    def fits_again(self, seq_id: int) -> None:
        """Were it still counted as refused, the gate would be open for the others, and one in a low level never tried.

        Raises KeyError for one that is not here.
        """
        assert self._is_settled, "fits_again within a step"
        sequence = self._sequences[seq_id]
        if sequence.is_refused:
            sequence.is_refused = False
            sequence.team.num_refused -= 1
            self._meter.forget_refusal()
            if sequence.step == 0:
                self._fresh[sequence] = None

    def begin(self, now_us: int) -> None:
        """Start picking for one step."""
        assert self._is_settled, "begin before the last step was settled"
        self._is_settled = False
        self._step += 1
        self._planned = self._meter.active.copy()
        for team in self._taken:
            team.num_taken = 0
        self._taken = []

    def _book_taken(self, sequence: RankedSequence, work_us: int) -> None:
        """The sequence is in the step: its team's lag grows at once by what the step will probably cost it."""
        team = sequence.team
        if sequence.step == 0:
            team.num_started += 1
            self._fresh.pop(sequence, None)
        sequence.step = self._step
        if team.num_taken == 0:
            self._taken.append(team)
        team.num_taken += 1
        expected = work_us * team.cost_average // team.work_average * team.unit
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

    def claimant(self, team_ids: Iterable[int], holder: int | None) -> int | None:
        """Orders without shares do not tell teams apart."""
        return None

    def _book_refused(self, sequence: RankedSequence) -> None:
        if not sequence.is_refused:
            self._fresh.pop(sequence, None)
            sequence.is_refused = True
            sequence.team.num_refused += 1
            self._meter.num_refused += 1

    def settle(self, served: Sequence[Served], now_us: int, overheads: Sequence[Overhead] = ()) -> None:
        """The step has run: the meter first, then the levels, then the mode of teams with completions. Sequences that
        ended leave after this.
        """
        assert not self._is_settled, "settle without begin"
        self._is_settled = True
        sequences = self._sequences
        rows = [(sequences[row.seq_id], row) for row in served]
        costs = [row.cost_us for row in served]
        for sequence, row in rows:
            team = sequence.team
            team.step_cost += row.cost_us
            team.step_work += row.work_us
        for team in self._taken:
            team.lag -= team.provisional
            team.provisional = 0
        self._meter.settle(self._planned, self._step, sum(costs), max(costs, default=0))
        for team in self._taken:
            team.served_us += team.step_cost
            learn_cost(team)
            team.step_cost = team.step_work = 0
        self._levels.charge(rows)
        if self._is_coast_on:
            for sequence in [sequence for sequence, row in rows if row.has_finished]:
                team = sequence.team
                if team.coast.complete(sequence.attained):
                    team.levels.set_coasting(team.coast.is_coasting)

    def leave(self, seq_id: int, now_us: int) -> None:
        """A sequence ended. Between steps only; raises KeyError for one that is not here."""
        assert self._is_settled, "leave within a step"
        sequence = self._sequences.pop(seq_id)
        team = sequence.team
        team.levels.remove(sequence)
        self._fresh.pop(sequence, None)
        if sequence.step:
            team.num_started -= 1
        if sequence.step == self._step:
            team.num_taken -= 1
        if sequence.is_refused:
            team.num_refused -= 1
            self._meter.num_refused -= 1
        self._meter.exit(team)

    def swapped_in(self, seq_id: int) -> None:
        """Its blocks are back: it is no longer refused."""
        self.fits_again(seq_id)

    def turns(self, seq_ids: Collection[int], slots: int, now_us: int) -> list[Turn]:
        """In order of arrival."""
        return [Turn(seq_id, 0) for seq_id in sorted(seq_ids)]

    def over_served(self, team_ids: Iterable[int]) -> list[int]:
        """By lag, the greatest first."""
        teams = self._meter.teams
        return sorted(team_ids, key=lambda team_id: (-teams[team_id].lag, team_id))

    def num_promotions(self, seq_id: int) -> int:
        """No promotion yet."""
        return 0

    def level(self, seq_id: int) -> int:
        """The present level of a live sequence. Raises KeyError for one that is not here."""
        return self._sequences[seq_id].level

    def team_service(self) -> list[TeamService]:
        """Running totals of every team that was ever active, by team_id. The lag of an inactive team reads 0."""
        meter = self._meter
        least = meter.band()[0] if meter.active else 0
        return [
            TeamService(
                team_id=team.team_id,
                served_us=team.served_us,
                entitled_us=team.entitled_us,
                backlogged_us=team.backlogged_us,
                waiting=team.num_live - team.num_taken,
                running=team.num_taken,
                lag=(team.lag - least) / meter.scale if team.num_live else 0.0,
                is_coasting=team.levels.is_coasting,
            )
            for team in sorted(meter.teams.values(), key=lambda team: team.team_id)
            if team.was_active
        ]

    def lags(self) -> dict[int, Fraction]:
        """D of every active team, exact, in cost-microseconds per unit of weight. Between steps only."""
        return {team.team_id: Fraction(team.lag, self._meter.scale) for team in self._meter.active}
