"""Random workloads with too little KV memory through the production core; every invariant at every step.

Device pool at 25 % and host pool at 10 % of what the workload could come to hold. Copies are over in their own step, or
a random number of steps later in random order, or are given up. A failing example prints its scenario and replays.
"""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import blocks_for
from engine.clock import VirtualClock
from engine.memory.mover import Mover
from engine.plan import BlockCopy, StepPlan, StepResult
from engine.request import Status
from engine.sim.delayed import DelayedCopies
from engine.sim.runner import SimRunner
from engine.step.core import Runner
from engine.wire.messages import Finished, StepDone
from policies.catalog import make_policy
from policies.config import from_profile
from policies.cost import StepProfile
from tests.support.engine.simple_engine import Engine, submit, team

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
    abort_after: int | None  # steps after its arrival; None is never


@dataclass(frozen=True)
class Scenario:
    mode: str
    policy: str
    copies: str  # sync, delayed or lossy
    seed: int
    slots: int
    budget: int
    chunk: int
    block_size: int
    block_copy_us: int
    min_run: int
    weights: tuple[int, ...]
    arrivals: tuple[Arrival, ...]

    @property
    def demand(self) -> int:
        return sum(blocks_for(min(CONTEXT_LEN, a.prompt + a.output), self.block_size) for a in self.arrivals)

    @property
    def device_blocks(self) -> int:
        largest = max(blocks_for(min(CONTEXT_LEN, a.prompt + a.output), self.block_size) for a in self.arrivals)
        return max(largest, self.demand // 4)

    @property
    def host_blocks(self) -> int:
        return self.demand // 10


arrivals = st.builds(
    Arrival,
    at_step=st.integers(0, 30),
    team_id=st.integers(0, NUM_TEAMS - 1),
    prompt=st.integers(1, 50),
    output=st.integers(1, 25),
    abort_after=st.one_of(st.none(), st.none(), st.integers(0, 40)),
)
scenarios = st.builds(
    Scenario,
    mode=st.sampled_from(["proactive", "proactive", "reactive", "recompute"]),
    policy=st.sampled_from(["eg-mlfq", "eg-mlfq", "fcfs"]),
    copies=st.sampled_from(["sync", "sync", "delayed", "lossy"]),
    seed=st.integers(0, 1000),
    slots=st.integers(2, 6),
    budget=st.integers(4, 40),
    chunk=st.integers(1, 32),
    block_size=st.sampled_from([1, 4]),
    block_copy_us=st.sampled_from([0, 5, 100]),
    min_run=st.sampled_from([0, 3, 8]),
    weights=st.tuples(*[st.integers(1, 4)] * NUM_TEAMS),
    arrivals=st.lists(arrivals, min_size=4, max_size=25).map(tuple),
)


@dataclass
class Checker:
    """Sits between core and runner: what the runner is asked to do is whole, and nothing is used twice."""

    scenario: Scenario
    inner: Runner
    engine: Engine | None = None
    flights: dict[int, tuple[BlockCopy, bool]] = field(default_factory=dict)
    ran_since_upload: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)  # tokens with KV somewhere
    num_forced: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.engine is not None
        scheduler = self.engine.scheduler
        swaps = scheduler.memory._mover
        assert isinstance(swaps, Mover)
        is_forced = swaps.num_forced > self.num_forced
        self.num_forced = swaps.num_forced
        busy_device = {p[0 if out else 1] for copy, out in self.flights.values() for p in copy.pairs}
        busy_host = {p[1 if out else 0] for copy, out in self.flights.values() for p in copy.pairs}
        for copies, is_out in ((plan.copies_out, True), (plan.copies_in, False)):
            for copy in copies:
                device = {pair[0 if is_out else 1] for pair in copy.pairs}
                host = {pair[1 if is_out else 0] for pair in copy.pairs}
                assert len(device) == len(host) == len(copy.pairs) > 0
                assert not device & busy_device and not host & busy_host, "a block of a copy in flight"
                busy_device |= device
                busy_host |= host
                if is_out:
                    since = self.ran_since_upload.pop(copy.seq_id, None)
                    if since is not None and not is_forced:
                        sequence = scheduler.sequences[copy.seq_id]
                        idle = scheduler.num_steps - (sequence.memory.uploaded_step or 0)
                        assert since >= self.scenario.min_run or idle >= 4 * self.scenario.min_run, "G2"
                else:
                    self.ran_since_upload[copy.seq_id] = 0
        used = [block for row in plan.rows for block in row.block_table]
        assert len(used) == len(set(used)) and not set(used) & busy_device, "resident and fenced"
        moving = {copy.seq_id for copy, _ in self.flights.values()}
        for row in plan.rows:
            sequence = scheduler.sequences[row.seq_id]
            assert sequence.status is Status.RUNNING and row.seq_id not in moving
            end = row.start + len(row.token_ids)
            assert row.start == sequence.num_computed and len(row.block_table) * self.scenario.block_size >= end
            whole = (*sequence.request.prompt_token_ids, *sequence.output_token_ids)
            assert tuple(row.token_ids) == whole[row.start : end], "no gap, no repeat, no other token"
            if end <= sequence.memory.replay_to:
                assert not row.samples and not row.is_decode
                self.seen["replays"] += 1
            else:
                assert row.start >= sequence.memory.replay_to
                assert row.samples == (end >= sequence.num_prompt)
            if row.seq_id in self.ran_since_upload:
                self.ran_since_upload[row.seq_id] += 1
        self.seen["out"] += len(plan.copies_out)
        self.seen["in"] += len(plan.copies_in)
        self.seen["only copies"] += not plan.rows and bool(plan.copies_out or plan.copies_in)
        self.seen["waits"] += not (plan.rows or plan.copies_out or plan.copies_in)
        result = self.inner.execute(plan)
        self.flights |= {copy.copy_id: (copy, True) for copy in plan.copies_out}
        self.flights |= {copy.copy_id: (copy, False) for copy in plan.copies_in}
        for copy_id in (*result.copies_done, *result.copies_failed):
            del self.flights[copy_id]
        self.seen["lost"] += len(result.copies_failed)
        return result

    def release(self, seq_id: int) -> None:
        self.inner.release(seq_id)


