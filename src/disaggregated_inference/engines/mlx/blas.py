"""A real BLAS for MLX on Linux. Must run before `mlx.core` is imported.

The Linux wheel of MLX carries the reference BLAS, 60 times slower than a tuned one. Symbols of a library opened
globally are found first, so opening one that has `sgemm_` replaces it. torch's BLAS is used if torch is installed: a
second BLAS in one process makes torch fifteen times slower.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path

_SYSTEM_LIBRARIES = ("libopenblas.so.0", "libopenblas.so", "libblis.so.4", "libmkl_rt.so.2")


def load_blas() -> str | None:
    """The name of the BLAS that MLX will use, or None if only the slow reference BLAS is available."""
    if sys.platform != "linux":
        return "Accelerate"
    for candidate in (*_torch_library(), *_SYSTEM_LIBRARIES):
        try:
            library = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if hasattr(library, "sgemm_"):
            return Path(candidate).name
    return None


def _torch_library() -> list[str]:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    path = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    return [str(path)] if path.is_file() else []
