"""Ollama's own package against the gateway: a simulated pair, and a real one with the embedded model."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import msgspec
import ollama
import pytest
from ollama import ResponseError

from disaggregated_inference.api import Phase, RequestRecord
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import BadRequest, NoDecodeNode
from disaggregated_inference.gateway.chat import ChatDelta, ChatRequest, generate_options
from disaggregated_inference.gateway.ollama import routes as adapter
from disaggregated_inference.gateway.ollama.output import OllamaWriter
from disaggregated_inference.gateway.ollama.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    read,
)
from disaggregated_inference.gateway.tool_parsers.base import (
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from disaggregated_inference.models import ModelStore, ModelTokenizer
from tests.support.cluster import Process, config_of
from tests.support.gateway import served, simulated_config, simulated_pair, smollm2_pair
from tests.support.waiting import until

MODEL = "simulated:tiny"
WINDOW = 600
HELLO: Any = [{"role": "user", "content": "Name three colours of the rainbow."}]
GREEDY: Any = {"temperature": 0, "num_predict": 8}
CITY: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["name", "inhabitants"],
    "additionalProperties": False,
}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair("custom:prefill=50000,decode=400") as pair:
        yield pair


@pytest.fixture(scope="module")
def url(pair: tuple[Process, Process]) -> Iterator[str]:
    config = simulated_config(*pair)
    config["models"][MODEL]["context_window"] = WINDOW
    with served(config, adapter) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(url, timeout=30) as client:
        yield client


def refused(ask: Any) -> tuple[int, str]:
    with pytest.raises(ResponseError) as caught:
        ask()
    return caught.value.status_code, caught.value.error


def test_generate_equals_its_stream(client: ollama.Client) -> None:
    whole = client.generate(MODEL, "Say something.", options=GREEDY)
    lines = list(client.generate(MODEL, "Say something.", options=GREEDY, stream=True))
    assert whole.response
    assert "".join(line.response or "" for line in lines) == whole.response
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert len(lines) > 2
    for last in (whole, lines[-1]):
        assert last.model == MODEL
        assert last.done_reason == "length"
        assert last.eval_count == GREEDY["num_predict"]
        assert last.prompt_eval_count == whole.prompt_eval_count == 32
        total, _, _, written = times = [getattr(last, name) for name in DURATIONS]
        assert all(isinstance(each, int) and each > 0 for each in times)
        assert total >= written > 7 / 400 * 1e9 / 2  # nanoseconds, not seconds


def test_chat_equals_its_stream(client: ollama.Client) -> None:
    whole = client.chat(MODEL, HELLO, options=GREEDY)
    lines = list(client.chat(MODEL, HELLO, options=GREEDY, stream=True))
    assert whole.message.role == "assistant"
    assert whole.message.content
    assert "".join(line.message.content or "" for line in lines) == whole.message.content
    assert lines[-1].done_reason == whole.done_reason == "length"
    assert whole.message.tool_calls is None
    assert whole.message.thinking is None


def test_generate_is_a_chat_of_one_message_unless_raw(client: ollama.Client) -> None:
    generated = client.generate(MODEL, "Hello", system="Be brief.", options=GREEDY)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert generated.response == client.chat(MODEL, talk, options=GREEDY).message.content
    raw = client.generate(MODEL, "Hello", raw=True, options=GREEDY)
    assert raw.response != generated.response
    assert raw.prompt_eval_count == len("Hello")
    assert refused(lambda: client.generate(MODEL, "Hello", raw=True, system="Be brief."))[0] == 400


def test_streams_are_the_default_and_ndjson(url: str) -> None:
    body = {"model": MODEL, "prompt": "x", "options": GREEDY}
    streamed = httpx.post(f"{url}/api/generate", json=body)
    assert streamed.headers["content-type"] == "application/x-ndjson"
    assert streamed.headers["x-disagg-decode"] == "d1"
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    whole = httpx.post(f"{url}/api/generate", json=body | {"stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["response"] == "".join(line["response"] for line in lines)


def test_options_are_mapped(client: ollama.Client) -> None:
    plain = client.chat(MODEL, HELLO, options=GREEDY).message.content or ""
    assert client.chat(MODEL, HELLO, options=GREEDY | {"num_ctx": 1 << 20, "mirostat": 0, "num_gpu": 1}).message.content
    stop = plain[6:12]  # a word, as simulated models write them
    stopped = client.chat(MODEL, HELLO, options=GREEDY | {"stop": [stop]})
    assert (stopped.message.content, stopped.done_reason) == (plain[: plain.index(stop)], "stop")
    one, other = ({"temperature": 1.5, "num_predict": 20, "seed": seed, "top_k": 900} for seed in (1, 2))
    assert client.chat(MODEL, HELLO, options=one).message != client.chat(MODEL, HELLO, options=other).message
    assert client.chat(MODEL, HELLO, options=one).message == client.chat(MODEL, HELLO, options=one).message
    assert client.chat(MODEL, HELLO, options={"num_predict": 3.0}).eval_count == 3


@pytest.mark.slow
@pytest.mark.parametrize("num_predict", [-1, -2])
def test_a_completion_may_fill_the_context_window(client: ollama.Client, num_predict: int) -> None:
    options = {"temperature": 0, "num_predict": num_predict}
    for last in (
        client.chat(MODEL, HELLO, options=options),
        client.generate(MODEL, "Hello", raw=True, options=options),
        client.generate(MODEL, "Hello", options=options),
    ):
        assert (last.prompt_eval_count or 0) + (last.eval_count or 0) == WINDOW
        assert last.done_reason == "length"


def test_a_completion_matches_its_format(client: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 200}
    whole = client.chat(MODEL, HELLO, format=CITY, options=options)
    jsonschema.validate(json.loads(whole.message.content or ""), CITY)
    lines = client.generate(MODEL, "A city, as JSON", format=CITY, options=options, stream=True)
    jsonschema.validate(json.loads("".join(line.response or "" for line in lines)), CITY)
    assert client.chat(MODEL, HELLO, format="json", options=GREEDY).message.content


def test_logprobs(client: ollama.Client) -> None:
    whole = client.chat(MODEL, HELLO, logprobs=True, top_logprobs=2, options=GREEDY)
    assert whole.logprobs
    assert "".join(each.token for each in whole.logprobs) == whole.message.content
    assert all(each.logprob <= 0 and len(each.top_logprobs or ()) == 2 for each in whole.logprobs)
    lines = list(client.generate(MODEL, "x", logprobs=True, options=GREEDY, stream=True))
    assert sum(len(line.logprobs or ()) for line in lines) == GREEDY["num_predict"]
    assert refused(lambda: client.chat(MODEL, HELLO, top_logprobs=2))[0] == 400


def test_a_request_without_a_prompt_checks_the_model(client: ollama.Client, url: str) -> None:
    loaded = client.generate(MODEL, keep_alive="10m")
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")
    assert client.chat(MODEL, []).done_reason == "load"
    assert [line.done_reason for line in client.generate(MODEL, stream=True)] == ["load"]
    assert refused(lambda: client.generate(MODEL, keep_alive=0))[0] == 501
    assert client.generate(MODEL, "x", keep_alive=0, options=GREEDY).response


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest", "tiny-alias", "tiny-alias:latest"])
def test_names_with_tags_and_aliases(client: ollama.Client, name: str) -> None:
    answer = client.generate(name, "x", options=GREEDY)
    assert answer.model == name
    assert answer.eval_count == GREEDY["num_predict"]


def test_lists_of_models(client: ollama.Client, url: str) -> None:
    client.generate(MODEL)  # by now the nodes are known
    listed = client.list().models[0]
    assert (listed.model, listed.size) == (MODEL, 0)
    assert len(listed.digest or "") == 64
    running = client.ps().models[0]
    assert (running.model, running.context_length, running.digest) == (MODEL, WINDOW, listed.digest)
    shown = client.show(MODEL)
    assert shown.modelinfo
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == WINDOW
    assert shown.parameters == f"num_ctx {WINDOW}"
    assert shown.capabilities == ["completion"]
    assert shown.details
    assert (shown.details.family, shown.details.format) == ("llama", "simulated")
    assert "messages" in (shown.template or "")
    assert refused(lambda: client.show("nothing"))[0] == 404
    assert httpx.get(f"{url}/api/version").json()["version"]
    assert httpx.get(url).text == "Ollama is running"
    assert httpx.head(url).status_code == 200


def test_lists_do_not_wait_for_nodes() -> None:
    config = {"decode_servers": [{"host": "127.0.0.1", "port": 9, "model": "away"}]}
    with served(config, adapter) as url, ollama.Client(url) as client:
        assert [model.model for model in client.list().models] == ["away"]
        assert client.ps().models == []
        assert client.show("away").capabilities == ["completion"]
        status, words = refused(lambda: client.chat("away", HELLO))
        cause = "127.0.0.1:9: it cannot be reached: connection refused"
        assert (status, words) == (503, f"Decode server unavailable - request failed: {cause}")
        assert refused(lambda: client.generate("away")) == (status, words)


def test_errors(client: ollama.Client) -> None:
    status, words = refused(lambda: client.chat("nothing", HELLO))
    assert status == 404
    assert MODEL in words
    assert refused(lambda: list(client.chat("nothing", HELLO, stream=True)))[0] == 404
    for field in (
        {"suffix": "x"},
        {"template": "x"},
        {"context": [1]},
        {"images": ["aGVsbG8="]},
        {"options": {"temperature": "hot"}},
        {"options": {"temperature": -1}},
        {"think": True},
        {"think": "high"},
        {"options": {"mirostat": 2}},
        {"options": {"typical_p": 0.7}},
        {"keep_alive": "banana"},
    ):
        status, words = refused(lambda field=field: client.generate(MODEL, "x", **field))
        assert status == 400, (field, words)
        assert words
    status, words = refused(lambda: client.chat(MODEL, [{"role": "user", "content": "x" * 20_000}]))
    assert status == 400
    assert str(WINDOW) in words
    assert refused(lambda: client.chat(MODEL, HELLO, tools=[{"type": "function", "function": {"name": "f"}}])) == (
        400,
        f'"{MODEL}" does not support tools: leave them out, or use another model',
    )
    assert client.chat(MODEL, HELLO, tools=[], think=False, options=GREEDY).message.content


def test_refusals_say_what_to_do(client: ollama.Client) -> None:
    assert client.pull(MODEL).status == "success"
    assert [each.status for each in client.pull(f"{MODEL}:latest", stream=True)] == ["success"]
    for ask in (
        lambda: client.pull("llama3.2"),
        lambda: client.push(MODEL),
        lambda: client.create("mine", from_=MODEL),
        lambda: client.copy(MODEL, "mine"),
        lambda: client.delete(MODEL),
        lambda: client.embed(MODEL, "x"),
        lambda: client.embeddings(MODEL, "x"),
    ):
        status, words = refused(ask)
        assert status == 501
        assert len(words) > 20


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b'{"model": 1}', b'{"options": 1}', b'{"stream": "yes"}'])
@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_malformed_bodies_are_refused(url: str, path: str, body: bytes) -> None:
    answer = httpx.post(f"{url}{path}", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.mark.parametrize(
    "messages", [1, [1], [{}], [{"role": 1}], [{"role": "user", "content": 1}], [{"role": "user", "tool_calls": 1}]]
)
def test_malformed_messages_are_refused(url: str, messages: Any) -> None:
    answer = httpx.post(f"{url}/api/chat", json={"model": MODEL, "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_many_concurrent_streams(url: str) -> None:
    async def run() -> list[str]:
        async with ollama.AsyncClient(url, timeout=60) as client:

            async def one(number: int) -> str:
                stream = await client.chat(
                    MODEL, [{"role": "user", "content": f"{number}"}], options=GREEDY, stream=True
                )
                return "".join([line.message.content or "" async for line in stream])

            return await asyncio.gather(*(one(number % 8) for number in range(32)))

    texts = asyncio.run(run())
    assert len(set(texts)) == 8
    assert all(texts[number] == texts[number % 8] for number in range(32))


def test_a_disconnect_cancels_the_request(url: str, pair: tuple[Process, Process]) -> None:
    body = {"model": MODEL, "messages": HELLO, "options": {"num_predict": 500}}
    with httpx.stream("POST", f"{url}/api/chat", json=body) as stream:
        assert next(stream.iter_lines())
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{url}/api/chat", json=body | {"stream": False}, timeout=0.2)
    assert until(lambda: all(node.nothing_left() for node in pair))


# What no small model says when it is asked to: parts as a parser makes them.


def script(monkeypatch: pytest.MonkeyPatch, *parts: ChatDelta | float | Exception) -> None:
    """A number is a pause, an error is raised."""

    async def scripted(core: Any, chat_request: Any, on_plan: Any = None) -> AsyncGenerator[list[ChatDelta], None]:
        for part in parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                yield [part]

    monkeypatch.setattr(adapter, "stream_chat", scripted)


RECORD = RequestRecord(total_time=1.5, prefill_time=0.25, decode_time=1.0, prompt_tokens=7, completion_tokens=5)
END = ChatDelta(record=msgspec.structs.replace(RECORD, waterfall=(Phase("queue", 0.0, 0.125),)))


def test_thinking_and_tool_calls(client: ollama.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    script(
        monkeypatch,
        ChatDelta(content=(ReasoningDelta("Hm"), ReasoningDelta("m."))),
        ChatDelta(content=(TextDelta("Let me see."), ToolCallStart(0, "call_1", "get_weather"))),
        ChatDelta(content=(ToolCallArguments(0, '{"city": "Pa'),)),
        ChatDelta(content=(ToolCallArguments(0, 'ris"}'), ToolCallStart(1, "call_2", "get_time"))),
        ChatDelta(content=(ToolCallArguments(1, "{}"),), finish_reason="tool_calls"),
        END,
    )
    whole = client.chat(MODEL, HELLO)
    lines = list(client.chat(MODEL, HELLO, stream=True))
    streamed = [call for line in lines for call in line.message.tool_calls or ()]
    for calls in (whole.message.tool_calls or (), streamed):
        named = [(call.function.name, dict(call.function.arguments)) for call in calls]
        assert named == [("get_weather", {"city": "Paris"}), ("get_time", {})]
    assert whole.message.thinking == "".join(line.message.thinking or "" for line in lines) == "Hmm."
    assert whole.message.content == "Let me see."
    assert whole.done_reason == lines[-1].done_reason == "stop"
    figures = [getattr(whole, name) for name in (*DURATIONS, "prompt_eval_count", "eval_count")]
    assert figures == [1_500_000_000, 125_000_000, 250_000_000, 1_000_000_000, 7, 5]


def test_a_truncated_call_becomes_text(client: ollama.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ChatDelta(content=(ToolCallStart(0, "call_1", "delete_files"), ToolCallArguments(0, '{"only": "these')))
    script(monkeypatch, begun, ChatDelta(finish_reason="length"), END)
    whole = client.chat(MODEL, HELLO)
    assert whole.message.tool_calls is None
    assert whole.message.content == '{"only": "these'
    assert whole.done_reason == "length"


def test_an_error_in_a_stream_is_the_last_line(
    client: ollama.Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, ChatDelta(content=(TextDelta("a"),)), 0.5, NoDecodeNode())
    image_message: list[str] = []
    with pytest.raises(ResponseError, match="Decode server unavailable"):
        image_message += [line.message.content or "" for line in client.chat(MODEL, HELLO, stream=True)]
    raw = httpx.post(f"{url}/api/chat", json={"model": MODEL, "messages": HELLO})
    lines = [json.loads(line) for line in raw.text.splitlines()]
    assert raw.status_code == 200
    assert lines[0]["message"]["content"] == "a"
    assert lines[-1] == {"error": "Decode server unavailable - request failed"}
    script(monkeypatch, NoDecodeNode())
    assert refused(lambda: list(client.chat(MODEL, HELLO, stream=True)))[0] == 503


def test_keepalives_are_empty_lines_of_content(client: ollama.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, 1.0, ChatDelta(content=(TextDelta("a"),), finish_reason="stop"), END)
    contents = [line.message.content for line in client.chat(MODEL, HELLO, stream=True)]
    assert contents[-2:] == ["a", ""]
    assert len(contents) >= 4
    assert not any(contents[:-2])


# What is made of a request, without a server.


@pytest.fixture(scope="module")
def plain() -> ModelTokenizer:
    return ModelStore().resolve(MODEL).tokenizer


def test_messages_have_openais_form(plain: ModelTokenizer) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    generated = OllamaMessage(role="assistant", thinking="Hm.", tool_calls=[call]).plain()
    assert generated["content"] == ""
    assert generated["reasoning_content"] == generated["thinking"] == "Hm."
    assert generated["tool_calls"] == [{"type": "function"} | call]
    summary = OllamaMessage(role="tool", content="2", tool_name="f", tool_call_id="call_1").plain()
    assert summary == {"role": "tool", "content": "2", "name": "f", "tool_call_id": "call_1"}
    image_message = OllamaMessage(role="user", content="x", images=["aGk="]).plain()
    assert image_message == {"role": "user", "content": "x", "images": ["aGk="]}
    with pytest.raises(BadRequest, match="text only"):
        generate_options(ChatRequest(messages=[image_message]), plain)


def test_think_becomes_a_template_option(plain: ModelTokenizer) -> None:
    def params(think: Any) -> OllamaChatRequest:
        return read({"model": "m", "messages": [], "think": think}, OllamaChatRequest)

    qwen = with_template(plain, "{% if enable_thinking %}<think>{% endif %}{{ tools }}")
    harmony = with_template(plain, "Reasoning: {{ reasoning_effort }}")
    assert params(None).template(qwen) == {}
    assert params(True).template(qwen) == {"enable_thinking": True, "thinking": True}
    assert params(False).template(plain) == {"enable_thinking": False, "thinking": False}
    assert params("low").template(harmony)["reasoning_effort"] == "low"
    for think, tokenizer in ((True, plain), ("high", qwen)):
        with pytest.raises(BadRequest, match="not support"):
            params(think).template(tokenizer)
    with pytest.raises(BadRequest):
        params("a lot")
    tool = {"function": {"name": "f"}}
    assert read({"tools": [tool]}, OllamaChatRequest).plain_tools(qwen) == [{"type": "function"} | tool]


def with_template(tokenizer: ModelTokenizer, template: str) -> ModelTokenizer:
    return ModelTokenizer.from_json(tokenizer.json, template, tokenizer.special)


def test_options_are_converted() -> None:
    every = dict.fromkeys(ollama.Options.model_fields, 1) | {
        "stop": ["x"],
        "seed": -1,
        "top_k": -1,
        "repeat_penalty": 1.5,
        "mirostat": 0,
    }
    options = read({"options": every}, OllamaGenerateRequest).sampling()
    assert options.plain() == {
        "temperature": 1,
        "top_p": 1,
        "min_p": None,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "max_tokens": 1,
        "top_k": 0,
        "repetition_penalty": 1.5,
        "seed": None,
        "stop": ["x"],
    }
    assert OllamaOptions(num_predict=-2).fills_window
    assert OllamaOptions(num_predict=-2).plain()["max_tokens"] is None
    assert not OllamaOptions().fills_window
    for name in ("num_predict", "top_k"):
        with pytest.raises(BadRequest, match=f"{name} must be at most 2147483648"):
            read({"options": {name: 1 << 40}}, OllamaGenerateRequest).sampling()
    assert OllamaOptions(stop=[]).plain()["stop"] is None
    for fine in (-1, 0, 2.5, "", "0", "-1", "5m", "1h30m", "-1s", "1.5h", "300ms"):
        assert read({"keep_alive": fine}, OllamaGenerateRequest).keep_alive == fine


def test_durations_are_never_zero(plain: ModelTokenizer) -> None:
    writer = OllamaWriter("m", True, plain)
    writer.take(ChatDelta(record=msgspec.structs.replace(RECORD, decode_time=0.0)))
    last = writer.end()
    assert last["eval_duration"] == last["load_duration"] == 1
    assert msgspec.json.encode(last)


# The embedded model on two real engines.


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[ollama.Client, DisaggregatedClient]]:
    with smollm2_pair() as pair:
        config = config_of(*pair)
        with (
            served(config, adapter) as url,
            ollama.Client(url, timeout=120) as client,
            DisaggregatedClient(config) as direct,
        ):
            yield client, direct


def test_a_real_model_gives_the_same_text_as_the_client(real: tuple[ollama.Client, DisaggregatedClient]) -> None:
    client, direct = real
    expected, metrics = direct.generate(model="smollm2", messages=HELLO, temperature=0, max_tokens=12)
    options = {"temperature": 0, "num_predict": 12}
    chat = client.chat("smollm2", HELLO, options=options)
    assert chat.message.content == expected
    assert chat.prompt_eval_count == metrics["prompt_tokens"]
    assert (
        "".join(line.message.content or "" for line in client.chat("smollm2", HELLO, options=options, stream=True))
        == expected
    )
    assert client.generate("smollm2", HELLO[0]["content"], options=options).response == expected
    raw, _ = direct.generate(model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=8)
    options |= {"num_predict": 8}
    assert client.generate("smollm2", "The capital of France is", raw=True, options=options).response == raw


def test_details_are_those_of_the_files(real: tuple[ollama.Client, DisaggregatedClient]) -> None:
    client, _ = real
    client.generate("smollm2")  # by now the nodes are known
    shown, (listed,), (running,) = client.show("smollm2"), client.list().models, client.ps().models
    assert shown.details
    assert shown.details == listed.details == running.details
    assert (shown.details.format, shown.details.quantization_level) == ("safetensors", "F32")
    assert (shown.details.family, shown.details.families) == ("llama", ["llama"])
    assert shown.details.parameter_size == "134.52M"
    assert (shown.modelinfo or {})["general.parameter_count"] == 134515008
    assert listed.size == running.size == ModelStore().resolve("smollm2").size_bytes > 4 * 134515008


def test_a_real_model_matches_a_schema(real: tuple[ollama.Client, DisaggregatedClient]) -> None:
    client, _ = real
    options = {"temperature": 0.8, "num_predict": 120}
    for seed in range(4):
        messages = [{"role": "user", "content": "Describe Paris as JSON."}]
        lines = client.chat("smollm2", messages, format=CITY, options=options | {"seed": seed}, stream=True)
        jsonschema.validate(json.loads("".join(line.message.content or "" for line in lines)), CITY)
