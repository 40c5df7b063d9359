"""Node processes in service: both roles, structured output, metrics, drain, kill and restart."""

import json
import re
import shutil
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.support.engines import LoadTiny
from tests.support.handoff import alone, prompt_of
from tests.support.node_process import Node, scraped
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TINY = ("--dtype", "float32")
NO_PREFIXES = ("--prefix-memory", "0")
SLOW = ("--model", "simulated:tiny", "--engine", "simulated", "--profile", "custom:prefill=5000,decode=200")


@pytest.fixture(scope="module")
def folder(tiny_folder: Any) -> Path:
    path: Path = tiny_folder("llama")
    return path


@pytest.fixture(scope="module")
def both(folder: Path) -> Iterator[Node]:
    node = Node("both", "--model", str(folder), *TINY, "--engine", "mlx", "--kv-memory", "64M")
    yield node
    assert node.stop() == 0


def test_both_roles_in_one_process(both: Node, tiny_engine: LoadTiny) -> None:
    prompt = prompt_of(200)
    expected = alone(tiny_engine("mlx", "llama"), prompt, 12)
    assert both.ask("/health")[1]["role"] == "both"
    context = both.ask("/prefill", {"tokens": prompt})[1]["context"]
    status, answer = both.ask("/decode", {"context": context, "max_tokens": 12})
    assert (status, answer["tokens"], answer["finish_reason"]) == (200, expected, "length")
    assert answer["usage"] == {
        "prompt_tokens": 200,
        "completion_tokens": 12,
        "total_tokens": 212,
        "cached_tokens": answer["metrics"]["prefill_cached_tokens"],
    }
    assert both.ask("/generate", {"tokens": prompt, "max_tokens": 12})[1]["tokens"] == expected


def test_status_and_metrics(both: Node) -> None:
    """Status and metrics, after some work of every kind."""
    for _ in range(2):
        context = both.ask("/prefill", {"tokens": prompt_of(300)})[1]["context"]
        assert both.ask("/decode", {"context": context, "max_tokens": 20})[0] == 200
        assert both.ask("/generate", {"tokens": prompt_of(90), "max_tokens": 20})[0] == 200
    assert both.ask("/generate", {"tokens": [9999], "max_tokens": 20})[0] == 400
    status = both.ask("/status")[1]
    assert status["queue"]["waiting"] == status["running"] == status["slots"]["used"] == 0
    assert status["kv"]["reserved_bytes"] == status["kv"]["held_bytes"] == 0
    assert (
        0 < status["kv"]["peak_held_bytes"] <= status["kv"]["peak_reserved_bytes"] <= status["kv"]["total_limit_bytes"]
    )
    assert status["prefixes"]["hits"] >= 2
    assert status["prefixes"]["size_bytes"] <= status["prefixes"]["limit_bytes"] == 16 << 20
    assert status["integrity_faults"] == 0
    for kind in ("prefill", "decode"):
        assert all(rate["tokens_per_s"] > 0 for rate in status["rates"][kind]), status["rates"]
    assert status["paths"][0]["goodput_bytes_s"] > 0
    metrics = scraped(both)
    assert metrics["disagg_requests_total[length][decode]"] >= 4
    assert metrics["disagg_requests_total[read][prefill]"] >= 2
    assert metrics["disagg_generation_tokens_total"] >= 80
    assert metrics["disagg_time_to_first_token_seconds_count"] >= 4
    assert metrics["disagg_kv_limit_bytes"] == status["kv"]["total_limit_bytes"] == 2 * status["kv"]["limit_bytes"]
    assert metrics["disagg_tickets_ended_total[fetched]"] >= 2
    assert metrics["disagg_transfer_exposed_seconds_count"] >= 2


