"""Gives memory that this process no longer uses back to the operating system.

glibc keeps freed memory in up to eight arenas a core. It also raises, by itself, the size from which an allocation gets
a mapping of its own: after one body of 8 MiB, the next bodies of that size come from the heap and leave holes in it.
Three things keep the process small: few arenas, a fixed size for mappings, and a trim when there is little to do. With
another C library the functions here do nothing.
"""

import asyncio
import ctypes
import gc
from collections.abc import Callable

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MAPPED_FROM_BYTES = 256 * 1024
_TRIM_FROM_BYTES = 4 * 1024 * 1024  # free at the heap's end
_ARENAS = 2

TRIM_SECONDS = 10.0  # between two looks at `activity`


def limit_arenas(arenas: int = _ARENAS) -> bool:
    """Limit the number of arenas and fix the thresholds. Call it once at the process's start, before any thread.

    True when the C library took every option.
    """
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    options = (
        (_M_ARENA_MAX, arenas),
        (_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES),
        (_M_TRIM_THRESHOLD, _TRIM_FROM_BYTES),
    )
    # A list, so that every call is made, also after a call has failed.
    return min([mallopt(option, value) for option, value in options]) == 1


def trim() -> bool:
    """Give free memory back now. True where the C library has malloc_trim."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is None:
        return False
    malloc_trim(0)
    return True


def _function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None)


async def keep_trimmed(activity: Callable[[], int], is_busy: Callable[[], bool]) -> None:
    """Look every TRIM_SECONDS whether anything was served since the last look; if so, trim. Runs until cancelled.

    `activity` returns any number that changes when something was served. A trim first collects unreachable cycles (a
    closed connection is one), which stops the loop for some tens of milliseconds. So while `is_busy` the trim leaves
    the cycles, and a later look collects them.
    """
    seen = activity()
    has_garbage = False
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        now = activity()
        has_garbage |= now != seen
        if now == seen and not has_garbage:
            continue
        seen = now
        if not is_busy():
            gc.collect()
            has_garbage = False
        await asyncio.to_thread(trim)
