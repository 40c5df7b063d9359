"""What a tool parser makes of a model's text."""

from abc import ABC, abstractmethod

import msgspec

from disaggregated_inference.orchestrator import Delta


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """The start of a tool call: its number within the completion, its id, and the function's name."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the arguments. All pieces of a call together are one JSON object."""

    index: int
    text: str


ContentDelta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class ToolParser(ABC):
    """The parser of one choice. `called`: it has parsed a complete tool call."""

    called = False

    def take(self, delta: Delta) -> list[ContentDelta]:
        return self.push(delta.token, delta.text)

    @abstractmethod
    def push(self, token: int | None, text: str) -> list[ContentDelta]:
        """The next token, and the text that it completes (which may be empty)."""

    @abstractmethod
    def finish(self) -> list[ContentDelta]:
        """The completion has ended: returns what was held back."""


class PlainParser(ToolParser):
    """Everything is text."""

    def take(self, delta: Delta) -> list[ContentDelta]:
        return [TextDelta(delta.text)] if delta.text else []

    def push(self, token: int | None, text: str) -> list[ContentDelta]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[ContentDelta]:
        return []
