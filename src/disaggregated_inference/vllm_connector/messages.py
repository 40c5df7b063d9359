"""What the connector inside vLLM and the node say to each other, over a Unix socket (SOCK_SEQPACKET): one message is
one packet. KV and logits go through shared memory (`region`).

The connector dials. Every process of vLLM has its own connection: the scheduler's half of the connector, and each
worker. The first packet is `AttachScheduler` or `AttachWorker`; the node answers `Accept`, with the shared memory as a
file descriptor, or `Refuse`; the connector says `Ready`. For a prompt, the node sends `Grant` to all connections and
then the request to vLLM's HTTP port, with the ticket in `kv_transfer_params`. Workers write only into memory that is
granted.
"""

from typing import Any, Literal

import msgspec

PROTOCOL = 4
MAX_PACKET_BYTES = 65536
TICKET_PARAM = "disagg_ticket"  # in `kv_transfer_params` of a request to vLLM
QUESTION_PARAM = "disagg_question"  # likewise: asks the connector for its `LinkState`
STATE_PARAM = "disagg_state"  # in `kv_transfer_params` of the response: the `LinkState`
SOCKET_OPTION = "disagg_socket"  # in `kv_connector_extra_config`: the path of the node's socket
DECODES_OPTION = "disagg_decodes"  # likewise: this vLLM also writes answers, so it keeps full CUDA graphs
LOGITS_PROCESSOR = "disaggregated_inference.vllm_connector.first_token:FirstToken"  # of vLLM's `--logits-processors`

KVDType = Literal["bfloat16", "float16", "float32"]


class SentHeads(msgspec.Struct, frozen=True, array_like=True):
    """The KV heads of one layer that a worker sends. Of workers that hold the same heads, one sends them."""

    layer: int
    first: int
    count: int


class AttachScheduler(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The half of the connector beside vLLM's scheduler."""

    protocol: int
    vllm_version: str
    engine: str  # the same in all processes of one vLLM, another after a restart
    pid: int
    workers: int  # how many will attach
    max_tokens: int  # of prompt and completion together
    max_step_tokens: int  # one step computes no more, of all requests together
    max_sequences: int  # of one step; others wait
    block_tokens: int
    blocks: int
    prefix_caching: bool
    windows: tuple[int, ...]  # of each group of layers with a block table of its own; 0: it keeps all tokens


class AttachWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One worker: a rank of tensor and pipeline parallelism."""

    protocol: int
    vllm_version: str
    engine: str
    pid: int
    rank: int
    device: str
    pages: str  # name of the page layout that was found
    dtype: KVDType
    kv_heads: int  # of the model, not of this rank
    head_dim: int
    vocabulary: int  # length of the logits
    heads: tuple[SentHeads, ...]  # empty: another worker sends the same heads
    sends_logits: bool


class Accept(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Comes with the file descriptor of the shared memory."""

    layers: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]  # of each layer; 0: full attention
    vocabulary: int
    region_bytes: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The connector has the shared memory: pinning it for a GPU takes seconds. Only now it takes grants."""


class Unusable(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """In the place of `Ready`: this process of vLLM cannot work with the node, and hangs up."""

    reason: str


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    reason: str


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The memory at `offset` belongs to this ticket until `ReleaseTicket`."""

    ticket: str
    offset: int
    tokens: int  # of the prompt


class ReleaseTicket(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The node no longer wants this ticket's KV. Workers answer `Released` when they no longer write."""

    ticket: str


class Released(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    ticket: str


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """vLLM's scheduler has taken the prompt from its queue. `cached_tokens` were in its prefix cache."""

    ticket: str
    cached_tokens: int


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """vLLM's scheduler made a step, of whatever requests, while the node waits for a ticket. At most one a second: a
    prompt that waits behind others is no sign of an engine that hangs."""


class ExportedRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of [start, stop) that this layer keeps are in shared memory."""

    ticket: str
    layer: int
    start: int
    stop: int


class Exported(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    rows: tuple[ExportedRows, ...]


class LogitsReady(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The logits after the prompt's last token are in shared memory."""

    ticket: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The connector could not export this ticket's KV; vLLM itself goes on."""

    ticket: str
    reason: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """vLLM's scheduler has ended the request and freed its blocks. `computed_tokens` of the prompt went through the
    model; more than the prompt has where vLLM preempted the request."""

    ticket: str
    computed_tokens: int
    exported_tokens: int
    status: str  # vLLM's own word


class LinkState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the connector beside vLLM's scheduler stands with its node. It goes through vLLM's HTTP response: where the
    socket cannot be reached, nothing else can tell the node why."""

    protocol: int
    socket: str
    trouble: str  # empty: it is attached


Attach = AttachScheduler | AttachWorker
ToNode = Attach | Ready | Unusable | Started | Stepped | Exported | LogitsReady | Failed | Ended | Released
ToVllm = Accept | Refuse | Grant | ReleaseTicket


class InvalidMessage(Exception):
    """The peer sent something else than the protocol allows."""


def encode(message: ToNode | ToVllm) -> bytes:
    packet = msgspec.msgpack.encode(message)
    assert len(packet) <= MAX_PACKET_BYTES, f"a packet of {len(packet)} bytes"
    return packet


class Decoder:
    """`kinds` are the messages that may come: `ToNode` or `ToVllm`."""

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)

    def decode(self, packet: bytes) -> Any:
        try:
            return self._decoder.decode(packet)
        except (msgspec.DecodeError, ValueError) as error:
            raise InvalidMessage(f"a packet of {len(packet)} bytes is no message: {error}") from error
