"""EG-MLFQ written the slow and obvious way: exact fractions, whole scans, nothing kept between picks.

Only the roundings that the scheduling page defines are taken over: entitlements are whole microseconds (what is left
goes to the lowest team ids), expected costs are whole microseconds, and virtual time counts in 1/lcm of the weights.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import attrgetter

from policies.config import PolicyConfig
from policies.sequences import AS_SERVED, Overhead, SequenceTerms, Served, Starving, StepTime, TeamTerms


@dataclass
class Seq:
    seq_id: int
    team: "Team"
    level: int
    place: int
    prefill: int
    next_work: int
    arrival: int
    used: int = 0
    attained: int = 0
    generated: bool = False
    last_service: int = 0
    grant_left: int = 0  # in lane P while it is positive
    grant_unused: int = 0  # handed back
    last_cost: int = 0  # of its latest decode row, as modelled
    min_run_left: int = 0
    exhausted: bool = False
    promotions: int = 0
    refused: bool = False
    tried: bool = False
    taken: bool = False


@dataclass
class Team:
    team_id: int
    weight: int
    D: Fraction = Fraction(0)
    D_planned: Fraction = Fraction(0)
    left_at: Fraction = Fraction(0)
    seqs: list[Seq] = field(default_factory=list)
    completions: list[int] = field(default_factory=list)
    window: int = 0  # completions that count
    is_alike: bool = False
    alpha: int = 0
    sigma: Fraction = Fraction(0)
    rho: Fraction = Fraction(0)
    b: Fraction = Fraction(0)
    fifo: list[Seq] = field(default_factory=list)
    exhausted: int = 0
    promoted: int = 0

    def able(self) -> bool:
        return any(not seq.refused for seq in self.seqs)

    @property
    def coasts(self) -> bool:
        """No live sequence has done more than three times the mean."""
        latest = self.completions[-self.window :]
        longest = max((seq.attained for seq in self.seqs), default=0)
        return self.is_alike and longest <= 3 * Fraction(sum(latest), len(latest))

    def order(self, seq: Seq) -> tuple[int, ...]:
        """Inside the team: lane P; then by level, a minimum run one level and a half better; or by arrival, first those
        in a minimum run.
        """
        if self.coasts:
            return rank(seq) == LANE_P, seq.min_run_left > 0, -seq.arrival
        return -rank(seq), -seq.place


LANE_P = -4


def rank(seq: Seq) -> int:
    """The order between teams: 2 * level, 2 * level - 3 in a minimum run, less than all in lane P."""
    if seq.grant_left > 0:
        return LANE_P
    return 2 * seq.level - 3 * (seq.min_run_left > 0)


class Reference:
    """The same calls as `policies.policy.Policy`."""

    name = "reference"

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.quanta = [*config.quanta(), math.inf]
        self.teams: dict[int, Team] = {}
        self.seqs: dict[int, Seq] = {}
        self.place = self.arrivals = 0
        self.V = Fraction(0)
        self.planned: list[Team] = []
        self.begun = 0
        self.was_short = False
        self.measured = self.modelled = 1
        self.modelled_now = 0  # of the step that is being picked

    def expected(self, cost: int) -> int:
        return cost * self.measured // self.modelled

    def configure(self, teams: Iterable[TeamTerms], now_us: int) -> None:
        self.teams = {}
        table = list(teams)
        for terms in table:
            team = self.teams[terms.team_id] = Team(terms.team_id, terms.weight, alpha=terms.starving_after_us)
            team.window = self.config.coast_completions
            team.b = team.sigma = Fraction(terms.promotion_burst_grants * self.config.promotion_grant_us)
            team.rho = Fraction(self.config.promotion_percent, 100) * terms.weight / sum(t.weight for t in table)
        self.lcm = math.lcm(*(team.weight for team in self.teams.values()))
        least = min(team.weight for team in self.teams.values())
        self.u = Fraction(self.config.step_cost_max_us, least)
        assert self.config.theta_us is not None
        self.theta: Fraction | float = Fraction(self.config.theta_us) if self.config.is_gated else math.inf

    def active(self) -> list[Team]:
        return [team for team in self.teams.values() if team.seqs]

    def able(self) -> list[Team]:
        return [team for team in self.active() if team.able()] or self.active()

    def arrive(self, terms: SequenceTerms, now_us: int) -> int:
        team = self.teams[terms.team_id]
        if not team.seqs:
            if not self.active():
                for other in self.teams.values():
                    other.D = Fraction(0)
            else:
                lags = [other.D for other in self.able()]
                away, credit = self.V - team.left_at, min(lags) - team.D
                team.D = max(team.D - away, min(lags))
                if self.theta != math.inf:
                    team.D -= max(Fraction(0), min(credit, Fraction(self.theta) - away))
                team.D = Fraction(min(team.D, max(max(lags), min(lags) + self.theta + self.u)))
        level = next(k for k in range(self.config.levels) if self.quanta[k] >= terms.prefill_work_us)
        level = max(level, min(terms.start_level, self.config.levels - 1))
        next_work = min(terms.prefill_work_us, self.config.chunk_work_us) or self.config.decode_work_us
        self.place += 1
        self.arrivals += 1
        seq = Seq(terms.seq_id, team, level, self.place, terms.prefill_work_us, next_work, self.arrivals)
        seq.last_service = now_us
        if team.seqs and not team.able():
            self.turn_able(team)
        team.seqs.append(seq)
        self.seqs[terms.seq_id] = seq
        return level

    def begin(self, now_us: int) -> list[Starving]:
        starving = self.promote(now_us)
        self.modelled_now = 0
        self.planned = self.active()
        for team in self.planned:
            team.D_planned = team.D
            for seq in team.seqs:
                seq.tried = seq.taken = False
        return starving

    def best(self) -> int | None:
        candidates = []
        for team in self.planned:
            untried = [seq for seq in team.seqs if not seq.tried]
            if untried:
                candidates.append(max(untried, key=team.order))
        if not candidates:
            return None
        limit = max(min(team.D_planned for team in self.able()) + self.theta, min(seq.team.D for seq in candidates))
        eligible = [seq for seq in candidates if limit >= seq.team.D]
        return min(eligible, key=lambda seq: (rank(seq), seq.team.D, seq.place)).seq_id

    def promote(self, now_us: int) -> list[Starving]:
        """ITERATE (1): fill the buckets, queue who starves, and give out grants."""
        for team in self.teams.values():
            team.b = min(team.sigma, team.b + team.rho * (now_us - self.begun))
        self.begun = now_us
        told: list[Starving] = []
        if not self.config.promotion_percent:
            return told
        for team in self.active():
            for seq in team.seqs:
                if seq.grant_left > 0 and seq.refused and not seq.taken:
                    seq.grant_unused, seq.grant_left = seq.grant_left, 0
                    team.fifo.append(seq)
            starving = [seq for seq in team.seqs if now_us - seq.last_service >= team.alpha]
            starving = [seq for seq in starving if seq.grant_left <= 0 and seq not in team.fifo]
            granted = [seq for seq in team.seqs if seq.grant_left > 0 and now_us - seq.last_service >= team.alpha]
            for seq in sorted(starving, key=attrgetter("last_service", "place")):
                told.append(Starving(seq.seq_id, len(team.fifo) + len(granted)))
                team.fifo.append(seq)
            if not team.fifo or any(seq.grant_left > 0 for seq in team.seqs):
                continue
            head = team.fifo[0]
            grant = head.grant_unused or self.config.promotion_grant_us
            if team.b >= grant:
                team.fifo.remove(head)
                head.exhausted = False
                head.grant_left = grant
                head.promotions += not head.grant_unused
                head.grant_unused = 0
            elif not head.exhausted:
                head.exhausted = True
                team.exhausted += 1
        return told

    def fits_again(self, seq_id: int) -> None:
        seq = self.seqs[seq_id]
        if not seq.team.able():
            self.turn_able(seq.team)
        seq.refused = False

    def protect(self, seq_id: int, num_steps: int) -> None:
        self.seqs[seq_id].min_run_left = num_steps

    def turn_able(self, team: Team) -> None:
        others = [other.D for other in self.active() if other.able()]
        if others and self.theta != math.inf:
            team.D = Fraction(max(team.D, max(others) - 2 * (self.theta + 2 * self.u)))

    def take(self, seq_id: int, work_us: int, cost_us: int | None = None) -> None:
        seq = self.seqs[seq_id]
        cost = work_us if cost_us is None else cost_us
        if work_us:
            self.modelled_now += cost
            if seq.generated:
                seq.last_cost = cost
        seq.tried = seq.taken = True
        seq.refused = False
        seq.team.D += Fraction(self.expected(cost), seq.team.weight)

    def refuse(self, seq_id: int) -> None:
        seq = self.seqs[seq_id]
        seq.tried = seq.refused = True

    def settle(
        self, served: Sequence[Served], now_us: int, overheads: Sequence[Overhead] = (), time: StepTime = AS_SERVED
    ) -> None:
        total = sum(row.cost_us for row in served)
        largest = max((row.cost_us for row in served), default=0)
        cost = {team.team_id: 0 for team in self.planned}
        decode = dict(cost)
        for row in served:
            cost[self.seqs[row.seq_id].team.team_id] += row.cost_us
            decode[self.seqs[row.seq_id].team.team_id] += row.cost_us * row.is_decode
        if self.modelled_now:
            self.measured += total - (self.measured >> 3)
            self.modelled += self.modelled_now - (self.modelled >> 3)
        for overhead in overheads:
            if self.teams[overhead.team_id] in self.planned:
                total += overhead.cost_us
                cost[overhead.team_id] += overhead.cost_us
            else:
                self.teams[overhead.team_id].D += Fraction(overhead.cost_us, self.teams[overhead.team_id].weight)
        stretched = {
            team_id: us
            * (time.predicted_us - time.own_us.get(team_id, time.decode_us))
            // time.own_us.get(team_id, time.decode_us)
            for team_id, us in decode.items()
        }
        demand = {
            team.team_id: cost[team.team_id]
            + stretched[team.team_id]
            + sum(max(largest, self.expected(seq.last_cost or seq.next_work)) for seq in team.seqs if not seq.taken)
            for team in self.planned
        }
        if total and self.planned:
            entitled, satisfied = water_fill(total, demand, {team.team_id: team.weight for team in self.planned})
            weight = sum(team.weight for team in self.planned)
            self.V += Fraction(total * self.lcm // weight, self.lcm)
            for team in self.planned:
                team.D = team.D_planned + Fraction(cost[team.team_id] - entitled[team.team_id], team.weight)
            most = min(team.D for team in self.able()) + self.theta + 2 * self.u
            for team_id in satisfied:
                self.teams[team_id].D = Fraction(min(self.teams[team_id].D, most))
        is_short = any(seq.refused for team in self.active() for seq in team.seqs)
        if is_short or self.was_short:
            band = min((team.D for team in self.able()), default=0) + self.theta + 2 * self.u
            self.was_short = is_short or any(band < team.D for team in self.active())
            for team in self.active():
                team.D = Fraction(min(team.D, band + self.theta + 2 * self.u))
        if any(team.able() for team in self.planned) and self.theta != math.inf:
            floor = min(team.D for team in self.able()) - self.theta - self.u
            for team in self.planned:
                if not team.able():
                    team.D = Fraction(max(team.D, floor))
        for row in served:
            self.charge(self.seqs[row.seq_id], row, now_us, time.predicted_us)
        for row in served:
            if row.has_finished and self.config.coast:
                self.complete(self.seqs[row.seq_id])

    def complete(self, seq: Seq) -> None:
        team = seq.team
        team.completions.append(seq.attained)
        latest = team.completions[-self.config.coast_completions :]
        if len(latest) >= self.config.coast_completions_min:
            variation = variation_of(latest)
            if variation < Fraction(self.config.coast_below_percent, 100):
                team.is_alike = True
            elif variation > Fraction(self.config.coast_above_percent, 100):
                team.is_alike = False

    def charge(self, seq: Seq, row: Served, now_us: int, step_us: int) -> None:
        seq.attained += row.work_us
        seq.last_service = now_us
        if seq in seq.team.fifo:
            seq.team.fifo.remove(seq)
            seq.exhausted = False
            seq.grant_unused = 0
        is_paid = seq.grant_left > 0
        if is_paid:
            seq.grant_left -= max(row.work_us, step_us // 4)
            seq.team.b -= row.work_us
            seq.team.promoted += row.work_us
        else:
            seq.used += row.work_us
        if not row.has_generated:
            left = seq.prefill - seq.attained
            seq.next_work = min(max(row.work_us, self.config.chunk_work_us), left) if left > 0 else row.work_us
            return
        seq.next_work = row.work_us if seq.generated else self.config.decode_work_us
        seq.generated = True
        if seq.used >= self.quanta[seq.level] and not is_paid:
            self.place += 1
            seq.level, seq.used, seq.place = seq.level + 1, 0, self.place

    def leave(self, seq_id: int, now_us: int) -> None:
        seq = self.seqs.pop(seq_id)
        seq.team.seqs.remove(seq)
        if seq in seq.team.fifo:
            seq.team.fifo.remove(seq)
        if not seq.team.seqs:
            seq.team.left_at = self.V

    def level(self, seq_id: int) -> int:
        return self.seqs[seq_id].level

    def lags(self) -> dict[int, Fraction]:
        return {team.team_id: team.D for team in self.active()}


def variation_of(works: list[int]) -> Fraction:
    """CV^2, by the book: mean squared deviation over the square of the mean."""
    mean = Fraction(sum(works), len(works))
    return sum((work - mean) ** 2 for work in works) / len(works) / mean**2


def water_fill(total: int, demand: dict[int, int], weight: dict[int, int]) -> tuple[dict[int, int], set[int]]:
    """Max-min parts of `total`: teams in the order of demand per weight, each satisfied or sharing what is left. Also
    the satisfied ones.
    """
    entitled: dict[int, int] = {}
    rest = total
    order = sorted(demand, key=lambda team: Fraction(demand[team], weight[team]))
    for i, team in enumerate(order):
        share = Fraction(rest * weight[team], sum(weight[other] for other in order[i:]))
        if demand[team] <= share:
            entitled[team] = demand[team]
            rest -= demand[team]
            continue
        thirsty = sorted(order[i:])
        weights = sum(weight[other] for other in thirsty)
        parts = {other: rest * weight[other] // weights for other in thirsty}
        for other in thirsty[: rest - sum(parts.values())]:
            parts[other] += 1
        return entitled | parts, set(entitled)
    return entitled, set(entitled)
