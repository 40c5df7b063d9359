"""The contract suite: every engine, every pair. A new engine joins by adding its name to ENGINE_OPTIONS.

llama.cpp keeps the contract too, and is in what a single engine must do; as one of a pair, which its half precision
makes a matter of its own, it is in tests/test_llamacpp.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from disaggregated_inference.engines import Engine, Logits, Sequence, load_engine
from disaggregated_inference.errors import ContextTooLong, KVMemoryFull, SequenceBroken, SliceRefused, TokensRefused
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.models import ARCHITECTURES, ModelFiles
from tests.conftest import ENGINE_OPTIONS, LLAMACPP, LoadTiny
from tests.support.handoff import alone, forced_logits, prompt_of, read_prompt, receive, write_answer

ENGINES = tuple(ENGINE_OPTIONS)
EVERY = (*ENGINES, *LLAMACPP)
PROMPTS = (1, 2, 127, 128, 129, 300, 1000)  # around and past the sliding window of 128
CHUNKS = (1, 64, 77, 256)  # 77 divides none of them
OTHER_PROMPTS = (5, 30, 64, 100, 140, 150, 210, 250, 350)  # of other tests
ANSWER = 32
BFLOAT16_TOLERANCE = 0.1  # of the largest logit; two engines on random weights part by 0.05 by themselves

Prefilled = Callable[[str, str, int, int], tuple[list[KVSlice], Logits]]
Oracle = Callable[[str, str, int], list[int]]
LoadSmollm2 = Callable[[str], Engine]
Record = Callable[[str, object], None]


@pytest.fixture(scope="session")
def prefilled(tiny_engine: LoadTiny) -> Prefilled:
    @lru_cache(maxsize=8)
    def run(engine: str, architecture: str, length: int, chunk: int) -> tuple[list[KVSlice], Logits]:
        return read_prompt(tiny_engine(engine, architecture), prompt_of(length), chunk)

    return run


@pytest.fixture(scope="session")
def oracle(tiny_engine: LoadTiny) -> Oracle:
    @lru_cache
    def run(engine: str, architecture: str, length: int) -> list[int]:
        return alone(tiny_engine(engine, architecture), prompt_of(length), ANSWER)

    return run


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_handoff_is_token_exact(
    architecture: str,
    source: str,
    length: int,
    chunk: int,
    target: str,
    tiny_engine: LoadTiny,
    prefilled: Prefilled,
    oracle: Oracle,
) -> None:
    expected = oracle(target, architecture, length)
    slices, logits = prefilled(source, architecture, length, chunk)
    engine = tiny_engine(target, architecture)
    before = engine.counters.prompt_tokens, engine.counters.step_tokens
    tokens = write_answer(engine, receive(engine, slices, length), logits, ANSWER)
    assert tokens == expected
    assert engine.counters.prompt_tokens == before[0], "the decode side read the prompt again"
    assert engine.counters.step_tokens == before[1] + ANSWER - 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_near_ties(architecture: str, tiny_engine: LoadTiny) -> None:
    """The oracle is worth something only if rounding cannot flip it (nor a router's choice), and the prompt matters."""
    engines = [tiny_engine(name, architecture) for name in (ENGINES[0], ENGINES[-1])]
    for length in (*PROMPTS, *OTHER_PROMPTS):
        answer = alone(engines[0], prompt_of(length), 2 * ANSWER)
        logits, mirror = (forced_logits(engine, prompt_of(length), answer) for engine in engines)
        error = np.abs(logits - mirror).max()
        second, first = np.sort(logits, axis=-1)[:, -2:].T
        assert error < 2e-4, f"prompt of {length}: the engines themselves differ by {error}"
        assert (first - second).min() > 2 * error, f"prompt of {length}: a near-tie"
    answers = [alone(engines[0], prompt_of(300, seed=seed), 8) for seed in range(4)]
    assert all(a != b for a, b in pairwise(answers))


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batched_decode_equals_one_by_one(architecture: str, target: str, tiny_engine: LoadTiny) -> None:
    """Eight sequences of different lengths and origins, joining every few steps and leaving when done."""
    engine = tiny_engine(target, architecture)
    lengths = (5, 300, 127, 1, 128, 64, 129, 210)
    answers = (40, 12, 33, 50, 21, 44, 9, 30)
    expected = [alone(engine, prompt_of(n), count) for n, count in zip(lengths, answers, strict=True)]
    running: dict[int, Sequence] = {}
    written: dict[int, list[int]] = {}
    waiting = list(range(8))
    for step in range(200):
        while waiting and step >= 3 * waiting[0]:
            index = waiting.pop(0)
            source = ("here", *ENGINES)[index % (1 + len(ENGINES))]
            prompt = prompt_of(lengths[index])
            if source == "here":
                running[index] = engine.open(lengths[index] + answers[index])
                logits = engine.prefill(running[index], prompt)
            else:
                slices, logits = read_prompt(tiny_engine(source, architecture), prompt, 50)
                running[index] = receive(engine, slices, lengths[index], answers[index])
            written[index] = logits.greedy().tolist()
        for index in [i for i in running if len(written[i]) == answers[i]]:
            engine.close(running.pop(index))
        order = sorted(running, key=lambda i: (step * i) % 5)  # the order of a batch must not matter
        if order:
            logits = engine.step([running[i] for i in order], [written[i][-1] for i in order])
            for i, token in zip(order, logits.greedy().tolist(), strict=True):
                written[i].append(token)
    assert not running
    assert [written[i] for i in range(8)] == expected


@pytest.mark.parametrize("name", EVERY)
def test_single_rows_of_the_logits(name: str, tiny_engine: LoadTiny) -> None:
    engine = tiny_engine(name, "llama")
    sequences = [engine.open(capacity) for capacity in (20, 2000, 20)]
    logits = engine.step(sequences, [5, 6, 7])
    whole = logits.numpy()
    assert not np.array_equal(whole[0], whole[1])
    for rows in ([2, 0], [1], [0, 1, 2], (1, 1), []):
        assert np.array_equal(logits.numpy(rows), whole[list(rows)])
    for sequence in sequences:
        engine.close(sequence)


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kept_prefix_takes_only_the_rest(architecture: str, source: str, target: str, tiny_engine: LoadTiny) -> None:
    """300 tokens are held on both sides; the next 50 are read on one and handed to the other."""
    prompt = prompt_of(350)
    near, far = tiny_engine(target, architecture), tiny_engine(source, architecture)
    expected = alone(near, prompt, ANSWER)
    held, reading = near.open(350 + ANSWER), far.open(350)
    near.prefill(held, prompt[:300])
    far.prefill(reading, prompt[:300])
    slices: list[KVSlice] = []
    logits = far.prefill(reading, prompt[300:], slices.append)
    assert all(piece.start >= 300 for piece in slices)
    before = near.counters.prompt_tokens
    for piece in slices:
        near.place(held, piece)
    near.commit(held, 350)
    assert write_answer(near, held, logits, ANSWER) == expected
    assert near.counters.prompt_tokens == before
    far.close(reading)


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_export_in_the_middle_of_an_answer(architecture: str, source: str, target: str, tiny_engine: LoadTiny) -> None:
    """A sequence moves after 20 tokens of its answer: out of a batch on one engine, into another engine."""
    first, second = tiny_engine(source, architecture), tiny_engine(target, architecture)
    prompt = prompt_of(150)
    expected = alone(second, prompt, 50)
    moving, staying = first.open(200), first.open(200)
    token = first.prefill(moving, prompt).greedy().tolist()
    other = first.prefill(staying, prompt_of(30)).greedy().tolist()
    written = list(token)
    for _ in range(19):
        chosen = first.step([moving, staying], [written[-1], other[-1]]).greedy().tolist()
        written.append(chosen[0])
        other.append(chosen[1])
    logits = first.step([moving], written[-1:])
    arrived = receive(second, [piece.copy() for piece in first.export(moving)], 170)
    first.close(moving)
    first.close(staying)
    assert written + write_answer(second, arrived, logits, 30) == expected


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_bfloat16_logits_stay_close(
    architecture: str, source: str, target: str, tiny_folder: Callable[[str], Path], record_property: Record
) -> None:
    """bfloat16 has 8 bits of mantissa: engines drift apart by themselves. The hand-off must add nothing to that."""
    model = ModelFiles(architecture, tiny_folder(architecture))
    near, far = (load_engine(name, model, dtype="bfloat16") for name in (target, source))
    prompt = prompt_of(300)
    slices, logits = read_prompt(far, prompt, 128)
    reference = near.open(400)
    whole = near.prefill(reference, prompt).numpy()[0]
    arrived = receive(near, slices, 300)
    differences = [np.abs(logits.numpy()[0] - whole).max() / np.abs(whole).max()]
    agreed = []
    for token in alone(near, prompt, 16):
        a, b = (near.step([s], [token]).numpy()[0] for s in (arrived, reference))
        differences.append(np.abs(a - b).max() / np.abs(b).max())
        agreed.append(int(a.argmax() == b.argmax()))
    record_property(
        "report",
        f"bfloat16 {source} -> {target}, {architecture}: worst error {max(differences):.3f} of the largest logit, "
        f"top-1 agreement {sum(agreed)} of {len(agreed)}",
    )
    assert max(differences) < BFLOAT16_TOLERANCE
    assert slices[0].keys.dtype == np.uint16


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_bad_slices_are_refused_and_leave_the_engine_usable(
    architecture: str, name: str, tiny_engine: LoadTiny
) -> None:
    engine = tiny_engine(name, architecture)
    prompt = prompt_of(140)
    slices, logits = read_prompt(engine, prompt, 140)
    good = slices[1]
    sequence = engine.open(200)
    bad = {
        "layer past the end": replace(good, layer=4),
        "negative layer": replace(good, layer=-1),
        "negative start": replace(good, start=-1),
        "a gap": replace(good, start=1),
        "too few heads": replace(good, keys=good.keys[:, :1], values=good.values[:, :1]),
        "head dim": replace(good, keys=good.keys[..., :8]),
        "keys and values of different lengths": replace(good, values=good.values[:-1]),
        "no tokens": replace(good, keys=good.keys[:0], values=good.values[:0]),
        "wrong bits": replace(good, keys=good.keys.astype(np.float64)),
        "a lie about the dtype": replace(good, dtype="bfloat16"),
        "flat": replace(good, keys=good.keys.reshape(-1)),
        "a number": replace(good, keys=np.array(1.0, np.float32), values=np.array(1.0, np.float32)),
        "an unknown dtype": replace(good, dtype="int4"),  # type: ignore[arg-type]
        "backwards": replace(good, keys=good.keys[::-1], values=good.values[::-1]),
    }
    for what, piece in bad.items():
        refused = False
        try:
            engine.place(sequence, piece)
        except SliceRefused:
            refused = True
        assert refused, what
    small = engine.open(100)
    with pytest.raises(KVMemoryFull):
        engine.place(small, good)
    with pytest.raises(SliceRefused, match="layer 0"):
        engine.commit(sequence, 140)
    engine.place(sequence, good)
    with pytest.raises(SliceRefused, match="not committed"):
        engine.step([sequence], [5])
    with pytest.raises(SliceRefused):
        engine.place(sequence, good)
    for used in (sequence, small):
        engine.close(used)
        engine.close(used)
    with pytest.raises(SliceRefused, match="closed"):
        engine.place(sequence, good)
    assert write_answer(engine, receive(engine, slices, 140), logits, 16) == alone(engine, prompt, 16)


@pytest.mark.parametrize("name", EVERY)
def test_room_is_kept(name: str, tiny_engine: LoadTiny) -> None:
    engine = tiny_engine(name, "llama")
    with pytest.raises(ContextTooLong, match=r"4097 tokens.*4096"):
        engine.open(4097)
    sequence = engine.open(10)
    with pytest.raises(KVMemoryFull):
        engine.prefill(sequence, prompt_of(11))
    logits = engine.prefill(sequence, prompt_of(10))
    with pytest.raises(KVMemoryFull):
        engine.step([sequence], logits.greedy())
    engine.close(sequence)


@pytest.mark.parametrize("name", EVERY)
def test_bad_tokens_and_batches_are_refused_and_change_nothing(name: str, tiny_engine: LoadTiny) -> None:
    engine = tiny_engine(name, "gpt_oss")
    prompt = prompt_of(140)
    expected = alone(engine, prompt, 12)
    sequence, other = engine.open(200), engine.open(200)
    for tokens in ([], [512], [5, -1], [100_000]):
        with pytest.raises(TokensRefused):
            engine.prefill(sequence, tokens)
    logits = engine.prefill(sequence, prompt)
    for batch, tokens in (([], []), ([sequence], [1, 2]), ([sequence] * 2, [1, 2]), ([sequence], [512])):
        with pytest.raises(TokensRefused):
            engine.step(batch, tokens)
    many = [sequence] * (engine.max_batch + 1)
    with pytest.raises(TokensRefused, match=str(engine.max_batch)):
        engine.step(many, [1] * len(many))
    engine.close(other)
    with pytest.raises(SliceRefused, match="closed"):
        engine.export(other)
    for start in (-1, 140, 1000):
        with pytest.raises(SliceRefused):
            engine.export(sequence, start)
    assert write_answer(engine, sequence, logits, 12) == expected


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_a_chunk_that_fails_half_way_breaks_its_sequence_only(
    architecture: str, name: str, tiny_engine: LoadTiny
) -> None:
    """The model has written a part of the chunk: reading it again into the same cache would be wrong in silence."""
    engine = tiny_engine(name, architecture)
    sequence = engine.open(400)
    engine.prefill(sequence, prompt_of(200))
    handed: list[int] = []

    def fail(piece: KVSlice) -> None:
        handed.append(piece.layer)
        if len(handed) == 3:
            raise OSError("the receiver is gone")

    with pytest.raises(OSError, match="gone"):
        engine.prefill(sequence, prompt_of(100), fail)
    assert len(handed) == 3
    for use in (
        lambda: engine.prefill(sequence, prompt_of(100)),
        lambda: engine.step([sequence], [5]),
        lambda: engine.export(sequence),
        lambda: engine.commit(sequence, 200),
    ):
        with pytest.raises(SequenceBroken):
            use()
    engine.close(sequence)
    assert alone(engine, prompt_of(300), 8) == alone(engine, prompt_of(300), 8)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_rollback_to_the_last_committed_chunk(architecture: str, name: str, tiny_engine: LoadTiny) -> None:
    """The transfer dies in the second chunk; the decode side reads the rest itself, from where it was whole."""
    engine = tiny_engine(name, architecture)
    prompt = prompt_of(300)
    reader = name if name == "llamacpp" else ENGINES[0]
    slices, _ = read_prompt(tiny_engine(reader, architecture), prompt, 175)
    layers = len(engine.spec.layout.layers)
    sequence = engine.open(400)
    for piece in slices[:layers]:
        engine.place(sequence, piece)
    engine.commit(sequence, 175)
    for piece in slices[layers : layers + 3]:
        engine.place(sequence, piece)
    with pytest.raises(SliceRefused, match="roll back"):
        engine.prefill(sequence, prompt[175:])
    engine.rollback(sequence)
    logits = engine.prefill(sequence, prompt[175:])
    assert write_answer(engine, sequence, logits, 16) == alone(engine, prompt, 16, chunk=175)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_a_second_turn_after_decoding_in_a_batch(architecture: str, name: str, tiny_engine: LoadTiny) -> None:
    """A chat goes on: the answer was written in a batch, the next question is handed over behind it."""
    engine, reader = tiny_engine(name, architecture), tiny_engine(ENGINES[0], architecture)
    chat, neighbour = engine.open(400), engine.open(100)
    tokens = prompt_of(150)
    last = [
        engine.prefill(chat, tokens).greedy().tolist()[0],
        engine.prefill(neighbour, prompt_of(30)).greedy().tolist()[0],
    ]
    for _ in range(20):
        tokens = [*tokens, last[0]]
        last = engine.step([chat, neighbour], last).greedy().tolist()
    whole = tokens + prompt_of(100, seed=5)
    reading = reader.open(400)
    reader.prefill(reading, tokens)
    slices: list[KVSlice] = []
    logits = reader.prefill(reading, whole[len(tokens) :], slices.append)
    for piece in slices:
        engine.place(chat, piece)
    engine.commit(chat, len(whole))
    reader.close(reading)
    engine.close(neighbour)
    assert write_answer(engine, chat, logits, 16) == alone(engine, whole, 16)


EMBEDDED_PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List three differences between RAM and a hard disk.",
    "Translate to German: The weather is nice today and we are going for a walk in the park.",
    "A train travels 120 km in 2 hours and then 45 km in 30 minutes. What is its average speed? Think step by step.",
)


@pytest.mark.parametrize("question", EMBEDDED_PROMPTS)
def test_embedded_model_torch_to_mlx(question: str, smollm2: ModelFiles, smollm2_engine: LoadSmollm2) -> None:
    torch_engine, mlx_engine = smollm2_engine("torch"), smollm2_engine("mlx")
    prompt = smollm2.tokenizer.encode_chat([{"role": "user", "content": question}])
    slices, logits = read_prompt(torch_engine, prompt, 20)
    before = mlx_engine.counters.prompt_tokens
    tokens = write_answer(mlx_engine, receive(mlx_engine, slices, len(prompt)), logits, 64)
    assert mlx_engine.counters.prompt_tokens == before
    assert tokens == alone(mlx_engine, prompt, 64)
    assert tokens == alone(torch_engine, prompt, 64)
