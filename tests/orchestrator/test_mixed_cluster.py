"""One cluster of engines that have nothing in common: torch reads and llama.cpp writes for one model, from two kinds of
files; Ollamas do both for the other. All are real node processes; only the Ollamas behind theirs are recorded."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from disaggregated_client import DisaggregatedClient
from disaggregated_inference.api import FALLBACK_WARNING
from disaggregated_inference.orchestrator.text_continuation import CONTINUED_WARNING
from tests.support.cluster import Process, config_of
from tests.support.engines import LLAMACPP, LoadTiny, twin_of
from tests.support.handoff import alone, prompt_of
from tests.support.recorded_ollama import LONG_S, RecordedOllama
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not LLAMACPP, reason="needs llama.cpp")]

TINY = "tiny"
COUNT = 800
PROMPT = prompt_of(300, seed=21)


class Mixed:
    def __init__(self, folder: Path) -> None:
        gguf = twin_of(folder)
        self.reader = Process("torch", "prefill", "torch", str(folder), "--dtype", "float32")
        self.writers = [
            Process(name, "decode", "llamacpp", str(gguf), "--kv-memory", "32M") for name in ("llama-1", "llama-2")
        ]
        self.ollamas = [RecordedOllama(), RecordedOllama()]
        self.fronts = [
            Process(f"ollama-{at}", "decode", "ollama", "smollm2", "--ollama-host", ollama.url)
            for at, ollama in enumerate(self.ollamas)
        ]
        self.processes = [self.reader, *self.writers, *self.fronts]

    @property
    def config(self) -> dict[str, Any]:
        config = config_of(*self.processes, poll_s=0.2)
        for entry in (*config["prefill_servers"], *config["decode_servers"]):
            if not entry["name"].startswith("ollama"):
                entry["model"] = TINY
        return config

    def ollamas_well(self) -> None:
        for ollama in self.ollamas:
            ollama.fault = ""

    def end(self) -> None:
        for process in self.processes:
            process.end()
        for ollama in self.ollamas:
            ollama.end()


@pytest.fixture
def mixed(tiny_folder: Any) -> Iterator[Mixed]:
    mixed = Mixed(tiny_folder("twin_llama"))
    try:
        for process in mixed.processes:
            process.ready()
        yield mixed
    finally:
        mixed.end()


@pytest.fixture
def client(mixed: Mixed) -> Iterator[DisaggregatedClient]:
    with DisaggregatedClient(mixed.config) as client:
        assert until(lambda: all(node["usable"] for node in client.health()["nodes"].values()), LONG_S)
        yield client


@pytest.fixture
def expected(tiny_engine: LoadTiny) -> list[int]:
    return alone(tiny_engine("llamacpp", "twin_llama"), PROMPT, COUNT)


def ask_tiny(client: DisaggregatedClient, kill: list[Process] | None = None) -> tuple[list[int], dict[str, Any]]:
    """`kill`: the one of them that writes it, when it has written twenty tokens."""
    tokens: list[int] = []
    metrics: dict[str, Any] = {}
    ask: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    for delta in client.stream(model=TINY, tokens=PROMPT, **ask):
        tokens += [] if delta.token is None else [delta.token]
        metrics = delta.metrics or metrics
        if kill and len(tokens) == 20:
            next(node for node in kill if node.status()["waiting"]).kill()
            kill = None
    return tokens, metrics


def test_both_models_at_once(client: DisaggregatedClient, expected: list[int]) -> None:
    with ThreadPoolExecutor(6) as pool:
        handed = [pool.submit(ask_tiny, client) for _ in range(3)]
        whole = [pool.submit(client.generate, model="smollm2", prompt="7", max_tokens=4) for _ in range(3)]
    for tokens, metrics in (each.result() for each in handed):
        assert tokens == expected
        assert (metrics["method"], metrics["prefill_node"]) == ("disaggregated_llamacpp", "torch")
        assert metrics["prompt_tokens_recomputed"] == 0
        assert "it names its model" in metrics["warning"], "a GGUF file under another name"
    for text, metrics in (each.result() for each in whole):
        assert (text, metrics["method"], metrics["warning"]) == (" 8 9 10 11", "local", None)


def test_each_model_fails_over_among_its_own(mixed: Mixed, client: DisaggregatedClient, expected: list[int]) -> None:
    for ollama in mixed.ollamas:
        ollama.fault, ollama.fault_after = "die", 2
        ollama.on_fault = mixed.ollamas_well
    with ThreadPoolExecutor(2) as pool:
        handed = pool.submit(ask_tiny, client, mixed.writers)
        whole = pool.submit(client.generate, model="smollm2", prompt="0", max_tokens=6)
    tokens, metrics = handed.result()
    dead = [writer.name for writer in mixed.writers if not writer.alive]
    assert len(dead) == 1
    assert tokens == expected
    assert dead[0] in [failover["node"] for failover in metrics["failovers"]]
    text, metrics = whole.result()
    assert (text, metrics["warning"], metrics["attempts"]) == (" 1 2 3 4 5 6", CONTINUED_WARNING, 2)

    mixed.reader.kill()
    tokens, metrics = ask_tiny(client)
    assert (tokens, metrics["warning"]) == (expected, FALLBACK_WARNING)
    assert metrics["decode_node"] not in dead
    for writer in mixed.writers:
        writer.kill()
    assert client.health()["verdict"] == "tiny: nothing is up; smollm2: all up"
