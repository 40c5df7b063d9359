"""A hand-off between two engines without nodes: prefill in one, decode in the other."""

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.engines import Engine, Logits, Sequence, chunks
from disaggregated_inference.kv import Array, KVSlice


class HostLogits:
    """Logits that travelled."""

    def __init__(self, rows: Array) -> None:
        self.rows = rows[None]

    def greedy(self) -> Array:
        return self.rows.argmax(-1)

    def numpy(self, rows: Items[int] | None = None) -> Array:
        return self.rows if rows is None else self.rows[list(rows)]


def prompt_of(length: int, vocabulary: int = 512, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(2, vocabulary, length).tolist()


def read_prompt(engine: Engine, prompt: list[int], chunk: int, answer: int = 64) -> tuple[list[KVSlice], Logits]:
    """Prefill and close; the slices are copied, as by a transfer."""
    sequence = engine.open(len(prompt) + answer)
    slices: list[KVSlice] = []
    logits: Logits | None = None
    for part in chunks(prompt, chunk):
        logits = engine.prefill(sequence, part, lambda piece: slices.append(piece.copy()))
    engine.close(sequence)
    assert logits is not None
    return slices, logits


def receive(engine: Engine, slices: list[KVSlice], length: int, answer: int = 64) -> Sequence:
    """A sequence with the KV of another engine."""
    sequence = engine.open(length + answer)
    for piece in slices:
        engine.place(sequence, piece)
    engine.commit(sequence, length)
    return sequence


def write_answer(engine: Engine, sequence: Sequence, logits: Logits, count: int) -> list[int]:
    """Greedy tokens; the first comes from the transferred logits."""
    tokens = logits.greedy().tolist()
    while len(tokens) < count:
        tokens += engine.step([sequence], tokens[-1:]).greedy().tolist()
    engine.close(sequence)
    return tokens


def alone(engine: Engine, prompt: list[int], count: int, chunk: int = 4096) -> list[int]:
    """The tokens of one engine alone: the expected result."""
    sequence = engine.open(len(prompt) + count)
    for part in chunks(prompt, chunk):
        logits = engine.prefill(sequence, part)
    return write_answer(engine, sequence, logits, count)


def greedy_logits(engine: Engine, prompt: list[int], count: int) -> NDArray[np.float32]:
    """Logits after the prompt and after each token of the greedy completion but the last."""
    sequence = engine.open(len(prompt) + count)
    rows = [engine.prefill(sequence, prompt).numpy()]
    while len(rows) <= count:
        rows.append(engine.step([sequence], rows[-1].argmax(axis=-1).tolist()).numpy())
    engine.close(sequence)
    return np.concatenate(rows)


def forced_in_a_batch(engine: Engine, prompts: list[list[int]], answers: list[list[int]]) -> NDArray[np.float32]:
    """`forced_logits` of several prompts, all in one batch: prompt, position, logit."""
    sequences = [engine.open(len(prompt) + len(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
    starts = [engine.prefill(sequence, prompt).numpy() for sequence, prompt in zip(sequences, prompts, strict=True)]
    steps = [engine.step(sequences, list(tokens)).numpy() for tokens in zip(*answers, strict=True)]
    for sequence in sequences:
        engine.close(sequence)
    return np.stack([np.concatenate(starts), *steps], axis=1)


def forced_logits(engine: Engine, prompt: list[int], answer: list[int]) -> NDArray[np.float32]:
    """Logits after the prompt and after each token of a given completion."""
    sequence = engine.open(len(prompt) + len(answer))
    rows = [engine.prefill(sequence, prompt).numpy()]
    rows += [engine.step([sequence], [token]).numpy() for token in answer]
    engine.close(sequence)
    return np.concatenate(rows)
