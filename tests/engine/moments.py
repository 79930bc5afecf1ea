"""Where a sequence stands when something happens to it: its status, and what its rows would do."""

from engine.request import Sequence, Status

MOMENTS = ("waiting", "prefill", "running", "paused", "swapping_out", "swapped", "swapping_in", "dropped", "replay")


def moment_of(sequence: Sequence) -> str:
    """One of MOMENTS. On the device it is also told whether it computes its prompt, or what a drop has cost it."""
    if sequence.status in (Status.RUNNING, Status.PAUSED):
        if not sequence.output_token_ids:
            return "prefill"
        if sequence.num_computed < sequence.num_prompt + len(sequence.output_token_ids) - 1:
            return "replay"
    return sequence.status.value
