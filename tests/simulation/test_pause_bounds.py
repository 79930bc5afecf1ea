"""No episode of starving exceeds its bound (I8) on the engine itself: long prompts beside answers, room for all KV.

Unit: the worst gap of an episode over the bound that held when it began.
"""

import random
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.sim.clients import SECOND_US, Ask, Client, Contest, Loop, at_once
from engine.sim.parts import fixed_profile
from policies.tiers import DEFAULT_TIERS, Tier

GIB = 2**30
SECONDS = 30


def crowd(seed: int, **changed: object) -> Contest:
    """Two to five teams of any tiers that together want more than the device, with prompts of any length."""
    source = random.Random(seed)
    teams: dict[str, Tier] = {}
    clients: list[Client] = []
    for number in range(source.randint(2, 5)):
        team = f"team{number}"
        alpha_ms = source.choice([200, 300, 1000, 3000])
        teams[team] = replace(source.choice(DEFAULT_TIERS), starving_after_ms=alpha_ms)
        for _ in range(source.randint(1, 3)):
            prompt = source.choice([10, 100, 128, 300, 1000, 4000, 8000])
            ask = Ask(prompt, min(8190 - prompt, source.choice([1, 20, 100, 1000])))
            if source.random() < 0.5:
                think_us = source.choice([0, SECOND_US // 2])
                clients.append(Loop(team, ask, source.randint(1, 12), think_us=think_us))
            else:
                clients.append(at_once(team, source.randint(1, 30), ask, at_us=source.randint(0, 10) * SECOND_US))
    settings: dict[str, object] = {
        "max_batch_size": source.choice([1, 4, 16, 64]),
        "promotion_percent": source.choice([5, 20, 20]),
        "isolation": source.choice(["batch", "batch", "strict"]),
        "kv_memory_bytes": 64 * GIB,
        "host_kv_memory_bytes": 0,
    }
    return Contest(teams, clients, profile=fixed_profile(), config=EngineConfig(kind="sim", **{**settings, **changed}))  # type: ignore[arg-type]


def judge(contest: Contest) -> tuple[int, float]:
    """How many requests starved, and the worst gap over its bound: of episodes that are over, and of open ones."""
    contest.run(until_us=SECONDS * SECOND_US)
    now_us, scheduler = contest.clock.now_us(), contest.core.scheduler
    ratios = [record.finished.pause_of_bound for record in contest.records if record.finished is not None]
    for sequence in scheduler.sequences.values():
        scheduler.pauses.over(sequence, now_us)
        ratios.append(sequence.pause.of_bound)
    starved = [ratio for ratio in ratios if ratio]
    return len(starved), max(starved, default=0.0)


@pytest.mark.case("I8")
@pytest.mark.parametrize("seed", range(6))
def test_when_prompts_crowd_no_episode_exceeds_its_bound(seed: int) -> None:
    starved, worst = judge(crowd(seed))
    assert starved and worst <= 1


@pytest.mark.slow
@pytest.mark.case("I8")
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_in_three_hundred_crowds_no_episode_exceeds_it(first: int) -> None:
    for seed in range(first, first + 50):
        _, worst = judge(crowd(seed))
        assert worst <= 1, seed
