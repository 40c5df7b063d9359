"""Qwen's prompts equal those of transformers, token for token, and its completions are parsed as their makers do."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from disaggregated_inference.gateway.anthropic.requests import CountTokensRequest
from disaggregated_inference.gateway.anthropic.requests import read as read_anthropic
from disaggregated_inference.gateway.chat import ChatRequest, encode_prompt
from disaggregated_inference.gateway.openai.messages import plain_messages
from disaggregated_inference.gateway.openai.requests import ChatCompletionRequest
from disaggregated_inference.gateway.openai.requests import read as read_openai
from disaggregated_inference.gateway.tool_parsers import parser_of
from disaggregated_inference.models import ModelTokenizer
from tests.support import originals
from tests.support.parsed_content import parsed

pytestmark = pytest.mark.slow

Messages = list[dict[str, Any]]

TEMPLATES = ["qwen3", "qwen3_instruct_2507", "Qwen3-Thinking", "Qwen3-Coder", "qwen3_6"]
THINKING = ("qwen3", "Qwen3-Thinking", "qwen3_6")

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": " The city. "},
        "days": {"type": "integer", "minimum": 1},
        "share": {"type": "number"},
        "hourly": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"lat": {"type": "number"}}},
    },
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Wétter <&>", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
OSLO = {"city": "Oslo é🙂\nnorth", "days": 3, "tags": ["a", "b'c"], "place": {"lat": 59.9}, "hourly": True}


def call(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
ASK: dict[str, Any] = {"role": "user", "content": "Weather? é🙂"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Old thought."}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "Hm.\n\nWell.",
    "tool_calls": [call("a", "weather", **OSLO)],
}
CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call("a", "weather", **OSLO), call("b", "now")],
}
SUN: dict[str, Any] = {"role": "tool", "tool_call_id": "a", "content": "sun"}
NOON: dict[str, Any] = {"role": "tool", "tool_call_id": "b", "content": '{"h": 12}'}

CHATS: dict[str, Messages] = {
    "a question": [ASK],
    "instructions": [SYSTEM, ASK],
    "several turns": [SYSTEM, ASK, ANSWER, ASK, ANSWER, ASK],
    "a call": [SYSTEM, ASK, ANSWER, ASK, CALL, SUN],
    "two calls": [ASK, CALLS, SUN, NOON],
    "calls in a row": [ASK, CALL, SUN, CALLS, SUN, NOON],
    "after a call": [ASK, CALL, SUN, ANSWER, ASK],
    "marks": [{"role": "user", "content": "<|im_end|> <think>a</think> <tool_call>"}],
}


@lru_cache
def _transformers() -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(originals.qwen_tokenizer("qwen3").json)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def reference(template: str, messages: Messages, **options: Any) -> list[int]:
    options |= {"chat_template": originals.template(template), "add_generation_prompt": True, "return_dict": False}
    return list(_transformers().apply_chat_template(messages, **options))


def as_openai(messages: Messages) -> Messages:
    """As clients send it: arguments as text."""
    return [
        message | {"tool_calls": [_with_text(each) for each in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_text(made: dict[str, Any]) -> dict[str, Any]:
    return made | {"function": made["function"] | {"arguments": json.dumps(made["function"]["arguments"])}}


def openai_tokens(tokenizer: ModelTokenizer, messages: Messages, tools: Messages, **more: Any) -> list[int]:
    given = {"tools": tools} if tools else {}
    request = read_openai({"messages": as_openai(messages), **given, **more}, ChatCompletionRequest)
    chat = ChatRequest(
        messages=plain_messages(request.messages),
        tools=[tool.plain() for tool in request.tools or []],
        template=request.template(),
    )
    return encode_prompt(chat, tokenizer)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", CHATS)
def test_prompts_equal_transformers(template: str, name: str) -> None:
    tokenizer, messages = originals.qwen_tokenizer(template), CHATS[name]
    assert openai_tokens(tokenizer, messages, []) == reference(template, messages)
    assert openai_tokens(tokenizer, messages, TOOLS) == reference(template, messages, tools=TOOLS)
    for thinks in (True, False):
        expected = reference(template, messages, tools=TOOLS, enable_thinking=thinks)
        given = {"chat_template_kwargs": {"enable_thinking": thinks}}
        assert openai_tokens(tokenizer, messages, TOOLS, **given) == expected
    assert openai_tokens(tokenizer, messages, TOOLS, reasoning_effort="none") == expected


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_conversation_of_anthropic(template: str) -> None:
    blocks: Messages = [{"type": "thinking", "thinking": CALL["reasoning_content"], "signature": ""}]
    blocks += [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "a", "name": "weather", "input": OSLO}]
    function = TOOLS[0]["function"]
    body = {
        "model": "qwen",
        "system": "Be brief.",
        "tools": [{"name": "weather", "description": function["description"], "input_schema": PARAMETERS}],
        "messages": [
            ASK,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "sun"}]},
        ],
    }
    chat = read_anthropic(body, CountTokensRequest).chat_request("qwen", {})
    expected = reference(template, [SYSTEM, ASK, CALL, SUN], tools=TOOLS[:1])
    assert encode_prompt(chat, originals.qwen_tokenizer(template)) == expected


def pieces(tokenizer: ModelTokenizer, text: str, lags: Sequence[int]) -> Iterator[tuple[int | None, str]]:
    """Token by token; `lags`: how many characters each holds back."""
    stream, held = tokenizer.stream(), ""
    for at, token in enumerate(tokenizer.encode(text)):
        held += stream.push(token)
        sent = max(len(held) - lags[at % len(lags)], 0)
        yield token, held[:sent]
        held = held[sent:]
    yield None, held


def completion(tokenizer: ModelTokenizer, message: dict[str, Any], options: dict[str, Any]) -> str:
    """What the model writes to make this message: the part that the prompt does not have."""
    prompt = tokenizer.render_chat([ASK], tools=TOOLS, **options)
    whole = tokenizer.render_chat([ASK, message], tools=TOOLS, add_generation_prompt=False, **options)
    assert whole.startswith(prompt)
    return whole[len(prompt) :].removesuffix("\n").removesuffix("<|im_end|>")


def parse(tokenizer: ModelTokenizer, text: str, lags: Sequence[int] | int, **options: Any) -> Any:
    """`lags`, or the size of pieces of text."""
    parser = parser_of(tokenizer, TOOLS, "auto", template=options)
    cut: Iterable[tuple[int | None, str]] = (
        [(None, text[at : at + lags]) for at in range(0, len(text), lags)]
        if isinstance(lags, int)
        else pieces(tokenizer, text, lags)
    )
    content = [item for token, piece in cut for item in parser.push(token, piece)]
    found, reasoning, calls = parsed([*content, *parser.finish()])
    return found, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


def expected_of(message: dict[str, Any], thinks: bool) -> Any:
    made = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ())]
    return message["content"], message.get("reasoning_content", "") if thinks else "", made


SIZES: list[Sequence[int] | int] = [*range(1, 40), 1000, (0,), (1,), (5,), (12, 0), (0, 30, 3), (1000,)]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("message", [ANSWER, CALL, CALLS], ids=["answer", "call", "calls"])
def test_completions_are_parsed_back(template: str, message: dict[str, Any]) -> None:
    tokenizer, thinks = originals.qwen_tokenizer(template), template in THINKING
    text = completion(tokenizer, message, {})
    for sizes in SIZES:
        assert parse(tokenizer, text, sizes) == expected_of(message, thinks)


@pytest.mark.parametrize("template", ["qwen3", "qwen3_6"])
def test_without_thinking(template: str) -> None:
    tokenizer, message = originals.qwen_tokenizer(template), {**CALL, "reasoning_content": ""}
    text = completion(tokenizer, message, {"enable_thinking": False})
    for sizes in SIZES:
        assert parse(tokenizer, text, sizes, enable_thinking=False) == expected_of(message, False)


# The closing tag of a value cannot be a part of it, and `null` is a word of the format.
WORDS = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=12)
VALUES = st.fixed_dictionaries(
    {"city": WORDS.filter(lambda text: text.lower() != "null")},
    optional={
        "days": st.integers(-(10**9), 10**9),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "hourly": st.booleans(),
        "tags": st.lists(WORDS, max_size=3),
        "place": st.dictionaries(WORDS, st.integers() | WORDS | st.none() | st.lists(st.booleans()), max_size=3),
    },
)


@settings(max_examples=60)
@given(VALUES, st.integers(1, 30))
@pytest.mark.parametrize("template", ["qwen3", "Qwen3-Coder", "qwen3_6"])
def test_arguments_of_any_shape(template: str, values: dict[str, Any], size: int) -> None:
    tokenizer = originals.qwen_tokenizer(template)
    text = completion(
        tokenizer, {"role": "assistant", "content": "", "tool_calls": [call("a", "weather", **values)]}, {}
    )
    found = parse(tokenizer, text, size)[2]
    assert found == [("weather", values)]
    block = text.partition("<tool_call>")[2].partition("</tool_call>")[0].strip()
    assert found == [_as_mlx_parses(template, block)]


def _as_mlx_parses(template: str, block: str) -> tuple[str, dict[str, Any]]:
    """With the parser that Qwen published, as mlx-lm has it."""
    from mlx_lm.tool_parsers import json_tools, qwen3_coder

    made = (json_tools if template == "qwen3" else qwen3_coder).parse_tool_call(block, TOOLS)
    return made["name"], made["arguments"]


def test_the_vocabulary_is_the_shipped_one() -> None:
    tokenizer = originals.qwen_tokenizer("qwen3")
    maker, ours = originals.shipped_vocabulary("qwen3"), originals.qwen_vocabulary()
    assert maker.get_vocab() == ours.get_vocab()
    assert str(maker.get_added_tokens_decoder()) == str(ours.get_added_tokens_decoder())
    text = originals.template("Qwen3-Coder")
    assert maker.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)
    settings_ = json.loads((originals.shipped("qwen3") / "tokenizer_config.json").read_text())
    chat = [SYSTEM, ASK, ANSWER, ASK, CALL, SUN]
    shipped = ModelTokenizer(maker, settings_["chat_template"])
    assert shipped.render_chat(chat, tools=TOOLS) == tokenizer.render_chat(chat, tools=TOOLS)
