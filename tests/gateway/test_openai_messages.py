"""What becomes of messages, deltas and errors in OpenAI's shape, without a cluster."""

from typing import Any

import msgspec
import pytest

from disaggregated_inference.errors import BadRequest, ContextTooLong, DisaggError, ModelNotFound
from disaggregated_inference.gateway.chat import ChatDelta
from disaggregated_inference.gateway.openai.chat import ChatChoice, content_fields
from disaggregated_inference.gateway.openai.errors import error_body
from disaggregated_inference.gateway.openai.requests import ChatCompletionRequest, CompletionRequest, read
from disaggregated_inference.gateway.tool_parsers.base import (
    ContentDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from tests.support.openai_requests import HELLO, TIME, WEATHER


def _choice(**more: Any) -> ChatChoice:
    return ChatChoice(0, read({"messages": HELLO} | more, ChatCompletionRequest), None)


def _said() -> list[ContentDelta]:
    return [
        ReasoningDelta("Let me "),
        ReasoningDelta("think."),
        TextDelta("Hi"),
        ToolCallStart(0, "call_a", "get_time"),
        ToolCallArguments(0, "{"),
        ToolCallStart(1, "call_b", "get_weather"),
        ToolCallArguments(0, "}"),
        ToolCallArguments(1, '{"a":1}'),
    ]


def test_reasoning_and_tool_calls_of_a_message() -> None:
    choice = _choice(tools=[TIME, WEATHER])
    for output in _said():
        choice.take(ChatDelta(content=(output,), token=5))
    choice.take(ChatDelta(token=5, finish_reason="tool_calls"))
    message = choice.body()["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi", "Let me think.")
    assert message["reasoning"] == message["reasoning_content"]
    assert message["tool_calls"] == [
        {"id": "call_a", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
        {"id": "call_b", "type": "function", "function": {"name": "get_weather", "arguments": '{"a":1}'}},
    ]
    assert choice.reasoning_tokens == 2
    assert choice.body()["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_deltas_add_up_to_the_message(size: int) -> None:
    from openai.lib.streaming._deltas import accumulate_delta

    output, whole = _said(), content_fields(_said())
    choice, added = _choice(tools=[TIME]), dict[object, object]()
    for at in range(0, len(output), size):
        choice.take(ChatDelta(content=tuple(output[at : at + size])))
        summary = choice.chunk()
        assert summary
        added = accumulate_delta(added, summary["delta"])
    assert added == {"role": "assistant"} | whole


def test_parallel_tool_calls_false_keeps_one_call() -> None:
    choice = _choice(tools=[TIME], parallel_tool_calls=False)
    choice.take(ChatDelta(content=tuple(_said()), finish_reason="tool_calls"))
    assert [call["id"] for call in choice.body()["message"]["tool_calls"]] == ["call_a"]


def test_empty_deltas_make_no_event() -> None:
    choice = _choice()
    choice.take(ChatDelta(token=5))
    assert choice.chunk() == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    choice.take(ChatDelta(token=6))
    assert choice.chunk() is None


def test_errors_have_openais_shape() -> None:
    def summary(error: Exception) -> Any:
        return error_body(error)["error"]

    assert summary(BadRequest("top_p: no", param="top_p")) == {
        "message": "top_p: no",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": None,
    }
    assert summary(ModelNotFound("none"))["code"] == "model_not_found"
    assert summary(ContextTooLong(10, 5))["code"] == "context_length_exceeded"
    assert summary(DisaggError("x"))["type"] == "server_error"
    assert "secret" not in msgspec.json.encode(error_body(ValueError("a secret"))).decode()


def test_messages_for_chat_templates() -> None:
    from disaggregated_inference.gateway.openai.messages import plain_messages

    call = {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    output = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning": "hm",
        "tool_calls": [call],
        "audio": None,
    }
    params = read({"messages": [{"role": "developer", "content": "x"}, output]}, ChatCompletionRequest)
    assert plain_messages(params.messages) == [
        {"role": "system", "content": "x"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
    ]
    template = {"messages": HELLO, "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    assert read(template, ChatCompletionRequest).template() == {"reasoning_effort": "low", "enable_thinking": False}
    assert read({"prompt": [1, 2], "top_k": -1}, CompletionRequest).options()["top_k"] == 0
