"""What a prefix store gives back is what was put in, for these tokens of this model, and never more than its limit."""

import logging
import math
import random
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggregated_inference.errors import SliceRefused
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
    salt_of,
)
from disaggregated_inference.kv.dtype import KV_DTYPES
from disaggregated_inference.kv.prefix_cache import DiskTier, Insertion, PrefixCache
from disaggregated_inference.kv.prefix_cache.blocks import chain, shared_tokens, words

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


# Addresses


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


# Limits


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    clock = Clock()
    store = make(limit=40 * FULL_BYTES, clock=clock)
    one, two = TOKENS[:20], list(range(500, 520))
    keep(store, one)
    keep(store, two)
    check(store, one, 20)
    keep(store, list(range(700, 710)))
    check(store, two, 8)  # the last four, then eight more
    check(store, one, 20)
    seen = store.stats()
    assert seen.evicted_blocks == 2
    assert seen.size_bytes == (20 + 8 + 10) * FULL_BYTES


def test_a_sequence_larger_than_the_limit_is_kept_in_part() -> None:
    store = make(limit=21 * FULL_BYTES)
    keep(store, list(range(500, 520)))
    assert keep(store, TOKENS) == 21
    check(store, TOKENS, 21)
    assert store.stats().size_bytes == 21 * FULL_BYTES
    assert store.insert(TOKENS) is None  # what is there is what there is room for
    check(store, TOKENS, 21)


def test_unfinished_insertions_count_and_are_not_evicted() -> None:
    store = make(limit=30 * FULL_BYTES)
    keep(store, TOKENS[:8])
    first = store.insert(TOKENS[:24])
    second = store.insert(list(range(500, 530)))
    assert first is not None
    assert second is not None
    assert store.stats().size_bytes == 30 * FULL_BYTES
    assert store.insert(list(range(700, 710))) is None
    assert fill(second, list(range(500, 530))) == 6
    assert fill(first, TOKENS[:24]) == 24  # the block it goes on from stayed
    check(store, TOKENS, 24)


def test_what_an_insertion_goes_on_from_stays_to_its_root() -> None:
    store = make(limit=40 * FULL_BYTES)
    keep(store, TOKENS[:24])
    insertion = store.insert(TOKENS[:30])
    keep(store, list(range(700, 708)))  # used later, and yet it has to go
    assert keep(store, list(range(500, 540))) == 10
    assert fill(insertion, TOKENS[:30]) == 30
    check(store, TOKENS, 30)


def test_old_blocks_go() -> None:
    clock = Clock()
    store = make(clock=clock, max_age_s=10)
    keep(store, TOKENS[:20])
    clock.now += 8
    keep(store, list(range(500, 508)))
    check(store, TOKENS, 8, most=8)
    clock.now += 5
    check(store, TOKENS, 8)
    assert store.stats().blocks == 2
    clock.now += 100
    assert store.insert(TOKENS[:1]) is not None
    assert store.stats().blocks == 0


def test_a_match_survives_eviction() -> None:
    for layout, length in ((FULL, 20), (SLIDING, 20)):
        store = make(layout)
        keep(store, TOKENS[:20])
        match = store.match(TOKENS)
        evict_all(store)
        assert (store.stats().size_bytes, store.stats().blocks) == (0, 0)
        keep(store, list(range(500, 520)))
        assert match.tokens == length
        verify(list(match.slices(7)), TOKENS, store, length, 7)


