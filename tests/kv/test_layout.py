"""The portable layout: sizes, dtypes, and that rows survive every engine's own layout."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from disaggregated_inference.errors import SliceRefused
from disaggregated_inference.kv import (
    KVDType,
    KVLayout,
    KVSlice,
    LayerPlan,
    as_dtype,
    float32_to_bfloat16,
    require_dtype,
)
from disaggregated_inference.kv.dtype import KV_DTYPES, bfloat16_to_float32
from tests.support.engines import ENGINE_OPTIONS, LoadTiny

FULL, SLIDING = LayerPlan(), LayerPlan(kind="sliding", window=128)


def test_sizes_of_the_models_this_is_for() -> None:
    qwen = KVLayout(layers=(FULL,) * 48, kv_heads=4, head_dim=128)
    gpt_oss = KVLayout(layers=(SLIDING, FULL) * 18, kv_heads=8, head_dim=64)
    assert qwen.token_bytes("bfloat16") == 98_304
    assert qwen.total_bytes(8192, "bfloat16") == 8192 * 98_304
    assert gpt_oss.token_bytes("bfloat16") == 36_864
    assert gpt_oss.total_bytes(8192, "bfloat16") == 8192 * 36_864 + 18 * 128 * 2048
    assert gpt_oss.total_bytes(10, "bfloat16") == 10 * 2 * 36_864


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 200))
def test_sliding_slices_always_cover_the_window(tokens: int, chunk: int, window: int) -> None:
    """After every chunk the rows sent so far hold the last `window` positions: a state to go on from."""
    plan = LayerPlan(kind="sliding", window=window)
    sent: set[int] = set()
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        rows = range(plan.first_row(start, stop), stop)
        assert len(rows) <= window
        sent |= set(rows)
        assert set(range(max(0, stop - window), stop)) <= sent


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    import torch

    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(float32_to_bfloat16(array), expected)
    assert np.array_equal(float32_to_bfloat16(bfloat16_to_float32(expected)), expected)


def test_bfloat16_keeps_nan_and_infinity() -> None:
    values = bfloat16_to_float32(float32_to_bfloat16(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)))
    assert np.isnan(values[0])
    assert values[1:].tolist() == [np.inf, -np.inf, 0.0, -0.0]


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_no_copy_where_nothing_changes(dtype: KVDType) -> None:
    rows = np.zeros((4, 2, 8), {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}[dtype])
    assert as_dtype(rows, dtype, dtype) is rows


@given(st.sampled_from(KV_DTYPES), st.sampled_from(KV_DTYPES))
def test_conversion_through_a_wider_dtype_is_exact(narrow: KVDType, wide: KVDType) -> None:
    values = np.arange(-64, 64, dtype=np.float32) / 8  # exact in all three
    stored = as_dtype(values, "float32", narrow)
    assert np.array_equal(as_dtype(as_dtype(stored, narrow, wide), wide, "float32"), values)


def test_dtype_names_from_outside_are_checked() -> None:
    assert require_dtype("float16") == "float16"
    with pytest.raises(SliceRefused, match="bfloat16, float16, float32"):
        require_dtype("int4")


def _random_slice(layer: int, start: int, tokens: int, dtype: KVDType, seed: int) -> KVSlice:
    noise = np.random.default_rng(seed).standard_normal((2, tokens, 2, 16)).astype(np.float32)
    rows = as_dtype(noise, "float32", dtype)
    return KVSlice(layer, start, dtype, rows[0], rows[1])


def _values(rows: NDArray[np.generic], dtype: KVDType) -> NDArray[np.float32]:
    return as_dtype(rows, dtype, "float32")


@pytest.mark.parametrize("name", ENGINE_OPTIONS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(1, 150), min_size=1, max_size=5), dtype=st.sampled_from(KV_DTYPES), seed=st.integers(0, 9)
)
def test_rows_survive_an_engine(name: str, cuts: list[int], dtype: KVDType, seed: int, tiny_engine: LoadTiny) -> None:
    """Slices of any dtype, in any chunks, layers out of order, come out of the engine as they went in."""
    engine = tiny_engine(name, "gpt_oss")
    layers, total = engine.spec.layout.layers, sum(cuts)
    whole = [_random_slice(layer, 0, total, dtype, seed + layer) for layer in range(len(layers))]
    sequence = engine.open(total)
    start = 0
    for index, count in enumerate(cuts):
        stop = start + count
        for layer in sorted(range(len(layers)), key=lambda n: (n * 7 + index) % 4):
            first = layers[layer].first_row(start, stop)
            keys, values = whole[layer].keys[first:stop], whole[layer].values[first:stop]
            engine.place(sequence, KVSlice(layer, first, dtype, keys, values))
        start = stop
        engine.commit(sequence, stop)
    for piece in (piece.copy() for piece in engine.export(sequence)):
        assert piece.stop == total
        assert piece.start == layers[piece.layer].first_row(0, total)
        expected = whole[piece.layer]
        for mine, sent in ((piece.keys, expected.keys), (piece.values, expected.values)):
            assert np.array_equal(_values(mine, piece.dtype), _values(sent[piece.start :], dtype))
    engine.close(sequence)
