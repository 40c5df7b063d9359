"""A node in front of an Ollama: what it tells, reads and writes, and what it refuses."""

import asyncio
import json
import os
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from disaggregated_inference.errors import EngineUnavailable
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.ollama_node.client import OllamaClient, base_url
from tests.support.recorded_ollama import LONG_S, Front, RecordedOllama, text_of
from tests.support.waiting import until


def test_it_says_what_it_is(front: Front, ollama: RecordedOllama) -> None:
    status, health = front.ask("/health")
    assert (status, health["status"], health["loaded"], health["backend"]) == (200, "healthy", True, "ollama")
    about, status_of = front.ask("/model")[1], front.ask("/status")[1]
    for told in (about, status_of):
        assert (told["exports"], told["imports"], told["tokenizer"]) == (False, False, "none")
    assert about["context_window"] == 8192
    assert about["fingerprint"] is None
    assert front.ask("/model/tokenizer")[0] == 501
    assert front.ask("/nothing")[1]["error"]["code"] == "not_found"


@pytest.mark.parametrize(("lists", "size"), [("all", 91728202), ("broken", 0), ("stalled", 0)])
def test_it_tells_how_the_model_is_stored(front: Front, ollama: RecordedOllama, lists: str, size: int) -> None:
    ollama.lists = lists
    status, about = front.ask("/model")
    assert status == 200
    stored = {"format": "gguf", "quantization": "Q4_1", "parameters": 134515008, "size_bytes": size}
    assert about["stored"] == stored
    assert front.ask("/health")[1]["status"] == "healthy"


def test_a_prompt_is_warmed_and_nothing_is_claimed(front: Front, ollama: RecordedOllama) -> None:
    status, read = front.ask("/prefill", {"prompt": "one two three"})
    assert status == 200
    assert read["kv"] == "none"
    assert read["metrics"]["prompt_tokens"] == read["prompt_tokens"] == 3
    assert ollama.asked[-1]["options"]["num_predict"] == 1, "0 has it write without an end"
    assert read["metrics"]["prefill_speed"] == pytest.approx(3 / 0.474583514)
    again = front.ask("/prefill", {"prompt": "one two three"})[1]["metrics"]
    assert again["prompt_tokens"] == 3
    assert again["prefill_speed"] is None, "it was held: that is no reading"

    decoded = front.ask("/decode", {"context": read["context"], "prompt": "one two three", "max_new_tokens": 2})
    assert decoded[0] == 200
    assert decoded[1]["generated_text"] == " 1 2"
    assert decoded[1]["tokens"] is None
    assert "kv_bytes" not in decoded[1]["metrics"]
    alone = front.ask("/decode", {"context": read["context"]})
    assert alone[0] == 400
    assert "it has no KV" in alone[1]["error"]["message"]
    other = PrefillContext(ticket="t", secret="s", epoch="e", tokens=3, prompt_hash="h", addresses=(("127.0.0.1", 9),))
    refused = front.ask("/decode", {"context": other.encode(), "prompt": "x"})
    assert refused[0] == 400
    assert "cannot import" in refused[1]["error"]["message"]
    wrong: list[dict[str, Any]] = [{"inline": True}, {"wait": False}, {"prompt_logprobs": 1}]
    for body in (*({"prompt": "x"} | each for each in wrong), {"tokens": [1]}, {"prompt": ""}):
        assert front.ask("/prefill", body)[0] == 400
    assert front.ask("/prefill/abc", method="DELETE")[0] == 404


def test_a_request_with_a_salt_is_told_nothing_of_the_cache(front: Front, ollama: RecordedOllama) -> None:
    """All callers share Ollama's cache. Without a salt, the speed and an old version's count tell what was cached."""
    new, known = {"prompt": "one two three", "max_tokens": 1}, {"prompt": "four five six", "max_tokens": 1}
    front.ask("/generate", known)
    speeds = [front.ask("/generate", body)[1]["metrics"]["prefill_speed"] for body in (new, known)]
    assert speeds[0]
    assert speeds[1] is None
    new = {"prompt": "seven eight nine", "max_tokens": 1}
    for body in (new, known):
        told = front.ask("/generate", body | {"cache_salt": "mine"})[1]["metrics"]
        assert (told["prefill_speed"], told["prompt_tokens"]) == (None, 3)
    ollama.version = front.node.version = "0.3.9"
    for body in ({"prompt": "new words", "max_tokens": 1}, known):
        told = front.ask("/generate", body | {"cache_salt": "mine"})[1]["metrics"]
        assert (told["prefill_speed"], told["prompt_tokens"]) == (None, None)


