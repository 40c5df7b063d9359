"""One forward pass over groups of sequences whose caches have different lengths.

mlx-lm pads a batch to its longest member: with one long and fifteen short sequences, attention reads sixteen long ones.
Only attention depends on lengths; all other layers work on all rows at once. So the rows of a step are ordered by
group, each layer gets a `GroupedCache`, and attention is computed per group with mlx-lm's function.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from disaggregated_inference.errors import EngineUnavailable

_NAME = "scaled_dot_product_attention"

Arrays = list[mx.array]


class GroupedCache:
    """One layer's caches, one per group; mlx-lm's models use it as one cache of all rows.

    Keys, values and masks are lists with one item per group. The models pass them on to attention unread.
    """

    def __init__(self, parts: list[Any], edges: list[int], offset: mx.array) -> None:
        self.parts, self.edges, self.offset = parts, edges, offset

    def make_mask(self, count: int, **kinds: Any) -> list[Any]:
        return [part.make_mask(count, **kinds) for part in self.parts]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Arrays, Arrays]:
        fresh = zip(self.parts, mx.split(keys, self.edges), mx.split(values, self.edges), strict=True)
        fetched = [part.update_and_fetch(k, v) for part, k, v in fresh]
        return [pair[0] for pair in fetched], [pair[1] for pair in fetched]


def install(model: Any) -> None:
    """Make the attention of `model` accept a `GroupedCache`. Models import the function by name into their modules."""
    for name in {type(layer.self_attn).__module__ for layer in model.layers}:
        module = sys.modules[name]
        original = getattr(module, _NAME, None)
        if original is None:
            raise EngineUnavailable(f"{name} has no {_NAME}: its attention cannot be grouped")
        if not hasattr(original, "by_group"):
            setattr(module, _NAME, _by_group(original))


def _by_group(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(original)
    def attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        if type(cache) is not GroupedCache:
            return original(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
        groups = zip(mx.split(queries, cache.edges), keys, values, cache.parts, mask, strict=True)
        return mx.concatenate(
            [original(q, k, v, part, scale=scale, mask=m, sinks=sinks) for q, k, v, part, m in groups]
        )

    attention.by_group = True  # type: ignore[attr-defined]
    return attention
