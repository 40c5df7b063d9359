"""In the place of a tokenizer, for a model whose engine does not export it (Ollama)."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from disaggregated_inference.errors import ModelUnsupported
from disaggregated_inference.models.tokenizer import Message, ModelTokenizer

_VARIABLES = {"tools": "tools", "thinking": "enable_thinking reasoning_effort"}


class MissingTokenizer(ModelTokenizer):
    """Every call that needs tokens raises `ModelUnsupported`."""

    def __init__(self, model: str, capabilities: Sequence[str] | None = None) -> None:
        self._model, self.capabilities = model, capabilities or ()
        # Not a template, only the variables of one, for capability checks. Unknown capabilities are left to the engine.
        variables = [names for name, names in _VARIABLES.items() if not capabilities or name in capabilities]
        self.chat_template = " ".join(["messages", *variables])

    @property
    def sees(self) -> bool:
        return "vision" in self.capabilities

    def encode(self, text: str) -> list[int]:
        self._refuse()

    def encode_within(self, text: str, window: int) -> list[int]:
        self._refuse()

    def chat_pieces(self, messages: Sequence[Message], options: dict[str, Any]) -> list[str]:
        self._refuse()

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        return self._refuse() if list(tokens) else ""

    def token_bytes(self, token: int) -> bytes:
        self._refuse()

    def token_id(self, text: str) -> int | None:
        return None

    def _refuse(self) -> NoReturn:
        raise ModelUnsupported(
            f"the engine that serves {self._model} does not export its tokenizer: tokens cannot be counted or decoded"
        )
