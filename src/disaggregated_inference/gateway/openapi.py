"""`/openapi.json`: paths, request schemas and status codes. The schemas come from the structs that read requests.

The document needs no key: it is the same for every gateway of this version and says nothing about the cluster.
"""

from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference import __version__
from disaggregated_inference.gateway.anthropic import requests as anthropic
from disaggregated_inference.gateway.auth import OPEN_PATHS
from disaggregated_inference.gateway.cluster import requests as cluster
from disaggregated_inference.gateway.ollama import requests as ollama
from disaggregated_inference.gateway.openai import requests as openai
from disaggregated_inference.gateway.openai import responses_requests as responses

Schema = dict[str, Any]

JSON, SSE, NDJSON, TEXT = "application/json", "text/event-stream", "application/x-ndjson", "text/plain"
HTML = "text/html"

_ABOUT = (
    "Prefill and decode nodes behind the APIs of OpenAI, Ollama and Anthropic. Bodies are JSON objects of up to 16 MiB,"
    " whatever the Content-Type says; unknown fields are ignored."
)
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
_STATUSES = {
    200: "Success.",
    400: "The request is malformed, not supported, or longer than the context window.",
    401: "Missing or unknown API key.",
    403: "This API key may not see it.",
    404: "Not found, or not available to this API key.",
    408: "The request's body did not arrive in time.",
    413: "The body, or the request's KV, is too large.",
    422: "The model does not support this: it has no chat template, or no tokenizer for structured output.",
    429: "A budget of the API key is exceeded: requests or tokens, in a time or at once.",
    500: "Internal error; the gateway's log has the reason.",
    501: "Part of an API that a cluster does not offer.",
    503: "No node can serve the request now, or the request queue is full.",
    504: "The request's time limit is over.",
}
_GENERATES = (400, 401, 404, 408, 413, 422, 429, 500, 503, 504)
_READS = (400, 401, 404, 408, 413, 422, 429, 500, 503)  # a body, and perhaps a tokenizer from a node

_MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
_NAME = {"type": "string", "minLength": 1}
_PAGE = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}

_DURATION = {"type": "string", "pattern": "^[0-9]{1,9}(\\.[0-9]{1,6})?[smhd]?$"}
_TIME = {"range": _DURATION}
_TIME |= {name: {"type": "string"} for name in ("since", "until", "model", "node", "caller")}
_ONE_OUTCOME = {"outcome": {"enum": ["ok", "failed", "refused", "cancelled"]}}
_READS_HISTORY = (400, 401, 403, 404, 500, 503)


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


_STRING, _STRING_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
_ERRORS = {
    "openai": _object(
        error=_object(message=_STRING, type=_STRING, param=_STRING_OR_NULL, code=_STRING_OR_NULL),
    ),
    "ollama": _object(error=_STRING),
    "anthropic": _object(
        type={"const": "error"}, error=_object(type=_STRING, message=_STRING), request_id=_STRING_OR_NULL
    ),
}
_ERRORS |= dict.fromkeys(("responses", "gateway"), _ERRORS["openai"])


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    route: str  # "POST /v1/completions"
    summary: str
    request: type | None = None
    example: Schema | None = None
    parameters: Schema = {}
    media: tuple[str, ...] = (JSON,)  # of the 200; a stream's comes last
    errors: tuple[int, ...] = (401, 500)
    also: tuple[int, ...] = ()  # statuses with a body like the 200's


def _post(id: str, path: str, summary: str, request: type, example: Schema, **more: Any) -> Operation:
    more = {"errors": _READS} | more
    return Operation(id=id, route=f"POST {path}", summary=summary, request=request, example=example, **more)


def _get(id: str, path: str, summary: str, **more: Any) -> Operation:
    return Operation(id=id, route=f"GET {path}", summary=summary, **more)


