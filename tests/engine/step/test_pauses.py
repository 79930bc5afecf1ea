"""Pauses beside what is promised: who starves, and which bound holds."""

from engine.step.pauses import Pauses
from engine.wire.messages import ConfigureTeams, TeamEntry
from policies.bounds import pause_bound_us
from policies.config import PolicyConfig
from policies.eg_mlfq import EgMlfq
from policies.sequences import TeamTerms
from tests.support.engine.simple_engine import Engine, submit, team


def test_a_pause_bound_is_kept_from_the_moment_a_request_starves() -> None:
    constants = PolicyConfig(levels=3, base_quantum_us=2000, fairness_window_us=10_000, step_cost_max_us=1000)
    terms = TeamTerms(0, starving_after_us=5000)
    engine = Engine(policy=EgMlfq(constants), max_batch_size=1, teams=(), pauses=Pauses(constants, 0), block_size=16)
    engine.core.configure(
        ConfigureTeams(
            teams=(TeamEntry(team_id=0, weight=1, start_level=0, starving_after_us=5000, promotion_burst_grants=4),)
        )
    )
    for index in range(4):
        engine.core.add(submit(f"r{index}", prompt=1, output=9))
    finished = {f.request_id: f for message in engine.run() for f in message.finished}
    bounds = {pause_bound_us(constants, [terms], 0, ahead, 0, is_short=True) for ahead in range(1, 5)}
    starved = [f for f in finished.values() if f.pause_bound_us]
    assert len(starved) >= 2 and all(f.pause_bound_us in bounds for f in starved)
    assert all(f.longest_pause_us >= 5000 for f in starved)
    assert all(f.longest_pause_us <= 5000 + 1000 for f in finished.values() if not f.pause_bound_us)


def test_a_shorter_starving_after_holds_for_those_that_wait_already() -> None:
    constants = PolicyConfig(levels=3, base_quantum_us=2000, fairness_window_us=10_000, step_cost_max_us=1000)
    engine = Engine(policy=EgMlfq(constants), max_batch_size=1, teams=(team(0), team(1)), pauses=Pauses(constants, 0))
    for index in range(4):
        engine.core.add(submit(f"r{index}", prompt=1, output=9))
    engine.core.step()
    patient = TeamEntry(team_id=0, weight=1, start_level=0, starving_after_us=5000, promotion_burst_grants=4)
    engine.core.configure(ConfigureTeams(teams=(patient, team(1))))
    finished = [f for message in engine.run() for f in message.finished]
    assert max(f.longest_pause_us for f in finished) < 1_000_000, "nobody starves by the table they arrived under"
    for one in finished:
        assert (one.pause_bound_us > 0) == (one.longest_pause_us > 5000)
