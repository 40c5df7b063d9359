"""Every path of the gateway, for its OpenAPI document: which types it is asked and answered with, how it may refuse."""

from typing import Any

import msgspec

from disaggregated_inference.gateway import openapi_told as told
from disaggregated_inference.gateway.anthropic import requests as anthropic_requests
from disaggregated_inference.gateway.cluster import requests as cluster_requests
from disaggregated_inference.gateway.ollama import requests as ollama_requests
from disaggregated_inference.gateway.openai import requests as openai_requests
from disaggregated_inference.gateway.openai import responses, responses_requests

Object = dict[str, Any]

SSE = "text/event-stream"
NDJSON = "application/x-ndjson"

STATUSES = {
    400: "The request cannot be understood, asks for what cannot be had, or does not fit the context window.",
    401: "No key, or one that nobody has.",
    404: "No such thing here, or not for this key; of a model, with those that are.",
    408: "The request's body did not come in time.",
    413: "The body, or the request's KV, is larger than what is taken.",
    422: "The model cannot do this: it has no chat template, or no tokenizer that grammars can use.",
    429: "More requests a minute than the key is for.",
    500: "Something went wrong inside; the log has the reason.",
    501: "What Ollama has and a cluster cannot do.",
    503: "Nobody can serve it now: no node, no room, or too long a queue.",
    504: "The request's time was over before it was done.",
}
_WORKS = (400, 401, 404, 408, 413, 422, 429, 500, 503, 504)  # what makes nodes work
_READS = (400, 401, 404, 408, 413, 422, 429, 500, 503)  # a body, and perhaps asks a node for its tokenizer
_LOOKS = (401, 500)

_ID = ("x-request-id",)
_WHO = ("x-request-id", "x-disagg-plan", "x-disagg-prefill", "x-disagg-decode")

_HELLO = [{"role": "user", "content": "Why is the sky blue?"}]
_TEXT = {"type": "string", "minLength": 1}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """`told` is the whole answer; `items` are the kinds of event, or line, of a streamed one."""

    id: str
    path: str
    method: str = "get"
    summary: str
    asked: type | None = None
    example: Object | None = None
    parameters: Object = {}
    told: type | None = None
    items: tuple[type, ...] = ()
    text: bool = False
    answer: str = "The answer."
    headers: tuple[str, ...] = ()
    statuses: tuple[int, ...] = _LOOKS
    also: int | None = None  # another status with the same shape


