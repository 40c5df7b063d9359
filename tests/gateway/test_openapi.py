"""The published document against the gateway: whatever it allows, and whatever it forbids, is answered as it says.

DISAGG_FUZZ_EXAMPLES has more of everything.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from schemathesis.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from starlette.routing import Route

from disaggregated_inference.cluster.config import load_config
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
    """A process of its own: on a thread of this one it would take from the chance that Hypothesis deals out."""
    folder = tmp_path_factory.mktemp("gateway")
    with simulated_pair() as pair, gateway_process(folder, simulated_config(*pair)) as gateway:
        yield gateway.url


@pytest.fixture(scope="module")
def kept(url: str) -> str:
    """The name of a response that is kept."""
    asked = {"input": "x", "max_output_tokens": 2}
    name: str = httpx.post(f"{url}/v1/responses", json=asked, timeout=30).json()["id"]
    return name


def asked_at(path: str, method: str = "post") -> dict[str, Any]:
    """What its body may say."""
    place = DOCUMENT["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    found: dict[str, Any] = DOCUMENT["components"]["schemas"][place.rpartition("/")[2]]["properties"]
    return found


def near(body: Any, path: str) -> Any:
    """Nearly the same, but of the model that is there, where one is named at all, with a short answer, and streamed
    every other time."""
    if not isinstance(body, dict):
        return body
    fields = asked_at(path)
    limits = [name for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in fields]
    limits = [name for name in limits if name in body] or limits[:1]
    body = body | dict.fromkeys(limits, 2) | ({"model": MODEL} if isinstance(body.get("model"), str) else {})
    if isinstance(body.get("options", {}), dict) and "options" in fields:
        body["options"] = body.get("options", {}) | {"num_predict": 2}
    return body | ({"stream": len(str(body)) % 2 == 0} if "stream" in fields else {})


answered: Any = schema.exclude(path="/cluster/events")  # that has no end
OPERATIONS = [found.ok() for found in answered.get_all_operations()]


# Not by schemathesis's own `parametrize`: it gives all operations one name, and xdist runs one test for each name.
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_everything_is_answered_as_the_document_says(operation: Any, url: str, kept: str) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def holds(case: Any) -> None:
        case.body = near(case.body, case.path)
        if case.method == "GET" and len(str(case.path_parameters.get("id"))) % 2:
            case.path_parameters["id"] = kept
        answer = case.call(base_url=url, timeout=30)
        case.validate_response(answer, checks=CHECKS)
        assert answer.status_code < 500 or answer.status_code == 501, answer.text
        assert_pieces(case.path, case.method.lower(), answer.headers["content-type"][0], answer.text)

    holds()


def assert_pieces(path: str, method: str, kind: str, text: str) -> None:
    """Each line of a stream, or each event's data, is what the document says of one."""
    kind, lines = kind.partition(";")[0], text.splitlines()
    if "event-stream" in kind:
        lines = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    if kind in ("text/event-stream", "application/x-ndjson"):
        for line in lines:
            validator(path, method, kind).validate(json.loads(line))


@cache
def validator(path: str, method: str, kind: str) -> Draft202012Validator:
    found = DOCUMENT["paths"][path][method]["responses"]["200"]["content"][kind]["schema"]
    if "event-stream" in kind:
        data = found["properties"]["data"]
        found = data.get("anyOf", [data])[-1]["contentSchema"]
    return Draft202012Validator(found | {"components": DOCUMENT["components"]})


EXAMPLE_OF = {
    path: methods["post"]["requestBody"]["content"]["application/json"]["example"]
    for path, methods in DOCUMENT["paths"].items()
    if "post" in methods
}


@pytest.mark.parametrize("path", EXAMPLE_OF)
def test_the_examples_are_answered_as_streams_where_there_are_any(url: str, path: str) -> None:
    streams = "stream" in asked_at(path)
    body = near(EXAMPLE_OF[path], path) | ({"stream": True} if streams else {})
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind == list(DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"])[-1]
    assert not streams or answer.text.count("\n") > 2
    assert_pieces(path, "post", kind, answer.text)


def test_events_are_what_the_document_says(url: str) -> None:
    with httpx.stream("GET", f"{url}/cluster/events", timeout=30) as answer:
        text = ""
        for piece in answer.iter_text():
            text += piece
            if text.endswith("\n\n"):
                break
    assert_pieces("/cluster/events", "get", answer.headers["content-type"], text)


def test_it_is_all_there() -> None:
    """Every path of the gateway but those that say no to everything."""
    served = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in gateway_app(DisaggregatedInference(load_config(AWAY)), Keys()).routes
        if isinstance(route, Route) and route.path not in ollama._ABSENT
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_it_is_no_secret() -> None:
    """Not even where everything else needs a key: it is the same for every cluster."""
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
