"""A fingerprint that tests change one field of."""

import numpy as np

from disaggregated_inference.kv import Fingerprint, KVLayout, LayerPlan, Weights

REFERENCE = Fingerprint(
    architecture="gpt_oss",
    layout=KVLayout(layers=(LayerPlan(kind="sliding", window=128), LayerPlan()), kv_heads=8, head_dim=64),
    rope_frequencies=(1.0, 0.1, 0.01),
    rope_scale=1.3466,
    vocabulary=1000,
    tokenizer="aaa",
    chat_template="bbb",
    weights=Weights(norms="nnn", format="BF16", sample="sss"),
)


def floats(*values: float) -> bytes:
    return np.array(values, "<f2").tobytes()
