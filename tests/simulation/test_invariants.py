"""Random workloads, pools and settings through the production core; every invariant is checked at every step.

A failing example prints its scenario and replays: nothing here depends on time or on a random source but hypothesis'.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import blocks_for
from engine.clock import VirtualClock
from engine.plan import StepPlan, StepResult
from engine.request import Status
from engine.sim.runner import SimRunner
from engine.step.core import EngineCore
from engine.wire.messages import StepDone
from policies.catalog import make_policy
from policies.config import from_profile
from policies.cost import StepProfile
from policies.sequences import Starving
from tests.support.engine.simple_engine import ArrivalOrder, Engine, submit, team

PROFILE = StepProfile(
    fixed_us=300.0, prefill_token_us=40.0, prefill_attention_us=0.5, decode_row_us=90.0, decode_context_us=0.7
)
NUM_TEAMS = 3
CONTEXT_LEN = 64


@dataclass(frozen=True)
class Arrival:
    at_step: int
    team_id: int
    prompt: int
    output: int
    start_level: int
    max_queue_us: int
    abort_after: int | None  # steps after its arrival; None is never
    abort_mid_step: bool


@dataclass(frozen=True)
class Scenario:
    policy: str
    slots: int
    budget: int
    chunk: int
    blocks: int
    block_size: int
    weights: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    failures: frozenset[tuple[int, int]]  # (step, row)


arrivals = st.builds(
    Arrival,
    at_step=st.integers(0, 40),
    team_id=st.integers(0, NUM_TEAMS - 1),
    prompt=st.integers(1, 50),
    output=st.integers(1, 25),
    start_level=st.integers(0, 3),
    max_queue_us=st.sampled_from([0, 0, 0, 4000]),
    abort_after=st.one_of(st.none(), st.integers(0, 25)),
    abort_mid_step=st.booleans(),
)
scenarios = st.builds(
    Scenario,
    policy=st.sampled_from(["eg-mlfq", "eg-mlfq", "fcfs", "arrival-order"]),
    slots=st.integers(1, 6),
    budget=st.integers(1, 40),
    chunk=st.integers(1, 32),
    blocks=st.integers(3, 40),
    block_size=st.sampled_from([1, 4, 16]),
    weights=st.tuples(*[st.integers(1, 4)] * NUM_TEAMS),
    arrivals=st.lists(arrivals, min_size=1, max_size=25).map(tuple),
    failures=st.frozensets(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=2),
)


@dataclass
class CheckingRunner:
    """Simulates, and holds each plan against the settings and against what it saw of the same sequences before."""

    scenario: Scenario
    clock: VirtualClock
    positions: dict[int, int] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    mid_step: Callable[[], None] = lambda: None
    plan: StepPlan | None = None
    left: set[int] = field(default_factory=set)  # teams whose prompts were passed over
    holders: list[int | None] = field(default_factory=list)  # of the reservation, as each step was begun

    def execute(self, plan: StepPlan) -> StepResult:
        self.plan = plan
        scenario = self.scenario
        tokens = sum(len(row.token_ids) for row in plan.rows)
        assert 1 <= len(plan.rows) <= scenario.slots and tokens <= scenario.budget
        tables = [block for row in plan.rows for block in row.block_table]
        assert len(tables) == len(set(tables)), "two sequences share a block"
        for row in plan.rows:
            end = row.start + len(row.token_ids)
            assert row.seq_id not in self.released, "it has ended"
            assert row.start == self.positions.get(row.seq_id, 0), "no gap and no repeat"
            assert len(row.block_table) == blocks_for(end, scenario.block_size), "resident, and not a block more"
            assert len(row.token_ids) == 1 or not row.is_decode
            if not row.is_decode and not row.samples:
                is_cut_by_time = end % scenario.block_size == 0
                assert end % scenario.chunk == 0 or tokens == scenario.budget or is_cut_by_time
            self.positions[row.seq_id] = end
        self.mid_step()
        result = SimRunner(PROFILE, self.clock).execute(plan)
        failed = {
            row.seq_id: "injected" for index, row in enumerate(plan.rows) if (plan.step_id, index) in scenario.failures
        }
        return StepResult(plan.step_id, result.duration_us, result.token_ids, failed)

    def release(self, seq_id: int) -> None:
        assert seq_id not in self.released, "released twice"
        self.released.append(seq_id)


def build(scenario: Scenario) -> tuple[Engine, CheckingRunner]:
    clock = VirtualClock()
    runner = CheckingRunner(scenario, clock)
    constants = from_profile(
        PROFILE, levels=4, fairness_window_us=5000, chunk_tokens=scenario.chunk, context_len=CONTEXT_LEN
    )
    engine = Engine(
        blocks=scenario.blocks,
        policy=ArrivalOrder() if scenario.policy == "arrival-order" else make_policy(scenario.policy, constants),
        profile=PROFILE,
        runner=runner,
        clock=clock,
        context_len=CONTEXT_LEN,
        teams=tuple(team(index, weight=weight) for index, weight in enumerate(scenario.weights)),
        block_size=scenario.block_size,
        max_batch_size=scenario.slots,
        max_batch_tokens=scenario.budget,
        prefill_chunk_tokens=scenario.chunk,
    )
    note_left(engine.policy, runner.left, lambda: runner.holders.append(engine.scheduler.memory.reserved_for))
    return engine, runner


def note_left(policy: Any, left: set[int], note_begin: Callable[[], None]) -> None:
    """Keep in `left` the teams whose prompts were passed over in the latest step: for time, or for their own team's."""

    def begin(now_us: int, call: Callable[[int], list[Starving]] = policy.begin) -> list[Starving]:
        left.clear()
        note_begin()
        return call(now_us)

    def note(call: Callable[[int], None]) -> Callable[[int], None]:
        def noted(team_id: int) -> None:
            left.add(team_id)
            call(team_id)

        return noted

    policy.begin, policy.leave_prompts, policy.leave_new = begin, note(policy.leave_prompts), note(policy.leave_new)