class Api(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    about: str
    error: type
    stream: str = SSE
    last_event: str = ""  # that is no JSON
    operations: tuple[Operation, ...]
    typed_fields: tuple[tuple[type, str, type], ...] = ()  # that are read later, with a type of their own

    @property
    def types(self) -> list[type]:
        found = [self.error, *(kind for _, _, kind in self.typed_fields)]
        for operation in self.operations:
            found += [kind for kind in (operation.asked, operation.told, *operation.items) if kind]
        return list(dict.fromkeys(found))


_OPENAI = Api(
    name="openai",
    about="OpenAI's chat completions, completions and models. A stream ends with `data: [DONE]`, or with an error.",
    error=told.Error,
    last_event="[DONE]",
    operations=(
        Operation(
            id="chatCompletions",
            path="/v1/chat/completions",
            method="post",
            summary="Answer a conversation.",
            asked=openai_requests.ChatCompletionRequest,
            example={"model": "qwen", "messages": _HELLO, "max_tokens": 200},
            told=told.ChatCompletion,
            items=(told.ChatCompletionChunk, told.Error),
            headers=_WHO,
            statuses=_WORKS,
        ),
        Operation(
            id="completions",
            path="/v1/completions",
            method="post",
            summary="Go on from a prompt, or from several.",
            asked=openai_requests.CompletionRequest,
            example={"model": "qwen", "prompt": "The sky is", "max_tokens": 20},
            told=told.Completion,
            items=(told.Completion, told.Error),
            headers=_WHO,
            statuses=_WORKS,
        ),
        Operation(
            id="models",
            path="/v1/models",
            summary="The models that this key may use, from memory.",
            told=told.ModelList,
            headers=_ID,
        ),
        Operation(
            id="model",
            path="/v1/models/{name}",
            summary="One model, by its name or an alias.",
            parameters={"name": _TEXT},
            told=told.Model,
            headers=_ID,
            statuses=(401, 404, 500),
        ),
    ),
)

_ONE = "/v1/responses/{id}"

_RESPONSES = Api(
    name="responses",
    about="OpenAI's Responses. They are kept for a while in the gateway that gave them, and nowhere else.",
    error=told.Error,
    operations=(
        Operation(
            id="createResponse",
            path="/v1/responses",
            method="post",
            summary="Answer, and keep the answer so that the next request may go on from it.",
            asked=responses_requests.CreateResponse,
            example={"model": "qwen", "input": "Why is the sky blue?", "max_output_tokens": 200},
            told=responses.Response,
            items=(told.ResponseEvent,),
            headers=_WHO,
            statuses=_WORKS,
        ),
        Operation(
            id="retrieveResponse",
            path=_ONE,
            summary="One that is kept.",
            parameters={"id": _TEXT},
            told=responses.Response,
            headers=_ID,
            statuses=(400, 401, 404, 500),
        ),
        Operation(
            id="deleteResponse",
            path=_ONE,
            method="delete",
            summary="Keep it no longer.",
            parameters={"id": _TEXT},
            told=told.ResponseDeleted,
            headers=_ID,
            statuses=(401, 404, 500),
        ),
        Operation(
            id="responseInputItems",
            path=f"{_ONE}/input_items",
            summary="What it answers, with everything that was said before.",
            parameters={
                "id": _TEXT,
                "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
                "order": {"enum": ["asc", "desc"], "default": "desc"},
                "after": {"type": "string"},
            },
            told=told.ItemList,
            headers=_ID,
            statuses=(400, 401, 404, 500),
        ),
    ),
)

_OLLAMA = Api(
    name="ollama",
    about="Ollama's API. Answers are streamed, one JSON object a line, unless `stream` is false.",
    error=told.OllamaError,
    stream=NDJSON,
    typed_fields=(
        (ollama_requests.OllamaGenerateRequest, "options", ollama_requests.OllamaOptions),
        (ollama_requests.OllamaChatRequest, "options", ollama_requests.OllamaOptions),
    ),
    operations=(
        Operation(id="ollamaRunning", path="/", summary="Whether anyone is there.", text=True, statuses=(500,)),
        Operation(
            id="ollamaGenerate",
            path="/api/generate",
            method="post",
            summary="Answer a prompt. Without one: is the model there?",
            asked=ollama_requests.OllamaGenerateRequest,
            example={"model": "qwen", "prompt": "Why is the sky blue?", "options": {"num_predict": 200}},
            told=told.Generated,
            items=(told.Generated, told.OllamaError),
            headers=_WHO,
            statuses=(*_WORKS, 501),
        ),
        Operation(
            id="ollamaChat",
            path="/api/chat",
            method="post",
            summary="Answer a conversation. Without one: is the model there?",
            asked=ollama_requests.OllamaChatRequest,
            example={"model": "qwen", "messages": _HELLO, "options": {"num_predict": 200}},
            told=told.Chatted,
            items=(told.Chatted, told.OllamaError),
            headers=_WHO,
            statuses=(*_WORKS, 501),
        ),
        Operation(
            id="ollamaShow",
            path="/api/show",
            method="post",
            summary="What is known of a model.",
            asked=ollama_requests.OllamaModelRequest,
            example={"model": "qwen"},
            told=told.Shown,
            statuses=_READS,
        ),
        Operation(
            id="ollamaPull",
            path="/api/pull",
            method="post",
            summary="Nothing is fetched: success, if the cluster has the model.",
            asked=ollama_requests.OllamaModelRequest,
            example={"model": "qwen"},
            items=(told.Pulled,),
            statuses=(400, 401, 408, 413, 429, 500, 501),
        ),
        Operation(id="ollamaTags", path="/api/tags", summary="The models that this key may use.", told=told.Tags),
        Operation(id="ollamaPs", path="/api/ps", summary="Those that a node has in memory.", told=told.Running),
        Operation(id="ollamaVersion", path="/api/version", summary="Of Ollama's API.", told=told.Version),
    ),
)

_ANTHROPIC = Api(
    name="anthropic",
    about="Anthropic's Messages.",
    error=told.AnthropicError,
    operations=(
        Operation(
            id="messages",
            path="/v1/messages",
            method="post",
            summary="Answer a conversation.",
            asked=anthropic_requests.MessagesRequest,
            example={"model": "qwen", "max_tokens": 200, "messages": _HELLO},
            told=told.AnthropicMessage,
            items=(told.AnthropicEvent,),
            headers=_WHO,
            statuses=_WORKS,
        ),
        Operation(
            id="countTokens",
            path="/v1/messages/count_tokens",
            method="post",
            summary="How many tokens a conversation is.",
            asked=anthropic_requests.CountTokensRequest,
            example={"model": "qwen", "messages": _HELLO},
            told=told.TokensCounted,
            headers=_ID,
            statuses=_READS,
        ),
    ),
)

_OURS = Api(
    name="gateway",
    about="The gateway's own paths. Errors have OpenAI's shape.",
    error=told.Error,
    operations=(
        Operation(
            id="tokenize",
            path="/tokenize",
            method="post",
            summary="Text, or a conversation as the model would get it, as tokens.",
            asked=cluster_requests.TokenizeRequest,
            example={"model": "qwen", "prompt": "Why is the sky blue?"},
            told=told.Tokens,
            headers=_ID,
            statuses=_READS,
        ),
        Operation(
            id="detokenize",
            path="/detokenize",
            method="post",
            summary="Tokens as text.",
            asked=cluster_requests.DetokenizeRequest,
            example={"model": "qwen", "tokens": [300, 301]},
            told=told.Detokenized,
            headers=_ID,
            statuses=_READS,
        ),
        Operation(id="health", path="/health", summary="Alive, and no more.", told=told.Health, statuses=(500,)),
        Operation(
            id="ready",
            path="/ready",
            summary="Whether some model can be served.",
            told=told.Ready,
            statuses=(500,),
            also=503,
        ),
        Operation(id="metrics", path="/metrics", summary="For Prometheus.", text=True),
        Operation(
            id="cluster",
            path="/cluster",
            summary="Nodes, links, queue, the last requests, and what is reached of what should be.",
            told=told.Cluster,
        ),
        Operation(
            id="clusterEvents",
            path="/cluster/events",
            summary="`status` about once a second while anything changes, `request` for each one that ends.",
            items=(told.ClusterStatus, told.Ended),
            answer="Events until whoever listens leaves.",
            statuses=(401, 500, 503),
        ),
        Operation(id="openapi", path="/openapi.json", summary="This.", told=told.Document, statuses=(500,)),
    ),
)

APIS = (_OPENAI, _RESPONSES, _OLLAMA, _ANTHROPIC, _OURS)
