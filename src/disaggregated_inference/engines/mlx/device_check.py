"""Whether MLX computes on Metal, and how fast. The doctor runs this file as a program.

Prints one line of JSON. The matrix units of M5 chips multiply 16-bit numbers and not, with TF32 off, 32-bit ones: the
ratio of the two rates shows whether they are in use.
"""

import json
import os
import time

from disaggregated_inference.engines.mlx.blas import load_blas

_SIZE, _SECONDS = 4096, 0.5


def check() -> dict[str, object]:
    os.environ["MLX_ENABLE_TF32"] = "0"
    load_blas()
    import mlx.core as mx

    if not mx.metal.is_available():
        return {"device": "cpu"}
    name = mx.device_info().get("device_name", "Apple GPU")
    rates = {"tflops": _multiply(mx, mx.bfloat16), "tflops_float32": _multiply(mx, mx.float32)}
    return {"device": "metal", "name": str(name), **rates}


def _multiply(mx: object, dtype: object) -> float:
    left = mx.random.normal((_SIZE, _SIZE)).astype(dtype)  # type: ignore[attr-defined]
    mx.eval(left @ left)  # type: ignore[attr-defined]
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        mx.eval([left @ left for _ in range(4)])  # type: ignore[attr-defined]
        rounds += 4
    return 2 * _SIZE**3 * rounds / (time.perf_counter() - began) / 1e12


if __name__ == "__main__":
    print(json.dumps(check()))