def gives_way(engine: Engine, seq_id: int, scenario: Scenario, plan: StepPlan) -> bool:
    """As the step was begun, a new sequence would have taken its team beyond its share of the blocks, and another team
    had a new one within its own. (Who is less served, `tests.engine.memory.test_starts` works out.)
    """
    live = engine.scheduler.sequences
    fresh = {row.seq_id for row in plan.rows if row.start == 0}
    claimed = dict.fromkeys((sequence.request.team_id for sequence in live.values()), 0)
    new: dict[int, list[int]] = {team_id: [] for team_id in claimed}
    for sequence in live.values():
        team_id, num_blocks = sequence.request.team_id, sequence.memory.num_blocks_max
        if sequence.status is Status.WAITING or sequence.seq_id in fresh:
            new[team_id].append(num_blocks)
        else:
            claimed[team_id] += num_blocks
    total = sum(scenario.weights[team_id] for team_id in claimed)

    def is_beyond(team_id: int, num_blocks: int) -> bool:
        return (claimed[team_id] + num_blocks) * total > scenario.blocks * scenario.weights[team_id]

    own = live[seq_id].request.team_id
    others = [line for team_id, line in new.items() if line and team_id != own and not is_beyond(team_id, line[0])]
    return is_beyond(own, live[seq_id].memory.num_blocks_max) and bool(others)


def check_work_conservation(engine: Engine, scenario: Scenario, plan: StepPlan, runner: CheckingRunner) -> None:
    """I6: with a slot and tokens left, whoever is left out is new and does not fit beside the reservation, or is a
    prompt that was passed over. (That its time was used up, `tests.support.simulation.pressure_checks` works out.)
    """
    if len(plan.rows) == scenario.slots or sum(len(row.token_ids) for row in plan.rows) == scenario.budget:
        return
    scheduler = engine.scheduler
    ran = {row.seq_id for row in plan.rows}
    holder = scheduler.memory.reserved_for
    if holder != runner.holders[-1]:
        return  # some were tried beside another holder
    committed = sum(s.memory.num_blocks_max for s in scheduler.sequences.values() if s.status is not Status.WAITING)
    for sequence in scheduler.sequences.values():
        if sequence.seq_id in ran or (sequence.request.team_id in runner.left and not sequence.output_token_ids):
            continue
        assert sequence.status is Status.WAITING, f"{sequence.seq_id} is resident and was left out"
        if scenario.policy == "eg-mlfq" and gives_way(engine, sequence.seq_id, scenario, plan):
            continue
        is_other = holder is not None and holder != sequence.seq_id
        held = scheduler.sequences[holder].memory.num_blocks_max if is_other else 0
        assert committed + held + sequence.memory.num_blocks_max > scenario.blocks, f"{sequence.seq_id} fits"


def abort_all(core: EngineCore, names: Iterable[str]) -> None:
    for name in names:
        core.abort(name)


