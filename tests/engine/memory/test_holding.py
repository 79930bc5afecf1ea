"""Where one sequence's KV is: along the transitions and no other way."""

import itertools

import pytest

from engine.blocks import BlockPool, BlockTable
from engine.memory.holding import TRANSITIONS, Holding, Place


def holding(place: Place) -> Holding:
    return Holding(BlockTable(BlockPool(1), 16), 1, place=place)


@pytest.mark.parametrize(("start", "end"), list(itertools.product(Place, Place)), ids=str)
def test_kv_moves_along_the_transitions_only(start: Place, end: Place) -> None:
    one = holding(start)
    if end in TRANSITIONS[start]:
        one.move_to(end)
        assert one.place is end
    else:
        with pytest.raises(AssertionError):
            one.move_to(end)
        assert one.place is start


def test_a_sequence_is_started_while_it_has_kv_or_blocks_for_it() -> None:
    started = [place for place in Place if holding(place).is_started]
    assert started == [Place.DEVICE, Place.GOING_OUT, Place.HOST, Place.COMING_BACK]


def test_nothing_follows_a_release_and_everything_leads_to_it() -> None:
    assert TRANSITIONS[Place.RELEASED] == ()
    assert all(Place.RELEASED in after for place, after in TRANSITIONS.items() if place is not Place.RELEASED)
