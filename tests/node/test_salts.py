"""Nodes keep the prefixes of each salt apart: on both nodes, in every way that KV comes to be cached."""

from collections.abc import Callable

import pytest

from disaggregated_inference.api import DecodeRequest, GenerationParams, PrefillRequest
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.kv import Salt
from disaggregated_inference.node.generation import Generation
from tests.support.handoff import prompt_of
from tests.support.node_pair import Pair
from tests.support.waiting import until

CACHE_BYTES = 64 << 20
ANN, BOB = Salt("ann"), Salt("bob")


def params(salt: Salt, n: int = 1) -> GenerationParams:
    shared = salt.shared_tokens
    return GenerationParams(max_tokens=4, ignore_eos=True, n=n, cache_salt=salt.value, shared_tokens=shared)


def transferred(pair: Pair, prompt: list[int], salt: Salt) -> Generation:
    """When it is done, and both nodes have saved its KV."""
    prefill, decode = pair
    context, _ = prefill.submit(prompt, salt=salt)
    answer = decode.generate_from_kv(context, params(salt), tokens=prompt)
    list(answer)
    prefill.chunked_prefill.prefix_writer.threads.submit(int).result()
    assert until(lambda: decode.open_requests == 0)
    return answer


def found(answer: Generation) -> tuple[int, int]:
    """Prompt tokens that the prefill node and the decode node had."""
    return answer.metrics.prefill_cached_tokens, answer.metrics.cached_tokens


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_both_nodes_reuse_only_prefixes_of_the_same_salt(architecture: str, nodes: Callable[..., Pair]) -> None:
    pair = nodes(architecture=architecture, prefix_bytes=CACHE_BYTES)
    prompt = prompt_of(200)
    first = transferred(pair, prompt, ANN)
    assert found(first) == (0, 0)
    all_bytes, computed = first.metrics.kv_bytes, pair[0].engine.counters.prompt_tokens
    for salt in (BOB, Salt()):
        other = transferred(pair, prompt, salt)
        assert found(other) == (0, 0)
        assert other.metrics.kv_bytes == all_bytes, "nothing was left out of the transfer"
        computed += 200
        assert pair[0].engine.counters.prompt_tokens == computed, "the prefill node computed the whole prompt"
    again = transferred(pair, [*prompt, 9], ANN)
    assert min(found(again)) >= 200, "of its own salt, all was found"
    assert again.metrics.kv_bytes < all_bytes


def test_completions_and_local_prefills_are_kept_apart(nodes: Callable[..., Pair]) -> None:
    _, decode = nodes(prefix_bytes=CACHE_BYTES)
    prompt = prompt_of(100)
    answer = decode.generate_local(prompt, params(ANN, n=2))
    written = [event.token for event in answer.events() if event.choice == 0]
    assert until(lambda: decode.open_requests == 0)
    longer = [*prompt, *written, 9]
    for salt, expected in ((BOB, 0), (Salt(), 0), (ANN, 103)):
        later = decode.generate_local(longer, params(salt))
        list(later)
        assert later.metrics.cached_tokens == expected
        assert until(lambda: decode.open_requests == 0)


def test_named_tokens_are_shared_and_no_more(nodes: Callable[..., Pair]) -> None:
    pair = nodes(prefix_bytes=CACHE_BYTES)
    prompt = prompt_of(200)
    assert found(transferred(pair, prompt, ANN._replace(shared_tokens=150))) == (0, 0)
    assert found(transferred(pair, prompt, BOB._replace(shared_tokens=150))) == (128, 128), "two blocks of 64"
    assert found(transferred(pair, prompt, Salt("cy"))) == (0, 0), "the others need not share it"


@pytest.mark.parametrize("salt", ["a b", "a\n", "ä", "x" * 129, "a/b", "\0"])
@pytest.mark.parametrize("kind", [PrefillRequest, DecodeRequest])
def test_the_form_of_a_salt_is_checked(kind: type, salt: str) -> None:
    from disaggregated_inference.api.validation import convert

    with pytest.raises(BadRequest, match="cache_salt"):
        convert({"prompt": "x", "cache_salt": salt}, kind)
    for wrong in (-1, 1 << 40, 1.5):
        with pytest.raises(BadRequest, match="shared_tokens"):
            convert({"prompt": "x", "shared_tokens": wrong}, kind)
    convert({"prompt": "x", "cache_salt": "0123abcdef.A_Z:-", "shared_tokens": 5}, kind)
