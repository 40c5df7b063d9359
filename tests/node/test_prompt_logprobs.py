"""Prompt logprobs through a prefill node and a decode node, and from a decode node alone."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disaggregated_inference.api import GenerationParams, PrefillMetrics, PromptLogprob, PromptLogprobs
from disaggregated_inference.errors import DisaggError, PeerFailed, PeerGone, PromptLogprobsUnsupported, ProtocolError
from disaggregated_inference.kv import LogprobRows
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.generation import Generation, Item
from tests.support.handoff import prompt_of
from tests.support.node_pair import Pair, nothing_left
from tests.support.prompt_logprobs import check_prompt_logprobs, transformers_logprobs
from tests.support.tcp_proxy import Fault, FaultyProxy
from tests.support.waiting import until

MakeNodes = Callable[..., Pair]
TinyFolder = Callable[[str], Path]


def collected(generation: Generation) -> tuple[list[PromptLogprob], list[int]]:
    """The prompt's, in order and without a gap, and the completion's tokens, which come after them."""
    found: list[PromptLogprob] = []
    tokens: list[int] = []
    items: queue.SimpleQueue[Item] = queue.SimpleQueue()
    generation.listen(items.put)
    while (item := items.get(timeout=60)) is not None:
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, PromptLogprobs):
            assert not tokens
            assert item.start == generation.params.scored_tokens + len(found)
            found += item.tokens
        elif token := getattr(item, "token", None):
            tokens.append(token)
    return found, tokens


def handed_over(
    pair: Pair, prompt: list[int], alternatives: int | None = 2, of_prefill: int | None = 2, **more: Any
) -> Generation:
    prefill, decode = pair
    submitted: tuple[PrefillContext, Future[PrefillMetrics]] = prefill.submit(
        prompt, prompt_logprobs=of_prefill, scored_tokens=more.get("scored_tokens", 0)
    )
    params = GenerationParams(max_tokens=3, prompt_logprobs=alternatives, **more)
    return decode.generate_from_kv(submitted[0], params, tokens=prompt)


@pytest.mark.parametrize("length", [1, 2, 77, 78, 300])
def test_a_prefill_node_scores_and_the_decode_node_passes_on(
    nodes: MakeNodes, tiny_folder: TinyFolder, length: int
) -> None:
    """At chunk borders too: chunks have 77 tokens."""
    pair, prompt = nodes(), prompt_of(length)
    found, tokens = collected(handed_over(pair, prompt))
    check_prompt_logprobs(found, transformers_logprobs(tiny_folder("llama"), prompt), prompt, 2)
    assert tokens == list(pair[1].generate_local(prompt, GenerationParams(max_tokens=3)))
    assert until(lambda: nothing_left(pair))


def test_each_prompt_token_is_computed_once_though_it_is_in_the_prefix_cache(
    nodes: MakeNodes, tiny_folder: TinyFolder
) -> None:
    pair, prompt = nodes(prefix_bytes=64 << 20), prompt_of(300)
    prefill, decode = pair
    assert list(handed_over(pair, prompt, None, None))
    assert until(lambda: len(prefill.tickets) == 0)
    before = [node.engine.counters.prompt_tokens for node in pair]
    generation = handed_over(pair, prompt)
    found, _ = collected(generation)
    check_prompt_logprobs(found, transformers_logprobs(tiny_folder("llama"), prompt), prompt, 2)
    after = [node.engine.counters.prompt_tokens for node in pair]
    assert [now - then for now, then in zip(after, before, strict=True)] == [300, 0]
    metrics = generation.metrics
    assert metrics.prefill_cached_tokens == 0
    assert metrics.cached_tokens > 0, "the decode node's own KV is good all the same"
    local = decode.generate_local(prompt, GenerationParams(max_tokens=3, prompt_logprobs=2))
    found, _ = collected(local)
    check_prompt_logprobs(found, transformers_logprobs(tiny_folder("llama"), prompt), prompt, 2)
    assert local.metrics.cached_tokens == 0
    assert decode.engine.counters.prompt_tokens - after[1] == 300
    assert list(decode.generate_local(prompt, GenerationParams(max_tokens=3))), "others use the cache"
    assert decode.engine.counters.prompt_tokens - after[1] < 350


@pytest.mark.parametrize("scored", [1, 120, 299, 300])
def test_an_attempt_after_a_failure_sends_what_is_missing(
    nodes: MakeNodes, tiny_folder: TinyFolder, scored: int
) -> None:
    pair, prompt = nodes(prefix_bytes=64 << 20), prompt_of(300)
    expected = transformers_logprobs(tiny_folder("llama"), prompt)
    first, _ = collected(handed_over(pair, prompt))
    for generation in (
        handed_over(pair, prompt, scored_tokens=scored),
        pair[1].generate_local(prompt, GenerationParams(max_tokens=1, prompt_logprobs=2, scored_tokens=scored)),
    ):
        rest, tokens = collected(generation)
        assert len(rest) == 300 - scored
        assert tokens
        check_prompt_logprobs(first[:scored] + rest, expected, prompt, 2)


def test_prefill_and_decode_must_ask_for_the_same(nodes: MakeNodes) -> None:
    pair, prompt = nodes(lease_s=1.0), prompt_of(50)
    for of_prefill in (None, 1):
        with pytest.raises(PeerFailed, match="give /prefill the same prompt_logprobs as /decode"):
            collected(handed_over(pair, prompt, 2, of_prefill))
    found, tokens = collected(handed_over(pair, prompt, None, 2))
    assert (found, len(tokens)) == ([], 3), "nothing is sent that was not asked for"
    assert until(lambda: nothing_left(pair))


def test_an_engine_that_cannot_refuses_before_it_computes(nodes: MakeNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, prompt = nodes(), prompt_of(50)
    for node in pair:
        monkeypatch.setattr(node.engine, "prompt_logprobs", False)
    with pytest.raises(PromptLogprobsUnsupported, match="computes no prompt logprobs"):
        pair[0].submit(prompt, prompt_logprobs=1)
    with pytest.raises(PromptLogprobsUnsupported, match="computes no prompt logprobs"):
        pair[1].generate_local(prompt, GenerationParams(max_tokens=1, prompt_logprobs=1))
    assert until(lambda: nothing_left(pair))


@pytest.mark.parametrize("fault", ["cut", "flip"])
def test_a_connection_that_breaks_is_resumed(nodes: MakeNodes, tiny_folder: TinyFolder, fault: Fault) -> None:
    """In the middle of the logprobs: 20 alternatives make them a third of all bytes."""
    prefill, decode = nodes(streams=1)
    prompt = prompt_of(300)
    assert list(handed_over((prefill, decode), prompt, None, None)), "the peer check is done"
    with FaultyProxy(prefill.kv_addresses[0], fault, 100_000, heals=True) as proxy:
        context, _ = prefill.submit(prompt, prompt_logprobs=20)
        context = msgspec.structs.replace(context, addresses=(proxy.address,))
        params = GenerationParams(max_tokens=3, prompt_logprobs=20)
        generation = decode.generate_from_kv(context, params, tokens=prompt)
        found, tokens = collected(generation)
        assert proxy.struck.is_set()
    check_prompt_logprobs(found, transformers_logprobs(tiny_folder("llama"), prompt), prompt, 20)
    assert len(tokens) == 3
    assert until(lambda: nothing_left((prefill, decode)))


def test_a_prefill_node_that_is_gone_fails_the_request(nodes: MakeNodes) -> None:
    prefill, decode = nodes()
    prompt = prompt_of(300)
    assert list(handed_over((prefill, decode), prompt, None, None))
    with FaultyProxy(prefill.kv_addresses[0], "cut", 50_000) as proxy:
        context, _ = prefill.submit(prompt, prompt_logprobs=20)
        context = msgspec.structs.replace(context, addresses=(proxy.address,))
        params = GenerationParams(max_tokens=3, prompt_logprobs=20)
        with pytest.raises(PeerGone):
            collected(decode.generate_from_kv(context, params, tokens=prompt))


def _gap(rows: LogprobRows) -> LogprobRows | None:
    return None if rows.start > 77 else rows


def _nan(rows: LogprobRows) -> LogprobRows:
    return LogprobRows(rows.start, rows.logprobs * float("nan"), rows.top_tokens, rows.top_logprobs)


def _beyond(rows: LogprobRows) -> LogprobRows:
    return LogprobRows(rows.start, rows.logprobs, rows.top_tokens + 10**6, rows.top_logprobs)


def _shifted(rows: LogprobRows) -> LogprobRows:
    return LogprobRows(rows.start + 1, rows.logprobs, rows.top_tokens, rows.top_logprobs)


def _outside(rows: LogprobRows) -> LogprobRows:
    return LogprobRows(1 << 30, rows.logprobs, rows.top_tokens, rows.top_logprobs)


def _fewer_alternatives(rows: LogprobRows) -> LogprobRows:
    return LogprobRows(rows.start, rows.logprobs, rows.top_tokens[:, :1].copy(), rows.top_logprobs[:, :1].copy())


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (_gap, "the logits came after logprobs of 78 of the prompt's 200 tokens"),
        (_nan, "not logarithms of probabilities"),
        (_beyond, "a token beyond the vocabulary of 512"),
        (_shifted, "continue at token 2, 1 have arrived"),
        (_outside, "logprobs of 77 tokens from"),
        (_fewer_alternatives, "a LOGPROBS frame of .* bytes, .* expected"),
    ],
)
def test_a_prefill_node_that_sends_wrong_logprobs(
    nodes: MakeNodes, monkeypatch: pytest.MonkeyPatch, lie: Callable[[LogprobRows], LogprobRows | None], why: str
) -> None:
    """The request fails with the reason, never with a hole; nothing is left, and the next one works."""
    from disaggregated_inference.kv_transfer.sender import Outbox

    pair, prompt, honest = nodes(), prompt_of(200), Outbox.put_logprobs

    def put(outbox: Outbox, rows: LogprobRows) -> None:
        if wrong := lie(rows):
            honest(outbox, wrong)

    with monkeypatch.context() as patched:
        patched.setattr(Outbox, "put_logprobs", put)
        with pytest.raises(ProtocolError, match=why) as caught:
            collected(handed_over(pair, prompt))
    assert isinstance(caught.value, DisaggError)
    assert until(lambda: nothing_left(pair))
    assert len(collected(handed_over(pair, prompt))[0]) == 200
