"""Copy engines: what a copy moves, when it is over, and which copies are the caller's bug. KV canary: what it sees."""

import math
import random
from collections.abc import Callable

import pytest
import torch

from engine.device.copy_engine import CopyEngine, SyncCopy, runs
from engine.device.kv_canary import KVCanary
from engine.plan import BlockCopy
from tests.support.engine.chaos_copy import ChaosCopy

NUM_DEVICE, NUM_HOST = 12, 16
SHAPE = (3, 2, 4, 2, 8)  # layers, keys and values, tokens, heads, head_dim

Pools = tuple[torch.Tensor, torch.Tensor]
MakeEngine = Callable[[torch.Tensor, torch.Tensor], CopyEngine]

ENGINES: dict[str, MakeEngine] = {
    "sync": SyncCopy,
    "chaos": lambda device, host: ChaosCopy(device, host, random.Random(3)),
}


@pytest.fixture
def device() -> torch.device:
    """The GPU tests run this file's tests with another one."""
    return torch.device("cpu")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def pools(request: pytest.FixtureRequest, device: torch.device) -> Pools:
    """Every element of the device pool is another number; the host pool holds none."""
    count = NUM_DEVICE * math.prod(SHAPE)
    bits = torch.arange(count, dtype=torch.int32) % 30000 + 7
    device_pool = bits.to(torch.int16 if request.param == torch.bfloat16 else torch.int32).view(request.param)
    host_pool = torch.full((NUM_HOST, *SHAPE), math.nan, dtype=request.param, pin_memory=device.type == "cuda")
    return device_pool.view(NUM_DEVICE, *SHAPE).to(device), host_pool


def finish(engine: CopyEngine, expected: set[int]) -> None:
    """Wait until exactly these copies have been named, each once."""
    named: list[int] = []
    while len(named) < len(expected):
        engine.wait()
        now = engine.poll()
        assert now, "wait came back and nothing was over"
        named += now
    assert sorted(named) == sorted(expected)
    assert engine.poll() == []
    engine.wait()  # nothing is in flight: returns


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.int16), other.cpu().view(torch.int16))


@pytest.mark.parametrize("name", list(ENGINES))
def test_blocks_go_out_and_come_back_elsewhere_with_every_bit(pools: Pools, name: str) -> None:
    device_pool, host_pool = pools
    before = device_pool.clone()
    engine = ENGINES[name](device_pool, host_pool)
    out = (BlockCopy(1, 1, ((0, 5), (1, 6), (7, 0))), BlockCopy(2, 2, ((3, 15), (4, 2))), BlockCopy(3, 3, ()))
    engine.start(out, ())
    finish(engine, {1, 2, 3})
    for copy in out:
        for source, destination in copy.pairs:
            assert same_bits(host_pool[destination], before[source])
    device_pool[:6] = math.nan
    engine.start((), (BlockCopy(4, 1, ((5, 2), (6, 1), (0, 0))), BlockCopy(5, 2, ((15, 3),))))
    finish(engine, {4, 5})
    for original, place in ((0, 2), (1, 1), (7, 0), (3, 3)):
        assert same_bits(device_pool[place], before[original])
    for untouched in (6, 8, 9, 10, 11):
        assert same_bits(device_pool[untouched], before[untouched])


def test_the_synchronous_engine_copies_at_once_and_out_first(pools: Pools) -> None:
    device_pool, host_pool = pools
    before = device_pool.clone()
    engine = SyncCopy(device_pool, host_pool)
    engine.start((BlockCopy(1, 1, ((0, 0),)),), ())
    engine.start((BlockCopy(2, 2, ((1, 1),)),), (BlockCopy(3, 1, ((0, 5),)),))
    assert engine.poll() == [1, 2, 3]
    assert same_bits(device_pool[5], before[0])


def test_the_chaos_engine_copies_late_and_poisons_what_is_absent(pools: Pools) -> None:
    """The control of every test that uses it: an early reader, or an early new owner, meets NaN."""
    device_pool, host_pool = pools
    before = device_pool.clone()
    engine = ChaosCopy(device_pool, host_pool, random.Random(1), max_delay=5)
    engine.start(tuple(BlockCopy(i, i, ((i, i),)) for i in range(6)), ())
    assert host_pool[:6].isnan().all()
    named: set[int] = set()
    for _ in range(10):
        named.update(engine.poll())
        for i in range(6):
            assert same_bits(host_pool[i], before[i]) == (i in named)
            assert bool(device_pool[i].isnan().all()) == (i in named)
    assert named == set(range(6))
    assert engine.num_late > 0


