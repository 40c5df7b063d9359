"""vLLM's own parser of `vllm serve`, and what it makes of arguments: JSON in, JSON out. Runs in vLLM's environment."""

import importlib
import json
import sys
from contextlib import suppress
from typing import Any


def _parser() -> Any:
    """The module has moved."""
    with suppress(ImportError):
        return importlib.import_module("vllm.entrypoints.launchers.cli_args")
    return importlib.import_module("vllm.entrypoints.openai.cli_args")


def _parsed(arguments: list[str]) -> dict[str, Any]:
    module, flexible = _parser(), importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    parsed = module.make_arg_parser(flexible()).parse_args(arguments)
    module.validate_parsed_serve_args(parsed)
    graphs = parsed.compilation_config
    return {
        "model": parsed.model_tag,
        "uds": parsed.uds,
        "connector": parsed.kv_transfer_config.kv_connector,
        "processors": parsed.logits_processors,
        "batched": parsed.max_num_batched_tokens,
        "mode": str(getattr(graphs, "cudagraph_mode", "")),
        "sizes": list(getattr(graphs, "cudagraph_capture_sizes", None) or []),
        "eager": parsed.enforce_eager,
        "tensor_parallel": parsed.tensor_parallel_size,
    }


if __name__ == "__main__":
    print("FOUND" + json.dumps([_parsed(arguments) for arguments in json.loads(sys.argv[1])]), flush=True)
