"""The published document against the gateway: generated requests get the status codes and errors that it lists.

Set DISAGG_FUZZ_EXAMPLES for more requests.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from schemathesis.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from starlette.routing import Route

from disaggregated_inference.cluster import load_config
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import OPEN_PATHS, Keys
from disaggregated_inference.gateway.key_file import keys_of
from disaggregated_inference.gateway.ollama import routes as ollama
from disaggregated_inference.gateway.openapi import document
from disaggregated_inference.orchestrator import DisaggregatedInference
from tests.support.gateway import gateway_process, simulated_config, simulated_pair

MODEL = "simulated:tiny"
EXAMPLES = int(os.environ.get("DISAGG_FUZZ_EXAMPLES", "8"))
DOCUMENT = document()
AWAY: Any = {"decode_servers": [{"host": "127.0.0.1", "port": 9, "model": "away"}]}

schema = schemathesis.openapi.from_dict(DOCUMENT)
schema.config.phases.coverage.enabled = False  # some thousand requests
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A process of its own: a thread of this one would disturb Hypothesis' random numbers."""
    folder = tmp_path_factory.mktemp("gateway")
    with simulated_pair() as pair, gateway_process(folder, simulated_config(*pair)) as gateway:
        yield gateway.url


@pytest.fixture(scope="module")
def stored(url: str) -> str:
    """The id of a stored response."""
    body = {"input": "x", "max_output_tokens": 2}
    id: str = httpx.post(f"{url}/v1/responses", json=body, timeout=30).json()["id"]
    return id


def fields_of(path: str, method: str = "post") -> dict[str, Any]:
    """The fields of its request body."""
    place = DOCUMENT["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    found: dict[str, Any] = DOCUMENT["components"]["schemas"][place.rpartition("/")[2]]["properties"]
    return found


def near(body: Any, path: str) -> Any:
    """The same request for the served model, with a short completion, and every second time streamed."""
    if not isinstance(body, dict):
        return body
    fields = fields_of(path)
    limits = [name for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in fields]
    limits = [name for name in limits if name in body] or limits[:1]
    body = body | dict.fromkeys(limits, 2) | ({"model": MODEL} if isinstance(body.get("model"), str) else {})
    if isinstance(body.get("options", {}), dict) and "options" in fields:
        body["options"] = body.get("options", {}) | {"num_predict": 2}
    return body | ({"stream": len(str(body)) % 2 == 0} if "stream" in fields else {})


answered: Any = schema.exclude(path="/cluster/events")  # it never ends
OPERATIONS = [found.ok() for found in answered.get_all_operations()]


# Not by schemathesis's own `parametrize`: it gives all operations one name, and xdist runs one test for each name.
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_responses_match_the_document(operation: Any, url: str, stored: str) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def holds(case: Any) -> None:
        case.body = near(case.body, case.path)
        if case.method == "GET" and len(str(case.path_parameters.get("id"))) % 2:
            case.path_parameters["id"] = stored
        answer = case.call(base_url=url, timeout=30)
        case.validate_response(answer, checks=CHECKS)
        assert answer.status_code < 500 or answer.status_code == 501, answer.text

    holds()


EXAMPLE_OF = {
    path: methods["post"]["requestBody"]["content"]["application/json"]["example"]
    for path, methods in DOCUMENT["paths"].items()
    if "post" in methods
}


@pytest.mark.parametrize("path", EXAMPLE_OF)
def test_the_examples_are_answered(url: str, path: str) -> None:
    streams = "stream" in fields_of(path)
    body = near(EXAMPLE_OF[path], path) | ({"stream": True} if streams else {})
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind == list(DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"])[-1]
    assert not streams or answer.text.count("\n") > 2


def test_a_request_that_the_schema_forbids_is_refused(url: str) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [], "max_tokens": 2}),
        ("/v1/completions", {"prompt": {"text": "x"}}),
        ("/v1/responses", {"input": 5}),
        ("/v1/messages", {"model": MODEL, "max_tokens": 0, "messages": EXAMPLE_OF["/v1/messages"]["messages"]}),
        ("/api/chat", {"model": MODEL, "messages": "hello"}),
        ("/detokenize", {"tokens": ["x"]}),
    ):
        assert not body_validator(path).is_valid(body)
        answer = httpx.post(url + path, json=body, timeout=30)
        assert (path, answer.status_code) == (path, 400)


def body_validator(path: str) -> Draft202012Validator:
    found = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return Draft202012Validator(found | {"components": DOCUMENT["components"]})


def test_every_path_is_documented() -> None:
    """Every path of the gateway, except those that only refuse."""
    served = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in gateway_app(DisaggregatedInference(load_config(AWAY)), Keys()).routes
        if isinstance(route, Route) and route.path not in {*ollama.NOT_OFFERED, "/v1/embeddings"}
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_the_document_needs_no_key() -> None:
    """It needs no key, also where everything else does."""
    keys = Keys(keys_of([{"name": "ann", "key_hash": hashlib.sha256(b"ann's").hexdigest()}], "keys"))

    async def ask() -> None:
        async with DisaggregatedInference(load_config(AWAY)) as core:
            app = httpx.ASGITransport(gateway_app(core, keys))
            async with httpx.AsyncClient(transport=app, base_url="http://gateway") as client:
                published = await client.get("/openapi.json")
                assert published.json() == json.loads(json.dumps(DOCUMENT))
                assert (await client.get("/v1/models")).status_code == 401

    asyncio.run(ask())
    closed = [
        path for path, methods in DOCUMENT["paths"].items() for about in methods.values() if "security" not in about
    ]
    assert not OPEN_PATHS & set(closed)
