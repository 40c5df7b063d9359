"""Which parser a model, its template and a request get."""

from typing import Any

import pytest

from disaggregated_inference.gateway.tool_parsers import parser_of
from disaggregated_inference.gateway.tool_parsers.base import PlainParser, ToolParser
from disaggregated_inference.gateway.tool_parsers.harmony import HarmonyParser
from disaggregated_inference.gateway.tool_parsers.hermes import HermesParser
from disaggregated_inference.gateway.tool_parsers.qwen import QwenParser
from disaggregated_inference.gateway.tool_parsers.tagged import TaggedParser
from disaggregated_inference.models import ModelTokenizer
from tests.support.tool_calls import OSLO, TOOLS, Toks, call, hermes, run, run_tokens

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
