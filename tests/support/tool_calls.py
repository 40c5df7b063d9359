"""Tools, completions that call them, and what parsers make of those."""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from disaggregated_inference.gateway.tool_parsers.base import (
    ContentDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    ToolParser,
)
from disaggregated_inference.models import ModelTokenizer

Parsed = list[tuple[Any, ...]]
Make = Callable[[], ToolParser]
Toks = Callable[..., ModelTokenizer]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "hourly": {"type": "boolean"},
        "place": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"enum": ["C", "F"]},
        "level": {"enum": [1, 2]},
        "nothing": {"type": "null"},
        "circle": {"$ref": "#/properties/circle"},
        "any": {},
    },
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "?", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": SCHEMA, "now": {"type": "object"}}


KINDS: dict[type[ContentDelta], str] = {TextDelta: "text", ReasoningDelta: "thought"}


def parsed(output: Iterable[ContentDelta]) -> Parsed:
    """Neighbours joined, as a client sees them at the end."""
    found: Parsed = []
    for piece in output:
        if isinstance(piece, ToolCallStart):
            found.append(("call", piece.index, piece.name))
            continue
        kind: tuple[Any, ...] = (
            ("arguments", piece.index) if isinstance(piece, ToolCallArguments) else (KINDS[type(piece)],)
        )
        before = found.pop()[-1] if found and found[-1][:-1] == kind else ""
        found.append((*kind, before + piece.text))
    return found


def run(parser: ToolParser, pieces: Iterable[str]) -> tuple[Parsed, bool]:
    output = [item for piece in pieces for item in parser.push(None, piece)] + parser.finish()
    assert all(not hasattr(item, "text") or item.text for item in output), "nothing is said that says nothing"
    return parsed(output), parser.called


def call(name: str, arguments: Any, index: int = 0) -> Parsed:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return [("call", index, name), ("arguments", index, text)]


def hermes(name: str, arguments: Any) -> str:
    inner = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{inner}\n</tool_call>"


def qwen(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


OSLO = {
    "city": "Oslo",
    "at": {"lat": 59.9, "tags": ["a", None, True, {"x": []}]},
    "t": '<tool_call> }\\ "é🙂" </tool_call>',
}


def check(make: Make, text: str, expected: Parsed, called: bool) -> None:
    for pieces in ([text], list(text), pieces_of(text, range(0, len(text), 3)), ["", *text, ""]):
        assert run(make(), pieces) == (expected, called)


def steps(parser: ToolParser, pieces: Iterable[str]) -> list[Parsed]:
    return [parsed(parser.push(None, piece)) for piece in pieces]


CUTS = st.lists(st.integers(0, 10_000), max_size=30)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")


def run_tokens(
    parser: ToolParser, tokenizer: ModelTokenizer, text: str, lags: Sequence[int] = ()
) -> tuple[Parsed, bool]:
    """Token by token. `lags`: how much of the text each token holds back, as stop strings make it."""
    stream, held = tokenizer.stream(), ""
    output: list[ContentDelta] = []
    for at, token in enumerate(tokenizer.encode(text)):
        held += stream.push(token)
        lag = min(lags[at % len(lags)] if lags else 0, len(held))
        output += parser.push(token, held[: len(held) - lag])
        held = held[len(held) - lag :]
    output += parser.push(tokenizer.token_id("<|im_end|>"), held)  # the last token, which has no text of its own
    return parsed([*output, *parser.finish()]), parser.called


ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|>"
