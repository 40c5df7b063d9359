"""Prefix caches of a small model, KV whose every number is known, and checks of what comes back."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from disaggregated_inference.kv import (
    NO_SALT,
    Array,
    Fingerprint,
    KVDType,
    KVLayout,
    KVSlice,
    LayerPlan,
    Salt,
    Weights,
    as_dtype,
)
from disaggregated_inference.kv.prefix_cache import Insertion, PrefixCache

FULL = KVLayout(layers=(LayerPlan(),) * 3, kv_heads=2, head_dim=4)
WINDOW = 6
SLIDING = KVLayout(
    layers=(LayerPlan("sliding", WINDOW), LayerPlan(), LayerPlan("sliding", 3), LayerPlan()), kv_heads=2, head_dim=4
)
FULL_BYTES = FULL.token_bytes("float32")
BLOCK = 8
LOTS = 1 << 30


def fingerprint(layout: KVLayout = FULL, tokenizer: str = "t") -> Fingerprint:
    return Fingerprint(
        architecture="llama",
        layout=layout,
        rope_frequencies=(1.0, 0.1),
        rope_scale=1.0,
        vocabulary=1000,
        tokenizer=tokenizer,
        chat_template="c",
        weights=Weights(norms="n", format="BF16", sample="s"),
    )


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(layout: KVLayout = FULL, dtype: KVDType = "float32", limit: int = LOTS, **more: object) -> PrefixCache:
    return PrefixCache(fingerprint(layout), dtype, limit, block_tokens=BLOCK, **more)  # type: ignore[arg-type]


def rows(tokens: Sequence[int], layer: int, start: int, stop: int, dtype: KVDType = "float32") -> tuple[Array, Array]:
    """What a model would have computed: each row says its layer, its position and every token up to it. All numbers
    are below 256, which every dtype holds exactly."""
    seen = np.cumsum(np.asarray(tokens, np.int64) * 7 + 1)[start:stop] % 251
    at = np.arange(start, stop)
    numbers = np.zeros((2, stop - start, 8), np.float32)
    own = np.asarray(tokens, np.int64)[start:stop] % 250
    for column, said in enumerate((np.full_like(at, layer), at % 100, at // 100, own, seen)):
        numbers[:, :, column] = said
    numbers[1, :, 7] = 1
    keys, values = as_dtype(numbers.reshape(2, stop - start, 2, 4), "float32", dtype)
    return keys, values


def piece(tokens: Sequence[int], layout: KVLayout, layer: int, start: int, stop: int, dtype: KVDType) -> KVSlice:
    first = layout.layers[layer].first_row(start, stop)
    return KVSlice(layer, first, dtype, *rows(tokens, layer, first, stop, dtype))


def fill(
    insertion: Insertion | None,
    tokens: Sequence[int],
    layout: KVLayout = FULL,
    chunk: int = 5,
    dtype: KVDType = "float32",
    start: int | None = None,
) -> int:
    """Chunk by chunk from where rows are needed, as an engine would."""
    if insertion is None:
        return 0
    for at in range(insertion.start if start is None else start, len(tokens), chunk):
        for layer in range(len(layout.layers)):
            given = piece(tokens, layout, layer, at, min(at + chunk, len(tokens)), dtype)
            insertion.put(given)
            given.keys[:], given.values[:] = 0, 0  # only valid during put
    return insertion.finish()


def keep(
    store: PrefixCache, tokens: Sequence[int], chunk: int = 5, dtype: KVDType = "float32", salt: Salt = NO_SALT
) -> int:
    return fill(store.insert(tokens, salt), tokens, store.layout, chunk, dtype)


def evict_all(store: PrefixCache) -> None:
    store._tree.evict_unused_since(math.inf)


def check(
    store: PrefixCache,
    tokens: Sequence[int],
    expected: int,
    most: int | None = None,
    chunk: int = 7,
    salt: Salt = NO_SALT,
) -> None:
    """A match of exactly this length, with every row right, in the order an engine can place them."""
    match = store.match(tokens, most, salt)
    assert match.tokens == expected
    verify(list(match.slices(chunk)), tokens, store, expected, chunk)


def verify(pieces: list[KVSlice], tokens: Sequence[int], store: PrefixCache, expected: int, chunk: int) -> None:
    layers = store.layout.layers
    sliding = any(plan.window for plan in layers)
    groups = [(0, expected)] if sliding else [(at, min(at + chunk, expected)) for at in range(0, expected, chunk)]
    wanted = [(layer, *group) for group in groups if expected for layer in range(len(layers))]
    assert len(pieces) == len(wanted)
    for got, (layer, start, stop) in zip(pieces, wanted, strict=True):
        got.require_fits(store.layout)
        assert (got.layer, got.start, got.stop, got.dtype) == (
            layer, layers[layer].first_row(start, stop), stop, store.dtype,
        )  # fmt: skip
        keys, values = rows(tokens, layer, got.start, stop, store.dtype)
        assert np.array_equal(got.keys, keys)
        assert np.array_equal(got.values, values)
        assert got.keys.flags.writeable  # torch warns about arrays that are not


TOKENS = list(range(100, 160))
Reopen = Callable[..., PrefixCache]  # the fixture `reopen`


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))
