"""Portable slices to and from mlx-lm's caches, by attribute: their `state` format changes between releases.

MLX stores [1, kv_heads, tokens, head_dim]. A full layer's buffer is allocated once for the sequence's capacity, and
slices are written into its memory through numpy, on Apple's unified memory as on Linux: no staging copy, no kernel,
nothing on the GPU's queue. A sliding layer is at most a window and is assembled in numpy, oldest row first.
"""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from disaggregated_inference.kv import Array, KVDType, KVLayout, KVSlice, LayerPlan, as_dtype

MLX_DTYPES: dict[KVDType, Any] = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


def to_numpy(array: mx.array, dtype: KVDType) -> Array:
    """A view of an evaluated array's memory; bfloat16 as its bits."""
    if dtype == "bfloat16":
        array = array.view(mx.uint16)
        mx.eval(array)
    return np.asarray(memoryview(array))  # type: ignore[arg-type]


def from_numpy(values: Array, dtype: KVDType) -> mx.array:
    array = mx.array(values)
    return array.view(mx.bfloat16) if dtype == "bfloat16" else array


class FullLayer:
    """Writes into a `KVCache`. While slices arrive, `_views` alias its buffers; they end before the model uses them."""

    def __init__(self, layout: KVLayout, dtype: KVDType, capacity: int) -> None:
        """The buffer is allocated once and never grows."""
        self.cache: Any = KVCache()  # None while its rows are in a batch
        self._dtype, self._capacity = dtype, capacity
        shape = (1, layout.kv_heads, capacity, layout.head_dim)
        self.cache.keys, self.cache.values = mx.zeros(shape, MLX_DTYPES[dtype]), mx.zeros(shape, MLX_DTYPES[dtype])
        self._views: tuple[Array, Array] | None = None

    def place(self, piece: KVSlice) -> None:
        if self._views is None:
            self._views = (to_numpy(self.cache.keys, self._dtype), to_numpy(self.cache.values, self._dtype))
        for view, rows in zip(self._views, (piece.keys, piece.values), strict=True):
            view[0, :, piece.start : piece.stop] = as_dtype(rows, piece.dtype, self._dtype).swapaxes(0, 1)

    def commit(self, length: int) -> None:
        self._views = None
        self.cache.offset = length

    def rollback(self) -> None:
        """Rows after the offset are ignored and will be overwritten."""
        self._views = None

    def restore(self, extracted: KVCache) -> None:
        """Put the rows from a batch into a buffer of full capacity again."""
        spare = [(0, 0), (0, 0), (0, self._capacity - extracted.keys.shape[2]), (0, 0)]
        extracted.keys, extracted.values = mx.pad(extracted.keys, spare), mx.pad(extracted.values, spare)
        mx.eval(extracted.keys, extracted.values)
        self.cache = extracted

    def settle(self) -> None:
        """After a chunk; a full layer needs nothing."""

    @property
    def nbytes(self) -> int:
        return _nbytes(self.cache)

    def rows(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        return self.cache.keys[0, :, start:stop], self.cache.values[0, :, start:stop]


class SlidingLayer:
    """Writes into a `RotatingKVCache`: oldest row first, `_idx` at the end, `offset` absolute."""

    def __init__(self, plan: LayerPlan, dtype: KVDType) -> None:
        self.cache: Any = RotatingKVCache(max_size=plan.window)  # None while its rows are in a batch
        self._window, self._dtype = plan.window, dtype
        self._staged: list[tuple[Array, Array]] = []

    def place(self, piece: KVSlice) -> None:
        keys, values = (as_dtype(rows, piece.dtype, self._dtype) for rows in (piece.keys, piece.values))
        if piece.tokens == self._window:
            self._staged.clear()
        self._staged.append((keys.swapaxes(0, 1).copy(), values.swapaxes(0, 1).copy()))
        if sum(rows.shape[1] for rows, _ in self._staged) > self._window:  # small chunks must not pile up
            self._staged = [self._joined()]

    def commit(self, length: int) -> None:
        if not self._staged:
            return
        keys, values = self._joined()
        if keys.shape[1] < self._window and self.cache.keys is not None:
            held = self.rows(0, self.cache.offset)
            keys, values = (
                np.concatenate([to_numpy(_evaluated(old), self._dtype), new], axis=1)[:, -self._window :]
                for old, new in zip(held, (keys, values), strict=True)
            )
        self.cache.keys, self.cache.values = (from_numpy(rows[None], self._dtype) for rows in (keys, values))
        mx.eval(self.cache.keys, self.cache.values)  # another thread may use them
        self.cache.offset, self.cache._idx = length, keys.shape[1]
        self._staged.clear()

    def rollback(self) -> None:
        self._staged.clear()

    def restore(self, extracted: RotatingKVCache) -> None:
        """Evaluated at once: a lazy slice would keep the batch's arrays alive."""
        mx.eval(extracted.keys, extracted.values)
        self.cache = extracted

    def settle(self) -> None:
        """After a chunk mlx-lm keeps all its rows until the next token: cut them to the window now."""
        if self.cache.keys.shape[2] > self._window:
            self.cache.keys, self.cache.values = (
                mx.contiguous(rows[..., -self._window :, :]) for rows in (self.cache.keys, self.cache.values)
            )
            self.cache._idx = self._window

    @property
    def nbytes(self) -> int:
        return _nbytes(self.cache) + sum(keys.nbytes + values.nbytes for keys, values in tuple(self._staged))

    def _joined(self) -> tuple[Array, Array]:
        keys, values = zip(*self._staged, strict=True)
        joined = [np.concatenate(rows, axis=1)[:, -self._window :] for rows in (keys, values)]
        return joined[0], joined[1]

    def rows(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """The newest rows up to `stop`, the end of the ring."""
        count = min(stop - start, self._window)
        ordered = (self.cache._temporal_order(array) for array in (self.cache.keys, self.cache.values))
        keys, values = (rows[0, :, max(0, rows.shape[2] - count) :] for rows in ordered)
        return keys, values


def _nbytes(cache: Any) -> int:
    return cache.nbytes if cache is not None else 0


def _evaluated(array: mx.array) -> mx.array:
    array = mx.contiguous(array)
    mx.eval(array)
    return array


def token_major(rows: mx.array) -> mx.array:
    """[kv_heads, tokens, head_dim] to the portable [tokens, kv_heads, head_dim], contiguous."""
    return mx.contiguous(rows.swapaxes(0, 1))


def make_layers(layout: KVLayout, dtype: KVDType, capacity: int) -> list[FullLayer | SlidingLayer]:
    """One per layer, with memory allocated."""
    layers = [
        SlidingLayer(plan, dtype) if plan.window else FullLayer(layout, dtype, capacity) for plan in layout.layers
    ]
    mx.eval([(layer.cache.keys, layer.cache.values) for layer in layers if isinstance(layer, FullLayer)])
    return layers
