"""Completions with tags: `<think>` around reasoning, and tags of the model family around tool calls."""

from collections.abc import Iterable

from disaggregated_inference.gateway.tool_parsers.base import ContentDelta, ToolParser
from disaggregated_inference.gateway.tool_parsers.text_buffer import (
    BLANKS,
    ContentBuffer,
    MalformedCall,
    TextBuffer,
    Waits,
)
from disaggregated_inference.models import ModelTokenizer

THINK, THINK_END = "<think>", "</think>"


class TaggedParser(ToolParser):
    """Text that may begin with reasoning. Subclasses add the tags that open a call, and how to parse one.

    Blanks beside tags are layout and are dropped. `stripped`: tags that are special tokens, so the text lacks them.
    `reasons`: the model may reason. `inside`: the prompt ends within the reasoning. `forced`: the completion must be a
    call, so a part of one is never text.
    """

    openers: tuple[str, ...] = ()

    def __init__(
        self,
        stripped: dict[int, str] | None = None,
        reasons: bool = False,
        inside: bool = False,
        forced: bool = False,
    ) -> None:
        self.source, self.out = TextBuffer(), ContentBuffer()
        self._stripped, self._reasons, self._inside, self._forced = stripped or {}, reasons, inside, forced
        self._parsing = self._parse()

    def push(self, token: int | None, text: str) -> list[ContentDelta]:
        tag = self._stripped.get(token, "") if token is not None else ""
        self.source.push(text + tag)
        return self._continue()

    def finish(self) -> list[ContentDelta]:
        self.source.ended = True
        return self._continue()

    def read_call(self, opener: str) -> Waits[None]:
        """Parses a call after its opening tag. Raises MalformedCall. This class itself has no such tags: it is for
        models that reason and call nothing."""
        raise AssertionError(f"{opener!r} opens no call")

    def _continue(self) -> list[ContentDelta]:
        next(self._parsing, None)
        return self.out.take()

    def _parse(self) -> Waits[None]:
        if self._reasons:
            yield from self._reasoning()
        while not self.source.over:
            opener = yield from self.source.copy(self._emit_text, self.openers, blanks=bool(self.openers))
            if opener:
                yield from self._call(opener)

    def _reasoning(self) -> Waits[None]:
        yield from self.source.blanks()
        opened = yield from self.source.which(THINK)
        if not opened and not self._inside:
            self.source.give_back()
            return
        yield from self.source.blanks()
        yield from self.source.copy(self._emit_reasoning, (THINK_END,), blanks=True)
        yield from self.source.blanks()
        self.source.accept()

    def _emit_reasoning(self, text: str) -> None:
        self.out.reasoning(text)
        self.source.accept()

    def _emit_text(self, text: str) -> None:
        if not self._forced and not (self.source.ended and self.out.calls and not text.strip(BLANKS)):
            self.out.text(text)
        self.source.accept()

    def _call(self, opener: str) -> Waits[None]:
        try:
            yield from self.read_call(opener)
            self.called = True
        except MalformedCall:
            if not self._forced:
                self.out.text(self.source.pending)
        self.source.accept()


def stripped_tags(tokenizer: ModelTokenizer, tags: Iterable[str]) -> dict[int, str]:
    """Tags that are special tokens, which leave no text."""
    found = {tag: tokenizer.token_id(tag) for tag in tags}
    return {token: tag for tag, token in found.items() if token is not None and not tokenizer.decode([token])}
