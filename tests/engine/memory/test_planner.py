"""Moves from views: each guard by itself, and the order of victims. Times are milliseconds where a name says ms."""

import pytest

from engine.memory.moves import Away, Holder, Kind, Move, Need, Pools, Resident
from engine.memory.planner import AIMD_UPLOADS, GAMMA_MAX, SwapPlanner
from policies.sequences import Turn

MS = 1000


def planner(mode: str = "proactive", *, gamma: int = 0, m: int = 8, block_us: int = 0) -> SwapPlanner:
    return SwapPlanner(mode, gamma=gamma, min_run_steps=m, copy_us=lambda blocks: blocks * block_us)


def pools(
    free: int = 0, *, incoming: int = 0, promised: int = 0, reserve: int = 0, host: int = 100, link_us: int = 1_000_000
) -> Pools:
    return Pools(free, incoming, promised, reserve, host, link_us)


def resident(seq_id: int, blocks: int, *, team: int = 0, **kwargs: object) -> Resident:
    return Resident(seq_id, team, blocks, **{"num_dirty": blocks, **kwargs})  # type: ignore[arg-type]


def turns(*order: int, ms: tuple[float, ...] = ()) -> list[Turn]:
    times = ms or tuple(1000.0 * place for place in range(len(order)))
    return [Turn(seq_id, round(at * MS)) for seq_id, at in zip(order, times, strict=True)]


def grow(seq_id: int, blocks: int = 1, team: int = 0) -> Need:
    return Need(seq_id, team, Kind.GROW, blocks)


def start(seq_id: int, blocks: int, team: int = 0) -> Need:
    return Need(seq_id, team, Kind.START, blocks)


def kinds(moves: list[Move]) -> list[tuple[str, int]]:
    return [(move.kind, move.seq_id) for move in moves]


LEADER = resident(99, 1, attained_us=10**9)


@pytest.mark.case("O12")
@pytest.mark.parametrize(("enst_ms", "goes"), [(40, False), (44, True), (45, True)])
def test_g1_a_move_out_must_be_worth_two_round_trips(enst_ms: int, goes: bool) -> None:
    """T_out = T_in = 11 ms, gamma = 2."""
    one = planner(gamma=2, block_us=MS)
    moves = one.plan(
        pools(),
        [resident(1, 11), LEADER],
        [],
        [start(2, 11)],
        turns(2, 99, 1, ms=(0, 0, enst_ms)),
        step_us=MS,
    )
    assert kinds(moves) == ([("out", 1)] if goes else [])


def test_g1_a_clean_sequence_has_no_way_out_to_pay() -> None:
    one = planner(gamma=2, block_us=MS)
    moves = one.plan(
        pools(),
        [resident(1, 11, num_dirty=0, num_host=11), LEADER],
        [],
        [start(2, 11)],
        turns(2, 99, 1, ms=(0, 0, 22)),
        step_us=MS,
    )
    assert kinds(moves) == [("out", 1)]


@pytest.mark.case("O11")
def test_victims_go_by_the_largest_turn_and_uploads_by_the_smallest() -> None:
    """ENST c 2.5, d 1, b 0.5: victims c, d, b; uploads b, d, c. With d's team locked out for 6, d goes first."""
    residents = [resident(seq_id, 2) for seq_id in (1, 2, 3)]  # b, c, d
    b, c, d = 1, 2, 3

    def victims(order: list[Turn]) -> list[tuple[str, int]]:
        return kinds(planner().plan(pools(reserve=6), [*residents, LEADER], [], [], order, step_us=MS))

    assert victims(turns(99, b, d, c, ms=(0, 0.5, 1, 2.5))) == [("out", c), ("out", d), ("out", b)]
    assert victims(turns(99, b, c, d, ms=(0, 0.5, 2.5, 6))) == [("out", d), ("out", c), ("out", b)]
    away = [Away(seq_id, 0, 2, 2) for seq_id in (1, 2, 3)]
    back = planner().plan(pools(10), [LEADER], away, [], turns(99, b, d, c, ms=(0, 0.5, 1, 2.5)), step_us=2 * MS)
    assert kinds(back) == [("in", b), ("in", d), ("in", c)]


