"""Requests that wait for memory: deadline, lease of the KV, and measured time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.errors import DeadlineExceeded, KVMemoryFull, PeerFailed
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.prefill import PrefillNode
from tests.support.handoff import prompt_of
from tests.support.node_pair import Pair, nothing_left
from tests.support.waiting import until


@contextmanager
def no_memory(node: DecodeNode | PrefillNode) -> Iterator[None]:
    admission = node.kv_memory.admission
    claim = admission.request(admission.limit_bytes, 1, lambda claim: None, lambda error: None, 0)
    yield
    admission.release(claim)


def rules(queue_s: float, timeout_s: float = 60.0) -> GenerationParams:
    return GenerationParams(max_tokens=4, queue_s=queue_s, timeout_s=timeout_s)


def test_the_deadline_holds_while_waiting(nodes: Callable[..., Pair]) -> None:
    prefill, decode = pair = nodes()
    context, reading = prefill.submit(prompt_of(50))
    reading.result(20)
    with no_memory(decode):
        with pytest.raises(DeadlineExceeded, match=r"within 0.4 s, still waiting for KV memory"):
            list(decode.generate_local(prompt_of(5), rules(30, timeout_s=0.4)))
        with pytest.raises(KVMemoryFull):
            list(decode.generate_local(prompt_of(5), rules(0.4)))
        with pytest.raises(DeadlineExceeded):
            list(decode.generate_from_kv(context, rules(30, timeout_s=0.4)))
        assert until(lambda: prefill.tickets.endings["cancelled"] == 1), "the prefill node is told to free the KV"
    assert until(lambda: not prefill.kv_memory.reserved_bytes)
    with no_memory(prefill), pytest.raises(DeadlineExceeded):
        prefill.submit(prompt_of(5), wait_s=30, timeout_s=0.4)[1].result(60)
    assert until(lambda: nothing_left(pair))


def test_the_wait_of_a_refused_request_is_measured(nodes: Callable[..., Pair]) -> None:
    _, decode = nodes()
    ended: list[Generation] = []
    decode.on_end = lambda answer, error: ended.append(answer)
    with no_memory(decode), pytest.raises(KVMemoryFull):
        list(decode.generate_local(prompt_of(5), rules(0.4)))
    list(decode.generate_local(prompt_of(5), rules(0)))
    assert ended[0].metrics.admission_time > 0.3
    assert ended[1].metrics.admission_time < ended[0].metrics.admission_time


@pytest.mark.slow
def test_the_lease_is_renewed_while_waiting(nodes: Callable[..., Pair]) -> None:
    """As long as the request waits. A refused request does not use up the ticket."""
    prefill, decode = nodes(lease_s=3)  # a busy machine may be late by two seconds
    context, reading = prefill.submit(prompt_of(50))
    reading.result(20)
    with no_memory(decode):
        with pytest.raises(KVMemoryFull):
            list(decode.generate_from_kv(context, rules(4.5)))
        answer = decode.generate_from_kv(context, rules(30))
        time.sleep(4.5)
    assert len(list(answer)) == 4
    assert until(lambda: prefill.tickets.endings["fetched"] == 1)
    assert prefill.tickets.endings["expired"] == 0


@pytest.mark.parametrize("gone", ["cancelled", "failed"])
def test_a_request_does_not_wait_for_kv_that_is_gone(gone: str, nodes: Callable[..., Pair]) -> None:
    prefill, decode = pair = nodes(lease_s=1.0)
    with no_memory(prefill), no_memory(decode):
        context, _ = prefill.submit(prompt_of(50), wait_s=30 if gone == "cancelled" else 0.2)
        answer = decode.generate_from_kv(context, rules(30))
        if gone == "cancelled":
            prefill.tickets.cancel(context.ticket)
        started = time.monotonic()
        with pytest.raises(PeerFailed, match="no such ticket" if gone == "cancelled" else "no KV memory within"):
            list(answer)
        assert time.monotonic() - started < 25  # it may wait for 30
    assert until(lambda: nothing_left(pair))
