"""vLLM itself takes the arguments that a node gives it, also those of a GPU that this machine does not have."""

import json
import os
import subprocess

import pytest

from disaggregated_inference.vllm_node.arguments import EngineOptions, serve_arguments
from disaggregated_inference.vllm_node.versions import VllmBuild
from tests.support.vllm_server import NO_VLLM, vllm_python

pytestmark = pytest.mark.slow
# vLLM's own parser of `vllm serve`, and what it makes of the arguments.
_PARSE = """
import json, sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
found = []
for arguments in json.load(sys.stdin):
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    graphs = parsed.compilation_config
    found.append({
        "model": parsed.model_tag,
        "uds": parsed.uds,
        "connector": parsed.kv_transfer_config.kv_connector,
        "processors": parsed.logits_processors,
        "batched": parsed.max_num_batched_tokens,
        "mode": str(getattr(graphs, "cudagraph_mode", "")),
        "sizes": list(getattr(graphs, "cudagraph_capture_sizes", None) or []),
        "eager": parsed.enforce_eager,
        "tensor_parallel": parsed.tensor_parallel_size,
    })
print("FOUND" + json.dumps(found))
"""


def test_vllm_takes_all_arguments() -> None:
    if not (python := vllm_python()):
        pytest.skip(NO_VLLM)
    kv_transfer = {"kv_connector": "DisaggConnector", "kv_role": "kv_producer", "kv_connector_module_path": "m"}
    options = {"model": "/m", "name": "m", "socket": "/s", "kv_transfer": kv_transfer, "logits_processors": ("a:B",)}
    prefill = EngineOptions(**options, more="--tensor-parallel-size 2 --max_num_batched_tokens=2048")  # type: ignore[arg-type]
    both, cpu = EngineOptions(**options, role="both"), EngineOptions(**options, dtype="float32")  # type: ignore[arg-type]
    cuda = VllmBuild(version="0.32.0")
    asked = [serve_arguments(prefill, cuda), serve_arguments(both, cuda)]
    asked.append(serve_arguments(cpu, VllmBuild(version="0.32.0", is_cpu=True)))
    bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(python), "-c", _PARSE],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=bare | {"VLLM_TARGET_DEVICE": "cpu"},
        timeout=400,
        check=False,
    )
    assert "FOUND" in done.stdout, done.stderr[-3000:]
    first, second, third = json.loads(done.stdout.partition("FOUND")[2])
    assert (first["model"], first["connector"], first["processors"]) == ("/m", "DisaggConnector", ["a:B"])
    assert first["uds"] == "/s"
    assert (first["batched"], first["tensor_parallel"], first["eager"]) == (2048, 2, False)
    assert "PIECEWISE" in first["mode"]
    assert {64, 768, 1536} <= set(first["sizes"])
    assert "PIECEWISE" not in second["mode"] or "FULL" in second["mode"]
    assert (second["batched"], third["eager"], third["sizes"]) == (8192, True, [])
