"""Running totals in, deltas of an interval out."""

from engine.samples import INTERVAL_US, LOOK_US, ServiceSampler
from policies.sequences import TeamService
from tests.engine.support import ArrivalOrder


class Totals(ArrivalOrder):
    def __init__(self) -> None:
        super().__init__()
        self.totals: list[TeamService] = []
        self.num_reads = 0

    def team_service(self) -> list[TeamService]:
        self.num_reads += 1
        return self.totals


def service(team_id: int, served: int, *, backlogged: int = 0, waiting: int = 0, lag: float = 0.0) -> TeamService:
    return TeamService(team_id, served, served + 1, backlogged, waiting, 0, lag)


def test_samples_are_deltas_that_sum_to_the_totals() -> None:
    policy = Totals()
    sampler = ServiceSampler(policy, 0)
    served = []
    for second in range(1, 6):
        policy.totals = [service(3, second * second * 1000, backlogged=second * 1400)]
        assert sampler.due_in_us(second * INTERVAL_US) == 0
        samples = sampler.take(second * INTERVAL_US)
        assert samples is not None and samples.interval_ms == 1000
        served.append((samples.teams[0].served_us, samples.teams[0].backlogged_ms))
    assert [us for us, _ in served] == [1000, 3000, 5000, 7000, 9000]
    assert sum(ms for _, ms in served) == 7, "no millisecond is lost to rounding"


def test_idle_teams_are_left_out_and_an_idle_interval_is_nothing() -> None:
    policy = Totals()
    sampler = ServiceSampler(policy, 0)
    policy.totals = [service(1, 10), service(2, 20)]
    sampler.take(INTERVAL_US)
    policy.totals = [service(1, 10), service(2, 25)]
    samples = sampler.take(2 * INTERVAL_US)
    assert samples is not None and [team.team_id for team in samples.teams] == [2]
    assert sampler.take(3 * INTERVAL_US) is None
    policy.totals = [service(1, 10, waiting=4), service(2, 25)]
    samples = sampler.take(4 * INTERVAL_US)
    assert samples is not None and samples.teams[0].waiting == 4 and samples.teams[0].served_us == 0


def test_lags_are_the_least_and_largest_of_the_looks() -> None:
    policy = Totals()
    sampler = ServiceSampler(policy, 0)
    for look, lag in enumerate((5.0, -2.0, 9.0, 1.0), start=1):
        policy.totals = [service(1, look, lag=lag)]
        sampler.look(look * LOOK_US)
    reads = policy.num_reads
    policy.totals = [service(1, 9, lag=100.0)]
    sampler.look(4 * LOOK_US + LOOK_US // 2)
    assert policy.num_reads == reads, "a look so soon after the last is not taken"
    policy.totals = [service(1, 9, lag=3.0)]
    samples = sampler.take(INTERVAL_US)
    assert samples is not None
    assert (samples.teams[0].lag_min_us, samples.teams[0].lag_max_us) == (-2.0, 9.0)
    samples = sampler.take(2 * INTERVAL_US)
    assert samples is None


def test_idleness_belongs_to_no_interval() -> None:
    policy = Totals()
    sampler = ServiceSampler(policy, 0)
    sampler.restart(50 * INTERVAL_US)
    assert sampler.due_in_us(50 * INTERVAL_US) == INTERVAL_US
    policy.totals = [service(1, 7)]
    samples = sampler.take(51 * INTERVAL_US)
    assert samples is not None and samples.interval_ms == 1000 and samples.teams[0].served_us == 7
