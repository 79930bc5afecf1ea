"""Paged KV accounting: which blocks are free, which sequence owns which, in what order.

A `BlockPool` owns the ids [0, num_blocks) of one memory; a `BlockTable` is one sequence's ordered list out of it.
Callers ask first (`can_allocate`) and then do (`allocate`), so nothing is ever half allocated. Free + owned = total.
What moves between the device's pool and the host's is `engine.memory`'s business.
"""


class BlockPool:
    """Fixed-size KV blocks of one memory, handed out last freed first."""

    def __init__(self, num_blocks: int, *, may_be_empty: bool = False) -> None:
        """`num_blocks` is at least 1, or 0 where that is said to be fine; else ValueError."""
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
        """Take blocks out of the pool. The caller has asked `can_allocate` before."""
        assert self.can_allocate(num_blocks), f"{num_blocks} blocks wanted, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._is_owned[block] = 1
        self.num_owned += num_blocks
        return taken

    def free(self, blocks: list[int]) -> None:
        """Give blocks back. Each must be owned; giving one back twice is a bug."""
        for block in blocks:
            assert self._is_owned[block], f"block {block} freed twice"
            self._is_owned[block] = 0
        self._free.extend(reversed(blocks))
        self.num_owned -= len(blocks)
        assert len(self._free) + self.num_owned == self.num_blocks, "free + owned = total"


class BlockTable:
    """One sequence's blocks in the order of its tokens: token i lies in blocks[i // block_size].

    `host` are copies of its first blocks on the host, valid for the first `num_saved` tokens, kept by `engine.memory`.
    """

    __slots__ = ("_pool", "block_size", "blocks", "host", "num_saved")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self.block_size = block_size
        self.blocks: list[int] = []
        self.host: list[int] = []
        self.num_saved = 0

    def grow_to(self, num_tokens: int) -> None:
        """Add blocks until `num_tokens` tokens have room. The pool has been asked before."""
        missing = blocks_for(num_tokens, self.block_size) - len(self.blocks)
        if missing > 0:
            self.blocks.extend(self._pool.allocate(missing))

    def release(self) -> None:
        """Give every device block back; none is left afterwards, and it may be released again."""
        self._pool.free(self.blocks)
        self.blocks = []


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens occupy."""
    return -(-num_tokens // block_size)
