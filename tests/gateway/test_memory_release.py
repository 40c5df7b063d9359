"""Memory that malloc keeps between blocks in use goes back to the system, and garbage is collected."""

import asyncio
import subprocess
import sys
import weakref

import pytest

from disaggregated_inference.gateway import memory_release
from disaggregated_inference.timeouts import GatewayTimeouts

FRAGMENTED = """
from disaggregated_inference.bench.processes import resident_bytes
from disaggregated_inference.gateway.memory_release import release_free_memory
import os
blocks = [bytearray(os.urandom(20_000)) for _ in range(4_000)]
kept = blocks[::100]
del blocks
before = resident_bytes(os.getpid())
assert release_free_memory()
print(before - resident_bytes(os.getpid()))
"""


@pytest.mark.skipif(memory_release.malloc_trim() is None, reason="this C library has no malloc_trim")
def test_fragments_are_given_back() -> None:
    run = subprocess.run([sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 40_000_000


class Ring:
    """Only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_the_gateway_does_it_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        ring = weakref.ref(Ring())
        third, times, loop = asyncio.Event(), list[int](), asyncio.get_running_loop()

        def release() -> bool:
            times.append(1)
            if len(times) == 3:
                loop.call_soon_threadsafe(third.set)
            return True

        monkeypatch.setattr(memory_release, "release_free_memory", release)
        releasing = asyncio.create_task(memory_release.keep_releasing(GatewayTimeouts(release_memory_s=0.001)))
        await third.wait()
        assert ring() is None
        releasing.cancel()

    asyncio.run(run())
