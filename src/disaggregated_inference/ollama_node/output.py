"""What a node in front of an Ollama tells: pieces of text, counts, and a context that is good for nothing."""

import base64
import binascii
import hashlib
from collections import OrderedDict
from typing import Any, Literal

import msgspec

from disaggregated_inference.errors import BadRequest

_HEAD_CHARS = 256
_MOST_SEEN = 1024
_HELD_STEPS = 3


class TextMetrics(msgspec.Struct):
    """Seconds and counts, from Ollama's own fields. None: it did not say, and nobody else knows."""

    prompt_tokens: int | None = None
    completion_tokens: int = 0
    queue_time: float = 0.0  # in its line
    load_time: float = 0.0
    prefill_time: float = 0.0
    prefill_speed: float | None = None  # None where it may have held it: it does not say how much
    decode_time: float = 0.0
    decode_speed: float = 0.0
    first_token_time: float = 0.0
    total_time: float = 0.0
    finish_reason: str = "error"
    seed: int | None = None


class TextPiece(msgspec.Struct, frozen=True):
    text: str = ""
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = []
    finish_reason: str | None = None


class WarmContext(msgspec.Struct, frozen=True, kw_only=True):
    """What /prefill gives out here: the word for a cache that nobody can fetch."""

    model: str
    prompt_tokens: int | None
    kv: Literal["none"] = "none"
    engine: Literal["ollama"] = "ollama"

    def encode(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def require(cls, word: str) -> None:
        """That a context is one of these: any other is the right to a cache, which cannot be taken in here."""
        try:
            msgspec.json.decode(base64.urlsafe_b64decode(word.encode()), type=cls)
        except (binascii.Error, msgspec.DecodeError, ValueError):
            words = "context: it is of another node's cache, and an Ollama cannot take one in; send the prompt alone"
            raise BadRequest(words) from None


def was_read(reading_s: float, step_s: float) -> bool:
    """Whether a prompt can have been read in that time, or must have been held: another process in front of the same
    Ollama may have sent it, and Ollama counts it all the same. Of a prompt that it holds it computes the last token
    again, and that takes as long as one step of writing (0.7 to 1.2 of one, measured). So what took less than a few
    steps is not taken for a reading. It errs on the safe side: a short prompt on a fast machine is not measured. Of
    one that was held in part nobody can tell.
    """
    return reading_s >= _HELD_STEPS * step_s


class OllamaNodeStats:
    """Prompts that went there: a beginning that it has read may be held, and its times say nothing about reading."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def is_new(self, *texts: str) -> bool:
        """Whether none of them began so before: which of them comes first is the template's business."""
        return all([self._take(text[:_HEAD_CHARS], 0) is None for text in texts if text])

    def counted(self, prompt: str, tokens: int | None) -> int | None:
        """The most tokens that this prompt was ever counted to have: an old version counts only what is new."""
        known = max(tokens or 0, self._take(f"={prompt}", tokens or 0) or 0)
        self._take(f"={prompt}", known)
        return known or None

    def _take(self, text: str, value: int) -> int | None:
        key = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        known = self._counts.get(key)
        self._counts[key] = value
        self._counts.move_to_end(key)
        while len(self._counts) > _MOST_SEEN:
            self._counts.popitem(last=False)
        return known
