"""Random load on pools that hold a quarter of what it asks for: one seed is one scenario, here and in the benchmark.

Each scenario runs twice on the production core, scheduler and policy. First with room for everything: the most blocks
that are ever owned at once are the *demand*, and its tokens are what the second run must yield too. Then with a device
pool of a quarter and a host pool of a tenth of the demand (but each request alone fits the device), while
`tests.support.simulation.pressure_checks` looks at every step.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.blocks import blocks_for
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.plan import BlockCopy, StepPlan
from engine.process.assembly import least_rate_percent
from engine.sim.delayed import DelayedCopies
from engine.sim.runner import SimRunner
from engine.step.core import EngineCore, Runner
from engine.step.pauses import Pauses
from engine.step.scheduler import Scheduler
from engine.wire.messages import ConfigureTeams, ModelInfo, SamplingParams, Submit, TeamEntry
from policies.config import PolicyConfig, from_profile
from policies.cost import StepProfile
from policies.eg_mlfq import EgMlfq

DEVICE_PERCENT, HOST_PERCENT = 25, 10  # of the demand
CONTEXT_LEN = 96
DRAWS_MAX = 8
STEPS_MAX = 20_000  # a run that takes longer has come to a standstill
PROFILE = StepProfile(
    fixed_us=300.0, prefill_token_us=40.0, prefill_attention_us=0.5, decode_row_us=90.0, decode_context_us=0.7
)
# Without a fixed part a row costs what it works, but for rounding: what a pick will cost is known beforehand.
EXACT_PROFILE = replace(PROFILE, fixed_us=0.0)
MODES = ("proactive",) * 6 + ("reactive", "recompute")


@dataclass(frozen=True)
class Call:
    """One request."""

    name: str
    team_id: int
    prompt: tuple[int, ...]
    seed: int
    output: int
    start_level: int
    max_queue_us: int
    abort_after: int | None  # steps after it was sent; None is never
    is_abort_mid_step: bool


@dataclass(frozen=True)
class Chain:
    """Calls of one client: the first is sent at `at_us`, each other one `think_us` after the one before has ended."""

    at_us: int
    think_us: int
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Scenario:
    """Everything that a run follows from, but for the pools."""

    seed: int
    is_exact: bool  # costs are known beforehand
    weights: tuple[int, ...]
    start_levels: tuple[int, ...]
    starving_after_us: tuple[int, ...]
    burst_grants: tuple[int, ...]
    promotion_percent: int
    levels: int
    fairness_window_us: int
    coast: bool
    mode: str
    slots: int
    budget: int
    chunk: int
    block_size: int
    min_run_steps: int
    benefit: int
    link_percent: int
    block_copy_us: float
    max_delay: int  # steps that copies are over later; 0: with their step
    lose_one_in: int  # copies that never end by themselves; 0: none
    chains: tuple[Chain, ...]

    @property
    def profile(self) -> StepProfile:
        return EXACT_PROFILE if self.is_exact else PROFILE

    @property
    def calls(self) -> list[Call]:
        return [call for chain in self.chains for call in chain.calls]

    @property
    def least_blocks(self) -> int:
        """What the largest request needs alone."""
        return max(blocks_for(len(call.prompt) + call.output, self.block_size) for call in self.calls)

    def constants(self) -> PolicyConfig:
        """The policy's configuration."""
        return from_profile(
            self.profile,
            levels=self.levels,
            fairness_window_us=self.fairness_window_us,
            chunk_tokens=min(self.chunk, self.budget),
            context_len=CONTEXT_LEN,
            coast=self.coast,
            promotion_percent=self.promotion_percent,
        )

    def config(self, mode: str) -> EngineConfig:
        """The engine's configuration."""
        return EngineConfig(
            kind="sim",
            block_size=self.block_size,
            max_batch_size=self.slots,
            max_batch_tokens=self.budget,
            prefill_chunk_tokens=self.chunk,
            memory_preemption=mode,
            swap_benefit=self.benefit,
            swap_min_run_steps=self.min_run_steps,
            swap_link_percent=self.link_percent,
            promotion_percent=self.promotion_percent,
            levels=self.levels,
            coast=self.coast,
        )


def scenario_of(seed: int) -> tuple[Scenario, int, dict[str, list[int]]]:
    """The scenario of a seed, its demand, and each request's tokens.

    Drawn again while the largest request alone needs more than a quarter of the demand, so that pools are really small.
    """
    for attempt in range(DRAWS_MAX):
        scenario = _draw(random.Random(f"pressure {seed} {attempt}"), seed)
        demand, tokens = unconstrained(scenario)
        if demand * DEVICE_PERCENT >= scenario.least_blocks * 100:
            break
    return scenario, demand, tokens


