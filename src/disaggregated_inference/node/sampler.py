"""From a row of logits to the next token, by the sampling parameters of one request.

Random numbers come from the request's seed and the token's position in the answer, from nothing else: so the same seed
gives the same answer in any batch, and another node continues it with the same tokens.
"""

import secrets
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.api import SamplingParams, TopLogprob
from disaggregated_inference.errors import BadRequest, SequenceBroken

LogitRow = NDArray[np.float32]

_COLDEST = 1e-5  # below it float32 cannot tell two tokens apart
_NUCLEUS = 256  # this many of the likeliest usually have top_p of the mass
_BLOCK = 256
_GOLDEN = np.uint32(0x9E3779B9)
_BELOW_ONE = np.float32(1 - 2.0**-24)
_SLACK = 1.001  # for rounding


class SampledToken(msgspec.Struct, frozen=True):
    """A token, and its logprobs if the request wants them."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()


class Sampler:
    """Samples one choice. `written`: its tokens so far, if another node began it."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        eos_tokens: tuple[int, ...],
        choice: int = 0,
        written: Sequence[int] = (),
    ) -> None:
        self.params, self._eos = params, list(eos_tokens)
        self.seed = secrets.randbits(64) if params.seed is None else params.seed % (1 << 64)
        self._choice = choice  # of n choices
        self._prompt = set(prompt) if params.repetition_penalty != 1 else set()
        self._known = np.array(sorted(self._prompt), np.int64)  # prompt and answer so far, each token once
        self._counts: dict[int, int] = {}
        self.written = 0
        for token in written:
            self.note(token)

    def note(self, token: int) -> None:
        """A token became part of the answer; the device or a sampler chose it."""
        if self.params.repetition_penalty != 1 and token not in self._counts and token not in self._prompt:
            self._known = np.append(self._known, token)
        self._counts[token] = self._counts.get(token, 0) + 1
        self.written += 1

    def choose(self, logits: LogitRow, allow: NDArray[np.bool_] | None = None) -> SampledToken:
        """`allow` is a mask of the tokens that a grammar permits."""
        row = self._adjusted(logits, allow)
        best = int(row.argmax())
        self._require_possible(float(row[best]))
        token = best if self.params.temperature == 0 else self._draw(row, row[best])
        return self._described(row, token, row[best])

    def _adjusted(self, logits: LogitRow, allow: NDArray[np.bool_] | None) -> LogitRow:
        """A copy of the logits with penalties and bias, and without forbidden tokens."""
        params, row = self.params, logits.astype(np.float32)
        if params.repetition_penalty != 1:
            values, penalty = row[self._known], np.float32(params.repetition_penalty)
            row[self._known] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts and (params.frequency_penalty or params.presence_penalty):
            tokens = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            row[tokens] -= params.frequency_penalty * counts + params.presence_penalty
        for token, bias in (params.logit_bias or {}).items():
            row[token] += bias
        if self.written < params.min_tokens:
            row[self._eos] = -np.inf
        return row if allow is None else np.where(allow, row, np.float32(-np.inf))

    def _require_possible(self, best: float) -> None:
        if best == -np.inf:
            raise BadRequest("no token is allowed next: min_tokens and the format exclude all of them")
        if not np.isfinite(best):
            raise SequenceBroken("the engine's logits are not numbers; send the request again")

    def _draw(self, row: LogitRow, peak: np.float32) -> int:
        """Exponential race (the Gumbel-max trick): the token with the least -log(1 - u) / weight, with an own u for
        each token. One random number into the cumulative sum is the usual way, but then rounding in another batch
        moves the borders of all tokens, and the choice flips far more often."""
        params = self.params
        weights = row - peak
        weights /= np.float32(max(params.temperature, _COLDEST))
        np.exp(weights, out=weights)  # the likeliest weighs 1
        if params.top_k or params.top_p < 1:
            kept = _nucleus(weights, params.top_k, params.top_p)
            kept = kept[weights[kept] >= params.min_p]
        elif params.min_p:
            kept = np.flatnonzero(weights >= params.min_p)
        else:
            return _race(weights, self._uniforms(np.arange(len(weights), dtype=np.uint32)))
        return int(kept[_race(weights[kept], self._uniforms(kept.astype(np.uint32)))])

    def _uniforms(self, tokens: NDArray[np.uint32]) -> LogitRow:
        """A number between 0 and 1 for each token, from the seed, the choice, the position and the token id alone."""
        stream = np.random.Philox(key=np.array([self.seed, self._choice], np.uint64), counter=[self.written, 0, 0, 0])
        begin, end = stream.random_raw(2).astype(np.uint32)
        bits = tokens * _GOLDEN
        bits += begin
        _mix(bits)
        bits ^= end
        _mix(bits)
        uniforms = bits.astype(np.float32)
        uniforms += np.float32(0.5)
        uniforms *= np.float32(2.0**-32)
        return np.minimum(uniforms, _BELOW_ONE, out=uniforms)

    def _described(self, row: LogitRow, token: int, peak: np.float32) -> SampledToken:
        wanted = self.params.logprobs
        if wanted is None:
            return SampledToken(token)
        whole = float(peak) + float(np.log(np.exp(row - peak).sum(dtype=np.float64)))
        top: list[int] = _best(row, wanted, -np.inf).tolist() if wanted else []
        return SampledToken(
            token, float(row[token]) - whole, tuple(TopLogprob(int(t), float(row[t]) - whole) for t in top)
        )


