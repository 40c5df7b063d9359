"""The channels of GPT-OSS, token by token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggregated_inference.gateway.tool_parsers.harmony import HarmonyParser
from disaggregated_inference.models import ModelTokenizer
from tests.support.tool_calls import ANALYSIS, MARKS, SCHEMAS, Parsed, call, is_object, parsed, run_tokens

WEATHER = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo é🙂"}<|call|>'
OSLO_CALL = call("weather", '{"city": "Oslo é🙂"}')
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
        assert any(is_object(item[2]) for item in prompt[0] if item[0] == "arguments")


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
