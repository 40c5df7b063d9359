"""vLLM itself takes the arguments that a node gives it, also those of a GPU that this machine does not have."""

import json
from pathlib import Path

import pytest

from disaggregated_inference.vllm_node.arguments import EngineOptions, serve_arguments
from disaggregated_inference.vllm_node.versions import VllmBuild
from tests.support import vllm_parser
from tests.support.vllm_server import VllmForker

pytestmark = pytest.mark.slow


def test_vllm_takes_all_arguments(vllm_forker: VllmForker, tmp_path: Path) -> None:
    kv_transfer = {"kv_connector": "DisaggConnector", "kv_role": "kv_producer", "kv_connector_module_path": "m"}
    options = {"model": "/m", "name": "m", "socket": "/s", "kv_transfer": kv_transfer, "logits_processors": ("a:B",)}
    prefill = EngineOptions(**options, more="--tensor-parallel-size 2 --max_num_batched_tokens=2048")  # type: ignore[arg-type]
    both, cpu = EngineOptions(**options, role="both"), EngineOptions(**options, dtype="float32")  # type: ignore[arg-type]
    cuda = VllmBuild(version="0.32.0")
    asked = [serve_arguments(prefill, cuda), serve_arguments(both, cuda)]
    asked.append(serve_arguments(cpu, VllmBuild(version="0.32.0", is_cpu=True)))
    told = vllm_forker.run(vllm_parser.__file__, json.dumps(asked), log=tmp_path / "log")
    assert "FOUND" in told, told[-3000:]
    first, second, third = json.loads(told.partition("FOUND")[2].partition("\n")[0])
    assert (first["model"], first["connector"], first["processors"]) == ("/m", "DisaggConnector", ["a:B"])
    assert first["uds"] == "/s"
    assert (first["batched"], first["tensor_parallel"], first["eager"]) == (2048, 2, False)
    assert "PIECEWISE" in first["mode"]
    assert {64, 768, 1536} <= set(first["sizes"])
    assert "PIECEWISE" not in second["mode"] or "FULL" in second["mode"]
    assert (second["batched"], third["eager"], third["sizes"]) == (8192, True, [])
