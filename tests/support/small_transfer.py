"""A KV transfer of a few hundred bytes: its model, and the slices of one prompt."""

import numpy as np

from disaggregated_inference.kv import Fingerprint, KVLayout, KVSlice, LayerPlan, Weights

TOKENS, VOCABULARY = 20, 32
LAYOUT = KVLayout(layers=(LayerPlan(), LayerPlan("sliding", 8)), kv_heads=2, head_dim=4)
MODEL = Fingerprint(
    architecture="recorded",
    layout=LAYOUT,
    rope_frequencies=(1.0, 0.5),
    rope_scale=1.0,
    vocabulary=VOCABULARY,
    tokenizer="t",
    chat_template="c",
    weights=Weights(norms="n", format="f", sample="s"),
)


def slices() -> list[KVSlice]:
    """Of a prompt in two chunks."""
    rows = np.arange(2 * TOKENS * 8, dtype=np.float32).reshape(2, TOKENS, 2, 4)
    chunks = [(0, 16), (16, TOKENS)]
    return [
        KVSlice(layer, first, "float32", rows[0, first:stop], rows[1, first:stop])
        for start, stop in chunks
        for layer, plan in enumerate(LAYOUT.layers)
        for first in [plan.first_row(start, stop)]
    ]