def play(scenario: Scenario) -> list[StepDone]:
    engine, runner = build(scenario)
    core, scheduler = engine.core, engine.scheduler
    accepted: dict[str, Arrival] = {}
    ended: dict[str, str] = {}
    charged: dict[str, int] = {}
    done: list[StepDone] = []
    by_step: dict[int, list[tuple[str, Arrival]]] = {}
    for index, arrival in enumerate(scenario.arrivals):
        by_step.setdefault(arrival.at_step, []).append((f"r{index}", arrival))
    aborts: dict[int, list[tuple[str, bool]]] = {}
    step = 0
    while by_step or core.has_work:
        assert step < 3000, "liveness: everything ends"
        for name, arrival in by_step.pop(step, []):
            refused = core.add(
                submit(
                    name,
                    team_id=arrival.team_id,
                    prompt=arrival.prompt,
                    output=arrival.output,
                    start_level=arrival.start_level,
                    max_queue_us=arrival.max_queue_us,
                )
            )
            impossible = arrival.prompt + 1 > min(CONTEXT_LEN, scenario.blocks * scenario.block_size)
            assert (refused is not None) == impossible
            if refused is None:
                accepted[name] = arrival
                if arrival.abort_after is not None:
                    aborts.setdefault(step + arrival.abort_after, []).append((name, arrival.abort_mid_step))
        due = aborts.pop(step, [])
        aborted_before = {name for name, mid_step in due if not mid_step}
        abort_all(core, aborted_before)
        late = [name for name, mid_step in due if mid_step]
        runner.mid_step = lambda late=late: abort_all(core, late)  # type: ignore[misc]
        runner.plan = None
        levels = {s.seq_id: s.level for s in scheduler.sequences.values()}
        message = core.step()
        if runner.plan is None:
            abort_all(core, late)
        scheduler.check()
        for sequence in scheduler.sequences.values():
            if sequence.seq_id in levels and scenario.policy == "eg-mlfq":
                assert levels[sequence.seq_id] <= sequence.level < 4, "levels only grow"
        if message is not None:
            done.append(message)
            events = {event.request_id: event for event in message.tokens}
            assert not aborted_before & events.keys(), "an aborted request ran"
            spent = sum(event.device_us - charged.get(name, 0) for name, event in events.items())
            assert spent == message.duration_us, "the charges of a step sum to its time"
            charged |= {name: event.device_us for name, event in events.items()}
            if runner.plan is not None and not message.finished:
                check_work_conservation(engine, scenario, runner.plan, runner)
            for finished in message.finished:
                assert finished.request_id not in ended, "ended twice"
                ended[finished.request_id] = finished.reason
                assert finished.device_us == charged.get(finished.request_id, 0)
                assert 0 <= finished.queued_us <= finished.total_us
        step += 1
    assert ended.keys() == accepted.keys(), "each accepted request ends"
    for name, reason in ended.items():
        arrival = accepted[name]
        assert reason != "abort" or arrival.abort_after is not None
        assert reason != "timeout" or arrival.max_queue_us > 0
        assert reason in ("length", "abort", "timeout", "error")
    assert scheduler.memory.device.num_free == scenario.blocks and scheduler.num_live == 0
    assert scheduler.memory.reserved_for is None
    assert sorted(runner.released) == list(range(len(accepted)))
    return done


@pytest.mark.case("I1", "I15")
@settings(max_examples=250, deadline=None, derandomize=True)
@given(scenario=scenarios)
def test_every_step_of_random_workloads_keeps_the_books(scenario: Scenario) -> None:
    play(scenario)


tight = st.builds(
    Scenario,
    policy=st.sampled_from(["eg-mlfq", "fcfs"]),
    slots=st.integers(2, 6),
    budget=st.integers(8, 64),
    chunk=st.integers(4, 32),
    blocks=st.integers(8, 16),
    block_size=st.just(4),
    weights=st.just((1, 1, 1)),
    arrivals=st.lists(
        st.builds(
            Arrival,
            at_step=st.integers(0, 30),
            team_id=st.integers(0, NUM_TEAMS - 1),
            prompt=st.sampled_from([1, 2, 3, 30]),
            output=st.sampled_from([1, 2, 10]),
            start_level=st.just(0),
            max_queue_us=st.just(0),
            abort_after=st.none(),
            abort_mid_step=st.just(False),
        ),
        min_size=10,
        max_size=40,
    ).map(tuple),
    failures=st.just(frozenset()),
)


@pytest.mark.case("I6", "I2")
@settings(max_examples=120, deadline=None, derandomize=True)
@given(scenario=tight)
def test_a_tight_pool_stays_busy_and_empties(scenario: Scenario) -> None:
    done = play(scenario)
    assert all(message.num_running for message in done), "no step without a row while work is queued"


@pytest.mark.case("I11")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(scenario=scenarios)
def test_the_same_log_gives_the_same_messages(scenario: Scenario) -> None:
    assert play(scenario) == play(scenario)
