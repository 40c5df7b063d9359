"""The checks of every LangChain chat model: they share one interface."""

from collections.abc import Callable, Sequence
from typing import Any

from common import QUESTION, City, joined, one_call, report, same
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool


def save_city(name: str, large: bool) -> str:
    return f"saved {name}"


TOOL = StructuredTool.from_function(save_city, description="Save a city", args_schema=City)


def report_model(
    package: str,
    short: BaseChatModel,
    long: BaseChatModel,
    methods: Sequence[str],
    messages: Sequence[BaseMessage] = (HumanMessage(QUESTION),),
    **choice: Any,
) -> None:
    """`methods` of structured output. Where a call cannot be forced, `messages` lead the model to it."""

    def chat() -> None:
        answer = short.invoke(QUESTION)
        same(answer.text)
        assert answer.usage_metadata["output_tokens"] > 1

    def streaming() -> None:
        joined(chunk.text for chunk in short.stream(QUESTION))

    def structured() -> str:
        for method in methods:
            assert isinstance(long.with_structured_output(City, method=method).invoke(QUESTION), City), method
        return ", ".join(methods)

    def tools() -> None:
        bound = long.bind_tools([TOOL], **choice)
        answer = bound.invoke(list(messages))
        one_call((call["name"], call["args"]) for call in answer.tool_calls)
        chunks = list(bound.stream(list(messages)))
        one_call((call["name"], call["args"]) for call in sum(chunks[1:], chunks[0]).tool_calls)
        result = ToolMessage("saved", tool_call_id=answer.tool_calls[0]["id"])
        assert short.bind_tools([TOOL]).invoke([*messages, answer, result])

    checks: dict[str, Callable[[], str | None]] = {"chat": chat, "streaming": streaming}
    report(package, **checks, structured=structured, tools=tools)
