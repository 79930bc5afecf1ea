"""Teams whose long requests fill the memory take nobody's share and nobody's start, and compute little twice."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.clock import VirtualClock
from engine.memory.billing import Counts
from engine.sim.runner import SimRunner
from engine.wire.messages import SamplingParams, Submit
from policies.catalog import make_policy
from policies.config import from_profile
from tests.simulation.test_gaming import PROFILE
from tests.support.engine.simple_engine import Engine, team


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it."""

    shares: list[float]  # of the device, by team
    ended: list[int]
    longest_us: int  # that one of team 0's went without a step
    replayed_tokens: int
    counts: dict[tuple[int, int], Counts]  # by causer and victim


def _run(mode: str, blocks: int, host: int, loads: Sequence[tuple[int, int, int]], seconds: int = 40) -> Run:
    """Each team keeps so many requests of so many prompt and output tokens inside; the last team sends first."""
    clock = VirtualClock()
    constants = from_profile(PROFILE, levels=8, fairness_window_us=1_000_000, chunk_tokens=256, context_len=8192)
    engine = Engine(
        blocks=blocks,
        host_blocks=host,
        block_copy_us=100.0,
        policy=make_policy("eg-mlfq", constants),
        profile=PROFILE,
        runner=SimRunner(PROFILE, clock, block_copy_us=100.0),
        clock=clock,
        context_len=8192,
        max_batch_size=8,
        max_batch_tokens=512,
        prefill_chunk_tokens=256,
        memory_preemption=mode,
        teams=tuple(team(team_id) for team_id in range(len(loads))),
    )
    ended = [0] * len(loads)
    number = longest_us = 0

    def send(team_id: int) -> None:
        nonlocal number
        number += 1
        _, prompt, output = loads[team_id]
        sampling = SamplingParams(seed=number, max_tokens=output, ignore_eos=True)
        name = f"{team_id}-{number}"
        submit = Submit(request_id=name, team_id=team_id, prompt_token_ids=(65,) * prompt, sampling=sampling)
        assert engine.core.add(submit) is None

    for team_id in reversed(range(len(loads))):
        for _ in range(loads[team_id][0]):
            send(team_id)
    while clock.now_us() < seconds * 1_000_000:
        done = engine.core.step()
        for finished in done.finished if done is not None else ():
            team_id = int(finished.request_id.partition("-")[0])
            ended[team_id] += 1
            if team_id == 0:
                longest_us = max(longest_us, finished.longest_pause_us)
            send(team_id)
    served = [one.served_us for one in engine.policy.team_service()]
    waits = [clock.now_us() - s.last_us for s in engine.scheduler.sequences.values() if s.request.team_id == 0]
    bills = engine.scheduler.memory.bills
    return Run(
        [one / sum(served) for one in served],
        ended,
        max(longest_us, *waits),
        bills.replayed_tokens,
        bills.take_counts(),
    )


def test_a_team_that_fills_both_pools_takes_nobodys_share() -> None:
    """The start rule counts claims; were they given back only by endings, the hog's growth would take each one."""
    run = _run("proactive", 520, 520, [(8, 200, 100), (64, 200, 3000)])
    assert run.shares[0] > 0.46 and run.longest_us < 6_000_000, run
    own, others = run.counts[1, 1], run.counts.get((0, 1), Counts())
    assert own.recomputes > 4 * others.recomputes, "it holds more than its share, and pays for that itself"
    assert run.replayed_tokens < 30_000, "it loses no more than what is above its share"


def test_a_newcomer_without_a_claim_moves_nobody() -> None:
    """KV dropped for one that may not start is computed again for nothing, and the loser is the next that asks."""
    run = _run("recompute", 480, 0, [(8, 400, 1200)], seconds=60)
    assert run.ended[0] >= 18 and run.replayed_tokens < 50_000, run


def test_two_teams_that_fill_the_memory_do_not_drop_in_turns() -> None:
    """The one with the least lag changes from step to step; who may lose KV is who holds more than its share of it."""
    run = _run("recompute", 480, 0, [(8, 400, 1200), (8, 400, 1200)], seconds=60)
    assert sum(run.ended) >= 12 and run.replayed_tokens < 120_000, run