def test_what_another_process_had_read_is_no_reading(front: Front, ollama: RecordedOllama) -> None:
    """Two nodes in front of one Ollama, as the set-up documents have them: neither knows what the other sent."""
    other = Front(ollama.url, role="decode")
    try:
        read = front.ask("/prefill", {"prompt": "one two three"})[1]
        held = other.ask("/generate", {"prompt": "one two three", "max_tokens": 3})[1]["metrics"]
        assert (held["prompt_tokens"], held["prefill_speed"]) == (3, None)
        held = other.ask("/decode", {"prompt": "four five", "context": read["context"], "max_tokens": 3})[1]["metrics"]
        assert held["prefill_speed"] is None, "a warm context says that it was read"
        told = other.ask("/status")[1]
        assert (told["prompt_tokens_computed"], told["rates"]["local_prefill"]) == (0, [])
        new = other.ask("/generate", {"prompt": "six seven", "max_tokens": 1})[1]["metrics"]
        assert new["prefill_speed"] == pytest.approx(2 / 0.474583514)
        told = other.ask("/status")[1]
        assert (told["prompt_tokens_computed"], told["rates"]["local_prefill"][0]["samples"]) == (2, 1)
    finally:
        other.end()


def test_old_versions_leave_out_what_they_held(front: Front, ollama: RecordedOllama) -> None:
    ollama.version = front.node.version = "0.3.9"
    counts = [front.ask("/generate", {"prompt": "a b c d", "max_tokens": 1})[1]["usage"] for _ in range(2)]
    assert [count["prompt_tokens"] for count in counts] == [4, 4]


TOOLS = [
    {"type": "function", "function": {"name": f"f{number}", "description": "word " * 20, "parameters": {}}}
    for number in range(5)
]
USER = {"role": "user", "content": "What is the weather?"}


@pytest.mark.parametrize("version", ["0.3.9", "0.9.3", "0.13.0"])
def test_counts_are_of_the_prompt_with_its_tools_and_thoughts(
    front: Front, ollama: RecordedOllama, version: str
) -> None:
    ollama.version = front.node.version = version

    def counted(path: str, **more: Any) -> int:
        status, answer = front.ask(path, {"messages": [USER]} | more)
        assert status == 200, answer
        return int((answer.get("usage") or answer)["prompt_tokens"])

    thought = [USER, {"role": "assistant", "content": "", "thinking": "It may rain. "}, USER]
    for _ in range(2):
        assert counted("/generate", template={"tools": TOOLS}) == counted("/prefill", tools=TOOLS) > 100
        assert counted("/generate") == counted("/prefill") == 6
        assert counted("/prefill", messages=thought) == 15
        assert counted("/generate", messages=[USER, {"role": "assistant", "content": ""}, USER]) == 12


def test_tools_are_warmed_too(front: Front, ollama: RecordedOllama) -> None:
    for given in ({"tools": TOOLS}, {"template": {"tools": TOOLS, "enable_thinking": True}}):
        assert front.ask("/prefill", {"messages": [USER]} | given)[0] == 200
        answer = front.ask("/generate", {"messages": [USER], "max_tokens": 1} | given)[1]
        warm, asked = ollama.asked[-2:]
        assert warm == asked
        assert warm["tools"] == TOOLS
        assert answer["metrics"]["prefill_time"] == pytest.approx(0.071976452), "it was held"
        assert answer["metrics"]["prefill_speed"] is None
    assert asked["think"] is True


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"images": ["aGVsbG8="]}, "the images in one of them"),
        ({"template": {"verbosity": "low"}}, "does not know verbosity"),
        ({"template": {"tools": TOOLS}, "tools": TOOLS}, "given twice"),
        ({"messages": None, "prompt": "x", "tools": TOOLS}, "tools: a prompt has no chat template"),
        ({"messages": None, "prompt": "x", "template": {"tools": TOOLS}}, "template: a prompt has no chat template"),
    ],
    ids=["images", "word", "twice", "tools", "template"],
)
def test_what_cannot_be_passed_on_is_refused(down: Front, more: dict[str, Any], says: str) -> None:
    for path in ("/prefill", "/generate"):
        status, answer = down.ask(path, {"messages": [USER]} | more)
        assert (status, answer["error"]["code"]) == (400, "bad_request")
        assert says in answer["error"]["message"]


