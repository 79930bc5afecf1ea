"""Where a sequence stands when something happens to it, and what the step log says of it afterwards."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Cut:
    """One abort: whom, where it stood, and the line of the log in which the engine must take it."""

    request_id: str
    moment: str
    line: int
    is_mid_step: bool = False


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of a step log behind its first."""
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def num_steps(path: Path) -> int:
    """How many lines those are."""
    return path.read_bytes().count(b"\n") - 1


def planned(line: dict[str, Any]) -> set[str]:
    """Every request that a plan touches."""
    return {part["request"] for key in ("rows", "copies_out", "copies_in") for part in line[key]}


def check_cuts(lines: list[dict[str, Any]], cuts: Iterable[Cut]) -> None:
    """Each was taken at the first boundary after it, ended there, and is in no plan from there on."""
    for cut in cuts:
        taken = {"what": "abort", "request": cut.request_id}
        (index,) = [index for index, line in enumerate(lines) if taken in line["inbox"]]
        assert index == cut.line, f"{cut}: taken at the first boundary after it"
        assert not any(cut.request_id in planned(line) for line in lines[index:]), f"{cut}: planned after its abort"
        (reason,) = [end["reason"] for line in lines for end in line["ended"] if end["request"] == cut.request_id]
        if reason == "abort":
            assert {"request": cut.request_id, "reason": "abort"} in lines[index]["ended"], f"{cut}: ends there"
        else:
            assert cut.is_mid_step and reason == "length", f"{cut}: only the step that ran could end it otherwise"
