"""What holds for a request while it waits for memory: its deadline, its cache elsewhere, and the time that it took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from disaggregated_inference.errors import DeadlineExceeded, KVMemoryFull, PeerFailed
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.generation import Generation, GenerationParams
from disaggregated_inference.node.prefill import PrefillNode
from tests.conftest import Pair, until
from tests.node.test_batching import nothing_left
from tests.support.handoff import prompt_of


@contextmanager
def no_memory(node: DecodeNode | PrefillNode) -> Iterator[None]:
    admission = node.kv_memory.admission
    claim = admission.ask(admission.limit_bytes, 1, lambda claim: None, lambda error: None, 0)
    yield
    admission.release(claim)


def rules(queue_s: float, timeout_s: float = 60.0) -> GenerationParams:
    return GenerationParams(max_tokens=4, queue_s=queue_s, timeout_s=timeout_s)


def test_a_deadline_in_line_is_a_deadline(nodes: Callable[..., Pair]) -> None:
    prefill, decode = pair = nodes()
    context, reading = prefill.begin(prompt_of(50))
    reading.result(20)
    with no_memory(decode):
        with pytest.raises(DeadlineExceeded, match=r"within 0.4 s, and still in line for KV memory"):
            list(decode.read_and_write(prompt_of(5), rules=rules(30, timeout_s=0.4)))
        with pytest.raises(KVMemoryFull):
            list(decode.read_and_write(prompt_of(5), rules=rules(0.4)))
        with pytest.raises(DeadlineExceeded):
            list(decode.fetch_and_write(context, rules=rules(30, timeout_s=0.4)))
        assert until(lambda: prefill.book.endings.cancelled == 1), "nobody will come for it"
    with no_memory(prefill), pytest.raises(DeadlineExceeded):
        prefill.begin(prompt_of(5), wait_s=30, timeout_s=0.4)[1].result(5)
    assert until(lambda: nothing_left(pair))


def test_who_is_refused_has_waited(nodes: Callable[..., Pair]) -> None:
    _, decode = nodes()
    ended: list[Generation] = []
    decode.on_end = lambda answer, error: ended.append(answer)
    with no_memory(decode), pytest.raises(KVMemoryFull):
        list(decode.read_and_write(prompt_of(5), rules=rules(0.4)))
    list(decode.read_and_write(prompt_of(5), rules=rules(0)))
    assert ended[0].metrics.admission_time > 0.3
    assert ended[1].metrics.admission_time < ended[0].metrics.admission_time


def test_a_lease_is_renewed_in_line(nodes: Callable[..., Pair]) -> None:
    """For as long as it waits; and whoever gave up waiting has not spent the ticket."""
    prefill, decode = nodes(lease_s=3)  # a busy machine may be late by two seconds
    context, reading = prefill.begin(prompt_of(50))
    reading.result(20)
    with no_memory(decode):
        with pytest.raises(KVMemoryFull):
            list(decode.fetch_and_write(context, rules=rules(4.5)))
        answer = decode.fetch_and_write(context, rules=rules(30))
        time.sleep(4.5)
    assert len(list(answer)) == 4
    assert until(lambda: prefill.book.endings.fetched == 1)
    assert prefill.book.endings.expired == 0


@pytest.mark.parametrize("gone", ["cancelled", "failed"])
def test_nobody_waits_for_a_cache_that_is_gone(gone: str, nodes: Callable[..., Pair]) -> None:
    prefill, decode = pair = nodes(lease_s=1.0)
    with no_memory(prefill), no_memory(decode):
        context, _ = prefill.begin(prompt_of(50), wait_s=30 if gone == "cancelled" else 0.2)
        answer = decode.fetch_and_write(context, rules=rules(30))
        if gone == "cancelled":
            prefill.book.cancel(context.ticket)
        started = time.monotonic()
        with pytest.raises(PeerFailed, match="no such ticket" if gone == "cancelled" else "no KV memory within"):
            list(answer)
        assert time.monotonic() - started < 10
    assert until(lambda: nothing_left(pair))
