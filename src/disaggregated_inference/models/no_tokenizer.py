"""The tokenizer of a model whose engine keeps it to itself."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from disaggregated_inference.errors import ModelUnsupported
from disaggregated_inference.models.tokenizer import Message, ModelTokenizer


class NoTokenizer(ModelTokenizer):
    """Stands where a tokenizer would, for whoever can do without; asked for tokens, it says why there are none."""

    def __init__(self, model: str) -> None:
        self._model = model
        # Nobody knows the real one. These are words that show what a model can: the engine says no where it cannot.
        self.chat_template = "tools enable_thinking reasoning_effort"

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
