"""Reasoning effort has three names in the APIs and one meaning."""

from typing import Any, get_args

import pytest

from disaggregated_inference.gateway.anthropic import requests as anthropic
from disaggregated_inference.gateway.openai import requests as openai
from disaggregated_inference.gateway.openai import responses_requests as responses
from disaggregated_inference.gateway.reasoning_effort import Effort

HELLO = [{"role": "user", "content": "hello"}]
FOR_TEMPLATES = {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high"}


@pytest.mark.parametrize("effort", get_args(Effort))
def test_openais_two_fields(effort: Any) -> None:
    expected = {"reasoning_effort": FOR_TEMPLATES.get(effort, "high"), "enable_thinking": effort != "none"}
    chat = openai.read({"messages": HELLO, "reasoning_effort": effort}, openai.ChatCompletionRequest)
    assert chat.template() == expected
    create = responses.read({"input": "hello", "reasoning": {"effort": effort}})
    assert responses.chat_request(create, "m", [], {}).template == expected


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
def test_anthropics_field(effort: Any) -> None:
    body = {"model": "m", "messages": HELLO, "output_config": {"effort": effort}}
    counted = anthropic.read(body, anthropic.CountTokensRequest)
    assert counted.template() == {"reasoning_effort": FOR_TEMPLATES.get(effort, "high")}


def test_chat_template_kwargs_override_the_effort() -> None:
    body = {"messages": HELLO, "reasoning_effort": "xhigh", "chat_template_kwargs": {"reasoning_effort": "xhigh"}}
    assert openai.read(body, openai.ChatCompletionRequest).template()["reasoning_effort"] == "xhigh"
