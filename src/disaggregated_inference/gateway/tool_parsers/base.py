"""What a parser makes of a model's text."""

from abc import ABC, abstractmethod

import msgspec

from disaggregated_inference.orchestrator import Delta


class TextDelta(msgspec.Struct, frozen=True):
    """For the reader."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """Reasoning: kept apart, shown where an API has a place for it."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A tool call: its place among the answer's calls, an id, and the function's name, once."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """The next piece of its arguments: all pieces together are one JSON object."""

    index: int
    text: str


ContentDelta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class ToolParser(ABC):
    """One choice's. `called` says whether a whole tool call was seen."""

    called = False

    def take(self, delta: Delta) -> list[ContentDelta]:
        """The next piece of the answer."""
        return self.push(delta.token, delta.text)

    @abstractmethod
    def push(self, token: int | None, text: str) -> list[ContentDelta]:
        """The next token and the text that it completes (which may be empty)."""

    @abstractmethod
    def finish(self) -> list[ContentDelta]:
        """No more comes: what was held back."""


class PlainParser(ToolParser):
    """Text is text."""

    def push(self, token: int | None, text: str) -> list[ContentDelta]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[ContentDelta]:
        return []
