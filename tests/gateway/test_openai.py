"""OpenAI's own package against the gateway: a pair of nodes with the embedded model, and a simulated pair."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI
from starlette.applications import Starlette
from starlette.requests import Request

from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.http import EventStreamResponse
from tests.support.cluster import config_of
from tests.support.gateway import served, simulated_config, simulated_pair, smollm2_pair
from tests.support.openai_requests import HELLO, QUICK, SIMULATED, TIME, WEATHER, openai_client
from tests.support.prompt_logprobs import check_prompt_logprobs, transformers_logprobs

TOKENS = 12
GREEDY: Any = {"model": "smollm2", "messages": HELLO, "temperature": 0, "max_tokens": TOKENS}
SEA = "The sea is wide — naïve 🐙 sailors think it is flat."
SCORED: Any = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}  # as lm-eval asks


class City(pydantic.BaseModel):
    name: str
    inhabitants: int
    coastal: bool


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[str, dict[str, Any]]]:
    """A gateway over the embedded model, and its config."""
    with smollm2_pair() as pair:
        config = config_of(*pair)
        with served(config) as url:
            yield url, config


@pytest.fixture(scope="module")
def client(real: tuple[str, dict[str, Any]]) -> Iterator[OpenAI]:
    with openai_client(real[0]) as made:
        yield made


@pytest.fixture(scope="module")
def quick_url() -> Iterator[str]:
    with simulated_pair() as pair, served(simulated_config(*pair)) as url:
        yield url


@pytest.fixture(scope="module")
def quick(quick_url: str) -> Iterator[OpenAI]:
    with openai_client(quick_url) as made:
        yield made


def _text(chunks: Any, choice: int = 0) -> str:
    output = [part for chunk in chunks for part in chunk.choices if part.index == choice]
    return "".join(part.delta.content or "" for part in output)


# The same text, however it is asked for.


def test_chat_equals_the_client(real: tuple[str, dict[str, Any]], client: OpenAI) -> None:
    with DisaggregatedClient(real[1]) as direct:
        text, metrics = direct.generate(messages=HELLO, temperature=0, max_tokens=TOKENS)
    answer = client.chat.completions.create(**GREEDY)
    assert answer.choices[0].message.content == text
    assert (answer.object, answer.model, answer.choices[0].message.role) == ("chat.completion", "smollm2", "assistant")
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (metrics["prompt_tokens"], TOKENS)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + TOKENS
    assert answer.usage.prompt_tokens_details
    assert answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.choices[0].message.tool_calls is None


def test_streams_equal_the_whole_response(client: OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True))
    assert _text(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_usage_is_the_last_chunk_with_include_usage(client: OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY)
    *chunks, last = client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage
    assert whole.usage
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_many_concurrent_requests_of_the_async_client(real: tuple[str, dict[str, Any]], client: OpenAI) -> None:
    expected = client.chat.completions.create(**GREEDY).choices[0].message.content

    async def ask(asking: AsyncOpenAI, stream: bool) -> str | None:
        if not stream:
            return (await asking.chat.completions.create(**GREEDY)).choices[0].message.content
        return _text([chunk async for chunk in await asking.chat.completions.create(**GREEDY, stream=True)])

    async def all_of_them() -> list[str | None]:
        async with AsyncOpenAI(base_url=f"{real[0]}/v1", api_key="any", max_retries=0) as asking:
            return await asyncio.gather(*(ask(asking, bool(number % 2)) for number in range(6)))

    assert asyncio.run(all_of_them()) == [expected] * 6


def test_the_stream_helper(client: OpenAI) -> None:
    """The helper raises an error for a truncated completion."""
    word = (client.chat.completions.create(**GREEDY).choices[0].message.content or "").split()[4]
    whole = client.chat.completions.create(**GREEDY, stop=word)
    with client.chat.completions.stream(**GREEDY, stop=word, logprobs=True, top_logprobs=1) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(deltas) == whole.choices[0].message.content == final.choices[0].message.content
    assert final.choices[0].logprobs
    tokens = "".join(item.token for item in final.choices[0].logprobs.content or [])
    assert tokens.startswith("".join(deltas))  # and the word's own


# What shapes an answer.


def test_several_choices_with_one_seed(client: OpenAI) -> None:
    params = GREEDY | {"n": 3, "temperature": 1.0, "seed": 7}
    first, again = (client.chat.completions.create(**params) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    chunks = list(client.chat.completions.create(**params, stream=True))
    assert [_text(chunks, number) for number in range(3)] == texts
    assert first.usage
    assert first.usage.completion_tokens > TOKENS


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs
    items = answer.choices[0].logprobs.content or []
    assert "".join(item.token for item in items) == answer.choices[0].message.content
    for item in items:
        assert len(item.top_logprobs) == 3
        assert item.top_logprobs[0].token == item.token
        assert item.top_logprobs[0].logprob == item.logprob <= 0
        assert item.bytes == list(item.token.encode())
    plain = client.chat.completions.create(**GREEDY, logprobs=True)
    assert plain.choices[0].logprobs
    assert [item.top_logprobs for item in plain.choices[0].logprobs.content or []] == [[]] * TOKENS


def test_stop(client: OpenAI) -> None:
    text = client.chat.completions.create(**GREEDY).choices[0].message.content or ""
    word = text.split()[4]
    for stop in (word, ["nowhere to be found", word]):
        answer = client.chat.completions.create(**GREEDY, stop=stop)
        assert answer.choices[0].message.content == text[: text.index(word)]
        assert answer.choices[0].finish_reason == "stop"
        assert _text(client.chat.completions.create(**GREEDY, stop=stop, stream=True)) == text[: text.index(word)]


def test_logit_bias_and_penalties(quick: OpenAI) -> None:
    """The text of a simulated token is its number."""
    text = quick.chat.completions.create(**QUICK).choices[0].message.content or ""
    first = str(int(text[1:5]))
    banned = quick.chat.completions.create(**QUICK, logit_bias={first: -100})
    assert not (banned.choices[0].message.content or "").startswith(text[:6])
    only = quick.chat.completions.create(**QUICK | {"max_tokens": 3}, logit_bias={"500": 100})
    assert only.choices[0].message.content == "[0500]" * 3


def test_json_schema_by_parse(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Describe the city of Lisbon."}]
    params: Any = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 200}
    answer = client.chat.completions.parse(**params, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)
    with client.chat.completions.stream(**params, response_format=City) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_json_object_and_text(client: OpenAI) -> None:
    choices = {"type": "choice", "choices": ["red", "blue"]}
    picked = client.chat.completions.create(**GREEDY, extra_body={"response_format": choices})
    assert picked.choices[0].message.content in ("red", "blue")
    assert picked.choices[0].finish_reason == "stop"
    shape: Any = {"type": "json_object"}
    found = client.chat.completions.create(**GREEDY | {"max_tokens": 200}, response_format=shape)
    if found.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(found.choices[0].message.content or ""), dict)
    assert (found.choices[0].message.content or "").lstrip().startswith("{")
    plain = client.chat.completions.create(**GREEDY, response_format={"type": "text"})
    assert plain.choices[0].message.content == client.chat.completions.create(**GREEDY).choices[0].message.content


# Tools.


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_tools(client: OpenAI, choice: Any) -> None:
    params = GREEDY | {"max_tokens": 200, "tools": [WEATHER], "tool_choice": choice}
    answer = client.chat.completions.create(**params)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert message.tool_calls
    call = message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Oslo")
    assert 1 <= arguments["days"] <= 9
    with client.chat.completions.stream(**params) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls
    streamed = final.choices[0].message.tool_calls[0]
    assert json.loads(streamed.function.arguments) == arguments
    assert final.choices[0].message.content is None


def test_a_tool_result_goes_back_to_the_model(client: OpenAI) -> None:
    params = GREEDY | {"max_tokens": 200, "tools": [WEATHER], "tool_choice": "required"}
    message = client.chat.completions.create(**params).choices[0].message
    assert message.tool_calls
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny"} for call in message.tool_calls]
    more = GREEDY | {"messages": [*HELLO, message.model_dump(), *answers], "tools": [WEATHER], "tool_choice": "none"}
    assert client.chat.completions.create(**more).choices[0].message.content


# What is let be, and what is not.


def test_additional_fields_of_programs_are_accepted(quick: OpenAI) -> None:
    plain = quick.chat.completions.create(**QUICK).choices[0].message.content
    nulls = dict.fromkeys(
        ("stop", "seed", "tools", "tool_choice", "stream", "stream_options", "logit_bias", "n", "audio")
    )
    extra = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "nobody": {"knows": 1}}
    empty: list[dict[str, Any]] = [{"tools": []}, {"functions": []}, {"modalities": ["text"]}]
    for more in (nulls, extra, *empty):
        answer = quick.chat.completions.create(**QUICK | {"extra_body": more})
        assert answer.choices[0].message.content == plain
    texts = [{"type": "text", "text": text} for text in ("Name three colours", " of the rainbow.")]
    parts: Any = [{"role": "user", "content": texts}]
    assert quick.chat.completions.create(**QUICK | {"messages": parts}).choices[0].message.content == plain
    same = quick.chat.completions.create(**QUICK | {"max_tokens": 8, "max_completion_tokens": 8})
    assert same.choices[0].message.content == plain


def test_developer_messages_become_system_messages(quick: OpenAI) -> None:
    texts = [
        quick.chat.completions.create(**QUICK | {"messages": [{"role": role, "content": "Be brief."}, *HELLO]})
        for role in ("developer", "system", "user")
    ]
    output = [text.choices[0].message.content for text in texts]
    assert output[0] == output[1] != output[2]


NONE = {"type": "function", "function": {"name": "none"}}
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
LEGACY = [{"role": "function", "name": "f", "content": "x"}]

REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"n": 17}, "n", "16"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": "2"}, "n", "int"),
    ({"temperature": 101}, "temperature", "at most 100"),
    ({"temperature": "hot"}, "temperature", "float"),
    ({"top_p": -1}, "top_p", "at least 0"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
    ({"seed": 1 << 70}, "seed", "at most"),
    ({"stop": [""]}, "stop[0]", "at least 1"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"frequency_penalty": 3}, "frequency_penalty", "at most 2"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "at most 100"),
    ({"stop": [1]}, "stop[0]", "str"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "int"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        "response_format",
        "response_format: ",
    ),
    ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    ({"audio": {"voice": "alloy"}}, "audio", "text only"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "max_tokens (8)"),
    ({"stop_token_ids": [1]}, "stop_token_ids", "stop"),
    ({"bad_words": ["a"]}, "bad_words", "logit_bias"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids", "choice"),
    ({"use_beam_search": True}, "use_beam_search", "sampled"),
    ({"length_penalty": 0}, "length_penalty", "beam search"),
    ({"prompt_logprobs": 0}, "prompt_logprobs", "give /v1/completions echo"),
    ({"continue_final_message": True}, "continue_final_message", "message of the user"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "/tokenize"),
    ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens", "never cut"),
    ({"functions": [{"name": "f"}]}, "functions", "tools"),
    ({"function_call": "auto"}, "function_call", "tool_choice"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "response_format"),
    ({"web_search_options": {"a": 1}}, "web_search_options", "web"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "custom"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tool_choice": "perhaps"}, "tool_choice", "perhaps"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "get_time"),
    ({"tools": [TIME], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "function"),
    ({"tools": [NONE], "tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice", "rename"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort", "enormous"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"messages": []}, "messages", "length"),
    ({"messages": None}, "messages", "array"),
    ({"messages": "hello"}, "messages", "array"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing"),
    ({"messages": PICTURE}, "messages[0].content[0]", "text only"),
    ({"messages": LEGACY}, "messages[0].role", "function"),
]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("more", "param", "why"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_unsupported_requests_are_refused(
    quick: OpenAI, more: dict[str, Any], param: str | None, why: str, stream: bool
) -> None:
    if stream and "stream_options" in more:
        pytest.skip("which is for streams")
    with pytest.raises(openai.APIError) as caught:
        # What only a node can tell may come after a stream has begun.
        list(quick.chat.completions.create(**QUICK | {"stream": stream, "extra_body": more}))
    error = caught.value
    assert stream or isinstance(error, openai.BadRequestError)
    assert (error.type, error.param) == ("invalid_request_error", param)
    assert why in error.message


def test_models_are_found_by_name_and_alias(quick: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=SIMULATED) as caught:
        quick.chat.completions.create(**QUICK | {"model": "of-no-such-name"})
    assert caught.value.code == "model_not_found"
    assert caught.value.type == "not_found_error"
    answer = quick.chat.completions.create(**QUICK | {"model": "tiny-alias"})
    assert answer.model == "tiny-alias"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_above_the_context_window_is_refused(client: OpenAI, stream: bool) -> None:
    long: Any = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(openai.BadRequestError, match=r"context length is 8192 tokens, .* \d+ tokens") as caught:
        client.chat.completions.create(**GREEDY | {"messages": long, "stream": stream})
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"have at least \d+ tokens"):  # not worth counting
        client.chat.completions.create(**GREEDY | {"messages": [{"role": "user", "content": "word " * 900_000}]})


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b'{"messages": "\xff"}', b"[" * 100_000, b"{}"])
def test_malformed_bodies_are_refused(quick_url: str, body: bytes) -> None:
    for path in ("chat/completions", "completions"):
        answer = httpx.post(f"{quick_url}/v1/{path}", content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


# Plain prompts.


def test_completions(real: tuple[str, dict[str, Any]], client: OpenAI) -> None:
    params: Any = {"model": "smollm2", "temperature": 0, "max_tokens": 12}
    with DisaggregatedClient(real[1]) as direct:
        text, _ = direct.generate(prompt="The sea is", temperature=0, max_tokens=12)
    answer = client.completions.create(prompt="The sea is", **params)
    assert (answer.object, answer.choices[0].text) == ("text_completion", text)
    assert answer.id.startswith("cmpl-")
    chunks = list(client.completions.create(prompt="The sea is", **params, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completions_of_several_prompts(quick: OpenAI) -> None:
    params: Any = {"model": SIMULATED, "temperature": 1, "seed": 3, "max_tokens": 6, "n": 2}
    alone = [quick.completions.create(prompt=text, **params).choices for text in ("one", "two", "three")]
    expected = [choice.text for choices in alone for choice in choices]
    together = quick.completions.create(prompt=["one", "two", "three"], **params)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == expected
    assert together.usage
    usage: Any = {"include_usage": True}
    *chunks, last = quick.completions.create(
        prompt=["one", "two", "three"], **params, stream=True, stream_options=usage
    )
    texts = ["".join(c.text for chunk in chunks for c in chunk.choices if c.index == index) for index in range(6)]
    assert texts == expected
    assert last.usage
    assert last.usage.total_tokens == together.usage.total_tokens


def test_completions_of_token_ids(quick: OpenAI) -> None:
    params: Any = {"model": SIMULATED, "temperature": 0, "max_tokens": 4}
    texts = [quick.completions.create(prompt=f"[{token:04d}]", **params).choices[0].text for token in (300, 301)]
    assert quick.completions.create(prompt=[300], **params).choices[0].text == texts[0]
    both = quick.completions.create(prompt=[[300], [301]], **params)
    assert [choice.text for choice in both.choices] == texts


def test_logprobs_of_completions(client: OpenAI) -> None:
    params: Any = {"model": "smollm2", "prompt": "The sea is", "temperature": 0, "max_tokens": 8, "logprobs": 2}
    answer = client.completions.create(**params).choices[0]
    found = answer.logprobs
    assert found
    assert "".join(found.tokens or []) == answer.text
    for token, logprob, top, offset in zip(
        found.tokens or [], found.token_logprobs or [], found.top_logprobs or [], found.text_offset or [], strict=True
    ):
        assert answer.text[offset:].startswith(token)
        assert top[token] == logprob == max(top.values())
        assert len(top) == 2
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**params, stream=True)]
    assert [offset for chunk in chunks if chunk for offset in chunk.text_offset or []] == found.text_offset


def test_echo_with_logprobs(real: tuple[str, dict[str, Any]], client: OpenAI, smollm2: Any) -> None:
    """As transformers computes them, in OpenAI's form; text and tokens say the same, streamed or not."""
    tokens = smollm2.tokenizer.encode(SEA)
    with DisaggregatedClient(real[1]) as direct:
        completion = direct.complete(SEA, max_tokens=1, temperature=0, logprobs=1, prompt_logprobs=1)
    check_prompt_logprobs(completion.prompt_logprobs, transformers_logprobs(smollm2.path, tokens), tokens, 1)
    text, ids = (client.completions.create(model="smollm2", prompt=prompt, **SCORED) for prompt in (SEA, tokens))
    assert ids.choices[0].to_dict() == text.choices[0].to_dict()
    choice = text.choices[0]
    found: Any = choice.logprobs
    assert choice.text == SEA + completion.text
    assert found.token_logprobs[:-1] == [each.logprob for each in completion.prompt_logprobs]
    assert found.token_logprobs[-1] == (completion.choices[0].logprobs[0].logprob)
    assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs) == len(tokens) + 1
    assert found.top_logprobs[0] is None
    assert found.text_offset[-1] == len(SEA)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert "\ufffd" in token or choice.text[offset:].startswith(token)
    chunks = list(client.completions.create(model="smollm2", prompt=SEA, stream=True, **SCORED))
    pieces: Any = [chunk.choices[0] for chunk in chunks]
    assert "".join(piece.text for piece in pieces) == choice.text
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [value for piece in pieces for value in getattr(piece.logprobs, name) or [None]]
        assert joined == getattr(found, name)
    usage = text.usage
    assert usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(tokens), 1)
    assert usage.prompt_tokens_details
    assert usage.prompt_tokens_details.cached_tokens == 0, "the same prompt again, and computed again"


