"""The room that one set of moves makes: the fewest that suffice, or nobody. A copied block takes 10 us."""

from collections.abc import Sequence

from engine.memory.moves import Away, Kind, Move, Need, Pools, Resident
from engine.memory.room import Room
from policies.sequences import Turn


class Costs:
    """Every move pays; no guard but those of `Room` itself."""

    gamma = 1

    def __init__(self, can_swap: bool = True) -> None:
        self.can_swap = can_swap

    def copy_us(self, num_blocks: int, /) -> int:
        return 10 * num_blocks

    def pays(self, enst_us: int, num_dirty: int, num_blocks: int) -> bool:
        return True


def resident(seq_id: int, blocks: int, **fields: int | bool) -> Resident:
    return Resident(seq_id, 0, blocks, **{"num_dirty": blocks, **fields})  # type: ignore[arg-type]


LEADER = resident(90, 9, attained_us=1)


def room(
    *residents: Resident,
    order: Sequence[int],
    away: Sequence[Away] = (),
    free: int = 0,
    incoming: int = 0,
    host_free: int = 100,
    link_us: int = 1000,
    can_swap: bool = True,
) -> Room:
    turns = [Turn(seq_id, 100 * rank) for rank, seq_id in enumerate((*order, 90))]
    pools = Pools(free, incoming, 0, 0, host_free, link_us)
    return Room(Costs(can_swap), pools, [*residents, LEADER], away, turns, lambda teams: sorted(teams))


def moved(one: Room) -> list[tuple[str, int]]:
    return [(move.kind, move.seq_id) for move in one.moves]


ASKER, PAYER = 5, 7  # the sequence that room is made for, and its team


def for_claim(one: Room, missing: int) -> bool:
    """For a newcomer or an upload: all that it needs, or nobody goes."""
    return one.make_room_for_claim(missing, Need(ASKER, PAYER, Kind.START, missing))


def for_growth(one: Room, missing: int) -> bool:
    """For a sequence that has a slot: whoever ranks behind it, and what is free sooner is welcome."""
    return one.make_room_for_growth(missing, Need(ASKER, PAYER, Kind.GROW, missing))


def ahead(one: Room, missing: int) -> None:
    """For nobody in particular; the first victim's team pays."""
    one.make_room_ahead(missing, None)


def test_blocks_on_their_way_are_taken_where_none_are_free() -> None:
    one = room(order=(), free=3, incoming=4)
    one.take(5)
    assert (one.free, one.incoming) == (0, 2)


def test_the_latest_turn_goes_first_and_the_asker_pays() -> None:
    one = room(resident(1, 2), resident(2, 3), order=(5, 1, 2))
    assert for_claim(one, 2)
    assert one.moves == [Move("out", 2, 7, 5)]
    assert (one.free, one.incoming, one.host_free, one.link_us) == (0, 3, 97, 970)


def test_one_that_a_larger_one_makes_needless_stays() -> None:
    one = room(resident(1, 4), resident(2, 1), order=(5, 1, 2))
    assert for_claim(one, 4)
    assert moved(one) == [("out", 1)]


def test_when_not_all_can_be_freed_nobody_goes() -> None:
    one = room(resident(1, 4), resident(2, 1), order=(5, 1, 2))
    assert not for_claim(one, 6)
    assert one.moves == []


def test_nobody_goes_that_runs_before_the_asker() -> None:
    one = room(resident(1, 4), order=(1, 5))
    assert not for_claim(one, 1)


def test_one_in_its_minimum_run_and_the_leader_stay() -> None:
    one = room(resident(1, 4, is_protected=True), order=(5, 1))
    assert not for_claim(one, 1)


def test_a_second_copy_does_not_overdraw_the_link() -> None:
    both = (resident(1, 2), resident(2, 2))
    assert not for_claim(room(*both, order=(5, 1, 2), link_us=20), 4)
    assert for_claim(room(*both, order=(5, 1, 2), link_us=21), 4)
    part = room(*both, order=(5, 1, 2), link_us=20)
    assert not for_growth(part, 4)
    assert moved(part) == [("out", 2)], "for growth the others go when the link is free again"


def test_ahead_of_need_only_idle_ones_go_and_fewer_will_do() -> None:
    one = room(resident(1, 4, is_idle=False), resident(2, 1), order=(1, 2))
    ahead(one, 3)
    assert one.moves == [Move("out", 2, 0, -1)]


def test_when_the_host_is_full_the_least_computed_is_dropped() -> None:
    both = (resident(1, 2, num_computed=30), resident(2, 2, num_computed=20))
    one = room(*both, order=(5, 1, 2), host_free=0)
    assert not for_claim(one, 2)
    assert for_growth(one, 2)
    assert (moved(one), one.free) == ([("drop", 2)], 2)


def test_without_a_host_a_half_prefilled_one_is_not_dropped() -> None:
    one = room(resident(1, 2), resident(2, 2, is_whole=False), order=(5, 1, 2), can_swap=False)
    assert not for_claim(one, 3)
    assert for_claim(one, 1)
    assert (moved(one), one.free, one.link_us) == ([("drop", 1)], 2, 1000)


def test_a_clean_host_copy_is_forgotten_where_its_room_is_needed() -> None:
    soon = resident(1, 2, num_host=2, num_dirty=0)
    one = room(soon, resident(2, 2, is_idle=True), order=(1, 5, 2), host_free=1)
    assert for_claim(one, 2)
    assert moved(one) == [("forget", 1), ("out", 2)]
    assert one.host_free == 1 + 2 - 2
