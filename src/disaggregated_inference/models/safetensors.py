"""The safetensors file format, without torch: eight bytes of header length, a JSON header, raw tensors."""

import json
import math
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from disaggregated_inference.errors import ModelDamaged
from disaggregated_inference.kv import Array, float32_to_bfloat16

_HEADER_LIMIT_BYTES = 100 << 20


class StoredTensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def canonical(self) -> Array:
        """Values rounded to bfloat16 bits: equal for a norm stored in float32, float16 or bfloat16."""
        if self.dtype == "BF16":
            return np.frombuffer(self.data, np.uint16)
        return float32_to_bfloat16(np.frombuffer(self.data, {"F32": np.float32, "F16": np.float16}[self.dtype]))


def read_tensors(path: Path) -> Iterator[StoredTensor]:
    """Every tensor of one file, memory-mapped."""
    with path.open("rb") as file:
        size = path.stat().st_size
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(_HEADER_LIMIT_BYTES, size - 8):
            raise ModelDamaged(f"{path}: not a complete safetensors file")
        try:
            header: dict[str, Any] = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            entries = [(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelDamaged(f"{path}: its header is damaged; download the model again") from error
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    body = content[8 + header_bytes :]
    for name, dtype, shape, begin, end in entries:
        if not 0 <= begin <= end <= len(body):
            raise ModelDamaged(f"{path}: tensor {name} is truncated; download the model again")
        yield StoredTensor(name, dtype, shape, body[begin:end])


def write_tensors(path: Path, shapes: dict[str, tuple[int, ...]], load: Callable[[str], Array]) -> None:
    """Write float32 tensors to one file, with one in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in shapes:
            file.write(np.ascontiguousarray(load(name), np.float32).data)