def test_an_end_token_has_its_place_in_an_echo(client: OpenAI) -> None:
    """lm-evaluation-harness leaves the last token out: there must always be one after the prompt."""
    answer = client.completions.create(
        model="smollm2", prompt="Hello", **SCORED | {"max_tokens": 3}, logit_bias={"2": 100}
    )
    found: Any = answer.choices[0].logprobs
    assert (answer.choices[0].text, found.tokens) == ("Hello", ["Hello", "<|im_end|>"])
    assert found.text_offset == [0, 5]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": ""}, None),
        ({"prompt": [5000]}, None),
    ],
)
def test_unsupported_completions_are_refused(quick: OpenAI, more: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        quick.completions.create(model=SIMULATED, prompt="a", extra_body=more)
    assert caught.value.param == param
    fine = quick.completions.create(model=SIMULATED, prompt="a", echo=False, best_of=2, n=2, max_tokens=2)
    assert len(fine.choices) == 2


# Models, headers, metrics.


def test_models(quick: OpenAI) -> None:
    found = list(quick.models.list())
    assert [model.id for model in found] == [SIMULATED, "tiny-alias"]
    assert found[0].owned_by == "disaggregated-inference"
    quick.chat.completions.create(**QUICK)
    one = quick.models.retrieve("tiny-alias")
    assert one.id == "tiny-alias"
    assert one.model_extra
    assert (one.model_extra["root"], one.model_extra["context_window"]) == (SIMULATED, 131072)
    with pytest.raises(openai.NotFoundError, match=SIMULATED):
        quick.models.retrieve("of-no-such-name")


@pytest.mark.parametrize("stream", [False, True])
def test_headers_name_the_nodes(quick: OpenAI, stream: bool) -> None:
    params = QUICK | {"stream": stream, "extra_headers": {"x-request-id": "mine-1"}}
    answer = quick.chat.completions.with_raw_response.create(**params)
    headers = answer.headers
    assert headers["x-request-id"] == "mine-1"
    assert (headers["x-disagg-prefill"], headers["x-disagg-decode"]) == ("p1", "d1")
    assert headers["x-disagg-plan"]
    assert (headers.get("cache-control"), headers.get("x-accel-buffering")) == (
        ("no-cache", "no") if stream else (None, None)
    )
    assert "chatcmpl-mine-1" in answer.text if not stream else list(answer.parse())


def test_a_failed_send_is_not_described_to_the_client() -> None:
    """A failure to send is no error of the completion: the gateway sends nothing after it."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            raise OSError("the socket is gone")

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def lines() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"two"

    async def run() -> None:
        request = Request({"type": "http", "app": Starlette(), "headers": []})
        response = EventStreamResponse(request, lines(), lambda error: pytest.fail(str(error)))
        with suppress(Exception):
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)

    asyncio.run(run())
    assert [message.get("body") for message in sent] == [None, b"one"]


def test_metrics_are_sent_on_request(quick: OpenAI) -> None:
    assert "disagg" not in (quick.chat.completions.create(**QUICK).model_extra or {})
    for more in ({"extra_body": {"include_metrics": True}}, {"extra_headers": {"x-disagg-metrics": "1"}}):
        summary = (quick.chat.completions.create(**QUICK, **more).model_extra or {})["disagg"]
        assert summary["prefill_node"] == "p1"
        assert summary["prompt_tokens_recomputed"] == 0
        assert "response" not in summary
        *_, last = quick.chat.completions.create(**QUICK, **more, stream=True)
        assert (last.model_extra or {})["disagg"]["decode_node"] == "d1"
    two = quick.completions.create(
        model=SIMULATED, prompt=["a", "b"], max_tokens=2, extra_body={"include_metrics": True}
    )
    assert len((two.model_extra or {})["disagg"]) == 2


def test_usage_counts_cached_tokens(quick: OpenAI) -> None:
    long = QUICK | {"messages": [{"role": "user", "content": "a story " * 200}]}
    first, again = (quick.chat.completions.create(**long).usage for _ in range(2))
    assert first
    assert again
    assert again.prompt_tokens_details
    assert 0 < (again.prompt_tokens_details.cached_tokens or 0) <= again.prompt_tokens
