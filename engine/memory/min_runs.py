"""Minimum runs (guard G2): the steps after an upload or a replay in which a sequence keeps its slot and blocks."""

from collections.abc import Iterable

from engine.request import Sequence


class MinRuns:
    """Owns who is in one. How long it is, the planner says (G5); it lapses in `engine.memory.view`."""

    def __init__(self) -> None:
        self._running: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, sequence: Sequence, num_steps: int, from_step: int) -> None:
        """Its KV is there again: it keeps it for so many of its own steps."""
        sequence.memory.min_run_left = num_steps
        sequence.memory.uploaded_step = from_step
        self._running[sequence.seq_id] = sequence

    def ran(self, sequences: Iterable[Sequence]) -> None:
        """They were in the step that is over."""
        if not self._running:
            return
        for sequence in sequences:
            if sequence.memory.min_run_left:
                sequence.memory.min_run_left -= 1
                if not sequence.memory.min_run_left:
                    self._running.pop(sequence.seq_id, None)

    def forget(self, sequence: Sequence) -> None:
        """Its KV is not on the device any more, or it has ended."""
        sequence.memory.min_run_left = 0
        self._running.pop(sequence.seq_id, None)
