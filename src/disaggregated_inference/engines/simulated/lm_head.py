"""The simulated LM head: logits as a function of the hash of all earlier tokens."""

from collections.abc import Sequence as Items

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from disaggregated_inference.engines.simulated.device import wait_until
from disaggregated_inference.engines.simulated.row_tags import Hashes, mix
from disaggregated_inference.models import FIRST_WORD, SPECIAL_TOKENS, ModelSpec

# Logits: the chosen word has nearly half of the probability, the other words share the rest. Bytes are sampled only if
# a grammar requires them; an end that is due is sampled at any temperature.
_CHOSEN, _WORDS, _BYTES, _NEVER, _END = 9.0, 4.0, -12.0, -30.0, 30.0


class SimulatedHead:
    def __init__(self, spec: ModelSpec, answer_tokens: int) -> None:
        self._spec, self._answer_tokens = spec, answer_tokens
        self._words = spec.vocabulary - FIRST_WORD
        noise = np.random.default_rng(0).random(2 * spec.vocabulary, np.float32)
        self._word_scores = sliding_window_view(noise * _WORDS, self._words)
        self._byte_scores = sliding_window_view(noise + _BYTES, FIRST_WORD - len(SPECIAL_TOKENS))

    def choose(self, hashes: Hashes) -> NDArray[np.int64]:
        """The greedy token. The end depends only on the hash, so a moved request ends at the same token."""
        drawn = mix(hashes)
        tokens = (FIRST_WORD + drawn % np.uint64(self._words)).astype(np.int64)
        if self._answer_tokens and self._spec.eos_tokens:
            due = (drawn >> np.uint64(32)) % np.uint64(self._answer_tokens) == 0
            tokens[due] = self._spec.eos_tokens[0]
        return tokens

    def scores(self, hashes: Hashes) -> NDArray[np.float32]:
        tokens, shifts = self.choose(hashes), (mix(~hashes) % np.uint64(self._spec.vocabulary)).astype(np.int64)
        rows = np.full((len(hashes), self._spec.vocabulary), _NEVER, np.float32)
        rows[:, len(SPECIAL_TOKENS) : FIRST_WORD] = self._byte_scores[shifts]
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
    """Known at once, returned when the device would have computed them."""

    def __init__(self, head: SimulatedHead, hashes: Hashes, ready_at: float) -> None:
        self._head, self._hashes, self._ready_at = head, hashes, ready_at

    def greedy(self) -> SimulatedTokens:
        return SimulatedTokens(self._head.choose(self._hashes), self._ready_at)

    def numpy(self, rows: Items[int] | None = None) -> NDArray[np.float32]:
        wait_until(self._ready_at)
        return self._head.scores(self._hashes if rows is None else self._hashes[list(map(int, rows))])
