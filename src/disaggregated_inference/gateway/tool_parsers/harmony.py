"""GPT-OSS: messages on channels. Special tokens, which leave no text, say where a message's header and content begin.

    <|channel|>analysis<|message|>Let me see.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

Text can come later than the token it belongs to (stop strings hold it back), so the parser decodes the tokens itself:
it reads headers from them, and counts which of the text that comes belongs to which stretch between two marks.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable

from disaggregated_inference.gateway.tool_parsers.base import ContentDelta, ToolParser
from disaggregated_inference.gateway.tool_parsers.json_object import JsonObjectReader
from disaggregated_inference.gateway.tool_parsers.text_buffer import ContentBuffer, MalformedCall, TextBuffer, Waits
from disaggregated_inference.models.tokenizer import ModelTokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)

_MARK = re.compile(r"<\|\w+\|>")
_TO = re.compile(r"to=(\S+)")
_ON = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_HEADER_WORDS = ("assistant", "to=", "analysis", "commentary", "final", "json", "code")
_MOST_HEADER = 300
_ALL = re.compile(r"(?s).*")

Read = Callable[[TextBuffer], Waits[None]]


def speaks_harmony(tokenizer: ModelTokenizer) -> bool:
    return None not in (tokenizer.token_id(CHANNEL), tokenizer.token_id(MESSAGE))


class Stretch:
    """Between two marks: a header while nobody reads it, text, thought or call once somebody does. `tokens` is what
    the tokens say of a header, marks included; `owed` how much of the text is yet to come."""

    def __init__(self, tokens: str = "", read: Read | None = None) -> None:
        self.tokens, self.owed = tokens, 0
        self._source = TextBuffer()
        self._reading: Waits[None] | None = None
        if read:
            self.show(read)

    @property
    def is_header(self) -> bool:
        return self._reading is None

    def show(self, read: Read) -> None:
        """Also what came already."""
        self._reading = read(self._source)
        next(self._reading, None)

    def push(self, text: str) -> None:
        self.owed -= len(text)
        self._source.push(text)
        self._go()

    def close(self) -> None:
        self._source.ended = True
        self._go()

    def _go(self) -> None:
        if self._reading:
            next(self._reading, None)


class HarmonyParser(ToolParser):
    """Calls are read as JSON while they come: if one breaks, what was given as arguments stays so, the rest is text."""

    def __init__(self, tokenizer: ModelTokenizer, tools: Iterable[str] = ()) -> None:
        self._marks = {tokenizer.token_id(mark): mark for mark in _MARKS}
        self._decoded, self._tools = tokenizer.stream(), frozenset(tools)
        self._out, self._ended = ContentBuffer(), False
        self._stretches = deque([Stretch()])  # the prompt ended with <|start|>assistant: a recipient may follow

    def push(self, token: int | None, text: str) -> list[ContentDelta]:
        self._meant(text if token is None else self._decoded.push(token))
        self._came(text)
        if token is not None and token in self._marks:
            self._marked(self._marks[token])
            self._came("")
        return self._out.take()

    def finish(self) -> list[ContentDelta]:
        self._ended = True
        self._settle(self._stretches[-1])
        for stretch in self._stretches:
            stretch.close()
        return self._out.take()

    def _meant(self, text: str) -> None:
        """By the last token, whether the text is here already or not."""
        last = self._stretches[-1]
        last.owed += len(text)
        if last.is_header:
            last.tokens += text
            if not _may_be_header(last.tokens):
                last.show(self._text)

    def _came(self, text: str) -> None:
        while len(self._stretches) > 1:
            first = self._stretches[0]
            due = max(first.owed, 0)
            first.push(text[:due])
            text = text[due:]
            if first.owed > 0:
                return
            first.close()
            self._stretches.popleft()
        self._stretches[0].push(text)

    def _marked(self, mark: str) -> None:
        last = self._stretches[-1]
        if last.is_header and mark in (CHANNEL, CONSTRAIN):
            last.tokens += mark
        elif mark in (START, CHANNEL):
            self._settle(last)
            self._stretches.append(Stretch(mark))
        elif mark == MESSAGE:
            self._settle(last)
            self._stretches.append(Stretch(read=self._reader(last.tokens if last.is_header else "")))
        elif mark in _ENDS:
            self._settle(last)
            self._stretches.append(Stretch())

    def _settle(self, stretch: Stretch) -> None:
        """A header that is none was text."""
        if stretch.is_header and not _was_header(stretch.tokens):
            stretch.show(self._text)

    def _reader(self, header: str) -> Read:
        to, on = _TO.search(_MARK.sub(" ", header)), _ON.search(header)
        name = to[1] if to else ""
        if name.startswith("functions.") or name in self._tools:
            return lambda source: self._call(source, name.removeprefix("functions."))
        return self._thought if on and on[1] == "analysis" else self._text

    def _text(self, source: TextBuffer) -> Waits[None]:
        return _all(source, self._out.text)

    def _thought(self, source: TextBuffer) -> Waits[None]:
        return _all(source, self._out.thought)

    def _call(self, source: TextBuffer, name: str) -> Waits[None]:
        try:
            yield from source.blanks()
            yield from self._arguments(source, name)
            self.called = True
            yield from source.blanks()
        except MalformedCall:
            self._out.text(source.unsaid)
        yield from self._text(source)

    def _arguments(self, source: TextBuffer, name: str) -> Waits[None]:
        first = True

        def say(text: str, key: str | None) -> None:
            nonlocal first
            if first:
                self._out.begin(name)
            first = False
            self._out.arguments(text)
            source.accept()

        if source.over and not self._ended:  # a whole message without content: no arguments
            say("{}", None)
        else:
            yield from JsonObjectReader(source, say).read()


def _all(source: TextBuffer, say: Callable[[str], None]) -> Waits[None]:
    while not source.over:
        say(source.take(_ALL))
        source.accept()
        if not source.ended:
            yield


def _may_be_header(tokens: str) -> bool:
    """So far. One that no mark began can only name a recipient."""
    text = tokens.strip()
    begun = _MARK.search(text) or text.startswith("to=") or "to=".startswith(text)
    return bool(begun) and "\n" not in text and len(text) < _MOST_HEADER


def _was_header(tokens: str) -> bool:
    """Or the beginning of one that was cut off."""
    words, marked = _MARK.sub(" ", tokens).split(), _MARK.search(tokens)
    return all(word.startswith("to=") or (marked and _begins_known(word)) for word in words)


def _begins_known(word: str) -> bool:
    return any(known.startswith(word) for known in _HEADER_WORDS)
