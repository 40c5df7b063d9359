"""From a row of logits to the next token, by one request's own rules.

Random numbers come from the request's seed and the token's place in the answer, from nothing else: so the same seed
gives the same answer whatever else is in the batch, and an answer that moves to another node goes on as it would have.
"""

import secrets
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import BadRequest, SequenceBroken

Row = NDArray[np.float32]

_MOST_LOGPROBS = 20
_MOST_STOPS = 16

_COLDEST = 1e-5  # below it float32 has nothing left to tell two tokens apart
_NUCLEUS = 256  # so many of the likeliest usually hold top_p of the mass
_BLOCK = 256
_GOLDEN = np.uint32(0x9E3779B9)
_BELOW_ONE = np.float32(1 - 2.0**-24)
_SLACK = 1.001  # for what is rounded


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
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
    ignore_eos: bool = False  # an end token may come like any other, and the answer goes on after it
    min_tokens: int = 0  # no end token before there are so many

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
        """Whether the device's own argmax is the answer, and nobody needs to see the logits. (A grammar, of which only
        the caller knows, needs them.)"""
        touched = (self.repetition_penalty != 1, self.frequency_penalty, self.presence_penalty, self.logit_bias)
        return self.temperature == 0 and not any(touched) and self.logprobs is None and not self.min_tokens


class SampledToken(msgspec.Struct, frozen=True):
    """A token, and how likely it was where someone asked."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """One answer's choices. `written` are the tokens it has already, where it was begun elsewhere."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Sequence[int],
        eos_tokens: tuple[int, ...],
        choice: int = 0,
        written: Sequence[int] = (),
    ) -> None:
        self.sampling, self._eos = sampling, list(eos_tokens)
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % (1 << 64)
        self._choice = choice  # of n answers to one prompt
        self._prompt = set(prompt) if sampling.repetition_penalty != 1 else set()
        self._known = np.array(sorted(self._prompt), np.int64)  # what was said so far, each token once
        self._counts: dict[int, int] = {}
        self.written = 0
        for token in written:
            self.note(token)

    def note(self, token: int) -> None:
        """A token is part of the answer, whoever chose it."""
        if self.sampling.repetition_penalty != 1 and token not in self._counts and token not in self._prompt:
            self._known = np.append(self._known, token)
        self._counts[token] = self._counts.get(token, 0) + 1
        self.written += 1

    def choose(self, logits: Row, allow: NDArray[np.bool_] | None = None) -> SampledToken:
        """`allow` is a mask of the tokens that a grammar permits."""
        row = self._adjusted(logits, allow)
        best = int(row.argmax())
        self._require_possible(float(row[best]))
        token = best if self.sampling.temperature == 0 else self._draw(row, row[best])
        return self._described(row, token, row[best])

    def _adjusted(self, logits: Row, allow: NDArray[np.bool_] | None) -> Row:
        """Penalties and bias first, then what must not come at all. The logits themselves stay as they are."""
        asked, row = self.sampling, logits.astype(np.float32)
        if asked.repetition_penalty != 1:
            values, penalty = row[self._known], np.float32(asked.repetition_penalty)
            row[self._known] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts and (asked.frequency_penalty or asked.presence_penalty):
            tokens = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            row[tokens] -= asked.frequency_penalty * counts + asked.presence_penalty
        for token, bias in asked.logit_bias.items():
            row[token] += bias
        if self.written < asked.min_tokens:
            row[self._eos] = -np.inf
        return row if allow is None else np.where(allow, row, np.float32(-np.inf))

    def _require_possible(self, best: float) -> None:
        if best == -np.inf:
            raise BadRequest("no token may come next: min_tokens and the format together leave none")
        if not np.isfinite(best):
            raise SequenceBroken("the engine's logits are not numbers; send the request again")

    def _draw(self, row: Row, peak: np.float32) -> int:
        """A race: every token waits for a random time, the likelier the shorter, and the first one is it. (One random
        number into the cumulative sum would do as well, but there the rounding of all tokens moves every border: in
        another batch it fell on the other side of one far too often.)"""
        asked = self.sampling
        weights = row - peak
        weights /= np.float32(max(asked.temperature, _COLDEST))
        np.exp(weights, out=weights)  # the likeliest weighs 1
        if asked.top_k or asked.top_p < 1:
            kept = _nucleus(weights, asked.top_k, asked.top_p)
            kept = kept[weights[kept] >= asked.min_p]
        elif asked.min_p:
            kept = np.flatnonzero(weights >= asked.min_p)
        else:
            return _first(weights, self._chances(np.arange(len(weights), dtype=np.uint32)))
        return int(kept[_first(weights[kept], self._chances(kept.astype(np.uint32)))])

    def _chances(self, tokens: NDArray[np.uint32]) -> Row:
        """A number between 0 and 1 for each: of the seed, the choice, the place in the answer and the token alone."""
        stream = np.random.Philox(key=np.array([self.seed, self._choice], np.uint64), counter=[self.written, 0, 0, 0])
        begin, end = stream.random_raw(2).astype(np.uint32)
        bits = tokens * _GOLDEN
        bits += begin
        _mix(bits)
        bits ^= end
        _mix(bits)
        chances = bits.astype(np.float32)
        chances += np.float32(0.5)
        chances *= np.float32(2.0**-32)
        return np.minimum(chances, _BELOW_ONE, out=chances)

    def _described(self, row: Row, token: int, peak: np.float32) -> SampledToken:
        wanted = self.sampling.logprobs
        if wanted is None:
            return SampledToken(token)
        whole = float(peak) + float(np.log(np.exp(row - peak).sum(dtype=np.float64)))
        top: list[int] = _best(row, wanted, -np.inf).tolist() if wanted else []
        return SampledToken(token, float(row[token]) - whole, tuple((t, float(row[t]) - whole) for t in top))


