"""The paged KV cache: one tensor, block-major, so that one block is one contiguous run over layers, keys and values.

The layout is `[num_blocks + 1, layers, 2, block_size, kv_heads, head_dim]`. The extra last block is never written:
block tables are padded with it.

Invariant: a slot that attention reads and masks holds zeros. Such slots are the rest of a sequence's last block, and
padding. What an earlier owner left there is cleared first, for a masked NaN still spoils a sum: 0 * NaN is NaN. The
native backend reads no slot past a sequence's end, so with it blocks are never cleared.

The host pool holds swapped-out blocks in the same layout, `[num_host_blocks, layers, 2, block_size, kv_heads,
head_dim]`. With a CPU device its pages cost nothing until a block is copied there. With a CUDA device the host pool is
pinned: the memory is taken at once, and its size is rounded up to a power of two. Before its first copy a host block
holds nothing defined.
"""

from pathlib import Path

import torch

from engine.models.config import ModelConfig


class KVAllocationError(Exception):
    """A KV pool does not fit in memory. The message is one line with the numbers and the setting to lower."""


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return block_size * config.kv_bytes_per_token(dtype.itemsize)


class KVCache:
    """Owns the pool tensors, addressed by block id. Which sequence owns a block is known to `engine.memory` alone."""

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
        """Allocate both pools; `num_host_blocks` 0 is no host pool. Raises KVAllocationError for too little memory."""
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
        # A row of the first view is one layer's keys or values of one block; a row of the second view, of one token.
        self._block_rows = self.pool.view(-1, block_size * self.kv_heads * self.head_dim)
        self._token_rows = self.pool.view(-1, self.kv_heads * self.head_dim)

    def token_index(self, slots: torch.Tensor) -> torch.Tensor:
        """For token slots (block * block_size + offset), the row indices of layer 0's keys, as `write` takes them."""
        block = torch.div(slots, self.block_size, rounding_mode="floor")
        return slots + block * (self.block_size * (2 * self.num_layers - 1))

    def block_index(self, blocks: torch.Tensor) -> torch.Tensor:
        """For block ids, the row indices of layer 0's keys, as `gather` takes them."""
        return blocks * (2 * self.num_layers)

    def write(self, layer: int, token_index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's keys and values, each [tokens, kv_heads, head_dim]."""
        at = token_index + layer * 2 * self.block_size
        self._token_rows.index_copy_(0, at, keys.flatten(1))
        self._token_rows.index_copy_(0, at + self.block_size, values.flatten(1))

    def gather(self, layer: int, block_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the blocks in one layer, in order, each [blocks * block_size, kv_heads, head_dim]."""
        at = block_index + 2 * layer
        keys = self._block_rows.index_select(0, at)
        values = self._block_rows.index_select(0, at + 1)
        shape = (-1, self.kv_heads, self.head_dim)
        return keys.view(shape), values.view(shape)

    def clear(self, blocks: torch.Tensor) -> None:
        """Fill blocks with zeros. Called for a block when its new owner writes the first token to it."""
        self.pool.index_fill_(0, blocks, 0)


def available_bytes(device: torch.device) -> int | None:
    """Bytes of memory that can still be taken on `device`, or None if the system does not tell."""
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
    """`num_wanted` host blocks, or fewer, so that a quarter of the `available` bytes is left to everything else.

    With None, where the system does not tell what is available, all `num_wanted` blocks are granted.
    """
    if available is None:
        return num_wanted
    return min(num_wanted, max(0, available * 3 // 4) // num_block_bytes)


def _shortage(side: str, num_blocks: int, num_bytes: int, available: int | None) -> str:
    free = "" if available is None else f", {available / 2**20:.0f} MiB are available"
    setting = "--host-kv-memory" if side else "--kv-memory"
    return f"the {side}KV pool of {num_blocks} blocks needs {num_bytes / 2**20:.0f} MiB{free}; lower {setting}"
