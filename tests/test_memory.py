"""A hand-off holds the KV itself and at most one chunk beside it, and gives everything back."""

import gc

import mlx.core as mx
import pytest

from disaggregated_inference.engines import Engine
from disaggregated_inference.errors import KVMemoryFull
from disaggregated_inference.kv import KVSlice
from tests.conftest import LoadTiny
from tests.handoff import prompt_of, read_prompt, receive


def test_mlx_peak_during_a_hand_off(tiny_engine: LoadTiny) -> None:
    engine = tiny_engine("mlx", "llama")
    length, chunk = 4000, 500
    slices, _ = read_prompt(tiny_engine("torch", "llama"), prompt_of(length), chunk)
    one_chunk = sum(piece.size_bytes for piece in slices[: len(engine.spec.layout.layers)])
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    sequence = receive(engine, slices, length, answer=0)
    held, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
    kv_bytes = engine.spec.kv_bytes(length, "float32")
    assert held == pytest.approx(kv_bytes, rel=0.02)
    assert peak <= kv_bytes + one_chunk
    engine.close(sequence)
    gc.collect()
    assert mx.get_active_memory() - before < 0.02 * kv_bytes


def test_torch_rows_return(tiny_engine: LoadTiny) -> None:
    engine = tiny_engine("torch", "gpt_oss")
    arena = engine.arena  # type: ignore[attr-defined]
    assert arena.used_rows == 0
    slices, _ = read_prompt(engine, prompt_of(300), 64)
    sequences = [receive(engine, slices, 300) for _ in range(8)]
    assert arena.used_rows == 8 * 364
    for sequence in sequences[::2] + sequences[1::2]:
        engine.close(sequence)
    assert arena.used_rows == 0
    assert len(arena._rows[0]._gaps) == 1


def test_torch_says_when_there_is_no_room(tiny_engine: LoadTiny) -> None:
    engine = tiny_engine("torch", "gpt_oss")
    sequences = [engine.open(8) for _ in range(64)]
    with pytest.raises(KVMemoryFull, match="no room for 128 tokens"):  # rings run out first
        engine.open(8)
    for sequence in sequences:
        engine.close(sequence)
    assert engine.arena.used_rows == 0  # type: ignore[attr-defined]


def test_slices_on_the_cpu_are_views_not_copies(tiny_engine: LoadTiny) -> None:
    engine: Engine = tiny_engine("torch", "llama")
    sequence = engine.open(100)
    slices: list[KVSlice] = []
    engine.prefill(sequence, prompt_of(100), slices.append)
    assert all(not piece.keys.flags.owndata and piece.keys.flags.c_contiguous for piece in slices)
    engine.close(sequence)
