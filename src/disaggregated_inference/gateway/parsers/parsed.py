"""Engines that tell thoughts and tool calls apart by themselves: there is nothing left to parse."""

import secrets
from typing import Any

import msgspec

from disaggregated_inference.gateway.parsers.base import CallArguments, CallBegun, Plain, Said, Text, Thought
from disaggregated_inference.orchestrator import Delta


class Parsed(Plain):
    """A call comes whole, and its arguments as an object."""

    def __init__(self) -> None:
        self._calls = 0

    def take(self, delta: Delta) -> list[Said]:
        said: list[Said] = [Thought(delta.thinking)] if delta.thinking else []
        said += [Text(delta.text)] if delta.text else []
        for call in delta.tool_calls:
            said += self._called(call)
        return said

    def _called(self, call: dict[str, Any]) -> list[Said]:
        function, index = call.get("function") or {}, self._calls
        self._calls, self.called = index + 1, True
        name = str(call.get("id") or f"call_{secrets.token_hex(12)}")
        arguments = msgspec.json.encode(function.get("arguments") or {}).decode()
        return [CallBegun(index, name, str(function.get("name", ""))), CallArguments(index, arguments)]
