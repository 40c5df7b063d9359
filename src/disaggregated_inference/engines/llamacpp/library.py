"""The part of llama.cpp's C API that the engine calls, from the library in the user's Python package.

Its structures change between builds, and a field that moved would silently be read as another one. So only builds with
known structures are accepted: those of `xllamacpp` (prebuilt for most machines) are defined here, those of
`llama-cpp-python` come with that package. A build is added after the tests have passed on it.
"""

import ctypes
import logging
import os
from collections import deque
from contextlib import suppress
from ctypes import c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from disaggregated_inference.errors import EngineUnavailable

log = logging.getLogger(__name__)

TESTED_VERSIONS = {"xllamacpp": ("2026.10.11549",), "llama-cpp-python": ("0.3.36",)}

# The library's own symbols first: torch, opened globally for its BLAS, has C++ symbols with the same names.
_MODE = getattr(os, "RTLD_DEEPBIND", 0) | ctypes.DEFAULT_MODE
_ERROR_LEVEL = 4
_AUTO_FLASH, _F16 = -1, 1


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class LlamaBatch(ctypes.Structure):
    """Tokens for one call; the same in all supported builds."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", ctypes.POINTER(c_int32)),
        ("embd", ctypes.POINTER(c_float)),
        ("pos", ctypes.POINTER(c_int32)),
        ("n_seq_id", ctypes.POINTER(c_int32)),
        ("seq_id", ctypes.POINTER(c_void_p)),
        ("logits", ctypes.POINTER(c_int8)),
    )


class ModelParams(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "devices tensor_buft_overrides"),
        *_fields(c_int32, "n_gpu_layers split_mode load_mode lazy_mode main_gpu"),
        *_fields(c_void_p, "tensor_split progress_callback progress_callback_user_data kv_overrides"),
        *_fields(c_bool, "vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp"),
    )


class ContextParams(ctypes.Structure):
    _fields_ = (
        *_fields(c_uint32, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq"),
        *_fields(c_int32, "n_threads n_threads_batch ctx_type rope_scaling_type pooling_type attention_type"),
        *_fields(c_int32, "flash_attn_type"),
        *_fields(c_float, "rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor"),
        *_fields(c_float, "yarn_beta_fast yarn_beta_slow"),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        *_fields(c_void_p, "cb_eval cb_eval_user_data"),
        *_fields(c_int32, "type_k type_v"),
        ("moe_cache_size", c_size_t),
        *_fields(c_void_p, "abort_callback abort_callback_data"),
        *_fields(c_bool, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


# Name, result, arguments. Pointers to llama.cpp's objects are opaque.
_FUNCTIONS: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("llama_backend_init", None, ()),
    ("llama_supports_gpu_offload", c_bool, ()),
    ("llama_set_n_threads", None, (c_void_p, c_int32, c_int32)),
    ("llama_log_set", None, (c_void_p, c_void_p)),
    ("llama_model_free", None, (c_void_p,)),
    ("llama_free", None, (c_void_p,)),
    ("llama_model_get_vocab", c_void_p, (c_void_p,)),
    ("llama_vocab_n_tokens", c_int32, (c_void_p,)),
    ("llama_model_n_layer", c_int32, (c_void_p,)),
    ("llama_model_n_head_kv", c_int32, (c_void_p,)),
    ("llama_model_n_swa", c_int32, (c_void_p,)),
    ("llama_n_ctx", c_uint32, (c_void_p,)),
    ("llama_n_seq_max", c_uint32, (c_void_p,)),
    ("llama_decode", c_int32, (c_void_p, LlamaBatch)),
    ("llama_get_logits", ctypes.POINTER(c_float), (c_void_p,)),
    ("llama_get_memory", c_void_p, (c_void_p,)),
    ("llama_memory_seq_rm", c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    ("llama_memory_seq_cp", None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    ("llama_memory_seq_pos_max", c_int32, (c_void_p, c_int32)),
    ("llama_state_seq_get_size", c_size_t, (c_void_p, c_int32)),
    ("llama_state_seq_get_data", c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
    ("llama_state_seq_set_data", c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
)


@dataclass(frozen=True, slots=True)
class Library:
    """The functions, by their C names in `call`."""

    name: str  # package and version
    call: Any
    model_params: Any
    context_params: Any

    def default_model_params(self) -> Any:
        return self.call.llama_model_default_params()

    def default_context_params(self) -> Any:
        return self.call.llama_context_default_params()


class LogCapture:
    """Receives llama.cpp's log messages. Keeps the last errors, because failed calls return no reason."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=8)
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
        self.callback = kind(self._receive)  # kept for the life of the process: any llama.cpp thread may call

    def _receive(self, level: int, text: bytes, _: Any) -> None:
        message = text.decode("utf-8", "replace").strip()
        if level == _ERROR_LEVEL:
            self.errors.append(message)
        if message:
            log.debug("llama.cpp: %s", message)

    def take(self) -> str:
        """The errors since the last call of this method."""
        errors = "; ".join(self.errors)
        self.errors.clear()
        return errors or "llama.cpp gives no reason"


