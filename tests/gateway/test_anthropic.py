"""Anthropic's Messages API, with the official client: against a cluster, and against scripted deltas."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic as official
import msgspec
import pytest
from anthropic import Anthropic
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import BadRequest, BodyTooLarge, DeadlineExceeded, NoDecodeNode
from disaggregated_inference.gateway.anthropic import routes as anthropic
from disaggregated_inference.gateway.chat import ChatDelta
from disaggregated_inference.gateway.tool_parsers.base import (
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from tests.support.cluster import Process, config_of
from tests.support.gateway import Script, served, simulated_config, simulated_pair, smollm2_pair
from tests.support.waiting import until

MODEL = "simulated:tiny"
HELLO: Any = [{"role": "user", "content": "hello"}]
GREEDY: Any = {"temperature": 0}  # the API has it, this version of the client no longer does
ASK: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "extra_body": GREEDY}
RAW = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
WEATHER: Any = {
    "name": "weather",
    "description": "Of a city, now",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair("custom:prefill=100000,decode=400") as nodes:
        yield nodes


@pytest.fixture(scope="module")
def url(pair: tuple[Process, Process]) -> Iterator[str]:
    with served(simulated_config(*pair), anthropic) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(anthropic, "stream_chat", script.stream_chat)
    return script


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


# Against a cluster.


@pytest.mark.slow
def test_the_response_has_the_whole_message(client: Anthropic, pair: tuple[Process, Process]) -> None:
    message = client.messages.create(**ASK | {"model": "tiny-alias"}, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    with DisaggregatedClient(config_of(*pair)) as plain:
        text, metrics = plain.generate(messages=messages, temperature=0, max_tokens=12)
    assert text_of(message) == text
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny-alias")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    assert usage.output_tokens == 12
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == metrics["prompt_tokens"]
    official.types.Message.model_validate(message.model_dump())  # strictly: the client itself lets much pass


def test_a_stream_has_the_same_message(client: Anthropic) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_delta") == 12
    assert text_of(final) == text_of(whole)
    assert final.stop_reason == whole.stop_reason
    read = [message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) for message in (whole, final)]
    assert read[0] == read[1] > 0


def test_system_blocks_are_joined(client: Anthropic) -> None:
    blocks: Any = [
        {"type": "text", "text": "Be "},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ]
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    in_blocks = client.messages.create(**ASK | {"messages": parts}, system=blocks)
    assert text_of(in_blocks) == text_of(client.messages.create(**ASK, system="Be brief."))


@pytest.mark.parametrize("streamed", [False, True])
def test_the_response_names_the_stop_sequence(client: Anthropic, streamed: bool) -> None:
    """Words of simulated answers look like [0312]."""
    words = text_of(client.messages.create(**ASK)).replace("][", "] [").split()
    at = next(at for at in range(3, 12) if words[at] not in words[:at])
    stops = ["never", words[at][:4], words[at]]
    if streamed:
        with client.messages.stream(**ASK, stop_sequences=stops) as stream:
            message: Any = stream.get_final_message()
    else:
        message = client.messages.create(**ASK, stop_sequences=stops)
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence in stops[1:]
    assert message.usage.output_tokens <= at + 1
    assert "".join(words).startswith(text_of(message) + message.stop_sequence)


def test_count_tokens_equals_the_prompt_tokens(client: Anthropic) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    usage = client.messages.create(**ask, max_tokens=1).usage
    counted = client.messages.count_tokens(**ask).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted > client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    long: Any = [{"role": "user", "content": "x" * 200_000}]  # more than the window: it says how much
    assert client.messages.count_tokens(model=MODEL, messages=long).input_tokens > 200_000


def test_a_disconnect_cancels_the_request(client: Anthropic, pair: tuple[Process, Process]) -> None:
    with client.messages.stream(**ASK | {"max_tokens": 4000}) as stream:
        next(event for event in stream if event.type == "content_block_delta")
        assert pair[1].status()["slots"]["used"] == 1
    assert until(lambda: all(node.nothing_left() for node in pair))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"model": None}, "model"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, r"messages\[0\]\.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image.*text"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document.*text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9"}]}]}, "t9"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "The answer is ("}]}, "the last one must be"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tool_choice": {"type": "any"}}, "give tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "nobody"}}, "nobody.*weather"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"stop_sequences": [""]}, r"stop_sequences\[0\] must"),
        ({"tools": [WEATHER | {"name": "any"}], "tool_choice": {"type": "tool", "name": "auto"}}, "auto.*any"),
        ({"tools": [WEATHER | {"name": "auto"}], "tool_choice": {"type": "tool", "name": "auto"}}, "rename"),
        ({"temperature": 1000}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_requests_are_refused_with_a_reason(
    client: Anthropic, params: dict[str, Any], expected: str, stream: bool
) -> None:
    body = {name: value for name, value in (RAW | {"stream": stream} | params).items() if value is not None}
    with pytest.raises(official.BadRequestError, match=expected) as refused:
        client.post("/v1/messages", body=body, cast_to=object)
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_id_header_is_anthropics(client: Anthropic, stream: bool) -> None:
    answer = client.messages.with_raw_response.create(**ASK, stream=stream, extra_headers={"x-request-id": "mine"})
    assert answer.request_id == answer.headers["x-request-id"] == "mine"
    answer.close()
    counted = client.messages.with_raw_response.count_tokens(model=MODEL, messages=HELLO)
    assert counted.request_id == counted.headers["x-request-id"]


def test_an_unknown_model(client: Anthropic) -> None:
    with pytest.raises(official.NotFoundError, match=MODEL):
        client.messages.create(model="nobody", messages=HELLO, max_tokens=5)
    with pytest.raises(official.NotFoundError, match=MODEL):
        client.messages.count_tokens(model="nobody", messages=HELLO)


# Against answers written by hand.


def test_thinking_text_and_tool_uses_are_blocks(client: Anthropic, script: Script) -> None:
    script.replies(
        ReasoningDelta("Hm"),
        ReasoningDelta("m."),
        TextDelta("I "),
        TextDelta("look."),
        ToolCallStart(0, "call_a", "weather"),
        ToolCallArguments(0, '{"city":'),
        ToolCallArguments(0, '"Oslo"}'),
        ToolCallStart(1, "call_b", "now"),
        finish="tool_calls",
    )
    message = client.messages.create(**ASK, tools=[WEATHER])
    assert message.stop_reason == "tool_use"
    assert message.usage.to_dict() == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 5,
    }
    thought, text, use, other = message.content
    assert thought.thinking == "Hmm."
    assert text.text == "I look."
    assert (use.id, use.name, use.input) == ("toolu_a", "weather", {"city": "Oslo"})
    assert other.input == {}
    with client.messages.stream(**ASK, tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in message.content]
    assert final.usage.to_dict() == message.usage.to_dict()
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas == ["thinking_delta"] * 2 + ["text_delta"] * 2 + ["input_json_delta"] * 2
    assert [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2, 3]


def test_disabled_thinking_and_parallel_calls_are_dropped(client: Anthropic, script: Script) -> None:
    script.replies(
        ReasoningDelta("Hm"),
        ToolCallStart(0, "a", "weather"),
        ToolCallStart(1, "b", "weather"),
        ToolCallArguments(1, "{}"),
    )
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = client.messages.create(**ASK, tools=[WEATHER], tool_choice=choice, thinking={"type": "disabled"})
    assert [block.type for block in message.content] == ["tool_use"]
    assert script.requests[0].template == {"enable_thinking": False}


def test_all_fields_reach_the_chat_request(client: Anthropic, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anthropic, "can_think", lambda tokenizer: True)
    script.replies(TextDelta("yes"))
    use: Any = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
    results: Any = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "cold"}]},
        {"type": "tool_result", "tool_use_id": "t1", "content": "no wind", "is_error": True},
        {"type": "text", "text": "So?"},
    ]
    thought: Any = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    client.messages.create(
        model=MODEL,
        max_tokens=1500,
        messages=[
            *HELLO,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, use]},
            {"role": "user", "content": results},
        ],
        tools=[WEATHER],
        tool_choice={"type": "any"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        stop_sequences=["END"],
        metadata={"user_id": "u"},
        service_tier="auto",
        extra_body={"top_p": 0.9, "top_k": 40, "of_tomorrow": 1},
    )
    chat_request = script.requests[0]
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert chat_request.messages == [
        *HELLO,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "cold"},
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "Error: no wind"},
        {"role": "user", "content": "So?"},
    ]
    function = {"name": "weather", "description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    assert chat_request.tools == [{"type": "function", "function": function}]
    assert chat_request.tool_choice == "required"
    assert chat_request.template == {"enable_thinking": True}
    wanted = {"max_tokens": 1500, "top_p": 0.9, "top_k": 40, "stop": ["END"], "temperature": None}
    assert {**chat_request.options, **wanted} == chat_request.options
    assert chat_request.format is None


@pytest.mark.parametrize(
    ("choice", "expected"),
    [({"type": "auto"}, "auto"), ({"type": "none"}, "none"), ({"type": "tool", "name": "weather"}, "weather")],
)
def test_tool_choice(client: Anthropic, script: Script, choice: Any, expected: str) -> None:
    script.replies(TextDelta("yes"))
    client.messages.create(**ASK, tools=[WEATHER], tool_choice=choice)
    assert script.requests[0].tool_choice == expected


def test_a_truncated_tool_use_has_an_empty_input(client: Anthropic, script: Script) -> None:
    script.replies(ToolCallStart(0, "a", "weather"), ToolCallArguments(0, '{"city": "Os'), finish="length")
    message = client.messages.create(**ASK, tools=[WEATHER])
    assert (message.stop_reason, message.content[0].input) == ("max_tokens", {})


def test_an_error_has_a_status_or_is_the_last_event(client: Anthropic, script: Script) -> None:
    script.error = NoDecodeNode()
    for stream in (False, True):
        with pytest.raises(official.APIStatusError, match="Decode server unavailable") as failed:
            client.messages.create(**ASK, stream=stream)
        assert failed.value.status_code == 503
        assert failed.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    script.deltas = [ChatDelta(content=(TextDelta("half"),))]
    received = []
    with client.messages.stream(**ASK) as streaming, pytest.raises(official.APIStatusError, match="Decode server"):
        received += [event.type for event in streaming]
    script.error = RuntimeError("a secret")
    with client.messages.stream(**ASK) as streaming, pytest.raises(official.APIStatusError, match="internal error"):
        list(streaming)


def test_a_quiet_stream_stays_alive(client: Anthropic, url: str, script: Script) -> None:
    script.replies(TextDelta("yes"))
    script.wait_s = 0.6
    with urllib.request.urlopen(
        f"{url}/v1/messages", msgspec.json.encode(RAW | {"stream": True}), timeout=10
    ) as answer:
        response = answer.read()
    assert response.startswith(b": keep-alive\n\n")  # no event comes before the first
    assert response.replace(b": keep-alive\n\n", b"").startswith(b"event: message_start\n")
    with client.messages.stream(**ASK) as stream:
        assert stream.get_final_text() == "yes"


def test_error_types_by_status() -> None:
    kinds = {
        BadRequest("x"): "invalid_request_error",
        BodyTooLarge("x"): "request_too_large",
        NoDecodeNode(): "overloaded_error",
        DeadlineExceeded("x"): "timeout_error",
        HTTPException(404): "not_found_error",
        HTTPException(405): "invalid_request_error",
        ValueError("a secret"): "api_error",
    }
    assert {error: anthropic.error_body(error)["error"]["type"] for error in kinds} == kinds
    assert "secret" not in json.dumps(anthropic.error_body(ValueError("a secret")))
    assert anthropic.error_body(BadRequest("why"), "r1") == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "why"},
        "request_id": "r1",
    }


# With a real model.


@pytest.fixture(scope="module")
def real_pair() -> Iterator[tuple[Process, Process]]:
    with smollm2_pair() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def real(real_pair: tuple[Process, Process]) -> Iterator[Anthropic]:
    with (
        served(config_of(*real_pair), anthropic) as url,
        Anthropic(base_url=url, api_key="none", max_retries=0) as made,
    ):
        yield made


class City(BaseModel):
    name: str
    country: str


def test_a_real_model_gives_the_same_text_as_the_client(real: Anthropic, real_pair: tuple[Process, Process]) -> None:
    ask: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": 12,
        "extra_body": GREEDY,
        "messages": HELLO,
        "system": "Be kind.",
    }
    with DisaggregatedClient(config_of(*real_pair)) as plain:
        messages = [{"role": "system", "content": "Be kind."}, *HELLO]
        text, _ = plain.generate(messages=messages, temperature=0, max_tokens=12)
    assert text_of(real.messages.create(**ask)) == text
    with real.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == text


def test_a_real_model_stops_at_a_stop_sequence(real: Anthropic) -> None:
    ask: dict[str, Any] = {
        "model": "smollm2",
        "extra_body": GREEDY,
        "messages": [{"role": "user", "content": "Say hi."}],
    }
    whole = real.messages.create(**ask, max_tokens=100)
    assert whole.stop_reason in ("end_turn", "max_tokens")
    words = text_of(whole).split()
    message = real.messages.create(**ask, max_tokens=100, stop_sequences=["never", words[2]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", words[2])
    assert text_of(whole).startswith(text_of(message) + words[2])


def test_messages_parse_returns_a_model(real: Anthropic) -> None:
    ask: dict[str, Any] = {"model": "smollm2", "max_tokens": 200, "extra_body": GREEDY, "messages": HELLO}
    parsed = real.messages.parse(**ask, output_format=City)
    assert isinstance(parsed.parsed_output, City)


def test_a_forced_tool_use_and_its_result(real: Anthropic) -> None:
    params: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
    ask: dict[str, Any] = {"model": "smollm2", "max_tokens": 60, "extra_body": GREEDY, "tools": [WEATHER]}
    first = real.messages.create(**ask, messages=params, tool_choice={"type": "any"})
    use: Any = first.content[-1]
    assert (first.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "weather")
    assert use.input["city"] in ("Oslo", "Rome")
    with real.messages.stream(**ask, messages=params, tool_choice={"type": "tool", "name": "weather"}) as stream:
        assert stream.get_final_message().content[-1].input == use.input  # type: ignore[union-attr]
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny, 25 degrees."}
    more: Any = [*params, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert real.messages.create(**ask, messages=more).usage.output_tokens > 0
