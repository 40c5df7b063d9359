"""An answer's text as it comes in, and what was made of it so far.

What reads a source are generators, written as if the text were all there; they yield where they must wait for more. So
where a parser stands between two tokens is where its generator stands, and how the text is cut cannot change what is
made of it.
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
_MOST_BLANKS = 256  # held back: a model that writes nothing but line breaks must not get slower and slower


class MalformedCall(Exception):
    """It is not what it looked like, or it ended too early."""


class TextBuffer:
    """`unsaid` is what was read and not yet accepted: what must be shown as text if it turns out to be broken."""

    def __init__(self) -> None:
        self.unsaid = ""
        self.ended = False
        self._text = ""

    @property
    def ahead(self) -> str:
        """What is here by now."""
        return self._text

    @property
    def over(self) -> bool:
        return self.ended and not self._text

    def push(self, text: str) -> None:
        self._text += text

    def accept(self) -> None:
        self.unsaid = ""

    def give_back(self) -> None:
        """What was not accepted will be read again, as something else."""
        self._text, self.unsaid = self.unsaid + self._text, ""

    def take(self, pattern: re.Pattern[str]) -> str:
        """What matches of that which is here by now, perhaps nothing."""
        found = pattern.match(self._text)
        return self._take(found.end()) if found else ""

    def peek(self) -> Waits[str]:
        """The next character; it stays."""
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
        """Allowed characters up to the one that ends them, which is taken as well."""
        found = ""
        while True:
            found += self.take(allowed)
            if (yield from self.peek()) == end:
                self._take(1)
                return found
            if not allowed.match(self._text):
                raise MalformedCall

    def which(self, *options: str) -> Waits[str | None]:
        """The one of them that comes next, which is taken; None where something else does."""
        while not self.ended and any(option.startswith(self._text) and option != self._text for option in options):
            yield
        found = next((option for option in options if self._text.startswith(option)), None)
        self._take(len(found or ""))
        return found

    def cut_off(self, tag: str) -> bool:
        """Whether the answer ended within this tag, of which the rest is taken."""
        if not (self.ended and tag.startswith(self._text)):
            return False
        self._take(len(self._text))
        return True

    def copy(self, say: Callable[[str], None], ends: tuple[str, ...], blanks: bool = False) -> Waits[str | None]:
        """Text is said at once, but for what may be one of `ends`, up to the first of them: that is returned, or None
        at the end of all. Of two that begin together the longer counts. With `blanks`, those before it go with it."""
        while True:
            at, end = self._first(ends)
            with_end = blanks and (end or not self.ended)
            if text := self._take(self._before_blanks(at) if with_end else at):
                say(text)
            if end:
                self._take(self._text.index(end) + len(end))
            if end or self.ended:
                return end
            yield

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        self.unsaid += taken
        return taken

    def _before_blanks(self, at: int) -> int:
        near = self._text[max(at - _MOST_BLANKS, 0) : at]
        return at - len(near) + len(near.rstrip(BLANKS))

    def _first(self, ends: tuple[str, ...]) -> tuple[int, str | None]:
        """Where an end begins, or may begin."""
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
    """What a parser says until it is taken; neighbours of a kind become one."""

    def __init__(self) -> None:
        self.calls = 0
        self._said: list[ContentDelta] = []

    def text(self, text: str) -> None:
        self._add(TextDelta(text))

    def thought(self, text: str) -> None:
        self._add(ReasoningDelta(text))

    def begin(self, name: str) -> None:
        self._said.append(ToolCallStart(self.calls, f"call_{secrets.token_hex(12)}", name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Of the call that was begun last."""
        self._add(ToolCallArguments(self.calls - 1, text))

    def _add(self, piece: TextDelta | ReasoningDelta | ToolCallArguments) -> None:
        last = self._said[-1] if self._said else None
        if isinstance(last, type(piece)):
            self._said[-1] = msgspec.structs.replace(piece, text=last.text + piece.text)
        elif piece.text:
            self._said.append(piece)

    def take(self) -> list[ContentDelta]:
        said, self._said = self._said, []
        return said
