"""The paged KV cache: one tensor, block-major, so that one block is one contiguous run over layers, keys and values.

Layout `[num_blocks + 1, layers, 2, block_size, kv_heads, head_dim]`. The extra last block is never written: block
tables are padded with it. Invariant: every slot a sequence's attention can read but must not see (the rest of its last
block, padding) holds zeros, never what an earlier owner left there; a masked slot with NaN in it would still poison
a sum, since 0 * NaN is NaN.
(The native backend reads no slot past a sequence's end, so with it blocks are never cleared.)

The host pool holds swapped-out blocks in the same layout, `[num_host_blocks, layers, 2, block_size, kv_heads,
head_dim]`. On a CPU its pages cost nothing until the first block is copied there; beside a CUDA device it is pinned,
which takes it at once and rounds it up to a power of two. A host block holds nothing before its first copy.
"""

from pathlib import Path

import torch

from engine.models.config import ModelConfig


class KVAllocationError(Exception):
    """The KV pool does not fit in memory, or holds too little to serve anything. One line with the numbers."""


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return block_size * config.kv_bytes_per_token(dtype.itemsize)


class KVCache:
    """Owns the pool tensors. Which block belongs to whom is the scheduler's business."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_host_blocks: int = 0,
    ) -> None:
        """`num_host_blocks` 0: no host pool. Raises KVAllocationError when the memory is not there."""
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.num_layers = config.num_layers
        self.null_block = num_blocks
        self.kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        shape = (num_blocks + 1, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        num_bytes = (num_blocks + 1) * block_bytes(config, block_size, dtype)
        available = available_bytes(device)
        if available is not None and num_bytes > available:
            raise KVAllocationError(_shortage("", num_blocks, num_bytes, available))
        try:
            self.pool = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError:
            raise KVAllocationError(_shortage("", num_blocks, num_bytes, available)) from None
        self.host_pool: torch.Tensor | None = None
        if num_host_blocks:
            try:
                self.host_pool = torch.empty(
                    (num_host_blocks, *shape[1:]), dtype=dtype, pin_memory=device.type == "cuda"
                )
            except RuntimeError:
                num_bytes = num_host_blocks * block_bytes(config, block_size, dtype)
                available = available_bytes(torch.device("cpu"))
                raise KVAllocationError(_shortage("host ", num_host_blocks, num_bytes, available)) from None
        # Rows of one layer's keys or values of one block, and of one token of it.
        self._block_rows = self.pool.view(-1, block_size * self.kv_heads * self.head_dim)
        self._token_rows = self.pool.view(-1, self.kv_heads * self.head_dim)

    def token_index(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of layer 0's keys for token slots (block * block_size + offset)."""
        block = torch.div(slots, self.block_size, rounding_mode="floor")
        return slots + block * (self.block_size * (2 * self.num_layers - 1))

    def block_index(self, blocks: torch.Tensor) -> torch.Tensor:
        """Rows of layer 0's keys for block ids."""
        return blocks * (2 * self.num_layers)

    def write(self, layer: int, token_index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's keys and values, each [tokens, kv_heads, head_dim]."""
        at = token_index + layer * 2 * self.block_size
        self._token_rows.index_copy_(0, at, keys.flatten(1))
        self._token_rows.index_copy_(0, at + self.block_size, values.flatten(1))

    def gather(self, layer: int, block_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values of the blocks in order, each [blocks * block_size, kv_heads, head_dim]."""
        at = block_index + 2 * layer
        keys = self._block_rows.index_select(0, at)
        values = self._block_rows.index_select(0, at + 1)
        shape = (-1, self.kv_heads, self.head_dim)
        return keys.view(shape), values.view(shape)

    def clear(self, blocks: torch.Tensor) -> None:
        """Fill blocks with zeros: done when a block gets its first token under a new owner."""
        self.pool.index_fill_(0, blocks, 0)


def available_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken on `device`; None when it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def host_blocks_that_fit(num_wanted: int, num_block_bytes: int, available: int | None) -> int:
    """At most `num_wanted` host blocks, and at most what leaves a quarter of the available memory to everybody else."""
    if available is None:
        return num_wanted
    return min(num_wanted, max(0, available * 3 // 4) // num_block_bytes)


def _shortage(side: str, num_blocks: int, num_bytes: int, available: int | None) -> str:
    free = "" if available is None else f", {available / 2**20:.0f} MiB are available"
    setting = "--host-kv-memory" if side else "--kv-memory"
    return f"the {side}KV pool of {num_blocks} blocks needs {num_bytes / 2**20:.0f} MiB{free}; lower {setting}"
