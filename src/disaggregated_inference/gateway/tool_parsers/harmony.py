"""GPT-OSS: messages on channels. Special tokens, which leave no text, say where a message's header and content begin.

    <|channel|>analysis<|message|>Let me see.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

Text can come later than its token (stop strings hold it back). So the parser decodes the tokens itself: it reads
headers from them, and counts how much text belongs to each section between two marks.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable

from disaggregated_inference.gateway.tool_parsers.base import ContentDelta, ToolParser
from disaggregated_inference.gateway.tool_parsers.json_object import JsonObjectReader
from disaggregated_inference.gateway.tool_parsers.text_buffer import ContentBuffer, MalformedCall, TextBuffer, Waits
from disaggregated_inference.models import ModelTokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)

_MARK = re.compile(r"<\|\w+\|>")
_TO = re.compile(r"to=(\S+)|(?<!\S)(functions\.\S+)")  # models forget `to=` at times
_ON = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTIONS = "functions."
_HEADER_WORDS = ("assistant", "to=", "analysis", "commentary", "final", "json", "code", _FUNCTIONS)
_MAX_HEADER = 300
_ALL = re.compile(r"(?s).*")

Read = Callable[[TextBuffer], Waits[None]]
EmitText = Callable[[str], None]


class Section:
    """Between two marks. It is a header until it has a reader; then text, reasoning or a call. `tokens`: the header as
    its tokens spell it, marks included. `owed`: how many characters of its text are still to come."""

    def __init__(self, tokens: str = "", read: Read | None = None) -> None:
        self.tokens, self.owed = tokens, 0
        self._source = TextBuffer()
        self._reading: Waits[None] | None = None
        if read:
            self.read_with(read)

    @property
    def is_header(self) -> bool:
        return self._reading is None

    def read_with(self, read: Read) -> None:
        """Includes the text that came already."""
        self._reading = read(self._source)
        next(self._reading, None)

    def push(self, text: str) -> None:
        self.owed -= len(text)
        self._source.push(text)
        self._continue()

    def close(self) -> None:
        self._source.ended = True
        self._continue()

    def _continue(self) -> None:
        if self._reading:
            next(self._reading, None)


class HarmonyParser(ToolParser):
    """Calls are parsed as JSON while they come. If one is malformed, the arguments so far stay and the rest is text."""

    def __init__(self, tokenizer: ModelTokenizer, tools: Iterable[str] = ()) -> None:
        self._marks = {tokenizer.token_id(mark): mark for mark in _MARKS}
        self._decoded, self._tools = tokenizer.stream(), frozenset(tools)
        self._out, self._ended = ContentBuffer(), False
        self._begun: set[EmitText] = set()
        self._sections = deque([Section()])  # the prompt ends with <|start|>assistant: a recipient may follow

    def push(self, token: int | None, text: str) -> list[ContentDelta]:
        self._expect(text if token is None else self._decoded.push(token))
        self._receive(text)
        if token is not None and token in self._marks:
            self._start_section(self._marks[token])
            self._receive("")
        return self._out.take()

    def finish(self) -> list[ContentDelta]:
        self._ended = True
        self._settle(self._sections[-1])
        for section in self._sections:
            section.close()
        return self._out.take()

    def _expect(self, text: str) -> None:
        """The text of the last token, which may come later."""
        last = self._sections[-1]
        last.owed += len(text)
        if last.is_header:
            last.tokens += text
            if not _may_be_header(last.tokens):
                last.read_with(self._text)

    def _receive(self, text: str) -> None:
        while len(self._sections) > 1:
            first = self._sections[0]
            due = max(first.owed, 0)
            first.push(text[:due])
            text = text[due:]
            if first.owed > 0:
                return
            first.close()
            self._sections.popleft()
        self._sections[0].push(text)

    def _start_section(self, mark: str) -> None:
        last = self._sections[-1]
        if last.is_header and mark in (CHANNEL, CONSTRAIN):
            last.tokens += mark
        elif mark in (START, CHANNEL):
            self._settle(last)
            self._sections.append(Section(mark))
        elif mark == MESSAGE:
            self._settle(last)
            self._sections.append(Section(read=self._reader(last.tokens if last.is_header else "")))
        elif mark in _ENDS:
            self._settle(last)
            self._sections.append(Section())

    def _settle(self, section: Section) -> None:
        """What looked like a header and is none becomes text."""
        if section.is_header and not _was_header(section.tokens):
            section.read_with(self._text)

    def _reader(self, header: str) -> Read:
        to, on = _TO.search(_MARK.sub(" ", header)), _ON.search(header)
        name = (to[1] or to[2]) if to else ""
        if name.startswith(_FUNCTIONS) or name in self._tools:
            return lambda source: self._call(source, name.removeprefix(_FUNCTIONS))
        emit = self._out.reasoning if on and on[1] == "analysis" else self._out.text
        return lambda source: self._paragraph(source, emit)

    def _paragraph(self, source: TextBuffer, emit: EmitText) -> Waits[None]:
        """The content of a message. APIs have one text and one reasoning: a second message begins on a new line."""
        while not source.ahead and not source.ended:
            yield
        if source.ahead and emit in self._begun:
            emit("\n")
        if source.ahead:
            self._begun.add(emit)
        yield from _copy_all(source, emit)

    def _text(self, source: TextBuffer) -> Waits[None]:
        return _copy_all(source, self._out.text)

    def _call(self, source: TextBuffer, name: str) -> Waits[None]:
        try:
            yield from source.blanks()
            yield from self._arguments(source, name)
            self.called = True
            yield from source.blanks()
        except MalformedCall:
            self._out.text(source.pending)
        yield from self._text(source)

    def _arguments(self, source: TextBuffer, name: str) -> Waits[None]:
        first = True

        def emit(text: str, key: str | None) -> None:
            nonlocal first
            if first:
                self._out.start_call(name)
            first = False
            self._out.arguments(text)
            source.accept()

        if source.over and not self._ended:  # a complete message without content: no arguments
            emit("{}", None)
        else:
            yield from JsonObjectReader(source, emit).read()


def _copy_all(source: TextBuffer, emit: EmitText) -> Waits[None]:
    while not source.over:
        emit(source.take(_ALL))
        source.accept()
        if not source.ended:
            yield


def _may_be_header(tokens: str) -> bool:
    """So far. A header without a mark can only name a recipient."""
    text = tokens.strip()
    begun = _MARK.search(text) or text.startswith("to=") or "to=".startswith(text)
    return bool(begun) and "\n" not in text and len(text) < _MAX_HEADER


def _was_header(tokens: str) -> bool:
    """Or the beginning of a header that was cut off."""
    words, marked = _MARK.sub(" ", tokens).split(), _MARK.search(tokens)
    return all(word.startswith("to=") or (marked and _begins_known(word)) for word in words)


def _begins_known(word: str) -> bool:
    return word.startswith(_FUNCTIONS) or any(known.startswith(word) for known in _HEADER_WORDS)