def _race(weights: LogitRow, uniforms: LogitRow) -> int:
    """The index of the least -log(1 - u) / weight. That is at least u / weight, so most tokens need no logarithm."""
    best = int(weights.argmax())
    bound = -np.log1p(-np.float64(uniforms[best])) / weights[best]
    candidates = np.flatnonzero(uniforms <= weights * np.float32(bound * _SLACK))
    waits = -np.log1p(-uniforms[candidates].astype(np.float64)) / weights[candidates]
    return int(candidates[waits.argmin()])


def _mix(bits: NDArray[np.uint32]) -> None:
    """Every bit comes to depend on every bit: the last steps of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits ^= bits >> np.uint32(shift)
        bits *= np.uint32(factor)


def _best(row: LogitRow, count: int, floor: float) -> NDArray[np.int64]:
    """Where the `count` largest are, largest first, of equal ones the earlier; never what is at the floor."""
    if np.count_nonzero(above := row > floor) < len(row) // 2:  # many equal values would make partition slow
        found = np.flatnonzero(above)
        return found[_best(row[found], count, floor)]
    least = np.partition(row, -count)[-count] if count < len(row) else floor
    found = np.flatnonzero(row >= least if least > floor else above)
    return found[np.argsort(-row[found], kind="stable")[:count]]


def _nucleus(weights: LogitRow, top_k: int, top_p: float) -> NDArray[np.int64]:
    """The `top_k` likeliest, and of those as many as hold `top_p` of their mass."""
    few = _best(weights, top_k or _NUCLEUS, 0)
    held = weights[few]
    share = top_p if top_k else top_p * float(weights.sum(dtype=np.float64) / held.sum(dtype=np.float64))
    if share <= 1:
        return few[: _reach(held, share) + 1]
    ordered = np.sort(weights)[::-1]  # values alone are sorted much faster than their places
    return _largest(weights, ordered[: _reach(ordered, top_p) + 1])


def _largest(weights: LogitRow, values: LogitRow) -> NDArray[np.int64]:
    """Where the largest weights are, given their values in order; of those equal to the least the earlier ones."""
    found = np.flatnonzero(weights >= values[-1])
    equal = np.flatnonzero(weights[found] == values[-1])
    return np.delete(found, equal[len(equal) - (len(found) - len(values)) :])


def _reach(weights: LogitRow, share: float) -> int:
    """The first place where the sum so far is that share of the whole. By blocks, because adding up 150,000 numbers
    one by one takes longer than everything else here together."""
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64))
    mass = share * blocks[-1]
    block = int(np.searchsorted(blocks, mass))
    start = block * _BLOCK
    ends = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64) + (blocks[block - 1] if block else 0.0)
    return start + int(min(np.searchsorted(ends, mass), np.searchsorted(ends, ends[-1])))