def test_an_upload_starts_one_copy_and_two_steps_before_its_turn() -> None:
    one = planner(block_us=MS)
    for at_ms, comes in ((9, True), (10, False)):
        moves = one.plan(pools(10), [], [Away(1, 0, 5, 5)], [], turns(1, ms=(at_ms,)), step_us=2 * MS)
        assert kinds(moves) == ([("in", 1)] if comes else [])


@pytest.mark.case("K36")
@pytest.mark.parametrize(
    ("sizes", "need", "goes"),
    [
        ((1, 1, 1, 1), 3, [4, 3, 2]),
        ((9, 5, 2, 1), 3, [4, 3]),
        ((9, 3, 1, 1), 3, [2]),  # the two small ones alone are not enough, and beside the third not needed
        ((3, 9, 9, 9), 3, [4]),
        ((2, 1, 3, 1), 4, [4, 3]),
    ],
)
def test_the_victims_are_as_few_as_can_be(sizes: tuple[int, ...], need: int, goes: list[int]) -> None:
    residents = [resident(seq_id, size) for seq_id, size in enumerate(sizes, start=1)]
    moves = planner().plan(pools(), [*residents, LEADER], [], [grow(5, need)], turns(5, 99, 1, 2, 3, 4), step_us=MS)
    assert kinds(moves) == [("out", seq_id) for seq_id in goes]


def test_what_is_free_or_on_its_way_needs_no_victim() -> None:
    for free, incoming, goes in ((3, 0, []), (1, 2, []), (1, 1, [("out", 1)])):
        moves = planner().plan(
            pools(free, incoming=incoming), [resident(1, 1), LEADER], [], [grow(2, 3)], turns(2, 99, 1), step_us=MS
        )
        assert kinds(moves) == goes


def test_growth_is_exempt_from_g1_but_moves_out_only_who_ranks_behind() -> None:
    one = planner(gamma=2, block_us=MS)
    soon = turns(1, 99, 2, 3, ms=(0, 0, 1, 1))
    residents = [resident(1, 4), resident(2, 4), resident(3, 4), LEADER]
    assert kinds(one.plan(pools(), residents, [], [grow(2)], soon, step_us=MS)) == [("out", 3)]
    assert kinds(one.plan(pools(), residents, [], [start(2, 1)], soon, step_us=MS)) == [], "G1 holds for a newcomer"
    assert kinds(one.plan(pools(), residents, [], [grow(3)], soon, step_us=MS)) == [], "nobody is behind the last"


def test_of_two_that_cannot_grow_the_later_makes_room() -> None:
    moves = planner().plan(
        pools(), [resident(1, 4), resident(2, 4), LEADER], [], [grow(1), grow(2)], turns(1, 99, 2), step_us=MS
    )
    assert moves == [Move("out", 2, 0, 1)]


@pytest.mark.case("I13")
def test_g2_and_g6_a_newly_uploaded_one_and_the_leader_stay() -> None:
    residents = [resident(1, 4, attained_us=5), resident(2, 4, is_protected=True), resident(3, 4, attained_us=6)]
    assert planner().plan(pools(), residents[1:], [], [start(9, 4)], turns(9, 3, 2), step_us=MS) == []
    moves = planner().plan(pools(), residents, [], [start(9, 4)], turns(9, 1, 3, 2), step_us=MS)
    assert kinds(moves) == [("out", 1)]


