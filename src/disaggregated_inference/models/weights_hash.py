"""What a fingerprint says of weights, without reading all of them: two hashes, and a few values.

Hashes cover bytes, so they do not help if one side is quantized; values are compared up to the rounding error. Of Q and
K only the first row is compared: a GGUF of a llama has the other rows in another order.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from disaggregated_inference.errors import ModelDamaged
from disaggregated_inference.kv import UNKNOWN_ROUNDING, Weights, WeightSample
from disaggregated_inference.models.gguf import Floats, block_size, dequantize
from disaggregated_inference.models.safetensors import StoredTensor

_HASHED_BYTES = 1024  # of each tensor
_NORM_SUFFIX = "norm.weight"
_BUFFER_SUFFIX = "rotary_emb.inv_freq"  # some old checkpoints contain this computed buffer
_COMPARED = re.compile(
    r"model\.embed_tokens\.weight|lm_head\.weight|.*\.layers\.(?P<layer>\d+)\.(?:self_attn\.[qkvo]_proj"
    r"|mlp\.(?:experts\.0\.)?(?:gate|up|down)_proj|mlp\.router)\.weight"
)
_ROUTER = re.compile(r"(ffn_gate_inp|mlp\.gate)\.weight$")
_STACKED = re.compile(r"(?:ffn_(gate|up|down)_exps|mlp\.switch_mlp\.(gate|up|down)_proj)\.weight$")
FIRST_ROW = ("q_proj.weight", "k_proj.weight")
_TOKENS_APART = 40  # between sampled rows of a vocabulary
_SAMPLED_ROWS, _SAMPLED_VALUES = 4, 32  # per tensor in three layers; three times as many of others
_MAX = float(np.finfo(np.float16).max)

# |mine - theirs| / |mine| that rounding to each type explains: three times the error for normally distributed weights.
ROUNDING = {
    **dict.fromkeys(("F32", "F16", "BF16"), 0.01),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS"), 0.25),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), 0.12),
    "Q3_K": 0.45,
    "MXFP4": 0.35,
    "Q6_K": 0.06,
    "Q8_0": 0.02,
}


def hash_weights(tensors: Iterable[StoredTensor], stored_as: str | None = None) -> Weights:
    """`stored_as` names the quantization; by default the most common dtype."""
    kept = (tensor for tensor in tensors if not tensor.name.endswith(_BUFFER_SUFFIX))
    ordered = sorted(kept, key=lambda tensor: tensor.name)
    norms, sample = hashlib.sha256(), hashlib.sha256()
    dtypes: dict[str, int] = {}
    for tensor in ordered:
        if tensor.name.endswith(_NORM_SUFFIX):
            norms.update(tensor.name.encode() + tensor.canonical().tobytes())
        sample.update(f"{tensor.name} {tensor.dtype} {tensor.shape} ".encode() + tensor.data[:_HASHED_BYTES])
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + len(tensor.data)
    if not dtypes:
        raise ModelDamaged("the model's files have no tensors")
    return Weights(
        norms=norms.hexdigest()[:32],
        format=stored_as or max(dtypes, key=lambda dtype: dtypes[dtype]),
        sample=sample.hexdigest()[:32],
        values=tuple(_sampled(tensor) for tensor in _of_three_layers(comparable(ordered))),
    )


def comparable(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Tensors whose rows mean the same in every kind of file, under common names. Of experts only the first: a GGUF and
    MLX store all experts of a layer in one tensor."""
    named = (_first_expert(tensor._replace(name=_ROUTER.sub("mlp.router.weight", tensor.name))) for tensor in tensors)
    tables = (tensor for tensor in named if len(tensor.shape) == 2 and 0 not in tensor.shape)
    return [tensor for tensor in tables if _COMPARED.fullmatch(tensor.name)]


def _first_expert(tensor: StoredTensor) -> StoredTensor:
    found = _STACKED.search(tensor.name)
    if not found or len(tensor.shape) != 3 or 0 in tensor.shape:
        return tensor
    name = f"{tensor.name[: found.start()]}mlp.experts.0.{found[1] or found[2]}_proj.weight"
    return StoredTensor(name, tensor.dtype, tensor.shape[1:], tensor.data[: len(tensor.data) // tensor.shape[0]])


def _of_three_layers(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Those of the first, middle and last layer, and of the vocabulary. Empty if no layer is recognised: the vocabulary
    alone would make the weights look finer than they are."""
    layers = {tensor.name: layer_of(tensor) for tensor in tensors}
    last = max(layers.values(), default=-1)
    return [tensor for tensor in tensors if layers[tensor.name] in {-1, 0, last // 2, last}] if last >= 0 else []


def layer_of(tensor: StoredTensor) -> int:
    """-1 for tensors outside the layers."""
    found = _COMPARED.fullmatch(tensor.name)
    return int(found["layer"] or -1) if found else -1


def _sampled(tensor: StoredTensor) -> WeightSample:
    """Values from all over the tensor, so that no dead row or outlier decides alone. float16 is finer than the finest
    rounding above."""
    if tensor.dtype not in ROUNDING:
        return WeightSample(tensor=tensor.name, rounding=UNKNOWN_ROUNDING, values=b"")
    times = 1 if layer_of(tensor) >= 0 else 3
    read = rows(tensor, _SAMPLED_ROWS * times)
    each = _SAMPLED_VALUES * times // len(read)
    values = read[:, :: max(1, tensor.shape[-1] // each)][:, :each]
    clipped = np.clip(values, -_MAX, _MAX).astype("<f2")
    return WeightSample(tensor=tensor.name, rounding=ROUNDING[tensor.dtype], values=clipped.tobytes())


def rows(tensor: StoredTensor, count: int) -> Floats:
    """At most `count` of the tensor's rows, in float32."""
    (block, block_bytes), width = block_size(tensor.dtype), tensor.shape[-1]
    whole = len(tensor.data) * block == math.prod(tensor.shape) * block_bytes
    if not whole or width % block:
        raise ModelDamaged(f"tensor {tensor.name} does not have the size of its shape; download the model again")
    raw = np.frombuffer(tensor.data, np.uint8).reshape(-1, width // block * block_bytes)
    return dequantize(raw[_places(tensor, len(raw), count)], tensor.dtype)


def _places(tensor: StoredTensor, height: int, count: int) -> list[int]:
    """Spread over the tensor. In a vocabulary, which may be padded, they do not depend on its height; of Q and K only
    the first row, which has the same place in every order."""
    if tensor.name.endswith(FIRST_ROW):
        return [0]
    if layer_of(tensor) < 0:
        first = range(_TOKENS_APART, _TOKENS_APART * (count + 1), _TOKENS_APART)
        return [row for row in first if row < height] or [height - 1]
    step = max(1, height // count)
    return list(range(step // 2, height, step))[:count]
