"""KV transfer between nodes: frames over plain TCP. docs/PROTOCOL.md specifies them, the tests hold golden bytes."""

from disaggregated_inference.kv_transfer.codecs import CODECS
from disaggregated_inference.kv_transfer.fetch import KVFetch
from disaggregated_inference.kv_transfer.frames import KEYED_MAGIC, MAGIC, Connection, bytes_of, peek
from disaggregated_inference.kv_transfer.inline import InlineReader, encode_inline
from disaggregated_inference.kv_transfer.messages import End, Hello, Welcome
from disaggregated_inference.kv_transfer.paths import Address, NetworkPath, Paths, TlsPeer, format_address
from disaggregated_inference.kv_transfer.placement import Sink
from disaggregated_inference.kv_transfer.receiver import fetch_stream
from disaggregated_inference.kv_transfer.sender import MIN_PART_BYTES, Outbox, serve
from disaggregated_inference.kv_transfer.ticket_requests import cancel_ticket, fetch_prompt, renew_lease
from disaggregated_inference.kv_transfer.tls_socket import TlsSocket, start_tls

__all__ = [
    "CODECS",
    "KEYED_MAGIC",
    "MAGIC",
    "MIN_PART_BYTES",
    "Address",
    "Connection",
    "End",
    "Hello",
    "InlineReader",
    "KVFetch",
    "NetworkPath",
    "Outbox",
    "Paths",
    "Sink",
    "TlsPeer",
    "TlsSocket",
    "Welcome",
    "bytes_of",
    "cancel_ticket",
    "encode_inline",
    "fetch_prompt",
    "fetch_stream",
    "format_address",
    "peek",
    "renew_lease",
    "serve",
    "start_tls",
]
