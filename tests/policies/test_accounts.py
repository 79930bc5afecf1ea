"""The order of one team's own sequences: by level and place, but for lane P, minimum runs and coasting."""

from policies.accounts import LANE_P, LevelQueues, RankedSequence, TeamShare, may_fit
from policies.config import PolicyConfig
from policies.sequences import TeamTerms

CONFIG = PolicyConfig(levels=3, base_quantum_us=10)


def filled(*levels: int) -> tuple[LevelQueues, dict[int, RankedSequence]]:
    """Sequences 1, 2, ... of these levels, in order of arrival."""
    team = TeamShare(TeamTerms(1), CONFIG)
    made = {i: RankedSequence(i, team, level, i, 0, 0) for i, level in enumerate(levels, 1)}
    for sequence in made.values():
        team.levels.push(sequence)
    return team.levels, made


def order(queues: LevelQueues) -> list[int]:
    found = [sequence.seq_id for sequence in queues.walk()]
    assert (queues.head.seq_id if queues.head else None) == next(iter(found), None), "head is the first of the walk"
    return found


def test_the_order_is_by_level_and_then_by_place() -> None:
    queues, made = filled(1, 0, 1, 0)
    assert order(queues) == [2, 4, 1, 3]
    queues.demote(made[2], 9)
    assert order(queues) == [4, 1, 3, 2], "behind those of its new level"
    assert (made[2].level, made[2].rank, made[2].used) == (1, 2, 0)


def test_while_a_team_coasts_the_order_is_by_arrival() -> None:
    queues, made = filled(1, 0, 1, 0)
    queues.set_coasting(True)
    assert order(queues) == [1, 2, 3, 4]
    queues.demote(made[1], 9)
    assert order(queues) == [1, 2, 3, 4]
    queues.set_coasting(False)
    assert order(queues) == [2, 4, 3, 1]


def test_a_minimum_run_yields_only_to_two_levels_better() -> None:
    queues, made = filled(0, 1, 2)
    queues.keep(made[3])
    assert made[3].rank == 1 and order(queues) == [1, 3, 2]
    queues.keep(made[2])
    assert made[2].rank == -1 and order(queues) == [2, 1, 3]
    queues.end_keep(made[2])
    queues.end_keep(made[3])
    assert order(queues) == [1, 2, 3]


def test_lane_p_is_before_all_and_goes_back_to_its_place() -> None:
    queues, made = filled(0, 1, 2)
    queues.keep(made[2])
    queues.grant(made[3])
    assert made[3].rank == LANE_P and order(queues) == [3, 2, 1]
    queues.end_grant(made[3])
    assert made[3].rank == 4 and order(queues) == [2, 1, 3]


def test_when_one_leaves_from_anywhere_the_rest_keep_their_order() -> None:
    queues, made = filled(0, 1, 2, 2)
    queues.grant(made[3])
    queues.keep(made[2])
    for seq_id, rest in ((3, [2, 1, 4]), (2, [1, 4]), (1, [4]), (4, [])):
        queues.remove(made[seq_id])
        assert order(queues) == rest
    assert queues.granted is None and not queues.kept


def test_only_one_that_is_away_and_refused_may_not_fit() -> None:
    _, made = filled(0)
    cases = [(False, False, True), (False, True, True), (True, False, True), (True, True, False)]
    for is_away, is_refused, expected in cases:
        made[1].is_away, made[1].is_refused = is_away, is_refused
        assert may_fit(made[1]) is expected
