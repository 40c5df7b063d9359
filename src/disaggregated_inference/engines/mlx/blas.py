"""A real BLAS for MLX on Linux. Must run before `mlx.core` is imported.

The Linux wheel of MLX carries the reference BLAS, 60 times slower than a tuned one. Symbols of a library opened
globally are found first, so opening one that has `sgemm_` replaces it. torch's BLAS is used if torch is installed: a
second BLAS in one process makes torch fifteen times slower.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path

# What sets the number of threads at run time: of OpenBLAS, MKL, torch's MKL (which exports only this name), and BLIS.
_SET_THREADS = (
    "openblas_set_num_threads",
    "MKL_Set_Num_Threads",
    "mkl_serv_set_num_threads",
    "bli_thread_set_num_threads",
)
_SYSTEM_LIBRARIES = ("libopenblas.so.0", "libopenblas.so", "libblis.so.4", "libmkl_rt.so.2")


_loaded: list[ctypes.CDLL] = []


def set_blas_threads(count: int) -> None:
    """For all threads of the process: MLX computes in its own. Without effect on a BLAS that has no such function."""
    functions = (getattr(library, name) for library in _loaded for name in _SET_THREADS if hasattr(library, name))
    for function in functions:
        function(ctypes.c_long(count))  # an int in some of them


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
            _loaded[:] = [library]
            return Path(candidate).name
    return None


def _torch_library() -> list[str]:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    path = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    return [str(path)] if path.is_file() else []
