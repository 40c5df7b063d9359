"""Calls that must happen: grammars for them, and requests that are refused."""

import json
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from tokenizers import Tokenizer

from disaggregated_inference.api import OutputFormat
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.chat import ChatRequest, generate_options
from disaggregated_inference.gateway.openai.requests import ChatCompletionRequest, read
from disaggregated_inference.gateway.tool_parsers import parser_of
from disaggregated_inference.gateway.tool_parsers.forced import either_format, forced_format
from disaggregated_inference.gateway.tool_parsers.harmony import HarmonyParser
from disaggregated_inference.gateway.tool_parsers.prompted_tools import render_tools_as_text
from disaggregated_inference.gateway.tool_parsers.tools import require_tools
from disaggregated_inference.models import ModelFiles, ModelTokenizer
from disaggregated_inference.node.structured_output import GrammarCompiler, GrammarMatcher
from tests.support.grammar_walk import Walk
from tests.support.tool_calls import ANALYSIS, SCHEMA, TOOLS, Toks, call, parsed, run, run_tokens

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
    for tokenizer, before, called in (
        (toks(), "", '<tool_call>\n{"name": "free", "arguments": {}}\n</tool_call>'),
        (
            gpt_oss,
            "<|channel|>final<|message|>",
            "<|channel|>commentary to=functions.free <|constrain|>json<|message|>{}",
        ),
    ):
        for text in (before + answer, called):
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
