"""Qwen's calls, whose parameters have tags of their own."""

import pytest

from disaggregated_inference.gateway.tool_parsers.qwen import QwenParser
from tests.support.tool_calls import SCHEMAS, Parsed, call, check, qwen, steps

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
