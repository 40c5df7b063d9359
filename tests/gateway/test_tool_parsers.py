"""Parsers split completions into text, reasoning and tool calls. Tokens may cut the text anywhere; nothing is lost."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from tokenizers import AddedToken, Tokenizer

from disaggregated_inference.api import OutputFormat
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.chat import ChatRequest, generate_options
from disaggregated_inference.gateway.openai.requests import ChatCompletionRequest, read
from disaggregated_inference.gateway.tool_parsers import parser_of
from disaggregated_inference.gateway.tool_parsers.base import (
    ContentDelta,
    PlainParser,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    ToolParser,
)
from disaggregated_inference.gateway.tool_parsers.forced import either_format, forced_format
from disaggregated_inference.gateway.tool_parsers.harmony import HarmonyParser
from disaggregated_inference.gateway.tool_parsers.hermes import HermesParser
from disaggregated_inference.gateway.tool_parsers.prompted_tools import render_tools_as_text
from disaggregated_inference.gateway.tool_parsers.qwen import QwenParser
from disaggregated_inference.gateway.tool_parsers.tagged import TaggedParser
from disaggregated_inference.gateway.tool_parsers.tools import require_tools
from disaggregated_inference.models import ModelFiles, ModelTokenizer
from disaggregated_inference.node.structured_output import GrammarCompiler, GrammarMatcher
from tests.support.grammar_walk import Walk

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

HERMES: dict[str, tuple[str, Parsed, bool]] = {
    "text": ("Just text, a < b, <tool", [("text", "Just text, a < b, <tool")], False),
    "many blanks": ("a" + "\n" * 300 + hermes("now", {}), [("text", "a" + "\n" * 44), *call("now", {})], True),
    "blanks stay": (" \n text \n\n", [("text", " \n text \n\n")], False),
    "one": (hermes("weather", OSLO), call("weather", OSLO), True),
    "no layout": ('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', call("f", '{"a":1}'), True),
    "text around": (
        f"Let me look.\n\n{hermes('weather', OSLO)}\nDone.\n",
        [("text", "Let me look."), *call("weather", OSLO), ("text", "\nDone.")],
        True,
    ),
    "several": (
        f"{hermes('weather', OSLO)}\n{hermes('now', {})}\n",
        call("weather", OSLO) + call("now", {}, 1),
        True,
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>',
        call("f", '{"a": [1]}'),
        True,
    ),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', call("f", '{"a": 1}'), True),
    "as text": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>',
        call("f", '{"a": "é"}'),
        True,
    ),
    "more fields": (
        '<tool_call>{"id": {"name": "g"}, "name": "f", "arguments": {}, "type": "function"}</tool_call>',
        call("f", "{}"),
        True,
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', call("f", "{}"), True),
    "null": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', call("f", "{}"), True),
    "escaped name": ('<tool_call>{"n\\u0061me": "\\u0066", "arguments": {}}</tool_call>', call("f", "{}"), True),
    "no closing tag": ('<tool_call>\n{"name": "f", "arguments": {}}', call("f", "{}"), True),
    "closing tag cut off": ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_c', call("f", "{}"), True),
    "text for a closing tag": (
        '<tool_call>{"name": "f", "arguments": {}} and on',
        [*call("f", "{}"), ("text", " and on")],
        True,
    ),
}
BROKEN = {
    "opened": "<tool_call>",
    "cut off in the name": 'So: \n<tool_call>\n{"name": "wea',
    "cut off after the name": '<tool_call>{"name": "f", "argum',
    "no object": "<tool_call>f(1)</tool_call> then",
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "a number's name": '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    "no key": '<tool_call>{name: "f"}</tool_call>',
    "a list": '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    "other text": '<tool_call>{"name": "f", "arguments": "{oops"}</tool_call>',
    "text of a list": '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
    "text of NaN": '<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>',
    "arguments first, broken": '<tool_call>{"arguments": {"a": tru}, "name": "f"}</tool_call>',
    "two names": '<tool_call>{"name": "f", "name": "g"}</tool_call>',
    "both fields": '<tool_call>{"parameters": {}, "arguments": {}, "name": "f"}</tool_call>',
    "comma": '<tool_call>{"name": "f",}</tool_call>',
    "closing tag only": "a </tool_call> b",
}


def check(make: Make, text: str, expected: Parsed, called: bool) -> None:
    for pieces in ([text], list(text), pieces_of(text, range(0, len(text), 3)), ["", *text, ""]):
        assert run(make(), pieces) == (expected, called)


@pytest.mark.parametrize("name", HERMES)
@pytest.mark.parametrize("make", [HermesParser, lambda: QwenParser(SCHEMAS)], ids=["hermes", "qwen"])
def test_hermes(make: Make, name: str) -> None:
    check(make, *HERMES[name])


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("make", [HermesParser, lambda: QwenParser(SCHEMAS)], ids=["hermes", "qwen"])
def test_text_without_a_call_stays_text(make: Make, name: str) -> None:
    check(make, BROKEN[name], [("text", BROKEN[name])], False)


def test_a_call_that_breaks_after_its_start() -> None:
    begun = '<tool_call>{"name": "f", "arguments": {"a": 1'
    check(HermesParser, begun + "}", [*call("f", '{"a": 1}')], False)
    check(HermesParser, begun + ", oops}", [*call("f", '{"a": 1, '), ("text", "oops}")], False)
    check(HermesParser, begun + ', "b": "c\\', [*call("f", '{"a": 1, "b": "c'), ("text", "\\")], False)
    check(HermesParser, begun + ', "b": "\n!', [*call("f", '{"a": 1, "b": "'), ("text", "\n!")], False)
    rest = "}, </tool_call>\n"
    whole = [*call("f", '{"a": 1}'), ("text", ", </tool_call>"), *call("now", {}, 1)]
    check(HermesParser, begun + rest + hermes("now", {}), whole, True)


def test_a_broken_call_does_not_hide_the_next() -> None:
    text = '<tool_call>{"name": <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    check(HermesParser, text, [("text", '<tool_call>{"name": '), *call("f", "{}")], True)


def steps(parser: ToolParser, pieces: Iterable[str]) -> list[Parsed]:
    return [parsed(parser.push(None, piece)) for piece in pieces]


def test_hermes_emits_early() -> None:
    pieces = ["Hi <", "b>\n", "<tool", "_call>{", '"name": "f', '", "arguments": {', '"a": "on', "e\\", 'n"', "}", "}"]
    assert steps(HermesParser(), pieces) == [
        [("text", "Hi")],
        [("text", " <b>")],
        [],
        [],
        [],
        [("call", 0, "f"), ("arguments", 0, "{")],
        [("arguments", 0, '"a": "on')],
        [("arguments", 0, "e")],
        [("arguments", 0, '\\n"')],
        [("arguments", 0, "}")],
        [],
    ]


def test_call_ids_are_unique() -> None:
    output = HermesParser().push(None, hermes("now", {}) * 3)
    calls = [piece for piece in output if isinstance(piece, ToolCallStart)]
    assert [piece.index for piece in calls] == [0, 1, 2]
    assert len({piece.id for piece in calls}) == 3


THOUGHTS: dict[str, tuple[bool, str, Parsed]] = {
    "whole": (False, "<think>\nHm.\n\n</think>\n\nYes.", [("thought", "Hm."), ("text", "Yes.")]),
    "empty": (False, "<think>\n\n</think>\n\nYes.", [("text", "Yes.")]),
    "cut off": (False, "\n<think>Hm. </thi", [("thought", "Hm. </thi")]),
    "none": (False, "\nYes. <think>No.</think>", [("text", "\nYes. <think>No.</think>")]),
    "begun": (False, "<thin", [("text", "<thin")]),
    "inside": (True, "\nHm. <tool_call>\n</think>\n\nYes.", [("thought", "Hm. <tool_call>"), ("text", "Yes.")]),
    "inside, opened again": (True, "<think>\nHm.</think>Yes.", [("thought", "Hm."), ("text", "Yes.")]),
    "inside, cut off": (True, "Hm.", [("thought", "Hm.")]),
    "call": (
        False,
        f"<think>a</think>\n\n{hermes('now', {})}",
        [("thought", "a"), *call("now", {})],
    ),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning(name: str) -> None:
    inside, text, expected = THOUGHTS[name]
    check(lambda: HermesParser(reasons=True, inside=inside), text, expected, "call" in name)
    if "call" not in name:
        check(lambda: TaggedParser(reasons=True, inside=inside), text, expected, False)


QWEN: dict[str, tuple[str, Parsed, bool]] = {
    "string": (qwen("weather", city="Oslo"), call("weather", {"city": "Oslo"}), True),
    "strings stay": (
        qwen("weather", city="5", unit="true", any="{}", unknown="null"),
        call("weather", {"city": "5", "unit": "true", "any": "{}", "unknown": "null"}),
        True,
    ),
    "types": (
        qwen(
            "weather", days="3", share="0.5", hourly="true", place='{"lat": 1}', tags='["a"]', level="2", nothing="null"
        ),
        call(
            "weather",
            {"days": 3, "share": 0.5, "hourly": True, "place": {"lat": 1}, "tags": ["a"], "level": 2, "nothing": None},
        ),
        True,
    ),
    "python": (
        qwen("weather", hourly="False", nothing="None"),
        call("weather", {"hourly": False, "nothing": None}),
        True,
    ),
    "lists and objects of Python": (
        qwen("weather", tags="['a', \"b's\", None]", place="{'lat': True}"),
        call("weather", {"tags": ["a", "b's", None], "place": {"lat": True}}),
        True,
    ),
    "no literals": (
        qwen("weather", tags="[" * 5000, place="{1, 2}", days="1 + 1"),
        call("weather", {"tags": "[" * 5000, "place": "{1, 2}", "days": "1 + 1"}),
        True,
    ),
    "text or null": (qwen("weather", note="null"), call("weather", {"note": None}), True),
    "text, not null": (qwen("weather", note="5"), call("weather", {"note": "5"}), True),
    "other than asked for": (
        qwen("weather", days="many", hourly="1", share="NaN", tags="{}", place="'a'", level="true", circle="1"),
        call(
            "weather",
            {
                "days": "many",
                "hourly": "1",
                "share": "NaN",
                "tags": "{}",
                "place": "'a'",
                "level": "true",
                "circle": "1",
            },
        ),
        True,
    ),
    "as it was written": (
        qwen("weather", share="1.50", days="2.0"),
        call("weather", '{"share": 1.50, "days": 2.0}'),
        True,
    ),
    "none": (qwen("now"), call("now", "{}"), True),
    "unknown function": (qwen("other", a="1"), call("other", {"a": "1"}), True),
    "lines": (
        qwen("weather", city='\n  one\n\n\ttwo \\ "é🙂" </para\n<b>\n'),
        call("weather", {"city": '\n  one\n\n\ttwo \\ "é🙂" </para\n<b>\n'}),
        True,
    ),
    "no lines": (
        qwen("weather", city="a b", days="1").replace("\n", ""),
        call("weather", {"city": "a b", "days": 1}),
        True,
    ),
    "empty": ("<function=weather><parameter=city></parameter></function>", call("weather", {"city": ""}), True),
    "several": (
        f"Now:\n{qwen('weather', city='a')}\n{qwen('now')}\nand\n",
        [("text", "Now:"), *call("weather", {"city": "a"}), *call("now", {}, 1), ("text", "\nand")],
        True,
    ),
    "no opening tag": (
        qwen("weather", city="a").removeprefix("<tool_call>\n"),
        call("weather", {"city": "a"}),
        True,
    ),
    "two in one": (
        "<tool_call><function=now></function>\n<function=now></function></tool_call>",
        call("now", {}) + call("now", {}, 1),
        True,
    ),
    "forgotten tags": (
        "<tool_call>\n<function=weather>\n<parameter=city>\na\n<parameter=days>\n3\n</parameter>\n</tool_call>.",
        [*call("weather", {"city": "a", "days": 3}), ("text", ".")],
        True,
    ),
    "forgotten at the end": (
        "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</function>\n</tool_call>",
        call("weather", {"days": 3}),
        True,
    ),
    "speaks of it": (
        "Write <function=foo> and\n</function>",
        [("text", "Write <function=foo> and\n</function>")],
        False,
    ),
    "no name": ("<tool_call><function=>", [("text", "<tool_call><function=>")], False),
    "text in it": ("<tool_call><function=now> hm", [("text", "<tool_call><function=now> hm")], False),
    "cut off": ("<tool_call>\n<function=now>\n<param", [("text", "<tool_call>\n<function=now>\n<param")], False),
    "cut off in a key": (
        "<function=weather><parameter=ci",
        [*call("weather", "{"), ("text", "ci")],
        False,
    ),
    "cut off in a number": (
        "<function=weather><parameter=days>\n12",
        [*call("weather", '{"days": '), ("text", "\n12")],
        False,
    ),
    "cut off in a text": ("<function=weather><parameter=city>\nOs", call("weather", '{"city": "Os'), False),
    "broken between": (
        "<function=weather><parameter=days>1</parameter> hm</function>",
        [*call("weather", '{"days": 1'), ("text", " hm</function>")],
        False,
    ),
}


@pytest.mark.parametrize("name", QWEN)
def test_qwen(name: str) -> None:
    check(lambda: QwenParser(SCHEMAS), *QWEN[name])


def test_qwen_emits_early() -> None:
    pieces = [
        "<tool_call>\n<function=weather",
        ">\n",
        "<parameter=city>",
        "\nOs",
        'l"o\n',
        "</par",
        "ameter>\n",
        "</function>",
    ]
    assert steps(QwenParser(SCHEMAS), pieces) == [
        [],
        [],
        [("call", 0, "weather"), ("arguments", 0, '{"city": ')],
        [("arguments", 0, '"Os')],
        [("arguments", 0, 'l\\"o')],
        [],
        [("arguments", 0, '"')],
        [("arguments", 0, "}")],
    ]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CUTS = st.lists(st.integers(0, 10_000), max_size=30)
NAMES = st.sampled_from(["weather", "now", "f.g-h_1"])


@settings(deadline=None)
@given(st.lists(st.tuples(NAMES, st.dictionaries(st.text(), VALUES, max_size=4)), min_size=1, max_size=3), CUTS)
def test_hermes_round_trip(calls: list[tuple[str, dict[str, Any]]], cuts: list[int]) -> None:
    text = "\n".join(hermes(name, arguments) for name, arguments in calls)
    expected = [item for at, (name, arguments) in enumerate(calls) for item in call(name, arguments, at)]
    assert run(HermesParser(), pieces_of(text, cuts)) == (expected, True)


@settings(deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 2]), CUTS)
def test_json_in_any_style(value: Any, ascii_: bool, indent: int | None, cuts: list[int]) -> None:
    text = json.dumps({"parameters": {"v": value}, "name": "f"}, ensure_ascii=ascii_, indent=indent)
    found, called = run(HermesParser(), pieces_of(f"<tool_call>{text}</tool_call>", cuts))
    assert called
    assert json.loads(found[1][2]) == {"v": value}


# A value that holds a closing tag cannot be told from its end: the format has no escapes.
LINES = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["city", "unit", "x y"]), LINES), st.integers(), VALUES, CUTS)
def test_qwen_round_trip(texts: dict[str, str], days: int, place: Any, cuts: list[int]) -> None:
    spelled = json.dumps({"p": place}).replace("<", "\\u003c")
    text = qwen("weather", **texts, days=str(days), place=spelled)
    found, called = run(QwenParser(SCHEMAS), pieces_of(text, cuts))
    assert called
    assert found[0] == ("call", 0, "weather")
    assert json.loads(found[1][2]) == texts | {"days": days, "place": {"p": place}}


SHARDS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f"',
    ', "arguments": ',
    "{",
    "}",
    '"',
    "\\u00",
    "\n",
    " ",
    "x",
    "1",
    ",",
]
SHARDS += [
    "<function=",
    "now>",
    "weather>",
    "<parameter=",
    "city>",
    "days>",
    "</parameter>",
    "</function>",
    "<think>",
    "</think>",
]
MAKERS: list[Make] = [
    HermesParser,
    lambda: HermesParser(reasons=True),
    lambda: QwenParser(SCHEMAS, reasons=True, inside=True),
    lambda: QwenParser(SCHEMAS),
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(SHARDS), max_size=25), st.sampled_from(MAKERS), CUTS)
def test_the_result_does_not_depend_on_how_text_is_cut(shards: list[str], make: Make, cuts: list[int]) -> None:
    text = "".join(shards)
    whole = run(make(), [text])
    assert run(make(), pieces_of(text, cuts)) == run(make(), text) == whole
    if make is HermesParser and not any(kind == "call" for kind, *_ in whole[0]):
        assert "".join(item[1] for item in whole[0]) == text
    if whole[1]:
        assert any(_is_object(item[2]) for item in whole[0] if item[0] == "arguments")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


# Harmony


MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")


@pytest.fixture(scope="module")
def toks(smollm2: ModelFiles) -> Toks:
    """The embedded model's tokenizer with other models' tokens and template."""

    @lru_cache
    def make(template: str = "", special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> ModelTokenizer:
        tokenizer = Tokenizer.from_str(smollm2.tokenizer.json)
        tokenizer.add_special_tokens(list(special))
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
        return ModelTokenizer(tokenizer, template)

    return make


@pytest.fixture(scope="module")
def gpt_oss(toks: Toks) -> ModelTokenizer:
    return toks("<|start|>{{ messages }}", MARKS)


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


WEATHER = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo é🙂"}<|call|>'
OSLO_CALL = call("weather", '{"city": "Oslo é🙂"}')
ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|>"

HARMONY: dict[str, tuple[str, Parsed, bool]] = {
    "final": ("<|channel|>final<|message|>Hello\n you<|return|>", [("text", "Hello\n you")], False),
    "thought": (
        f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [("thought", "Let me see."), ("text", "Yes.")],
        False,
    ),
    "call": (WEATHER, OSLO_CALL, True),
    "thought and call": (f"{ANALYSIS}<|start|>assistant{WEATHER}", [("thought", "Let me see."), *OSLO_CALL], True),
    "preamble": (
        f"<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant{WEATHER}",
        [("text", "I look it up."), *OSLO_CALL],
        True,
    ),
    "recipient first": (
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo é🙂"}<|call|>',
        OSLO_CALL,
        True,
    ),
    "recipient in the role": (
        f"{ANALYSIS}<|start|>assistant to=functions.now<|channel|>analysis<|constrain|>json<|message|>{{}}<|call|>",
        [("thought", "Let me see."), *call("now", "{}")],
        True,
    ),
    "recipient of a bare name": ("<|channel|>commentary to=now<|message|>{}<|call|>", call("now", "{}"), True),
    "recipient of another kind": (
        "<|channel|>analysis to=python code<|message|>1 + 1<|call|>",
        [("thought", "1 + 1")],
        False,
    ),
    "several": (f"{WEATHER}<|start|>assistant{WEATHER}", OSLO_CALL + call("weather", OSLO_CALL[1][2], 1), True),
    "no content": ("<|channel|>commentary to=functions.now<|message|><|call|>", call("now", "{}"), True),
    "blanks": ("<|channel|>commentary to=functions.now<|message|>\n{ }\n<|call|>", call("now", "{ }"), True),
    "text after": (
        "<|channel|>commentary to=functions.now<|message|>{} so<|call|>",
        [*call("now", "{}"), ("text", "so")],
        True,
    ),
    "ended by another mark": ("<|channel|>commentary to=functions.now<|message|>{}<|end|>", call("now", "{}"), True),
    "no end": ("<|channel|>commentary to=functions.now<|message|>{}", call("now", "{}"), True),
    "cut off": (
        '<|channel|>commentary to=functions.now<|message|>{"a": [1, tr',
        [*call("now", '{"a": [1, '), ("text", "tr")],
        False,
    ),
    "not JSON": ("<|channel|>commentary to=functions.now<|message|>now()<|call|>", [("text", "now()")], False),
    "plain": ("No marks at all.\n", [("text", "No marks at all.\n")], False),
    "plain JSON": ('{"a": 1}', [("text", '{"a": 1}')], False),
    "nearly a recipient": ("to be or not to be", [("text", "to be or not to be")], False),
    "only the beginning of it": ("to", [("text", "to")], False),
    "no header": ("<|message|>Hello<|end|>", [("text", "Hello")], False),
    "text after the end": ("<|channel|>final<|message|>a<|end|> b", [("text", "a b")], False),
    "no end between": (
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|start|>assistant<|channel|>final<|message|>c",
        [("thought", "a"), ("text", "b\nc")],
        False,
    ),
    "another channel": ("<|channel|>final answer is<|message|>4", [("text", "final answer is4")], False),
    "no message": ("<|channel|>The answer is 4<|end|>", [("text", "The answer is 4")], False),
    "no header after all": ("<|start|>assistant\n\nHello\n", [("text", "assistant\n\nHello\n")], False),
    "two starts": ("<|start|>Hello<|start|>assistant<|message|>you", [("text", "Helloyou")], False),
    "stray marks": ("<|constrain|><|end|><|end|>Hello <|constrain|>you<|return|>", [("text", "Hello you")], False),
    "header cut off": ("<|channel|>commentary to=functions.wea", [], False),
    "channel cut off": (f"{ANALYSIS}<|start|>assistant<|channel|>fin", [("thought", "Let me see.")], False),
    "nothing": ("", [], False),
}


@pytest.mark.parametrize("name", HARMONY)
def test_harmony(gpt_oss: ModelTokenizer, name: str) -> None:
    text, expected, called = HARMONY[name]
    for lags in ((), (1,), (3, 0), (50,), (1000,), (0, 7, 2)):
        assert run_tokens(HarmonyParser(gpt_oss, SCHEMAS), gpt_oss, text, lags) == (expected, called)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_harmony_with_late_text(gpt_oss: ModelTokenizer, data: st.DataObject) -> None:
    words = [
        "assistant",
        "analysis",
        "commentary",
        "final",
        " to=functions.now",
        ' {"a": "b',
        '"}',
        "Hello",
        "\n",
        "🙂",
        " ",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from([*MARKS, *words]), max_size=20)))
    lags = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=20))
    prompt = run_tokens(HarmonyParser(gpt_oss), gpt_oss, text)
    assert run_tokens(HarmonyParser(gpt_oss), gpt_oss, text, lags) == prompt
    if prompt[1]:
        assert any(_is_object(item[2]) for item in prompt[0] if item[0] == "arguments")


def test_harmony_emits_early(gpt_oss: ModelTokenizer) -> None:
    parser, stream = HarmonyParser(gpt_oss), gpt_oss.stream()
    output = [parsed(parser.push(token, stream.push(token))) for token in gpt_oss.encode(ANALYSIS)]
    assert output[-1] == []
    assert [item for step in output for item in step] == [("thought", word) for word in ("Let", " me", " see", ".")]


def test_harmony_with_a_stop_string(gpt_oss: ModelTokenizer) -> None:
    """The stop string was found in the content: the rest of the completion, also of a call, is missing."""
    parser = HarmonyParser(gpt_oss)
    output = [item for token in gpt_oss.encode(WEATHER.removesuffix("<|call|>")) for item in parser.push(token, "")]
    assert output + parser.finish() == []
    assert not parser.called


# Which parser


THINKING = "{{ messages[0].content }}{% if think %}<think>\n{% endif %}{# <think> #}"


@pytest.mark.parametrize(
    ("template", "tools", "choice", "expected"),
    [
        ("{{ messages }}", [], "auto", PlainParser),
        ("<tool_call>", [], "auto", PlainParser),
        ("<tool_call>", TOOLS, "none", PlainParser),
        ("<tool_call>", TOOLS, "auto", HermesParser),
        ("<tool_call>", TOOLS, "weather", HermesParser),
        ("{{ messages }}", TOOLS, "auto", HermesParser),
        ("<tool_call><function=x>", TOOLS, "required", QwenParser),
        ("<tool_call><function=x>", TOOLS, "none", PlainParser),
        ("<tool_call><think>", TOOLS, "none", TaggedParser),
        ("<think>", [], "auto", TaggedParser),
        ("", TOOLS, "auto", HermesParser),
    ],
)
def test_parser_of(
    toks: Toks, template: str, tools: list[dict[str, Any]], choice: str, expected: type[ToolParser]
) -> None:
    assert type(parser_of(toks(template), tools, choice)) is expected


def test_parser_of_harmony(gpt_oss: ModelTokenizer) -> None:
    assert all(isinstance(parser_of(gpt_oss, tools, "none"), HarmonyParser) for tools in ([], TOOLS))


def test_prompts_that_end_within_the_reasoning(toks: Toks) -> None:
    tokenizer, text = toks(THINKING), "a</think>b"
    apart, plain = [("thought", "a"), ("text", "b")], [("text", text)]
    assert run(parser_of(tokenizer, [], "auto", template={"think": True}), text)[0] == apart
    assert run(parser_of(tokenizer, [], "auto"), text)[0] == plain
    assert run(parser_of(tokenizer, [], "auto", template={"think": True}, guided=True), text)[0] == plain
    refusing = toks("{{ raise_exception('no') }}<think>")
    assert run(parser_of(refusing, [], "auto"), text)[0] == plain


@pytest.mark.parametrize("special", [True, False])
def test_tags_that_are_special_tokens(toks: Toks, special: bool) -> None:
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer = toks("<think><tool_call>", **{"special" if special else "added": tags})
    text = f"<think>a</think>b {hermes('weather', OSLO | {'t': 'é'})}"
    found = run_tokens(parser_of(tokenizer, TOOLS, "auto"), tokenizer, text)
    assert found == ([("thought", "a"), ("text", "b"), *call("weather", OSLO | {"t": "é"})], True)


# Calls that must happen


SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORCED = [
    {"type": "function", "function": {"name": "small", "parameters": SMALL}},
    {"type": "function", "function": {"name": "by_ref", "parameters": {"$ref": "#/$defs/a", "$defs": {"a": SMALL}}}},
    {"type": "function", "function": {"name": "free"}},
]


@lru_cache
def guides_of(tokenizer: ModelTokenizer) -> GrammarCompiler:
    vocabulary = Tokenizer.from_str(tokenizer.json).get_vocab_size()
    return GrammarCompiler(tokenizer, vocabulary, (_end_of(tokenizer),))


def _end_of(tokenizer: ModelTokenizer) -> int:
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    return end


def forced_guide(tokenizer: ModelTokenizer, tools: list[dict[str, Any]], choice: str) -> GrammarMatcher:
    return guides_of(tokenizer).start(forced_format(tokenizer, tools, choice))


def walk(tokenizer: ModelTokenizer, grammar: GrammarMatcher, seed: int) -> Walk:
    model = SimpleNamespace(tokenizer=tokenizer, spec=SimpleNamespace(eos_tokens=(_end_of(tokenizer),)))
    return Walk(cast(ModelFiles, model), grammar, seed, wander=30)


def forced_call(tokenizer: ModelTokenizer, tokens: list[int], choice: str) -> tuple[str, Any]:
    parser, stream = parser_of(tokenizer, FORCED, choice), tokenizer.stream()
    output = parsed([item for token in tokens for item in parser.push(token, stream.push(token))] + parser.finish())
    assert parser.called
    assert [kind for kind, *_ in output] == ["call", "arguments"]
    return output[0][2], json.loads(output[1][2])


@pytest.mark.parametrize("choice", ["required", "small", "by_ref", "free"])
@pytest.mark.parametrize("special", [True, False, None])
@pytest.mark.parametrize("template", ["<tool_call>", "<tool_call><function=>"])
def test_forced_calls_are_parsed_as_calls(toks: Toks, template: str, special: bool | None, choice: str) -> None:
    tags = ("<tool_call>", "</tool_call>")
    tokenizer = toks(template, **({} if special is None else {"special" if special else "added": tags}))
    names = set()
    for seed in range(6):
        walked = walk(tokenizer, forced_guide(tokenizer, FORCED, choice), seed)
        walked.text()
        name, arguments = forced_call(tokenizer, walked.tokens, choice)
        names.add(name)
        assert Draft202012Validator({} if name == "free" else SMALL).is_valid(arguments)
    assert names <= {"small", "by_ref", "free"} if choice == "required" else names == {choice}


@pytest.mark.parametrize("choice", ["required", "small"])
def test_forced_calls_of_harmony(gpt_oss: ModelTokenizer, choice: str) -> None:
    for seed in range(4):
        begun = gpt_oss.encode("<|channel|>commentary to=functions.small <|constrain|>json<|message|>")
        grammar = forced_guide(gpt_oss, FORCED, choice)
        grammar.replay(begun)
        walked = walk(gpt_oss, grammar, seed)
        walked.text()
        name, arguments = forced_call(gpt_oss, begun + walked.tokens, choice)
        assert name == "small"
        assert Draft202012Validator(SMALL).is_valid(arguments)


def test_forced_calls_of_harmony_after_reasoning(gpt_oss: ModelTokenizer) -> None:
    grammar = forced_guide(gpt_oss, FORCED, "required")
    text = f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.free <|constrain|>json<|message|>{{}}"
    grammar.replay(gpt_oss.encode(text))
    assert grammar.finished
    assert run_tokens(HarmonyParser(gpt_oss), gpt_oss, text) == (
        [("thought", "Let me see."), *call("free", "{}")],
        True,
    )
    with pytest.raises(BadRequest, match="does not fit"):
        forced_guide(gpt_oss, FORCED, "small").replay(gpt_oss.encode("<|channel|>final"))


@pytest.mark.parametrize("cut", ["<tool", "<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "free"'])
def test_a_truncated_forced_call_is_no_text(toks: Toks, cut: str) -> None:
    for template in ("<tool_call>", "<tool_call><function=x>"):
        assert run(parser_of(toks(template), FORCED, "required"), cut)[0] == []
        assert run(parser_of(toks(template), FORCED, "auto"), cut)[0] == [("text", cut)]


def test_a_tool_without_parameters_has_no_arguments(toks: Toks) -> None:
    for parameters in (None, {}, {"type": "object", "properties": {}}):
        tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
        walked = walk(toks(), forced_guide(toks(), tools, "required"), seed=1)
        assert walked.text() == '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("format", "answer"),
    [
        (OutputFormat(type="json_schema", schema=SMALL), '{"city": "Oslo", "days": 3}'),
        (OutputFormat(type="json_object"), '{"a": 1}'),
        (OutputFormat(type="choice", choices=("yes", "no")), "yes"),
    ],
)
def test_a_call_or_a_completion_in_its_format(
    toks: Toks, gpt_oss: ModelTokenizer, format: OutputFormat, answer: str
) -> None:
    for tokenizer, before, call in (
        (toks(), "", '<tool_call>\n{"name": "free", "arguments": {}}\n</tool_call>'),
        (
            gpt_oss,
            "<|channel|>final<|message|>",
            "<|channel|>commentary to=functions.free <|constrain|>json<|message|>{}",
        ),
    ):
        for text in (before + answer, call):
            grammar = guides_of(tokenizer).start(either_format(tokenizer, FORCED, format))
            grammar.replay(tokenizer.encode(text))
            assert grammar.finished or grammar.allow()[_end_of(tokenizer)]
        with pytest.raises(BadRequest, match="does not fit"):
            guides_of(tokenizer).start(either_format(tokenizer, FORCED, format)).replay(tokenizer.encode("Well"))


def test_a_format_of_openai_becomes_a_grammar(toks: Toks, gpt_oss: ModelTokenizer) -> None:
    """Beside tools, and for GPT-OSS always."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    completion = read(body, ChatCompletionRequest)
    for tokenizer, tools in ((toks(), FORCED), (gpt_oss, FORCED), (gpt_oss, [])):
        chat = ChatRequest(messages=body["messages"], tools=tools, format=completion.format())
        format = generate_options(chat, tokenizer)["format"]
        assert isinstance(format, OutputFormat)
        assert format.type == "grammar"