def build(scenario: Scenario) -> tuple[Engine, Checker]:
    clock = VirtualClock()
    runner = SimRunner(PROFILE, clock, block_copy_us=scenario.block_copy_us)
    lose = 5 if scenario.copies == "lossy" else 0
    inner = runner if scenario.copies == "sync" else DelayedCopies(runner, scenario.seed, lose_one_in=lose)
    checker = Checker(scenario, inner)
    constants = from_profile(
        PROFILE,
        levels=4,
        fairness_window_us=5000,
        chunk_tokens=scenario.chunk,
        context_len=CONTEXT_LEN,
    )
    engine = Engine(
        blocks=scenario.device_blocks,
        host_blocks=scenario.host_blocks,
        block_copy_us=scenario.block_copy_us,
        policy=make_policy(scenario.policy, constants),
        profile=PROFILE,
        runner=checker,
        clock=clock,
        context_len=CONTEXT_LEN,
        teams=tuple(team(index, weight=weight) for index, weight in enumerate(scenario.weights)),
        block_size=scenario.block_size,
        max_batch_size=scenario.slots,
        max_batch_tokens=scenario.budget,
        prefill_chunk_tokens=scenario.chunk,
        memory_preemption=scenario.mode,
        swap_min_run_steps=scenario.min_run,
    )
    checker.engine = engine
    if engine.scheduler.memory.mode == "none":  # a host pool of no block
        checker.engine = None
    return engine, checker


def play(scenario: Scenario) -> tuple[list[StepDone], Checker]:
    engine, checker = build(scenario)
    if checker.engine is None:
        return [], checker
    core, scheduler = engine.core, engine.scheduler
    by_step: dict[int, list[tuple[str, Arrival]]] = {}
    for index, arrival in enumerate(scenario.arrivals):
        by_step.setdefault(arrival.at_step, []).append((f"r{index}", arrival))
    accepted: dict[str, Arrival] = {}
    aborts: dict[int, list[str]] = {}
    ended: dict[str, Finished] = {}
    charged: dict[str, int] = {}
    done: list[StepDone] = []
    total_us = step = 0
    while by_step or core.has_work:
        assert step < 5000, "liveness: everything ends"
        for name, arrival in by_step.pop(step, []):
            message = submit(name, team_id=arrival.team_id, prompt=arrival.prompt, output=arrival.output)
            if core.add(message) is None:
                accepted[name] = arrival
                if arrival.abort_after is not None:
                    aborts.setdefault(step + arrival.abort_after, []).append(name)
        due = set(aborts.pop(step, []))
        for name in due:
            core.abort(name)
        outcome = core.step()
        scheduler.check()
        assert outcome is not None or not scheduler.has_work, "nothing can be done, and there is work"
        step += 1
        if outcome is None:
            continue
        done.append(outcome)
        total_us += outcome.duration_us
        assert not due & {event.request_id for event in outcome.tokens}, "an aborted request ran"
        for event in outcome.tokens:
            assert event.device_us >= charged.get(event.request_id, 0)
            charged[event.request_id] = event.device_us
        for finished in outcome.finished:
            assert finished.request_id not in ended, "ended twice"
            ended[finished.request_id] = finished
            assert finished.device_us == charged.get(finished.request_id, 0)
            assert 0 <= finished.overhead_us <= finished.device_us
            assert finished.longest_pause_us <= finished.total_us
        carried_us = sum(scheduler.memory.bills.carried_us.values())
        assert sum(charged.values()) + carried_us == total_us, "charges and what is carried are the measured time"
    assert ended.keys() == accepted.keys(), "each accepted request ends"
    for name, finished in ended.items():
        assert finished.reason == "length" or (finished.reason == "abort" and accepted[name].abort_after is not None)
        if finished.reason == "length":
            assert finished.output_tokens == min(accepted[name].output, CONTEXT_LEN - accepted[name].prompt)
    served_us = sum(service.served_us for service in engine.policy.team_service())
    assert served_us == total_us, "the teams' bill is the measured time"
    memory = scheduler.memory
    assert memory.device.num_owned == memory.host.num_owned == 0 and not memory._pools.flights
    assert scheduler.memory.num_away == scheduler.memory.num_dropped == 0 and scheduler.memory.reserved_for is None
    checker.seen["swaps"] += sum(finished.num_swaps for finished in ended.values())
    checker.seen["recomputes"] += sum(finished.num_recomputes for finished in ended.values())
    return done, checker


