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
from disaggregated_inference.models.gguf_metadata import require_sound

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


def _number(blocks: Bytes, at: int) -> Floats:
    """One to a block, as float16."""
    return _float16(blocks[:, at : at + 2].copy())


def _halves(packed: Bytes) -> Bytes:
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _bits(packed: Bytes, width: int, group: int) -> Bytes:
    """Numbers of `width` bits, those of one place in every byte of a group together: 32 numbers to a row."""
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    parts: Bytes = packed.reshape(len(packed), -1, 1, group) >> shifts
    return (parts & np.uint8((1 << width) - 1)).reshape(len(packed), -1, 32)


def _fifth_bits(packed: Bytes) -> Bytes:
    return np.unpackbits(packed.copy(), axis=1, bitorder="little") * np.uint8(16)


def _q4_0(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, 18)
    return _number(blocks, 0) * (_halves(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, 20)
    return _number(blocks, 0) * _halves(blocks[:, 4:]).astype(np.float32) + _number(blocks, 2)


def _q5_0(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, 22)
    whole = _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _number(blocks, 0) * (whole.astype(np.float32) - 16)


def _q5_1(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, 24)
    whole = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _number(blocks, 0) * whole.astype(np.float32) + _number(blocks, 2)


def _of_eight(blocks: Bytes, whole: Bytes) -> Floats:
    """Q4_K and Q5_K: eight rows to a block, each with a scale and an offset of six bits, which lie interleaved."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    offsets = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    scale, low = ((_number(blocks, at) * each)[..., None] for at, each in ((0, scales), (2, offsets)))
    values: Floats = scale * whole.astype(np.float32) - low
    return values


def _q4_k(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, 144)
    return _of_eight(blocks, _bits(blocks[:, 16:], 4, 32))


def _q5_k(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, 176)
    return _of_eight(blocks, _bits(blocks[:, 48:], 4, 32) | _bits(blocks[:, 16:48], 1, 32) * np.uint8(16))


def _q6_k(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, 210)
    whole = (_bits(blocks[:, :128], 4, 64) | _bits(blocks[:, 128:192], 2, 32) * np.uint8(16)).reshape(
        len(blocks), 16, 16
    )
    scales = _number(blocks, 208) * blocks[:, 192:208].copy().view(np.int8).astype(np.float32)
    values: Floats = scales[..., None] * (whole.astype(np.float32) - 32)
    return values


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
    2: Encoding("Q4_0", 32, 18, _q4_0),
    3: Encoding("Q4_1", 32, 20, _q4_1),
    6: Encoding("Q5_0", 32, 22, _q5_0),
    7: Encoding("Q5_1", 32, 24, _q5_1),
    8: Encoding("Q8_0", 32, 34, _q8_0),
    9: Encoding("Q8_1", 32, 40),
    10: Encoding("Q2_K", 256, 84),
    11: Encoding("Q3_K", 256, 110),
    12: Encoding("Q4_K", 256, 144, _q4_k),
    13: Encoding("Q5_K", 256, 176, _q5_k),
    14: Encoding("Q6_K", 256, 210, _q6_k),
    15: Encoding("Q8_K", 256, 292),
    16: Encoding("IQ2_XXS", 256, 66),
    17: Encoding("IQ2_XS", 256, 74),
    18: Encoding("IQ3_XXS", 256, 98),
    19: Encoding("IQ1_S", 256, 50),
    20: Encoding("IQ4_NL", 32, 18),
    21: Encoding("IQ3_S", 256, 110),
    22: Encoding("IQ2_S", 256, 82),
    23: Encoding("IQ4_XS", 256, 136),
    24: Encoding("I8", 1, 1),
    25: Encoding("I16", 1, 2),
    26: Encoding("I32", 1, 4),
    27: Encoding("I64", 1, 8),
    28: Encoding("F64", 1, 8),
    29: Encoding("IQ1_M", 256, 56),
    30: Encoding("BF16", 1, 2, _bfloat16),
    34: Encoding("TQ1_0", 256, 54),
    35: Encoding("TQ2_0", 256, 66),
    39: Encoding("MXFP4", 32, 17),
    40: Encoding("NVFP4", 64, 36),
    41: Encoding("Q1_0", 128, 18),
}


class GGUFTensor(NamedTuple):
    name: str
    type_id: int
    shape: tuple[int, ...]  # row-major, as numpy has it
    begin: int
    buffer: memoryview

    @property
    def encoding(self) -> Encoding:
        return ENCODINGS[self.type_id]

    @property
    def type_name(self) -> str:
        return self.encoding.name

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) // self.encoding.block * self.encoding.block_bytes

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
        require_sound(path, self.metadata)
        self.parts = _parts(path, self.metadata)
        for number, part in enumerate(self.parts[1:], 1):
            metadata, tensors = _read(part)
            _require_part(part, metadata, number, len(self.parts))
            if twice := next(iter(tensors.keys() & self.tensors.keys()), None):
                raise ModelDamaged(f"{part}: tensor {twice} is in an earlier part, too; fetch the files again")
            self.tensors |= tensors

    def load(self, name: str) -> Floats:
        tensor = self.tensors[name]
        if tensor.encoding.decode is None:
            known = ", ".join(each.name for each in ENCODINGS.values() if each.decode)
            raise ModelUnsupported(f"{self.path}: tensor {name} is stored as {tensor.type_name}; we read {known}")
        values: Floats = tensor.encoding.decode(np.frombuffer(tensor.data, np.uint8))
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
    _require_part(path, metadata, 0, count)
    return parts


def _require_part(path: Path, metadata: dict[str, Any], number: int, count: int) -> None:
    said = (metadata.get("split.no"), metadata.get("split.count"))
    if said != (number, count):
        raise ModelDamaged(
            f"{path}: by its name part {number} of {count} (from 0), by its header (split.no, split.count) part"
            f" {said[0]} of {said[1]}; fetch the files again"
        )


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
    if odd := next((each for each in tensors if each.type_id not in ENCODINGS), None):
        raise ModelUnsupported(f"{path}: tensor {odd.name} is stored as ggml type {odd.type_id}, which is unknown")
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
