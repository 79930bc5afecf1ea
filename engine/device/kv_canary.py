"""The KV canary: checks that a block comes back from the host with the bits it left with. Opt-in (`kv_canary`).

The checksum of a block is taken when its copy out begins, and taken again of the device block when its copy back is
complete. The checksum is the sum of the block's 32-bit words, each times a fixed odd number, modulo 2^64. The change of
a single word always shows, because an odd factor is invertible. Larger damage goes unseen with a chance of about 2^-32.
The canary costs one pass over the copied blocks on the device.
"""

from collections.abc import Sequence

import torch

from engine.plan import BlockCopy

_SEED = 0x7E4A21


class KVCanary:
    """Owns the checksums of the blocks on the host."""

    def __init__(self, device_pool: torch.Tensor) -> None:
        """`device_pool` [blocks, ...] is the pool that blocks are copied out of and back into."""
        self._words = device_pool.view(device_pool.shape[0], -1).view(torch.int32)
        generator = torch.Generator().manual_seed(_SEED)
        factors = torch.randint(-(2**62), 2**62, (self._words.shape[1],), generator=generator) * 2 + 1
        self._factors = factors.to(device_pool.device)
        self._of_host_block: dict[int, int] = {}
        self._coming: dict[int, BlockCopy] = {}  # copies in that are not complete

    def start(self, out: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        """Note which blocks leave and which are to come back. Call it before the copy engine's `start`."""
        for copy in out:
            self._of_host_block.update(
                zip((host for _, host in copy.pairs), self._checksums([d for d, _ in copy.pairs]), strict=True)
            )
        self._coming.update((copy.copy_id, copy) for copy in into)

    def done(self, copy_ids: Sequence[int]) -> dict[int, str]:
        """The sequences whose KV came back changed: seq_id -> one line that says what changed.

        Call it with the ids from the copy engine's `poll`.
        """
        spoiled: dict[int, str] = {}
        for copy in (self._coming.pop(copy_id) for copy_id in copy_ids if copy_id in self._coming):
            found = self._checksums([device for _, device in copy.pairs])
            bad = [
                host
                for (host, _), checksum in zip(copy.pairs, found, strict=True)
                if self._of_host_block[host] != checksum
            ]
            if bad:
                spoiled[copy.seq_id] = (
                    f"KV canary: {len(bad)} of {len(found)} blocks changed between swap-out and swap-in "
                    f"(host block {bad[0]})"
                )
        return spoiled

    def forget(self, seq_id: int) -> None:
        """Stop watching the copies of a sequence that has ended."""
        self._coming = {copy_id: copy for copy_id, copy in self._coming.items() if copy.seq_id != seq_id}

    def _checksums(self, blocks: Sequence[int]) -> list[int]:
        at = torch.tensor(blocks, dtype=torch.long, device=self._words.device)
        words = self._words.index_select(0, at).to(torch.int64)
        return [int(value) for value in (words * self._factors).sum(1).tolist()]
