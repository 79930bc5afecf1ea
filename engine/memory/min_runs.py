"""Minimum runs (guard G2): the steps after an upload or a replay in which a sequence keeps its slot and its blocks.

The memory counts them, and tells the policy after every change how many are left (`Policy.protect`). So the blocks and
the slot are safe for exactly the same steps.
"""

from collections.abc import Iterable

from engine.request import Sequence
from policies.policy import Policy

_LAPSE_STEPS = 4  # times m: a sequence that is not picked is no longer safe after so many steps of the engine


class MinRuns:
    """Owns which sequences are in a minimum run, and how many of their own steps are left. Called between steps only.

    How long a run is, the planner says when it begins (G5).
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._running: dict[Sequence, int] = {}  # with the step before which the run lapses

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, sequence: Sequence, num_steps: int, from_step: int) -> None:
        """The KV of `sequence` is whole on the device before step `from_step`: it stays for the sequence's next
        `num_steps` steps.
        """
        sequence.memory.uploaded_step = from_step
        if num_steps:
            self._running[sequence] = from_step + _LAPSE_STEPS * num_steps
            self._set(sequence, num_steps)

    def step_over(self, ran: Iterable[Sequence], next_step: int) -> None:
        """The step before `next_step` is over, and these sequences were in it. No run that it made possible has begun
        yet.
        """
        if not self._running:
            return
        for sequence in ran:
            if sequence.memory.min_run_left:
                self._set(sequence, sequence.memory.min_run_left - 1)
        for sequence in [sequence for sequence, lapse in self._running.items() if lapse <= next_step]:
            self._set(sequence, 0)

    def forget(self, sequence: Sequence) -> None:
        """The KV of `sequence` is not on the device any more, or it has ended."""
        if sequence.memory.min_run_left:
            self._set(sequence, 0)

    def check(self, live: Iterable[Sequence]) -> None:
        """Assert that the sequences agree."""
        assert self._running.keys() == {sequence for sequence in live if sequence.memory.is_protected}

    def _set(self, sequence: Sequence, num_steps: int) -> None:
        sequence.memory.min_run_left = num_steps
        if not num_steps:
            del self._running[sequence]
        self._policy.protect(sequence.seq_id, num_steps)
