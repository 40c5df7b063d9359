"""For engines that parse reasoning and tool calls themselves."""

import secrets
from typing import Any

import msgspec

from disaggregated_inference.gateway.tool_parsers.base import (
    ContentDelta,
    PlainParser,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from disaggregated_inference.orchestrator import Delta


class PassthroughParser(PlainParser):
    """A call comes complete, with its arguments as an object."""

    def __init__(self) -> None:
        self._calls = 0

    def take(self, delta: Delta) -> list[ContentDelta]:
        content: list[ContentDelta] = [ReasoningDelta(delta.thinking)] if delta.thinking else []
        content += [TextDelta(delta.text)] if delta.text else []
        for call in delta.tool_calls:
            content += self._convert(call)
        return content

    def _convert(self, call: dict[str, Any]) -> list[ContentDelta]:
        function, index = call.get("function") or {}, self._calls
        self._calls, self.called = index + 1, True
        id = str(call.get("id") or f"call_{secrets.token_hex(12)}")
        arguments = msgspec.json.encode(function.get("arguments") or {}).decode()
        return [ToolCallStart(index, id, str(function.get("name", ""))), ToolCallArguments(index, arguments)]
