"""A team whose long requests fill both pools takes nobody's share and nobody's start."""

from engine.clock import VirtualClock
from engine.messages import SamplingParams, Submit
from engine.sim.runner import SimRunner
from policies.config import from_profile
from policies.service import make_policy
from tests.engine.support import Engine, team
from tests.simulation.test_gaming import PROFILE

SECONDS = 40


def _hogged(mode: str, host: int) -> tuple[float, int]:
    """Team 0 keeps 8 requests of 200 + 100 inside, team 1 has 64 of 200 + 3000: team 0's part of the device, and the
    longest that one of its requests went without a step."""
    clock = VirtualClock()
    constants = from_profile(PROFILE, levels=8, fairness_window_us=1_000_000, chunk_tokens=256, context_len=8192)
    engine = Engine(
        blocks=520,
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
        teams=(team(0), team(1)),
    )
    number = 0

    def send(team_id: int, output: int) -> None:
        nonlocal number
        number += 1
        sampling = SamplingParams(seed=number, max_tokens=output, ignore_eos=True)
        assert (
            engine.core.add(
                Submit(
                    request_id=f"{team_id}-{number}", team_id=team_id, prompt_token_ids=(65,) * 200, sampling=sampling
                )
            )
            is None
        )

    for _ in range(64):
        send(1, 3000)
    for _ in range(8):
        send(0, 100)
    longest = 0
    while clock.now_us() < SECONDS * 1_000_000:
        done = engine.core.step()
        for finished in done.finished if done is not None else ():
            if finished.request_id.startswith("0-"):
                longest = max(longest, finished.longest_pause_us)
                send(0, 100)
            else:
                send(1, 3000)
    service = {one.team_id: one.served_us for one in engine.policy.team_service()}
    waits = [clock.now_us() - s.last_us for s in engine.scheduler.sequences.values() if s.request.team_id == 0]
    return service[0] / sum(service.values()), max(longest, *waits)


def test_a_team_that_fills_both_pools_takes_nobodys_share() -> None:
    """The start rule counts claims; were they given back only by endings, the hog's growth would take each one."""
    share, longest_us = _hogged("proactive", 520)
    assert share > 0.46 and longest_us < 6_000_000, (share, longest_us)