STEPS = st.lists(
    st.tuples(st.sampled_from("kkkmua"), st.integers(0, 3), st.integers(1, 40), st.integers(1, 17)), max_size=30
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps=STEPS, limit=st.integers(1, 90), sliding=st.booleans())
def test_never_above_the_limit_and_never_wrong(
    steps: list[tuple[str, int, int, int]], limit: int, sliding: bool
) -> None:
    """Random sequences that share beginnings: kept, matched, abandoned, left open, aged."""
    clock = Clock()
    layout = SLIDING if sliding else FULL
    limit_bytes = limit * FULL_BYTES
    store = make(layout, limit=limit_bytes, clock=clock, max_age_s=20)
    open_ones: list[tuple[Insertion, list[int]]] = []
    for what, seed, length, chunk in steps:
        clock.now += chunk / 4
        tokens = [*TOKENS[: seed * 5], *random.Random(seed).choices(range(300), k=length)]
        if what == "m":
            match = store.match(tokens)
            verify(list(match.slices(chunk)), tokens, store, match.tokens, chunk)
        elif insertion := store.insert(tokens):
            if what == "k":
                fill(insertion, tokens, layout, chunk)
            elif what == "a":
                insertion.abandon()
            else:
                open_ones.append((insertion, tokens))
        assert store.stats().size_bytes <= limit_bytes
    for insertion, tokens in open_ones:
        fill(insertion, tokens, layout)
        assert store.stats().size_bytes <= limit_bytes
        match = store.match(tokens)
        verify(list(match.slices(9)), tokens, store, match.tokens, 9)
    evict_all(store)
    assert store.stats().size_bytes == 0


# Sliding layers


def test_sliding_layers_end_matches_at_a_snapshot() -> None:
    store = make(SLIDING)
    keep(store, TOKENS[:30], chunk=7)  # stops at 7, 14, 21, 28, 30: the last four are kept
    check(store, TOKENS, 30)
    check(store, TOKENS, 28, most=29)
    check(store, TOKENS, 21, most=27)
    check(store, TOKENS, 14, most=20)
    check(store, TOKENS, 0, most=13)
    check(store, [*TOKENS[:25], 1, 2], 21)
    row = SLIDING.row_bytes("float32")
    assert store.stats().size_bytes == row * (30 * 2 + 4 * (WINDOW + 3))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_snapshots_shorter_than_the_window_and_other_dtypes(dtype: KVDType) -> None:
    store = make(SLIDING, dtype)
    keep(store, TOKENS[:5], chunk=2, dtype="bfloat16")
    for most in (2, 4, 5):
        check(store, TOKENS, most, most=most)


def test_going_on_from_a_snapshot_in_small_steps() -> None:
    """A short turn after a hit: its rows alone do not fill a window, the store knows the rest."""
    store = make(SLIDING)
    keep(store, TOKENS[:20], chunk=20)
    insertion = store.insert(TOKENS[:22])
    assert insertion is not None
    assert insertion.start == 22 - WINDOW
    assert fill(insertion, TOKENS[:22], SLIDING, start=20) == 22
    check(store, TOKENS, 22)
    check(store, TOKENS, 20, most=21)


def test_an_export_from_start_is_enough() -> None:
    store = make(SLIDING)
    keep(store, TOKENS[:20], chunk=20)
    other = [*TOKENS[:18], 1, 2, 3]
    insertion = store.insert(other)
    assert insertion is not None
    assert insertion.start == 15
    assert fill(insertion, other, SLIDING, chunk=100) == 21
    check(store, other, 21)
    check(store, TOKENS, 20)


def test_only_the_snapshot_is_new() -> None:
    store = make(SLIDING)
    keep(store, TOKENS[:30], chunk=30)
    check(store, TOKENS, 0, most=29)
    before = store.stats()
    insertion = store.insert(TOKENS[:20])
    assert insertion is not None
    assert insertion.start == 14
    assert fill(insertion, TOKENS[:20], SLIDING, chunk=6) == 20
    check(store, TOKENS, 20, most=29)
    assert store.stats().blocks == before.blocks
    assert store.insert(TOKENS[:20]) is None


def test_rows_without_a_window_are_no_hit() -> None:
    store = make(SLIDING)
    insertion = store.insert(TOKENS[:20])
    assert insertion is not None
    for layer in (1, 3):
        insertion.put(piece(TOKENS, SLIDING, layer, 0, 20, "float32"))
    insertion.put(piece(TOKENS, SLIDING, 0, 0, 20, "float32"))
    insertion.put(KVSlice(2, 18, "float32", *rows(TOKENS, 2, 18, 20)))  # two rows of three
    assert insertion.finish() == 20
    check(store, TOKENS, 0)


def test_a_snapshot_beyond_the_rows_is_not_kept() -> None:
    """Else a longer block that goes on in another way would inherit it."""
    store = make(SLIDING)
    insertion = store.insert(TOKENS[:14])
    assert insertion is not None
    for layer, stop in ((0, 14), (1, 13), (2, 14), (3, 14)):
        insertion.put(piece(TOKENS, SLIDING, layer, 0, stop, "float32"))
    assert insertion.finish() == 13
    other = [*TOKENS[:13], 1, 2, 3]
    keep(store, other, chunk=16)
    check(store, other, 0, most=15)


