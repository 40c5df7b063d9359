"""What a node counts and measures: requests, tokens and rates; and its memory limits at the start."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from disaggregated_inference.api import GenerationParams, Rate
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.scheduler import Scheduler
from tests.support.engines import LoadTiny
from tests.support.handoff import prompt_of
from tests.support.node_pair import Pair
from tests.support.node_process import Node, scraped
from tests.support.waiting import until

LOTS = 64 << 20


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Node, Node]]:
    """Without --model: the simulated engine has its own models."""
    both = Node("prefill", "--engine", "simulated"), Node("decode", "--engine", "simulated")
    yield both
    for node in both:
        node.stop()


def handed_over(pair: tuple[Node, Node], tokens: list[int], count: int) -> dict[str, Any]:
    prefill, decode = pair
    context = prefill.ask("/prefill", {"tokens": tokens})[1]["context"]
    status, answer = decode.ask("/decode", {"context": context, "max_tokens": count, "ignore_eos": True})
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


@pytest.mark.slow
def test_the_canary_is_not_counted_as_a_request(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    assert prefill.ready["model"] == "simulated:tiny"
    assert handed_over(pair, prompt_of(100), 5)["usage"]["cached_tokens"] == 0
    assert decode.ask("/generate", {"tokens": prompt_of(7), "max_tokens": 9, "n": 2, "ignore_eos": True})[0] == 200
    told = prefill.ask("/status")[1], decode.ask("/status")[1]
    assert [status["prompt_tokens_computed"] for status in told] == [100, 7]
    assert [status["tokens_written"] for status in told] == [0, 5 + 2 * 9]
    assert told[1]["canary_tokens"] == 48
    metrics = scraped(prefill)
    assert metrics["disagg_requests_total[read][prefill]"] == 1
    assert metrics["disagg_prompt_tokens_total[computed]"] == 100


def test_recomputed_tokens_do_not_count_as_cached(pair: tuple[Node, Node]) -> None:
    """Only the decode node has cached the prompt: the prefill node computes it again, and it is not transferred."""
    prefill, decode = pair
    tokens = prompt_of(300, seed=4)
    assert decode.ask("/generate", {"tokens": tokens, "max_tokens": 2, "ignore_eos": True})[0] == 200
    first = handed_over(pair, tokens, 3)
    assert (first["metrics"]["cached_tokens"], first["metrics"]["prefill_cached_tokens"]) == (300, 0)
    assert first["usage"]["cached_tokens"] == 0
    assert until(lambda: prefill.ask("/status")[1]["prefixes"]["blocks"] >= 5)
    assert handed_over(pair, tokens, 3)["usage"]["cached_tokens"] == 299
    again = decode.ask("/generate", {"tokens": tokens, "max_tokens": 2, "ignore_eos": True})[1]
    assert again["usage"]["cached_tokens"] == 299


def test_rates_count_computed_tokens_only(nodes: Callable[..., Pair]) -> None:
    """A prompt with one new token measures the speed of one token, not of a thousand."""
    prefill, decode = nodes("torch", "torch", prefix_bytes=LOTS)

    def sizes(rates: list[Rate]) -> list[tuple[int, int]]:
        return [(rate.size, rate.samples) for rate in rates]

    for _ in range(2):
        list(decode.generate_local(prompt_of(1000), GenerationParams(max_tokens=2)))
        prefill.submit(prompt_of(1000))[1].result(10)
        prefill.chunked_prefill.prefix_writer.threads.submit(int).result()  # everything before it is saved
    assert (
        sizes(decode.kv_source.prefill_rates.stats())
        == sizes(prefill.chunked_prefill.rates.stats())
        == [(1, 1), (512, 1)]
    )


def test_a_node_without_memory_for_requests_does_not_start() -> None:
    command = [sys.executable, "-m", "disaggregated_inference", "serve", "--engine", "simulated", "--port", "0"]
    command += ["--kv-port", "0"]
    done = subprocess.run([*command, "--kv-memory", "1K"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert '"ready"' not in done.stdout
    assert "error: 384 bytes of KV memory are left for requests" in done.stderr
    assert "more --kv-memory, or less --prefix-memory" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("size", ["200K", "40K"])
def test_a_node_with_little_memory_starts(size: str, tiny_folder: Any) -> None:
    """A token takes a kilobyte: one or both prompts of the speed measurement do not fit."""
    common = "--engine", "torch", "--dtype", "float32", "--prefix-memory", "0"
    node = Node("decode", *common, "--model", str(tiny_folder("llama")), "--kv-memory", size)
    try:
        rates = node.ask("/status")[1]["rates"]["local_prefill"]
        assert [rate["size"] for rate in rates] == ([64] if size == "200K" else [])
        status, answer = node.ask("/generate", {"tokens": prompt_of(20), "max_tokens": 4, "ignore_eos": True})
        assert (status, len(answer["tokens"])) == (200, 4)
    finally:
        node.stop()


def test_a_request_on_a_node_with_both_roles_gets_half_of_the_memory() -> None:
    """The other half is for KV that waits to be fetched: a router must not count on it."""
    node = Node("both", "--engine", "simulated", "--kv-memory", "8M", "--prefix-memory", "0")
    try:
        kv, token_bytes = (node.ask("/status")[1][name] for name in ("kv", "kv_token_bytes"))
        assert kv["limit_bytes"] == node.ready["kv_limit_bytes"] == 4 << 20
        assert kv["total_limit_bytes"] == scraped(node)["disagg_kv_limit_bytes"] == 8 << 20
        assert node.ask("/prefill", {"tokens": prompt_of(100), "ticket": "waits"})[0] == 200
        kv = node.ask("/status")[1]["kv"]
        assert (kv["reserved_bytes"], kv["total_reserved_bytes"] >= 100 * token_bytes) == (0, True)
        most = (kv["limit_bytes"] - kv["reserved_bytes"]) // token_bytes
        asked = {"tokens": prompt_of(10), "ignore_eos": True}
        assert node.ask("/generate", asked | {"max_tokens": most - 10})[0] == 200
        refused = node.ask("/generate", asked | {"max_tokens": most - 9})[1]
        assert refused["error"]["code"] == "request_too_large"
    finally:
        node.ask("/prefill/waits", method="DELETE")
        node.stop()


def test_the_prefix_cache_must_leave_memory_for_requests(tiny_engine: LoadTiny) -> None:
    scheduler = Scheduler(lambda: tiny_engine("torch", "llama"))
    scheduler.engine.preallocates_kv, before = False, scheduler.engine.preallocates_kv
    with pytest.raises(BadRequest, match=r"^0 bytes of KV memory are left"):
        KVMemory(scheduler, prefix_bytes=999 << 40)
    scheduler.engine.preallocates_kv = before
    scheduler.stop()


@pytest.mark.slow
def test_a_model_is_not_idle_before_its_node_is_ready() -> None:
    """Starting takes longer than the idle time; it counts from the moment at which the node is ready."""
    node = Node("decode", "--engine", "simulated", "--idle-unload", "4")
    assert node.ask("/health")[1]["loaded"]
    assert until(lambda: not node.ask("/health")[1]["loaded"])
    assert node.ask("/generate", {"tokens": [5], "max_tokens": 2})[0] == 200
    node.stop()


def test_a_model_with_unfetched_kv_is_not_unloaded(pair: tuple[Node, Node]) -> None:
    prefill, _ = pair
    ticket = prefill.ask("/prefill", {"tokens": prompt_of(20)})[1]["ticket"]
    status, answer = prefill.ask("/unload", {})
    assert (status, "and its KV was fetched" in answer["error"]["message"]) == (503, True)
    prefill.ask(f"/prefill/{ticket}", method="DELETE")


@pytest.mark.parametrize("text", ["127.0.0.1:0", "a:b:c:999999", "a:b", "a:65536", "[a:b]:1", "[a:b]", "::g"])
def test_malformed_kv_addresses_are_refused(text: str, pair: tuple[Node, Node]) -> None:
    status, answer = pair[0].ask("/prefill", json.dumps({"tokens": [5], "kv_addresses": [text]}).encode())
    assert (status, "is not an address" in answer["error"]["message"]) == (400, True)
