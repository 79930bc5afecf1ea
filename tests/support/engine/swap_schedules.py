"""Random schedules with swapping, built straight as StepPlans: sequences lose their device blocks at any point.

The books are as simple as the contract of `engine.plan`: blocks of a copy belong to nobody until a result names it.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.plan import BlockCopy, Row, StepPlan
from tests.support.engine.torch_schedules import Job, Progress, RecordingRunner, row_of

STEPS_MAX = 5000


@dataclass
class Swapping:
    """One request on its way, and where its KV is: on the device (`progress.blocks`), on the host, or in flight."""

    progress: Progress
    host_blocks: list[int] = field(default_factory=list)
    in_flight: BlockCopy | None = None
    num_swaps: int = 0


class SwapSchedule:
    """Runs jobs with random picks, chunks and swaps; `run` returns how each fared."""

    def __init__(self, runner: RecordingRunner, jobs: Sequence[Job], rng: random.Random, *, swap_chance: float) -> None:
        self.runner, self.rng, self.swap_chance = runner, rng, swap_chance
        self.live = {seq_id: Swapping(Progress(job)) for seq_id, job in enumerate(jobs)}
        self.all = dict(self.live)
        self.free_device = list(range(runner.cache.num_blocks))
        self.free_host = list(range(runner.cache.num_host_blocks))
        self.in_flight: dict[int, tuple[BlockCopy, bool]] = {}  # copy_id -> copy, whether it goes out
        self.num_copies = self.num_empty_plans = 0

    def run(self, max_rows: int) -> list[Swapping]:
        for step in range(STEPS_MAX):
            if not self.live and not self.in_flight:
                return list(self.all.values())
            self.rng.shuffle(self.free_device)
            self.rng.shuffle(self.free_host)
            out = [self._swap_out(i) for i in self._on_device() if self.rng.random() < self.swap_chance]
            into = [copy for i in self._on_host() if self.rng.random() < 0.5 and (copy := self._swap_in(i)) is not None]
            rows = self._rows(max_rows)
            self.num_empty_plans += not (rows or out or into)
            self._execute(StepPlan(step, tuple(rows), tuple(out), tuple(into)))
        raise AssertionError("no end in sight")

    def _on_device(self) -> list[int]:
        return [i for i, s in self.live.items() if s.progress.blocks and s.in_flight is None]

    def _on_host(self) -> list[int]:
        return [i for i, s in self.live.items() if s.host_blocks and s.in_flight is None]

    def _swap_out(self, seq_id: int) -> BlockCopy:
        one = self.live[seq_id]
        one.host_blocks = [self.free_host.pop() for _ in one.progress.blocks]
        one.num_swaps += 1
        return self._start(seq_id, zip(one.progress.blocks, one.host_blocks, strict=True))

    def _swap_in(self, seq_id: int) -> BlockCopy | None:
        one = self.live[seq_id]
        if len(one.host_blocks) > len(self.free_device):
            return None
        one.progress.blocks = [self.free_device.pop() for _ in one.host_blocks]
        return self._start(seq_id, zip(one.host_blocks, one.progress.blocks, strict=True))

    def _start(self, seq_id: int, pairs: Iterable[tuple[int, int]]) -> BlockCopy:
        copy = BlockCopy(self.num_copies, seq_id, tuple(pairs))
        self.num_copies += 1
        self.live[seq_id].in_flight = copy
        return copy

    def _rows(self, max_rows: int) -> list[Row]:
        rows = []
        size = self.runner.cache.block_size
        can_run = [i for i, s in self.live.items() if s.in_flight is None and not s.host_blocks]
        for seq_id in self.rng.sample(can_run, min(len(can_run), self.rng.randint(0, max_rows))):
            progress = self.live[seq_id].progress
            left = len(progress.job.prompt) - progress.computed
            count = self.rng.randint(1, left) if left > 0 and self.rng.random() < 0.7 else max(left, 1)
            missing = -(-(progress.computed + count) // size) - len(progress.blocks)
            if missing > len(self.free_device):
                continue
            progress.blocks += [self.free_device.pop() for _ in range(missing)]
            rows.append(row_of(progress, seq_id, count))
        return rows

    def _execute(self, plan: StepPlan) -> None:
        for copies in (plan.copies_out, plan.copies_in):
            self.in_flight.update((copy.copy_id, (copy, copies is plan.copies_out)) for copy in copies)
        result = self.runner.execute(plan)
        assert not result.failed, result.failed
        for copy_id in result.copies_done:
            copy, is_out = self.in_flight.pop(copy_id)
            self._over(self.live[copy.seq_id], is_out)
        for row in plan.rows:
            progress = self.live[row.seq_id].progress
            progress.computed += len(row.token_ids)
            assert (row.seq_id in result.token_ids) == row.samples
            if row.samples:
                progress.output.append(result.token_ids[row.seq_id])
                progress.logits.append(self.runner.recorded[row.seq_id])
            if progress.is_done:
                self.runner.release(row.seq_id)
                self.free_device += progress.blocks
                del self.live[row.seq_id]

    def _over(self, one: Swapping, is_out: bool) -> None:
        one.in_flight = None
        if is_out:
            self.free_device += one.progress.blocks
            one.progress.blocks = []
        else:
            self.free_host += one.host_blocks
            one.host_blocks = []
