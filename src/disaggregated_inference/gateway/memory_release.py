"""Gives memory back that nothing uses. asyncio leaves a few objects of each closed connection to the garbage collector,
which counts objects and not their bytes; and malloc keeps free bytes between those in use."""

import asyncio
import ctypes
import gc
from collections.abc import Callable

from disaggregated_inference.timeouts import GatewayTimeouts


def malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def release_free_memory() -> bool:
    """Whether there was anything to give back."""
    trim = malloc_trim()
    return bool(trim and trim(0))


async def keep_releasing(timeouts: GatewayTimeouts = GatewayTimeouts()) -> None:
    """malloc on a thread: it takes milliseconds. The garbage here, since the event loop's objects are part of it. What
    the start made stays, and is left out: walking over it would stop every stream for 20 ms."""
    gc.collect()
    gc.freeze()
    while True:
        await asyncio.sleep(timeouts.release_memory_s)
        gc.collect()
        await asyncio.to_thread(release_free_memory)