def test_choices_logprobs_and_stops(both: Node) -> None:
    asked = {"tokens": prompt_of(50), "max_tokens": 10, "temperature": 1.3, "seed": 4, "n": 3, "logprobs": 2}
    asked["ignore_eos"] = True
    whole = both.ask("/generate", asked)[1]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    events = both.stream("/generate", asked | {"stream": True})
    for choice in whole["choices"]:
        mine = [event for event in events if event.get("index") == choice["index"]]
        assert [event["token"] for event in mine] == choice["tokens"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
        assert [event["logprob"] for event in mine] == pytest.approx([item["logprob"] for item in choice["logprobs"]])
        assert all(len(event["top_logprobs"]) == 2 for event in mine)
    assert events[-1]["usage"]["completion_tokens"] == 30
    again = both.ask("/generate", asked | {"n": 1, "seed": None})[1]
    seed = again["metrics"]["seed"]
    assert both.ask("/generate", asked | {"n": 1, "seed": seed})[1]["tokens"] == again["tokens"]


def test_prompt_logprobs_over_http(both: Node) -> None:
    prompt = prompt_of(50)
    asked = {"tokens": prompt, "max_tokens": 2, "prompt_logprobs": 1}
    whole = both.ask("/generate", asked)[1]["prompt_logprobs"]
    assert [each["token"] for each in whole] == prompt
    assert whole[0]["logprob"] is None
    assert all(each["logprob"] <= each["top_logprobs"][0]["logprob"] <= 0 for each in whole[1:])
    context = both.ask("/prefill", {"tokens": prompt, "prompt_logprobs": 1})[1]["context"]
    events = both.stream("/decode", asked | {"context": context, "stream": True})
    pieces = [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event]
    assert [each["token"] for piece in pieces for each in piece["tokens"]] == prompt
    assert [piece["start"] for piece in pieces][:2] == [0, 1]
    assert both.ask("/status")[1]["prompt_logprobs"] is True
    for path, wrong, why in (
        ("/prefill", {"inline": True}, "inline carries no prompt_logprobs: leave one of them out"),
        ("/decode", {"kv_cache": "AAAA"}, "kv_cache carries no prompt_logprobs: give a prompt or a context"),
        ("/generate", {"prompt_logprobs": 21}, "prompt_logprobs must be at most 20"),
        ("/generate", {"scored_tokens": -1}, "scored_tokens must be at least 0"),
    ):
        status, answer = both.ask(path, {"tokens": prompt, "prompt_logprobs": 1} | wrong)
        assert (status, answer["error"]["message"]) == (400, why)


def test_full_memory_is_503_with_a_reason() -> None:
    node = Node("decode", *SLOW, "--kv-memory", "512K", *NO_PREFIXES, "--queue", "1")
    long = {"tokens": [5, 6], "max_tokens": 900, "ignore_eos": True}  # more than four seconds
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(node.ask, "/generate", long)
        assert until(lambda: node.ask("/status")[1]["slots"]["used"] == 1)
        refused = pool.submit(node.ask, "/generate", long | {"queue_s": 2.0})
        assert until(lambda: node.ask("/status")[1]["queue"]["waiting"] == 1)
        body = json.dumps(long | {"stream": True}).encode()
        with pytest.raises(urllib.error.HTTPError) as full:
            urllib.request.urlopen(urllib.request.Request(node.url + "/generate", body), timeout=30)
        with full.value as error:
            assert (error.code, error.headers["Retry-After"].isdigit()) == (503, True)
            assert "wait for KV memory already" in json.loads(error.read())["error"]["message"]
        status, answer = refused.result()
        assert (status, answer["error"]["code"]) == (503, "kv_memory_full")
        assert re.search(r"\d+ of \d+ bytes", answer["error"]["message"])
        assert running.result()[0] == 200
    status, answer = node.ask("/generate", {"tokens": [5], "max_tokens": 4000})
    assert (status, "can never fit" in answer["error"]["message"]) == (413, True)
    assert node.stop() == 0


def test_load_and_unload_by_request(folder: Path, tiny_engine: LoadTiny) -> None:
    node = Node("decode", "--model", str(folder), *TINY, "--engine", "torch", "--idle-unload", "600")
    expected = alone(tiny_engine("torch", "llama"), prompt_of(40), 8)
    assert node.ask("/unload", {})[1]["loaded"] is False
    health = node.ask("/health")[1]
    assert (health["status"], health["loaded"]) == ("healthy", False)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(node.ask, "/generate", {"tokens": prompt_of(40), "max_tokens": 8}) for _ in range(8)]
    assert [future.result()[1]["tokens"] for future in asked] == [expected] * 8
    assert node.ask("/unload", {})[0] == 200
    assert node.ask("/load", {})[1]["loaded"] is True
    assert node.stop() == 0


def test_a_waiting_prefill_has_no_context(folder: Path) -> None:
    """Else its request would hold memory on a decode node, and both nodes could wait for each other."""
    node = Node("prefill", "--model", str(folder), *TINY, "--engine", "torch", "--kv-memory", "1M", *NO_PREFIXES)
    ask = {"tokens": prompt_of(700), "wait": False}
    first = node.ask("/prefill", ask)[1]["ticket"]
    status, answer = node.ask("/prefill", ask | {"queue_s": 0.3})
    assert (status, answer["error"]["code"]) == (503, "kv_memory_full")
    assert node.ask("/status")[1]["tickets"] == 1, "a refused request leaves no ticket"
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(node.ask, "/prefill", ask | {"queue_s": 30})
        assert until(lambda: node.ask("/status")[1]["queue"]["waiting"] == 1)
        time.sleep(0.3)
        assert not second.done()
        node.ask(f"/prefill/{first}", method="DELETE")
        status, answer = second.result(10)
    assert (status, node.ask("/status")[1]["tickets"]) == (200, 1)
    node.ask(f"/prefill/{answer['ticket']}", method="DELETE")
    assert node.stop() == 0


