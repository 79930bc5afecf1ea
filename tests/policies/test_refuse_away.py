"""Refusing at once all whose KV is away picks what refusing each by itself picks."""

import random

import pytest

from policies.catalog import make_policy
from policies.config import PolicyConfig
from policies.policy import Policy
from policies.sequences import SequenceTerms, Served, TeamTerms

NUM_TEAMS, SLOTS, STEPS = 5, 6, 60
CONFIG = PolicyConfig(
    levels=4,
    base_quantum_us=2000,
    theta_us=3000,
    step_cost_max_us=1500,
    decode_work_us=1000,
    chunk_work_us=1000,
    promotion_percent=30,
)


def step(policy: Policy, now_us: int, away: set[int], new_fit: bool, asked: int | None) -> tuple[list[int], int]:
    """Runs a step. After `asked` offers the rest of those away is refused at once, unless it is None. Returns who ran,
    and how many were offered.
    """
    policy.begin(now_us)
    taken: list[int] = []
    offers = 0
    if not new_fit:
        policy.refuse_new()
    while len(taken) < SLOTS:
        if offers == asked:
            policy.refuse_away()
        seq_id = policy.best()
        if seq_id is None:
            break
        offers += 1
        if seq_id in away:
            policy.refuse(seq_id)
        else:
            policy.take(seq_id, 1000)
            taken.append(seq_id)
    policy.settle([Served(seq_id, 1000, 900 + seq_id % 7 * 50, True) for seq_id in taken], now_us + 1000 * len(taken))
    return taken, offers


@pytest.mark.parametrize("name", ["eg-mlfq", "fcfs"])
@pytest.mark.parametrize("seed", range(12))
def test_both_ways_of_refusing_pick_the_same(name: str, seed: int) -> None:
    rng = random.Random(seed)
    one_by_one, at_once = policies = make_policy(name, CONFIG), make_policy(name, CONFIG)
    for policy in policies:
        policy.configure(
            [TeamTerms(team, weight=1 + team % 3, starving_after_us=9_000) for team in range(NUM_TEAMS)], 0
        )
    away: set[int] = set()
    live: list[int] = []
    started: set[int] = set()
    min_runs: dict[int, int] = {}  # steps left
    now_us = spared = num_arrived = 0
    for _ in range(STEPS):
        while len(live) < 40:
            terms = SequenceTerms(num_arrived, rng.randrange(NUM_TEAMS), 8, 0, 500, rng.randrange(4), now_us)
            for policy in policies:
                policy.arrive(terms, now_us)
            live.append(num_arrived)
            num_arrived += 1
        for seq_id in live:
            if seq_id in away and rng.random() < 0.08:
                away.discard(seq_id)
                for policy in policies:
                    policy.set_away(seq_id, False)
                    policy.fits_again(seq_id)
                    policy.protect(seq_id, 2)
                min_runs[seq_id] = 2
            elif seq_id in started - away and rng.random() < 0.5:
                away.add(seq_id)
                for policy in policies:
                    policy.set_away(seq_id, True)
        new_fit = rng.random() < 0.6
        first, num_first = step(one_by_one, now_us, away, new_fit, None)
        second, num_second = step(at_once, now_us, away, new_fit, rng.randrange(4))
        assert first == second
        assert one_by_one.team_service() == at_once.team_service()
        spared += num_first - num_second
        started.update(first)
        for seq_id in [seq_id for seq_id in first if min_runs.get(seq_id)]:
            min_runs[seq_id] -= 1
            for policy in policies:
                policy.protect(seq_id, min_runs[seq_id])
        now_us += 1000 * max(1, len(first))
        for seq_id in [seq_id for seq_id in live if rng.random() < 0.03]:
            live.remove(seq_id)
            away.discard(seq_id)
            for policy in policies:
                policy.leave(seq_id, now_us)
    assert spared > STEPS, "refusing at once saved no offers"
