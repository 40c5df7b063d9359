"""The portable KV layout: per layer, K and V as [tokens, kv_heads, head_dim].

Contiguous, after RoPE, in the Hugging Face basis, positions absolute from 0. A *slice* is one layer's K and V for a run
of tokens. Token-major, because a run of tokens is then one run of bytes for any number of heads: skipping a prefix
moves a pointer, and llama.cpp and vLLM store their rows the same way.

Sliding layers keep a window. Their slice for a chunk carries the chunk's last `window` rows, not the prompt's. So every
committed chunk is a state from which another engine can continue, and neither side needs to know the prompt's length.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from disaggregated_inference.errors import SliceRefused
from disaggregated_inference.kv.dtype import Array, KVDType, require_dtype, storage_dtype


class LayerPlan(msgspec.Struct, frozen=True):
    """What one layer keeps: everything (`full`), or the last `window` tokens (`sliding`)."""

    kind: Literal["full", "sliding"] = "full"
    window: int = 0

    def first_row(self, start: int, stop: int) -> int:
        """The first position of [start, stop) that this layer still keeps at `stop`."""
        return start if self.kind == "full" else max(start, stop - self.window)


class KVLayout(msgspec.Struct, frozen=True):
    """The shape of a model's cache."""

    layers: tuple[LayerPlan, ...]
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        sliding = [plan.window for plan in self.layers if plan.kind != "full"]
        some = f" ({len(sliding)} of them sliding by {sliding[0]})" if sliding else ""
        return f"{len(self.layers)} layers{some}, {self.kv_heads} x {self.head_dim}"

    def row_bytes(self, dtype: KVDType) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * storage_dtype(dtype).itemsize

    def token_bytes(self, dtype: KVDType) -> int:
        """What each further token adds; sliding layers do not grow."""
        return self.row_bytes(dtype) * sum(plan.kind == "full" for plan in self.layers)

    def total_bytes(self, tokens: int, dtype: KVDType) -> int:
        """The KV of a sequence of `tokens` tokens."""
        rows = sum(tokens - plan.first_row(0, tokens) for plan in self.layers)
        return rows * self.row_bytes(dtype)


def _no_wait() -> None:
    """The bytes are in host memory already."""


@dataclass(frozen=True, slots=True)
class KVSlice:
    """K and V of one layer for positions [start, stop).

    `wait` returns when the bytes are in `keys` and `values`: an engine on a GPU emits a slice while its copy to host
    memory is still running, and the reader waits for it, not the engine. `ready` tells without waiting.
    """

    layer: int
    start: int
    dtype: KVDType
    keys: Array
    values: Array
    wait: Callable[[], None] = _no_wait
    ready: Callable[[], bool] = lambda: True
    rest: int = 0  # rows of the same layer and chunk that follow these in other slices

    @property
    def tokens(self) -> int:
        return len(self.keys) if self.keys.ndim else 0

    @property
    def stop(self) -> int:
        return self.start + self.tokens

    @property
    def chunk_stop(self) -> int:
        return self.stop + self.rest

    def part(self, first: int, last: int) -> "KVSlice":
        """Rows number `first` to `last` of these, over the same memory."""
        keys, values, rest = self.keys[first:last], self.values[first:last], self.rest + self.tokens - last
        return replace(self, start=self.start + first, keys=keys, values=values, rest=rest)

    @property
    def size_bytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def copy(self) -> "KVSlice":
        """A copy with its own memory."""
        self.wait()
        return KVSlice(self.layer, self.start, self.dtype, self.keys.copy(), self.values.copy(), rest=self.rest)

    def require_fits(self, layout: KVLayout) -> None:
        """Refuse a slice that does not fit `layout`. Checked once, at the border; shapes are trusted after it."""
        if not 0 <= self.layer < len(layout.layers):
            raise SliceRefused(f"layer {self.layer} of a model with {len(layout.layers)} layers")
        if self.start < 0 or self.tokens == 0:
            raise SliceRefused(f"layer {self.layer}: {self.tokens} tokens from position {self.start}")
        storage = storage_dtype(require_dtype(self.dtype))
        for name, array in (("keys", self.keys), ("values", self.values)):
            expected = (self.tokens, layout.kv_heads, layout.head_dim)
            if array.shape != expected:
                raise SliceRefused(f"layer {self.layer}: {name} of shape {array.shape}, expected {expected}")
            if array.dtype != storage:
                raise SliceRefused(f"layer {self.layer}: {name} of numpy {array.dtype}, {self.dtype} needs {storage}")
            if not array.flags.c_contiguous:
                raise SliceRefused(f"layer {self.layer}: {name} are not contiguous")
        window = layout.layers[self.layer].window
        if window and self.tokens > window:
            raise SliceRefused(f"layer {self.layer}: {self.tokens} tokens for a window of {window}")