def test_a_reloaded_model_must_be_the_same(folder: Path, tmp_path: Path) -> None:
    """Prefix cache and peer checks belong to the weights that the node was started with."""
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    node = Node("decode", "--model", str(own), *TINY, "--engine", "torch")
    ask = {"tokens": prompt_of(40), "max_tokens": 8}
    before = node.ask("/generate", ask)[1]["tokens"]
    assert node.ask("/unload", {})[0] == 200
    (weights,) = own.glob("*.safetensors")
    kept = weights.read_bytes()
    weights.write_bytes(kept[: -len(kept) // 2] + bytes(byte ^ 1 for byte in kept[-len(kept) // 2 :]))
    status, answer = node.ask("/generate", ask)
    assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
    assert "changed since this node started" in answer["error"]["message"]
    weights.write_bytes(kept)
    assert node.ask("/generate", ask)[1]["tokens"] == before
    assert node.stop() == 0


def test_sigterm_lets_requests_finish(folder: Path, tiny_engine: LoadTiny) -> None:
    """SIGTERM to both nodes with eight running requests and four transfers: all finish, both nodes exit with 0."""
    shared = ("--model", str(folder), *TINY, "--prefix-memory", "0")
    prefill = Node("prefill", *shared, "--engine", "torch", "--chunk", "16")
    decode = Node("decode", *shared, "--engine", "torch")
    engine = tiny_engine("torch", "llama")
    written, moved = alone(engine, prompt_of(20), 800), alone(engine, prompt_of(2000), 20)
    with ThreadPoolExecutor(12) as pool:
        asked = {"tokens": prompt_of(20), "max_tokens": 800, "stream": True, "ignore_eos": True}
        writing = [pool.submit(decode.stream, "/generate", asked) for _ in range(8)]
        assert until(lambda: decode.ask("/status")[1]["running"] == 8)
        contexts = [prefill.ask("/prefill", {"tokens": prompt_of(2000), "wait": False})[1]["context"] for _ in range(4)]
        moving = [
            pool.submit(decode.stream, "/decode", {"context": c, "max_tokens": 20, "stream": True}) for c in contexts
        ]
        assert until(lambda: decode.ask("/status")[1]["waiting"] == 12)
        assert until(lambda: 0 < prefill.ask("/status")[1]["prompt_tokens_computed"] < 8000)
        for node in (prefill, decode):
            node.process.send_signal(signal.SIGTERM)
        for future in writing:
            assert [event["token"] for event in future.result() if "token" in event] == written
        for future in moving:
            assert [event["token"] for event in future.result() if "token" in event] == moved
    assert [node.process.wait(30) for node in (prefill, decode)] == [0, 0]
    prefill.stop()
    decode.stop()


def test_drain_by_request(folder: Path, tiny_engine: LoadTiny) -> None:
    node = Node("decode", "--model", str(folder), *TINY, "--engine", "torch")
    asked = {"tokens": prompt_of(20), "max_tokens": 500, "stream": True, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(node.stream, "/generate", asked)
        assert until(lambda: node.ask("/status")[1]["running"] == 1)
        assert node.ask("/drain", {})[1] == {"draining": True, "waiting": 1}
        tokens = [event["token"] for event in writing.result() if "token" in event]
    assert tokens == alone(tiny_engine("torch", "llama"), prompt_of(20), 500)
    assert node.process.wait(60) == 0
    node.stop()


def test_kill_and_restart(folder: Path, tiny_engine: LoadTiny) -> None:
    """kill -9 of one node, then of the other: after its restart the pair works again."""
    shared = ("--model", str(folder), *TINY)
    expected = alone(tiny_engine("torch", "llama"), prompt_of(300), 8)
    prefill = Node("prefill", *shared, "--engine", "torch", "--lease", "5")
    decode = Node("decode", *shared, "--engine", "torch")

    def handed_over() -> list[int]:
        context = prefill.ask("/prefill", {"tokens": prompt_of(300)})[1]["context"]
        tokens: list[int] = decode.ask("/decode", {"context": context, "max_tokens": 8})[1]["tokens"]
        return tokens

    assert handed_over() == expected
    prefill.process.kill()
    prefill.process.wait()
    prefill.stop()
    prefill = Node("prefill", *shared, "--engine", "torch", "--lease", "5")
    assert handed_over() == expected
    prefill.ask("/prefill", {"tokens": prompt_of(200), "wait": False})
    decode.process.kill()
    decode.process.wait()
    decode.stop()
    assert until(lambda: prefill.ask("/status")[1]["tickets"] == 0)
    decode = Node("decode", *shared, "--engine", "torch")
    assert handed_over() == expected
    assert [prefill.stop(), decode.stop()] == [0, 0]


def test_prefixes_survive_a_restart(folder: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(folder), *TINY, "--engine", "mlx", "--prefix-disk", str(tmp_path / "kv"))
    first = Node("decode", *arguments)
    answer = first.ask("/generate", {"tokens": prompt_of(300), "max_tokens": 8})[1]
    assert first.stop() == 0
    second = Node("decode", *arguments)
    again = second.ask("/generate", {"tokens": prompt_of(300), "max_tokens": 8})[1]
    assert again["tokens"] == answer["tokens"]
    assert again["usage"]["cached_tokens"] == 299
    assert second.ask("/status")[1]["prefixes"]["disk_hits"] > 0
    assert second.stop() == 0


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["star", "planet", "moon"]},
        "mass": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 1},
    },
    "required": ["name", "kind", "mass", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def embedded() -> Iterator[Node]:
    node = Node("both", "--model", "smollm2", "--engine", "mlx")
    yield node
    assert node.stop() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_every_output_matches_its_schema(stream: bool, embedded: Node) -> None:
    """Half of them handed over: then the first token, from the received logits, obeys the schema too. Through the
    gateway, and for every API: tests/gateway/test_guarantees.py."""

    def ask(number: int) -> str:
        prompt = [{"role": "user", "content": f"Describe heavenly body number {number} as JSON."}]
        rules: dict[str, Any] = {
            "max_tokens": 600,
            "format": {"type": "json_schema", "schema": SCHEMA},
            "stream": stream,
        }
        rules |= {"temperature": (number % 5) * 0.4, "seed": number}
        asked, path = {"messages": prompt} | rules, "/generate"
        if number % 2:
            asked, path = {"context": embedded.ask("/prefill", {"messages": prompt})[1]["context"]} | rules, "/decode"
        if stream:
            return "".join(event.get("text", "") for event in embedded.stream(path, asked))
        text: str = embedded.ask(path, asked)[1]["generated_text"]
        return text

    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(ask, range(6)))
    assert all(jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text)) for text in texts)


