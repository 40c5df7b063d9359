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
_BREAK = "\n"

# One line break before the closing tag is layout. Where that tag is missing, the next tag on its own line ends the
# value.
_VALUE_ENDS = (_BREAK + PARAMETER_END, PARAMETER_END, _BREAK + PARAMETER, _BREAK + FUNCTION_END)


class QwenParser(HermesParser):
    """Also parses JSON between the tags, which a forced call has. `<tool_call>` is often missing: then the function
    must be one of the tools, because text may contain `<function=` too."""

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
        """Returns the tag that closes it."""
        tag = yield from self._tag()
        self.out.start_call(name)
        self._emit("{")
        separator = ""
        while tag == PARAMETER:
            key = (yield from self.source.run(_KEY, ">")).strip()
            self._emit(separator + json.dumps(key, ensure_ascii=False) + ": ")
            end = yield from self._value(self._types(name, key))
            tag = end if end != PARAMETER_END else (yield from self._tag())
            separator = ", "
        self._emit("}")
        return tag

    def _tag(self) -> Waits[str]:
        yield from self.source.blanks()
        tag = yield from self.source.which(PARAMETER, FUNCTION_END, CALL_END)
        if tag is None:
            raise MalformedCall
        return tag

    def _value(self, types: set[str]) -> Waits[str]:
        yield from self.source.which(_BREAK)
        parse = self._other if types - {"string"} else self._string
        end = yield from parse(types)
        if end is None:
            raise MalformedCall
        return end.strip()

    def _string(self, types: set[str]) -> Waits[str | None]:
        """Emitted while it comes."""
        self._emit('"')
        end = yield from self.source.copy(
            lambda text: self._emit(json.dumps(text, ensure_ascii=False)[1:-1]), _VALUE_ENDS
        )
        if end:
            self._emit('"')
        return end

    def _other(self, types: set[str]) -> Waits[str | None]:
        """Emitted at its end, when its type is known."""
        pieces: list[str] = []
        end = yield from self.source.copy(pieces.append, _VALUE_ENDS)
        if end:
            self._emit(typed("".join(pieces), types))
        return end

    def _types(self, name: str, key: str) -> set[str]:
        schema = self._schemas.get(name, {})
        properties = schema.get("properties")
        return types_of(properties.get(key), schema) if isinstance(properties, dict) else set()

    def _emit(self, text: str) -> None:
        self.out.arguments(text)
        self.source.accept()
