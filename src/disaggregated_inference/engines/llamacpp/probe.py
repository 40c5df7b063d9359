"""Does this llama.cpp keep a cache as we think, and rotate as the model says? One token at a few positions tells.

K of the first layer depends on the token and its position alone. So K at a later position must be K at the start,
turned by the model's own frequencies: it is not when rows lie in another order, when a head's halves are interleaved
where we think they are not, or when llama.cpp rotates otherwise. And a state that we write must be the one it wrote.
"""

import logging
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.engines.llamacpp.context import LlamaContext
from disaggregated_inference.engines.llamacpp.state import PERMUTED, StateCodec
from disaggregated_inference.errors import EngineMismatch, EngineUnavailable
from disaggregated_inference.kv import KVDType, KVSlice, as_dtype
from disaggregated_inference.kv.dtype import Array
from disaggregated_inference.models import ModelSpec
from disaggregated_inference.models.rope import Rope

log = logging.getLogger(__name__)

_POSITIONS = (0, 1, 30, 1000)
_TOKEN = 5
# Of a row's length: rounding of the cache's dtype, twice.
_TOLERANCE: dict[KVDType, float] = {"float32": 1e-3, "float16": 5e-3, "bfloat16": 2e-2}


def prove(context: LlamaContext, spec: ModelSpec, dtype: KVDType, ropes: Iterable[Rope]) -> tuple[StateCodec, Rope]:
    """The codec for this context's states, and which of `ropes` it rotates by; refused when nothing fits."""
    _require_shape(context, spec)
    scratch = context.size.sequences - 1
    states = {at: _state_of(context, scratch, at) for at in _POSITIONS if at < spec.context_window}
    codec = _codec_of(context, spec, dtype, len(states[0]))
    slices = {at: _read_back(codec, state, at, scratch) for at, state in states.items()}
    for rope in ropes:
        if turns(slices, rope):
            return codec, rope
    raise EngineMismatch(
        f"{context.library.name} does not keep the K of this {spec.architecture} model as its config asks: another"
        " basis or another RoPE. A cache would be misread"
    )


def _require_shape(context: LlamaContext, spec: ModelSpec) -> None:
    layout = spec.layout
    window = max(plan.window for plan in layout.layers)
    expected = (len(layout.layers), layout.kv_heads, window, spec.vocabulary)
    if context.shape != expected:
        raise EngineMismatch(
            f"llama.cpp reads this model otherwise: layers, KV heads, window and vocabulary are {context.shape} there,"
            f" {expected} here"
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
            f"{context.library.name} writes states in a layout we do not know: {size_bytes} bytes for one token of this"
            f" model, not {' or '.join(map(str, sizes))}"
        )
    return known[sizes.index(size_bytes)]


def _read_back(codec: StateCodec, state: Array, position: int, scratch: int) -> KVSlice:
    """The first layer's row, once the state was taken apart and put together again, bit for bit."""
    slices = list(codec.decode(state, position, position + 1))
    again = codec.encode([[(piece.keys, piece.values)] for piece in slices], position + 1, scratch)
    if not np.array_equal(again, state):
        raise EngineMismatch("a state of llama.cpp's, read and written again, is another one: an unknown layout")
    return slices[0]


def turns(slices: dict[int, KVSlice], rope: Rope) -> bool:
    """Whether the row at every position is the one at the start, turned by these frequencies."""
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
    """The two halves of each head as complex numbers: RoPE turns them."""
    rows = as_dtype(piece.keys, piece.dtype, "float32")[0].astype(np.float64)
    first, second = np.split(rows, 2, axis=-1)
    return first + 1j * second
