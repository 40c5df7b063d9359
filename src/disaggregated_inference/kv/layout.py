"""The contract of the cache that moves: per layer, K and V as [tokens, kv_heads, head_dim].

Contiguous, after RoPE, in the Hugging Face basis, positions absolute from 0. A *slice* is one layer's K and V for a run
of tokens. Token-major because a run of tokens is then one run of bytes, whatever the number of heads: a prefix is cut
off by moving a pointer, and llama.cpp and vLLM keep their rows the same way.

Sliding layers keep a window. Their slice for a chunk carries the chunk's last `window` rows, not the prompt's: so
every committed chunk is a state another engine can go on from, and no side has to know how long the prompt will be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from disaggregated_inference.errors import SliceRefused
from disaggregated_inference.kv.dtype import Array, KVDType, require_dtype, storage_dtype


class LayerPlan(msgspec.Struct, frozen=True):
    """What one layer keeps: everything (`full`), or the last `window` tokens (`sliding`)."""

    kind: Literal["full", "sliding"] = "full"
    window: int = 0

    def first_row(self, start: int, stop: int) -> int:
        """The first position of tokens [start, stop) that this layer still keeps at `stop`."""
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
        """What one more token adds for good: sliding layers do not grow."""
        return self.row_bytes(dtype) * sum(plan.kind == "full" for plan in self.layers)

    def total_bytes(self, tokens: int, dtype: KVDType) -> int:
        """The whole cache of a sequence of `tokens` tokens."""
        rows = sum(tokens - plan.first_row(0, tokens) for plan in self.layers)
        return rows * self.row_bytes(dtype)


def _there() -> None:
    """The bytes are there already."""


@dataclass(frozen=True, slots=True)
class KVSlice:
    """K and V of one layer for positions [start, stop).

    `wait` returns once the bytes are in `keys` and `values`: an engine on a GPU hands a slice out while its copy to
    host memory is still under way, and whoever needs the bytes waits for them, not the engine. `ready` says whether
    they are there, for those who have something to say meanwhile.
    """

    layer: int
    start: int
    dtype: KVDType
    keys: Array
    values: Array
    wait: Callable[[], None] = _there
    ready: Callable[[], bool] = lambda: True

    @property
    def tokens(self) -> int:
        return len(self.keys) if self.keys.ndim else 0

    @property
    def stop(self) -> int:
        return self.start + self.tokens

    @property
    def size_bytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def copy(self) -> "KVSlice":
        """In memory of its own."""
        self.wait()
        return KVSlice(self.layer, self.start, self.dtype, self.keys.copy(), self.values.copy())

    def require_fits(self, layout: KVLayout) -> None:
        """Refuse what does not belong in `layout`. The one check at the border; inside, shapes are trusted."""
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
