"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, values bare."""

import json
import re
from typing import Any

from disaggregated_inference.gateway.tool_parsers.argument_types import typed, types_of
from disaggregated_inference.gateway.tool_parsers.hermes import CALL, CALL_END, HermesParser
from disaggregated_inference.gateway.tool_parsers.text_buffer import MalformedCall, Waits

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_NAME = re.compile(r"[\w.-]+")
_KEY = re.compile(r"[^<>\n]+")
_LINE = "\n"

# One line break before the closing tag is layout. Where that tag was forgotten, the next one on a line of its own ends
# the value as well.
_VALUE_ENDS = (_LINE + PARAMETER_END, PARAMETER_END, _LINE + PARAMETER, _LINE + FUNCTION_END)


class QwenParser(HermesParser):
    """Also takes JSON between the tags, which is what a forced call has. `<tool_call>` may be missing, as it often is:
    then the function must be one of the tools, because text may speak of `<function=` too."""

    openers: tuple[str, ...] = (CALL, FUNCTION)

    def __init__(self, schemas: dict[str, dict[str, Any]], **options: Any) -> None:
        super().__init__(**options)
        self._schemas = schemas

    def read_call(self, opener: str) -> Waits[None]:
        if opener == CALL:
            yield from self.source.blanks()
            if (yield from self.source.which(FUNCTION)) is None:
                return (yield from super().read_call(opener))
        name = (yield from self.source.run(_NAME, ">")).strip()
        if opener == FUNCTION and name not in self._schemas:
            raise MalformedCall
        if (yield from self._function(name)) != CALL_END:
            yield from self.end_call()

    def _function(self, name: str) -> Waits[str]:
        """Up to the tag that closes it, which is returned."""
        tag = yield from self._tag()
        self.out.begin(name)
        self._say("{")
        separator = ""
        while tag == PARAMETER:
            key = (yield from self.source.run(_KEY, ">")).strip()
            self._say(separator + json.dumps(key, ensure_ascii=False) + ": ")
            end = yield from self._value(self._types(name, key))
            tag = end if end != PARAMETER_END else (yield from self._tag())
            separator = ", "
        self._say("}")
        return tag

    def _tag(self) -> Waits[str]:
        yield from self.source.blanks()
        tag = yield from self.source.which(PARAMETER, FUNCTION_END, CALL_END)
        if tag is None:
            raise MalformedCall
        return tag

    def _value(self, types: set[str]) -> Waits[str]:
        yield from self.source.which(_LINE)
        read = self._other if types - {"string"} else self._string
        end = yield from read(types)
        if end is None:
            raise MalformedCall
        return end.strip()

    def _string(self, types: set[str]) -> Waits[str | None]:
        """Handed on while it comes."""
        self._say('"')
        end = yield from self.source.copy(
            lambda text: self._say(json.dumps(text, ensure_ascii=False)[1:-1]), _VALUE_ENDS
        )
        if end:
            self._say('"')
        return end

    def _other(self, types: set[str]) -> Waits[str | None]:
        """Its type is only certain at its end."""
        pieces: list[str] = []
        end = yield from self.source.copy(pieces.append, _VALUE_ENDS)
        if end:
            self._say(typed("".join(pieces), types))
        return end

    def _types(self, name: str, key: str) -> set[str]:
        schema = self._schemas.get(name, {})
        properties = schema.get("properties")
        return types_of(properties.get(key), schema) if isinstance(properties, dict) else set()

    def _say(self, text: str) -> None:
        self.out.arguments(text)
        self.source.accept()