def test_a_short_block_hands_its_snapshots_on() -> None:
    store = make(SLIDING)
    keep(store, TOKENS[:11], chunk=11)
    keep(store, TOKENS[:14], chunk=14)
    check(store, TOKENS, 14)
    check(store, TOKENS, 11, most=13)
    assert store.stats().blocks == 2


def test_snapshots_of_a_block_are_bounded() -> None:
    store = make(SLIDING)
    for length in range(9, 16):
        keep(store, TOKENS[:length], chunk=20)
    row = SLIDING.row_bytes("float32")
    assert store.stats().size_bytes == row * (15 * 2 + 4 * (WINDOW + 3))
    check(store, TOKENS, 12, most=12)
    check(store, TOKENS, 0, most=11)


def test_a_sliding_model_keeps_all_or_nothing() -> None:
    store = make(SLIDING, limit=60 * SLIDING.token_bytes("float32"))
    assert store.insert(TOKENS) is None
    assert keep(store, TOKENS[:20]) == 20


def test_layers_that_all_slide_are_not_kept() -> None:
    layout = KVLayout(layers=(LayerPlan("sliding", 4),) * 2, kv_heads=2, head_dim=4)
    assert make(layout).insert(TOKENS) is None


# Threads


@pytest.mark.parametrize("layout", [FULL, SLIDING], ids=["full", "sliding"])
def test_many_threads(layout: KVLayout, tmp_path: Path) -> None:
    limit = 120 * FULL_BYTES
    store = make(layout, limit=limit, disk=DiskTier(tmp_path, 40_000))
    over: list[int] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            tokens = [*TOKENS[: chance.randrange(40)], *chance.choices(range(3), k=chance.randrange(1, 20))]
            match = store.match(tokens)
            verify(list(match.slices(9)), tokens, store, match.tokens, 9)
            insertion = store.insert(tokens)
            if insertion and chance.random() < 0.2:
                insertion.abandon()
            else:
                fill(insertion, tokens, layout, chance.randrange(1, 20))
            over.append(max(0, store.stats().size_bytes - limit))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    store.close()
    assert not any(over)
    assert store.stats().hits > 0
    evict_all(store)
    assert store.stats().size_bytes == 0


def test_layers_put_by_several_threads() -> None:
    store = make(SLIDING)
    insertion = store.insert(TOKENS)
    assert insertion is not None

    def put(layer: int) -> None:
        for at in range(0, 60, 4):
            insertion.put(piece(TOKENS, SLIDING, layer, at, at + 4, "float32"))

    threads = [threading.Thread(target=put, args=(layer,)) for layer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert insertion.finish() == 60
    check(store, TOKENS, 60)
    check(store, TOKENS, 56, most=59)


# Disk


Reopen = Callable[..., PrefixCache]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Reopen]:
    """A store over the same folder, as after a restart; the one before is closed."""
    made: list[PrefixCache] = []

    def again(layout: KVLayout = FULL, disk_limit: int = LOTS, **more: object) -> PrefixCache:
        for store in made:
            store.close()
        made.append(make(layout, disk=DiskTier(tmp_path, disk_limit), **more))  # type: ignore[arg-type]
        return made[-1]

    yield again
    made[-1].close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


