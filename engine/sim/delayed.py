"""A twin of the simulated runner whose copies are over a random number of steps later, in random order.

With it a test meets every hazard between a copy and its blocks without a device. Code that uses, frees or gives away a
block too early does so while the copy is still in flight, and the test sees it. The same seed gives the same delays.
"""

import random
from collections.abc import Callable

from engine.plan import BlockCopy, StepPlan, StepResult
from engine.sim.runner import SimRunner


class DelayedCopies:
    """Wraps a SimRunner. A test's `on_plan` sees each plan, with the copies in flight before it by copy id."""

    def __init__(
        self,
        runner: SimRunner,
        seed: int,
        *,
        max_delay: int = 5,
        lose_one_in: int = 0,
        on_plan: Callable[[StepPlan, dict[int, BlockCopy]], None] = lambda plan, in_flight: None,
    ) -> None:
        """A copy is over from 0 to `max_delay` steps after its own step.

        About one copy in `lose_one_in` (0: none) never ends by itself. It is given up after 2 * `max_delay` steps, and
        reported as failed.
        """
        self._runner = runner
        self._random = random.Random(seed)
        self._max_delay = max_delay
        self._lose_one_in = lose_one_in
        self._on_plan = on_plan
        self._due: dict[int, int] = {}  # copy_id -> steps still to wait
        self._lost: set[int] = set()
        self.in_flight: dict[int, BlockCopy] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan. Report the copies that are over by now, of this plan and of earlier plans."""
        self._on_plan(plan, self.in_flight)
        result = self._runner.execute(plan)
        for copy in (*plan.copies_out, *plan.copies_in):
            self.in_flight[copy.copy_id] = copy
            is_lost = self._lose_one_in > 0 and self._random.randrange(self._lose_one_in) == 0
            self._due[copy.copy_id] = 2 * self._max_delay if is_lost else self._random.randint(0, self._max_delay)
            if is_lost:
                self._lost.add(copy.copy_id)
        if not (plan.rows or plan.copies_out or plan.copies_in) and self._due:
            soonest = min(self._due.values())  # a plan without rows and copies waits for a copy
            self._due = {copy_id: steps - soonest for copy_id, steps in self._due.items()}
        over = [copy_id for copy_id, steps in self._due.items() if steps <= 0]
        self._random.shuffle(over)
        for copy_id in over:
            del self._due[copy_id], self.in_flight[copy_id]
        self._due = {copy_id: steps - 1 for copy_id, steps in self._due.items()}
        failed = [copy_id for copy_id in over if copy_id in self._lost]
        done = [copy_id for copy_id in over if copy_id not in self._lost]
        self._lost.difference_update(failed)
        return StepResult(
            result.step_id,
            result.duration_us,
            result.token_ids,
            result.failed,
            copies_done=done,
            copy_us=result.copy_us,
            copies_failed=failed,
        )

    def release(self, seq_id: int) -> None:
        """Pass the call on."""
        self._runner.release(seq_id)