def test_g3_without_link_time_only_what_needs_no_copy_moves() -> None:
    one = planner(block_us=MS)
    order = turns(9, 99, 2, 1)
    residents = [resident(1, 4), resident(2, 4, num_dirty=0, num_host=4), LEADER]
    moves = one.plan(pools(link_us=0), residents, [], [start(9, 4)], order, step_us=MS)
    assert kinds(moves) == [("out", 2)]
    away = [Away(1, 0, 4, 4)]
    assert one.plan(pools(9, link_us=0), [], away, [Need(1, 0, Kind.UPLOAD, 4)], turns(1), step_us=MS) == []
    two = [Away(1, 0, 4, 4), Away(2, 0, 4, 4)]
    moves = one.plan(pools(9, link_us=1), [], two, [], turns(1, 2, ms=(0, 0)), step_us=MS)
    assert kinds(moves) == [("in", 1)], "the first may overdraw it, the second has to wait"


@pytest.mark.parametrize(("link_us", "goes"), [(4 * MS, [("out", 2)]), (4 * MS + 1, [("out", 2), ("out", 1)])])
def test_g3_one_need_overdraws_the_link_by_one_copy_only(link_us: int, goes: list[tuple[str, int]]) -> None:
    """Room for eight blocks takes two victims of four; the first copy uses 4 ms. Growth begins with what it can get, a
    newcomer does not.
    """
    one = planner(block_us=MS)
    residents = [resident(1, 4), resident(2, 4), LEADER]
    order = turns(99, 9, 1, 2)
    assert kinds(one.plan(pools(link_us=link_us), residents, [], [grow(9, 8)], order, step_us=MS)) == goes
    moves = one.plan(pools(link_us=link_us), residents, [], [start(9, 8)], order, step_us=MS)
    assert kinds(moves) == (goes if len(goes) == 2 else [])


def test_g3_uploads_use_the_link_before_moves_out_ahead_of_time() -> None:
    moves = planner(block_us=MS).plan(
        pools(8, reserve=4, link_us=2 * MS),
        [resident(1, 4), LEADER],
        [Away(2, 0, 2, 2)],
        [Need(2, 0, Kind.UPLOAD, 2)],
        turns(2, 99, 1),
        step_us=MS,
    )
    assert kinds(moves) == [("in", 2)]


def test_g4_and_g7_the_reserve_is_refilled_and_twice_it_is_left() -> None:
    residents = [resident(1, 4), LEADER]
    order = turns(2, 99, 1, ms=(0, 0, 1000))
    assert kinds(planner().plan(pools(1, reserve=3), residents, [], [], order, step_us=MS)) == [("out", 1)]
    assert planner().plan(pools(3, reserve=3), residents, [], [], order, step_us=MS) == []
    away = [Away(2, 0, 2, 2)]
    near = turns(99, 2, ms=(0, 0))
    for free, comes in ((7, []), (8, [("in", 2)])):
        assert kinds(planner().plan(pools(free, reserve=3), [LEADER], away, [], near, step_us=MS)) == comes
    asked = [Need(2, 0, Kind.UPLOAD, 2)]
    for free, comes in ((4, []), (5, [("in", 2)])):
        assert kinds(planner().plan(pools(free, reserve=3), [LEADER], away, asked, near, step_us=MS)) == comes


def test_the_reserve_is_paid_by_the_team_that_took_most_blocks() -> None:
    (move,) = planner().plan(
        pools(reserve=3), [resident(1, 4, team=5), LEADER], [], [], turns(99, 1), step_us=MS, grower_team=7
    )
    assert move == Move("out", 1, 7, -1)


def test_g5_early_moves_out_double_gamma_and_m_for_a_while() -> None:
    one = planner(gamma=2, m=8)

    def uploads(early: int) -> tuple[int, int]:
        for _ in range(early):
            one.note_out(15)
        for _ in range(AIMD_UPLOADS - early):
            one.note_out(16)
        one.note_out(None)
        for _ in range(AIMD_UPLOADS):
            one.note_upload()
        return one.gamma, one.min_run_steps

    assert uploads(3) == (2, 8), "a tenth is 3.2"
    assert uploads(4) == (4, 16)
    assert uploads(32) == (8, 32)
    assert [uploads(0) for _ in range(3)] == [(7, 31), (6, 30), (5, 29)]
    for _ in range(30):
        uploads(0)
    assert (one.gamma, one.min_run_steps) == (2, 8), "never below the settings"
    for _ in range(20):
        uploads(32)
    assert one.gamma == GAMMA_MAX