def _first(weights: Row, chances: Row) -> int:
    """Who waits least: -log(1 - chance) / weight. That is at least chance / weight, so most need no logarithm."""
    best = int(weights.argmax())
    bound = -np.log1p(-np.float64(chances[best])) / weights[best]
    hopeful = np.flatnonzero(chances <= weights * np.float32(bound * _SLACK))
    waits = -np.log1p(-chances[hopeful].astype(np.float64)) / weights[hopeful]
    return int(hopeful[waits.argmin()])


def _mix(bits: NDArray[np.uint32]) -> None:
    """Every bit comes to depend on every bit: the last steps of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits ^= bits >> np.uint32(shift)
        bits *= np.uint32(factor)


def _best(row: Row, count: int, floor: float) -> NDArray[np.int64]:
    """Where the `count` largest are, largest first, of equal ones the earlier; never what is at the floor."""
    if np.count_nonzero(above := row > floor) < len(row) // 2:  # many equal values would make partition slow
        found = np.flatnonzero(above)
        return found[_best(row[found], count, floor)]
    least = np.partition(row, -count)[-count] if count < len(row) else floor
    found = np.flatnonzero(row >= least if least > floor else above)
    return found[np.argsort(-row[found], kind="stable")[:count]]


def _nucleus(weights: Row, top_k: int, top_p: float) -> NDArray[np.int64]:
    """The `top_k` likeliest, and of those as many as hold `top_p` of their mass."""
    few = _best(weights, top_k or _NUCLEUS, 0)
    held = weights[few]
    share = top_p if top_k else top_p * float(weights.sum(dtype=np.float64) / held.sum(dtype=np.float64))
    if share <= 1:
        return few[: _reach(held, share) + 1]
    ordered = np.sort(weights)[::-1]  # values alone are sorted much faster than their places
    return _largest(weights, ordered[: _reach(ordered, top_p) + 1])


def _largest(weights: Row, values: Row) -> NDArray[np.int64]:
    """Where the largest weights are, given their values in order; of those equal to the least the earlier ones."""
    found = np.flatnonzero(weights >= values[-1])
    equal = np.flatnonzero(weights[found] == values[-1])
    return np.delete(found, equal[len(equal) - (len(found) - len(values)) :])


def _reach(weights: Row, share: float) -> int:
    """The first place where the sum so far is that share of the whole. By blocks, because adding up 150,000 numbers
    one by one takes longer than everything else here together."""
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64))
    mass = share * blocks[-1]
    block = int(np.searchsorted(blocks, mass))
    start = block * _BLOCK
    ends = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64) + (blocks[block - 1] if block else 0.0)
    return start + int(min(np.searchsorted(ends, mass), np.searchsorted(ends, ends[-1])))
