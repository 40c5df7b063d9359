"""Checks that MLX applies the model's RoPE, and repairs it if not.

mlx-lm ignores `rope_parameters` of newer configs (a different base, no error) and rounds YaRN's range where GPT-OSS's
checkpoint sets `truncate: false`. Keys rotated by torch would then meet queries rotated differently, and answers would
be silently wrong. So the frequencies are measured by rotating a known vector, not read from MLX's settings.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.errors import EngineMismatch
from disaggregated_inference.models import Rope

_TOLERANCE = 1e-5


class ExactRoPE(nn.Module):
    """Rotation by given frequencies; takes an offset per row, as batched caches need."""

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self._wavelengths = mx.array(1.0 / np.array(rope.frequencies, np.float64), mx.float32)
        self._scale = rope.scale
        self._dims = 2 * len(rope.frequencies)

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if self._scale != 1.0:
            x = x * self._scale
        return mx.fast.rope(
            x, self._dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._wavelengths
        )


def measure(rope: Any, head_dim: int) -> tuple[NDArray[np.float32], float]:
    """Frequencies and scale that a rope module applies, from unit vectors rotated by one position."""
    ones = mx.concatenate([mx.ones(head_dim // 2), mx.zeros(head_dim // 2)]).reshape(1, 1, 1, head_dim)
    turned = np.array(rope(ones, offset=1)).reshape(2, head_dim // 2)
    return np.arctan2(turned[1], turned[0]), float(np.hypot(turned[0], turned[1]).mean())


def agrees(rope: Any, wanted: Rope) -> bool:
    frequencies, scale = measure(rope, 2 * len(wanted.frequencies))
    same = np.allclose(frequencies, np.array(wanted.frequencies), rtol=_TOLERANCE, atol=0)
    return bool(same and abs(scale - wanted.scale) <= _TOLERANCE * wanted.scale)


def ensure_exact(model: Any, wanted: Rope) -> int:
    """Install the model's frequencies in layers where MLX has others; returns how many layers."""
    repaired = 0
    for layer in model.layers:
        if not agrees(layer.self_attn.rope, wanted):
            layer.self_attn.rope = ExactRoPE(wanted)
            repaired += 1
            if not agrees(layer.self_attn.rope, wanted):
                raise EngineMismatch("MLX does not apply the RoPE of the model's config, even with given frequencies")
    return repaired
