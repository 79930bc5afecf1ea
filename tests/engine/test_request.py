import itertools
from pathlib import Path

import pytest

from engine.blocks import BlockPool, BlockTable
from engine.memory import holding
from engine.memory.holding import Holding, Place
from engine.request import TRANSITIONS, Request, Sequence, Status, transition_table
from engine.wire.messages import SamplingParams


def sequence_at(place: Place, *, is_running: bool = False) -> Sequence:
    request = Request("r", 0, 0, (1,), SamplingParams(), 0)
    held = Holding(BlockTable(BlockPool(1), 16), 1, place=place)
    return Sequence(0, request, held, level=0, is_running=is_running)


def test_a_status_follows_from_place_and_slot() -> None:
    statuses = {
        Place.NOWHERE: Status.WAITING,
        Place.DEVICE: Status.PAUSED,
        Place.GOING_OUT: Status.SWAPPING_OUT,
        Place.HOST: Status.SWAPPED,
        Place.COMING_BACK: Status.SWAPPING_IN,
        Place.LOST: Status.DROPPED,
        Place.RELEASED: Status.FINISHED,
    }
    assert {place: sequence_at(place).status for place in Place} == statuses
    assert sequence_at(Place.DEVICE, is_running=True).status is Status.RUNNING


@pytest.mark.case("I1")
def test_kv_moves_only_along_the_table() -> None:
    for before, after in itertools.product(Place, Place):
        held = sequence_at(before).memory
        if after in holding.TRANSITIONS[before]:
            held.move_to(after)
            assert held.place is after
        else:
            with pytest.raises(AssertionError, match=f"from {before} to {after}"):
                held.move_to(after)
            assert held.place is before, "nothing changed"


def test_statuses_change_as_places_do() -> None:
    """The table of statuses is the table of places, seen with and without a slot in the newest step."""
    for before, afters in holding.TRANSITIONS.items():
        for after in afters:
            change = sequence_at(before).status, sequence_at(after).status
            if after is Place.DEVICE and before is not Place.COMING_BACK:
                change = change[0], Status.RUNNING  # a sequence starts by running
            assert change[1] in TRANSITIONS[change[0]], change


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


def test_the_drawn_table_has_each_status_and_each_change() -> None:
    rows = transition_table().splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [status.name for status in TRANSITIONS]
    for row, (_, successors) in zip(rows, TRANSITIONS.items(), strict=True):
        drawn = row.split("|")[2].strip()
        assert drawn == (", ".join(s.name for s in successors) or "(end)")


def test_the_architecture_page_shows_the_table_of_the_code() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "architecture.md").read_text("utf-8")
    shown = page.split("<!-- status-table:begin -->")[1].split("<!-- status-table:end -->")[0]
    assert shown.strip() == transition_table().strip()
