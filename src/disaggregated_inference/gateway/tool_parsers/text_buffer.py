"""Buffers of a parser: the text that came in, and the content that goes out.

Parsers read the text with generators, written as if all of it were there. They yield where they must wait for more. So
a generator keeps a parser's position between two tokens, and the result does not depend on how the text is cut.
"""

import re
import secrets
from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec

from disaggregated_inference.gateway.tool_parsers.base import (
    ContentDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)

Result = TypeVar("Result")
Waits = Generator[None, None, Result]

BLANKS = " \t\r\n"
_MAX_HELD_BLANKS = 256  # a model that writes only line breaks must not become slower and slower


class MalformedCall(Exception):
    """The text is no tool call, or the call was cut off."""


class TextBuffer:
    """`pending`: text that was read and not yet accepted. It becomes text again if the call is malformed."""

    def __init__(self) -> None:
        self.pending = ""
        self.ended = False
        self._text = ""

    @property
    def ahead(self) -> str:
        """The text that came and was not read."""
        return self._text

    @property
    def over(self) -> bool:
        return self.ended and not self._text

    def push(self, text: str) -> None:
        self._text += text

    def accept(self) -> None:
        self.pending = ""

    def give_back(self) -> None:
        """Pending text is read again, as something else."""
        self._text, self.pending = self.pending + self._text, ""

    def take(self, pattern: re.Pattern[str]) -> str:
        """The part of the available text that matches; perhaps empty."""
        found = pattern.match(self._text)
        return self._take(found.end()) if found else ""

    def peek(self) -> Waits[str]:
        """The next character; it is not taken."""
        while not self._text:
            if self.ended:
                raise MalformedCall
            yield
        return self._text[0]

    def blanks(self) -> Waits[None]:
        while not self.over:
            self._take(len(self._text) - len(self._text.lstrip(BLANKS)))
            if self._text or self.ended:
                return
            yield

    def run(self, allowed: re.Pattern[str], end: str) -> Waits[str]:
        """Allowed characters up to `end`, which is taken as well."""
        found = ""
        while True:
            found += self.take(allowed)
            if (yield from self.peek()) == end:
                self._take(1)
                return found
            if not allowed.match(self._text):
                raise MalformedCall

    def which(self, *options: str) -> Waits[str | None]:
        """The option that comes next, which is taken; None if something else comes."""
        while not self.ended and any(option.startswith(self._text) and option != self._text for option in options):
            yield
        found = next((option for option in options if self._text.startswith(option)), None)
        self._take(len(found or ""))
        return found

    def cut_off(self, tag: str) -> bool:
        """Whether the completion ended within this tag. Its beginning is taken."""
        if not (self.ended and tag.startswith(self._text)):
            return False
        self._take(len(self._text))
        return True

    def copy(self, emit: Callable[[str], None], ends: tuple[str, ...], blanks: bool = False) -> Waits[str | None]:
        """Emits text at once up to the first of `ends`, and holds back what may be the start of one. Returns that end,
        or None at the end of the completion. Of two ends at one place the longer counts. With `blanks`, blanks before
        an end are dropped."""
        while True:
            at, end = self._first(ends)
            with_end = blanks and (end or not self.ended)
            if text := self._take(self._before_blanks(at) if with_end else at):
                emit(text)
            if end:
                self._take(self._text.index(end) + len(end))
            if end or self.ended:
                return end
            yield

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        self.pending += taken
        return taken

    def _before_blanks(self, at: int) -> int:
        near = self._text[max(at - _MAX_HELD_BLANKS, 0) : at]
        return at - len(near) + len(near.rstrip(BLANKS))

    def _first(self, ends: tuple[str, ...]) -> tuple[int, str | None]:
        """Where an end begins, or may begin."""
        if not any(end[0] in self._text for end in ends):  # nearly always: no tag is near
            return len(self._text), None
        places = [(self._text.find(end), -len(end), end) for end in ends if end in self._text]
        if places:
            return min(places)[0], min(places)[2]
        return len(self._text) - (0 if self.ended else self._possible_start(ends)), None

    def _possible_start(self, ends: tuple[str, ...]) -> int:
        sizes = (
            size
            for end in ends
            for size in range(min(len(end) - 1, len(self._text)), 0, -1)
            if self._text.endswith(end[:size])
        )
        return max(sizes, default=0)


class ContentBuffer:
    """Content until it is taken. Neighbours of one kind are joined."""

    def __init__(self) -> None:
        self.calls = 0
        self._content: list[ContentDelta] = []

    def text(self, text: str) -> None:
        self._add(TextDelta(text))

    def reasoning(self, text: str) -> None:
        self._add(ReasoningDelta(text))

    def start_call(self, name: str) -> None:
        self._content.append(ToolCallStart(self.calls, f"call_{secrets.token_hex(12)}", name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Of the last call."""
        self._add(ToolCallArguments(self.calls - 1, text))

    def _add(self, piece: TextDelta | ReasoningDelta | ToolCallArguments) -> None:
        last = self._content[-1] if self._content else None
        if isinstance(last, type(piece)):
            self._content[-1] = msgspec.structs.replace(piece, text=last.text + piece.text)
        elif piece.text:
            self._content.append(piece)

    def take(self) -> list[ContentDelta]:
        content, self._content = self._content, []
        return content
