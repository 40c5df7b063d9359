"""Hermes calls and reasoning in tags. Tokens may cut the text anywhere; nothing is lost."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggregated_inference.gateway.tool_parsers.base import ToolCallStart
from disaggregated_inference.gateway.tool_parsers.hermes import HermesParser
from disaggregated_inference.gateway.tool_parsers.qwen import QwenParser
from disaggregated_inference.gateway.tool_parsers.tagged import TaggedParser
from tests.support.tool_calls import (
    CUTS,
    OSLO,
    SCHEMAS,
    Make,
    Parsed,
    call,
    check,
    hermes,
    is_object,
    pieces_of,
    qwen,
    run,
    steps,
)

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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
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
        assert any(is_object(item[2]) for item in whole[0] if item[0] == "arguments")
