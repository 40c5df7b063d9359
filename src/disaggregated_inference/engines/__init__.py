"""Engines by name. An engine's libraries are imported when it is loaded, never before."""

import importlib
import importlib.util
from typing import Any

from disaggregated_inference.engines.base import Engine, Logits, Tokens, chunks
from disaggregated_inference.engines.memory import available_bytes
from disaggregated_inference.engines.row_allocator import RowAllocator
from disaggregated_inference.engines.scoring import Scoring, chunk_scoring
from disaggregated_inference.engines.sequence import Sequence
from disaggregated_inference.engines.versions import EnginePackage, engine_packages
from disaggregated_inference.errors import DisaggError, EngineUnavailable, ModelDamaged, ModelUnsupported
from disaggregated_inference.models import ENGINE_FILES, SIMULATED_MODELS, FileKind, ModelFiles

# Engine names, and the packages that each needs.
ENGINES: dict[str, tuple[str, ...]] = {
    "torch": ("torch", "transformers"),
    "mlx": ("mlx", "mlx_lm"),
    "llamacpp": ("xllamacpp or llama_cpp",),
    "simulated": (),
}


def load_engine(name: str, model: ModelFiles, **options: Any) -> Engine:
    """Load `model` into the engine `name`; `options` are engine-specific (device, dtype, ...)."""
    require_engine(name)
    _require_right_kind(name, model)
    module = importlib.import_module(f"disaggregated_inference.engines.{name}")
    try:
        engine: Engine = module.load(model, **options)
    except (DisaggError, MemoryError):
        raise
    except Exception as error:  # the libraries raise many different errors for a damaged file
        raise ModelDamaged(f"{name} cannot load {model.path}: {type(error).__name__}: {error}") from error
    return engine


def require_engine(name: str) -> None:
    """Check an engine's name and its packages before anything is loaded."""
    if name not in ENGINES:
        raise EngineUnavailable(f"unknown engine {name!r}: choose {', '.join(ENGINES)}, vllm or ollama")
    if missing := [package for package in ENGINES[name] if not any(map(_installed, package.split(" or ")))]:
        raise EngineUnavailable(
            f"engine {name!r} needs {', '.join(missing)}: pip install 'disaggregated-inference[{name}]'"
        )


def file_kind(name: str) -> FileKind:
    """The kind of model files that an engine loads."""
    return ENGINE_FILES.get(name, "safetensors")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _require_right_kind(name: str, model: ModelFiles) -> None:
    """Simulated and real models must never be confused."""
    if name == "simulated" and not model.simulated:
        raise ModelUnsupported(
            f"{model.name} needs a real engine: the simulated engine serves only {', '.join(SIMULATED_MODELS)}"
        )
    if name != "simulated" and model.simulated:
        raise ModelUnsupported(f"{model.name} has no weights: only the simulated engine can serve it, not {name}")
    if ENGINE_FILES.get(name, model.kind) != model.kind:
        kinds = {"gguf": "a GGUF file", "safetensors": "a folder of safetensors"}
        raise ModelUnsupported(
            f"{model.path} is {kinds[model.kind]}, and {name} loads {kinds[ENGINE_FILES[name]]}:"
            f" use --engine {' or '.join(model.engines)}"
        )
    if name not in model.engines:
        others = f"; {' or '.join(model.engines)} can" if model.engines else ""
        hint = ": pip install accelerate" if name == "torch" and model.quantization != "mlx" else ""
        raise ModelUnsupported(
            f"{name} cannot load {model.path} here, which is quantized as {model.quantization}{hint}{others}"
        )


__all__ = [
    "ENGINES",
    "Engine",
    "EnginePackage",
    "Logits",
    "RowAllocator",
    "Scoring",
    "Sequence",
    "Tokens",
    "available_bytes",
    "chunk_scoring",
    "chunks",
    "engine_packages",
    "file_kind",
    "load_engine",
    "require_engine",
]
