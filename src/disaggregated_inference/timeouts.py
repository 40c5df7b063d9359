"""Every time limit that decides when a component gives up, retries or looks again, in one structure.

Components take their part as a constructor argument, with these defaults. Tests pass other values instead of patching
modules. What a user configures per request or per cluster (`timeout_s`, `prefill_timeout_s`, ...) is not here.
"""

import msgspec


class TransferTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """KV transfer between two nodes (package `kv_transfer`)."""

    dial_s: float = 0.9  # until a connection to a KV address is established
    redial_s: float = 0.3  # a fetch that just began may dial a broken path again for this long
    silence_s: float = 0.5  # of a sender; then the receiver probes it on another connection
    probe_s: float = 0.4  # for the answer to that probe; slow peers get more, up to max_probe_s
    max_probe_s: float = 2.0
    avoid_path_s: float = 10.0  # a path that failed is tried last for this long
    recent_s: float = 2.0  # a path that delivered within this time is trusted
    hello_s: float = 3.0  # for the whole HELLO of a new connection
    heartbeat_s: float = 0.2  # how often a sender that waits for its engine says so
    last_words_s: float = 0.2  # for the peer's error after a failed send
    poll_copy_s: float = 0.0002  # how often the sender looks whether a device copy has finished


class NodeTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill or decode node (package `node`)."""

    tick_s: float = 0.2  # the node's housekeeping thread: leases, deadlines, idle unload
    check_s: float = 1.0  # how often an idle node checks that its memory adds up
    body_s: float = 30.0  # for a whole request body, and one second more per 16 KiB received
    progress_s: float = 0.1  # at most this often a stream reports how much of the prompt was read
    heartbeat_s: float = 0.25  # how often a stream with nothing to send sends a comment
    stall_s: float = 0.05  # how long running answers may wait for a chunk of another prompt
    chunk_s: float = 0.8  # longest chunk while no answer is running: a cancelled request frees its memory by then
    linger_s: float = 0.005  # the scheduler waits this long, or a share of a step, for further slices
    next_slice_s: float = 0.002
    fetch_silence_s: float = 15.0  # a fetching decode node that renews no lease for this long is gone
    unknown_lease_s: float = 3.0  # lease assumed for a prefill node that did not answer
    slow_transfer_s: float = 1.0  # an exposed transfer longer than this is logged and counted
    peer_check_s: float = 0.2  # a peer check waits this long for memory before it retries
    peer_check_retry_s: float = 0.05


class OllamaTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """A node in front of an Ollama (package `ollama_node`)."""

    dial_s: float = 3.0
    small_request_s: float = 5.0  # for requests that need no computing
    early_refusal_s: float = 1.0  # a refusal within this time gets its own HTTP status
    health_s: float = 0.5  # how long one look at Ollama's health is good for
    unload_s: float = 2.0
    identity_s: float = 5.0  # how long a loaded model is taken to be the same one
    reload_s: float = 5.0  # until a failed load is tried again


class OrchestratorTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The orchestrator (package `orchestrator`)."""

    first_status_s: float = 3.0  # a request waits this long for the first status of its model's nodes
    idle_connection_s: float = 2.0  # shorter than a node's keep-alive: no request goes into a closing connection
    dial_s: float = 1.0
    small_body_s: float = 5.0  # for the rest of a small response that has begun
    watch_s: float = 0.4  # how often a request without a response has its node's health probed
    probe_s: float = 0.45  # for that probe; slow nodes get more, up to max_probe_s
    max_probe_s: float = 4.0
    heartbeat_tick_s: float = 0.1
    late_tick_s: float = 0.2  # a tick this late shows that this process itself was held up
    silence_s: float = 0.4  # of a stream; then its node is probed
    max_silence_s: float = 3.0  # of a stream whose node answers probes: the connection is broken
    late_poll_s: float = 0.3
    quiet_node_s: float = 5.0  # a node that stopped answering may come back for this long
    missing_model_s: float = 60.0  # all nodes of a model may be away this long and still be that model
    poll_missing_s: float = 0.25  # how often a missing node is polled
    tokenizer_s: float = 15.0  # for fetching a tokenizer from a node
    busy_wait_s: float = 2.0  # longest wait for a busy node before planning again
    poll_s: float = 0.05  # how often a waiting request looks for a usable node
    explore_s: float = 60.0  # a node unused for this long gets a request again
    no_node_s: float = 10.0  # for nodes that are there and take no request at the moment
    come_back_s: float = 0.5  # a node that was there a moment ago gets this long, once
    history_lock_s: float = 2.0  # for another process that holds the history file


class GatewayTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway (package `gateway`)."""

    read_s: float = 20.0  # for a request's head, and for its body plus one second per 16 KiB
    keepalive_s: float = 5.0  # a stream with nothing to send sends a comment this often
    early_error_s: float = 0.25  # an error within this time gets its own HTTP status
    event_poll_s: float = 1.0  # how often the event stream looks at the cluster
    event_quiet_s: float = 5.0  # an unchanged status is sent again this often
    reload_status_s: float = 3.0  # for the nodes of a new config
    reload_body_s: float = 60.0  # for requests whose body was still on its way
    last_words_s: float = 5.0  # after the drain, for answers to end with an error


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    transfer: TransferTimeouts = TransferTimeouts()
    node: NodeTimeouts = NodeTimeouts()
    ollama: OllamaTimeouts = OllamaTimeouts()
    orchestrator: OrchestratorTimeouts = OrchestratorTimeouts()
    gateway: GatewayTimeouts = GatewayTimeouts()
