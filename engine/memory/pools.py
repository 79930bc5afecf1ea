"""KV blocks on the device and on the host, who owns which, and the copies between the two that are not done yet.

KV only ever grows at its end, so a full block never changes again. After an upload its host copy therefore stays valid
(*clean*) while the host has room: the next swap out copies only what was appended since, and a clean host copy can be
dropped at any time without a copy. Clean blocks are always a sequence's first ones.

A copy is *in flight* from the plan that holds it until a result names it. Until then its blocks on both sides are
nobody's to use: not free, not readable by rows. On both sides free + owned + in flight = total. An ended sequence's
blocks come back when its copy is over.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.blocks import BlockPool, BlockTable, blocks_for
from engine.plan import BlockCopy

_PERCENT = 100
BURST_US = 100_000  # link time that may be used at once after a quiet while


@dataclass(slots=True, eq=False)
class Flight:
    """A copy in flight. `is_orphan`: its sequence has ended; `is_lost`: nobody waits for it any more."""

    copy: BlockCopy
    is_out: bool
    table: BlockTable
    is_orphan: bool = False
    is_lost: bool = False

    @property
    def device_blocks(self) -> list[int]:
        return [pair[0 if self.is_out else 1] for pair in self.copy.pairs]

    @property
    def host_blocks(self) -> list[int]:
        return [pair[1 if self.is_out else 0] for pair in self.copy.pairs]


class KVMemory:
    """The one owner of both block pools. A table belongs to one live sequence; nothing else touches `table.host`."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int = 0) -> None:
        """Raises ValueError for a device pool without blocks; the host pool may be empty."""
        self.device = BlockPool(num_device_blocks)
        self.host = BlockPool(num_host_blocks, may_be_empty=True)
        self.flights: dict[int, Flight] = {}  # by copy_id
        self._flight_of: dict[BlockTable, Flight] = {}
        self._next_copy_id = 0

    @property
    def num_incoming(self) -> int:
        """Device blocks that copies out in flight will free."""
        return sum(len(f.copy.pairs) for f in self.flights.values() if f.is_out and not f.is_lost)

    @property
    def is_copying(self) -> bool:
        """Copies are in flight that somebody waits for."""
        return bool(self.flights) and not all(flight.is_lost for flight in self.flights.values())

    def num_clean(self, table: BlockTable, num_tokens: int) -> int:
        """Of a resident sequence's blocks, the first ones that the host has as they are."""
        if table.num_saved == num_tokens:
            return len(table.host)
        return min(len(table.host), table.num_saved // table.block_size)

    def swap_out(self, seq_id: int, table: BlockTable, num_tokens: int) -> BlockCopy | None:
        """Move a resident sequence's KV of `num_tokens` tokens to the host.

        The clean blocks are free at once, the others when the copy is done; None when there is nothing to copy. The
        caller has asked that the host has room for those without a place there.
        """
        assert table not in self._flight_of, "one copy of a sequence at a time"
        num_blocks = blocks_for(num_tokens, table.block_size)
        self.device.free(table.blocks[num_blocks:])  # taken for tokens that were not computed yet
        del table.blocks[num_blocks:]
        num_clean = self.num_clean(table, num_tokens)
        table.host.extend(self.host.allocate(len(table.blocks) - len(table.host)))
        pairs = tuple(zip(table.blocks[num_clean:], table.host[num_clean:], strict=True))
        self.device.free(table.blocks[:num_clean])
        table.blocks = []
        table.num_saved = num_tokens
        return self._start(seq_id, table, pairs, is_out=True) if pairs else None

    def swap_in(self, seq_id: int, table: BlockTable, num_blocks: int = 0) -> BlockCopy:
        """Bring a swapped sequence's KV back; its host copy stays. It gets `num_blocks` device blocks when those are
        more than it has KV for: without room for its next token it would come back for nothing. The caller has asked
        that the device has them.
        """
        assert table not in self._flight_of and not table.blocks and table.host, "not on the host"
        table.blocks = self.device.allocate(max(num_blocks, len(table.host)))
        pairs = tuple(zip(table.host, table.blocks, strict=False))
        return self._start(seq_id, table, pairs, is_out=False)

    def forget_host_copy(self, table: BlockTable) -> int:
        """Drop a resident sequence's host copy, which needs no copying. Returns the host blocks that are free by it."""
        assert table not in self._flight_of and table.blocks, "its only KV, or being read"
        num_freed = len(table.host)
        self.host.free(table.host)
        table.host, table.num_saved = [], 0
        return num_freed

    def drop(self, table: BlockTable) -> None:
        """Give up a sequence's KV wherever it is; no copy of it is in flight."""
        assert table not in self._flight_of, "its blocks are in flight"
        table.release()
        self.host.free(table.host)
        table.host, table.num_saved = [], 0

    def release(self, table: BlockTable) -> None:
        """A sequence has ended, in whatever state. Blocks in flight come back when their copy is over."""
        flight = self._flight_of.pop(table, None)
        if flight is None:
            self.drop(table)
            return
        flight.is_orphan = True
        self.host.free(_without(table.host, flight.host_blocks))
        self.device.free(_without(table.blocks, flight.device_blocks))
        table.blocks, table.host, table.num_saved = [], [], 0

    def complete(self, copy_id: int) -> Flight:
        """A copy is done. The side it was read from is free after a copy out; both sides are, if its sequence ended."""
        flight = self._land(copy_id)
        if flight.is_out or flight.is_orphan:
            self.device.free(flight.device_blocks)
        if flight.is_orphan:
            self.host.free(flight.host_blocks)
        return flight

    def fail(self, copy_id: int) -> Flight:
        """A copy has been given up and touches no block any more: what it wrote is worth nothing, so the sequence's KV
        is dropped whole.
        """
        flight = self._land(copy_id)
        if flight.is_out or flight.is_orphan:
            self.device.free(flight.device_blocks)
        if flight.is_orphan:
            self.host.free(flight.host_blocks)
        else:
            self.drop(flight.table)
        return flight

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Assert that each block on either side is free, or owned by one table, or in one copy: I1."""
        tables = list(tables)
        flights = list(self.flights.values())
        device = [block for table in tables for block in table.blocks]
        host = [block for table in tables for block in table.host]
        for flight in flights:
            # A live sequence's table already names the blocks that are being written.
            device += flight.device_blocks if flight.is_out or flight.is_orphan else []
            host += flight.host_blocks if flight.is_orphan else []
        for pool, used in ((self.device, device), (self.host, host)):
            assert len(used) == len(set(used)) == pool.num_owned, "each block in use has one owner"
            assert pool.num_free + len(used) == pool.num_blocks, "free + owned + in flight = total"
        assert set(self._flight_of.values()) == {flight for flight in flights if not flight.is_orphan}

    def _start(self, seq_id: int, table: BlockTable, pairs: tuple[tuple[int, int], ...], *, is_out: bool) -> BlockCopy:
        copy = BlockCopy(self._next_copy_id, seq_id, pairs)
        self._next_copy_id += 1
        self.flights[copy.copy_id] = self._flight_of[table] = Flight(copy, is_out, table)
        return copy

    def _land(self, copy_id: int) -> Flight:
        assert copy_id in self.flights, f"copy {copy_id} is not in flight"
        flight = self.flights.pop(copy_id)
        self._flight_of.pop(flight.table, None)
        return flight


def _without(blocks: list[int], busy: list[int]) -> list[int]:
    kept = set(busy)
    return [block for block in blocks if block not in kept]


class LinkBudget:
    """How much of the link between device and host swapping may use: kappa of its time (docs/scheduling.md, G3).

    A token bucket of link microseconds. It is asked before a copy and may go below 0 by one sequence, so in a window
    without forced moves at most kappa * window + burst + one sequence is moved. Forced moves count, but are not held
    back.
    """

    def __init__(self, block_copy_us: float, percent: int) -> None:
        """`block_copy_us` is the time of one block, one way; 0 is a link that costs nothing."""
        self.block_copy_us = block_copy_us
        self._percent = percent
        self._top = BURST_US * _PERCENT
        self._amount = self._top  # hundredths of a microsecond
        self._refilled_us: int | None = None

    def copy_us(self, num_blocks: int) -> int:
        """Time of copying so many blocks one way, rounded up."""
        return -int(-num_blocks * self.block_copy_us // 1)

    def left_us(self, now_us: int) -> int:
        """What may be used now."""
        if self._refilled_us is not None:
            self._amount = min(self._top, self._amount + (now_us - self._refilled_us) * self._percent)
        self._refilled_us = now_us
        return self._amount // _PERCENT

    def use(self, num_blocks: int) -> None:
        """So many blocks are copied one way."""
        self._amount -= self.copy_us(num_blocks) * _PERCENT
