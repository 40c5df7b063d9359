"""The prefix cache: KV of finished requests, for requests that start with the same tokens."""

from disaggregated_inference.kv.prefix_cache.cache import PrefixCache
from disaggregated_inference.kv.prefix_cache.disk import DiskTier
from disaggregated_inference.kv.prefix_cache.insertion import Insertion

__all__ = ["DiskTier", "Insertion", "PrefixCache"]
