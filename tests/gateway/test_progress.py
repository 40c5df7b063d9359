"""Progress of the prefill, with llama.cpp's names, for clients that request it."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from anthropic import Anthropic
from openai import OpenAI

from disaggregated_inference.api import DecodeRequest, GenerationParams, Progress, TokenEvent
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.node.generation import Generation, Item
from tests.support.cluster import Process
from tests.support.gateway import served, simulated_config, simulated_pair
from tests.support.node_pair import ONE_PROCESS, Pair
from tests.support.waiting import until

MODEL = "simulated:tiny"  # every letter is a token
SLOW = "custom:prefill=6000,decode=2000,chunk=512"
WANTED: Any = {"return_progress": True}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    with simulated_pair(SLOW) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def url(pair: tuple[Process, Process]) -> Iterator[str]:
    with served(simulated_config(*pair, poll_s=0.2)) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def request_params(prompt: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": prompt}]
    body: Any = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0, "stream": True}
    return body | {"stream_options": {"include_usage": True}} | more


def response(chunks: Any) -> tuple[list[dict[str, int]], Any]:
    """The progress events, which all come before the first token, and the usage."""
    progress, usage, began = [], None, False
    for chunk in chunks:
        usage = chunk.usage or usage
        if news := (chunk.model_extra or {}).get("prompt_progress"):
            assert not began, "after the first token"
            progress.append(news)
        else:
            began = True
    return progress, usage


def require_true(progress: list[dict[str, int]], usage: Any) -> None:
    assert all(set(each) == {"total", "cache", "processed", "time_ms"} for each in progress)
    assert {each["total"] for each in progress} == {usage.prompt_tokens}
    assert {each["cache"] for each in progress} == {usage.prompt_tokens_details.cached_tokens}
    processed, times = [each["processed"] for each in progress], [each["time_ms"] for each in progress]
    assert processed == sorted(set(processed))
    assert times == sorted(times)
    assert processed[0] == progress[0]["cache"]
    assert processed[-1] == usage.prompt_tokens


def test_a_chunked_prefill_reports_progress(client: OpenAI) -> None:
    progress, usage = response(client.chat.completions.create(**request_params("a" * 12000, extra_body=WANTED)))
    require_true(progress, usage)
    assert len(progress) >= 3
    assert any(0 < each["processed"] < usage.prompt_tokens for each in progress)


def test_a_second_request_reports_cached_tokens(client: OpenAI) -> None:
    text = "b" * 600
    response(client.chat.completions.create(**request_params(text)))
    progress, usage = response(client.chat.completions.create(**request_params(text + "c" * 50, extra_body=WANTED)))
    require_true(progress, usage)
    assert progress[0]["cache"] > 500


def test_no_progress_without_the_option(client: OpenAI) -> None:
    for unasked in ({}, {"return_progress": False}, {"return_progress": None}):
        assert not response(client.chat.completions.create(**request_params("d" * 700, extra_body=unasked)))[0]
    whole = client.chat.completions.create(
        **request_params("e" * 700, stream=False, stream_options=None, extra_body=WANTED)
    )
    assert "prompt_progress" not in (whole.model_extra or {})
    assert whole.choices[0].message.content


def test_openais_client_ignores_progress(client: OpenAI) -> None:
    """The client's accumulated message is the same with and without progress."""
    messages: Any = [{"role": "user", "content": "f" * 1500}]
    made = []
    extra: Any
    for extra in ({}, WANTED):
        with client.chat.completions.stream(
            model=MODEL, messages=messages, max_tokens=5, temperature=0, n=2, extra_body=extra
        ) as events:
            for _ in events:
                pass
            made.append(events.current_completion_snapshot)
    assert [choice.message for choice in made[0].choices] == [choice.message for choice in made[1].choices]
    assert made[1].choices[0].message.role == "assistant"
    assert made[1].choices[0].message.content


def test_every_prompt_of_completions_has_its_own_progress(client: OpenAI) -> None:
    prompts = ["g" * 900, "h" * 1800]
    chunks = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=2, temperature=0, n=2, stream=True, extra_body=WANTED
    )
    found: dict[int, list[dict[str, int]]] = {}
    texts: dict[int, str] = {}
    for chunk in chunks:
        choice: Any = chunk.choices[0]
        if news := (chunk.model_extra or {}).get("prompt_progress"):
            assert choice.text == ""
            assert choice.finish_reason is None
            found.setdefault(choice.index, []).append(news)
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert {index: each[-1]["processed"] for index, each in found.items()} == {0: 900, 2: 1800}
    assert {each["total"] for each in found[0]} == {900}
    assert len(texts) == 4
    assert all(texts.values())


