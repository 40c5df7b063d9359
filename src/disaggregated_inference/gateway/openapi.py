"""`/openapi.json`: what the gateway understands, from the types that requests are read with, so that it cannot say
anything else. It needs no key: it is the same for every gateway of this version, and tells nothing of a cluster."""

from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disaggregated_inference import __version__
from disaggregated_inference.gateway.auth import OPEN_PATHS
from disaggregated_inference.gateway.openapi_paths import APIS, NDJSON, STATUSES, Api, Operation

Object = dict[str, Any]

_VERSION = "3.1.0"
_ABOUT = (
    "A cluster of prefill and decode nodes behind the APIs of OpenAI, Ollama and Anthropic. Bodies are JSON objects,"
    " whatever the Content-Type says, of up to 16 MiB; fields that nobody knows are let be."
)
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
_HEADERS = {
    "x-request-id": "The request's name: the caller's own x-request-id, or a new one.",
    "x-disagg-plan": "The plan, and why it was chosen. Of streams: if it was made within a moment.",
    "x-disagg-prefill": "The node that read the prompt.",
    "x-disagg-decode": "The node that wrote the answer.",
}


def routes() -> list[Route]:
    return [Route("/openapi.json", _openapi)]


async def _openapi(request: Request) -> Response:
    return Response(_encoded(), media_type="application/json")


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


def document() -> Object:
    paths: Object = {}
    for api in APIS:
        for operation in api.operations:
            paths.setdefault(operation.path, {})[operation.method] = _operation(api, operation)
    return {
        "openapi": _VERSION,
        "info": {"title": "disaggregated-inference gateway", "version": __version__, "description": _ABOUT},
        "tags": [{"name": api.name, "description": api.about} for api in APIS],
        # The empty one: a gateway may be without keys.
        "security": [*({name: []} for name in _KEYS), {}],
        "paths": paths,
        "components": {
            "securitySchemes": _KEYS,
            "headers": {name: {"description": about, "schema": {"type": "string"}} for name, about in _HEADERS.items()},
            "schemas": {name: schema for api in APIS for name, schema in _schemas(api).items()},
        },
    }


def _schemas(api: Api) -> Object:
    """By the API's name and the type's: several APIs have a Message."""
    _, found = msgspec.json.schema_components(api.types, ref_template=_place(api, "{name}"))
    for owner, field, kind in api.typed_fields:
        found[owner.__name__]["properties"][field] = {"anyOf": [_ref(api, kind), {"type": "null"}], "default": None}
    return {f"{api.name}.{name}": schema for name, schema in found.items()}


def _place(api: Api, name: str) -> str:
    return f"#/components/schemas/{api.name}.{name}"


def _ref(api: Api, kind: type) -> Object:
    return {"$ref": _place(api, kind.__name__)}


def _operation(api: Api, operation: Operation) -> Object:
    told: Object = {"tags": [api.name], "summary": operation.summary, "operationId": operation.id}
    if operation.path in OPEN_PATHS:
        told["security"] = []
    if operation.parameters:
        told["parameters"] = [_parameter(name, schema, operation) for name, schema in operation.parameters.items()]
    if operation.asked:
        content = {"schema": _ref(api, operation.asked), "example": operation.example}
        told["requestBody"] = {"required": True, "content": {"application/json": content}}
    refusals = {str(status): _refusal(api, status) for status in operation.statuses}
    return told | {"responses": _answers(api, operation) | refusals}


def _parameter(name: str, schema: Object, operation: Operation) -> Object:
    in_path = f"{{{name}}}" in operation.path
    return {"name": name, "in": "path" if in_path else "query", "required": in_path, "schema": schema}


def _answers(api: Api, operation: Operation) -> Object:
    answer: Object = {"description": operation.answer, "content": _content(api, operation)}
    if headers := operation.headers:
        answer["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in headers}
    answers = {"200": answer}
    if operation.also:
        answers[str(operation.also)] = answer | {"description": STATUSES[operation.also]}
    return answers


def _content(api: Api, operation: Operation) -> Object:
    content: Object = {}
    if operation.told:
        content["application/json"] = {"schema": _ref(api, operation.told)}
    if operation.items:
        content[api.stream] = {"schema": _streamed(api, operation.items)}
    if operation.text:
        content["text/plain"] = {"schema": {"type": "string"}}
    return content


def _streamed(api: Api, items: tuple[type, ...]) -> Object:
    """OpenAPI 3.1 has no word for one piece of a stream: it is what the schema is of, as tools have come to read it."""
    kinds: Object = {"anyOf": [_ref(api, kind) for kind in items]}
    if api.stream == NDJSON:
        return {"description": "One line of the stream."} | kinds
    data: Object = {"contentMediaType": "application/json", "contentSchema": kinds}
    if api.last_event:
        data = {"anyOf": [{"const": api.last_event}, data]}
    fields = {"event": {"type": "string"}, "data": {"type": "string"} | data}
    return {"description": "One event of the stream.", "type": "object", "properties": fields, "required": ["data"]}


def _refusal(api: Api, status: int) -> Object:
    refusal: Object = {
        "description": STATUSES[status],
        "content": {"application/json": {"schema": _ref(api, api.error)}},
    }
    if status in (429, 503):
        seconds = {"description": "Seconds until it is worth another try.", "schema": {"type": "integer"}}
        refusal["headers"] = {"Retry-After": seconds}
    return refusal
