"""A hand-off holds the KV itself and at most one chunk beside it; sequences together, what was reckoned for each."""

import gc
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch

from disaggregated_inference.engines import Engine, Sequence, chunks, load_engine, memory
from disaggregated_inference.engines.mlx.caches import FullLayer
from disaggregated_inference.engines.torch import engine as torch_engine
from disaggregated_inference.errors import KVMemoryFull, SequenceBroken
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.models import ModelFiles
from tests.support.engines import ENGINE_OPTIONS, LoadTiny
from tests.support.handoff import alone, forced_logits, prompt_of, read_prompt, receive


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
    rows = arena._rows[0]
    rows.give_back(rows.take(rows.count - rows.used))  # the free rows are one run again


def test_torch_says_when_there_is_no_room(tiny_engine: LoadTiny) -> None:
    engine = tiny_engine("torch", "gpt_oss")
    sequences = [engine.open(8) for _ in range(64)]
    with pytest.raises(KVMemoryFull, match="no memory for 128 tokens"):  # rings run out first
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


Fill = Callable[[Engine, int, int], Sequence]


@pytest.fixture
def filled(tiny_engine: LoadTiny) -> Fill:
    """A sequence with a prompt of some length in it, read by torch, which is quicker at it."""

    def fill(engine: Engine, length: int, capacity: int) -> Sequence:
        slices, _ = read_prompt(tiny_engine("torch", engine.spec.architecture), prompt_of(length), 500)
        return receive(engine, slices, length, capacity - length)

    return fill


MIXED = ((5, 20), (100, 40), (300, 33), (1000, 60), (2000, 25), (100, 700), (250, 30), (2000, 90))  # prompt, answer