def test_message_start_has_the_prompt_tokens(url: str) -> None:
    text: Any = [{"role": "user", "content": "i" * 480}]
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        count = client.messages.count_tokens(model=MODEL, messages=text).input_tokens
        for least in (0, 400):
            events = list(client.messages.create(model=MODEL, messages=text, max_tokens=3, stream=True))
            assert events[0].type == "message_start"
            usage = events[0].message.usage
            cached = usage.cache_read_input_tokens or 0
            assert usage.input_tokens + cached == count
            assert least <= cached < least + 100
            last = next(event for event in events if event.type == "message_delta").usage
            assert (last.input_tokens, last.cache_read_input_tokens) == (usage.input_tokens, cached)


@pytest.mark.slow
def test_progress_continues_after_a_prefill_node_dies(client: OpenAI, pair: tuple[Process, Process]) -> None:
    """The decode node continues from the KV it has received. Those tokens do not count as cached."""
    reader, writer = pair
    progress: list[dict[str, int]] = []
    usage, before = None, 0
    for chunk in client.chat.completions.create(**request_params("j" * 24000, extra_body=WANTED)):
        usage = chunk.usage or usage
        if news := (chunk.model_extra or {}).get("prompt_progress"):
            progress.append(news)
            if news["processed"] > 500 and reader.alive:
                reader.kill()
                before = len(progress)
    reader.start()
    reader.ready()
    assert usage
    assert 0 < before < len(progress)
    assert len({(each["total"], each["cache"]) for each in progress}) == 1
    assert progress[0]["cache"] < 50
    after = [each["processed"] for each in progress[before:]]
    assert 300 < after[0] < 24000
    assert after[-1] == usage.prompt_tokens
    times = [each["time_ms"] for each in progress]
    assert times == sorted(times)
    assert until(writer.nothing_left, 10)


def test_the_python_client_reports_progress(pair: tuple[Process, Process]) -> None:
    with DisaggregatedClient(simulated_config(*pair, local="always")) as client:
        deltas = list(client.stream(prompt="k" * 1200, max_tokens=2, temperature=0, progress=True))
        assert all(delta.text or delta.metrics for delta in client.stream(prompt="k", max_tokens=2, temperature=0))
    response = [delta.progress for delta in deltas if delta.progress]
    assert [deltas.index(delta) for delta in deltas if delta.progress] == list(range(len(response)))
    assert (response[0].cache, response[0].processed, response[-1].processed, response[-1].total) == (0, 0, 1200, 1200)


def items_of(answer: Generation) -> list[Item]:
    found: list[Item] = []
    answer.listen(found.append)
    assert until(lambda: bool(found) and (found[-1] is None or isinstance(found[-1], BaseException)), 20)
    assert found[-1] is None, found[-1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", ["from a prefill node", "by itself"])
def test_real_engines_report_progress(nodes: Callable[..., Pair], way: str) -> None:
    every_report = msgspec.structs.replace(ONE_PROCESS, progress_s=0.0)
    prefill, decode = nodes(prefix_bytes=4 << 20, timeouts=every_report)
    prompt, rules = [1 + number % 90 for number in range(300)], GenerationParams(max_tokens=3, progress=True)

    def written() -> list[Item]:
        if way == "by itself":
            return items_of(decode.generate_local(prompt, rules))
        return items_of(decode.generate_from_kv(prefill.submit(prompt)[0], rules, tokens=prompt))

    first = [item for item in written() if isinstance(item, Progress)]
    response = [item.processed for item in first]
    assert response == sorted(set(response))
    assert response[0] == 0
    assert response[-1] == 300
    assert set(response) <= ({0, 50, 100, 150, 200, 250, 300} if way == "by itself" else {0, 77, 154, 231, 300})
    assert way != "by itself" or len(response) == 7  # slices that the logits overtook are not told of
    again = written()
    held = [item for item in again if isinstance(item, Progress)]
    assert held[0].cache == held[0].processed > 200
    assert held[-1].processed == 300
    pieces = [number for number, item in enumerate(again) if isinstance(item, TokenEvent)]
    assert not any(isinstance(item, Progress) for item in again[pieces[0] :])


def test_only_streams_report_progress() -> None:
    assert DecodeRequest(tokens=[1], stream=True, progress=True).params().progress
    assert not DecodeRequest(tokens=[1], progress=True).params().progress
