"""A node: one process with one engine and one model. It serves prefill, decode or both."""

from disaggregated_inference.node.app import base_app
from disaggregated_inference.node.choice import Choice
from disaggregated_inference.node.chunked_prefill import ChunkedPrefill, OnPrefillEnd
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.generation import Admitted, Generation, Item, RequestInfo
from disaggregated_inference.node.kv_listener import listen, parse_address
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.loading import load_node, start_readings
from disaggregated_inference.node.metrics import NodeMetrics, RequestMetrics
from disaggregated_inference.node.node import Node
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.prefill_job import PrefillJob
from disaggregated_inference.node.rates import RateMeter
from disaggregated_inference.node.requests import prompt_tokens
from disaggregated_inference.node.routes import node_app, require_epoch
from disaggregated_inference.node.sampler import SampledToken
from disaggregated_inference.node.scheduler import Scheduler
from disaggregated_inference.node.settings import NodeSettings, memory_of, parse_size
from disaggregated_inference.node.startup import Begin, NodeStart, peer_tls
from disaggregated_inference.node.streaming import respond
from disaggregated_inference.node.trust import Trust, open_trust, require_token, require_trusted_link

__all__ = [
    "Admitted",
    "Begin",
    "Choice",
    "ChunkedPrefill",
    "DecodeNode",
    "Generation",
    "Item",
    "KVMemory",
    "Node",
    "NodeMetrics",
    "NodeSettings",
    "NodeStart",
    "OnPrefillEnd",
    "PrefillContext",
    "PrefillJob",
    "PrefillNode",
    "RateMeter",
    "RequestInfo",
    "RequestMetrics",
    "SampledToken",
    "Scheduler",
    "Trust",
    "base_app",
    "listen",
    "load_node",
    "memory_of",
    "node_app",
    "open_trust",
    "parse_address",
    "parse_size",
    "peer_tls",
    "prompt_tokens",
    "require_epoch",
    "require_token",
    "require_trusted_link",
    "respond",
    "start_readings",
]
