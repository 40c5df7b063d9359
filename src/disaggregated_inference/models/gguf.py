"""GGUF files: a metadata reader ten times as fast as the reference one, and dequantization by the `gguf` package. That
is imported where it is used: it takes a tenth of the start of commands that read no GGUF file."""

import math
import mmap
import re
import struct
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import ModelDamaged, ModelUnsupported
from disaggregated_inference.models.gguf_metadata import require_valid_metadata

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAGIC = b"GGUF"
_MAX_PARTS = 99_999  # file names have five digits
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_LIMIT = 1 << 24  # no real model has longer keys, arrays or tensor lists

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def dequantize(raw: Bytes, type_name: str) -> Floats:
    """Values of rows of one ggml type, in float32."""
    import gguf

    try:
        values: Floats = gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    except (NotImplementedError, KeyError) as error:
        raise ModelUnsupported(f"gguf {version('gguf')} does not dequantize {type_name} weights") from error
    return values


def block_size(type_name: str) -> tuple[int, int]:
    """Values and bytes of a block of one ggml type."""
    import gguf

    values, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    return values, size_bytes


class GGUFTensor(NamedTuple):
    name: str
    type_id: int
    shape: tuple[int, ...]  # row-major, as in numpy
    begin: int
    buffer: memoryview

    @property
    def type_name(self) -> str:
        import gguf

        name: str = gguf.GGMLQuantizationType(self.type_id).name
        return name

    @property
    def size_bytes(self) -> int:
        block, block_bytes = block_size(self.type_name)
        return math.prod(self.shape) // block * block_bytes

    @property
    def data(self) -> memoryview:
        """The stored bytes."""
        return self.buffer[self.begin : self.begin + self.size_bytes]


class _Broken(Exception):
    """The file is incomplete or damaged."""


class _Cursor:
    """Reads the header; checks every length against the file's size."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer, self.at = buffer, 0

    def take(self, size: int) -> memoryview:
        if size < 0 or self.at + size > len(self.buffer):
            raise _Broken("its header exceeds the file")
        self.at += size
        return self.buffer[self.at - size : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self) -> int:
        n = int(self.scalar("Q"))
        if n > _LIMIT:
            raise _Broken(f"its header claims {n} entries")
        return n

    def string(self) -> str:
        return bytes(self.take(self.count())).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner = self.scalar("I")
            if inner == _ARRAY:
                raise _Broken("its header has arrays of arrays")
            return self.array(inner, self.count())
        if kind not in _SCALARS:
            raise _Broken(f"its header has a value of type {kind}, which is unknown")
        return self.scalar(_SCALARS[kind])

    def array(self, kind: int, n: int) -> list[Any]:
        if kind in _SCALARS:
            code = f"<{n}{_SCALARS[kind]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code))))
        return [self.value(kind) for _ in range(n)]


def is_gguf(path: Path) -> bool:
    """By its first bytes, not by its name."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


class GGUFFile:
    """A memory-mapped GGUF file: `metadata`, `tensors`, and `load(name)` as float32. For a model in several files it is
    the first of them, with the tensors of all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self.tensors = _read(path)
        require_valid_metadata(path, self.metadata)
        self.parts = _parts(path, self.metadata)
        for number, part in enumerate(self.parts[1:], 1):
            metadata, tensors = _read(part)
            _require_part(part, metadata, number, len(self.parts))
            if twice := next(iter(tensors.keys() & self.tensors.keys()), None):
                raise ModelDamaged(f"{part}: tensor {twice} is in an earlier file too; download the files again")
            self.tensors |= tensors

    def load(self, name: str) -> Floats:
        tensor = self.tensors[name]
        raw = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape[:-1], -1)
        return dequantize(raw, tensor.type_name).reshape(tensor.shape)


def is_later_part(path: Path) -> bool:
    """Whether a file is not the first of several, by its name: `...-00002-of-00003.gguf`."""
    found = _PART.search(path.name)
    return found is not None and int(found[1]) > 1


def _parts(path: Path, metadata: dict[str, Any]) -> list[Path]:
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count > _MAX_PARTS:
        raise ModelDamaged(f"{path}: invalid split.count in its header: {str(count)[:20]}")
    if count <= 1:
        return [path]
    if not _PART.search(path.name):
        raise ModelUnsupported(
            f"{path} is one of {count} files: they must keep their names, ...-00001-of-{count:05}.gguf"
        )
    parts = [path.with_name(_PART.sub(f"-{number:05}-of-{count:05}.gguf", path.name)) for number in range(1, count + 1)]
    if is_later_part(path):
        raise ModelUnsupported(f"{path} is not the first of its {count} files: use {parts[0].name}")
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelDamaged(f"{path} is the first of {count} files, and {', '.join(missing)} is missing")
    _require_part(path, metadata, 0, count)
    return parts


def _require_part(path: Path, metadata: dict[str, Any], number: int, count: int) -> None:
    header = (metadata.get("split.no"), metadata.get("split.count"))
    if header != (number, count):
        raise ModelDamaged(
            f"{path}: part {number} of {count} (from 0) by its name, part {header[0]} of {header[1]} by its header"
            " (split.no, split.count); download the files again"
        )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    if not is_gguf(path):
        raise ModelDamaged(f"{path} is not a GGUF file")
    with path.open("rb") as file:
        buffer = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        return _read_header(path, buffer)
    except _Broken as error:
        raise ModelDamaged(f"{path}: {error}; download the file again") from error


def _read_header(path: Path, buffer: memoryview) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    import gguf

    cursor = _Cursor(buffer)
    cursor.take(len(_MAGIC))
    version, tensor_count, key_count = cursor.scalar("I"), cursor.count(), cursor.count()
    if version not in (2, 3):
        raise ModelUnsupported(f"{path}: GGUF version {version}; 2 and 3 are supported")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    tensors = [_tensor(cursor) for _ in range(tensor_count)]
    if odd := next((each for each in tensors if each.type_id not in gguf.GGML_QUANT_SIZES), None):
        raise ModelUnsupported(f"{path}: tensor {odd.name} is stored as ggml type {odd.type_id}, which is unknown")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelDamaged(f"{path}: invalid general.alignment: {alignment}")
    data_at = cursor.at + -cursor.at % alignment
    located = {each.name: each._replace(begin=data_at + each.begin) for each in tensors}
    if cut := next((each for each in located.values() if each.begin + each.size_bytes > len(buffer)), None):
        raise _Broken(f"tensor {cut.name} is truncated")
    return metadata, located


def _tensor(cursor: _Cursor) -> GGUFTensor:
    name = cursor.string()
    shape = tuple(cursor.scalar("Q") for _ in range(min(cursor.scalar("I"), 8)))
    return GGUFTensor(name, cursor.scalar("I"), shape[::-1], cursor.scalar("Q"), cursor.buffer)