_STREAMS: dict[str, Any] = {"errors": _GENERATES, "media": (JSON, SSE)}
_LINES: dict[str, Any] = {"errors": (*_GENERATES, 501), "media": (JSON, NDJSON)}
_ONE = "/v1/responses/{id}"
_PROMPT = {"model": "qwen", "prompt": "Why is the sky blue?"}
_CHAT = {"model": "qwen", "messages": _MESSAGES}
_SHORT = {"options": {"num_predict": 200}}
# fmt: off
OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "openai": (
        _post("chatCompletions", "/v1/chat/completions", "Complete a conversation.",
              openai.ChatCompletionRequest, _CHAT | {"max_tokens": 200}, **_STREAMS),
        _post("completions", "/v1/completions", "Complete one prompt or several.",
              openai.CompletionRequest, _PROMPT | {"max_tokens": 20}, **_STREAMS),
        _get("models", "/v1/models", "The models that this API key may use; with anthropic-version in its shape."),
        _get("model", "/v1/models/{name}", "One model, by name or alias.",
             parameters={"name": _NAME}, errors=(401, 404, 500)),
    ),
    "responses": (
        _post("createResponse", "/v1/responses", "Create a response and store it in this gateway.",
              responses.CreateResponse, {"model": "qwen", "input": "Why is the sky blue?", "max_output_tokens": 200},
              **_STREAMS),
        _get("retrieveResponse", _ONE, "A stored response.", parameters={"id": _NAME}, errors=(400, 401, 404, 500)),
        Operation(id="deleteResponse", route=f"DELETE {_ONE}", summary="Delete a stored response.",
                  parameters={"id": _NAME}, errors=(401, 404, 500)),
        _get("responseInputItems", f"{_ONE}/input_items", "A stored response's input, earlier responses included.",
             parameters={"id": _NAME} | _PAGE, errors=(400, 401, 404, 500)),
    ),
    "ollama": (
        _get("ollamaRunning", "/", "Says that the gateway runs.", media=(TEXT,), errors=(500,)),
        _post("ollamaGenerate", "/api/generate", "Complete a prompt. Without one: whether the model is available.",
              ollama.OllamaGenerateRequest, _PROMPT | _SHORT, **_LINES),
        _post("ollamaChat", "/api/chat", "Complete a conversation. Without one: whether the model is available.",
              ollama.OllamaChatRequest, _CHAT | _SHORT, **_LINES),
        _post("ollamaShow", "/api/show", "A model's details.", ollama.OllamaModelRequest, {"model": "qwen"}),
        _post("ollamaPull", "/api/pull", "Downloads nothing; succeeds if the cluster has the model.",
              ollama.OllamaModelRequest, {"model": "qwen"},
              media=(NDJSON,), errors=(400, 401, 408, 413, 429, 500, 501)),
        _get("ollamaTags", "/api/tags", "The models that this API key may use."),
        _get("ollamaPs", "/api/ps", "The models that a node has in memory."),
        _get("ollamaVersion", "/api/version", "The version of Ollama's API."),
    ),
    "anthropic": (
        _post("messages", "/v1/messages", "Complete a conversation.",
              anthropic.MessagesRequest, _CHAT | {"max_tokens": 200}, **_STREAMS),
        _post("countTokens", "/v1/messages/count_tokens", "The number of tokens of a conversation.",
              anthropic.CountTokensRequest, _CHAT),
    ),
    "gateway": (
        _post("tokenize", "/tokenize", "The tokens of a text or of a rendered conversation.",
              cluster.TokenizeRequest, _PROMPT),
        _post("detokenize", "/detokenize", "The text of tokens.",
              cluster.DetokenizeRequest, {"model": "qwen", "tokens": [300, 301]}),
        _get("health", "/health", "Says that the gateway runs.", errors=(500,)),
        _get("ready", "/ready", "Whether at least one model can be served.", errors=(500,), also=(503,)),
        _get("metrics", "/metrics", "Metrics for Prometheus.", media=(TEXT,)),
        _get("cluster", "/cluster", "Nodes, links, queue, recent requests, and targets."),
        _get("clusterEvents", "/cluster/events", "`status` when something changes, `request` for each finished one.",
             media=(SSE,), errors=(401, 500, 503)),
        _get("dashboard", "/dashboard", "The dashboard, for a browser.", media=(HTML,), errors=(500,)),
        _get("clusterHistory", "/cluster/history", "Finished requests, newest first.",
             parameters=_TIME | _ONE_OUTCOME | {"limit": {"type": "integer", "minimum": 1, "maximum": 1000},
                                                "full": {"enum": ["0", "1"]}}, errors=_READS_HISTORY),
        _get("clusterRequest", "/cluster/requests/{id}", "One finished request: waterfall, plan, prediction, transfer.",
             parameters={"id": _NAME}, errors=_READS_HISTORY),
        _get("clusterSeries", "/cluster/series", "Figures over time: latencies, throughput, shares, energy.",
             parameters=_TIME | _ONE_OUTCOME | {"step": _DURATION}, errors=_READS_HISTORY),
        _get("clusterTargets", "/cluster/targets", "Targets beside measured values, and alarms.",
             parameters=_TIME | _ONE_OUTCOME, errors=_READS_HISTORY),
        _get("clusterEnergy", "/cluster/energy", "Energy and cost: in all, by model, API key and day.",
             parameters=_TIME | _ONE_OUTCOME, errors=_READS_HISTORY),
        _get("openapi", "/openapi.json", "This document.", errors=(500,)),
    ),
}
# fmt: on


