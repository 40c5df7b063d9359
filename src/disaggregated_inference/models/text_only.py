"""The tokenizer of a model whose engine keeps it to itself."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from disaggregated_inference.errors import ModelUnsupported
from disaggregated_inference.models.tokenizer import Message, ModelTokenizer

_WORDS = {"tools": "tools", "thinking": "enable_thinking reasoning_effort"}


class TextOnlyTokenizer(ModelTokenizer):
    """Stands where a tokenizer would, for whoever can do without; asked for tokens, it says why there are none."""

    def __init__(self, model: str, capabilities: Sequence[str] | None = None) -> None:
        self._model, self.capabilities = model, capabilities or ()
        # No template: words that show what may be asked of it. Where nobody knows what it can, the engine says no.
        able = [words for name, words in _WORDS.items() if not capabilities or name in capabilities]
        self.chat_template = " ".join(["messages", *able])

    @property
    def sees(self) -> bool:
        return "vision" in self.capabilities

    def encode(self, text: str) -> list[int]:
        self._refuse()

    def encode_within(self, text: str, window: int) -> list[int]:
        self._refuse()

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        self._refuse()

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        return self._refuse() if list(tokens) else ""

    def token_bytes(self, token: int) -> bytes:
        self._refuse()

    def token_id(self, text: str) -> int | None:
        return None

    def whole(self) -> dict[str, Any]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ModelUnsupported(
            f"{self._model} is served by an engine that keeps its tokenizer to itself:"
            " its tokens cannot be counted or shown"
        )