def test_clean_ones_go_first_and_half_prefilled_ones_last() -> None:
    residents = [
        resident(1, 2, is_whole=False),
        resident(2, 2),
        resident(3, 2, num_dirty=0, num_host=2),
        LEADER,
    ]
    order = turns(9, 99, 3, 2, 1)
    for need, goes in ((2, [3]), (4, [3, 2]), (6, [3, 2, 1])):
        assert kinds(planner().plan(pools(), residents, [], [start(9, need)], order, step_us=MS)) == [
            ("out", seq_id) for seq_id in goes
        ]


def test_the_holder_is_served_first_and_without_g1() -> None:
    one = planner(gamma=2, block_us=MS)
    order = turns(1, 2, 99, 3, ms=(0, 0, 0, 1))
    needs = [start(1, 4), start(2, 4)]
    assert one.plan(pools(), [resident(3, 4), LEADER], [], needs, order, step_us=MS) == []
    moves = one.plan(pools(), [resident(3, 4), LEADER], [], needs, order, step_us=MS, holder=Holder(2))
    assert moves == [Move("out", 3, 0, 2)]
    back = [Need(1, 0, Kind.UPLOAD, 4), Need(2, 0, Kind.UPLOAD, 4)]
    away = [Away(1, 0, 4, 4), Away(2, 0, 4, 4)]
    assert kinds(one.plan(pools(5), [], away, back, turns(1, 2), step_us=MS, holder=Holder(2))) == [("in", 2)]


def test_what_is_promised_to_half_prompts_is_not_given_to_others() -> None:
    away = [Away(2, 0, 2, 3)]
    asked = [Need(2, 0, Kind.UPLOAD, 3)]
    for free, comes in ((7, []), (8, [("in", 2)])):
        assert kinds(planner().plan(pools(free, promised=5), [], away, asked, turns(2), step_us=MS)) == comes
    assert planner().plan(pools(1, promised=5), [LEADER], [], [grow(1)], turns(1, 99), step_us=MS) == []


def test_clean_host_copies_make_room_the_soonest_turn_first() -> None:
    residents = [
        resident(1, 3, num_host=2, num_dirty=1),
        resident(2, 3, num_host=2, num_dirty=1),
        resident(3, 4),
        LEADER,
    ]
    moves = planner().plan(pools(host=2), residents, [], [grow(1, 4)], turns(1, 2, 99, 3), step_us=MS)
    assert kinds(moves) == [("forget", 1), ("out", 3)]


def test_nobody_is_dropped_while_a_victim_fits_the_host() -> None:
    residents = [resident(1, 4, num_computed=50), resident(2, 4, num_computed=10), LEADER]
    moves = planner().plan(pools(host=4), residents, [], [grow(9, 2)], turns(9, 99, 2, 1), step_us=MS)
    assert kinds(moves) == [("out", 1)]


def test_when_the_host_is_full_the_least_computed_is_dropped() -> None:
    residents = [
        resident(1, 4, team=1, num_computed=10),
        resident(2, 4, team=2, num_computed=60),
        resident(3, 4, team=2, num_computed=50),
        resident(4, 4, team=2, num_computed=5, is_whole=False),
        LEADER,
    ]
    order = turns(9, 99, 1, 2, 3, 4)

    def plan(need: Need) -> list[Move]:
        return planner().plan(
            pools(host=3),
            residents,
            [],
            [need],
            order,
            step_us=MS,
            over_served=lambda teams: sorted(teams, reverse=True),
        )

    assert plan(grow(9, 2)) == [Move("drop", 3, 0, 9)]
    assert plan(start(9, 2)) == [], "nobody is dropped for a newcomer"


