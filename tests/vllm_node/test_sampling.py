"""Our sampling params as vLLM's, and its logprobs as ours."""

import pytest

from disaggregated_inference.api import GenerationParams, OutputFormat, TopLogprob
from disaggregated_inference.errors import (
    BadRequest,
    DisaggError,
    EngineFailed,
    KVMemoryFull,
    NotOffered,
)
from disaggregated_inference.vllm_node.client import ChoicePiece, KeyRefused, TokenLogprobs, refusal
from disaggregated_inference.vllm_node.sampling import completion_body, logprobs_of, require_possible


def body(**params: object) -> dict[str, object]:
    return completion_body(GenerationParams(**params), "m", [1, 2], 9, (7, 8))  # type: ignore[arg-type]


def test_end_tokens_are_ours_whatever_the_servers_defaults_are() -> None:
    assert (body()["ignore_eos"], body()["stop_token_ids"]) == (True, [7, 8])
    assert body(ignore_eos=True)["stop_token_ids"] == []


def test_every_parameter_is_sent_since_servers_have_defaults() -> None:
    sent = body()
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["repetition_penalty"]) == (0.0, 1.0, 0, 1.0)
    assert "seed" not in sent
    assert "logprobs" not in sent
    assert sent["return_token_ids"] is True
    assert body(temperature=0.001)["temperature"] == 0.0, "vLLM would raise it to 0.01"
    assert body(temperature=1.0, top_p=0.0)["top_p"] == 1e-6


@pytest.mark.parametrize(("seed", "sent"), [(5, 5), (-1, -1), ((1 << 64) - 1, -1), (1 << 63, -(1 << 63))])
def test_seeds_fit_into_64_bits_with_a_sign(seed: int, sent: int) -> None:
    assert body(temperature=1.0, seed=seed)["seed"] == sent


def test_a_choice_that_is_generated_alone_has_its_own_seed() -> None:
    assert body(temperature=1.0, seed=5, choice=2)["seed"] == 7


def test_tokens_that_another_node_wrote_count_for_min_tokens() -> None:
    assert body(min_tokens=5, written=(1, 2, 3))["min_tokens"] == 2
    assert body(min_tokens=50)["min_tokens"] == 9, "vLLM refuses more than max_tokens"


def test_what_only_our_sampler_does_is_refused() -> None:
    for params in (GenerationParams(format=OutputFormat(type="json_object")), GenerationParams(prompt_logprobs=1)):
        with pytest.raises(NotOffered):
            require_possible(params)


def test_logprobs_are_the_likeliest_and_no_more_than_asked_for() -> None:
    top = {"token_id:4": -0.5, "token_id:9": -2.0, "token_id:3": -0.5, "token_id:1": -7.0}
    piece = ChoicePiece(token_ids=[1], logprobs=TokenLogprobs([-7.0], [top]))
    assert logprobs_of(piece, 0, 3) == (-7.0, (TopLogprob(3, -0.5), TopLogprob(4, -0.5), TopLogprob(9, -2.0)))
    assert logprobs_of(piece, 0, 0) == (-7.0, ())
    assert logprobs_of(piece, 0, None) == (None, ())


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, b'{"error": {"message": "top_p must be in (0, 1]", "code": 400}}', BadRequest),
        (401, b'{"error": "Unauthorized"}', KeyRefused),
        (500, b'{"error": {"message": "CUDA out of memory"}}', KVMemoryFull),
        (500, b"<html>", EngineFailed),
        (503, b"", EngineFailed),
    ],
)
def test_refusals_are_typed(status: int, body: bytes, kind: type[DisaggError]) -> None:
    assert type(refusal(status, body)) is kind
