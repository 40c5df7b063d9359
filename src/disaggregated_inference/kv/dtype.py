"""Element types of the portable KV. numpy has no bfloat16, so its bits travel as uint16."""

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import SliceRefused

KVDType = Literal["bfloat16", "float16", "float32"]
KV_DTYPES: tuple[KVDType, ...] = get_args(KVDType)

Array = NDArray[Any]

_STORAGE: dict[KVDType, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


def storage_dtype(dtype: KVDType) -> np.dtype[Any]:
    """The numpy dtype that holds the bits of `dtype`."""
    return _STORAGE[dtype]


def require_dtype(name: str) -> KVDType:
    """Check a dtype name from outside this process."""
    for known in KV_DTYPES:
        if name == known:
            return known
    raise SliceRefused(f"KV dtype {name!r} is not one of {', '.join(KV_DTYPES)}")


def bfloat16_to_float32(bits: Array) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Array) -> NDArray[np.uint16]:
    """Round to nearest even, as torch and MLX do; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def as_dtype(values: Array, have: KVDType, want: KVDType) -> Array:
    """The values in another dtype; the array itself if the dtypes are the same."""
    if have == want:
        return values
    wide = bfloat16_to_float32(values) if have == "bfloat16" else values
    return float32_to_bfloat16(wide) if want == "bfloat16" else wide.astype(storage_dtype(want))
