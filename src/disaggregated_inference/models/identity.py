"""What tells the weights of two models apart without reading them all: two hashes, and a few values.

Hashes are of bytes, and say nothing where one side is rounded to four bits; values are compared as far as that
rounding explains. Rows of Q and K are never compared: a GGUF of a llama keeps them in another order.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from disaggregated_inference.errors import ModelDamaged
from disaggregated_inference.kv.fingerprint import Sampled, Weights
from disaggregated_inference.models.gguf import ENCODINGS, Floats
from disaggregated_inference.models.safetensors import StoredTensor

_HASHED_BYTES = 1024  # of every tensor
_NORM_SUFFIX = "norm.weight"
_SAMPLED = re.compile(r".*\.layers\.(\d+)\.(?:self_attn\.[vo]_proj|mlp\.down_proj)\.weight")
_SAMPLED_VALUES = 64
_MOST = float(np.finfo(np.float16).max)
_BY_NAME = {encoding.name: encoding for encoding in ENCODINGS.values()}

# |mine - theirs| / |mine| that rounding to each explains: a third of it is usual for bell-shaped weights.
ROUNDING = {
    **dict.fromkeys(("F32", "F16", "BF16"), 0.01),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), 0.25),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), 0.12),
    "Q6_K": 0.06,
    "Q8_0": 0.02,
}


def weights_identity(tensors: Iterable[StoredTensor], stored_as: str | None = None) -> Weights:
    """`stored_as` names a quantization, else the commonest dtype does."""
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    norms, sample = hashlib.sha256(), hashlib.sha256()
    dtypes: dict[str, int] = {}
    for tensor in ordered:
        if tensor.name.endswith(_NORM_SUFFIX):
            norms.update(tensor.name.encode() + tensor.canonical().tobytes())
        sample.update(f"{tensor.name} {tensor.dtype} {tensor.shape} ".encode() + tensor.data[:_HASHED_BYTES])
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + len(tensor.data)
    if not dtypes:
        raise ModelDamaged("the model's files hold no tensors")
    return Weights(
        norms=norms.hexdigest()[:32],
        format=stored_as or max(dtypes, key=lambda dtype: dtypes[dtype]),
        sample=sample.hexdigest()[:32],
        values=tuple(_sampled(tensor) for tensor in _of_three_layers(ordered)),
    )


def _of_three_layers(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Of the first, the middle and the last layer, whatever of it can be read as numbers."""
    layers = {tensor.name: int(found[1]) for tensor in tensors if (found := _SAMPLED.fullmatch(tensor.name))}
    last = max(layers.values(), default=0)
    chosen = {0, last // 2, last}
    return [
        tensor for tensor in tensors if layers.get(tensor.name) in chosen and tensor.dtype in ROUNDING and tensor.shape
    ]


def _sampled(tensor: StoredTensor) -> Sampled:
    """The begin of its middle row. Float16 is finer than the finest rounding above."""
    values = np.clip(rows(tensor, 1)[:_SAMPLED_VALUES], -_MOST, _MOST).astype("<f2")
    return Sampled(tensor=tensor.name, rounding=ROUNDING[tensor.dtype], values=values.tobytes())


def rows(tensor: StoredTensor, count: int) -> Floats:
    """The values of so many of its rows, spread over it."""
    encoding, width = _BY_NAME[tensor.dtype], tensor.shape[-1]
    if len(tensor.data) * encoding.block != math.prod(tensor.shape) * encoding.block_bytes:
        raise ModelDamaged(f"tensor {tensor.name} has not the size of its shape; fetch the model again")
    raw = np.frombuffer(tensor.data, np.uint8).reshape(-1, width // encoding.block * encoding.block_bytes)
    step = max(1, len(raw) // count)
    values: Floats = encoding.decode(raw[step // 2 :: step][:count].ravel())
    return values.reshape(-1)
