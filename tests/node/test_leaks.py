"""What a node must not remember, and what must not stay behind: each gave a wrong answer or held memory once."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from disaggregated_inference.errors import DisaggError, PeerFailed
from disaggregated_inference.kv_transfer import End, Outbox
from disaggregated_inference.node.context import prompt_hash
from disaggregated_inference.node.generation import GenerationParams
from tests.conftest import ENGINE_OPTIONS, LoadTiny, Pair, until
from tests.node.test_batching import nothing_left
from tests.node.test_serve_command import Node
from tests.support.handoff import alone, prompt_of

LOTS = 64 << 20
WRITER = list(ENGINE_OPTIONS)[-1]  # what the decode node of `nodes` runs on


def test_a_prompt_cancelled_in_its_last_chunk_is_not_kept(nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    """Its rows are given back at the end of that chunk, and the next prompt writes there."""
    pair = nodes("torch", "torch", prefix_bytes=LOTS, chunk_tokens=500)
    prefill, decode = pair
    cancelled, other = prompt_of(400), prompt_of(400, seed=9)
    original = prefill.engine._prefill
    ticket: list[str] = []

    def cancelling(*arguments: Any) -> Any:
        done = original(*arguments)
        if ticket:
            prefill.book.cancel(ticket.pop())
        return done

    prefill.engine._prefill = cancelling  # type: ignore[method-assign, assignment]
    ticket.append("doomed")
    prefill._keeper._threads.submit(time.sleep, 0.2)  # a keeper that is behind
    _, reading = prefill.begin(cancelled, "doomed")
    with pytest.raises(DisaggError):
        reading.result(5)
    list(decode.fetch_and_write(prefill.begin(other)[0], 4))
    time.sleep(0.4)
    again = [*cancelled, 7]
    answer = decode.fetch_and_write(prefill.begin(again)[0], 8)
    assert list(answer) == alone(tiny_engine("torch", "llama"), again, 8)
    assert answer.metrics.prefill_cached_tokens < 100
    assert until(lambda: nothing_left(pair))


def test_a_kept_beginning_is_handed_out_from_where_it_was_placed(nodes: Callable[..., Pair]) -> None:
    """Not as copies beside it, which nobody has promised memory for."""
    prefill, decode = nodes("torch", "torch", prefix_bytes=LOTS)
    prompt = prompt_of(400)
    expected = list(decode.fetch_and_write(prefill.begin(prompt)[0], 4))
    assert until(lambda: prefill.kv_memory.prefixes.seen().blocks > 0)
    context, reading = prefill.begin(prompt)
    assert reading.result(5).cached_tokens > 300
    arena: Any = prefill.engine.arena  # type: ignore[attr-defined]
    for piece in prefill._known(context.ticket).outbox.slices():
        assert np.shares_memory(piece.keys, arena.keys[piece.layer].numpy())
        assert np.shares_memory(piece.values, arena.values[piece.layer].numpy())
    assert list(decode.fetch_and_write(context, 4)) == expected


def test_a_prompt_fetched_before_its_reader_looks_up_was_read(
    nodes: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side may have it all, and end the ticket, before the engine's thread does its next thing."""
    prefill, decode = nodes("torch", "torch", prefix_bytes=LOTS)
    prompt, finish = prompt_of(400), Outbox.finish

    def finish_and_stay(outbox: Outbox, end: End) -> None:
        finish(outbox, end)
        if end.prompt_tokens == len(prompt):
            assert until(lambda: prefill.book.endings.fetched == 1)

    monkeypatch.setattr(Outbox, "finish", finish_and_stay)
    context, reading = prefill.begin(prompt)
    list(decode.fetch_and_write(context, 4))
    assert reading.result(5).prompt_tokens == 400
    assert until(lambda: prefill.kv_memory.prefixes.seen().blocks > 0)


def test_rounded_rows_are_not_kept(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes(prefix_bytes=LOTS, codecs=("int8", "raw"))
    list(decode.fetch_and_write(prefill.begin(prompt_of(300))[0], 8))
    assert decode.kv_memory.prefixes.seen().blocks == 0
    assert decode.read_and_write(prompt_of(300), 1).metrics.cached_tokens == 0


def test_rows_that_a_client_brings_are_not_kept(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes(prefix_bytes=LOTS)
    context, reading = prefill.begin(prompt_of(300))
    reading.result(10)
    list(decode.play_and_write(prefill.inline(context.ticket, 1 << 24), 8))
    assert decode.kv_memory.prefixes.seen().blocks == 0


def test_a_forged_context_poisons_nothing(nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    """The cache of one prompt, said to be that of another: the prefill node knows better."""
    prefill, decode = nodes(prefix_bytes=LOTS)
    context, _ = prefill.begin(prompt_of(300))
    others = prompt_of(300, seed=5)
    forged = msgspec.structs.replace(context, prompt_hash=prompt_hash(others))
    with pytest.raises(PeerFailed, match="not those of its prompt"):
        list(decode.fetch_and_write(forged, 8, tokens=others))
    assert list(decode.read_and_write(others, 8)) == alone(tiny_engine(WRITER, "llama"), others, 8)


def test_an_engine_that_cannot_open_holds_nothing(nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    pair = nodes(lease_s=1.0)
    prefill, decode = pair
    for node in pair:
        original = node.kv_memory.open

        def broken(*arguments: Any, **named: Any) -> Any:
            raise RuntimeError("no such file any more")

        node.kv_memory.open = broken  # type: ignore[method-assign]
        if node is prefill:
            with pytest.raises(RuntimeError):
                prefill.begin(prompt_of(50))[1].result(5)
        else:
            with pytest.raises(RuntimeError):
                list(decode.read_and_write(prompt_of(50), 4))
        node.kv_memory.open = original  # type: ignore[method-assign]
    assert until(lambda: nothing_left(pair))
    answer = decode.fetch_and_write(prefill.begin(prompt_of(50))[0], rules=GenerationParams(max_tokens=4))
    assert list(answer) == alone(tiny_engine(WRITER, "llama"), prompt_of(50), 4)


def test_both_roles_do_not_wait_for_each_other(tiny_folder: Any) -> None:
    """Caches that wait to be fetched leave room for those who fetch them."""
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
