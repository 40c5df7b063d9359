"""vLLM reads, other engines write: the tokens are those of the writing engine alone, in float32."""

from functools import partial
from itertools import pairwise

import pytest

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.vllm_connector.messages import ExportedRows
from disaggregated_inference.vllm_node.prefill import VllmPrefill
from tests.support.engines import ENGINE_OPTIONS, LLAMACPP
from tests.support.handoff import prompt_of
from tests.support.vllm_nodes import DecodeNodes, VllmHome, expected, hand_over
from tests.support.vllm_prompts import LENGTHS, chosen_prompt
from tests.support.vllm_server import BUSY_S, frozen
from tests.support.waiting import until as until_soon

pytestmark = pytest.mark.slow

until = partial(until_soon, seconds=BUSY_S)

TARGETS = (*ENGINE_OPTIONS, *LLAMACPP)
ANSWER = 16


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("length", LENGTHS)
def test_token_exact(length: int, target: str, architecture: str, home: VllmHome, decoders: DecodeNodes) -> None:
    """Over the wire, under tickets. llama.cpp gets chosen prompts: see tests/support/vllm_prompts.py."""
    decode, any_prompt = decoders[target], prompt_of(length, seed=TARGETS.index(target))
    prompt = chosen_prompt(architecture, length) if target == "llamacpp" else any_prompt
    before = decode.engine.counters.prompt_tokens - decode.kv_source.peer_checks.tokens_computed
    answer = hand_over(home, decode, prompt, ANSWER)
    assert list(answer) == expected(decode, prompt, ANSWER)
    assert answer.metrics.prompt_tokens_recomputed == 0
    assert decode.engine.counters.prompt_tokens - decode.kv_source.peer_checks.tokens_computed == before


def test_a_prefix_that_vllm_held_is_sent_from_its_pages(home: VllmHome, decoders: DecodeNodes) -> None:
    decode, base = decoders[TARGETS[0]], prompt_of(400, seed=11)
    for length in (300, 400):  # then the first 300 tokens, or most of them, are in vLLM's prefix cache
        prompt = base[:length]
        context, reading = home.node.submit(prompt)
        answer = decode.generate_from_kv(context, GenerationParams(max_tokens=ANSWER))
        assert list(answer) == expected(decode, prompt, ANSWER)
        cached = reading.result(BUSY_S).cached_tokens
    assert 0 < cached < 400
    again = hand_over(home, decode, prompt, ANSWER)
    assert list(again) == expected(decode, prompt, ANSWER)


def test_each_prompt_token_goes_through_the_model_once(home: VllmHome, decoders: DecodeNodes) -> None:
    prefill = prefill_of(home)
    assert until(lambda: not prefill.uncounted)
    before, prompt = home.node.engine.counters.prompt_tokens, prompt_of(333, seed=12)
    assert list(hand_over(home, decoders[TARGETS[0]], prompt, 4))
    assert until(lambda: not prefill.uncounted)
    assert home.node.engine.counters.prompt_tokens == before + 333


def test_sixteen_at_once(
    architecture: str, home: VllmHome, decoders: DecodeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all decode nodes. All sixteen are there before vLLM begins, and prompts share steps: rows of two prompts
    then come one after the other for one layer."""
    prefill = prefill_of(home)
    exported, seen = prefill.exported, []

    def export(worker: int, rows: ExportedRows) -> None:
        seen.append((rows.layer, rows.ticket))
        exported(worker, rows)

    monkeypatch.setattr(prefill, "exported", export)
    jobs = [(TARGETS[number % len(TARGETS)], prompt_of(20 + 37 * number, seed=13)) for number in range(16)]
    if LLAMACPP:
        chosen = (chosen_prompt(architecture, length) for length in LENGTHS)
        jobs = [(target, next(chosen) if target in LLAMACPP else prompt) for target, prompt in jobs]
    assert until(lambda: not prefill.uncounted)
    with frozen(home.server.engine()):
        answers = [hand_over(home, decoders[target], prompt, ANSWER) for target, prompt in jobs]
        assert until(lambda: len(prefill.uncounted) == 16)
    assert [list(each) for each in answers] == [expected(decoders[target], prompt, ANSWER) for target, prompt in jobs]
    shared = {frozenset((one, two)) for (layer, one), (other, two) in pairwise(seen) if layer == other and one != two}
    assert len(shared) >= 8, "most of sixteen prompts share a step with the next one"


def prefill_of(home: VllmHome) -> VllmPrefill:
    assert isinstance(home.node.chunked_prefill, VllmPrefill)
    return home.node.chunked_prefill


def test_layers_are_in_the_groups_that_the_hybrid_manager_makes(architecture: str, home: VllmHome) -> None:
    """Of sliding layers it keeps the window's blocks alone; off, as in test_embedded.py, there is one group."""
    assert home.border.engine
    assert sorted(home.border.engine.scheduler.windows) == ([0, 128] if architecture == "gpt_oss" else [0])


def test_nothing_is_left(home: VllmHome, decoders: DecodeNodes) -> None:
    """After all of the above: no ticket, no memory of the node, no block of vLLM."""
    assert until(lambda: not home.node.tickets and not home.node.jobs)
    assert until(lambda: home.node.scheduler.call(lambda: home.node.engine.kv_held_bytes) == 0)
    assert home.node.kv_memory.reserved_bytes == 0
    assert until(lambda: home.server.metric("vllm:num_requests_running") == 0)
    assert until(lambda: home.server.metric("vllm:kv_cache_usage_perc") == 0)
