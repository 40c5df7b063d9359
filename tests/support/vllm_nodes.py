"""A prefill node over a real vLLM, and decode nodes of other engines for it, in this process, over real sockets."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from disaggregated_inference.api import GenerationParams
from disaggregated_inference.engines import load_engine
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node import DecodeNode, Generation, KVMemory, Scheduler
from disaggregated_inference.vllm_node.attach import VllmPrefillNode, open_vllm_prefill
from disaggregated_inference.vllm_node.connector_server import ConnectorServer
from disaggregated_inference.vllm_node.prefill_requests import Completions
from disaggregated_inference.vllm_node.staging import Staging
from tests.support.engines import ENGINE_OPTIONS, LLAMACPP_OPTIONS, twin_of
from tests.support.handoff import alone
from tests.support.node_pair import ONE_PROCESS
from tests.support.vllm_server import START_S, VllmForker, VllmServer

STAGING_BYTES = 64 << 20
CHUNK = 77  # divides no length of a prompt, and no block
LIMITS = ("--max-model-len", "2048", "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "16")


@dataclass
class VllmHome:
    """A vLLM and the prefill node over it. The node outlives its vLLM."""

    model: ModelFiles
    server: VllmServer
    border: ConnectorServer
    node: VllmPrefillNode

    def restart(self) -> None:
        self.server.start()
        self.server.wait_until_ready()
        self.border.wait_attached(START_S, self.server.why_stopped)

    def close(self) -> None:
        kv_memory = self.node.kv_memory
        self.node.close()
        kv_memory.scheduler.stop()
        kv_memory.close_all()
        self.server.kill()
        assert kv_memory.faults == 0


def open_home(
    forker: VllmForker,
    model: ModelFiles,
    folder: Path,
    *arguments: str,
    staging_bytes: int = STAGING_BYTES,
    lease_s: float = 60.0,
) -> VllmHome:
    if model.name == "gpt_oss" and not forker.computes_gpt_oss:
        pytest.skip("before 0.31, vLLM on the CPU computes gpt_oss in no float32")
    folder.mkdir(parents=True, exist_ok=True)
    staging = Staging(staging_bytes)
    border = ConnectorServer(folder / "border.sock", model.spec, staging)
    server = VllmServer(forker, model, border.path, folder / "vllm.log", *(arguments or LIMITS))
    try:
        server.wait_until_ready()
        node = open_vllm_prefill(
            model,
            border,
            staging,
            Completions(lambda: server.address, lambda: str(model.path)),
            attach_s=START_S,
            stopped=server.why_stopped,
            lease_s=lease_s,
        )
    except BaseException:
        server.kill()
        border.close()
        raise
    return VllmHome(model, server, border, node)


class DecodeNodes:
    """Decode nodes for one model, by engine, made when they are asked for."""

    def __init__(self, model: ModelFiles) -> None:
        self._model = model
        self._made: dict[str, DecodeNode] = {}

    def __getitem__(self, engine: str) -> DecodeNode:
        if engine not in self._made:
            self._made[engine] = self._make(engine)
        return self._made[engine]

    def _make(self, engine: str) -> DecodeNode:
        model, options = self._model, ENGINE_OPTIONS.get(engine, {})
        if engine == "llamacpp":
            model, options = ModelFiles("twin", twin_of(model.path)), LLAMACPP_OPTIONS
        kv_memory = KVMemory(Scheduler(partial(load_engine, engine, model, **options)), prefix_bytes=0)
        return DecodeNode(kv_memory, model.tokenizer, 50, codecs=("raw",), timeouts=ONE_PROCESS)

    def close(self) -> None:
        for node in self._made.values():
            node.close()
            node.kv_memory.scheduler.stop()
            node.kv_memory.close_all()
            assert node.kv_memory.faults == 0


def hand_over(home: VllmHome, decode: DecodeNode, prompt: list[int], count: int) -> Generation:
    """A running generation; iterate for its tokens."""
    context, _ = home.node.submit(prompt)
    return decode.generate_from_kv(context, GenerationParams(max_tokens=count))


def expected(decode: DecodeNode, prompt: list[int], count: int) -> list[int]:
    """What the decode node's engine answers alone. Its counter of prompt tokens is put back."""

    def compute() -> list[int]:
        before = decode.engine.counters.prompt_tokens
        tokens = alone(decode.engine, prompt, count)
        decode.engine.counters.prompt_tokens = before
        return tokens

    return decode.scheduler.call(compute)
