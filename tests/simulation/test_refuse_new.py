"""Refusing all new sequences at once is the same as refusing each by itself, and never touches those that run."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalog import make_policy
from policies.config import PolicyConfig
from policies.policy import Policy
from policies.sequences import SequenceTerms, Served, TeamTerms

NUM_TEAMS = 4
CONFIG = PolicyConfig(
    levels=4, base_quantum_us=2000, theta_us=3000, step_cost_max_us=1500, decode_work_us=1000, chunk_work_us=1000
)

newcomers = st.lists(st.tuples(st.integers(0, NUM_TEAMS - 1), st.integers(0, 3)), min_size=1, max_size=14)


class Pair:
    """Two policies with the same history: one refuses new sequences one by one, the other all at once."""

    def __init__(self, name: str, slots: int, constants: PolicyConfig = CONFIG) -> None:
        self.slots = slots
        self.one_by_one, self.at_once = make_policy(name, constants), make_policy(name, constants)
        self.started: set[int] = set()
        self.num_arrived = 0
        for policy in (self.one_by_one, self.at_once):
            policy.configure([TeamTerms(team, weight=1 + team % 2) for team in range(NUM_TEAMS)], 0)

    def arrive(self, arrivals: list[tuple[int, int]]) -> None:
        for team, level in arrivals:
            for policy in (self.one_by_one, self.at_once):
                policy.arrive(SequenceTerms(self.num_arrived, team, 8, 0, 500, level, 0), 0)
            self.num_arrived += 1

    def let_coast(self, teams: Iterable[int]) -> None:
        """A sequence of each of these teams finishes, with more work than others will have. Enough where one completion
        is.
        """
        for team in teams:
            seq_id = -1 - team
            for policy in (self.one_by_one, self.at_once):
                policy.arrive(SequenceTerms(seq_id, team, 8, 0, 500, 0, 0), 0)
                policy.begin(0)
                policy.take(seq_id, 10_000, 1000)
                policy.settle([Served(seq_id, 10_000, 1000, True, True)], 0)
                policy.leave(seq_id, 0)

    def step(self, policy: Policy, *, is_closed: bool, at_once: bool) -> list[int]:
        policy.begin(0)
        if is_closed and at_once:
            policy.refuse_new()
        taken: list[int] = []
        while len(taken) < self.slots and (seq_id := policy.best()) is not None:
            if is_closed and seq_id not in self.started:
                assert not at_once, "a new sequence was offered after refuse_new"
                policy.refuse(seq_id)
            else:
                policy.take(seq_id, 1000)
                taken.append(seq_id)
        if is_closed and not at_once:
            while (seq_id := policy.best()) is not None:  # the walk to its end, so that both know who was refused
                policy.refuse(seq_id) if seq_id not in self.started else policy.take(seq_id, 1000)
                taken += [seq_id] if seq_id in self.started else []
        policy.settle([Served(seq_id, 1000, 1000, True) for seq_id in taken], 0)
        return taken

    def both(self, *, is_closed: bool) -> tuple[list[int], list[int]]:
        first = self.step(self.one_by_one, is_closed=is_closed, at_once=False)
        second = self.step(self.at_once, is_closed=is_closed, at_once=True)
        self.started |= {*first, *second}
        return first, second


@pytest.mark.parametrize("name", ["eg-mlfq", "fcfs"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(before=newcomers, after=newcomers, num_closed=st.integers(1, 6))
def test_both_ways_of_refusing_pick_the_same(
    name: str, before: list[tuple[int, int]], after: list[tuple[int, int]], num_closed: int
) -> None:
    pair = Pair(name, slots=100)
    pair.arrive(before)
    assert len(pair.both(is_closed=False)[0]) == len(before)
    pair.arrive(after)
    first, second = pair.both(is_closed=True)
    assert sorted(first) == sorted(second) == list(range(len(before)))
    for _ in range(num_closed):  # from here on both know the same of who was refused
        first, second = pair.both(is_closed=True)
        assert first == second and sorted(first) == list(range(len(before)))
    first, second = pair.both(is_closed=False)
    assert first == second and sorted(first) == list(range(len(before) + len(after)))
    assert pair.one_by_one.team_service() == pair.at_once.team_service()


@pytest.mark.parametrize("name", ["eg-mlfq", "fcfs"])
def test_in_mid_step_it_spares_those_taken_and_those_that_ran(name: str) -> None:
    policy = make_policy(name, CONFIG)
    policy.configure([TeamTerms(0), TeamTerms(1)], 0)
    for seq_id, (team, level) in enumerate([(0, 3), (1, 3), (0, 0), (1, 0), (0, 0)]):
        policy.arrive(SequenceTerms(seq_id, team, 8, 0, 500, level, 0), 0)
    policy.begin(0)
    first = [policy.best()]
    assert first[0] is not None
    policy.take(first[0], 1000)
    policy.refuse_new()
    assert policy.best() is None
    policy.settle([Served(first[0], 1000, 1000, True)], 0)
    policy.begin(0)
    policy.refuse_new()
    assert policy.best() == first[0]
    policy.take(first[0], 1000)
    assert policy.best() is None
    policy.settle([Served(first[0], 1000, 1000, True)], 0)
    for seq_id in range(5):
        policy.leave(seq_id, 0)
