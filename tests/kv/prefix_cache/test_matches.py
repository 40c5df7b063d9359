"""What a prefix cache gives back is what was put in, for these tokens of this model."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggregated_inference.errors import SliceRefused
from disaggregated_inference.kv import KVDType, KVSlice
from disaggregated_inference.kv.dtype import KV_DTYPES
from disaggregated_inference.kv.prefix_cache import DiskTier, PrefixCache
from disaggregated_inference.kv.prefix_cache.blocks import chain, shared_tokens, words
from tests.support.prefix_rows import (
    BLOCK,
    FULL,
    FULL_BYTES,
    LOTS,
    TOKENS,
    check,
    fill,
    fingerprint,
    keep,
    make,
    piece,
    rows,
)


def test_addresses_depend_on_all_that_came_before() -> None:
    one, two = chain(b"r", [1, 2, 3, 4, 5], 2), chain(b"r", [9, 2, 3, 4, 5], 2)
    assert [(each.start, each.stop) for each in one] == [(0, 2), (2, 4), (4, 5)]
    assert one[1].tokens == two[1].tokens
    assert one[1].hash != two[1].hash
    assert {each.hash for each in one}.isdisjoint(each.hash for each in chain(b"s", [1, 2, 3, 4, 5], 2))


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_shared_tokens(mine: list[int], theirs: list[int]) -> None:
    expected = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
    )
    assert shared_tokens(words(mine), words(theirs)) == expected


# Hits without sliding layers


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 23, 60])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_longer_prompt_finds_exactly_what_was_kept(length: int, dtype: KVDType) -> None:
    store = make(dtype=dtype)
    assert keep(store, TOKENS[:length], dtype="bfloat16") == length
    check(store, TOKENS, length)
    check(store, [*TOKENS[:length], 1, 2, 3], length)
    assert store.stats().size_bytes == length * FULL.token_bytes(dtype)
    assert store.insert(TOKENS[:length]) is None


@pytest.mark.parametrize("most", [0, 1, 5, 8, 12, 16, 19, 20, 99])
def test_no_more_than_asked_for(most: int) -> None:
    store = make()
    keep(store, TOKENS[:20])
    check(store, TOKENS[:20], min(most, 20), most)


@pytest.mark.parametrize("same", range(0, 21, 3))
def test_diverging_anywhere(same: int) -> None:
    store = make()
    keep(store, TOKENS[:20])
    other = [*TOKENS[:same], *range(500, 520)]
    check(store, other, same)
    insertion = store.insert(other)
    assert insertion is not None
    assert insertion.start == same
    assert fill(insertion, other) == len(other)
    check(store, other, len(other))
    check(store, TOKENS, 20)


def test_what_two_requests_share_is_kept_once() -> None:
    store = make()
    one, two = [*TOKENS[:16], 1, 2, 3], [*TOKENS[:16], 4, 5]
    keep(store, one)
    keep(store, two)
    assert store.stats().size_bytes == (16 + 3 + 2) * FULL_BYTES
    assert store.stats().blocks == 4


def test_a_short_last_block_gives_way_to_the_longer_one() -> None:
    store = make()
    for length in (3, 11, 13, 16, 21):
        keep(store, TOKENS[:length])
        assert store.stats().size_bytes == length * FULL_BYTES
        check(store, TOKENS, length)
    assert store.stats().evicted_blocks == 0


def test_the_best_of_several_tails() -> None:
    store = make()
    for tail in ([1], [1, 2, 9], [1, 2, 3, 9], [5]):
        keep(store, [*TOKENS[:8], *tail])
    check(store, [*TOKENS[:8], 1, 2, 3, 4], 11)
    check(store, [*TOKENS[:8], 5, 5], 9)
    check(store, [*TOKENS[:8], 7], 8)


def test_slices_in_any_chunks_and_layers_one_after_the_other() -> None:
    store = make()
    insertion = store.insert(TOKENS)
    assert insertion is not None
    for layer, chunk in ((2, 60), (0, 1), (1, 13)):
        for at in range(0, 60, chunk):
            insertion.put(piece(TOKENS, FULL, layer, at, min(at + chunk, 60), "float32"))
    check(store, TOKENS, 0)  # nothing is visible before
    assert insertion.finish() == 60
    check(store, TOKENS, 60)


def test_slices_that_overlap_or_reach_too_far() -> None:
    store = make()
    keep(store, TOKENS[:13])
    insertion = store.insert(TOKENS[:30])
    assert insertion is not None
    assert insertion.start == 13
    for layer in range(3):
        for start, stop in ((0, 9), (4, 20), (4, 20), (15, 60)):
            insertion.put(piece(TOKENS, FULL, layer, start, stop, "float32"))
    assert insertion.finish() == 30
    check(store, TOKENS, 30)


def test_what_is_whole_of_an_incomplete_insertion_is_kept() -> None:
    store = make()
    insertion = store.insert(TOKENS)
    assert insertion is not None
    for layer, stop in ((0, 21), (1, 19), (2, 40)):
        insertion.put(piece(TOKENS, FULL, layer, 0, stop, "float32"))
    insertion.put(piece(TOKENS, FULL, 1, 25, 60, "float32"))  # does not join on
    assert insertion.finish() == 19
    assert insertion.finish() == 0
    check(store, TOKENS, 19)
    assert store.stats().size_bytes == 19 * FULL_BYTES
    assert all(block.keys.base is None for block in store._tree.blocks.values())  # no larger array behind them


def test_an_insertion_that_gets_nothing() -> None:
    store = make()
    keep(store, TOKENS[:10])
    insertion = store.insert(TOKENS)
    assert insertion is not None
    assert insertion.finish() == 10
    assert store.stats().size_bytes == 10 * FULL_BYTES


def test_abandoned() -> None:
    store = make(limit=60 * FULL_BYTES)
    insertion = store.insert(TOKENS)
    assert insertion is not None
    assert store.stats().size_bytes == 60 * FULL_BYTES
    insertion.put(piece(TOKENS, FULL, 0, 0, 60, "float32"))
    insertion.abandon()
    insertion.abandon()
    insertion.put(piece(TOKENS, FULL, 1, 0, 60, "float32"))
    assert insertion.finish() == 0
    assert (store.stats().size_bytes, store.match(TOKENS).tokens) == (0, 0)


def test_slices_are_waited_for_and_checked() -> None:
    store = make()
    insertion = store.insert(TOKENS[:4])
    assert insertion is not None
    late = np.zeros((4, 2, 4), np.float32), np.zeros((4, 2, 4), np.float32)

    def arrive() -> None:
        late[0][:], late[1][:] = rows(TOKENS, 0, 0, 4)

    insertion.put(KVSlice(0, 0, "float32", *late, wait=arrive))
    for layer in (1, 2):
        insertion.put(piece(TOKENS, FULL, layer, 0, 4, "float32"))
    with pytest.raises(SliceRefused, match="layer 3"):
        insertion.put(KVSlice(3, 0, "float32", *late))
    assert insertion.finish() == 4
    check(store, TOKENS, 4)


def test_two_insertions_of_the_same_at_once() -> None:
    store = make()
    one, two, longer = store.insert(TOKENS[:20]), store.insert(TOKENS[:20]), store.insert(TOKENS[:23])
    assert store.stats().size_bytes == 63 * FULL_BYTES
    assert fill(longer, TOKENS[:23]) == 23
    assert fill(one, TOKENS[:20]) == 20
    assert fill(two, TOKENS[:20]) == 20
    assert store.stats().size_bytes == 23 * FULL_BYTES
    check(store, TOKENS, 23)


def test_counts() -> None:
    store = make()
    assert store.match(TOKENS).tokens == 0
    keep(store, TOKENS[:20])
    check(store, TOKENS, 20)
    check(store, TOKENS, 9, most=9)
    seen = store.stats()
    assert (seen.hits, seen.misses, seen.hit_tokens, seen.blocks) == (2, 1, 29, 3)
    assert (seen.limit_bytes, seen.evicted_blocks, seen.disk_bytes) == (LOTS, 0, 0)


def test_off() -> None:
    store = make(limit=0)
    assert store.insert(TOKENS) is None
    assert store.match(TOKENS).tokens == 0
    assert list(store.match(TOKENS).slices(4)) == []
    assert (store.stats().misses, store.stats().size_bytes) == (0, 0)
    assert make().insert([]) is None


# No other's


@pytest.mark.parametrize(
    "other",
    [
        lambda disk: PrefixCache(fingerprint(tokenizer="u"), "float32", LOTS, BLOCK, disk=disk),
        lambda disk: PrefixCache(fingerprint(), "float16", LOTS, BLOCK, disk=disk),
        lambda disk: PrefixCache(fingerprint(), "float32", LOTS, 2 * BLOCK, disk=disk),
        lambda disk: PrefixCache(
            msgspec.structs.replace(fingerprint(), rope_frequencies=(1.0, 0.2)), "float32", LOTS, BLOCK, disk=disk
        ),
    ],
    ids=["tokenizer", "dtype", "block", "rope"],
)
def test_another_model_finds_nothing(other: Callable[[DiskTier], PrefixCache], tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, LOTS)
    store = make(disk=disk)
    keep(store, TOKENS)
    disk.flush()
    assert other(disk).match(TOKENS).tokens == 0
    check(store, TOKENS, 60)
    store.close()
