"""Format, quantization, parameters and size of stored weights."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from disaggregated_inference.models import ModelFiles, ModelStore, WeightStorage, storage_of
from tests.support.gguf_twins import write_twin

PARAMETERS = 134515008  # of SmolLM2-135M, as Ollama counts them too


@pytest.fixture
def tiny(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("qwen3")


def configured(folder: Path, source: Path, tensors: dict[str, Any], **config: Any) -> ModelFiles:
    """Another folder, with these tensors and the config of `source`."""
    save_file(tensors, folder / "model.safetensors")
    known = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    return ModelFiles("other", folder)


def test_the_embedded_model_as_a_folder_and_as_a_gguf() -> None:
    folder, file = ModelStore().resolve("smollm2"), ModelStore().resolve("smollm2", kind="gguf")
    assert storage_of(folder) == WeightStorage("safetensors", "F32", PARAMETERS, folder.size_bytes)
    assert storage_of(file) == WeightStorage("gguf", "Q4_1", PARAMETERS, file.path.stat().st_size)


def test_a_gguf_that_does_not_name_its_type(tiny: Path, tmp_path: Path) -> None:
    stored = storage_of(ModelFiles("twin", write_twin(tiny, tmp_path / "twin.gguf")))
    assert (stored.format, stored.quantization) == ("gguf", "F32")
    assert stored.parameters == storage_of(ModelFiles("tiny", tiny)).parameters


def test_mlx_packs_parameters(tiny: Path, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    settings: dict[str, Any] = {"group_size": 32, "bits": 4, "lm_head": {"group_size": 32, "bits": 8}}
    packed: dict[str, Any] = {}
    original = load_file(next(tiny.glob("*.safetensors")))
    for name, values in original.items():
        path = name.removesuffix(".weight")
        if values.ndim == 2:
            bits = settings.get(path, settings)["bits"]
            parts = mx.quantize(mx.array(values.astype(np.float32)), group_size=32, bits=bits)
            packed |= {
                f"{path}.{part}": np.array(each)
                for part, each in zip(("weight", "scales", "biases"), parts, strict=True)
            }
        else:
            packed[name] = values
    stored = storage_of(configured(tmp_path, tiny, packed, quantization=settings))
    assert stored.parameters == sum(math.prod(values.shape) for values in original.values())
    assert (stored.format, stored.quantization) == ("safetensors", "4-bit")
    assert 0 < stored.size_bytes < next(tiny.glob("*.safetensors")).stat().st_size


def test_quantizations_with_a_name(tiny: Path, tmp_path: Path) -> None:
    tensors = {"x.weight": np.zeros((8, 16), np.uint8), "x.weight_scale_inv": np.zeros((1, 1), np.float32)}
    fp8 = configured(tmp_path, tiny, tensors, quantization_config={"quant_method": "fp8"})
    assert storage_of(fp8)[:3] == ("safetensors", "FP8", 8 * 16)
    tensors = {"e.down_proj_blocks": np.zeros((2, 4, 2, 16), np.uint8), "e.down_proj_scales": np.zeros(16, np.uint8)}
    mxfp4 = configured(tmp_path, tiny, tensors, quantization_config={"quant_method": "mxfp4"})
    assert storage_of(mxfp4)[:3] == ("safetensors", "MXFP4", 2 * 4 * 2 * 32)
    mlx = configured(tmp_path, tiny, tensors, quantization={"mode": "mxfp4", "bits": 4})
    assert storage_of(mlx).quantization == "MXFP4"


def test_what_cannot_be_read_is_unknown(tiny: Path, tmp_path: Path) -> None:
    """The engine may have it in memory all the same."""
    assert storage_of(ModelStore().resolve("simulated:tiny")) == WeightStorage("simulated")
    model = configured(tmp_path, tiny, {"x.weight": np.zeros(4, np.float32)})
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert storage_of(model) == WeightStorage()