def test_calls_beside_a_format_need_json_or_choices(toks: Toks) -> None:
    with pytest.raises(BadRequest, match="give json_schema"):
        either_format(toks(), FORCED, OutputFormat(type="regex", pattern="a+"))


@pytest.mark.parametrize("harmony", [True, False])
def test_many_tools(toks: Toks, gpt_oss: ModelTokenizer, harmony: bool) -> None:
    tools = [{"type": "function", "function": {"name": f"tool-{n}.x", "parameters": SCHEMA}} for n in range(128)]
    assert forced_guide(gpt_oss if harmony else toks(), tools, "required").allow().any()


def test_invalid_forced_calls_are_refused(toks: Toks) -> None:
    with pytest.raises(BadRequest, match="give tools"):
        forced_format(toks(), [], "required")
    with pytest.raises(BadRequest, match="no tool 'other'; tools has weather, now"):
        forced_format(toks(), TOOLS, "other")
    with pytest.raises(BadRequest, match=r"tools\[0\]"):
        forced_format(toks(), [{}], "required")


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ({}, "tools must be a list"),
        ([*TOOLS, 5], r"tools\[2\] must be an object"),
        ([{"type": "web_search"}], 'type "function"'),
        ([{"type": "function"}], r"tools\[0\].function must be an object"),
        ([{"type": "function", "function": {}}], "function.name must be 1 to 64"),
        ([{"type": "function", "function": {"name": "a b"}}], "function.name must be 1 to 64"),
        ([{"type": "function", "function": {"name": "a\n"}}], "function.name must be 1 to 64"),
        ([{"type": "function", "function": {"name": "a" * 65}}], "function.name must be 1 to 64"),
        ([{"type": "function", "function": {"name": "é"}}], "function.name must be 1 to 64"),
        ([{"type": "function", "function": {"name": "a", "description": 5}}], "description must be text"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], "parameters must be a JSON schema"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}], 'type "object"'),
        ([{"type": "function", "function": {"name": "a", "parameters": {"properties": 1}}}], "properties must be"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_tools_are_refused(tools: Any, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        require_tools(tools)


def test_valid_tools_are_accepted() -> None:
    require_tools([])
    require_tools(TOOLS)
    require_tools([{"type": "function", "function": {"name": "f", "parameters": None, "description": None}}])


def test_tools_are_described_where_the_template_has_none() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": {"zone": "UTC"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "12:00"}]},
    ]
    response = render_tools_as_text(messages, TOOLS)
    assert [message["role"] for message in response] == ["system", "assistant", "user"]
    assert response[0]["content"].startswith("Be brief.\n\nYou can call functions.")
    assert all(json.dumps(tool["function"], ensure_ascii=False) in response[0]["content"] for tool in TOOLS)
    assert response[1]["content"] == '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    assert response[2]["content"] == "<tool_response>\n12:00\n</tool_response>"
    assert render_tools_as_text(messages[1:], TOOLS)[0]["role"] == "system"
    assert render_tools_as_text(messages[:1], []) == messages[:1]
