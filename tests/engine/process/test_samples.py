"""Running totals in, deltas of an interval out."""

from dataclasses import replace

import pytest

from engine.process.samples import INTERVAL_US, LOOK_US, ServiceSampler
from engine.step.pauses import Pauses
from engine.wire.messages import ConfigureTeams
from policies.bounds import pause_bound_us
from policies.config import PolicyConfig
from policies.eg_mlfq import EgMlfq
from policies.sequences import TeamService, TeamTerms
from policies.team_counters import POLICY_TOTALS
from tests.support.engine.simple_engine import ArrivalOrder, Engine, submit, team


class Totals(ArrivalOrder):
    def __init__(self) -> None:
        super().__init__()
        self.totals: list[TeamService] = []
        self.num_reads = 0

    def team_service(self) -> list[TeamService]:
        self.num_reads += 1
        return self.totals


def service(team_id: int, served: int, *, backlogged: int = 0, waiting: int = 0, lag: float = 0.0) -> TeamService:
    return TeamService(
        team_id=team_id, served_us=served, entitled_us=served + 1, backlogged_us=backlogged, waiting=waiting, lag=lag
    )


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


@pytest.mark.parametrize("name", POLICY_TOTALS)
def test_when_any_total_grows_the_team_has_a_sample(name: str) -> None:
    policy = Totals()
    sampler = ServiceSampler(policy, 0)
    for second, total in enumerate((4, 9), start=1):
        policy.totals = [replace(service(1, 10), **{name: total + 10})]
        samples = sampler.take(second * INTERVAL_US)
    assert samples is not None and getattr(samples.teams[0], name) == 5


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


def test_samples_tell_of_swaps_pauses_bounds_and_who_cost_whom_what() -> None:
    constants = PolicyConfig(levels=3, base_quantum_us=2000, fairness_window_us=10_000, step_cost_max_us=1000)
    engine = Engine(
        blocks=6,
        host_blocks=6,
        block_copy_us=100.0,
        policy=EgMlfq(constants),
        block_size=4,
        max_batch_size=2,
        teams=(team(0, weight=3), team(1)),
        pauses=Pauses(constants, 600),
    )
    sampler = ServiceSampler(engine.policy, 0, engine.scheduler, block_bytes=1024)
    for team_id in (0, 1):
        engine.core.add(submit(f"r{team_id}", team_id=team_id, prompt=8, output=12))
    done = engine.run()
    samples = sampler.take(INTERVAL_US)
    assert samples is not None
    copied_us = sum(message.duration_us for message in done if not message.num_running)
    finished = {f.request_id: f for message in done for f in message.finished}
    assert samples.stall_us >= copied_us > 0 and samples.replayed_tokens == 0
    assert sum(pair.billed_us for pair in samples.interference) == samples.stall_us
    assert sum(pair.swaps_out for pair in samples.interference) == sum(f.num_swaps for f in finished.values()) > 0
    assert sum(pair.preemptions for pair in samples.interference) == sum(f.num_preemptions for f in finished.values())
    by_team = {sample.team_id: sample for sample in samples.teams}
    for team_id, sample in by_team.items():
        pairs = [pair for pair in samples.interference if pair.victim_id == team_id]
        assert sample.bytes_swapped_out == sum(pair.bytes_out for pair in pairs)
        assert sample.bytes_swapped_in == sum(pair.bytes_in for pair in pairs)
        assert sample.bytes_swapped_out % 1024 == 0
        assert sample.longest_pause_us == finished[f"r{team_id}"].longest_pause_us
        terms = [TeamTerms(0, 3), TeamTerms(1, 1)]
        assert sample.pause_bound_us == pause_bound_us(constants, terms, team_id, sample.waiting, 0), "not short now"
    assert sum(sample.bytes_swapped_out for sample in by_team.values()) > 0
    assert sum(sample.overhead_us for sample in by_team.values()) == samples.stall_us
    assert sum(sample.served_us for sample in by_team.values()) == sum(message.duration_us for message in done)
    assert samples.lag_bound_us == 2 * (2500 + 2 * 1000), "blocks were short: twice Theta + 2u"
    assert sampler.take(2 * INTERVAL_US) is None, "deltas, and nothing is told twice"


def test_a_team_that_was_archived_and_restored_begins_anew() -> None:
    """The policy closes the account of a team that has left at a later change: its totals start again at nothing."""
    engine = Engine(policy=EgMlfq(PolicyConfig()), teams=(team(0), team(1)))
    sampler = ServiceSampler(engine.policy, 0, engine.scheduler)
    total_us = sampled_us = 0
    for number, output in enumerate((8, 2, 9)):
        engine.core.add(submit(f"r{number}", output=output))
        total_us += sum(message.duration_us for message in engine.run())
        for table in ((team(1),), (team(1, weight=3),), (team(0), team(1))):
            samples = sampler.take(engine.clock.now_us())
            if samples is not None:
                assert min(sample.served_us for sample in samples.teams) >= 0
                sampled_us += sum(sample.served_us for sample in samples.teams)
            engine.core.configure(ConfigureTeams(teams=table))
            engine.core.step()
    assert sampled_us == total_us > 0
    restored = Totals()
    sampler = ServiceSampler(restored, 0)
    for second, served_us in enumerate((7000, 1000), start=1):  # changed twice between two samples
        restored.totals = [service(0, served_us)]
        samples = sampler.take(second * INTERVAL_US)
        assert samples is not None and samples.teams[0].served_us == served_us
