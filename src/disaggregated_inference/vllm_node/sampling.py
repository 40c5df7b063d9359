"""Our sampling params as a request to vLLM's `/v1/completions`, and its logprobs as ours.

Text, stop strings and end tokens are this node's own work: vLLM gets `ignore_eos` and the model's end tokens as
`stop_token_ids`, so that defaults of its server change nothing.
"""

from collections.abc import Sequence
from typing import Any

from disaggregated_inference.api import GenerationParams, TopLogprob
from disaggregated_inference.errors import NotOffered, PromptLogprobsUnsupported
from disaggregated_inference.vllm_node.client import ChoicePiece

_SMALLEST_P = 1e-6  # vLLM's top_p is more than 0
_COLDEST = 0.01  # vLLM raises lower temperatures to this; they are greedy for all that matters
_SIGN = 1 << 63


def require_possible(params: GenerationParams) -> None:
    """What only this project's own sampler does the same way on every node."""
    if params.format is not None:
        raise NotOffered("structured output: a node in front of a vLLM does not offer it; send it to a decode node")
    if params.prompt_logprobs is not None:
        raise PromptLogprobsUnsupported("prompt logprobs: a node in front of a vLLM does not offer them")


def completion_body(
    params: GenerationParams, model: str, tokens: Sequence[int], max_tokens: int, eos: Sequence[int]
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(tokens),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": max_tokens,
        "n": params.n,
        "ignore_eos": True,
        "stop_token_ids": [] if params.ignore_eos else list(eos),
        "min_tokens": min(max(0, params.min_tokens - len(params.written)), max_tokens),
        "skip_special_tokens": False,
        **_drawing(params),
    }
    if params.logprobs is not None:
        body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.cache_salt:
        body["cache_salt"] = params.cache_salt
    return body


def _drawing(params: GenerationParams) -> dict[str, Any]:
    cold = params.temperature < _COLDEST
    return {
        "temperature": 0.0 if cold else params.temperature,
        "top_p": max(params.top_p, _SMALLEST_P),
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        **({} if params.seed is None or cold else {"seed": _signed(params.seed + params.choice)}),
    }


def _signed(seed: int) -> int:
    """In 64 bits with a sign, which is what vLLM takes."""
    return (seed + _SIGN) % (2 * _SIGN) - _SIGN


def logprobs_of(piece: ChoicePiece, at: int, wanted: int | None) -> tuple[float | None, tuple[TopLogprob, ...]]:
    """Of the token at place `at` of a piece: its own, and the likeliest, at most `wanted`."""
    if wanted is None or piece.logprobs is None:
        return None, ()
    own = piece.logprobs.token_logprobs[at]
    found = (piece.logprobs.top_logprobs or [None] * (at + 1))[at] or {}
    top = sorted(((value, -_token(name)) for name, value in found.items()), reverse=True)[:wanted]
    return own, tuple(TopLogprob(-token, value) for value, token in top)


def _token(name: str) -> int:
    return int(name.removeprefix("token_id:"))
