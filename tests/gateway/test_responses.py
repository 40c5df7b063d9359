"""OpenAI's Responses API, with the official client: against a cluster, and against scripted deltas."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import BadRequest, NoDecodeNode
from disaggregated_inference.gateway.auth import Caller
from disaggregated_inference.gateway.chat import ChatDelta
from disaggregated_inference.gateway.openai import responses
from disaggregated_inference.gateway.openai import responses_requests as responses_requests
from disaggregated_inference.gateway.response_store import ResponseNotFound, ResponseStore
from disaggregated_inference.gateway.tool_parsers.base import (
    ContentDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from tests.support.cluster import Process, config_of
from tests.support.gateway import Script, served, simulated_config, simulated_pair, smollm2_pair
from tests.support.waiting import until

MODEL = "simulated:tiny"
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Of a city, now",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair("custom:prefill=100000,decode=400") as nodes:
        yield nodes


@pytest.fixture(scope="module")
def url(pair: tuple[Process, Process]) -> Iterator[str]:
    with served(simulated_config(*pair), responses) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def patient_client(pair: tuple[Process, Process]) -> Iterator[OpenAI]:
    with (
        served(simulated_config(*pair), responses, early_error_s=20) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(responses, "stream_chat", script.stream_chat)
    return script


def text_of(pair: tuple[Process, Process], **ask: Any) -> str:
    with DisaggregatedClient(config_of(*pair)) as plain:
        text, _ = plain.generate(**ask)
        return str(text)


def events_of(client: OpenAI, **ask: Any) -> list[Any]:
    with client.responses.create(model=MODEL, stream=True, **ask) as stream:
        return list(stream)


def _nameless(item: Any) -> dict[str, Any]:
    """Items without their ids, which always differ."""
    return {name: value for name, value in item.to_dict().items() if name != "id"}


# Against a cluster.


def test_the_response_has_the_whole_output(client: OpenAI, pair: tuple[Process, Process]) -> None:
    response = client.responses.create(
        model="tiny-alias", input="hello", instructions="Be brief.", metadata={"who": "me"}, **GREEDY
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert response.output_text == text_of(pair, messages=messages, temperature=0, max_tokens=12)
    assert (response.object, response.model, response.metadata) == ("response", "tiny-alias", {"who": "me"})
    assert response.status == "incomplete"
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage
    assert response.usage.output_tokens == 12
    assert response.usage.total_tokens == response.usage.input_tokens + 12
    Response.model_validate(response.model_dump())  # strictly: the client itself lets much pass


def test_a_stream_has_the_same_output(client: OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="hello", **GREEDY)
    with client.responses.stream(model=MODEL, input="hello", **GREEDY) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) == 12
    assert "".join(deltas) == whole.output_text


def test_previous_response_id_continues_a_conversation(client: OpenAI, pair: tuple[Process, Process]) -> None:
    first = client.responses.create(model=MODEL, input="one", **GREEDY)
    again = client.responses.create(model=MODEL, input="two", previous_response_id=first.id, **GREEDY)
    third = client.responses.create(model=MODEL, input="three", previous_response_id=again.id, **GREEDY)
    generated = ["one", first.output_text, "two", again.output_text, "three"]
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(generated)]
    assert third.output_text == text_of(pair, messages=messages, temperature=0, max_tokens=12)
    assert third.previous_response_id == again.id
    by_hand = client.responses.create(model=MODEL, input=messages, **GREEDY)  # type: ignore[arg-type]
    assert by_hand.output_text == third.output_text


def test_output_items_are_valid_input(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="one", **GREEDY)
    by_id = client.responses.create(model=MODEL, input="two", previous_response_id=first.id, **GREEDY)
    more: Any = [{"role": "user", "content": [{"type": "input_text", "text": "two"}]}]
    before: Any = [{"role": "user", "content": "one"}, *first.output]
    assert client.responses.create(model=MODEL, input=before + more, **GREEDY).output_text == by_id.output_text
    pointed: Any = [{"role": "user", "content": "one"}, {"type": "item_reference", "id": first.output[0].id}]
    assert client.responses.create(model=MODEL, input=pointed + more, **GREEDY).output_text == by_id.output_text


def test_a_response_is_stored_until_it_is_deleted(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="one", **GREEDY)
    second = client.responses.create(model=MODEL, input="two", previous_response_id=first.id, **GREEDY)
    assert client.responses.retrieve(second.id) == second
    newest = client.responses.input_items.list(second.id, limit=1)
    assert [item.content[0].text for item in newest.data] == ["two"]  # type: ignore[union-attr, index]
    assert newest.has_more
    items = list(client.responses.input_items.list(second.id, limit=2, order="asc"))  # page by page
    assert [item.role for item in items] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    client.responses.delete(second.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=second.id):
            gone(second.id)
    assert client.responses.retrieve(first.id).id == first.id


def test_store_false_stores_nothing(client: OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="one", store=False, **GREEDY)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id") as refused:
        client.responses.create(model=MODEL, input="two", previous_response_id=response.id)
    assert refused.value.code == "previous_response_not_found"


def test_a_stream_is_stored_before_its_last_event(client: OpenAI) -> None:
    last = events_of(client, input="one", **GREEDY)[-1]
    assert client.responses.retrieve(last.response.id).output_text == last.response.output_text


def test_stored_responses_are_private_to_a_key(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.gateway.Caller", lambda: Caller(name="ann"))
    hers = client.responses.create(model=MODEL, input="one", **GREEDY)
    assert client.responses.retrieve(hers.id).id == hers.id
    monkeypatch.setattr("tests.support.gateway.Caller", lambda: Caller(name="bob"))
    for look in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            look(hers.id)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="two", previous_response_id=hers.id)
    with pytest.raises(openai.BadRequestError, match="no item"):
        client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": hers.output[0].id or ""}])


def test_a_disconnect_cancels_the_request(client: OpenAI, pair: tuple[Process, Process]) -> None:
    with client.responses.create(model=MODEL, input="hello", max_output_tokens=4000, stream=True) as stream:
        next(event for event in stream if event.type == "response.output_text.delta")
        assert pair[1].status()["slots"]["used"] == 1
    assert until(lambda: all(node.nothing_left() for node in pair))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "never cut"),
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "logprobs"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].*web_search.*function"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "file_search"),
        ({"tool_choice": "required"}, "give tools"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "nobody"),
        ({"tool_choice": {"type": "web_search_preview"}}, "web_search_preview"),
        ({"text": {"format": {"type": "xml"}}}, r"text\.format.*xml"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, r"- text\.format: "),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input: image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input_file.*images"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "nobody"),
        ({"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]}, "c9"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "computer_call"),
        ({"input": []}, "^.*input: it is empty"),
        ({"input": None}, "^.*input: it is empty"),
        ({"n": 2}, "one response"),
        ({"stop": [""]}, r"stop\[0\]"),
        ({"input": 5}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 1000}, "temperature"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_requests_are_refused_with_a_reason(
    patient_client: OpenAI, params: dict[str, Any], expected: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=expected):
        patient_client.post(
            "/responses", body={"model": MODEL, "input": "x", "stream": stream} | params, cast_to=object
        )


def test_errors_have_openais_status(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.responses.create(model="nobody", input="x")
    kept = client.responses.create(model=MODEL, input="x", **GREEDY)
    with pytest.raises(openai.BadRequestError, match="order"):
        client.get(f"/responses/{kept.id}/input_items?order=up", cast_to=object)


# Against answers written by hand.


def test_reasoning_text_and_calls_are_items(client: OpenAI, script: Script) -> None:
    script.replies(
        ReasoningDelta("Hm"),
        ReasoningDelta("m."),
        TextDelta("I "),
        TextDelta("look."),
        ToolCallStart(0, "call_a", "weather"),
        ToolCallArguments(0, '{"city":'),
        ToolCallArguments(0, '"Oslo"}'),
        ToolCallStart(1, "call_b", "weather"),
        ToolCallArguments(1, '{"city":"Rome"}'),
        finish="tool_calls",
    )
    ask: dict[str, Any] = {"model": MODEL, "input": "x", "tools": [WEATHER]}
    response = client.responses.create(**ask)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, message, call, other = response.output
    assert thought.content[0].text == "Hmm."
    assert message.content[0].text == "I look."
    assert (call.call_id, call.name, call.arguments) == ("call_a", "weather", '{"city":"Oslo"}')
    assert other.arguments == '{"city":"Rome"}'
    assert response.status == "completed"
    assert response.usage
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    final = events_of(client, input="x", tools=[WEATHER])[-1].response
    assert [_nameless(item) for item in final.output] == [_nameless(item) for item in response.output]
    with client.responses.stream(**ask) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        assert stream.get_final_response().output_text == "I look."
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_parallel_tool_calls_false_keeps_one_call(client: OpenAI, script: Script) -> None:
    calls: list[ContentDelta] = [
        ToolCallStart(0, "a", "weather"),
        ToolCallArguments(0, "{}"),
        ToolCallStart(1, "b", "weather"),
        ToolCallArguments(1, "{}"),
    ]
    script.replies(*calls, finish="tool_calls")
    response = client.responses.create(model=MODEL, input="x", tools=[WEATHER], parallel_tool_calls=False)
    assert [item.call_id for item in response.output] == ["a"]  # type: ignore[union-attr]


def test_all_fields_reach_the_chat_request(client: OpenAI, script: Script) -> None:
    script.replies(TextDelta("yes"))
    client.responses.create(
        model=MODEL,
        input=[
            {"role": "developer", "content": "And kind."},
            {"role": "user", "content": "Weather?"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city":"Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "cold"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "warm"}]},
        ],
        instructions="Be brief.",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        reasoning={"effort": "minimal"},
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        include=["reasoning.encrypted_content"],
        extra_body={"of_tomorrow": 1, "seed": 7, "stop": "END", "top_k": -1, "n": 1},
    )
    chat_request = script.requests[0]
    assert {name: chat_request.options[name] for name in ("seed", "stop", "top_k")} == {
        "seed": 7,
        "stop": "END",
        "top_k": 0,
    }
    calls = [("c1", "Oslo"), ("c2", "Rome")]
    params = [
        {
            "id": call,
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": city}, separators=(",", ":"))},
        }
        for call, city in calls
    ]
    assert chat_request.messages == [
        {"role": "system", "content": "Be brief.\n\nAnd kind."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": params},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "cold"},
        {"role": "tool", "tool_call_id": "c2", "name": "weather", "content": "warm"},
    ]
    function = {name: WEATHER[name] for name in ("name", "description", "parameters")}
    assert chat_request.tools == [{"type": "function", "function": function}]
    assert chat_request.tool_choice == "weather"
    assert chat_request.template == {"reasoning_effort": "low", "enable_thinking": True}
    wanted = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}
    assert {**chat_request.options, **wanted} == chat_request.options
    assert chat_request.format is None


def test_allowed_tools_limits_the_tools(client: OpenAI, script: Script) -> None:
    script.replies(TextDelta("yes"))
    other = WEATHER | {"name": "other"}
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    response = client.responses.create(model=MODEL, input="x", tools=[WEATHER, other], tool_choice=choice)
    assert [tool["function"]["name"] for tool in script.requests[0].tools] == ["other"]
    assert script.requests[0].tool_choice == "required"
    assert len(response.tools) == 2
    assert response.tool_choice.mode == "required"  # type: ignore[union-attr]


def test_an_error_has_a_status_or_is_the_last_event(client: OpenAI, script: Script) -> None:
    script.error = NoDecodeNode()
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="Decode server unavailable") as failed:
            client.responses.create(model=MODEL, input="x", stream=stream)
        assert failed.value.status_code == 503
    script.deltas = [ChatDelta(content=(TextDelta("half"),))]
    events = events_of(client, input="x")
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "Decode server unavailable - request failed"
    assert [event.type for event in events[-4:-1]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert [(item.status, item.content[0].text) for item in events[-1].response.output] == [("incomplete", "half")]
    assert client.responses.retrieve(events[-1].response.id) == events[-1].response
    script.deltas, script.wait_s = [], 0.4  # too late for a status, and nothing was said yet
    with client.responses.stream(model=MODEL, input="x") as late:
        assert [event.type for event in late] == ["response.created", "response.in_progress", "response.failed"]


def test_internal_errors_are_hidden(client: OpenAI, script: Script) -> None:
    script.deltas, script.error = [ChatDelta(content=(TextDelta("half"),))], RuntimeError("a secret")
    last = events_of(client, input="x")[-1]
    assert last.response.error.code == "server_error"
    assert "secret" not in last.response.error.message


def test_a_quiet_stream_stays_alive(url: str, script: Script) -> None:
    script.replies(TextDelta("yes"))
    script.wait_s = 0.6
    body = msgspec.json.encode({"model": MODEL, "input": "x", "stream": True})
    with urllib.request.urlopen(f"{url}/v1/responses", body, timeout=10) as answer:
        summary = [line.partition(b"\n")[0] for line in answer.read().split(b"\n\n")]
    assert summary[:3] == [b"event: response.created", b"event: response.in_progress", b": keep-alive"]
    assert summary.count(b"event: response.created") == 1


# Without HTTP.


def test_the_store_is_limited() -> None:
    now = [0.0]
    store = ResponseStore(max_count=3, max_bytes=1000, max_age_s=10, clock=lambda: now[0])
    for name in "abcd":
        store.put("me", name, ("x" * 100,), name)
    assert len(store) == 3
    with pytest.raises(ResponseNotFound):
        store.get("me", "a")
    with pytest.raises(ResponseNotFound):
        store.get("you", "b")
    store.put("me", "e", ("x" * 800,), "e")
    assert [kept.response for kept in store.owned("me")] == ["e", "d"]
    assert store.size_bytes == sum(kept.size_bytes for kept in store.owned("me")) <= 1000
    store.put("me", "f", ("x" * 2000,), "f")
    assert (len(store), store.size_bytes) == (0, 0)
    store.put("me", "g", (), "g")
    now[0] = 11.0
    with pytest.raises(ResponseNotFound):
        store.get("me", "g")
    assert store.size_bytes == 0


def test_items_of_the_assistant_are_one_message() -> None:
    items: Any = [
        {"type": "message", "role": "user", "content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}], "status": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": None},
        {"type": "reasoning", "content": None, "encrypted_content": "?"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "message", "role": "assistant", "content": "again"},
    ]
    create = responses_requests.read({"input": items})
    summary = responses_requests.messages_of(None, create.input)  # type: ignore[arg-type]
    assert [(one["role"], one["content"], len(one.get("tool_calls", []))) for one in summary] == [
        ("user", "x", 0),
        ("assistant", "a", 1),
        ("assistant", "no", 0),
        ("assistant", "again", 0),
    ]
    assert summary[1]["reasoning_content"] == "hm"
    with pytest.raises(BadRequest, match=r"^input\[0\]\.role: "):
        responses_requests.read({"input": [{"role": "x", "content": "x"}]})


# With a real model.


@pytest.fixture(scope="module")
def real() -> Iterator[OpenAI]:
    with (
        smollm2_pair() as nodes,
        served(config_of(*nodes), responses) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


class City(BaseModel):
    name: str
    country: str


def test_a_conversation_with_a_real_model(real: OpenAI) -> None:
    first = real.responses.create(
        model="smollm2", input="My name is Ann. Say hello.", temperature=0, max_output_tokens=12
    )
    with real.responses.stream(
        model="smollm2", input="What is my name?", previous_response_id=first.id, temperature=0, max_output_tokens=12
    ) as stream:
        second = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    both: Any = [
        {"role": "user", "content": "My name is Ann. Say hello."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "What is my name?"},
    ]
    whole = real.responses.create(model="smollm2", input=both, temperature=0, max_output_tokens=12)
    assert second == whole.output_text
    assert second


def test_responses_parse_returns_a_model(real: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "smollm2", "input": "Name a city.", "text_format": City, "temperature": 0}
    parsed = real.responses.parse(max_output_tokens=200, **ask)
    assert isinstance(parsed.output_parsed, City)
    with real.responses.stream(max_output_tokens=200, **ask) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_a_forced_call_and_its_output(real: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "smollm2", "tools": [WEATHER], "temperature": 0, "max_output_tokens": 60}
    first = real.responses.create(input="How is the weather in Rome?", tool_choice="required", **ask)
    call: Any = first.output[-1]
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 25 degrees."}
    second = real.responses.create(input=[output], previous_response_id=first.id, **ask)
    assert second.output
    events = list(
        real.responses.create(input="How is the weather in Rome?", tool_choice="required", stream=True, **ask)
    )
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
