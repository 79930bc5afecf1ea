"""A scheduler with KV memory that a test drives step by step, copy by copy."""

from collections.abc import Iterable

from engine.config import EngineConfig
from engine.plan import BlockCopy, StepPlan, StepResult
from engine.request import Request, Sequence, Status
from engine.step.scheduler import Scheduler, StepOutcome
from engine.wire.messages import SamplingParams
from policies.sequences import TeamTerms
from tests.support.engine.simple_engine import UNIT_PROFILE, ArrivalOrder

STEP_US = 1000


class Ranked(ArrivalOrder):
    """Ranks by a list that the test may change between steps; ENST is a second for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []

    def rank(self) -> list[int]:
        return [*(i for i in self.order if i in self.live), *(i for i in sorted(self.live) if i not in self.order)]

    def best(self) -> int | None:
        return next((seq_id for seq_id in self.rank() if seq_id not in self._tried), None)

    def turns(self, seq_ids, slots, now_us):  # type: ignore[no-untyped-def]
        turns = {turn.seq_id: turn for turn in super().turns(seq_ids, 1, now_us)}
        rank = [seq_id for seq_id in self.rank() if seq_id in turns]
        return [type(turns[i])(i, place * 1_000_000) for place, i in enumerate(rank)]


class Bench:
    """A scheduler driven step by step; every copy is over at the end of its step unless it is held back."""

    def __init__(self, blocks: int = 6, host: int = 6, **settings: int | str) -> None:
        self.policy = Ranked()
        defaults: dict[str, int | str] = {"block_size": 4, "max_batch_size": 4, "swap_min_run_steps": 0}
        config = EngineConfig(**{**defaults, **settings})  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, self.policy, UNIT_PROFILE, blocks, num_host_blocks=host, block_copy_us=10.0)
        self.scheduler.configure([TeamTerms(team_id) for team_id in range(4)], 0)
        self.now_us = 0
        self.held: list[int] = []  # copies to report with the next `apply`
        self.total_us = 0

    def add(self, prompt: int, output: int, team_id: int = 0) -> Sequence:
        params = SamplingParams(max_tokens=output)
        request = Request(f"r{self.scheduler.num_live}", team_id, 0, tuple(range(prompt)), params, self.now_us)
        return self.scheduler.add(request, self.now_us)

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now_us)
        assert plan is not None
        return plan

    def apply(
        self, plan: StepPlan, *, copy_us: int = 0, done: Iterable[int] | None = None, failed: Iterable[int] = ()
    ) -> StepOutcome:
        self.now_us += STEP_US
        self.total_us += STEP_US
        chosen = {row.seq_id: 65 for row in plan.rows if row.samples}
        copies = [copy.copy_id for copy in (*plan.copies_out, *plan.copies_in)]
        over = copies if done is None else list(done)
        result = StepResult(
            plan.step_id, STEP_US, chosen, copies_done=over, copy_us=copy_us, copies_failed=tuple(failed)
        )
        outcome = self.scheduler.apply(plan, result, self.now_us)
        self.scheduler.check()
        moving = (Status.SWAPPING_OUT, Status.SWAPPED, Status.SWAPPING_IN)
        away = {one.seq_id for one in self.scheduler.sequences.values() if one.status in moving}
        assert self.policy.away == away, "the policy knows who cannot run"
        return outcome

    def step(self, **kwargs: object) -> StepPlan:
        plan = self.plan()
        self.apply(plan, **kwargs)  # type: ignore[arg-type]
        return plan

    def until(self, sequence: Sequence, status: Status) -> StepPlan:
        """Step until `sequence` has the status in an applied step; the plan that did it."""
        for _ in range(200):
            plan = self.step()
            if sequence.status is status:
                return plan
        raise AssertionError(f"{sequence.seq_id} never became {status}")


def ran(plan: StepPlan) -> list[int]:
    return [row.seq_id for row in plan.rows]


def copied(copies: tuple[BlockCopy, ...]) -> list[tuple[int, int]]:
    return [(copy.seq_id, len(copy.pairs)) for copy in copies]


def swapped_pair(**settings: int | str) -> tuple[Bench, Sequence, Sequence]:
    """Two of 8 + 12 tokens on 6 blocks: the second was moved out for the first, and the copy is over."""
    bench = Bench(**{"blocks": 6, "host": 6, "max_batch_size": 2, **settings})  # type: ignore[arg-type]
    first, second = bench.add(8, 12), bench.add(8, 12, team_id=1)
    bench.until(second, Status.SWAPPED)
    return bench, first, second


def dropped_pair() -> tuple[Bench, Sequence, Sequence]:
    """As `swapped_pair`, but the host is too small for the second, so its KV is dropped."""
    bench = Bench(blocks=6, host=2, max_batch_size=2, prefill_chunk_tokens=8)
    first, second = bench.add(8, 12), bench.add(8, 12, team_id=1)
    bench.until(second, Status.DROPPED)
    return bench, first, second


def half_prompts(device: int, prompts: tuple[int, ...]) -> tuple[Bench, Sequence, list[Sequence]]:
    """A decoding sequence, and others that have two chunks of their prompts; one slot, which the first takes from now
    on, growing into the others' blocks. Each is of a team of its own.
    """
    bench = Bench(blocks=device, host=20, max_batch_size=1, prefill_chunk_tokens=4, swap_benefit=1000)
    grower = bench.add(4, 4 * device - 4)
    half = []
    for team_id, prompt in enumerate(prompts, 1):  # a team's second would wait for its first
        half.append(bench.add(prompt, 4, team_id=team_id))
        bench.policy.order = [half[-1].seq_id]
        bench.step(), bench.step()
    bench.policy.order = [grower.seq_id]
    return bench, grower, half
