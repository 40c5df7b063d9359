"""What a simulated model says next: a function of the hash of everything before it, and of nothing else."""

from collections.abc import Sequence as Items

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from disaggregated_inference.engines.simulated.device import wait_until
from disaggregated_inference.engines.simulated.marks import Hashes, mixed
from disaggregated_inference.models import ModelSpec
from disaggregated_inference.models.simulated import FIRST_WORD, SPECIAL

# Scores: the chosen word has nearly half of the probability, the other words share the rest. Bytes come only where a
# grammar asks for them; an end that is due comes whatever the temperature.
_CHOSEN, _WORDS, _BYTES, _NEVER, _END = 9.0, 4.0, -12.0, -30.0, 30.0


class Voice:
    def __init__(self, spec: ModelSpec, answer_tokens: int) -> None:
        self._spec, self._answer_tokens = spec, answer_tokens
        self._words = spec.vocabulary - FIRST_WORD
        noise = np.random.default_rng(0).random(2 * spec.vocabulary, np.float32)
        self._word_scores = sliding_window_view(noise * _WORDS, self._words)
        self._byte_scores = sliding_window_view(noise + _BYTES, FIRST_WORD - len(SPECIAL))

    def choose(self, hashes: Hashes) -> NDArray[np.int64]:
        """The likeliest token. An end is due by the hash alone, so an answer that moves ends where it would have."""
        drawn = mixed(hashes)
        tokens = (FIRST_WORD + drawn % np.uint64(self._words)).astype(np.int64)
        if self._answer_tokens and self._spec.eos_tokens:
            due = (drawn >> np.uint64(32)) % np.uint64(self._answer_tokens) == 0
            tokens[due] = self._spec.eos_tokens[0]
        return tokens

    def scores(self, hashes: Hashes) -> NDArray[np.float32]:
        tokens, shifts = self.choose(hashes), (mixed(~hashes) % np.uint64(self._spec.vocabulary)).astype(np.int64)
        rows = np.full((len(hashes), self._spec.vocabulary), _NEVER, np.float32)
        rows[:, len(SPECIAL) : FIRST_WORD] = self._byte_scores[shifts]
        rows[:, FIRST_WORD:] = self._word_scores[shifts]
        rows[np.arange(len(tokens)), tokens] = np.where(tokens < FIRST_WORD, _END, _CHOSEN)
        return rows


class SimulatedTokens:
    def __init__(self, array: NDArray[np.int64], ready_at: float) -> None:
        self.array, self._ready_at = array, ready_at

    def __len__(self) -> int:
        return len(self.array)

    def tolist(self) -> list[int]:
        wait_until(self._ready_at)
        tokens: list[int] = self.array.tolist()
        return tokens


class SimulatedLogits:
    """Known at once, told when the device would have had them."""

    def __init__(self, voice: Voice, hashes: Hashes, ready_at: float) -> None:
        self._voice, self._hashes, self._ready_at = voice, hashes, ready_at

    def greedy(self) -> SimulatedTokens:
        return SimulatedTokens(self._voice.choose(self._hashes), self._ready_at)

    def numpy(self, rows: Items[int] | None = None) -> NDArray[np.float32]:
        wait_until(self._ready_at)
        return self._voice.scores(self._hashes if rows is None else self._hashes[list(map(int, rows))])
