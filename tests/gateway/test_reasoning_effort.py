"""How hard a model thinks is asked for by three names, and means the same."""

from typing import Any, get_args

import pytest

from disaggregated_inference.gateway.anthropic import requests as anthropic_shapes
from disaggregated_inference.gateway.openai import requests as openai_asked
from disaggregated_inference.gateway.openai import responses_requests as responses_shapes
from disaggregated_inference.gateway.reasoning_effort import Effort

HELLO = [{"role": "user", "content": "hello"}]
FOR_TEMPLATES = {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high"}


@pytest.mark.parametrize("effort", get_args(Effort))
def test_openai_has_two_names_for_it(effort: Any) -> None:
    expected = {"reasoning_effort": FOR_TEMPLATES.get(effort, "high"), "enable_thinking": effort != "none"}
    chat = openai_asked.read({"messages": HELLO, "reasoning_effort": effort}, openai_asked.ChatCompletionRequest)
    assert chat.template() == expected
    create = responses_shapes.understood({"input": "hello", "reasoning": {"effort": effort}})
    assert responses_shapes.turn_of(create, "m", [], {}).template == expected


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
def test_anthropic_has_a_third(effort: Any) -> None:
    body = {"model": "m", "messages": HELLO, "output_config": {"effort": effort}}
    counted = anthropic_shapes.understood(body, anthropic_shapes.CountTokensRequest)
    assert counted.template() == {"reasoning_effort": FOR_TEMPLATES.get(effort, "high")}


def test_what_the_template_is_told_by_name_counts() -> None:
    body = {"messages": HELLO, "reasoning_effort": "xhigh", "chat_template_kwargs": {"reasoning_effort": "xhigh"}}
    assert openai_asked.read(body, openai_asked.ChatCompletionRequest).template()["reasoning_effort"] == "xhigh"
