"""The identity of a model, as far as its KV matters. KV moves between two nodes only if their fingerprints agree.

Weight quantization may differ (FP8 on one side, 8-bit on the other is the normal case), so identity rests on what no
quantizer changes: `norms`, a hash of every normalization weight. Two fine-tunes can share their norms. If both sides
store weights in the same format, `sample` (a hash of a piece of every tensor) detects that; else `values` does, as far
as rounding permits. Nodes also compare computed values with a canary prompt, and `disagg models verify` compares more
values of the files.
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
UNKNOWN_ROUNDING = 1.0
_LAYER = re.compile(r"\blayers\.\d+\.")
_PLAIN = frozenset({"F32", "F16", "BF16"})


class WeightSample(msgspec.Struct, frozen=True):
    """Some weights of one tensor, in little-endian float16. `rounding` is the relative error that their storage format
    explains. A format that cannot be read has no values and `UNKNOWN_ROUNDING`."""

    tensor: str
    rounding: float
    values: bytes

    @property
    def read(self) -> bool:
        return self.rounding != UNKNOWN_ROUNDING


class ComparedValues(NamedTuple):
    """The same weights on two sides, and the relative difference that rounding explains."""

    mine: NDArray[np.float32]
    theirs: NDArray[np.float32]
    rounding: float


class Weights(msgspec.Struct, frozen=True, omit_defaults=True):
    """Identity of the weights. `format` names their storage; `sample` is comparable within one format, `values` between
    any two formats that can be read."""

    norms: str
    format: str
    sample: str
    values: tuple[WeightSample, ...] = ()

    @property
    def hash(self) -> str:
        """For records: the same weights in the same format have the same. Empty: unknown."""
        return f"{self.format}-{self.sample}" if self.sample else ""

    @property
    def rounding(self) -> float:
        """The coarsest rounding of any sampled tensor; 1 if unknown."""
        return max((each.rounding for each in self.values), default=UNKNOWN_ROUNDING)

    def far_values(self, other: "Weights") -> list[str]:
        """One line for each kind of tensor whose difference rounding does not explain. Layers are judged together: one
        row alone may be nearly zero, or share its scale with an outlier."""
        theirs = {each.tensor: each for each in other.values if each.read}
        kinds: dict[str, list[ComparedValues]] = {}
        for mine in self.values:
            if mine.read and (there := theirs.get(mine.tensor)):
                pair = ComparedValues(
                    _floats(mine.values), _floats(there.values), math.hypot(mine.rounding, there.rounding)
                )
                kinds.setdefault(without_layer_number(mine.tensor), []).append(pair)
        return [line for kind, pairs in kinds.items() if (line := describe_difference(kind, pairs))]

    def rounded_again(self, other: "Weights") -> bool:
        """Whether both are quantized to the same types, all of them readable. Scales may differ (an importance matrix
        chooses them), so their bytes are not comparable."""
        kinds = set(self.format.removeprefix("gguf:").split("+"))
        quantized = self.format.startswith("gguf:") and not kinds <= _PLAIN
        return quantized and self.format == other.format and max(self.rounding, other.rounding) < UNKNOWN_ROUNDING


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
        """GGUF files often carry a repaired chat template."""
        same = (self.tokenizer, self.chat_template) == (other.tokenizer, other.chat_template)
        if same or not any(each.weights.format.startswith("gguf") for each in (self, other)):
            return []
        return ["put the tokenizer.json and tokenizer_config.json of the one model beside the GGUF file of the other"]

    def _rope_differences(self, other: "Fingerprint") -> list[str]:
        if len(self.rope_frequencies) != len(other.rope_frequencies):
            return [f"rope: {len(self.rope_frequencies)} frequencies here, {len(other.rope_frequencies)} there"]
        pairs = enumerate(zip(self.rope_frequencies, other.rope_frequencies, strict=True))
        differing = [i for i, (a, b) in pairs if not math.isclose(a, b, rel_tol=_ROPE_TOLERANCE)]
        found = [f"rope_frequencies: {len(differing)} differ, the first at index {differing[0]}"] if differing else []
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


def without_layer_number(tensor: str) -> str:
    """The tensor's name with `*` for its layer."""
    return _LAYER.sub("layers.*.", tensor)


def describe_difference(what: str, pairs: Sequence[ComparedValues]) -> str:
    """One line if rounding does not explain the difference of all pairs together; else an empty string."""
    far, limit = _apart(pairs)
    if far <= limit:
        return ""
    return f"weights: {what} differs by {far:.3g} of its size, where rounding explains {limit:.3g}"


def _apart(pairs: Sequence[ComparedValues]) -> tuple[float, float]:
    """The difference and what rounding explains of it, relative to the larger side, weighted by each pair's norm.
    Infinite if the values cannot be compared: a peer may send anything."""
    limits = np.array([pair.rounding for pair in pairs])
    if not all(_comparable(pair) for pair in pairs):
        return math.inf, float(limits.max())
    sides = (np.array([np.linalg.norm(pair[side]) for pair in pairs]) for side in (0, 1))
    larger = max(sides, key=lambda sizes: float(np.linalg.norm(sizes)))
    size = float(np.linalg.norm(larger)) or 1.0
    far = np.linalg.norm([np.linalg.norm(pair.mine - pair.theirs) for pair in pairs])
    return float(far) / size, float(np.linalg.norm(limits * larger)) / size


def _comparable(pair: ComparedValues) -> bool:
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
    """Raise unless KV of `theirs` is valid for `mine`."""
    if differences := mine.differences(theirs):
        raise FingerprintMismatch("the two sides do not hold the same model: " + "; ".join(differences))
