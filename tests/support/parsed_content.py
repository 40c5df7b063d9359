"""What a client has at the end of a completion: its text, its reasoning, and the name and arguments of each call."""

from collections.abc import Sequence

from disaggregated_inference.gateway.tool_parsers.base import (
    ContentDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)

Parsed = tuple[str, str, list[tuple[str, str]]]


def parsed(content: Sequence[ContentDelta]) -> Parsed:
    text, reasoning, calls = "", "", list[tuple[str, str]]()
    for piece in content:
        match piece:
            case TextDelta():
                text += piece.text
            case ReasoningDelta():
                reasoning += piece.text
            case ToolCallStart():
                calls.append((piece.name, ""))
            case ToolCallArguments():
                calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.text)
    return text, reasoning, calls
