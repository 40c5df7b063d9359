"""One generation by an Ollama, and what its counts and times say."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from disaggregated_inference.api import TextEvent, TextMetrics
from disaggregated_inference.errors import ContextTooLong, EngineFailed, EngineUnavailable, ModelUnsupported
from disaggregated_inference.ollama_node.client import COUNTS_ALL, HONOURS_TRUNCATE, GenerateChunk, version_of
from disaggregated_inference.ollama_node.node import OllamaNode
from disaggregated_inference.ollama_node.output import was_computed
from disaggregated_inference.ollama_node.requests import ParsedPrompt, TextRequest, WarmRequest

_MAX_TOKEN_BYTES = 8  # text with more bytes per token is very rare: this gives the least tokens of a text
_MIN_TOKEN_BYTES = 2  # and so is text with fewer: this many bytes per token of the window surely fit
_TOKEN_BYTES = 4  # usual
_CHAT_TOKEN_BYTES = 3  # usual, on the safe side: old versions drop chat messages without a trace
_IMAGE_TOKENS = 768  # Ollama's own estimate
_CUTS = (
    "this Ollama ({}) would cut the prompt silently. Version 0.12.6 or later refuses only what really does not fit;"
    " a larger --ollama-context helps if the model has the window"
)
_USER = {"role": "user", "content": "A"}
_ASSISTANT = {"role": "assistant", "content": "A"}


async def warm(node: OllamaNode, params: WarmRequest) -> TextMetrics:
    """Prefill a prompt, so that Ollama has it cached for requests with the same prefix. One token is generated: to
    Ollama, 0 means no limit."""
    generation = OllamaGeneration(node, params.one_token())
    async with aclosing(generation.pieces()) as pieces:
        async for _ in pieces:
            pass
    return generation.metrics


async def _require_continuable(node: OllamaNode) -> None:
    """The chat template either continues a last assistant message or closes it, and Ollama does not say which. A test
    shows it: a message of one letter adds one token, or the tokens of a whole message."""
    if node.continues is None:
        chats = [_USER], [_USER, _ASSISTANT]
        counts = [(await warm(node, WarmRequest(messages=chat))).prompt_tokens or 0 for chat in chats]
        node.continues = 0 < counts[1] - counts[0] <= 2
    if not node.continues:
        raise ModelUnsupported(
            f"Ollama's chat template of {node.ollama.model} closes assistant messages:"
            " this node cannot continue a completion that another node started"
        )


class OllamaGeneration:
    """One generation. Its `metrics` are complete after the last piece."""

    def __init__(self, node: OllamaNode, params: TextRequest) -> None:
        self._node, self._params, self._prompt = node, params, ParsedPrompt(params)
        self.metrics = TextMetrics(finish_reason="error")
        self._key, self._is_new = "", False

    async def pieces(self) -> AsyncGenerator[TextEvent, None]:
        started_at, node = time.perf_counter(), self._node
        details = node.details or await node.identify()
        if self._params.written_text and self._params.messages is not None:
            await _require_continuable(node)
        self._require_fits()
        path, body = node.ollama_request(self._params, details)
        self.metrics.seed = body["options"].get("seed") if self._params.temperature else None
        self._key = self._prompt.key(body.get("think"))
        is_new = node.prompts.is_new(self._prompt.messages, self._prompt.tools)
        self._is_new = is_new and self._params.context is None  # with a warm context, Ollama has the prompt
        try:
            async with aclosing(node.ollama.stream(path, body)) as chunks:
                async for chunk in chunks:
                    if piece := _piece(chunk):
                        self.metrics.first_token_time = (
                            self.metrics.first_token_time or time.perf_counter() - started_at
                        )
                        yield piece
                    if chunk.done:
                        self._finish(chunk)
        except EngineUnavailable:
            node.forget_model()
            raise
        finally:
            self.metrics.total_time = time.perf_counter() - started_at
        yield TextEvent(token=None, text="", finish_reason=self.metrics.finish_reason)

    @property
    def _min_tokens(self) -> int:
        return _size_bytes(self._prompt.text) // _MAX_TOKEN_BYTES

    @property
    def _likely_tokens(self) -> int:
        token_bytes = _CHAT_TOKEN_BYTES if self._prompt.in_chat else _TOKEN_BYTES
        return _size_bytes(self._prompt.all) // token_bytes + self._prompt.images * _IMAGE_TOKENS

    def _require_fits(self) -> None:
        """A prompt that surely does not fit is refused before it costs anything. A version that would cut it silently
        also gets none that may not fit: it would compute for minutes, and its counts come last."""
        least, window = self._min_tokens + self._params.limit, self._node.window
        if least > window:
            raise ContextTooLong(least, window, "at least ")
        likely = self._likely_tokens + self._params.limit
        if likely > window and version_of(self._node.version) < HONOURS_TRUNCATE:
            raise ContextTooLong(likely, window, "about ", _CUTS.format(self._node.version))

    def _finish(self, chunk: GenerateChunk) -> None:
        metrics = self.metrics
        if chunk.done_reason not in ("stop", "length", "", None):
            what = "broke off its response" if metrics.first_token_time else "generated nothing"
            raise EngineFailed(f"Ollama {what}: its finish reason is {chunk.done_reason!r}")
        metrics.completion_tokens, metrics.finish_reason = chunk.eval_count, chunk.done_reason or "stop"
        metrics.prompt_tokens = self._count_prompt(chunk.prompt_eval_count)
        metrics.load_time, metrics.prefill_time = chunk.load_duration / 1e9, chunk.prompt_eval_duration / 1e9
        metrics.decode_time = chunk.eval_duration / 1e9
        known = chunk.load_duration + chunk.prompt_eval_duration + chunk.eval_duration
        metrics.queue_time = max(0.0, (chunk.total_duration - known) / 1e9)
        self._require_not_cut()
        self._measure()

    def _count_prompt(self, count: int | None) -> int | None:
        """An old version counts only tokens that are not cached. For a request with a salt that would tell what others
        have sent, because all share Ollama's cache: so it gets no count."""
        if version_of(self._node.version) >= COUNTS_ALL:
            return count or None
        if self._params.cache_salt:
            return None
        return self._node.prompts.count(self._key, count)

    def _require_not_cut(self) -> None:
        """Versions without `truncate` cut a prompt silently, or drop messages. The counts show it."""
        version, count, window = version_of(self._node.version), self.metrics.prompt_tokens or 0, self._node.window
        if version >= HONOURS_TRUNCATE:
            return
        least, surely_fits = self._min_tokens, _MIN_TOKEN_BYTES * window // _MAX_TOKEN_BYTES
        dropped = version >= COUNTS_ALL and least > max(count, surely_fits)
        if count >= window or dropped:
            raise ContextTooLong(max(least, window + 1), window, "at least ")
        if count + self.metrics.completion_tokens > window:  # it dropped the start of the prompt to continue
            raise ContextTooLong(count + self.metrics.completion_tokens, window)

    def _measure(self) -> None:
        """The first token comes from the logits of the prefill: its time is part of the prefill time."""
        node, metrics = self._node, self.metrics
        node.generated_tokens += metrics.completion_tokens
        later, batch = metrics.completion_tokens - 1, max(node.open_requests, 1)
        if later > 0 and metrics.decode_time:
            metrics.decode_speed = later / metrics.decode_time
            node.decode_rates.record(batch, later * batch, metrics.decode_time)
        if self._is_new and metrics.prompt_tokens and metrics.prefill_time:
            self._measure_prefill(metrics.prompt_tokens)

    def _measure_prefill(self, tokens: int) -> None:
        """Before its first decode step, the node cannot check Ollama's number: it reports the number, but gives the
        router no rate."""
        node, metrics = self._node, self.metrics
        decode_speed = metrics.decode_speed or node.decode_rates.estimate(1)
        if decode_speed and not was_computed(metrics.prefill_time, 1 / decode_speed):
            return
        node.prompt_tokens += tokens
        if not self._params.cache_salt:  # no speed means that the prompt is not new: perhaps another caller sent it
            metrics.prefill_speed = tokens / metrics.prefill_time
        if decode_speed:
            node.prefill_rates.record(tokens, tokens, metrics.prefill_time)


def _size_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _piece(chunk: GenerateChunk) -> TextEvent | None:
    message = chunk.message
    text, thinking = chunk.response or message.content or "", chunk.thinking or message.thinking or ""
    piece = TextEvent(token=None, text=text, thinking=thinking, tool_calls=tuple(message.tool_calls or ()))
    return piece if piece.text or piece.thinking or piece.tool_calls else None
