"""The engines that the tests run, and with which options."""

import os
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from disaggregated_inference.engines import Engine

# On a CUDA machine without MLX: DISAGG_TEST_ENGINES=torch DISAGG_TEST_DEVICE=cuda pytest
DEVICE = os.environ.get("DISAGG_TEST_DEVICE", "cpu")
_OPTIONS: dict[str, dict[str, Any]] = {
    "torch": {"device": DEVICE, "dtype": "float32", "threads": 1, "kv_bytes": 1 << 30},
    "mlx": {"dtype": "float32"},
}
ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    name: _OPTIONS[name] for name in os.environ.get("DISAGG_TEST_ENGINES", "torch,mlx").split(",")
}
# llama.cpp always computes attention in half precision, so it has tiny models of its own, as GGUF files: see
# tests/support/gguf_twins.py.
LLAMACPP_OPTIONS: dict[str, Any] = {"threads": 1, "kv_bytes": 16 << 20}
LLAMACPP = ("llamacpp",) if find_spec("xllamacpp") or find_spec("llama_cpp") else ()

LoadTiny = Callable[[str, str], Engine]


@lru_cache
def twin_of(folder: Path) -> Path:
    """The same weights as a GGUF, beside the folder's own files."""
    from tests.support.gguf_twins import write_twin

    return write_twin(folder, folder / "model.gguf")
