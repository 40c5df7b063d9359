"""Converts between llama.cpp's state of a sequence and the portable KV. Little endian:

    magic, sequence | for each of its caches (full layers; sliding layers, where there are any):
        streams = 1, cells, cells x (position, 1, sequence)
        V transposed = 0, layers, [rotation of K = 0, of V = 0: from state version 4 on]
        layers x (type, bytes of a row, rows of K), layers x (type, bytes of a row, rows of V)

Cells come in memory order, which may differ from the order of positions. Rows are [kv_heads, head_dim] after RoPE. Of
the supported architectures only `llama` has K in another basis: a head's two halves are interleaved.

Every field of a state is checked: a state that differs from what this model requires is refused.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from disaggregated_inference.engines.llamacpp.context import GGML_TYPES
from disaggregated_inference.errors import SliceRefused
from disaggregated_inference.kv import Array, KVDType, KVLayout, KVSlice, storage_dtype

MAGIC = 0xAF143CD8
PERMUTED = ("llama",)  # its GGUF converter interleaves the rows of q_proj and k_proj

_HEAD, _COUNTS, _ROWS = struct.Struct("<Ii"), struct.Struct("<II"), struct.Struct("<iQ")
_CELL = np.dtype([("position", "<i4"), ("owners", "<u4"), ("sequence", "<i4")])

Pair = tuple[Array, Array]  # keys, values: [tokens, kv_heads, head_dim] in the portable basis


@dataclass(frozen=True, slots=True)
class StateCodec:
    """The state format of one model in one build of llama.cpp. `rotations`: whether the two fields for them exist."""

    layout: KVLayout
    dtype: KVDType
    permuted: bool
    rotations: bool

    @property
    def sections(self) -> list[list[int]]:
        """The layers of each cache, in the order of a state."""
        plans = list(enumerate(self.layout.layers))
        found = [[layer for layer, plan in plans if bool(plan.window) == sliding] for sliding in (False, True)]
        return [layers for layers in found if layers]

    @property
    def _row_bytes(self) -> int:
        return self.layout.row_bytes(self.dtype) // 2

    @property
    def _setting(self) -> bytes:
        """The bytes between the number of layers and the rows: nothing is rotated."""
        return bytes(8 if self.rotations else 0)

    def size_bytes(self, cells: Sequence[int]) -> int:
        """Size of a state with this many cells in each of its caches."""
        each = (
            2 * _COUNTS.size
            + len(self._setting)
            + count * _CELL.itemsize
            + 2 * len(layers) * (_ROWS.size + count * self._row_bytes)
            if count
            else _COUNTS.size
            for layers, count in zip(self.sections, cells, strict=True)
        )
        return _HEAD.size + sum(each)

    def encode(self, rows: Sequence[Sequence[Pair]], stop: int, sequence: int) -> Array:
        """A state that ends at position `stop`. `rows` has the pieces of each layer in order."""
        cells = [sum(len(keys) for keys, _ in rows[layers[0]]) for layers in self.sections]
        state = np.empty(self.size_bytes(cells), np.uint8)
        _HEAD.pack_into(state.data, 0, MAGIC, sequence)
        at = _HEAD.size
        for layers, count in zip(self.sections, cells, strict=True):
            at = self._write_head(state, at, range(stop - count, stop), len(layers), sequence)
            for kind in (0, 1):
                for layer in layers:
                    at = self._write_rows(state, at, [pair[kind] for pair in rows[layer]], count, kind == 0)
        assert at == len(state)
        return state

    def _write_head(self, state: Array, at: int, positions: range, layers: int, sequence: int) -> int:
        _COUNTS.pack_into(state.data, at, 1, len(positions))
        at += _COUNTS.size
        cells = state[at : at + len(positions) * _CELL.itemsize].view(_CELL)
        cells["position"], cells["owners"], cells["sequence"] = positions, 1, sequence
        at += cells.nbytes
        _COUNTS.pack_into(state.data, at, 0, layers)
        at += _COUNTS.size
        state[at : at + len(self._setting)] = 0
        return at + len(self._setting)

    def _write_rows(self, state: Array, at: int, pieces: Sequence[Array], count: int, keys: bool) -> int:
        _ROWS.pack_into(state.data, at, GGML_TYPES[self.dtype], self._row_bytes)
        at += _ROWS.size
        target = self._view(state, at, count)
        for piece in pieces:
            self._put(target[: len(piece)], piece, keys)
            target = target[len(piece) :]
        return at + count * self._row_bytes

    def decode(self, state: Array, start: int, stop: int) -> Iterator[KVSlice]:
        """The rows of [start, stop), or those that a sliding layer's window keeps; one slice per layer."""
        found: dict[int, KVSlice] = {}
        at = self._read_magic(state)
        for layers in self.sections:
            plan = self.layout.layers[layers[0]]
            first = plan.first_row(start, stop)
            at, order = self._read_cells(state, at, first, stop, droppable=int(stop - first == plan.window))
            at = self._read_setting(state, at, len(layers))
            parts: dict[int, list[Array]] = {layer: [] for layer in layers}
            for kind in (0, 1):
                for layer in layers:
                    at, rows = self._read_rows(state, at, order, kind == 0)
                    parts[layer].append(rows)
            for layer, (keys, values) in parts.items():
                found[layer] = KVSlice(layer, first, self.dtype, *_with_dead_row(stop - first, keys, values))
        if at != len(state):
            raise SliceRefused(f"a state with {len(state) - at} extra bytes")
        return (found[layer] for layer in sorted(found))

    def _read_magic(self, state: Array) -> int:
        magic, _ = self._unpack(_HEAD, state, 0)
        if magic != MAGIC:
            raise SliceRefused(f"not a state of a sequence: it starts with {magic:#x}")
        return _HEAD.size

    def _read_cells(self, state: Array, at: int, first: int, stop: int, droppable: int) -> tuple[int, Array]:
        """The offset after the cells, and the order that sorts them by position."""
        streams, count = self._unpack(_COUNTS, state, at)
        missing = stop - first - count
        # No later token attends to the oldest row of a full window: llama.cpp may have reused its cell.
        if streams != 1 or not 0 <= missing <= droppable:
            raise SliceRefused(f"a state of {count} cells in {streams} streams; expected {stop - first} in one")
        at += _COUNTS.size
        cells = self._bytes(state, at, count * _CELL.itemsize).view(_CELL)
        order = np.argsort(cells["position"], kind="stable")
        expected = np.arange(first + missing, stop)
        if not np.array_equal(cells["position"][order], expected) or not np.all(cells["owners"] == 1):
            raise SliceRefused(f"the cells of a state are not the positions {first} to {stop}")
        return at + cells.nbytes, order

    def _read_setting(self, state: Array, at: int, layers: int) -> int:
        transposed, count = self._unpack(_COUNTS, state, at)
        if transposed:
            raise SliceRefused("a state with transposed V: written without flash attention")
        if count != layers:
            raise SliceRefused(f"a state of {count} layers; expected {layers}")
        at += _COUNTS.size
        if bytes(self._bytes(state, at, len(self._setting))) != self._setting:
            raise SliceRefused("a state with rotated rows: written with a quantized cache")
        return at + len(self._setting)

    def _read_rows(self, state: Array, at: int, order: Array, keys: bool) -> tuple[int, Array]:
        kind, row_bytes = self._unpack(_ROWS, state, at)
        if (kind, row_bytes) != (GGML_TYPES[self.dtype], self._row_bytes):
            raise SliceRefused(
                f"a state with rows of {row_bytes} bytes of type {kind}; expected {self._row_bytes} of type"
                f" {GGML_TYPES[self.dtype]} ({self.dtype})"
            )
        at += _ROWS.size
        self._bytes(state, at, len(order) * self._row_bytes)
        rows = self._view(state, at, len(order))
        if not np.array_equal(order, np.arange(len(order))):
            rows = rows[order]
        if keys and self.permuted:
            rows = np.concatenate([rows[..., 0::2], rows[..., 1::2]], axis=-1)
        return at + len(order) * self._row_bytes, rows

    def _view(self, state: Array, at: int, count: int) -> Array:
        rows = state[at : at + count * self._row_bytes].view(storage_dtype(self.dtype))
        return rows.reshape(count, self.layout.kv_heads, self.layout.head_dim)

    def _put(self, target: Array, rows: Array, keys: bool) -> None:
        if keys and self.permuted:  # half by half is six times as fast in numpy
            half = self.layout.head_dim // 2
            target[..., 0::2], target[..., 1::2] = rows[..., :half], rows[..., half:]
        else:
            target[...] = rows

    def _unpack(self, form: struct.Struct, state: Array, at: int) -> tuple[int, ...]:
        return form.unpack(self._bytes(state, at, form.size).tobytes())

    def _bytes(self, state: Array, at: int, size: int) -> Array:
        if at + size > len(state):
            raise SliceRefused(f"a truncated state: {len(state)} bytes, expected at least {at + size}")
        return state[at : at + size]


def _with_dead_row(count: int, keys: Array, values: Array) -> Pair:
    """The portable KV has all rows of a window, including the one that llama.cpp dropped."""
    if len(keys) == count:
        return keys, values
    spare = np.zeros_like(keys[:1])
    return np.concatenate([spare, keys]), np.concatenate([spare, values])
