"""A chat request as every API can be turned into it, and its answer as every API can be made from it.

Adapters know their API and nothing of models; parsers know how a family of models writes tool calls and thoughts, and
nothing of APIs. Between them are these types. Messages and tools have OpenAI's shape, because chat templates do.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.tool_parsers import parser_of
from disaggregated_inference.gateway.tool_parsers.base import ContentDelta, ToolParser
from disaggregated_inference.gateway.tool_parsers.forced import either_format, forced_format, framed_format
from disaggregated_inference.gateway.tool_parsers.harmony import speaks_harmony
from disaggregated_inference.gateway.tool_parsers.passthrough import PassthroughParser
from disaggregated_inference.gateway.tool_parsers.prompted_tools import in_words, knows_tools
from disaggregated_inference.models.text_only import TextOnlyTokenizer
from disaggregated_inference.models.tokenizer import ModelTokenizer
from disaggregated_inference.orchestrator import Delta, DisaggregatedInference
from disaggregated_inference.orchestrator.node_client import Progress


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none", "required"] | str = "auto"  # or the one function that must be called
    template: dict[str, Any] = {}  # more for the chat template: reasoning_effort, enable_thinking, ...
    options: dict[str, Any] = {}  # for the orchestrator: max_tokens, temperature, format, n, timeout, request_id, ...


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A piece of one choice: what a parser made of some text; with the choice's last piece, why it ended."""

    choice: int = 0
    said: Sequence[ContentDelta] = ()
    token: int | None = None
    logprob: float | None = None
    top_logprobs: Sequence[dict[str, float]] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    metrics: dict[str, Any] | None = None  # on the very last part, which has no choice
    progress: Progress | None = None  # on parts before the first token, which have nothing else


Parts = AsyncGenerator[list[ChatDelta], None]


async def converse(core: DisaggregatedInference, turn: ChatRequest) -> Parts:
    """The answer in parts, as many at a time as have come. Closing it cancels the request on both nodes."""
    tokenizer = await core.tokenizer(turn.model)
    parsers: dict[int, ToolParser] = {}

    def part(delta: Delta) -> ChatDelta:
        if delta.metrics is not None or delta.progress:
            return ChatDelta(metrics=delta.metrics, progress=delta.progress)
        if delta.choice not in parsers:
            parsers[delta.choice] = _parser(tokenizer, turn)
        return _part(delta, parsers[delta.choice])

    async with aclosing(core.batches(**asked(turn, tokenizer))) as batches:
        async for deltas in batches:
            yield [part(delta) for delta in deltas]


def _parser(tokenizer: ModelTokenizer, turn: ChatRequest) -> ToolParser:
    if isinstance(tokenizer, TextOnlyTokenizer):
        return PassthroughParser()
    guided = bool(turn.options.get("format"))
    return parser_of(tokenizer, turn.tools, turn.tool_choice, template=turn.template, guided=guided)


def asked(turn: ChatRequest, tokenizer: ModelTokenizer) -> dict[str, Any]:
    """For the orchestrator."""
    tools = turn.tools if turn.tool_choice != "none" else []
    template = turn.template | ({"tools": tools} if tools else {})
    options = dict(turn.options)
    _require_eyes(turn, tokenizer)
    if isinstance(tokenizer, TextOnlyTokenizer):  # whoever has it also has the template, the parser and the grammars
        if turn.tool_choice not in ("auto", "none"):
            raise BadRequest(f"tool_choice: {turn.model} is served by an engine that cannot be made to call a tool")
        return options | {"model": turn.model, "messages": turn.messages, "template": template}
    if turn.tool_choice not in ("auto", "none"):
        if options.get("format"):
            raise BadRequest(
                "a forced tool call has a format of its own: leave out response_format, or that tool_choice"
            )
        options["format"] = forced_format(tokenizer, turn.tools, turn.tool_choice)
    elif options.get("format"):
        form = options["format"]
        options["format"] = either_format(tokenizer, tools, form) if tools else framed_format(tokenizer, form)
    messages = [_for_template(message, speaks_harmony(tokenizer)) for message in turn.messages]
    if not knows_tools(tokenizer):
        messages = in_words(messages, tools)
    return options | {"model": turn.model, "messages": messages, "template": template}


def _require_eyes(turn: ChatRequest, tokenizer: ModelTokenizer) -> None:
    """A template would leave pictures out in silence."""
    sees = isinstance(tokenizer, TextOnlyTokenizer) and tokenizer.sees
    if not sees and any(message.get("images") for message in turn.messages):
        raise BadRequest("messages: this model reads text alone: leave the images out, or ask one with vision")


def _for_template(message: dict[str, Any], harmony: bool) -> dict[str, Any]:
    """Templates read a call's arguments as an object; APIs carry them as text. GPT-OSS's reads the thoughts before a
    call as `thinking`, and only where nothing else was said."""
    if harmony and message.get("reasoning_content"):
        thoughts = message["reasoning_content"]
        message = {name: value for name, value in message.items() if name != "reasoning_content"}
        if message.get("tool_calls") and not message.get("content"):
            message |= {"thinking": thoughts}
    calls = message.get("tool_calls")
    if not calls:
        return message
    return message | {"tool_calls": [_call(call) for call in calls]}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("every tool call in messages needs a function with a name")
    arguments = function.get("arguments") or {}
    try:
        parsed = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:  # halves of characters, too: no tokenizer takes them
        raise BadRequest(f"the arguments of the call of {function['name']} are not JSON: {error}") from error
    return call | {"function": function | {"arguments": parsed}}


def _part(delta: Delta, parser: ToolParser) -> ChatDelta:
    said = parser.take(delta)
    finish = delta.finish_reason
    if finish:
        said = [*said, *parser.finish()]
        if finish == "stop" and parser.called:
            finish = "tool_calls"
    return ChatDelta(
        choice=delta.choice,
        said=said,
        token=delta.token,
        logprob=delta.logprob,
        top_logprobs=delta.top_logprobs,
        finish_reason=finish,  # type: ignore[arg-type]
    )
