"""Moves KV blocks between device and host: the interface of a copy engine, and the synchronous copy engine.

A copy is *in flight* from `start` until `poll` names its id. While a copy is in flight, its destination blocks hold
nothing to read, and its source blocks may be read, but not written or given away. Once `poll` has named the id,
everybody may rely on the copy. `start` sees what every earlier step wrote, for the caller has waited for those steps:
TorchRunner needs their tokens.

FastServe's public code records its fence before it enqueues the copies, so that fence waits for nothing. Here the id is
the fence, and a copy engine names it only when it knows that the copy is over. A copy engine that copies beside the
forward pass has the same interface. A test's copy engine (`chaos_copy.py`) copies as late and as badly as it allows.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from engine.plan import BlockCopy


class CopyEngine(Protocol):
    """Block copies between two pools. One thread calls `start`, then `poll` until every id has been named once."""

    def start(self, out: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        """Begin copies: `out` from device to host, then `into` from host to device.

        If it raises, none of these copies touches a block any more, and `poll` names none of them.
        """

    def poll(self) -> list[int]:
        """Ids of the copies that are complete. Names each id once, and does not wait."""

    def wait(self) -> None:
        """Return when at least one copy in flight is complete. Return at once if no copy is in flight."""


class SyncCopy:
    """Copies inside `start`, which returns when all copies are complete. The reference for every other copy engine."""

    def __init__(self, device_pool: torch.Tensor, host_pool: torch.Tensor) -> None:
        """Two pools [blocks, ...] with blocks of one shape and type. With a CUDA device the host pool is pinned."""
        assert device_pool.shape[1:] == host_pool.shape[1:] and device_pool.dtype == host_pool.dtype
        self._device, self._host = device_pool, host_pool
        self._done: list[int] = []

    def start(self, out: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        """See CopyEngine.start. Blocks that `check` refuses are a bug of the caller's, and an assertion fails."""
        check(out, into, self._device.shape[0], self._host.shape[0])
        try:
            for copy in out:
                copy_blocks(self._device, self._host, copy.pairs)
            for copy in into:
                copy_blocks(self._host, self._device, copy.pairs)
        finally:  # also after an exception: the copies before it are still on their way
            if self._device.is_cuda:
                torch.cuda.synchronize(self._device.device)
        self._done.extend(copy.copy_id for copy in (*out, *into))

    def poll(self) -> list[int]:
        """See CopyEngine.poll."""
        done, self._done = self._done, []
        return done

    def wait(self) -> None:
        """Return at once: no copy is ever in flight after `start`."""


def copy_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks of one pool to another. Blocks that are neighbours on both sides go in one copy.

    A block is one contiguous run of memory, and so are blocks with consecutive ids.
    """
    for first_source, first_destination, count in runs(pairs):
        destination[first_destination : first_destination + count].copy_(
            source[first_source : first_source + count], non_blocking=True
        )


def runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """The pairs grouped into runs (first source, first destination, number of blocks), in order of source.

    A run goes on as long as source and destination both go up by one: (4, 7), (5, 8), (9, 9) give (4, 7, 2), (9, 9, 1).
    """
    first_source = first_destination = count = 0
    for source, destination in sorted(pairs):
        if count and (source, destination) == (first_source + count, first_destination + count):
            count += 1
            continue
        if count:
            yield first_source, first_destination, count
        first_source, first_destination, count = source, destination, 1
    if count:
        yield first_source, first_destination, count


def check(out: Sequence[BlockCopy], into: Sequence[BlockCopy], num_device_blocks: int, num_host_blocks: int) -> None:
    """Assert that the order of one plan's copies does not matter.

    Every block must lie in its pool, no block may be the destination of two copies, and no block may be both source and
    destination.
    """
    device_read, host_written = _sides(out, num_device_blocks, num_host_blocks)
    host_read, device_written = _sides(into, num_host_blocks, num_device_blocks)
    assert device_read.isdisjoint(device_written), "a device block is copied out and overwritten in one plan"
    assert host_read.isdisjoint(host_written), "a host block is copied in and overwritten in one plan"


def _sides(copies: Sequence[BlockCopy], num_sources: int, num_destinations: int) -> tuple[set[int], set[int]]:
    sources = [source for copy in copies for source, _ in copy.pairs]
    destinations = [destination for copy in copies for _, destination in copy.pairs]
    assert all(0 <= block < num_sources for block in sources), "a copy's source is outside its pool"
    assert all(0 <= block < num_destinations for block in destinations), "a copy's destination is outside its pool"
    written = set(destinations)
    assert len(written) == len(destinations), "a block is the destination of two copies"
    return set(sources), written
