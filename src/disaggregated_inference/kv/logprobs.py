"""Logprobs of prompt tokens, as arrays: engines compute them, and they travel with the KV."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LOWEST_LOGPROB = -9999.0  # in the place of minus infinity, which JSON does not have


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """One row per token, from position `start` on. Alternatives are the likeliest tokens there, likeliest first."""

    start: int
    logprobs: NDArray[np.float32]  # [tokens]
    top_tokens: NDArray[np.uint32]  # [tokens, alternatives]
    top_logprobs: NDArray[np.float32]  # the same shape

    @property
    def stop(self) -> int:
        return self.start + len(self.logprobs)

    def after(self, known: int) -> "LogprobRows":
        """Without the rows before position `known`."""
        cut = max(0, known - self.start)
        return LogprobRows(self.start + cut, self.logprobs[cut:], self.top_tokens[cut:], self.top_logprobs[cut:])


def reusable_tokens(prompt_tokens: int, scored_tokens: int | None) -> int:
    """How much of a prompt may come from a prefix cache. The last token is always computed, for its logits. With prompt
    logprobs (`scored_tokens` is how many are known), so is every token whose successor has none yet."""
    last = prompt_tokens - 1
    return last if scored_tokens is None else min(last, max(0, scored_tokens - 1))
