"""Two pools and the copies between them: who owns a block at every moment, whatever ends when."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.blocks import BlockTable, blocks_for
from engine.memory.pools import KVMemory, LinkBudget

BLOCK_SIZE = 4


def grown(memory: KVMemory, num_tokens: int) -> BlockTable:
    table = BlockTable(memory.device, BLOCK_SIZE)
    table.grow_to(num_tokens)
    return table


def test_out_and_back_keeps_the_order_and_the_host_copy() -> None:
    memory = KVMemory(4, 6)
    table = grown(memory, 10)
    source = list(table.blocks)
    out = memory.swap_out(7, table, 10)
    assert out is not None and [pair[0] for pair in out.pairs] == source and out.seq_id == 7
    assert table.blocks == [] and memory.device.num_free == 1, "in flight: not free yet"
    assert memory.num_incoming == 3
    memory.complete(out.copy_id)
    assert memory.device.num_free == 4 and memory.host.num_free == 3 and memory.num_incoming == 0
    other = grown(memory, 1)
    back = memory.swap_in(7, table)
    assert back.copy_id != out.copy_id
    assert [pair[0] for pair in back.pairs] == [pair[1] for pair in out.pairs], "what went out comes back, in order"
    assert [pair[1] for pair in back.pairs] == table.blocks and not set(table.blocks) & set(other.blocks)
    memory.complete(back.copy_id)
    assert memory.host.num_free == 3, "the host copy stays"
    memory.check([table, other])


def swapped_and_back(memory: KVMemory, num_tokens: int) -> BlockTable:
    table = grown(memory, num_tokens)
    out = memory.swap_out(0, table, num_tokens)
    assert out is not None
    memory.complete(out.copy_id)
    memory.complete(memory.swap_in(0, table).copy_id)
    return table


def test_what_did_not_change_since_is_not_copied_again() -> None:
    memory = KVMemory(8, 8)
    table = swapped_and_back(memory, 10)  # two full blocks and a half
    assert memory.num_clean(table, 10) == 3
    assert memory.swap_out(0, table, 10) is None, "all of it is clean"
    assert memory.device.num_free == 8 and table.blocks == []
    memory.complete(memory.swap_in(0, table).copy_id)
    table.grow_to(17)
    assert memory.num_clean(table, 17) == 2, "the half block was written to, full ones never are"
    kept, source = list(table.host), list(table.blocks)
    out = memory.swap_out(0, table, 17)
    assert out is not None and [pair[0] for pair in out.pairs] == source[2:]
    assert out.pairs[0][1] == kept[2], "the stale copy is written over"
    assert memory.device.num_free == 8 - 3, "clean blocks are free at once"
    memory.check([table])


def test_a_clean_host_copy_is_dropped_without_a_copy() -> None:
    memory = KVMemory(4, 4)
    table = swapped_and_back(memory, 9)
    assert memory.forget_host_copy(table) == 3 and memory.host.num_free == 4
    assert memory.num_clean(table, 9) == 0 and len(table.blocks) == 3
    memory.check([table])


@pytest.mark.case("K11")
def test_the_host_copy_is_pinned_while_it_is_read_back() -> None:
    memory = KVMemory(4, 4)
    table = grown(memory, 8)
    out = memory.swap_out(0, table, 8)
    assert out is not None
    memory.complete(out.copy_id)
    memory.swap_in(0, table)
    with pytest.raises(AssertionError, match="being read"):
        memory.forget_host_copy(table)
    with pytest.raises(AssertionError, match="in flight"):
        memory.drop(table)
    assert memory.host.num_free == 2


@pytest.mark.case("K05", "K07")
@pytest.mark.parametrize("is_out", [True, False])
def test_an_ended_ones_blocks_are_free_when_its_copy_is_over(is_out: bool) -> None:
    memory = KVMemory(4, 4)
    table = grown(memory, 8)
    copy = memory.swap_out(0, table, 8)
    assert copy is not None
    if not is_out:
        memory.complete(copy.copy_id)
        copy = memory.swap_in(0, table)
    memory.release(table)
    memory.check([])
    assert (memory.device.num_free, memory.host.num_free) == (2, 2)
    flight = memory.complete(copy.copy_id)
    assert flight.is_orphan and (memory.device.num_free, memory.host.num_free) == (4, 4)
    memory.check([])


@pytest.mark.case("K08")
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_store_and_a_load_pending_and_completions_in_any_order(order: tuple[int, ...]) -> None:
    memory = KVMemory(9, 9)
    tables = [grown(memory, 8) for _ in range(3)]
    copies = []
    for seq_id, table in enumerate(tables):
        out = memory.swap_out(seq_id, table, 8)
        assert out is not None
        copies.append(out)
    memory.complete(copies[0].copy_id)
    copies[0] = memory.swap_in(0, tables[0])
    for table in tables[:2]:
        memory.release(table)
    for index in order:
        memory.complete(copies[index].copy_id)
        with pytest.raises(AssertionError, match="not in flight"):
            memory.complete(copies[index].copy_id)
        memory.check(tables[2:])
    assert memory.device.num_free == 9 and memory.host.num_free == 7
    memory.release(tables[2])
    assert memory.host.num_free == 9


@pytest.mark.case("K09")
@pytest.mark.parametrize(("is_out", "is_ended"), list(itertools.product([True, False], repeat=2)))
def test_a_copy_that_is_given_up_leaves_no_block_behind(is_out: bool, is_ended: bool) -> None:
    memory = KVMemory(4, 4)
    table = grown(memory, 8)
    copy = memory.swap_out(0, table, 8)
    assert copy is not None
    if not is_out:
        memory.complete(copy.copy_id)
        copy = memory.swap_in(0, table)
    if is_ended:
        memory.release(table)
    memory.fail(copy.copy_id)
    assert (memory.device.num_free, memory.host.num_free) == (4, 4)
    assert table.blocks == [] and table.host == [] and table.num_saved == 0
    memory.check([] if is_ended else [table])


def test_a_memory_needs_a_device_pool_but_no_host_pool() -> None:
    with pytest.raises(ValueError, match="at least one block, got 0"):
        KVMemory(0, 4)
    with pytest.raises(ValueError, match="at least one block, got -1"):
        KVMemory(1, -1)
    assert KVMemory(1).host.num_free == 0


class MemoryMachine(RuleBasedStateMachine):
    """Sequences come, grow, leave, come back and end; copies are over whenever they like."""

    @initialize(device=st.integers(1, 12), host=st.integers(0, 12))
    def start(self, device: int, host: int) -> None:
        self.memory = KVMemory(device, host)
        self.resident: dict[int, tuple[BlockTable, int]] = {}
        self.away: dict[int, tuple[BlockTable, int]] = {}
        self.moving: dict[int, tuple[int, BlockTable, int]] = {}  # by copy id
        self.next_id = 0

    @property
    def tables(self) -> list[BlockTable]:
        return [
            *(table for table, _ in self.resident.values()),
            *(table for table, _ in self.away.values()),
            *(table for _, table, _ in self.moving.values()),
        ]

    @rule(tokens=st.integers(1, 20))
    def come(self, tokens: int) -> None:
        table = BlockTable(self.memory.device, BLOCK_SIZE)
        if self.memory.device.can_allocate(blocks_for(tokens, BLOCK_SIZE) - len(table.blocks)):
            table.grow_to(tokens)
            self.resident[self.next_id] = table, tokens
            self.next_id += 1

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), more=st.integers(1, 9))
    def grow(self, data: st.DataObject, more: int) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.resident)))
        table, tokens = self.resident[seq_id]
        if self.memory.device.can_allocate(blocks_for(tokens + more, BLOCK_SIZE) - len(table.blocks)):
            table.grow_to(tokens + more)
            self.resident[seq_id] = table, tokens + more

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.resident)))
        table, tokens = self.resident[seq_id]
        if self.memory.host.can_allocate(len(table.blocks) - len(table.host)):
            del self.resident[seq_id]
            copy = self.memory.swap_out(seq_id, table, tokens)
            if copy is None:
                self.away[seq_id] = table, tokens
            else:
                self.moving[copy.copy_id] = seq_id, table, tokens

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def return_(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.away)))
        table, tokens = self.away[seq_id]
        if self.memory.device.can_allocate(len(table.host)):
            del self.away[seq_id]
            self.moving[self.memory.swap_in(seq_id, table).copy_id] = seq_id, table, tokens

    @precondition(lambda self: self.memory.flights)
    @rule(data=st.data(), is_lost=st.booleans())
    def land(self, data: st.DataObject, is_lost: bool) -> None:
        copy_id = data.draw(st.sampled_from(sorted(self.memory.flights)))
        flight = self.memory.fail(copy_id) if is_lost else self.memory.complete(copy_id)
        moved = self.moving.pop(copy_id, None)
        assert (moved is None) == flight.is_orphan
        if moved is not None and not is_lost:
            (self.away if flight.is_out else self.resident)[moved[0]] = moved[1:]

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def end_moving(self, data: st.DataObject) -> None:
        self.memory.release(self.moving.pop(data.draw(st.sampled_from(sorted(self.moving))))[1])

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), is_ended=st.booleans())
    def end_or_drop(self, data: st.DataObject, is_ended: bool) -> None:
        table, _ = self.resident.pop(data.draw(st.sampled_from(sorted(self.resident))))
        (self.memory.release if is_ended else self.memory.drop)(table)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.memory.forget_host_copy(self.resident[data.draw(st.sampled_from(sorted(self.resident)))][0])

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "memory"):
            return
        memory = self.memory
        memory.check(self.tables)
        free = {*memory.device._free}
        for flight in memory.flights.values():
            assert not free & set(flight.device_blocks) and not {*memory.host._free} & set(flight.host_blocks)
        for table, tokens in self.resident.values():
            assert len(table.blocks) * BLOCK_SIZE >= tokens and memory.num_clean(table, tokens) <= len(table.blocks)

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        for table in self.tables:
            self.memory.release(table)
        for copy_id in list(self.memory.flights):
            self.memory.complete(copy_id)
        self.memory.check([])
        assert self.memory.device.num_owned == self.memory.host.num_owned == 0


TestMemory = pytest.mark.case("I1", "I15")(MemoryMachine.TestCase)
TestMemory.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)


def test_time_of_a_copy_is_rounded_up() -> None:
    link = LinkBudget(2.5, 60)
    assert [link.copy_us(blocks) for blocks in (0, 1, 2, 3)] == [0, 3, 5, 8]


@pytest.mark.case("I13")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    asks=st.lists(st.tuples(st.integers(0, 60_000), st.integers(1, 500)), min_size=1, max_size=60),
    percent=st.integers(1, 100),
)
def test_a_window_moves_at_most_its_part_a_burst_and_a_sequence(asks: list[tuple[int, int]], percent: int) -> None:
    """Whoever is asked moves as soon as it may; every window over the moves is then recounted."""
    link = LinkBudget(100.0, percent)
    now_us = 0
    moved: list[tuple[int, int]] = []
    for wait_us, blocks in asks:
        now_us += wait_us
        if link.left_us(now_us) > 0:
            link.use(blocks)
            moved.append((now_us, link.copy_us(blocks)))
    for first in range(len(moved)):
        for last in range(first, len(moved)):
            window = moved[first : last + 1]
            within = (window[-1][0] - window[0][0]) * percent / 100 + 100_000 + max(us for _, us in window)
            assert sum(us for _, us in window) <= within


def test_a_link_that_costs_nothing_is_never_used_up() -> None:
    link = LinkBudget(0.0, 1)
    link.use(10_000)
    assert link.left_us(0) > 0
