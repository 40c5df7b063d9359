"""Hermes, Qwen 2.5 and 3, and many others: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import json

from disaggregated_inference.gateway.tool_parsers.json_object import JsonObjectReader, strict_json
from disaggregated_inference.gateway.tool_parsers.tagged import TaggedParser
from disaggregated_inference.gateway.tool_parsers.text_buffer import ContentBuffer, MalformedCall, TextBuffer, Waits

CALL, CALL_END = "<tool_call>", "</tool_call>"


class HermesParser(TaggedParser):
    """A call is emitted from its arguments on: until then it may be text. If it is malformed later, the arguments so
    far stay, and the rest is text."""

    openers: tuple[str, ...] = (CALL,)

    def read_call(self, opener: str) -> Waits[None]:
        yield from self.source.blanks()
        yield from JsonCall(self.source, self.out).read()
        yield from self.end_call()

    def end_call(self) -> Waits[None]:
        """The call is complete, also if its closing tag is missing or cut off."""
        self.source.accept()
        yield from self.source.blanks()
        if not (yield from self.source.which(CALL_END)) and not self.source.cut_off(CALL_END):
            self.source.give_back()


class JsonCall:
    """`{"name": ..., "arguments": {...}}` while it comes, with the keys in any order. `parameters` counts as
    `arguments`, and so does a string that holds them as JSON."""

    def __init__(self, source: TextBuffer, out: ContentBuffer) -> None:
        self._source, self._out = source, out
        self._name, self._arguments, self._field = "", "", ""
        self._started = False

    def read(self) -> Waits[None]:
        yield from JsonObjectReader(self._source, self._take).read()
        if not self._started:
            arguments = _object(self._arguments)
            self._start()
            self._emit(arguments)

    def _take(self, text: str, key: str | None) -> None:
        if key == "name":
            self._name += text
        elif key in ("arguments", "parameters"):
            self._argument(text, key)

    def _argument(self, text: str, field: str) -> None:
        if self._field not in ("", field):
            raise MalformedCall
        self._field = field
        if self._started:
            return self._emit(text)
        self._arguments += text
        if self._name and self._arguments == "{":
            self._start()
            self._emit(text)

    def _start(self) -> None:
        name = json.loads(self._name or "null")
        if not name or not isinstance(name, str):
            raise MalformedCall
        self._out.start_call(name)
        self._started = True

    def _emit(self, text: str) -> None:
        self._out.arguments(text)
        self._source.accept()


def _object(text: str) -> str:
    """The arguments as JSON, whatever their form; an empty object if there are none."""
    try:
        given = strict_json(text or "null")
        inner = strict_json(given or "null") if isinstance(given, str) else given
    except ValueError as error:
        raise MalformedCall from error
    if inner is None:
        return "{}"
    if not isinstance(inner, dict):
        raise MalformedCall
    return given if isinstance(given, str) else text
