"""What the planner is shown: residents, those away, and the reserve."""

import pytest

from engine.memory.mover import Mover
from engine.request import Status
from tests.support.engine.swap_bench import Bench, swapped_pair


def test_the_planner_is_shown_what_a_move_would_copy() -> None:
    bench, _first, second = swapped_pair()
    bench.until(second, Status.PAUSED)
    swaps = bench.scheduler.memory._mover
    assert isinstance(swaps, Mover)

    def view() -> tuple[int, int, int, int]:
        (one,), away = swaps.view.sequences(())
        assert away == [] and one.seq_id == second.seq_id
        return one.num_blocks, one.num_dirty, one.num_host, one.num_spare

    held = len(second.memory.table.blocks)
    assert second.num_computed == 12 and view() == (4, 0, 3, 1), "a block more for its next token"
    bench.step()
    assert view() == (held, 1, 3, 0), "full blocks stay clean, the new one is not on the host"
    bench.step()
    assert view() == (held, 1, 3, 0)


@pytest.mark.parametrize("to_edge", range(6))
def test_the_reserve_is_what_the_next_four_steps_take(to_edge: int) -> None:
    """Block size 8; two sequences have `to_edge` tokens of room in their blocks, one of them with one token to go."""
    bench = Bench(blocks=12, host=12, block_size=8)
    both = [bench.add(16 - to_edge, 20), bench.add(16 - to_edge, 2)]
    bench.step()
    view = bench.scheduler.memory._mover.view  # type: ignore[union-attr]
    assert [len(one.memory.table.blocks) * 8 - one.num_computed for one in both] == [to_edge, to_edge]
    assert view.reserve(both) == (to_edge < 4) + (to_edge < 2)
    assert view.reserve(both[1:]) == (to_edge < 2), "no further than to its end"
