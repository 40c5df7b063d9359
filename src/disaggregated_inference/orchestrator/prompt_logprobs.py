"""The prompt logprobs of one request, over all its attempts: complete and without a gap, or the request fails."""

from typing import Any

from disaggregated_inference.api import PromptLogprobs
from disaggregated_inference.orchestrator.leg_errors import LegFailed


class PromptLogprobsState:
    """`known`: tokens of the prompt whose logprobs have come. The next attempt asks for those that follow."""

    def __init__(self, alternatives: int | None, tokens: list[int]) -> None:
        self._alternatives, self._tokens, self.known = alternatives, tokens, 0

    @property
    def complete(self) -> bool:
        return self._alternatives is None or self.known == len(self._tokens)

    @property
    def scored_tokens(self) -> int | None:
        """None: the next attempt needs no prompt logprobs."""
        return None if self.complete else self.known

    def params(self) -> dict[str, Any]:
        """For requests to both kinds of nodes."""
        return {} if self.complete else {"prompt_logprobs": self._alternatives, "scored_tokens": self.known}

    def take(self, piece: PromptLogprobs, node: str) -> PromptLogprobs | None:
        """The part of it that is new."""
        if self._alternatives is None or piece.start > self.known or piece.stop > len(self._tokens):
            place = f"tokens {piece.start} to {piece.stop}, after {self.known} of {len(self._tokens)}"
            raise _wrong(node, place)
        if [token.token for token in piece.tokens] != self._tokens[piece.start : piece.stop]:
            raise _wrong(node, "they are of other tokens")
        if piece.stop <= self.known:
            return None
        fresh, self.known = piece.after(self.known), piece.stop
        return fresh

    def require_complete(self, node: str) -> None:
        """When the first token of the completion comes."""
        if not self.complete:
            raise _wrong(node, f"{self.known} of {len(self._tokens)} came before the completion")


def _wrong(node: str, problem: str) -> LegFailed:
    return LegFailed(node, "bad_answer", f"its prompt logprobs are not those of this prompt: {problem}")
