"""Memory and policy agree on every minimum run after every step: blocks and slot are safe for the same steps."""

from collections import Counter

import pytest

from engine.memory.mover import Mover
from policies.accounts import LANE_P
from policies.eg_mlfq import EgMlfq
from tests.support.simulation.pressure import Rig, pools, scenario_of

SEEDS = range(60)


def seen_in(seed: int) -> Counter[str]:
    """Plays a seed's load under memory pressure; how runs began and ended in it."""
    scenario, demand, _ = scenario_of(seed)
    device_blocks, host_blocks = pools(scenario, demand)
    policy = EgMlfq(scenario.constants())
    rig = Rig(scenario, policy, mode=scenario.mode, device_blocks=device_blocks, host_blocks=host_blocks)
    scheduler, mover = rig.scheduler, rig.scheduler.memory._mover
    assert isinstance(mover, Mover)
    if seed % 2:
        mover._planner.min_run_steps = 2 * max(1, scenario.min_run_steps)  # as G5 does after many early moves
    seen: Counter[str] = Counter()
    left: dict[int, int] = {}  # steps, after the step before
    lapse: dict[int, int] = {}  # the step before which the run must be over
    while not rig.load.is_over or rig.core.has_work:
        late = rig.load.begin_step()
        done = rig.core.step()
        for name in late:
            rig.core.abort(name)
        scheduler.check()
        ran = {sequence.seq_id for sequence in scheduler._ran_last}
        for seq_id, sequence in scheduler.sequences.items():
            ranked, now = policy._sequences[seq_id], sequence.memory.min_run_left
            assert ranked.min_run_left == now
            kept = ranked.level * 2 - 3 * (now > 0)
            assert ranked.rank == (LANE_P if ranked.grant_left > 0 else kept)
            assert (ranked in ranked.team.levels.kept) == (now > 0)
            before = left.get(seq_id, 0)
            if now and sequence.memory.uploaded_step == scheduler.num_steps:
                assert now == mover._planner.min_run_steps, "a run begins whole"
                seen["after a replay" if seq_id in ran else "after an upload"] += 1
                seen["doubled"] += now > scenario.min_run_steps
                lapse[seq_id] = scheduler.num_steps + 4 * now
            elif seq_id in ran and before:
                assert now in (before - 1, 0)
            elif before:
                assert now in (before, 0), "only its own steps count"
                seen["ended early"] += now == 0
            assert not now or scheduler.num_steps < lapse[seq_id]
            left[seq_id] = now
        if done is not None:
            for finished in done.finished:
                rig.load.ended(finished.request_id)
    return seen


@pytest.mark.case("I13")
def test_when_memory_counts_a_minimum_run_the_policy_agrees() -> None:
    """And runs of all kinds are among those counted."""
    seen = sum((seen_in(seed) for seed in SEEDS), Counter[str]())
    assert min(seen["after an upload"], seen["after a replay"], seen["doubled"]) > 50, seen
    assert seen["ended early"] > 5, seen
