"""Codecs turn a slice's rows into payload: `raw` sends the arrays' memory, `int8` halves bfloat16 for slow links."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import ProtocolError
from disaggregated_inference.kv import Array, KVDType, KVLayout, KVSlice, as_dtype, storage_dtype

CODECS = {"raw": 0, "int8": 1}
NAMES = {number: name for name, number in CODECS.items()}


def payload_parts(codec: str, layout: KVLayout, dtype: KVDType, tokens: int) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and numpy dtype of each array in a slice's payload, in order."""
    rows = (tokens, layout.kv_heads, layout.head_dim)
    if codec == "raw":
        return [(rows, storage_dtype(dtype))] * 2
    return [(rows[:2], np.dtype(np.float32)), (rows, np.dtype(np.int8))] * 2


def payload_bytes(codec: str, layout: KVLayout, dtype: KVDType, tokens: int) -> int:
    parts = payload_parts(codec, layout, dtype, tokens)
    return sum(int(np.prod(shape, dtype=np.int64)) * kind.itemsize for shape, kind in parts)


def encode(codec: str, piece: KVSlice) -> list[Array]:
    if codec == "raw":
        return [piece.keys, piece.values]
    return [array for rows in (piece.keys, piece.values) for array in quantize(as_dtype(rows, piece.dtype, "float32"))]


def decode(codec: str, dtype: KVDType, arrays: list[Array], layer: int, start: int) -> KVSlice:
    """For `raw` a slice over the arrays themselves; for `int8` a float32 copy, which the engine rounds to its dtype."""
    if codec == "raw":
        return KVSlice(layer, start, dtype, arrays[0], arrays[1])
    keys, values = (dequantize(arrays[at], arrays[at + 1]) for at in (0, 2))
    return KVSlice(layer, start, "float32", keys, values)


def quantize(rows: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """One scale per token and head: heads differ in size by orders of magnitude, and so do tokens."""
    scales = np.abs(rows).max(axis=-1) / np.float32(127)
    steps = rows / np.where(scales == 0, np.float32(1), scales)[..., None]
    return scales.astype(np.float32), np.rint(steps).astype(np.int8)


def dequantize(scales: Array, steps: Array) -> NDArray[np.float32]:
    return np.asarray(steps.astype(np.float32) * scales[..., None], np.float32)


def codec_of(number: int) -> str:
    if number not in NAMES:
        raise ProtocolError(f"codec {number} is unknown; known: {', '.join(CODECS)}")
    return NAMES[number]