@pytest.mark.case("I1", "I2")
@settings(max_examples=200, deadline=None, derandomize=True)
@given(scenario=scenarios)
def test_short_of_memory_every_step_keeps_the_books(scenario: Scenario) -> None:
    play(scenario)


@pytest.mark.case("I15")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(scenario=scenarios.filter(lambda s: s.copies != "sync"), cut=st.integers(0, 60))
def test_a_shutdown_at_any_step_leaves_no_block_behind(scenario: Scenario, cut: int) -> None:
    engine, checker = build(scenario)
    if checker.engine is None:
        return
    for index, arrival in enumerate(scenario.arrivals):
        engine.core.add(submit(f"r{index}", team_id=arrival.team_id, prompt=arrival.prompt, output=arrival.output))
    for _ in range(cut):
        engine.core.step()
    names = engine.core.request_ids
    for name in names:
        engine.core.abort(name)
    finished = [f for message in engine.run(steps_max=200) for f in message.finished]
    assert {f.request_id for f in finished} == names
    memory = engine.scheduler.memory
    assert memory.device.num_owned == memory.host.num_owned == 0 and not checker.flights


@pytest.mark.case("I11")
@settings(max_examples=30, deadline=None, derandomize=True)
@given(scenario=scenarios)
def test_the_same_log_gives_the_same_messages_with_copies_too(scenario: Scenario) -> None:
    assert play(scenario)[0] == play(scenario)[0]


def test_the_scenarios_swap_drop_wait_and_lose_copies() -> None:
    """The tests above would say nothing if their scenarios fitted the memory."""
    seen: Counter[str] = Counter()
    for seed in range(12):
        for copies in ("sync", "delayed", "lossy"):
            batch = tuple(Arrival(i % 9, i % 3, 5 + (seed * 7 + i * 11) % 40, 10 + i % 12, None) for i in range(14))
            one = Scenario("proactive", "eg-mlfq", copies, seed, 4, 24, 8, 4, 5, 3, (1, 2, 3), batch)
            seen += play(one)[1].seen
    assert min(seen[what] for what in ("out", "in", "replays", "waits", "lost", "recomputes")) > 10, seen
    assert seen["only copies"] > 0


@pytest.mark.case("I12")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(scenario=scenarios)
def test_tokens_are_those_of_a_run_with_all_the_memory(scenario: Scenario) -> None:
    """A simulated token depends on seed and position, so a replay that is off by one would show."""

    def tokens(done: list[StepDone]) -> dict[str, list[int]]:
        streams: dict[str, list[int]] = {}
        for message in done:
            for event in message.tokens:
                streams.setdefault(event.request_id, []).extend(event.token_ids)
        return streams

    done, checker = play(scenario)
    if checker.engine is None:
        return
    ended = {f.request_id for message in done for f in message.finished if f.reason == "length"}
    ample = Engine(blocks=2000, profile=PROFILE, context_len=CONTEXT_LEN, block_size=scenario.block_size)
    for index, arrival in enumerate(scenario.arrivals):
        ample.core.add(submit(f"r{index}", team_id=arrival.team_id, prompt=arrival.prompt, output=arrival.output))
    alone = tokens(ample.run())
    squeezed = tokens(done)
    assert all(squeezed[name] == alone[name] for name in ended)
