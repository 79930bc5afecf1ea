import itertools
from pathlib import Path

import pytest

from engine.blocks import BlockPool, BlockTable
from engine.request import TRANSITIONS, Request, Sequence, Status, transition_table
from engine.wire.messages import SamplingParams

SEQUENCE_PATHS_THAT_MUST_WORK = [
    (Status.RUNNING, Status.PAUSED, Status.RUNNING, Status.FINISHED),
    (Status.FINISHED,),
    (Status.RUNNING, Status.PAUSED, Status.SWAPPING_OUT, Status.SWAPPED, Status.SWAPPING_IN, Status.PAUSED),
    (Status.RUNNING, Status.PAUSED, Status.DROPPED, Status.RUNNING),
]


def sequence_in(status: Status) -> Sequence:
    request = Request("r", 0, 0, (1,), SamplingParams(), 0)
    return Sequence(0, request, BlockTable(BlockPool(1), 16), 1, level=0, status=status)


@pytest.mark.parametrize("path", SEQUENCE_PATHS_THAT_MUST_WORK, ids=lambda path: "-".join(path))
def test_the_ways_a_sequence_goes(path: tuple[Status, ...]) -> None:
    sequence = sequence_in(Status.WAITING)
    for status in path:
        sequence.move_to(status)
    assert sequence.status is path[-1]


@pytest.mark.case("I1")
def test_every_pair_outside_the_table_is_refused_and_changes_nothing() -> None:
    illegal = [(a, b) for a, b in itertools.product(Status, Status) if b not in TRANSITIONS[a]]
    assert len(illegal) > 40
    for before, after in illegal:
        sequence = sequence_in(before)
        with pytest.raises(AssertionError, match=f"{before} -> {after}"):
            sequence.move_to(after)
        assert sequence.status is before


def test_every_live_status_can_end_and_nothing_leaves_the_end() -> None:
    assert set(TRANSITIONS) == set(Status)
    assert TRANSITIONS[Status.FINISHED] == ()
    assert all(Status.FINISHED in TRANSITIONS[s] for s in Status if s is not Status.FINISHED)


def test_every_status_is_reachable_from_waiting() -> None:
    seen, frontier = {Status.WAITING}, [Status.WAITING]
    while frontier:
        for after in TRANSITIONS[frontier.pop()]:
            if after not in seen:
                seen.add(after)
                frontier.append(after)
    assert seen == set(Status)


def test_the_drawn_table_has_a_row_for_each_status_and_names_each_change() -> None:
    rows = transition_table().splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [status.name for status in TRANSITIONS]
    for row, (_, successors) in zip(rows, TRANSITIONS.items(), strict=True):
        drawn = row.split("|")[2].strip()
        assert drawn == (", ".join(s.name for s in successors) or "(end)")


def test_the_architecture_page_shows_the_table_of_the_code() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "architecture.md").read_text("utf-8")
    shown = page.split("<!-- status-table:begin -->")[1].split("<!-- status-table:end -->")[0]
    assert shown.strip() == transition_table().strip()
