"""Prompt logprobs: what a prefill computes beside KV where a request wants them.

The logits of a whole prompt would be gigabytes (a vocabulary of 150,000, a prompt of 10,000 tokens: 6 GB). So they are
computed for a piece of a chunk at a time, and only the logprobs of its tokens and of the likeliest others are kept.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import SequenceBroken, TokensRefused
from disaggregated_inference.kv import LOWEST_LOGPROB, LogprobRows

_LOGITS_BYTES = 64 << 20  # of one piece, in float32


@dataclass(frozen=True, slots=True)
class Scoring:
    """`targets` are the tokens that follow a chunk's positions: one for each, but none for the prompt's last."""

    targets: Items[int]
    alternatives: int
    put: Callable[[LogprobRows], None]  # called once per piece, in order
    logits_bytes: int = _LOGITS_BYTES

    def require_chunk(self, count: int) -> None:
        if len(self.targets) not in (count, count - 1):
            raise TokensRefused(f"{len(self.targets)} tokens to score after a chunk of {count}")

    def pieces(self, vocabulary: int) -> Iterator[slice]:
        """Places in the chunk whose logits are in memory together."""
        size = max(1, self.logits_bytes // (4 * vocabulary))
        for at in range(0, len(self.targets), size):
            yield slice(at, min(at + size, len(self.targets)))

    def take(self, start: int, chosen: Any, tokens: Any, top: Any) -> None:
        """A piece whose first target is at position `start`: logprobs of the targets, and the likeliest tokens there
        with theirs, in any order."""
        logprobs, best, others = (np.asarray(array) for array in (chosen, tokens, top))
        order = np.argsort(-others, axis=-1, kind="stable")
        best, others = (np.take_along_axis(array, order, axis=-1) for array in (best, others))
        self.put(LogprobRows(start, _finite(logprobs), np.ascontiguousarray(best, "<u4"), _finite(others)))

    def take_logits(self, start: int, logits: NDArray[np.float32], piece: slice) -> None:
        """The same from logits on the host."""
        peak = logits.max(axis=-1, keepdims=True)
        whole = peak + np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)
        chosen = logits[np.arange(len(logits)), list(self.targets[piece])] - whole[:, 0]
        count = min(self.alternatives, logits.shape[-1])
        best = np.argpartition(-logits, count - 1, axis=-1)[:, :count] if count else np.empty((len(logits), 0), int)
        self.take(start, chosen, best, np.take_along_axis(logits, best, axis=-1) - whole)


def chunk_scoring(
    prompt: Items[int], at: int, count: int, scored: int, alternatives: int, put: Callable[[LogprobRows], None]
) -> Scoring | None:
    """For the chunk of `count` tokens at position `at`; None if all tokens that follow have their logprobs already:
    those before position `scored`."""
    targets = prompt[at + 1 : at + 1 + count]
    return Scoring(targets, alternatives, put) if at + 1 + len(targets) > scored else None


def _finite(logprobs: NDArray[np.float32]) -> NDArray[np.float32]:
    if np.isnan(logprobs).any():
        raise SequenceBroken("the engine's logits are not numbers; send the request again")
    return np.ascontiguousarray(np.clip(logprobs, LOWEST_LOGPROB, 0.0), "<f4")
