"""What the gateway answers, for the OpenAPI document alone: answers are written as they come, not from these types.

Fields with a default may be absent. Tests hold real answers against them.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from disaggregated_inference.gateway.slo import Target

Object = dict[str, Any]


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """There may be more fields."""


class ErrorDetail(_Told, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Told, frozen=True, kw_only=True):
    """As OpenAI has it; also of our own paths and of those that nobody knows."""

    error: ErrorDetail


class Usage(_Told, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


Finish = Literal["stop", "length", "tool_calls"]


class ChatMessage(_Told, frozen=True, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[Object] | UnsetType = UNSET


class ChatChoice(_Told, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: Object | None
    finish_reason: Finish


class ChatCompletion(_Told, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    disagg: Any = None


class ChunkChoice(_Told, frozen=True, kw_only=True):
    index: int
    delta: Object
    logprobs: Object | None
    finish_reason: Finish | None


class ChatCompletionChunk(_Told, frozen=True, kw_only=True):
    """`usage` in the last one, where stream_options asks for it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class CompletionChoice(_Told, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: Object | None
    finish_reason: Literal["stop", "length"] | None


class Completion(_Told, frozen=True, kw_only=True):
    """Whole, or an event of a stream; those have no usage but the last one, where stream_options asks for it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(_Told, frozen=True, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    context_window: int | UnsetType = UNSET


class ModelList(_Told, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[Model]


class ResponseEvent(_Told, frozen=True, kw_only=True):
    """response.created, response.output_text.delta, ..., and in the end response.completed, .incomplete or .failed."""

    type: str
    sequence_number: int


class ResponseDeleted(_Told, frozen=True, kw_only=True):
    id: str
    object: Literal["response"]
    deleted: Literal[True] = True


class ItemList(_Told, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[Object]
    first_id: str
    last_id: str
    has_more: bool


class OllamaError(_Told, frozen=True, kw_only=True):
    error: str


class _OllamaAnswer(_Told, frozen=True, kw_only=True):
    """Whole, or a line of a stream: the last one has `done`, its reason, and counts and nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[Object] | UnsetType = UNSET


class Generated(_OllamaAnswer, frozen=True, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaMessage(_Told, frozen=True, kw_only=True):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[Object] | UnsetType = UNSET


class Chatted(_OllamaAnswer, frozen=True, kw_only=True):
    message: OllamaMessage


class ListedModel(_Told, frozen=True, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Object


class Tags(_Told, frozen=True, kw_only=True):
    models: list[ListedModel]


class RunningModel(ListedModel, frozen=True, kw_only=True):
    expires_at: str
    size_vram: int
    context_length: int | None


class Running(_Told, frozen=True, kw_only=True):
    models: list[RunningModel]


class Shown(_Told, frozen=True, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: Object
    model_info: Object
    capabilities: list[str]
    modified_at: str


class Version(_Told, frozen=True, kw_only=True):
    version: str


class Pulled(_Told, frozen=True, kw_only=True):
    status: Literal["success"]


class AnthropicErrorDetail(_Told, frozen=True, kw_only=True):
    type: str
    message: str


class AnthropicError(_Told, frozen=True, kw_only=True):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


class AnthropicMessage(_Told, frozen=True, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Object]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: dict[str, int]


class AnthropicEvent(_Told, frozen=True, kw_only=True):
    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]


class TokensCounted(_Told, frozen=True, kw_only=True):
    input_tokens: int


class Tokens(_Told, frozen=True, kw_only=True):
    count: int
    max_model_len: int | None
    tokens: list[int]


class Detokenized(_Told, frozen=True, kw_only=True):
    prompt: str


class Health(_Told, frozen=True, kw_only=True):
    status: Literal["healthy"]


class Ready(_Told, frozen=True, kw_only=True):
    status: Literal["ready", "not ready", "draining"]
    verdict: str
    models: dict[str, str]


class ClusterStatus(_Told, frozen=True, kw_only=True):
    """An event of the feed; see docs/API.md for a node's fields."""

    verdict: str
    models: dict[str, str]
    nodes: list[Object]
    links: list[Object]
    refusals: list[Object]
    queue: dict[str, Object]
    served: dict[str, int]
    latency: Object


class Cluster(ClusterStatus, frozen=True, kw_only=True):
    history: list[Object]
    targets: list[Target]


class Ended(_Told, frozen=True, kw_only=True):
    """A record of the history."""

    time: float
    request_id: str
    model: str


class Document(_Told, frozen=True, kw_only=True):
    openapi: str
    info: Object
    paths: Object
