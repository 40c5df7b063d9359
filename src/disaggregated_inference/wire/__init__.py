"""KV on the move: our own framing over plain TCP. docs/PROTOCOL.md specifies it, the tests hold golden bytes."""

from disaggregated_inference.wire.gather import Gather, Gathered, Sink, gather_tokens, keep_waiting, withdraw
from disaggregated_inference.wire.messages import End, Failure, Hello, Welcome
from disaggregated_inference.wire.paths import Path, Paths
from disaggregated_inference.wire.receiver import Receipt, fetch
from disaggregated_inference.wire.sender import Outbox, serve

__all__ = [
    "End",
    "Failure",
    "Gather",
    "Gathered",
    "Hello",
    "Outbox",
    "Path",
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
