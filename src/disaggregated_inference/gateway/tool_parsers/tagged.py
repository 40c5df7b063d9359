"""Answers in which tags say what is what: `<think>` around thoughts, and a family's own tags around tool calls."""

from collections.abc import Iterable

from disaggregated_inference.gateway.tool_parsers.base import ContentDelta, ToolParser
from disaggregated_inference.gateway.tool_parsers.text_buffer import (
    BLANKS,
    ContentBuffer,
    MalformedCall,
    TextBuffer,
    Waits,
)
from disaggregated_inference.models.tokenizer import ModelTokenizer

THINK, THINK_END = "<think>", "</think>"


class TaggedParser(ToolParser):
    """Text with thoughts at its beginning. Families add the tags that open a call, and how to read one.

    Blanks beside tags are layout and go with them. `inside`: the prompt's end has opened the thought. `stripped` are
    the tags that the tokenizer takes for special tokens, so that they are missing from the text. `forced`: a call must
    come and nothing else, so what there is of one that was cut off is no text.
    """

    openers: tuple[str, ...] = ()

    def __init__(
        self,
        stripped: dict[int, str] | None = None,
        thoughts: bool = False,
        inside: bool = False,
        forced: bool = False,
    ) -> None:
        self.source, self.out = TextBuffer(), ContentBuffer()
        self._stripped, self._thoughts, self._inside, self._forced = stripped or {}, thoughts, inside, forced
        self._reading = self._answer()

    def push(self, token: int | None, text: str) -> list[ContentDelta]:
        tag = self._stripped.get(token, "") if token is not None else ""
        self.source.push(text + tag)
        return self._read()

    def finish(self) -> list[ContentDelta]:
        self.source.ended = True
        return self._read()

    def read_call(self, opener: str) -> Waits[None]:
        """A whole call, to its end, after what opened it. Raises `Broken` where it is none. This class by itself has no
        tags that open one: it is for models that think and call nothing."""
        raise AssertionError(f"{opener!r} opens no call here")

    def _read(self) -> list[ContentDelta]:
        next(self._reading, None)
        return self.out.take()

    def _answer(self) -> Waits[None]:
        if self._thoughts:
            yield from self._thought()
        while not self.source.over:
            opener = yield from self.source.copy(self._text, self.openers, blanks=bool(self.openers))
            if opener:
                yield from self._call(opener)

    def _thought(self) -> Waits[None]:
        yield from self.source.blanks()
        opened = yield from self.source.which(THINK)
        if not opened and not self._inside:
            self.source.give_back()
            return
        yield from self.source.blanks()
        yield from self.source.copy(self._think, (THINK_END,), blanks=True)
        yield from self.source.blanks()
        self.source.accept()

    def _think(self, text: str) -> None:
        self.out.thought(text)
        self.source.accept()

    def _text(self, text: str) -> None:
        if not self._forced and not (self.source.ended and self.out.calls and not text.strip(BLANKS)):
            self.out.text(text)
        self.source.accept()

    def _call(self, opener: str) -> Waits[None]:
        try:
            yield from self.read_call(opener)
            self.called = True
        except MalformedCall:
            if not self._forced:
                self.out.text(self.source.unsaid)
        self.source.accept()


def stripped_tags(tokenizer: ModelTokenizer, tags: Iterable[str]) -> dict[int, str]:
    found = {tag: tokenizer.token_id(tag) for tag in tags}
    return {token: tag for tag, token in found.items() if token is not None and not tokenizer.decode([token])}
