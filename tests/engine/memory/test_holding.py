"""Where one sequence's KV is: along the transitions and no other way."""

import itertools

import pytest

from engine.blocks import BlockPool, BlockTable
from engine.memory.holding import TRANSITIONS, Holding, Place

# A copy goes one way at a time; KV is lost on the way or where it lies; a lost one starts anew on the device.
ALLOWED = {
    ("nowhere", "device"),
    ("device", "going_out"),
    ("going_out", "host"),
    ("host", "coming_back"),
    ("coming_back", "device"),
    *((place, "lost") for place in ("device", "going_out", "host", "coming_back")),
    ("lost", "device"),
    *((place, "released") for place in Place if place != "released"),
}


def holding(place: Place) -> Holding:
    return Holding(BlockTable(BlockPool(1), 16), 1, place=place)


@pytest.mark.parametrize(("start", "end"), list(itertools.product(Place, Place)), ids=str)
def test_kv_moves_along_the_transitions_only(start: Place, end: Place) -> None:
    one = holding(start)
    if (start, end) in ALLOWED:
        one.move_to(end)
        assert one.place is end
    else:
        with pytest.raises(AssertionError):
            one.move_to(end)
        assert one.place is start


def test_a_sequence_is_started_while_it_has_kv_or_blocks_for_it() -> None:
    started = [place for place in Place if holding(place).is_started]
    assert started == [Place.DEVICE, Place.GOING_OUT, Place.HOST, Place.COMING_BACK]


def test_the_table_names_each_change_once() -> None:
    listed = [(start, end) for start, ends in TRANSITIONS.items() for end in ends]
    assert sorted(listed) == sorted(ALLOWED)
