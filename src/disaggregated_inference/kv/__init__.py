"""The portable KV cache: one layout that every engine converts to and from."""

from disaggregated_inference.kv.dtype import KVDType, as_dtype
from disaggregated_inference.kv.fingerprint import Fingerprint, require_same_model
from disaggregated_inference.kv.layout import KVLayout, KVSlice, LayerPlan

__all__ = ["Fingerprint", "KVDType", "KVLayout", "KVSlice", "LayerPlan", "as_dtype", "require_same_model"]
