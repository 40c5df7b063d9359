"""Engines by name. Their libraries are imported when an engine is loaded, never before."""

import importlib
import importlib.util
from typing import Any

from disaggregated_inference.engines.base import Engine, Logits, Sequence, Tokens, chunks
from disaggregated_inference.errors import DisaggError, EngineUnavailable, ModelDamaged, ModelUnsupported
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.models.simulated import NAMES as SIMULATED_MODELS
from disaggregated_inference.models.store import READS, FileKind

# And the packages that each needs.
ENGINES: dict[str, tuple[str, ...]] = {
    "torch": ("torch", "transformers"),
    "mlx": ("mlx", "mlx_lm"),
    "llamacpp": ("xllamacpp or llama_cpp",),
    "simulated": (),
}


def load_engine(name: str, model: ModelFiles, **options: Any) -> Engine:
    """Load `model` into the engine called `name`; `options` are the engine's own (device, dtype, ...)."""
    require_engine(name)
    _require_right_kind(name, model)
    module = importlib.import_module(f"disaggregated_inference.engines.{name}")
    try:
        engine: Engine = module.load(model, **options)
    except (DisaggError, MemoryError):
        raise
    except Exception as error:  # the libraries' own words for a bad file are many
        raise ModelDamaged(f"{name} cannot load {model.path}: {type(error).__name__}: {error}") from error
    return engine


def require_engine(name: str) -> None:
    """Say what is wrong with an engine's name before anything is loaded."""
    if name not in ENGINES:
        raise EngineUnavailable(
            f"no engine {name!r}; there are {', '.join(ENGINES)}, and ollama for a node in front of one"
        )
    if missing := [package for package in ENGINES[name] if not any(map(_installed, package.split(" or ")))]:
        raise EngineUnavailable(
            f"engine {name!r} needs {', '.join(missing)}: pip install 'disaggregated-inference[{name}]'"
        )


def file_kind(name: str) -> FileKind:
    """The files that an engine reads, for whoever looks for a model that exists in both kinds."""
    return READS.get(name, "safetensors")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _require_right_kind(name: str, model: ModelFiles) -> None:
    """What is simulated and what is not must never be taken for each other."""
    if name == "simulated" and not model.simulated:
        raise ModelUnsupported(
            f"the simulated engine computes nothing and has models of its own ({', '.join(SIMULATED_MODELS)});"
            f" {model.name} needs a real engine"
        )
    if name != "simulated" and model.simulated:
        raise ModelUnsupported(f"{model.name} has no weights: it is for the simulated engine alone, not for {name}")
    if READS.get(name, model.kind) != model.kind:
        kinds = {"gguf": "a GGUF file", "safetensors": "a folder of safetensors"}
        raise ModelUnsupported(
            f"{model.path} is {kinds[model.kind]} and {name} reads {kinds[READS[name]]}:"
            f" give it one, or load this with {' or '.join(model.engines)}"
        )
    if name not in model.engines:
        others = f"; {' or '.join(model.engines)} can" if model.engines else ""
        hint = ": pip install accelerate" if name == "torch" and model.quantization != "mlx" else ""
        raise ModelUnsupported(
            f"{name} cannot load {model.path} here, which is quantized as {model.quantization}{hint}{others}"
        )


__all__ = ["ENGINES", "Engine", "Logits", "Sequence", "Tokens", "chunks", "file_kind", "load_engine", "require_engine"]
