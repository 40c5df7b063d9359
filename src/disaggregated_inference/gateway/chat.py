"""The chat request that every API makes, and the deltas that every API writes.

APIs know nothing of models, and parsers nothing of APIs: these types are between them. Messages and tools have OpenAI's
form, because chat templates read it.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Literal, TypeVar

import msgspec

from disaggregated_inference.api import OutputFormat, Progress, RequestOptions, RequestRecord, TopLogprob
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.tool_parsers import parser_of
from disaggregated_inference.gateway.tool_parsers.base import ContentDelta, PlainParser, ToolParser
from disaggregated_inference.gateway.tool_parsers.forced import either_format, forced_format, framed_format
from disaggregated_inference.gateway.tool_parsers.passthrough import PassthroughParser
from disaggregated_inference.gateway.tool_parsers.prompted_tools import knows_tools, render_tools_as_text
from disaggregated_inference.gateway.tool_parsers.tools import with_parameters
from disaggregated_inference.models import MissingTokenizer, ModelTokenizer
from disaggregated_inference.orchestrator import Delta, DisaggregatedInference, OnPlan


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    messages: list[dict[str, Any]] = []
    prompt: str | None = None  # instead of messages: it goes to the model as it is, and the completion is plain text
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none", "required"] | str = "auto"  # or the name of the function to call
    template: dict[str, Any] = {}  # options of the chat template: reasoning_effort, enable_thinking, ...
    format: OutputFormat | None = None
    options: RequestOptions = {}  # without those that the fields above stand for


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The next piece of one choice, parsed. The last one of a choice has the finish reason."""

    choice: int = 0
    content: Sequence[ContentDelta] = ()
    token: int | None = None
    logprob: float | None = None
    top_logprobs: Sequence[TopLogprob] = ()
    finish_reason: str | None = None  # stop, length or tool_calls
    record: RequestRecord | None = None  # only on the last delta of a request, which has no choice
    progress: Progress | None = None  # only before the first token; then nothing else is set
    waiting: str = ""  # no decode node is there, and the request waits for one; then nothing else is set


ChatDeltas = AsyncGenerator[list[ChatDelta], None]
Item = TypeVar("Item")


async def stream_chat(core: DisaggregatedInference, chat: ChatRequest, on_plan: OnPlan | None = None) -> ChatDeltas:
    """Deltas in batches, as they come. Closing it cancels the request on both nodes."""
    tokenizer = await core.tokenizer(chat.model)
    parsers: dict[int, ToolParser] = {}

    def parse(delta: Delta) -> ChatDelta:
        if delta.completion:
            return ChatDelta(record=delta.completion.record)
        if delta.progress is not None or delta.waiting:
            return ChatDelta(progress=delta.progress, waiting=delta.waiting)
        if (parser := parsers.get(delta.choice)) is None:
            parser = parsers[delta.choice] = _new_parser(tokenizer, chat)
        content, finish = parser.take(delta), delta.finish_reason
        if finish:
            content = [*content, *parser.finish()]
            if finish == "stop" and parser.called:
                finish = "tool_calls"
        return ChatDelta(
            choice=delta.choice,
            content=content,
            token=delta.token,
            logprob=delta.logprob,
            top_logprobs=delta.top_logprobs,
            finish_reason=finish,
        )

    async with aclosing(core.batches(generate_options(chat, tokenizer), on_plan)) as batches:
        async for deltas in batches:
            yield [parse(delta) for delta in deltas]


async def encode_all(
    batches: AsyncGenerator[list[Item], None], encode: Callable[[Item], bytes], end: Callable[[], bytes] = bytes
) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream. What comes together is sent together."""
    async with aclosing(batches):
        async for items in batches:
            if encoded := b"".join([encode(item) for item in items]):
                yield encoded
    if last := end():
        yield last


async def consume(batches: AsyncGenerator[list[Item], None], take: Callable[[Item], object]) -> None:
    async with aclosing(batches):
        async for items in batches:
            for item in items:
                take(item)


def _new_parser(tokenizer: ModelTokenizer, chat: ChatRequest) -> ToolParser:
    if chat.prompt is not None:
        return PlainParser()
    if isinstance(tokenizer, MissingTokenizer):
        return PassthroughParser()
    guided = chat.format is not None
    return parser_of(tokenizer, chat.tools, chat.tool_choice, template=chat.template, guided=guided)


def generate_options(chat: ChatRequest, tokenizer: ModelTokenizer) -> RequestOptions:
    """The orchestrator's options."""
    if chat.prompt is not None:
        return chat.options | {"model": chat.model, "prompt": chat.prompt, "format": chat.format}
    tools = chat.tools if chat.tool_choice != "none" else []
    tools = tools if tokenizer.harmony else [with_parameters(tool) for tool in tools]
    template = chat.template | ({"tools": tools} if tools else {})
    _require_vision(chat, tokenizer)
    messages, format = chat.messages, chat.format
    if not isinstance(tokenizer, MissingTokenizer):  # such a node has the template, the parser and the grammars
        format = _format(chat, tools, tokenizer)
        messages = [_for_template(message, tokenizer.harmony) for message in messages]
        messages = messages if knows_tools(tokenizer) else render_tools_as_text(messages, tools)
    elif chat.tool_choice not in ("auto", "none"):
        raise BadRequest(f"tool_choice: the engine of {chat.model} cannot force a tool call", param="tool_choice")
    own: RequestOptions = {"model": chat.model, "messages": messages, "template": template, "format": format}
    return chat.options | own


def encode_prompt(chat: ChatRequest, tokenizer: ModelTokenizer, window: int | None = None) -> list[int]:
    """The prompt as the model reads it. Refuses what cannot fit into the window."""
    options = generate_options(chat, tokenizer)
    if chat.prompt:
        return tokenizer.encode_within(chat.prompt, window) if window else tokenizer.encode(chat.prompt)
    return tokenizer.encode_chat(options["messages"] or [], window, **(options["template"] or {}))


def _format(chat: ChatRequest, tools: list[dict[str, Any]], tokenizer: ModelTokenizer) -> OutputFormat | None:
    """A forced tool call has no text, so the format of a text has no effect beside it."""
    if chat.tool_choice in ("auto", "none"):
        if not chat.format:
            return None
        return either_format(tokenizer, tools, chat.format) if tools else framed_format(tokenizer, chat.format)
    return forced_format(tokenizer, chat.tools, chat.tool_choice)


def _require_vision(chat: ChatRequest, tokenizer: ModelTokenizer) -> None:
    """A chat template would drop images silently."""
    sees = isinstance(tokenizer, MissingTokenizer) and tokenizer.sees
    if not sees and any(message.get("images") for message in chat.messages):
        reason = "this model reads text only: leave out the images, or use a model with vision"
        raise BadRequest(f"messages: {reason}", param="messages")


def _for_template(message: dict[str, Any], harmony: bool) -> dict[str, Any]:
    """Templates read the arguments of a call as an object; APIs send them as a string. GPT-OSS reads them as it wrote
    them: so the next prompt begins with the tokens of the last one."""
    if not message.get("tool_calls"):
        return message
    parsed = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return message if harmony else message | {"tool_calls": parsed}


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("messages: every tool call needs a function with a name", param="messages")
    arguments = function.get("arguments") or {}
    try:
        parsed = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:  # also invalid Unicode, which no tokenizer takes
        reason = f"the arguments of a call of {function['name']} are not JSON: {error}"
        raise BadRequest(f"messages: {reason}", param="messages") from error
    return call | {"function": function | {"arguments": parsed}}
