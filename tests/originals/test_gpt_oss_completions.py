"""GPT-OSS's completions are parsed as openai-harmony parses them, whatever the pieces that their text comes in."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggregated_inference.gateway.tool_parsers import parser_of
from disaggregated_inference.gateway.tool_parsers.base import ContentDelta
from tests.support import originals
from tests.support.parsed_content import Parsed, parsed

pytestmark = pytest.mark.slow

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("now", "weather", "a.b-c")]


def reference(tokens: list[int]) -> Parsed:
    library, encoding = originals.harmony()
    parser = library.StreamableParser(encoding, library.Role.ASSISTANT)
    for token in tokens:
        parser.process(token)
    parser.process_eos()
    texts: dict[str, list[str]] = {"analysis": [], "final": []}
    calls = []
    for message in parser.messages:
        text = message.content[0].text
        if (message.recipient or "").startswith("functions."):
            calls.append((message.recipient.removeprefix("functions."), text.strip() or "{}"))
        elif text:
            texts["analysis" if message.channel == "analysis" else "final"].append(text)
    return "\n".join(texts["final"]), "\n".join(texts["analysis"]), calls


def ours(tokens: list[int], lags: Sequence[int] = (0,)) -> Parsed:
    """`lags`: how many characters each token holds back, as stop strings make it."""
    tokenizer = originals.gpt_oss_tokenizer()
    parser, stream, held = parser_of(tokenizer, TOOLS, "auto"), tokenizer.stream(), ""
    content: list[ContentDelta] = []
    for at, token in enumerate(tokens):
        held += stream.push(token)
        sent = max(len(held) - lags[at % len(lags)], 0)
        content += parser.push(token, held[:sent])
        held = held[sent:]
    content += parser.push(None, "") if not held else parser.push(tokens[-1], held)
    return parsed([*content, *parser.finish()])


def check(text: str, lags: Sequence[int] | None = None) -> Parsed:
    tokens = originals.gpt_oss_tokenizer().encode(text)
    expected = reference(tokens)
    for each in [lags] if lags else [(0,), *((size,) for size in range(1, 12)), (1000,), (0, 7, 2), (3, 0)]:
        assert ours(tokens, each) == expected
    return expected


ANALYSIS = "<|channel|>analysis<|message|>Let me see: é🙂.<|end|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Oslo 🙂"}<|call|>'
COMPLETIONS = {
    "answer": "<|channel|>final<|message|>Hello\n you<|return|>",
    "reasoning": f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>漢字 👩‍👩‍👧<|return|>",
    "reasoning twice": f"{ANALYSIS}<|start|>assistant{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Yes",
    "call": CALL,
    "reasoned call": f"{ANALYSIS}<|start|>assistant{CALL}",
    "preamble": f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}",
    "preamble and answer": (
        f"<|channel|>commentary<|message|>One.<|end|><|start|>assistant{ANALYSIS}"
        "<|start|>assistant<|channel|>final<|message|>Two.<|return|>"
    ),
    "several calls": f"{CALL}<|start|>assistant{CALL}<|start|>assistant to=functions.now<|message|>{{}}<|call|>",
    "recipient in the role": ' to=functions.now<|channel|>commentary <|constrain|>json<|message|>{"a": [1]}<|call|>',
    "no blank before the type": "<|channel|>commentary to=functions.now<|constrain|>json<|message|>{}<|call|>",
    "no type": "<|channel|>commentary to=functions.a.b-c<|message|>{}<|call|>",
    "on the analysis channel": "<|channel|>analysis to=functions.now code<|message|>{}<|call|>",
    "recipient without to=": "<|channel|>commentary functions.now <|constrain|>json<|message|>{}<|call|>",
    "no content": "<|channel|>commentary to=functions.now<|message|><|call|>",
    "typed answer": '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>',
    "another tool": "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
    "no end": "<|channel|>final<|message|>Hello",
    "no channel": "<|message|>Hello<|end|>",
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(name: str) -> None:
    check(COMPLETIONS[name])


def test_what_they_mean() -> None:
    text, reasoning, calls = check(COMPLETIONS["preamble"])
    assert (text, reasoning, calls) == ("I look.", "Let me see: é🙂.", [("weather", '{"city":"Oslo 🙂"}')])
    assert check(COMPLETIONS["reasoning twice"])[1] == "Let me see: é🙂.\nLet me see: é🙂."


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.builds(
    lambda value, indent: json.dumps(value, ensure_ascii=False, indent=indent),
    st.dictionaries(st.text(), VALUES, max_size=3),
    st.sampled_from([None, 1]),
)
HEADERS = [
    " to=functions.{}<|channel|>commentary <|constrain|>json",
    " to=functions.{}<|channel|>commentary json",
    "<|channel|>commentary to=functions.{} <|constrain|>json",
    "<|channel|>commentary to=functions.{}<|constrain|>json",
    "<|channel|>commentary to=functions.{}",
    "<|channel|>analysis to=functions.{} code",
]
# A mark in a text is a mark: the model cannot write it otherwise.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="|"), max_size=20)
SAID = st.builds(
    lambda channel, text: f"<|channel|>{channel}<|message|>{text}<|end|>",
    st.sampled_from(["analysis", "commentary", "final"]),
    TEXTS,
)
CALLED = st.builds(
    lambda header, name, arguments: f"{header.format(name)}<|message|>{arguments.replace('<|', '< |')}<|call|>",
    st.sampled_from(HEADERS),
    st.sampled_from(["now", "weather", "a.b-c"]),
    ARGUMENTS,
)


@settings(max_examples=200)
@given(st.lists(SAID | CALLED, min_size=1, max_size=5), st.lists(st.integers(0, 30), min_size=1, max_size=9))
def test_completions_of_any_shape(messages: list[str], lags: list[int]) -> None:
    check("<|start|>assistant".join(messages), lags)
