"""Prompt logprobs of a request over all its attempts: complete, in order and right, or an error with the reason."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from disaggregated_inference.api import PromptLogprob, PromptLogprobs
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import BadRequest, ClusterError
from disaggregated_inference.orchestrator.leg_errors import LegFailed
from disaggregated_inference.orchestrator.prompt_logprobs import PromptLogprobsState
from tests.support.cluster import Process, config_of
from tests.support.handoff import prompt_of
from tests.support.waiting import until

MODEL = "simulated:tiny"
PROMPT = prompt_of(600, 900)


def piece(start: int, *tokens: int) -> PromptLogprobs:
    return PromptLogprobs(start=start, tokens=tuple(PromptLogprob(token=token, logprob=-1.0) for token in tokens))


def test_pieces_that_come_again_or_overlap_count_once() -> None:
    state = PromptLogprobsState(1, [5, 6, 7, 8])
    assert state.params() == {"prompt_logprobs": 1, "scored_tokens": 0}
    assert state.take(piece(0, 5, 6), "d") == piece(0, 5, 6)
    assert state.take(piece(0, 5, 6), "d") is None
    assert state.params()["scored_tokens"] == 2
    with pytest.raises(LegFailed, match="2 of 4 came before the completion"):
        state.require_complete("d")
    assert state.take(piece(1, 6, 7, 8), "d") == piece(2, 7, 8)
    state.require_complete("d")
    assert (state.complete, state.params(), state.scored_tokens) == (True, {}, None)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (piece(1, 6), "tokens 1 to 2, after 0 of 3"),
        (piece(0, 5, 6, 7, 8), "tokens 0 to 4, after 0 of 3"),
        (piece(0, 5, 7), "they are of other tokens"),
    ],
)
def test_a_node_that_sends_others_has_failed(wrong: PromptLogprobs, why: str) -> None:
    with pytest.raises(LegFailed, match=f"its prompt logprobs are not those of this prompt: {why}"):
        PromptLogprobsState(0, [5, 6, 7]).take(wrong, "d")


def test_none_are_expected_where_none_were_asked_for() -> None:
    state = PromptLogprobsState(None, [5])
    state.require_complete("d")
    with pytest.raises(LegFailed):
        state.take(piece(0, 5), "d")


def simulated(name: str, role: str) -> Process:
    pace = "custom:prefill=500,decode=200"
    return Process(name, role, "simulated", MODEL, "--profile", pace, "--chunk", "50", "--lease", "10")


@contextmanager
def running(*made: Process) -> Iterator[DisaggregatedClient]:
    try:
        for node in made:
            node.ready()
        with DisaggregatedClient(config_of(*made)) as client:
            assert until(lambda: client.health()["verdict"] == "all up")
            yield client
    finally:
        for node in made:
            node.end()


def asked(**more: Any) -> dict[str, Any]:
    return {"tokens": PROMPT, "max_tokens": 3, "temperature": 0, "prompt_logprobs": 2, "ignore_eos": True} | more


@pytest.fixture(scope="module")
def expected() -> tuple[PromptLogprob, ...]:
    with running(simulated("d", "decode")) as client:
        return client.complete(**asked(timeout=60)).prompt_logprobs


@pytest.mark.slow
def test_the_result_is_typed(expected: tuple[PromptLogprob, ...]) -> None:
    assert [each.token for each in expected] == PROMPT
    assert expected[0].logprob is None
    assert all(each.logprob is not None and len(each.top_logprobs) == 2 for each in expected[1:])
    with running(simulated("p", "prefill"), simulated("d", "decode")) as client:
        _, metrics = client.generate(**asked(n=2, temperature=1.0, seed=1))
        assert metrics["method"] == "disaggregated_simulated"
        found = metrics["prompt_logprobs"]
        assert [each["logprob"] for each in found] == [each.logprob for each in expected]
        assert len(metrics["choices"]) == 2
        for wrong, why in (({"prompt_logprobs": 21}, "at most 20"), ({"prompt_logprobs": "1"}, "Expected `int")):
            with pytest.raises(BadRequest, match=why):
                client.complete(**asked(**wrong))


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["one of two prefill nodes", "the only prefill node", "the decode node"])
def test_a_node_that_dies_leaves_no_hole(dies: str, expected: tuple[PromptLogprob, ...]) -> None:
    """In the middle of the prompt. The next attempt asks for the rest."""
    count = {"one of two prefill nodes": (2, 1), "the only prefill node": (1, 1), "the decode node": (1, 2)}[dies]
    readers = [simulated(f"p{number}", "prefill") for number in range(count[0])]
    writers = [simulated(f"d{number}", "decode") for number in range(count[1])]
    with running(*readers, *writers) as client:
        found: list[PromptLogprob] = []
        tokens: list[int] = []
        killed = False
        for delta in client.stream(**asked()):
            if delta.prompt_logprobs:
                assert not tokens
                assert delta.prompt_logprobs.start == len(found), "without a gap, and nothing twice"
                found += delta.prompt_logprobs.tokens
                if len(found) > 1 and not killed:
                    candidates = writers if dies == "the decode node" else readers
                    next(node for node in candidates if node.status()["waiting"]).kill()
                    killed = True
            tokens += [] if delta.token is None else [delta.token]
            metrics = delta.metrics
        assert metrics
        assert killed
        assert 1 < len(metrics["failovers"]) + 1 <= 3
        assert metrics["method"] == ("fallback" if dies == "the only prefill node" else "disaggregated_simulated")
        assert len(tokens) == 3
    assert tuple(found) == expected


@pytest.mark.slow
def test_a_request_without_fallback_fails_with_the_reason() -> None:
    reader, writer = simulated("p", "prefill"), simulated("d", "decode")
    with running(reader, writer), DisaggregatedClient(config_of(reader, writer, fallback=False, retries=0)) as client:
        deltas = client.stream(**asked())
        assert next(deltas).prompt_logprobs
        assert next(deltas).prompt_logprobs
        reader.kill()
        with pytest.raises(ClusterError, match=r"does not answer|lost the peer"):
            list(deltas)
