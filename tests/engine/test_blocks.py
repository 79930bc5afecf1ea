import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.blocks import BlockPool, BlockTable, blocks_for


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block, got 0"):
        BlockPool(0)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(3)
    assert sorted(taken) == [0, 1, 2] and pool.num_free == 1 and pool.num_owned == 3
    assert not pool.can_allocate(2)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1 and pool.num_owned == 3


@pytest.mark.case("I1")
def test_freeing_twice_or_what_was_never_owned_is_a_bug() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(2)
    pool.free(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([3])


def test_a_table_grows_by_whole_blocks_and_gives_all_back() -> None:
    pool = BlockPool(8)
    table = BlockTable(pool, 4)
    table.grow_to(1)
    first = list(table.blocks)
    table.grow_to(4)
    assert table.blocks == first
    table.grow_to(13)
    assert table.blocks[:1] == first and len(table.blocks) == 4
    table.release()
    table.release()
    assert table.blocks == [] and pool.num_free == 8


class PoolMachine(RuleBasedStateMachine):
    """Random growth and release of a few tables over one small pool."""

    @initialize(blocks=st.integers(1, 12))
    def start(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.tables = [BlockTable(self.pool, 4) for _ in range(3)]
        self.tokens = [0, 0, 0]

    @rule(which=st.integers(0, 2), more=st.integers(1, 20))
    def grow(self, which: int, more: int) -> None:
        table, target = self.tables[which], self.tokens[which] + more
        if self.pool.can_allocate(blocks_for(target, 4) - len(table.blocks)):
            table.grow_to(target)
            self.tokens[which] = target

    @precondition(lambda self: any(self.tokens))
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        self.tables[which].release()
        self.tokens[which] = 0

    @invariant()
    def free_and_owned_are_all(self) -> None:
        owned = [block for table in self.tables for block in table.blocks]
        assert len(owned) == len(set(owned)) == self.pool.num_owned
        assert self.pool.num_free + self.pool.num_owned == self.pool.num_blocks
        assert [len(t.blocks) for t in self.tables] == [blocks_for(n, 4) for n in self.tokens]


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
test_pool_under_random_use = pytest.mark.case("I1")(PoolMachine.TestCase)