def _draw(rng: random.Random, seed: int) -> Scenario:
    """2 to 6 teams, bursts, Poisson arrivals and closed loops, 30 to 95 requests."""
    teams = rng.randint(2, 6)
    is_patient = rng.random() < 0.5
    scenario = Scenario(
        seed=seed,
        is_exact=rng.random() < 0.5,
        weights=tuple(rng.randint(1, 4) for _ in range(teams)),
        start_levels=tuple(rng.choice((0, 0, 0, 1, 2)) for _ in range(teams)),
        starving_after_us=tuple(rng.choice((3_000, 10_000, 50_000, 1_000_000)) for _ in range(teams)),
        burst_grants=tuple(rng.randint(0, 4) for _ in range(teams)),
        promotion_percent=0 if rng.random() < 0.3 else rng.choice((5, 20, 60)),
        levels=rng.choice((1, 2, 4, 4, 6, 6)),
        fairness_window_us=rng.choice((0, 2_000, 10_000, 60_000)),
        coast=rng.random() < 0.5,
        mode=rng.choice(MODES),
        slots=rng.choice((1, 2, 3, 4, 6, 8, 8, 12, 16, 16)),
        budget=rng.choice((16, 24, 48, 96)),
        chunk=rng.choice((4, 8, 16, 32)),
        block_size=rng.choice((2, 4, 8, 16)),
        min_run_steps=rng.choice((0, 1, 4, 8)),
        benefit=rng.choice((0, 1, 2)),
        link_percent=rng.choice((20, 60, 100)),
        block_copy_us=rng.choice((0.0, 2.0, 30.0, 300.0, 1_000.0, 5_000.0)),
        max_delay=rng.choice((0, 2, 5, 5)),
        lose_one_in=rng.choice((0, 0, 0, 25)),
        chains=(),
    )
    if not scenario.max_delay:
        scenario = replace(scenario, lose_one_in=0)
    serial = iter(range(1 << 30))
    sizes = ((12, 10), (20, 16), (32, 24), (60, 36)) if scenario.slots > 4 else ((8, 12), (16, 16))
    prompt_max, output_max = rng.choice(sizes)

    def call(team_id: int) -> Call:
        number = next(serial)
        prompt = rng.choice((rng.randint(1, 6), rng.randint(4, prompt_max), rng.randint(prompt_max // 2, prompt_max)))
        return Call(
            name=f"r{number}",
            team_id=team_id,
            prompt=tuple(rng.randrange(256) for _ in range(prompt)),
            seed=rng.randrange(1 << 20),
            output=rng.choice((1, rng.randint(2, 10), rng.randint(8, output_max))),
            start_level=rng.choice((0, 0, 0, 1, 3)),
            max_queue_us=0 if is_patient else rng.choice((0, 0, 5_000, 40_000)),
            abort_after=None if rng.random() < 0.75 else rng.randint(0, 120),
            is_abort_mid_step=rng.random() < 0.5,
        )

    chains: list[Chain] = []
    target = rng.randint(30, 80)
    sent = 0
    while sent < target:
        team_id = rng.randrange(teams)
        start_us = rng.choice((0, 0, rng.randrange(60_000)))
        kind = rng.choice(("burst", "poisson", "loop"))
        size = rng.randint(2, 16)
        if kind == "loop":
            chains.append(Chain(start_us, rng.choice((0, 0, 4_000)), tuple(call(team_id) for _ in range(size))))
        else:
            at_us = start_us
            for _ in range(size):
                chains.append(Chain(at_us, 0, (call(team_id),)))
                at_us += round(rng.expovariate(1 / 4_000)) if kind == "poisson" else 0
        sent += size
    return replace(scenario, chains=tuple(chains))


class Load:
    """Sends the calls of a scenario, and aborts them when it is time."""

    def __init__(self, scenario: Scenario, core: EngineCore, clock: VirtualClock) -> None:
        self._core, self._clock = core, clock
        self._due = [(chain.at_us, index, chain, 0) for index, chain in enumerate(scenario.chains)]
        self._chain_of = {call.name: (chain, i) for chain in scenario.chains for i, call in enumerate(chain.calls)}
        self._aborts: dict[int, list[Call]] = {}  # by step
        self.sent: dict[str, Call] = {}
        self._step = 0

    @property
    def is_over(self) -> bool:
        return not self._due

    def begin_step(self) -> Sequence[str]:
        """Send and abort what is due; whom to abort within the step."""
        now_us = self._clock.now_us()
        if not self._core.has_work and self._due:
            self._clock.advance_to(min(due[0] for due in self._due))
            now_us = self._clock.now_us()
        due = sorted(entry[:2] for entry in self._due if entry[0] <= now_us)
        if due:
            entries = {entry[:2]: entry for entry in self._due}
            self._due = [entry for entry in self._due if entry[0] > now_us]
            for key in due:
                self._send(entries[key][2].calls[entries[key][3]])
        aborts = self._aborts.pop(self._step, [])
        self._step += 1
        for call in aborts:
            if not call.is_abort_mid_step:
                self._core.abort(call.name)
        return [call.name for call in aborts if call.is_abort_mid_step]

    def ended(self, name: str) -> None:
        """The client sends its next call after a while."""
        chain, index = self._chain_of[name]
        if index + 1 < len(chain.calls):
            order = int(chain.calls[0].name[1:]) + (1 << 20)
            self._due.append((self._clock.now_us() + chain.think_us, order, chain, index + 1))

    def _send(self, call: Call) -> None:
        self.sent[call.name] = call
        if call.abort_after is not None:
            self._aborts.setdefault(self._step + call.abort_after, []).append(call)
        refused = self._core.add(
            Submit(
                request_id=call.name,
                team_id=call.team_id,
                start_level=call.start_level,
                prompt_token_ids=call.prompt,
                sampling=SamplingParams(seed=call.seed, max_tokens=call.output, ignore_eos=True),
                max_queue_us=call.max_queue_us,
            )
        )
        assert refused is None, refused


class Rig:
    """A core on pools of a given size."""

    def __init__(
        self,
        scenario: Scenario,
        policy: EgMlfq,
        *,
        mode: str,
        device_blocks: int,
        host_blocks: int,
        on_plan: Callable[[StepPlan, dict[int, BlockCopy]], None] = lambda plan, in_flight: None,
    ) -> None:
        self.scenario = scenario
        self.policy = policy
        self.clock = VirtualClock()
        plain = SimRunner(scenario.profile, self.clock, block_copy_us=scenario.block_copy_us)
        runner: Runner = DelayedCopies(
            plain, scenario.seed, max_delay=scenario.max_delay, lose_one_in=scenario.lose_one_in, on_plan=on_plan
        )
        config = scenario.config(mode)
        self.scheduler = Scheduler(
            config,
            policy,
            scenario.profile,
            device_blocks,
            num_host_blocks=host_blocks,
            block_copy_us=scenario.block_copy_us,
            pauses=Pauses(policy._config, round(scenario.block_copy_us * CONTEXT_LEN), least_rate_percent(config)),
        )
        model = ModelInfo(
            name="sim", path="", vocab_size=256, context_len=CONTEXT_LEN, eos_token_ids=(), dtype="", device=""
        )
        self.core = EngineCore(config, self.scheduler, runner, self.clock, model)
        self.core.configure(
            ConfigureTeams(
                teams=tuple(
                    TeamEntry(
                        team_id=team_id,
                        weight=weight,
                        start_level=scenario.start_levels[team_id],
                        starving_after_us=scenario.starving_after_us[team_id],
                        promotion_burst_grants=scenario.burst_grants[team_id],
                    )
                    for team_id, weight in enumerate(scenario.weights)
                )
            )
        )
        self.load = Load(scenario, self.core, self.clock)


def unconstrained(scenario: Scenario) -> tuple[int, dict[str, list[int]]]:
    """With room for everything: the most device blocks ever owned at once, and each request's tokens."""
    blocks = sum(blocks_for(len(call.prompt) + call.output, scenario.block_size) for call in scenario.calls)
    rig = Rig(scenario, EgMlfq(scenario.constants()), mode="none", device_blocks=blocks, host_blocks=0)
    tokens: dict[str, list[int]] = {call.name: [] for call in scenario.calls}
    demand = 0
    while not rig.load.is_over or rig.core.has_work:
        late = rig.load.begin_step()
        done = rig.core.step()
        for name in late:
            rig.core.abort(name)
        demand = max(demand, rig.scheduler.memory.device.num_owned)
        if done is not None:
            for event in done.tokens:
                tokens[event.request_id] += event.token_ids
            for finished in done.finished:
                rig.load.ended(finished.request_id)
    return demand, tokens


def pools(scenario: Scenario, demand: int) -> tuple[int, int]:
    """Device and host blocks of the run under pressure."""
    device = max(scenario.least_blocks, -(-demand * DEVICE_PERCENT // 100))
    return device, max(1, demand * HOST_PERCENT // 100)
