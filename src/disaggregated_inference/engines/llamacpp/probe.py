"""Checks llama.cpp's state format and RoPE with one token at a few positions.

K of the first layer depends on the token and its position only. So K at a later position must be K at the start,
rotated by the model's frequencies. It is not if rows have another order, if a head's halves are interleaved
unexpectedly, or if llama.cpp rotates differently. A state that is decoded and encoded again must be unchanged.
"""

import logging
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.engines.llamacpp.context import LlamaContext
from disaggregated_inference.engines.llamacpp.state import PERMUTED, StateCodec
from disaggregated_inference.errors import EngineMismatch, EngineUnavailable
from disaggregated_inference.kv import Array, KVDType, KVSlice, as_dtype
from disaggregated_inference.models import ModelSpec, Rope

log = logging.getLogger(__name__)

_POSITIONS = (0, 1, 30, 1000)
_TOKEN = 5
# Relative to a row's norm: twice the rounding of the KV dtype.
_TOLERANCE: dict[KVDType, float] = {"float32": 1e-3, "float16": 5e-3, "bfloat16": 2e-2}


def probe(context: LlamaContext, spec: ModelSpec, dtype: KVDType, ropes: Iterable[Rope]) -> tuple[StateCodec, Rope]:
    """The codec for this context's states, and which of `ropes` it applies; raises if none fits."""
    _require_shape(context, spec)
    scratch = context.size.sequences - 1
    states = {at: _state_of(context, scratch, at) for at in _POSITIONS if at < spec.context_window}
    codec = _codec_of(context, spec, dtype, len(states[0]))
    slices = {at: _read_back(codec, state, at, scratch) for at, state in states.items()}
    for rope in ropes:
        if rotates_by(slices, rope):
            return codec, rope
    raise EngineMismatch(
        f"{context.library.name} stores the K of this {spec.architecture} model in another basis or with another RoPE"
        " than its config specifies. KV would be misread"
    )


def _require_shape(context: LlamaContext, spec: ModelSpec) -> None:
    layout = spec.layout
    window = max(plan.window for plan in layout.layers)
    expected = (len(layout.layers), layout.kv_heads, window, spec.vocabulary)
    if context.shape != expected:
        raise EngineMismatch(
            f"llama.cpp reads layers, KV heads, window and vocabulary of this model as {context.shape}, expected"
            f" {expected}"
        )


def _state_of(context: LlamaContext, scratch: int, position: int) -> Array:
    context.evaluate([_TOKEN], [position], [scratch], wanted=0)
    state = context.dump(scratch)
    context.forget(scratch)
    return state


def _codec_of(context: LlamaContext, spec: ModelSpec, dtype: KVDType, size_bytes: int) -> StateCodec:
    permuted = spec.architecture in PERMUTED
    known = [StateCodec(spec.layout, dtype, permuted, rotations) for rotations in (True, False)]
    sizes = [codec.size_bytes([1] * len(codec.sections)) for codec in known]
    if size_bytes not in sizes:
        raise EngineUnavailable(
            f"{context.library.name} writes states in an unknown format: {size_bytes} bytes for one token of this"
            f" model, not {' or '.join(map(str, sizes))}"
        )
    return known[sizes.index(size_bytes)]


def _read_back(codec: StateCodec, state: Array, position: int, scratch: int) -> KVSlice:
    """The first layer's row, after checking that decoding and encoding the state gives the same bytes."""
    slices = list(codec.decode(state, position, position + 1))
    again = codec.encode([[(piece.keys, piece.values)] for piece in slices], position + 1, scratch)
    if not np.array_equal(again, state):
        raise EngineMismatch("a state of llama.cpp changes when it is decoded and encoded again: an unknown format")
    return slices[0]


def rotates_by(slices: dict[int, KVSlice], rope: Rope) -> bool:
    """Whether every position's row is the first row, rotated by these frequencies."""
    start = _pairs(slices[0])
    size = np.linalg.norm(start)
    frequencies = np.array(rope.frequencies, np.float64)
    for position, piece in slices.items():
        angles = frequencies * position
        wanted = start * np.exp(1j * angles)
        if not np.linalg.norm(_pairs(piece) - wanted) <= _TOLERANCE[piece.dtype] * size:
            return False
    return True


def _pairs(piece: KVSlice) -> NDArray[np.complex128]:
    """The two halves of each head as complex numbers, which RoPE rotates."""
    rows = as_dtype(piece.keys, piece.dtype, "float32")[0].astype(np.float64)
    first, second = np.split(rows, 2, axis=-1)
    return first + 1j * second