def test_everything_is_said_in_its_words(front: Front, ollama: RecordedOllama) -> None:
    asked = {"messages": [{"role": "developer", "content": [{"type": "text", "text": "Count."}]}], "max_tokens": 3}
    asked |= {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": (1 << 40) + 5, "stop": "END"}
    asked |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4}
    asked |= {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "f"}}
    asked |= {"template": {"tools": [tool], "reasoning_effort": "high"}}
    status, answer = front.ask("/generate", asked)
    assert status == 200
    assert answer["metrics"]["seed"] == 5
    sent = ollama.asked[-1]
    assert sent["path"] == "/api/chat"
    assert sent["messages"] == [{"role": "system", "content": "Count."}]
    assert sent["format"] == {"type": "object"}
    assert sent["tools"] == [tool]
    assert sent["think"] is True
    assert (sent["truncate"], sent["shift"], sent["stream"]) == (False, False, True)
    assert sent["options"] == {
        "num_ctx": 8192,
        "num_predict": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repeat_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "stop": ["<|im_start|>", "<|im_end|>", "END"],
        "seed": 5,
    }
    front.ask("/generate", {"prompt": "as it is", "max_tokens": 1, "format": {"type": "json_object"}})
    sent = ollama.asked[-1]
    assert (sent["path"], sent["prompt"], sent["raw"], sent["format"]) == ("/api/generate", "as it is", True, "json")
    assert sent["options"]["temperature"] == 0
    assert "seed" not in sent["options"]
    assert "stop" not in sent["options"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 2},
        {"logprobs": 3},
        {"prompt_logprobs": 0},
        {"logit_bias": {"5": 1.0}},
        {"ignore_eos": True},
        {"min_tokens": 3},
        {"written": [1]},
        {"format": {"type": "regex", "pattern": "a"}},
        {"format": {"type": "choice", "choices": ["a"]}},
        {"format": {"type": "grammar", "grammar": "start: A"}},
        {"template": {"verbosity": "low"}},
        {"max_tokens": 0},
        {"max_tokens": 3, "max_new_tokens": 4},
        {"temperature": -1},
        {"timeout_s": 0},
        {"tokens": [1, 2]},
        {"messages": [{"role": "user", "content": "x"}]},
        {"kv_cache": "AAAA"},
        {"images": ["aGVsbG8="]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_it_cannot_do_is_refused_with_the_reason(down: Front, wrong: dict[str, Any]) -> None:
    status, answer = down.ask("/generate", {"prompt": "x"} | wrong)
    assert (status, answer["error"]["code"]) == (400, "bad_request")
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"images": "aGVsbG8="}, "images: give a list"),
        ({"images": [5]}, "images: give a list"),
        ({"images": ["data:image/png;base64,aGVsbG8="]}, "images: give a list"),
        ({"images": ["é"]}, "images: give a list"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "give images as `images`, in base64"),
    ],
)
def test_images_that_are_none_are_refused(down: Front, more: dict[str, Any], says: str) -> None:
    for path, stream in (("/generate", False), ("/generate", True), ("/prefill", False)):
        body = {"messages": [{"role": "user", "content": "x"} | more], "stream": stream}
        status, answer = down.ask(path, body)
        assert (status, answer["error"]["code"]) == (400, "messages_refused")
        assert says in answer["error"]["message"]


def test_images_go_where_ollama_has_them(ollama: RecordedOllama) -> None:
    ollama.shown = ollama.shown | {"capabilities": ["completion", "vision"]}
    node, picture = Front(ollama.url), "aGVsbG8="
    try:
        message = {
            "role": "user",
            "content": "What is it?",
            "images": [picture],
            "name": "ann",
            "refusal": None,
            "cache_control": {"type": "ephemeral"},
        }
        for path in ("/prefill", "/generate"):
            status, answer = node.ask(path, {"messages": [message]})
            assert status == 200, answer
            assert ollama.asked[-1]["messages"] == [{"role": "user", "content": "What is it?", "images": [picture]}]
        assert answer["metrics"]["prefill_speed"] is None
        other = node.ask("/generate", {"messages": [message | {"images": ["aGVsbG9v"]}]})[1]["metrics"]
        assert other["prefill_speed"], "another picture is another prompt"
    finally:
        node.end()