@pytest.mark.parametrize("layout", [FULL, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_restart_forgets_nothing(reopen: Reopen, layout: KVLayout, dtype: KVDType) -> None:
    other = [*TOKENS[:16], 1, 2, 3]
    store = reopen(layout, dtype=dtype)
    keep(store, TOKENS[:21], chunk=21)
    keep(store, other, chunk=21)
    store = reopen(layout, dtype=dtype)
    assert store.stats().disk_blocks == 4
    check(store, TOKENS, 21)
    check(store, [*other, 4], 19)
    check(store, [9, *TOKENS], 0)
    seen = store.stats()
    assert (seen.disk_hits, seen.blocks, seen.hits) == (4, 4, 2)
    check(store, TOKENS, 21)
    assert store.stats().disk_hits == 4  # from memory now
    assert keep(store, TOKENS[:40], chunk=10) == 40
    check(reopen(layout, dtype=dtype), TOKENS, 40)


def test_a_longer_block_replaces_the_short_one_on_disk(reopen: Reopen, tmp_path: Path) -> None:
    store = reopen()
    for length in (10, 12, 16):
        keep(store, TOKENS[:length])
    reopen().close()
    assert len(files(tmp_path)) == 2
    check(reopen(), TOKENS, 16)


def test_files_are_for_this_user_alone(reopen: Reopen, tmp_path: Path) -> None:
    """They hold users' prompts."""
    keep(reopen(), TOKENS[:21])
    reopen().close()
    folders = {path for file in files(tmp_path) for path in file.parents if path.is_relative_to(tmp_path)}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files(tmp_path)} == {0o600}
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


def test_new_snapshots_reach_the_disk(reopen: Reopen) -> None:
    store = reopen(SLIDING)
    keep(store, TOKENS[:30], chunk=30)
    fill(store.insert(TOKENS[:20]), TOKENS[:20], SLIDING, chunk=6)
    store = reopen(SLIDING)
    check(store, TOKENS, 20, most=29)
    check(store, TOKENS, 30)


def test_a_snapshot_on_disk_for_a_block_in_memory(reopen: Reopen) -> None:
    keep(reopen(SLIDING), TOKENS[:16], chunk=12)
    store = reopen(SLIDING)
    keep(store, TOKENS[:16], chunk=16)  # an insertion looks in memory only, and this one makes one snapshot
    check(store, TOKENS, 16)
    assert store.stats().disk_hits == 0
    check(store, TOKENS, 12, most=15)
    assert store.stats().disk_hits == 1


def test_the_disk_limit(reopen: Reopen, tmp_path: Path) -> None:
    store = reopen()
    keep(store, TOKENS[:8])
    store.close()
    one = files(tmp_path)[0].stat().st_size
    store = reopen(disk_limit=3 * one + 50)
    for start in range(0, 600, 100):
        keep(store, range(start, start + 8))
        store.disk.flush()  # type: ignore[union-attr]
        assert sum(path.stat().st_size for path in files(tmp_path)) == store.stats().disk_bytes <= 3 * one + 50
    store = reopen(disk_limit=2 * one + 50)
    assert store.stats().disk_blocks == 2
    check(store, range(500, 508), 8)
    check(store, range(300, 308), 0)
    assert reopen(disk_limit=10).stats().disk_blocks == 0
    assert files(tmp_path) == []


def test_a_sequence_loses_its_end_first(reopen: Reopen, tmp_path: Path) -> None:
    keep(reopen(), TOKENS[:32])
    store = reopen()
    size = store.stats().disk_bytes
    store = reopen(disk_limit=size - 1)
    assert store.stats().disk_blocks == 3
    check(store, TOKENS, 24)


def test_what_is_used_stays_on_disk(reopen: Reopen) -> None:
    store = reopen()
    for start in (0, 100, 200):
        keep(store, range(start, start + 8))
    store.disk.flush()  # type: ignore[union-attr]
    check(store, range(8), 8)  # in memory: the disk hears of it all the same
    size = store.stats().disk_bytes
    store = reopen(disk_limit=size - 1)
    check(store, range(8), 8)
    check(store, range(100, 108), 0)


def test_memory_smaller_than_what_is_on_disk(reopen: Reopen) -> None:
    keep(reopen(), TOKENS)
    limit = 20 * FULL_BYTES
    store = reopen(limit=limit)
    check(store, TOKENS, 16)
    assert store.stats().size_bytes == 16 * FULL_BYTES
    other = list(range(500, 520))
    keep(store, other)
    check(store, other, 20)
    check(store, TOKENS, 16)
    assert store.stats().size_bytes <= limit


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 30, 200, -200, -1])
@pytest.mark.parametrize("when", ["before the start", "after the start"])
def test_a_damaged_file_is_never_served(
    reopen: Reopen, tmp_path: Path, at: int, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep(reopen(), TOKENS[:8])
    store = reopen()
    if when == "before the start":
        damage(files(tmp_path)[0], at)
        store = reopen()
    else:
        damage(files(tmp_path)[0], at)
    check(store, TOKENS, 0)
    assert (store.stats().disk_damaged, store.stats().disk_blocks, store.stats().disk_bytes) == (1, 0, 0)
    assert files(tmp_path) == []
    assert store.stats().size_bytes == 0
    assert keep(store, TOKENS[:8]) == 8
    check(reopen(), TOKENS, 8)


def test_damage_in_the_middle_leaves_the_beginning(reopen: Reopen, tmp_path: Path) -> None:
    keep(reopen(), TOKENS[:24])
    store = reopen()
    second = chain(store._root, TOKENS, BLOCK)[1].hash.hex()
    damage(next(path for path in files(tmp_path) if path.stem == second), -20)
    check(store, TOKENS, 8)
    assert store.stats().disk_damaged == 1


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_truncated_files_are_removed_at_the_start(reopen: Reopen, tmp_path: Path, size: int) -> None:
    keep(reopen(), TOKENS[:8])
    reopen()
    path = files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:size])
    store = reopen()
    check(store, TOKENS, 0)
    assert not path.exists()


