"""Requests of every kind: a fifth is cancelled at some moment, one in twenty fetches over a broken connection."""

import ctypes
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import msgspec
import pytest

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.errors import Cancelled, DisaggError, WireError
from disaggregated_inference.node.context import PrefillContext
from tests.support.mixed_requests import MixedRequest, mixed
from tests.support.node_pair import Pair, left, nothing_left
from tests.support.scale import CHAOS_REQUESTS
from tests.support.tcp_proxy import Fault, FaultyProxy
from tests.support.waiting import until

pytestmark = pytest.mark.slow

CLIENTS = 12
WARM_UP = CHAOS_REQUESTS // 3  # then threads, descriptors and memory must not grow
FAULTS: list[Fault] = ["cut", "silent", "flip"]


class Chaos:
    def __init__(self, pair: Pair, requests: list[MixedRequest], expected: list[list[int]]) -> None:
        self.pair, self.requests, self.expected = pair, requests, expected
        self.outcomes: list[str] = []
        self.longest_s = 0.0

    def one(self, number: int) -> None:
        draw = random.Random(number)
        asked = self.requests[number % len(self.requests)]
        fault = draw.choice(FAULTS) if draw.random() < 0.05 else None
        leaves_after = draw.random() * 0.12 if draw.random() < 0.2 else None
        started = time.monotonic()
        outcome = self._broken(asked, fault, draw) if fault else self._asked(asked, number, leaves_after)
        self.longest_s = max(self.longest_s, time.monotonic() - started)
        self.outcomes.append(outcome)

    def _asked(self, asked: MixedRequest, number: int, leaves_after: float | None) -> str:
        answer = asked.begin(self.pair)
        if leaves_after is not None:
            threading.Timer(leaves_after, answer.cancel).start()
        try:
            tokens = list(answer)
        except Cancelled:
            return "cancelled" if leaves_after is not None else "wrong: cancelled without a reason"
        except DisaggError as error:
            # the prefill node may report the cancellation of a fetch
            return "cancelled" if leaves_after is not None else f"wrong: {error}"
        right = tokens == self.expected[number % len(self.requests)]
        return "answered" if right else f"wrong: {tokens}"

    @contextmanager
    def _cleaned(self, context: PrefillContext) -> Iterator[None]:
        """Where the proxy lost the DONE frame, the ticket would stay until its lease ends, after this test."""
        try:
            yield
        finally:
            self.pair[0].tickets.cancel(context.ticket)

    def _broken(self, asked: MixedRequest, fault: Fault, draw: random.Random) -> str:
        """Over a connection that breaks during the transfer, with or without a second path."""
        prefill, decode = self.pair
        prompt = asked.prompt if len(asked.prompt) > 50 else asked.prompt * 20
        context, _ = prefill.submit(prompt)
        size = len(prompt) * decode.engine.spec.kv_token_bytes("float32")
        with (
            self._cleaned(context),
            FaultyProxy(prefill.kv_addresses[0], fault, int(size * draw.random() * 0.8)) as proxy,
        ):
            ways = (proxy.address, prefill.kv_addresses[0]) if draw.random() < 0.7 else (proxy.address,)
            answer = decode.generate_from_kv(
                msgspec.structs.replace(context, addresses=ways), GenerationParams(max_tokens=8)
            )
            try:
                tokens = list(answer)
            except WireError:
                return "failed as it must" if len(ways) == 1 else "wrong: there was a second path"
        if tokens != list(decode.generate_local(prompt, GenerationParams(max_tokens=8))):
            return "wrong: after a fault"
        return "answered over a broken line"


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured() -> tuple[int, int, int]:
    gc.collect()
    with suppress(OSError, AttributeError):  # what malloc keeps for later is not a leak
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return threading.active_count(), len(os.listdir("/proc/self/fd")), resident_bytes()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors where Linux lists them")
def test_hundreds_of_requests(nodes: Callable[..., Pair], record_property: Callable[[str, object], None]) -> None:
    requests = mixed(48, seed=4)
    lonely = nodes()
    expected = [list(asked.begin(lonely)) for asked in requests]
    pair = nodes(prefix_bytes=4 << 20)
    chaos = Chaos(pair, requests, expected)
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(chaos.one, range(WARM_UP)))
        assert until(lambda: nothing_left(pair)), left(pair)
        before = measured()
        list(pool.map(chaos.one, range(WARM_UP, CHAOS_REQUESTS)))
    assert until(lambda: nothing_left(pair)), left(pair)
    assert until(lambda: threading.active_count() <= before[0] + 1)
    assert until(lambda: measured()[1] <= before[1] + 2), "descriptors"
    after = measured()
    counts = {name: chaos.outcomes.count(name) for name in sorted(set(chaos.outcomes))}
    assert not [outcome for outcome in chaos.outcomes if outcome.startswith("wrong")], counts
    assert len(chaos.outcomes) == CHAOS_REQUESTS
    assert chaos.longest_s < 60
    assert counts["cancelled"] > CHAOS_REQUESTS // 10
    assert counts["answered over a broken line"] > CHAOS_REQUESTS // 70
    assert after[0] <= before[0] + 1, "threads"
    assert after[1] <= before[1] + 2, "descriptors"
    assert after[2] <= before[2] + (24 << 20), "memory"
    grown = (after[2] - before[2]) / 1e6
    record_property(
        "report", f"{CHAOS_REQUESTS:,} requests: {counts}, longest {chaos.longest_s:.1f} s, resident {grown:+.1f} MB"
    )