def test_other_output_formats(embedded: Node) -> None:
    question = {"messages": [{"role": "user", "content": "Is the sky blue?"}], "max_tokens": 40}

    def output_of(format: dict[str, Any]) -> str:
        text: str = embedded.ask("/generate", question | {"format": format})[1]["generated_text"]
        return text

    assert output_of({"type": "choice", "choices": ["yes", "no", "perhaps"]}) in ("yes", "no", "perhaps")
    assert re.fullmatch(r"[A-Z]{3}-\d{4}", output_of({"type": "regex", "pattern": r"[A-Z]{3}-\d{4}"}))
    assert re.fullmatch(
        r"(up|down)( (up|down))*",
        output_of({"type": "grammar", "grammar": 'start: W (" " W)*\nW: "up" | "down"'}).strip() or "up",
    )
    whole = embedded.ask("/generate", question | {"format": {"type": "json_object"}, "max_tokens": 200})[1]
    if whole["finish_reason"] == "stop":
        assert isinstance(json.loads(whole["generated_text"]), dict)


def test_stop_strings_are_not_in_the_output(embedded: Node) -> None:
    asked = {"prompt": "The colours of the rainbow are red, orange,", "max_tokens": 40}
    whole = embedded.ask("/generate", asked)[1]["generated_text"]
    stop = whole[9:14]
    answer = embedded.ask("/generate", asked | {"stop": [stop]})[1]
    assert (answer["generated_text"], answer["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    events = embedded.stream("/generate", asked | {"stop": stop, "stream": True})
    assert "".join(event.get("text", "") for event in events) == whole[: whole.index(stop)]


def test_a_disconnect_while_waiting() -> None:
    """A waiting request is removed at once, not when it would have its turn."""
    node = Node("decode", *SLOW, "--kv-memory", "512K", *NO_PREFIXES, "--drain", "1")
    long = {"tokens": [5, 6], "max_tokens": 900, "ignore_eos": True, "stream": True}
    body = json.dumps(long).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(node.ask, "/generate", long | {"stream": False})
        assert until(lambda: node.ask("/status")[1]["slots"]["used"] == 1)
        with socket.create_connection(("127.0.0.1", node.ready["port"])) as client:
            client.sendall(head + body)
            assert until(lambda: node.ask("/status")[1]["queue"]["waiting"] == 1)
        assert until(lambda: node.ask("/status")[1]["queue"]["waiting"] == 0)
        assert not holding.done()
        holding.result()
    assert node.stop() == 0
