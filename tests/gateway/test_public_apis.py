"""What clients of several APIs rely on, with their official packages: lists of models, defaults, refusals, notes."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from disaggregated_inference.gateway import openapi
from disaggregated_inference.gateway.app import ADAPTERS
from disaggregated_inference.gateway.request_context import RequestContext
from tests.support.cluster import Process
from tests.support.gateway import served, simulated_config, simulated_pair
from tests.support.waiting import until

MODEL, ALIAS = "simulated:tiny", "tiny-alias"
WINDOW = 1000
HELLO: Any = [{"role": "user", "content": "Name a city."}]
PICTURE = "data:image/png;base64,aGVsbG8="
CITY: Any = {  # it does not say whether there may be more
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "in": {"$ref": "#/$defs/country"}},
    "required": ["name", "in"],
    "$defs": {
        "country": {"type": "object", "properties": {"code": {"enum": ["FR", "NO"]}}, "required": ["code"]},
    },
}
ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def url(pair: tuple[Process, Process]) -> Iterator[str]:
    config = simulated_config(*pair)
    config["models"][MODEL]["context_window"] = WINDOW
    with served(config, cors=(ORIGIN,)) as found:
        assert until(lambda: len(httpx.get(f"{found}/api/ps").json()["models"]) == 2)
        yield found


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def test_every_adapter_is_in_the_document() -> None:
    assert {adapter.NAME for adapter in ADAPTERS} == set(openapi.OPERATIONS)


def test_lists_have_aliases(url: str, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    both = [MODEL, ALIAS]
    assert [(model.id, model.to_dict()["root"]) for model in client.models.list()] == [(name, MODEL) for name in both]
    assert [model.id for model in claude.models.list()] == both
    with ollama.Client(url) as llama:
        assert [model.model for model in llama.list().models] == both
        running = llama.ps().models
    assert [model.model for model in running] == both
    assert [model.context_length for model in running] == [WINDOW] * 2
    assert len({model.digest for model in running}) == 1


def test_anthropics_clients_get_their_list_of_models(url: str, claude: anthropic.Anthropic) -> None:
    pages = [[model.id for model in page.data] for page in claude.models.list(limit=1).iter_pages()]
    assert pages == [[MODEL], [ALIAS]]
    assert [model.id for model in claude.models.list(before_id=ALIAS).data] == [MODEL]
    model = claude.models.retrieve(ALIAS)
    assert (model.type, model.id, model.display_name, model.max_input_tokens) == ("model", ALIAS, ALIAS, WINDOW)
    with pytest.raises(anthropic.NotFoundError, match='no model "nothing"') as refused:
        claude.models.retrieve("nothing")
    assert refused.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert refused.value.request_id == refused.value.body["request_id"]  # type: ignore[index]
    for query, expected in (
        ({"limit": 0}, "limit must be from 1 to 1000"),
        ({"after_id": "nothing"}, "no model 'nothing' in this list"),
        ({"after_id": MODEL, "before_id": ALIAS}, "not both"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=expected):
            claude.models.list(**query)
    assert httpx.get(f"{url}/v1/models").json()["object"] == "list"


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
def test_a_path_that_ends_with_a_slash_is_none(url: str, headers: dict[str, str]) -> None:
    answer = httpx.get(f"{url}/v1/models/", headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no such path: /v1/models/")
    assert ("request_id" in answer.json()) == bool(headers)


def test_embeddings_are_refused_with_the_reason(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="no node makes embeddings") as refused:
        client.embeddings.create(model=MODEL, input="x")
    assert refused.value.status_code == 501
    assert refused.value.code == "not_offered"
    assert refused.value.response.headers["x-should-retry"] == "false"
    with ollama.Client(url) as llama:
        for ask in (lambda: llama.embed(MODEL, "x"), lambda: llama.embeddings(MODEL, "x")):
            with pytest.raises(ollama.ResponseError, match="no node makes embeddings") as says:
                ask()
            assert says.value.status_code == 501


def test_a_completion_has_16_tokens_unless_the_request_or_the_config_says(
    pair: tuple[Process, Process], client: openai.OpenAI
) -> None:
    def tokens(**more: Any) -> int | None:
        usage = client.completions.create(model=MODEL, prompt="x", **more).usage
        return usage.completion_tokens if usage else None

    assert tokens() == 16
    assert tokens(max_tokens=20) == 20
    assert tokens(extra_body={"min_tokens": 18}) == 18
    chat = client.chat.completions.create(model=MODEL, messages=HELLO).usage
    assert chat
    assert chat.total_tokens == WINDOW
    config = simulated_config(*pair)
    config["models"][MODEL]["defaults"] = {"max_tokens": 21, "temperature": 0.7}
    with served(config) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert tokens() == 21
        response = client.responses.create(model=MODEL, input="x")
        assert (response.temperature, response.top_p) == (0.7, 1.0)


def test_a_response_has_the_temperature_that_was_used(client: openai.OpenAI) -> None:
    plain = client.responses.create(model=MODEL, input="x", max_output_tokens=2)
    assert (plain.temperature, plain.top_p) == (0.2, 1.0)
    events = list(
        client.responses.create(model=MODEL, input="x", max_output_tokens=2, temperature=0, top_p=0.5, stream=True)
    )
    for event in (events[0], events[-1]):
        assert event.type in ("response.created", "response.incomplete")
        assert (event.response.temperature, event.response.top_p) == (0, 0.5)


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "name": "visit", "parameters": parameters}


def test_a_format_beside_a_forced_call_has_no_effect(client: Any) -> None:
    """As instructor sends it in its mode RESPONSES_TOOLS."""
    response = client.responses.create(
        model=MODEL,
        input="x",
        tools=[tool(CITY)],
        tool_choice={"type": "function", "name": "visit"},
        text={"format": {"type": "json_schema", "name": "other", "schema": {"type": "integer"}}},
    )
    (call,) = response.output
    assert call.type == "function_call"
    require_city(call.arguments)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[{"type": "function", "function": {"name": "visit", "parameters": CITY}}],
        tool_choice="required",
        response_format={"type": "json_object"},
    )
    (called,) = chat.choices[0].message.tool_calls
    require_city(called.function.arguments)


def require_city(text: str | None) -> None:
    """Nothing but the properties that the schema names."""
    city = json.loads(text or "")
    assert city.keys() == {"name", "in"}
    assert city["in"].keys() == {"code"}


def test_objects_are_closed_where_a_schema_is_silent(url: str, claude: anthropic.Anthropic) -> None:
    with ollama.Client(url) as llama:
        for seed in range(4):
            options = {"temperature": 2, "seed": seed, "num_predict": 100}
            require_city(llama.chat(MODEL, HELLO, format=CITY, options=options).message.content)
            require_city(llama.generate(MODEL, "x", format=CITY, options=options).response)
    message = claude.messages.create(
        model=MODEL,
        max_tokens=100,
        messages=HELLO,
        tools=[{"name": "visit", "input_schema": CITY}],
        tool_choice={"type": "any"},
    )
    (block,) = message.content
    assert block.type == "tool_use"
    require_city(json.dumps(block.input))


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_of_a_model_that_does_not_think_is_noted(claude: Any, stream: bool) -> None:
    raw = claude.messages.with_raw_response.create(
        model=ALIAS, max_tokens=4, messages=HELLO, thinking={"type": "enabled", "budget_tokens": 1024}, stream=stream
    )
    assert raw.headers["x-disagg-note"] == f"thinking: {MODEL} does not think"
    raw.close()
    raw = claude.messages.with_raw_response.create(model=ALIAS, max_tokens=4, messages=HELLO)
    assert "x-disagg-note" not in raw.headers


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (("user", {"image_url": PICTURE}), "input: this model reads text only"),
        (("user", {"image_url": "https://pictures.example/1.png"}), "the gateway downloads nothing"),
        (("user", {"file_id": "file-1"}), "files are not stored"),
        (("system", {"image_url": PICTURE}), "images belong into messages of the user"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_says_that_its_model_takes_no_images(
    client: Any, item: tuple[str, dict[str, str]], expected: str, stream: bool
) -> None:
    role, image = item
    parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image"} | image]
    with pytest.raises(openai.BadRequestError, match=expected) as refused:
        client.responses.create(model=MODEL, input=[{"role": role, "content": parts}], stream=stream)
    assert refused.value.param == "input"


@pytest.mark.parametrize(
    ("path", "headers"), [("/v1/models", {}), ("/v1/models", {"anthropic-version": "2023-06-01"}), ("/api/tags", {})]
)
def test_unexpected_errors_can_be_read_by_a_page(
    url: str, path: str, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(context: RequestContext) -> dict[str, str]:
        raise RuntimeError("a secret")

    monkeypatch.setattr(RequestContext, "names", fail)
    answer = httpx.get(url + path, headers=headers | {"Origin": ORIGIN, "x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    error = answer.json()["error"]
    assert (error if path == "/api/tags" else error["message"]).startswith("internal error of the gateway")
    assert "secret" not in answer.text
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [("a secret",)]  # type: ignore[union-attr]
    monkeypatch.undo()
    assert httpx.get(url + path, headers=headers).status_code == 200
