"""Reading GGUF: its metadata (in a tenth of the time the reference reader takes) and the tensor types we dequantize."""

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import ModelDamaged, ModelUnsupported

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAGIC = b"GGUF"
_MOST_PARTS = 99_999  # their names have five digits
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_LIMIT = 1 << 24  # no key, array or tensor list of a sane model has more entries

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def _float32(raw: Bytes) -> Floats:
    return raw.view(np.float32)


def _float16(raw: Bytes) -> Floats:
    return raw.view(np.float16).astype(np.float32)


def _bfloat16(raw: Bytes) -> Floats:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_1(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, 20)
    scale, low = _float16(blocks[:, :2].copy()), _float16(blocks[:, 2:4].copy())
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return scale * nibbles + low


def _q8_0(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, 34)
    return _float16(blocks[:, :2].copy()) * blocks[:, 2:].view(np.int8).astype(np.float32)


class Encoding(NamedTuple):
    name: str
    block: int
    block_bytes: int
    decode: Any = None  # those that we need the numbers of


ENCODINGS = {
    0: Encoding("F32", 1, 4, _float32),
    1: Encoding("F16", 1, 2, _float16),
    2: Encoding("Q4_0", 32, 18),
    3: Encoding("Q4_1", 32, 20, _q4_1),
    6: Encoding("Q5_0", 32, 22),
    7: Encoding("Q5_1", 32, 24),
    8: Encoding("Q8_0", 32, 34, _q8_0),
    10: Encoding("Q2_K", 256, 84),
    11: Encoding("Q3_K", 256, 110),
    12: Encoding("Q4_K", 256, 144),
    13: Encoding("Q5_K", 256, 176),
    14: Encoding("Q6_K", 256, 210),
    20: Encoding("IQ4_NL", 32, 18),
    23: Encoding("IQ4_XS", 256, 136),
    30: Encoding("BF16", 1, 2, _bfloat16),
    39: Encoding("MXFP4", 32, 17),
}


class GGUFTensor(NamedTuple):
    name: str
    type_id: int
    shape: tuple[int, ...]  # row-major, as numpy has it
    begin: int
    buffer: memoryview

    @property
    def type_name(self) -> str:
        return ENCODINGS[self.type_id].name if self.type_id in ENCODINGS else f"ggml-{self.type_id}"

    @property
    def size_bytes(self) -> int:
        """Of a type that we do not know, a byte at least."""
        encoding = ENCODINGS.get(self.type_id)
        return math.prod(self.shape) // encoding.block * encoding.block_bytes if encoding else 1

    @property
    def data(self) -> memoryview:
        """As it is stored."""
        return self.buffer[self.begin : self.begin + self.size_bytes]


class _Broken(Exception):
    """What cannot be the whole file."""


class _Cursor:
    """Walks the header; every length is checked against the file before it is believed."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer, self.at = buffer, 0

    def take(self, size: int) -> memoryview:
        if size < 0 or self.at + size > len(self.buffer):
            raise _Broken("its header runs past the end of the file")
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
    """By its first bytes, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


class GGUFFile:
    """A mapped GGUF file: `metadata`, `tensors`, and `load(name)` as float32. Of a model in several files it is the
    first, and has the tensors of all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self.tensors = _read(path)
        self.parts = _parts(path, self.metadata)
        for part in self.parts[1:]:
            self.tensors |= _read(part)[1]

    def load(self, name: str) -> Floats:
        tensor = self.tensors[name]
        encoding = ENCODINGS.get(tensor.type_id)
        if encoding is None or encoding.decode is None:
            known = ", ".join(each.name for each in ENCODINGS.values() if each.decode)
            raise ModelUnsupported(f"{self.path}: tensor {name} is stored as {tensor.type_name}; we read {known}")
        values: Floats = encoding.decode(np.frombuffer(tensor.data, np.uint8))
        return values.reshape(tensor.shape)


def is_later_part(path: Path) -> bool:
    """Of a model in several files, by its name: `...-00002-of-00003.gguf`."""
    found = _PART.search(path.name)
    return found is not None and int(found[1]) > 1


def _parts(path: Path, metadata: dict[str, Any]) -> list[Path]:
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count > _MOST_PARTS:
        raise ModelDamaged(f"{path}: its header claims to be one of {str(count)[:20]} files")
    if count <= 1:
        return [path]
    if not _PART.search(path.name):
        raise ModelUnsupported(f"{path} is one of {count} files: leave them their names, ...-00001-of-{count:05}.gguf")
    parts = [path.with_name(_PART.sub(f"-{number:05}-of-{count:05}.gguf", path.name)) for number in range(1, count + 1)]
    if is_later_part(path):
        raise ModelUnsupported(f"{path} is not the first of its {count} files: name {parts[0].name}")
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelDamaged(f"{path} is the first of {count} files, and {', '.join(missing)} is not beside it")
    return parts


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    if not is_gguf(path):
        raise ModelDamaged(f"{path} is not a GGUF file")
    with path.open("rb") as file:
        buffer = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        return _read_whole(path, buffer)
    except _Broken as error:
        raise ModelDamaged(f"{path}: {error}; fetch the file again") from error


def _read_whole(path: Path, buffer: memoryview) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
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
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelDamaged(f"{path}: an alignment of {alignment}")
    data_at = cursor.at + -cursor.at % alignment
    placed = {each.name: each._replace(begin=data_at + each.begin) for each in tensors}
    if cut := next((each for each in placed.values() if each.begin + each.size_bytes > len(buffer)), None):
        raise _Broken(f"tensor {cut.name} is cut off")
    return metadata, placed


def _tensor(cursor: _Cursor) -> GGUFTensor:
    name = cursor.string()
    shape = tuple(cursor.scalar("Q") for _ in range(min(cursor.scalar("I"), 8)))
    return GGUFTensor(name, cursor.scalar("I"), shape[::-1], cursor.scalar("Q"), cursor.buffer)
