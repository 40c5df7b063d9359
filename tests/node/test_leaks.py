"""Cancelled, forged, rounded or failed KV must not enter the prefix cache, and its memory must become free."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.errors import DisaggError, PeerFailed
from disaggregated_inference.kv_transfer import End, Outbox
from disaggregated_inference.node.context import prompt_hash
from tests.support.engines import ENGINE_OPTIONS, LoadTiny
from tests.support.handoff import alone, prompt_of
from tests.support.node_pair import Pair, nothing_left
from tests.support.node_process import Node
from tests.support.waiting import until

LOTS = 64 << 20
WRITER = list(ENGINE_OPTIONS)[-1]  # what the decode node of `nodes` runs on


def test_a_prompt_cancelled_in_its_last_chunk_is_not_cached(nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    """Its memory is freed after that chunk, and the next prompt uses it."""
    pair = nodes("torch", "torch", prefix_bytes=LOTS, chunk_tokens=500)
    prefill, decode = pair
    cancelled, other = prompt_of(400), prompt_of(400, seed=9)
    original = prefill.engine.run_prefill
    ticket: list[str] = []

    def cancelling(*arguments: Any) -> Any:
        done = original(*arguments)
        if ticket:
            prefill.tickets.cancel(ticket.pop())
        return done

    prefill.engine.run_prefill = cancelling  # type: ignore[method-assign, assignment]
    ticket.append("doomed")
    prefill.chunked_prefill.prefix_writer.threads.submit(time.sleep, 0.2)  # the prefix writer is behind
    _, reading = prefill.submit(cancelled, "doomed")
    with pytest.raises(DisaggError):
        reading.result(60)
    list(decode.generate_from_kv(prefill.submit(other)[0], GenerationParams(max_tokens=4)))
    time.sleep(0.4)
    again = [*cancelled, 7]
    answer = decode.generate_from_kv(prefill.submit(again)[0], GenerationParams(max_tokens=8))
    assert list(answer) == alone(tiny_engine("torch", "llama"), again, 8)
    assert answer.metrics.prefill_cached_tokens < 100
    assert until(lambda: nothing_left(pair))


def test_a_cached_prefix_is_sent_without_a_copy(nodes: Callable[..., Pair]) -> None:
    """Admission has reserved no memory for a copy."""
    prefill, decode = nodes("torch", "torch", prefix_bytes=LOTS)
    prompt = prompt_of(400)
    expected = list(decode.generate_from_kv(prefill.submit(prompt)[0], GenerationParams(max_tokens=4)))
    assert until(lambda: prefill.kv_memory.prefixes.stats().blocks > 0)
    context, reading = prefill.submit(prompt)
    assert reading.result(60).cached_tokens > 300
    arena: Any = prefill.engine.arena  # type: ignore[attr-defined]
    for piece in prefill.jobs[context.ticket].outbox.slices():
        assert np.shares_memory(piece.keys, arena.keys[piece.layer].numpy())
        assert np.shares_memory(piece.values, arena.values[piece.layer].numpy())
    assert list(decode.generate_from_kv(context, GenerationParams(max_tokens=4))) == expected


def test_a_prompt_that_is_fetched_at_once_counts_as_computed(
    nodes: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode node may fetch everything and end the ticket before the scheduler continues."""
    prefill, decode = nodes("torch", "torch", prefix_bytes=LOTS)
    prompt, finish = prompt_of(400), Outbox.finish
    first, _ = prefill.submit(prompt_of(50, seed=1))
    list(decode.generate_from_kv(first, GenerationParams(max_tokens=1)))  # the peer check

    def finish_and_stay(outbox: Outbox, end: End) -> None:
        finish(outbox, end)
        if end.prompt_tokens == len(prompt):
            assert until(lambda: prefill.tickets.endings["fetched"] > before)

    assert until(lambda: prefill.tickets.endings["fetched"] > 0)
    before = prefill.tickets.endings["fetched"]
    monkeypatch.setattr(Outbox, "finish", finish_and_stay)
    context, reading = prefill.submit(prompt)
    list(decode.generate_from_kv(context, GenerationParams(max_tokens=4)))
    assert reading.result(60).prompt_tokens == 400
    assert until(lambda: prefill.kv_memory.prefixes.stats().blocks > 0)


def test_rounded_kv_is_not_cached(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes(prefix_bytes=LOTS, codecs=("int8", "raw"))
    list(decode.generate_from_kv(prefill.submit(prompt_of(300))[0], GenerationParams(max_tokens=8)))
    assert decode.kv_memory.prefixes.stats().blocks == 0
    assert decode.generate_local(prompt_of(300), GenerationParams(max_tokens=1)).metrics.cached_tokens == 0


def test_kv_from_a_client_is_not_cached(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes(prefix_bytes=LOTS)
    context, reading = prefill.submit(prompt_of(300))
    reading.result(10)
    list(decode.generate_from_inline_kv(prefill.inline(context.ticket, 1 << 24), GenerationParams(max_tokens=8)))
    assert decode.kv_memory.prefixes.stats().blocks == 0


def test_a_forged_context_does_not_enter_the_prefix_cache(nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    """The KV of one prompt with the hash of another: the prefill node refuses it."""
    prefill, decode = nodes(prefix_bytes=LOTS)
    context, _ = prefill.submit(prompt_of(300))
    others = prompt_of(300, seed=5)
    forged = msgspec.structs.replace(context, prompt_hash=prompt_hash(others))
    with pytest.raises(PeerFailed, match="not the prompt of this ticket"):
        list(decode.generate_from_kv(forged, GenerationParams(max_tokens=8), tokens=others))
    assert list(decode.generate_local(others, GenerationParams(max_tokens=8))) == alone(
        tiny_engine(WRITER, "llama"), others, 8
    )


def test_a_failed_open_holds_no_memory(nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    pair = nodes(lease_s=1.0)
    prefill, decode = pair
    for node in pair:
        original = node.kv_memory.open

        def broken(*arguments: Any, **named: Any) -> Any:
            raise RuntimeError("no such file any more")

        node.kv_memory.open = broken  # type: ignore[method-assign]
        if node is prefill:
            with pytest.raises(DisaggError, match="no such file any more"):
                prefill.submit(prompt_of(50))[1].result(60)
        else:
            with pytest.raises(RuntimeError):
                list(decode.generate_local(prompt_of(50), GenerationParams(max_tokens=4)))
        node.kv_memory.open = original  # type: ignore[method-assign]
    assert until(lambda: nothing_left(pair))
    answer = decode.generate_from_kv(prefill.submit(prompt_of(50))[0], GenerationParams(max_tokens=4))
    assert list(answer) == alone(tiny_engine(WRITER, "llama"), prompt_of(50), 4)


def test_both_roles_do_not_deadlock(tiny_folder: Any) -> None:
    """KV that waits to be fetched leaves memory for the requests that fetch it."""
    arguments = ("--model", str(tiny_folder("llama")), "--dtype", "float32", "--engine", "torch", "--lease", "5")
    node = Node("both", *arguments, "--kv-memory", "4M", "--prefix-memory", "0")

    def ask(number: int) -> int:
        prompt = prompt_of(480, seed=number)
        status, read = node.ask("/prefill", {"tokens": prompt, "queue_s": 20})
        if status == 200:
            status = node.ask("/decode", {"context": read["context"], "max_tokens": 4, "queue_s": 20})[0]
        return status

    with ThreadPoolExecutor(30) as pool:
        assert list(pool.map(ask, range(30))) == [200] * 30
    assert node.stop() == 0
