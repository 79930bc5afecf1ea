"""Pauses beside what is promised: who starves, and which bound holds."""

from engine.step.pauses import Pauses
from engine.wire.messages import ConfigureTeams, TeamEntry
from policies.bounds import pause_terms
from policies.config import PolicyConfig
from policies.eg_mlfq import EgMlfq
from policies.sequences import Starving, TeamTerms
from tests.support.engine.simple_engine import Engine, submit, team


def test_when_requests_starve_each_has_a_bound_and_keeps_it() -> None:
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
    parts = pause_terms(constants, [terms], 0, 0, is_short=True)
    assert parts is not None
    least_us, most_us = parts.bound_us(0, 0, 10**9), parts.bound_us(4)
    starved = [f for f in finished.values() if f.pause_bound_us]
    assert len(starved) >= 2 and all(least_us <= f.pause_bound_us <= most_us for f in starved)
    assert all(f.longest_pause_us >= 5000 and 0 < f.pause_of_bound <= 1 for f in starved)
    assert all(f.longest_pause_us <= 5000 + 2000 for f in finished.values() if not f.pause_bound_us)


def test_when_a_gap_breaks_its_bound_no_longer_one_hides_it() -> None:
    """Two episodes: 40 ms where more was promised, then 4 s more than was promised."""
    constants = PolicyConfig(levels=3, base_quantum_us=2000, fairness_window_us=10_000, step_cost_max_us=1000)
    pauses = Pauses(constants, 0)
    pauses.configure([TeamTerms(0, starving_after_us=5000)])
    engine = Engine(policy=EgMlfq(constants), teams=(team(0),))
    engine.core.add(submit("r", prompt=1, output=9))
    engine.core.step()
    (sequence,) = engine.scheduler.sequences.values()
    sequence.last_us = 0
    pauses.starve(sequence, Starving(0, 9, 9, 9 * constants.promotion_grant_us, 0), 5_000)
    promised_us = sequence.pause.promised_us
    pauses.over(sequence, 40_000)
    first = sequence.pause.of_bound
    assert first == 40_000 / promised_us < 1
    sequence.last_us = 40_000
    pauses.starve(sequence, Starving(0, 0, 0, 0, 4 * constants.promotion_grant_us), 45_000)
    second_us = sequence.pause.promised_us
    assert second_us < promised_us
    pauses.over(sequence, 40_000 + second_us + 4_000_000)
    assert sequence.pause.of_bound == (second_us + 4_000_000) / second_us > 1
    assert sequence.pause.bound_us == promised_us, "the larger bound is shown, and the ratio is not taken from it"


def test_when_blocks_were_short_in_an_episode_the_wide_bound_counts() -> None:
    constants = PolicyConfig(levels=3, base_quantum_us=2000, fairness_window_us=10_000, step_cost_max_us=1000)
    ratios = []
    for short_us in (None, 7_000):
        pauses = Pauses(constants, 30_000, rate_percent=40)
        pauses.configure([TeamTerms(0, starving_after_us=5000), TeamTerms(1, starving_after_us=5000)])
        engine = Engine(policy=EgMlfq(constants), teams=(team(0),))
        engine.core.add(submit("r", prompt=1, output=9))
        engine.core.step()
        (sequence,) = engine.scheduler.sequences.values()
        sequence.last_us = 0
        pauses.starve(sequence, Starving(0, 0), 5_000)
        if short_us is not None:
            pauses.note_memory(is_short=True, now_us=short_us)
            pauses.note_memory(is_short=False, now_us=short_us + 1000)
        pauses.over(sequence, 20_000)
        ratios.append(sequence.pause.of_bound)
    assert ratios[1] < 0.7 * ratios[0]


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