log_capture = LogCapture()


@cache
def load_library() -> Library:
    """Once per process."""
    package, build = _installed()
    require_tested(package, build)
    path, params = _xllamacpp() if package == "xllamacpp" else _llama_cpp_python()
    library = bind(path, f"{package} {build}", *params)
    library.call.llama_log_set(ctypes.cast(log_capture.callback, c_void_p), None)
    library.call.llama_backend_init()
    return library


def require_tested(package: str, build: str) -> None:
    if build not in TESTED_VERSIONS[package]:
        known = TESTED_VERSIONS[package]
        raise EngineUnavailable(
            f"{package} {build} has not been tested: its structures may differ. "
            f"Tested: {', '.join(known)}; run: pip install {package}=={known[-1]}"
        )


def bind(path: Path, name: str, model_params: Any, context_params: Any) -> Library:
    """A separate ctypes library: another binding's declarations in this process stay unchanged."""
    call = ctypes.CDLL(str(path), mode=_MODE)
    defaults = (
        ("llama_model_default_params", model_params, ()),
        ("llama_context_default_params", context_params, ()),
        ("llama_model_load_from_file", c_void_p, (c_char_p, model_params)),
        ("llama_init_from_model", c_void_p, (c_void_p, context_params)),
    )
    for function, result, arguments in (*_FUNCTIONS, *defaults):
        try:
            found = getattr(call, function)
        except AttributeError as error:
            raise EngineUnavailable(f"{name} has no {function}: unknown llama.cpp build") from error
        found.restype, found.argtypes = result, arguments
    library = Library(name, call, model_params, context_params)
    _require_known_structures(library)
    return library


def _require_known_structures(library: Library) -> None:
    """Check a few default values, far apart in the structure."""
    found = library.default_context_params()
    values = (found.n_ctx, found.flash_attn_type, found.yarn_beta_slow, found.type_k, found.type_v)
    if values != (512, _AUTO_FLASH, -1.0, _F16, _F16) or (found.embeddings, found.offload_kqv) != (False, True):
        raise EngineUnavailable(f"{library.name}: llama.cpp's parameter structures have another layout: {values}")


def _installed() -> tuple[str, str]:
    """Package and build; a tested one if possible."""
    found: list[tuple[str, str]] = []
    for package in TESTED_VERSIONS:
        with suppress(PackageNotFoundError):
            found.append((package, version(package).partition("+")[0]))  # +cu124: the same sources, built for CUDA
    if not found:
        raise EngineUnavailable(
            "llama.cpp is not installed: pip install 'disaggregated-inference[llamacpp]', or llama-cpp-python"
        )
    return next((each for each in found if each[1] in TESTED_VERSIONS[each[0]]), found[0])


def _xllamacpp() -> tuple[Path, tuple[Any, Any]]:
    """Its extension module contains llama.cpp, and need not be imported."""
    spec = find_spec("xllamacpp")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("xllamacpp*.so")):
            return path, (ModelParams, ContextParams)
    raise EngineUnavailable("xllamacpp is installed without its library: install it again")


def _llama_cpp_python() -> tuple[Path, tuple[Any, Any]]:
    from llama_cpp import llama_cpp as bound

    return Path(bound._lib._name), (bound.llama_model_params, bound.llama_context_params)
