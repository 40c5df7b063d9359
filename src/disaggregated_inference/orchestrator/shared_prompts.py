"""Shared prompts: texts of the cluster file whose cached prefixes callers share, such as a system prompt.

A request shares the tokens that it has in common with a named prompt, and none after them. So a hit tells at most that
another caller sent a text that the cluster file has anyway.
"""

from collections.abc import Sequence
from datetime import date

from disaggregated_inference.errors import DisaggError
from disaggregated_inference.models import ModelTokenizer

TokenIds = Sequence[int]


class SharedPrompts:
    """Of one model. The tokens are computed once, and again when the tokenizer or the date changes: some chat templates
    write the date into the system prompt."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._known: tuple[ModelTokenizer, date, list[TokenIds]] | None = None

    def tokens_in(self, prompt: TokenIds, tokenizer: ModelTokenizer, today: date) -> int:
        """How many leading tokens of `prompt` are those of a shared prompt."""
        if self._known is None or self._known[0] is not tokenizer or self._known[1] != today:
            found = [tokens for text in self._texts for tokens in _rendered(text, tokenizer)]
            self._known = (tokenizer, today, found)
        return max((_common(prompt, tokens) for tokens in self._known[2]), default=0)


def _rendered(text: str, tokenizer: ModelTokenizer) -> list[TokenIds]:
    """As the beginning of a plain prompt, and as the system prompt of a chat. Nothing of a request is in it."""
    chat = [{"role": "system", "content": text}, {"role": "user", "content": "-"}]
    try:
        return [tokenizer.encode(text), tokenizer.encode_chat(chat)]
    except DisaggError:  # no chat template, or one without system prompts
        return [tokenizer.encode(text)]


def _common(one: TokenIds, two: TokenIds) -> int:
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (mine, other) in pairs if mine != other), min(len(one), len(two)))
