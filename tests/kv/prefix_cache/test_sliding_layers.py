"""Models with sliding layers: a match ends at a snapshot of the windows."""

import pytest

from disaggregated_inference.kv import KVDType, KVLayout, KVSlice, LayerPlan
from disaggregated_inference.kv.dtype import KV_DTYPES
from tests.support.prefix_rows import SLIDING, TOKENS, WINDOW, check, fill, keep, make, piece, rows


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
