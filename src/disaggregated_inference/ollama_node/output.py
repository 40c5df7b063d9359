"""The output of a node in front of an Ollama: pieces of text, and a context without KV."""

import base64
import binascii
import hashlib
from collections import OrderedDict
from typing import Literal

import msgspec

from disaggregated_inference.api import TextMetrics
from disaggregated_inference.errors import BadRequest

_PREFIX_CHARS = 256
_MAX_PROMPTS = 1024
_CACHED_STEPS = 3


class WarmMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Of /prefill: the part of `TextMetrics` that is not about a completion."""

    prompt_tokens: int | None
    queue_time: float
    prefill_time: float
    total_time: float
    load_time: float
    prefill_speed: float | None

    @classmethod
    def of(cls, metrics: TextMetrics) -> "WarmMetrics":
        return msgspec.convert(metrics, cls, from_attributes=True)


class WarmResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /prefill."""

    context: str
    ticket: str
    kv: Literal["none"] = "none"
    prompt_tokens: int | None
    metrics: WarmMetrics
    note: str = "Ollama keeps the KV of this prompt and cannot hand it over: this context carries only its counts"


class WarmContext(msgspec.Struct, frozen=True, kw_only=True):
    """The context that /prefill returns: it names a cache inside Ollama that no other node can fetch."""

    model: str
    prompt_tokens: int | None
    kv: Literal["none"] = "none"
    engine: Literal["ollama"] = "ollama"

    def encode(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def require(cls, context: str) -> None:
        """Refuse the contexts of other nodes: Ollama cannot import KV."""
        try:
            msgspec.json.decode(base64.urlsafe_b64decode(context.encode()), type=cls)
        except (binascii.Error, msgspec.DecodeError, ValueError):
            raise BadRequest(
                "context: it names the KV of another node, which Ollama cannot import; send the prompt"
            ) from None


def was_computed(prefill_s: float, step_s: float) -> bool:
    """Whether Ollama computed a prompt, or had it cached because another process sent it before. Its count is the same
    in both cases. For a cached prompt Ollama computes only the last token, which takes as long as one decode step
    (measured: 0.7 to 1.2 of one). So a prefill that took less than a few steps does not count. This errs on the safe
    side: a short prompt on a fast machine is not measured. A prompt that was cached in part cannot be told apart.
    """
    return prefill_s >= _CACHED_STEPS * step_s


class SentPrompts:
    """Prompts that this node sent. Ollama may have such a prefix cached, and then its times are no prefill times."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def is_new(self, *texts: str) -> bool:
        """Whether no earlier prompt started with one of these texts. The template decides which of them comes first."""
        return all([self._swap(text[:_PREFIX_CHARS], 0) is None for text in texts if text])

    def count(self, prompt: str, tokens: int | None) -> int | None:
        """The highest count for this prompt so far: an old version counts only tokens that are not cached."""
        known = max(tokens or 0, self._swap(f"={prompt}", tokens or 0) or 0)
        self._swap(f"={prompt}", known)
        return known or None

    def _swap(self, text: str, value: int) -> int | None:
        key = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        known = self._counts.get(key)
        self._counts[key] = value
        self._counts.move_to_end(key)
        while len(self._counts) > _MAX_PROMPTS:
            self._counts.popitem(last=False)
        return known