@pytest.mark.slow
@pytest.mark.parametrize("target", ENGINE_OPTIONS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss"])
def test_batches_of_all_sizes_equal_one_by_one(architecture: str, target: str, tiny_engine: LoadTiny) -> None:
    """Short and long together, joining, pausing and leaving at random; and never more memory than was reckoned."""
    engine = tiny_engine(target, architecture)
    chance = np.random.default_rng(len(architecture))
    longest = {length: alone(engine, prompt_of(length), 60) for length in {length for length, _ in MIXED}}
    expected = [longest[length][:answer] for length, answer in MIXED]
    assert engine.kv_held_bytes == 0
    waiting: list[int] = chance.permutation(len(MIXED)).tolist()
    running: dict[int, Sequence] = {}
    written: dict[int, list[int]] = {}

    def require_within_cost() -> None:
        assert engine.kv_held_bytes <= sum(engine.kv_cost(sequence.capacity) for sequence in running.values())

    while waiting or running:
        if waiting and (len(running) < 2 or chance.random() < 0.3):
            index = waiting.pop()
            running[index] = engine.open(sum(MIXED[index]))
            require_within_cost()
            for part in chunks(prompt_of(MIXED[index][0]), 700):
                logits = engine.prefill(running[index], part)
                require_within_cost()
            written[index] = logits.greedy().tolist()
        order = [index for index in chance.permutation(list(running)).tolist() if chance.random() < 0.9]
        if order:
            logits = engine.step([running[i] for i in order], [written[i][-1] for i in order])
            require_within_cost()
            for i, token in zip(order, logits.greedy().tolist(), strict=True):
                written[i].append(token)
        for index in [i for i in running if len(written[i]) == len(expected[i])]:
            engine.close(running.pop(index))
            require_within_cost()
    assert engine.kv_held_bytes == 0
    assert [written[i] for i in range(len(MIXED))] == expected


@pytest.mark.parametrize("target", ENGINE_OPTIONS)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_a_step_may_come_before_any_prompt(architecture: str, target: str, tiny_engine: LoadTiny) -> None:
    """Two empty sequences of one size and one of another: every token of theirs is a step's."""
    engine = tiny_engine(target, architecture)
    prompts = [prompt_of(262, seed=seed) for seed in range(3)]  # past the 256 rows in which mlx-lm grows
    sequences = [engine.open(capacity) for capacity in (262, 400, 700)]
    for column in zip(*prompts, strict=True):
        logits = engine.step(sequences, column)
        assert engine.kv_held_bytes <= sum(engine.kv_cost(sequence.capacity) for sequence in sequences)
    expected = np.concatenate([forced_logits(engine, prompt, []) for prompt in prompts])
    assert np.abs(logits.numpy() - expected).max() < 1e-3
    for sequence in sequences:
        engine.close(sequence)


def test_mlx_does_not_pad_the_short_to_the_long(tiny_engine: LoadTiny, filled: Fill) -> None:
    """One long sequence beside fifteen short ones takes its own room, not sixteen times that."""
    engine = tiny_engine("mlx", "llama")
    gc.collect()
    before = mx.get_active_memory()
    sequences = [filled(engine, 3900, 4000), *(filled(engine, 100, 200) for _ in range(15))]
    needed = sum(engine.spec.kv_bytes(sequence.capacity, "float32") for sequence in sequences)
    padded = 16 * engine.spec.kv_bytes(4000, "float32")
    mx.reset_peak_memory()
    for _ in range(5):
        engine.step(sequences, [7] * 16).greedy().tolist()
    assert engine.kv_held_bytes == needed
    assert mx.get_peak_memory() - before < 1.5 * needed < 0.2 * padded
    for sequence in sequences:
        engine.close(sequence)
    assert engine.kv_held_bytes == 0


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_mlx_joins_and_leaves_a_layer_at_a_time(architecture: str, tiny_engine: LoadTiny, filled: Fill) -> None:
    """Old and new of one layer in four exist side by side, and what leaves is not kept alive by what stays."""
    engine = tiny_engine("mlx", architecture)
    gc.collect()
    before = mx.get_active_memory()
    sequences = [filled(engine, length, 4096) for length in (3900, 2100, 2500, 3000)]
    largest_layer = 4 * 4096 * engine.spec.layout.row_bytes("float32")
    held = engine.kv_held_bytes
    for batch in (sequences[:2], sequences, sequences[1:], sequences[::-1]):
        mx.reset_peak_memory()
        engine.step(batch, [7] * len(batch)).greedy().tolist()
        assert mx.get_peak_memory() - before < held + 2.5 * largest_layer
        assert engine.kv_held_bytes == pytest.approx(held, rel=0.02)
        assert mx.get_active_memory() - before == pytest.approx(held, rel=0.02)
    engine.close(sequences.pop(0))
    assert mx.get_active_memory() - before == pytest.approx(engine.kv_held_bytes, rel=0.02)
    for sequence in sequences:
        engine.close(sequence)
    assert engine.kv_held_bytes == 0


@pytest.mark.parametrize("name", ENGINE_OPTIONS)
def test_what_is_held_while_slices_arrive(name: str, tiny_engine: LoadTiny) -> None:
    """In small chunks, behind rows that are committed: a sliding layer holds both, and counts both."""
    engine = tiny_engine(name, "gpt_oss")
    slices, _ = read_prompt(engine, prompt_of(600), 60)
    layers = len(engine.spec.layout.layers)
    sequence = engine.open(700)
    before = engine.kv_held_bytes
    for piece in slices[:layers]:
        engine.place(sequence, piece)
    engine.commit(sequence, 60)
    for layer in range(layers):
        for piece in slices[layers + layer :: layers]:
            engine.place(sequence, piece)
            assert engine.kv_held_bytes <= engine.kv_cost(700)
    assert engine.kv_held_bytes > before
    engine.commit(sequence, 600)
    engine.close(sequence)
    assert engine.kv_held_bytes == 0


def test_a_change_of_the_batch_that_fails_breaks_everyone_in_it(
    tiny_engine: LoadTiny, filled: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory left while one leaves: the others' rows are half moved too, though they were not asked for."""
    engine = tiny_engine("mlx", "llama")
    expected = alone(engine, prompt_of(300), 4)
    sequences = [filled(engine, 300, 400) for _ in range(3)]
    other = filled(engine, 300, 1000)
    engine.step([*sequences, other], [expected[0]] * 4)
    moved: list[object] = []

    def fail(layer: FullLayer, extracted: object) -> None:
        moved.append(extracted)
        if len(moved) == 2:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(FullLayer, "restore", fail)
        with pytest.raises(MemoryError):
            next(engine.export(sequences[0]))
    for sequence in sequences:
        with pytest.raises(SequenceBroken):
            engine.step([sequence], [7])
    assert engine.step([other], [expected[1]]).greedy().tolist() == expected[2:3]
    for sequence in (*sequences, other):
        engine.close(sequence)
    assert engine.kv_held_bytes == 0


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_torch_has_room_for_what_was_reckoned(architecture: str, tiny_folder: Callable[[str], Path]) -> None:
    model = ModelFiles(architecture, tiny_folder(architecture))
    engine = load_engine("torch", model, **ENGINE_OPTIONS["torch"] | {"kv_bytes": 8 << 20, "sequences": 16})
    assert 0 < engine.kv_limit_bytes <= 8 << 20
    left = engine.kv_limit_bytes
    sequences: list[Sequence] = []
    while len(sequences) < 16 and left >= engine.kv_cost(1):
        token = engine.spec.kv_token_bytes("float32")
        capacity = min(300, 1 + (left - engine.kv_cost(1)) // token)
        sequences.append(engine.open(capacity))
        left -= engine.kv_cost(capacity)
        assert engine.kv_held_bytes <= engine.kv_limit_bytes - left
    assert len(sequences) > 5
    for sequence in sequences:
        engine.close(sequence)
    assert engine.kv_held_bytes == 0


def test_the_limit_is_an_option_or_a_share_of_what_is_free(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelFiles("llama", tiny_folder("llama"))
    assert load_engine("mlx", model, kv_bytes=12345).kv_limit_bytes == 12345
    free = memory.available_bytes()
    assert 0 < load_engine("mlx", model).kv_limit_bytes < free
    for free, budget in ((1 << 30, 1 << 29), (1 << 40, 4 << 30)):
        monkeypatch.setattr(torch_engine, "available_bytes", lambda free=free: free)
        assert torch_engine.default_kv_bytes(torch.device("cpu")) == budget


def test_free_memory_as_linux_and_macos_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.parse_meminfo("MemTotal:  900 kB\nMemFree:  1 kB\nMemAvailable:     700 kB\n") == 700 * 1024
    told = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free:     10.\nPages active:   99.\n"
        "Pages inactive:  20.\nPages speculative:  3.\nPages wired down:  50.\nPages purgeable:   4.\n"
    )
    assert memory.parse_vm_stat(told) == 37 * 16384
    for parse in (memory.parse_meminfo, memory.parse_vm_stat):
        with pytest.raises(ValueError, match=r"MemAvailable|vm_stat"):
            parse("something else")
    monkeypatch.setattr("platform.system", lambda: "Plan 9")
    assert memory.available_bytes() > 1 << 20
    monkeypatch.setattr("platform.system", lambda: "Darwin")  # without its vm_stat
    assert memory.available_bytes() > 1 << 20