@pytest.mark.parametrize(
    ("out", "into", "message"),
    [
        ([((12, 0),)], [], "source is outside"),
        ([((0, 16),)], [], "destination is outside"),
        ([((-1, 0),)], [], "source is outside"),
        ([], [((16, 0),)], "source is outside"),
        ([], [((0, 12),)], "destination is outside"),
        ([((0, 3), (1, 3))], [], "destination of two"),
        ([((0, 3),), ((1, 3),)], [], "destination of two"),
        ([], [((0, 3),), ((1, 3),)], "destination of two"),
        ([((3, 0),)], [((5, 3),)], "device block is copied out and overwritten"),
        ([((3, 5),)], [((5, 4),)], "host block is copied in and overwritten"),
    ],
)
@pytest.mark.parametrize("name", list(ENGINES))
def test_copies_that_disagree_about_a_block_are_a_bug(
    pools: Pools,
    name: str,
    out: list[tuple[tuple[int, int], ...]],
    into: list[tuple[tuple[int, int], ...]],
    message: str,
) -> None:
    device_pool, host_pool = pools
    before = device_pool.clone()
    engine = ENGINES[name](device_pool, host_pool)
    with pytest.raises(AssertionError, match=message):
        engine.start(
            tuple(BlockCopy(i, i, pairs) for i, pairs in enumerate(out)),
            tuple(BlockCopy(10 + i, i, pairs) for i, pairs in enumerate(into)),
        )
    assert same_bits(device_pool, before)  # nothing is half done
    assert engine.poll() == []


def test_neighbours_on_both_sides_go_as_one() -> None:
    assert list(runs(((4, 9), (2, 7), (3, 8), (5, 1), (6, 3), (7, 4)))) == [(2, 7, 3), (5, 1, 1), (6, 3, 2)]
    assert list(runs(())) == []
    rng = random.Random(5)
    for _ in range(50):
        pairs = list(zip(rng.sample(range(20), 8), rng.sample(range(20), 8), strict=True))
        spread = [(s + i, d + i) for s, d, count in runs(pairs) for i in range(count)]
        assert sorted(spread) == sorted(pairs)


def test_the_canary_sees_changed_bytes_and_swapped_words(pools: Pools) -> None:
    device_pool, host_pool = pools
    engine, canary = SyncCopy(device_pool, host_pool), KVCanary(device_pool)
    out = (BlockCopy(0, 7, ((0, 4), (1, 9))),)
    canary.start(out, ())
    engine.start(out, ())
    assert canary.done(engine.poll()) == {}
    content = host_pool.view(torch.uint8).view(NUM_HOST, -1)
    rng = random.Random(2)

    def come_back() -> dict[int, str]:
        into = (BlockCopy(rng.randrange(1 << 40), 7, ((4, 2), (9, 5))),)
        canary.start((), into)
        engine.start((), into)
        return canary.done(engine.poll())

    assert come_back() == {}
    for _ in range(40):
        block, at, bit = rng.choice([4, 9]), rng.randrange(content.shape[1]), 1 << rng.randrange(8)
        content[block, at] ^= bit
        assert come_back() == {7: f"KV canary: 1 of 2 blocks changed between swap-out and swap-in (host block {block})"}
        content[block, at] ^= bit
    words = host_pool.view(torch.int32).view(NUM_HOST, -1)
    words[4, 3], words[4, 90] = words[4, 90].clone(), words[4, 3].clone()
    assert "host block 4" in come_back()[7]


def test_the_canary_has_nothing_to_say_of_sequences_that_have_ended(pools: Pools) -> None:
    canary = KVCanary(pools[0])
    canary.start((BlockCopy(0, 7, ((0, 4),)),), ())
    canary.start((), (BlockCopy(1, 7, ((4, 2),)), BlockCopy(2, 8, ((4, 3),))))
    canary.forget(7)
    assert list(canary.done([0, 1, 2])) == [8]
