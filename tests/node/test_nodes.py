"""A prefill node and a decode node in one process, over real sockets."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.errors import (
    BadRequest,
    ContextTooLong,
    PeerFailed,
    PeerGone,
    TicketRefused,
    TokensRefused,
)
from disaggregated_inference.kv_transfer.frames import HEADER, Kind, decode_header
from disaggregated_inference.node.context import PrefillContext
from tests.support.engines import LoadTiny
from tests.support.handoff import alone, prompt_of
from tests.support.kv_frames import split_frames
from tests.support.node_pair import Pair
from tests.support.waiting import until

Folder = Callable[[str], Path]


def expected(tiny_engine: LoadTiny, writer: str, architecture: str, prompt: list[int], count: int = 16) -> list[int]:
    return alone(tiny_engine(writer, architecture), prompt, count)


@pytest.mark.parametrize("pair", [("torch", "mlx"), ("mlx", "torch"), ("torch", "torch"), ("mlx", "mlx")])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss"])
def test_token_exact_between_nodes(
    architecture: str, pair: tuple[str, str], nodes: Callable[..., Pair], tiny_engine: LoadTiny
) -> None:
    prefill, decode = nodes(*pair, architecture)
    prompt = prompt_of(300)
    context, reading = prefill.submit(prompt)
    answer = decode.generate_from_kv(PrefillContext.decode(context.encode()), GenerationParams(max_tokens=16))
    assert list(answer) == expected(tiny_engine, pair[1], architecture, prompt)
    assert reading.result(60).prompt_tokens == 300
    assert decode.engine.counters.prompt_tokens == decode.kv_source.peer_checks.tokens_computed == 48  # the canary's
    assert answer.metrics.prompt_tokens_recomputed == 0
    assert answer.metrics.completion_tokens == 16
    assert until(lambda: prefill.tickets.endings["fetched"] == 1)


@pytest.mark.parametrize("when", ["before the prefill ends", "after"])
def test_a_context_can_be_fetched_once(when: str, nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    prefill, decode = nodes()
    context, reading = prefill.submit(prompt_of(300))
    if when == "after":
        reading.result(10)
    assert list(decode.generate_from_kv(context, GenerationParams(max_tokens=16))) == expected(
        tiny_engine, "mlx", "llama", prompt_of(300)
    )
    assert until(lambda: len(prefill.tickets) == 0)
    with pytest.raises(PeerFailed, match="no such ticket"):
        list(decode.generate_from_kv(context, GenerationParams(max_tokens=16)))
    assert until(lambda: prefill.engine.arena.used_rows == 0)  # type: ignore[attr-defined]


def test_an_expired_lease_frees_the_kv(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes(lease_s=1.0)
    context, reading = prefill.submit(prompt_of(100))
    reading.result(10)
    assert prefill.engine.arena.used_rows == 100  # type: ignore[attr-defined]
    assert until(lambda: prefill.tickets.endings["expired"] == 1)
    assert until(lambda: prefill.engine.arena.used_rows == 0)  # type: ignore[attr-defined]
    with pytest.raises(PeerFailed, match="no such ticket"):
        list(decode.generate_from_kv(context, GenerationParams(max_tokens=4)))


def test_cancel_during_a_prefill(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes()
    context, reading = prefill.submit(prompt_of(4000))
    assert prefill.tickets.cancel(context.ticket)
    with pytest.raises(Exception, match="cancelled"):
        reading.result(10)
    assert until(lambda: prefill.engine.arena.used_rows == 0)  # type: ignore[attr-defined]
    with pytest.raises(PeerFailed):
        list(decode.generate_from_kv(context, GenerationParams(max_tokens=4)))


def test_local_prefill_on_the_decode_node(nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    _, decode = nodes()
    answer = decode.generate_local(prompt_of(300), GenerationParams(max_tokens=16))
    assert list(answer) == expected(tiny_engine, "mlx", "llama", prompt_of(300))
    assert answer.metrics.prompt_tokens_recomputed == 300


def test_the_prefill_node_is_gone(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes()
    context, _ = prefill.submit(prompt_of(100))
    prefill.close()
    with pytest.raises(PeerGone, match="does not answer"):
        list(decode.generate_from_kv(context, GenerationParams(max_tokens=4)))


def test_invalid_requests_are_refused_at_once(nodes: Callable[..., Pair]) -> None:
    prefill, decode = nodes()
    context, _ = prefill.submit(prompt_of(4000))
    with pytest.raises(ContextTooLong):
        decode.generate_from_kv(context, GenerationParams(max_tokens=1000))
    with pytest.raises(ContextTooLong):
        prefill.submit(prompt_of(4097))
    with pytest.raises(BadRequest, match="empty"):
        prefill.submit([])
    with pytest.raises(TokensRefused):
        prefill.submit([512])
    assert len(prefill.tickets) == 1, "a refused prompt leaves no ticket"
    with pytest.raises(TicketRefused, match="not a context of a prefill node"):
        PrefillContext.decode("nonsense")


def test_long_prompts_do_not_starve_short_ones(nodes: Callable[..., Pair]) -> None:
    prefill, _ = nodes()
    order: list[str] = []
    for name, length in (("long", 4000), ("short", 50)):
        _, reading = prefill.submit(prompt_of(length))
        reading.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
    assert until(lambda: len(order) == 2, 30)
    assert order == ["short", "long"]


def test_the_lease_starts_after_the_prefill(nodes: Callable[..., Pair]) -> None:
    """More prompts at once than can be computed within a lease: all are computed, and each lease starts at its end."""
    prefill, _ = nodes(lease_s=0.3, chunk_tokens=20)
    started = time.monotonic()
    readings = [prefill.submit(prompt_of(400))[1] for _ in range(20)]
    assert [reading.result(30).prompt_tokens for reading in readings] == [400] * 20
    assert time.monotonic() - started > 0.3, "the test is too fast to show anything"
    assert until(lambda: prefill.tickets.endings["expired"] == 20)
    assert until(lambda: prefill.engine.arena.used_rows == 0)  # type: ignore[attr-defined]


def test_slices_out_of_order_are_refused(nodes: Callable[..., Pair], tiny_engine: LoadTiny) -> None:
    """The slices of one layer in the wrong order; each frame alone is valid."""
    prefill, decode = nodes()
    context, reading = prefill.submit(prompt_of(300))
    reading.result(10)
    frames = split_frames(prefill.inline(context.ticket, 1 << 24))
    slices = [at for at, frame in enumerate(frames) if decode_header(frame[: HEADER.size]).kind is Kind.SLICE]
    first, second = slices[0], slices[4]  # four layers: the same layer, one chunk later
    right = expected(tiny_engine, "mlx", "llama", prompt_of(300))
    assert list(decode.generate_from_inline_kv(b"".join(frames), GenerationParams(max_tokens=16))) == right
    frames[first], frames[second] = frames[second], frames[first]
    with pytest.raises(BadRequest, match="a slice does not fit"):
        list(decode.generate_from_inline_kv(b"".join(frames), GenerationParams(max_tokens=16)))
    assert list(decode.generate_from_kv(context, GenerationParams(max_tokens=16))) == right
