"""Every pair of engines as four processes, on the tiny models: token for token what the decode node writes alone, and
no prompt token computed there. The embedded model has its pairs in test_contract.py, and in the gateway's tests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.handoff import prompt_of
from tests.support.node_process import Node

pytestmark = pytest.mark.slow

ENGINES = ("torch", "mlx")
Nodes = dict[tuple[str, str], Node]


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "gpt_oss"])
def cluster(request: pytest.FixtureRequest, tiny_folder: Any) -> Iterator[tuple[Nodes, list[int]]]:
    folder: Path = tiny_folder(request.param)
    tokens = prompt_of(300)
    roles = [(role, engine) for role in ("prefill", "decode") for engine in ENGINES]

    def start(role: str, engine: str) -> Node:
        chunk = ("--chunk", "77") if role == "prefill" else ()
        shared = ("--model", str(folder), "--dtype", "float32", "--prefix-memory", "0")
        return Node(role, "--engine", engine, *shared, *chunk)

    with ThreadPoolExecutor() as pool:
        started = list(pool.map(lambda item: start(*item), roles))
    yield dict(zip(roles, started, strict=True)), tokens
    assert [node.stop() for node in started] == [0] * 4


def test_every_pair(cluster: tuple[Nodes, list[int]]) -> None:
    nodes, tokens = cluster
    for writer in ENGINES:
        decode = nodes["decode", writer]
        alone = decode.ask("/generate", {"tokens": tokens, "max_new_tokens": 24})[1]["tokens"]
        before = decode.ask("/status")[1]["prompt_tokens_computed"]
        assert before == len(tokens)
        for reader in ENGINES:
            read = nodes["prefill", reader].ask("/prefill", {"tokens": tokens, "wait": False})[1]
            answer = decode.ask("/decode", {"context": read["context"], "max_new_tokens": 24})[1]
            assert answer["tokens"] == alone, f"{reader} -> {writer}"
            assert answer["metrics"]["prompt_tokens_recomputed"] == 0
        assert decode.ask("/status")[1]["prompt_tokens_computed"] == before
