"""The real core and scheduler over a real tiny model, short of blocks, on a virtual clock: runs can be repeated."""

import dataclasses
from collections.abc import Sequence

import msgspec

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.device.profiling import read_profile
from engine.device.runner import TorchRunner
from engine.plan import StepPlan, StepResult
from engine.sim.runner import step_us
from engine.step.core import EngineCore
from engine.step.scheduler import Scheduler
from engine.wire.messages import ConfigureTeams, Finished, ModelInfo, Submit
from policies.catalog import make_policy
from policies.config import from_profile
from policies.policy import Policy
from tests.support.engine.simple_engine import team
from tests.support.engine.torch_schedules import Job

PROFILE = read_profile()
BLOCK_COPY_US = 50.0
STEPS_MAX = 20_000


class TimedRunner:
    """A torch runner whose steps take the modelled time; counts what is copied and checks what rows touch."""

    def __init__(self, runner: TorchRunner, clock: VirtualClock) -> None:
        self._runner, self._clock = runner, clock
        self.num_out = self.num_in = self.num_empty = self.num_replayed = 0
        self._in_flight: dict[int, frozenset[int]] = {}  # copy_id -> its device blocks

    def execute(self, plan: StepPlan) -> StepResult:
        for copies, side in ((plan.copies_out, 0), (plan.copies_in, 1)):
            for copy in copies:
                self._in_flight[copy.copy_id] = frozenset(pair[side] for pair in copy.pairs)
        busy = frozenset().union(*self._in_flight.values())
        assert busy.isdisjoint(block for row in plan.rows for block in row.block_table), "a row uses a block in flight"
        self.num_out += len(plan.copies_out)
        self.num_in += len(plan.copies_in)
        self.num_empty += not (plan.rows or plan.copies_out or plan.copies_in)
        self.num_replayed += sum(len(row.token_ids) for row in plan.rows if row.num_generated and not row.is_decode)
        result = self._runner.execute(plan)
        for copy_id in result.copies_done:
            del self._in_flight[copy_id]
        copy_us = round(BLOCK_COPY_US * sum(len(copy.pairs) for copy in (*plan.copies_out, *plan.copies_in)))
        duration_us = (step_us(PROFILE, plan) if plan.rows else 0) + max(1, copy_us)
        self._clock.advance(duration_us)
        return dataclasses.replace(result, duration_us=duration_us, copy_us=copy_us, blamed_us={})

    def release(self, seq_id: int) -> None:
        self._runner.release(seq_id)


class SwapEngine:
    """A core with a small device pool. `run` plays jobs to their end and keeps their ids."""

    def __init__(self, runner: TorchRunner, *, policy: Policy | None = None, **settings: object) -> None:
        defaults = {"max_batch_size": 4, "max_batch_tokens": 128, "prefill_chunk_tokens": 32, "swap_benefit": 1}
        self.config = EngineConfig(**{**defaults, **settings})  # type: ignore[arg-type]
        self.clock = VirtualClock()
        self.runner = TimedRunner(runner, self.clock)
        model = runner.model.config
        self.policy = policy or make_policy(
            "eg-mlfq",
            from_profile(
                PROFILE,
                levels=self.config.levels,
                fairness_window_us=100_000,
                chunk_tokens=self.config.prefill_chunk_tokens,
                context_len=model.context_len,
            ),
        )
        self.scheduler = Scheduler(
            self.config,
            self.policy,
            PROFILE,
            runner.cache.num_blocks,
            num_host_blocks=runner.cache.num_host_blocks,
            block_copy_us=BLOCK_COPY_US,
        )
        info = ModelInfo(
            name="tiny",
            path="",
            vocab_size=model.vocab_size,
            context_len=model.context_len,
            eos_token_ids=(),
            dtype="",
            device="cpu",
        )
        self.core = EngineCore(self.config, self.scheduler, self.runner, self.clock, info)
        self.core.configure(ConfigureTeams(teams=tuple(team(i, weight=1 + i, start_level=i % 2) for i in range(3))))
        self.ids: dict[str, list[int]] = {}
        self.finished: dict[str, Finished] = {}

    def add(self, request_id: str, job: Job) -> None:
        submit = Submit(
            request_id=request_id,
            team_id=int(request_id) % 3,
            prompt_token_ids=job.prompt,
            sampling=msgspec.structs.replace(job.sampling, max_tokens=job.num_output, ignore_eos=True),
        )
        assert self.core.add(submit) is None
        self.ids[request_id] = []

    def step(self) -> None:
        done = self.core.step()
        self.scheduler.check()
        if done is None:
            return
        for event in done.tokens:
            self.ids[event.request_id] += event.token_ids
        for finished in done.finished:
            assert finished.request_id not in self.finished, "a request ends once"
            self.finished[finished.request_id] = finished

    def run(self, jobs: Sequence[Job], *, every: int = 3) -> list[list[int]]:
        """Hand in a job every few steps and step until all have ended; their ids in order."""
        for step in range(STEPS_MAX):
            number, rest = divmod(step, every)
            if not rest and number < len(jobs):
                self.add(str(number), jobs[number])
            if number >= len(jobs) and not self.core.has_work:
                self.check_empty()
                return [self.ids[str(i)] for i in range(len(jobs))]
            self.step()
        raise AssertionError("no end in sight")

    def check_empty(self) -> None:
        """Nobody is here: every block of both pools is free."""
        memory = self.scheduler.memory
        assert (memory.device.num_free, memory.host.num_free) == (memory.device.num_blocks, memory.host.num_blocks)
        assert not memory._pools.flights