def test_one_on_the_host_may_be_dropped_and_its_room_used() -> None:
    residents = [resident(1, 4, team=1, num_computed=50), LEADER]
    away = [Away(5, 2, 3, 4, num_computed=20), Away(6, 2, 4, 5, num_computed=30), Away(7, 1, 9, 9, num_computed=1)]
    moves = planner().plan(
        pools(host=0),
        residents,
        away,
        [grow(9, 2)],
        turns(9, 99, 5, 6, 7, 1, ms=(0, 0, 9999, 9999, 9999, 9999)),
        step_us=MS,
        over_served=lambda teams: sorted(teams, reverse=True),
    )
    assert kinds(moves) == [("drop", 6), ("out", 1)], "4 blocks are needed on the host: the 3 of 5 alone are too few"


def test_reactive_moves_only_for_what_was_refused() -> None:
    one = planner("reactive")
    assert one.plan(pools(9), [], [Away(1, 0, 2, 2)], [], turns(1), step_us=MS) == []
    assert one.plan(pools(0, reserve=5), [resident(1, 4), LEADER], [], [], turns(99, 1), step_us=MS) == []
    moves = one.plan(pools(9), [], [Away(1, 0, 2, 2)], [Need(1, 0, Kind.UPLOAD, 2)], turns(1), step_us=MS)
    assert kinds(moves) == [("in", 1)]


def test_recompute_drops_instead_but_never_a_half_prefilled_one() -> None:
    one = planner("recompute", gamma=2)
    residents = [resident(1, 4, is_whole=False), resident(2, 4, replay_us=100 * MS), resident(3, 4), LEADER]
    order = turns(9, 99, 3, 2, 1, ms=(0, 0, 10, 199, 1000))
    assert kinds(one.plan(pools(host=0), residents, [], [start(9, 4)], order, step_us=MS)) == [("drop", 3)]
    later = turns(9, 99, 3, 2, 1, ms=(0, 0, 10, 200, 1000))
    assert kinds(one.plan(pools(host=0), residents, [], [start(9, 4)], later, step_us=MS)) == [("drop", 2)]
    assert one.plan(pools(host=0), residents[:1], [], [grow(9)], turns(9, 1), step_us=MS) == []


def test_when_nothing_can_run_the_last_goes_despite_the_guards() -> None:
    one = planner(gamma=60, block_us=MS)
    residents = [resident(1, 4), resident(2, 4, is_protected=True, attained_us=9)]
    order = turns(1, 2, 3, ms=(0, 0, 0))
    assert one.plan(pools(link_us=-5), residents, [], [grow(1)], order, step_us=MS) == []
    assert one.force(pools(link_us=-5), residents, [], [grow(1)], order) == [Move("out", 2, 0, 1)]
    assert one.force(pools(link_us=-5), residents, [], [grow(3)], order) == [Move("out", 2, 0, 3)]
    back = one.force(pools(4, link_us=-5), [], [Away(3, 0, 4, 4)], [Need(3, 0, Kind.UPLOAD, 4)], order)
    assert back == [Move("in", 3, 0, 3)]
    assert one.force(pools(), [], [], [grow(1)], order) == [], "nobody to move"


def test_force_serves_the_first_that_can_be_and_the_holder_before_all() -> None:
    residents = [resident(1, 4, is_whole=False), resident(2, 4)]
    order = turns(1, 2, 3)
    needs = [grow(1, 2), grow(2, 2), start(3, 8)]
    assert planner().force(pools(host=0), residents, [], needs, order) == [Move("drop", 2, 0, 1)]
    assert planner().force(pools(host=4), residents, [], needs, order, holder=Holder(2)) == [Move("out", 1, 0, 2)]
    only_half = [residents[0], resident(2, 4, is_whole=False)]
    assert planner().force(pools(host=0), only_half, [], needs, order) == [], "half-prefilled ones are never dropped"