def test_a_model_without_eyes_is_shown_nothing(front: Front, ollama: RecordedOllama) -> None:
    status, answer = front.ask("/generate", {"messages": [{"role": "user", "content": "x", "images": ["aGVsbG8="]}]})
    assert (status, ollama.asked) == (400, [])
    assert "images: this model reads text only" in answer["error"]["message"]


def test_a_stream_has_the_shape_of_every_other_nodes(front: Front, ollama: RecordedOllama) -> None:
    ollama.hold.clear()
    ollama.held_after = 1
    connection, response = front.stream({"prompt": "3", "max_tokens": 3})
    assert response.getheader("X-Request-Id") == "mine"
    assert response.readline().startswith(b"data: ")
    while not response.readline().startswith(b": alive"):  # a pulse while nothing is written
        pass
    ollama.hold.set()
    rest = [json.loads(line[6:]) for line in response.read().split(b"\n") if line.startswith(b"data: ")]
    connection.close()
    assert rest[:2] == [{"token": None, "text": " 5"}, {"token": None, "text": " 6"}]
    assert rest[2] == {"token": None, "text": "", "finish_reason": "length"}
    assert rest[3]["done"]
    assert rest[3]["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    metrics = rest[3]["metrics"]
    assert metrics["prefill_time"] == pytest.approx(0.474583514)
    assert metrics["decode_speed"] == pytest.approx(2 / 0.12310607), "the first token is of the reading"


def test_thoughts_and_calls_come_as_its_own(front: Front, ollama: RecordedOllama) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    ollama.says = [{"content": "", "thinking": "hm"}, {"content": "so"}, {"content": "", "tool_calls": [call]}]
    events = front.events({"messages": [{"role": "user", "content": "x"}]})
    assert [event.get("thinking") for event in events[:2]] == ["hm", None]
    assert events[2]["tool_calls"] == [call]
    assert events[3]["finish_reason"] == "stop"
    answer = front.ask("/generate", {"messages": [{"role": "user", "content": "x"}]})[1]
    assert (answer["thinking"], answer["generated_text"], answer["tool_calls"]) == ("hm", "so", [call])


def test_a_prompt_is_never_cut(ollama: RecordedOllama) -> None:
    node = Front(ollama.url, max_window=64)
    try:
        status, answer = node.ask("/generate", {"prompt": "word " * 500, "max_tokens": 8})
        assert status == 400
        assert answer["error"]["code"] == "context_too_long"
        assert not ollama.asked
        assert "at least 320 tokens" in answer["error"]["message"]
        assert "64 tokens" in answer["error"]["message"]
        # What only may not fit is a question for a version that says so itself, and none for one that would cut it.
        fits = {"prompt": "abcdefg " * 40, "max_tokens": 8}
        answer = node.ask("/generate", fits)[1]["error"]
        assert answer["code"] == "context_too_long"
        assert "about 88 tokens do not fit" in answer["message"]
        assert "this Ollama (0.9.3) would cut the prompt silently" in answer["message"]
        assert not ollama.asked
        ollama.version = node.node.version = "0.12.6"
        assert node.ask("/generate", fits)[0] == 200
        # This was not known before; a version that knows `truncate` says so, an older one gives it away by its counts.
        for version in ("0.13.0", "0.9.3"):
            ollama.version = node.node.version = version
            status, answer = node.ask("/generate", {"prompt": "a " * 100, "max_tokens": 8})
            assert (status, answer["error"]["code"]) == (400, "context_too_long")
            assert ollama.asked[-1]["options"]["num_ctx"] == 64
        events = node.events({"prompt": "a " * 60, "max_tokens": 8})
        assert events[-1]["error"]["message"].startswith("68 tokens do not fit"), "it forgot the beginning to go on"
    finally:
        node.end()


_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"text": "line " * 300})}}
_LAST = [{"role": "tool", "content": "done", "tool_call_id": "1"}, USER]


