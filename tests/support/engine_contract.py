"""What every engine must do. tests/contract runs it for the real engines, tests/engines for the simulated one, and
tests/vllm/handoff for a vLLM that computes the prompts."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from disaggregated_inference.engines import Engine, Logits, Sequence
from disaggregated_inference.errors import ContextTooLong, KVMemoryFull, SequenceBroken, SliceRefused, TokensRefused
from disaggregated_inference.kv import KVSlice
from tests.support.engines import ENGINE_OPTIONS, LLAMACPP, LoadTiny
from tests.support.handoff import (
    alone,
    forced_in_a_batch,
    greedy_logits,
    prompt_of,
    read_prompt,
    receive,
    write_answer,
)

ENGINES = tuple(ENGINE_OPTIONS)
EVERY = (*ENGINES, *LLAMACPP)
PROMPTS = (1, 2, 127, 128, 129, 300, 1000)  # around and past the sliding window of 128
CHUNKS = (1, 64, 77, 256)  # 77 divides none of them
OTHER_PROMPTS = (5, 30, 64, 100, 140, 150, 210, 250, 350)  # of other tests
ANSWER = 32


def check_handoff(engine: Engine, slices: list[KVSlice], logits: Logits, length: int, expected: list[int]) -> None:
    """The KV of a prompt comes from another engine: the answer is the one of this engine alone, and no prompt token is
    computed here."""
    before = engine.counters.prompt_tokens, engine.counters.step_tokens
    tokens = write_answer(engine, receive(engine, slices, length), logits, len(expected))
    assert tokens == expected
    assert engine.counters.prompt_tokens == before[0], "the decode side read the prompt again"
    assert engine.counters.step_tokens == before[1] + len(expected) - 1


def check_no_near_ties(architecture: str, tiny_engine: LoadTiny) -> None:
    """The oracle is worth something only if rounding cannot flip it (nor a router's choice), and the prompt matters."""
    engines = [tiny_engine(name, architecture) for name in (ENGINES[0], ENGINES[-1])]
    prompts = [prompt_of(length) for length in (*PROMPTS, *OTHER_PROMPTS)]
    greedy = [greedy_logits(engines[0], prompt, 2 * ANSWER) for prompt in prompts]
    mirrors = forced_in_a_batch(engines[1], prompts, [rows.argmax(axis=-1)[:-1].tolist() for rows in greedy])
    for length, logits, mirror in zip((*PROMPTS, *OTHER_PROMPTS), greedy, mirrors, strict=True):
        error = np.abs(logits - mirror).max()
        second, first = np.sort(logits, axis=-1)[:, -2:].T
        assert error < 2e-4, f"prompt of {length}: the engines themselves differ by {error}"
        assert (first - second).min() > 2 * error, f"prompt of {length}: a near-tie"
    answers = [alone(engines[0], prompt_of(300, seed=seed), 8) for seed in range(4)]
    assert all(a != b for a, b in pairwise(answers))


def check_batched_decode_equals_one_by_one(
    architecture: str, target: str, tiny_engine: LoadTiny, sources: tuple[str, ...] = ENGINES
) -> None:
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
            source = ("here", *sources)[index % (1 + len(sources))]
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


def check_single_rows_of_the_logits(name: str, tiny_engine: LoadTiny) -> None:
    engine = tiny_engine(name, "llama")
    sequences = [engine.open(capacity) for capacity in (20, 2000, 20)]
    logits = engine.step(sequences, [5, 6, 7])
    whole = logits.numpy()
    assert not np.array_equal(whole[0], whole[1])
    for rows in ([2, 0], [1], [0, 1, 2], (1, 1), []):
        assert np.array_equal(logits.numpy(rows), whole[list(rows)])
    for sequence in sequences:
        engine.close(sequence)


def check_kept_prefix_takes_only_the_rest(architecture: str, source: str, target: str, tiny_engine: LoadTiny) -> None:
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


def check_export_in_the_middle_of_an_answer(architecture: str, source: str, target: str, tiny_engine: LoadTiny) -> None:
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


def check_bad_slices_are_refused_and_leave_the_engine_usable(
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


def check_room_is_kept(name: str, tiny_engine: LoadTiny) -> None:
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


def check_bad_tokens_and_batches_are_refused_and_change_nothing(name: str, tiny_engine: LoadTiny) -> None:
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


def check_a_chunk_that_fails_half_way_breaks_its_sequence_only(
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


def check_rollback_to_the_last_committed_chunk(
    architecture: str, name: str, tiny_engine: LoadTiny, reader: str = ENGINES[0]
) -> None:
    """The transfer dies in the second chunk; the decode side reads the rest itself, from where it was whole."""
    engine = tiny_engine(name, architecture)
    prompt = prompt_of(300)
    reader = name if name == "llamacpp" else reader
    slices, _ = read_prompt(tiny_engine(reader, architecture), prompt, 175)
    first, second = ([piece for piece in slices if (piece.stop > 175) == late] for late in (False, True))
    sequence = engine.open(400)
    for piece in first:
        engine.place(sequence, piece)
    engine.commit(sequence, 175)
    for piece in second[:3]:
        engine.place(sequence, piece)
    with pytest.raises(SliceRefused, match="roll back"):
        engine.prefill(sequence, prompt[175:])
    engine.rollback(sequence)
    logits = engine.prefill(sequence, prompt[175:])
    assert write_answer(engine, sequence, logits, 16) == alone(engine, prompt, 16, chunk=175)


def check_a_second_turn_after_decoding_in_a_batch(
    architecture: str, name: str, tiny_engine: LoadTiny, source: str = ENGINES[0]
) -> None:
    """A chat goes on: the answer was written in a batch, the next question is handed over behind it."""
    engine, reader = tiny_engine(name, architecture), tiny_engine(source, architecture)
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
