"""A long run of a heavy mixed load that swaps, drops, promotes, aborts and reloads its teams leaves nothing behind.

Every container that the core, the scheduler and the policy hold is counted before and after, by walking their
attributes; what may keep something is named here.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable

import pytest

from engine.wire.messages import ConfigureTeams, SamplingParams, Submit, TeamEntry
from policies.eg_mlfq import EgMlfq
from tests.support.simulation.pressure import Rig, Scenario

LIVE = 40  # requests at once
TEAMS = 5

# What an engine at rest may keep: the latest step, heaps whose old entries go when they are too many, what a team's
# coasting is decided by, the longest pauses and the counts that a sample takes away once a second, cached bounds.
KEPT = {
    "scheduler._ran_last": 16,
    "scheduler.memory._starts._needs": 64,
    "scheduler.memory._starts._deadlines": 64,
    "scheduler.policy._rows": 16,
    "scheduler.policy._planned": TEAMS,
    "scheduler.policy._taken": TEAMS,
    "scheduler.policy._walks": TEAMS,
    "scheduler.policy._eligible": TEAMS,
    "scheduler.policy._gated": TEAMS,
    "scheduler.policy._able": TEAMS,
    "scheduler.policy._promotions._due": 64,
    "scheduler.policy._promotions._funded": TEAMS,
    "scheduler.policy._meter.teams[].coast._works": 256 * TEAMS,
    "scheduler.memory._mover.grew": TEAMS,
    "scheduler.pauses._longest_us": TEAMS,
    "scheduler.pauses._bounds": (LIVE + 1) * TEAMS,
    "scheduler.memory.bills._counts": TEAMS * TEAMS,
    "scheduler.memory.bills.carried_us": TEAMS,
}


def sizes(root: object) -> Counter[str]:
    """Elements of every container below `root`, by the path of attributes that leads to it; `[]` is any element."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: deque[tuple[str, object]] = deque([("", root)])  # nearest first, so that paths are the shortest
    while todo:
        path, thing = todo.popleft()
        if id(thing) in seen or isinstance(thing, (int, float, str, bytes, type)) or thing is None:
            continue
        seen.add(id(thing))
        if isinstance(thing, (list, tuple, set, frozenset, deque, dict, bytearray)):
            found[path] += len(thing)
            inside: Iterable[object] = () if isinstance(thing, bytearray) else thing
            if isinstance(thing, dict):
                inside = [*thing, *thing.values()]
            todo += [(path + "[]", one) for one in inside]
        elif type(thing).__module__.split(".")[0] in ("engine", "policies"):
            names = {*getattr(thing, "__dict__", ())}
            for cls in type(thing).__mro__:
                names.update(getattr(cls, "__slots__", ()))
            todo += [
                (f"{path}.{name}".lstrip("."), getattr(thing, name)) for name in sorted(names) if hasattr(thing, name)
            ]
    return found


def make_rig() -> Rig:
    scenario = Scenario(
        seed=1,
        is_exact=False,
        weights=(1, 2, 3, 4, 1),
        start_levels=(0, 0, 1, 2, 0),
        starving_after_us=(3_000, 10_000, 10_000, 50_000, 200_000),
        burst_grants=(4, 2, 1, 0, 3),
        promotion_percent=20,
        levels=5,
        fairness_window_us=20_000,
        coast=True,
        mode="proactive",
        slots=8,
        budget=48,
        chunk=16,
        block_size=4,
        min_run_steps=4,
        benefit=1,
        link_percent=60,
        block_copy_us=20.0,
        max_delay=3,
        lose_one_in=200,
        chains=(),
    )
    return Rig(scenario, EgMlfq(scenario.constants()), mode="proactive", device_blocks=70, host_blocks=28)


def table(rig: Rig, rng: random.Random) -> ConfigureTeams:
    """The teams with other weights; now and then one is missing."""
    scenario = rig.scenario
    absent = rng.randrange(2 * TEAMS)
    return ConfigureTeams(
        teams=tuple(
            TeamEntry(
                team_id=team_id,
                weight=rng.randint(1, 4),
                start_level=scenario.start_levels[team_id],
                starving_after_us=scenario.starving_after_us[team_id],
                promotion_burst_grants=scenario.burst_grants[team_id],
            )
            for team_id in range(TEAMS)
            if team_id != absent
        )
    )


@pytest.mark.timeout(1200)
@pytest.mark.case("I15", "I1")
@pytest.mark.parametrize("steps", [6_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_nothing_grows(steps: int) -> None:
    rng = random.Random(7)
    rig = make_rig()
    core, scheduler = rig.core, rig.scheduler
    (whole,) = core._inbox  # what the rig has configured
    assert isinstance(whole, ConfigureTeams)
    num_sent = num_ended = num_swaps = num_recomputes = num_promotions = 0
    busy: list[int] = []
    while core.has_work or num_sent == 0:
        is_over = scheduler.num_steps >= steps
        while not is_over and len(core.request_ids) < LIVE:
            refused = core.add(
                Submit(
                    request_id=f"r{num_sent}",
                    team_id=rng.randrange(TEAMS),
                    start_level=rng.choice((0, 0, 2)),
                    prompt_token_ids=(1,) * rng.randint(1, 50),
                    sampling=SamplingParams(seed=num_sent, max_tokens=rng.randint(1, 40), ignore_eos=True),
                    max_queue_us=rng.choice((0, 0, 0, 50_000)),
                )
            )
            num_sent += refused is None
        if rng.randrange(100) == 0:
            core.abort(rng.choice(sorted(core.request_ids)))
        if rng.randrange(5_000) == 0:
            core.configure(table(rig, rng) if not is_over else whole)
        done = core.step()
        if scheduler.num_steps % 1000 == 0:
            scheduler.check()
            scheduler.memory.bills.take_counts()
        if scheduler.num_steps in (steps // 10, steps):
            busy.append(sizes(core).total())
            for heap in (scheduler.memory._starts._needs, scheduler.memory._starts._deadlines):
                assert len(heap) <= 2 * LIVE + 64, "entries of those that have gone are swept out under load too"
        if done is not None:
            for finished in done.finished:
                num_ended += 1
                num_swaps += finished.num_swaps
                num_recomputes += finished.num_recomputes
                num_promotions += finished.num_promotions
    assert num_ended == num_sent > steps // 12
    assert min(num_swaps, num_recomputes, num_promotions) > steps // 100, (num_swaps, num_recomputes, num_promotions)
    core.configure(whole)
    core.step()
    scheduler.check()
    fresh = make_rig()
    fresh.core.step()
    before, after = sizes(fresh.core), sizes(core)
    grown = {name: (before[name], after[name]) for name in after if after[name] > before[name] + _kept(name)}
    assert not grown, "\n".join(f"{n}: {v}" for n, v in sorted(grown.items()))
    assert busy[-1] < 2 * busy[0], "under load there is no more at the end than after a tenth of the steps"


def _kept(name: str) -> int:
    """How much more than a fresh engine one at rest may hold there."""
    for path, most in KEPT.items():
        if name == path or name.startswith((path + "[", path + ".")):
            return most if name == path else 1 << 30
    return 0
