"""What a node sends back: completions, logprobs, usage, metrics, errors."""

from typing import Any

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    code: str = "internal_error"
    message: str = "no reason given"
    param: str | msgspec.UnsetType = msgspec.UNSET  # the field of the request that is wrong


class ErrorBody(msgspec.Struct, frozen=True):
    """Every error response of a node."""

    error: ErrorDetail


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int | None  # None: the engine did not say
    completion_tokens: int
    total_tokens: int
    cached_tokens: int | msgspec.UnsetType = msgspec.UNSET


class GenerationMetrics(msgspec.Struct):
    """Seconds and counts of one request on one node. Not frozen, nor its children: the node counts in it with every
    token, and sends it when the request has ended."""

    prompt_tokens: int | None = None  # None: the engine did not say
    completion_tokens: int = 0
    queue_time: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    decode_speed: float = 0.0
    first_token_time: float = 0.0
    total_time: float = 0.0
    finish_reason: str = "length"
    seed: int | None = None  # of a sampled answer: the same seed gives the same answer


class DecodeMetrics(GenerationMetrics):
    """Of a node that imports KV. Transfer is *hidden* while the prompt is still being prefilled; what remains after the
    prefill node's computing has ended is *exposed*. Decode time begins when the whole KV is there.

    `fetch_time` is the whole fetch, with waiting for the prefill; `transfer_time` the seconds in which KV arrived,
    `hidden_transfer_time` those before the end of computing, `inject_time` the engine's own time for placing it."""

    cached_tokens: int = 0  # of the prompt, from this node's prefix cache
    prefill_cached_tokens: int = 0  # of the prompt, from the prefill node's prefix cache
    prompt_tokens_recomputed: int = 0
    kv_bytes: int = 0
    kv_codec: str = ""
    kv_paths: tuple[str, ...] = ()
    resumed: int = 0
    canary_time: float = 0.0
    admission_time: float = 0.0  # waiting for KV memory on this node
    fetch_time: float = 0.0
    first_slice_time: float = 0.0  # from the start of the fetch
    transfer_time: float = 0.0
    hidden_transfer_time: float = 0.0
    exposed_transfer_time: float = 0.0
    inject_time: float = 0.0
    batch_size: float = 0.0  # choices in a decode step, on average over its time; 0: there was no step

    @property
    def spared_tokens(self) -> int:
        """Prompt tokens that no node computed for this request. With a transfer, tokens that this node held and the
        prefill node computed all the same were not moved, but they were computed."""
        return self.prefill_cached_tokens if self.kv_paths else self.cached_tokens

    @property
    def usage(self) -> Usage:
        prompt = self.prompt_tokens or 0
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt + self.completion_tokens,
            cached_tokens=self.spared_tokens,
        )


class TextMetrics(GenerationMetrics):
    """Of a node that takes text and serves whole answers."""

    load_time: float = 0.0
    prefill_speed: float | None = None  # None: the engine may have held a part of the prompt, and does not say so


class ReportedMetrics(DecodeMetrics):
    """What the orchestrator reads: the metrics of either kind of node."""

    load_time: float = 0.0
    prefill_speed: float | None = None


class TopLogprob(msgspec.Struct, frozen=True):
    token: int
    logprob: float


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A token of the prompt. The first one has no logprob: no token is before it."""

    token: int
    logprob: float | None
    top_logprobs: tuple[TopLogprob, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The tokens of a prompt from position `start` on: a piece at a time, as chunks are prefilled, without a gap."""

    start: int
    tokens: tuple[PromptLogprob, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def after(self, known: int) -> "PromptLogprobs":
        """Without the tokens before position `known`."""
        cut = max(0, known - self.start)
        return self if not cut else PromptLogprobs(start=self.start + cut, tokens=self.tokens[cut:])


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: int
    logprob: float
    top_logprobs: tuple[TopLogprob, ...] = ()


class GeneratedChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of a request's answers, whole."""

    index: int
    text: str
    tokens: tuple[int, ...] | None  # None: from a node that takes and gives text
    finish_reason: str | None
    logprobs: tuple[TokenLogprob, ...] = ()
    thinking: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole answer: of `/decode` and `/generate` without a stream."""

    generated_text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    choices: tuple[GeneratedChoice, ...] = ()  # where there are several
    usage: Usage
    metrics: DecodeMetrics


class TextGenerateResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The same, of a node that takes and gives text."""

    generated_text: str
    tokens: None
    finish_reason: str | None
    thinking: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    usage: Usage
    metrics: TextMetrics
