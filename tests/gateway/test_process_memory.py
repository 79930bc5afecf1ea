"""Memory goes back when there is little to do, and never in the way of what runs."""

import asyncio
import subprocess
import sys

import pytest

from gateway import process_memory
from tests.support.gateway.harness import eventually

pytestmark = pytest.mark.anyio

# Bodies' sizes, freed in an order that leaves holes: with glibc's defaults most of it stays.
_HOLES = """
import ctypes
from gateway import process_memory
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

{first}
malloc = ctypes.CDLL(None).malloc
free = ctypes.CDLL(None).free
malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for size in (8 << 20, 16 << 20):
    free(malloc(size))  # after these, glibc takes such sizes from the heap
before = resident()
held = [malloc(1 << 20) for _ in range(64)]
for pointer in held:
    ctypes.memset(pointer, 1, 1 << 20)
for pointer in held[:-1]:
    free(pointer)
print((resident() - before) >> 20)
{last}
print((resident() - before) >> 20)
"""


def stays(first: str, last: str) -> list[int]:
    """MiB that stay of 64: at once, and after `last`."""
    script = _HOLES.format(first=first, last=last)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.case("T12")
def test_when_freed_then_memory_goes_back() -> None:
    control = stays("pass", "pass")
    assert control[0] > 50, "the control: with the C library's own ways it stays"
    assert stays("assert process_memory.limit_arenas()", "pass")[0] <= 5
    assert stays("pass", "assert process_memory.trim()")[1] <= 5


@pytest.mark.case("T12")
async def test_when_nothing_happened_then_nothing_is_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    activity, is_busy, looks, trims, collections = 0, True, 0, 0, 0

    def look() -> int:
        nonlocal looks
        looks += 1
        return activity

    def trim() -> bool:
        nonlocal trims
        trims += 1
        return True

    def collect() -> int:
        nonlocal collections
        collections += 1
        return 0

    async def later(number: int) -> None:
        seen = looks
        await eventually(lambda: looks >= seen + number)

    monkeypatch.setattr(process_memory, "TRIM_SECONDS", 0)
    monkeypatch.setattr(process_memory, "trim", trim)
    monkeypatch.setattr(process_memory.gc, "collect", collect)
    task = asyncio.create_task(process_memory.keep_trimmed(look, lambda: is_busy))
    await later(5)
    assert (trims, collections) == (0, 0)
    activity += 1
    await later(3)
    assert trims >= 1 and collections == 0, "a collection would stop what runs"
    is_busy = False
    await eventually(lambda: collections == 1)
    await later(2)
    done = trims
    await later(5)
    assert (trims, collections) == (done, 1)
    task.cancel()