def test_foreign_files(reopen: Reopen, tmp_path: Path) -> None:
    """Ours to remove is what ends in .kv in a folder named like ours, and nothing else."""
    keep(reopen(), TOKENS[:8])
    reopen()
    ours = files(tmp_path)[0]
    (ours.parent / "note.txt").write_text("mine")
    (ours.parent / "renamed.kv").write_bytes(ours.read_bytes())
    (ours.parent / "folder.kv").mkdir()
    (tmp_path / "widgets").mkdir()
    (tmp_path / "widgets" / "button.kv").write_text("mine")
    check(reopen(), TOKENS, 8)
    assert not (ours.parent / "renamed.kv").exists()
    assert (ours.parent / "note.txt").exists()
    assert (tmp_path / "widgets" / "button.kv").exists()


def test_other_models_count_and_can_be_evicted(reopen: Reopen, tmp_path: Path) -> None:
    keep(reopen(), TOKENS[:16])
    store = reopen(dtype="float16")
    size = store.stats().disk_bytes
    assert store.stats().disk_blocks == 2
    store = reopen(dtype="float16", disk_limit=size)
    keep(store, TOKENS[:8])
    store = reopen(dtype="float16", disk_limit=size)
    check(store, TOKENS, 8)
    assert store.stats().disk_blocks == 2  # one of each model


def test_a_file_that_vanished_is_a_miss(reopen: Reopen, tmp_path: Path) -> None:
    keep(reopen(), TOKENS[:8])
    store = reopen()
    files(tmp_path)[0].unlink()
    check(store, TOKENS, 0)
    assert (store.stats().disk_blocks, store.stats().disk_damaged) == (0, 0)


def test_a_disk_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = []

    def replace(self: Path, target: Path) -> None:
        refused.append(target)
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(Path, "replace", replace)
    store = make(disk=DiskTier(tmp_path, LOTS))
    with caplog.at_level(logging.WARNING):
        assert keep(store, TOKENS) == 60
        store.close()
    assert len(refused) == 8
    assert len(caplog.records) == 1
    check(store, TOKENS, 60)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = make(disk=DiskTier(tmp_path / "file" / "kv", LOTS))
    assert keep(store, TOKENS) == 60
    store.close()
    check(store, TOKENS, 60)
    assert len(caplog.records) == 1
    assert "name another folder with --prefix-disk" in caplog.text


def test_a_full_queue_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = DiskTier._write_block

    def slow(self: DiskTier, *given: object) -> None:
        gate.wait(10)
        write(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskTier, "_write_block", slow)
    store = make(disk=DiskTier(tmp_path, LOTS, queue_blocks=2))
    keep(store, TOKENS)
    assert store.stats().disk_dropped >= 5
    gate.set()
    store.close()
    assert store.stats().disk_blocks + store.stats().disk_dropped == 8


def test_what_left_memory_before_its_turn_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = DiskTier._write

    def slow(self: DiskTier, *given: object) -> None:
        gate.wait(10)
        write(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskTier, "_write", slow)
    store = make(disk=DiskTier(tmp_path, LOTS))
    keep(store, TOKENS)
    evict_all(store)
    gate.set()
    store.close()
    assert (store.stats().disk_blocks, store.stats().disk_dropped) == (0, 8)


