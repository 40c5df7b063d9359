"""The portable KV cache: one layout that every engine converts to and from, its fingerprint and its tickets."""

from disaggregated_inference.kv.dtype import (
    Array,
    KVDType,
    as_dtype,
    float32_to_bfloat16,
    require_dtype,
    storage_dtype,
)
from disaggregated_inference.kv.fingerprint import (
    UNKNOWN_ROUNDING,
    ComparedValues,
    Fingerprint,
    Weights,
    WeightSample,
    describe_difference,
    require_same_model,
    without_layer_number,
)
from disaggregated_inference.kv.layout import KVLayout, KVSlice, LayerPlan
from disaggregated_inference.kv.logprobs import LOWEST_LOGPROB, LogprobRows, reusable_tokens
from disaggregated_inference.kv.salt import NO_SALT, Salt, salt_of
from disaggregated_inference.kv.tickets import TicketBook

__all__ = [
    "LOWEST_LOGPROB",
    "NO_SALT",
    "UNKNOWN_ROUNDING",
    "Array",
    "ComparedValues",
    "Fingerprint",
    "KVDType",
    "KVLayout",
    "KVSlice",
    "LayerPlan",
    "LogprobRows",
    "Salt",
    "TicketBook",
    "WeightSample",
    "Weights",
    "as_dtype",
    "describe_difference",
    "float32_to_bfloat16",
    "require_dtype",
    "require_same_model",
    "reusable_tokens",
    "salt_of",
    "storage_dtype",
    "without_layer_number",
]
