"""Who a model is, as far as a KV cache cares. Two sides hand a cache over only when these agree.

Weight quantization may differ (FP8 on one side, 8-bit on the other is the normal case), so identity rests on what no
quantizer touches: `norms`, a hash over every normalization weight. Two fine-tunes can share their norms; where both
sides store them in the same format, `sample` (a hash over a piece of every tensor) tells those apart too. Where they do
not, `values` does, as far as rounding leaves a difference to see; nodes also compare computed values, with a canary
prompt, and `disagg models verify` more of those in files.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import FingerprintMismatch
from disaggregated_inference.kv.layout import KVLayout

# Frequencies are computed in float32 by different libraries: this far apart is rounding, further is another model.
_ROPE_TOLERANCE = 1e-5
UNREAD = 1.0  # as a rounding: anything may be there
_LAYER = re.compile(r"\blayers\.\d+\.")
_PLAIN = frozenset({"F32", "F16", "BF16"})


class Sampled(msgspec.Struct, frozen=True):
    """Some weights of one tensor, in little-endian float16, and how far the way it is stored may have moved them: the
    difference's size over theirs. No values, and `UNREAD`, where it is stored in a way that cannot be read here."""

    tensor: str
    rounding: float
    values: bytes

    @property
    def read(self) -> bool:
        return self.rounding != UNREAD


class Pair(NamedTuple):
    """The same weights on two sides, and how far rounding may have moved them apart."""

    mine: NDArray[np.float32]
    theirs: NDArray[np.float32]
    rounding: float


class Weights(msgspec.Struct, frozen=True, omit_defaults=True):
    """Identity of the weights: `format` names how they are stored, `sample` is comparable only within one format, and
    `values` between any two that can be read as numbers."""

    norms: str
    format: str
    sample: str
    values: tuple[Sampled, ...] = ()

    @property
    def rounding(self) -> float:
        """How coarse they are; 1 where nobody knows."""
        return max((each.rounding for each in self.values), default=UNREAD)

    def far_values(self, other: "Weights") -> list[str]:
        """One line for each kind of tensor that rounding does not explain. Those of all layers together: a row of one
        may be nearly zero, or share its scale with an outlier, and then says nothing by itself."""
        theirs = {each.tensor: each for each in other.values if each.read}
        kinds: dict[str, list[Pair]] = {}
        for mine in self.values:
            if mine.read and (there := theirs.get(mine.tensor)):
                pair = Pair(_floats(mine.values), _floats(there.values), math.hypot(mine.rounding, there.rounding))
                kinds.setdefault(kind_of(mine.tensor), []).append(pair)
        return [line for kind, pairs in kinds.items() if (line := far_apart(kind, pairs))]

    def rounded_again(self, other: "Weights") -> bool:
        """Quantized to the same types, perhaps with other scales (an importance matrix chooses them), so that bytes say
        nothing; and all that is sampled can be read."""
        kinds = set(self.format.removeprefix("gguf:").split("+"))
        quantized = self.format.startswith("gguf:") and not kinds <= _PLAIN
        return quantized and self.format == other.format and max(self.rounding, other.rounding) < UNREAD


class Fingerprint(msgspec.Struct, frozen=True):
    """Everything that must agree before a byte of cache moves."""

    architecture: str
    layout: KVLayout
    rope_frequencies: tuple[float, ...]
    rope_scale: float
    vocabulary: int
    tokenizer: str
    chat_template: str
    weights: Weights

    def differences(self, other: "Fingerprint") -> list[str]:
        """One line per disagreement, empty when a cache may move."""
        found = [
            f"{name}: {_short(mine)} here, {_short(theirs)} there"
            for name in ("architecture", "layout", "vocabulary", "tokenizer", "chat_template")
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]
        return [*found, *self._rope_differences(other), *self._weight_differences(other), *self._remedy(other)]

    def _remedy(self, other: "Fingerprint") -> list[str]:
        """Whoever makes a GGUF likes to mend the template in it."""
        same = (self.tokenizer, self.chat_template) == (other.tokenizer, other.chat_template)
        if same or not any(each.weights.format.startswith("gguf") for each in (self, other)):
            return []
        return ["put the tokenizer.json and tokenizer_config.json of the one beside the GGUF of the other"]

    def _rope_differences(self, other: "Fingerprint") -> list[str]:
        if len(self.rope_frequencies) != len(other.rope_frequencies):
            return [f"rope: {len(self.rope_frequencies)} frequencies here, {len(other.rope_frequencies)} there"]
        pairs = enumerate(zip(self.rope_frequencies, other.rope_frequencies, strict=True))
        wrong = [i for i, (a, b) in pairs if not math.isclose(a, b, rel_tol=_ROPE_TOLERANCE)]
        found = [f"rope_frequencies: {len(wrong)} differ, the first at index {wrong[0]}"] if wrong else []
        if not math.isclose(self.rope_scale, other.rope_scale, rel_tol=_ROPE_TOLERANCE):
            found.append(f"rope_scale: {self.rope_scale} here, {other.rope_scale} there")
        return found

    def _weight_differences(self, other: "Fingerprint") -> list[str]:
        mine, theirs = self.weights, other.weights
        if mine.norms != theirs.norms:
            return [f"weights: norms {_short(mine.norms)} here, {_short(theirs.norms)} there"]
        if mine.format != theirs.format or (mine.sample != theirs.sample and mine.rounded_again(theirs)):
            return mine.far_values(theirs)[:4]
        if mine.sample != theirs.sample:
            return [f"weights: {mine.format} {_short(mine.sample)} here, {_short(theirs.sample)} there"]
        return []


def kind_of(tensor: str) -> str:
    """Its name without the number of its layer."""
    return _LAYER.sub("layers.*.", tensor)


def far_apart(what: str, pairs: Sequence[Pair]) -> str:
    """A line where rounding does not explain the difference of all of them together; else nothing."""
    far, limit = _apart(pairs)
    if far <= limit:
        return ""
    return f"weights: {what} differs by {far:.3g} of its size, where rounding explains {limit:.3g}"


def _apart(pairs: Sequence[Pair]) -> tuple[float, float]:
    """How far, and how far rounding explains, both in sizes of the larger side. A pair weighs as much as it is large.
    Infinite where they cannot be compared: a peer may send anything."""
    limits = np.array([pair.rounding for pair in pairs])
    if not all(_comparable(pair) for pair in pairs):
        return math.inf, float(limits.max())
    sides = (np.array([np.linalg.norm(pair[side]) for pair in pairs]) for side in (0, 1))
    larger = max(sides, key=lambda sizes: float(np.linalg.norm(sizes)))
    size = float(np.linalg.norm(larger)) or 1.0
    far = np.linalg.norm([np.linalg.norm(pair.mine - pair.theirs) for pair in pairs])
    return float(far) / size, float(np.linalg.norm(limits * larger)) / size


def _comparable(pair: Pair) -> bool:
    same = pair.mine.shape == pair.theirs.shape
    return same and bool(np.isfinite(pair.mine).all() and np.isfinite(pair.theirs).all())


def _floats(values: bytes) -> NDArray[np.float32]:
    if len(values) % 2:
        return np.array([np.nan], np.float32)
    return np.frombuffer(values, "<f2").astype(np.float32)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 48 else text[:45] + "..."


def require_same_model(mine: Fingerprint, theirs: Fingerprint) -> None:
    """Raise unless a cache made under `theirs` means the same thing under `mine`."""
    if differences := mine.differences(theirs):
        raise FingerprintMismatch("the two sides do not hold the same model: " + "; ".join(differences))
