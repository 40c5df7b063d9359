"""KV on the move: our own framing over plain TCP. docs/PROTOCOL.md specifies it, the tests hold golden bytes."""

from disaggregated_inference.kv_transfer.fetch import FetchResult, KVFetch, Sink, gather_tokens, keep_waiting, withdraw
from disaggregated_inference.kv_transfer.messages import End, ErrorMessage, Hello, Welcome
from disaggregated_inference.kv_transfer.paths import NetworkPath, Paths
from disaggregated_inference.kv_transfer.receiver import Receipt, fetch
from disaggregated_inference.kv_transfer.sender import Outbox, serve

__all__ = [
    "End",
    "ErrorMessage",
    "FetchResult",
    "Hello",
    "KVFetch",
    "NetworkPath",
    "Outbox",
    "Paths",
    "Receipt",
    "Sink",
    "Welcome",
    "fetch",
    "gather_tokens",
    "keep_waiting",
    "serve",
    "withdraw",
]
