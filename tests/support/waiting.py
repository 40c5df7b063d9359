"""Wait for a state instead of sleeping."""

import asyncio
import time
from collections.abc import Awaitable, Callable


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Poll until the condition holds or the time is up. Returns what the last call of the condition returned. A
    condition that takes long, such as a command, is asked half of the time: the machine is for what is waited for."""
    deadline = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if (holds := condition()) or time.monotonic() >= deadline:
            return holds
        time.sleep(max(0.01, time.monotonic() - asked))


async def until_async(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> bool:
    """The same for a condition that is awaited."""
    deadline = time.monotonic() + seconds
    while not (holds := await condition()) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return holds
