"""A block as a file.

magic, version, length of meta | meta (JSON) | keys, values, snapshots | XXH3-64 of all before it
"""

import io
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
import xxhash

from disaggregated_inference.kv.dtype import Array
from disaggregated_inference.kv.prefix_cache.blocks import Block, BlockAddress, BlockShape, address, frozen, words

_FIXED = struct.Struct("<4sHxxI")
_MAGIC, _VERSION = b"DKVP", 1
_MAX_META_BYTES = 1 << 20
_CHECKSUM_BYTES = 8


class Damaged(Exception):
    """Not a block file, or an incomplete one."""


class Meta(msgspec.Struct, frozen=True):
    """The file's header."""

    parent: str
    start: int
    tokens: tuple[int, ...]
    shape: BlockShape
    snapshots: tuple[int, ...]


class Label(NamedTuple):
    """A block on disk: enough to decide whether to read it."""

    root: bytes
    address: BlockAddress
    positions: tuple[int, ...]
    size_bytes: int  # of its rows in memory
    file_bytes: int


def encoded(root: bytes, shape: BlockShape, block: Block) -> tuple[Label, bytes]:
    """A block's label, and the head of its file."""
    at, positions = block.address, block.positions
    meta = msgspec.json.encode(Meta(at.parent.hex(), at.start, at.token_ids, shape, positions))
    head = _FIXED.pack(_MAGIC, _VERSION, len(meta)) + meta
    size_bytes = shape.size_bytes(at.length, positions)
    return Label(root, at, positions, size_bytes, len(head) + size_bytes + _CHECKSUM_BYTES), head


def write_block(file: BinaryIO, head: bytes, block: Block) -> None:
    checksum = xxhash.xxh3_64()
    parts: list[bytes | memoryview] = [head, *map(_bytes, block.arrays())]
    for part in parts:
        checksum.update(part)
        file.write(part)
    file.write(checksum.digest())


def read_label(path: Path, root: bytes, file_bytes: int) -> Label:
    """From the header alone; the rows are checked when they are read."""
    with path.open("rb") as file:
        meta, head_bytes = _read_meta(file, xxhash.xxh3_64())
    named = _named(meta)
    if named.hash.hex() != path.stem:
        raise Damaged("its tokens do not match its name")
    size_bytes = meta.shape.size_bytes(named.length, meta.snapshots)
    if file_bytes != head_bytes + size_bytes + _CHECKSUM_BYTES:
        raise Damaged("its size is wrong")
    return Label(root, named, meta.snapshots, size_bytes, file_bytes)


def read_block(path: Path, label: Label, shape: BlockShape) -> Block:
    """Straight into the block's arrays."""
    checksum = xxhash.xxh3_64()
    with path.open("rb") as file:
        meta, _ = _read_meta(file, checksum)
        if meta.shape != shape or _named(meta) != label.address:
            raise Damaged("it holds another block")
        snapshots = {at: shape.snapshot(at) for at in meta.snapshots}
        block = Block(label.address, *shape.block_pair(label.address.length), snapshots)
        for array in block.arrays():
            view = _bytes(array)
            if file.readinto(view) != len(view):
                raise Damaged("truncated")
            checksum.update(view)
            frozen(array)
        if file.read() != checksum.digest():
            raise Damaged("its checksum does not match")
    return block


def _read_meta(file: io.BufferedReader, checksum: xxhash.xxh3_64) -> tuple[Meta, int]:
    """The header, and its size in bytes."""
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size:
        raise Damaged("truncated")
    magic, version, length = _FIXED.unpack(fixed)
    if (magic, version) != (_MAGIC, _VERSION) or length > _MAX_META_BYTES:
        raise Damaged("not a block of this version")
    data = file.read(length)
    checksum.update(fixed)
    checksum.update(data)
    try:
        return msgspec.json.decode(data, type=Meta), _FIXED.size + length
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"invalid header: {error}") from error


def _named(meta: Meta) -> BlockAddress:
    """The address of a header, after checking its values."""
    try:
        named = address(bytes.fromhex(meta.parent), meta.start, words(meta.tokens))
    except (ValueError, OverflowError) as error:
        raise Damaged(f"invalid header: {error}") from error
    if not meta.tokens or not all(named.start < at <= named.stop for at in meta.snapshots):
        raise Damaged("invalid header")
    return named


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
