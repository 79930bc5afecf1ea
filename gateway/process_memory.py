"""Memory of this process that nothing uses goes back to the operating system.

glibc keeps freed memory in up to eight arenas a core, and raises by itself the size from which an allocation is mapped
apart: after one body of 8 MiB, the next such bodies come from the heap and leave holes in it. Few arenas, a fixed size
and a trim when there is little to do keep the process at what it needs. With another C library these are no-ops.
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

TRIM_SECONDS = 10.0  # between two looks


def limit_arenas(arenas: int = _ARENAS) -> bool:
    """Call once at the process's start, before threads. True where the C library has this."""
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    options = (
        (_M_ARENA_MAX, arenas),
        (_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES),
        (_M_TRIM_THRESHOLD, _TRIM_FROM_BYTES),
    )
    return min([mallopt(option, value) for option, value in options]) == 1  # every option, whatever the others said


def trim() -> bool:
    """Give free memory back now. True where the C library has this."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is None:
        return False
    malloc_trim(0)
    return True


def _function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None)


async def keep_trimmed(activity: Callable[[], int], is_busy: Callable[[], bool]) -> None:
    """Trim at every look that finds something has happened since the last trim, until cancelled.

    `activity` is any number that changes when something was served. Unreachable cycles (a closed connection is one) are
    collected first, but never while `is_busy`: that stops the loop for some tens of milliseconds.
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
