"""Moves KV blocks between device and host: the interface, and the synchronous engine.

A copy is *in flight* from `start` until `poll` names its id. Until then its destinations hold nothing to read, and its
sources may be read but not written or given away; after it, everybody may rely on it. `start` sees what every step
before it wrote: the caller has waited for those steps (TorchRunner has, since it needs their tokens).

FastServe's public code records the fence before it enqueues the copies, and so fences nothing; here the id is the
fence, and only an engine that knows the copy is over says it. An engine that copies behind the forward pass has the
same interface (tests/support/engine/chaos_copy.py is one that copies as late and as badly as it may).
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from engine.plan import BlockCopy


class CopyEngine(Protocol):
    """Block copies between two pools. One thread; `start`, then `poll` until every id has been named once."""

    def start(self, out: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        """Begin copies: `out` from device to host, then `into` from host to device.

        When it raises, none of them touches a block any more, and `poll` names none of them.
        """

    def poll(self) -> list[int]:
        """Ids of the copies that are complete, each named once. Does not wait."""

    def wait(self) -> None:
        """Return when at least one copy in flight is complete; at once when none is in flight."""


class SyncCopy:
    """Copies inside `start`: on a CUDA device it returns when the device has finished. The reference for all others."""

    def __init__(self, device_pool: torch.Tensor, host_pool: torch.Tensor) -> None:
        """Pools [blocks, ...] with equal blocks. The host pool is pinned when the device is CUDA."""
        assert device_pool.shape[1:] == host_pool.shape[1:] and device_pool.dtype == host_pool.dtype
        self._device, self._host = device_pool, host_pool
        self._done: list[int] = []

    def start(self, out: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        """See CopyEngine.start. A block out of range, or one that two copies disagree about, is the caller's bug."""
        check(out, into, self._device.shape[0], self._host.shape[0])
        try:
            for copy in out:
                copy_blocks(self._device, self._host, copy.pairs)
            for copy in into:
                copy_blocks(self._host, self._device, copy.pairs)
        finally:  # also when one of them raised: those before it are still on their way
            if self._device.is_cuda:
                torch.cuda.synchronize(self._device.device)
        self._done.extend(copy.copy_id for copy in (*out, *into))

    def poll(self) -> list[int]:
        """See CopyEngine.poll."""
        done, self._done = self._done, []
        return done

    def wait(self) -> None:
        """Nothing is ever in flight."""


def copy_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks. Neighbours on both sides go as one: a block is one contiguous run, and so are they."""
    for first_source, first_destination, count in runs(pairs):
        destination[first_destination : first_destination + count].copy_(
            source[first_source : first_source + count], non_blocking=True
        )


def runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """The pairs as (first source, first destination, blocks), by source, each as long as both sides go up by one."""
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
    """Assert that the copies of one plan can be made in any order and leave no doubt about any block."""
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
