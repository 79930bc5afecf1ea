"""Paged KV accounting: which blocks are free, and which blocks a sequence owns, in the order of its tokens.

A `BlockPool` owns the block ids [0, num_blocks) of one memory. A `BlockTable` is the ordered list of the blocks that
one sequence holds out of a pool. A caller first asks (`can_allocate`) and then takes (`allocate`), so an allocation is
never left half done. In every pool, free + owned = total. Moves between the device's pool and the host's pool are
decided and carried out by `engine.memory`.
"""


class BlockPool:
    """The KV blocks of one memory, all of one size. The block freed last is handed out first."""

    def __init__(self, num_blocks: int, *, may_be_empty: bool = False) -> None:
        """A pool whose blocks are all free. Raises ValueError for fewer blocks than 1, or than 0 if `may_be_empty`."""
        if num_blocks < (0 if may_be_empty else 1):
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_owned = bytearray(num_blocks)
        self.num_owned = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks out of the pool and return their ids. The caller has asked `can_allocate` before."""
        assert self.can_allocate(num_blocks), f"{num_blocks} blocks wanted, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._is_owned[block] = 1
        self.num_owned += num_blocks
        return taken

    def free(self, blocks: list[int]) -> None:
        """Give blocks back. Every block must be owned: freeing a block twice is a bug, and an assertion stops it."""
        for block in blocks:
            assert self._is_owned[block], f"block {block} freed twice"
            self._is_owned[block] = 0
        self._free.extend(reversed(blocks))
        self.num_owned -= len(blocks)
        assert len(self._free) + self.num_owned == self.num_blocks, "free + owned = total"


class BlockTable:
    """One sequence's blocks in the order of its tokens: token i lies in blocks[i // block_size].

    `host` lists the host blocks with copies of the sequence's first device blocks. These copies are valid for the first
    `num_saved` tokens. `engine.memory` writes both.
    """

    __slots__ = ("_pool", "block_size", "blocks", "host", "num_saved")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self.block_size = block_size
        self.blocks: list[int] = []
        self.host: list[int] = []
        self.num_saved = 0

    def grow_to(self, num_tokens: int) -> None:
        """Add blocks until `num_tokens` tokens fit. The caller has asked the pool's `can_allocate` before."""
        missing = blocks_for(num_tokens, self.block_size) - len(self.blocks)
        if missing > 0:
            self.blocks.extend(self._pool.allocate(missing))

    def release(self) -> None:
        """Give every device block back to the pool. A second call gives back nothing and does no harm."""
        self._pool.free(self.blocks)
        self.blocks = []


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks `num_tokens` tokens occupy. A block that is partly filled counts whole."""
    return -(-num_tokens // block_size)