@pytest.mark.parametrize(
    "chat",
    [
        {"messages": [USER, {"role": "assistant", "content": "ok " * 30}, USER], "tools": TOOLS * 2},
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, *_LAST]},
        {"messages": [USER, {"role": "assistant", "content": "ok", "thinking": "perhaps " * 300}, USER]},
        {"messages": [USER | {"images": ["aGVsbG8="]}, USER]},
    ],
    ids=["tools", "calls", "thoughts", "images"],
)
def test_what_is_beside_the_words_is_not_cut_either(ollama: RecordedOllama, chat: dict[str, Any]) -> None:
    """By words it all would fit; an old version drops the first message of it without a trace."""
    ollama.shown = ollama.shown | {"capabilities": ["completion", "tools", "thinking", "vision"]}
    node = Front(ollama.url, max_window=420)
    try:
        for path in ("/generate", "/prefill"):
            status, answer = node.ask(path, chat | {"max_tokens": 8})
            assert (status, answer["error"]["code"]) == (400, "context_too_long")
            assert "would cut the prompt silently" in answer["error"]["message"]
        assert not ollama.asked
        ollama.version = node.node.version = "0.13.0"
        status, answer = node.ask("/generate", chat | {"max_tokens": 8})
        assert (status, ollama.dropped) == (200, 0), answer
    finally:
        node.end()


def test_an_answer_is_gone_on_with_where_that_is_possible(front: Front, ollama: RecordedOllama) -> None:
    raw = front.ask("/generate", {"prompt": "count: ", "written_text": "1 2", "max_tokens": 2})
    assert raw[1]["generated_text"] == " 3 4"
    chat = {"messages": [{"role": "user", "content": "count"}], "written_text": "1 2", "max_tokens": 2}
    assert front.ask("/generate", chat)[1]["generated_text"] == " 3 4"
    front.node.forget_model()
    ollama.continues = False
    status, answer = front.ask("/generate", chat)
    assert status == 422
    assert "cannot continue" in answer["error"]["message"]


def test_draining_and_crowds_are_refused(front: Front, ollama: RecordedOllama) -> None:
    front.node.slots, front.node.queue = 1, 0
    ollama.hold.clear()
    threading.Thread(target=front.ask, args=("/generate", {"prompt": "x"}), daemon=True).start()
    assert ollama.holding.wait(LONG_S)
    status, answer = front.ask("/generate", {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (503, "node_busy")
    ollama.hold.set()
    assert until(lambda: front.node.open_requests == 0, LONG_S)
    front.node.drain()
    assert front.ask("/generate", {"prompt": "x"})[1]["error"]["code"] == "node_draining"
    assert front.ask("/health")[1]["status"] == "draining"


def _real() -> tuple[str, str] | None:
    """The address and the smallest model of an Ollama that is really there."""
    if not os.environ.get("OLLAMA_HOST"):
        return None
    url = base_url(os.environ["OLLAMA_HOST"])
    try:
        with urllib.request.urlopen(f"{url}/api/tags", timeout=2) as response:
            models = json.loads(response.read())["models"]
    except OSError:
        return None
    named = os.environ.get("OLLAMA_TEST_MODEL")
    return (url, named or min(models, key=lambda model: model["size"])["name"]) if models else None


@pytest.mark.skipif(_real() is None, reason="OLLAMA_HOST names no running Ollama with a model")
def test_a_real_one_does_the_same() -> None:
    found = _real()
    assert found
    url, model = found
    with pytest.raises(EngineUnavailable, match="run `ollama pull no-such-model`"):
        asyncio.run(_shown(url, "no-such-model"))
    node = Front(url, model, max_window=256)
    try:
        assert until(lambda: node.ask("/health")[1]["loaded"], LONG_S)
        prompt = f"The number {time.time_ns()} is"
        read = node.ask("/prefill", {"prompt": prompt})[1]["metrics"]
        assert read["prompt_tokens"] > 3
        assert read["prefill_time"] > 0
        assert read["prefill_speed"]
        answer = node.ask("/decode", {"prompt": prompt, "max_new_tokens": 3})[1]
        assert answer["usage"]["prompt_tokens"] == read["prompt_tokens"]
        assert answer["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["metrics"]["prefill_speed"] is None
        assert answer["metrics"]["prefill_time"] < read["prefill_time"], "its beginning was held"
        events = node.events({"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 3})
        assert text_of(events)
        assert events[-1]["done"]
        assert events[-1]["usage"]["completion_tokens"] == 3
        refused = node.ask("/generate", {"prompt": "word " * 600, "max_tokens": 2})
        assert refused[1]["error"]["code"] == "context_too_long"
        assert node.ask("/unload", {})[1]["loaded"] is False
    finally:
        node.end()


async def _shown(url: str, model: str) -> None:
    client = OllamaClient(url, model)
    try:
        await client.show()
    finally:
        await client.close()
