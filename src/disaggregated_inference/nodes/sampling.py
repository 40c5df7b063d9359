"""From a row of logits to the next token, by one request's own rules.

Random numbers come from the request's seed and the token's place in the answer, from nothing else: so the same seed
gives the same answer whatever else is in the batch, and an answer that moves to another node goes on as it would have.
"""

import secrets

import msgspec
import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import BadRequest

Row = NDArray[np.float32]

_MOST_LOGPROBS = 20
_MOST_STOPS = 16


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose. The defaults choose the likeliest token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0

    def require_valid(self, vocabulary: int) -> None:
        """One check per field, with its range in the message."""
        ranges: list[tuple[str, float, float]] = [
            ("temperature", 0, 100),
            ("top_p", 0, 1),
            ("top_k", 0, 1 << 31),
            ("min_p", 0, 1),
            ("repetition_penalty", 0.01, 100),
            ("frequency_penalty", -2, 2),
            ("presence_penalty", -2, 2),
            ("min_tokens", 0, 1 << 31),
        ]
        for name, low, high in ranges:
            if not low <= getattr(self, name) <= high:
                raise BadRequest(f"{name} must be between {low} and {high}, not {getattr(self, name)}")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise BadRequest("seed must fit 64 bits")
        if self.logprobs is not None and not 0 <= self.logprobs <= _MOST_LOGPROBS:
            raise BadRequest(f"logprobs must be between 0 and {_MOST_LOGPROBS}")
        if len(self.stop) > _MOST_STOPS or not all(self.stop):
            raise BadRequest(f"stop takes up to {_MOST_STOPS} strings, none of them empty")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocabulary or not -100 <= bias <= 100:
                raise BadRequest(f"logit_bias: {token}: {bias}; tokens of the vocabulary, -100 to 100")

    @property
    def plain(self) -> bool:
        """Whether the device's own argmax is the answer, and nobody needs to see the logits."""
        touched = (self.repetition_penalty != 1, self.frequency_penalty, self.presence_penalty, self.logit_bias)
        return self.temperature == 0 and not any(touched) and self.logprobs is None and not self.min_tokens


class Chosen(msgspec.Struct, frozen=True):
    """A token, and how likely it was where someone asked."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """One answer's choices. `allow` is a mask of tokens that a grammar permits, or None."""

    def __init__(self, sampling: Sampling, prompt: list[int], eos_tokens: tuple[int, ...], choice: int = 0) -> None:
        self.sampling, self._eos = sampling, list(eos_tokens)
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % (1 << 64)
        self._choice = choice  # of n answers to one prompt
        self._seen = np.array(sorted(set(prompt)), np.int64)
        self._counts: dict[int, int] = {}
        self.written = 0

    def note(self, token: int) -> None:
        """A token is part of the answer, whoever chose it."""
        self._counts[token] = self._counts.get(token, 0) + 1
        self.written += 1

    def choose(self, logits: Row, allow: NDArray[np.bool_] | None = None) -> Chosen:
        row = self._adjusted(logits, allow)
        token = int(row.argmax()) if self.sampling.temperature == 0 else self._draw(row)
        return self._described(row, token)

    def _adjusted(self, logits: Row, allow: NDArray[np.bool_] | None) -> NDArray[np.float64]:
        """Penalties and bias first, then what must not come at all."""
        asked, row = self.sampling, logits.astype(np.float64)
        if asked.repetition_penalty != 1:
            known = np.union1d(self._seen, np.fromiter(self._counts, np.int64, len(self._counts)))
            row[known] = np.where(
                row[known] > 0, row[known] / asked.repetition_penalty, row[known] * asked.repetition_penalty
            )
        for token, count in self._counts.items():
            row[token] -= asked.frequency_penalty * count + asked.presence_penalty
        for token, bias in asked.logit_bias.items():
            row[token] += bias
        if asked.ignore_eos or self.written < asked.min_tokens:
            row[self._eos] = -np.inf
        if allow is not None:
            row[~allow] = -np.inf
        return row

    def _draw(self, row: NDArray[np.float64]) -> int:
        """Nucleus of the softmax, in the order of likelihood, and one random number into its cumulative sum."""
        asked = self.sampling
        order = np.argsort(-row, kind="stable")[: asked.top_k or None]
        weights = np.exp((row[order] - row[order[0]]) / asked.temperature)
        shares = weights / weights.sum()
        keep = int(np.searchsorted(np.cumsum(shares), asked.top_p)) + 1
        keep = min(keep, int((shares >= asked.min_p * shares[0]).sum()))
        ends = np.cumsum(shares[:keep])
        return int(order[min(int(np.searchsorted(ends, self._random() * ends[-1], "right")), keep - 1)])

    def _random(self) -> float:
        key = np.array([self.seed, self._choice], np.uint64)
        stream = np.random.Philox(key=key, counter=np.array([self.written, 0, 0, 0], np.uint64))
        return float(np.random.Generator(stream).random())

    def _described(self, row: NDArray[np.float64], token: int) -> Chosen:
        wanted = self.sampling.logprobs
        if wanted is None:
            return Chosen(token)
        logprobs = row - row.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.argsort(-logprobs, kind="stable")[:wanted]
        return Chosen(token, float(logprobs[token]), tuple((int(t), float(logprobs[t])) for t in best))