def routes() -> list[Route]:
    return [Route("/openapi.json", _openapi)]


async def _openapi(request: Request) -> Response:
    return Response(_encoded(), media_type=JSON)


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


def document() -> Schema:
    paths: Schema = {}
    for api, operations in OPERATIONS.items():
        for operation in operations:
            method, _, path = operation.route.partition(" ")
            paths.setdefault(path, {})[method.lower()] = _operation(api, operation, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "disaggregated-inference gateway", "version": __version__, "description": _ABOUT},
        "security": [*({name: []} for name in _KEYS), {}],  # the empty one: a gateway may run without keys
        "paths": paths,
        "components": {
            "securitySchemes": _KEYS,
            "schemas": {name: schema for api in OPERATIONS for name, schema in _schemas(api).items()},
        },
    }


def _schemas(api: str) -> Schema:
    """Named by API and type."""
    requests = list(dict.fromkeys(operation.request for operation in OPERATIONS[api] if operation.request))
    requests += [ollama.OllamaOptions] if api == "ollama" else []
    _, schemas = msgspec.json.schema_components(requests, ref_template=f"#/components/schemas/{api}.{{name}}")
    if api == "ollama":  # read later, with a type of its own
        options = {"anyOf": [{"$ref": "#/components/schemas/ollama.OllamaOptions"}, {"type": "null"}], "default": None}
        for name in ("OllamaGenerateRequest", "OllamaChatRequest"):
            schemas[name]["properties"]["options"] = options
    return {f"{api}.{name}": schema for name, schema in {**schemas, "Error": _ERRORS[api]}.items()}


def _operation(api: str, operation: Operation, path: str) -> Schema:
    described: Schema = {"tags": [api], "summary": operation.summary, "operationId": operation.id}
    if path in OPEN_PATHS:
        described["security"] = []
    if operation.parameters:
        described["parameters"] = [_parameter(name, schema, path) for name, schema in operation.parameters.items()]
    if operation.request:
        schema = {"$ref": f"#/components/schemas/{api}.{operation.request.__name__}"}
        body = {"schema": schema, "example": operation.example}
        described["requestBody"] = {"required": True, "content": {JSON: body}}
    content: Schema = {media: {} for media in operation.media}
    answers = {str(status): {"description": _STATUSES[status], "content": content} for status in (200, *operation.also)}
    error = {JSON: {"schema": {"$ref": f"#/components/schemas/{api}.Error"}}}
    refusals = {str(status): {"description": _STATUSES[status], "content": error} for status in operation.errors}
    return described | {"responses": answers | refusals}


def _parameter(name: str, schema: Schema, path: str) -> Schema:
    in_path = f"{{{name}}}" in path
    return {"name": name, "in": "path" if in_path else "query", "required": in_path, "schema": schema}
