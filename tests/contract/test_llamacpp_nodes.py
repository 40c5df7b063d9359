"""The embedded model over real nodes: llama.cpp reads the GGUF as it is, torch and MLX what was dequantized from it.

Its arithmetic is its own (activations of 8 bits where weights are quantized), so answers are compared where the
likeliest token is likelier by far.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from disaggregated_inference.models import ModelStore
from tests.support.engines import ENGINE_OPTIONS, LLAMACPP
from tests.support.node_process import Node

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LLAMACPP or "mlx" not in ENGINE_OPTIONS, reason="needs llama.cpp and MLX"),
]

WEEK = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, "
QUESTION = f"Continue the list: {WEEK}Monday, Tuesday,"
ANSWER = 16
START = {"torch": "prefill", "mlx": "decode", "llamacpp": "both"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, Node]]:
    def start(engine: str) -> Node:
        dtype = () if engine == "llamacpp" else ("--dtype", "float32", "--prefix-memory", "0")
        return Node(START[engine], "--engine", engine, "--model", "smollm2", "--kv-memory", "256M", *dtype)

    with ThreadPoolExecutor() as pool:
        started = dict(zip(START, pool.map(start, START), strict=True))
    yield started
    assert [node.stop() for node in started.values()] == [0] * 3


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return ModelStore().resolve("smollm2").tokenizer.encode_chat([{"role": "user", "content": QUESTION}])


def test_it_serves(nodes: dict[str, Node], tokens: list[int]) -> None:
    health = nodes["llamacpp"].ask("/health")[1]
    assert (health["backend"], health["model"]) == ("llamacpp", "smollm2:135m")
    status = nodes["llamacpp"].ask("/status")[1]
    assert (status["exports"], status["imports"], status["dtype"]) == (True, True, "float16")
    answer = nodes["llamacpp"].ask("/generate", {"prompt": QUESTION, "max_new_tokens": 3})[1]
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("reader", "writer"), [("torch", "llamacpp"), ("llamacpp", "mlx"), ("llamacpp", "llamacpp")])
def test_hand_over(reader: str, writer: str, nodes: dict[str, Node], tokens: list[int]) -> None:
    decode = nodes[writer]
    before = decode.ask("/status")[1]["prompt_tokens_computed"]
    read = nodes[reader].ask("/prefill", {"tokens": tokens, "wait": False})[1]
    handed = decode.ask("/decode", {"context": read["context"], "max_new_tokens": ANSWER})[1]
    assert handed["metrics"]["prompt_tokens_recomputed"] == 0
    if reader != writer:
        assert decode.ask("/status")[1]["prompt_tokens_computed"] == before
    alone = decode.ask("/generate", {"tokens": tokens, "max_new_tokens": ANSWER})[1]
    assert handed["tokens"] == alone["tokens"]
    peers = decode.ask("/status")[1]["peers"]
    assert peers
    assert all(peer["refused"] is None and peer["distance"] < 0.15 for peer in peers)


def test_a_kept_prefix_is_used(nodes: dict[str, Node], tokens: list[int]) -> None:
    node, asked = nodes["llamacpp"], {"tokens": tokens, "max_new_tokens": ANSWER}
    first, second = (node.ask("/generate", asked)[1] for _ in range(2))
    assert second["usage"]["cached_tokens"] == len(tokens) - 1
    assert first["tokens"] == second["tokens"]
    assert node.ask("/status")[1]["integrity_faults"] == 0


def test_unloaded_and_loaded_again(nodes: dict[str, Node], tokens: list[int]) -> None:
    node, asked = nodes["llamacpp"], {"tokens": tokens, "max_new_tokens": 4}
    expected = node.ask("/generate", asked)[1]["tokens"]
    assert node.ask("/unload", {})[0] == 200
    assert not node.ask("/health")[1]["loaded"]
    assert node.ask("/generate", asked)[1]["tokens"] == expected
