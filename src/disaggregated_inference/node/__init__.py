"""A node: one process with one engine and one model. It serves prefill, decode or both."""

from disaggregated_inference.node.app import base_app
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.generation import Generation, Item
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.metrics import RequestMetrics
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.rates import RateMeter
from disaggregated_inference.node.scheduler import Scheduler
from disaggregated_inference.node.server import NodeSettings, open_trust, require_token, run_node
from disaggregated_inference.node.starting import peer_tls
from disaggregated_inference.node.trust import Trust, require_trusted_link

__all__ = [
    "DecodeNode",
    "Generation",
    "Item",
    "KVMemory",
    "NodeSettings",
    "PrefillContext",
    "PrefillNode",
    "RateMeter",
    "RequestMetrics",
    "Scheduler",
    "Trust",
    "base_app",
    "open_trust",
    "peer_tls",
    "require_token",
    "require_trusted_link",
    "run_node",
]