# Salts

ANN, BOB = Salt(salt_of("ann")), Salt(salt_of("bob"))


@pytest.mark.parametrize("layout", [FULL, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("other", [BOB, NO_SALT], ids=["another salt", "no salt"])
def test_a_salt_finds_only_its_own(layout: KVLayout, other: Salt) -> None:
    store = make(layout)
    keep(store, TOKENS, salt=ANN)
    check(store, TOKENS, 60, salt=ANN)
    for length in (1, 7, 8, 9, 59, 60):
        check(store, TOKENS[:length], 0, salt=other)
    keep(store, TOKENS, salt=other)
    check(store, TOKENS, 60, salt=other)
    assert store.stats().blocks == 16, "nothing is shared, not even the first block"


def test_the_disk_tier_keeps_salts_apart(reopen: Reopen) -> None:
    keep(reopen(), TOKENS, salt=ANN)
    store = reopen()
    for salt in (BOB, NO_SALT):
        store.recall(TOKENS, salt)
        check(store, TOKENS, 0, salt=salt)
    assert store.stats().disk_hits == 0
    keep(store, TOKENS[:20], salt=BOB)
    store = reopen()
    check(store, TOKENS, 20, salt=BOB)
    check(store, TOKENS, 60, salt=ANN)


def test_a_longer_block_takes_the_place_of_its_own_salt_only() -> None:
    store = make()
    keep(store, TOKENS[:5], salt=ANN)
    keep(store, TOKENS[:7], salt=BOB)
    check(store, TOKENS, 5, salt=ANN)
    check(store, TOKENS, 7, salt=BOB)


@pytest.mark.parametrize("layout", [FULL, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_leading_tokens_may_be_shared(reopen: Reopen, layout: KVLayout, on_disk: bool) -> None:
    """Whole blocks of them: 20 tokens are two blocks of 8."""
    mine, other = ANN._replace(shared_tokens=20), BOB._replace(shared_tokens=20)
    tokens, store = TOKENS[:30], reopen(layout)
    fill(store.insert(tokens, mine), tokens, layout, chunk=8)
    store = reopen(layout) if on_disk else store
    check(store, tokens, 30, salt=mine)
    check(store, tokens, 16, salt=other)
    check(store, tokens[:12], 8 if layout is SLIDING else 12, salt=other)
    check(store, tokens, 0, salt=BOB)
    changed = [*tokens[:18], 1, *tokens[19:]]
    fill(store.insert(changed, other), changed, layout, chunk=8)
    check(store, tokens, 30, salt=mine)
    check(store, changed, 30, salt=other)


def test_shared_blocks_stay_while_private_ones_follow_them() -> None:
    store = make(limit=9 * BLOCK * FULL_BYTES)
    mine = ANN._replace(shared_tokens=24)
    keep(store, TOKENS, salt=mine)
    keep(store, list(range(8)), salt=BOB)
    keep(store, list(range(50, 66)), salt=BOB)  # evicts the end of the first sequence, never its shared beginning
    assert 24 <= store.match(TOKENS, None, mine).tokens < 60
    evict_all(store)
    assert store.stats().size_bytes == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.lists(st.integers(0, 1), max_size=24)), max_size=12))
def test_a_match_never_tells_of_another_salt(sequences: list[tuple[int, int, list[int]]]) -> None:
    """Beyond the shared blocks, a match is the longest beginning that the same salt has left."""
    store, left, shared = make(), dict[int, list[list[int]]](), [0] * BLOCK
    for number, shared_blocks, tail in sequences:
        tokens = [*shared, *tail]
        salt = Salt(f"salt-{number}", BLOCK * min(shared_blocks, 1))
        known = store.match(tokens, None, salt).tokens
        own = max((_common(tokens, each) for each in left.get(salt.shared_tokens * 10 + number, [])), default=0)
        assert known <= max(own, salt.shared_tokens), "no more than its own, or what is shared"
        keep(store, tokens, salt=salt)
        left.setdefault(salt.shared_tokens * 10 + number, []).append(tokens)


def _common(one: list[int], two: list[int]) -> int:
    return shared_tokens(words(one), words(two))
