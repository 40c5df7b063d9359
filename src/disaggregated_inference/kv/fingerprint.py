"""Who a model is, as far as a KV cache cares. Two sides hand a cache over only when these agree.

Weight quantization may differ (FP8 on one side, 8-bit on the other is the normal case), so identity rests on what no
quantizer touches: `norms`, a hash over every normalization weight. Two fine-tunes can share their norms; where both
sides store them in the same format, `sample` (a hash over a piece of every tensor) tells those apart too. Where they do
not, `values` does, as far as rounding leaves a difference to see; nodes also compare computed values, with a canary
prompt, and `disagg models verify` more of those in files.
"""

import math

import msgspec
import numpy as np

from disaggregated_inference.errors import FingerprintMismatch
from disaggregated_inference.kv.layout import KVLayout

# Frequencies are computed in float32 by different libraries: this far apart is rounding, further is another model.
_ROPE_TOLERANCE = 1e-5


class Sampled(msgspec.Struct, frozen=True):
    """Some weights of one tensor, in little-endian float16, and how far the way it is stored may have moved them: the
    difference's size over theirs."""

    tensor: str
    rounding: float
    values: bytes

    def far_from(self, other: "Sampled") -> str:
        limit, far = max(self.rounding, other.rounding), _apart(self.values, other.values)
        if far <= limit:
            return ""
        return f"weights: {self.tensor} differs by {far:.2g} of its size, where rounding explains {limit}"


class Weights(msgspec.Struct, frozen=True, omit_defaults=True):
    """Identity of the weights: `format` names how they are stored, `sample` is comparable only within one format, and
    `values` between any two that can be read as numbers."""

    norms: str
    format: str
    sample: str
    values: tuple[Sampled, ...] = ()

    def far_values(self, other: "Weights") -> list[str]:
        """One line for each tensor that rounding does not explain."""
        theirs = {each.tensor: each for each in other.values}
        return [line for mine in self.values if mine.tensor in theirs and (line := mine.far_from(theirs[mine.tensor]))]


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
        if mine.format == theirs.format and mine.sample != theirs.sample:
            return [f"weights: {mine.format} {_short(mine.sample)} here, {_short(theirs.sample)} there"]
        return mine.far_values(theirs)[:4] if mine.format != theirs.format else []


def _apart(mine: bytes, theirs: bytes) -> float:
    """Infinite where they cannot be compared: a peer may send anything."""
    if len(mine) != len(theirs) or len(mine) % 2:
        return math.inf
    ours, others = (np.frombuffer(values, "<f2").astype(np.float32) for values in (mine, theirs))
    if not (np.isfinite(ours).all() and np.isfinite(others).all()):
        return math.inf
    larger = max(np.linalg.norm(ours), np.linalg.norm(others)) or 1.0
    return float(np.linalg.norm(ours - others) / larger)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 48 else text[:45] + "..."


def require_same_model(mine: Fingerprint, theirs: Fingerprint) -> None:
    """Raise unless a cache made under `theirs` means the same thing under `mine`."""
    if differences := mine.differences(theirs):
        raise FingerprintMismatch("the two sides do not hold the same model: " + "; ".join(differences))
